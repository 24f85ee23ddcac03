"""Products between a block of query rows and a tile of history rows, in three forms.

``R`` query rows of width ``D`` meet a tile of rows ``x``. What lies where differs:

    WIDE     scores ``[rows, R]``, rows ``[rows, D]``, sums over rows ``[D, R]``: the rows fill the
             M side of tensor-core products that all warps share
    SLICED   ``[slices, R, rows]``, ``[slices, rows, D]``, ``[slices, R, D]``: each warp has a slice
             of the tile and keeps its own sums of it, so that no warp waits for another before the
             end; for blocks of few queries
    SCALAR   one row per slice, by multiply-adds, exact fp32: ``[slices, R, 1]``, and with width in
             groups ``[groups, slices, 1, COLUMNS]``, ``[groups, slices, R, COLUMNS]``: the fewer
             COLUMNS, which lanes read in fours, the fewer lanes share a row

Sums over rows are, in the last two, as many short chains as there are slices. ``AXIS`` is the axis
of rows in scores, and of what statistics by query lack in sums over rows: 0 if WIDE, else 2.
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
    "query_index",
    "row_columns",
    "row_index",
    "spread",
    "sum_slices",
    "tile_index",
    "zeros_by_query",
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
def row_columns(BLOCK_D: tl.constexpr, COLUMNS: tl.constexpr, FORM: tl.constexpr):
    """Numbers of a row's columns, shaped to go with :func:`row_index`."""
    if FORM == WIDE:
        columns = tl.arange(0, BLOCK_D)[None, :]
    elif FORM == SLICED:
        columns = tl.arange(0, BLOCK_D)[None, None, :]
    else:
        groups = tl.arange(0, BLOCK_D // COLUMNS)[:, None, None, None] * COLUMNS
        columns = groups + tl.arange(0, COLUMNS)[None, None, None, :]
    return columns


@triton.jit
def row_index(index, FORM: tl.constexpr):
    """What goes with scores, such as numbers of rows, shaped to go with the rows themselves."""
    if FORM == SLICED:
        index = tl.permute(index, (0, 2, 1))
    elif FORM == SCALAR:
        index = index[None, :, :, :]
    return index


@triton.jit
def per_query(value, FORM: tl.constexpr):
    """``[R]`` shaped so that ``expand_dims(…, AXIS)`` goes with scores."""
    return value if FORM == WIDE else value[None, :]


@triton.jit
def spread(queries, COLUMNS: tl.constexpr, FORM: tl.constexpr):
    """``queries`` (``[R, D]``), shaped to go with SCALAR rows; as they are in other forms."""
    if FORM == SCALAR:
        R: tl.constexpr = queries.shape[0]
        groups: tl.constexpr = queries.shape[1] // COLUMNS
        queries = tl.permute(tl.reshape(queries, [R, groups, COLUMNS]), (1, 0, 2))[:, None, :, :]
    return queries


@triton.jit
def query_index(value, FORM: tl.constexpr):
    """``[R]``, such as numbers of query rows, shaped to go with scores."""
    return tl.expand_dims(per_query(value, FORM), 0 if FORM == WIDE else 2)


@triton.jit
def zeros_by_query(BLOCK_R: tl.constexpr, SLICES: tl.constexpr, FORM: tl.constexpr):
    """Where statistics of an online softmax begin, and other sums of scores."""
    if FORM == WIDE:
        zeros = tl.zeros([BLOCK_R], tl.float32)
    else:
        zeros = tl.zeros([SLICES, BLOCK_R], tl.float32)
    return zeros


@triton.jit
def zeros_over_rows(
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SLICES: tl.constexpr,
    COLUMNS: tl.constexpr,
    FORM: tl.constexpr,
):
    """Where :func:`add_over_rows` begins."""
    if FORM == WIDE:
        zeros = tl.zeros([BLOCK_D, BLOCK_R], tl.float32)
    elif FORM == SLICED:
        zeros = tl.zeros([SLICES, BLOCK_R, BLOCK_D], tl.float32)
    else:
        zeros = tl.zeros([BLOCK_D // COLUMNS, SLICES, BLOCK_R, COLUMNS], tl.float32)
    return zeros


@triton.jit
def zeros_over_queries(
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SLICES: tl.constexpr,
    COLUMNS: tl.constexpr,
    FORM: tl.constexpr,
):
    """Where :func:`add_over_queries` begins, in the shape of a tile of rows."""
    if FORM == WIDE:
        zeros = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    elif FORM == SLICED:
        zeros = tl.zeros([SLICES, BLOCK_N // SLICES, BLOCK_D], tl.float32)
    else:
        zeros = tl.zeros([BLOCK_D // COLUMNS, SLICES, 1, COLUMNS], tl.float32)
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
    """Dot products of :func:`spread` ``queries`` with the rows ``x``, in the shape of scores."""
    if FORM == WIDE:
        dots = tl.dot(x, tl.trans(queries), input_precision=PRECISION)
    elif FORM == SLICED:
        shape: tl.constexpr = [x.shape[0], queries.shape[0], queries.shape[1]]
        of_slices = tl.broadcast_to(queries[None, :, :], shape)
        dots = tl.dot(of_slices, tl.permute(x, (0, 2, 1)), input_precision=PRECISION)
    else:
        dots = tl.sum(tl.sum(queries * x, 0), 2, keep_dims=True)
    return dots


@triton.jit
def add_over_rows(acc, scores, x, FORM: tl.constexpr, PRECISION: tl.constexpr):
    """``acc`` plus, for every query, the rows ``x`` weighted by its ``scores``."""
    if FORM == WIDE:
        acc = tl.dot(tl.trans(x), scores.to(x.dtype), acc, input_precision=PRECISION)
    elif FORM == SLICED:
        acc = tl.dot(scores.to(x.dtype), x, acc, input_precision=PRECISION)
    else:
        acc += scores[None, :, :, :] * x
    return acc


@triton.jit
def add_over_queries(acc, scores, queries, FORM: tl.constexpr, PRECISION: tl.constexpr):
    """``acc`` plus, for every row, :func:`spread` ``queries`` weighted by its ``scores``."""
    if FORM == WIDE:
        acc = tl.dot(scores.to(queries.dtype), queries, acc, input_precision=PRECISION)
    elif FORM == SLICED:
        shape: tl.constexpr = [acc.shape[0], queries.shape[0], queries.shape[1]]
        of_slices = tl.broadcast_to(queries[None, :, :], shape)
        of_rows = tl.permute(scores, (0, 2, 1)).to(queries.dtype)
        acc = tl.dot(of_rows, of_slices, acc, input_precision=PRECISION)
    else:
        acc += tl.sum(scores[None, :, :, :] * queries, 2, keep_dims=True)
    return acc


@triton.jit
def sum_slices(acc, FORM: tl.constexpr):
    """``[R, D]`` of what :func:`add_over_rows` has summed."""
    if FORM == WIDE:
        acc = tl.trans(acc)
    elif FORM == SLICED:
        acc = tl.sum(acc, 0)
    else:
        R: tl.constexpr = acc.shape[2]
        width: tl.constexpr = acc.shape[0] * acc.shape[3]
        acc = tl.reshape(tl.permute(tl.sum(acc, 1), (1, 0, 2)), [R, width])
    return acc


@triton.jit
def merge_slices(acc, maximum, total, FORM: tl.constexpr):
    """``[R, D]`` sums, ``[R]`` maximum and total of an online softmax, of all slices together."""
    if FORM != WIDE:
        whole = tl.max(maximum, 0)
        shift = tl.where(whole == -float("inf"), 0.0, whole)
        weight = tl.exp2((maximum - shift[None, :]) * LOG2E)
        acc = acc * tl.expand_dims(weight, 2)
        total = tl.sum(total * weight, 0)
        maximum = whole
    return sum_slices(acc, FORM), maximum, total
