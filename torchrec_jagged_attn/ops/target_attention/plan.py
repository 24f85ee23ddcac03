"""Dispatch of target attention: the kernel variant of a call, its tiles and its chunks.

The variants, the fastest first, for R query rows (targets × heads) of a sample:

    one_warp     a warp holds all query rows; R up to 8
    warpgroup    four warps share wgmma products, on Hopper; R of 9 to 64, half precision
    general      Triton kernels for any call: any R, any width, jagged queries

Plans do not depend on the number of samples and rows, and the chunks of a sample depend on its own
length alone: results are batch-invariant.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from torchrec_jagged_attn.base import devices
from torchrec_jagged_attn.codes import codes_per_byte
from torchrec_jagged_attn.ops.device.matmul import MAX_DECOMPOSED_WIDTH, padded_width
from torchrec_jagged_attn.ops.dispatch import Condition, KernelVariant, choose
from torchrec_jagged_attn.ops.launch import overlap_options
from torchrec_jagged_attn.ops.target_attention.kernels import schedule
from torchrec_jagged_attn.ops.target_attention.kernels.records import Constants
from torchrec_jagged_attn.ops.target_attention.kernels.warp_common import BLOCK_R

# As plain integers: comparing Triton constants takes host time.
DENSE, SHARED, JAGGED = (
    layout.value for layout in (schedule.DENSE, schedule.SHARED, schedule.JAGGED)
)
ONE_WARP_ROWS = BLOCK_R.value
MOST_BUCKETS = 256  # of both tables, which are in shared memory or registers
# In forward, there is room for so many partial results (one for each block of queries) per CHUNK
# rows. They take up to one byte per element of the history.
MAX_PARTIALS_PER_CHUNK = 4


class Call(NamedTuple):
    """Properties of a call, on which its plan depends."""

    device: torch.device  # of the tensors
    backward: bool  # whether gradients are computed, else outputs
    layout: int  # of queries: DENSE, SHARED or JAGGED
    num_targets: int  # of each sample; 0 if queries are JAGGED
    num_heads: int  # of a target
    width: int  # of queries and history rows
    num_positions: int  # buckets of the table of positions; 0 without one
    num_ages: int  # buckets of the table of ages; 0 without one
    has_prior_weights: bool
    dropout: bool  # whether there is dropout of weights
    element_size: int  # bytes of an element of queries
    history_stride: int  # elements from one history row to the next
    aligned: bool  # whether the history begins at a multiple of 16 bytes
    tma_compatible: bool  # whether the history has few enough rows for a TMA descriptor
    precision: str  # of products, see ``matmul.product_precision``
    score: str = "softmax"  # from scores to weights, see ``arguments.SCORES``
    has_indices: bool = False  # whether there are gather indices of history rows
    num_levels: int = 0  # of packed codes; 0 if history rows are not packed

    @property
    def query_rows(self) -> int:
        """Query rows of a sample; if JAGGED, for eight targets per sample.

        The mean of the batch would make results depend on other samples.
        """
        return (8 if self.layout == JAGGED else self.num_targets) * self.num_heads

    @property
    def buckets(self) -> int:
        """Buckets of both tables together."""
        return self.num_positions + self.num_ages

    @property
    def half(self) -> bool:
        """Whether queries have half precision."""
        return self.element_size == 2

    @property
    def has_codes(self) -> bool:
        """Whether history rows are packed codes."""
        return self.num_levels > 0

    @property
    def row_bytes(self) -> int:
        """Bytes of a history row in a tile, in the dtype of products."""
        return padded_width(self.width) * self.element_size


def _rows_are_aligned(x: Call) -> bool:
    in_pieces = (x.width | x.history_stride) % (16 // x.element_size) == 0
    return x.has_codes or (x.aligned and in_pieces)


_GLUON = (
    Condition("the same number of targets in each sample", lambda x: x.layout != JAGGED),
    Condition("history rows at multiples of 16 bytes, or packed codes", _rows_are_aligned),
    Condition(
        f"bias tables of up to {MOST_BUCKETS} buckets together", lambda x: x.buckets <= MOST_BUCKETS
    ),
)
VARIANTS = (
    KernelVariant(
        "one_warp",
        (
            Condition(
                f"up to {ONE_WARP_ROWS} query rows (targets × heads) a sample",
                lambda x: x.query_rows <= ONE_WARP_ROWS,
            ),
            Condition("width up to 256", lambda x: x.width <= 256),
            *_GLUON,
        ),
        runs_on=lambda device: devices.gluon_shared_memory(device) > 0,
        device="an Ampere GPU or later",
    ),
    KernelVariant(
        "warpgroup",
        (
            Condition(
                f"{ONE_WARP_ROWS + 1} to 64 query rows (targets × heads) a sample",
                lambda x: ONE_WARP_ROWS < x.query_rows <= 64,
            ),
            Condition("width up to 128", lambda x: x.width <= 128),
            Condition("half precision", lambda x: x.half),
            *_GLUON,
            Condition("no packed codes", lambda x: not x.has_codes),
            Condition("history rows that do not overlap", lambda x: x.history_stride >= x.width),
            Condition("no gather indices: TMA reads consecutive rows", lambda x: not x.has_indices),
            Condition("fewer than 2³⁰ history rows", lambda x: x.tma_compatible),
        ),
        runs_on=lambda device: devices.hopper_multiprocessors(device) > 0,
        device="a Hopper GPU",
    ),
    KernelVariant("general"),
)


class Plan:
    """The kernels of forward or backward, their tiles, and their compile-time arguments.

    Attributes:
        choice: the variant that serves ``call``, and why faster variants do not.
        has_schedule: whether programs find their chunk in a ``records.SplitSchedule``, and the last
            program of a sample combines its chunks.
        overlap: whether launches overlap.
        block_r: query rows of a block.
        num_blocks: blocks of a sample, unless queries are JAGGED.
        chunk: fewest history rows of a chunk.
        rows_per_partial: history rows per partial result, see ``schedule.py``.
        partial_rows: query rows of a partial result.
        one_block: whether backward may have samples of one block, computed in a single pass.
        several_blocks: whether backward may have other samples.
        kernel, combine, split_schedule: compile-time arguments and launch options of kernels.
        column_blocks: programs per partial result of the kernels that combine partial results.
        rows, combine_rows: like ``kernel``, for gradients of rows with gather indices.
    """

    def __init__(self, call: Call) -> None:
        x = self.call = call
        self.choice = choose(VARIANTS, x.device, x)
        self.variant = self.choice.variant
        self.overlap = devices.launches_overlap(x.device)
        self.has_schedule = self.variant in ("one_warp", "warpgroup")
        self.tiles = tiles_of(self.variant, x)
        self.block_r = self.tiles["BLOCK_R"]
        self.chunk = self.tiles["CHUNK"]
        jagged = x.layout == JAGGED
        self.num_blocks = -(-x.query_rows // self.block_r)
        blocks = MAX_PARTIALS_PER_CHUNK if jagged else self.num_blocks
        if x.backward:  # memory is scarcest, and programs of whole samples take longer anyway
            blocks = 1
        self.rows_per_partial = self.chunk // max(1, min(MAX_PARTIALS_PER_CHUNK, blocks))
        self.partial_rows = self.block_r if jagged else min(x.query_rows, self.block_r)
        # A single pass computes delta from outputs. In the Triton kernels that is less exact than
        # fp32.
        single_pass = x.half or self.variant == "one_warp"
        self.one_block = single_pass and (jagged or x.query_rows <= self.block_r)
        self.several_blocks = jagged or not self.one_block

        self.kernel = self._kernel(single_pass)
        self.split_schedule = {
            "CHUNK": self.chunk,
            "BLOCK_B": schedule.SAMPLES_PER_PROGRAM,
            "OVERLAP": self.overlap,
        }
        block_r = 1 << (self.partial_rows - 1).bit_length()
        block_d = min(padded_width(x.width), max(16, 1024 // block_r))
        self.column_blocks = -(-x.width // block_d)
        self.combine = _arguments(
            LAYOUT=x.layout,
            H=x.num_heads,
            D=x.width,
            BLOCK_R=block_r,
            BLOCK_D=block_d,
            CHUNK=self.chunk,
            ROWS_PER_PARTIAL=self.rows_per_partial,
            SINGLE_PASS=single_pass,
            num_warps=1,
            **overlap_options(self.overlap),
        )
        self.combine_rows = _arguments(**_inputs(x), num_warps=4, **_tiles_of_rows(x))
        self.rows = self.combine_rows | {
            "ONE_BLOCK": not jagged and x.query_rows <= self.combine_rows["C"].BLOCK_R,
            "num_warps": 1,
        }

    def _kernel(self, single_pass: bool) -> dict[str, Any]:
        """Compile-time arguments and launch options of the variant's main kernels."""
        x = self.call
        arguments: dict[str, Any] = {
            "COMPONENTS": 1 if x.half else 2 if x.precision == "tf32" else 3
        }
        if self.variant == "general":
            arguments = {
                "PRECISION": _precision_of_general(x),
                "ROWS_PER_PARTIAL": self.rows_per_partial,
            }
        if self.variant == "general" and x.backward:
            one_target = x.num_targets == 1 and x.query_rows <= self.block_r
            arguments |= {
                "SINGLE_PASS": single_pass,
                "ONE_TARGET": one_target,
                "BLOCK_H": self.block_r if one_target else padded_width(x.num_heads),
                "BLOCK_P": padded_width(x.num_positions),
                "BLOCK_A": padded_width(x.num_ages),
            }
        if self.has_schedule:
            arguments |= overlap_options(self.overlap)
        return _arguments(**_inputs(x), **self.tiles, **arguments)


