"""Dispatch of jagged flash attention: kernel variants, their conditions, and tile sizes.

``VARIANTS`` lists the kernel variants. Some of them compute short samples only, each in one tile;
the others divide samples into tiles (``tile_list.py``). Tile sizes were the fastest on an H200.

A plan does not depend on lengths, which kernels read on the device, nor on the number of rows and
samples, except whether tensors are empty and whether their indices fit in int32. So results are
batch-invariant, and a model has one plan for all batches.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from torchrec_jagged_attn.base import devices
from torchrec_jagged_attn.ops.device.matmul import (
    MAX_DECOMPOSED_WIDTH,
    gradient_precision,
    padded_width,
)
from torchrec_jagged_attn.ops.dispatch import Choice, Condition, KernelVariant, choose
from torchrec_jagged_attn.ops.flash_attention.kernels import hopper_short
from torchrec_jagged_attn.ops.flash_attention.kernels.records import Constants


class Call(NamedTuple):
    """Properties of a call that determine its plan."""

    device: torch.device
    on_hopper: bool  # whether the device is a Hopper GPU
    dtype: torch.dtype
    precision: str  # precision of products, see ``product_precision``
    shared_memory: int  # maximum bytes of shared memory of a program
    num_heads: int  # heads of queries
    num_key_heads: int  # heads of keys and values
    width: int  # width of queries and keys
    value_width: int  # width of values
    has_bias: bool  # whether keys have a bias or prior weights
    has_dropout: bool  # whether there is dropout of attention weights
    position_buckets: int  # rows of ``position_bias``, 0 without it
    age_buckets: int  # rows of ``age_bias``, 0 without it
    distance_buckets: int  # rows of ``relative_bias``, 0 without it
    causal: bool
    negative_scale: bool
    fits_int32: bool  # whether the number of (sample, head) pairs fits in int32
    # Whether the inputs, and in backward the gradients, are not empty and can be addressed by the
    # tensor memory accelerator
    tma_compatible: bool = True

    @property
    def padded_width(self) -> int:
        """Columns of the tiles of queries, keys and values.

        Tiles of values are not narrower, since results would be wrong with Triton 3.6 on an H200.
        """
        return padded_width(max(self.width, self.value_width))

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of a tile."""
        return self.padded_width * self.dtype.itemsize

    @property
    def biased_by_keys(self) -> bool:
        """Whether scores have a bias by the row, position or age of the key."""
        return self.has_bias or self.position_buckets > 0 or self.age_buckets > 0

    @property
    def biased(self) -> bool:
        """Whether scores have any bias."""
        return self.biased_by_keys or self.distance_buckets > 0


def _is_hopper(device: torch.device) -> bool:
    return devices.hopper_multiprocessors(device) > 0


_HALF = Condition("half precision", lambda call: call.dtype.itemsize == 2)
_NO_DROPOUT = Condition("no dropout of weights", lambda call: not call.has_dropout)
_WIDTHS = Condition("widths of at most 128", lambda call: call.padded_width <= 128)
_NO_BIAS = Condition("no bias", lambda call: not call.biased)
_NO_BIAS_BY_KEY = Condition("no bias but by distance", lambda call: not call.biased_by_keys)
# These kernels assume that the largest product has the largest score. The general kernels negate
# queries if the scale is negative.
_SCALE = Condition("scale >= 0", lambda call: not call.negative_scale)
_TMA_COMPATIBLE = Condition(
    "q, k and v have rows, with widths, strides and addresses of multiples of 16 bytes",
    lambda call: call.tma_compatible,
)

VARIANTS = (
    KernelVariant(
        "hopper_short",
        (
            _HALF,
            _NO_DROPOUT,
            _NO_BIAS,
            _SCALE,
            Condition(
                f"a larger width of 33 to {hopper_short.WIDTH}",
                lambda call: call.padded_width == hopper_short.WIDTH,
            ),
            _TMA_COMPATIBLE,
            Condition("samples times heads below 2^31", lambda call: call.fits_int32),
        ),
        runs_on=_is_hopper,
        device="a Hopper GPU",
        samples=f"samples of at most {hopper_short.MAX_ROWS} rows on both sides",
    ),
    KernelVariant(
        "general_short",
        (
            _HALF,
            _NO_BIAS_BY_KEY,
            _WIDTHS,
        ),
        samples="samples of at most 64 rows on both sides, or 32 at widths over 64",
    ),
    KernelVariant(
        "hopper",
        (
            _HALF,
            _NO_BIAS_BY_KEY,
            _SCALE,
            _WIDTHS,
            _TMA_COMPATIBLE,
        ),
        runs_on=_is_hopper,
        device="a Hopper GPU",
    ),
    KernelVariant("general"),
)
_LONG_SAMPLE_VARIANTS = tuple(variant for variant in VARIANTS if not variant.samples)


