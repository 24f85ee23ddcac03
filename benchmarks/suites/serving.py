"""Serving: each user has one history and any number of candidates. Forward only.

Ours takes jagged candidates and histories. Peers project each user's history once; ``expanded``
peers then copy it for every candidate, the others use all candidates of a user as queries of one
sequence.
"""

import functools
from dataclasses import replace

import torch

from suites import Inputs
from suites import target_attention as base
from suites._attention import UNEVEN_PEERS
from tests.cases import Case

# The numbers of candidates of two users differ by a factor of up to 3.
CASES = {
    case.name: case
    for candidates in (1, 16, 256, 2048)
    for name in [f"serving-{candidates}"]
    for case in [Case(name, 15, 1024, 4, 128, candidates, 0.5, torch.bfloat16, large=True)]
}


def make_inputs(case: Case, device: str) -> Inputs:
    """Return the inputs of ``target_attention``, with jagged targets ``[ΣT, E]``."""
    x = base.make_inputs(case, device)
    target = x.leaves["target"].detach().flatten(0, 1).requires_grad_()
    parts = 0.5 + torch.rand(case.batch_size, generator=torch.Generator().manual_seed(4))
    ends = parts.cumsum(0)
    ends = (ends / ends[-1] * target.shape[0]).round().to(x.query_offsets)
    query_offsets = torch.cat([ends.new_zeros(1), ends])
    return replace(
        x,
        leaves=x.leaves | {"target": target},
        query_offsets=query_offsets,
        max_targets=int(query_offsets.diff().max()),
    )


SUITE = replace(
    base.SUITE,
    name="serving",
    measures="target attention of many candidates, forward",
    cases=CASES,
    inputs=make_inputs,
    providers={
        "ours": base.ours,
        **{
            f"linear+{name}": functools.partial(base.over_keys, peer)
            for name, peer in UNEVEN_PEERS.items()
        },
    },
    modes=("forward",),
)
