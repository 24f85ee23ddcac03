"""Gradients of the projections of target attention, and the bias of values, on every device."""

import pytest
import torch

from tests.cases import Case
from tests.combinations import each_pair
from tests.fixtures import skip_unless_supported
from tests.rounding import RoundingErrors
from tests.tolerance import assert_close
from torchrec_jagged_attn.devices import has_kernels
from torchrec_jagged_attn.target_attention import cpu_projections as head_products
from torchrec_jagged_attn.target_attention.arguments import ProjectionGradients, ProjectionRows
from torchrec_jagged_attn.target_attention.kernels import projections
from torchrec_jagged_attn.target_attention.kernels.projections import ROWS, parameter_gradients

# The rows of a tile and of a split, one more and one less; and of many splits.
NUM_ROWS = [0, 1, 31, 33, 65, ROWS, ROWS + 1, 2 * ROWS + 1, 4096]


def inputs_of(num_rows, device, dtype=torch.float32, heads=2, widths=(16, 32), target_dim=None):
    """The rows that gradients sum over; terms do not cancel."""
    generator = torch.Generator().manual_seed(0)
    x, y = widths
    rows = ["grad_q", "target", "grad_out", "v", "grad_v"]
    shapes = dict.fromkeys(rows, (heads * x,)) | {
        "target": (heads * x if target_dim is None else target_dim,),
        "filled": (),
        "q": (heads, x),
        "grad_u": (heads, y),
        "pooled": (heads, y),
    }
    inputs = {
        name: (torch.randn(num_rows, *shape, generator=generator) + 0.5).to(device, dtype)
        for name, shape in shapes.items()
    }
    inputs["filled"] = (inputs["filled"] > 0).to(dtype)
    return inputs


def gradients_of(inputs, absorbed=True, biased=True, of_values=True):
    """Gradients, written to buffers of NaN."""
    (heads, x), y = inputs["q"].shape[1:], inputs["pooled"].shape[2]
    width, new = heads * x, inputs["target"].new_full
    rows = ProjectionRows(**inputs)
    if not absorbed:
        rows = rows._replace(q=None, grad_u=None, pooled=None)
    if not of_values:
        of_others = ("grad_out", "v", "grad_v", "filled", "pooled")
        rows = rows._replace(**dict.fromkeys(of_others))
    grads = ProjectionGradients(
        w_q=new((width, inputs["target"].shape[1]), torch.nan),
        w_out=new((width, width), torch.nan) if of_values else None,
        w_k=new((heads, x, y), torch.nan) if absorbed else None,
        w_v=new((heads, x, y), torch.nan) if absorbed and of_values else None,
        b_in=new(((3 if of_values else 1) * width,), torch.nan) if biased else None,
        b_out=new((width,), torch.nan) if biased and of_values else None,
    )
    device, dtype = rows.grad_q.device, rows.grad_q.dtype
    on_kernels = has_kernels(device, dtype)
    (parameter_gradients if on_kernels else head_products.parameter_gradients)(rows, grads)
    return [grad for grad in grads if grad is not None]


def expected_of(inputs, absorbed=True, biased=True, of_values=True):
    """The same gradients, by PyTorch."""
    weights = [inputs["grad_q"].T @ inputs["target"]]
    if of_values:
        weights.append(inputs["grad_out"].T @ inputs["v"])
    if absorbed:
        q, grad_u, pooled = (inputs[name].transpose(0, 1) for name in ("q", "grad_u", "pooled"))
        grad_values = inputs["grad_v"].reshape(inputs["q"].shape).transpose(0, 1)
        weights += [q.mT @ grad_u, grad_values.mT @ pooled][: 1 + of_values]
    sums = []
    if biased and not of_values:
        sums = [inputs["grad_q"].sum(0)]
    elif biased:
        grad_b_q = inputs["grad_q"].sum(0)
        grad_b_v = (inputs["grad_v"] * inputs["filled"].unsqueeze(1)).sum(0)
        sums = [
            torch.cat([grad_b_q, torch.zeros_like(grad_b_q), grad_b_v]),
            inputs["grad_out"].sum(0),
        ]
    return weights + sums


