"""Builds a C++ source, once for each version of PyTorch, and loads it.

The name of a library contains two digests, of its source and of its bytes. A library that is
damaged, for example by a full disk, does not match its name and is not loaded.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import shutil
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch


class Extension:
    """A C++ source that registers ops, and the library built from it.

    Args:
        source: its file. The namespace of the ops is ``torchrec_jagged_attn_`` and the name of its
            folder.
        flags: of the compiler.
        used_by: the caller that the error message names.
    """

    def __init__(self, source: Path, *, flags: Sequence[str], used_by: str) -> None:
        self.source, self.flags, self.used_by = source, flags, used_by
        self.name = f"torchrec_jagged_attn_{source.parent.name}"
        self.lock = threading.Lock()
        self.load = functools.cache(self._load)

    def library(self) -> torch._ops._OpNamespace:
        """Return the ops of the library. The first call loads it, and builds it if necessary.

        Building takes a C++ compiler, Ninja and up to half a minute. The library stays in the
        folder ``TORCH_EXTENSIONS_DIR``, by default PyTorch's folder of extensions.

        Raises:
            RuntimeError: the library cannot be built or loaded; says what to install. Later calls
                raise it without another attempt.
        """
        with self.lock:
            loaded = self.load()
        if isinstance(loaded, Exception):
            raise RuntimeError(self._message(loaded)) from loaded
        return getattr(torch.ops, self.name)

    def build(self) -> Path:
        """Return the file of the library. The first call builds it if necessary.

        Raises:
            Exception: what failed, with the whole output of the compiler.
        """
        with self.lock:
            loaded = self.load()
        if isinstance(loaded, Exception):
            raise loaded
        return loaded

    def is_built(self) -> bool:
        """Whether the library exists, so :meth:`library` does not have to build it."""
        return any(_intact_libraries(*self._place()))

    def _load(self) -> Path | Exception:
        """Load a library, or build one if none loads. Returns its file, or the error.

        Machines that share a folder may need different libraries: each loads the first that it can.
        """
        try:
            folder, prefix = self._place()
            for path in _intact_libraries(folder, prefix):
                with contextlib.suppress(OSError):  # for example built for another C library
                    torch.ops.load_library(path)
                    return path
            path = self._build(folder, prefix)
            torch.ops.load_library(path)
            return path
        except Exception as error:  # no compiler, no writable folder, …
            return error

    def _message(self, error: Exception) -> str:
        """Return the message of :meth:`library`'s error: three lines."""
        advice = (
            "install g++ (apt-get install g++, dnf install gcc-c++ or conda install gxx), or name "
            "a C++ compiler in the variable CXX"
        )
        if _is_of_loader(error):
            advice = (
                "name a compiler that suits PyTorch in the variable CXX, or a folder that programs "
                "may run from in TORCH_EXTENSIONS_DIR"
            )
        elif isinstance(error, OSError):
            advice = "name a folder that can be written to in the variable TORCH_EXTENSIONS_DIR"
        return (
            f"{self.used_by} needs {self.source.name}, which is not built\n"
            f"{summary(error)}\n"
            f"{advice}; `python -m torchrec_jagged_attn --build` shows the whole output"
        )

    def _place(self) -> tuple[Path, str]:
        """Return the folder of libraries, and the prefix of the names of those of this source."""
        from torch.utils import cpp_extension

        folder = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
        machine = f"{torch.__version__} {platform.system()} {platform.machine()}"
        digest = _digest(self.source.read_bytes() + machine.encode())
        return Path(folder), f"torchrec_jagged_attn_{digest}"

    def _build(self, folder: Path, prefix: str) -> Path:
        """Build a library in ``folder``."""
        from torch.utils import cpp_extension

        compiler = cpp_extension.get_cxx_compiler()
        if shutil.which(compiler.partition(" ")[0]) is None:
            raise RuntimeError(f"there is no C++ compiler {compiler!r}")
        folder.mkdir(parents=True, exist_ok=True)
        message = f"Compiling C++ for {self.used_by}, once per machine; this takes half a minute"
        print(message, file=sys.stderr, flush=True)
        # Processes may build at the same time, and be killed: each builds in a folder of its own.
        with tempfile.TemporaryDirectory(dir=folder) as build_folder, _ninja_on_path():
            cpp_extension.load(
                self.name,
                [str(self.source)],
                extra_cflags=list(self.flags),
                build_directory=build_folder,
                is_python_module=False,
            )
            built = Path(build_folder, f"{self.name}.so")
            return built.replace(folder / f"{prefix}_{_digest(built.read_bytes())}.so")


def summary(error: Exception) -> str:
    """Return one line of an error of :meth:`Extension.build`: the loader's, or the compiler's first
    error.
    """
    cause = (error.__cause__ or error) if _is_of_loader(error) else error
    lines = str(cause).splitlines() or [""]
    reason = next((line for line in lines if " error: " in line), lines[0])
    return textwrap.shorten(f"{type(cause).__name__}: {reason}", 240)


def _is_of_loader(error: Exception) -> bool:
    """Whether ``error`` says that a built library does not load. Errors of files have a number."""
    return isinstance(error, OSError) and error.errno is None


def _intact_libraries(folder: Path, prefix: str) -> Iterator[Path]:
    """Yield the libraries in ``folder`` that are not damaged."""
    for path in sorted(folder.glob(f"{prefix}_*.so")):
        digest = ""
        with contextlib.suppress(OSError):
            digest = _digest(path.read_bytes())
        if path.stem == f"{prefix}_{digest}":
            yield path


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


@contextlib.contextmanager
def _ninja_on_path() -> Iterator[None]:
    """Add the Ninja of this environment to the path, also if the environment is not active."""
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
