"""Kernels in Triton, and in C++ for CPUs, and their launchers; no autograd, modules, TorchRec."""
