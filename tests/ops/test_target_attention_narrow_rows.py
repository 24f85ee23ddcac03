"""``jagged_target_attention`` over rows of a byte a number, against oracles on wide rows."""

import functools

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tests.combinations import each_pair
from tests.fixtures import opcheck, skip_unless_supported, sync_debug_mode
from tests.ops.test_dropout import assert_weights_are_dropped
from tests.ops.test_row_dropout import assert_rows_are_dropped
from tests.ops.test_target_attention import arguments_of_op, inputs_of
from tests.ops.test_target_attention_rows import BIASES, LAYOUTS, LENGTHS, TARGETS, lay_out
from torchrec_jagged_attn import jagged_target_attention
from torchrec_jagged_attn.testing import (
    Case,
    assert_close,
    assert_matches_oracle,
    outputs_and_gradients,
    plain_products,
    target_attention_oracle,
    target_attention_plain,
)

CPU = torch.device("cpu")
E4M3 = torch.float8_e4m3fn
NARROW = [torch.int8, torch.uint8, E4M3]


def draw_rows(num_rows, width, device, of_byte, has_bias=True):
    """All numbers that a byte can be, but NaN; rows have a mean of about zero."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(256, (num_rows, width), generator=generator, dtype=torch.uint8)
    scale = (0.5 + torch.rand(num_rows, generator=generator)) / 64
    bias = torch.randn(num_rows, generator=generator) / 4
    if of_byte == torch.uint8:
        bias -= 128 * scale
    elif of_byte == E4M3:
        codes[codes & 0x7F == 0x7F] = 0x01
        codes[codes & 0x40 == 0x40] -= 0x30  # few are large
    rows = {"history": codes.view(of_byte), "row_scale": scale, "row_bias": bias}
    if not has_bias:
        del rows["row_bias"]
    return {name: x.to(device) for name, x in rows.items()}


def narrow(lengths, device=CPU, dtype=torch.float32, of_byte=torch.int8, has_bias=True, **shape):
    """Random inputs without a bias of scores, and their narrow rows."""
    inputs = inputs_of(lengths, device, dtype, **shape)
    del inputs["bias"]
    num_rows, width = inputs.pop("history").shape
    return inputs, draw_rows(num_rows, width, device, of_byte, has_bias)


def by_index(lengths, device=CPU, dtype=torch.float32, of_byte=torch.int8, **shape):
    """The same over 20 rows; every third one is NaN, and not named."""
    inputs, rows = narrow(lengths, device, dtype, of_byte, **shape)
    num_places, width = rows["history"].shape
    rows = draw_rows(20, width, device, of_byte)
    rows["row_scale"][2::3] = torch.nan
    drawn = torch.randint(14, (num_places,), generator=torch.Generator().manual_seed(2))
    named = torch.arange(20)[torch.arange(20) % 3 < 2]
    return inputs | {"indices": named[drawn].to(device)}, rows


def wide(rows, dtype):
    """``rows`` in fp32, or fp64, and then in ``dtype``."""
    exact = torch.promote_types(dtype, torch.float32)
    x = rows["history"].to(exact) * rows["row_scale"].to(exact).unsqueeze(1)
    if "row_bias" in rows:
        x += rows["row_bias"].to(exact).unsqueeze(1)
    return x.to(dtype)


def of_wide(attend, rows):
    """``attend`` on wide rows, of which indices make a copy."""

    def call(*, query, indices=None, **inputs):
        history = wide(rows, query.dtype)
        history = history if indices is None else history.index_select(0, indices)
        return attend(query=query, history=history, **inputs)

    return call


def functions_of(rows):
    return (
        functools.partial(jagged_target_attention, **rows),
        of_wide(target_attention_oracle, rows),
        of_wide(target_attention_plain, rows),
    )


def assert_right(inputs, rows, **constants):
    """Also where no gradient is taken, which other kernels may compute."""
    assert_right_without_a_gradient(inputs, rows, **constants)
    functions = (functools.partial(function, **constants) for function in functions_of(rows))
    assert_matches_oracle(*functions, inputs)


def assert_right_without_a_gradient(inputs, rows, **constants):
    exact = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    attend, oracle, plain = functions_of(rows)
    with torch.no_grad():
        found, expected = attend(**inputs, **constants), oracle(**exact, **constants)
        with plain_products():
            formula = plain(**inputs, **constants)
    assert_close(found, expected, formula)


@pytest.mark.usefixtures("without_a_compiler")
@pytest.mark.parametrize(
    ("layout", "biases", "dtype", "of_byte", "make"),
    each_pair(
        LAYOUTS,
        BIASES,
        [torch.float32, torch.float16, torch.bfloat16],
        NARROW,
        [narrow, by_index],
    ),
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_right(layout, biases, dtype, of_byte, make, device):
    skip_unless_supported(Case("rows", 5, 300, 2, 16, dtype=dtype), device)
    inputs, rows = make(LENGTHS, device, dtype, of_byte, num_targets=TARGETS.get(layout, 9))
    inputs, timestamps = lay_out(inputs, layout, biases)
    assert_right(inputs, rows, timestamps=timestamps)


@pytest.mark.parametrize(
    ("queries", "width", "of_byte"),
    each_pair([(1, 1), (1, 4), (5, 3), (2, 40)], [8, 20, 64, 128, 256, 512], NARROW),
    ids=str,
)
def test_widths(queries, width, of_byte, device):
    num_targets, num_heads = queries
    shape = {"num_targets": num_targets, "num_heads": num_heads, "width": width}
    assert_right(*narrow([33, 0, 70], device, of_byte=of_byte, **shape))


@pytest.mark.gpu
@pytest.mark.parametrize("of_byte", NARROW, ids=str)
@pytest.mark.parametrize("make", [narrow, by_index])
@pytest.mark.parametrize("num_targets", [1, 2, 5])
@pytest.mark.parametrize("width", [16, 32, 48, 96, 128, 256])
def test_half_precision_of_long_samples(width, num_targets, make, of_byte):
    lengths = [3, 0, 5000, 17, 191, 192, 193, 383, 384, 385, 1000]
    shape = {"num_targets": num_targets, "num_heads": 4, "width": width}
    assert_right(*make(lengths, "cuda", torch.bfloat16, of_byte, **shape))


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("num_targets", [1, 9, 40])
def test_tf32(num_targets, device):
    assert_right(*narrow([70, 0, 17], device, num_targets=num_targets, width=64))


@pytest.mark.parametrize("score", ["silu", "sigmoid"])
@pytest.mark.parametrize("num_targets", [1, 9, 40])
def test_scores(num_targets, score, device):
    assert_right(*narrow(LENGTHS, device, num_targets=num_targets), score=score)


@pytest.mark.parametrize("of_byte", NARROW, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_scales_alone(dtype, of_byte, device):
    skip_unless_supported(Case("rows", 5, 300, 2, 16, dtype=dtype), device)
    assert_right(*narrow(LENGTHS, device, dtype, of_byte, has_bias=False))


@pytest.mark.parametrize("for_backward", [False, True])
@pytest.mark.parametrize("of_byte", NARROW, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_number_of_a_byte(dtype, of_byte, for_backward, device):
    """Each is the only row of a sample, whose output it is; NaN, too."""
    skip_unless_supported(Case("rows", 5, 300, 2, 16, dtype=dtype), device)
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(of_byte)
    query = torch.ones(256, 1, 16, device=device, dtype=dtype)
    rows = codes.unsqueeze(1).repeat(1, 16)
    ones, offsets = torch.ones(256, device=device), torch.arange(257, device=device)
    with torch.set_grad_enabled(for_backward):
        out = jagged_target_attention(query, rows, offsets, row_scale=ones)
    assert torch.equal(out.squeeze(1).nan_to_num(1000), rows.to(dtype).nan_to_num(1000))


@pytest.mark.usefixtures("without_a_compiler")
@pytest.mark.parametrize("of_byte", NARROW, ids=str)
@pytest.mark.parametrize("make", [narrow, by_index])
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]], ids=str)
def test_no_row(lengths, make, of_byte, device):
    inputs, rows = make(lengths, device, of_byte=of_byte)
    attend = functions_of(rows)[0]
    results = outputs_and_gradients(attend, inputs, torch.ones_like(inputs["query"]))
    assert {*results} == {"out", "query"}
    assert all(torch.all(value == 0) for value in results.values())


@pytest.mark.parametrize("num_targets", [0, 1, 9])
@pytest.mark.parametrize("lengths", [[1], [0, 0, 70, 1, 1, 0], [64] * 3], ids=str)
def test_edges(lengths, num_targets, device):
    assert_right(*narrow(lengths, device, num_targets=num_targets))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("num_targets", [1, 9, 40])
def test_dropout(num_targets, dtype, device):
    inputs, rows = narrow(LENGTHS, device, dtype, num_targets=num_targets)
    functions = functions_of(rows)
    assert_rows_are_dropped(functions, inputs, 368, device)
    assert_weights_are_dropped(functions, inputs, 5 * num_targets, 2, 368, device)


@pytest.mark.parametrize("of_scale", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("num_targets", [1, 9, 40])
def test_strided_rows_and_scales(num_targets, of_scale, device):
    """Scales and biases of another dtype than queries, between the numbers of rows."""
    inputs, rows = narrow([7, 0, 70], device, of_byte=torch.uint8, num_targets=num_targets)
    num_rows, width = rows["history"].shape
    fused = torch.full((num_rows, 8 + width + 8), 0xFF, dtype=torch.uint8, device=device)
    scales = fused[:, :8].view(of_scale)
    scales[:, 0], scales[:, 1] = rows["row_scale"], rows["row_bias"]
    fused[:, 8 : 8 + width] = rows["history"]
    strided = {
        "history": fused[:, 8 : 8 + width],
        "row_scale": scales[:, 0],
        "row_bias": scales[:, 1],
    }
    assert_right(inputs, strided)


@pytest.mark.parametrize("num_targets", [1, 9, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("nan_filled_memory")
def test_other_samples_never_matter(num_targets, dtype, device):
    skip_unless_supported(Case("rows", 5, 300, 2, 16, dtype=dtype), device)
    lengths = [3, 0, 130, 17, 600 if device.type == "cuda" else 300]
    inputs, rows = narrow(lengths, device, dtype, num_targets=num_targets)
    grad_out = torch.randn_like(inputs["query"])
    whole = outputs_and_gradients(functions_of(rows)[0], inputs, grad_out)
    assert all(torch.isfinite(value).all() for value in whole.values())
    rows["row_scale"][3:133] = rows["row_bias"][3:133] = torch.nan  # of sample 2
    poisoned = outputs_and_gradients(functions_of(rows)[0], inputs, grad_out)
    order = [0, 1, 3, 4]
    for name, value in whole.items():
        assert torch.equal(poisoned[name][order], value[order]), name
        assert poisoned[name][2].isnan().any() or not num_targets


@pytest.mark.parametrize(
    ("make", "row_format"), [(narrow, "int8"), (by_index, "uint8"), (narrow, "e4m3")]
)
def test_opcheck(make, row_format, device):
    of_byte = {"int8": torch.int8, "uint8": torch.uint8, "e4m3": E4M3}[row_format]
    inputs, rows = make([3, 0, 5], device, of_byte=of_byte, num_targets=2)
    if row_format == "e4m3":
        rows["history"] = rows["history"].view(torch.int8)
    arguments = arguments_of_op(inputs | rows, row_format=row_format)
    opcheck(torch.ops.torchrec_jagged_attn.target_attention.default, arguments)


@pytest.mark.reference  # traced alike with any kernels
@pytest.mark.parametrize(
    ("make", "of_byte"), [(narrow, torch.int8), (by_index, torch.uint8), (narrow, E4M3)]
)
def test_compiles_once_for_all_batches(make, of_byte, device):
    counter = CompileCounter()
    compiled = torch.compile(jagged_target_attention, backend=counter, fullgraph=True, dynamic=True)
    for lengths in ([3, 4, 2], [9, 0, 2, 5], [2, 30, 1, 5, 8]):
        inputs, rows = make(lengths, device, of_byte=of_byte)
        inputs |= rows
        torch.testing.assert_close(compiled(**inputs), jagged_target_attention(**inputs))
    assert counter.frame_count == 1


@pytest.mark.reference  # kernels compute no fp64
def test_gradcheck_of_the_reference():
    inputs, rows = narrow([3, 0, 5], num_targets=2, dtype=torch.float64)
    attend = functools.partial(jagged_target_attention, offsets=inputs["offsets"], **rows)
    assert torch.autograd.gradcheck(attend, inputs["query"].requires_grad_())


def test_rows_have_no_gradient(device):
    """Nor have their scales where the op itself is given ones that require it."""
    inputs, rows = narrow([3, 0, 5], device, num_targets=2)
    scale = rows["row_scale"].requires_grad_()
    arguments = arguments_of_op(inputs | rows, row_format="int8")
    op = torch.ops.torchrec_jagged_attn.target_attention.default
    op(*arguments)[0].sum().backward()
    assert inputs["query"].grad is not None
    assert scale.grad is None


@pytest.fixture(params=NARROW, ids=str)
def of_byte(request):
    return request.param


@pytest.fixture(params=["no gradient", "1 target", "9 targets", "40 targets"])
def long_samples(request, of_byte):
    """On a GPU, inputs, their rows, and a function of both: for the kernels of one warp, which take
    no gradient, and for those in Triton.
    """
    num_targets = {"9 targets": 9, "40 targets": 40}.get(request.param, 1)
    shape = {"num_targets": num_targets, "width": 64}
    inputs, rows = narrow([60, 1200, 140, 600], "cuda", torch.bfloat16, of_byte, **shape)
    grad_out = torch.randn_like(inputs["query"])

    def results():
        attend = functions_of(rows)[0]
        if request.param != "no gradient":
            return outputs_and_gradients(attend, inputs, grad_out)
        with torch.no_grad():
            return {"out": attend(**inputs)}

    return inputs, rows, results


@pytest.mark.gpu
def test_cuda_graph_replays_with_other_rows(long_samples):
    inputs, rows, results_of = long_samples
    results_of()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = results_of()
    inputs["offsets"].copy_(torch.tensor([0, 1800, 1800, 1820, 2000]))
    rows["history"].view(torch.uint8).copy_(rows["history"].view(torch.uint8).flip(0))
    expected = results_of()
    for _ in range(2):
        for value in results.values():
            value.fill_(torch.nan)
        graph.replay()
        for name, value in expected.items():
            assert torch.equal(results[name], value), name


@pytest.mark.gpu
def test_repeats_are_bit_equal(long_samples):
    *_, results_of = long_samples
    first = results_of()
    for _ in range(50):
        again = results_of()
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.gpu
def test_never_waits_for_the_device(long_samples):
    *_, results_of = long_samples
    results_of()  # compiles
    with sync_debug_mode("error"):
        results_of()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"row_scale": None}, ValueError, "row_scale must be given for history of torch.int8, got"),
        ({"history": torch.zeros(7, 8)}, TypeError, "history must be one of int8, uint8, float8_e"),
        (
            {"history": torch.zeros(7, 8), "row_scale": None},
            ValueError,
            "row_bias must go with row_scale, got row_bias alone",
        ),
        ({"row_scale": torch.ones(6)}, ValueError, r"row_scale must have shape \[N\] = \[7\], got"),
        ({"row_bias": torch.ones(7, 1)}, ValueError, r"row_bias must have shape \[N\] = \[7\], go"),
        ({"row_scale": torch.ones(7).int()}, TypeError, "row_scale must be one of"),
        ({"row_bias": torch.ones(7).int()}, TypeError, "row_bias must be one of"),
        ({"row_scale": [1.0] * 7}, TypeError, "row_scale must be a tensor, got a list"),
        (
            {"row_scale": torch.ones(7, requires_grad=True)},
            ValueError,
            "row_scale must not require a gradient where rows are narrow",
        ),
        (
            {"history": torch.zeros(7, 8).to(E4M3).requires_grad_()},
            ValueError,
            "history must not require a gradient where rows are narrow",
        ),
        (
            {"row_bias": torch.ones(7, device="meta")},
            ValueError,
            "row_bias must be on cpu as query is, got meta",
        ),
        ({"indices": torch.zeros(7).long(), "row_scale": torch.ones(6)}, ValueError, r"\[U\] = \["),
    ],
    ids=str,
)
def test_errors_name_the_argument(given, error, message):
    rows = {
        "history": torch.zeros(7, 8, dtype=torch.int8),
        "row_scale": torch.ones(7),
        "row_bias": torch.ones(7),
    }
    with pytest.raises(error, match=message):
        jagged_target_attention(
            torch.zeros(2, 2, 8), offsets=torch.tensor([0, 3, 7]), **rows | given
        )
