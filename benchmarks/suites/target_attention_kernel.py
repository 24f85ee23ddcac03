"""``jagged_target_attention`` alone, without projections: queries over raw history rows.

Peers compute the same function with the history as the one key and value head, and all targets and
heads of a sample as its query rows.
"""

import functools
from collections.abc import Callable

from torch import Tensor

from suites import Cost, Inputs, Suite
from suites._attention import PEERS, Attend
from torchrec_jagged_attn import jagged_target_attention
from torchrec_jagged_attn.testing import (
    CASES,
    Case,
    make_target_inputs,
    target_attention_oracle,
    target_attention_plain,
)


def make_inputs(case: Case, device: str) -> Inputs:
    """Query ``[B, T, H, D]`` and history ``[N, D]``."""
    drawn = make_target_inputs(case, device, bias=False)
    offsets = drawn.pop("offsets")
    leaves = {name: tensor.requires_grad_() for name, tensor in drawn.items()}
    return Inputs(case, leaves, offsets, int(offsets.diff().max()))


def formula(x: Inputs, attention: Callable[..., Tensor]) -> Tensor:
    """One of the package's test formulas, or the op itself."""
    return attention(x.leaves["query"], x.leaves["history"], x.offsets)


def cost(x: Inputs) -> dict[str, Cost]:
    """Read history once, and in backward again, and write its gradient."""
    num_rows, width = x.leaves["history"].shape
    num_queries = x.leaves["query"].numel() // width
    flops = 4 * num_rows * x.case.num_targets * x.case.num_heads * width
    size = x.case.dtype.itemsize
    return {
        "forward": Cost(size * width * (num_rows + 2 * num_queries), flops),
        "backward": Cost(size * width * (2 * num_rows + 3 * num_queries), 2 * flops),
    }


def ours(x: Inputs) -> Callable[[], Tensor]:
    """The op."""
    return lambda: formula(x, jagged_target_attention)


def _peer(make: Callable[[Inputs, int], Attend], x: Inputs) -> Callable[[], Tensor]:
    query, history = x.leaves["query"], x.leaves["history"]
    attend = make(x, x.case.num_targets * x.case.num_heads)

    def call() -> Tensor:
        rows = history.unsqueeze(1)
        return attend(query.flatten(1, 2).unsqueeze(2), rows, rows).view_as(query)

    return call


SUITE = Suite(
    name="target_attention_kernel",
    cases={name: case for name, case in CASES.items() if case.large},
    inputs=make_inputs,
    oracle=functools.partial(formula, attention=target_attention_oracle),
    plain=functools.partial(formula, attention=target_attention_plain),
    cost=cost,
    providers={
        "ours-kernel": ours,
        **{name: functools.partial(_peer, peer) for name, peer in PEERS.items()},
    },
)
