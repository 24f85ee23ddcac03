"""What ``JaggedTargetAttention`` computes, projections included: one op with one gradient.

With ``R`` targets in all, ``[R, C]``, history rows of width ``D``, and ``W_K,h`` ``[E / H, D]`` the
rows of ``W_K`` that belong to head ``h``, the projections of keys and values are absorbed on the
targets' side:

    q = target · W_Qᵀ + b_Q                   [R, E]
    u_h = q_h · W_K,h                         [R, D]      what history rows are compared with
    pooled_h = Σ_n p_nh x_n                   [R, D]      target attention, of the raw rows
    values_h = pooled_h · W_V,hᵀ + b_V,h      [R, E / H]  the bias only where there is a history
    out = values · W_Oᵀ + b_O                 [R, E]

A history whose rows are all removed, by prior weights of zero, counts as empty.

Without an output weight, values are the rows themselves, each head's its own columns of them:
``W_V`` and ``W_O`` fixed at the identity. Then ``D = E``, and ``out`` are the columns of each head
of what it pooled.

With dropout, the weights ``p_nh`` no longer sum to one. The bias of values is still added once: it
is then not part of materialized values, but added to their weighted sum.

History rows may be read by indices where they lie. Projections are then absorbed: materialized ones
are made of a copy of the rows, which is for the caller to make.

Forward is two products before the attention and two after it, and so is backward: each two are one
kernel (``kernels/head_products.py``). One more has all gradients of weights and biases
(``kernels/projections.py``). ``q`` and ``u`` take 2·E·(C + D) FLOPs a target; ``target · M_h`` with
``M_h = W_Q,hᵀ · W_K,h`` would take 2·C·H·D, which is no less from two heads on where C = D = E, and
the product ``M`` besides.

Rows that are packed in codes, and a one, are attended so as well: the maps from codes to rows are
in ``W_K`` and ``W_V`` then.

Or keys and values are materialized, ``[N, 2·E]`` by one product of the ``N`` history rows, and each
head attends over its own E / H columns of them. Backward makes them again, so that a layer keeps
nothing of that size. With ``T`` targets per sample, each history row then takes

                absorbed          materialized
    forward     4·T·H·D           4·T·E + 4·D·E             FLOPs
    backward    14·T·H·D          14·T·E + 12·D·E           FLOPs
    together    3·D               4·D + 16·E                elements moved

so that materialized keys pay off from some number of targets on. ``"auto"`` compares the two sums
over all samples. Where values are the rows themselves, only keys are made, with 8·D·E FLOPs in
place of 16·D·E, and 13·E elements in place of 16·E. An element moved counts as FLOPS_PER_ELEMENT,
and a FLOP of attention over raw rows as FLOPS_OF_ABSORBED. Attention over keys does not spread one
history over a GPU: with fewer targets in all than fill the GPU, it takes as long as with that many.
"""

from __future__ import annotations

import itertools
import math
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrec_jagged_attn.checks import MAX_WIDTH
from torchrec_jagged_attn.devices import has_kernels
from torchrec_jagged_attn.flash_attention import api as flash_attention
from torchrec_jagged_attn.flash_attention.arguments import FlashArguments, FlashOutputs
from torchrec_jagged_attn.runtime import dispatch
from torchrec_jagged_attn.runtime.dispatch import Condition, KernelVariant
from torchrec_jagged_attn.runtime.registration import register_op
from torchrec_jagged_attn.target_attention import api as target_attention
from torchrec_jagged_attn.target_attention import cpu_projections as cpu_products
from torchrec_jagged_attn.target_attention.arguments import (
    MultiHeadArguments,
    MultiHeadGradients,
    MultiHeadOutputs,
    ProjectionGradients,
    ProjectionRows,
    TargetArguments,
    TargetOutputs,
    new_outputs,
)
from torchrec_jagged_attn.target_attention.kernels import head_products as kernel_products
from torchrec_jagged_attn.target_attention.kernels.attention import listing_of
from torchrec_jagged_attn.target_attention.kernels.projections import parameter_gradients

