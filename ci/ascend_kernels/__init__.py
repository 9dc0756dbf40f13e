"""Verification of k3-ascend's Triton kernels without an NPU: lowering, execution on a CPU, unified-buffer budget."""
