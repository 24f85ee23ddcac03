"""``jagged_target_attention`` with ``query_offsets``: serving without the projections."""

import functools
from collections.abc import Callable
from dataclasses import replace

from suites import Inputs, serving
from suites import target_attention_kernel as base
from suites._attention import UNEVEN_PEERS, Attend
from torchrec_jagged_attn.testing import Case


def make_inputs(case: Case, device: str) -> Inputs:
    """Those of ``target_attention_kernel``, queries ``[ΣT, H, D]``."""
    return serving.uneven(base.make_inputs(case, device), "query")


def by_candidate(peer: Callable[[Inputs, int], Attend], x: Inputs) -> Attend:
    """A copy of the history for every candidate, not for each of its heads."""
    return peer(x, x.case.num_heads)


PEERS = {
    name: functools.partial(by_candidate, peer) if name.startswith("expanded") else peer
    for name, peer in UNEVEN_PEERS.items()
}
SUITE = replace(
    base.SUITE,
    name="serving_kernel",
    measures="serving without the projections",
    cases=serving.CASES,
    inputs=make_inputs,
    providers={
        "ours-kernel": base.ours,
        **{name: functools.partial(base.over_rows, peer) for name, peer in PEERS.items()},
    },
    modes=("forward",),
    default=serving.DEFAULT,
)
