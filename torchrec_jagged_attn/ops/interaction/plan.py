"""Kernel variants of the softmax ops, one of which the kernels choose for each sample."""

from __future__ import annotations

from torchrec_jagged_attn.ops.dispatch import KernelVariant

# Most rows of a sample whose columns are read several times, from cache.
MAX_SHORT_LENGTH = 1024
# Most rows of y of a sample whose rows of pairs fit in one tile.
MAX_TILE_LENGTH = 512

VARIANTS = {
    "jagged_softmax": (
        KernelVariant("short", samples=f"samples of up to {MAX_SHORT_LENGTH} rows"),
        KernelVariant("multi_pass"),
    ),
    "jagged2_softmax": (
        KernelVariant("single_tile", samples=f"samples of up to {MAX_TILE_LENGTH} rows of y"),
        KernelVariant("multi_pass"),
    ),
}