# How many FLOPs take as long as moving an element does. On CUDA an estimate, for an H200: attention
# at 250 TFLOP/s in 16 bits and 32 in exact fp32, memory at 4 TB/s. On CPU measured: it covers the
# overhead of calls per sample for keys and values, where histories have about 100 rows.
FLOPS_PER_ELEMENT = {("cuda", 2): 128, ("cuda", 4): 32, ("cpu", 2): 28, ("cpu", 4): 28}
# How many FLOPs of attention over keys take as long as one over raw rows does, which for many
# targets uses slower kernels. Measured, see docs/kernels.md.
FLOPS_OF_ABSORBED = {("cuda", 2): 3.5, ("cuda", 4): 4.5, ("cpu", 2): 1, ("cpu", 4): 1}
# Batches with fewer query rows (targets · heads) than this count as having this many, where they
# attend over keys: they do not fill the GPU. On CUDA measured, for 1 and 4 users of 512 to 10,000
# rows, on an H200.
ROWS_TO_FILL = {"cuda": 8192, "cpu": 0}


def _forward(args: MultiHeadArguments) -> MultiHeadOutputs:
    if dispatch.LOG:
        choice = dispatch.choose(VARIANTS, args.history.device, args)
        dispatch.log_choice("JaggedTargetAttention", choice)
        if choice.variant == "absorbed":
            choice = dispatch.choose(PRODUCT_VARIANTS, args.history.device, args)
            dispatch.log_choice("JaggedTargetAttention, products of heads", choice)
    target, weights, dtype = args.target, args.weights, args.dtype
    rows = target.reshape(-1, target.shape[-1])
    w_q, w_k, w_v = _projections(weights.of_inputs, args.num_heads)
    b_q = b_v = None
    if weights.in_bias is not None:
        b_q = weights.in_bias.contiguous()
        if weights.out_weight is not None:
            b_q, _, b_v = b_q.chunk(3)
    if is_materialized(args):
        q = F.linear(rows.to(dtype), w_q.to(dtype), _cast(b_q, dtype)).view(-1, *w_k.shape[:2])
        k, v, _ = _keys_and_values(args)
        values, stats = flash_attention.forward(_over_keys(args, q, k, v))
        values = values.to(dtype=dtype).view(-1, args.embed_dim)
        filled = q.new_empty(0) if b_v is None else (stats[1] != 0).any(1).to(dtype)
        if weights.out_weight is None:
            out, values = values, values.new_empty(0, args.embed_dim)
        else:
            biased = _with_bias(args, values, filled)
            out = F.linear(biased, weights.out_weight.to(dtype), _cast(weights.out_bias, dtype))
            if args.query_offsets is not None and weights.out_bias is not None:
                _head_products(args).clear_rows_behind(out, args.query_offsets)
        stats = stats.view(2, *_query_shape(args)[:-1])
        u, pooled, residual = _empty_absorbed(args)
    else:
        products = _head_products(args)
        u = _new_absorbed(args)
        absorbed_args = _over_rows(args, u)
        listing = None
        if products is kernel_products:
            listing = listing_of(absorbed_args, backward=False)
        q = products.absorb_queries(rows, w_q, b_q, w_k, dtype, u, listing)
        pooled, residual, stats = target_attention.forward(absorbed_args, listing)
        if args.row_dtype == torch.float64:
            stats = stats.float()
        pooled = pooled.view_as(u)
        if weights.out_weight is None:
            out = products.own_columns(pooled, dtype)
            values, filled = out.new_empty(0, args.embed_dim), out.new_empty(0)
        else:
            b_out = None if weights.out_bias is None else weights.out_bias.contiguous()
            values, filled, out = products.project(
                pooled, stats, w_v, b_v, weights.out_weight.contiguous(), b_out, dtype,
                args.query_offsets,
            )  # fmt: skip
        if not args.for_backward:
            u, pooled, residual = _empty_absorbed(args)
        elif u.element_size() == 2:
            residual = residual.view_as(u)
    out = out.view(*target.shape[:-1], out.shape[-1])
    return MultiHeadOutputs(out, q, u, pooled, residual, stats, values, filled)


