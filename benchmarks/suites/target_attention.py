"""The default ``JaggedTargetAttention``, with its projections.

The module absorbs the projections or, with many targets, projects every history row to a key. Peers
always project keys, and have no recency bias, which FlashAttention does not support.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from suites import TRAINING_CASES, Cost, Inputs, PreparedCall, Suite
from suites._attention import PEERS, Attend, exact
from tests.cases import Case, make_target_inputs
from torchrec_jagged_attn.ops import JaggedLayout

POSITION_WEIGHT = "recency_bias.position_weight"
NUM_BUCKETS = 64  # of positions: four per octave


def make_inputs(case: Case, device: str) -> Inputs:
    """Return targets ``[B, T, E]``, history ``[N, E]`` and the weights of projections."""
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
    """Return random parameters by name."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {
        name: torch.randn(shape, generator=generator) / case.width**0.5
        for name, shape in shapes.items()
    }
    return {name: nn.Parameter(x.to(device, case.dtype)) for name, x in drawn.items()}


def with_recency(x: Inputs) -> Inputs:
    """Return ``x`` with the table of biases by position ``[64, H]``."""
    shapes = {POSITION_WEIGHT: (NUM_BUCKETS, x.case.num_heads)}
    table = draw_weights(x.case, x.offsets.device, shapes, seed=3)
    return replace(x, leaves=x.leaves | table)


def distance_buckets(distances: Tensor) -> Tensor:
    """Return ``floor(4 · log2(1 + distance))`` of integers."""
    edges = 2 ** (torch.arange(NUM_BUCKETS, dtype=torch.float64) / 4)  # integers are exact
    return torch.bucketize(1 + distances.double(), edges.to(distances.device), right=True) - 1


def over_keys(make: Callable[[Inputs], Attend], x: Inputs) -> Callable[[], Tensor]:
    """Return a call of a peer on projected keys, with the history rows as values."""
    attend = make(x)
    target, history, w_q, w_k, b_q = list(x.leaves.values())[:5]
    heads = (x.case.num_heads, -1)

    def call() -> Tensor:
        q = F.linear(target.flatten(0, -2), w_q, b_q).unflatten(-1, heads)
        k = F.linear(history, w_k).unflatten(-1, heads)
        return attend(q, k, history.unflatten(-1, heads)).reshape(target.shape)

    return call


def oracle(x: Inputs) -> Tensor:
    """Attention by its formula, with the recency bias if ``x`` has its table."""

    def make(x: Inputs) -> Attend:
        if POSITION_WEIGHT not in x.leaves:
            return exact(x)
        layout = JaggedLayout(x.offsets, x.leaves["history"].shape[0])
        bias = F.embedding(distance_buckets(layout.positions_from_end()), x.leaves[POSITION_WEIGHT])
        return functools.partial(exact(x), bias=bias)

    return over_keys(make, x)()


def cost(x: Inputs) -> dict[str, Cost]:
    """Forward reads the history; backward reads it and writes its gradient.

    FLOPs are the minimum of absorbed and materialized projections. Backward recomputes attention
    weights, and has five products of pairs.
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


def ours(x: Inputs) -> PreparedCall:
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
    return PreparedCall(lambda: module(target, history), x.leaves, inputs=x)


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
