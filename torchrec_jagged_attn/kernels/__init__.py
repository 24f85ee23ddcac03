"""Triton kernels and their launchers; no autograd, no modules, no TorchRec."""