def _fake(args: MultiHeadArguments) -> MultiHeadOutputs:
    target, weights, width = args.target, args.weights, args.embed_dim
    rows = math.prod(target.shape[:-1])
    q = target.new_empty(rows, args.num_heads, args.head_dim, dtype=args.dtype)
    query = args.history.new_empty(_query_shape(args), dtype=args.row_dtype)
    stats = new_outputs(_over_rows(args, query)).stats.float()
    u, pooled, residual = _empty_absorbed(args)
    out = q.new_empty(*target.shape[:-1], width)
    values = q.new_empty(0 if weights.out_weight is None else rows, width)
    has_filled = weights.out_weight is not None and weights.in_bias is not None
    filled = q.new_empty(rows if has_filled else 0)
    return MultiHeadOutputs(out, q, u, pooled, residual, stats, values, filled)


def _backward(
    grad_out: Tensor, args: MultiHeadArguments, outputs: MultiHeadOutputs, needs: MultiHeadArguments
) -> MultiHeadGradients:
    target, history, dtype = args.target, args.history, args.dtype
    _, _, _, in_bias, out_weight, out_bias = args.weights
    out, q, u, pooled, residual, stats, values, filled = outputs
    rows = target.reshape(-1, target.shape[-1])
    grad_out = grad_out.reshape(-1, args.embed_dim)
    weights, needs_weights = args.weights.of_inputs, any(needs.weights.of_inputs)
    w_q, w_k, w_v = _projections(weights, args.num_heads)
    grad_weights = [weight.new_empty(weight.shape) for weight in weights]
    grad_w_q, grad_w_k, grad_w_v = _projections(grad_weights, args.num_heads)
    grad_history = grad_target = None
    absorbed: tuple[Tensor, ...] = ()
    of_history = (None, None)
    if is_materialized(args):
        k, v, w_made = _keys_and_values(args)
        grad_made = history.new_empty(history.shape[0], w_made.shape[0])
        if out_weight is None:
            grad_values, pooled_values = grad_out, out
            grad_history = history.new_empty(history.shape)  # of values; that of keys is added
            grad_k, grad_v = grad_made.view_as(k), grad_history.view_as(k)
        else:
            grad_values, pooled_values = grad_out @ out_weight.to(dtype), values
            grad_k, grad_v = _by_head(grad_made, args.num_heads)
        pooled_values = pooled_values.to(dtype=history.dtype).view_as(q)
        values = _with_bias(args, values, filled)
        of_scores = flash_attention.backward(
            grad_values.reshape_as(q).to(dtype=history.dtype),
            _over_keys(args, q, k, v),
            FlashOutputs(pooled_values, stats.view(2, *q.shape[:2])),
            grad_k,
            grad_v,
            needs_bias=bool(needs.biases.bias),
        )
        grad_q = of_scores.q.to(dtype=dtype).view_as(grad_out)
        if needs.target:
            grad_target = (grad_q @ w_q.to(dtype)).to(target.dtype)
        if needs.history and grad_history is not None:
            grad_history.addmm_(grad_made, w_made)
        elif needs.history:
            grad_history = grad_made @ w_made
        if needs_weights:
            grad_w_made = (grad_made.mT @ history).view(-1, *w_k.shape)
            grad_w_k.copy_(grad_w_made[0])
            if grad_w_v is not None:
                grad_w_v.copy_(grad_w_made[1])
    else:
        absorbed_args = _over_rows(args, u)
        shape = absorbed_args.query.shape
        products = _head_products(args)
        grad_pooled = _new_absorbed(args)
        listing = None
        if products is kernel_products:
            listing = listing_of(absorbed_args, backward=True)
        if out_weight is None:
            grad_values = grad_out
            products.spread_columns(grad_out, grad_pooled, listing)
        else:
            grad_values = products.gradient_of_pooled(
                grad_out, out_weight.contiguous(), w_v, dtype, grad_pooled, listing
            )
        of_scores = target_attention.backward(
            grad_pooled.view(shape),
            absorbed_args,
            TargetOutputs(pooled.view(shape), residual, stats),
            bool(needs.biases.bias),
            bool(needs.history),
            listing,
        )
        grad_history = of_scores.history
        grad_u = of_scores.query.view_as(u)
        target_dtype = target.dtype if needs.target else None
        grad_q, grad_target = products.gradient_of_targets(grad_u, w_k, w_q, dtype, target_dtype)
        absorbed, of_history = (q, grad_u, pooled), (grad_w_k, grad_w_v)

    of_values: tuple[Tensor | None, ...] = grad_out, values, grad_values, filled
    if out_weight is None:
        of_values, absorbed = (None,) * 4, absorbed[:2]
    grad_out_weight = None
    if out_weight is not None:
        grad_out_weight = out_weight.new_empty(out_weight.shape)
    grad_bias = None if in_bias is None else torch.empty_like(in_bias)
    grad_out_bias = None if out_bias is None else torch.empty_like(out_bias)
    if any(needs.weights):
        on_kernels = has_kernels(history.device, dtype)
        (parameter_gradients if on_kernels else cpu_products.parameter_gradients)(
            ProjectionRows(grad_q, rows, *of_values, *absorbed),
            ProjectionGradients(grad_w_q, grad_out_weight, *of_history, grad_bias, grad_out_bias),
            args.query_offsets,
        )
    return MultiHeadGradients(
        target=None if grad_target is None else grad_target.view_as(target),
        history=grad_history,
        **dict(itertools.zip_longest(("q_weight", "k_weight", "v_weight"), grad_weights)),
        in_bias=grad_bias,
        out_weight=grad_out_weight,
        out_bias=grad_out_bias,
        bias=of_scores.bias,
        position_bias=of_scores.position_bias,
        age_bias=of_scores.age_bias,
    )


