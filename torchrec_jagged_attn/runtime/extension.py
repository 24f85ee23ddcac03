"""Builds a source of C++, once for each version of PyTorch, and loads it.

A library's name holds two digests: that of what it was made from, and that of its own bytes. One
that is damaged, by a full disk say, no longer has the bytes of its name, and is not loaded.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
import textwrap
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import torch


class Extension:
    """A source of C++, and what is built of it.

    Args:
        source: its file, which registers ops or, if ``is_module``, defines a Python module.
        flags: of the compiler.
        include: folders of headers, beside PyTorch's.
        is_module: whether it is a Python module.
        without: a sentence on what happens where it cannot be built.
    """

    def __init__(
        self,
        source: Path,
        *,
        flags: Sequence[str],
        include: Sequence[Path] = (),
        is_module: bool = False,
        without: str,
    ) -> None:
        self.source, self.flags, self.include = source, flags, include
        self.is_module, self.without = is_module, without
        self.lock = threading.Lock()
        self.load = functools.cache(self._load)
        self.warn = functools.cache(self._warn)

    def library(self) -> ModuleType | None:
        """The ops or the module; none, after one warning, if it cannot be built or loaded.

        The first time on a machine that takes a C++ compiler, Ninja and up to half a minute. What
        is built stays in PyTorch's folder of extensions, which the variable
        ``TORCH_EXTENSIONS_DIR`` may name.
        """
        with self.lock:
            loaded = self.load()
            if not isinstance(loaded, Exception):
                return loaded[1]
            self.warn(loaded)
        return None

    def build(self) -> Path:
        """The library's file, which is built first if it is not there.

        Raises:
            Exception: what is in the way, with all that the compiler said.
        """
        with self.lock:
            loaded = self.load()
        if isinstance(loaded, Exception):
            raise loaded
        return loaded[0]

    def is_built(self) -> bool:
        """Whether a library is there, so that :meth:`library` need not build."""
        return any(_whole_libraries(*self._place()))

    def _load(self) -> tuple[Path, ModuleType] | Exception:
        """Load a library, which is built first if there is none that loads, or say what is in the
        way.

        Machines that share a folder may need different ones: each loads the first that it can.
        """
        try:
            folder, name = self._place()
            for path in _whole_libraries(folder, name):
                with contextlib.suppress(OSError, ImportError):  # built for another C library, say
                    return path, self._import(path)
            path = self._build(folder, name)
            return path, self._import(path)
        except Exception as error:  # no compiler, no place to write, …
            return error

    def _import(self, path: Path) -> ModuleType:
        if not self.is_module:
            torch.ops.load_library(path)
            return getattr(torch.ops, self._name())
        spec = importlib.util.spec_from_file_location(self._name(), path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def _name(self) -> str:
        """Of the Python module, or of the namespace of the ops: by the folder of the source."""
        return f"torchrec_jagged_attn_{self.source.parent.name}"

    def _warn(self, error: Exception) -> None:
        """Warn in three lines, once."""
        advice = "install g++, or name a compiler in the variable CXX"
        if _is_of_loader(error):
            advice = (
                "name a compiler that suits PyTorch in the variable CXX, or a folder that programs "
                "may run from in TORCH_EXTENSIONS_DIR"
            )
        elif isinstance(error, OSError):
            advice = "name a folder that can be written to in the variable TORCH_EXTENSIONS_DIR"
        warnings.warn(
            f"{self.without}: no {self.source.name} here\n"
            f"{summary(error)}\n"
            f"{advice}; `python -m torchrec_jagged_attn --build` shows the whole output",
            stacklevel=3,
        )

    def _place(self) -> tuple[Path, str]:
        """The folder of libraries, and how the names of those begin that are made from the source
        as it is.
        """
        from torch.utils import cpp_extension

        folder = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
        machine = f"{torch.__version__} {platform.system()} {platform.machine()}"
        if self.is_module:
            machine += f" {sys.implementation.cache_tag}"
        digest = _digest(self.source.read_bytes() + machine.encode())
        return Path(folder), f"torchrec_jagged_attn_{digest}"

    def _build(self, folder: Path, name: str) -> Path:
        """Build a library in ``folder``."""
        from torch.utils import cpp_extension

        compiler = cpp_extension.get_cxx_compiler()
        if shutil.which(compiler.partition(" ")[0]) is None:
            raise RuntimeError(f"there is no C++ compiler {compiler!r}")
        folder.mkdir(parents=True, exist_ok=True)
        # Processes may build at once, and be killed: each builds in a folder of its own.
        with tempfile.TemporaryDirectory(dir=folder) as own, _ninja_on_path():
            cpp_extension.load(
                self._name(),
                [str(self.source)],
                extra_cflags=list(self.flags),
                extra_include_paths=[str(path) for path in self.include],
                build_directory=own,
                is_python_module=False,
            )
            made = Path(own, f"{self._name()}.so")
            return made.replace(folder / f"{name}_{_digest(made.read_bytes())}.so")


def summary(error: Exception) -> str:
    """One line of what :func:`build` raised: the loader's words, or the compiler's first error."""
    said = (error.__cause__ or error) if _is_of_loader(error) else error
    lines = str(said).splitlines() or [""]
    reason = next((line for line in lines if " error: " in line), lines[0])
    return textwrap.shorten(f"{type(said).__name__}: {reason}", 240)


def _is_of_loader(error: Exception) -> bool:
    """Whether a library that was built does not load. Errors of files and folders have a number."""
    return isinstance(error, OSError) and error.errno is None


def _whole_libraries(folder: Path, name: str) -> Iterator[Path]:
    """Those of ``folder`` whose bytes are as they were when they were built."""
    for path in sorted(folder.glob(f"{name}_*.so")):
        digest = ""
        with contextlib.suppress(OSError):
            digest = _digest(path.read_bytes())
        if path.stem == f"{name}_{digest}":
            yield path


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
