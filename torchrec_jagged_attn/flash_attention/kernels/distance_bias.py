"""Relative position bias: scores by the absolute distance of query and key, a table ``[R, H]``.

All pairs of one distance are on a diagonal of a tile. So kernels do not compute a bucket per pair:
the table is first expanded to a list by distance, from which a tile loads its scores with coalesced
accesses. Gradients of a tile are summed along its diagonals (sums of columns, after row ``i`` is
rotated by ``i``), and then by bucket.

The list has two elements per head and row of the longer side, as the statistics do, and is rebuilt
by each call.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrec_jagged_attn.attention.kernels.biases import recency_bucket
from torchrec_jagged_attn.runtime.kernels.softmax import LOG2E
from torchrec_jagged_attn.runtime.launch import Launcher

MARGIN = 128  # rows of a tile beyond the end of a sample
MOST_ROWS = 2**30 - MARGIN - 1
BLOCK = 1024


@triton.jit(do_not_specialize=["reach"])
def _list_kernel(
    list_ptr,  # [H, 2 · reach] fp32
    table_ptr,  # [R, H]
    reach,
    H: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The scores of one head for BLOCK distances, from ``-reach`` on."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    bucket = recency_bucket(tl.abs(at - reach), R)
    score = tl.load(table_ptr + bucket * H + head).to(tl.float32) * LOG2E
    tl.store(list_ptr + head.to(tl.int64) * (2 * reach) + at, score, mask=at < 2 * reach)


_list = Launcher(_list_kernel)


def list_by_distance(table: Tensor, num_rows: int) -> Tensor:
    """``[H, 2 · reach]`` fp32: scores times log2(e) by distance, with distance 0 in the middle.

    It covers the distances in tiles of samples of up to ``num_rows`` rows a side, at most
    MOST_ROWS, since kernels index it in int32.
    """
    if num_rows > MOST_ROWS:
        raise NotImplementedError(
            f"q, k and v may have at most {MOST_ROWS} rows with relative_bias, got {num_rows}"
        )
    num_buckets, num_heads = table.shape
    reach = num_rows + MARGIN
    by_distance = table.new_empty(num_heads, 2 * reach, dtype=torch.float32)
    _list(
        (triton.cdiv(2 * reach, BLOCK), num_heads),
        (by_distance, table.contiguous(), reach),
        {"H": num_heads, "R": num_buckets, "BLOCK": BLOCK},
    )
    return by_distance


@triton.jit
def scores_by_distance(list_ptr, reach, head, first, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """``[BLOCK_M, BLOCK_N]`` scores, times log2(e), of queries and keys ``first + i - j`` apart."""
    zero_ptr = list_ptr + (head.to(tl.int64) * (2 * reach) + reach)
    apart = tl.arange(0, BLOCK_M)[:, None] - tl.arange(0, BLOCK_N)[None, :]
    return tl.load(zero_ptr + first + apart)


@triton.jit
def add_gradient(grads, ds, first, R: tl.constexpr, BLOCKS_R: tl.constexpr):
    """``grads`` (``[BLOCKS_R, 16]``, by bucket) plus the sums by bucket of ``ds``, which is zero
    where masked, of queries and keys ``first + i - j`` apart.
    """
    BLOCK_M: tl.constexpr = ds.shape[0]
    BLOCK_N: tl.constexpr = ds.shape[1]
    tl.static_assert(BLOCK_M <= BLOCK_N)
    # Row i is rotated by i, so that column c holds the diagonals of c and of c - BLOCK_N.
    column = tl.arange(0, BLOCK_M)[:, None] + tl.arange(0, BLOCK_N)[None, :]
    rotated = tl.gather(ds, column % BLOCK_N, 1)
    near = tl.sum(tl.where(column < BLOCK_N, rotated, 0.0), 0)
    far = tl.sum(tl.where(column < BLOCK_N, 0.0, rotated), 0)
    distance = tl.abs(first - tl.arange(0, BLOCK_N))
    far_distance = tl.abs(first + BLOCK_N - tl.arange(0, BLOCK_N))
    bucket = recency_bucket(distance, R)
    far_bucket = recency_bucket(far_distance, R)
    lowest = tl.minimum(tl.min(bucket), tl.min(far_bucket))
    highest = tl.maximum(tl.max(bucket), tl.max(far_bucket))
    for block in range(lowest // 16, highest // 16 + 1):
        r = (block * 16 + tl.arange(0, 16))[:, None]
        of_bucket = tl.where(bucket[None, :] == r, near[None, :], 0.0)
        of_bucket += tl.where(far_bucket[None, :] == r, far[None, :], 0.0)
        sums = tl.sum(of_bucket, 1)
        grads += tl.where(tl.arange(0, BLOCKS_R)[:, None] == block, sums[None, :], 0.0)
    return grads