def is_materialized(args: MultiHeadArguments) -> bool:
    """Whether to make keys and values."""
    return VARIANTS[0].supports(args.history.device, args)


def _is_cheaper_materialized(args: MultiHeadArguments) -> bool:
    """By what the top of this file counts.

    From shapes alone; of targets ``[B, T, C]`` not from ``B``, which what is traced leaves open.
    """
    target, history, num_heads = args.target, args.history, args.num_heads
    embed_dim, history_dim = args.embed_dim, history.shape[1]
    device_type = "cuda" if history.is_cuda else "cpu"
    if args.query_offsets is not None:
        num_samples, num_targets = args.offsets.numel() - 1, target.shape[0]
        num_to_fill = ROWS_TO_FILL[device_type] // num_heads
    else:
        num_samples, num_targets = 1, 1 if target.dim() == 2 else target.shape[1]
        num_to_fill = 0
    kind = device_type, min(history.element_size(), 4)
    flops, elements = (
        (8, 13) if args.weights.out_weight is None else (16, 16)
    )  # see the top of this file
    elements = history_dim + elements * embed_dim
    more_per_sample = flops * history_dim * embed_dim + elements * FLOPS_PER_ELEMENT[kind]
    absorbed = int(18 * FLOPS_OF_ABSORBED[kind]) * num_targets * num_heads * history_dim
    materialized = 18 * max(num_targets, num_to_fill) * embed_dim + num_samples * more_per_sample
    return absorbed > materialized


