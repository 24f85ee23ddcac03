"""Target attention from one target per sample to many: over raw rows, or over keys and values?

``ours`` is ``JaggedTargetAttention``; ``ours-explicit`` projects the history and calls
``jagged_flash_attention``, with work that grows less with the targets, but starts higher.
"""

import functools
from dataclasses import replace

import torch

from suites import target_attention as base
from torchrec_jagged_attn.testing import Case

SUITE = replace(
    base.SUITE,
    name="targets",
    cases={
        name: Case(name, 2048, 2048, 4, 128, targets, "log-normal", torch.bfloat16, large=True)
        for targets in (1, 2, 4, 8, 16, 32, 64)
        for name in [f"targets-{targets}"]
    },
    providers=base.SUITE.providers
    | {"ours-explicit": functools.partial(base.over_keys, base.ours_explicit)},
    sweep="T",
)
