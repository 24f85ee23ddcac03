"""Kernel variants of the softmax of pairs, one of which the kernel chooses for each sample."""

from __future__ import annotations

from torchrec_jagged_attn.ops.dispatch import KernelVariant

# Most rows of y of a sample whose rows of pairs fit in one tile.
MAX_TILE_LENGTH = 512

VARIANTS = {
    "jagged2_softmax": (
        KernelVariant("single_tile", samples=f"samples of up to {MAX_TILE_LENGTH} rows of y"),
        KernelVariant("multi_pass"),
    ),
}
