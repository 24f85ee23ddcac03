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

import functools

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from torchrec_jagged_attn import devices
from torchrec_jagged_attn.arguments import TargetArguments, TargetGradients, TargetOutputs
from torchrec_jagged_attn.kernels.common.launch import Launcher, overlap_options
from torchrec_jagged_attn.kernels.common.matmul import padded_width, product_precision
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
from torchrec_jagged_attn.kernels.target.warp_parts import BLOCK_R
from torchrec_jagged_attn.kernels.target.warpgroup_backward import BUCKETS
from torchrec_jagged_attn.kernels.target.warpgroup_backward import (
    backward_kernel as warpgroup_backward_kernel,
)
from torchrec_jagged_attn.kernels.target.warpgroup_forward import (
    forward_kernel as warpgroup_forward_kernel,
)

__all__ = ["backward", "forward"]

# As plain numbers: comparing those of Triton takes host time.
DENSE, SHARED, JAGGED = (
    layout.value for layout in (schedule.DENSE, schedule.SHARED, schedule.JAGGED)
)
WARP_ROWS = BLOCK_R.value
BUCKETS_OF_WARPS = 256  # of both tables, which lie in shared memory
ROOM_OF_WARPS = 200_000  # bytes of shared memory that some warps together need more than
# Forward, samples of up to so many blocks of queries are cut as if they had one. The sums of all
# chunks then take a byte for each element of the history.
MOST_SLOTS = 4

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
    sums = stats.new_empty(num_slots, plan.rows_of_slot, plan.width)
    sums_stats = stats.new_empty(num_slots, 2, plan.rows_of_slot)
    residual_or_none = residual if is_rounded else None
    written = (out, residual_or_none, stats, sums, sums_stats)
    queries = _aligned(call.inputs[0]) if plan.by_group else call.inputs[0]
    listed = (call.list_slots(),) if plan.listed else ()  # the last kernel before the main one
    if plan.by_warps:
        (_one_warp_forward if plan.one_warp else _few_warps_forward)(
            (num_slots + call.num_samples,),
            (
                *call.inputs, *written, *listed, call.offsets[0], *call.sizes, num_slots,
                args.scale,
            ),
            plan.kernel,
        )  # fmt: skip
    elif plan.by_group:
        _warpgroup_forward(
            (num_slots + call.num_samples,),
            (
                queries, *call.inputs[2:], *written, *listed, call.offsets[0],
                plan.rows_of(call.inputs[1]), *call.sizes, num_slots, args.scale,
            ),
            plan.kernel,
        )  # fmt: skip
    else:
        _forward(
            (num_slots + call.num_blocks,),
            (
                *call.inputs, *written, *call.offsets, *call.sizes,
                num_slots, plan.history_stride, args.scale,
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
    shared = plan.layout == SHARED
    grad_query = torch.empty_like(out, dtype=torch.float32 if shared else None)
    grad_history = args.history.new_empty(*args.history.shape)
    grad_bias = None
    if bias is not None and needs_bias:
        dtype = torch.float32 if plan.prior else bias.dtype
        grad_bias = bias.new_empty(*bias.shape, dtype=dtype)
    grad_tables = None
    if plan.buckets:
        fill = stats.new_empty if plan.by_warps else stats.new_zeros
        targets = plan.num_targets if plan.one_warp else 1
        grad_tables = fill(num_slots + num_samples, plan.buckets, targets, plan.num_heads)
    sums = stats.new_empty(num_slots, plan.rows_of_slot, plan.width)
    delta = torch.empty_like(stats[0]) if plan.more_blocks else None
    residuals = sums.new_empty(num_slots, plan.rows_of_slot) if plan.more_blocks else None
    grad_out = grad_out.contiguous()
    read = (out, residual if plan.half else None, stats, grad_query)
    sizes = (*call.sizes, num_slots, plan.history_stride, args.scale)

    def launch_grad_history(one_block: bool) -> None:
        _grad_history(
            (num_slots + num_samples,),
            (
                grad_out, *call.inputs, *read, delta, grad_history, grad_bias, grad_tables,
                sums, *call.offsets, *sizes,
            ),
            plan.grad_history | {"ONE_BLOCK": one_block},
        )  # fmt: skip

    if plan.by_warps and num_samples:
        listed = ()
        if plan.one_warp:
            exact_tables = plan.buckets and not plan.half
            weights = (
                sums.new_empty(num_slots, 1 + plan.buckets, plan.rows) if exact_tables else None
            )
            listed = (weights, call.list_slots())
        (_one_warp_backward if plan.one_warp else _few_warps_backward)(
            (num_slots + num_samples,),
            (
                grad_out, *call.inputs, *read, grad_history, grad_bias, grad_tables, sums,
                *listed, call.offsets[0], *call.sizes, num_slots, args.scale,
            ),
            plan.kernel,
        )  # fmt: skip
    elif plan.by_group and num_samples:
        _warpgroup_backward(
            (num_slots + num_samples,),
            (
                _aligned(grad_out), _aligned(call.inputs[0]), *call.inputs[2:], *read, grad_bias,
                grad_tables, sums, call.list_slots(), call.offsets[0], plan.rows_of(call.inputs[1]),
                plan.rows_of(grad_history), *call.sizes, num_slots, args.scale,
            ),
            plan.kernel,
        )  # fmt: skip
    elif plan.one_block and num_samples:
        launch_grad_history(one_block=True)
    if plan.more_blocks and out.numel():
        _grad_query(
            (num_slots + call.num_blocks,),
            (
                grad_out, *call.inputs, *read, delta, sums, residuals, *call.offsets, *sizes,
            ),
            plan.grad_query,
        )  # fmt: skip
    if num_slots and out.numel() and not plan.listed:
        _combine_gradients(
            (num_slots, plan.column_blocks),
            (
                sums, residuals, out, grad_query, delta, *call.offsets,
                num_samples, plan.num_targets, args.scale,
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
            grad_position_bias = grad_table[: plan.num_positions].to(dtype=position_bias.dtype)
        if age_bias is not None:  # no memory of the other's
            of_age = grad_table[plan.num_positions :]
            grad_age_bias = of_age.to(dtype=age_bias.dtype, copy=plan.num_positions > 0)
    return TargetGradients(grad_query, grad_history, grad_bias, grad_position_bias, grad_age_bias)


class _Call:
    """What both directions of one call have in common."""

    def __init__(self, args: TargetArguments, backward: bool) -> None:
        query, history, offsets, query_offsets = args[:4]
        bias, position_bias, age_bias, timestamps, _ = args.biases
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
        self.plan = _plan(
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
            product_precision(history.dtype),
            devices.gluon_shared_memory(history.device),
            devices.launches_overlap(history.device),
            _room_for_groups(history),
        )
        self.num_slots = history.shape[0] // self.plan.slot
        if layout == JAGGED:
            self.num_blocks = total_rows // self.plan.block_r + self.num_samples
        else:
            self.num_blocks = self.num_samples * -(-self.plan.rows // self.plan.block_r)
        biases = (bias, position_bias, age_bias, timestamps)
        self.inputs = (query.contiguous(), history, *map(_contiguous, biases))
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


class _Plan:
    """How one direction is cut up, which kernels take it and what they are compiled for.

    Nothing of it depends on how many samples and rows there are.

    Attributes:
        one_warp, by_warps: whether kernels of ``warp_parts.py`` take it, of one or of any warps.
        by_group: whether those of ``warpgroup_parts.py`` do.
        listed: whether their programs find chunks by a list of slots, and bring sums together.
        block_r, chunk: query rows, and history rows, that a program takes at least.
        slot: how many history rows there are for each slot.
        rows_of_slot: how many query rows the sums of a chunk have.
        one_block, more_blocks: whether backward meets samples of one block, and of more or, of
            kernels that take two passes, of any number.
        kernel, grad_query, grad_history, combine, list_slots: compile-time arguments.
        column_blocks: programs that bring the sums of one chunk together.
    """

    def __init__(
        self,
        backward: bool,
        layout: int,
        num_targets: int,
        num_heads: int,
        width: int,
        num_positions: int,
        num_ages: int,
        bias: bool,
        prior: bool,
        element_size: int,
        history_stride: int,
        aligned: bool,
        precision: str,
        room_for_warps: int,
        overlap: bool,
        room_for_groups: bool,
    ) -> None:
        self.layout, self.num_targets, self.num_heads, self.width = (
            layout, num_targets, num_heads, width,
        )  # fmt: skip
        self.history_stride, self.overlap, self.precision = history_stride, overlap, precision
        self.num_positions, self.buckets = num_positions, num_positions + num_ages
        self.bias, self.prior = bias, prior
        self.half = element_size == 2
        self.row_bytes = padded_width(width) * element_size
        # Of jagged ones, not the batch's own: results must not depend on other samples.
        self.rows = (8 if layout == JAGGED else num_targets) * num_heads
        self.one_warp = self.by_warps = self.by_group = False
        if (
            layout != JAGGED
            and aligned
            and (width | history_stride) % (16 // element_size) == 0
            and (not bias or prior or num_targets == 1)
            and self.buckets <= BUCKETS_OF_WARPS
        ):
            self.one_warp = self.rows <= WARP_ROWS and width <= 256 and room_for_warps > 0
            most = 64 if self.half else 32
            few_warps = (
                WARP_ROWS < self.rows <= most and width <= 128 and room_for_warps > ROOM_OF_WARPS
            )
            # Backward of half precision, Triton's kernels are faster, but for tables.
            slower = backward and self.half and not self.buckets
            # Gradients of a bias of each row, and of larger tables, are those kernels' of warps.
            too_much = backward and (
                (bias and not prior) or max(num_positions, num_ages) > BUCKETS.value
            )
            self.by_group = (
                few_warps
                and self.half
                and room_for_groups
                and history_stride >= width
                and not too_much
            )
            self.by_warps = self.one_warp or (few_warps and not slower and not self.by_group)

        self.listed = self.one_warp or self.by_group
        tiles = self.tiles(backward)
        self.block_r, self.chunk = tiles["BLOCK_R"], tiles["CHUNK"]
        # Backward, when memory is shortest, programs that take whole samples last longer anyway.
        most_blocks = MOST_SLOTS if layout == JAGGED else -(-self.rows // self.block_r)
        self.slot = self.chunk // (1 if backward else max(1, min(MOST_SLOTS, most_blocks)))
        self.rows_of_slot = self.block_r if layout == JAGGED else min(self.rows, self.block_r)
        # One pass takes the mean gradient from outputs: Triton's kernels not as exactly as fp32 is.
        single_pass = self.by_warps or self.half
        self.one_block = single_pass and (layout == JAGGED or self.rows <= self.block_r)
        self.more_blocks = layout == JAGGED or not self.one_block

        names = {
            "H": num_heads, "D": width, "P": num_positions, "A": num_ages, "PRIOR": prior,
        }  # fmt: skip
        if self.by_warps:
            fixed = {"BLOCK_R"} if self.one_warp else set()
            self.kernel = {
                **names,
                **{name: value for name, value in tiles.items() if name not in fixed},
                "SHARED": layout == SHARED,
                "STRIDE": history_stride,
                "PARTS": 1 if self.half else 2 if precision == "tf32" else 3,
                **(overlap_options(overlap) if self.one_warp else {"OVERLAP": overlap}),
            }
        elif self.by_group:
            self.kernel = {**names, **tiles, "SHARED": layout == SHARED, **overlap_options(overlap)}
        else:
            self.kernel = {"LAYOUT": layout, **names, "PRECISION": precision, **tiles}
            self.kernel["SLOT"] = self.slot
        self.list_slots = {"CHUNK": self.chunk, "BLOCK_B": 128, "OVERLAP": overlap}
        passes = {"SINGLE_PASS": single_pass}
        one_target = num_targets == 1 and self.rows <= self.block_r
        self.grad_query = self.kernel | passes
        self.grad_history = self.grad_query | {
            "ONE_TARGET": one_target,
            "BLOCK_H": self.block_r if one_target else padded_width(num_heads),
            "BLOCK_P": padded_width(num_positions),
            "BLOCK_A": padded_width(num_ages),
        }
        block_r = 1 << (self.rows_of_slot - 1).bit_length()
        block_d = min(padded_width(width), max(16, 1024 // block_r))
        self.column_blocks = -(-width // block_d)
        self.combine = {
            "LAYOUT": layout,
            "H": num_heads,
            "D": width,
            "BLOCK_R": block_r,
            "BLOCK_D": block_d,
            "CHUNK": self.chunk,
            "SLOT": self.slot,
            "num_warps": 1,
            **overlap_options(overlap),
            **(passes if backward else {}),
        }

    def rows_of(self, x: Tensor) -> TensorDescriptor:
        """Boxes of rows of ``x``, of its memory as it is, for the kernels of groups."""
        if not x.shape[0]:
            x = x.new_empty(1, self.width)  # there is no descriptor of nothing
        return jagged_rows(x.unsqueeze(1), self.kernel["BLOCK_N"], self.kernel["BLOCK_D"])

    def tiles(self, backward: bool) -> dict:
        """How the work is cut up. Nothing of it may depend on other samples than a row's own.

        Found by trying, on an H200.
        """
        width = padded_width(self.width)
        if self.one_warp:
            return {
                "BLOCK_R": WARP_ROWS,
                "BLOCK_N": 32 if self.half and not backward else 16,
                "BLOCK_D": width,
                "CHUNK": 384 if self.row_bytes <= 128 else 192 if self.half else 128,
                "NUM_STAGES": 4 if self.half and backward else 3 if self.row_bytes < 1024 else 2,
                "num_warps": 1,
            }
        if self.by_group:
            # Registers for as many programs on a multiprocessor as its shared memory holds, where
            # none has to lie in memory while rows are multiplied.
            registers = 168 if backward or self.bias or self.buckets else 128
            if self.rows > 32 or (backward and self.buckets):
                registers = 255
            return {
                "BLOCK_R": padded_width(self.rows),
                "BLOCK_N": 64,
                "BLOCK_D": max(64, width),
                **({"COLUMNS": 64} if backward else {}),
                "CHUNK": 512,
                "NUM_STAGES": 2,
                "num_warps": 4,
                "maxnreg": registers,
            }
        if self.by_warps:
            block_r = padded_width(self.rows)
            return {
                "BLOCK_R": block_r,
                "BLOCK_N": max(32, block_r) if backward else 64 if self.half else 16,
                "BLOCK_D": width,
                "CHUNK": 512 if self.half else 256,
                "NUM_STAGES": 3 if self.half or not backward else 2,
                "num_warps": block_r // 16,
            }
        block_r = min(padded_width(self.rows), 64, 32768 // self.row_bytes)
        exact = self.precision in ("ieee", "bf16x6")  # operands and their parts lie in registers
        bytes_of_tile = 16384 if backward or exact else 32768
        rows_of_slot = block_r if self.layout == JAGGED else min(self.rows, block_r)
        return {
            "BLOCK_R": block_r,
            "BLOCK_N": max(16, min(64, bytes_of_tile // self.row_bytes)),
            "BLOCK_D": width,
            "CHUNK": max(128, 16 * rows_of_slot),
            "NUM_STAGES": 3 if self.row_bytes < 512 else 2,
            "num_warps": 4 if self.row_bytes < 1024 else 8,
        }


_plan = functools.lru_cache(maxsize=1024)(_Plan)


def paths(device: torch.device) -> dict[str, str]:
    """What :class:`_Plan` gives to kernels in Gluon on ``device``, by the name of these."""
    if not devices.gluon_shared_memory(device):
        return {}
    found = {
        "gluon": "as many targets for each sample, history rows at multiples of 16 bytes, tables "
        f"of up to {BUCKETS_OF_WARPS} buckets together, a bias of each row with one target only",
        "gluon, one warp": f"of those, up to {WARP_ROWS} query rows (targets × heads) of a sample, "
        "width <= 256",
    }
    few = f"of those, {WARP_ROWS + 1} to 64 query rows, width <= 128"
    if devices.gluon_shared_memory(device) > ROOM_OF_WARPS:
        found["gluon, a few warps"] = (
            f"{few}: fp32 of up to 32; half precision, backward with tables only"
        )
    if devices.hopper_multiprocessors(device):
        found["gluon, wgmma"] = (
            f"{few}, before a few warps: half precision, rows that do not overlap; backward "
            f"without a bias of each row, of up to {BUCKETS.value} buckets in a table"
        )
    return found


def _room_for_groups(history: Tensor) -> bool:
    """Whether the kernels of warpgroups run there, and rows are not too many for them."""
    return devices.hopper_multiprocessors(history.device) > 0 and history.shape[0] <= END.value


def _sum_of_tables(tables: Tensor, overlap: bool) -> Tensor:
    """``[buckets, H]``: sums of ``[tables, buckets, targets, H]``, in two parallel steps."""
    num_tables, buckets, targets, num_heads = tables.shape
    size = buckets * num_heads
    constants = {"H": num_heads, "BLOCK": 128, "COLUMNS": 8, **overlap_options(overlap)}
    groups = tables.new_empty(32, buckets, num_heads)
    programs = -(-size // 8)
    _sum_tables((programs, 32), (tables, groups, num_tables, targets, size), constants)
    out = tables.new_empty(buckets, num_heads)
    _sum_tables((programs, 1), (groups, out, 32, 1, size), constants)
    return out


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _aligned(tensor: Tensor) -> Tensor:
    """``tensor`` where copies of 16 bytes can begin, if need be a copy."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _unit_stride(x: Tensor) -> Tensor:
    """``x`` as it is, if the elements of a row are next to each other, else a copy."""
    return x if x.stride(-1) == 1 or x.numel() == 0 else x.contiguous()
