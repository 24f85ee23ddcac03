"""Takes out of gradients what causality and windows hide, as ``hidden_forward.py`` of outputs."""

from __future__ import annotations

import triton
import triton.language as tl

from torchrec_jagged_attn.arguments import FlashOutputs
from torchrec_jagged_attn.kernels.common.launch import Launcher
from torchrec_jagged_attn.kernels.common.matmul import multiply, product
from torchrec_jagged_attn.kernels.common.tile_list import FIELDS
from torchrec_jagged_attn.kernels.flash.general_backward import (
    Keys,
    drop_keys,
    key_biases,
    query_weights,
    seeing_queries,
    store_bias_gradients,
)
from torchrec_jagged_attn.kernels.flash.hidden_forward import (
    BLOCK,
    is_hidden,
    lanes_of,
    load_block,
    mend_tiles,
    nothing_bad,
    options_of,
    without_bad,
)
from torchrec_jagged_attn.kernels.flash.records import (
    Arguments,
    Biases,
    Constants,
    Gradients,
    Inputs,
    Samples,
)
from torchrec_jagged_attn.kernels.flash.tiles import (
    drop_pairs,
    is_finite,
    key_weights,
    load_keys,
    load_rows,
    load_values,
    seen_from,
    seen_pairs,
    store_rows,
)

__all__ = ["mend_gradients"]


@triton.jit
def _mend_query_gradients(args, sample, row, end, head, C: tl.constexpr):
    """Gradients of a block of queries."""
    count, grad_q_ptr = end - row, args.grads.q
    grad_q = load_rows(grad_q_ptr, row, count, head, C.H * C.D, C.D, C.BLOCK_M, C.BLOCK_D)
    if tl.max(tl.where(is_finite(grad_q), 0, 1)) > 0:
        tile, q, maximum, inverse = load_block(args, sample, row, end, head, C)
        grad_out = load_rows(
            args.grads.out, row, count, head, C.H * C.DV, C.DV, C.BLOCK_M, C.BLOCK_D
        )
        out = load_rows(args.outputs.out, row, count, head, C.H * C.DV, C.DV, C.BLOCK_M, C.BLOCK_D)
        delta = tl.sum(grad_out.to(tl.float32) * out.to(tl.float32), 1)
        acc = tl.zeros([C.BLOCK_M, C.BLOCK_D], tl.float32)
        bad = nothing_bad(args.window, C.BLOCK_M, C.BLOCK_D)
        first, _whole = seen_from(args.window, tile, C)
        last = tl.minimum(tile.num_keys, tile.diagonal + C.BLOCK_M)
        for start in range(first, last, C.BLOCK_N):
            j = start + tl.arange(0, C.BLOCK_N)
            k = load_keys(args.inputs.k, tile, start, C)
            v = load_values(args.inputs.v, tile, start, C)
            p, _ = key_weights(q, k, maximum, inverse, args, tile, start, C)
            dp = product(grad_out, tl.trans(v), C.PRECISION)
            dp = drop_pairs(dp, args, tile, start, C)
            seen = seen_pairs(args.window, tile, j[None, :])
            ds = tl.where(seen, p * (dp - delta[:, None]), 0.0)
            k, bad = without_bad(k, j, seen, bad, args.window, C)
            acc = multiply(ds.to(k.dtype), k, acc, C.PRECISION)
        hidden = ~is_finite(grad_q) & is_hidden(bad, tile.high, args.window)
        grad_q = tl.where(hidden, (acc * args.scale).to(grad_q.dtype), grad_q)
        store_rows(grad_q_ptr, grad_q, row, count, head, C.H * C.D, C.D, C.BLOCK_M, C.BLOCK_D)


