"""What ``JaggedTargetAttention`` computes, projections included: one op with one gradient.

With ``R`` targets in all, ``[R, C]``, history rows of width ``D``, and ``W_K,h`` ``[E / H, D]`` the
rows of ``W_K`` that belong to head ``h``, the projections of keys and values are absorbed on the
targets' side:

    q = target · W_Qᵀ + b_Q                   [R, E]
    u_h = q_h · W_K,h                         [R, D]      what history rows are compared with
    pooled_h = Σ_n p_nh x_n                   [R, D]      target attention, of the raw rows
    values_h = pooled_h · W_V,hᵀ + b_V,h      [R, E / H]  the bias only where there is a history
    out = values · W_Oᵀ + b_O                 [R, E]

A history whose rows are all removed, by prior weights of zero, is none.

Forward is two products before the attention and two after it; backward four, and a kernel for all
gradients of weights and biases (``kernels/projections.py``), written into their place in the
gradients, so that nothing is copied together. ``q`` and ``u`` take 2·E·(C + D) FLOPs a
target; ``target · M_h`` with ``M_h = W_Q,hᵀ · W_K,h`` would take 2·C·H·D, which is no less from two
heads on where C = D = E, and the product ``M`` besides.

Or keys and values are explicit, ``[N, 2·E]`` by one product of the ``N`` history rows, and each
head attends over its own E / H columns of them. Backward makes them again, so that a layer keeps
nothing of that size. With ``T`` targets per sample, each history row then takes

                absorbed          explicit
    forward     4·T·H·D           4·T·E + 4·D·E             FLOPs
    backward    14·T·H·D          14·T·E + 12·D·E           FLOPs
    together    3·D               4·D + 16·E                elements moved

so that from some number of targets on explicit ones pay off. ``"auto"`` adds them up, an element
moved as FLOPS_PER_ELEMENT and a FLOP of attention over raw rows as FLOPS_OF_ABSORBED, for all
samples. But attention over keys does not split histories over a GPU: with fewer targets in all than
fill it, it takes no less time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrec_jagged_attn.devices import implementation, supported_dtypes
from torchrec_jagged_attn.kernels.target.projections import add_bias_of_values, parameter_gradients
from torchrec_jagged_attn.ops.flash_attention import (
    flash_attention_backward,
    flash_attention_forward,
)
from torchrec_jagged_attn.ops.registration import register_op
from torchrec_jagged_attn.ops.target_attention import (
    target_attention_backward,
    target_attention_fake,
    target_attention_forward,
)

__all__ = ["multi_head_target_attention"]

# How many FLOPs take as long as moving an element does. On CUDA an estimate, for an H200: attention
# at 250 TFLOP/s in 16 bits and 32 in exact fp32, memory at 4 TB/s. On CPU by trying: it stands for
# the calls that each sample's keys and values take, where histories have about 100 rows.
FLOPS_PER_ELEMENT = {("cuda", 2): 128, ("cuda", 4): 32, ("cpu", 2): 28, ("cpu", 4): 28}
# How many FLOPs of attention over keys take as long as one over raw rows does, which for many
# targets is left to slower kernels. By trying, see docs/target_attention.md.
FLOPS_OF_ABSORBED = {("cuda", 2): 3.5, ("cuda", 4): 4.5, ("cpu", 2): 1, ("cpu", 4): 1}
# As how many query rows (targets · heads) fewer count that all of a batch attend over keys: on CUDA
# by trying, for 1 and 4 users of 512 to 10,000 rows, on an H200.
ROWS_TO_FILL = {"cuda": 8192, "cpu": 0}


def _forward(
    target: Tensor,
    history: Tensor,
    offsets: Tensor,
    query_offsets: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor | None,
    v_weight: Tensor | None,
    in_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    position_bias: Tensor | None,
    age_bias: Tensor | None,
    timestamps: Tensor | None,
    prior_weights: Tensor | None,
    num_heads: int,
    dtype: torch.dtype,
    keys_and_values: str,
    for_backward: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output, and what its gradient needs.

    Args:
        target: ``[B, C]``, ``[B, T, C]`` or, with ``query_offsets``, ``[ΣT, C]``, of any dtype.
        history: ``[N, D]``, read in its own dtype.
        offsets: ``[B + 1]`` int32 or int64.
        query_offsets: ``[B + 1]`` int32 or int64, of a jagged target.
        q_weight: ``[E, C]``; or, without the next two, ``[3 · E, E]`` for all three.
        k_weight: ``[E, D]``.
        v_weight: ``[E, D]``.
        in_bias: ``[3 · E]`` of queries, keys and values; that of keys changes nothing.
        out_weight: ``[E, E]``.
        out_bias: ``[E]``.
        position_bias: see :func:`jagged_target_attention`.
        age_bias: see there.
        timestamps: see there.
        prior_weights: see there.
        num_heads: ``H``.
        dtype: what projections are computed in, whatever dtypes their inputs have; but explicit
            keys and values in that of ``history``.
        keys_and_values: ``"absorbed"``, ``"explicit"`` or ``"auto"``.
        for_backward: whether a gradient may be taken.

    Returns:
        The output, ``[B, E]``, ``[B, T, E]`` or ``[ΣT, E]`` in ``dtype``; then what its gradient
        needs: ``q`` ``[R, H, E / H]``; ``u`` and ``pooled`` ``[R, H, D]`` in the dtype of
        ``history``, unused or without a row where nothing asks for them (see
        :func:`_empty_absorbed`); what ``pooled`` was rounded by; the statistics of the attention;
        ``values`` ``[R, E]``; and ``[R]`` ones for targets with a history, zeros for others (no
        element without ``in_bias``).
    """
    weights = [weight for weight in (q_weight, k_weight, v_weight) if weight is not None]
    w_q, w_k, w_v = _projections(weights, num_heads, dtype)
    b_q = b_v = None
    if in_bias is not None:
        b_q, _, b_v = in_bias.to(dtype=dtype).chunk(3)
    width = out_weight.shape[0]
    q = F.linear(target.reshape(-1, target.shape[-1]).to(dtype=dtype), w_q, b_q)
    q = q.view(-1, num_heads, width // num_heads)
    filled = q.new_empty(0)
    if b_v is not None and prior_weights is None:
        filled = _filled(target, offsets, query_offsets, dtype)
    biases = (prior_weights, position_bias, age_bias, timestamps)
    scale = 1 / math.sqrt(q.shape[2])
    shape = _query_shape(target, query_offsets, num_heads, history.shape[1])
    layout = (target, history, offsets, query_offsets, num_heads, width)
    explicit = _is_explicit(keys_and_values, *layout)
    if explicit:
        k, v, _ = _keys_and_values(history, weights, in_bias, num_heads)
        values, stats = flash_attention_forward(
            q.to(dtype=history.dtype), k, v, _row_offsets(target, offsets, query_offsets), offsets,
            *biases, None, False, scale, prior_weights is not None,
        )  # fmt: skip
        values = values.to(dtype=dtype).view(-1, width)
        stats = stats.view(2, *shape[:-1])
        u, pooled, rest = _empty_absorbed(for_backward, keys_and_values, *layout)
    else:
        u = _multiply(q, w_k).to(dtype=history.dtype)
        pooled, rest, stats = target_attention_forward(
            u.view(*shape), history, offsets, query_offsets, *biases, scale, for_backward
        )
        pooled = pooled.view_as(u)
        values = _multiply(pooled.to(dtype=dtype), w_v.mT).view(-1, width)
        if not for_backward:
            u, pooled, rest = _empty_absorbed(for_backward, keys_and_values, *layout)
        elif u.element_size() == 2:
            rest = rest.view_as(u)
    if b_v is not None:
        if prior_weights is not None:
            filled = _see_rows(stats, q)
        if not explicit:
            _add_bias_of_values(values, b_v, filled)
    b_out = None if out_bias is None else out_bias.to(dtype=dtype)
    out = F.linear(values, out_weight.to(dtype=dtype), b_out)
    return out.view(*target.shape[:-1], width), q, u, pooled, rest, stats, values, filled


def _fake(
    target: Tensor,
    history: Tensor,
    offsets: Tensor,
    query_offsets: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor | None,
    v_weight: Tensor | None,
    in_bias: Tensor | None,
    out_weight: Tensor,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_heads, dtype, keys_and_values, for_backward = others[-4:]
    width, rows = out_weight.shape[0], math.prod(target.shape[:-1])
    q = target.new_empty(rows, num_heads, width // num_heads, dtype=dtype)
    shape = _query_shape(target, query_offsets, num_heads, history.shape[1])
    query = history.new_empty(shape)
    _, _, stats = target_attention_fake(query, history, offsets, query_offsets, for_backward)
    layout = (target, history, offsets, query_offsets, num_heads, width)
    u, pooled, rest = _empty_absorbed(for_backward, keys_and_values, *layout)
    values = q.new_empty(rows, width)
    filled = q.new_empty(0 if in_bias is None else rows)
    return q.new_empty(*target.shape[:-1], width), q, u, pooled, rest, stats, values, filled


def _backward(
    grad_out: Tensor,
    needs_grad: Sequence[bool],
    target: Tensor,
    history: Tensor,
    offsets: Tensor,
    query_offsets: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor | None,
    v_weight: Tensor | None,
    in_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    position_bias: Tensor | None,
    age_bias: Tensor | None,
    timestamps: Tensor | None,
    prior_weights: Tensor | None,
    num_heads: int,
    dtype: torch.dtype,
    keys_and_values: str,
    for_backward: bool,
    out: Tensor,
    q: Tensor,
    u: Tensor,
    pooled: Tensor,
    rest: Tensor,
    stats: Tensor,
    values: Tensor,
    filled: Tensor,
) -> list[Tensor]:
    """Gradients of those inputs that need one."""
    needs_target, needs_history, _, _, *needs_weights, needs_bias = needs_grad[:8]
    needs_out_weight, needs_out_bias, needs_position, needs_age, _, needs_prior = needs_grad[8:14]
    weights = [weight for weight in (q_weight, k_weight, v_weight) if weight is not None]
    w_q, w_k, w_v = _projections(weights, num_heads, dtype)
    grad_weights = [weight.new_empty(*weight.shape, dtype=dtype) for weight in weights]
    grad_w_q, grad_w_k, grad_w_v = _projections(grad_weights, num_heads, dtype)

    grad_out = grad_out.reshape_as(values)
    grad_values = grad_out @ out_weight.to(dtype=dtype)
    grad_values_by_head = grad_values.view_as(q)
    biases = (prior_weights, position_bias, age_bias, timestamps)
    scale = 1 / math.sqrt(q.shape[2])
    layout = (target, history, offsets, query_offsets, num_heads, values.shape[1])
    if _is_explicit(keys_and_values, *layout):
        k, v, w_kv = _keys_and_values(history, weights, in_bias, num_heads)
        grad_kv = history.new_empty(history.shape[0], w_kv.shape[0])
        grad_k, grad_v = _by_head(grad_kv, num_heads)
        grad_q_by_head, *grads_of_scores, _ = flash_attention_backward(
            grad_values_by_head.to(dtype=history.dtype), q.to(dtype=history.dtype), k, v,
            _row_offsets(target, offsets, query_offsets), offsets, *biases, None, False, scale,
            needs_prior, values.to(dtype=history.dtype).view_as(q), stats.view(2, *q.shape[:2]),
            grad_k, grad_v,
        )  # fmt: skip
        grad_q_by_head = grad_q_by_head.to(dtype=dtype)
        needs_scores = needs_prior, needs_position, needs_age
        grads_of_scores = [
            grad
            for grad, need in zip(grads_of_scores, needs_scores, strict=True)
            if grad is not None and need
        ]
        grad_history = grad_kv @ w_kv if needs_history else None
        absorbed = None
        if any(needs_weights):
            grad_w_kv = (grad_kv.T @ history).view(2, *w_k.shape)
            grad_w_k.copy_(grad_w_kv[0])
            grad_w_v.copy_(grad_w_kv[1])
    else:
        shape = _query_shape(target, query_offsets, *u.shape[1:])
        grad_pooled = _multiply(grad_values_by_head, w_v).to(dtype=history.dtype)
        grad_u, *grads_of_scores = target_attention_backward(
            grad_pooled.view(*shape),
            (
                True, needs_history, False, False, needs_prior, needs_position, needs_age,
                False, False, False,
            ),
            u.view(*shape), history, offsets, query_offsets, *biases, scale, for_backward,
            pooled.view(*shape), rest, stats,
        )  # fmt: skip
        grad_history = grads_of_scores.pop(0) if needs_history else None
        grad_u = grad_u.view_as(u).to(dtype=dtype)
        grad_q_by_head = _multiply(grad_u, w_k.mT)
        absorbed = q, grad_u, pooled.to(dtype=dtype)
    grad_q = grad_q_by_head.view_as(values)

    grad_out_weight = out_weight.new_empty(*out_weight.shape, dtype=dtype)
    grad_bias = None if in_bias is None else grad_q.new_empty(*in_bias.shape)
    grad_out_bias = None if out_bias is None else grad_q.new_empty(*out_bias.shape)
    if any((*needs_weights, needs_bias, needs_out_weight, needs_out_bias)):
        _parameter_gradients(
            grad_q, target.reshape(-1, target.shape[-1]).to(dtype=dtype), grad_out, values,
            grad_values, filled, absorbed, grad_w_q, grad_out_weight, grad_w_k, grad_w_v, grad_bias,
            grad_out_bias,
        )  # fmt: skip
    grads = []
    if needs_target:
        grads.append((grad_q @ w_q).view_as(target).to(dtype=target.dtype))
    if grad_history is not None:
        grads.append(grad_history)
    parameters = (*weights, in_bias, out_weight, out_bias)
    grads_of_parameters = (*grad_weights, grad_bias, grad_out_weight, grad_out_bias)
    needs = (*needs_weights[: len(weights)], needs_bias, needs_out_weight, needs_out_bias)
    grads += [
        grad.to(dtype=parameter.dtype)
        for grad, parameter, need in zip(grads_of_parameters, parameters, needs, strict=True)
        if grad is not None and parameter is not None and need
    ]
    if needs_prior:  # which come last
        grads_of_scores.append(grads_of_scores.pop(0))
    return grads + grads_of_scores


def _is_explicit(
    keys_and_values: str,
    target: Tensor,
    history: Tensor,
    offsets: Tensor,
    query_offsets: Tensor | None,
    num_heads: int,
    embed_dim: int,
) -> bool:
    """Whether to make keys and values; where ``"auto"``, by what the top of this file counts.

    From shapes alone; of targets ``[B, T, C]`` not from ``B``, which what is traced leaves open.
    """
    if keys_and_values != "auto":
        return keys_and_values == "explicit"
    history_dim, device_type = history.shape[1], history.device.type
    if query_offsets is not None:
        num_samples, num_targets = offsets.numel() - 1, target.shape[0]
        num_to_fill = ROWS_TO_FILL[device_type] // num_heads
    else:
        num_samples, num_targets = 1, 1 if target.dim() == 2 else target.shape[1]
        num_to_fill = 0
    kind = device_type, min(history.element_size(), 4)
    elements = history_dim + 16 * embed_dim
    more_per_sample = 16 * history_dim * embed_dim + elements * FLOPS_PER_ELEMENT[kind]
    absorbed = 18 * num_targets * num_heads * history_dim * FLOPS_OF_ABSORBED[kind]
    explicit = 18 * max(num_targets, num_to_fill) * embed_dim + num_samples * more_per_sample
    return absorbed > explicit


def _empty_absorbed(
    for_backward: bool,
    keys_and_values: str,
    target: Tensor,
    history: Tensor,
    offsets: Tensor,
    query_offsets: Tensor | None,
    num_heads: int,
    embed_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """``u``, ``pooled`` and what that was rounded by, of ``R`` rows, with nothing in them.

    Of no row for explicit keys and values or without a gradient, which have no use for them. But of
    ``R`` where the number of jagged targets decides: no shape may depend on what it says.
    """
    depends = query_offsets is not None and keys_and_values == "auto"
    layout = (target, history, offsets, query_offsets, num_heads, embed_dim)
    unused = not for_backward or (not depends and _is_explicit(keys_and_values, *layout))
    rows = 0 if unused else math.prod(target.shape[:-1])
    u, pooled = (history.new_empty(rows, num_heads, history.shape[1]) for _ in range(2))
    return u, pooled, pooled.new_empty(pooled.shape if pooled.element_size() == 2 else [0])


def _projections(
    weights: list[Tensor], num_heads: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """``W_Q`` ``[E, C]``, and ``W_K`` and ``W_V`` ``[H, E / H, D]``, of one weight or three."""
    weights = [weight.to(dtype=dtype) for weight in weights]
    w_q, w_k, w_v = weights if len(weights) == 3 else weights[0].chunk(3)
    embed_dim, history_dim = w_k.shape
    by_head = num_heads, embed_dim // num_heads, history_dim
    return w_q, w_k.view(*by_head), w_v.view(*by_head)


def _keys_and_values(
    history: Tensor, weights: list[Tensor], in_bias: Tensor | None, num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values ``[N, H, E / H]``, side by side in memory, and their weight ``[2·E, D]``.

    All in the dtype of ``history``. Keys have no bias: softmax would drop it, but not its rounding.
    """
    w_kv = torch.cat(weights[1:]) if len(weights) == 3 else weights[0][history.shape[1] :]
    b_kv = None
    if in_bias is not None:
        b_kv = in_bias[-w_kv.shape[0] :].to(history.dtype, copy=True)
        b_kv[: w_kv.shape[0] // 2] = 0
    w_kv = w_kv.to(history.dtype)
    return *_by_head(F.linear(history, w_kv, b_kv), num_heads), w_kv


def _by_head(kv: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Both halves of ``[N, 2·E]`` as ``[N, H, E / H]``."""
    k, v = kv.view(kv.shape[0], 2, num_heads, kv.shape[1] // (2 * num_heads)).unbind(1)
    return k, v


def _row_offsets(target: Tensor, offsets: Tensor, query_offsets: Tensor | None) -> Tensor:
    """``[B + 1]`` offsets of the targets of each sample."""
    if query_offsets is not None:
        return query_offsets
    num_targets = 1 if target.dim() == 2 else target.shape[1]
    return torch.arange(offsets.numel(), device=offsets.device) * num_targets


def _multiply(x: Tensor, matrices: Tensor) -> Tensor:
    """``[R, H, V]``: each head of ``x`` ``[R, H, W]`` times its own of ``[H, W, V]`` matrices."""
    rows, heads, _ = x.shape
    out = x.new_empty(rows, heads, matrices.shape[2])
    torch.bmm(x.transpose(0, 1), matrices, out=out.transpose(0, 1))
    return out


def _has_kernels(x: Tensor) -> bool:
    """Whether kernels take ``x``. A layer may compute in another dtype than its attention: fp64."""
    return implementation(x.device)[0] != "reference" and x.dtype in supported_dtypes(x.device)


def _add_bias_of_values(values: Tensor, bias: Tensor, filled: Tensor) -> None:
    """Add ``bias`` ``[E]`` to rows of ``values`` ``[R, E]`` that are ``filled`` ``[R]``."""
    if _has_kernels(values):
        add_bias_of_values(values, bias, filled)
    else:
        values.addcmul_(filled.unsqueeze(1), bias)


def _parameter_gradients(
    grad_q: Tensor,
    target: Tensor,
    grad_out: Tensor,
    values: Tensor,
    grad_values: Tensor,
    filled: Tensor,
    absorbed: tuple[Tensor, Tensor, Tensor] | None,
    grad_w_q: Tensor,
    grad_w_out: Tensor,
    grad_w_k: Tensor,
    grad_w_v: Tensor,
    grad_b_in: Tensor | None,
    grad_b_out: Tensor | None,
) -> None:
    """Write gradients of weights and biases, see :func:`parameter_gradients`."""
    if _has_kernels(grad_q):
        parameter_gradients(
            grad_q, target, grad_out, values, grad_values, filled if filled.numel() else None,
            absorbed, grad_w_q, grad_w_out, grad_w_k, grad_w_v, grad_b_in, grad_b_out,
        )  # fmt: skip
        return
    torch.mm(grad_q.T, target, out=grad_w_q)
    torch.mm(grad_out.T, values, out=grad_w_out)
    if absorbed is not None:
        q, grad_u, pooled = absorbed
        torch.bmm(q.permute(1, 2, 0), grad_u.transpose(0, 1), out=grad_w_k)
        torch.bmm(grad_values.view_as(q).permute(1, 2, 0), pooled.transpose(0, 1), out=grad_w_v)
    # Sums, not products with ones: those add one row after the other on a CPU, and round as often.
    if grad_b_in is not None:
        grad_b_q, grad_b_k, grad_b_v = grad_b_in.chunk(3)
        torch.sum(grad_q, 0, out=grad_b_q)
        grad_b_k.zero_()
        torch.sum(grad_values * filled.unsqueeze(1), 0, out=grad_b_v)
    if grad_b_out is not None:
        torch.sum(grad_out, 0, out=grad_b_out)


def _query_shape(
    target: Tensor, query_offsets: Tensor | None, num_heads: int, width: int
) -> tuple[int, ...]:
    """``[B, T, H, D]``, or ``[ΣT, H, D]`` of jagged targets."""
    if query_offsets is None and target.dim() == 2:
        return target.shape[0], 1, num_heads, width
    return *target.shape[:-1], num_heads, width


def _filled(
    target: Tensor, offsets: Tensor, query_offsets: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``[R]``: one for a target whose sample has a history, zero for another."""
    num_targets = target.shape[1] if target.dim() == 3 else 1
    filled = offsets.new_empty(offsets.numel() - 1, num_targets, dtype=dtype)
    begins, ends = (x.unsqueeze(1).expand_as(filled) for x in (offsets[:-1], offsets[1:]))
    torch.gt(ends, begins, out=filled)
    if query_offsets is not None:
        rows = torch.arange(target.shape[0], dtype=query_offsets.dtype, device=query_offsets.device)
        samples = torch.searchsorted(query_offsets[1:], rows, right=True)
        return filled.view(-1).index_select(0, samples)
    return filled.view(-1)


def _see_rows(stats: Tensor, q: Tensor) -> Tensor:
    """``[R]``: as :func:`_filled`, but one for a target that sees a row, by the attention's
    statistics. In the dtype of ``q`` ``[R, H, E / H]``.
    """
    _, inverse = stats.view(2, *q.shape[:2])
    return (inverse > 0).any(1).to(q.dtype)


multi_head_target_attention = register_op(
    "multi_head_target_attention",
    forward=_forward,
    fake=_fake,
    backward=_backward,
    non_differentiable=("timestamps",),
)
