"""Target attention: a few query rows per sample over that sample's history rows.

Keys and values are the same rows ``x``. With R query rows per sample (targets × heads, in this
order), N history rows of width D and e bytes an element:

    forward    reads x once per block of query rows: N·D·e bytes, 4·N·R·D FLOPs
    backward   reads x and writes dx once: 2·N·D·e bytes, 10·N·R·D FLOPs. This is where one block
               holds the query rows of a sample, in half precision or by the kernels of
               ``warp_parts.py``. Else it reads x once more for each block: 14·N·R·D FLOPs

Where rows are read by indices, x is read where it lies, and dx is written so, of rows that one
place names. Those of the others are left to ``row_gradients.py``, which takes a row at a time.

Rows that are packed codes are read as bytes, and have no gradient: ``history_rows.py``,
``code_parts.py``.

A history is cut into chunks, so that a long one is spread over the GPU. The sums of its chunks are
combined in their order: by a kernel of their own or, on the paths ``one_warp`` and ``warpgroup``,
by the program that ends last, which an atomic counter tells. There are no other atomics. Where a
history is cut depends on its own length alone.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from torchrec_jagged_attn.attention.arguments import Biases
from torchrec_jagged_attn.runtime import paths
from torchrec_jagged_attn.runtime.kernels.matmul import product_precision
from torchrec_jagged_attn.runtime.kernels.tma import END, jagged_rows
from torchrec_jagged_attn.runtime.launch import Launcher, overlap_options
from torchrec_jagged_attn.target_attention.arguments import (
    TargetArguments,
    TargetGradients,
    TargetOutputs,
)
from torchrec_jagged_attn.target_attention.kernels import schedule
from torchrec_jagged_attn.target_attention.kernels.few_warps_backward import (
    backward_kernel as few_warps_backward_kernel,
)
from torchrec_jagged_attn.target_attention.kernels.few_warps_forward import (
    forward_kernel as few_warps_forward_kernel,
)
from torchrec_jagged_attn.target_attention.kernels.general_backward import (
    grad_history_kernel,
    grad_query_kernel,
)
from torchrec_jagged_attn.target_attention.kernels.general_combine import (
    combine_gradients_kernel,
    combine_outputs_kernel,
    sum_tables_kernel,
)
from torchrec_jagged_attn.target_attention.kernels.general_forward import forward_kernel
from torchrec_jagged_attn.target_attention.kernels.one_warp_backward import (
    backward_kernel as one_warp_backward_kernel,
)
from torchrec_jagged_attn.target_attention.kernels.one_warp_forward import (
    forward_kernel as one_warp_forward_kernel,
)
from torchrec_jagged_attn.target_attention.kernels.records import (
    Gradients,
    Listing,
    Outputs,
    Samples,
    SlotList,
    Sums,
)
from torchrec_jagged_attn.target_attention.kernels.row_gradients import (
    PLACES_OF_PROGRAM,
    ZEROS_OF_PROGRAM,
    Places,
    QueryRows,
    combine_rows_kernel,
    find_places_kernel,
    rows_kernel,
)
from torchrec_jagged_attn.target_attention.kernels.warpgroup_backward import (
    backward_kernel as warpgroup_backward_kernel,
)
from torchrec_jagged_attn.target_attention.kernels.warpgroup_forward import (
    forward_kernel as warpgroup_forward_kernel,
)
from torchrec_jagged_attn.target_attention.plan import DENSE, JAGGED, SHARED, Call, Plan, plan_of

__all__ = ["backward", "forward", "listing_of", "sum_of_tables"]

SUMMED_COLUMNS = 8  # elements of a table that a program sums up

_forward = Launcher(forward_kernel)
_combine_outputs = Launcher(combine_outputs_kernel)
_grad_query = Launcher(grad_query_kernel)
_grad_history = Launcher(grad_history_kernel)
_combine_gradients = Launcher(combine_gradients_kernel)
_sum_tables = Launcher(sum_tables_kernel)
_find_places = Launcher(find_places_kernel)
_rows = Launcher(rows_kernel)
_combine_rows = Launcher(combine_rows_kernel)
_list_slots = Launcher(schedule.list_slots_kernel)
_one_warp_forward = Launcher(one_warp_forward_kernel)
_one_warp_backward = Launcher(one_warp_backward_kernel)
_few_warps_forward = Launcher(few_warps_forward_kernel)
_few_warps_backward = Launcher(few_warps_backward_kernel)
_warpgroup_forward = Launcher(warpgroup_forward_kernel)
_warpgroup_backward = Launcher(warpgroup_backward_kernel)


def listing_of(args: TargetArguments, backward: bool) -> Listing | None:
    """The list of slots that the call of ``args`` needs, for the kernel before it to make.

    ``None`` where there is no list, or this family makes it by itself.
    """
    history = args.history
    if not args.query.numel() or _unit_stride(history) is not history:
        return None
    plan = plan_of(_call_of(args, history, backward, slots_given=True))
    num_slots = args.num_rows // plan.slot
    if not plan.listed or not num_slots:
        return None
    slots = args.offsets.new_empty(2, num_slots, dtype=torch.int32)
    slot_list = SlotList(slots, args.offsets.contiguous())
    return Listing(slot_list, args.offsets.shape[0] - 1, num_slots, plan.chunk)


def forward(args: TargetArguments, listing: Listing | None = None) -> TargetOutputs:
    """Attend. ``listing``, of :func:`listing_of`, was given to the kernel that made the queries."""
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
    launch = _Launch(args, listing, backward=False)
    plan, num_slots = launch.plan, launch.num_slots
    if paths.LOG:
        paths.log_choice("jagged_target_attention forward", plan.choice)
    sums = Sums(
        stats.new_empty(num_slots, plan.slot_rows, plan.call.width),
        stats.new_empty(num_slots, 2, plan.slot_rows),
    )
    written = Outputs(out, residual if is_rounded else None, stats)
    grid = (num_slots + launch.num_samples,)
    taken = (launch.query, launch.history, launch.biases, written, sums, launch.samples())
    sizes = (*launch.sizes, num_slots)
    if plan.path == "warpgroup":
        query, history, *records = taken
        boxes = _boxes_of(history, plan)
        _warpgroup_forward(grid, (query, *records, boxes, *sizes, args.scale), plan.kernel)
    elif plan.path == "one_warp":
        _one_warp_forward(grid, (*taken, *sizes, args.scale), plan.kernel)
    elif plan.path == "few_warps":
        _few_warps_forward(grid, (*taken, *sizes, args.scale), plan.kernel)
    else:
        grid = (num_slots + launch.num_blocks,)
        _forward(grid, (*taken, *sizes, plan.call.history_stride, args.scale), plan.kernel)
    if num_slots and not plan.listed:
        _combine_outputs(
            (num_slots, plan.column_blocks), (sums, written, taken[-1], *launch.sizes), plan.combine
        )
    return outputs


def backward(
    grad_out: Tensor,
    args: TargetArguments,
    outputs: TargetOutputs,
    needs_bias: bool = True,
    needs_history: bool = True,
    listing: Listing | None = None,
    grad_lse: Tensor | None = None,
) -> TargetGradients:
    """Gradients, that of ``bias`` if ``needs_bias``; of prior weights, of their logarithms.

    That of the history always, but, where it is read by indices, if ``needs_history``; where it is
    packed codes, it is ``None``. ``grad_lse`` is that of log-sum-exps: where nothing is seen, it
    counts as zero.
    ``listing`` was given to the kernel that made ``grad_out``.
    """
    launch = _Launch(args, listing, backward=True)
    plan, num_programs = launch.plan, launch.num_slots + launch.num_samples
    call = plan.call
    bias, position_bias, age_bias = args.bias, args.position_bias, args.age_bias
    if paths.LOG:
        paths.log_choice("jagged_target_attention backward", plan.choice)
    shared = call.layout == SHARED
    grad_query = torch.empty_like(outputs.out, dtype=torch.float32 if shared else None)
    delta = grad_history = found = None
    if not call.of_codes and (needs_history or not call.by_index):
        grad_history = args.history.new_empty(*args.history.shape)
    if call.by_index or plan.more_blocks:
        delta = torch.empty_like(outputs.stats[0])
    if grad_history is not None and launch.indices is not None:
        found = _find_rows(launch, launch.indices)
    grad_bias = None
    if bias is not None and needs_bias:
        dtype = torch.float32 if call.prior else bias.dtype
        grad_bias = bias.new_empty(*bias.shape, dtype=dtype)
    grad_tables = None
    if call.buckets:
        by_warps = plan.path in ("one_warp", "few_warps")
        fill = outputs.stats.new_empty if by_warps else outputs.stats.new_zeros
        targets = call.num_targets if plan.path == "one_warp" else 1
        grad_tables = fill(num_programs, call.buckets, targets, call.num_heads)
    grad_out = grad_out.contiguous()
    grad_lse = _contiguous(grad_lse)
    read = Outputs(outputs.out, outputs.residual if call.half else None, outputs.stats, grad_lse)
    if launch.num_samples:
        targets = None if found is None else found.targets
        grads = Gradients(grad_query, delta, grad_history, grad_bias, grad_tables, targets)
        _launch_backward(launch, grad_out, read, grads, args.scale)
    if grad_history is not None and delta is not None and found is not None:
        _add_up_rows(launch, found, grad_out, read, delta, grad_history, args.scale)
    if shared:
        grad_query = grad_query.sum(0, keepdim=True).to(dtype=args.query.dtype)
    grad_position_bias = grad_age_bias = None
    if grad_tables is not None:
        grad_table = sum_of_tables(grad_tables, plan.overlap)
        if position_bias is not None:
            grad_position_bias = grad_table[: call.num_positions].to(dtype=position_bias.dtype)
        if age_bias is not None:  # no memory of the other's
            of_age = grad_table[call.num_positions :]
            grad_age_bias = of_age.to(dtype=age_bias.dtype, copy=call.num_positions > 0)
    return TargetGradients(grad_query, grad_history, grad_bias, grad_position_bias, grad_age_bias)


def _launch_backward(
    launch: _Launch, grad_out: Tensor, outputs: Outputs, grads: Gradients, scale: float
) -> None:
    """Launch the kernels that write ``grads``, of one sample or more."""
    plan, call, num_slots = launch.plan, launch.plan.call, launch.num_slots
    acc = outputs.stats.new_empty(num_slots, plan.slot_rows, call.width)
    weights = None
    of_mean = plan.path == "one_warp" and call.buckets and call.score == "softmax"
    if of_mean and not call.half:  # gradients of tables are exact
        weights = acc.new_empty(num_slots, 1 + call.buckets, call.query_rows)
    elif plan.more_blocks:
        weights = acc.new_empty(num_slots, plan.slot_rows)
    sums = Sums(acc, weights)
    grid = (num_slots + launch.num_samples,)
    inputs = (launch.query, launch.history, launch.biases, outputs)
    sizes = (*launch.sizes, num_slots)
    if plan.path == "warpgroup":
        query, history, *records = inputs
        boxes = _boxes_of(history, plan), _boxes_of(grads.history, plan)
        grads = grads._replace(history=None)
        taken = (_aligned(grad_out), query, *records, grads, sums, launch.samples())
        _warpgroup_backward(grid, (*taken, *boxes, *sizes, scale), plan.kernel)
        return
    samples = launch.samples()
    taken = (grad_out, *inputs, grads, sums, samples, *sizes)
    if plan.path == "one_warp":
        _one_warp_backward(grid, (*taken, scale), plan.kernel)
        return
    by_triton = (*taken, call.history_stride, scale)
    has_queries = outputs.out.numel() > 0
    if plan.path == "few_warps":
        _few_warps_backward(grid, (*taken, scale), plan.kernel)
    elif plan.one_block:
        _grad_history(grid, by_triton, plan.kernel | {"ONE_BLOCK": True})
    if plan.more_blocks and has_queries:
        _grad_query((num_slots + launch.num_blocks,), by_triton, plan.kernel)
    if num_slots and has_queries:
        _combine_gradients(
            (num_slots, plan.column_blocks),
            (sums, outputs, grads, samples, *launch.sizes, scale),
            plan.combine,
        )
    by_row = (grads.history, grads.bias, grads.tables)
    if plan.more_blocks and any(grad is not None for grad in by_row):
        _grad_history(grid, by_triton, plan.kernel | {"ONE_BLOCK": False})


def _find_rows(launch: _Launch, indices: Tensor) -> Places:
    """Which places name each row, for the kernels of ``row_gradients.py``."""
    num_places, num_rows, num_samples = indices.shape[0], launch.history.shape[0], launch.sizes[0]
    keys = indices.to(dtype=torch.int32) if num_rows < 2**31 else indices
    found = Places(
        keys.new_empty(num_places),
        indices.new_empty(2, num_places, dtype=torch.int32),
        indices.new_empty(-(-num_places // PLACES_OF_PROGRAM), dtype=torch.int32),
        indices.new_zeros(2, num_rows, dtype=torch.int32),
    )
    if num_places:
        order = keys.argsort(stable=True)
        sizes = num_places, num_rows, num_samples, num_samples.bit_length()
        _find_places(
            (-(-num_places // 256),),
            (order, indices, launch.offsets, found, *sizes),
            {"BLOCK": 256, "PLACES": PLACES_OF_PROGRAM},
        )
    return found


def _add_up_rows(
    launch: _Launch,
    found: Places,
    grad_out: Tensor,
    outputs: Outputs,
    delta: Tensor,
    grad_history: Tensor,
    scale: float,
) -> None:
    """Write the gradients of rows that no place names, or several do."""
    plan, indices, history = launch.plan, launch.indices, launch.history
    num_places, num_rows = found.targets.shape[0], history.shape[0]
    num_slots = num_places // plan.combine_rows["C"].CHUNK
    sums = delta.new_empty(num_slots, plan.call.width)
    samples = Samples(None, launch.offsets, launch.query_offsets, indices)
    of_places, of_zeros = -(-num_places // PLACES_OF_PROGRAM), -(-num_rows // ZEROS_OF_PROGRAM)
    if num_rows:
        queries = QueryRows(grad_out, launch.query, outputs.stats, delta, outputs.grad_lse)
        tensors = (queries, history, launch.biases, grad_history, sums, found, samples)
        sizes = num_rows, num_places, *launch.sizes[1:], num_slots
        _rows(
            (num_slots + of_places + of_zeros,),
            (*tensors, *sizes, plan.call.history_stride, scale),
            plan.rows,
        )
    if num_slots:
        _combine_rows(
            (num_slots,), (sums, grad_history, found, indices, num_rows), plan.combine_rows
        )


class _Launch:
    """What kernels of both directions take of one call.

    Attributes:
        query, history, biases: as kernels read them.
        sizes: samples, targets of each, and query rows of all.
        num_slots: of chunks.
        num_blocks: of all query rows.
    """

    def __init__(self, args: TargetArguments, listing: Listing | None, backward: bool) -> None:
        query, offsets, query_offsets = args.query, args.offsets, args.query_offsets
        history = _unit_stride(args.history)
        call = _call_of(args, history, backward, slots_given=listing is not None)
        plan = self.plan = plan_of(call)
        self.listing = listing
        self.num_samples = offsets.shape[0] - 1
        self.num_slots = args.num_rows // plan.slot
        if call.layout == JAGGED:
            total_rows = query.shape[0] * call.num_heads
            self.num_blocks = total_rows // plan.block_r + self.num_samples
        else:
            total_rows = self.num_samples * call.num_targets * call.num_heads
            self.num_blocks = self.num_samples * plan.num_blocks
        query = query.contiguous()
        self.query = _aligned(query) if plan.path == "warpgroup" else query
        self.history = history
        self.biases = Biases(*map(_contiguous, args.biases))
        self.sizes = (self.num_samples, call.num_targets, total_rows)
        self.offsets, self.query_offsets = offsets.contiguous(), _contiguous(query_offsets)
        self.indices = _contiguous(args.indices)

    def samples(self) -> Samples:
        """Where samples lie, for the main kernel.

        If the path has a list of slots and none is given, the kernel that makes it is launched, and
        may still be at it: no other may come before the main one.
        """
        slots = None
        if self.listing is not None:
            slots = self.listing.slot_list.slots
        elif self.plan.listed:
            slots = self.offsets.new_empty(2, self.num_slots, dtype=torch.int32)
            if self.num_slots:
                _list_slots(
                    (-(-self.num_samples // schedule.SAMPLES_OF_LIST),),
                    (SlotList(slots, self.offsets), self.num_samples, self.num_slots),
                    self.plan.list_slots,
                )
        return Samples(slots, self.offsets, self.query_offsets, self.indices)


def _call_of(args: TargetArguments, history: Tensor, backward: bool, slots_given: bool) -> Call:
    """What the plan depends on; ``history`` is as kernels read it."""
    bias, position_bias, age_bias = args.bias, args.position_bias, args.age_bias
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
        bias=bias is not None,
        prior=bias is not None and bias.dim() == 1,
        row_dropout=args.row_dropout is not None,
        dropout=args.dropout is not None,
        element_size=args.query.element_size(),
        history_stride=history.stride(0),
        aligned=history.data_ptr() % 16 == 0,
        addressable=history.shape[0] <= END.value,
        precision=product_precision(args.query.dtype),
        score=args.score,
        slots_given=slots_given,
        by_index=args.indices is not None,
        num_levels=args.num_levels,
    )


def _boxes_of(x: Tensor, plan: Plan) -> TensorDescriptor:
    """Boxes of rows of ``x``, of its memory as it is, for the kernels of warpgroups."""
    if not x.shape[0]:
        x = x.new_empty(1, x.shape[1])  # a descriptor needs a row
    return jagged_rows(x.unsqueeze(1), plan.tiles["BLOCK_N"], plan.tiles["BLOCK_D"])


def sum_of_tables(tables: Tensor, overlap: bool) -> Tensor:
    """``[buckets, H]``: sums of ``[tables, buckets, targets, H]``, in two parallel steps."""
    num_tables, buckets, targets, num_heads = tables.shape
    size = buckets * num_heads
    constants = {
        "H": num_heads,
        "BLOCK": 128,
        "COLUMNS": SUMMED_COLUMNS,
        **overlap_options(overlap),
    }
    num_partials = max(1, min(num_tables, 32))
    partials = tables.new_empty(num_partials, buckets, num_heads)
    programs = -(-size // SUMMED_COLUMNS)
    _sum_tables((programs, num_partials), (tables, partials, num_tables, targets, size), constants)
    out = tables.new_empty(buckets, num_heads)
    _sum_tables((programs, 1), (partials, out, num_partials, 1, size), constants)
    return out


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _aligned(tensor: Tensor) -> Tensor:
    """``tensor`` where copies of 16 bytes can begin, if need be a copy."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _unit_stride(x: Tensor) -> Tensor:
    """``x`` as it is, if the elements of a row are next to each other, else a copy."""
    return x if x.stride(-1) == 1 or x.numel() == 0 else x.contiguous()
