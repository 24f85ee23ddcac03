"""Products between a block of query rows and a tile of history rows, in three forms.

``R`` query rows of width ``D`` meet a tile of rows ``x``. What lies where differs:

    WIDE     scores ``[rows, R]``: rows fill the M side of tensor-core products that all warps share
    SLICED   scores ``[slices, R, rows]``: each warp has a slice of the tile and keeps its own sums
             of it, so that no warp waits for another before the end; for blocks of few queries
    SCALAR   the same with one row per slice, by multiply-adds: exact fp32, no tensor cores. Sums
             over rows are as many short chains as there are slices

``AXIS`` is the axis of rows in scores, and of width in sums over rows: 0 if WIDE, else 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchrec_jagged_attn.kernels.common import LOG2E

__all__ = [
    "SCALAR",
    "SLICED",
    "WIDE",
    "add_over_queries",
    "add_over_rows",
    "merge_slices",
    "per_query",
    "products",
    "row_mask",
    "row_pointers",
    "sum_slices",
    "tile_index",
    "zeros_of_scores",
    "zeros_over_queries",
    "zeros_over_rows",
]

WIDE, SLICED, SCALAR = (tl.constexpr(form) for form in range(3))


@triton.jit
def tile_index(FORM: tl.constexpr, SLICES: tl.constexpr, BLOCK_N: tl.constexpr):
    """Numbers of a tile's rows, shaped to go with scores."""
    if FORM == WIDE:
        index = tl.arange(0, BLOCK_N)[:, None]
    else:
        rows: tl.constexpr = BLOCK_N // SLICES
        index = (tl.arange(0, SLICES)[:, None] * rows + tl.arange(0, rows)[None, :])[:, None, :]
    return index


@triton.jit
def row_pointers(ptr, index, stride, d, FORM: tl.constexpr):
    """Pointers to the elements ``d`` of a tile's rows, ``stride`` apart; index as in scores."""
    if FORM == WIDE:
        pointers = ptr + index * stride + d[None, :]
    else:
        pointers = ptr + tl.permute(index, (0, 2, 1)) * stride + d[None, None, :]
    return pointers


@triton.jit
def row_mask(visible, in_row, FORM: tl.constexpr):
    """Mask of :func:`row_pointers`, of the visible rows and the elements ``in_row``."""
    if FORM == WIDE:
        mask = visible & in_row[None, :]
    else:
        mask = tl.permute(visible, (0, 2, 1)) & in_row[None, None, :]
    return mask


@triton.jit
def per_query(value, FORM: tl.constexpr):
    """``[R]`` shaped so that ``expand_dims(…, AXIS)`` goes with scores."""
    return value if FORM == WIDE else value[None, :]


@triton.jit
def zeros_over_rows(
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, SLICES: tl.constexpr, FORM: tl.constexpr
):
    """Where :func:`add_over_rows` begins."""
    if FORM == WIDE:
        zeros = tl.zeros([BLOCK_D, BLOCK_R], tl.float32)
    else:
        zeros = tl.zeros([SLICES, BLOCK_R, BLOCK_D], tl.float32)
    return zeros


@triton.jit
def zeros_over_queries(
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SLICES: tl.constexpr, FORM: tl.constexpr
):
    """Where :func:`add_over_queries` begins, in the shape of a tile of rows."""
    if FORM == WIDE:
        zeros = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    else:
        zeros = tl.zeros([SLICES, BLOCK_N // SLICES, BLOCK_D], tl.float32)
    return zeros


@triton.jit
def zeros_of_scores(
    BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, SLICES: tl.constexpr, FORM: tl.constexpr
):
    """In the shape of scores, with any number of columns instead of R."""
    if FORM == WIDE:
        zeros = tl.zeros([BLOCK_N, COLUMNS], tl.float32)
    else:
        zeros = tl.zeros([SLICES, COLUMNS, BLOCK_N // SLICES], tl.float32)
    return zeros


@triton.jit
def products(queries, x, FORM: tl.constexpr, PRECISION: tl.constexpr):
    """Dot products of ``queries`` (``[R, D]``) with the rows ``x``, in the shape of scores."""
    if FORM == WIDE:
        dots = tl.dot(x, tl.trans(queries), input_precision=PRECISION)
    elif FORM == SLICED:
        shape: tl.constexpr = [x.shape[0], queries.shape[0], queries.shape[1]]
        of_slices = tl.broadcast_to(queries[None, :, :], shape)
        dots = tl.dot(of_slices, tl.permute(x, (0, 2, 1)), input_precision=PRECISION)
    else:
        dots = tl.sum(queries[None, :, :] * x, 2, keep_dims=True)
    return dots


@triton.jit
def add_over_rows(acc, scores, x, FORM: tl.constexpr, PRECISION: tl.constexpr):
    """``acc`` plus, for every query, the rows ``x`` weighted by its ``scores``."""
    if FORM == WIDE:
        acc = tl.dot(tl.trans(x), scores.to(x.dtype), acc, input_precision=PRECISION)
    elif FORM == SLICED:
        acc = tl.dot(scores.to(x.dtype), x, acc, input_precision=PRECISION)
    else:
        acc += scores * x
    return acc


@triton.jit
def add_over_queries(acc, scores, queries, FORM: tl.constexpr, PRECISION: tl.constexpr):
    """``acc`` plus, for every row of the tile, ``queries`` (``[R, D]``) weighted by ``scores``."""
    if FORM == WIDE:
        acc = tl.dot(scores.to(queries.dtype), queries, acc, input_precision=PRECISION)
    elif FORM == SLICED:
        shape: tl.constexpr = [acc.shape[0], queries.shape[0], queries.shape[1]]
        of_slices = tl.broadcast_to(queries[None, :, :], shape)
        of_rows = tl.permute(scores, (0, 2, 1)).to(queries.dtype)
        acc = tl.dot(of_rows, of_slices, acc, input_precision=PRECISION)
    else:
        acc += tl.sum(scores * queries[None, :, :], 1, keep_dims=True)
    return acc


@triton.jit
def sum_slices(acc, FORM: tl.constexpr):
    """``[R, D]`` of what :func:`add_over_rows` has summed."""
    return tl.trans(acc) if FORM == WIDE else tl.sum(acc, 0)


@triton.jit
def merge_slices(acc, maximum, total, FORM: tl.constexpr):
    """``[R, D]`` sums, ``[R]`` maximum and total of an online softmax, of all slices together."""
    if FORM != WIDE:
        whole = tl.max(maximum, 0)
        shift = tl.where(whole == -float("inf"), 0.0, whole)
        weight = tl.exp2((maximum - shift[None, :]) * LOG2E)
        acc = acc * weight[:, :, None]
        total = tl.sum(total * weight, 0)
        maximum = whole
    return sum_slices(acc, FORM), maximum, total
