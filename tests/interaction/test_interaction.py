"""The feature-interaction ops against PyTorch on each sample, on every device."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from tests.cases import Case, offsets_of
from tests.fixtures import (
    assert_graph_replays,
    opcheck,
    skip_unless_supported,
    summed,
    sync_debug_mode,
)
from tests.oracles import (
    array_jagged_bmm_jagged_out_oracle,
    jagged2_softmax_oracle,
    jagged_dense_add_oracle,
    jagged_dense_bmm_oracle,
    jagged_dense_mul_oracle,
    jagged_jagged_bmm_jagged_out_oracle,
    jagged_jagged_bmm_oracle,
    jagged_softmax_oracle,
)
from tests.samples import assert_other_samples_never_matter
from tests.tolerance import (
    assert_matches_oracle,
    assert_output,
    outputs_and_gradients,
)
from torchrec_jagged_attn import ops
from torchrec_jagged_attn.base.devices import implementation

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Op:
    """An op, its oracle, and the layout of its tensors.

    Args:
        oracle: the same function in PyTorch, sample by sample.
        layout: axes of each input and of ``"out"``: ``X`` and ``Y`` rows of x and y, ``P`` pairs of
            them, ``B`` samples, ``D`` and ``T`` widths.
    """

    oracle: Callable
    layout: dict[str, str]

    @property
    def has_pairs(self):
        return "P" in "".join(self.layout.values())


OPS = {
    "jagged_dense_bmm": Op(jagged_dense_bmm_oracle, {"x": "XD", "y": "BDT", "out": "XT"}),
    "jagged_jagged_bmm": Op(jagged_jagged_bmm_oracle, {"x": "XD", "y": "XT", "out": "BDT"}),
    "jagged_softmax": Op(jagged_softmax_oracle, {"x": "XT", "out": "XT"}),
    "jagged_jagged_bmm_jagged_out": Op(
        jagged_jagged_bmm_jagged_out_oracle, {"x": "XD", "y": "YD", "out": "P"}
    ),
    "array_jagged_bmm_jagged_out": Op(
        array_jagged_bmm_jagged_out_oracle, {"p": "P", "y": "YD", "out": "XD"}
    ),
    "jagged2_softmax": Op(jagged2_softmax_oracle, {"p": "P", "out": "P"}),
    "jagged_dense_add": Op(jagged_dense_add_oracle, {"x": "XD", "y": "BD", "out": "XD"}),
    "jagged_dense_mul": Op(jagged_dense_mul_oracle, {"x": "XD", "y": "BD", "out": "XD"}),
}
ALL_OPS = pytest.mark.parametrize("name", OPS)
WITH_TARGETS = [name for name, op in OPS.items() if "T" in "".join(op.layout.values())]
PAIR_OPS = pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.has_pairs])


def function_of(name):
    return getattr(ops, name)


def inputs_of(
    name,
    x_lengths,
    y_lengths=None,
    device=CPU,
    dtype=torch.float32,
    width=16,
    num_targets=5,
    index_dtype=torch.int64,
):
    """Random inputs for the given lengths; without ``y_lengths``, y has as many rows as x."""
    generator = torch.Generator().manual_seed(0)
    x_lengths = torch.as_tensor(x_lengths, dtype=torch.int64)
    num_y = x_lengths if y_lengths is None else torch.as_tensor(y_lengths, dtype=torch.int64)
    sizes = {
        "X": int(x_lengths.sum()),
        "Y": int(num_y.sum()),
        "P": int((x_lengths * num_y).sum()),
        "B": x_lengths.numel(),
        "D": width,
        "T": num_targets,
    }
    inputs = {
        key: torch.randn([sizes[letter] for letter in letters], generator=generator)
        .to(device, dtype)
        for key, letters in OPS[name].layout.items()
        if key != "out"
    }  # fmt: skip
    if not OPS[name].has_pairs:
        return {**inputs, "offsets": offsets_of(x_lengths, index_dtype, device)}
    inputs["x_offsets"] = offsets_of(x_lengths, index_dtype, device)
    if y_lengths is not None:
        inputs["y_offsets"] = offsets_of(num_y, torch.int32, device)
    if name == "jagged_jagged_bmm_jagged_out":
        inputs["total"] = sizes["P"]
    if name == "array_jagged_bmm_jagged_out":
        inputs["num_rows"] = sizes["X"]
    return inputs


def assert_right(name, inputs):
    assert_matches_oracle(function_of(name), OPS[name].oracle, inputs)


def results_of(name, inputs):
    """Output and gradients, for a random gradient of the output."""
    shape = OPS[name].oracle(**inputs).shape
    grad_out = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    value = inputs.get("x", inputs.get("p"))
    return outputs_and_gradients(function_of(name), inputs, grad_out.to(value))


@ALL_OPS
@pytest.mark.parametrize(
    ("dtype", "index_dtype", "width", "num_targets"),
    [
        *((torch.float32, torch.int64, *sizes) for sizes in ((1, 1), (64, 16))),
        *((torch.float32, torch.int32, *sizes) for sizes in ((20, 7), (33, 130))),
        (torch.float16, torch.int32, 48, 16),
        (torch.float16, torch.int64, 96, 3),
        *((torch.bfloat16, torch.int32, *sizes) for sizes in ((48, 16), (7, 48))),
        (torch.bfloat16, torch.int64, 128, 1),
        (torch.float64, torch.int64, 5, 3),
    ],
    ids=str,
)
def test_shapes(name, dtype, index_dtype, width, num_targets, device):
    skip_unless_supported(Case("interaction", 6, 65, 1, width, dtype=dtype), device)
    lengths = [3, 0, 65, 1, 17, 0]
    assert_right(
        name, inputs_of(name, lengths, None, device, dtype, width, num_targets, index_dtype)
    )


@PAIR_OPS
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str
)
def test_other_lengths_of_y(name, dtype, device):
    skip_unless_supported(Case("interaction", 5, 65, 1, 24, dtype=dtype), device)
    inputs = inputs_of(name, [3, 0, 65, 2, 17], [40, 9, 16, 0, 1], device, dtype, width=24)
    assert_right(name, inputs)


@pytest.mark.parametrize(
    ("name", "num_targets"),
    [*((name, 70) for name in OPS), *((name, 512) for name in WITH_TARGETS)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_wide(name, dtype, num_targets, device):
    skip_unless_supported(Case("interaction", 2, 19, 1, 512, dtype=dtype), device)
    if num_targets == 512 and implementation(device)[0] == "triton-interpreter":
        pytest.skip("too many programs for the interpreter")
    assert_right(name, inputs_of(name, [2, 19], None, device, dtype, 512, num_targets))


@ALL_OPS
@pytest.mark.usefixtures("tf32")
def test_tf32(name, device):
    assert_right(name, inputs_of(name, [70, 0, 17], None, device, width=48))


@ALL_OPS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_long_samples(name, dtype, device):
    """Sums over rows have several chunks, softmaxes several tiles."""
    if OPS[name].has_pairs:
        assert_right(name, inputs_of(name, [2, 1, 600], [1100, 3, 2], device, dtype))
    else:
        assert_right(name, inputs_of(name, [300, 0, 1, 1700, 511, 40], None, device, dtype))


@pytest.mark.reference  # kernels sum in fp32, many rows at a time
def test_long_sums_on_a_cpu_are_rounded_once():
    inputs = inputs_of("jagged_dense_add", [3000, 0, 700], width=5)
    grad_out = torch.randn(3700, 5, generator=torch.Generator().manual_seed(1))
    results = outputs_and_gradients(function_of("jagged_dense_add"), inputs, grad_out)
    expected = [x.sum(0) for x in grad_out.double().split([3000, 0, 700])]
    assert torch.equal(results["y"], torch.stack(expected).float())


def test_wide_sums_over_long_samples(device):
    """Wider sums have longer chunks."""
    inputs = inputs_of(
        "jagged_jagged_bmm", [3, 1100, 20], None, device, torch.float16, width=70, num_targets=70
    )
    assert_right("jagged_jagged_bmm", inputs)


LENGTHS = st.sampled_from([0, 1, 15, 16, 17, 31, 33, 63, 64, 65])


@ALL_OPS
@settings(max_examples=8)
@given(lengths=st.lists(st.tuples(LENGTHS, LENGTHS), max_size=5))
def test_lengths_around_tile_sizes(name, lengths):
    x_lengths, y_lengths = [x for x, _ in lengths], [y for _, y in lengths]
    assert_right(name, inputs_of(name, x_lengths, y_lengths, dtype=torch.float16))


@ALL_OPS
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0], [1], [64] * 2], ids=str)
def test_edges(name, lengths, device):
    assert_right(name, inputs_of(name, lengths, None, device))
    assert_right(name, inputs_of(name, lengths, [0] * len(lengths), device))


@pytest.mark.parametrize("name", [name for name in OPS if name != "jagged2_softmax"])
@pytest.mark.parametrize(("width", "num_targets"), [(0, 3), (3, 0), (0, 0)])
def test_no_width(name, width, num_targets, device):
    inputs = inputs_of(name, [3, 0, 5], None, device, width=width, num_targets=num_targets)
    function, oracle = function_of(name), OPS[name].oracle
    if name == "jagged_jagged_bmm_jagged_out" and width == 0:
        oracle = lambda x, *_, **__: x.new_zeros(34) + 0 * x.sum()  # noqa: E731
    assert_matches_oracle(function, oracle, inputs)


@pytest.mark.gpu
@ALL_OPS
def test_more_samples_than_a_grid_dimension_holds(name):
    assert_right(name, inputs_of(name, torch.arange(70_000) % 3, None, "cuda", width=8))


@pytest.mark.reference  # tracing does not depend on kernels
@pytest.mark.parametrize(
    ("name", "size", "strict"),
    [
        ("jagged_jagged_bmm_jagged_out", "total", True),
        ("array_jagged_bmm_jagged_out", "num_rows", False),
    ],
)
def test_exported_without_sizes(name, size, strict):
    class Module(torch.nn.Module):
        def forward(self, **inputs):
            return function_of(name)(**inputs)

    inputs = inputs_of(name, [3, 0, 7], [2, 4, 5])
    others = inputs_of(name, [7, 0, 3], [5, 4, 2])  # same sizes
    del inputs[size], others[size]
    exported = torch.export.export(Module(), (), inputs, strict=strict).module()
    assert torch.equal(exported(**others), function_of(name)(**others))


@pytest.mark.parametrize("name", ["jagged_softmax", "jagged2_softmax"])
def test_softmax_of_minus_infinity(name, device):
    inputs = inputs_of(name, [5, 300], [3, 1], device)
    x = inputs["x" if name == "jagged_softmax" else "p"]
    x[:3] = -torch.inf
    if name == "jagged_softmax":
        x[3:5, 0] = -torch.inf
        x[5:300] = -torch.inf  # several tiles before the first finite row
    results = results_of(name, inputs)
    assert all(torch.isfinite(value).all() for value in results.values())
    assert torch.all(results["out"][:3] == 0)
    if name == "jagged_softmax":
        assert torch.all(results["out"][:5, 0] == 0)
    seen = (slice(3, 5), slice(1, None)) if name == "jagged_softmax" else slice(3, None)
    assert_output(results["out"], OPS[name].oracle, inputs, seen)


@ALL_OPS
def test_strided_inputs_and_gradients(name, device):
    inputs = inputs_of(name, [7, 0, 20], [3, 2, 9], device)
    strided = dict(inputs)
    for key in OPS[name].layout.keys() - {"out"}:
        buffer = torch.full([2 * size + 1 for size in inputs[key].shape], torch.nan, device=device)
        view = buffer[tuple(slice(1, None, 2) for _ in inputs[key].shape)]
        strided[key] = view.copy_(inputs[key])
        assert not view.is_contiguous()
    for key in inputs.keys() - OPS[name].layout.keys():
        if isinstance(inputs[key], torch.Tensor):
            strided[key] = inputs[key].repeat_interleave(2)[::2]
    assert_right(name, strided)
    functions = function_of(name), OPS[name].oracle
    assert_matches_oracle(*map(summed, functions), strided)


@pytest.mark.parametrize("name", ["jagged_dense_bmm", "jagged_jagged_bmm"])
@pytest.mark.parametrize("num_targets", [3, 20])
def test_infinities_in_products(name, num_targets, device):
    """They affect the same outputs as in PyTorch."""
    inputs = inputs_of(name, [70, 0, 40], None, device, num_targets=num_targets)
    inputs["x"][3, 5], inputs["x"][80, 2] = torch.inf, torch.nan
    assert_output(function_of(name)(**inputs), OPS[name].oracle, inputs)


def test_transposed_matrices(device):
    inputs = inputs_of("jagged_dense_bmm", [7, 0, 20], None, device)
    inputs["y"] = inputs["y"].mT.contiguous().mT
    assert_right("jagged_dense_bmm", inputs)


@ALL_OPS
@pytest.mark.usefixtures("nan_filled_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_samples_never_matter(name, dtype, device):
    x_lengths, y_lengths = [3, 2, 130, 1, 600], [5, 0, 9, 40, 4]
    inputs = inputs_of(name, x_lengths, y_lengths, device, dtype)
    grad_out = torch.randn_like(OPS[name].oracle(**inputs))
    for size in ("total", "num_rows"):  # of all samples
        inputs.pop(size, None)
    pairs = [x * y for x, y in zip(x_lengths, y_lengths, strict=True)]
    by_letter = {"X": x_lengths, "Y": y_lengths, "B": [1] * 5, "P": pairs}
    lengths = {key: by_letter[letters[0]] for key, letters in OPS[name].layout.items()}
    lengths |= {"offsets": x_lengths, "x_offsets": x_lengths, "y_offsets": y_lengths}
    assert_other_samples_never_matter(function_of(name), inputs, grad_out, lengths)


def test_opcheck(device):
    ops = torch.ops.torchrec_jagged_attn
    x_offsets, y_offsets = (torch.tensor(x, device=device) for x in ([0, 3, 3, 5], [0, 2, 6, 7]))
    pair_offsets = torch.tensor([0, 6, 6, 8], device=device)

    def draw(*shape):
        return torch.randn(shape, device=device, requires_grad=True)

    g, x, y = (draw(*shape).detach() for shape in ((5, 2), (5, 4), (3, 4, 2)))
    offsets = (x_offsets, y_offsets, pair_offsets)
    for op, arguments in (
        (ops.jagged_pair_offsets, (x_offsets, y_offsets)),
        (ops.jagged_dense_bmm, (draw(5, 4), draw(3, 4, 2), x_offsets)),
        (ops.jagged_dense_bmm, (x, y.mT.contiguous().mT, x_offsets)),
        (ops.jagged_jagged_bmm, (draw(5, 4), draw(5, 2), x_offsets)),
        (ops.jagged_dense_bmm_backward, (g, [True, True, False], x, y, x_offsets, None)),
        (ops.jagged_softmax, (draw(5, 4), x_offsets, None)),
        (ops.jagged_softmax, (x.T.contiguous().T, x_offsets, None)),
        (ops.jagged_softmax, (draw(8), pair_offsets, y_offsets)),
        (ops.jagged_softmax_backward, (x, [True, False, False], None, x_offsets, None, x)),
        (ops.jagged_jagged_bmm_jagged_out, (draw(5, 4), draw(7, 4), *offsets, 8)),
        (ops.array_jagged_bmm_jagged_out, (draw(8), draw(7, 4), *offsets, 5, False)),
        (ops.array_jagged_bmm_jagged_out, (draw(8), draw(5, 4), *offsets, 7, True)),
        (ops.jagged_dense_add, (draw(5, 4), draw(3, 4), x_offsets)),
        (ops.jagged_dense_mul, (draw(5, 4), draw(3, 4), x_offsets)),
        (ops.jagged_dense_mul, (x.T.contiguous().T, draw(4, 3).T.detach(), x_offsets)),
        (ops.jagged_dense_add_backward, (x, [False, True, False], None, None, x_offsets, None)),
    ):
        opcheck(op.default, arguments)


@pytest.mark.reference  # tracing does not depend on kernels
def test_compiles_once_for_all_batches(device):
    def run_all(inputs):
        return [function_of(name)(**inputs[name]) for name in OPS]

    counter = CompileCounter()
    compiled = torch.compile(run_all, backend=counter, fullgraph=True, dynamic=True)
    for lengths in ([3, 4, 2], [9, 0, 2, 5], [2, 30, 1, 5, 8]):
        y_lengths = [length + 2 for length in lengths]
        inputs = {name: inputs_of(name, lengths, y_lengths, device) for name in OPS}
        torch.testing.assert_close(compiled(inputs), run_all(inputs), rtol=0, atol=0)
    assert counter.frame_count == 1


@pytest.mark.gpu
@ALL_OPS
def test_cuda_graph_replays_with_other_lengths(name):
    x_lengths, y_lengths = [3, 60, 7, 30], [10, 2, 5, 5]
    inputs = inputs_of(name, x_lengths, y_lengths, "cuda")
    grad_out = torch.randn_like(OPS[name].oracle(**inputs))
    others = inputs_of(name, x_lengths[::-1], y_lengths[::-1], "cuda")  # same sizes

    def change():
        for key in inputs.keys() & {"offsets", "x_offsets", "y_offsets"}:
            inputs[key].copy_(others[key])

    assert_graph_replays(lambda: outputs_and_gradients(function_of(name), inputs, grad_out), change)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "size"),
    [("jagged_jagged_bmm_jagged_out", "total"), ("array_jagged_bmm_jagged_out", "num_rows")],
)
def test_waits_once_if_a_size_is_not_given(name, size, recwarn):
    inputs = inputs_of(name, [3, 60, 7, 30], [10, 2, 5, 5], "cuda")
    function_of(name)(**inputs)  # compiles
    del inputs[size]
    with sync_debug_mode("warn"):
        function_of(name)(**inputs)
    assert len([w for w in recwarn if "called a synchronizing" in str(w.message)]) == 1


@pytest.mark.gpu
def test_more_pairs_than_int32_counts():
    """The last rows of a giant sample and the sample after it have the same bits if alone."""
    x = torch.randn(47_008, 8, device="cuda", dtype=torch.bfloat16)
    offsets = torch.tensor([0, 3, 47_003, 47_008], device="cuda")
    total = 9 + 47_000**2 + 25
    p = ops.jagged_jagged_bmm_jagged_out(x, x, offsets, total=total)
    weights = ops.jagged2_softmax(p, offsets)
    out = ops.array_jagged_bmm_jagged_out(weights, x, offsets)

    tail = torch.tensor([0, 10, 15], device="cuda"), torch.tensor([0, 47_000, 47_005]).cuda()
    num_tail_pairs = 10 * 47_000 + 25
    tail_p = ops.jagged_jagged_bmm_jagged_out(x[-15:], x[3:], *tail, total=num_tail_pairs)
    assert torch.equal(tail_p, p[-num_tail_pairs:])
    tail_weights = ops.jagged2_softmax(tail_p, *tail)
    assert torch.equal(tail_weights, weights[-num_tail_pairs:])
    tail_out = ops.array_jagged_bmm_jagged_out(tail_weights, x[3:], *tail, num_rows=15)
    assert torch.equal(tail_out, out[-15:])


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("jagged_dense_bmm", {"x": None}, TypeError, "x must be a tensor, got a NoneType"),
        ("jagged_softmax", {"offsets": [0, 3, 7]}, TypeError, "offsets must be a tensor, got a l"),
        ("jagged_dense_mul", {"y": 2.0}, TypeError, "y must be a tensor, got a float"),
        ("array_jagged_bmm_jagged_out", {"y": None}, TypeError, "y must be a tensor, got a None"),
        ("jagged_dense_bmm", {"x": torch.zeros(7)}, ValueError, r"x must have shape \[N, D\]"),
        ("jagged_dense_bmm", {"x": torch.zeros(7, 16).long()}, TypeError, "x must be one of"),
        (
            "jagged_dense_bmm",
            {"y": torch.zeros(2, 9, 3)},
            ValueError,
            r"y must have shape \[B, D, T\] = \[2, 16, any\], got \[2, 9, 3\]",
        ),
        ("jagged_dense_bmm", {"y": torch.zeros(2, 16, 3).half()}, TypeError, "y must be torch.fl"),
        ("jagged_dense_bmm", {"offsets": torch.zeros(3)}, TypeError, "offsets must be int32 or"),
        ("jagged_dense_bmm", {"offsets": torch.tensor([0, 3, 6])}, ValueError, "at the 7 rows"),
        (
            "jagged_jagged_bmm",
            {"y": torch.zeros(6, 3)},
            ValueError,
            r"y must have shape \[N, T\] = \[7, any\], got \[6, 3\]",
        ),
        (
            "jagged_jagged_bmm",
            {"y": torch.zeros(7, 3, device="meta")},
            ValueError,
            "y must be on cpu as x is, got meta",
        ),
        ("jagged_softmax", {"offsets": torch.tensor([0, 9, 7])}, ValueError, "never decrease"),
        (
            "jagged_jagged_bmm_jagged_out",
            {"y": torch.zeros(7, 9)},
            ValueError,
            r"y must have shape \[Ny, D\] = \[any, 16\], got \[7, 9\]",
        ),
        (
            "jagged_jagged_bmm_jagged_out",
            {"y_offsets": torch.tensor([0, 7])},
            ValueError,
            r"y_offsets must have shape \[B \+ 1\] = \[3\], got \[2\]",
        ),
        (
            "jagged_jagged_bmm_jagged_out",
            {"total": 24},
            ValueError,
            "total must have the 25 pairs that offsets define, got 24",
        ),
        (
            "array_jagged_bmm_jagged_out",
            {"p": torch.zeros(24)},
            ValueError,
            "p must have the 25 pairs that offsets define, got 24",
        ),
        (
            "array_jagged_bmm_jagged_out",
            {"num_rows": 8},
            ValueError,
            "x_offsets must end at the 8 rows",
        ),
        (
            "array_jagged_bmm_jagged_out",
            {
                "x_offsets": torch.tensor([0, 1, -2]),
                "y_offsets": torch.tensor([0, 3, 7]),
                "num_rows": None,
            },
            ValueError,
            "offsets must not end below 0, got -2",
        ),
        ("jagged2_softmax", {"p": torch.zeros(5, 5)}, ValueError, r"p must have shape \[Σ Lx"),
        (
            "jagged2_softmax",
            {"x_offsets": torch.tensor([0, 8, 7])},
            ValueError,
            "x_offsets must never decrease",
        ),
        ("jagged_dense_add", {"y": torch.zeros(3, 16)}, ValueError, r"\[B, D\] = \[2, 16\], got"),
        ("jagged_dense_mul", {"y": torch.zeros(2, 9)}, ValueError, r"\[B, D\] = \[2, 16\], got"),
    ],
)
def test_errors_name_the_argument(name, change, error, message):
    with pytest.raises(error, match=message):
        function_of(name)(**inputs_of(name, [3, 4]) | change)
