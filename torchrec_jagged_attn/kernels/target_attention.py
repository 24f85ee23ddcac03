"""Target attention: a few query rows per sample over that sample's history rows.

Keys and values are the same rows ``x``. With R query rows per sample (targets × heads, in this
order), N history rows of width D and e bytes an element:

    forward    reads x once per BLOCK_R query rows: N·D·e bytes, 4·N·R·D FLOPs
    backward   reads x twice (dq, then dx) and writes dx once: 3·N·D·e bytes, 14·N·R·D FLOPs

History rows lie on the M side of every product with the queries (scores are
``[BLOCK_N, BLOCK_R]``): they fill tensor-core tiles that a handful of queries would not. Nothing is
accumulated by atomics: every output element is written by one program, in one order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrec_jagged_attn.kernels.common import (
    LOG2E,
    dot_precision,
    find_tile,
    load_stats,
    mean_grad,
    online_softmax_update,
    padded_width,
    softmax_weights,
    store_stats,
    tile_rows,
)
from torchrec_jagged_attn.layout import JaggedLayout

__all__ = ["backward", "forward"]

# How queries are laid out: one row block per sample, the same block for all samples, or jagged.
DENSE, SHARED, JAGGED = (tl.constexpr(layout) for layout in range(3))


@triton.jit
def _find_queries(
    query_offsets_ptr,
    num_samples,
    num_targets,
    block,
    LAYOUT: tl.constexpr,
    H: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Sample, first output row, first row in it and row count of query block ``block``."""
    if LAYOUT == JAGGED:
        sample, begin, end, start = find_tile(query_offsets_ptr, num_samples, block, H, BLOCK_R)
        return sample, begin, start, end - begin
    rows = num_targets.to(tl.int64) * H
    blocks = tl.cdiv(rows, BLOCK_R)
    sample = block // blocks
    return sample, sample * rows, (block - sample * blocks) * BLOCK_R, rows


@triton.jit
def _load_bias(bias_ptr, rows, columns, count, visible, H: tl.constexpr, HAS_BIAS: tl.constexpr):
    """``[BLOCK_N, BLOCK_R]`` bias, times log2(e), of history ``rows`` for query ``columns``.

    Zero for the columns from ``count`` on: they have no maximum to keep it from overflowing.
    """
    if HAS_BIAS:
        bias_ptrs = bias_ptr + rows[:, None] * H + (columns % H)[None, :]
        mask = visible & (columns < count)[None, :]
        bias = tl.load(bias_ptrs, mask=mask, other=0.0).to(tl.float32) * LOG2E
    else:
        bias = 0.0
    return bias