def assert_right(inputs, **options):
    with RoundingErrors(inputs["grad_q"].dtype) as errors:
        expected = expected_of({name: x.double() for name, x in inputs.items()}, **options)
    for found, grad in zip(gradients_of(inputs, **options), expected, strict=True):
        assert_close(found, grad, errors)


@pytest.mark.parametrize(
    ("dtype", "num_rows"),
    [
        *((torch.float32, num_rows) for num_rows in NUM_ROWS),
        *((torch.float16, num_rows) for num_rows in (33, ROWS, 2 * ROWS + 1)),
        *((torch.bfloat16, num_rows) for num_rows in (33, ROWS, 2 * ROWS + 1)),
    ],
    ids=str,
)
def test_any_number_of_rows(num_rows, dtype, device):
    skip_unless_supported(Case("rows", 1, 1, 2, 32, dtype=dtype), device)
    assert_right(inputs_of(num_rows, device, dtype))


@pytest.mark.parametrize(
    ("dtype", "absorbed", "target_dim"),
    each_pair([torch.float32, torch.float16, torch.bfloat16], [True, False], [5, 64, 200]),
    ids=str,
)
def test_targets_of_another_width(dtype, absorbed, target_dim, device):
    skip_unless_supported(Case("widths", 1, 1, 2, 32, dtype=dtype), device)
    inputs = inputs_of(300, device, dtype, target_dim=target_dim)
    for biased in (True, False):
        assert_right(inputs, absorbed=absorbed, biased=biased)


@pytest.mark.parametrize(
    ("heads", "widths"),
    [(1, (1, 1)), (3, (5, 20)), (1, (48, 96)), (4, (32, 128)), (2, (65, 70)), (1, (128, 200))],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_any_width(heads, widths, dtype, device):
    skip_unless_supported(Case("widths", 1, 1, heads, 32, dtype=dtype), device)
    assert_right(inputs_of(100, device, dtype, heads, widths))


@pytest.mark.parametrize("biased", [True, False])
def test_materialized_keys_and_values(biased, device):
    """Only weights of projections that exist have gradients."""
    assert_right(inputs_of(300, device), absorbed=False, biased=biased)


@pytest.mark.parametrize(
    ("dtype", "absorbed", "biased", "target_dim", "num_rows"),
    each_pair(
        [torch.float32, torch.float16, torch.bfloat16],
        [True, False],
        [True, False],
        [None, 5, 200],
        [0, 33, 2 * ROWS + 1, 4096],
    ),
    ids=str,
)
def test_of_queries_and_keys_alone(dtype, absorbed, biased, target_dim, num_rows, device):
    """Without a value projection."""
    skip_unless_supported(Case("rows", 1, 1, 2, 32, dtype=dtype), device)
    inputs = inputs_of(num_rows, device, dtype, 2, (16, 32), target_dim)
    assert_right(inputs, absorbed=absorbed, biased=biased, of_values=False)


def test_no_bias(device, monkeypatch):
    monkeypatch.setattr(projections, "SUMMED_ELEMENTS", 128)
    monkeypatch.setattr(projections, "plan_of", projections.plan_of.__wrapped__)  # not a cached one
    assert_right(inputs_of(300, device), biased=False)


@pytest.mark.usefixtures("tf32")
def test_tf32(device):
    assert_right(inputs_of(2 * ROWS + 1, device, widths=(32, 48)))


def test_doubles(device):
    """What a layer may be in whose attention is not; the oracle is no more exact than they are."""
    assert_right(inputs_of(300, device, torch.float64))


def test_infinities_stay_where_they_are(device):
    """Also if a tile also reads the next head."""
    inputs = inputs_of(300, device, heads=3, widths=(5, 20))
    inputs["q"][7, 1, 2] = torch.inf
    inputs["pooled"][8, 1, 3] = torch.nan
    inputs["grad_out"][9, 4] = torch.inf
    for found, expected in zip(gradients_of(inputs), expected_of(inputs), strict=True):
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.isinf(), expected.isinf())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [4096, 100_000])
def test_repeats_are_equal(num_rows, dtype):
    inputs = inputs_of(num_rows, "cuda", dtype, 4, (32, 128))
    assert_right(inputs)
    first = gradients_of(inputs)
    for _ in range(3):
        for found, expected in zip(gradients_of(inputs), first, strict=True):
            assert torch.equal(found, expected)
