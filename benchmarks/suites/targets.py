"""Target attention from one target per sample to many: over raw rows, or over keys and values?

``ours`` chooses, as the top of ``ops/multi_head_target_attention.py`` counts; ``ours-absorbed`` and
``ours-explicit`` are the two ways, at whose crossing it should change.
"""

import functools
from dataclasses import replace

import torch

from suites import target_attention as base
from torchrec_jagged_attn.testing import Case

LARGE = Case("targets", 512, 2048, 4, 128, 1, "log-normal", torch.bfloat16, large=True)
SMALL = Case("cpu-targets", 64, 200, 4, 64, 1, "uniform")


def sweep(case: Case, *targets: int) -> dict[str, Case]:
    """``case`` with each number of ``targets``, and that in its name."""
    cases = (replace(case, name=f"{case.name}-{n}", num_targets=n) for n in targets)
    return {case.name: case for case in cases}


SUITE = replace(
    base.SUITE,
    name="targets",
    measures="target_attention with 1 to 256 targets per sample",
    cases=sweep(LARGE, 1, 4, 16, 24, 32, 48, 64, 128, 256)
    | sweep(SMALL, 1, 4, 16, 32, 64, 128, 192),
    providers={"ours-absorbed": functools.partial(base.ours, keys_and_values="absorbed")}
    | base.SUITE.providers,
    sweep="T",
)
