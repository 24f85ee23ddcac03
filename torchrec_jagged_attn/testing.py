"""What tests and benchmarks share: named shapes, input makers, oracles, the tolerance rule."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "CASES",
    "Case",
    "TF32Products",
    "assert_close",
    "assert_matches_oracle",
    "error_bound",
    "flash_attention_oracle",
    "flash_attention_plain",
    "jagged_lengths",
    "make_flash_inputs",
    "make_target_inputs",
    "offsets_of",
    "outputs_and_gradients",
    "plain_products",
    "recency_bias_oracle",
    "target_attention_oracle",
    "target_attention_plain",
]

Distribution = Literal["uniform", "log-normal", "skewed", "giant", "edges"] | float


@dataclass(frozen=True)
class Case:
    """A named shape.

    Args:
        name: what tests and benchmarks call it.
        batch_size: ``B``.
        max_length: longest history that ``lengths`` may draw, in rows.
        num_heads: ``H``.
        width: ``D`` of target attention's rows; the head width of flash attention.
        num_targets: ``T`` of target attention.
        lengths: how history lengths are drawn, see :func:`jagged_lengths`.
        dtype: of all floating-point inputs.
        index_dtype: of offsets.
        large: too large for anything but a GPU.
    """

    name: str
    batch_size: int
    max_length: int
    num_heads: int
    width: int
    num_targets: int = 1
    lengths: Distribution = "edges"
    dtype: torch.dtype = torch.float32
    index_dtype: torch.dtype = torch.int64
    large: bool = False


CASES = {
    case.name: case
    for case in (
        Case("one-head", 9, 70, 1, 8),
        Case("wide-20", 12, 70, 3, 20, index_dtype=torch.int32),
        Case("targets-48", 9, 70, 2, 48, num_targets=5),
        Case("bf16-96", 9, 150, 4, 96, dtype=torch.bfloat16, index_dtype=torch.int32),
        Case("fp16-64", 9, 150, 2, 64, num_targets=3, dtype=torch.float16),
        Case("bf16-targets-128", 9, 70, 4, 128, num_targets=16, dtype=torch.bfloat16),
        Case("wide-256", 9, 70, 2, 256),
        Case("bf16-512", 7, 40, 2, 512, num_targets=32, dtype=torch.bfloat16),
        Case("many-heads-32", 7, 40, 16, 32, num_targets=7, dtype=torch.bfloat16),
        # Ranking models: H heads over rows of width D, where the embedding's own width is D.
        Case("rank-1k", 4096, 1024, 4, 128, 1, "log-normal", torch.bfloat16, large=True),
        Case("rank-2k", 2048, 2048, 4, 256, 1, "log-normal", torch.bfloat16, large=True),
        Case("rank-2k-8-targets", 2048, 2048, 4, 128, 8, "log-normal", torch.bfloat16, large=True),
        Case("rank-8k-16-targets", 512, 8192, 2, 128, 16, "log-normal", torch.bfloat16, large=True),
        Case("rank-200", 8192, 200, 2, 64, 1, "uniform", torch.bfloat16, large=True),
        Case("rank-1k-fp32", 4096, 1024, 4, 128, 1, "log-normal", large=True),
        Case("rank-2k-fp32", 2048, 2048, 4, 256, 1, "log-normal", large=True),
        Case("rank-2k-8-targets-fp32", 2048, 2048, 4, 128, 8, "log-normal", large=True),
        Case("rank-8k-16-targets-fp32", 512, 8192, 2, 128, 16, "log-normal", large=True),
        Case("rank-200-fp32", 8192, 200, 2, 64, 1, "uniform", large=True),
    )
}


def jagged_lengths(
    batch_size: int, max_length: int, distribution: Distribution, generator: torch.Generator
) -> Tensor:
    """Draw ``[B]`` int64 lengths on CPU.

    ``"uniform"``: 1…max_length. ``"log-normal"``: σ = 1 with a mean of about ``max_length / 8``,
    clipped to 1…max_length. ``"skewed"``: the quantiles of such a one whose clipped mean is 0.15 of
    ``max_length``, in a random order. ``"giant"``: one of ``max_length`` among ones of 20.
    ``"edges"``: empties at both ends and in a row, ones, one giant among small ones, and one row
    around the multiples of 16, in a random order between the ends. A number in (0, 1] is the mean
    as a part of ``max_length``, which one sample has: all are alike at 1.0, evenly spread at 0.5,
    and below that the more skewed the smaller it is.
    """
    if isinstance(distribution, float):
        parts = torch.arange(1, batch_size + 1, dtype=torch.float64) / batch_size
        drawn = (max_length * parts ** (1 / distribution - 1)).ceil().long()  # mean of u^a: 1/(a+1)
        return drawn[torch.randperm(batch_size, generator=generator)]
    if distribution == "uniform":
        return torch.randint(1, max_length + 1, (batch_size,), generator=generator)
    if distribution == "log-normal":
        normal = torch.randn(batch_size, generator=generator, dtype=torch.float64)
        drawn = torch.exp(normal + math.log(max_length / 8) - 0.5)
        return drawn.long().clamp(1, max_length)
    if distribution == "skewed":
        parts = (torch.arange(batch_size, dtype=torch.float64) + 0.5) / batch_size
        drawn = torch.exp(torch.special.ndtri(parts) + math.log(max_length / 6.5) - 0.5)
        drawn = drawn.round().long().clamp(1, max_length)
        return drawn[torch.randperm(batch_size, generator=generator)]
    if distribution == "giant":
        lengths = torch.full((batch_size,), min(20, max_length))
        lengths[batch_size // 2 : batch_size // 2 + 1] = max_length
        return lengths
    hard = torch.tensor([max_length, 1, 16, 15, 17, 0, 0, 31, 33, 64, 63, 65]).clamp(max=max_length)
    inner = hard[torch.arange(max(batch_size - 2, 0)) % hard.numel()]
    inner = inner[torch.randperm(inner.numel(), generator=generator)]
    ends = torch.zeros(min(batch_size, 2), dtype=torch.int64)
    return torch.cat([ends[:1], inner, ends[1:]])


def offsets_of(lengths: Tensor, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """``[B + 1]`` offsets of ``lengths``, on ``device``."""
    return F.pad(lengths.cumsum(0), (1, 0)).to(device, dtype)


def make_target_inputs(
    case: Case, device: torch.device | str, *, bias: bool = True, seed: int = 0
) -> dict[str, Tensor]:
    """Random ``query`` ``[B, T, H, D]``, ``history``, ``offsets`` and ``bias`` of ``case``."""
    generator = torch.Generator().manual_seed(seed)
    lengths = jagged_lengths(case.batch_size, case.max_length, case.lengths, generator)
    num_rows = int(lengths.sum())

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, case.dtype)

    inputs = {
        "query": draw(case.batch_size, case.num_targets, case.num_heads, case.width),
        "history": draw(num_rows, case.width),
        "offsets": offsets_of(lengths, case.index_dtype, device),
    }
    if bias:
        inputs["bias"] = draw(num_rows, case.num_heads)
    return inputs


def make_flash_inputs(
    case: Case,
    device: torch.device | str,
    *,
    cross: bool = False,
    kv_heads: int | None = None,
    value_width: int | None = None,
    bias: bool = False,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Random ``q``, ``k``, ``v`` and their offsets of ``case``, and ``bias`` if asked for.

    ``cross`` draws other lengths for the keys (given as ``kv_offsets``) than for the queries.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = jagged_lengths(case.batch_size, case.max_length, case.lengths, generator)
    kv_lengths = lengths.flip(0).roll(1) if cross else lengths
    kv_heads = case.num_heads if kv_heads is None else kv_heads
    value_width = case.width if value_width is None else value_width

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, case.dtype)

    inputs = {
        "q": draw(int(lengths.sum()), case.num_heads, case.width),
        "k": draw(int(kv_lengths.sum()), kv_heads, case.width),
        "v": draw(int(kv_lengths.sum()), kv_heads, value_width),
        "q_offsets": offsets_of(lengths, case.index_dtype, device),
    }
    if cross:
        inputs["kv_offsets"] = offsets_of(kv_lengths, case.index_dtype, device)
    if bias:
        inputs["bias"] = draw(int(kv_lengths.sum()), case.num_heads)
    return inputs


def target_attention_oracle(
    query: Tensor,
    history: Tensor,
    offsets: Tensor,
    query_offsets: Tensor | None = None,
    bias: Tensor | None = None,
    position_bias: Tensor | None = None,
    age_bias: Tensor | None = None,
    timestamps: Tensor | None = None,
    prior_weights: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """``jagged_target_attention`` by PyTorch's SDPA on each sample; give it fp64 tensors.

    Rows of a prior weight of zero are taken out of the lists before.
    """
    bias = recency_bias_oracle(offsets, bias, position_bias, age_bias, timestamps)
    if prior_weights is not None:
        left = prior_weights > 0
        logs = prior_weights[left].log().unsqueeze(1)
        bias = logs if bias is None else bias[left] + logs
        history, offsets = history[left], F.pad(left.cumsum(0), (1, 0))[offsets]
    lengths = offsets.diff().tolist()
    if query_offsets is not None:
        queries = query.split(query_offsets.diff().tolist())  # [T_b, H, D] each
    elif query.dim() == 3:
        queries = query.unsqueeze(1).unbind()
    else:
        queries = query.expand(len(lengths), -1, -1, -1).unbind()
    rows = history.split(lengths)
    biases = [None] * len(lengths) if bias is None else bias.to(query.dtype).split(lengths)
    outs = []
    for q_THD, x_LD, bias_LH in zip(queries, rows, biases, strict=True):
        if x_LD.shape[0] == 0 or q_THD.shape[0] == 0:
            outs.append(q_THD * 0)
            continue
        q_HTD = q_THD.transpose(0, 1)
        x_HLD = x_LD.expand(q_HTD.shape[0], -1, -1)
        mask = None
        if bias_LH is not None:
            mask = bias_LH.T.unsqueeze(1).expand(q_HTD.shape[0], q_HTD.shape[1], -1)
        out = F.scaled_dot_product_attention(q_HTD, x_HLD, x_HLD, mask, scale=scale)
        outs.append(out.transpose(0, 1))
    if query_offsets is not None:
        return torch.cat(outs) if outs else query * 0
    out = torch.stack(outs) if outs else query[:0] * 0
    return out.squeeze(1) if query.dim() == 3 else out


def target_attention_plain(
    query: Tensor,
    history: Tensor,
    offsets: Tensor,
    query_offsets: Tensor | None = None,
    bias: Tensor | None = None,
    position_bias: Tensor | None = None,
    age_bias: Tensor | None = None,
    timestamps: Tensor | None = None,
    prior_weights: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """``jagged_target_attention`` by the textbook formula, padded, in the inputs' dtype."""
    bias = recency_bias_oracle(offsets, bias, position_bias, age_bias, timestamps)
    bias, left = _with_prior_weights(bias, prior_weights, query.dtype)
    index, real = _padding(offsets, history.shape[0])  # [B, L]
    q_BTHD = query
    if query_offsets is not None:
        query_index, query_real = _padding(query_offsets, query.shape[0])
        q_BTHD = _pad(query, query_index)
    elif query.dim() == 3:
        q_BTHD = query.unsqueeze(1)
    if left is not None:
        real = real & _pad(left, index)
    x_BLD = _pad(history, index)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("bthd,bld->bthl", q_BTHD.expand(index.shape[0], -1, -1, -1), x_BLD)
    scores = scores * factor
    if bias is not None:
        scores = scores + _pad(bias, index).transpose(1, 2).unsqueeze(1)
    weights = _masked_softmax(scores, real[:, None, None])
    out = torch.einsum("bthl,bld->bthd", weights, x_BLD)
    if query_offsets is not None:
        return out[query_real]
    return out.squeeze(1) if query.dim() == 3 else out


