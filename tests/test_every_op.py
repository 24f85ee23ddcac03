"""All public ops: strides, autocast, tensors without values, FLOPs."""

import contextlib
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from tests.runs import assert_same_run
from torchrec_jagged_attn import ops
from torchrec_jagged_attn.ops import array_jagged_bmm_jagged_out

LENGTHS = [3, 0, 5, 4]
OTHER_LENGTHS = [4, 2, 0, 6]


@dataclass(frozen=True)
class Op:
    """A call of an op.

    Args:
        shapes: of the floating-point operands. Of sizes that are letters: ``N`` and ``M`` rows of
            samples of LENGTHS and OTHER_LENGTHS, ``P`` pairs of these, ``B`` samples.
        offsets: names of the offsets of ``N`` rows, and of ``M``.
        options: what else is given.
    """

    shapes: dict[str, tuple[str | int, ...]]
    offsets: tuple[str, ...] = ("offsets",)
    options: dict = field(default_factory=dict)
    name: str | None = None

    def function(self, name: str) -> Callable:
        return getattr(ops, self.name or name)


OPS = {
    "jagged_dense_bmm": Op({"x": ("N", 8), "y": ("B", 8, 4)}),
    "jagged_jagged_bmm": Op({"x": ("N", 8), "y": ("N", 4)}),
    "jagged_softmax": Op({"x": ("N", 4)}),
    "jagged_jagged_bmm_jagged_out": Op(
        {"x": ("N", 8), "y": ("M", 8)}, ("x_offsets", "y_offsets"), {"total": 36}
    ),
    "array_jagged_bmm_jagged_out": Op(
        {"p": ("P",), "y": ("M", 8)}, ("x_offsets", "y_offsets"), {"num_rows": 12}
    ),
    "jagged2_softmax": Op({"p": ("P",)}, ("x_offsets", "y_offsets")),
    "jagged_dense_add": Op({"x": ("N", 8), "y": ("B", 8)}),
    "jagged_dense_mul": Op({"x": ("N", 8), "y": ("B", 8)}),
    "jagged_target_attention": Op(
        {"query": ("B", 2, 8), "history": ("N", 8), "position_bias": (5, 2)}
    ),
    "of many targets": Op(
        {"query": ("B", 3, 2, 8), "history": ("N", 8), "position_bias": (5, 2)},
        name="jagged_target_attention",
    ),
    "of shared queries": Op(
        {"query": (1, 3, 2, 8), "history": ("N", 8), "position_bias": (5, 2)},
        name="jagged_target_attention",
    ),
    "jagged_flash_attention": Op(
        {"q": ("N", 4, 8), "k": ("M", 2, 8), "v": ("M", 2, 4), "relative_bias": (5, 4)},
        ("q_offsets", "kv_offsets"),
    ),
    "causal": Op(
        {"q": ("N", 2, 8), "k": ("N", 1, 8), "v": ("N", 1, 8)},
        ("q_offsets",),
        {"causal": True, "window": 3},
        name="jagged_flash_attention",
    ),
}
EVERY_OP = pytest.mark.parametrize("name", OPS)


def function_of(name):
    return OPS[name].function(name)


def inputs_of(name, device, dtype=torch.float32):
    """The floating-point operands, and what else a call takes."""
    generator = torch.Generator().manual_seed(0)
    pairs = sum(n * m for n, m in zip(LENGTHS, OTHER_LENGTHS, strict=True))
    sizes = {"N": 12, "M": 12, "P": pairs, "B": 4}
    operands = {
        key: torch.randn([sizes.get(x, x) for x in shape], generator=generator).to(device, dtype)
        for key, shape in OPS[name].shapes.items()
    }
    row_offsets = (torch.tensor(x).cumsum(0) for x in ([0, *LENGTHS], [0, *OTHER_LENGTHS]))
    offsets = {key: x.to(device) for key, x in zip(OPS[name].offsets, row_offsets, strict=False)}
    return operands, {**offsets, **OPS[name].options}


def run(name, operands, others, grad_out=None):
    """The output, and the gradients for ``grad_out``, by default ones."""
    leaves = {key: x.detach().requires_grad_() for key, x in operands.items()}
    out = function_of(name)(**leaves, **others)
    grad_out = torch.ones_like(out) if grad_out is None else grad_out
    grads = torch.autograd.grad(out, [*leaves.values()], grad_out)
    return [out.detach(), *grads]


