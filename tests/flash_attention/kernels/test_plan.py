"""Which kernels serve a call, and their tile sizes."""

import pytest
import torch

from torchrec_jagged_attn.base import devices
from torchrec_jagged_attn.ops.dispatch import table
from torchrec_jagged_attn.ops.flash_attention.plan import VARIANTS, Call, plan_of

CUDA = torch.device("cuda")
A100, H100 = 166_912, 232_448  # bytes of shared memory
HALF = Call(
    device=CUDA,
    on_hopper=True,
    dtype=torch.bfloat16,
    precision="tf32",
    shared_memory=H100,
    num_heads=4,
    num_key_heads=2,
    width=64,
    value_width=64,
    has_bias=False,
    has_dropout=False,
    position_buckets=0,
    age_buckets=0,
    distance_buckets=0,
    causal=True,
    negative_scale=False,
    fits_int32=True,
)


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(devices, "hopper_multiprocessors", lambda device: 132)


@pytest.mark.parametrize(
    ("change", "short", "long", "max_short_rows"),
    [
        ({}, "hopper_short", "hopper", 64),
        ({"width": 48, "value_width": 40}, "hopper_short", "hopper", 64),
        ({"width": 128}, "general_short", "hopper", 32),
        ({"fits_int32": False}, "general_short", "hopper", 64),
        ({"width": 32, "value_width": 32}, "general_short", "hopper", 64),
        ({"negative_scale": True}, "general_short", "general", 64),
        ({"tma_compatible": False}, "general_short", "general", 64),
        ({"width": 256}, "general", "general", 0),
        ({"dtype": torch.float32}, "general", "general", 0),
        ({"has_bias": True}, "general", "general", 0),
        ({"has_dropout": True}, "general_short", "hopper", 64),
        ({"age_buckets": 9}, "general", "general", 0),
        ({"distance_buckets": 9}, "general_short", "hopper", 64),
    ],
    ids=str,
)
def test_variants_of_a_hopper_gpu(change, short, long, max_short_rows):
    plan = plan_of(HALF._replace(**change))
    assert (plan.short_samples.variant, plan.long_samples.variant) == (short, long)
    assert plan.max_short_rows == max_short_rows


@pytest.mark.parametrize(
    ("change", "short"),
    [({}, "general_short"), ({"width": 256}, "general"), ({"position_buckets": 1}, "general")],
    ids=str,
)
def test_variants_of_another_gpu(change, short, monkeypatch):
    monkeypatch.setattr(devices, "hopper_multiprocessors", lambda device: 0)
    plan = plan_of(HALF._replace(on_hopper=False, shared_memory=A100, **change))
    assert (plan.short_samples.variant, plan.long_samples.variant) == (short, "general")


def test_a_choice_says_why():
    choice = plan_of(HALF._replace(has_bias=True, negative_scale=True)).long_samples
    assert dict(choice.refused)["hopper"] == "no bias but by distance"


def test_table_lists_variants_of_the_device(monkeypatch):
    assert list(table(VARIANTS, CUDA)) == ["hopper_short", "general_short", "hopper", "general"]
    monkeypatch.setattr(devices, "hopper_multiprocessors", lambda device: 0)
    assert list(table(VARIANTS, CUDA)) == ["general_short", "general"]


@pytest.mark.parametrize("room", [A100, H100])
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [
        (torch.float32, "ieee"),
        (torch.float32, "bf16x6"),
        (torch.float32, "tf32"),
        (torch.bfloat16, "tf32"),
    ],
    ids=str,
)
@pytest.mark.parametrize("width", [256, 512, 1024])
def test_operands_of_wide_rows_fit(width, dtype, precision, room):
    call = HALF._replace(width=width, dtype=dtype, precision=precision, shared_memory=room)
    tile = plan_of(call).grad_kv
    operands = 5 if (dtype, precision) == (torch.float32, "tf32") else 4
    block = tile["BLOCK_M"]
    assert block == tile["BLOCK_N"]
    assert block == 16 or block * (operands * call.row_bytes + 4 * block) <= room


@pytest.mark.parametrize(
    ("width", "asked", "precision"),
    [
        (256, "bf16x6", "bf16x8"),
        (257, "bf16x6", "ieee"),
        (64, "ieee", "ieee"),
        (64, "tf32", "tf32"),
    ],
    ids=str,
)
def test_products_of_wide_rows_are_not_taken_apart(width, asked, precision):
    call = HALF._replace(dtype=torch.float32, width=width, precision=asked)
    chosen = plan_of(call).constants.PRECISION
    assert chosen == precision
