"""The tolerance rule: an attention of PyTorch is within it, and a small fault is over it."""

import pytest
import torch
import torch.nn.functional as F

from tests.rounding import RoundingErrors
from tests.tolerance import assert_close, assert_matches_oracle
from torchrec_jagged_attn import jagged_flash_attention

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("cut", [True, False], ids=["cut", "rounded"])
def test_products_of_tf32(cut):
    a, b = draw(40, 300), draw(300, 30, seed=1)
    with RoundingErrors(torch.float32) as errors:
        expected = a.double() @ b.double()

    def upper(x):
        return ((x.view(torch.int32) + (0 if cut else 4096)) & -8192).view(torch.float32)

    assert_close(upper(a) @ upper(b), expected, errors)
    with pytest.raises(AssertionError, match="over the bound"):
        assert_close(a.bfloat16().float() @ b.bfloat16().float(), expected, errors)


def attention(q, k, v, bias, scale=0.25):
    return torch.softmax(q @ k.mT * scale + bias, -1) @ v


def attention_inputs(dtype, *, heads=3, queries=5, keys=70, width=16):
    shapes = {"q": queries, "k": keys, "v": keys}
    inputs = {n: draw(heads, m, width, dtype=dtype, seed=m) for n, m in shapes.items()}
    return inputs | {"bias": draw(queries, keys, dtype=dtype)}


@DTYPES
def test_attention_and_its_gradients(dtype):
    assert_matches_oracle(attention, attention, attention_inputs(dtype))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda q, k, v, bias: attention(q, k, v, bias, scale=0.25 * (1 + 2e-5)),
        lambda q, k, v, bias: attention(q, k, v, bias) * (1 + 3e-6),
        lambda q, k, v, bias: attention(q, k.bfloat16().float(), v, bias),
        lambda q, k, v, bias: attention(q, k[:, 1:], v[:, 1:], bias[:, 1:]),
        lambda q, k, v, bias: attention(q, k, v, bias.detach()),
        lambda q, k, v, bias: attention(q, k, v, bias.half().float()),
    ],
    ids=["scale", "output", "bf16 keys", "a key less", "no gradient", "fp16 bias"],
)
def test_faults_are_over_the_bound(wrong):
    with pytest.raises(AssertionError, match="over the bound"):
        assert_matches_oracle(wrong, attention, attention_inputs(torch.float32))


def test_masked_gradients_are_zero():
    inputs = attention_inputs(torch.float32)
    inputs["bias"][:, 60:] = -torch.inf
    assert_matches_oracle(attention, attention, inputs)

    def leaks(q, k, v, bias):
        out = attention(q, k, v, bias)
        return out + 1e-30 * v.sum()

    with pytest.raises(AssertionError, match=r"^v: error"):
        assert_matches_oracle(leaks, attention, inputs)


def test_nan_infinities_and_shapes():
    x = torch.tensor([1.0, torch.nan, torch.inf])
    with RoundingErrors(torch.float32) as errors:
        expected = x.double() * 2
    assert_close(x * 2, expected, errors)
    for wrong in ([torch.nan, torch.nan, torch.inf], [2, 2, torch.inf], [2, torch.nan, -torch.inf]):
        with pytest.raises(AssertionError, match="1 of 3 elements"):
            assert_close(torch.tensor(wrong), expected, errors)
    with pytest.raises(AssertionError, match="shape"):
        assert_close(x[:2], expected, errors)


def test_unbounded_errors():
    with RoundingErrors(torch.float32) as errors:
        x = draw(3).double()
        expected = (x.exp() - x.exp()).sqrt()  # of a slope without end
    with pytest.raises(AssertionError, match="out: no bound"):
        assert_close(torch.zeros(3), expected, errors)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.cat([x[3:], x[:3]]).exp(),
        lambda x: x.T.reshape(-1).index_select(0, torch.tensor([3, 3, 1])).square(),
        lambda x: F.layer_norm(x, (8,), torch.ones_like(x[0]), x[1]),
        lambda x: F.gelu(x) + F.silu(x) * torch.sigmoid(x),
        lambda x: torch.where(x > 0, x, 0).mean(1) / (1 + x.square().sum(1)),
        lambda x: x.clone().index_add_(0, torch.tensor([2, 0, 2]), x[:3]).exp(),
        lambda x: F.embedding(torch.tensor([1, 1, 4]), x).exp().sum(0).log(),
        lambda x: torch.addmm(x[:, :3], x, x[:3].T, beta=0.5, alpha=2).clamp(min=0.1),
    ],
    ids=["cat", "index", "norm", "activations", "where", "in place", "embedding", "addmm"],
)
@DTYPES
def test_operators_have_rules_in_both_directions(function, dtype):
    assert_matches_oracle(function, function, {"x": draw(6, 8, dtype=dtype)})


def test_views_share_the_errors_of_their_memory():
    with RoundingErrors(torch.float32) as errors:
        x = torch.zeros(4, 4, dtype=torch.float64)
        x[1:3].copy_(draw(2, 4).double().exp())
        x.T[0].zero_()
    bound = errors.bound(x, torch.float32)
    assert (bound[1:3, 1:] > 1e-8).all()
    assert (bound[[0, 3]] < 1e-30).all()
    assert (bound[:, 0] < 1e-30).all()


def test_operators_without_rules():
    x = draw(3).double()
    with RoundingErrors(torch.float32), pytest.raises(NotImplementedError, match=r"aten\.erfinv"):
        torch.erfinv(x)
    with RoundingErrors(torch.float32), pytest.raises(NotImplementedError, match="return fp64"):
        x.exp().float()
    with (
        RoundingErrors(torch.float32),
        pytest.raises(
            NotImplementedError, match=r"return fp64, got torch\.float32, torch\.float64"
        ),
    ):  # an op of ours, whose statistics are fp32
        jagged_flash_attention(*[x.view(1, 1, -1)] * 3, torch.tensor([0, 1]))
