"""Builds of the C++ library, and their errors."""

import functools
import hashlib
import shutil
from pathlib import Path

import pytest

from tests import processes
from torchrec_jagged_attn.ops.flash_attention import extension

pytestmark = pytest.mark.reference
run_code = functools.partial(processes.run_code, imported="torchrec_jagged_attn")

INPUTS = (
    "import torch, torchrec_jagged_attn as ours",
    "x, offsets = torch.ones(3, 1, 8), torch.tensor([0, 1, 3])",
)
ATTEND = (*INPUTS, "ours.jagged_target_attention(x[:2], x.squeeze(1), offsets)")
ATTEND_WITH_FLASH = (*INPUTS, "ours.jagged_flash_attention(x, x, x, offsets)")
ATTEND_AGAIN = (
    "import contextlib",
    *ATTEND_WITH_FLASH[:-1],
    "with contextlib.suppress(RuntimeError):",
    f"    {ATTEND_WITH_FLASH[-1]}",
    ATTEND[-1],
)
BUILD = (
    "from torchrec_jagged_attn.ops.flash_attention import extension",
    "extension.library()",
    "print(extension.build())",
)
NO_COMPILER = {"CXX": "no-such-compiler"}
FIND_OUTPUT = 'while [ $# -gt 1 ] && [ "$1" != -o ]; do shift; done'


def error_of(lines, environment):
    """The message of the RuntimeError that ends a process of these ``lines``."""
    done = run_code(*lines, check=False, **environment)
    assert done.returncode == 1
    assert not done.stdout
    return done.stderr[done.stderr.rindex("RuntimeError: attention on a CPU") :].splitlines()


@pytest.mark.parametrize("missing", ["compiler", "working compiler", "folder"])
def test_build_errors(missing, tmp_path):
    """Each call raises an error of three lines, with the reason and advice."""
    (tmp_path / "file").touch()
    broken = tmp_path / "g++"
    errors = "for i in 1 2 3; do echo a.h:$i: fatal error: no b.h; done"
    processes.write_script(broken, '[ "$1" = -MMD ] || exec echo 13.2.0', errors, "exit 1")
    folder = str(tmp_path / "file" / "folder")
    environment, reason, advice = {
        "compiler": (NO_COMPILER, "no-such-compiler", "install g++"),
        "working compiler": ({"CXX": str(broken)}, "a.h:1: fatal error: no b.h", "install g++"),
        "folder": ({"TORCH_EXTENSIONS_DIR": folder}, folder, "TORCH_EXTENSIONS_DIR"),
    }[missing]
    environment = {"TORCH_EXTENSIONS_DIR": str(tmp_path), **environment}
    said = error_of(ATTEND_WITH_FLASH, environment)
    assert said[0] == "RuntimeError: attention on a CPU needs attention.cpp, which is not built"
    assert reason in said[1]
    assert advice in said[2]
    assert "python -m torchrec_jagged_attn --build" in said[2]
    assert len(said) == 3
    assert error_of(ATTEND_AGAIN, environment) == said
    assert {path.name for path in tmp_path.iterdir()} == {"file", "g++"}


def test_is_built_once(tmp_path, with_compiler):
    """By the first of two threads, which prints a line, and without ``ninja`` on the path."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("cp", "sh", "which"):
        if (found := shutil.which(name)) is not None:
            (tools / name).symlink_to(found)
    lines = (
        "from concurrent.futures import ThreadPoolExecutor",
        "from torchrec_jagged_attn.ops.flash_attention import extension",
        "with ThreadPoolExecutor(2) as pool:",
        "    found = [pool.submit(extension.library) for _ in range(2)]",
        "for future in found: future.result()",
    )
    message = "Compiling C++ for attention on a CPU"
    assert run_code(*lines, **with_compiler, PATH=str(tools)).stderr.count(message) == 1
    assert len(list(tmp_path.glob("*.so"))) == 1
    assert message not in run_code(*lines, **with_compiler | NO_COMPILER).stderr


@pytest.fixture
def built(tmp_path):
    """A copy of the library, in a folder of its own."""
    found = extension.build()
    return Path(shutil.copy(found, tmp_path / found.name))


@pytest.fixture
def with_compiler(tmp_path):
    """Environment of a fast compiler: it copies the existing library."""
    compiler = tmp_path / "c++"
    processes.write_script(compiler, FIND_OUTPUT, f'[ $# -lt 2 ] || cp {extension.build()} "$2"')
    return {"CXX": str(compiler), "TORCH_EXTENSIONS_DIR": str(tmp_path)}


def assert_is_built_again(with_compiler):
    without_compiler = {**with_compiler, **NO_COMPILER}
    assert "install g++" in error_of(ATTEND, without_compiler)[2]
    again = run_code(*BUILD, **with_compiler).stdout
    assert run_code(*BUILD, **without_compiler).stdout == again


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_library_is_built_again(damage, built, with_compiler):
    """Loading it would end the process."""
    whole = built.read_bytes()
    half = len(whole) // 2
    parts = {"cut": whole[:half], "changed": whole[:half] + b"0" + whole[half + 1 :]}
    built.write_bytes(parts[damage])
    assert_is_built_again(with_compiler)
    assert built.read_bytes() == whole


def test_a_library_that_does_not_load_is_built_again(built, with_compiler):
    """It is kept, since another machine that shares the folder may load it."""
    foreign = b"\x7fELF of another machine"
    digest = hashlib.sha256(foreign).hexdigest()[:16]
    other = built.with_name(f"{built.stem.rpartition('_')[0]}_{digest}.so")
    built.rename(other)
    other.write_bytes(foreign)
    assert_is_built_again(with_compiler)
    assert other.exists()
    assert built.exists()


def test_a_built_library_that_does_not_load(tmp_path):
    """The error asks for another compiler, not for another folder."""
    compiler = tmp_path / "c++"
    processes.write_script(compiler, FIND_OUTPUT, '[ $# -lt 2 ] || echo no library > "$2"')
    said = error_of(ATTEND, {"CXX": str(compiler), "TORCH_EXTENSIONS_DIR": str(tmp_path)})
    assert "invalid ELF header" in said[1] or "file too short" in said[1]
    assert "name a compiler that suits PyTorch in the variable CXX" in said[2]


def test_is_imported_under_a_fake_mode():
    """In which new tensors have no values."""
    lines = (
        "from torch._subclasses import FakeTensorMode",
        "with FakeTensorMode(): import torchrec_jagged_attn",
    )
    warnings_are_errors = ("import warnings", "warnings.simplefilter('error', UserWarning)")
    processes.run_code(*warnings_are_errors, *lines)
