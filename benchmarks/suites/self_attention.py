"""Self-attention of histories by ``jagged_flash_attention``, without projections."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from suites import Cost, Inputs, Suite
from suites._self_attention import PEERS, ours
from tests.cases import Case, make_flash_inputs
from tests.oracles import flash_attention_oracle

BF16 = torch.bfloat16
CASES = {
    case.name: case
    for case in (
        Case("self-256", 512, 256, 4, 64, 1, "uniform", BF16, large=True),
        Case("self-512", 1024, 512, 1, 64, 1, "uniform", BF16, large=True),
        Case("self-1k", 512, 1024, 4, 64, 1, "uniform", BF16, large=True),
        Case("self-2k", 256, 2048, 4, 128, 1, "uniform", BF16, large=True),
        Case("self-4k", 256, 4096, 2, 128, 1, "log-normal", BF16, large=True),
        Case("self-32", 8192, 32, 4, 64, 1, "uniform", BF16, large=True),
        Case("self-64", 4096, 64, 4, 64, 1, "uniform", BF16, large=True),
        Case("cpu-self-200", 64, 200, 4, 64, lengths="uniform"),
        Case("cpu-self-1k", 16, 1024, 4, 64, lengths="log-normal"),
    )
}


def make_inputs(case: Case, device: str) -> Inputs:
    """Return ``q``, ``k`` and ``v`` ``[N, H, D]``."""
    drawn = make_flash_inputs(case, device)
    offsets = drawn.pop("q_offsets")
    leaves = {name: tensor.requires_grad_() for name, tensor in drawn.items()}
    max_length = int(offsets.diff().max())
    return Inputs(case, leaves, offsets, offsets, max_length, max_length)


def by_sample_groups(
    x: Inputs, attention: Callable[..., Tensor], group: int, *shared: Tensor
) -> Tensor:
    """Compute ``attention(q, k, v, offsets, *shared)`` of ``group`` samples at a time.

    Scores are recomputed in backward.
    """
    num_samples = x.offsets.numel() - 1
    cuts = [*range(0, num_samples, group), num_samples]
    rows = x.offsets[cuts].tolist()
    outs = []
    for begin, end, first, last in zip(cuts, cuts[1:], rows, rows[1:], strict=False):
        offsets = x.offsets[begin : end + 1] - first
        qkv = (x.leaves[name][first:last] for name in "qkv")
        outs.append(checkpoint(attention, *qkv, offsets, *shared, use_reentrant=False))
    return torch.cat(outs)


def oracle(x: Inputs) -> Tensor:
    """PyTorch's SDPA on each sample."""
    return by_sample_groups(x, flash_attention_oracle, group=64)


def cost(x: Inputs, num_pairs: int | None = None) -> dict[str, Cost]:
    """Operands and results are moved once. Forward has two products of pairs, backward five."""
    moved = 2 * (x.leaves["q"].nbytes + x.leaves["k"].nbytes)
    pairs = x.num_pairs() if num_pairs is None else num_pairs
    product = 2 * pairs * x.case.num_heads * x.case.width
    return {"forward": Cost(moved, 2 * product), "backward": Cost(2 * moved, 5 * product)}


SUITE = Suite(
    name="self_attention",
    measures="jagged_flash_attention of histories to themselves",
    cases=CASES,
    inputs=make_inputs,
    oracle=oracle,
    cost=cost,
    providers={"ours": ours, **PEERS},
)
