"""Device kernels, one file a kernel; launchers take tensors, never layers."""
