"""FLOPs of the matrix products of ops, for ``torch.utils.flop_counter.FlopCounterMode``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from torchrec_jagged_attn.base.checks import has_values


def count_flops(op: torch._ops.OpOverload, formula: Callable[..., int]) -> None:
    """Register ``formula`` of the FLOPs of ``op``: a function of its arguments and ``out_val``."""
    packet = op.overloadpacket
    flop_registry.pop(packet, None)  # registered again if a module is reloaded
    register_flop_formula(packet, get_raw=True)(formula)


def attention_flops(pairs: int, width: int, value_width: int, *, backward: bool) -> int:
    """Return the FLOPs of attention for ``pairs`` of query and key rows of one head each.

    Backward is counted as PyTorch counts ``scaled_dot_product_attention``: scores are recomputed,
    and both products have two gradients.
    """
    return 2 * pairs * (3 * width + 2 * value_width if backward else width + value_width)


def pairs_of(
    q_offsets: Tensor,
    num_queries: int,
    kv_offsets: Tensor,
    num_keys: int,
    *,
    causal: bool = False,
    window: int = 0,
) -> int:
    """Return the number of pairs of a query and a key of its sample that it attends to.

    Reads the offsets, which synchronizes with the device. If offsets have no values, as fake
    tensors, all samples are assumed to have the same length.
    """
    lengths = (_lengths(q_offsets, num_queries), _lengths(kv_offsets, num_keys))
    if not causal:
        return sum(queries * keys for queries, keys in zip(*lengths, strict=True))
    return sum(
        _causal_pairs(keys, window) - _causal_pairs(max(keys - queries, 0), window)
        for queries, keys in zip(*lengths, strict=True)
    )


def _lengths(offsets: Tensor, num_rows: int) -> list[int]:
    if has_values(offsets):
        return offsets.diff().tolist()
    num_samples = offsets.shape[0] - 1
    ends = [num_rows * sample // num_samples for sample in range(1, num_samples + 1)]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def _causal_pairs(num_rows: int, window: int) -> int:
    """Return the number of pairs of causal self-attention over ``num_rows``, within ``window``."""
    cut = min(num_rows, window) if window else num_rows
    return cut * (cut + 1) // 2 + (num_rows - cut) * cut
