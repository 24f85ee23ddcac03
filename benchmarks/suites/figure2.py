"""The paper's Figure 2: dense and jagged attention, unfused and flash, by maximum length.

Lengths are uniform, so that half of a padded batch is padding; skewed lengths are log-normal, as of
real users, with 85 % of padding.

Source:
    Jagged Flash Attention (RecSys '24, https://arxiv.org/abs/2409.15373), Figure 2.
"""

from dataclasses import replace

import torch

from suites import self_attention as base
from suites._self_attention import PEERS, dense_flash, jagged_unfused, ours
from tests.cases import Case

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
SUITE = replace(
    base.SUITE,
    name="figure2",
    measures="the paper's Figure 2: dense and jagged attention",
    cases={
        name: Case(name, 256, length, 2, 64, 1, lengths, torch.bfloat16, large=True)
        for family, lengths in (("length", 0.5), ("skewed", "skewed"))
        for length in LENGTHS
        for name in [f"{family}-{length}"]
    },
    providers={
        "ours": ours,
        "ours-unfused": jagged_unfused,
        **PEERS,
        "dense-flash": dense_flash,
    },
    modes=("forward", "both"),
)
