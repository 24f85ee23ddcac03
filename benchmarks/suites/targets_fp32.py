"""``targets`` in fp32, whose exact products take other times: of bf16 parts over raw rows, where
over keys and values they are of fp32; with --tf32 both are of TF32.
"""

from dataclasses import replace

import torch

from suites import targets

LARGE = replace(targets.LARGE, name="targets-fp32", dtype=torch.float32)

SUITE = replace(
    targets.SUITE,
    name="targets_fp32",
    measures="targets in fp32",
    cases=targets.sweep(LARGE, 1, 4, 8, 12, 16, 32, 64, 128),
)
