"""Launches of target attention: a few query rows per sample over that sample's history rows.

Keys and values are the same rows ``x``. With R query rows per sample (targets × heads, in this
order), N history rows of width D and e bytes an element:

    forward    reads x once per block of query rows: N·D·e bytes, 4·N·R·D FLOPs
    backward   reads x and writes dx once: 2·N·D·e bytes, 10·N·R·D FLOPs, if a sample has one
               block of query rows, and in half precision or in ``one_warp``. Else it reads x once
               more per block: 14·N·R·D FLOPs

With gather indices, x is read in place, and dx is written for rows whose index occurs once. The
others are left to ``row_gradients.py``.

Packed codes are read as bytes, and have no gradient: ``history_rows.py``, ``warp_codes.py``.

Long histories are split into chunks (see ``schedule.py``), so that all of the GPU is used. Partial
results are combined in order: by another kernel or, in the variants ``one_warp`` and ``warpgroup``,
by the last program of a sample, which an atomic counter identifies. There are no other atomics. The
chunks of a history depend on its length alone.

Rows behind the last offset are not read. All programs of a kernel together set their outputs and
gradients to zero.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from torchrec_jagged_attn.base.row_gradients import new_gradient
from torchrec_jagged_attn.ops import dispatch
from torchrec_jagged_attn.ops.device.bias_records import Biases
from torchrec_jagged_attn.ops.device.matmul import product_precision
from torchrec_jagged_attn.ops.device.tma import END, jagged_rows
from torchrec_jagged_attn.ops.launch import Launcher, overlap_options
from torchrec_jagged_attn.ops.target_attention.arguments import (
    TargetArguments,
    TargetGradients,
    TargetOutputs,
    new_outputs,
)
from torchrec_jagged_attn.ops.target_attention.kernels import (
    general_backward,
    general_combine,
    general_forward,
    one_warp_backward,
    one_warp_forward,
    row_gradients,
    schedule,
    warp_common,
    warpgroup_backward,
    warpgroup_common,
    warpgroup_forward,
)
from torchrec_jagged_attn.ops.target_attention.kernels.records import (
    Gradients,
    Outputs,
    Partials,
    Samples,
    SplitSchedule,
)
from torchrec_jagged_attn.ops.target_attention.kernels.row_gradients import (
    INDICES,
    ZERO_ROWS,
    QueryRows,
    SortedIndices,
)
from torchrec_jagged_attn.ops.target_attention.plan import (
    DENSE,
    JAGGED,
    SHARED,
    Call,
    Plan,
    plan_of,
)

SUMMED_COLUMNS = 8  # elements of a table per program

_forward = Launcher(general_forward.forward_kernel)
_combine_outputs = Launcher(general_combine.combine_outputs_kernel)
_grad_query = Launcher(general_backward.grad_query_kernel)
_grad_history = Launcher(general_backward.grad_history_kernel)
_combine_gradients = Launcher(general_combine.combine_gradients_kernel)
_sum_tables = Launcher(general_combine.sum_tables_kernel)
_find_runs = Launcher(row_gradients.find_runs_kernel)
_rows = Launcher(row_gradients.rows_kernel)
_combine_rows = Launcher(row_gradients.combine_rows_kernel)
_split_schedule = Launcher(schedule.split_schedule_kernel)
_one_warp_forward = Launcher(one_warp_forward.forward_kernel)
_one_warp_backward = Launcher(one_warp_backward.backward_kernel)
_warpgroup_forward = Launcher(warpgroup_forward.forward_kernel)
_warpgroup_backward = Launcher(warpgroup_backward.backward_kernel)


def forward(args: TargetArguments) -> TargetOutputs:
    """Return the outputs of attention."""
    outputs = new_outputs(args)
    out, residual, stats = outputs
    if out.numel() == 0:
        return outputs
    if args.offsets.shape[0] == 1:  # no sample
        for x in outputs:
            x.zero_()
        return outputs
    launch = _Launch(args, backward=False)
    plan, num_partials = launch.plan, launch.num_partials
    if dispatch.LOG:
        dispatch.log_choice("jagged_target_attention forward", plan.choice)
    partials = Partials(
        stats.new_empty(num_partials, plan.partial_rows, plan.call.width),
        stats.new_empty(num_partials, 2, plan.partial_rows),
    )
    written_outputs = Outputs(out, residual if residual.numel() else None, stats)
    samples = launch.samples()
    inputs = (launch.query, launch.kernel_history, launch.biases, written_outputs, partials)
    taken = (*inputs, samples, *launch.sizes, num_partials, args.scale)
    if plan.variant == "warpgroup":
        _warpgroup_forward((num_partials + launch.num_samples,), taken, plan.kernel)
    elif plan.variant == "one_warp":
        _one_warp_forward((num_partials + launch.num_samples,), taken, plan.kernel)
    else:
        _forward((num_partials + launch.num_blocks,), taken, plan.kernel)
    if num_partials and not plan.has_schedule:
        _combine_outputs(
            (num_partials, plan.column_blocks),
            (partials, written_outputs, samples, *launch.sizes),
            plan.combine,
        )
    return outputs


def backward(
    grad_out: Tensor,
    args: TargetArguments,
    outputs: TargetOutputs,
    needs_prior_weights: bool = True,
    needs_history: bool = True,
    grad_lse: Tensor | None = None,
) -> TargetGradients:
    """Return the gradients, of prior weights the gradients of their logarithms.

    The latter are computed if ``needs_prior_weights``. The gradient of the history is ``None`` for
    packed codes and, with gather indices, unless ``needs_history``. ``grad_lse``, the gradient of
    log-sum-exps, is ignored for queries without a visible row.
    """
    launch = _Launch(args, backward=True)
    plan, num_programs = launch.plan, launch.num_partials + launch.num_samples
    call = plan.call
    prior_weights, position_bias, age_bias, *_ = args.biases
    if dispatch.LOG:
        dispatch.log_choice("jagged_target_attention backward", plan.choice)
    shared = call.layout == SHARED
    grad_query = torch.empty_like(outputs.out, dtype=torch.float32 if shared else None)
    delta = grad_history = sorted_indices = None
    if not call.has_codes and (needs_history or not call.has_indices):
        grad_history = new_gradient(args.history)
    if call.has_indices or plan.several_blocks:
        delta = torch.empty_like(outputs.stats[0])
    if grad_history is not None and launch.indices is not None:
        sorted_indices = _sort_indices(launch, launch.indices)
    grad_weights = None
    if prior_weights is not None and needs_prior_weights:
        grad_weights = torch.empty_like(prior_weights, dtype=torch.float32)
    grad_tables = None
    if call.buckets:
        writes_whole_tables = plan.variant == "one_warp"
        fill = outputs.stats.new_empty if writes_whole_tables else outputs.stats.new_zeros
        targets = call.num_targets if writes_whole_tables else 1
        grad_tables = fill(num_programs, call.buckets, targets, call.num_heads)
    grad_out = _aligned(grad_out.contiguous())
    grad_lse = _contiguous(grad_lse)
    saved = Outputs(outputs.out, outputs.residual if call.half else None, outputs.stats, grad_lse)
    if launch.num_samples:
        targets = None if sorted_indices is None else sorted_indices.targets
        grads = Gradients(grad_query, delta, grad_history, grad_weights, grad_tables, targets)
        _launch_backward(launch, grad_out, saved, grads, args.scale)
    else:
        for grad in (grad_query, grad_history, grad_weights, grad_tables):
            if grad is not None:
                grad.zero_()
    if grad_history is not None and delta is not None and sorted_indices is not None:
        _write_row_gradients(
            launch, sorted_indices, grad_out, saved, delta, grad_history, args.scale
        )
    if shared:
        grad_query = grad_query.sum(0, keepdim=True).to(dtype=args.query.dtype)
    grad_position_bias = grad_age_bias = None
    if grad_tables is not None:
        order = _order_of_programs(launch)
        grad_table = sum_of_tables(grad_tables, plan.overlap, *order)
        if position_bias is not None:
            grad_position_bias = grad_table[: call.num_positions].to(dtype=position_bias.dtype)
        if age_bias is not None:  # gradients must not share memory
            age_table = grad_table[call.num_positions :]
            grad_age_bias = age_table.to(dtype=age_bias.dtype, copy=call.num_positions > 0)
    return TargetGradients(
        grad_query, grad_history, grad_weights, grad_position_bias, grad_age_bias
    )


def _launch_backward(
    launch: _Launch, grad_out: Tensor, outputs: Outputs, grads: Gradients, scale: float
) -> None:
    """Launch the kernels that write ``grads``; there is at least one sample."""
    plan, call, num_partials = launch.plan, launch.plan.call, launch.num_partials
    acc = outputs.stats.new_empty(num_partials, plan.partial_rows, call.width)
    totals = None
    needs_bucket_totals = plan.variant == "one_warp" and call.buckets and call.score == "softmax"
    if needs_bucket_totals and not call.half:  # gradients of tables are exact
        totals = acc.new_empty(num_partials, 1 + call.buckets, call.query_rows)
    elif plan.several_blocks:
        totals = acc.new_empty(num_partials, plan.partial_rows)
    partials = Partials(acc, totals)
    grid = (num_partials + launch.num_samples,)
    samples = launch.samples()
    inputs = (grad_out, launch.query, launch.kernel_history, launch.biases, outputs)
    sizes = (*launch.sizes, num_partials, launch.num_history_rows)
    taken = (*inputs, grads, partials, samples, *sizes, scale)
    if plan.variant == "warpgroup":
        _warpgroup_backward(grid, (*taken, _tma_descriptor(grads.history, plan)), plan.kernel)
        return
    if plan.variant == "one_warp":
        _one_warp_backward(grid, taken, plan.kernel)
        return
    has_queries = outputs.out.numel() > 0
    if plan.one_block:
        _grad_history(grid, taken, plan.kernel | {"ONE_BLOCK": True})
    if plan.several_blocks and has_queries:
        _grad_query((num_partials + launch.num_blocks,), taken, plan.kernel)
    if num_partials and has_queries:
        _combine_gradients(
            (num_partials, plan.column_blocks),
            (partials, outputs, grads, samples, *launch.sizes, scale),
            plan.combine,
        )
    row_grads = (grads.history, grads.prior_weights, grads.tables)
    if plan.several_blocks and any(grad is not None for grad in row_grads):
        _grad_history(grid, taken, plan.kernel | {"ONE_BLOCK": False})


def _sort_indices(launch: _Launch, indices: Tensor) -> SortedIndices:
    """Sorted gather indices, for the kernels of ``row_gradients.py``."""
    num_indices, num_rows, num_samples = indices.shape[0], launch.history.shape[0], launch.sizes[0]
    keys = indices.to(dtype=torch.int32) if num_rows < 2**31 else indices
    sorted_indices = SortedIndices(
        keys.new_empty(num_indices),
        indices.new_empty(2, num_indices, dtype=torch.int32),
        indices.new_empty(-(-num_indices // INDICES.value), dtype=torch.int32),
        indices.new_zeros(2, num_rows, dtype=torch.int32),
    )
    if num_indices:
        order = keys.argsort(stable=True)
        sizes = num_indices, num_rows, num_samples, num_samples.bit_length()
        _find_runs(
            (-(-num_indices // 256),),
            (order, indices, launch.offsets, sorted_indices, *sizes),
            {"BLOCK": 256},
        )
    return sorted_indices


def _write_row_gradients(
    launch: _Launch,
    sorted_indices: SortedIndices,
    grad_out: Tensor,
    outputs: Outputs,
    delta: Tensor,
    grad_history: Tensor,
    scale: float,
) -> None:
    """Write the gradients of rows whose index does not occur, or occurs several times."""
    plan, indices, history = launch.plan, launch.indices, launch.history
    num_indices, num_rows = sorted_indices.targets.shape[0], history.shape[0]
    num_partials = num_indices // plan.combine_rows["C"].CHUNK
    partials = delta.new_empty(num_partials, plan.call.width)
    samples = Samples(None, launch.offsets, launch.query_offsets, indices)
    num_index_programs, num_zero_programs = (
        -(-num_indices // INDICES.value),
        -(-num_rows // ZERO_ROWS.value),
    )
    if num_rows:
        queries = QueryRows(grad_out, launch.query, outputs.stats, delta, outputs.grad_lse)
        tensors = (queries, history, launch.biases, grad_history, partials, sorted_indices, samples)
        sizes = num_rows, num_indices, *launch.sizes[1:], num_partials
        _rows(
            (num_partials + num_index_programs + num_zero_programs,),
            (*tensors, *sizes, scale),
            plan.rows,
        )
    if num_partials:
        _combine_rows(
            (num_partials,),
            (partials, grad_history, sorted_indices, indices, num_rows),
            plan.combine_rows,
        )


class _Launch:
    """The plan and the prepared inputs of one call, in forward or backward.

    Attributes:
        query, history, biases: as kernels read them.
        kernel_history: the history as main kernels take it: for ``warpgroup`` a TMA descriptor.
        sizes: number of samples, of targets per sample, and of query rows in all.
        num_history_rows: ``N``.
        num_partials: how many partial results the buffers have room for.
        num_blocks: upper bound of the number of blocks of query rows.
    """

    def __init__(self, args: TargetArguments, backward: bool) -> None:
        query, offsets, query_offsets = args.query, args.offsets, args.query_offsets
        history = _unit_stride(args.history)
        call = _call_of(args, history, backward)
        plan = self.plan = plan_of(call)
        self.num_samples = offsets.shape[0] - 1
        self.num_history_rows = args.num_rows
        self.num_partials = args.num_rows // plan.rows_per_partial
        if call.layout == JAGGED:
            total_rows = query.shape[0] * call.num_heads
            self.num_blocks = total_rows // plan.block_r + self.num_samples
        else:
            total_rows = self.num_samples * call.num_targets * call.num_heads
            self.num_blocks = self.num_samples * plan.num_blocks
        self.query = _aligned(query.contiguous())
        self.history = history
        has_descriptor = plan.variant == "warpgroup"
        self.kernel_history = _tma_descriptor(history, plan) if has_descriptor else history
        biases = *args.biases, args.row_numbers, args.row_number_ends
        self.biases = Biases(*map(_contiguous, biases))
        self.sizes = (self.num_samples, call.num_targets, total_rows)
        self.offsets, self.query_offsets = offsets.contiguous(), _contiguous(query_offsets)
        self.indices = _contiguous(args.indices)

    def samples(self) -> Samples:
        """Return offsets, indices and the schedule, for the main kernel.

        If the variant needs a schedule, this launches the kernel that writes it. The main kernel
        must be the next launch, since it overlaps with this one.
        """
        entries = None
        if self.plan.has_schedule:
            entries = self.offsets.new_empty(2, self.num_partials, dtype=torch.int32)
            if self.num_partials:
                _split_schedule(
                    (-(-self.num_samples // schedule.SAMPLES_PER_PROGRAM),),
                    (SplitSchedule(entries, self.offsets), self.num_samples, self.num_partials),
                    self.plan.split_schedule,
                )
        return Samples(entries, self.offsets, self.query_offsets, self.indices)


def _call_of(args: TargetArguments, history: Tensor, backward: bool) -> Call:
    """The :class:`Call` of ``args``, with ``history`` as kernels read it."""
    prior_weights, position_bias, age_bias, _, _, dropout = args.biases
    if args.query_offsets is not None:
        layout, num_targets = JAGGED, 0  # differs by sample
    else:
        layout = DENSE if args.query.shape[0] == args.offsets.shape[0] - 1 else SHARED
        num_targets = args.query.shape[1]
    return Call(
        device=history.device,
        backward=backward,
        layout=layout,
        num_targets=num_targets,
        num_heads=args.query.shape[-2],
        width=args.query.shape[-1],
        num_positions=0 if position_bias is None else position_bias.shape[0],
        num_ages=0 if age_bias is None else age_bias.shape[0],
        has_prior_weights=prior_weights is not None,
        dropout=dropout is not None,
        element_size=args.query.element_size(),
        history_stride=history.stride(0),
        aligned=history.data_ptr() % 16 == 0,
        tma_compatible=history.shape[0] <= END.value,
        precision=product_precision(args.query.dtype),
        score=args.score,
        has_indices=args.indices is not None,
        num_levels=args.num_levels,
    )


def _tma_descriptor(x: Tensor, plan: Plan) -> TensorDescriptor:
    """Return a TMA descriptor of tiles of rows of ``x``, for the variant ``warpgroup``."""
    if not x.shape[0]:
        x = x.new_empty(1, x.shape[1])  # a descriptor needs a row
    return jagged_rows(x.unsqueeze(1), plan.tiles["BLOCK_N"], plan.tiles["BLOCK_D"])


def _order_of_programs(launch: _Launch) -> tuple[int, int]:
    """Return the number of programs of the first samples, and of partial results after them."""
    first = {"one_warp": warp_common.PROGRAMS, "warpgroup": warpgroup_common.PROGRAMS}
    num_first = first[launch.plan.variant].value if launch.plan.has_schedule else 0
    return min(launch.num_samples, num_first), launch.num_partials


def sum_of_tables(
    tables: Tensor, overlap: bool, num_first: int = 0, num_partials: int = 0
) -> Tensor:
    """``[buckets, H]``: sums of ``[tables, buckets, targets, H]``, in two parallel steps.

    The first ``num_first`` tables belong to samples, the next ``num_partials`` to partial results.
    """
    num_tables, buckets, targets, num_heads = tables.shape
    size = buckets * num_heads
    constants = {"H": num_heads, "COLUMNS": SUMMED_COLUMNS, **overlap_options(overlap)}
    num_groups = max(1, min(num_tables - num_partials, 32))
    group_sums = tables.new_empty(num_groups, buckets, num_heads)
    programs = -(-size // SUMMED_COLUMNS)
    order = num_tables, targets, num_first, num_partials
    _sum_tables((programs, num_groups), (tables, group_sums, *order, size), constants)
    out = tables.new_empty(buckets, num_heads)
    _sum_tables((programs, 1), (group_sums, out, num_groups, 1, 0, 0, size), constants)
    return out


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _aligned(tensor: Tensor) -> Tensor:
    """``tensor`` itself, if it is aligned to 16 bytes, else a copy."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _unit_stride(x: Tensor) -> Tensor:
    """``x`` itself, if the elements of a row are contiguous, else a copy."""
    return x if x.stride(-1) == 1 or x.numel() == 0 else x.contiguous()
