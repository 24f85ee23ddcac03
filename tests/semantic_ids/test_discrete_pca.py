"""``DiscretePCA`` encodes and decodes rows with the error of its formulas."""

import copy
import itertools
import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rounding import RoundingErrors
from tests.tolerance import assert_close
from torchrec_jagged_attn.semantic_ids import DiscretePCA, discrete_pca

STATISTICS = ["mean", "basis"]


def draw_rows(num_rows, dim, device="cpu", dtype=torch.float64):
    """Rows with mixed columns, a decaying spectrum and a mean that is not zero."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(num_rows, dim, generator=generator, dtype=torch.float64)
    mixed = spread / torch.arange(1, dim + 1) @ torch.randn(dim, dim, generator=generator).double()
    return (mixed + 3).to(device, dtype)


def error_of(pca, rows):
    left = rows.double() - pca.decode(pca.encode(rows)).double()
    return left.square().sum(1).mean().item()


def assert_error(pca, rows, error, dtype=torch.float64, factor=1.0):
    """``error`` is the mean squared error of ``rows * factor`` for a power of two."""
    codes = pca.encode(rows * factor).double()
    mean, basis = (x.double() / factor for x in (pca.mean, pca.basis))
    with RoundingErrors(dtype) as errors:
        left = rows.double() - (mean + codes @ basis)
        expected = left.square().sum(1).mean()
    # Squares of the bounds matter if residuals are small.
    squared = errors.bound(left, dtype).square().sum(1).mean()
    assert abs(error / factor**2 - expected) <= errors.bound(expected, torch.float64) + squared


def fitted(rows, num_codes, num_levels=3, **options):
    pca = DiscretePCA(rows.shape[1], num_codes, num_levels, dtype=torch.float64, device=rows.device)
    return pca, pca.fit(rows, **options)


@settings(max_examples=25)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 20), st.sampled_from([3, 5, 9]))
def test_error_never_rises(num_rows, dim, num_codes, num_levels):
    rows = draw_rows(num_rows, dim)
    pca, errors = fitted(rows, num_codes, num_levels, tolerance=0)
    assert all(later < earlier for earlier, later in itertools.pairwise(errors))
    assert_error(pca, rows, errors[-1])


@pytest.mark.parametrize("tolerance", [0.0, 1e-2])
def test_steps_end_by_the_tolerance(tolerance):
    rows = draw_rows(500, 8)
    _, errors = fitted(rows, 12, tolerance=tolerance)
    parts = [1 - later / earlier for earlier, later in itertools.pairwise(errors)]
    assert all(part >= tolerance for part in parts[:-1])
    assert len(fitted(rows, 12, tolerance=tolerance, max_steps=1)[1]) == 2
    assert fitted(rows, 12, tolerance=tolerance, max_steps=0)[1] == errors[:1]


def test_more_codes_and_more_levels_leave_less():
    rows = draw_rows(1000, 8)
    for family in ([(n, 3) for n in (2, 8, 16, 40)], [(8, levels) for levels in (3, 5, 9, 31)]):
        errors = [fitted(rows, *size)[1][-1] for size in family]
        assert all(later < 0.8 * earlier for earlier, later in itertools.pairwise(errors)), errors


def test_the_greedy_choice_is_the_formula():
    rows = draw_rows(300, 6)
    pca, _ = fitted(rows, 9, 5)
    residual = rows - pca.mean
    codes = []
    for b in pca.basis:
        scale = b.norm()
        codes.append((residual @ (b / scale) / scale).round().clamp(-2, 2))
        residual = residual - torch.outer(codes[-1], b)
    with mock.patch.object(discrete_pca, "NUM_SWEEPS", 0):
        assert torch.equal(pca.encode(rows), torch.stack(codes, 1).to(torch.int8))


def test_sweeps_find_the_nearest_codes():
    rows = draw_rows(100, 6)
    pca, _ = fitted(rows, 9)
    before = error_of(pca, rows)
    with mock.patch.object(discrete_pca, "NUM_SWEEPS", 50):
        codes = pca.encode(rows)
        assert error_of(pca, rows) <= before
    with RoundingErrors(torch.float64) as errors:
        best = (rows - (pca.mean + codes.double() @ pca.basis)).square().sum(1)
    least = best - 2 * errors.bound(best, torch.float64)  # of both
    for place, value in itertools.product(range(9), (-1, 0, 1)):
        other = codes.clone()
        other[:, place] = value
        assert torch.all((rows - pca.decode(other)).square().sum(1) >= least)


def test_directions_are_principal_components(device):
    """Before least squares, with one code per direction."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2000, 5, generator=generator).double() * torch.arange(5, 2.5, -0.5)
    rows = (rows @ torch.linalg.qr(torch.randn(5, 5, generator=generator).double()).Q).to(device)
    pca, _ = fitted(rows, 5, max_steps=0)
    principal = torch.linalg.svd(rows - rows.mean(0), full_matrices=False).Vh
    unit = pca.basis / pca.basis.norm(dim=1, keepdim=True)
    with RoundingErrors(torch.float64) as errors:
        ones = principal.square().sum(1)
    assert_close((unit * principal).sum(1).abs(), ones, errors)
    assert torch.all(unit.gather(1, unit.abs().argmax(1, keepdim=True)) > 0)


