"""Gradients of the weights and biases around target attention.

With ``R`` targets in all, and absorbed projections of keys and values,

    ∂W_Q = Σ_r ∂q_r ⊗ target_r                                                      [E, C]
    ∂W_O = Σ_r ∂out_r ⊗ v_r                                                         [E, E]
    ∂W_K,h = Σ_r q_rh ⊗ ∂u_rh          ∂W_V,h = Σ_r ∂v_rh ⊗ pooled_rh               [X, D]
    ∂b_Q = Σ_r ∂q_r                    ∂b_V = Σ_r ∂v_r with a history               [E]
    ∂b_O = Σ_r ∂out_r

Outputs are small, and sums are over all targets of a batch: 2·R·E·(C + E + 2·D) FLOPs, operands
read once. So products are split-K, with as many splits as fill a GPU; their number and order do not
depend on the GPU. cuBLAS would need seven products, without split-K, and in fp32 adds one row after
the other.

Without a value projection, there are only ∂W_Q, ∂W_K and ∂b_Q.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from torchrec_jagged_attn import devices
from torchrec_jagged_attn.runtime.kernels.matmul import (
    gradient_precision,
    load_tile,
    multiply,
    padded_width,
    product_precision,
    tile_of,
)
from torchrec_jagged_attn.runtime.launch import Launcher, overlap_options
from torchrec_jagged_attn.target_attention.arguments import ProjectionGradients, ProjectionRows

ROWS = 128  # fewest rows of a split
SUMMED_ELEMENTS = 128  # of a program that sums splits
SPLITS_AT_ONCE = tl.constexpr(16)


@triton.jit
def _sum_products(
    sums_ptr,  # [H, X, Y]
    a_ptr,  # [R, H, X]
    b_ptr,  # [R, H, Y]
    tile,
    begin,
    end,
    H: tl.constexpr,
    X: tl.constexpr,
    Y: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_Y: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """A tile of one head of the outer products, summed over the rows from begin to end.

    Tiles wider than a head also read the next head; its results are not stored.
    """
    TILES_Y: tl.constexpr = (Y + BLOCK_Y - 1) // BLOCK_Y
    TILES: tl.constexpr = (X + BLOCK_X - 1) // BLOCK_X * TILES_Y
    h = tile // TILES
    x = tile % TILES // TILES_Y * BLOCK_X
    y = tile % TILES_Y * BLOCK_Y
    acc = tl.zeros([BLOCK_X, BLOCK_Y], tl.float32)
    for r in tl.range(begin, end, BLOCK_R, num_stages=3):
        a = load_tile(a_ptr, h * X + x, r, H * X, end, BLOCK_X, BLOCK_R, True)
        b = load_tile(b_ptr, r, h * Y + y, end, H * Y, BLOCK_R, BLOCK_Y)
        acc = multiply(a, b.to(a.dtype), acc, PRECISION)
    origin, at, mask = tile_of(x, y, X, Y, BLOCK_X, BLOCK_Y)
    tl.store(sums_ptr + h * (X * Y) + origin + at, acc, mask=mask)


@triton.jit
def _sum_rows(
    sums_ptr,  # [E]
    x_ptr,  # [R, E]
    filled_ptr,  # [R], or None: all
    tile,
    begin,
    end,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """BLOCK_E columns, summed over the rows from begin to end that are filled."""
    e = tile * BLOCK_E + tl.arange(0, BLOCK_E)
    acc = tl.zeros([BLOCK_R, BLOCK_E], tl.float32)
    for first in tl.range(begin, end, BLOCK_R, num_stages=3):
        x = load_tile(x_ptr, first, tile * BLOCK_E, end, E, BLOCK_R, BLOCK_E)
        if filled_ptr is not None:
            r = first + tl.arange(0, BLOCK_R)
            x *= tl.load(filled_ptr + r, mask=r < end, other=0.0)[:, None]
        acc += x
    tl.store(sums_ptr + e, tl.sum(acc, 0), mask=e < E)


@triton.jit(do_not_specialize=["num_rows", "num_samples", "rows_of_split"])
def _splits_kernel(
    sums_ptr,  # [splits, SIZE] fp32
    rows,  # ProjectionRows
    query_offsets_ptr,  # [B + 1] of jagged targets, or None: all rows are summed
    num_rows,
    num_samples,
    rows_of_split,
    H: tl.constexpr,
    X: tl.constexpr,
    Y: tl.constexpr,
    C: tl.constexpr,
    SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_Y: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A tile of one gradient of a weight, or some columns of one of a bias, over one split of rows.

    Sums are stored in the order of :class:`ProjectionGradients`, without those of values if there
    is no value projection.
    """
    if OVERLAP:
        cuda.gdc_launch_dependents()
    E: tl.constexpr = H * X
    TILES_E: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    TILES_EE: tl.constexpr = TILES_E * TILES_E
    TILES_XY: tl.constexpr = H * ((X + BLOCK_X - 1) // BLOCK_X) * ((Y + BLOCK_Y - 1) // BLOCK_Y)
    program = tl.program_id(0)
    split = tl.program_id(1)
    begin = split * rows_of_split
    end = tl.minimum(begin + rows_of_split, num_rows)
    if query_offsets_ptr is not None:
        end = tl.minimum(end, tl.load(query_offsets_ptr + num_samples).to(end.dtype))
    sums_ptr += split.to(tl.int64) * SIZE
    if C != E or rows.v is None or rows.target.dtype != rows.v.dtype:
        TILES_EC: tl.constexpr = TILES_E * ((C + BLOCK_E - 1) // BLOCK_E)
        if program < TILES_EC:
            _sum_products(
                sums_ptr, rows.grad_q, rows.target, program, begin, end, 1, E, C,
                PRECISION, BLOCK_E, BLOCK_E, BLOCK_R,
            )  # fmt: skip
            return
        program -= TILES_EC
        sums_ptr += E * C
        if rows.v is not None:
            if program < TILES_EE:
                _sum_products(
                    sums_ptr, rows.grad_out, rows.v, program, begin, end, 1, E, E,
                    PRECISION, BLOCK_E, BLOCK_E, BLOCK_R,
                )  # fmt: skip
                return
            program -= TILES_EE
            sums_ptr += E * E
    else:
        if program < 2 * TILES_EE:
            of_out = program // TILES_EE
            a_ptr, b_ptr = rows.grad_q, rows.target
            if of_out == 1:
                a_ptr, b_ptr = rows.grad_out, rows.v
            _sum_products(
                sums_ptr + of_out * (E * E), a_ptr, b_ptr, program % TILES_EE, begin, end, 1, E, E,
                PRECISION, BLOCK_E, BLOCK_E, BLOCK_R,
            )  # fmt: skip
            return
        program -= 2 * TILES_EE
        sums_ptr += 2 * E * E
    if rows.q is not None:
        WEIGHTS: tl.constexpr = 1 if rows.pooled is None else 2
        if program < WEIGHTS * TILES_XY:
            of_values = program // TILES_XY
            a_ptr, b_ptr = rows.q, rows.grad_u
            if rows.pooled is not None:
                if of_values == 1:
                    a_ptr, b_ptr = rows.grad_v, rows.pooled
            _sum_products(
                sums_ptr + of_values * (E * Y), a_ptr, b_ptr, program % TILES_XY, begin, end,
                H, X, Y, PRECISION, BLOCK_X, BLOCK_Y, BLOCK_R,
            )  # fmt: skip
            return
        program -= WEIGHTS * TILES_XY
        sums_ptr += WEIGHTS * E * Y
    bias, tile = program // TILES_E, program % TILES_E
    sums_ptr += bias * E
    if rows.v is None or bias == 0:
        _sum_rows(sums_ptr, rows.grad_q, None, tile, begin, end, E, BLOCK_E, BLOCK_R)
    elif bias == 1:  # the bias of keys has no effect: zeros
        _sum_rows(sums_ptr, rows.grad_q, None, tile, begin, begin, E, BLOCK_E, BLOCK_R)
    elif bias == 2:
        _sum_rows(sums_ptr, rows.grad_v, rows.filled, tile, begin, end, E, BLOCK_E, BLOCK_R)
    else:
        _sum_rows(sums_ptr, rows.grad_out, None, tile, begin, end, E, BLOCK_E, BLOCK_R)


@triton.jit
def _sum_splits_of(
    out_ptr,  # [NUM], or None
    sums_ptr,  # [splits, SIZE] fp32, from the first of NUM on
    num_splits,
    NUM: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of all splits of this program's BLOCK elements of an output."""
    if out_ptr is not None:
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        if tl.program_id(0) * BLOCK < NUM:
            acc = tl.zeros([SPLITS_AT_ONCE, BLOCK], tl.float32)
            for first in range(0, num_splits, SPLITS_AT_ONCE):
                split = first + tl.arange(0, SPLITS_AT_ONCE)
                at = split.to(tl.int64)[:, None] * SIZE + i[None, :]
                mask = (split < num_splits)[:, None] & (i < NUM)[None, :]
                acc += tl.load(sums_ptr + at, mask=mask, other=0.0)
            tl.store(out_ptr + i, tl.sum(acc, 0), mask=i < NUM)


@triton.jit(do_not_specialize=["num_splits"])
def _add_splits_kernel(
    sums_ptr,  # [splits, SIZE] fp32
    grads,  # ProjectionGradients
    num_splits,
    E: tl.constexpr,
    Y: tl.constexpr,
    C: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Sum the splits of one output, by the second axis of programs."""
    if OVERLAP:
        cuda.gdc_wait()
    W: tl.constexpr = 0 if grads.w_k is None else E * Y
    W_OUT: tl.constexpr = 0 if grads.w_out is None else E * E
    W_V: tl.constexpr = 0 if grads.w_v is None else E * Y
    B_IN: tl.constexpr = E if grads.w_out is None else 3 * E
    output = tl.program_id(1)
    if output == 0:
        _sum_splits_of(grads.w_q, sums_ptr, num_splits, E * C, SIZE, BLOCK)
    elif output == 1:
        _sum_splits_of(grads.w_out, sums_ptr + E * C, num_splits, W_OUT, SIZE, BLOCK)
    elif output == 2:
        sums_ptr += E * C + W_OUT
        _sum_splits_of(grads.w_k, sums_ptr, num_splits, W, SIZE, BLOCK)
    elif output == 3:
        sums_ptr += E * C + W_OUT + W
        _sum_splits_of(grads.w_v, sums_ptr, num_splits, W_V, SIZE, BLOCK)
    elif output == 4:
        sums_ptr += E * C + W_OUT + W + W_V
        _sum_splits_of(grads.b_in, sums_ptr, num_splits, B_IN, SIZE, BLOCK)
    else:
        sums_ptr += E * C + W_OUT + W + W_V + B_IN
        _sum_splits_of(grads.b_out, sums_ptr, num_splits, E, SIZE, BLOCK)


_sum_splits = Launcher(_splits_kernel)
_add_splits = Launcher(_add_splits_kernel)


def parameter_gradients(
    rows: ProjectionRows, grads: ProjectionGradients, query_offsets: Tensor | None = None
) -> None:
    """Write ``grads``, the gradients at the top of this file, of ``rows``, up to the last of
    ``query_offsets``, if there are any.

    Products are in the dtype of ``rows.grad_q``, to which others are cast as they are read.
    """
    rows = ProjectionRows(*(None if x is None else x.contiguous() for x in rows))
    if rows.filled is not None and not rows.filled.numel():
        rows = rows._replace(filled=None)
    grad_q, target = rows.grad_q, rows.target
    num_rows, width = grad_q.shape
    num_heads, x, y = 1, width, 0
    if rows.q is not None and rows.grad_u is not None:
        num_heads, x, y = *rows.q.shape[1:], rows.grad_u.shape[2]
    overlap = devices.launches_overlap(grad_q.device)
    precision = gradient_precision(product_precision(grad_q.dtype))
    half, of_values = grad_q.element_size() == 2, rows.v is not None
    plan = plan_of(half, precision, num_heads, x, y, target.shape[1], of_values, overlap)
    block = plan.of_splits["BLOCK_R"]
    rows_of_split = -(-num_rows * plan.num_tiles // (plan.num_programs * block)) * block
    rows_of_split = max(ROWS, rows_of_split)
    num_splits = max(1, -(-num_rows // rows_of_split))
    sums = grad_q.new_empty(num_splits, plan.size, dtype=torch.float32)
    num_samples = 0
    if query_offsets is not None:
        query_offsets, num_samples = query_offsets.contiguous(), query_offsets.shape[0] - 1
    sizes = num_rows, num_samples, rows_of_split
    _sum_splits((plan.num_tiles, num_splits), (sums, rows, query_offsets, *sizes), plan.of_splits)
    _add_splits((plan.num_blocks, 6), (sums, grads, num_splits), plan.of_sums)


class Plan(NamedTuple):
    """Tiles and splits of gradients of one shape."""

    num_programs: int  # target number of programs, a few per multiprocessor of an H200
    num_tiles: int  # of all gradients
    size: int  # elements of all gradients
    num_blocks: int  # of SUMMED_ELEMENTS, of the largest gradient
    of_splits: dict[str, Any]  # compile-time arguments of ``_splits_kernel``
    of_sums: dict[str, Any]  # those of ``_add_splits_kernel``


@functools.cache
def plan_of(
    half: bool, precision: str, heads: int, x: int, y: int, c: int, of_values: bool, overlap: bool
) -> Plan:
    """The plan for ``H`` heads of width ``X``, targets of width ``C`` and history rows of width
    ``Y`` (0 unless projections are absorbed).

    ``of_values``: whether there is a value projection. Tiles are the fastest of those tried on an
    H200.
    """
    e = heads * x
    if half:
        num_programs, block_r, most, warps = 264, 64, 128, 4
    else:  # four warps would use wgmma, which needs a transposed copy of TF32 operands
        num_programs, block_r, most, warps = 528, 32, 64, 2 if precision == "tf32" else 4
    block_x, block_e = min(64, padded_width(x)), min(64, padded_width(e))
    block_y = min(most, padded_width(max(1, y)))
    tiles_e, tiles_c = -(-e // block_e), -(-c // block_e)
    tiles_of_head = -(-x // block_x) * -(-y // block_y)
    weights, biases = (2, 4) if of_values else (1, 1)  # of history rows; of all
    size = e * (c + (weights - 1) * e + weights * y + biases)
    of_splits = {
        "H": heads,
        "X": x,
        "Y": y,
        "C": c,
        "SIZE": size,
        "PRECISION": precision,
        "BLOCK_X": block_x,
        "BLOCK_Y": block_y,
        "BLOCK_E": block_e,
        "BLOCK_R": block_r,
        "OVERLAP": overlap,
        "num_warps": warps,
    }
    of_sums = {
        "E": e,
        "Y": y,
        "C": c,
        "SIZE": size,
        "BLOCK": SUMMED_ELEMENTS,
        **overlap_options(overlap),
    }
    num_tiles = tiles_e * (tiles_c + (weights - 1) * tiles_e + biases)
    num_tiles += weights * heads * tiles_of_head
    num_blocks = -(-max(e * c, e * e, e * y, 3 * e) // SUMMED_ELEMENTS)
    return Plan(num_programs, num_tiles, size, num_blocks, of_splits, of_sums)
