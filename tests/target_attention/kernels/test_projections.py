"""The projections of target attention, through the module, for many targets and few rows."""

from functools import partial

import pytest
import torch

from tests.cases import Case
from tests.combinations import each_pair
from tests.fixtures import skip_unless_supported
from tests.modules.target_attention_inputs import attend, attend_by_sample, make_inputs, make_module
from tests.samples import assert_other_samples_never_matter
from tests.tolerance import assert_matches_oracle, outputs_and_gradients
from torchrec_jagged_attn.target_attention.arguments import ProjectionGradients, ProjectionRows
from torchrec_jagged_attn.target_attention.kernels import projections
from torchrec_jagged_attn.target_attention.kernels.projections import ROWS

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# The targets of a tile and of a split, one more and one less; and of many splits.
NUM_TARGETS = [1, 31, 32, 33, 65, ROWS, ROWS + 1, 2 * ROWS + 1, 1000]


@pytest.fixture
def device(kernel_device):
    """Each device with kernels: for others, tests of the module have as much."""
    return kernel_device


def make(heads=2, widths=(16, 32), keys_and_values="absorbed", value_projection=True, **options):
    """Without recency bias; without a value projection, rows are as wide as all heads."""
    head_dim, history_dim = widths
    history_dim = history_dim if value_projection else heads * head_dim
    return make_module(
        heads * head_dim, heads, history_dim=history_dim, recency_bias=False,
        keys_and_values=keys_and_values, value_projection=value_projection, device="meta",
        **options,
    )  # fmt: skip


def assert_right(num_targets, dtype, device, lengths=(3, 0, 2), **options):
    """A third of the targets has no history."""
    skip_unless_supported(Case("projections", 3, 3, 2, 32, dtype=dtype), device)
    module = make(**options)
    targets = [
        num_targets - num_targets // 2,
        num_targets // 3,
        num_targets // 2 - num_targets // 3,
    ]
    inputs = make_inputs(module, lengths, device, dtype, targets=targets)
    assert_matches_oracle(partial(attend, module), partial(attend_by_sample, module), inputs)


@pytest.mark.parametrize(
    ("num_targets", "dtype", "value_projection"),
    [
        *((number, torch.float32, True) for number in NUM_TARGETS),
        *((number, dtype, True) for number in (33, 2 * ROWS + 1) for dtype in DTYPES[1:]),
        *((number, torch.float32, False) for number in (1, 33, 2 * ROWS + 1)),
        *((33, dtype, False) for dtype in DTYPES[1:]),
    ],
    ids=str,
)
def test_any_number_of_targets(num_targets, dtype, value_projection, device):
    assert_right(num_targets, dtype, device, value_projection=value_projection)


@pytest.mark.parametrize(
    ("shape", "dtype", "bias", "value_projection"),
    each_pair(
        [
            (1, (1, 1), 1),
            (3, (5, 20), 7),
            (1, (48, 96), 200),
            (4, (32, 128), 128),
            (1, (128, 70), 65),
        ],
        DTYPES,
        [True, False],
        [True, False],
    ),
    ids=str,
)
def test_any_width(shape, dtype, bias, value_projection, device):
    heads, widths, target_dim = shape
    options = {"target_dim": target_dim, "bias": bias, "value_projection": value_projection}
    assert_right(40, dtype, device, heads=heads, widths=widths, **options)


@pytest.mark.parametrize(
    ("dtype", "bias", "target_dim", "value_projection"),
    each_pair(DTYPES, [True, False], [5, 200], [True, False]),
    ids=str,
)
def test_materialized_keys_and_values(dtype, bias, target_dim, value_projection, device):
    options = {"target_dim": target_dim, "bias": bias, "value_projection": value_projection}
    assert_right(300, dtype, device, keys_and_values="materialized", **options)


@pytest.mark.usefixtures("tf32")
def test_tf32(device):
    assert_right(2 * ROWS + 1, torch.float32, device, widths=(32, 48))


@pytest.mark.parametrize("value_projection", [True, False], ids=["values", "rows"])
def test_of_histories_that_are_cut(value_projection, device):
    """The kernel of the first projection lists the chunks, too."""
    lengths = [1100, 0, 700]
    assert_right(40, torch.float32, device, lengths, value_projection=value_projection)


def test_sums_by_several_programs(device, monkeypatch):
    monkeypatch.setattr(projections, "SUMMED_ELEMENTS", 128)
    monkeypatch.setattr(projections, "plan_of", projections.plan_of.__wrapped__)  # not a cached one
    assert_right(300, torch.float32, device, bias=False)


@pytest.mark.parametrize("value_projection", [True, False], ids=["values", "rows"])
def test_other_samples_never_matter(value_projection, device):
    module = make(heads=3, widths=(5, 20), value_projection=value_projection)
    rows, targets = [5, 0, 40, 3, 1], [17, 33, 5, 1, 20]
    inputs = make_inputs(module, rows, device, targets=targets)
    lengths = dict.fromkeys(("target", "out", "target_offsets"), targets)
    lengths |= dict.fromkeys(("history", "offsets"), rows)
    grad_out = torch.randn_like(inputs["target"])
    assert_other_samples_never_matter(partial(attend, module), inputs, grad_out, lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_targets", [4096, 100_000])
def test_repeats_are_equal(num_targets, dtype):
    module = make(heads=4, widths=(32, 128))
    inputs = make_inputs(module, [3, 2], "cuda", dtype, targets=[num_targets // 2] * 2)
    grad_out = torch.randn_like(inputs["target"])
    first = outputs_and_gradients(partial(attend, module), inputs, grad_out)
    for _ in range(3):
        again = outputs_and_gradients(partial(attend, module), inputs, grad_out)
        assert all(torch.equal(again[name], value) for name, value in first.items())


def test_infinities_stay_in_the_gradients_of_their_head(device):
    """Also where a tile reads columns of the next head, too."""
    heads, head_dim, width = 3, 5, 20
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(300, *shape, generator=generator).to(device)

    q, grad_u, pooled = draw(heads, head_dim), draw(heads, width), draw(heads, width)
    grad_q, target, grad_out, v, grad_v = (draw(heads * head_dim) for _ in range(5))
    q[7, 1, 2] = torch.inf
    pooled[8, 1, 3] = torch.nan
    grad_out[9, 4] = torch.inf
    grad_values = grad_v.view_as(q)
    expected = ProjectionGradients(
        w_q=grad_q.T @ target,
        w_out=grad_out.T @ v,
        w_k=torch.einsum("rhx,rhy->hxy", q, grad_u),
        w_v=torch.einsum("rhx,rhy->hxy", grad_values, pooled),
        b_in=None,
        b_out=None,
    )
    found = ProjectionGradients(*(None if x is None else torch.empty_like(x) for x in expected))
    rows = ProjectionRows(
        grad_q, target, grad_out, v, grad_v, grad_q.new_empty(0), q, grad_u, pooled
    )
    projections.parameter_gradients(rows, found)
    for grad, of_products in zip(found[:4], expected[:4], strict=True):
        assert torch.equal(grad.isnan(), of_products.isnan())
        assert torch.equal(grad.isinf(), of_products.isinf())
