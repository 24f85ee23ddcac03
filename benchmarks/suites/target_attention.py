"""The default ``JaggedTargetAttention``, with its projections.

It absorbs the projections and reads the raw history rows or, with many targets, projects every
history row into a key. Peers always project keys, and have the same projections, but no recency
bias, which FlashAttention does not support.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from suites import TRAINING_CASES, Cost, Inputs, Relaid, Suite
from suites._attention import PEERS, Attend, exact
from tests.cases import Case, make_target_inputs
from torchrec_jagged_attn.ops import JaggedLayout

POSITION_WEIGHT = "recency_bias.position_weight"
NUM_BUCKETS = 64  # of positions: four per octave


def make_inputs(case: Case, device: str) -> Inputs:
    """Targets ``[B, T, E]``, history ``[N, E]`` and the weights of projections."""
    drawn = make_target_inputs(case, device)
    width = case.width
    shapes = {
        "q_proj_weight": (width, width),
        "k_proj_weight": (width, width),
        "in_proj_bias": (width,),
    }
    leaves = {
        "target": drawn["query"][:, :, 0].contiguous().requires_grad_(),
        "history": drawn["history"].requires_grad_(),
        **draw_weights(case, device, shapes),
    }
    return Inputs.even(case, leaves, drawn["offsets"])


def draw_weights(
    case: Case, device: str | torch.device, shapes: dict[str, tuple[int, ...]], seed: int = 1
) -> dict[str, nn.Parameter]:
    """Random parameters by name."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {
        name: torch.randn(shape, generator=generator) / case.width**0.5
        for name, shape in shapes.items()
    }
    return {name: nn.Parameter(x.to(device, case.dtype)) for name, x in drawn.items()}


def with_recency(x: Inputs) -> Inputs:
    """``x`` and the table of positions ``[64, H]``."""
    shapes = {POSITION_WEIGHT: (NUM_BUCKETS, x.case.num_heads)}
    table = draw_weights(x.case, x.offsets.device, shapes, seed=3)
    return replace(x, leaves=x.leaves | table)


def buckets_of(distances: Tensor) -> Tensor:
    """``floor(4 · log2(1 + distance))`` of whole numbers."""
    edges = 2 ** (torch.arange(NUM_BUCKETS, dtype=torch.float64) / 4)  # whole numbers are exact
    return torch.bucketize(1 + distances.double(), edges.to(distances.device), right=True) - 1


def over_keys(make: Callable[[Inputs], Attend], x: Inputs) -> Callable[[], Tensor]:
    """A provider from the maker of a peer: keys of all rows, whose values are the rows."""
    attend = make(x)
    target, history, w_q, w_k, b_q = list(x.leaves.values())[:5]
    heads = (x.case.num_heads, -1)

    def call() -> Tensor:
        q = F.linear(target.flatten(0, -2), w_q, b_q).unflatten(-1, heads)
        k = F.linear(history, w_k).unflatten(-1, heads)
        return attend(q, k, history.unflatten(-1, heads)).reshape(target.shape)

    return call


def oracle(x: Inputs) -> Tensor:
    """With the recency bias if ``x`` has a table of it."""

    def make(x: Inputs) -> Attend:
        if POSITION_WEIGHT not in x.leaves:
            return exact(x)
        layout = JaggedLayout(x.offsets, x.leaves["history"].shape[0])
        bias = F.embedding(buckets_of(layout.positions_from_end()), x.leaves[POSITION_WEIGHT])
        return functools.partial(exact(x), bias=bias)

    return over_keys(make, x)()


def cost(x: Inputs) -> dict[str, Cost]:
    """Read history once, and in backward again, and write its gradient; the cheaper arithmetic.

    Of implementations that keep no weight of a pair for backward: that has five products of pairs.
    """
    num_rows, width = x.leaves["history"].shape
    num_targets = x.leaves["target"].numel() // width
    pairs = 2 * x.num_pairs() * width  # of each product of targets, over all heads of keys

    def flops(products_of_pairs: int, times: int) -> float:
        over_rows = (
            4 * times * num_targets * width**2 + products_of_pairs * pairs * x.case.num_heads
        )
        over_keys = 2 * times * (num_targets + num_rows) * width**2 + products_of_pairs * pairs
        return min(over_rows, over_keys)

    size = x.case.dtype.itemsize
    return {
        "forward": Cost(size * width * (num_rows + 2 * num_targets + 2 * width), flops(2, 1)),
        "backward": Cost(size * width * (2 * num_rows + 3 * num_targets + 4 * width), flops(5, 2)),
    }


def ours(x: Inputs) -> Relaid:
    """The module."""
    from torchrec.sparse.jagged_tensor import JaggedTensor

    from torchrec_jagged_attn import JaggedTargetAttention

    x = with_recency(x)
    module = JaggedTargetAttention(x.case.width, x.case.num_heads, device="meta")
    weights = {name: leaf for name, leaf in x.leaves.items() if isinstance(leaf, nn.Parameter)}
    module.load_state_dict(weights, assign=True)
    target = x.leaves["target"]
    if target.dim() == 2:
        target = JaggedTensor(target, offsets=x.query_offsets)
    history = JaggedTensor(x.leaves["history"], offsets=x.offsets)
    return Relaid(lambda: module(target, history), x.leaves, inputs=x)


SUITE = Suite(
    name="target_attention",
    measures="JaggedTargetAttention, projections included",
    cases=TRAINING_CASES,
    inputs=make_inputs,
    oracle=oracle,
    cost=cost,
    providers={
        "ours": ours,
        **{f"linear+{name}": functools.partial(over_keys, peer) for name, peer in PEERS.items()},
    },
)
