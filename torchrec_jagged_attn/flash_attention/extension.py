"""Attention on a CPU in C++, where that can be built."""

from pathlib import Path

from torchrec_jagged_attn.runtime.extension import Extension

_attention = Extension(
    Path(__file__).with_name("attention.cpp"),
    flags=["-O3", "-fopenmp"],  # not for the linker: PyTorch brings its OpenMP
    without="attention on a CPU runs in Python, one sample after the other",
)
build, is_built, library = _attention.build, _attention.is_built, _attention.library