def recency_bias_oracle(
    offsets: Tensor,
    bias: Tensor | None,
    position_bias: Tensor | None,
    age_bias: Tensor | None,
    timestamps: Tensor | None,
) -> Tensor | None:
    """``[N, H]``: ``bias`` and the scores by position and age, by integer arithmetic."""
    positions, ages = [], []
    times = None if timestamps is None else timestamps.tolist()
    bounds = offsets.tolist()
    for begin, end in itertools.pairwise(bounds):
        positions += range(end - begin - 1, -1, -1)
        ages += [] if times is None else [max(times[end - 1] - t, 0) for t in times[begin:end]]
    for table, distances in ((position_bias, positions), (age_bias, ages)):
        if table is not None:
            rounded = torch.tensor([distance + 1 for distance in distances]).float().tolist()
            buckets = [math.floor(Fraction(x) ** 4).bit_length() - 1 for x in rounded]
            index = torch.tensor(buckets, dtype=torch.int64, device=table.device)
            scores = table[index.clamp(max=len(table) - 1)]
            bias = scores if bias is None else bias + scores
    return bias


def flash_attention_oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor | None = None,
    bias: Tensor | None = None,
    position_bias: Tensor | None = None,
    age_bias: Tensor | None = None,
    timestamps: Tensor | None = None,
    prior_weights: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """``jagged_flash_attention`` by PyTorch's SDPA on each sample; give it fp64 tensors."""
    group = q.shape[1] // k.shape[1]
    kv_offsets = q_offsets if kv_offsets is None else kv_offsets
    bias = recency_bias_oracle(kv_offsets, bias, position_bias, age_bias, timestamps)
    bias, left = _with_prior_weights(bias, prior_weights, q.dtype)
    if bias is not None and left is not None:
        bias = bias.masked_fill(~left.unsqueeze(1), -torch.inf)
    q_lengths, kv_lengths = q_offsets.diff().tolist(), kv_offsets.diff().tolist()
    biases = [None] * len(q_lengths) if bias is None else bias.to(q.dtype).split(kv_lengths)
    outs = [q.new_zeros(0, q.shape[1], v.shape[2])]
    for q_LHD, k_LHD, v_LHD, bias_LH in zip(
        q.split(q_lengths), k.split(kv_lengths), v.split(kv_lengths), biases, strict=True
    ):
        q_HLD = q_LHD.transpose(0, 1)
        k_HLD = k_LHD.repeat_interleave(group, 1).transpose(0, 1)
        v_HLD = v_LHD.repeat_interleave(group, 1).transpose(0, 1)
        num_rows, num_keys = q_HLD.shape[1], k_HLD.shape[1]
        out = q_HLD.new_zeros(q_HLD.shape[0], num_rows, v.shape[2])
        mask = q_HLD.new_zeros(q_HLD.shape[0], num_rows, num_keys)
        if bias_LH is not None:
            mask = mask + bias_LH.T.unsqueeze(1)
        if causal:
            visible = torch.ones(num_rows, num_keys, device=q.device).tril(num_keys - num_rows)
            mask = mask.masked_fill(visible == 0, -torch.inf)
        seeing = (mask > -torch.inf).any(2).all(0)
        if seeing.any():
            out[:, seeing] = F.scaled_dot_product_attention(
                q_HLD[:, seeing], k_HLD, v_HLD, mask[:, seeing], scale=scale
            )
        outs.append(out.transpose(0, 1))
    return torch.cat(outs)


