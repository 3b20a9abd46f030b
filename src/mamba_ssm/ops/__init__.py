"""Operators: one module each, on the native kernels, registered with torch.library."""
