"""Relative position bias: a table ``[R, H]`` by the bucket of the distance of query and key.

All pairs on one diagonal of a tile have the same distance. So kernels do not compute a bucket per
pair: each call first expands the table to a bias per distance, from which a tile loads with
coalesced accesses. The expanded bias has two elements per head and row of the longer side, as many
as the softmax statistics. Gradients of a tile are summed along its diagonals (as sums of columns,
after row ``i`` is rotated by ``i``), and then by bucket.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrec_jagged_attn.ops.device.biases import recency_bucket
from torchrec_jagged_attn.ops.device.softmax import LOG2E
from torchrec_jagged_attn.ops.launch import Launcher

MARGIN = 128  # maximum rows of a tile beyond the end of a sample
MAX_ROWS = 2**30 - MARGIN - 1
BLOCK = 1024


@triton.jit(do_not_specialize=["max_distance"])
def _expand_kernel(
    by_distance_ptr,  # [H, 2 · max_distance] fp32
    table_ptr,  # [R, H]
    max_distance,
    H: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Expand the bias of one head for BLOCK distances."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    bucket = recency_bucket(tl.abs(column - max_distance), R)
    bias = tl.load(table_ptr + bucket * H + head).to(tl.float32) * LOG2E
    mask = column < 2 * max_distance
    ptrs = by_distance_ptr + head.to(tl.int64) * (2 * max_distance) + column
    tl.store(ptrs, bias, mask=mask)


_expand = Launcher(_expand_kernel)


def bias_by_distance(table: Tensor, num_rows: int) -> Tensor:
    """Expand ``table`` ``[R, H]`` to a bias per distance, ``[H, 2 · max_distance]`` fp32.

    Column ``max_distance + d`` is the bias at distance ``d``, times log2(e). All distances in tiles
    of samples of at most ``num_rows`` rows on both sides are included.

    Raises:
        NotImplementedError: ``num_rows`` is more than MAX_ROWS, so that int32 cannot index columns.
    """
    if num_rows > MAX_ROWS:
        raise NotImplementedError(
            f"q, k and v may have at most {MAX_ROWS} rows with relative_bias, got {num_rows}"
        )
    num_buckets, num_heads = table.shape
    max_distance = num_rows + MARGIN
    by_distance = table.new_empty(num_heads, 2 * max_distance, dtype=torch.float32)
    _expand(
        (triton.cdiv(2 * max_distance, BLOCK), num_heads),
        (by_distance, table.contiguous(), max_distance),
        {"H": num_heads, "R": num_buckets, "BLOCK": BLOCK},
    )
    return by_distance


@triton.jit
def load_distance_bias(
    by_distance_ptr, max_distance, head, first, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Load the bias ``[BLOCK_M, BLOCK_N]``, times log2(e), at the distances ``first + i - j``."""
    zero_ptr = by_distance_ptr + (head.to(tl.int64) * (2 * max_distance) + max_distance)
    distance = tl.arange(0, BLOCK_M)[:, None] - tl.arange(0, BLOCK_N)[None, :]
    return tl.load(zero_ptr + first + distance)


@triton.jit
def add_gradient(grads, ds, first, R: tl.constexpr, BLOCKS_R: tl.constexpr):
    """Return ``grads`` ``[BLOCKS_R, 16]``, by bucket, plus the sums by bucket of ``ds``.

    ``ds`` ``[BLOCK_M, BLOCK_N]`` are the gradients of scores at the distances ``first + i - j``,
    zero for masked pairs.
    """
    BLOCK_M: tl.constexpr = ds.shape[0]
    BLOCK_N: tl.constexpr = ds.shape[1]
    tl.static_assert(BLOCK_M <= BLOCK_N)
    # Row i is rotated by i, so that column c has the diagonals i - j = -c and i - j = BLOCK_N - c.
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
        in_bucket = tl.where(bucket[None, :] == r, near[None, :], 0.0)
        in_bucket += tl.where(far_bucket[None, :] == r, far[None, :], 0.0)
        sums = tl.sum(in_bucket, 1)
        grads += tl.where(tl.arange(0, BLOCKS_R)[:, None] == block, sums[None, :], 0.0)
    return grads