def _inputs(x: Call) -> dict[str, Any]:
    """Compile-time arguments of all kernels that compute scores."""
    return {
        "LAYOUT": x.layout,
        "H": x.num_heads,
        "D": x.width,
        "STRIDE": x.history_stride,
        "P": x.num_positions,
        "A": x.num_ages,
        "SCORE": x.score,
        "LEVELS": x.num_levels,
        "PER_BYTE": codes_per_byte(x.num_levels) if x.has_codes else 0,
    }


def _tiles_of_rows(x: Call) -> dict[str, int]:
    """Tiles of gradients of rows with gather indices: BLOCK_N positions × BLOCK_R query rows.

    A warp holds 512 elements of queries in registers, and as many of gradients of outputs.
    """
    width = padded_width(x.width)
    pairs = max(1, 512 // width)
    block_r = min(pairs, 1 << (max(1, x.query_rows) - 1).bit_length())
    return {
        "BLOCK_R": block_r,
        "BLOCK_N": 1 if x.layout == JAGGED else min(4, pairs // block_r),
        "BLOCK_D": width,
        "CHUNK": 32,
    }


def _precision_of_general(x: Call) -> str:
    """Precision of products in the Triton kernels: for wide rows, components do not fit in
    registers, and tensor cores truncate too often in sums over so many columns.
    """
    if x.precision == "bf16x6" and x.width > MAX_DECOMPOSED_WIDTH:
        return "ieee"
    return x.precision


def _arguments(**values: Any) -> dict[str, Any]:
    """Arguments of a launch: constants of the kernel (in capitals), and launch options."""
    options = {name: value for name, value in values.items() if name.islower()}
    constants = {name: value for name, value in values.items() if name.isupper()}
    return {"C": Constants(**constants), **options}


plan_of = functools.lru_cache(maxsize=1024)(Plan)


def tiles_of(variant: str, x: Call) -> dict[str, int]:
    """Tiles of a ``variant``, tuned on an H200.

    They must not depend on the number of samples and rows: see the top of this file.
    """
    width = padded_width(x.width)
    if variant == "one_warp":
        by_lane = x.has_codes and width < 256  # a lane unpacks a row of codes
        stages = 4 if x.half and x.backward else 3 if x.row_bytes < 1024 else 2
        return {
            "BLOCK_R": ONE_WARP_ROWS,
            "BLOCK_N": 32 if by_lane or (x.half and not x.backward) else 16,
            "BLOCK_D": width,
            "CHUNK": 384 if x.row_bytes <= 128 else 192 if x.half else 128,
            "NUM_STAGES": 2 if x.has_codes else stages,
            "num_warps": 1,
        }
    if variant == "warpgroup":
        # As many programs on a multiprocessor as its shared memory holds, if registers do not spill
        # in the main loop.
        needs_registers = x.backward or x.has_prior_weights or x.buckets or x.dropout
        registers = 168 if needs_registers else 128
        if x.query_rows > 32 or (x.backward and x.buckets):
            registers = 255
        return {
            "BLOCK_R": padded_width(x.query_rows),
            "BLOCK_N": 64,
            "BLOCK_D": max(64, width),
            "CHUNK": 512,
            "NUM_STAGES": 2,
            "num_warps": 4,
            "maxnreg": registers,
        }
    block_r = min(padded_width(x.query_rows), 64, 32768 // x.row_bytes)
    exact = x.precision in ("ieee", "bf16x6")  # operands are in registers
    bytes_of_tile = 16384 if x.backward or exact else 32768
    partial_rows = block_r if x.layout == JAGGED else min(x.query_rows, block_r)
    return {
        "BLOCK_R": block_r,
        "BLOCK_N": max(16, min(64, bytes_of_tile // x.row_bytes)),
        "BLOCK_D": width,
        "CHUNK": 1024 if x.has_codes else max(128, 16 * partial_rows),  # rows of codes are small
        "NUM_STAGES": 3 if x.row_bytes < 512 else 2,
        "num_warps": 4 if x.row_bytes < 1024 else 8,
    }
