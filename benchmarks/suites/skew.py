"""``jagged_target_attention`` on batches of as many samples and rows, from even to skewed lengths.

``fill`` is their mean over their longest: the part of a padded batch that is not padding.
"""

from dataclasses import replace

import torch

from suites import target_attention_kernel as base
from torchrec_jagged_attn.testing import Case

MEAN_LENGTH = 128

SUITE = replace(
    base.SUITE,
    name="skew",
    measures="target attention, from even to skewed lengths",
    cases={
        name: Case(
            name, 4096, round(MEAN_LENGTH / fill), 4, 128, 1, fill, torch.bfloat16, large=True
        )
        for fill in (0.05, 0.07, 0.16, 0.25, 0.5, 1.0)
        for name in [f"fill-{fill:g}"]
    },
    sweep="fill",
)