@triton.jit
def _find_in_list(tiles_ptr, row):
    """Number of the tile in the list whose first row is ``row``."""
    num_tiles = tl.load(tiles_ptr).to(tl.int32)
    found = num_tiles * 0
    for start in range(0, num_tiles, 1024):
        n = start + tl.arange(0, 1024)
        first = tl.load(tiles_ptr + (1 + n) * FIELDS + 1, mask=n < num_tiles, other=-1)
        found = tl.maximum(found, tl.max(tl.where(first == row, n, 0)))
    return found


@triton.jit
def _mend_key_gradients(args, sample, row, end, kv_head, C: tl.constexpr):
    """Gradients of a block of keys and values, and of biases, whose block is a tile."""
    inputs, grads = args.inputs, args.grads
    i, j = tl.arange(0, C.BLOCK_M), tl.arange(0, C.BLOCK_N)
    count = (end - row).to(tl.int32)
    grad_k = load_rows(grads.k, row, count, kv_head, C.GRAD_K_STRIDE, C.D, C.BLOCK_N, C.BLOCK_D)
    grad_v = load_rows(grads.v, row, count, kv_head, C.GRAD_V_STRIDE, C.DV, C.BLOCK_N, C.BLOCK_D)
    bad = tl.max(tl.where(is_finite(grad_k), 0, 1)) + tl.max(tl.where(is_finite(grad_v), 0, 1))
    if bad > 0:
        base = tl.load(args.samples.q_offsets + sample).to(tl.int64)
        num_rows = (tl.load(args.samples.q_offsets + sample + 1).to(tl.int64) - base).to(tl.int32)
        diagonal = num_rows - count
        low = tl.maximum(diagonal + j, 0)  # the first query that sees a key
        k = load_rows(inputs.k, row, count, kv_head, C.K_STRIDE, C.D, C.BLOCK_N, C.BLOCK_D)
        v = load_rows(inputs.v, row, count, kv_head, C.V_STRIDE, C.DV, C.BLOCK_N, C.BLOCK_D)
        keys = Keys(k, v, sample, row, j < count, base, num_rows, low, diagonal)
        acc_k = tl.zeros([C.BLOCK_N, C.BLOCK_D], tl.float32)
        acc_v = tl.zeros([C.BLOCK_N, C.BLOCK_D], tl.float32)
        # Counted from the sample's last query on, so that the first is the last that is bad.
        bad_q = nothing_bad(args.window, C.BLOCK_N, C.BLOCK_D)
        bad_grad_out = nothing_bad(args.window, C.BLOCK_N, C.BLOCK_D)
        last, _whole = seeing_queries(args.window, count, diagonal, num_rows, C)
        tile = row
        if C.P > 0 or C.A > 0:
            tile = _find_in_list(args.samples.tiles, row)
        for member in range(C.H // C.HK):
            head = kv_head * (C.H // C.HK) + member
            bias = key_biases(args, keys, head, C)
            grad_bias = tl.zeros([C.BLOCK_N], tl.float32)
            for start in range(tl.maximum(diagonal, 0) // C.BLOCK_M * C.BLOCK_M, last, C.BLOCK_M):
                p, seen, q, grad_out, delta, draws = query_weights(
                    keys, bias, args, head, start, C, MASKED=True
                )
                dp = product(v, tl.trans(grad_out), C.PRECISION)
                dp = drop_keys(dp, args, keys, draws, C)
                ds = tl.where(seen, p * (dp - delta[None, :]), 0.0)
                grad_bias += tl.sum(ds, 1)
                from_last = num_rows - 1 - start - i
                q, bad_q = without_bad(q, from_last, seen, bad_q, args.window, C)
                grad_out, bad_grad_out = without_bad(
                    grad_out, from_last, seen, bad_grad_out, args.window, C
                )
                acc_k = multiply(ds.to(q.dtype), q, acc_k, C.PRECISION)
                p = drop_keys(p, args, keys, draws, C)
                acc_v = multiply(p.to(grad_out.dtype), grad_out, acc_v, C.PRECISION)
            store_bias_gradients(args, grad_bias, keys, tile, head, C)
        high = (num_rows - low)[:, None]
        hidden = ~is_finite(grad_k) & is_hidden(bad_q, high, args.window)
        grad_k = tl.where(hidden, (acc_k * args.scale).to(grad_k.dtype), grad_k)
        hidden = ~is_finite(grad_v) & is_hidden(bad_grad_out, high, args.window)
        grad_v = tl.where(hidden, acc_v.to(grad_v.dtype), grad_v)
        store_rows(grads.k, grad_k, row, count, kv_head, C.GRAD_K_STRIDE, C.D, C.BLOCK_N, C.BLOCK_D)
        store_rows(
            grads.v, grad_v, row, count, kv_head, C.GRAD_V_STRIDE, C.DV, C.BLOCK_N, C.BLOCK_D
        )


@triton.jit(
    do_not_specialize=[
        "num_samples",
        "num_q_programs",
        "q_shift",
        "kv_shift",
        "num_stats",
        "reach",
        "window",
    ]
)
def mend_gradients_kernel(
    inputs,  # Inputs
    biases,  # Biases
    outputs,  # arguments.FlashOutputs
    grads,  # Gradients; ``delta`` is None where kernels have no biases
    samples,  # Samples, whose tiles are of keys
    num_samples,
    num_q_programs,  # the first ones, which look at queries
    q_shift,  # a sample has 2 ** q_shift lanes, of queries
    kv_shift,  # and of keys
    num_stats,
    reach,
    window,  # or None
    factor,
    scale,
    C: tl.constexpr,  # Constants
):
    """One head of the tiles of Q_TILE queries of some samples, or of those of KV_TILE keys."""
    args = Arguments(
        inputs, biases, outputs, grads, samples, num_stats, reach, window, factor, scale
    )
    program = tl.program_id(0)
    if program < num_q_programs:
        mend_tiles(
            grads.q, args, samples.q_offsets, num_samples, program // C.H, program % C.H, q_shift,
            C.H * C.D, C.D, C.Q_TILE, C.BLOCK_M, False, _mend_query_gradients, C,
        )  # fmt: skip
    else:
        program -= num_q_programs
        mend_tiles(
            grads.k, args, samples.kv_offsets, num_samples, program // C.HK, program % C.HK,
            kv_shift, C.GRAD_K_STRIDE, C.D, C.KV_TILE, C.BLOCK_N, True, _mend_key_gradients, C,
        )  # fmt: skip


_launch = Launcher(mend_gradients_kernel)


def mend_gradients(
    inputs: Inputs,
    biases: Biases,
    outputs: FlashOutputs,
    grads: Gradients,
    samples: Samples,
    reach: int,
    window: int | None,
    factor: float,
    scale: float,
    tiles: tuple[int, int],
    constants: Constants,
) -> None:
    """Compute again what should not have come into ``grads``.

    See :func:`mend_outputs`; ``tiles`` are of queries and of keys.
    """
    out, stats = outputs
    options = options_of(constants, out)
    num_samples, lanes = samples.q_offsets.numel() - 1, options["LANES"]
    q_shift, q_per_head = lanes_of(out.shape[0], num_samples, tiles[0], lanes)
    kv_shift, kv_per_head = lanes_of(grads.k.shape[0], num_samples, tiles[1], lanes)
    num_q_programs = q_per_head * constants.H
    by_keys = grads.bias is not None or grads.tables is not None
    _launch(
        (num_q_programs + kv_per_head * constants.HK,),
        (
            inputs, biases, outputs, grads, samples, num_samples, num_q_programs, q_shift, kv_shift,
            stats[0].numel(), reach, window, factor, scale,
        ),
        constants.of_launch(
            Q_TILE=tiles[0], KV_TILE=tiles[1], BLOCK_N=tiles[1] if by_keys else BLOCK, **options
        ),
    )  # fmt: skip
