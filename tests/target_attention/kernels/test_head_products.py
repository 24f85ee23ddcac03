"""The projections of target attention on the side of targets, compared with fp64."""

import pytest
import torch

from tests.cases import Case, offsets_of
from tests.combinations import each_pair
from tests.fixtures import skip_unless_supported
from tests.rounding import RoundingErrors
from tests.tolerance import assert_close
from torchrec_jagged_attn.devices import has_kernels
from torchrec_jagged_attn.target_attention import cpu_projections as plain_head_products
from torchrec_jagged_attn.target_attention.kernels import head_products as kernel_products
from torchrec_jagged_attn.target_attention.kernels import schedule
from torchrec_jagged_attn.target_attention.kernels.records import Listing, SplitList

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
TILE = 32  # rows of one


def inputs_of(num_rows, device, dtype=torch.float32, heads=2, widths=(16, 32), target_dim=None):
    """Arguments of the four functions; some targets have no history."""
    generator = torch.Generator().manual_seed(0)
    head_dim, width = widths
    embed_dim = heads * head_dim
    target_dim = embed_dim if target_dim is None else target_dim
    shapes = {
        "target": (num_rows, target_dim),
        "w_q": (embed_dim, target_dim),
        "b_q": (embed_dim,),
        "w_k": (heads, head_dim, width),
        "pooled": (num_rows, heads, width),
        "w_v": (heads, head_dim, width),
        "b_v": (embed_dim,),
        "w_out": (embed_dim, embed_dim),
        "b_out": (embed_dim,),
        "grad_out": (num_rows, embed_dim),
        "grad_u": (num_rows, heads, width),
    }
    inputs = {
        name: torch.randn(shape, generator=generator).to(device, dtype)
        for name, shape in shapes.items()
    }
    seen = torch.rand(num_rows, 1, generator=generator) < 0.7
    inputs["stats"] = torch.rand(2, num_rows, heads, generator=generator) * seen
    inputs["stats"] = inputs["stats"].to(device)
    return inputs


def results_of(products, inputs, dtype, biased=True, listing=None):
    """Results of all four functions, in ``dtype``, by name."""
    x = inputs if biased else inputs | dict.fromkeys(("b_q", "b_v", "b_out"))
    u, grad_pooled = (torch.full_like(x["pooled"], torch.nan, dtype=dtype) for _ in range(2))
    q = products.absorb_queries(x["target"], x["w_q"], x["b_q"], x["w_k"], dtype, u, listing)
    values, filled, out = products.project(
        x["pooled"], x["stats"], x["w_v"], x["b_v"], x["w_out"], x["b_out"], dtype
    )
    grad_values = products.gradient_of_pooled(
        x["grad_out"], x["w_out"], x["w_v"], dtype, grad_pooled, listing
    )
    grad_q, grad_target = products.gradient_of_targets(
        x["grad_u"], x["w_k"], x["w_q"], dtype, dtype
    )
    results = {"q": q, "u": u, "values": values, "out": out, "grad_values": grad_values}
    results |= {"grad_pooled": grad_pooled, "grad_q": grad_q, "grad_target": grad_target}
    return results | ({"filled": filled} if biased else {})


def products_on(device, dtype):
    """The functions that a call on ``device`` uses."""
    on_kernels = has_kernels(torch.device(device), dtype)
    return kernel_products if on_kernels else plain_head_products


def assert_right(inputs, **options):
    device, dtype = inputs["target"].device, inputs["target"].dtype
    doubles = {name: x.double() for name, x in inputs.items()}
    with RoundingErrors(dtype) as errors:
        expected = results_of(plain_head_products, doubles, torch.float64, **options)
    found = results_of(products_on(device, dtype), inputs, dtype, **options)
    for name, x in found.items():
        assert_close(x, expected[name], errors, name=name)


@pytest.mark.parametrize("num_rows", [0, 1, TILE - 1, TILE, TILE + 1, 3 * TILE + 5])
@DTYPES
def test_any_number_of_rows(num_rows, dtype, device):
    skip_unless_supported(Case("rows", 1, 1, 2, 32, dtype=dtype), device)
    assert_right(inputs_of(num_rows, device, dtype))


@pytest.mark.parametrize(
    ("heads", "widths", "target_dim"),
    [(1, (1, 1), 1), (3, (5, 20), 7), (1, (48, 96), 200), (4, (32, 128), 128), (2, (128, 70), 65)],
)
@DTYPES
def test_any_width(heads, widths, target_dim, dtype, device):
    skip_unless_supported(Case("widths", 1, 1, heads, 32, dtype=dtype), device)
    for biased in (True, False):
        assert_right(inputs_of(40, device, dtype, heads, widths, target_dim), biased=biased)