def test_repeated_directions(device):
    deviations = torch.tensor([100.0, 1, 1], device=device)
    pca, _ = fitted(draw_rows(1000, 3, device) @ torch.diag(deviations).double(), 4, max_steps=0)
    unit = pca.basis / pca.basis.norm(dim=1, keepdim=True)
    assert (unit @ unit.T).abs().min() > 0.99


@pytest.mark.parametrize("num_levels", [3, 7])
@pytest.mark.parametrize("draw", [torch.randn, torch.rand], ids=["normal", "uniform"])
def test_the_scale_is_best(draw, num_levels):
    sizes = draw(400, generator=torch.Generator().manual_seed(1), dtype=torch.float64).abs()
    counts = torch.arange(400) % 5
    half = num_levels // 2

    def error(scale):
        codes = (sizes / scale).round().clamp(-half, half)
        return (counts * (sizes - scale * codes).square()).sum().item()

    scale, part = discrete_pca._best_scale(sizes, counts, half)
    with RoundingErrors(torch.float64) as errors:
        whole = (counts * sizes.square()).sum()
    assert abs(error(scale) - part * whole) <= errors.bound(whole, torch.float64)
    assert error(scale) <= min(map(error, torch.linspace(0.01, 4, 4000).tolist()))


@pytest.mark.parametrize("sizes", [[100] * 10, [1, 0, 998, 1], [333, 333, 334]], ids=str)
def test_fit_on_batches(sizes, device):
    rows = draw_rows(1000, 6, device, torch.float32)
    with mock.patch.object(discrete_pca, "BLOCK", 128):
        whole, batched = (DiscretePCA(6, 10, device=device) for _ in range(2))
        errors = whole.fit(rows)
        assert batched.fit(rows.split(sizes)) == errors
    for name in STATISTICS:
        assert torch.equal(getattr(batched, name), getattr(whole, name)), name
    assert error_of(whole, rows) < 0.2 * (rows - rows.mean(0)).square().sum(1).mean()


def test_rows_far_from_zero():
    """Their squares would cancel; the error is the same as for rows around zero."""
    rows = draw_rows(1000, 4)
    _, expected = fitted(rows, 8)
    with mock.patch.object(discrete_pca, "BLOCK", 64):
        pca, errors = fitted(rows + 2**26, 8)
    assert errors[-1] == pytest.approx(expected[-1], rel=1e-3)
    assert torch.all((pca.mean - 2**26 - rows.mean(0)).abs() < 1e-3)


@pytest.mark.parametrize("exponent", [-30, -23, -18, 18, 20, 30])
@pytest.mark.parametrize("num_levels", [3, 7])
def test_rows_of_any_scale_in_fp32(exponent, num_levels, device):
    """A power of two does not change the codes, not even of the least directions."""
    rows = draw_rows(300, 5, device, torch.float32) - 3
    factor = 2.0 ** round(exponent * math.log2(10))
    pca, scaled = (DiscretePCA(5, 12, num_levels, device=device) for _ in range(2))
    pca.fit(rows)
    errors = scaled.fit(rows * factor)
    codes = scaled.encode(rows * factor)
    assert torch.equal(codes, pca.encode(rows))
    assert (codes != 0).any(0).all()
    assert_error(scaled, rows, errors[-1], torch.float32, factor)


def test_without_a_fit_nothing_is_encoded_or_decoded():
    pca = DiscretePCA(4, 3)
    for method, value in (
        (pca.encode, torch.ones(2, 4)),
        (pca.decode, torch.zeros(2, 3).long()),
        (pca, torch.zeros(2, 1).byte()),
    ):
        with pytest.raises(ValueError, match="DiscretePCA must be fitted"):
            method(value)
    fitted = DiscretePCA(4, 3)
    fitted.fit(torch.eye(4))
    pca.load_state_dict(fitted.state_dict())
    assert torch.equal(pca.encode(torch.eye(4)), fitted.encode(torch.eye(4)))