VARIANTS = (
    KernelVariant(
        "materialized",
        (
            Condition("score='softmax'", lambda args: args.score == "softmax"),
            Condition("rows in their order, without indices", lambda args: args.indices is None),
            Condition("rows, not codes", lambda args: not args.num_levels),
            Condition(
                f"heads of up to {MAX_WIDTH} columns", lambda args: args.head_dim <= MAX_WIDTH
            ),
            Condition("not 'absorbed'", lambda args: args.keys_and_values != "absorbed"),
            Condition(
                "targets enough to pay for keys and values of all rows, or 'materialized'",
                lambda args: (
                    args.keys_and_values == "materialized" or _is_cheaper_materialized(args)
                ),
            ),
        ),
    ),
    KernelVariant("absorbed"),
)
"""Whether keys and values are made: those of ``JaggedTargetAttention``."""
PRODUCT_VARIANTS = (
    KernelVariant(
        "kernels",
        (
            Condition(
                "a GPU, and projections of fp32, bf16 or fp16",  # attention may have another dtype
                lambda args: has_kernels(args.history.device, args.dtype),
            ),
            Condition(
                f"heads of up to {kernel_products.MAX_HEAD_DIM} columns",
                lambda args: args.head_dim <= kernel_products.MAX_HEAD_DIM,
            ),
        ),
    ),
    KernelVariant("pytorch"),
)
"""Of absorbed keys and values: what multiplies on the targets' side."""


def _new_absorbed(args: MultiHeadArguments) -> Tensor:
    """Room for ``u``, or for the gradient of what is pooled: ``[R, H, D]``."""
    rows = math.prod(args.target.shape[:-1])
    return args.history.new_empty(rows, args.num_heads, args.row_dim, dtype=args.row_dtype)


def _over_rows(args: MultiHeadArguments, u: Tensor) -> TargetArguments:
    """Attention of ``u`` ``[R, H, D]`` over the raw rows of the history."""
    return TargetArguments(
        u.view(_query_shape(args)), args.history, args.offsets, args.query_offsets, args.indices,
        args.biases, row_numbers=None, row_number_ends=None, scale=args.scale, score=args.score,
        num_levels=args.num_levels, for_backward=args.for_backward,
    )  # fmt: skip


def _over_keys(args: MultiHeadArguments, q: Tensor, k: Tensor, v: Tensor) -> FlashArguments:
    """Attention of ``q`` ``[R, H, E / H]`` over materialized keys and values."""
    return FlashArguments(
        q.to(dtype=args.history.dtype), k, v, _row_offsets(args), args.offsets, args.biases,
        relative_bias=None, causal=False, window=0, scale=args.scale, needs_stats=True,
    )  # fmt: skip


def _empty_absorbed(args: MultiHeadArguments) -> tuple[Tensor, Tensor, Tensor]:
    """``u``, ``pooled`` and the residual of that, of ``R`` rows, with nothing in them.

    Of no row for materialized keys and values or without a gradient, which do not use them.
    But of ``R`` where the number of jagged targets decides: no shape may depend on what it says.
    """
    depends = args.query_offsets is not None and args.keys_and_values == "auto"
    unused = not args.for_backward or (not depends and is_materialized(args))
    shape = 0 if unused else math.prod(args.target.shape[:-1]), args.num_heads, args.row_dim
    u, pooled = (args.history.new_empty(shape, dtype=args.row_dtype) for _ in range(2))
    return u, pooled, pooled.new_empty(pooled.shape if pooled.element_size() == 2 else [0])


