"""Target attention: a few query rows per sample over that sample's history rows.

Keys and values are the same rows ``x``. With R query rows per sample (targets × heads, in this
order), N history rows of width D and e bytes an element:

    forward    reads x once per block of query rows: N·D·e bytes, 4·N·R·D FLOPs
    backward   reads x and writes dx once: 2·N·D·e bytes, 10·N·R·D FLOPs, in half precision where
               one block holds the query rows of a sample; else reads x once more for each block:
               14·N·R·D FLOPs

Histories are cut into chunks, so that a long one is spread over the GPU; the sums of a sample's
chunks are brought together by a kernel of their own, in their order. Nothing is accumulated by
atomics, and where a sample is cut depends on itself alone.
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

from torchrec_jagged_attn.kernels import target_schedule
from torchrec_jagged_attn.kernels.block_backward import backward_kernel as block_backward_kernel
from torchrec_jagged_attn.kernels.block_forward import forward_kernel as block_forward_kernel
from torchrec_jagged_attn.kernels.common import padded_width, product_precision
from torchrec_jagged_attn.kernels.launch import Launcher
from torchrec_jagged_attn.kernels.target_backward import grad_history_kernel, grad_query_kernel
from torchrec_jagged_attn.kernels.target_combine import (
    combine_gradients_kernel,
    combine_outputs_kernel,
    sum_tables_kernel,
)
from torchrec_jagged_attn.kernels.target_forward import forward_kernel
from torchrec_jagged_attn.kernels.warp_backward import backward_kernel as warp_backward_kernel
from torchrec_jagged_attn.kernels.warp_forward import forward_kernel as warp_forward_kernel
from torchrec_jagged_attn.kernels.warp_tiles import BLOCK_R

__all__ = ["backward", "forward"]

# As plain numbers: comparing those of Triton takes host time.
DENSE, SHARED, JAGGED = (
    layout.value
    for layout in (target_schedule.DENSE, target_schedule.SHARED, target_schedule.JAGGED)
)
WARP_ROWS = BLOCK_R.value

_forward = Launcher(forward_kernel)
_combine_outputs = Launcher(combine_outputs_kernel)
_grad_query = Launcher(grad_query_kernel)
_grad_history = Launcher(grad_history_kernel)
_combine_gradients = Launcher(combine_gradients_kernel)
_sum_tables = Launcher(sum_tables_kernel)
_warp_forward = Launcher(warp_forward_kernel)
_warp_backward = Launcher(warp_backward_kernel)
_block_forward = Launcher(block_forward_kernel)
_block_backward = Launcher(block_backward_kernel)


def forward(
    query: Tensor,
    history: Tensor,
    offsets: Tensor,
    query_offsets: Tensor | None,
    bias: Tensor | None,
    position_bias: Tensor | None,
    age_bias: Tensor | None,
    timestamps: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output of ``[B, T, H, D]``, ``[1, T, H, D]`` or ``[ΣT, H, D]`` queries, and for backward what
    it was rounded by (no element in fp32), and statistics.
    """
    shape = list(query.shape)
    if query_offsets is None:
        shape[0] = offsets.numel() - 1
    out = query.new_empty(shape)
    rest = query.new_empty(shape if query.element_size() == 2 else [0])
    stats = query.new_empty([2, *shape[:-1]], dtype=torch.float32)
    if out.numel() == 0:
        return out, rest, stats
    rest_or_none = rest if query.element_size() == 2 else None
    call = _Call(query, history, offsets, query_offsets, bias, position_bias, age_bias, timestamps)
    tiles = call.tiles(backward=False)
    num_slots = call.num_rows // tiles["CHUNK"]
    room = call.rows_of_slot(tiles["BLOCK_R"])
    sums = stats.new_empty([num_slots, room, call.width])
    sums_stats = stats.new_empty([num_slots, 2, room])
    outputs = (out, rest_or_none, stats, sums, sums_stats)
    if call.by_warps(backward=False):
        (_warp_forward if call.one_warp else _block_forward)(
            (num_slots + call.num_samples,),
            (*call.inputs, *outputs, call.offsets[0], *call.sizes, num_slots, scale),
            call.warp_constants(tiles),
        )
    else:
        _forward(
            (num_slots + call.num_blocks(tiles["BLOCK_R"]),),
            (
                *call.inputs, *outputs, *call.offsets, *call.sizes,
                num_slots, call.history_stride, scale,
            ),
            call.constants | tiles,
        )  # fmt: skip
    if num_slots:
        constants = call.combine_constants(tiles)
        _combine_outputs(
            call.combine_grid(num_slots, constants),
            (sums, sums_stats, out, rest_or_none, stats, *call.offsets, *call.sizes),
            constants,
        )
    return out, rest, stats


