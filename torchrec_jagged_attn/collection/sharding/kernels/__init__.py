"""Kernels of the exchange of ids."""
