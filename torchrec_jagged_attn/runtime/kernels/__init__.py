"""Kernels on a GPU."""