def in_each_order(x):
    """``x`` with its axes in each order in memory."""
    for order in itertools.permutations(range(x.dim())):
        yield x.permute(order).contiguous().permute([order.index(i) for i in range(x.dim())])


def assert_same(actual, expected):
    """Up to the order of sums, which are longest in gradients of shared queries."""
    for x, y in zip(actual, expected, strict=True):
        assert_same_run(x, y, num_terms=12 * 8, dtype=x.dtype)


@EVERY_OP
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_axes_in_any_order(name, dtype, device):
    """Results equal results of contiguous copies."""
    operands, others = inputs_of(name, device, dtype)
    out = function_of(name)(**operands, **others)
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    expected = run(name, operands, others, grad_out)
    orders = [[*in_each_order(x)] for x in (*operands.values(), grad_out)]
    for i in range(max(map(len, orders))):
        *ordered, grad = (copies[(i + j) % len(copies)] for j, copies in enumerate(orders))
        operands = dict(zip(operands, ordered, strict=True))
        assert_same(run(name, operands, others, grad), expected)


def autocast_dtypes(name, dtypes):
    """Return the dtypes to which PyTorch's autocast casts operands of such an op."""
    if "softmax" in name:
        return [torch.float32]
    if name in ("jagged_dense_add", "jagged_dense_mul"):
        return [functools.reduce(torch.promote_types, dtypes)] * 2
    return [torch.float64 if dtype == torch.float64 else torch.float16 for dtype in dtypes]


BIASES = ("position_bias", "relative_bias")  # which may have any dtype


@EVERY_OP
@pytest.mark.parametrize(
    "dtypes", [(torch.float32,), (torch.float32, torch.float16), (torch.float16, torch.float32)]
)
def test_autocast(name, dtypes, device):
    """Casts operands as PyTorch does in the same function, and casts gradients back."""
    operands, others = inputs_of(name, device)
    keys = [key for key in operands if key not in BIASES]
    dtypes = [dtypes[i % len(dtypes)] for i in range(len(keys))]
    operands |= {key: operands[key].to(dtype) for key, dtype in zip(keys, dtypes, strict=True)}
    if len({*dtypes}) > 1:
        with pytest.raises(TypeError, match=r"must be torch\.float"):
            run(name, operands, others)
    with torch.autocast(device.type, torch.float16):
        out, *grads = run(name, operands, others)
    cast_to = zip(keys, autocast_dtypes(name, dtypes), strict=True)
    cast = operands | {key: operands[key].to(dtype) for key, dtype in cast_to}
    expected, *expected_grads = run(name, cast, others)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    for grad, expected_grad, x in zip(grads, expected_grads, operands.values(), strict=True):
        torch.testing.assert_close(grad, expected_grad.to(x.dtype), rtol=0, atol=0)


@pytest.mark.reference  # kernels compute no fp64
@EVERY_OP
def test_autocast_leaves_fp64(name):
    operands, others = inputs_of(name, torch.device("cpu"), torch.float64)
    expected = run(name, operands, others)
    with torch.autocast("cpu", torch.bfloat16):
        actual = run(name, operands, others)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.reference  # traced alike with any kernels
