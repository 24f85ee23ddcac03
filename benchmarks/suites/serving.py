"""Serving: each user has candidates, as many as it has, and one history. Forward only.

Ours takes candidates and histories as they are, jagged. Peers project each user's history once;
those ``expanded`` then give a copy of it to every candidate, the others take all candidates of a
user as the queries of its sequence.
"""

import functools
from dataclasses import replace

import torch

from suites import Inputs
from suites import target_attention as base
from suites._attention import UNEVEN_PEERS
from tests.cases import Case

# Candidates are 1/3 to 3 times as many as those of another user. In the last group, one user's long
# history is all there is to fill a GPU with.
CASES = {
    name: Case(name, users, length, 4, 128, candidates, 0.5, torch.bfloat16, large=True)
    for users, length in ((15, 1024), (15, 10_000), (1, 4096))
    for candidates in (1, 16, 256, 2048)
    for name in [f"u{users}-t{candidates}-l{length}-d128"]
}


def uneven(x: Inputs, name: str) -> Inputs:
    """``x`` with the rows of its leaf ``name`` ``[B, T, …]`` divided anew, as ``[ΣT, …]``."""
    leaf = x.leaves[name].detach().flatten(0, 1).requires_grad_()
    parts = 0.5 + torch.rand(x.case.batch_size, generator=torch.Generator().manual_seed(4))
    ends = parts.cumsum(0)
    ends = (ends / ends[-1] * leaf.shape[0]).round().to(x.query_offsets)
    query_offsets = torch.cat([ends.new_zeros(1), ends])
    return replace(
        x,
        leaves=x.leaves | {name: leaf},
        query_offsets=query_offsets,
        max_targets=int(query_offsets.diff().max()),
    )


def make_inputs(case: Case, device: str) -> Inputs:
    """Those of ``target_attention``, targets ``[ΣT, E]``."""
    return uneven(base.make_inputs(case, device), "target")


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
