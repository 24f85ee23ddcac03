"""``jagged_flash_attention``: multi-head attention within each sample."""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import torch
from torch import Tensor

from torchrec_jagged_attn.base.autocast import cast_as_products
from torchrec_jagged_attn.base.checks import (
    check_bool,
    check_finite,
    check_float,
    check_integers,
    check_number,
    check_offsets_metadata,
    check_same,
    check_shape,
)
from torchrec_jagged_attn.base.devices import implementation_of
from torchrec_jagged_attn.base.layout import check_offsets_values
from torchrec_jagged_attn.ops.attention.arguments import Biases
from torchrec_jagged_attn.ops.attention.checks import (
    check_biases,
    check_width,
    check_window,
    refuse_options,
)
from torchrec_jagged_attn.ops.attention.dropout import draw_dropout, dropout_threshold
from torchrec_jagged_attn.ops.attention.prior_weights import prior_weights_gradient
from torchrec_jagged_attn.ops.flash_attention import cpu
from torchrec_jagged_attn.ops.flash_attention.arguments import (
    FlashArguments,
    FlashGradients,
    FlashOutputs,
    new_outputs,
)
from torchrec_jagged_attn.ops.flash_attention.kernels import attention as kernels
from torchrec_jagged_attn.ops.flops import attention_flops, pairs_of
from torchrec_jagged_attn.ops.registration import register_op


