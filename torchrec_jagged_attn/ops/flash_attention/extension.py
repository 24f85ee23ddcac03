"""The C++ library of attention on a CPU."""

from pathlib import Path

from torchrec_jagged_attn.ops.extension import Extension

_attention = Extension(
    Path(__file__).with_name("attention.cpp"),
    flags=["-O3", "-fopenmp"],  # not for the linker: PyTorch brings its OpenMP
    used_by="attention on a CPU",
)
build, is_built, library = _attention.build, _attention.is_built, _attention.library
