"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from gluon_in_numpy import gluon_in_numpy
from hypothesis import settings
from triton import knobs
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from torchrec_jagged_attn.devices import supported_dtypes
from torchrec_jagged_attn.ops import implementation
from torchrec_jagged_attn.testing import Case

if knobs.runtime.interpret:
    # The interpreter's own are BLAS's, which round by the CPU's model and by which operand comes
    # first; a GPU's are the same either way.
    def product_rounded_once(_builder, a, b, acc, *_options):
        product = np.matmul(a.data, b.data, dtype=np.float64)
        return TensorHandle(product.astype(acc.data.dtype) + acc.data, acc.dtype.scalar)

    InterpreterBuilder.create_dot = product_rounded_once

# MKL may round a product by where its operands lie in memory, unless it is told not to.
os.environ.setdefault("MKL_CBWR", "AUTO")

# Examples are the same in every run, and take as long as they take.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked ``gpu`` on a machine that has none."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device that tests run on; under ``TRITON_INTERPRET=1``, "cpu" interprets the kernels."""
    return torch.device(request.param)


@pytest.fixture(params=["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> str:
    """How ranks talk: on two CPU processes, or on as many GPUs as there are, up to two."""
    return request.param


@pytest.fixture(params=["numpy", pytest.param("gpu", marks=pytest.mark.gpu)])
def hopper(request):
    """A device and the modules of kernels in Gluon launched there, where those for Hopper run.

    The modules are ``None`` on a GPU, which may be any: what comes out is the same.
    """
    if request.param == "gpu":
        yield torch.device("cuda"), None
    elif not knobs.runtime.interpret:
        pytest.skip("needs TRITON_INTERPRET=1, for the kernels around those for Hopper")
    else:
        with gluon_in_numpy(multiprocessors=3) as launched:
            yield torch.device("cpu"), launched


@pytest.fixture
def fake_classes() -> Iterator[None]:
    """``torch.export`` has to know the two classes that lookups of quantized tables hold."""
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


def skip_unless_supported(case: Case, device: torch.device) -> None:
    """Skip a case that the device's implementation has no dtype for, or no power."""
    if case.dtype not in supported_dtypes(device):
        pytest.skip(f"{case.dtype} is not computed by {implementation(device)[0]}")
    if case.large and device.type != "cuda":
        pytest.skip("large cases need a GPU")
