"""Named shapes, and their random inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Distribution = Literal["uniform", "log-normal", "skewed", "edges"] | float


@dataclass(frozen=True)
class Case:
    """A named shape.

    Args:
        name: its name in tests and benchmarks.
        batch_size: ``B``.
        max_length: longest history that ``lengths`` may draw, in rows.
        num_heads: ``H``.
        width: ``D`` of target attention's rows; the head width of flash attention.
        num_targets: ``T`` of target attention.
        lengths: how history lengths are drawn, see :func:`jagged_lengths`.
        dtype: of all floating-point inputs.
        index_dtype: of offsets.
        large: too large for anything but a GPU.
    """

    name: str
    batch_size: int
    max_length: int
    num_heads: int
    width: int
    num_targets: int = 1
    lengths: Distribution = "edges"
    dtype: torch.dtype = torch.float32
    index_dtype: torch.dtype = torch.int64
    large: bool = False


CASES = {
    case.name: case
    for case in (
        Case("one-head", 9, 70, 1, 8),
        Case("wide-20", 12, 70, 3, 20, index_dtype=torch.int32),
        Case("targets-48", 9, 70, 2, 48, num_targets=5),
        Case("bf16-96", 9, 150, 4, 96, dtype=torch.bfloat16, index_dtype=torch.int32),
        Case("fp16-64", 9, 150, 2, 64, num_targets=3, dtype=torch.float16),
        Case("bf16-targets-128", 9, 70, 4, 128, num_targets=16, dtype=torch.bfloat16),
        Case("wide-256", 9, 70, 2, 256),
        Case("bf16-512", 7, 40, 2, 512, num_targets=32, dtype=torch.bfloat16),
        Case("many-heads-32", 7, 40, 16, 32, num_targets=7, dtype=torch.bfloat16),
        # Ranking models: H heads over rows of width D, where the embedding's own width is D.
        Case("rank-1k", 4096, 1024, 4, 128, 1, "log-normal", torch.bfloat16, large=True),
        Case("rank-2k", 2048, 2048, 4, 256, 1, "log-normal", torch.bfloat16, large=True),
        Case("rank-2k-8-targets", 2048, 2048, 4, 128, 8, "log-normal", torch.bfloat16, large=True),
        Case("rank-8k-16-targets", 512, 8192, 2, 128, 16, "log-normal", torch.bfloat16, large=True),
        Case("rank-200", 8192, 200, 2, 64, 1, "uniform", torch.bfloat16, large=True),
        Case("rank-1k-fp32", 4096, 1024, 4, 128, 1, "log-normal", large=True),
        Case("rank-2k-fp32", 2048, 2048, 4, 256, 1, "log-normal", large=True),
        Case("rank-2k-8-targets-fp32", 2048, 2048, 4, 128, 8, "log-normal", large=True),
        Case("rank-8k-16-targets-fp32", 512, 8192, 2, 128, 16, "log-normal", large=True),
        Case("rank-200-fp32", 8192, 200, 2, 64, 1, "uniform", large=True),
    )
}


def jagged_lengths(
    batch_size: int, max_length: int, distribution: Distribution, generator: torch.Generator
) -> Tensor:
    """Draw ``[B]`` int64 lengths on CPU.

    ``"uniform"``: 1…max_length. ``"log-normal"``: σ = 1 with a mean of about ``max_length / 8``,
    clipped to 1…max_length. ``"skewed"``: the quantiles of such a one whose clipped mean is 0.15 of
    ``max_length``, in a random order. ``"edges"``: empties at both ends and in a row, ones, one
    giant among small ones, and one row around the multiples of 16, in a random order between the
    ends. A number in (0, 1] is the mean as a part of ``max_length``, which one sample has: all are
    alike at 1.0, evenly spread at 0.5, and below that the more skewed the smaller it is.
    """
    if isinstance(distribution, float):
        parts = torch.arange(1, batch_size + 1, dtype=torch.float64) / batch_size
        drawn = (max_length * parts ** (1 / distribution - 1)).ceil().long()  # mean of u^a: 1/(a+1)
        return drawn[torch.randperm(batch_size, generator=generator)]
    if distribution == "uniform":
        return torch.randint(1, max_length + 1, (batch_size,), generator=generator)
    if distribution == "log-normal":
        normal = torch.randn(batch_size, generator=generator, dtype=torch.float64)
        drawn = torch.exp(normal + math.log(max_length / 8) - 0.5)
        return drawn.long().clamp(1, max_length)
    if distribution == "skewed":
        parts = (torch.arange(batch_size, dtype=torch.float64) + 0.5) / batch_size
        drawn = torch.exp(torch.special.ndtri(parts) + math.log(max_length / 6.5) - 0.5)
        drawn = drawn.round().long().clamp(1, max_length)
        return drawn[torch.randperm(batch_size, generator=generator)]
    hard = torch.tensor([max_length, 1, 16, 15, 17, 0, 0, 31, 33, 64, 63, 65]).clamp(max=max_length)
    inner = hard[torch.arange(max(batch_size - 2, 0)) % hard.numel()]
    inner = inner[torch.randperm(inner.numel(), generator=generator)]
    ends = torch.zeros(min(batch_size, 2), dtype=torch.int64)
    return torch.cat([ends[:1], inner, ends[1:]])


def offsets_of(lengths: Tensor, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """``[B + 1]`` offsets of ``lengths``, on ``device``."""
    return F.pad(lengths.cumsum(0), (1, 0)).to(device, dtype)


def make_target_inputs(
    case: Case, device: torch.device | str, *, prior_weights: bool = False
) -> dict[str, Tensor]:
    """Random ``query`` ``[B, T, H, D]``, ``history`` and ``offsets`` of ``case``, and
    ``prior_weights`` if asked for.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = jagged_lengths(case.batch_size, case.max_length, case.lengths, generator)
    num_rows = int(lengths.sum())

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, case.dtype)

    inputs = {
        "query": draw(case.batch_size, case.num_targets, case.num_heads, case.width),
        "history": draw(num_rows, case.width),
        "offsets": offsets_of(lengths, case.index_dtype, device),
    }
    if prior_weights:
        inputs["prior_weights"] = draw(num_rows).abs()
    return inputs


def make_flash_inputs(
    case: Case,
    device: torch.device | str,
    *,
    cross: bool = False,
    kv_heads: int | None = None,
    value_width: int | None = None,
    bias: bool = False,
) -> dict[str, Tensor]:
    """Random ``q``, ``k``, ``v`` and their offsets of ``case``, and ``bias`` if asked for.

    ``cross`` draws other lengths for the keys (given as ``kv_offsets``) than for the queries.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = jagged_lengths(case.batch_size, case.max_length, case.lengths, generator)
    kv_lengths = lengths.flip(0).roll(1) if cross else lengths
    kv_heads = case.num_heads if kv_heads is None else kv_heads
    value_width = case.width if value_width is None else value_width

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, case.dtype)

    inputs = {
        "q": draw(int(lengths.sum()), case.num_heads, case.width),
        "k": draw(int(kv_lengths.sum()), kv_heads, case.width),
        "v": draw(int(kv_lengths.sum()), kv_heads, value_width),
        "q_offsets": offsets_of(lengths, case.index_dtype, device),
    }
    if cross:
        inputs["kv_offsets"] = offsets_of(kv_lengths, case.index_dtype, device)
    if bias:
        inputs["bias"] = draw(int(kv_lengths.sum()), case.num_heads)
    return inputs
