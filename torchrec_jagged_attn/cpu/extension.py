"""Builds ``attention.cpp``, once for each version of PyTorch, and loads it.

A library is named by the digest of what it was made from, and by that of its own bytes: one that is
damaged, by a full disk say, has not the name of its bytes, and is not loaded.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import shutil
import tempfile
import textwrap
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

__all__ = ["build", "is_built", "library", "summary"]

_SOURCE = Path(__file__).with_name("attention.cpp")
_lock = threading.Lock()


def library() -> Any | None:
    """The ops of ``attention.cpp``; none, after one warning, if it cannot be built or loaded.

    The first time on a machine that takes a C++ compiler, Ninja and some 15 s. What is built stays
    in PyTorch's folder of extensions, which the variable ``TORCH_EXTENSIONS_DIR`` may name.
    """
    with _lock:
        loaded = _load()
        if isinstance(loaded, Path):
            return torch.ops.torchrec_jagged_attn_cpu
        _warn(loaded)
    return None


def build() -> Path:
    """The library's file, which is built first if it is not there.

    Raises:
        Exception: what is in the way, with all that the compiler said.
    """
    with _lock:
        loaded = _load()
    if isinstance(loaded, Path):
        return loaded
    raise loaded


def is_built() -> bool:
    """Whether a library is there, so that :func:`library` need not build."""
    return any(_whole_libraries(*_place()))


@functools.cache
def _load() -> Path | Exception:
    """Load a library, which is built first if there is none that loads, or say what is in the way.

    Machines that share a folder may need different ones: each loads the first that it can.
    """
    try:
        folder, name = _place()
        for path in _whole_libraries(folder, name):
            with contextlib.suppress(OSError):  # built for another C library, say
                torch.ops.load_library(path)
                return path
        return _build(folder, name)
    except Exception as error:  # no compiler, no place to write, …
        return error


def summary(error: Exception) -> str:
    """One line of what :func:`build` raised: the loader's words, or the compiler's first error."""
    said = (error.__cause__ or error) if _is_of_loader(error) else error
    lines = str(said).splitlines() or [""]
    reason = next((line for line in lines if " error: " in line), lines[0])
    return textwrap.shorten(f"{type(said).__name__}: {reason}", 240)


def _is_of_loader(error: Exception) -> bool:
    """Whether a library that was built does not load. Errors of files and folders have a number."""
    return isinstance(error, OSError) and error.errno is None


@functools.cache
def _warn(error: Exception) -> None:
    """Warn in three lines, once."""
    advice = "install g++, or name a compiler in the variable CXX"
    if _is_of_loader(error):
        advice = (
            "name a compiler that suits PyTorch in the variable CXX, or a folder that programs may "
            "run from in TORCH_EXTENSIONS_DIR"
        )
    elif isinstance(error, OSError):
        advice = "name a folder that can be written to in the variable TORCH_EXTENSIONS_DIR"
    warnings.warn(
        f"attention on a CPU runs in Python, one sample after the other: no {_SOURCE.name} here\n"
        f"{summary(error)}\n"
        f"{advice}; `python -m torchrec_jagged_attn --build` shows the whole output",
        stacklevel=3,
    )


def _place() -> tuple[Path, str]:
    """The folder of libraries, and how the names of those begin that are made from this source."""
    from torch.utils import cpp_extension

    folder = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    machine = f"{torch.__version__} {platform.system()} {platform.machine()}"
    return Path(folder), f"torchrec_jagged_attn_{_digest(_SOURCE.read_bytes() + machine.encode())}"


def _whole_libraries(folder: Path, name: str) -> Iterator[Path]:
    """Those of ``folder`` whose bytes are as they were when they were built."""
    for path in sorted(folder.glob(f"{name}_*.so")):
        digest = ""
        with contextlib.suppress(OSError):
            digest = _digest(path.read_bytes())
        if path.stem == f"{name}_{digest}":
            yield path


def _build(folder: Path, name: str) -> Path:
    """Build a library in ``folder``, and load it."""
    from torch.utils import cpp_extension

    compiler = cpp_extension.get_cxx_compiler()
    if shutil.which(compiler.partition(" ")[0]) is None:
        raise RuntimeError(f"there is no C++ compiler {compiler!r}")
    folder.mkdir(parents=True, exist_ok=True)
    # Processes may build at once, and be killed: each builds in a folder of its own.
    with tempfile.TemporaryDirectory(dir=folder) as own, _ninja_on_path():
        cpp_extension.load(
            name,
            [str(_SOURCE)],
            extra_cflags=["-O3", "-fopenmp"],  # not for the linker: PyTorch brings its OpenMP
            build_directory=own,
            is_python_module=False,
        )
        made = Path(own, f"{name}.so")
        return made.replace(folder / f"{name}_{_digest(made.read_bytes())}.so")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


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
