"""What the backward of jagged flash attention on Hopper needs of queries, made beforehand.

For each tile of BLOCK_M queries and head: the log-sum-exp of its rows and Σ_d grad_out · out, side
by side, so that one copy brings both; and a turn of zero (``hopper_turns.py``). The kernel reads
out and grad_out once, and writes eight bytes for each row and head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from torchrec_jagged_attn import devices
from torchrec_jagged_attn.kernels.common.jagged import find_tile
from torchrec_jagged_attn.kernels.common.launch import Launcher, overlap_options
from torchrec_jagged_attn.kernels.flash.tiles import load_rows, store_rows

__all__ = ["BLOCK_M", "prepare"]

BLOCK_M = 64  # queries of a tile
PROGRAMS = 16  # to a multiprocessor


@triton.jit(do_not_specialize=["num_samples", "num_slots"])
def prepare_kernel(
    grad_out_ptr,  # [ΣLq, H, Dv]
    out_ptr,  # [ΣLq, H, Dv]
    stats_ptr,  # [2, ΣLq, H] fp32
    grad_q_ptr,  # [ΣLq, H, D]
    row_stats_ptr,  # [tiles of queries, H, 2, BLOCK_M] fp32: log-sum-exp, Σ_d grad_out · out
    turns_ptr,  # [tiles of queries, H] int32
    delta_ptr,  # [ΣLq, H] fp32: the second of row_stats, if it is not None
    q_offsets_ptr,  # [B + 1]
    kv_offsets_ptr,  # [B + 1]
    tiles_ptr,  # [1 + capacity, FIELDS] int64, see tile_list.list_tiles
    num_samples,
    num_slots,  # most tiles of queries
    H: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    CAUSAL: tl.constexpr,
    SHORT: tl.constexpr,
    IS_SELF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """``row_stats`` and turns of tiles of queries of one head; ``grad_q`` of those that see no key.

    If IS_SELF, nothing is done where no tile of keys is listed: no sample is without keys then.
    """
    if OVERLAP:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    num_work = num_slots * H
    if IS_SELF:
        num_work = tl.where(tl.load(tiles_ptr) > 0, num_work, 0)
    work = tl.program_id(0)
    while work < num_work:
        slot, head = work // H, work % H
        sample, begin, end, start = find_tile(q_offsets_ptr, num_samples, slot, 1, BLOCK_M)
        num_keys = tl.load(kv_offsets_ptr + sample + 1) - tl.load(kv_offsets_ptr + sample)
        row, count = begin + start, end - begin - start
        if (count > 0) & ((end - begin > SHORT) | (num_keys > SHORT)):
            grad_out = load_rows(grad_out_ptr, row, count, head, H * DV, DV, BLOCK_M, BLOCK_D)
            out = load_rows(out_ptr, row, count, head, H * DV, DV, BLOCK_M, BLOCK_D)
            i = tl.arange(0, BLOCK_M)
            # Rows beyond the sample get weights of zero.
            lse = tl.load(stats_ptr + (row + i) * H + head, mask=i < count, other=float("inf"))
            delta = tl.sum(grad_out.to(tl.float32) * out.to(tl.float32), 1)
            ptrs = row_stats_ptr + work.to(tl.int64) * (2 * BLOCK_M) + i
            tl.store(ptrs, lse)
            tl.store(ptrs + BLOCK_M, delta)
            if delta_ptr is not None:
                tl.store(delta_ptr + (row + i) * H + head, delta, mask=i < count)
            tl.store(turns_ptr + work, 0)
            seen = num_keys
            if CAUSAL:
                seen = tl.minimum(seen, num_keys - count + tl.minimum(count, BLOCK_M))
            if seen <= 0:
                zeros = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
                store_rows(grad_q_ptr, zeros, row, count, head, H * D, D, BLOCK_M, BLOCK_D)
        work += tl.num_programs(0)


_prepare = Launcher(prepare_kernel)


def prepare(
    grad_out: Tensor,
    out: Tensor,
    stats: Tensor,
    grad_q: Tensor,
    delta: Tensor | None,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    tiles: Tensor,
    causal: bool,
    width: int,
    short: int,
    is_self: bool,
) -> tuple[Tensor, Tensor]:
    """``row_stats`` and ``turns`` for :func:`hopper_backward.backward`.

    It also writes zeros into ``grad_q`` where a tile sees no key, and, unless it is ``None``,
    Σ_d grad_out · out into ``delta`` ``[ΣLq, H]``.

    Samples of at most ``short`` rows on both sides are left out. If ``is_self``, all samples have
    as many queries as keys. The kernel waits for the one before it, which must be that of the list
    of ``tiles``.
    """
    num_queries, H, D = grad_q.shape
    num_samples = q_offsets.numel() - 1
    num_slots = num_queries // BLOCK_M + num_samples
    row_stats = out.new_empty(num_slots * H, 2 * BLOCK_M, dtype=torch.float32)
    turns = out.new_empty(num_slots * H, dtype=torch.int32)
    _prepare(
        (min(num_slots * H, PROGRAMS * devices.hopper_multiprocessors(out.device)),),
        (
            grad_out, out, stats, grad_q, row_stats, turns, delta, q_offsets, kv_offsets, tiles,
            num_samples, num_slots,
        ),
        {
            "H": H,
            "D": D,
            "DV": out.shape[2],
            "CAUSAL": causal,
            "SHORT": short,
            "IS_SELF": is_self,
            "BLOCK_M": BLOCK_M,
            "BLOCK_D": width,
            "num_warps": 4,
            **overlap_options(devices.launches_overlap(out.device)),
        },
    )  # fmt: skip
    return row_stats, turns
