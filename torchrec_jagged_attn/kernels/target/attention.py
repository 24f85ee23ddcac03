"""Target attention: a few query rows per sample over that sample's history rows.

Keys and values are the same rows ``x``. With R query rows per sample (targets × heads, in this
order), N history rows of width D and e bytes an element:

    forward    reads x once per block of query rows: N·D·e bytes, 4·N·R·D FLOPs
    backward   reads x and writes dx once: 2·N·D·e bytes, 10·N·R·D FLOPs, where one block holds the
               query rows of a sample, in half precision or by the kernels of ``warp_parts.py``;
               else reads x once more for each block: 14·N·R·D FLOPs

Histories are cut into chunks, so that a long one is spread over the GPU; the sums of a sample's
chunks are brought together in their order: by a kernel of their own or, of few query rows, by the
program that ends last of them, which a counter tells. Nothing else is done by atomics, and where a
sample is cut depends on itself alone.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from torchrec_jagged_attn import paths
from torchrec_jagged_attn.arguments import (
    Biases,
    TargetArguments,
    TargetGradients,
    TargetOutputs,
)
from torchrec_jagged_attn.kernels.common.launch import Launcher, overlap_options
from torchrec_jagged_attn.kernels.common.matmul import product_precision
from torchrec_jagged_attn.kernels.common.tma import END, jagged_rows
from torchrec_jagged_attn.kernels.target import schedule
from torchrec_jagged_attn.kernels.target.few_warps_backward import (
    backward_kernel as few_warps_backward_kernel,
)
from torchrec_jagged_attn.kernels.target.few_warps_forward import (
    forward_kernel as few_warps_forward_kernel,
)
from torchrec_jagged_attn.kernels.target.general_backward import (
    grad_history_kernel,
    grad_query_kernel,
)
from torchrec_jagged_attn.kernels.target.general_combine import (
    combine_gradients_kernel,
    combine_outputs_kernel,
    sum_tables_kernel,
)
from torchrec_jagged_attn.kernels.target.general_forward import forward_kernel
from torchrec_jagged_attn.kernels.target.one_warp_backward import (
    backward_kernel as one_warp_backward_kernel,
)
from torchrec_jagged_attn.kernels.target.one_warp_forward import (
    forward_kernel as one_warp_forward_kernel,
)
from torchrec_jagged_attn.kernels.target.plan import (
    DENSE,
    JAGGED,
    SHARED,
    Plan,
    Problem,
    plan_of,
)
from torchrec_jagged_attn.kernels.target.warpgroup_backward import (
    backward_kernel as warpgroup_backward_kernel,
)
from torchrec_jagged_attn.kernels.target.warpgroup_forward import (
    forward_kernel as warpgroup_forward_kernel,
)

__all__ = ["backward", "forward"]

_forward = Launcher(forward_kernel)
_combine_outputs = Launcher(combine_outputs_kernel)
_grad_query = Launcher(grad_query_kernel)
_grad_history = Launcher(grad_history_kernel)
_combine_gradients = Launcher(combine_gradients_kernel)
_sum_tables = Launcher(sum_tables_kernel)
_list_slots = Launcher(schedule.list_slots_kernel)
_one_warp_forward = Launcher(one_warp_forward_kernel)
_one_warp_backward = Launcher(one_warp_backward_kernel)
_few_warps_forward = Launcher(few_warps_forward_kernel)
_few_warps_backward = Launcher(few_warps_backward_kernel)
_warpgroup_forward = Launcher(warpgroup_forward_kernel)
_warpgroup_backward = Launcher(warpgroup_backward_kernel)


def forward(args: TargetArguments) -> TargetOutputs:
    """Attend."""
    query = args.query
    shape = list(query.shape)
    if args.query_offsets is None:
        shape[0] = args.offsets.numel() - 1
    out = query.new_empty(shape)
    is_rounded = args.for_backward and query.element_size() == 2
    residual = query.new_empty(shape if is_rounded else [0])
    stats = query.new_empty([2, *shape[:-1]], dtype=torch.float32)
    outputs = TargetOutputs(out, residual, stats)
    if out.numel() == 0:
        return outputs
    call = _Call(args, backward=False)
    plan, num_slots = call.plan, call.num_slots
    if paths.LOG:
        paths.log_choice("jagged_target_attention forward", plan.choice)
    sums = stats.new_empty(num_slots, plan.rows_of_slot, plan.problem.width)
    sums_stats = stats.new_empty(num_slots, 2, plan.rows_of_slot)
    residual_or_none = residual if is_rounded else None
    written = (out, residual_or_none, stats, sums, sums_stats)
    queries = _aligned(call.inputs[0]) if plan.path == "warpgroup" else call.inputs[0]
    listed = (call.list_slots(),) if plan.listed else ()  # the last kernel before the main one
    if plan.path in ("one_warp", "few_warps"):
        (_one_warp_forward if plan.path == "one_warp" else _few_warps_forward)(
            (num_slots + call.num_samples,),
            (
                *call.inputs, *written, *listed, call.offsets[0], *call.sizes, num_slots,
                args.scale,
            ),
            plan.kernel,
        )  # fmt: skip
    elif plan.path == "warpgroup":
        _warpgroup_forward(
            (num_slots + call.num_samples,),
            (
                queries, *call.inputs[2:], *written, *listed, call.offsets[0],
                _boxes_of(call.inputs[1], plan), *call.sizes, num_slots, args.scale,
            ),
            plan.kernel,
        )  # fmt: skip
    else:
        _forward(
            (num_slots + call.num_blocks,),
            (
                *call.inputs, *written, *call.offsets, *call.sizes,
                num_slots, plan.problem.history_stride, args.scale,
            ),
            plan.kernel,
        )  # fmt: skip
    if num_slots and not plan.listed:
        _combine_outputs(
            (num_slots, plan.column_blocks),
            (sums, sums_stats, out, residual_or_none, stats, *call.offsets, *call.sizes),
            plan.combine,
        )
    return outputs


def backward(
    grad_out: Tensor, args: TargetArguments, outputs: TargetOutputs, needs_bias: bool = True
) -> TargetGradients:
    """Gradients, that of ``bias`` if ``needs_bias``; of prior weights, of their logarithms."""
    call = _Call(args, backward=True)
    plan, num_slots, num_samples = call.plan, call.num_slots, call.num_samples
    bias, position_bias, age_bias, _, _ = args.biases
    out, residual, stats = outputs
    problem, by_warps = plan.problem, plan.path in ("one_warp", "few_warps")
    if paths.LOG:
        paths.log_choice("jagged_target_attention backward", plan.choice)
    shared = problem.layout == SHARED
    grad_query = torch.empty_like(out, dtype=torch.float32 if shared else None)
    grad_history = args.history.new_empty(*args.history.shape)
    grad_bias = None
    if bias is not None and needs_bias:
        dtype = torch.float32 if problem.prior else bias.dtype
        grad_bias = bias.new_empty(*bias.shape, dtype=dtype)
    grad_tables = None
    if problem.buckets:
        fill = stats.new_empty if by_warps else stats.new_zeros
        targets = problem.num_targets if plan.path == "one_warp" else 1
        grad_tables = fill(num_slots + num_samples, problem.buckets, targets, problem.num_heads)
    sums = stats.new_empty(num_slots, plan.rows_of_slot, problem.width)
    delta = torch.empty_like(stats[0]) if plan.more_blocks else None
    ds_totals = sums.new_empty(num_slots, plan.rows_of_slot) if plan.more_blocks else None
    grad_out = grad_out.contiguous()
    read = (out, residual if problem.half else None, stats, grad_query)
    sizes = (*call.sizes, num_slots, problem.history_stride, args.scale)

    def launch_grad_history(one_block: bool) -> None:
        _grad_history(
            (num_slots + num_samples,),
            (
                grad_out, *call.inputs, *read, delta, grad_history, grad_bias, grad_tables,
                sums, *call.offsets, *sizes,
            ),
            plan.grad_history | {"ONE_BLOCK": one_block},
        )  # fmt: skip

    if by_warps and num_samples:
        listed = ()
        if plan.path == "one_warp":
            weights = None
            if problem.buckets and not problem.half:  # their gradients are exact
                weights = sums.new_empty(num_slots, 1 + problem.buckets, problem.rows)
            listed = (weights, call.list_slots())
        (_one_warp_backward if plan.path == "one_warp" else _few_warps_backward)(
            (num_slots + num_samples,),
            (
                grad_out, *call.inputs, *read, grad_history, grad_bias, grad_tables, sums,
                *listed, call.offsets[0], *call.sizes, num_slots, args.scale,
            ),
            plan.kernel,
        )  # fmt: skip
    elif plan.path == "warpgroup" and num_samples:
        _warpgroup_backward(
            (num_slots + num_samples,),
            (
                _aligned(grad_out), _aligned(call.inputs[0]), *call.inputs[2:], *read, grad_bias,
                grad_tables, sums, call.list_slots(), call.offsets[0],
                _boxes_of(call.inputs[1], plan), _boxes_of(grad_history, plan), *call.sizes,
                num_slots, args.scale,
            ),
            plan.kernel,
        )  # fmt: skip
    elif plan.one_block and num_samples:
        launch_grad_history(one_block=True)
    if plan.more_blocks and out.numel():
        _grad_query(
            (num_slots + call.num_blocks,),
            (
                grad_out, *call.inputs, *read, delta, sums, ds_totals, *call.offsets, *sizes,
            ),
            plan.grad_query,
        )  # fmt: skip
    if num_slots and out.numel() and not plan.listed:
        _combine_gradients(
            (num_slots, plan.column_blocks),
            (
                sums, ds_totals, out, grad_query, delta, *call.offsets,
                num_samples, problem.num_targets, args.scale,
            ),
            plan.combine,
        )  # fmt: skip
    if plan.more_blocks and num_samples:
        launch_grad_history(one_block=False)
    if shared:
        grad_query = grad_query.sum(0, keepdim=True).to(dtype=args.query.dtype)
    grad_position_bias = grad_age_bias = None
    if grad_tables is not None:
        grad_table = _sum_of_tables(grad_tables, plan.overlap)
        if position_bias is not None:
            grad_position_bias = grad_table[: problem.num_positions].to(dtype=position_bias.dtype)
        if age_bias is not None:  # no memory of the other's
            of_age = grad_table[problem.num_positions :]
            grad_age_bias = of_age.to(dtype=age_bias.dtype, copy=problem.num_positions > 0)
    return TargetGradients(grad_query, grad_history, grad_bias, grad_position_bias, grad_age_bias)


class _Call:
    """What both directions of one call have in common."""

    def __init__(self, args: TargetArguments, backward: bool) -> None:
        query, history, offsets, query_offsets = args[:4]
        bias, position_bias, age_bias = args.bias, args.position_bias, args.age_bias
        self.num_samples = offsets.shape[0] - 1
        num_heads, width = query.shape[-2:]
        if query_offsets is not None:
            layout, num_targets = JAGGED, 0  # differs by sample
            total_rows = query.shape[0] * num_heads
        else:
            layout = DENSE if query.shape[0] == self.num_samples else SHARED
            num_targets = query.shape[1]
            total_rows = self.num_samples * num_targets * num_heads
        history = _unit_stride(history)
        problem = Problem(
            history.device,
            backward,
            layout,
            num_targets,
            num_heads,
            width,
            0 if position_bias is None else position_bias.shape[0],
            0 if age_bias is None else age_bias.shape[0],
            bias is not None,
            bias is not None and bias.dim() == 1,
            history.element_size(),
            history.stride(0),
            history.data_ptr() % 16 == 0,
            history.shape[0] <= END.value,
            product_precision(history.dtype),
        )
        self.plan = plan_of(problem)
        self.num_slots = history.shape[0] // self.plan.slot
        if layout == JAGGED:
            self.num_blocks = total_rows // self.plan.block_r + self.num_samples
        else:
            self.num_blocks = self.num_samples * self.plan.num_blocks
        biases = (bias, position_bias, age_bias, args.timestamps)
        biases = Biases(*map(_contiguous, biases))
        self.inputs = (query.contiguous(), history, biases)
        self.offsets = (offsets.contiguous(), _contiguous(query_offsets))
        self.sizes = (self.num_samples, num_targets, total_rows)

    def list_slots(self) -> Tensor:
        """What :func:`schedule.list_slots_kernel` makes, which may still be at it."""
        offsets = self.offsets[0]
        slots = offsets.new_empty(2, self.num_slots, dtype=torch.int32)
        if self.num_slots:
            _list_slots(
                (-(-self.num_samples // 128),),
                (slots, offsets, self.num_samples, self.num_slots),
                self.plan.list_slots,
            )
        return slots


def _boxes_of(x: Tensor, plan: Plan) -> TensorDescriptor:
    """Boxes of rows of ``x``, of its memory as it is, for the kernels of warpgroups."""
    if not x.shape[0]:
        x = x.new_empty(1, x.shape[1])  # there is no descriptor of nothing
    return jagged_rows(x.unsqueeze(1), plan.tiles["BLOCK_N"], plan.tiles["BLOCK_D"])


def _sum_of_tables(tables: Tensor, overlap: bool) -> Tensor:
    """``[buckets, H]``: sums of ``[tables, buckets, targets, H]``, in two parallel steps."""
    num_tables, buckets, targets, num_heads = tables.shape
    size = buckets * num_heads
    constants = {"H": num_heads, "BLOCK": 128, "COLUMNS": 8, **overlap_options(overlap)}
    num_groups = max(1, min(num_tables, 32))
    groups = tables.new_empty(num_groups, buckets, num_heads)
    programs = -(-size // 8)
    _sum_tables((programs, num_groups), (tables, groups, num_tables, targets, size), constants)
    out = tables.new_empty(buckets, num_heads)
    _sum_tables((programs, 1), (groups, out, num_groups, 1, size), constants)
    return out


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _aligned(tensor: Tensor) -> Tensor:
    """``tensor`` where copies of 16 bytes can begin, if need be a copy."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _unit_stride(x: Tensor) -> Tensor:
    """``x`` as it is, if the elements of a row are next to each other, else a copy."""
    return x if x.stride(-1) == 1 or x.numel() == 0 else x.contiguous()
