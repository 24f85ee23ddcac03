"""Jagged flash attention: multi-head attention within each sample, tiled, with an online softmax.

With P = Σ Lq·Lk pairs (about half of them when causal), H heads and widths D and Dv:

    forward    2·H·P·(D + Dv) FLOPs
    backward   H·P·(8·D + 6·Dv) FLOPs: scores and dp once for dq and once for dk, dv

and each tile of one side reads the rows of the other side once. ``plan.py`` says which kernels take
a call:

    general          any call; backward has a kernel for dq and one for dk, dv, and no atomics
    general_short    short samples, each whole in one tile, so that nothing is computed twice
    hopper           half precision; backward computes scores once and adds up dq in turns
    hopper_short     short samples on Hopper

Scores may have biases, each for a head: by key row, by the bucket of the key's position or age, or
by the bucket of its distance to the query (``distance_bias.py``), the only one that ``hopper``
knows. Gradients of tables are summed by tile, then over the tiles.

Causal attention ends with a kernel that takes out what should not matter (``hidden_rows.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchrec_jagged_attn import devices, paths
from torchrec_jagged_attn.arguments import FlashArguments, FlashGradients, FlashOutputs
from torchrec_jagged_attn.kernels.common.launch import Launcher, overlap_options
from torchrec_jagged_attn.kernels.common.matmul import dot_precision
from torchrec_jagged_attn.kernels.common.softmax import LOG2E
from torchrec_jagged_attn.kernels.common.tile_list import list_tiles, most_tiles
from torchrec_jagged_attn.kernels.common.tma import is_addressable
from torchrec_jagged_attn.kernels.flash import (
    hidden_rows,
    hopper_backward,
    hopper_forward,
    hopper_prepare,
    hopper_short,
)
from torchrec_jagged_attn.kernels.flash.distance_bias import list_by_distance
from torchrec_jagged_attn.kernels.flash.general_backward import (
    grad_kv_kernel,
    grad_q_kernel,
    grad_relative_kernel,
)
from torchrec_jagged_attn.kernels.flash.general_forward import forward_kernel
from torchrec_jagged_attn.kernels.flash.general_short import (
    backward_short_kernel,
    forward_short_kernel,
)
from torchrec_jagged_attn.kernels.flash.plan import Call, Plan, plan_of

__all__ = ["backward", "forward"]

_forward = Launcher(forward_kernel)
_forward_short = Launcher(forward_short_kernel)
_grad_q = Launcher(grad_q_kernel)
_grad_kv = Launcher(grad_kv_kernel)
_grad_relative = Launcher(grad_relative_kernel)
_backward_short = Launcher(backward_short_kernel)


def forward(args: FlashArguments) -> FlashOutputs:
    """Attend."""
    q, v = args.q, args.v
    call = _Call(args)
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    stats = q.new_empty([2, *q.shape[:2]], dtype=torch.float32)
    if out.numel() == 0:
        return FlashOutputs(out, stats)
    plan = call.plan
    if paths.LOG:
        _log_choices("forward", plan)
    sizes = (stats[0].numel(), call.reach, call.factor)
    block = hopper_forward.BLOCK_M if plan.on_hopper else plan.forward["BLOCK_M"]
    tiles = call.list_tiles(block, of_keys=False)
    if plan.short_on_hopper:
        hopper_short.forward(*call.inputs, out, stats, *call.offsets, call.factor, args.causal)
    elif plan.most_short:
        _forward_short(
            (call.num_samples * q.shape[1],),
            (*call.inputs, out, stats, *call.offsets, stats[0].numel(), call.factor),
            call.shape | call.short_tile(),
        )
    if plan.on_hopper:
        hopper_forward.forward(
            *call.inputs, out, stats, call.by_distance, tiles, call.factor, args.causal, plan.width
        )
    else:
        _forward(
            ((tiles.shape[0] - 1) * q.shape[1],),
            (*call.inputs, *call.biases, out, stats, call.offsets[1], tiles, *sizes),
            call.shape | plan.tables | plan.forward,
        )
    if args.causal and v.shape[0]:
        hidden_rows.mend_outputs(
            call.inputs, call.biases, out, stats, call.offsets, call.reach, call.factor, block,
            call.shape | plan.tables,
        )  # fmt: skip
    return FlashOutputs(out, stats)


def backward(
    grad_out: Tensor,
    args: FlashArguments,
    outputs: FlashOutputs,
    grad_k: Tensor,
    grad_v: Tensor,
    needs_bias: bool = True,
) -> FlashGradients:
    """Gradients, that of ``bias`` if ``needs_bias``; of prior weights, of their logarithms.

    Those of ``k`` and ``v`` are written into ``grad_k`` and ``grad_v``, whose rows may be apart.
    """
    q, k = args.q, args.k
    bias, position_bias, age_bias, _, relative_bias = args.biases
    causal, scale = args.causal, args.scale
    out, stats = outputs
    grad_out = grad_out.contiguous()
    grads_of_rows = (grad_out, grad_k, grad_v)
    call = _Call(args, grads_of_rows)
    plan = call.plan
    if paths.LOG:
        _log_choices("backward", plan)
    grad_q, delta = q.new_empty(q.shape), torch.empty_like(stats[0])
    grad_bias = None
    if bias is not None and needs_bias:
        grad_bias = bias.new_empty(
            k.shape[0],
            q.shape[1],
            dtype=torch.float32 if plan.call.has_prior_weights else bias.dtype,
        )
    grad_tables = grad_relative = None
    strides = {"GRAD_K_STRIDE": grad_k.stride(0), "GRAD_V_STRIDE": grad_v.stride(0)}
    sizes = (delta.numel(), call.reach, call.factor, scale)
    prepared = ()
    if plan.on_hopper:
        tiles = call.list_tiles(hopper_backward.BLOCK_N, of_keys=True, together=plan.together)
        prepared = hopper_prepare.prepare(
            grad_out, out, stats, grad_q, None if relative_bias is None else delta, *call.offsets,
            tiles, causal, plan.width, plan.most_short, call.is_self,
        )  # fmt: skip
    else:
        tiles = call.list_tiles(plan.grad_q["BLOCK_M"], of_keys=False)
    if plan.short_on_hopper:
        hopper_short.backward(
            grad_out, *call.inputs, grad_q, grad_k, grad_v, *call.offsets, call.factor, scale,
            causal,
        )  # fmt: skip
    elif plan.most_short:
        _backward_short(
            (call.num_samples * k.shape[1],),
            (grad_out, *call.inputs, grad_q, grad_k, grad_v, *call.offsets, call.factor, scale),
            call.shape | strides | call.short_tile(),
        )
    if plan.on_hopper:
        hopper_backward.backward(
            *call.inputs, grad_q, *grads_of_rows, *prepared, call.by_distance, call.offsets[1],
            tiles, call.factor, scale, causal, plan.width,
        )  # fmt: skip
    elif q.shape[0]:
        _grad_q(
            ((tiles.shape[0] - 1) * q.shape[1],),
            (
                grad_out, *call.inputs, *call.biases, out, stats, grad_q, delta, call.offsets[1],
                tiles, *sizes,
            ),
            call.shape | plan.tables | plan.grad_q,
        )  # fmt: skip
    if relative_bias is not None:
        tiles = call.list_tiles(plan.grad_relative["BLOCK"], of_keys=False)
        num_programs = (tiles.shape[0] - 1) * q.shape[1]
        grad_relative = delta.new_zeros(num_programs, relative_bias.shape[0])
        if num_programs:
            _grad_relative(
                (num_programs,),
                (
                    grad_out, *call.inputs, *call.biases, stats, delta, grad_relative,
                    *call.offsets, tiles, *sizes[:-1],
                ),
                call.shape | plan.tables | plan.grad_relative,
            )  # fmt: skip
    if k.shape[0] and not plan.on_hopper:
        tiles = call.list_tiles(plan.grad_kv["BLOCK_N"], of_keys=True)
        num_tiles = tiles.shape[0] - 1
        num_buckets = plan.call.position_buckets, plan.call.age_buckets
        if any(num_buckets):
            grad_tables = delta.new_zeros(num_tiles, sum(num_buckets), q.shape[1])
        _grad_kv(
            (num_tiles * k.shape[1],),
            (
                grad_out, *call.inputs, *call.biases, stats, delta, grad_k, grad_v,
                grad_bias, grad_tables, call.offsets[1], tiles, *sizes,
            ),
            call.shape | plan.tables | strides | plan.grad_kv,
        )  # fmt: skip
    if causal and q.shape[0] and k.shape[0]:
        blocks = (
            (hopper_prepare.BLOCK_M, hopper_backward.BLOCK_N)
            if plan.on_hopper
            else (plan.grad_q["BLOCK_M"], plan.grad_kv["BLOCK_N"])
        )
        of_tables = (None, None) if grad_tables is None else (grad_tables, tiles)
        hidden_rows.mend_gradients(
            grad_out, call.inputs, call.biases, out, stats,
            delta if plan.call.biased and not plan.on_hopper else None, (grad_q, grad_k, grad_v),
            (grad_bias, *of_tables), call.offsets, call.reach, call.factor, scale, blocks,
            call.shape | plan.tables | strides,
        )  # fmt: skip
    grads = [None, None, None]
    if grad_tables is not None:
        of_position, of_age = grad_tables.sum(0).split(num_buckets)
        grads[:2] = of_position, of_age.clone()  # which share no memory
    if grad_relative is not None:
        by_tile = grad_relative.view(-1, q.shape[1], grad_relative.shape[1]).mT
        grads[2] = torch.sum(by_tile, 0, out=delta.new_empty(by_tile.shape[1:]))  # contiguous
    tables = (position_bias, age_bias, relative_bias)
    return FlashGradients(grad_q, grad_k, grad_v, grad_bias, *map(_as_table, grads, tables))


class _Call:
    """What both directions of one call have in common: contiguous inputs, the plan, the tiles."""

    def __init__(self, args: FlashArguments, grads: tuple[Tensor, ...] = ()) -> None:
        q, k, v, q_offsets, kv_offsets = args[:5]
        bias, position_bias, age_bias, timestamps, relative_bias = args.biases
        causal, scale = args.causal, args.scale
        self.num_samples = q_offsets.numel() - 1
        self.inputs = (_rows(q), _rows(k), _rows(v))
        self.offsets = (q_offsets.contiguous(), kv_offsets.contiguous())
        self.is_self = _is_same(q_offsets, kv_offsets)
        self.lists: dict[tuple[int, int], Tensor] = {}
        self.by_distance, self.reach = None, 0
        if relative_bias is not None:
            self.by_distance = list_by_distance(relative_bias, max(q.shape[0], k.shape[0]))
            self.reach = self.by_distance.shape[1] // 2
        biases = (bias, position_bias, age_bias, timestamps)
        self.biases = tuple(None if x is None else x.contiguous() for x in biases)
        self.biases += (self.by_distance,)
        self.factor = abs(scale) * LOG2E.value
        device, num_heads = q.device, q.shape[1]
        alike = Call(
            device=device,
            on_hopper=devices.hopper_multiprocessors(device) > 0,
            dtype=q.dtype,
            precision=dot_precision(q.dtype),
            shared_memory=devices.shared_memory(device),
            num_heads=num_heads,
            num_key_heads=k.shape[1],
            width=q.shape[2],
            value_width=v.shape[2],
            has_bias=bias is not None,
            has_prior_weights=args.biases.are_prior_weights,
            position_buckets=0 if position_bias is None else position_bias.shape[0],
            age_buckets=0 if age_bias is None else age_bias.shape[0],
            distance_buckets=0 if relative_bias is None else relative_bias.shape[0],
            causal=causal,
            negative_scale=scale < 0,
            counted=self.num_samples * num_heads < 2**31 - hopper_short.MOST_ROWS,
        )
        self.plan = plan_of(alike)
        if self.plan.on_hopper and not _in_boxes(*self.inputs, *grads):
            self.plan = plan_of(alike._replace(in_boxes=False))
        q_stride, k_stride, v_stride = (x.stride(0) for x in self.inputs)
        self.shape = self.plan.shape | {
            "Q_STRIDE": q_stride,
            "K_STRIDE": k_stride,
            "V_STRIDE": v_stride,
        }

    def short_tile(self) -> dict[str, Any]:
        """Tile of samples taken whole, by the kernel after the one that makes a list of tiles."""
        return self.plan.short | overlap_options(devices.launches_overlap(self.inputs[0].device))

    def list_tiles(self, block: int, of_keys: bool, together: int = 0) -> Tensor:
        """The tiles of queries, or of keys; each list is made once."""
        own, other = (1, 0) if of_keys and not self.is_self else (0, 1)
        if (block, own) not in self.lists:
            short = self.plan.most_short
            num_own, num_other = self.inputs[own].shape[0], self.inputs[other].shape[0]
            num_other = 0 if self.is_self else num_other
            capacity = most_tiles(num_own, num_other, self.num_samples, short, block)
            self.lists[block, own] = list_tiles(
                self.offsets[own], self.offsets[other], capacity, short, block, together
            )
        return self.lists[block, own]


def _log_choices(direction: str, plan: Plan) -> None:
    paths.log_choice(f"jagged_flash_attention {direction}, short samples", plan.short_samples)
    paths.log_choice(f"jagged_flash_attention {direction}, long samples", plan.long_samples)


def _in_boxes(*tensors: Tensor) -> bool:
    """Whether the tensor memory accelerator can address all of them, and none is empty."""
    return all(x.shape[0] > 0 and is_addressable(x) for x in tensors)


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two vectors of one size are the same memory, read alike."""
    return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.stride() == b.stride()


def _rows(x: Tensor) -> Tensor:
    """``[L, H, D]`` as it is, if the elements of a row are next to each other, else a copy."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _as_table(grad: Tensor | None, table: Tensor | None) -> Tensor | None:
    if table is None:
        return None
    return table.new_zeros(table.shape) if grad is None else grad.to(table.dtype)