def test_shapes_on_the_meta_device():
    pca = DiscretePCA(4, 6, device="meta")
    rows = pca(torch.zeros(3, pca.packed_codes.num_bytes, dtype=torch.uint8, device="meta"))
    assert (rows.shape, rows.device.type) == ((3, 4), "meta")
    assert pca.encode(rows).shape == (3, 6)


def test_the_default_device_changes_nothing():
    rows = draw_rows(50, 6)
    expected, errors = fitted(rows, 8)
    with torch.device("meta"):
        actual, errors_here = fitted(rows, 8)
        assert torch.equal(actual.encode(rows), expected.encode(rows))
    assert errors_here == errors


def test_constant_columns_and_fewer_dimensions_than_codes(device):
    rows = draw_rows(200, 6, device)
    rows[:, 2] = 5
    rows[:, 4] = rows[:, 0] - rows[:, 1]
    pca, errors = fitted(rows, 60)
    assert pca.decode(pca.encode(rows))[:, 2].tolist() == pytest.approx([5.0] * 200)
    assert errors[-1] < 1e-4 * (rows - rows.mean(0)).square().sum(1).mean()
    assert pca.basis.isfinite().all()


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_fewer_rows_than_codes(num_rows, device):
    rows = draw_rows(num_rows, 6, device)
    pca, _ = fitted(rows, 20)
    error = (pca.decode(pca.encode(rows)) - rows).abs()
    assert error.max() <= 1e-7 * rows.abs().max()  # half a unit of fp32


@pytest.mark.parametrize("value", [0.0, -7.5])
def test_equal_rows(value, device):
    rows = torch.full((30, 4), value, device=device)
    pca = DiscretePCA(4, 3, device=device)
    assert pca.fit(rows) == [0.0]
    assert not pca.encode(rows).any()
    assert torch.equal(pca.decode(pca.encode(rows)), rows)


def test_a_row_far_from_all_others_takes_one_code():
    rows = torch.cat([draw_rows(1000, 3), torch.zeros(1000, 1)], 1)
    rows[777] = torch.tensor([0.0, 0, 0, 1e6])
    pca, errors = fitted(rows, 12)
    assert_error(pca, rows, errors[-1])
    remaining_rows = torch.cat([rows[:777], rows[778:]])
    assert errors[-1] < 0.1 * (remaining_rows - remaining_rows.mean(0)).square().sum(1).mean()


def test_no_row_to_encode(device):
    pca = DiscretePCA(4, 3, device=device)
    pca.fit(torch.eye(4, device=device))
    codes = pca.encode(torch.empty(0, 4, device=device))
    assert codes.shape == (0, 3)
    assert pca.decode(codes).shape == (0, 4)


def test_autocast_changes_nothing(device):
    rows = draw_rows(200, 8, device, torch.float32)
    pca = DiscretePCA(8, 8, device=device, dtype=torch.float32)
    pca.fit(rows)
    codes = pca.encode(rows)
    decoded = pca.decode(codes)
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(pca.encode(rows), codes)
        assert torch.equal(pca.decode(codes), decoded)


