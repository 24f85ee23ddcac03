"""Fixtures shared by all tests."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import settings
from triton import knobs

from tests.cases import Case
from tests.kernels import quick_interpreter
from tests.kernels.gluon_in_numpy import gluon_in_numpy
from tests.processes import fork_server, start_method
from torchrec_jagged_attn.base.devices import implementation, supported_dtypes
from torchrec_jagged_attn.ops.device import tile_list
from torchrec_jagged_attn.ops.target_attention.kernels import attention

if knobs.runtime.interpret:
    quick_interpreter.install()
    # The interpreter also computes masked elements; small blocks have few of them.
    tile_list.SCAN = 256
    # Fewer programs.
    tile_list.CLASSES, attention.SUMMED_COLUMNS = 4, 64

# MKL may round a product by where its operands lie in memory, unless it is told not to.
os.environ.setdefault("MKL_CBWR", "AUTO")

# Examples are the same in every run, and take as long as they take.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


# Files that take longest come first: none of them is left to one worker at the end.
LONG_FIRST = (
    "tests/kernels/test_compiles",
    "tests/torchrec",
    "tests/pipeline",
    "tests/benchmarks",
    "tests/examples",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that this machine cannot run."""
    missing = {"reference" if knobs.runtime.interpret else "interpreter"}
    if not torch.cuda.is_available():
        missing.add("gpu")
    left_out = {item for item in items if missing & {mark.name for mark in item.iter_markers()}}
    config.hook.pytest_deselected(items=[*left_out])
    items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: not item.nodeid.startswith(LONG_FIRST))


def pytest_collection_finish() -> None:
    """Exclude imported modules and collected tests from garbage collection, which is slow."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop() -> Iterator[None]:
    """Start the fork server before any test has run."""
    if start_method() == "forkserver" and sys.platform == "linux":  # elsewhere, threads forbid it
        fork_server()
    return (yield)


@pytest.fixture(autouse=True)
def nothing_is_compiled_yet() -> None:
    """Reset Dynamo, whose limit of recompilations is per process."""
    if "torch._dynamo" in sys.modules:  # which takes a second to import
        torch._dynamo.reset()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device that tests run on; under ``TRITON_INTERPRET=1``, "cpu" interprets the kernels."""
    return torch.device(request.param)


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.interpreter),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def kernel_device(request: pytest.FixtureRequest) -> torch.device:
    """Each device that kernels run on."""
    return torch.device(request.param)


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> str:
    """Backend of two CPU ranks, or of up to two GPUs."""
    return request.param


@pytest.fixture(
    params=[
        pytest.param("numpy", marks=pytest.mark.interpreter),  # and Triton's kernels around them
        pytest.param("gpu", marks=pytest.mark.gpu),
    ]
)
def hopper(request):
    """A device and the modules of kernels in Gluon launched there, where those for Hopper run.

    The modules are ``None`` on a GPU.
    """
    if request.param == "gpu":
        yield torch.device("cuda"), None
    else:
        with gluon_in_numpy(multiprocessors=3) as launched:
            yield torch.device("cpu"), launched


@pytest.fixture
def fake_classes() -> Iterator[None]:
    """Register the classes of quantized lookups for ``torch.export``."""
    from torchrec.pt2.utils import deregister_fake_classes, register_fake_classes

    register_fake_classes()
    yield
    deregister_fake_classes()


@pytest.fixture
def tf32():
    """fp32 products on tensor cores."""
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.fixture
def nan_filled_memory():
    """Fresh memory is NaN inside."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


PATHS = ["absorbed", "materialized"]


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> dict[str, str]:
    """Absorbed projections, or materialized keys and values."""
    return {"keys_and_values": request.param}


@contextlib.contextmanager
def sync_debug_mode(mode: str) -> Iterator[None]:
    """A context in which synchronization with the GPU raises ("error") or warns ("warn")."""
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_graph_replays(run: Callable[[], dict], change: Callable[[], object]) -> None:
    """Assert that ``run`` does not wait for the GPU and that its graph replays after ``change``."""
    run()  # compiles
    with sync_debug_mode("error"):
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    change()
    expected = run()
    for _ in range(2):
        for value in results.values():
            value.fill_(torch.nan)
        graph.replay()
        for name, value in expected.items():
            assert torch.equal(results[name], value), name


def summed(function):
    """The sum of what ``function`` returns, whose gradient has strides of 0."""
    return lambda **inputs: function(**inputs).sum()


def opcheck(op: torch._ops.OpOverload, arguments: tuple) -> None:
    """``torch.library.opcheck``; gradients of interpreted kernels are computed, not traced."""
    leaves = [x for x in arguments if isinstance(x, torch.Tensor) and x.requires_grad]
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if leaves and not knobs.runtime.interpret:
        checks.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(op, arguments, test_utils=checks)
    if leaves and knobs.runtime.interpret:
        outs = op(*arguments)
        out = outs[0] if isinstance(outs, (tuple, list)) else outs
        grads = torch.autograd.grad(out.sum(), leaves)
        assert all(torch.isfinite(grad).all() for grad in grads)


def skip_unless_supported(case: Case, device: torch.device) -> None:
    """Skip a case that the device's implementation has no dtype for."""
    if case.dtype not in supported_dtypes(device):
        pytest.skip(f"{case.dtype} is not computed by {implementation(device)[0]}")