@dataclass(frozen=True)
class Plan:
    """The kernel variants of a call, and their compile-time constants."""

    call: Call
    short_samples: Choice  # the variant for short samples; ``long_samples`` if none is short
    long_samples: Choice  # the variant for all other samples
    max_short_rows: int  # maximum rows of a short sample; 0 if none is short
    rows_per_group: int  # argument of ``list_tiles`` for tiles of keys on Hopper
    constants: Constants = field(repr=False)  # of all kernels, without strides and tile sizes

    @property
    def long_on_hopper(self) -> bool:
        """Whether the variant for long samples is ``hopper``."""
        return self.long_samples.variant == "hopper"

    @property
    def short_on_hopper(self) -> bool:
        """Whether the variant for short samples is ``hopper_short``."""
        return self.short_samples.variant == "hopper_short"

    @functools.cached_property
    def short(self) -> list[dict[str, Any]]:
        """Tiles of the kernels of ``general_short``, one for each launch."""
        warps = 1 if self.call.row_bytes <= 128 else 2
        tiles = [{"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": warps}]
        if self.max_short_rows == 64:
            tiles.append({"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "SHORT": 32})
        return tiles

    @functools.cached_property
    def forward(self) -> dict[str, Any]:
        """Tile of the general forward kernel."""
        if self._is_decomposed:
            return self._decomposed_tile(64, 32)
        if self._is_small:
            return self._small
        stages = 2 if self.call.biased or self.call.dtype.itemsize == 4 else 3
        return {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": stages}

    @functools.cached_property
    def grad_q(self) -> dict[str, Any]:
        """Tile of the general kernel for the gradient of queries."""
        if self._is_decomposed:
            return self._decomposed_tile(64, 32)
        if self._is_small:
            return self._small
        stages = 4 if self.call.row_bytes <= 128 else 3
        return {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4, "num_stages": stages}

    @functools.cached_property
    def grad_kv(self) -> dict[str, Any]:
        """Tile of the general kernel for the gradients of keys and values."""
        if self._is_decomposed:
            return self._decomposed_tile(32, 32)
        if self._is_small:
            return self._small
        tile = {"BLOCK_M": 32, "BLOCK_N": 64, "num_warps": 4}
        if self.call.row_bytes <= 128 and not self.call.biased:
            return tile | {"num_stages": 2, "maxnreg": 128}
        return tile | {"num_stages": 3}

    @functools.cached_property
    def grad_relative(self) -> dict[str, Any]:
        """Tile of the kernel for the gradient of ``relative_bias``."""
        stages = 2 if self.call.row_bytes <= 128 else 1
        tile = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": stages}
        if self._is_decomposed and self.call.on_hopper and self.call.padded_width <= 128:
            tile["num_stages"] = 1
        elif self._is_small:
            tile = self._small | {"num_stages": 1, "PRECISION": _plain_precision(self.call)}
        return tile | {"BLOCKS_R": padded_width(self.call.distance_buckets) // 16}

    @property
    def _is_decomposed(self) -> bool:
        """Whether fp32 products are decomposed into products of bf16."""
        return self.constants.PRECISION == "bf16x8"

    def _decomposed_tile(self, block_m: int, block_n: int) -> dict[str, Any]:
        """Return a tile for decomposed products, ``block_m × block_n`` at a width of 128."""
        stages = 2
        if not self.call.on_hopper:  # operands are in registers: larger tiles spill
            block_m = block_n = 32 if self.call.padded_width <= 64 else 16
        elif self.call.padded_width <= 64:
            block_m, block_n, stages = 64, 64, 1
        elif self.call.padded_width == 256:
            block_m, block_n = 16, 16
        return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": 4, "num_stages": stages}

    @property
    def _is_small(self) -> bool:
        """Whether operands of the usual tiles do not fit in shared memory or registers."""
        return self.call.row_bytes > 256 or _plain_precision(self.call) == "ieee"

    @functools.cached_property
    def _small(self) -> dict[str, Any]:
        """Tile for ``"ieee"`` products or wide rows, limited by shared memory.

        The gradient of keys needs most of it: four operands, or five with TF32, and scores.
        """
        call, precision = self.call, _plain_precision(self.call)
        # "ieee" operands are in registers, where scores of larger blocks would spill as well. Other
        # operands are in shared memory, in tiles of up to 32 KiB.
        max_block, max_bytes = (32, 8192) if precision == "ieee" else (64, 32768)
        block = max(16, min(max_block, max_bytes // call.row_bytes))
        operands = 5 if call.dtype.itemsize == 4 and precision == "tf32" else 4
        while block > 16 and (
            block * (operands * call.row_bytes + 4 * block + 16) > call.shared_memory
        ):
            block //= 2
        warps = 4 if call.row_bytes < 512 else 8
        return {"BLOCK_M": block, "BLOCK_N": block, "num_warps": warps, "num_stages": 2}


def _plain_precision(call: Call) -> str:
    """Return the precision of fp32 products without decomposition."""
    return "ieee" if call.precision == "bf16x6" else call.precision


def _max_short_rows(call: Call, variant: str) -> int:
    if not variant.endswith("short"):
        return 0
    return 64 if call.padded_width <= 64 else 32


@functools.cache
def plan_of(call: Call) -> Plan:
    """Return the plan for ``call``."""
    short = choose(VARIANTS, call.device, call)
    precision = _plain_precision(call)
    if call.padded_width <= MAX_DECOMPOSED_WIDTH:
        precision = gradient_precision(call.precision)
    return Plan(
        call=call,
        short_samples=short,
        long_samples=choose(_LONG_SAMPLE_VARIANTS, call.device, call),
        max_short_rows=_max_short_rows(call, short.variant),
        rows_per_group=2**16 // (1 << (call.num_key_heads - 1).bit_length()),
        constants=Constants(
            H=call.num_heads,
            HK=call.num_key_heads,
            D=call.width,
            DV=call.value_width,
            BLOCK_D=call.padded_width,
            CAUSAL=call.causal,
            NEGATIVE=call.negative_scale,
            EXACT=call.dtype == torch.float32,
            PRECISION=precision,
            P=call.position_buckets,
            A=call.age_buckets,
            R=call.distance_buckets,
            BIASED=call.biased,
        ),
    )