def test_rows_are_encoded_alone(device):
    rows = draw_rows(300, 6, device, torch.float32)
    pca = DiscretePCA(6, 9, device=device)
    pca.fit(rows)
    with mock.patch.object(discrete_pca, "BLOCK", 64):
        assert torch.equal(
            pca.encode(rows), torch.cat([pca.encode(part) for part in rows.split(64)])
        )
    packed = pca.packed_codes.pack(pca.encode(rows))
    assert packed.shape == (300, 2)
    assert torch.equal(pca(packed), pca.decode(pca.encode(rows)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_rows_of_other_dtypes(dtype, device):
    rows = draw_rows(300, 6, device, dtype)
    pca = DiscretePCA(6, 9, device=device)
    errors = pca.fit(rows)
    assert pca.decode(pca.encode(rows)).dtype == torch.float32
    assert_error(pca, rows, errors[-1], torch.float32)


@pytest.mark.parametrize("trainable", [True, False])
def test_state_dict(trainable, device):
    rows = draw_rows(300, 6, device, torch.float32)
    pca = DiscretePCA(6, 9, trainable=trainable, device=device)
    pca.fit(rows)
    other = DiscretePCA(6, 9, trainable=not trainable, device=device)
    other.load_state_dict(pca.state_dict())
    assert torch.equal(other.encode(rows), pca.encode(rows))
    assert len(list(pca.parameters())) == 2 * trainable
    assert len(list(pca.buffers())) == 2 * (not trainable)
    assert torch.equal(copy.deepcopy(pca).basis, pca.basis)
    assert "num_codes=9" in repr(pca)


def test_exported_with_any_number_of_rows(device):
    rows = draw_rows(50, 6, device, torch.float32)
    pca = DiscretePCA(6, 9, device=device)
    pca.fit(rows)
    packed = pca.packed_codes.pack(pca.encode(rows))
    shapes = {"packed": {0: torch.export.Dim("N")}}
    exported = torch.export.export(pca, (packed,), dynamic_shapes=shapes).module()
    for num_rows in (1, 7, 50):
        assert torch.equal(exported(packed[:num_rows]), pca(packed[:num_rows]))


def test_gradients_of_decoding():
    pca = DiscretePCA(3, 4, trainable=True, dtype=torch.float64)
    pca.fit(draw_rows(50, 3))
    codes = pca.encode(draw_rows(50, 3))
    pca.decode(codes).sum().backward()
    assert torch.equal(pca.mean.grad, torch.full((3,), 50.0).double())
    assert torch.equal(pca.basis.grad, codes.double().sum(0).unsqueeze(1).expand(4, 3))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_levels": 2}, ValueError, "num_levels must be odd and 3 to 255, got 2"),
        ({"dtype": torch.float16}, TypeError, "dtype must be float32 or float64, got torch.float1"),
    ],
)
def test_wrong_modules_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        DiscretePCA(**({"embed_dim": 4, "num_codes": 3} | arguments))


class Shrinking:
    """Batches whose number shrinks in each pass."""

    def __init__(self):
        self.count = 4

    def __iter__(self):
        self.count -= 1
        return iter([torch.ones(2, 4)] * self.count)


@pytest.mark.parametrize(
    ("rows", "options", "error", "message"),
    [
        (3, {}, TypeError, "rows must be a tensor, or batches .*, got a int"),
        (iter([torch.ones(2, 4)]), {}, TypeError, "iterated repeatedly, got a list_iterator"),
        ([[1.0]], {}, TypeError, "rows must be a tensor, got a list"),
        (torch.ones(2, 4).int(), {}, TypeError, "rows must be floating point, got torch.int32"),
        (torch.ones(2, 3), {}, ValueError, r"rows must have shape \[N, D\] = \[any, 4\], got \[2,"),
        ([], {}, ValueError, "rows must hold at least one row, got none"),
        (torch.full((2, 4), torch.nan), {}, ValueError, "rows must be finite"),
        (Shrinking(), {}, ValueError, "rows must be the same in each pass, got 6 and then 4"),
        (torch.ones(2, 4), {"tolerance": -1}, ValueError, "tolerance must be finite and not n"),
        (torch.ones(2, 4), {"max_steps": -1}, ValueError, "max_steps must be at least 0, got -1"),
        (
            torch.eye(4).double() * 1e50,
            {},
            ValueError,
            "rows must have a scale within the range of torch.float32",
        ),
        (
            torch.eye(4).double() * 1e-50,
            {},
            ValueError,
            "rows must have a scale within the range of torch.float32",
        ),
    ],
)
def test_invalid_rows(rows, options, error, message):
    pca = DiscretePCA(4, 3)
    pca.fit(draw_rows(20, 4))
    before = copy.deepcopy(pca.state_dict())
    with pytest.raises(error, match=message):
        pca.fit(rows, **options)
    for name in STATISTICS:
        assert torch.equal(getattr(pca, name), before[name])


@pytest.mark.parametrize(
    ("method", "value", "error", "message"),
    [
        ("encode", torch.ones(2, 3), ValueError, r"rows must have shape \[N, D\]"),
        ("encode", torch.full((1, 4), torch.inf), ValueError, "rows must be finite"),
        ("decode", torch.ones(2, 3), TypeError, "codes must be integers, got torch.float32"),
        ("decode", torch.full((1, 3), 2), ValueError, "codes must be -1 to 1, got 2 to 2"),
    ],
)
def test_wrong_values_are_named(method, value, error, message):
    with pytest.raises(error, match=message):
        getattr(DiscretePCA(4, 3), method)(value)
