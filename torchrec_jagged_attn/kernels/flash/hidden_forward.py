"""Takes out of jagged flash attention what causality and windows hide, if it is infinite or NaN.

A product of matrices adds up 0 · x for each pair that they hide: NaN, where x is infinite or
NaN. To keep x out would slow the kernels down, so they let it in. After them, one kernel for each
direction looks for it, and computes the elements that it has come into once more, without it.

It looks at one row of each tile: at the first of a tile of queries, and at the last of a tile of
keys. What the tile adds up but hides from any of its rows is hidden from that one, too, and has
come into it. So it reads a row for each tile, and no more where these are finite.

Elements that a visible row has made infinite or NaN keep what they are, and so does all that is
finite. The gradient of the table of distances needs none of this: see ``grad_relative_kernel``.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from torchrec_jagged_attn import devices
from torchrec_jagged_attn.arguments import FlashOutputs
from torchrec_jagged_attn.kernels.common.dropout import query_draws
from torchrec_jagged_attn.kernels.common.launch import Launcher, overlap_options
from torchrec_jagged_attn.kernels.common.matmul import multiply
from torchrec_jagged_attn.kernels.flash.records import (
    Arguments,
    Biases,
    Constants,
    Inputs,
    Samples,
)
from torchrec_jagged_attn.kernels.flash.tiles import (
    QueryTile,
    drop_pairs,
    is_finite,
    key_weights,
    load_keys,
    load_queries,
    load_rows,
    load_softmax_stats,
    load_values,
    seen_from,
    seen_pairs,
    store_rows,
)

__all__ = [
    "BLOCK",
    "is_hidden",
    "lanes_of",
    "load_block",
    "mend_outputs",
    "mend_tiles",
    "nothing_bad",
    "options_of",
    "without_bad",
]

BLOCK = 16  # rows, of queries and of keys, that are computed at a time
LOOKED_AT = 8192  # elements that a program looks at, at a time


@triton.jit
def _pick(chosen, x):
    """The only element of ``x``, which is not negative, that is ``chosen``."""
    return tl.max(tl.where(chosen, x, 0))


@triton.jit
def mend_tiles(
    ptr,
    args,
    offsets_ptr,
    num_samples,
    program,
    head,
    shift,
    STRIDE: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    OF_LAST: tl.constexpr,
    MEND: tl.constexpr,
    C: tl.constexpr,
):
    """Look at one row of each of some samples' tiles, and ``MEND`` the tiles whose row is bad.

    That is the first row, or ``OF_LAST`` the last one; it is bad if it has an infinity or a NaN.
    The tiles of a sample are spread over ``2 ** shift`` lanes.

    Args:
        ptr: of the rows, ``D`` wide and ``STRIDE`` apart.
        offsets_ptr: ``[B + 1]``, of these rows.
        program: number of the program among those of the head: which samples are its own.
        MEND: computes STEP rows; it takes ``(args, sample, row, end, head, C)``.
    """
    lanes = tl.arange(0, C.LANES)
    sample = program * (C.LANES >> shift) + (lanes >> shift)
    number = lanes & ((1 << shift) - 1)
    begin = tl.load(offsets_ptr + sample, mask=sample < num_samples, other=0).to(tl.int64)
    end = tl.load(offsets_ptr + sample + 1, mask=sample < num_samples, other=0).to(tl.int64)
    if C.OVERLAP:
        cuda.gdc_wait()
    for start in range(0, tl.max((end - begin).to(tl.int32)), TILE << shift):
        row = begin + start + number * TILE
        looked_at = tl.minimum(row + TILE, end) - 1 if OF_LAST else row
        d = tl.arange(0, C.BLOCK_D)[None, :]
        ptrs = ptr + (looked_at * STRIDE + head * D)[:, None] + d
        x = tl.load(ptrs, mask=(row < end)[:, None] & (d < D), other=0.0)
        bad = tl.max(tl.where(is_finite(x), 0, 1), 1)
        if tl.max(bad) > 0:
            for lane in range(C.LANES):
                chosen = (bad > 0) & (lanes == lane)
                last = tl.minimum(_pick(chosen, row) + TILE, _pick(chosen, end))
                for first in range(_pick(chosen, row), last, STEP):
                    MEND(args, _pick(chosen, sample), first, _pick(chosen, end), head, C)


@triton.jit
def load_block(args, sample, row, end, head, C: tl.constexpr):
    """``(tile, q, maximum, inverse)``: a block of queries, and what :func:`key_weights` needs."""
    offsets_ptr = args.samples.kv_offsets
    base = tl.load(offsets_ptr + sample).to(tl.int64)
    num_keys = (tl.load(offsets_ptr + sample + 1).to(tl.int64) - base).to(tl.int32)
    i, count = tl.arange(0, C.BLOCK_M), end - row
    diagonal = num_keys - count.to(tl.int32)
    high = tl.minimum(num_keys, diagonal + i + 1)[:, None]
    kv_head = head // (C.H // C.HK)
    q = load_queries(args.inputs.q, row, count, head, C)
    stat = (row + i) * C.H + head
    draws = query_draws(args.biases.dropout, stat)
    tile = QueryTile(sample, row, count, base, num_keys, high, diagonal, head, kv_head, draws)
    maximum, inverse = load_softmax_stats(args, stat, i < count, C)
    return tile, q, maximum, inverse


@triton.jit
def nothing_bad(window, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """What :func:`without_bad` begins with, for BLOCK rows that see others."""
    if window is None:
        bad = tl.full([BLOCK_D], 2**31 - 1, tl.int32)
    else:
        bad = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    return bad


@triton.jit
def without_bad(x, index, seen, bad, window, C: tl.constexpr):
    """``x`` with zeros where it is not finite, and what is known of the rows that are ``bad``.

    That is the first of them by its ``index``, by column; with a window, how many of them each row
    has ``seen``.
    """
    finite = is_finite(x)
    if window is None:
        first = tl.min(tl.where(finite, 2**31 - 1, index[:, None]), 0)
        x = tl.where(finite, x, 0.0).to(x.dtype)
        bad = tl.minimum(bad, first)
    else:
        ones = tl.where(finite, 0.0, 1.0).to(x.dtype)
        bad = multiply(tl.where(seen, 1.0, 0.0).to(x.dtype), ones, bad, C.PRECISION)
        x = tl.where(finite, x, 0.0).to(x.dtype)
    return x, bad


@triton.jit
def is_hidden(bad, end, window):
    """Whether a row sees nothing that is ``bad``: it sees what comes before ``end``."""
    return bad[None, :] >= end if window is None else bad == 0


@triton.jit
def _mend_outputs(args, sample, row, end, head, C: tl.constexpr):
    """Outputs of a block of queries."""
    count, out_ptr = end - row, args.outputs.out
    out = load_rows(out_ptr, row, count, head, C.H * C.DV, C.DV, C.BLOCK_M, C.BLOCK_D)
    if tl.max(tl.where(is_finite(out), 0, 1)) > 0:
        tile, q, maximum, inverse = load_block(args, sample, row, end, head, C)
        acc = tl.zeros([C.BLOCK_M, C.BLOCK_D], tl.float32)
        bad = nothing_bad(args.window, C.BLOCK_M, C.BLOCK_D)
        first, _whole = seen_from(args.window, tile, C)
        last = tl.minimum(tile.num_keys, tile.diagonal + C.BLOCK_M)
        for start in range(first, last, C.BLOCK_N):
            k = load_keys(args.inputs.k, tile, start, C)
            v = load_values(args.inputs.v, tile, start, C)
            p, _ = key_weights(q, k, maximum, inverse, args, tile, start, C)
            p = drop_pairs(p, args, tile, start, C)
            j = start + tl.arange(0, C.BLOCK_N)
            seen = seen_pairs(args.window, tile, j[None, :])
            v, bad = without_bad(v, j, seen, bad, args.window, C)
            acc = multiply(p.to(v.dtype), v, acc, C.PRECISION)
        hidden = ~is_finite(out) & is_hidden(bad, tile.high, args.window)
        out = tl.where(hidden, acc.to(out.dtype), out)
        store_rows(out_ptr, out, row, count, head, C.H * C.DV, C.DV, C.BLOCK_M, C.BLOCK_D)


@triton.jit(do_not_specialize=["num_samples", "shift", "num_stats", "reach", "window"])
def mend_outputs_kernel(
    inputs,  # Inputs
    biases,  # Biases
    outputs,  # arguments.FlashOutputs
    samples,  # Samples
    num_samples,
    shift,  # a sample has 2 ** shift lanes
    num_stats,
    reach,
    window,  # or None
    factor,
    C: tl.constexpr,  # Constants
):
    """One head of the tiles of Q_TILE queries of some samples."""
    args = Arguments(inputs, biases, outputs, None, samples, num_stats, reach, window, factor, None)
    program, head = tl.program_id(0) // C.H, tl.program_id(0) % C.H
    mend_tiles(
        outputs.out, args, samples.q_offsets, num_samples, program, head, shift, C.H * C.DV, C.DV,
        C.Q_TILE, C.BLOCK_M, False, _mend_outputs, C,
    )  # fmt: skip


_launch = Launcher(mend_outputs_kernel)


def lanes_of(num_rows: int, num_samples: int, tile: int, lanes: int) -> tuple[int, int]:
    """How many lanes the tiles of a sample get, as a power of two, and programs a head.

    About as many as the tiles of twice the mean sample; of longer samples a lane has several.
    """
    tiles = num_rows // max(1, num_samples * tile)
    shift = min(tiles.bit_length(), lanes.bit_length() - 1)
    return shift, triton.cdiv(num_samples, lanes >> shift)


def options_of(constants: Constants, x: Tensor) -> dict[str, Any]:
    """Constants and options of kernels that look at rows of the dtype of ``x``."""
    return {
        "LANES": min(128, LOOKED_AT // constants.BLOCK_D),
        "BLOCK_M": BLOCK,
        "num_warps": 4 if constants.BLOCK_D * x.element_size() < 512 else 8,
        "num_stages": 1,
        "maxnreg": 128,
        **overlap_options(devices.launches_overlap(x.device)),
    }


def mend_outputs(
    inputs: Inputs,
    biases: Biases,
    outputs: FlashOutputs,
    samples: Samples,
    reach: int,
    window: int | None,
    factor: float,
    tile: int,
    constants: Constants,
) -> None:
    """Compute again what should not have come into ``outputs`` of causal attention.

    Args:
        inputs, biases, samples, reach, window, factor: as the general kernels take them.
        tile: queries that all see what any of them has multiplied; or a whole sample, if it is of
            fewer.
        constants: of the general kernels.
    """
    out, stats = outputs
    options = options_of(constants, out)
    num_samples = samples.q_offsets.numel() - 1
    shift, per_head = lanes_of(out.shape[0], num_samples, tile, options["LANES"])
    _launch(
        (per_head * constants.H,),
        (
            inputs, biases, outputs, samples, num_samples, shift, stats[0].numel(), reach, window,
            factor,
        ),
        constants.of_launch(Q_TILE=tile, BLOCK_N=BLOCK, **options),
    )  # fmt: skip