def _projections(weights: list[Tensor], num_heads: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """``W_Q`` ``[E, C]``, and ``W_K`` and, if there is one, ``W_V`` ``[H, E / H, D]``."""
    weights = [weight.contiguous() for weight in weights]
    w_q, w_k, *of_values = weights if len(weights) > 1 else weights[0].chunk(3)
    embed_dim, history_dim = w_k.shape
    by_head = num_heads, embed_dim // num_heads, history_dim
    return w_q, w_k.view(*by_head), of_values[0].view(*by_head) if of_values else None


def _cast(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if x is None else x.to(dtype)


def _keys_and_values(args: MultiHeadArguments) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values ``[N, H, E / H]``, side by side in memory, and their weight ``[2·E, D]``.

    Values that are not projected are a view of the history, and the weight ``[E, E]`` is of keys.
    All in the dtype of the history. Keys have no bias: softmax would drop it, but not its rounding.
    """
    history, weights = args.history, args.weights.of_inputs
    embed_dim, in_bias, b_kv = args.embed_dim, args.weights.in_bias, None
    if args.weights.out_weight is None:
        w_k, shape = weights[1].to(history.dtype), (history.shape[0], args.num_heads, args.head_dim)
        return F.linear(history, w_k).view(*shape), history.reshape(*shape), w_k
    if len(weights) == 3:
        w_kv = history.new_empty(2 * embed_dim, history.shape[1])
        for half, weight in zip(w_kv.chunk(2), weights[1:], strict=True):
            half.copy_(weight)
    else:
        w_kv = weights[0][embed_dim:].to(history.dtype)
    if in_bias is not None and args.biases.dropout is None:
        b_kv = history.new_zeros(2 * embed_dim)
        b_kv[embed_dim:].copy_(in_bias[2 * embed_dim :])
    return *_by_head(F.linear(history, w_kv, b_kv), args.num_heads), w_kv


def _with_bias(args: MultiHeadArguments, values: Tensor, filled: Tensor) -> Tensor:
    """Materialized ``values`` ``[R, E]`` with the bias that :func:`_keys_and_values` left out."""
    weights = args.weights
    if args.biases.dropout is None or weights.in_bias is None or weights.out_weight is None:
        return values
    b_v = weights.in_bias[2 * args.embed_dim :].to(values.dtype)
    return torch.addcmul(values, filled.unsqueeze(1), b_v)


def _by_head(kv: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Both halves of ``[N, 2·E]`` as ``[N, H, E / H]``."""
    k, v = kv.view(kv.shape[0], 2, num_heads, kv.shape[1] // (2 * num_heads)).unbind(1)
    return k, v


def _row_offsets(args: MultiHeadArguments) -> Tensor:
    """``[B + 1]`` offsets of the targets of each sample."""
    if args.query_offsets is not None:
        return args.query_offsets
    num_targets = 1 if args.target.dim() == 2 else args.target.shape[1]
    steps = args.offsets.new_full([args.offsets.numel()], num_targets, dtype=torch.int64)
    return steps.cumsum(0) - num_targets


def _head_products(args: MultiHeadArguments) -> ModuleType:
    """What multiplies on the targets' side."""
    on_kernels = PRODUCT_VARIANTS[0].supports(args.history.device, args)
    return kernel_products if on_kernels else cpu_products


def _query_shape(args: MultiHeadArguments) -> tuple[int, ...]:
    """``[B, T, H, D]``, or ``[ΣT, H, D]`` of jagged targets."""
    shape = args.target.shape[:-1]
    if args.query_offsets is None and len(shape) == 1:
        shape = (*shape, 1)
    return *shape, args.num_heads, args.row_dim


def _flops(args: MultiHeadArguments, needs: MultiHeadArguments | None) -> int:
    """Of the products at the top of this file; backward has two for each, and makes keys anew."""
    num_targets, target_dim = math.prod(args.target.shape[:-1]), args.target.shape[-1]
    embed_dim, num_keys = args.embed_dim, 0
    of_targets = target_dim + (0 if args.weights.out_weight is None else embed_dim)
    query = args.history.new_empty(_query_shape(args), dtype=args.row_dtype)
    attention = target_attention.flops_of(_over_rows(args, query), needs)
    if is_materialized(args):
        attention = attention // (args.num_heads * args.row_dim) * embed_dim
        num_keys = args.history.shape[0] * (1 if args.weights.out_weight is None else 2)
    else:
        of_targets += args.row_dim * (1 if args.weights.out_weight is None else 2)
    products = (1, 1) if needs is None else (2, 3)
    of_targets, of_keys = num_targets * of_targets, num_keys * args.row_dim
    return attention + 2 * embed_dim * (products[0] * of_targets + products[1] * of_keys)


multi_head_target_attention, call_multi_head_target_attention = register_op(
    "multi_head_target_attention",
    flops=_flops,
    arguments=MultiHeadArguments,
    outputs=MultiHeadOutputs,
    forward=_forward,
    fake=_fake,
    backward=_backward,
    non_differentiable=("indices", "timestamps", "request_time", "dropout"),
)
