"""The Hopper kernel of pairs, in numpy and on a GPU."""

import pytest
import torch

from tests.interaction.test_interaction import inputs_of
from tests.oracles import jagged_jagged_bmm_jagged_out_oracle
from torchrec_jagged_attn import devices, ops
from torchrec_jagged_attn.interaction import plan
from torchrec_jagged_attn.interaction.kernels import hopper_pairs
from torchrec_jagged_attn.interaction.kernels.products import pair_offsets
from torchrec_jagged_attn.runtime import dispatch

SIZES = [
    (0, 5),
    (1, 1),
    (63, 65),
    (2, 0),
    (65, 7),
    (130, 8),
    (64, 9),
    (66, 410),
    (5, 129),
    (3, 128),
]


def whole_numbers(width, device):
    """x, y, offsets and the pairs' exact products, rounded once, of samples of ``SIZES``."""
    inputs = inputs_of(
        "jagged_jagged_bmm_jagged_out",
        *zip(*SIZES, strict=True),
        device,
        torch.float16,
        width=width,
    )
    x, y = inputs["x"].mul(3).round(), inputs["y"].mul(3).round()
    offsets = inputs["x_offsets"], inputs["y_offsets"]
    return x, y, offsets, jagged_jagged_bmm_jagged_out_oracle(x.float(), y.float(), *offsets).half()


@pytest.fixture
def pairs_of_any_mean(monkeypatch):
    monkeypatch.setattr(plan, "MIN_MEAN_ROWS", 0)


@pytest.mark.usefixtures("pairs_of_any_mean")
@pytest.mark.parametrize("width", [8, 40, 64, 128])
def test_pairs_on_hopper(width, hopper):
    device, launched = hopper
    x, y, offsets, expected = whole_numbers(width, device)
    out = ops.jagged_jagged_bmm_jagged_out(x, y, *offsets, total=expected.numel())
    assert launched in (["hopper_pairs"], None)
    assert torch.equal(out, expected)


@pytest.mark.usefixtures("pairs_of_any_mean")
def test_pairs_on_hopper_write_nothing_else(hopper):
    """Without writing before or after, for any begin of a sample's pairs modulo 16 bytes."""
    device, _ = hopper
    x, y, offsets, expected = whole_numbers(16, device)
    if devices.hopper_multiprocessors(device) == 0:
        pytest.skip("needs a Hopper GPU")
    guard = 64
    held = torch.full((expected.numel() + 2 * guard,), torch.nan, device=device).half()
    out = held[guard:-guard]
    starts = pair_offsets(*offsets)
    assert len(set((starts % 8).tolist())) > 3
    hopper_pairs.pair_bmm(x, y, out, *offsets, starts)
    assert torch.equal(out, expected)
    assert held[:guard].isnan().all()
    assert held[-guard:].isnan().all()


def test_pairs_of_short_samples_take_another_kernel(hopper, monkeypatch, caplog):
    device, launched = hopper
    x, y, offsets, expected = whole_numbers(64, device)
    monkeypatch.setattr(dispatch, "LOG", True)
    caplog.set_level("INFO")
    out = ops.jagged_jagged_bmm_jagged_out(x, y, *offsets)
    (said,) = caplog.messages
    assert f"{__file__}:" in said
    if launched is not None:
        why = f"needs {plan.MIN_MEAN_ROWS} rows of x or more per sample in the mean"
        assert said.endswith(f"general takes jagged_jagged_bmm_jagged_out; not hopper_pairs: {why}")
    assert launched in ([], None)
    assert torch.equal(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [8, 40, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_pairs_have_the_same_bits_from_either_kernel(width, dtype, monkeypatch):
    inputs = inputs_of(
        "jagged_jagged_bmm_jagged_out", *zip(*SIZES, strict=True), "cuda", dtype, width=width
    )
    results = []
    for least in (0, 10**6):
        monkeypatch.setattr(plan, "MIN_MEAN_ROWS", least)
        results.append(ops.jagged_jagged_bmm_jagged_out(**inputs))
    assert torch.equal(*results)


@pytest.mark.usefixtures("pairs_of_any_mean")
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.float(),
        lambda x: x[:, :20],
        lambda x: torch.cat([x, x], 1),
        lambda x: torch.cat([x.new_zeros(4), x.flatten()])[4:].view(x.shape),
    ],
    ids=["fp32", "20 wide", "wider than 128", "not at 16 bytes"],
)
def test_pairs_that_hopper_has_no_kernel_for(change, hopper):
    device, launched = hopper
    x, y, offsets, _ = whole_numbers(72, device)
    x, y = change(x), change(y)
    out = ops.jagged_jagged_bmm_jagged_out(x, y, *offsets)
    assert launched in ([], None)
    expected = jagged_jagged_bmm_jagged_out_oracle(x.float(), y.float(), *offsets).to(x.dtype)
    assert torch.equal(out, expected)
