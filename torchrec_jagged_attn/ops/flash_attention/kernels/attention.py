"""Launches of jagged flash attention: multi-head attention within each sample.

With P = Σ Lq·Lk pairs (about half of them when causal), H heads and widths D and Dv:

    forward    2·H·P·(D + Dv) FLOPs
    backward   H·P·(8·D + 6·Dv) FLOPs: scores and dp once for dq and once for dk, dv

and each tile of one side reads the rows of the other side once. With a window, P includes all pairs
of partly visible tiles. ``plan.py`` chooses the kernel variants:

    general          any call; backward has a kernel for dq and one for dk, dv, and no atomics
    general_short    short samples, each in one tile, so that nothing is computed twice
    hopper           half precision; backward computes scores once and orders dq by semaphores
    hopper_short     short samples on Hopper

Rows behind the last offset are not read. The kernel that lists tiles sets their outputs and
gradients to zero.

Scores may have biases per head: by key row, by the bucket of the key's position or age, or by the
bucket of its distance to the query (``distance_bias.py``). ``hopper`` and ``general_short`` only
support the latter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchrec_jagged_attn.base import devices
from torchrec_jagged_attn.ops import dispatch
from torchrec_jagged_attn.ops.device.bias_records import Biases
from torchrec_jagged_attn.ops.device.matmul import product_precision
from torchrec_jagged_attn.ops.device.softmax import LOG2E
from torchrec_jagged_attn.ops.device.tile_list import RowsBehind, list_tiles, max_tiles
from torchrec_jagged_attn.ops.device.tma import is_tma_compatible
from torchrec_jagged_attn.ops.flash_attention.arguments import (
    FlashArguments,
    FlashGradients,
    FlashOutputs,
    new_outputs,
)
from torchrec_jagged_attn.ops.flash_attention.kernels import (
    hopper_backward,
    hopper_forward,
    hopper_prepare,
    hopper_short,
)
from torchrec_jagged_attn.ops.flash_attention.kernels.distance_bias import bias_by_distance
from torchrec_jagged_attn.ops.flash_attention.kernels.general_backward import (
    grad_kv_kernel,
    grad_q_kernel,
    grad_relative_kernel,
)
from torchrec_jagged_attn.ops.flash_attention.kernels.general_forward import forward_kernel
from torchrec_jagged_attn.ops.flash_attention.kernels.general_short import (
    backward_short_kernel,
    forward_short_kernel,
)
from torchrec_jagged_attn.ops.flash_attention.kernels.records import Gradients, Inputs, Samples
from torchrec_jagged_attn.ops.flash_attention.plan import Call, Plan, plan_of
from torchrec_jagged_attn.ops.launch import Launcher, overlap_options

_forward = Launcher(forward_kernel)
_forward_short = Launcher(forward_short_kernel)
_grad_q = Launcher(grad_q_kernel)
_grad_kv = Launcher(grad_kv_kernel)
_grad_relative = Launcher(grad_relative_kernel)
_backward_short = Launcher(backward_short_kernel)


def forward(args: FlashArguments) -> FlashOutputs:
    """Compute the output and the softmax statistics."""
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
    block = hopper_forward.BLOCK_M if plan.long_on_hopper else plan.forward["BLOCK_M"]
    call.cleared_queries = outputs.out, outputs.stats.unsqueeze(-1)
    samples = call.list_tiles(block, tiles_of_keys=False)
    if plan.short_on_hopper:
        hopper_short.forward(
            call.inputs, outputs, samples, call.window, call.factor, plan.constants
        )
    elif plan.max_short_rows:
        for tile in plan.short:
            _forward_short(
                (call.num_samples * num_heads,),
                (
                    call.inputs, call.biases, outputs, samples, num_stats, call.max_distance,
                    call.window, call.factor,
                ),
                call.short_launch_arguments(tile),
            )  # fmt: skip
    if plan.long_on_hopper:
        hopper_forward.forward(
            call.inputs, call.biases.by_distance, call.biases.dropout, outputs, samples.tiles,
            call.window, call.factor, plan.constants,
        )  # fmt: skip
    else:
        sizes = (num_stats, call.max_distance, call.window, call.factor)
        _forward(
            (_capacity(samples) * num_heads,),
            (call.inputs, call.biases, outputs, samples, *sizes),
            call.constants.launch_arguments(**plan.forward),
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
    """Compute all gradients but of prior weights, and the gradient of ``bias`` if ``needs_bias``.

    With prior weights, the latter is in fp32: it is also the gradient of their logarithms, by head.
    The gradients of ``k`` and ``v`` are written into ``grad_k`` and ``grad_v``, whose rows may be
    strided.
    """
    q, k = args.q, args.k
    grad_out = grad_out.contiguous()
    call = _Call(args, (grad_out, grad_k, grad_v))
    plan = call.plan
    if dispatch.LOG:
        _log_choices("backward", plan)
    delta = torch.empty_like(outputs.stats[0])
    grads = Gradients(grad_out, delta, q.new_empty(q.shape), grad_k, grad_v)
    if plan.call.has_bias and needs_bias:
        dtype = torch.float32
        if args.bias is not None and args.biases.prior_weights is None:
            dtype = args.bias.dtype
        grads = grads._replace(bias=q.new_empty(k.shape[0], q.shape[1], dtype=dtype))
        call.cleared_keys = (grads.bias.unsqueeze(-1),)
    call.cleared_queries, call.cleared_keys = (grads.q,), (grad_k, grad_v, *call.cleared_keys)
    if not call.num_samples:
        for grad in (*call.cleared_queries, *call.cleared_keys):
            grad.zero_()
    elif plan.long_on_hopper:
        _backward_on_hopper(call, outputs, grads)
    else:
        grads = _backward_general(call, outputs, grads)
    if args.relative_bias is not None and call.num_samples:
        grads = _backward_relative_bias(call, outputs, grads)
    return FlashGradients(grads.q, grads.k, grads.v, grads.bias, None, *_table_grads(args, grads))


def _backward_on_hopper(call: _Call, outputs: FlashOutputs, grads: Gradients) -> None:
    plan = call.plan
    samples = call.list_tiles(
        hopper_backward.BLOCK_N, tiles_of_keys=True, rows_per_group=plan.rows_per_group
    )
    by_distance, dropout = call.biases.by_distance, call.biases.dropout
    prepared = hopper_prepare.prepare(outputs, grads, samples, dropout, call.is_self, plan)
    _backward_of_short(call, grads, samples)
    hopper_backward.backward(
        call.inputs, by_distance, dropout, grads, prepared, samples, call.window, call.factor,
        call.grad_scale, plan.constants,
    )  # fmt: skip


def _backward_general(call: _Call, outputs: FlashOutputs, grads: Gradients) -> Gradients:
    """Return ``grads`` with the gradients of ``position_bias`` and ``age_bias`` added."""
    plan, q, k = call.plan, call.args.q, call.args.k
    sizes = (grads.delta.numel(), call.max_distance, call.window, call.factor, call.grad_scale)
    samples = call.list_tiles(plan.grad_q["BLOCK_M"], tiles_of_keys=False)
    _backward_of_short(call, grads, samples)
    if q.shape[0]:
        _grad_q(
            (_capacity(samples) * q.shape[1],),
            (call.inputs, call.biases, outputs, grads, samples, *sizes),
            call.constants.launch_arguments(**plan.grad_q),
        )
    if k.shape[0]:
        samples = call.list_tiles(plan.grad_kv["BLOCK_N"], tiles_of_keys=True)
        num_tiles = _capacity(samples)
        num_buckets = plan.call.position_buckets + plan.call.age_buckets
        if num_buckets:
            tables = grads.delta.new_zeros(num_tiles, num_buckets, q.shape[1])
            grads = grads._replace(tables=tables)
        _grad_kv(
            (num_tiles * k.shape[1],),
            (call.inputs, call.biases, outputs, grads, samples, *sizes),
            call.constants.launch_arguments(**plan.grad_kv),
        )
    return grads


def _backward_of_short(call: _Call, grads: Gradients, samples: Samples) -> None:
    factor, scale = call.factor, call.grad_scale
    if call.plan.short_on_hopper:
        hopper_short.backward(
            call.inputs, grads, samples, call.window, factor, scale, call.plan.constants
        )
    elif call.plan.max_short_rows:
        sizes = call.max_distance, call.window, factor, scale
        for tile in call.plan.short:
            _backward_short(
                (call.num_samples * call.args.k.shape[1],),
                (call.inputs, call.biases, grads, samples, *sizes),
                call.short_launch_arguments(tile),
            )


def _backward_relative_bias(call: _Call, outputs: FlashOutputs, grads: Gradients) -> Gradients:
    """Return ``grads`` with the gradient of ``relative_bias`` added."""
    constants = call.plan.grad_relative
    samples = call.list_tiles(constants["BLOCK_M"], tiles_of_keys=False, short=0)
    num_programs = _capacity(samples) * call.args.q.shape[1]
    grads = grads._replace(relative=grads.delta.new_zeros(num_programs, call.constants.R))
    if num_programs:
        _grad_relative(
            (num_programs,),
            (
                call.inputs, call.biases, outputs, grads, samples, grads.delta.numel(),
                call.max_distance, call.window, call.factor, call.grad_scale,
            ),
            call.constants.launch_arguments(**constants),
        )  # fmt: skip
    return grads


def _table_grads(args: FlashArguments, grads: Gradients) -> Iterator[Tensor | None]:
    """Sum the gradients of the bias tables over tiles; ``None`` for absent tables."""
    _, position_bias, age_bias, *_ = args.biases
    position_grad = age_grad = relative_grad = None
    if grads.tables is not None:
        num_positions = 0 if position_bias is None else position_bias.shape[0]
        sums = grads.tables.sum(0)
        position_grad = sums[:num_positions]
        age_grad = sums[num_positions:].clone()  # outputs of an op may not share memory
    if grads.relative is not None:
        by_tile = grads.relative.view(-1, args.q.shape[1], grads.relative.shape[1]).mT
        sums = grads.delta.new_empty(by_tile.shape[1:])
        relative_grad = torch.sum(by_tile, 0, out=sums)  # contiguous
    tables = (position_bias, age_bias, args.relative_bias)
    return map(_as_table, (position_grad, age_grad, relative_grad), tables)


class _Call:
    """Inputs, plan and lists of tiles of one call, in forward or backward."""

    def __init__(self, args: FlashArguments, grads: tuple[Tensor, ...] = ()) -> None:
        q, k, v, q_offsets, kv_offsets = args[:5]
        biases, relative_bias = args.biases, args.relative_bias
        prior_weights, position_bias, age_bias, _, _, dropout = biases
        self.args = args
        self.num_samples = q_offsets.numel() - 1
        self.inputs = Inputs(_rows(q), _rows(k), _rows(v))
        self.samples = Samples(q_offsets.contiguous(), kv_offsets.contiguous())
        self.is_self = _is_same(q_offsets, kv_offsets)
        # By tile size, tiled side, and maximum rows of samples that are not listed
        self.lists: dict[tuple[int, int, int], Samples] = {}
        # The first kernel that lists tiles sets rows of these tensors to zero.
        self.cleared_queries: tuple[Tensor, ...] = ()
        self.cleared_keys: tuple[Tensor, ...] = ()
        by_distance, self.max_distance = None, 0
        if relative_bias is not None:
            by_distance = bias_by_distance(relative_bias, max(q.shape[0], k.shape[0]))
            self.max_distance = by_distance.shape[1] // 2
        *contiguous, bias = (None if x is None else x.contiguous() for x in (*biases, args.bias))
        self.biases = Biases(*contiguous, bias=bias, by_distance=by_distance)
        self.factor = abs(args.scale) * LOG2E.value
        self.window = min(args.window, 2**31 - 1) or None
        # A single key has a constant weight: the gradient of its score is exactly zero.
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
            has_bias=bias is not None or prior_weights is not None,
            has_dropout=dropout is not None,
            position_buckets=0 if position_bias is None else position_bias.shape[0],
            age_buckets=0 if age_bias is None else age_bias.shape[0],
            distance_buckets=0 if relative_bias is None else relative_bias.shape[0],
            causal=args.causal,
            negative_scale=args.scale < 0,
            fits_int32=self.num_samples * num_heads < 2**31 - hopper_short.MAX_ROWS,
        )
        self.plan = plan_of(call)
        if self.plan.long_on_hopper and not _are_tma_compatible(*self.inputs, *grads):
            self.plan = plan_of(call._replace(tma_compatible=False))
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

    def short_launch_arguments(self, tile: dict[str, Any]) -> dict[str, Any]:
        """Return the launch arguments of ``general_short``, which follows the list of tiles."""
        overlap = overlap_options(devices.launches_overlap(self.inputs.q.device))
        return self.constants.launch_arguments(**tile, **overlap)

    def list_tiles(
        self, block: int, tiles_of_keys: bool, rows_per_group: int = 0, short: int | None = None
    ) -> Samples:
        """Return the samples with a list of tiles of queries or keys. Each list is built once.

        Samples of at most ``short`` rows are not listed, by default the short samples of the plan.
        """
        tiled, other = (1, 0) if tiles_of_keys and not self.is_self else (0, 1)
        short = self.plan.max_short_rows if short is None else short
        if (block, tiled, short) not in self.lists:
            num_tiled, num_other = self.inputs[tiled].shape[0], self.inputs[other].shape[0]
            num_other = 0 if self.is_self else num_other
            capacity = max_tiles(num_tiled, num_other, self.num_samples, short, block)
            cleared = [RowsBehind(x, not tiles_of_keys) for x in self.cleared_queries]
            cleared += [RowsBehind(x, tiles_of_keys) for x in self.cleared_keys]
            self.cleared_queries = self.cleared_keys = ()
            tiles = list_tiles(
                self.samples[tiled], self.samples[other], capacity, short, block, rows_per_group,
                cleared,
            )  # fmt: skip
            self.lists[block, tiled, short] = self.samples._replace(tiles=tiles)
        return self.lists[block, tiled, short]


def _capacity(samples: Samples) -> int:
    """Return the capacity of the list of tiles."""
    return samples.tiles.shape[0] - 1


def _log_choices(direction: str, plan: Plan) -> None:
    dispatch.log_choice(f"jagged_flash_attention {direction}, short samples", plan.short_samples)
    dispatch.log_choice(f"jagged_flash_attention {direction}, long samples", plan.long_samples)


def _are_tma_compatible(*tensors: Tensor) -> bool:
    """Return whether the tensor memory accelerator supports ``tensors``, and none is empty."""
    return all(x.shape[0] > 0 and is_tma_compatible(x) for x in tensors)


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Return whether two vectors of the same size have the same memory, dtype and stride."""
    return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.stride() == b.stride()


def _rows(x: Tensor) -> Tensor:
    """Return ``x`` ``[L, H, D]``, or a copy if the elements of a row are not contiguous."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _as_table(grad: Tensor | None, table: Tensor | None) -> Tensor | None:
    if table is None:
        return None
    return table.new_zeros(table.shape) if grad is None else grad.to(table.dtype)
