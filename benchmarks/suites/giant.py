"""``jagged_target_attention`` with one history of 10,000 rows among histories of 20.

Beside it, as many samples with as many rows and no giant.
"""

from dataclasses import replace

import torch

from suites import target_attention_kernel as base
from torchrec_jagged_attn.testing import Case

SUITE = replace(
    base.SUITE,
    name="giant",
    measures="target attention, one of 10,000 rows among short",
    cases={
        case.name: case
        for case in (
            Case("giant", 24_501, 10_000, 4, 128, 1, "giant", torch.bfloat16, large=True),
            Case("no-giant", 24_501, 40, 4, 128, 1, "uniform", torch.bfloat16, large=True),
        )
    },
)
