"""FLOPs of ops, as ``torch.utils.flop_counter.FlopCounterMode`` counts them: those of products."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from torchrec_jagged_attn.checks import has_values


def count_flops(op: torch._ops.OpOverload, formula: Callable[..., int]) -> None:
    """Have PyTorch count what ``formula`` makes of the arguments of ``op``, and ``out_val``."""
    packet = op.overloadpacket
    flop_registry.pop(packet, None)  # of a reload
    register_flop_formula(packet, get_raw=True)(formula)


def attention_flops(pairs: int, width: int, value_width: int, *, backward: bool) -> int:
    """FLOPs of ``pairs`` of queries and keys, of all heads.

    Backward as of ``scaled_dot_product_attention`` in PyTorch: scores are computed once more, and
    each of both products has two gradients.
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
    """How many pairs of a query and a key of its sample see each other.

    Reads the offsets, which waits for the device. Where they have no values, as fake tensors, all
    samples count as equally long.
    """
    lengths = (_lengths(q_offsets, num_queries), _lengths(kv_offsets, num_keys))
    if not causal:
        return sum(queries * keys for queries, keys in zip(*lengths, strict=True))
    return sum(
        _seen_up_to(keys, window) - _seen_up_to(max(keys - queries, 0), window)
        for queries, keys in zip(*lengths, strict=True)
    )


def _lengths(offsets: Tensor, num_rows: int) -> list[int]:
    if has_values(offsets):
        return offsets.diff().tolist()
    num_samples = offsets.shape[0] - 1
    ends = [num_rows * sample // num_samples for sample in range(1, num_samples + 1)]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def _seen_up_to(keys: int, window: int) -> int:
    """Pairs of ``keys`` queries, of which each sees the keys up to its own, within ``window``."""
    cut = min(keys, window) if window else keys
    return cut * (cut + 1) // 2 + (keys - cut) * cut
