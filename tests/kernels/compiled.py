"""Compiles every kernel for A100 and H100 on a machine without a GPU.

The ops are called with CPU tensors, as if on such a GPU, and their launches are compiled. So CI
finds faults of layouts, registers and shared memory, which an interpreter does not. Triton caches
compiled kernels: unchanged ones are not compiled again.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import re
import subprocess
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

import torchrec_jagged_attn
from tests.kernels.gluon_in_numpy import ops_take_the_cpu_for
from torchrec_jagged_attn import (
    jagged_dense_bmm,
    jagged_flash_attention,
    jagged_jagged_bmm,
    jagged_softmax,
    jagged_target_attention,
)
from torchrec_jagged_attn.base import devices
from torchrec_jagged_attn.collection.sharding.fixed_exchange import FixedExchange, SentIds
from torchrec_jagged_attn.collection.sharding.id_router import IdRouter, Route, pair_capacity
from torchrec_jagged_attn.collection.sharding.tables import HistoryFeature
from torchrec_jagged_attn.events import select_events
from torchrec_jagged_attn.ops import jagged_dense_add, jagged_dense_mul
from torchrec_jagged_attn.ops.attention.arguments import Biases
from torchrec_jagged_attn.ops.interaction import gradients as interaction_gradients
from torchrec_jagged_attn.ops.launch import Launcher, as_constexprs
from torchrec_jagged_attn.ops.target_attention.api import target_attention_with_lse
from torchrec_jagged_attn.ops.target_attention.arguments import TargetArguments
from torchrec_jagged_attn.semantic_ids import PackedCodes

SHARED_MEMORY = {80: 166_912, 90: 232_448}  # most bytes of a program on A100 and H100
NEED_AN_H100 = ("hopper", "warpgroup")  # prefixes of names of modules

LENGTHS = torch.tensor([100, 0, 3, 700])
OFFSETS = torch.tensor([0, 100, 100, 103, 803])
N = 803
BF16, FP32 = torch.bfloat16, torch.float32


class Launch(NamedTuple):
    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


@contextlib.contextmanager
def ops_on(arch: int) -> Iterator[list[Launch]]:
    """Dispatch CPU tensors as on a GPU of ``arch``, for which Triton compiles; yields the launches,
    which are not run.
    """
    launches: list[Launch] = []

    def launch(launcher: Launcher, *call: Any) -> None:
        launches.append(Launch(launcher.kernel, *call))

    gpu = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
        get_current_device=lambda: arch,  # Triton caches compiled kernels by device
        get_current_stream=lambda device: 0,
    )
    with (
        ops_take_the_cpu_for(
            shared_memory=SHARED_MEMORY[arch],
            gluon_shared_memory=SHARED_MEMORY[arch],
            hopper_multiprocessors=132 if arch == 90 else 0,
            launches_overlap=arch >= 90,
        ),
        mock.patch.dict(devices.IMPLEMENTATIONS, cpu=("triton", "compiled")),
        mock.patch.object(Launcher, "__call__", launch),
        mock.patch.object(driver, "_active", gpu),
    ):
        yield launches


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=True)


def tables(num_heads: int) -> dict[str, Tensor]:
    """Biases by position and age, and prior weights."""
    return {
        "position_bias": zeros(9, num_heads, dtype=FP32),
        "age_bias": zeros(5, num_heads, dtype=FP32),
        "timestamps": torch.zeros(N, dtype=torch.int64),
        "prior_weights": torch.ones(N, requires_grad=True),
    }


def target(
    num_targets: int,
    dtype: torch.dtype,
    width: int = 64,
    biased: bool = False,
    jagged: bool = False,
    score: Any = "softmax",
    dropout: float = 0.0,
    index_dtype: torch.dtype | None = None,
) -> None:
    query = zeros(4, num_targets, 4, width, dtype=dtype)
    query_offsets = None
    if jagged:
        query, query_offsets = query.flatten(0, 1), torch.arange(5) * num_targets
    biases = tables(4) if biased else {}
    if biased and index_dtype is None:
        biases["request_time"] = torch.zeros(4, dtype=torch.int64)
    history = zeros(N, width, dtype=dtype)
    indices = None if index_dtype is None else torch.zeros(N, dtype=index_dtype)
    jagged_target_attention(
        query, history, OFFSETS, query_offsets=query_offsets, indices=indices, score=score,
        dropout=dropout, **biases,
    ).sum().backward()  # fmt: skip


def target_with_lse(
    num_targets: int, dtype: torch.dtype, width: int = 64, *, jagged: bool = False
) -> None:
    """With row numbers, all biases and a gradient of log-sum-exps."""
    query, query_offsets = zeros(4, num_targets, 4, width, dtype=dtype), None
    if jagged:
        query, query_offsets = query.flatten(0, 1), torch.arange(5) * num_targets
    args = TargetArguments(
        query, zeros(N, width, dtype=dtype), OFFSETS, query_offsets,
        indices=torch.zeros(N, dtype=torch.int64) if jagged else None,
        biases=Biases(
            prior_weights=torch.ones(N, requires_grad=True),
            position_bias=zeros(9, 4, dtype=FP32),
            age_bias=zeros(5, 4, dtype=FP32),
            timestamps=torch.zeros(N, dtype=torch.int64),
            request_time=torch.zeros(4, dtype=torch.int64),
            dropout=torch.tensor([7, 2**30]),
        ),
        row_numbers=torch.arange(N), row_number_ends=OFFSETS[1:],
        scale=0.125, score="softmax", num_levels=0, for_backward=True,
    )  # fmt: skip
    out, lse = target_attention_with_lse(args)
    (out.float().sum() + lse.sum()).backward()


def codes(
    dtype: torch.dtype,
    width: int = 26,
    biased: bool = False,
    num_levels: int = 3,
    num_targets: int = 1,
    dropout: float = 0.0,
) -> None:
    """Attention over packed codes."""
    packed = torch.zeros(N, PackedCodes(width - 1, num_levels).num_bytes, dtype=torch.uint8)
    biases = tables(4) if biased else {}
    jagged_target_attention(
        zeros(4, num_targets, 4, width, dtype=dtype), packed, OFFSETS, num_levels=num_levels,
        dropout=dropout, **biases,
    ).sum().backward()  # fmt: skip


def flash(
    width: int,
    dtype: torch.dtype = BF16,
    biased: bool = False,
    relative: bool = False,
    window: int | None = None,
    dropout: float = 0.0,
):
    biases = tables(2) if biased else {}
    if biased and window is not None:
        biases["request_time"] = torch.zeros(4, dtype=torch.int64)
    if relative:
        biases["relative_bias"] = zeros(9, 2, dtype=FP32)
    q, k, v = (zeros(N, 2, width, dtype=dtype) for _ in range(3))
    jagged_flash_attention(
        q, k, v, OFFSETS, causal=True, window=window, dropout=dropout, **biases
    ).sum().backward()


def table_1(dtype: torch.dtype) -> None:
    """Products of rows with a matrix per sample, softmax, elementwise ops."""
    x, y, row = (zeros(*shape, dtype=dtype) for shape in ((N, 64), (4, 64, 32), (4, 64)))
    weights = jagged_softmax(jagged_dense_bmm(x, y, OFFSETS), OFFSETS)
    jagged_jagged_bmm(x, weights, OFFSETS).sum().backward()
    jagged_dense_mul(jagged_dense_add(x, row, OFFSETS), row, OFFSETS).sum().backward()


def pairs(dtype: torch.dtype) -> None:
    """Products and softmax of pairs, with offsets computed here because no kernel runs."""
    interaction_gradients.pair_offsets(OFFSETS, OFFSETS)
    ends = LENGTHS.square().cumsum(0)
    offsets = (OFFSETS, OFFSETS, torch.cat([ends.new_zeros(1), ends]))
    x = zeros(N, 64, dtype=dtype)
    p = interaction_gradients.pair_bmm(x, x, *offsets, int(ends[-1]))
    p = interaction_gradients.softmax(p, offsets[2], OFFSETS)
    interaction_gradients.array_jagged_bmm(p, x, *offsets, N, False).sum().backward()


def selection(scores: Tensor, segments: Tensor | None = None, keep: int | list[int] = 9) -> None:
    """Rows with the highest scores."""
    history = JaggedTensor(zeros(N, 64), offsets=OFFSETS)
    select_events(history, scores, keep=keep, segments=segments, capacity=N)


class Case(NamedTuple):
    archs: tuple[int, ...]
    kernels: str  # regular expression for the launched kernels to compile
    call: Callable[[], None]


# Not all combinations of options: some cases have most options at once.
def ids(is_weighted: bool = False) -> None:
    """Pack and unpack ids of a pooled feature or, with ``is_weighted``, of a history with ages."""
    history = HistoryFeature("history", "history", True, "times", "", True, "history")
    route = Route(0, "history", [0, 1], 5, history=history if is_weighted else None)
    router = IdRouter([route], [["history", "times"]], [is_weighted], 0, 2, torch.device("cpu"))
    capacities = {pair_capacity(i, j): 8 for i in range(2) for j in range(2)}
    group: Any = None  # nothing is sent
    exchange = FixedExchange(router, [[0]], group, [2, 2], capacities)
    values = torch.zeros(8, dtype=torch.int64)
    batch = KeyedJaggedTensor(
        ["history", "times"],
        values,
        values.float() if is_weighted else None,
        lengths=torch.full((4,), 2, dtype=torch.int32),
    )
    message = values.new_zeros(100)
    ids = router.read(router.join([batch]))
    _, counts, order = exchange._pack(ids, message)
    exchange._unpack(SentIds(ids.lengths, counts, order), message)


CASES = {
    "one warp": Case((80, 90), "target", lambda: target(1, BF16)),
    "one warp, biased": Case((80, 90), "target", lambda: target(1, BF16, biased=True)),
    "warpgroup": Case((90,), "warpgroup", lambda: target(8, BF16)),
    "warpgroup, biased": Case((90,), "warpgroup", lambda: target(8, BF16, biased=True)),
    "general target": Case((80, 90), "target", lambda: target(2, BF16, 20)),
    "general target, dropout": Case(
        (80, 90), "general", lambda: target(2, BF16, 32, jagged=True, dropout=0.5)
    ),
    "one warp, dropout": Case((80, 90), "one_warp", lambda: target(1, BF16, dropout=0.5)),
    "warpgroup, dropout": Case((90,), "warpgroup", lambda: target(8, BF16, dropout=0.5)),
    "one warp, SiLU": Case((90,), "one_warp", lambda: target(1, BF16, score="silu")),
    "warpgroup, SiLU": Case((90,), "warpgroup", lambda: target(8, BF16, score="silu")),
    "general target, SiLU": Case((80,), "general", lambda: target(2, BF16, 20, score="silu")),
    "rows by index, one warp": Case(
        (80, 90), "one_warp", lambda: target(1, BF16, 128, index_dtype=torch.int64)
    ),
    "rows by index, general, biased, dropout": Case(
        (80, 90),
        "target",
        lambda: target(2, BF16, 20, True, True, dropout=0.5, index_dtype=torch.int64),
    ),
    "rows by index, general, SiLU": Case(
        (90,), "target", lambda: target(20, BF16, 256, score="silu", index_dtype=torch.int32)
    ),
    "one warp, log-sum-exps": Case((80, 90), "target", lambda: target_with_lse(1, FP32)),
    "warpgroup, log-sum-exps": Case((90,), "target", lambda: target_with_lse(8, BF16)),
    "general target, log-sum-exps": Case(
        (80, 90), "target", lambda: target_with_lse(2, FP32, 20, jagged=True)
    ),
    "codes": Case((80, 90), "", lambda: codes(BF16)),
    "codes, fp32, biased": Case((80, 90), "target", lambda: codes(FP32, biased=True)),
    "codes, general, fp32": Case(
        (80, 90), "general", lambda: codes(FP32, 129, biased=True, num_targets=3)
    ),
    "codes, wide": Case((90,), "target", lambda: codes(BF16, 250, num_levels=15)),
    "codes, general, wide, dropout": Case(
        (90,), "general", lambda: codes(BF16, 151, num_levels=15, num_targets=5, dropout=0.5)
    ),
    "hopper flash": Case((90,), "", lambda: flash(64)),
    "general flash of short samples": Case((90,), "short", lambda: flash(20)),
    "general flash by distance": Case((80,), "relative|distance", lambda: flash(20, relative=True)),
    "general flash, fp32": Case((80,), "", lambda: flash(64, FP32, relative=True)),
    "general flash, biased": Case((90,), "flash", lambda: flash(32, biased=True, relative=True)),
    "hopper flash of a window": Case((90,), "hopper", lambda: flash(64, window=70)),
    "hopper flash of a window, wide": Case((90,), "hopper", lambda: flash(128, window=70)),
    "hopper flash of a window by distance": Case(
        (90,), "hopper", lambda: flash(64, relative=True, window=70)
    ),
    "hopper flash of a window by distance, dropout": Case(
        (90,), "hopper", lambda: flash(32, relative=True, window=70, dropout=0.5)
    ),
    "hopper flash by distance, dropout, wide": Case(
        (90,), "hopper", lambda: flash(128, relative=True, dropout=0.5)
    ),
    "general flash of a window": Case((80,), "", lambda: flash(20, window=70)),
    "general flash of a window, fp32": Case((90,), "flash", lambda: flash(64, FP32, window=70)),
    "general flash, dropout": Case((80,), "flash", lambda: flash(64, dropout=0.5)),
    "general flash of short samples by distance, dropout": Case(
        (80, 90), "short", lambda: flash(64, relative=True, dropout=0.5)
    ),
    "general flash of a window, all biases, dropout": Case(
        (90,), "flash", lambda: flash(32, biased=True, relative=True, window=70, dropout=0.5)
    ),
    "table 1": Case((80, 90), "", lambda: table_1(BF16)),
    "pairs": Case((80, 90), "", lambda: pairs(BF16)),
    "ids": Case((80, 90), "pack_ids", ids),
    "ids, positions, ages and weights": Case((90,), "pack_ids", lambda: ids(is_weighted=True)),
    "selection": Case((80, 90), "highest_rows", lambda: selection(torch.zeros(N))),
    "selection in segments": Case(
        (90,),
        "highest_rows",
        lambda: selection(torch.zeros(N, dtype=BF16), torch.zeros(N, dtype=torch.int64), [1, 2]),
    ),
}
FITS = {
    "one warp",
    "one warp, SiLU",
    "codes",
    "rows by index, one warp",
    "warpgroup",
    "warpgroup, SiLU",
    "hopper flash",
    "hopper flash of a window",
    "ids",
    "ids, positions, ages and weights",
    "selection",
    "selection in segments",
}  # no register spills


def cases_of(arch: int) -> list[str]:
    """Names of the cases of ``arch``."""
    return [name for name, case in CASES.items() if arch in case.archs]


def launches_of(name: str, launches: list[Launch]) -> list[Launch]:
    """Launches of a case, of its ``kernels``."""
    CASES[name].call()
    return [x for x in launches if re.search(CASES[name].kernels, label(x.kernel))]


def label(kernel: Any) -> str:
    """Module and name of a kernel."""
    return f"{kernel.fn.__module__}.{kernel.fn.__name__}"


def stack_bytes(compiled: Any) -> int:
    """Stack bytes of a thread: register spills."""
    (cubin,) = (path for name, path in compiled.metadata_group.items() if name.endswith(".cubin"))
    command = [knobs.nvidia.cuobjdump.path, "-res-usage", cubin]
    usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (found,) = re.findall(rf"Function {compiled.name}:\s+REG:\d+ STACK:(\d+)", usage)
    return int(found)


def assert_compiles(name: str, arch: int) -> None:
    """All launches of a case compile for ``arch``, within the limits of a program."""
    with ops_on(arch) as launches:
        found = launches_of(name, launches)
        assert found
        for kernel, grid, arguments, constants in found:
            compiled = kernel.warmup(*arguments, grid=grid, **as_constexprs(constants))
            assert compiled.metadata.shared <= SHARED_MEMORY[arch], label(kernel)
            if name in FITS:
                assert stack_bytes(compiled) == 0, label(kernel)


def assert_every_kernel_is_compiled(arch: int) -> None:
    """Every kernel of ``arch`` is launched by some case."""
    packages = pkgutil.walk_packages(torchrec_jagged_attn.__path__, "torchrec_jagged_attn.")
    names = [x.name for x in packages if ".kernels." in x.name or ".device." in x.name]
    missing = {
        label(x.kernel)
        for name in names
        for x in vars(importlib.import_module(name)).values()
        if type(x) is Launcher and isinstance(x.kernel, JITFunction)
    }
    assert missing
    for name in cases_of(arch):
        with ops_on(arch) as launches:
            missing -= {label(x.kernel) for x in launches_of(name, launches)}
    if arch < 90:
        missing = {x for x in missing if not x.split(".")[-2].startswith(NEED_AN_H100)}
    assert not missing
