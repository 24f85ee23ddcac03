"""Preprocessing for backward of jagged flash attention on Hopper.

For each tile of BLOCK_M queries and each head, the kernel writes the log-sum-exps of the rows,
Σ_d grad_out · out and, for dropout, random bits, next to each other, so that one copy loads them;
and a semaphore of zero (``hopper_dq_semaphores.py``). It reads out and grad_out once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from torchrec_jagged_attn.base import devices
from torchrec_jagged_attn.ops.device.dropout import query_draws
from torchrec_jagged_attn.ops.device.jagged import find_tile
from torchrec_jagged_attn.ops.flash_attention.arguments import FlashOutputs
from torchrec_jagged_attn.ops.flash_attention.kernels.records import Gradients, Prepared, Samples
from torchrec_jagged_attn.ops.flash_attention.kernels.tiles import load_rows, store_rows
from torchrec_jagged_attn.ops.flash_attention.plan import Plan
from torchrec_jagged_attn.ops.launch import Launcher, overlap_options

BLOCK_M = 64  # queries of a tile
PROGRAMS = 16  # per multiprocessor


@triton.jit(do_not_specialize=["num_samples", "num_tiles"])
def prepare_kernel(
    outputs,  # arguments.FlashOutputs
    grads,  # Gradients; ``delta`` is written unless None, ``q`` if no key is visible
    prepared,  # Prepared
    samples,  # Samples, whose tiles are of keys
    dropout_ptr,  # [2], see dropout.py, or None
    num_samples,
    num_tiles,  # upper bound of the number of tiles of queries
    C: tl.constexpr,  # Constants
):
    """Write ``prepared``, and zeros to ``grads.q`` of tiles of queries that see no key.

    If IS_SELF, all samples with queries have keys, and nothing is done if no tile is listed.
    """
    if C.OVERLAP:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    STATS: tl.constexpr = 2 if dropout_ptr is None else 4
    num_work = num_tiles * C.H
    if C.IS_SELF:
        num_work = tl.where(tl.load(samples.tiles) > 0, num_work, 0)
    work = tl.program_id(0)
    while work < num_work:
        q_tile, head = work // C.H, work % C.H
        sample, begin, end, start = find_tile(samples.q_offsets, num_samples, q_tile, 1, C.BLOCK_M)
        kv_offsets_ptr = samples.kv_offsets + sample
        num_keys = tl.load(kv_offsets_ptr + 1) - tl.load(kv_offsets_ptr)
        row, count = begin + start, end - begin - start
        if (count > 0) & ((end - begin > C.SHORT) | (num_keys > C.SHORT)):
            grad_out = load_rows(
                grads.out, row, count, head, C.H * C.DV, C.DV, C.BLOCK_M, C.BLOCK_D
            )
            out = load_rows(outputs.out, row, count, head, C.H * C.DV, C.DV, C.BLOCK_M, C.BLOCK_D)
            i = tl.arange(0, C.BLOCK_M)
            stat = (row + i) * C.H + head
            # An infinite log-sum-exp makes the weights of rows beyond the sample zero.
            lse = tl.load(outputs.stats + stat, mask=i < count, other=float("inf"))
            delta = tl.sum(grad_out.to(tl.float32) * out.to(tl.float32), 1)
            ptrs = prepared.row_stats + work.to(tl.int64) * (STATS * C.BLOCK_M) + i
            tl.store(ptrs, lse)
            tl.store(ptrs + C.BLOCK_M, delta)
            if dropout_ptr is not None:
                draws = query_draws(dropout_ptr, stat).to(tl.float32, bitcast=True)
                tl.store(ptrs + 2 * C.BLOCK_M, draws)
            if grads.delta is not None:
                tl.store(grads.delta + stat, delta, mask=i < count)
            tl.store(prepared.semaphores + work, 0)
            num_visible = num_keys
            if C.CAUSAL:
                num_visible = tl.minimum(
                    num_visible, num_keys - count + tl.minimum(count, C.BLOCK_M)
                )
            if num_visible <= 0:
                zeros = tl.zeros([C.BLOCK_M, C.BLOCK_D], tl.float32)
                store_rows(grads.q, zeros, row, count, head, C.H * C.D, C.D, C.BLOCK_M, C.BLOCK_D)
        work += tl.num_programs(0)


_prepare = Launcher(prepare_kernel)


def prepare(
    outputs: FlashOutputs,
    grads: Gradients,
    samples: Samples,
    dropout: Tensor | None,
    is_self: bool,
    plan: Plan,
) -> Prepared:
    """Return statistics and semaphores for :func:`hopper_backward.backward`.

    Also sets ``grads.q`` to zero for tiles of queries that see no key and, with ``relative_bias``,
    writes ``grads.delta``. Short samples are skipped. ``is_self`` is true if all samples have as
    many queries as keys. The kernel waits for the previous kernel, which must list the tiles.
    """
    num_queries, H, _ = grads.q.shape
    num_samples = samples.q_offsets.numel() - 1
    num_tiles = num_queries // BLOCK_M + num_samples
    num_stats = 2 if dropout is None else 4  # a power of two; the last is not used
    row_stats = outputs.stats.new_empty(num_tiles * H, num_stats * BLOCK_M)
    semaphores = row_stats.new_empty(num_tiles * H, dtype=torch.int32)
    prepared = Prepared(row_stats, semaphores)
    device = semaphores.device
    _prepare(
        (min(num_tiles * H, PROGRAMS * devices.hopper_multiprocessors(device)),),
        (
            outputs, grads if plan.constants.R else grads._replace(delta=None), prepared, samples,
            dropout, num_samples, num_tiles,
        ),
        plan.constants.launch_arguments(
            SHORT=plan.max_short_rows,
            IS_SELF=is_self,
            BLOCK_M=BLOCK_M,
            num_warps=4,
            **overlap_options(devices.launches_overlap(device)),
        ),
    )  # fmt: skip
    return prepared