def backward(
    grad_out: Tensor,
    query: Tensor,
    history: Tensor,
    offsets: Tensor,
    query_offsets: Tensor | None,
    bias: Tensor | None,
    position_bias: Tensor | None,
    age_bias: Tensor | None,
    timestamps: Tensor | None,
    out: Tensor,
    rest: Tensor,
    stats: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of ``query``, ``history``, ``bias``, ``position_bias`` and ``age_bias``."""
    call = _Call(query, history, offsets, query_offsets, bias, position_bias, age_bias, timestamps)
    tiles = call.tiles(backward=True)
    by_warps = call.by_warps(backward=True)
    shared = call.layout == SHARED
    rest_or_none = rest if query.element_size() == 2 else None
    grad_query = torch.empty_like(out, dtype=torch.float32 if shared else None)
    grad_history = history.new_empty(history.shape)
    grad_bias = None if bias is None else bias.new_empty(bias.shape)
    num_slots = call.num_rows // tiles["CHUNK"]
    num_programs = num_slots + call.num_samples
    buckets = call.constants["P"] + call.constants["A"]
    targets = call.num_targets if call.one_warp else 1
    grad_tables = None
    if buckets:
        fill = stats.new_empty if by_warps else stats.new_zeros
        grad_tables = fill([num_programs, buckets, targets, call.num_heads])
    sums = stats.new_empty([num_slots, call.rows_of_slot(tiles["BLOCK_R"]), call.width])
    grad_out = grad_out.contiguous()
    sizes = (*call.sizes, num_slots, call.history_stride, scale)
    constants = call.constants | tiles

    # One pass takes the mean gradient from outputs: Triton's kernels not as exactly as fp32 is.
    single_pass = by_warps or query.element_size() == 2
    one_block = single_pass and (call.layout == JAGGED or call.rows <= tiles["BLOCK_R"])
    more_blocks = call.layout == JAGGED or not one_block
    delta = torch.empty_like(stats[0]) if more_blocks else None
    residuals = sums.new_empty(sums.shape[:2]) if more_blocks else None

    def launch_grad_history(one_block: bool) -> None:
        if call.num_samples:
            _grad_history(
                (num_programs,),
                (
                    grad_out, *call.inputs, out, rest_or_none, stats, grad_query, delta,
                    grad_history, grad_bias, grad_tables, sums, *call.offsets, *sizes,
                ),
                constants
                | call.head_constants(tiles)
                | {"SINGLE_PASS": single_pass, "ONE_BLOCK": one_block},
            )  # fmt: skip

    if by_warps and call.num_samples:
        (_warp_backward if call.one_warp else _block_backward)(
            (num_programs,),
            (
                grad_out, *call.inputs, out, rest_or_none, stats, grad_query, grad_history,
                grad_bias, grad_tables, sums, call.offsets[0], *call.sizes, num_slots, scale,
            ),
            call.warp_constants(tiles),
        )  # fmt: skip
    elif one_block:
        launch_grad_history(one_block=True)
    if more_blocks and out.numel():
        _grad_query(
            (num_slots + call.num_blocks(tiles["BLOCK_R"]),),
            (
                grad_out, *call.inputs, out, rest_or_none, stats, grad_query, delta,
                sums, residuals, *call.offsets, *sizes,
            ),
            constants | {"SINGLE_PASS": single_pass},
        )  # fmt: skip
    if num_slots and out.numel():
        of_combine = call.combine_constants(tiles)
        _combine_gradients(
            call.combine_grid(num_slots, of_combine),
            (
                sums, residuals, out, grad_query, delta, *call.offsets,
                call.num_samples, call.num_targets, scale,
            ),
            of_combine | {"SINGLE_PASS": single_pass},
        )  # fmt: skip
    if more_blocks:
        launch_grad_history(one_block=False)
    if shared:
        grad_query = grad_query.sum(0, keepdim=True).to(query.dtype)
    grad_position_bias = grad_age_bias = None
    if grad_tables is not None:
        grad_table = _sum_of_tables(grad_tables, call.overlap)
        of_position, of_age = grad_table.split([call.constants["P"], call.constants["A"]])
        if position_bias is not None:
            grad_position_bias = of_position.to(position_bias.dtype)
        if age_bias is not None:
            grad_age_bias = of_age.to(age_bias.dtype)
    return grad_query, grad_history, grad_bias, grad_position_bias, grad_age_bias


class _Call:
    """What both directions of one call have in common; from shapes alone."""

    def __init__(
        self,
        query: Tensor,
        history: Tensor,
        offsets: Tensor,
        query_offsets: Tensor | None,
        bias: Tensor | None,
        position_bias: Tensor | None,
        age_bias: Tensor | None,
        timestamps: Tensor | None,
    ) -> None:
        self.num_samples = offsets.numel() - 1
        self.num_rows = history.shape[0]
        self.num_heads, self.width = query.shape[-2:]
        if query_offsets is not None:
            self.layout = JAGGED
            self.num_targets = 0  # differs by sample
            self.rows = 8 * self.num_heads  # of no batch: results must not depend on other samples
            self.total_rows = query.shape[0] * self.num_heads
        else:
            self.layout = DENSE if query.shape[0] == self.num_samples else SHARED
            self.num_targets = query.shape[1]
            self.rows = self.num_targets * self.num_heads
            self.total_rows = self.num_samples * self.rows
        self.row_bytes = padded_width(self.width) * history.element_size()
        self.precision = product_precision(history.dtype)
        half = history.element_size() == 2
        self.parts = 1 if half else 2 if self.precision == "tf32" else 3
        history = _unit_stride(history)
        self.history_stride = history.stride(0)
        biases = (bias, position_bias, age_bias, timestamps)
        self.inputs = (query.contiguous(), history, *(_contiguous(tensor) for tensor in biases))
        self.offsets = (offsets.contiguous(), _contiguous(query_offsets))
        self.sizes = (self.num_samples, self.num_targets, self.total_rows)
        self.constants = {
            "LAYOUT": self.layout,
            "H": self.num_heads,
            "D": self.width,
            "P": 0 if position_bias is None else position_bias.shape[0],
            "A": 0 if age_bias is None else age_bias.shape[0],
            "PRECISION": self.precision,
        }
        self.overlap = _knows_dependent_launches(history.device)
        self.one_warp = self.few_warps = False
        of_copy = 16 // history.element_size()
        if (
            self.layout != JAGGED
            and (self.width | self.history_stride) % of_copy == 0
            and history.data_ptr() % 16 == 0
            and (bias is None or self.num_targets == 1)
            and self.constants["P"] + self.constants["A"] <= 256  # a table lies in shared memory
        ):
            room = _room_for_warps(history.device)
            self.one_warp = self.rows <= WARP_ROWS and self.width <= 256 and room > 0
            most = 64 if self.parts == 1 else 32
            self.few_warps = WARP_ROWS < self.rows <= most and self.width <= 128 and room > 200_000

    def by_warps(self, backward: bool) -> bool:
        """Whether the kernels of ``warp_tiles.py`` take this direction.

        A few warps are slower backward than ``target_backward.py``, but in fp32 and for tables.
        """
        slower = self.parts == 1 and self.constants["P"] + self.constants["A"] == 0
        return self.one_warp or (self.few_warps and not (backward and slower))

    def num_blocks(self, block_rows: int) -> int:
        """How many blocks of query rows there are at most."""
        if self.layout == JAGGED:
            return self.total_rows // block_rows + self.num_samples
        return self.num_samples * -(-self.rows // block_rows)

    def rows_of_slot(self, block_rows: int) -> int:
        """How many query rows the sums of a chunk have."""
        return block_rows if self.layout == JAGGED else min(self.rows, block_rows)

    def tiles(self, backward: bool) -> dict:
        """How the work is cut up. Nothing of it may depend on other samples than a row's own.

        Found by trying, on an H200.
        """
        width = padded_width(self.width)
        half = self.parts == 1
        if self.one_warp:
            return {
                "BLOCK_R": WARP_ROWS,
                "BLOCK_N": 32 if half and not backward else 16,
                "BLOCK_D": width,
                "CHUNK": 256 if half or self.row_bytes < 512 else 128,
                "NUM_STAGES": 4 if half and backward else 3 if self.row_bytes < 1024 else 2,
                "num_warps": 1,
            }
        if self.by_warps(backward):
            block_r = padded_width(self.rows)
            return {
                "BLOCK_R": block_r,
                "BLOCK_N": max(32, block_r) if backward else 64 if half else 16,
                "BLOCK_D": width,
                "CHUNK": 512 if half else 256,
                "NUM_STAGES": 3 if half or not backward else 2,
                "num_warps": block_r // 16,
            }
        block_r = min(padded_width(self.rows), 64, 32768 // self.row_bytes)
        exact = self.precision in ("ieee", "bf16x6")  # operands and their parts lie in registers
        bytes_of_tile = 16384 if backward or exact else 32768
        return {
            "BLOCK_R": block_r,
            "BLOCK_N": max(16, min(64, bytes_of_tile // self.row_bytes)),
            "BLOCK_D": width,
            "CHUNK": max(128, 16 * self.rows_of_slot(block_r)),
            "NUM_STAGES": 3 if self.row_bytes < 512 else 2,
            "num_warps": 4 if self.row_bytes < 1024 else 8,
        }

    def combine_grid(self, num_slots: int, constants: dict) -> tuple[int, int]:
        """Programs that bring chunks together: one for each slot and block of columns."""
        return num_slots, -(-self.width // constants["BLOCK_D"])

    def combine_constants(self, tiles: dict) -> dict:
        """Compile-time arguments of the kernels that bring chunks together, a warp for each."""
        block_r = 1 << (self.rows_of_slot(tiles["BLOCK_R"]) - 1).bit_length()
        return {
            **{name: self.constants[name] for name in ("LAYOUT", "H", "D")},
            "BLOCK_R": block_r,
            "BLOCK_D": min(padded_width(self.width), max(16, 1024 // block_r)),
            "CHUNK": tiles["CHUNK"],
            "num_warps": 1,
            **_overlap(self.overlap),
        }

    def warp_constants(self, tiles: dict) -> dict:
        """Compile-time arguments of the kernels of ``warp_tiles.py``."""
        names = ("H", "D", "P", "A")
        fixed = {"BLOCK_R"} if self.one_warp else set()
        of_tiles = {name: value for name, value in tiles.items() if name not in fixed}
        return (
            {name: self.constants[name] for name in names}
            | of_tiles
            | {"SHARED": self.layout == SHARED, "STRIDE": self.history_stride, "PARTS": self.parts}
            | {"OVERLAP": self.overlap}
        )

    def head_constants(self, tiles: dict) -> dict:
        """Compile-time arguments of the kernel that sums over heads and buckets."""
        one_target = self.num_targets == 1 and self.rows <= tiles["BLOCK_R"]
        return {
            "ONE_TARGET": one_target,
            "BLOCK_H": tiles["BLOCK_R"] if one_target else padded_width(self.num_heads),
            "BLOCK_P": padded_width(self.constants["P"]),
            "BLOCK_A": padded_width(self.constants["A"]),
        }


@functools.cache
def _knows_dependent_launches(device: torch.device) -> bool:
    of_amd = torch.version.hip is not None  # pyright: ignore[reportAttributeAccessIssue]
    if triton.knobs.runtime.interpret or of_amd or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def _overlap(overlap: bool) -> dict:
    """Compile-time arguments and options of a kernel that may begin before the last one ends."""
    return {"OVERLAP": True, "launch_pdl": True} if overlap else {"OVERLAP": False}


@functools.cache
def _room_for_warps(device: torch.device) -> int:
    """Bytes of shared memory for a program of ``warp_tiles.py``, or 0 where they do not run.

    Gluon has no interpreter, and asynchronous copies need an Ampere GPU or a later one of NVIDIA.
    """
    of_amd = torch.version.hip is not None  # pyright: ignore[reportAttributeAccessIssue]
    if triton.knobs.runtime.interpret or of_amd:
        return 0
    if torch.cuda.get_device_capability(device) < (8, 0):
        return 0
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def _sum_of_tables(tables: Tensor, overlap: bool) -> Tensor:
    """``[buckets, H]``: sums of ``[tables, buckets, targets, H]``, in two parallel steps."""
    num_tables, buckets, targets, num_heads = tables.shape
    size = buckets * num_heads
    constants = {"H": num_heads, "BLOCK": 128, "COLUMNS": 8, **_overlap(overlap)}
    groups = tables.new_empty([32, buckets, num_heads])
    programs = -(-size // 8)
    _sum_tables((programs, 32), (tables, groups, num_tables, targets, size), constants)
    out = tables.new_empty([buckets, num_heads])
    _sum_tables((programs, 1), (groups, out, 32, 1, size), constants)
    return out


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _unit_stride(x: Tensor) -> Tensor:
    """``x`` as it is, if the elements of a row are next to each other, else a copy."""
    return x if x.stride(-1) == 1 or x.numel() == 0 else x.contiguous()
