"""``jagged_target_attention`` without projections: queries attend to raw history rows.

Peers compute the same function with the history as a single head of keys and values, and all
targets and heads of a sample as its query rows.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from suites import TRAINING_CASES, Cost, Inputs, Suite
from suites._attention import PEERS, Attend, exact
from tests.cases import Case, make_target_inputs
from torchrec_jagged_attn import jagged_target_attention


def make_inputs(case: Case, device: str) -> Inputs:
    """Return query ``[B, T, H, D]`` and history ``[N, D]``."""
    drawn = make_target_inputs(case, device)
    offsets = drawn.pop("offsets")
    leaves = {name: tensor.requires_grad_() for name, tensor in drawn.items()}
    return Inputs.even(case, leaves, offsets)


def cost(x: Inputs) -> dict[str, Cost]:
    """Forward reads the history; backward reads it and writes its gradient.

    Backward recomputes attention weights, and has five products of pairs.
    """
    num_rows, width = x.leaves["history"].shape
    num_queries = x.leaves["query"].numel() // width
    product = 2 * x.num_pairs() * x.case.num_heads * width
    size = x.case.dtype.itemsize
    return {
        "forward": Cost(size * width * (num_rows + 2 * num_queries), 2 * product),
        "backward": Cost(size * width * (2 * num_rows + 3 * num_queries), 5 * product),
    }


def ours(x: Inputs) -> Callable[[], Tensor]:
    """The op."""
    query, history = x.leaves.values()
    return lambda: jagged_target_attention(query, history, x.offsets)


def over_rows(make: Callable[[Inputs], Attend], x: Inputs) -> Callable[[], Tensor]:
    """Return a call of a peer on raw history rows."""
    query, num_heads = x.leaves["query"], x.case.num_heads
    rows, max_rows = x.query_offsets * num_heads, x.max_targets * num_heads
    attend = make(replace(x, query_offsets=rows, max_targets=max_rows))

    def call() -> Tensor:
        rows = x.leaves["history"].unsqueeze(1)
        return attend(query.flatten(0, -2).unsqueeze(1), rows, rows).view_as(query)

    return call


SUITE = Suite(
    name="target_attention_kernel",
    measures="jagged_target_attention, without projections",
    cases=TRAINING_CASES,
    inputs=make_inputs,
    oracle=lambda x: over_rows(exact, x)(),
    cost=cost,
    providers={
        "ours-kernel": ours,
        **{name: functools.partial(over_rows, peer) for name, peer in PEERS.items()},
    },
)