def flash_attention_plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor | None = None,
    bias: Tensor | None = None,
    position_bias: Tensor | None = None,
    age_bias: Tensor | None = None,
    timestamps: Tensor | None = None,
    prior_weights: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """``jagged_flash_attention`` by the textbook formula, padded, in the inputs' dtype."""
    group = q.shape[1] // k.shape[1]
    kv_offsets = q_offsets if kv_offsets is None else kv_offsets
    bias = recency_bias_oracle(kv_offsets, bias, position_bias, age_bias, timestamps)
    bias, left = _with_prior_weights(bias, prior_weights, q.dtype)
    q_index, q_real = _padding(q_offsets, q.shape[0])
    kv_index, kv_real = _padding(kv_offsets, k.shape[0])
    if left is not None:
        kv_real = kv_real & _pad(left, kv_index)
    q_BLHD = _pad(q, q_index)
    k_BLHD, v_BLHD = (_pad(x, kv_index).repeat_interleave(group, 2) for x in (k, v))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    visible = kv_real[:, None, None]  # [B, 1, 1, Lk]
    if causal:
        rows, keys = (torch.arange(x.shape[1], device=q.device) for x in (q_index, kv_index))
        shift = kv_offsets.diff() - q_offsets.diff()
        visible = visible & (keys <= rows[:, None] + shift[:, None, None]).unsqueeze(1)
    scores = torch.einsum("bihd,bjhd->bhij", q_BLHD, k_BLHD) * factor
    if bias is not None:
        scores = scores + _pad(bias, kv_index).transpose(1, 2).unsqueeze(2)
    out = torch.einsum("bhij,bjhd->bihd", _masked_softmax(scores, visible), v_BLHD)
    return out[q_real]