@overload
def jagged_flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    position_bias: Tensor | None = None,
    age_bias: Tensor | None = None,
    timestamps: Tensor | None = None,
    request_time: Tensor | None = None,
    prior_weights: Tensor | None = None,
    relative_bias: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def jagged_flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    position_bias: Tensor | None = None,
    age_bias: Tensor | None = None,
    timestamps: Tensor | None = None,
    request_time: Tensor | None = None,
    prior_weights: Tensor | None = None,
    relative_bias: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def jagged_flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    position_bias: Tensor | None = None,
    age_bias: Tensor | None = None,
    timestamps: Tensor | None = None,
    request_time: Tensor | None = None,
    prior_weights: Tensor | None = None,
    relative_bias: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Multi-head attention within each sample of a jagged batch, self or cross.

    For row :math:`i` of a sample's queries and head :math:`h`, over the rows :math:`j` of its keys
    and values,

    .. math:: out_i = \sum_j p_{ij} v_j, \qquad
              p_i = \mathrm{softmax}_j(scale \cdot q_i \cdot k_j + bias_{jh}
              + P_{\beta(position_j), h} + A_{\beta(age_j), h} + \log w_j
              + R_{\beta(|distance_{ij}|), h})

    A row without a visible key gives zeros. Nothing is padded. The first three biases and the prior
    weights :math:`w_j` belong to a key row. Positions are counted from the last key of the sample,
    ages from its ``request_time``, by default the time of its last key. The last bias depends on
    the distance between query and key in rows, where both sides end together:
    :math:`distance_{ij} = (i + L_k - L_q) - j`. :math:`\beta` makes four buckets per octave, as in
    :func:`jagged_target_attention`.

    One sample never affects another, whatever its rows hold. Within a sample, NaN and infinity can
    spread as in any attention: a masked key has a weight of zero, and 0 · NaN is NaN.

    Offsets may end before the rows, as in buffers of a fixed size. Rows behind the last offset are
    ignored, whatever they hold; their outputs and gradients are zeros.

    Args:
        q: ``[ΣLq, H, D]`` fp32, bf16 or fp16 (on CPU also fp64), ``D`` in 1…512. Gradients of fp32
            rows wider than 256 need 163 KiB of shared memory per block, as on A100 and H100; all
            other cases need 99 KiB.
        k: ``[ΣLk, Hk, D]``, dtype of ``q``; ``H`` must be a multiple of ``Hk``, and head ``h`` of
            ``q`` reads head ``h // (H / Hk)`` of ``k`` and ``v``.
        v: ``[ΣLk, Hk, Dv]``, dtype of ``q``, ``Dv`` in 1…512.
        q_offsets: ``[B + 1]`` int32 or int64: sample ``b`` owns query rows ``q_offsets[b]`` to
            ``q_offsets[b + 1] - 1``.
        kv_offsets: ``[B + 1]`` int32 or int64, the same for keys and values; by default
            ``q_offsets``.
        bias: ``[ΣLk, H]``, any dtype that ``q`` may have, added to the scores of its key; ``-inf``
            masks it.
        position_bias: ``[P, H]``, likewise, by the bucket of the key's position from the end.
        age_bias: ``[A, H]``, likewise, by the bucket of the key's age; needs ``timestamps``.
        timestamps: ``[ΣLk]`` times of the keys, as in :func:`jagged_target_attention`: int32,
            int64, fp32 or fp64.
        request_time: ``[B]`` in the dtype of ``timestamps``, as in :func:`jagged_target_attention`.
        prior_weights: ``[ΣLk]``, any dtype that ``q`` may have, for all heads; zero or less masks
            the key, and the gradient is zero there.
        relative_bias: ``[R, H]``, any dtype that ``q`` may have, by the bucket of the distance.
            On a GPU, of up to 2^30 - 129 rows of queries and of keys.
        dropout: the probability that a weight :math:`p_{ij}` of a head is set to zero, as in
            ``torch.nn.MultiheadAttention``; the others are divided by ``1 - dropout``. The softmax
            is over all of them, and so is its log-sum-exp. Drawn in each call, with PyTorch's
            generator of the device.
        causal: query ``i`` of ``Lq`` attends to the first ``Lk - Lq + i + 1`` of ``Lk`` keys: the
            last query attends to all.
        window: maximum number of keys that a query attends to, the newest that ``causal`` allows;
            needs ``causal``. ``None`` for all.
        scale: factor of the dot products; ``1/√D`` by default.
        return_lse: whether to also return log-sum-exps, to merge attention over parts of the keys.
            They have no gradient.

    Returns:
        ``[ΣLq, H, Dv]``, in the dtype of ``q``. With ``return_lse`` also ``[ΣLq, H]`` fp32, the
        logarithm of the sum of :math:`e` to the scores; ``-inf`` for a row without a visible key.
        Under autocast ``q``, ``k`` and ``v`` are cast to its dtype, as by
        ``scaled_dot_product_attention``, and the output has it.

    Raises:
        TypeError: a dtype does not fit, ``window`` is not an int, ``scale`` not a number, or
            ``causal`` not a bool.
        ValueError: a shape, a device, ``dropout``, ``window`` or (on CPU, or under
            ``TORCHREC_JAGGED_ATTN_VALIDATE=1``) the values of offsets or prior weights do not fit.
        NotImplementedError: ``D`` or ``Dv`` is over 512, or the device is neither CPU nor CUDA.

    Example:
        >>> x = torch.eye(3).unsqueeze(1)  # 3 rows, H=1, D=3
        >>> jagged_flash_attention(x, x, x, torch.tensor([0, 1, 3]), scale=0.0).squeeze(1)
        tensor([[1.0000, 0.0000, 0.0000],
                [0.0000, 0.5000, 0.5000],
                [0.0000, 0.5000, 0.5000]])

    Source:
        Jagged Flash Attention (RecSys '24, https://arxiv.org/abs/2409.15373), Section 2; its tiled
        softmax is that of FlashAttention-2 (https://arxiv.org/abs/2307.08691), Algorithms 1 and 2.
    """
    q, k, v = cast_as_products(q, k, v)
    check_offsets_metadata(q_offsets, "q_offsets")
    if kv_offsets is None:
        kv_offsets = q_offsets
    else:
        check_shape(kv_offsets, "kv_offsets", "[B + 1]", (q_offsets.numel(),))
        check_integers(kv_offsets, "kv_offsets")
    check_shape(q, "q", "[ΣLq, H, D]", (None, None, None))
    check_float(q, "q")
    check_shape(k, "k", "[ΣLk, Hk, D]", (None, None, q.shape[2]))
    check_shape(v, "v", "[ΣLk, Hk, Dv]", (k.shape[0], k.shape[1], None))
    check_width(q.shape[2], "q")
    check_width(v.shape[2], "v")
    check_same(q, "q", dtype=True, k=k, v=v)
    check_same(q, "q", dtype=False, q_offsets=q_offsets, kv_offsets=kv_offsets)
    biases = Biases(prior_weights, position_bias, age_bias, timestamps, request_time)
    check_biases(q, "q", k.shape[0], kv_offsets.numel() - 1, biases, bias, relative_bias)
    if q.shape[1] == 0:
        raise ValueError(f"q must have at least one head, got {list(q.shape)}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise ValueError(
            f"q must have a multiple of the {k.shape[1]} heads of k, got {q.shape[1]} heads"
        )
    refuse_options("jagged_flash_attention", options)
    window = check_window(window, causal)
    check_bool(return_lse, "return_lse")
    dropped_weights = draw_dropout(dropout_threshold(dropout, "dropout"), q.device)
    scale = 1 / math.sqrt(q.shape[2]) if scale is None else check_number(scale, "scale")
    arguments = (
        q, k, v, q_offsets, kv_offsets, prior_weights, position_bias, age_bias, timestamps,
        request_time, dropped_weights, bias, relative_bias, causal, window or 0, scale, return_lse,
    )  # fmt: skip
    if not return_lse:
        return call_flash_attention(*arguments)
    out, stats = flash_attention(*arguments)
    maximum, inverse = stats
    lse = (maximum - torch.log2(inverse)) * math.log(2)
    return out, lse.masked_fill_(inverse == 0, -torch.inf)


def _check_values(args: FlashArguments) -> None:
    """Check the values of offsets and prior weights."""
    num_queries, num_keys = args.q.shape[0], args.k.shape[0]
    check_offsets_values(args.q_offsets, num_queries, "q_offsets", exact=False)
    if args.kv_offsets is not args.q_offsets or num_keys != num_queries:
        check_offsets_values(args.kv_offsets, num_keys, "kv_offsets", exact=False)
    prior_weights = args.biases.prior_weights
    if prior_weights is not None:
        check_finite(prior_weights, "prior_weights", offsets=args.kv_offsets)


def forward(args: FlashArguments) -> FlashOutputs:
    """Attend; see :class:`FlashArguments`."""
    return implementation_of(args.q, cpu, kernels).forward(args)


def _backward(
    grad_out: Tensor, args: FlashArguments, outputs: FlashOutputs, needs: FlashArguments
) -> FlashGradients:
    grad_k, grad_v = (x.new_empty(x.shape) for x in (args.k, args.v))
    bias = args.bias if needs.bias else None
    prior_weights = args.biases.prior_weights if needs.biases.prior_weights else None
    needs_bias = bias is not None or prior_weights is not None
    grads = implementation_of(args.q, cpu, kernels).backward(
        grad_out, args, outputs, grad_k, grad_v, needs_bias
    )
    grad_bias = grad_weights = None
    if prior_weights is not None:
        grad_weights = prior_weights_gradient(grads.bias, prior_weights)
    if bias is not None:
        grad_bias = grads.bias.to(bias.dtype)
    return grads._replace(prior_weights=grad_weights, bias=grad_bias)


def _flops(args: FlashArguments, needs: FlashArguments | None) -> int:
    q, k = args.q, args.k
    pairs = pairs_of(
        args.q_offsets, q.shape[0], args.kv_offsets, k.shape[0],
        causal=args.causal, window=args.window,
    )  # fmt: skip
    widths = q.shape[2], args.v.shape[2]
    return attention_flops(pairs * q.shape[1], *widths, backward=needs is not None)


flash_attention, call_flash_attention = register_op(
    "flash_attention",
    flops=_flops,
    arguments=FlashArguments,
    outputs=FlashOutputs,
    check_values=_check_values,
    forward=forward,
    fake=new_outputs,
    backward=_backward,
    non_differentiable=("timestamps", "request_time", "dropout"),
)
