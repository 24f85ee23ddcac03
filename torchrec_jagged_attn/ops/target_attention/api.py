"""``jagged_target_attention``: the query rows of a sample attend to its history rows."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from torchrec_jagged_attn.base.autocast import cast_as_products
from torchrec_jagged_attn.base.checks import (
    check_finite,
    check_float,
    check_integers,
    check_number,
    check_offsets_metadata,
    check_same,
    check_shape,
    check_tensor,
)
from torchrec_jagged_attn.base.devices import implementation_of
from torchrec_jagged_attn.base.layout import check_offsets_values
from torchrec_jagged_attn.codes.checks import check_num_levels, check_packed_values
from torchrec_jagged_attn.ops.attention.arguments import Biases
from torchrec_jagged_attn.ops.attention.checks import (
    check_biases,
    check_indices,
    check_indices_values,
    check_packed_history,
    check_score,
    check_width,
)
from torchrec_jagged_attn.ops.attention.dropout import draw_dropout, dropout_threshold
from torchrec_jagged_attn.ops.attention.prior_weights import prior_weights_gradient
from torchrec_jagged_attn.ops.flops import attention_flops, pairs_of
from torchrec_jagged_attn.ops.registration import flatten, register_op
from torchrec_jagged_attn.ops.target_attention import cpu
from torchrec_jagged_attn.ops.target_attention.arguments import (
    TargetArguments,
    TargetGradients,
    TargetOutputs,
    TargetOutputsWithLse,
    new_outputs,
)
from torchrec_jagged_attn.ops.target_attention.kernels import attention as kernels


def jagged_target_attention(
    query: Tensor,
    history: Tensor,
    offsets: Tensor,
    *,
    query_offsets: Tensor | None = None,
    indices: Tensor | None = None,
    position_bias: Tensor | None = None,
    age_bias: Tensor | None = None,
    timestamps: Tensor | None = None,
    request_time: Tensor | None = None,
    prior_weights: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    score: Literal["softmax", "silu", "sigmoid"] = "softmax",
    num_levels: int | None = None,
) -> Tensor:
    r"""Attend from query rows to the history rows of their sample, which are keys and values.

    For query row :math:`q` of head :math:`h`, over the rows :math:`x_n` of its sample,

    .. math:: out = \sum_n p_n x_n, \qquad
              p = \mathrm{softmax}_n(scale \cdot q \cdot x_n + P_{\beta(position_n), h}
              + A_{\beta(age_n), h} + \log w_n)

    All heads share one pass over the history. An empty history gives zeros. Positions count the
    newer rows of the sample; ages are the time from a row to the sample's ``request_time``, by
    default to its last row, and zero where that is negative. Both fall into buckets, four per
    octave below 2^32 and one per octave above (of ``1 + x`` rounded to fp32),

    .. math:: \beta(x) = \min(\lfloor 4 \log_2(1 + x) \rfloor, 96 + \lfloor \log_2(1 + x) \rfloor)

    so that 160 buckets cover int64. Everything beyond a table falls into its last bucket. A row
    whose prior weight :math:`w_n` is zero has a weight of zero, and a history of such rows alone
    gives zeros; but positions and ages count it.

    With gather indices, ``indices``, row ``n`` is ``history[indices[n]]``; ``history`` has unique
    rows, or is a whole table. No ``[N, D]`` tensor is created. Backward does not create one either,
    and sums the gradient of each row of ``history`` in fp32.

    Offsets may end before the rows, as in buffers of a fixed size. Rows behind the last offset are
    ignored, whatever they hold; their outputs and gradients are zeros.

    Args:
        query: ``[B, H, D]``; ``[B, T, H, D]`` for ``T`` targets per sample; ``[1, T, H, D]`` for
            queries shared by all samples; or, with ``query_offsets``, ``[ΣT, H, D]``. fp32, bf16 or
            fp16 (on CPU also fp64), ``D`` in 1…512.
        history: ``[N, D]`` rows of all samples, one sample after the other; dtype of ``query``.
        offsets: ``[B + 1]`` int32 or int64: sample ``b`` owns history rows ``offsets[b]`` to
            ``offsets[b + 1] - 1``.
        query_offsets: ``[B + 1]`` int32 or int64, likewise for the rows of a jagged ``query``.
        indices: ``[N]`` int32 or int64, gather indices into ``history``, then ``[U, D]``. Biases,
            times, prior weights and dropout belong to the ``N`` positions, not to its rows.
        position_bias: ``[P, H]``, any dtype that ``query`` may have, added to scores by the bucket
            of the row's position from the end.
        age_bias: ``[A, H]``, likewise, by the bucket of the row's age; needs ``timestamps``.
        timestamps: ``[N]`` times of the rows: int32, int64, fp32 or fp64. fp32 rounds current
            Unix times to multiples of 128 seconds. They have no gradient. An age that overflows
            int64, for example if a missing time is ``-2**63``, or is NaN, falls into the last
            bucket.
        request_time: ``[B]`` in the dtype of ``timestamps``: the time when each sample is scored,
            from which the ages of its rows are counted; by default the time of its last row. It has
            no gradient.
        prior_weights: ``[N]``, any dtype that ``query`` may have: factors of the weights of rows
            before normalization, for all heads. A negative one counts as zero and has a gradient of
            zero: compute learned weights with ``exp`` or ``softplus`` to keep them positive.
        dropout: the probability that a weight :math:`p_n` of a query row and head is set to zero,
            as in ``torch.nn.MultiheadAttention``; the others are divided by ``1 - dropout``. The
            softmax is over all of them. Drawn in each call, with PyTorch's generator of the device.
        scale: factor of the dot products; ``1/√D`` by default.
        score: how weights :math:`p_n` are computed from scores :math:`s_n`: by ``"softmax"``; or
            elementwise by ``"silu"``, :math:`s_n \sigma(s_n)`, or ``"sigmoid"``,
            :math:`\sigma(s_n)`. Prior weights require the softmax.
        num_levels: number of levels of packed codes: ``history`` is then ``[N, num_bytes]`` or
            ``[U, num_bytes]`` uint8 of ``PackedCodes(D - 1, num_levels)``. Row :math:`x_n` has
            these codes and, in the last column, a one. Rows are unpacked in registers, and have no
            gradient.

    Returns:
        One output row per query row, in the dtype of ``query``: ``[B, H, D]``, ``[B, T, H, D]``
        (also for shared queries) or ``[ΣT, H, D]``. Under autocast ``query`` and ``history`` are
        cast to its dtype, as by ``scaled_dot_product_attention``, and the output has it.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: shapes or devices do not match, ``dropout`` is not in [0, 1), or (on a CPU, or
            under ``TORCHREC_JAGGED_ATTN_VALIDATE=1``) the values of offsets, indices, packed
            codes or prior weights are invalid.
        NotImplementedError: ``D`` is over 512, or the device is neither CPU nor CUDA.

    Example:
        >>> query = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])  # B=2, H=1, D=2
        >>> history = torch.tensor([[1.0, 2.0], [3.0, 2.0], [5.0, 6.0]])
        >>> jagged_target_attention(query, history, torch.tensor([0, 2, 3]), scale=0.0)
        tensor([[[2., 2.]],
        <BLANKLINE>
                [[5., 6.]]])

        Gather indices; both samples have the last row:

        >>> indices = torch.tensor([0, 2, 2])
        >>> jagged_target_attention(
        ...     query, history, torch.tensor([0, 2, 3]), indices=indices, scale=0.0
        ... )
        tensor([[[3., 4.]],
        <BLANKLINE>
                [[5., 6.]]])

    Source:
        Jagged Flash Attention (RecSys '24, https://arxiv.org/abs/2409.15373), Section 2: the fusion
        of the first three rows of its Table 1.
    """
    query, history = cast_as_products(query, history)
    if num_levels is not None:
        num_levels = check_num_levels(num_levels)
    check_tensor(query, "query")
    check_offsets_metadata(offsets, "offsets")
    num_samples = offsets.numel() - 1
    per_sample = query_offsets is None and query.dim() == 3
    if query_offsets is not None:
        check_shape(query_offsets, "query_offsets", "[B + 1]", (num_samples + 1,))
        check_integers(query_offsets, "query_offsets")
        check_shape(query, "query", "[ΣT, H, D]", (None, None, None))
    elif query.dim() == 4 and query.shape[0] == 1:
        check_shape(query, "query", "[1, T, H, D]", (1, None, None, None))
    elif per_sample:
        check_shape(query, "query", "[B, H, D]", (num_samples, None, None))
    else:
        check_shape(query, "query", "[B, T, H, D]", (num_samples, None, None, None))
    width = query.shape[-1]
    check_float(query, "query")
    check_width(width, "query")
    if num_levels is None:
        check_tensor(history, "history")
        if history.dtype == torch.uint8:
            raise ValueError("num_levels must be given for history of torch.uint8, got None")
        symbols = "[N, D]" if indices is None else "[U, D]"
        check_shape(history, "history", symbols, (None, width))
    else:
        check_packed_history(history, width, num_levels)
        check_same(query, "query", dtype=False, history=history)
    if indices is not None:
        check_indices(indices)
    num_rows = (history if indices is None else indices).shape[0]
    check_same(
        query, "query", dtype=False,
        offsets=offsets, query_offsets=query_offsets, indices=indices,
    )  # fmt: skip
    if num_levels is None:
        check_same(query, "query", dtype=True, history=history)
    biases = Biases(prior_weights, position_bias, age_bias, timestamps, request_time)
    check_biases(query, "query", num_rows, num_samples, biases)
    check_score(score, prior_weights)
    if per_sample:
        query = query.unsqueeze(1)
    dropout_state = draw_dropout(dropout_threshold(dropout, "dropout"), query.device)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else check_number(scale, "scale")
    out = call_target_attention(
        query, history, offsets, query_offsets, indices, prior_weights, position_bias, age_bias,
        timestamps, request_time, dropout_state, None, None, scale, score, num_levels or 0,
        torch.is_grad_enabled(),
    )  # fmt: skip
    return out.squeeze(1) if per_sample else out


def _check_row_numbers(args: TargetArguments) -> None:
    """Check row numbers, their ends, and that request times are given if there are timestamps."""
    numbers, ends = args.row_numbers, args.row_number_ends
    if numbers is None and ends is None:
        return
    if numbers is None or ends is None:
        given = "row_numbers" if ends is None else "row_number_ends"
        raise ValueError(
            f"row_numbers and row_number_ends must be given together, got {given} alone"
        )
    check_integers(numbers, "row_numbers")
    check_shape(numbers, "row_numbers", "[N]", (args.num_rows,))
    check_shape(ends, "row_number_ends", "[B]", (args.offsets.numel() - 1,))
    check_same(numbers, "row_numbers", dtype=True, row_number_ends=ends)
    if args.biases.timestamps is not None and args.biases.request_time is None:
        raise ValueError("request_time must be given with row_numbers and timestamps, got None")


def _check_values(args: TargetArguments) -> None:
    """Check row numbers, and the values of offsets, indices, packed codes and prior weights.

    On a GPU only if ``TORCHREC_JAGGED_ATTN_VALIDATE=1``, since reading them synchronizes.
    """
    _check_row_numbers(args)
    check_offsets_values(args.offsets, args.num_rows, "offsets", exact=False)
    if args.indices is not None:
        check_indices_values(args.indices, args.history.shape[0], args.offsets)
    if args.num_levels:
        row_offsets = args.offsets if args.indices is None else None
        num_codes = args.query.shape[-1] - 1
        check_packed_values(args.history, "history", num_codes, args.num_levels, row_offsets)
    if args.query_offsets is not None:
        check_offsets_values(args.query_offsets, args.query.shape[0], "query_offsets", exact=False)
    prior_weights = args.biases.prior_weights
    if prior_weights is not None:
        check_score(args.score, prior_weights)  # scripted modules do not check it
        check_finite(prior_weights, "prior_weights", offsets=args.offsets)


def forward(args: TargetArguments) -> TargetOutputs:
    """Attend; see :class:`TargetArguments`."""
    return implementation_of(args.query, cpu, kernels).forward(args)


def backward(
    grad_out: Tensor,
    args: TargetArguments,
    outputs: TargetOutputs,
    needs: TargetArguments,
    grad_lse: Tensor | None = None,
) -> TargetGradients:
    """Return the gradients of :func:`forward`.

    The gradient of prior weights is computed if needed, the gradient of the history at least if
    needed, other gradients always. ``grad_lse`` is the gradient of the
    log-sum-exps, in the shape and dtype of ``outputs.stats[0]``; it is ignored for query rows
    without a visible history row.
    """
    if not args.for_backward:
        raise ValueError(
            "for_backward must be True where a gradient is taken, got False: "
            "this was called, traced or exported with gradients off"
        )
    prior_weights = args.biases.prior_weights if needs.biases.prior_weights else None
    grads = implementation_of(args.query, cpu, kernels).backward(
        grad_out, args, outputs, prior_weights is not None, bool(needs.history), grad_lse=grad_lse
    )
    grad_weights = None
    if prior_weights is not None:
        grad_weights = prior_weights_gradient(grads.prior_weights, prior_weights)
    return grads._replace(prior_weights=grad_weights)


def target_attention_with_lse(args: TargetArguments) -> tuple[Tensor, Tensor]:
    """Attend to a part of each sample's rows, and return log-sum-exps to merge the results.

    If several calls attend to disjoint parts that together are all rows of a sample, its output is
    ``sum(softmax(lses)[i] * outs[i])``. Outputs and log-sum-exps have gradients.

    Args:
        args: arguments of the op, with a score of ``"softmax"``. With position biases or dropout,
            each call needs the ``row_numbers`` and ``row_number_ends`` of its rows.

    Returns:
        ``out``, the output of the op, and its log-sum-exps, in fp32 (for fp64, fp64) in the shape
        of ``out`` without its last axis: the logarithm of the sum of :math:`e^{s_n}`, where scores
        :math:`s_n` include biases and logarithms of prior weights, before dropout; ``-inf`` if no
        row is visible.

    Raises:
        ValueError: the score is not ``"softmax"``, or ``row_numbers`` and their ends do not fit.
    """
    if args.score != "softmax":
        raise ValueError(f'score must be "softmax" for log-sum-exps, got {args.score!r}')
    return _call_with_lse(*flatten(args))


def _forward_with_lse(args: TargetArguments) -> TargetOutputsWithLse:
    out, residual, stats = forward(args)
    maximum, inverse = stats
    lse = maximum.sub(inverse.log()).nan_to_num(torch.nan, -torch.inf, -torch.inf)
    return TargetOutputsWithLse(out, lse, residual, stats)


def _fake_with_lse(args: TargetArguments) -> TargetOutputsWithLse:
    out, residual, stats = new_outputs(args)
    return TargetOutputsWithLse(out, stats.new_empty(stats.shape[1:]), residual, stats)


def _backward_with_lse(
    grad_out: Tensor,
    grad_lse: Tensor,
    args: TargetArguments,
    outputs: TargetOutputsWithLse,
    needs: TargetArguments,
) -> TargetGradients:
    saved = TargetOutputs(outputs.out, outputs.residual, outputs.stats)
    return backward(grad_out, args, saved, needs, grad_lse)


def flops_of(args: TargetArguments, needs: object) -> int:
    """FLOPs of :func:`forward`, or, with ``needs``, of :func:`backward`."""
    query = args.query
    *_, num_heads, width = query.shape
    if args.query_offsets is None:
        pairs = query.shape[1] * args.num_rows
    else:
        pairs = pairs_of(args.query_offsets, query.shape[0], args.offsets, args.num_rows)
    return attention_flops(pairs * num_heads, width, width, backward=needs is not None)


_REGISTERED: dict[str, Any] = {
    "arguments": TargetArguments,
    "flops": flops_of,
    "check_values": _check_values,
    "non_differentiable": (
        "indices", "timestamps", "request_time", "dropout", "row_numbers", "row_number_ends",
    ),
}  # fmt: skip
target_attention, call_target_attention = register_op(
    "target_attention",
    outputs=TargetOutputs,
    forward=forward,
    fake=new_outputs,
    backward=backward,
    **_REGISTERED,
)
_, _call_with_lse = register_op(
    "target_attention_with_lse",
    outputs=TargetOutputsWithLse,
    forward=_forward_with_lse,
    fake=_fake_with_lse,
    backward=_backward_with_lse,
    num_differentiable=2,
    not_saved=("lse",),
    **_REGISTERED,
)