@triton.jit(do_not_specialize=["num_samples", "num_targets", "num_rows"])
def _forward_kernel(
    query_ptr,  # [rows, D]
    history_ptr,  # [N, D], rows history_stride apart
    bias_ptr,  # [N, H]
    out_ptr,  # [rows, D]
    stats_ptr,  # [2, rows] fp32
    offsets_ptr,  # [B + 1]
    query_offsets_ptr,  # [B + 1], where queries are JAGGED
    num_samples,
    num_targets,
    num_rows,
    history_stride,
    factor,  # scale · log2(e), rounded once
    LAYOUT: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One block of query rows over all history rows of its sample."""
    sample, first, start, count = _find_queries(
        query_offsets_ptr,
        num_samples,
        num_targets,
        tl.program_id(0).to(tl.int64),
        LAYOUT,
        H,
        BLOCK_R,
    )
    if start >= count:
        return
    n_begin = tl.load(offsets_ptr + sample).to(tl.int64)
    n_end = tl.load(offsets_ptr + sample + 1).to(tl.int64)

    r = start + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    tile = r[:, None] * D + d[None, :]
    tile_mask = (r < count)[:, None] & (d < D)[None, :]
    query_first = 0 if LAYOUT == SHARED else first * D
    q = tl.load(query_ptr + query_first + tile, mask=tile_mask, other=0.0)  # [BLOCK_R, BLOCK_D]

    maximum = tl.full([BLOCK_R], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_D, BLOCK_R], tl.float32)
    for n_start in range(n_begin, n_end, BLOCK_N):
        n = n_start + tl.arange(0, BLOCK_N)
        visible = (n < n_end)[:, None]
        x_mask = visible & (d < D)[None, :]
        x = tl.load(history_ptr + n[:, None] * history_stride + d[None, :], mask=x_mask, other=0.0)
        products = tl.dot(x, tl.trans(q), input_precision=PRECISION)  # [BLOCK_N, BLOCK_R]
        bias = _load_bias(bias_ptr, n, r, count, visible, H, HAS_BIAS)
        p, rescale, maximum, total = online_softmax_update(
            products, factor, bias, visible, maximum, total, 0
        )
        acc = acc * rescale[None, :]
        acc = tl.dot(tl.trans(x), p.to(x.dtype), acc, input_precision=PRECISION)

    out = tl.trans(tl.div_rn(acc, tl.where(total > 0, total, 1.0)[None, :]))
    tl.store(out_ptr + first * D + tile, out, mask=tile_mask)
    store_stats(stats_ptr, num_rows, first + r, r < count, maximum, total)


@triton.jit(do_not_specialize=["num_samples", "num_targets", "num_rows"])
def _grad_query_kernel(
    grad_out_ptr,  # [rows, D]
    query_ptr,  # [rows, D]
    history_ptr,  # [N, D], rows history_stride apart
    bias_ptr,  # [N, H]
    out_ptr,  # [rows, D]
    stats_ptr,  # [2, rows] fp32
    grad_query_ptr,  # [rows, D]; fp32 where queries are SHARED: a row for each sample
    delta_ptr,  # [rows] fp32, out: Σ_d grad_out · out
    offsets_ptr,  # [B + 1]
    query_offsets_ptr,  # [B + 1], where queries are JAGGED
    num_samples,
    num_targets,
    num_rows,
    history_stride,
    factor,  # scale · log2(e), rounded once
    scale,
    LAYOUT: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Gradient of one block of query rows, over all history rows of its sample."""
    sample, first, start, count = _find_queries(
        query_offsets_ptr,
        num_samples,
        num_targets,
        tl.program_id(0).to(tl.int64),
        LAYOUT,
        H,
        BLOCK_R,
    )
    if start >= count:
        return
    n_begin = tl.load(offsets_ptr + sample).to(tl.int64)
    n_end = tl.load(offsets_ptr + sample + 1).to(tl.int64)

    r = start + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    tile = r[:, None] * D + d[None, :]
    tile_mask = (r < count)[:, None] & (d < D)[None, :]
    query_first = 0 if LAYOUT == SHARED else first * D
    q = tl.load(query_ptr + query_first + tile, mask=tile_mask, other=0.0)  # [BLOCK_R, BLOCK_D]
    grad_out = tl.load(grad_out_ptr + first * D + tile, mask=tile_mask, other=0.0)
    out = tl.load(out_ptr + first * D + tile, mask=tile_mask, other=0.0)
    maximum, inverse = load_stats(stats_ptr, num_rows, first + r, r < count)
    delta = tl.sum(grad_out.to(tl.float32) * out.to(tl.float32), 1)  # [BLOCK_R]

    acc = tl.zeros([BLOCK_D, BLOCK_R], tl.float32)
    residual = tl.zeros([BLOCK_R], tl.float32)  # Σ ds: zero but for the rounding of out in delta
    for n_start in range(n_begin, n_end, BLOCK_N):
        n = n_start + tl.arange(0, BLOCK_N)
        visible = (n < n_end)[:, None]
        x_mask = visible & (d < D)[None, :]
        x = tl.load(history_ptr + n[:, None] * history_stride + d[None, :], mask=x_mask, other=0.0)
        products = tl.dot(x, tl.trans(q), input_precision=PRECISION)  # [BLOCK_N, BLOCK_R]
        bias = _load_bias(bias_ptr, n, r, count, visible, H, HAS_BIAS)
        p = softmax_weights(products, factor, bias, visible, maximum, inverse, 0)
        dp = tl.dot(x, tl.trans(grad_out), input_precision=PRECISION)  # [BLOCK_N, BLOCK_R]
        delta = mean_grad(p, dp, visible, delta, n_end - n_begin <= BLOCK_N, 0)
        ds = p * (dp - delta[None, :])
        acc = tl.dot(tl.trans(x), ds.to(x.dtype), acc, input_precision=PRECISION)
        residual += tl.sum(ds, 0)
    # A delta larger by the residual would have made it zero, and acc smaller by its share of Σ p·x.
    grad_query = tl.trans(acc) - residual[:, None] * out.to(tl.float32)
    tl.store(delta_ptr + first + r, delta + residual, mask=r < count)
    tl.store(grad_query_ptr + first * D + tile, grad_query * scale, mask=tile_mask)


@triton.jit(do_not_specialize=["num_samples", "num_targets", "num_rows"])
def _grad_history_kernel(
    grad_out_ptr,  # [rows, D]
    query_ptr,  # [rows, D]
    history_ptr,  # [N, D], rows history_stride apart
    bias_ptr,  # [N, H]
    stats_ptr,  # [2, rows] fp32
    delta_ptr,  # [rows] fp32
    grad_history_ptr,  # [N, D]
    grad_bias_ptr,  # [N, H]
    offsets_ptr,  # [B + 1]
    query_offsets_ptr,  # [B + 1], where queries are JAGGED
    num_samples,
    num_targets,
    num_rows,
    history_stride,
    factor,  # scale · log2(e), rounded once
    scale,
    LAYOUT: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Gradients of one tile of history rows and their bias, over all query rows of their sample."""
    sample, begin, n_end, start = find_tile(
        offsets_ptr, num_samples, tl.program_id(0).to(tl.int64), 1, BLOCK_N
    )
    if begin + start >= n_end:
        return
    if LAYOUT == JAGGED:
        first = tl.load(query_offsets_ptr + sample).to(tl.int64) * H
        count = tl.load(query_offsets_ptr + sample + 1).to(tl.int64) * H - first
    else:
        count = num_targets.to(tl.int64) * H
        first = sample * count
    query_first = 0 if LAYOUT == SHARED else first * D

    n = begin + start + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    h = tl.arange(0, BLOCK_H)
    visible = (n < n_end)[:, None]
    x_mask = visible & (d < D)[None, :]
    x = tl.load(history_ptr + n[:, None] * history_stride + d[None, :], mask=x_mask, other=0.0)

    acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    acc_bias = tl.zeros([BLOCK_N, BLOCK_H], tl.float32)
    for r_start in range(0, count, BLOCK_R):
        r = r_start + tl.arange(0, BLOCK_R)
        tile = r[:, None] * D + d[None, :]
        tile_mask = (r < count)[:, None] & (d < D)[None, :]
        q = tl.load(query_ptr + query_first + tile, mask=tile_mask, other=0.0)
        grad_out = tl.load(grad_out_ptr + first * D + tile, mask=tile_mask, other=0.0)
        maximum, inverse = load_stats(stats_ptr, num_rows, first + r, r < count)
        delta = tl.load(delta_ptr + first + r, mask=r < count, other=0.0)

        products = tl.dot(x, tl.trans(q), input_precision=PRECISION)  # [BLOCK_N, BLOCK_R]
        bias = _load_bias(bias_ptr, n, r, count, visible, H, HAS_BIAS)
        p = softmax_weights(products, factor, bias, visible, maximum, inverse, 0)
        dp = tl.dot(x, tl.trans(grad_out), input_precision=PRECISION)  # [BLOCK_N, BLOCK_R]
        ds = p * (dp - delta[None, :])
        acc = tl.dot(p.to(x.dtype), grad_out, acc, input_precision=PRECISION)
        acc = tl.dot((ds * scale).to(x.dtype), q, acc, input_precision=PRECISION)
        if HAS_BIAS:
            of_head = ((r % H)[:, None] == h[None, :]).to(tl.float32)  # [BLOCK_R, BLOCK_H]
            acc_bias = tl.dot(ds, of_head, acc_bias, input_precision="ieee")
    tl.store(grad_history_ptr + n[:, None] * D + d[None, :], acc, mask=x_mask)
    if HAS_BIAS:
        bias_mask = visible & (h < H)[None, :]
        tl.store(grad_bias_ptr + n[:, None] * H + h[None, :], acc_bias, mask=bias_mask)


def forward(
    query: Tensor,
    history: Tensor,
    offsets: Tensor,
    query_offsets: Tensor | None,
    bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output of ``[B, T, H, D]``, ``[1, T, H, D]`` or ``[ΣT, H, D]`` queries, and statistics."""
    shape = list(query.shape)
    if query_offsets is None:
        shape[0] = offsets.numel() - 1
    out = query.new_empty(shape)
    stats = query.new_empty([2, *shape[:-1]], dtype=torch.float32)
    history = _unit_stride(history)
    queries = _Queries(query, offsets, query_offsets)
    if out.numel():
        _forward_kernel[(queries.num_blocks,)](
            query.contiguous(),
            history,
            None if bias is None else bias.contiguous(),
            out,
            stats,
            offsets.contiguous(),
            None if query_offsets is None else query_offsets.contiguous(),
            queries.num_samples,
            queries.num_targets,
            stats[0].numel(),
            history.stride(0),
            scale * LOG2E.value,
            **queries.constants(history, bias),
        )
    return out, stats


def backward(
    grad_out: Tensor,
    query: Tensor,
    history: Tensor,
    offsets: Tensor,
    query_offsets: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    stats: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of ``query``, ``history`` and ``bias``."""
    shared = query_offsets is None and query.shape[0] == 1 and out.shape[0] != 1
    grad_query = torch.empty_like(out, dtype=torch.float32 if shared else None)
    grad_history = history.new_empty(history.shape)
    grad_bias = None if bias is None else bias.new_empty(bias.shape)
    delta = torch.empty_like(stats[0])
    query, grad_out, offsets = query.contiguous(), grad_out.contiguous(), offsets.contiguous()
    query_offsets = None if query_offsets is None else query_offsets.contiguous()
    bias = None if bias is None else bias.contiguous()
    history = _unit_stride(history)
    queries = _Queries(query, offsets, query_offsets)
    constants = queries.constants(history, bias)
    shape = (
        queries.num_samples, queries.num_targets, delta.numel(),
        history.stride(0), scale * LOG2E.value, scale,
    )  # fmt: skip
    if out.numel():
        _grad_query_kernel[(queries.num_blocks,)](
            grad_out, query, history, bias, out, stats, grad_query, delta,
            offsets, query_offsets, *shape, **constants,
        )  # fmt: skip
    if history.numel():
        num_tiles = JaggedLayout(offsets, history.shape[0]).num_tiles(constants["BLOCK_N"])
        _grad_history_kernel[(num_tiles,)](
            grad_out, query, history, bias, stats, delta, grad_history, grad_bias,
            offsets, query_offsets, *shape, **constants, BLOCK_H=padded_width(queries.num_heads),
        )  # fmt: skip
    if shared:
        grad_query = grad_query.sum(0, keepdim=True).to(query.dtype)
    return grad_query, grad_history, grad_bias


class _Queries:
    """How query rows are laid out and cut into blocks; from shapes alone."""

    def __init__(self, query: Tensor, offsets: Tensor, query_offsets: Tensor | None) -> None:
        self.num_samples = offsets.numel() - 1
        self.num_heads, self.width = query.shape[-2:]
        if query_offsets is None:
            self.layout = DENSE if query.shape[0] == self.num_samples else SHARED
            self.num_targets = query.shape[1]
            rows = self.num_targets * self.num_heads
        else:
            self.layout = JAGGED
            self.num_targets = 0  # differs by sample
            rows = 8 * self.num_heads  # of no batch: results must not depend on other samples
        row_bytes = padded_width(self.width) * query.element_size()
        self.block_rows = min(padded_width(rows), tile_rows(row_bytes))
        if query_offsets is None:
            self.num_blocks = self.num_samples * triton.cdiv(rows, self.block_rows)
        else:
            total = query.shape[0] * self.num_heads
            self.num_blocks = JaggedLayout(query_offsets, total).num_tiles(self.block_rows)

    def constants(self, history: Tensor, bias: Tensor | None) -> dict:
        """Compile-time arguments of all three kernels."""
        block_width = padded_width(self.width)
        row_bytes = block_width * history.element_size()
        precision = dot_precision(history.dtype)
        return {
            "LAYOUT": self.layout,
            "H": self.num_heads,
            "D": self.width,
            "HAS_BIAS": bias is not None,
            "PRECISION": precision,
            "BLOCK_R": self.block_rows,
            "BLOCK_N": tile_rows(row_bytes, precision, registers=16384),
            "BLOCK_D": block_width,
            "num_warps": 4 if row_bytes < 1024 else 8,
            "num_stages": 3 if row_bytes < 512 else 2,
        }


def _unit_stride(x: Tensor) -> Tensor:
    """``x`` as it is, if the elements of a row are next to each other, else a copy."""
    return x if x.stride(-1) == 1 or x.numel() == 0 else x.contiguous()
