"""``Launcher`` reuses compiled kernels of equal signatures."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from triton import knobs
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import constexpr

from torchrec_jagged_attn.ops import launch
from torchrec_jagged_attn.ops.launch import Launcher

CONSTANTS = {"D": 8, "H": 2, "num_warps": 4}


class Kernel:
    """Stands in for a ``triton.jit`` function of two tensors, three numbers and two constants."""

    def __init__(self):
        names = ("x_ptr", "y_ptr", "stride", "num_rows", "scale", "H", "D")
        self.params = [
            SimpleNamespace(
                name=name, is_constexpr=name.isupper(), do_not_specialize=name == "num_rows"
            )
            for name in names
        ]
        self.calls = []

    def __getitem__(self, grid):
        def compile_and_run(*arguments, **constants):
            self.calls.append(("compiled", grid, arguments, constants))
            return Compiled(self.calls)

        return compile_and_run


class Compiled:
    """Stands in for Triton's ``CompiledKernel``."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, calls):
        self.calls = calls

    def run(self, *arguments):
        self.calls.append(("launched", arguments))

    def __getitem__(self, grid):
        return lambda *arguments: self.calls.append(("launched with hooks", grid, arguments))


@pytest.fixture
def launched(monkeypatch):
    """A launcher that has launched once, its kernel's calls, and the arguments of that launch."""
    streams = SimpleNamespace(get_current_stream=lambda device: f"stream of {device}")
    monkeypatch.setattr("torchrec_jagged_attn.ops.launch.driver", SimpleNamespace(active=streams))
    kernel = Kernel()
    launcher = Launcher(kernel)
    arguments = (torch.zeros(64), None, 32, 100, 0.5)
    launcher((3,), arguments, CONSTANTS)
    assert kernel.calls.pop() == ("compiled", (3,), arguments, CONSTANTS)
    return launcher, kernel.calls, arguments


@pytest.mark.parametrize(
    "change",
    [{}, {0: torch.ones(7)}, {2: 64}, {3: 1}, {3: 16}, {4: 2.0}],
    ids=["same", "values", "stride", "one", "divisible", "scale"],
)
def test_equal_signatures_share_a_kernel(launched, change):
    launcher, calls, arguments = launched
    arguments = tuple(change.get(at, value) for at, value in enumerate(arguments))
    launcher((5, 2), arguments, CONSTANTS)
    launch_arguments = ("stream of -1", "function", "metadata", None, None, None)
    kernel_arguments = (*arguments, 2, 8)  # constants as in the signature
    assert calls == [("launched", (5, 2, 1, *launch_arguments, *kernel_arguments))]


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_launch_hooks(launched, hook):
    launcher, calls, arguments = launched
    chain = getattr(knobs.runtime, hook)
    chain.add(print)
    try:
        launcher((5,), arguments, CONSTANTS)
    finally:
        chain.remove(print)
    assert calls == [("launched with hooks", (5, 1, 1), (*arguments, 2, 8))]


@pytest.mark.parametrize(
    ("change", "constants"),
    [
        ({0: torch.zeros(64).half()}, {}),
        ({0: torch.zeros(65)[1:]}, {}),
        ({1: torch.zeros(64)}, {}),
        ({2: 33}, {}),
        ({2: 1}, {}),
        ({3: 2**31}, {}),
        ({}, {"D": 16}),
        ({}, {"num_warps": 8}),
    ],
    ids=["dtype", "alignment", "none", "odd", "one", "wide", "constant", "option"],
)
def test_other_signatures_are_compiled(launched, change, constants):
    launcher, calls, arguments = launched
    arguments = tuple(change.get(at, value) for at, value in enumerate(arguments))
    launcher((3,), arguments, CONSTANTS | constants)
    assert [call[0] for call in calls] == ["compiled"]


def test_descriptors(launched):
    launcher, calls, arguments = launched

    def launch(dtype, width):
        box = TensorDescriptor.from_tensor(
            torch.zeros(64, 128, dtype=dtype), [8, width], NVMMASharedLayout(128, 16, rank=2)
        )
        launcher((3,), (arguments[0], box, *arguments[2:]), CONSTANTS)
        return calls.pop()[0]

    unlike = [(torch.float16, 64), (torch.float16, 128), (torch.bfloat16, 64)]
    assert {launch(*box) for box in unlike} == {"compiled"}
    assert {launch(*box) for box in unlike} == {"launched"}


class Record(NamedTuple):
    x: Any
    y: Any


def test_fields_of_records_are_constants(launched):
    launcher, calls, arguments = launched

    def launch(number, inner):
        launcher((3,), arguments, CONSTANTS | {"H": Record(number, inner)})
        return calls.pop()

    fields = launch(3, "plain")[3]["H"]
    assert all(isinstance(field, constexpr) for field in fields)
    assert [field.value for field in fields] == [3, "plain"]
    assert launch(3, "plain")[0] == "launched"
    assert launch(4, "plain")[0] == "compiled"
    assert launch(3, "codes")[0] == "compiled"


def test_device_is_that_of_the_first_tensor(launched):
    launcher, calls, arguments = launched
    for _ in range(2):
        launcher((3,), (Record(arguments[0], None), *arguments[1:]), CONSTANTS)
    assert [call[0] for call in calls] == ["compiled", "launched"]
    assert calls[1][1][3] == "stream of -1"


def test_records(launched):
    launcher, calls, arguments = launched
    x = torch.zeros(64)

    def launch(*fields):
        launcher((3,), (arguments[0], Record(*fields), *arguments[2:]), CONSTANTS)
        return calls.pop()[0]

    unlike = [(x, None), (None, x), (x, x), (x.half(), None), (torch.zeros(65)[1:], None)]
    unlike += [(x, number) for number in (1, 3, 16, 2**31 + 1)]
    assert {launch(*fields) for fields in unlike} == {"compiled"}
    assert {launch(*fields) for fields in unlike} == {"launched"}
    assert launch(torch.ones(7), None) == launch(x, 5) == "launched"


def test_a_long_compilation_is_printed_once(monkeypatch, capsys):
    times = iter([0.0, 0.1, 1.0, 4.0, 5.0, 8.0])
    monkeypatch.setattr(launch, "perf_counter", lambda: next(times))
    launch._print_compilation.cache_clear()
    launcher = Launcher(Kernel())
    for dtype, num_lines in ((torch.int32, 0), (torch.int64, 1), (torch.float32, 0)):
        launcher((1,), (torch.zeros(4, dtype=dtype), None, 1, 1, 0.5), CONSTANTS)
        assert capsys.readouterr().err.count(f"{knobs.cache.dir}\n") == num_lines