def _with_prior_weights(
    bias: Tensor | None, prior_weights: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """``[N, H]`` or ``[N, 1]``: ``bias`` plus the logarithms of prior weights, but of removed rows;
    and ``[N]``, which rows are left.
    """
    if prior_weights is None:
        return bias, None
    left = prior_weights > 0
    logs = prior_weights.masked_fill(~left, 1).log().unsqueeze(1).to(dtype)
    return logs if bias is None else bias + logs, left


def _padding(offsets: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """``[B, L]`` row numbers of a padded batch, and which of them are real."""
    length = int(offsets.diff().max()) if offsets.numel() > 1 else 0
    index = offsets[:-1, None] + torch.arange(length, device=offsets.device)
    real = index < offsets[1:, None]
    return index.masked_fill(~real, num_rows), real


def _pad(x: Tensor, index: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])[index]


def _masked_softmax(scores: Tensor, visible: Tensor) -> Tensor:
    """Softmax over the visible; zero where nothing is."""
    some = visible.any(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(~visible & some, -torch.inf), -1) * some


def error_bound(expected: Tensor, plain: Tensor, *, gradient: bool = False) -> float:
    """The largest error allowed, by the one tolerance rule.

    Twice (gradients: three times) the error of ``plain``, the textbook formula computed in the
    input dtype, against ``expected`` in fp64, plus two units in the last place of the largest
    value.
    """
    if expected.numel() == 0:
        return 0.0
    largest = expected.abs().max().item()
    ulp = torch.finfo(plain.dtype).eps * 2 ** math.floor(math.log2(largest)) if largest else 0.0
    plain_error = (plain.double() - expected).abs().max().item()
    return (3 if gradient else 2) * plain_error + 2 * ulp


def assert_close(
    actual: Tensor, expected: Tensor, plain: Tensor, *, gradient: bool = False, name: str = "out"
) -> None:
    """Assert that ``actual`` lies within :func:`error_bound` of the fp64 ``expected``.

    Raises:
        AssertionError: naming the tensor, its error and the bound; also for NaN, another shape or
            another dtype than ``plain``.
    """
    assert expected.dtype == torch.float64, f"{name}: the oracle must be fp64"
    assert actual.dtype == plain.dtype, f"{name}: dtype {actual.dtype}, expected {plain.dtype}"
    assert actual.shape == expected.shape, f"{name}: shape {actual.shape} for {expected.shape}"
    if actual.numel() == 0:
        return
    error = (actual.double() - expected).abs().max().item()
    bound = error_bound(expected, plain, gradient=gradient)
    assert error <= bound, f"{name}: error {error:.3e} is over the bound {bound:.3e}"


class TF32Products(TorchDispatchMode):
    """A context in which products of fp32 matrices are what tensor cores make of them.

    These read the upper 19 bits of their operands, and add up in fp32. On any device, and for
    products of any size: cuBLAS gives thin ones to units that are exact.
    """

    PRODUCTS = (
        torch.ops.aten.mm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.mv.default,
        torch.ops.aten.dot.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.baddbmm.default,
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run ``func``, a product with its operands cut short."""
        if func in self.PRODUCTS:
            *summand, a, b = args
            args = (*summand, self._cut(a), self._cut(b))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _cut(operand: Tensor) -> Tensor:
        if operand.dtype != torch.float32:
            return operand
        return (operand.contiguous().view(torch.int32) & -(2**13)).view(torch.float32)


def plain_products() -> contextlib.AbstractContextManager:
    """The context for a plain formula: its products as ``torch.get_float32_matmul_precision()``."""
    exact = torch.get_float32_matmul_precision() == "highest"
    return contextlib.nullcontext() if exact else TF32Products()


def outputs_and_gradients(
    function: Callable[..., Tensor], inputs: dict[str, Any], grad_out: Tensor
) -> dict[str, Tensor]:
    """``function(**inputs)`` as ``"out"``, and the gradient of each floating-point input."""
    leaves = {
        name: value.detach().requires_grad_()
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in inputs.items()
    }
    out = function(**leaves)
    if out.requires_grad:
        out.backward(grad_out)
    gradients = {
        name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for name, leaf in leaves.items()
        if isinstance(leaf, Tensor) and leaf.requires_grad
    }
    return {"out": out.detach(), **gradients}


def assert_matches_oracle(
    function: Callable[..., Tensor],
    oracle: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    inputs: dict[str, Any],
    *,
    seed: int = 0,
) -> None:
    """Assert that ``function``'s output and all its gradients follow the tolerance rule.

    ``oracle`` is run on the inputs in fp64, ``plain`` on the inputs as they are; the gradient of
    the output is random.
    """
    exact = {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    with torch.no_grad():
        shape = oracle(**exact)
    dtype, device = next(
        (value.dtype, value.device)
        for value in inputs.values()
        if isinstance(value, Tensor) and value.is_floating_point()
    )
    generator = torch.Generator().manual_seed(seed)
    grad_out = torch.randn(shape.shape, generator=generator).to(device, dtype)
    actual = outputs_and_gradients(function, inputs, grad_out)
    expected = outputs_and_gradients(oracle, exact, grad_out.double())
    with plain_products():
        formula = outputs_and_gradients(plain, inputs, grad_out)
    assert actual.keys() == expected.keys(), f"gradients of {list(actual)}, not {list(expected)}"
    for name in expected:
        assert_close(actual[name], expected[name], formula[name], gradient=name != "out", name=name)
