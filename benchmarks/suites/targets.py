"""Target attention from one target per sample to many: over raw rows, or over keys and values?

``ours`` chooses, as the top of ``modules/projections.py`` counts; ``ours-absorbed`` and
``ours-materialized`` are the two ways, at whose crossing it should change. Exact products of
``targets-fp32`` take other times: of bf16 parts over raw rows, where over keys and values they are
of fp32; with --tf32 both are of TF32.

``requests`` are batches of as many candidates, of ever fewer requests: forward is serving, both
directions are training. Numbers of candidates are uneven. Peers project each history once;
``expanded`` then gives a copy of it to every candidate, the others take all candidates of a request
as the queries of one sequence.
"""

import functools
from dataclasses import replace

import torch

from suites import Inputs
from suites import target_attention as base
from suites._attention import expanded_flash_attention_3
from suites.serving import uneven
from tests.cases import Case

LARGE = Case("targets", 512, 2048, 4, 128, 1, "log-normal", torch.bfloat16, large=True)
LARGE_FP32 = replace(LARGE, name="targets-fp32", dtype=torch.float32)
SMALL = Case("cpu-targets", 64, 200, 4, 64, 1, "uniform")
REQUESTS = {  # from how many candidates each has on average to how many there are
    f"{name}-{n}": replace(case, name=f"{name}-{n}", batch_size=in_all // n, num_targets=n)
    for name, case, in_all, numbers in (
        ("requests", LARGE, 8192, (1, 16, 256, 2048)),
        ("cpu-requests", SMALL, 512, (1, 16, 256)),
    )
    for n in numbers
}


def sweep(case: Case, *targets: int) -> dict[str, Case]:
    """``case`` with each number of ``targets``, and that in its name."""
    cases = (replace(case, name=f"{case.name}-{n}", num_targets=n) for n in targets)
    return {case.name: case for case in cases}


def make_inputs(case: Case, device: str) -> Inputs:
    """Those of ``target_attention``; of requests, targets ``[ΣT, E]``."""
    x = base.make_inputs(case, device)
    return uneven(x, "target") if "requests" in case.name else x


SUITE = replace(
    base.SUITE,
    name="targets",
    measures="target_attention with 1 to 2,048 targets",
    cases=sweep(LARGE, 4, 16, 24, 32, 48, 64, 128)
    | sweep(LARGE_FP32, 4, 8, 12, 16, 32, 64, 128)
    | REQUESTS
    | sweep(SMALL, 1, 4, 16, 32, 64, 128, 192),
    inputs=make_inputs,
    providers={
        "ours-absorbed": base.ours_absorbed,
        "ours-materialized": base.ours_materialized,
        **base.SUITE.providers,
        "linear+expanded-flash-attention-3": functools.partial(
            base.over_keys, expanded_flash_attention_3
        ),
    },
)
