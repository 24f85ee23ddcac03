"""Builds ``cpu_attention.cpp``, once for each version of PyTorch, and loads it."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

__all__ = ["library"]

_SOURCE = Path(__file__).with_suffix(".cpp")


@functools.cache
def library() -> Any | None:
    """The ops of ``cpu_attention.cpp``; none, after a warning that says why, if it does not build.

    The first time on a machine that takes a C++ compiler, Ninja and some 15 s. What is built stays
    in PyTorch's folder of extensions, which the variable ``TORCH_EXTENSIONS_DIR`` may name.
    """
    try:
        from torch.utils import cpp_extension

        folder = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
        what = f"{_SOURCE.read_text()} {torch.__version__} {platform.system()} {platform.machine()}"
        name = f"torchrec_jagged_attn_{hashlib.sha256(what.encode()).hexdigest()[:16]}"
        built = Path(folder, f"{name}.so")
        if built.exists():
            torch.ops.load_library(built)
        else:
            _build(name, built)
    except Exception as error:  # no compiler, no place to write, …
        warnings.warn(
            "attention on a CPU runs in Python, one sample after the other, since "
            f"{_SOURCE.name} was not built: {type(error).__name__}: {error}",
            stacklevel=2,
        )
        return None
    return torch.ops.torchrec_jagged_attn_cpu


def _build(name: str, built: Path) -> None:
    """Build and load, and leave the library as ``built``, whole or not at all."""
    import ninja
    from torch.utils import cpp_extension

    built.parent.mkdir(parents=True, exist_ok=True)
    path = os.environ.get("PATH", "")
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:  # processes may build at once
        os.environ["PATH"] = os.pathsep.join([ninja.BIN_DIR, path])
        try:
            cpp_extension.load(
                name,
                [str(_SOURCE)],
                extra_cflags=["-O2", "-fopenmp"],
                build_directory=folder,
                is_python_module=False,
            )
        finally:
            os.environ["PATH"] = path
        Path(folder, f"{name}.so").replace(built)
