"""What all kernels share: tiles of jagged rows, the online softmax, precision."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["LOG2E", "dot_precision", "find_tile", "online_softmax_update", "padded_width"]

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def find_tile(offsets_ptr, num_samples, tile, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """The sample that owns ``tile``, that sample's rows, and the tile's first row in it.

    A device-side ``JaggedLayout.tiles``, by a binary search: sample ``b`` owns the tiles from
    ``offsets[b] // BLOCK + b``. A row that ``offsets`` (``[B + 1]``) count stands for ``SCALE``.

    Returns ``(sample, begin, end, start)``; the tile is idle where ``begin + start >= end``.
    """
    low = tile * 0
    high = low + num_samples
    while low + 1 < high:
        middle = (low + high) // 2
        first = tl.load(offsets_ptr + middle).to(tl.int64) * SCALE // BLOCK + middle
        if first <= tile:
            low = middle
        else:
            high = middle
    begin = tl.load(offsets_ptr + low).to(tl.int64) * SCALE
    end = tl.load(offsets_ptr + low + 1).to(tl.int64) * SCALE
    return low, begin, end, (tile - begin // BLOCK - low) * BLOCK


@triton.jit
def online_softmax_update(scores, maximum, total, AXIS: tl.constexpr):
    """One step of the online softmax in base 2, over ``AXIS`` of ``scores``.

    Returns the tile's weights, the factor for what was summed before, the new maximum and the new
    total. All of a row's scores may be ``-inf`` so far: it then has weights of zero.
    """
    new_maximum = tl.maximum(maximum, tl.max(scores, AXIS))
    shift = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
    weights = tl.exp2(scores - tl.expand_dims(shift, AXIS))
    rescale = tl.exp2(maximum - shift)
    return weights, rescale, new_maximum, total * rescale + tl.sum(weights, AXIS)


def dot_precision() -> str:
    """Precision of fp32 matrix products, as ``torch.get_float32_matmul_precision()`` asks."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def padded_width(width: int) -> int:
    """The power of two, at least 16, that a tile needs to hold ``width`` columns."""
    return max(16, triton.next_power_of_2(width))
