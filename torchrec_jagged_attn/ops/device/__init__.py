"""Device functions that kernels of several ops share."""
