"""Launches of jagged flash attention: multi-head attention within each sample.

With P = Σ Lq·Lk pairs (about half of them when causal), H heads and widths D and Dv:

    forward    2·H·P·(D + Dv) FLOPs
    backward   H·P·(8·D + 6·Dv) FLOPs: scores and dp once for dq and once for dk, dv

and each tile of one side reads the rows of the other side once. With a window, P counts visible
pairs, plus those in partly visible tiles. ``plan.py`` chooses the kernel variants:

    general          any call; backward has a kernel for dq and one for dk, dv, and no atomics
    general_short    short samples, each whole in one tile, so that nothing is computed twice
    hopper           half precision; backward computes scores once and orders dq by semaphores
    hopper_short     short samples on Hopper

Rows behind the last offset are not read. The kernel that lists tiles sets their outputs and
gradients to zero.

Scores may have biases per head: by key row, by the bucket of the key's position or age, or by the
bucket of its distance to the query (``distance_bias.py``), the only one that ``hopper`` supports.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchrec_jagged_attn import devices
from torchrec_jagged_attn.attention.kernels.records import Biases
from torchrec_jagged_attn.flash_attention.arguments import (
    FlashArguments,
    FlashGradients,
    FlashOutputs,
    new_outputs,
)
from torchrec_jagged_attn.flash_attention.kernels import (
    hopper_backward,
    hopper_forward,
    hopper_prepare,
    hopper_short,
)
from torchrec_jagged_attn.flash_attention.kernels.distance_bias import list_by_distance
from torchrec_jagged_attn.flash_attention.kernels.general_backward import (
    grad_kv_kernel,
    grad_q_kernel,
    grad_relative_kernel,
)
from torchrec_jagged_attn.flash_attention.kernels.general_forward import forward_kernel
from torchrec_jagged_attn.flash_attention.kernels.general_short import (
    backward_short_kernel,
    forward_short_kernel,
)
from torchrec_jagged_attn.flash_attention.kernels.records import Gradients, Inputs, Samples
from torchrec_jagged_attn.flash_attention.plan import Call, Plan, plan_of
from torchrec_jagged_attn.runtime import dispatch
from torchrec_jagged_attn.runtime.kernels.matmul import product_precision
from torchrec_jagged_attn.runtime.kernels.softmax import LOG2E
from torchrec_jagged_attn.runtime.kernels.tile_list import RowsBehind, list_tiles, most_tiles
from torchrec_jagged_attn.runtime.kernels.tma import is_addressable
from torchrec_jagged_attn.runtime.launch import Launcher, overlap_options

_forward = Launcher(forward_kernel)
_forward_short = Launcher(forward_short_kernel)
_grad_q = Launcher(grad_q_kernel)
_grad_kv = Launcher(grad_kv_kernel)
_grad_relative = Launcher(grad_relative_kernel)
_backward_short = Launcher(backward_short_kernel)


def forward(args: FlashArguments) -> FlashOutputs:
    """Attend."""
    call, outputs = _Call(args), new_outputs(args)
    if outputs.out.numel() == 0:
        return outputs
    if not call.num_samples:
        for x in outputs:
            x.zero_()
        return outputs
    plan, num_heads, num_stats = call.plan, args.q.shape[1], outputs.stats[0].numel()
    if dispatch.LOG:
        _log_choices("forward", plan)
    block = hopper_forward.BLOCK_M if plan.on_hopper else plan.forward["BLOCK_M"]
    call.cleared_queries = outputs.out, outputs.stats.unsqueeze(-1)
    samples = call.list_tiles(block, of_keys=False)
    if plan.short_on_hopper:
        hopper_short.forward(
            call.inputs, outputs, samples, call.window, call.factor, plan.constants
        )
    elif plan.most_short:
        _forward_short(
            (call.num_samples * num_heads,),
            (
                call.inputs, outputs, samples, call.biases.dropout, num_stats, call.window,
                call.factor,
            ),
            call.for_short(),
        )  # fmt: skip
    if plan.on_hopper:
        hopper_forward.forward(
            call.inputs, call.biases.by_distance, outputs, samples.tiles, call.window, call.factor,
            plan.constants,
        )  # fmt: skip
    else:
        sizes = (num_stats, call.reach, call.window, call.factor)
        _forward(
            (_capacity(samples) * num_heads,),
            (call.inputs, call.biases, outputs, samples, *sizes),
            call.constants.of_launch(**plan.forward),
        )
    return outputs


def backward(
    grad_out: Tensor,
    args: FlashArguments,
    outputs: FlashOutputs,
    grad_k: Tensor,
    grad_v: Tensor,
    needs_bias: bool = True,
) -> FlashGradients:
    """Gradients; that of ``bias`` if ``needs_bias``, with prior weights of their logarithms.

    Those of ``k`` and ``v`` are written to ``grad_k`` and ``grad_v``, which may be strided.
    """
    q, k = args.q, args.k
    grad_out = grad_out.contiguous()
    call = _Call(args, (grad_out, grad_k, grad_v))
    plan = call.plan
    if dispatch.LOG:
        _log_choices("backward", plan)
    delta = torch.empty_like(outputs.stats[0])
    grads = Gradients(grad_out, delta, q.new_empty(q.shape), grad_k, grad_v)
    bias = args.biases.bias
    if bias is not None and needs_bias:
        dtype = torch.float32 if plan.call.has_prior_weights else bias.dtype
        grads = grads._replace(bias=bias.new_empty(k.shape[0], q.shape[1], dtype=dtype))
        call.cleared_keys = (grads.bias.unsqueeze(-1),)
    call.cleared_queries, call.cleared_keys = (grads.q,), (grad_k, grad_v, *call.cleared_keys)
    if not call.num_samples:
        for grad in (*call.cleared_queries, *call.cleared_keys):
            grad.zero_()
    elif plan.on_hopper:
        _backward_on_hopper(call, outputs, grads)
    else:
        grads = _backward_in_general(call, outputs, grads)
    if args.relative_bias is not None and call.num_samples:
        grads = _backward_by_distance(call, outputs, grads)
    return FlashGradients(grads.q, grads.k, grads.v, grads.bias, *_grads_of_tables(args, grads))


def _backward_on_hopper(call: _Call, outputs: FlashOutputs, grads: Gradients) -> None:
    plan = call.plan
    samples = call.list_tiles(hopper_backward.BLOCK_N, of_keys=True, together=plan.together)
    prepared = hopper_prepare.prepare(outputs, grads, samples, call.is_self, plan)
    _backward_of_short(call, grads, samples)
    hopper_backward.backward(
        call.inputs, call.biases.by_distance, grads, prepared, samples, call.window, call.factor,
        call.grad_scale, plan.constants,
    )  # fmt: skip


def _backward_in_general(call: _Call, outputs: FlashOutputs, grads: Gradients) -> Gradients:
    """``grads`` with those of tables by position and age."""
    plan, q, k = call.plan, call.args.q, call.args.k
    sizes = (grads.delta.numel(), call.reach, call.window, call.factor, call.grad_scale)
    samples = call.list_tiles(plan.grad_q["BLOCK_M"], of_keys=False)
    _backward_of_short(call, grads, samples)
    if q.shape[0]:
        _grad_q(
            (_capacity(samples) * q.shape[1],),
            (call.inputs, call.biases, outputs, grads, samples, *sizes),
            call.constants.of_launch(**plan.grad_q),
        )
    if k.shape[0]:
        samples = call.list_tiles(plan.grad_kv["BLOCK_N"], of_keys=True)
        num_tiles = _capacity(samples)
        num_buckets = plan.call.position_buckets + plan.call.age_buckets
        if num_buckets:
            tables = grads.delta.new_zeros(num_tiles, num_buckets, q.shape[1])
            grads = grads._replace(tables=tables)
        _grad_kv(
            (num_tiles * k.shape[1],),
            (call.inputs, call.biases, outputs, grads, samples, *sizes),
            call.constants.of_launch(**plan.grad_kv),
        )
    return grads


def _backward_of_short(call: _Call, grads: Gradients, samples: Samples) -> None:
    factor, scale = call.factor, call.grad_scale
    if call.plan.short_on_hopper:
        hopper_short.backward(
            call.inputs, grads, samples, call.window, factor, scale, call.plan.constants
        )
    elif call.plan.most_short:
        _backward_short(
            (call.num_samples * call.args.k.shape[1],),
            (call.inputs, grads, samples, call.biases.dropout, call.window, factor, scale),
            call.for_short(),
        )


def _backward_by_distance(call: _Call, outputs: FlashOutputs, grads: Gradients) -> Gradients:
    """``grads`` with that of the table by distance."""
    constants = call.plan.grad_relative
    samples = call.list_tiles(constants["BLOCK_M"], of_keys=False)
    num_programs = _capacity(samples) * call.args.q.shape[1]
    grads = grads._replace(relative=grads.delta.new_zeros(num_programs, call.constants.R))
    if num_programs:
        _grad_relative(
            (num_programs,),
            (
                call.inputs, call.biases, outputs, grads, samples, grads.delta.numel(), call.reach,
                call.window, call.factor, call.grad_scale,
            ),
            call.constants.of_launch(**constants),
        )  # fmt: skip
    return grads


def _grads_of_tables(args: FlashArguments, grads: Gradients) -> Iterator[Tensor | None]:
    """Gradients of the tables, summed over tiles; ``None`` without a table."""
    _, position_bias, age_bias, *_ = args.biases
    of_position = of_age = of_relative = None
    if grads.tables is not None:
        num_positions = 0 if position_bias is None else position_bias.shape[0]
        sums = grads.tables.sum(0)
        of_position, of_age = sums[:num_positions], sums[num_positions:].clone()  # no memory shared
    if grads.relative is not None:
        by_tile = grads.relative.view(-1, args.q.shape[1], grads.relative.shape[1]).mT
        sums = grads.delta.new_empty(by_tile.shape[1:])
        of_relative = torch.sum(by_tile, 0, out=sums)  # contiguous
    tables = (position_bias, age_bias, args.relative_bias)
    return map(_as_table, (of_position, of_age, of_relative), tables)


class _Call:
    """The inputs, plan and lists of tiles of one call, for either direction."""

    def __init__(self, args: FlashArguments, grads: tuple[Tensor, ...] = ()) -> None:
        q, k, v, q_offsets, kv_offsets = args[:5]
        biases, relative_bias = args.biases, args.relative_bias
        bias, position_bias, age_bias, _, _, dropout = biases
        self.args = args
        self.num_samples = q_offsets.numel() - 1
        self.inputs = Inputs(_rows(q), _rows(k), _rows(v))
        self.samples = Samples(q_offsets.contiguous(), kv_offsets.contiguous())
        self.is_self = _is_same(q_offsets, kv_offsets)
        self.lists: dict[tuple[int, int], Samples] = {}
        # Tensors of rows that are set to zero behind the last offset, by the first list of tiles.
        self.cleared_queries: tuple[Tensor, ...] = ()
        self.cleared_keys: tuple[Tensor, ...] = ()
        by_distance, self.reach = None, 0
        if relative_bias is not None:
            by_distance = list_by_distance(relative_bias, max(q.shape[0], k.shape[0]))
            self.reach = by_distance.shape[1] // 2
        contiguous = (None if x is None else x.contiguous() for x in biases)
        self.biases = Biases(*contiguous, by_distance=by_distance)
        self.factor = abs(args.scale) * LOG2E.value
        self.window = min(args.window, 2**31 - 1) or None
        # The weight of a single key is constant: the gradient of its score is exactly zero.
        self.grad_scale = 0.0 if args.window == 1 else args.scale
        device, num_heads = q.device, q.shape[1]
        call = Call(
            device=device,
            on_hopper=devices.hopper_multiprocessors(device) > 0,
            dtype=q.dtype,
            precision=product_precision(q.dtype),
            shared_memory=devices.shared_memory(device),
            num_heads=num_heads,
            num_key_heads=k.shape[1],
            width=q.shape[2],
            value_width=v.shape[2],
            has_bias=bias is not None,
            has_prior_weights=biases.are_prior_weights,
            has_dropout=dropout is not None,
            position_buckets=0 if position_bias is None else position_bias.shape[0],
            age_buckets=0 if age_bias is None else age_bias.shape[0],
            distance_buckets=0 if relative_bias is None else relative_bias.shape[0],
            causal=args.causal,
            negative_scale=args.scale < 0,
            counted=self.num_samples * num_heads < 2**31 - hopper_short.MOST_ROWS,
        )
        self.plan = plan_of(call)
        if self.plan.on_hopper and not _in_boxes(*self.inputs, *grads):
            self.plan = plan_of(call._replace(in_boxes=False))
        self.constants = self.plan.constants._replace(
            Q_STRIDE=self.inputs.q.stride(0),
            K_STRIDE=self.inputs.k.stride(0),
            V_STRIDE=self.inputs.v.stride(0),
        )
        if grads:
            _, grad_k, grad_v = grads
            self.constants = self.constants._replace(
                GRAD_K_STRIDE=grad_k.stride(0), GRAD_V_STRIDE=grad_v.stride(0)
            )

    def for_short(self) -> dict[str, Any]:
        """Constants of the kernel of short samples, launched after that of the list."""
        overlap = overlap_options(devices.launches_overlap(self.inputs.q.device))
        return self.constants.of_launch(**self.plan.short, **overlap)

    def list_tiles(self, block: int, of_keys: bool, together: int = 0) -> Samples:
        """Samples with the list of tiles of queries, or of keys; each list is built once."""
        own, other = (1, 0) if of_keys and not self.is_self else (0, 1)
        if (block, own) not in self.lists:
            short = self.plan.most_short
            num_own, num_other = self.inputs[own].shape[0], self.inputs[other].shape[0]
            num_other = 0 if self.is_self else num_other
            capacity = most_tiles(num_own, num_other, self.num_samples, short, block)
            cleared = [RowsBehind(x, not of_keys) for x in self.cleared_queries]
            cleared += [RowsBehind(x, of_keys) for x in self.cleared_keys]
            self.cleared_queries = self.cleared_keys = ()
            tiles = list_tiles(
                self.samples[own], self.samples[other], capacity, short, block, together, cleared
            )
            self.lists[block, own] = self.samples._replace(tiles=tiles)
        return self.lists[block, own]


def _capacity(samples: Samples) -> int:
    """The capacity of the list of tiles."""
    return samples.tiles.shape[0] - 1


def _log_choices(direction: str, plan: Plan) -> None:
    dispatch.log_choice(f"jagged_flash_attention {direction}, short samples", plan.short_samples)
    dispatch.log_choice(f"jagged_flash_attention {direction}, long samples", plan.long_samples)


def _in_boxes(*tensors: Tensor) -> bool:
    """Whether the tensor memory accelerator can address all ``tensors``, and none is empty."""
    return all(x.shape[0] > 0 and is_addressable(x) for x in tensors)


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two vectors of one size are the same memory, dtype and stride."""
    return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.stride() == b.stride()


def _rows(x: Tensor) -> Tensor:
    """``x`` ``[L, H, D]`` itself, if the elements of a row are contiguous, else a copy."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _as_table(grad: Tensor | None, table: Tensor | None) -> Tensor | None:
    if table is None:
        return None
    return table.new_zeros(table.shape) if grad is None else grad.to(table.dtype)
