"""Dispatch of the interaction ops: kernel variants and their conditions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_jagged_attn import devices
from torchrec_jagged_attn.runtime.dispatch import Condition, KernelVariant
from torchrec_jagged_attn.runtime.kernels.tma import is_addressable

# With fewer rows of x per sample, tiles of x are mostly empty: the general kernel, which needs no
# list of tiles, is then as fast or faster on an H200.
MIN_MEAN_ROWS = 128
# Longest columns that are read several times, from cache.
LONGEST_COLUMN = 1024
# Longest rows of pairs that are read once, into one tile.
LONGEST_WHOLE_ROW = 512


class PairProduct(NamedTuple):
    """Operands of a product of pairs, on which its variant depends."""

    x: Tensor  # [Nx, D], not empty
    y: Tensor  # [Ny, D], not empty
    num_samples: int  # ``B``


def _can_copy_rows(call: PairProduct) -> bool:
    """Whether the tensor memory accelerator can address the rows of x and y."""
    return all(t.stride(1) == 1 and is_addressable(t.unsqueeze(1)) for t in (call.x, call.y))


# By op. The kernels of a product of pairs are bit-equal, so that the mean length, which depends on
# other samples, may decide. Softmax kernels decide per sample, on the device.
VARIANTS = {
    "jagged_jagged_bmm_jagged_out": (
        KernelVariant(
            "hopper_pairs",
            (
                Condition(
                    "half precision", lambda call: call.x.dtype in (torch.bfloat16, torch.float16)
                ),
                Condition(
                    f"{MIN_MEAN_ROWS} rows of x or more per sample in the mean",
                    lambda call: call.x.shape[0] >= MIN_MEAN_ROWS * call.num_samples,
                ),
                Condition("a width of 8 to 128", lambda call: 0 < call.x.shape[1] <= 128),
                Condition(
                    "a width that 8 divides, rows at multiples of 16 bytes that do not overlap",
                    _can_copy_rows,
                ),
            ),
            runs_on=lambda device: devices.hopper_multiprocessors(device) > 0,
            device="a Hopper GPU",
        ),
        KernelVariant("general"),
    ),
    "jagged_softmax": (
        KernelVariant("short_columns", samples=f"samples of up to {LONGEST_COLUMN} rows"),
        KernelVariant("long_lines"),
    ),
    "jagged2_softmax": (
        KernelVariant("whole_rows", samples=f"samples of up to {LONGEST_WHOLE_ROW} rows of y"),
        KernelVariant("long_lines"),
    ),
}
