"""Sums of outer products over all targets, by head, on every device and path."""

import pytest
import torch
from conftest import skip_unless_supported

from torchrec_jagged_attn.kernels.weight_gradients import BLOCK_R, ROWS
from torchrec_jagged_attn.ops.multi_head import _sum_outer_products
from torchrec_jagged_attn.testing import Case, assert_close, plain_products

# Those of a tile and of a part, and one more or less; and some that many parts are needed for.
NUM_ROWS = [0, 1, BLOCK_R - 1, BLOCK_R + 1, ROWS, ROWS + 1, 2 * ROWS + 1, 4096]


def inputs_of(num_rows, device, dtype=torch.float32, heads=2, widths=(16, 32)):
    """``[R, H, X]`` and ``[R, H, Y]``, twice; the sums of outer products do not cancel."""
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(num_rows, heads, width, generator=generator) + 0.5).to(device, dtype)
        for width in (*widths, *widths)
    ]


def sums_of(inputs):
    """Both sums, in the places they have in the gradient of one weight ``[3 · E, …]``."""
    q, grad_u = inputs[:2]
    sums = q.new_full((3, *q.shape[1:], grad_u.shape[2]), torch.nan)
    _sum_outer_products(*inputs, sums[1], sums[2])
    assert sums[0].isnan().all()
    return sums[1:]


def sums_by_head(inputs):
    """The same, of one head after the other."""
    q, grad_u, grad_values, pooled = (x.unbind(1) for x in inputs)
    return torch.stack([
        torch.stack([x.T @ y for x, y in zip(*pair, strict=True)])
        for pair in ((q, grad_u), (grad_values, pooled))
    ])  # fmt: skip


def assert_right(inputs):
    with plain_products():
        plain = sums_by_head(inputs)
    expected = sums_by_head([x.double() for x in inputs])
    assert_close(sums_of(inputs), expected, plain, gradient=True)


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_any_number_of_rows(num_rows, dtype, device):
    skip_unless_supported(Case("rows", 1, 1, 2, 32, dtype=dtype), device)
    assert_right(inputs_of(num_rows, device, dtype))


@pytest.mark.parametrize(
    ("heads", "widths"),
    [(1, (1, 1)), (3, (5, 20)), (1, (48, 96)), (4, (32, 128)), (2, (65, 70)), (1, (128, 200))],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_any_width(heads, widths, dtype, device):
    skip_unless_supported(Case("widths", 1, 1, heads, 32, dtype=dtype), device)
    assert_right(inputs_of(300, device, dtype, heads, widths))


@pytest.mark.usefixtures("tf32")
def test_tf32(device):
    assert_right(inputs_of(4096, device, widths=(32, 48)))


def test_doubles(device):
    """What a layer may be in whose attention is not; the oracle is no more exact than they are."""
    inputs = inputs_of(300, device, torch.float64)
    torch.testing.assert_close(sums_of(inputs), sums_by_head(inputs))


def test_infinities_stay_where_they_are(device):
    """Also where a tile reads on in the next head."""
    inputs = inputs_of(300, device, heads=3, widths=(5, 20))
    inputs[0][7, 1, 2] = torch.inf
    inputs[3][8, 1, 3] = torch.nan
    sums, expected = sums_of(inputs), sums_by_head(inputs)
    assert torch.equal(sums.isnan(), expected.isnan())
    assert torch.equal(sums.isinf(), expected.isinf())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [4096, 100_000])
def test_repeats_are_equal(num_rows, dtype):
    inputs = inputs_of(num_rows, "cuda", dtype, 4, (32, 128))
    assert_right(inputs)
    first = sums_of(inputs)
    for _ in range(3):
        assert torch.equal(sums_of(inputs), first)
