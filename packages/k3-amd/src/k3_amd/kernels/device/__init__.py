"""Device functions: Triton source only, no torch, so that they compile ahead of time with nothing else installed."""
