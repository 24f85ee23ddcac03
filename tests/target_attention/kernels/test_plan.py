"""Which kernel variant serves a call of target attention, and why."""

import pytest
import torch

from torchrec_jagged_attn.base import devices
from torchrec_jagged_attn.ops.dispatch import choose, table
from torchrec_jagged_attn.ops.target_attention.plan import (
    DENSE,
    JAGGED,
    SHARED,
    VARIANTS,
    Call,
    Plan,
)

A10, A100, H100 = 99 * 1024, 163 * 1024, 227 * 1024  # bytes of shared memory of a program
DEVICE = torch.device("cuda")
PLAIN = Call(
    device=DEVICE,
    backward=False,
    layout=DENSE,
    num_targets=1,
    num_heads=4,
    width=64,
    num_positions=0,
    num_ages=0,
    has_prior_weights=False,
    dropout=False,
    element_size=2,
    history_stride=64,
    aligned=True,
    tma_compatible=True,
    precision="tf32",
)
WIDE = {"width": 128, "history_stride": 128}
FP32 = {"element_size": 4}
WARPGROUP = {"num_targets": 8}
CODES = {"num_levels": 3, "history_stride": 13}


@pytest.fixture
def gpu(monkeypatch, request):
    """Properties of a GPU by name."""
    shared_memory, multiprocessors = {
        "T4": (0, 0), "A10": (A10, 0), "A100": (A100, 0), "B200": (H100, 0), "H100": (H100, 132),
    }[getattr(request, "param", "H100")]  # fmt: skip
    monkeypatch.setattr(devices, "gluon_shared_memory", lambda device: shared_memory)
    monkeypatch.setattr(devices, "hopper_multiprocessors", lambda device: multiprocessors)
    monkeypatch.setattr(devices, "launches_overlap", lambda device: multiprocessors > 0)


def variant_of(**changes):
    return choose(VARIANTS, DEVICE, PLAIN._replace(**changes)).variant


@pytest.mark.parametrize("backward", [False, True])
def test_8_targets_of_4_heads_in_bf16_on_an_h100(backward, gpu):
    assert variant_of(num_targets=8, num_heads=4, element_size=2, backward=backward) == "warpgroup"


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        ("T4", ["general"]),
        ("A10", ["one_warp", "general"]),
        ("A100", ["one_warp", "general"]),
        ("B200", ["one_warp", "general"]),
        ("H100", ["one_warp", "warpgroup", "general"]),
    ],
    indirect=["gpu"],
)
def test_variants_of_a_gpu(gpu, expected):
    assert list(table(VARIANTS, DEVICE)) == expected


@pytest.mark.parametrize(
    ("changes", "forward", "backward"),
    [
        ({}, "one_warp", "one_warp"),
        (FP32, "one_warp", "one_warp"),
        ({"layout": SHARED}, "one_warp", "one_warp"),
        ({"num_targets": 2}, "one_warp", "one_warp"),
        ({"width": 256, "history_stride": 256}, "one_warp", "one_warp"),
        ({"width": 264, "history_stride": 264}, "general", "general"),
        ({"layout": JAGGED, "num_targets": 0}, "general", "general"),
        ({"aligned": False}, "general", "general"),
        ({"width": 20}, "general", "general"),
        ({"width": 20, "history_stride": 20} | FP32, "one_warp", "one_warp"),
        ({"history_stride": 68}, "general", "general"),
        ({"dropout": True}, "one_warp", "one_warp"),
        (WARPGROUP | {"dropout": True}, "warpgroup", "warpgroup"),
        ({"has_prior_weights": True, "num_targets": 2}, "one_warp", "one_warp"),
        ({"num_positions": 128, "num_ages": 128}, "one_warp", "one_warp"),
        ({"num_positions": 128, "num_ages": 129}, "general", "general"),
        (WARPGROUP | WIDE, "warpgroup", "warpgroup"),
        ({"num_targets": 16}, "warpgroup", "warpgroup"),
        ({"num_targets": 17}, "general", "general"),
        (WARPGROUP | {"width": 136, "history_stride": 136}, "general", "general"),
        (WARPGROUP | FP32, "general", "general"),
        (WARPGROUP | {"history_stride": 32}, "general", "general"),
        (WARPGROUP | {"tma_compatible": False}, "general", "general"),
        (WARPGROUP | {"num_positions": 64, "num_ages": 64}, "warpgroup", "warpgroup"),
        (WARPGROUP | {"num_positions": 64, "num_ages": 160}, "warpgroup", "warpgroup"),
        ({"has_indices": True}, "one_warp", "one_warp"),
        (WARPGROUP | {"has_indices": True}, "general", "general"),
        (WARPGROUP | {"has_prior_weights": True}, "warpgroup", "warpgroup"),
        (CODES, "one_warp", "one_warp"),
        (CODES | WARPGROUP, "general", "general"),
    ],
    ids=str,
)
def test_rules_on_an_h100(changes, forward, backward, gpu):
    assert variant_of(**changes) == forward
    assert variant_of(**changes, backward=True) == backward


def test_a_plan_says_why(gpu):
    refused = dict(Plan(PLAIN._replace(num_targets=100)).choice.refused)
    assert refused == {
        "one_warp": "up to 8 query rows (targets × heads) a sample",
        "warpgroup": "9 to 64 query rows (targets × heads) a sample",
    }
