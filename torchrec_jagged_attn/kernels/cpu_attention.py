"""Builds ``cpu_attention.cpp``, once for each version of PyTorch, and loads it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

__all__ = ["library"]

_SOURCE = Path(__file__).with_suffix(".cpp")
_lock = threading.Lock()


def library() -> Any | None:
    """The ops of ``cpu_attention.cpp``; none, after a warning that says why, if it does not build.

    The first time on a machine that takes a C++ compiler, Ninja and some 15 s. What is built stays
    in PyTorch's folder of extensions, which the variable ``TORCH_EXTENSIONS_DIR`` may name.
    """
    with _lock:
        error = _load()
    if error is None:
        return torch.ops.torchrec_jagged_attn_cpu
    warnings.warn(
        "attention on a CPU runs in Python, one sample after the other, since "
        f"{_SOURCE.name} was not built: {type(error).__name__}: {error}",
        stacklevel=2,
    )
    return None


@functools.cache
def _load() -> Exception | None:
    """Load the library, which is built first if it is not there. Returns what is in the way."""
    try:
        from torch.utils import cpp_extension

        folder = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
        machine = f"{torch.__version__} {platform.system()} {platform.machine()}"
        digest = hashlib.sha256(_SOURCE.read_bytes() + machine.encode()).hexdigest()
        name = f"torchrec_jagged_attn_{digest[:16]}"
        built = Path(folder, f"{name}.so")
        if built.exists():
            torch.ops.load_library(built)
            return None
        built.parent.mkdir(parents=True, exist_ok=True)
        # Processes may build at once, and be killed: each builds in a folder of its own.
        with tempfile.TemporaryDirectory(dir=built.parent) as own, _ninja_on_path():
            cpp_extension.load(
                name,
                [str(_SOURCE)],
                extra_cflags=["-O3", "-fopenmp"],  # not for the linker: PyTorch brings its OpenMP
                build_directory=own,
                is_python_module=False,
            )
            Path(own, f"{name}.so").replace(built)
    except Exception as error:  # no compiler, no place to write, …
        return error
    return None


@contextlib.contextmanager
def _ninja_on_path() -> Iterator[None]:
    """Where the environment's own is, which need not be active."""
    before = os.environ.get("PATH")
    with contextlib.suppress(ImportError):
        import ninja

        os.environ["PATH"] = os.pathsep.join([ninja.BIN_DIR, before or os.defpath])
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("PATH", None)
        else:
            os.environ["PATH"] = before
