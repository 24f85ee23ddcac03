"""prepare_kernel of flash_hopper_backward.py by as many programs as fit, none of which does a thing
where no tile is listed. It waits for the list: it is launched before the kernel of short samples."""
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from torchrec_jagged_attn.kernels.common import find_tile
from torchrec_jagged_attn.kernels.flash_tiles import load_rows, store_rows
from torchrec_jagged_attn.kernels.launch import Launcher


@triton.jit(do_not_specialize=["num_samples", "num_slots"])
def prepare_kernel(
    grad_out_ptr, out_ptr, stats_ptr, grad_q_ptr, row_stats_ptr, turns_ptr, q_offsets_ptr,
    kv_offsets_ptr, tiles_ptr, num_samples, num_slots,
    H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, CAUSAL: tl.constexpr,
    SHORT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr,
):
    if OVERLAP:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    if tl.load(tiles_ptr) > 0:
        for work in range(tl.program_id(0), num_slots * H, tl.num_programs(0)):
            slot, head = work // H, work % H
            sample, begin, end, start = find_tile(q_offsets_ptr, num_samples, slot, 1, BLOCK_M)
            num_keys = tl.load(kv_offsets_ptr + sample + 1) - tl.load(kv_offsets_ptr + sample)
            row, count = begin + start, end - begin - start
            if (count > 0) & ((end - begin > SHORT) | (num_keys > SHORT)):
                grad_out = load_rows(
                    grad_out_ptr, row, count, H * DV, head * DV, DV, BLOCK_M, BLOCK_D, True
                )
                out = load_rows(out_ptr, row, count, H * DV, head * DV, DV, BLOCK_M, BLOCK_D, True)
                i = tl.arange(0, BLOCK_M)
                lse = tl.load(stats_ptr + (row + i) * H + head, mask=i < count, other=float("inf"))
                delta = tl.sum(grad_out.to(tl.float32) * out.to(tl.float32), 1)
                ptrs = row_stats_ptr + (begin * 0 + work) * (2 * BLOCK_M) + i
                tl.store(ptrs, lse)
                tl.store(ptrs + BLOCK_M, delta)
                tl.store(turns_ptr + work, 0)
                seen = num_keys
                if CAUSAL:
                    seen = tl.minimum(seen, num_keys - count + tl.minimum(count, BLOCK_M))
                if seen <= 0:
                    zeros = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
                    store_rows(grad_q_ptr, zeros, row, count, H * D, head * D, D, BLOCK_M, BLOCK_D)


launch = Launcher(prepare_kernel)
