"""Kernels in Triton and Gluon, and their launchers: three families on one common ground."""
