"""Kernels in Triton and Gluon, and their launchers: families side by side, on one common ground."""