@pytest.mark.usefixtures("tf32")
def test_tf32(device):
    assert_right(inputs_of(40, device, widths=(32, 48)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_operands_of_other_dtypes_are_cast(dtype, device):
    """Bit-equal to casting operands first."""
    inputs = inputs_of(40, device, dtype)
    other = torch.float16 if dtype == torch.float32 else torch.float32
    products = products_on(device, dtype)
    cast = {name: x.to(other) for name, x in inputs.items() if name not in ("stats", "grad_out")}
    cast |= {"stats": inputs["stats"], "grad_out": inputs["grad_out"]}
    before = {name: x if name == "stats" else x.to(dtype) for name, x in cast.items()}
    expected = results_of(products, before, dtype)
    for name, x in results_of(products, cast, dtype).items():
        assert torch.equal(x, expected[name]), name


def test_bias_of_values_where_there_is_a_history(device):
    """Also if its statistics are NaN."""
    inputs = inputs_of(3, device)
    inputs["stats"][1] = torch.tensor([[0.0, 0.0], [0.0, 0.5], [torch.nan, 0.0]])
    for name in ("pooled", "b_out"):
        inputs[name].zero_()
    found = results_of(products_on(device, torch.float32), inputs, torch.float32)
    assert found["filled"].tolist() == [0, 1, 1]
    expected = torch.stack([torch.zeros_like(inputs["b_v"]), inputs["b_v"], inputs["b_v"]])
    assert torch.equal(found["values"], expected)


def test_a_row_does_not_matter_to_another(device):
    inputs = inputs_of(40, device)
    expected = results_of(products_on(device, torch.float32), inputs, torch.float32)
    for name in ("target", "pooled", "grad_out", "grad_u"):
        inputs[name][:7] = torch.nan
        inputs[name][-1] = torch.inf
    for name, x in results_of(products_on(device, torch.float32), inputs, torch.float32).items():
        assert torch.equal(x[7:-1], expected[name][7:-1]), name


def splits_to_list(kernel_device):
    """Splits listed by a separate kernel, and a listing to be filled."""
    lengths = torch.tensor([5, 300, 2, *[16] * 200, 0, 64])  # of more than one program
    offsets = offsets_of(lengths, torch.int64, kernel_device)
    chunk, num_splits = 16, int(lengths.sum()) // 16
    expected, splits = (
        torch.full((2, num_splits), 77, dtype=torch.int32, device=kernel_device) for _ in range(2)
    )
    schedule.list_splits_kernel[(2,)](
        SplitList(expected, offsets), len(lengths), num_splits,
        CHUNK=chunk, BLOCK_B=schedule.SAMPLES_OF_LIST, OVERLAP=False,
    )  # fmt: skip
    return expected, Listing(SplitList(splits, offsets), len(lengths), num_splits, chunk)


@pytest.mark.parametrize("num_rows", [1, 40])
def test_products_list_splits(num_rows, kernel_device):
    """As a separate kernel does; products are bit-equal."""
    expected, listing = splits_to_list(kernel_device)
    inputs = inputs_of(num_rows, kernel_device)
    alone = results_of(kernel_products, inputs, torch.float32)
    beside = results_of(kernel_products, inputs, torch.float32, listing=listing)
    assert torch.equal(listing.split_list.splits, expected)
    for name, x in beside.items():
        assert torch.equal(x, alone[name]), name


@pytest.mark.parametrize(
    ("num_rows", "shape", "dtype"),
    each_pair(
        [0, 1, 15, 16, 17, 70],
        [(1, 1), (1, 20), (3, 5), (4, 32), (2, 128)],
        [torch.float32, torch.float16, torch.bfloat16],
    ),
    ids=str,
)
def test_own_columns(num_rows, shape, dtype, device):
    """Exact copies, whatever the other columns contain."""
    heads, head_dim = shape
    skip_unless_supported(Case("columns", 1, 1, heads, 32, dtype=dtype), device)
    products = products_on(device, dtype)
    width = heads * head_dim
    rows = torch.randn(num_rows, heads, head_dim, generator=torch.Generator().manual_seed(0))
    rows = rows.to(device, dtype)
    pooled, spread = (torch.full((num_rows, heads, width), torch.nan) for _ in range(2))
    pooled, spread = pooled.to(device, dtype), spread.to(device, dtype)
    expected = torch.zeros_like(pooled)
    for h in range(heads):
        of_head = slice(h * head_dim, (h + 1) * head_dim)
        pooled[:, h, of_head] = expected[:, h, of_head] = rows[:, h]
    for other in (dtype, torch.float32, torch.float16):  # operands of other dtypes are cast
        out = products.own_columns(pooled, other)
        assert out.dtype == other
        assert torch.equal(out, rows.flatten(1).to(other))
    products.spread_columns(rows.flatten(1).float(), spread, None)
    assert torch.equal(spread, expected)


@pytest.mark.parametrize("num_rows", [1, 40])
def test_spreading_columns_lists_splits(num_rows, kernel_device):
    expected, listing = splits_to_list(kernel_device)
    grad_out = torch.randn(num_rows, 32, device=kernel_device)
    alone, beside = (torch.empty(num_rows, 2, 32, device=kernel_device) for _ in range(2))
    kernel_products.spread_columns(grad_out, alone, None)
    kernel_products.spread_columns(grad_out, beside, listing)
    assert torch.equal(listing.split_list.splits, expected)
    assert torch.equal(beside, alone)


def test_no_gradient_of_targets(device):
    inputs = inputs_of(40, device)
    products = products_on(device, torch.float32)
    arguments = (inputs["grad_u"], inputs["w_k"], inputs["w_q"], torch.float32)
    grad_q, grad_target = products.gradient_of_targets(*arguments, None)
    assert grad_target is None
    assert torch.equal(grad_q, products.gradient_of_targets(*arguments, torch.float32)[0])