@pytest.mark.parametrize("name", ["jagged_dense_bmm", "jagged_softmax", "jagged_dense_mul"])
def test_compiled_under_autocast(name):
    operands, others = inputs_of(name, torch.device("cpu"), torch.bfloat16)
    operands["x"] = operands["x"].float()
    compiled = torch.compile(function_of(name), backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = compiled(**operands, **others)
        torch.testing.assert_close(out, function_of(name)(**operands, **others), rtol=0, atol=0)


@pytest.mark.parametrize(
    "name",
    ["jagged_target_attention", "of many targets", "of shared queries", "jagged_flash_attention"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_prior_weights_below_zero(name, dtype, device):
    """They count as zero, and have a gradient of zero."""
    operands, others = inputs_of(name, device, dtype)
    lengths = OTHER_LENGTHS if name == "jagged_flash_attention" else LENGTHS
    weights = torch.linspace(0.5, 1.5, 12, device=device)
    weights[[1, 10]], weights[: lengths[0]] = -0.5, -2.0
    expected = run(name, operands | {"prior_weights": weights.clamp(min=0)}, others)
    actual = run(name, operands | {"prior_weights": weights}, others)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert torch.all(actual[-1][weights < 0] == 0)
    assert torch.all(actual[-1][weights > 0].isfinite())


def shapes_of(tensors):
    return [(x.shape, x.dtype, x.stride()) for x in tensors]


@pytest.mark.reference  # alike with any kernels
@EVERY_OP
@pytest.mark.parametrize("on", ["meta", "fake", "in fake mode"])
def test_tensors_without_values(name, on):
    """Shapes equal the shapes of tensors with values, forward and backward."""
    operands, others = inputs_of(name, torch.device("cpu"))
    expected = shapes_of(run(name, operands, others))
    mode = FakeTensorMode(allow_non_fake_inputs=on == "in fake mode")
    if on == "meta":
        operands, others = inputs_of(name, torch.device("meta"))
    elif on == "fake":
        operands, others = tree_map_only(torch.Tensor, mode.from_tensor, (operands, others))
    with mode if on == "in fake mode" else contextlib.nullcontext():
        assert shapes_of(run(name, operands, others)) == expected


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x, o: ops.jagged_jagged_bmm_jagged_out(x, x, o), "total"),
        (lambda x, o: array_jagged_bmm_jagged_out(x[:, 0], x, o, o.clone()), "num_rows"),
        (lambda x, o: ops.JaggedLayout.from_lengths(o), "num_rows"),
    ],
)
def test_sizes_without_values(call, name):
    rows = torch.zeros(7, 16, device="meta"), torch.zeros(3, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match=f"{name} must be given for tensors without values"):
        call(*rows)
    with FakeTensorMode(), pytest.raises(ValueError, match=f"{name} must be given for tensors"):
        call(torch.zeros(7, 16), torch.zeros(3, dtype=torch.int64))


# Of forward and of backward; of attention for a pair and head, 2 · (8 + 4) and 2 · (3 · 8 + 2 · 4)
# of keys of 8 columns and values of 4.
FLOPS = {
    "jagged_dense_bmm": (2 * 12 * 8 * 4, 4 * 12 * 8 * 4),
    "jagged_jagged_bmm": (2 * 12 * 8 * 4, 4 * 12 * 8 * 4),
    "jagged_jagged_bmm_jagged_out": (2 * 36 * 8, 4 * 36 * 8),
    "array_jagged_bmm_jagged_out": (2 * 36 * 8, 4 * 36 * 8),
    "jagged_target_attention": (12 * 2 * 32, 12 * 2 * 80),
    "of many targets": (12 * 3 * 2 * 32, 12 * 3 * 2 * 80),
    "of shared queries": (12 * 3 * 2 * 32, 12 * 3 * 2 * 80),
    "jagged_flash_attention": (36 * 4 * 24, 36 * 4 * 64),
    "causal": ((6 + 12 + 9) * 2 * 32, (6 + 12 + 9) * 2 * 80),
}


@EVERY_OP
def test_flops(name, device):
    operands, others = inputs_of(name, device)
    leaves = [x.requires_grad_() for x in operands.values()]
    with FlopCounterMode(display=False) as forward_counter:
        out = function_of(name)(**operands, **others)
    with FlopCounterMode(display=False) as backward_counter:
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    counted = forward_counter.get_total_flops(), backward_counter.get_total_flops()
    assert counted == FLOPS.get(name, (0, 0))


@pytest.mark.parametrize("name", ["jagged_dense_bmm", "jagged_jagged_bmm_jagged_out"])
def test_flops_of_one_gradient(name, device):
    operands, others = inputs_of(name, device)
    out = function_of(name)(**operands | {"x": operands["x"].requires_grad_()}, **others)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == FLOPS[name][0]


@pytest.mark.reference  # alike with any kernels
@pytest.mark.parametrize("name", FLOPS)
@pytest.mark.parametrize("fake", [False, True])
def test_flops_without_values(name, fake):
    """Counted as if all samples had 3 rows."""
    operands, others = inputs_of(name, torch.device("cpu" if fake else "meta"))
    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext()
    with mode, FlopCounterMode(display=False) as counter:
        function_of(name)(**operands, **others)
    expected = 4 * 6 * 2 * 32 if name == "causal" else FLOPS[name][0]
    assert counter.get_total_flops() == expected
