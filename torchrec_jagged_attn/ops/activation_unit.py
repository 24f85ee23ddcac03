"""``jagged_activation_unit``: DIN's weights of history rows, and the rows pooled by them."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from torchrec_jagged_attn.arguments import (
    ActivationUnitArguments,
    ActivationUnitGradients,
    ActivationUnitOutputs,
    Biases,
)
from torchrec_jagged_attn.checks import (
    check_activation,
    check_biases,
    check_finite,
    check_float,
    check_hidden_dims,
    check_offsets_metadata,
    check_same,
    check_shape,
    check_tensor,
)
from torchrec_jagged_attn.cpu import activation_unit as cpu
from torchrec_jagged_attn.devices import implementation
from torchrec_jagged_attn.kernels.target import activation_unit as kernels
from torchrec_jagged_attn.layout import check_offsets_values
from torchrec_jagged_attn.ops.dropout import draw_dropout, drops_of
from torchrec_jagged_attn.ops.registration import register_op

__all__ = ["activation_unit", "call_activation_unit", "check_one_target", "jagged_activation_unit"]


def jagged_activation_unit(
    query: Tensor,
    history: Tensor,
    offsets: Tensor,
    weight_1: Tensor,
    bias_1: Tensor,
    weight_2: Tensor,
    bias_2: Tensor,
    weight_3: Tensor,
    bias_3: Tensor,
    *,
    activation: Literal["sigmoid", "silu", "relu"] = "sigmoid",
    position_bias: Tensor | None = None,
    age_bias: Tensor | None = None,
    timestamps: Tensor | None = None,
    prior_weights: Tensor | None = None,
    row_dropout: float = 0.0,
) -> Tensor:
    r"""Pool the history rows of each sample by the weights that a small network gives them.

    For the query :math:`q` of a sample, over its rows :math:`u_n`, and with the activation
    :math:`\phi`,

    .. math:: out = \sum_n p_n a_n u_n, \qquad
              a_n = w_3 \cdot \phi(W_2 \phi(W_1 [q, u_n, q - u_n, q \odot u_n] + b_1) + b_2) + b_3

    :math:`a_n` may be negative, and nothing makes those of a history sum to one. The factor
    :math:`p_n` is one unless a bias or prior weights are given,

    .. math:: p_n = w_n \exp(P_{\beta(position_n)} + A_{\beta(age_n)})

    with the buckets :math:`\beta` of :func:`jagged_target_attention`. An empty history gives zeros.

    The first layer is absorbed: with :math:`W_1 = [W_q, W_u, W_d, W_p]`, it is
    :math:`(W_u - W_d + W_p \, \mathrm{diag}(q)) \, u_n` plus a constant of the sample. So a row
    takes a product by ``[D, H1]`` in place of one by ``[4·D, H1]``, and no features or hidden
    layers of the rows are stored, forward or backward.

    Args:
        query: ``[B, D]``, one target of each sample. fp32, bf16 or fp16 (on CPU also fp64), ``D``
            in 1…256.
        history: ``[N, D]`` rows of all samples, one sample after the other; dtype of ``query``.
        offsets: ``[B + 1]`` int32 or int64: sample ``b`` owns history rows ``offsets[b]`` to
            ``offsets[b + 1] - 1``.
        weight_1: ``[H1, 4·D]``, any dtype that ``query`` may have, ``H1`` in 1…128, as
            ``torch.nn.Linear`` has it. So are the next ones.
        bias_1: ``[H1]``.
        weight_2: ``[H2, H1]``, ``H2`` in 1…128.
        bias_2: ``[H2]``.
        weight_3: ``[1, H2]``.
        bias_3: ``[1]``.
        activation: :math:`\phi`, of both hidden layers: ``"sigmoid"``, ``"silu"`` or ``"relu"``.
            Dice and PReLU, which learn parameters of their own, are not served.
        position_bias: ``[P, 1]``, any dtype that ``query`` may have, by the bucket of the row's
            position from the end.
        age_bias: ``[A, 1]``, likewise, by the bucket of the row's age; needs ``timestamps``.
        timestamps: ``[N]`` times of the rows: int32, int64, fp32 or fp64. They have no gradient.
        prior_weights: ``[N]``, any dtype that ``query`` may have, not negative.
        row_dropout: the probability that a row is left out, see :func:`jagged_target_attention`.

    Returns:
        ``[B, D]``, in the dtype of ``query``.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape, a device, ``activation``, ``row_dropout`` or (on CPU, or under
            ``TORCHREC_JAGGED_ATTN_VALIDATE=1``) the values of offsets or prior weights do not fit.
        NotImplementedError: ``query`` has several targets per sample, ``D`` is over 256, ``H1`` or
            ``H2`` is over 128, or the device is neither CPU nor CUDA. The GPU has less shared
            memory than an H100, and ``D·H1``, each rounded up to a power of two, is over 16,384.

    Example:
        >>> import torch
        >>> query = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> history = torch.tensor([[1.0, 2.0], [3.0, 2.0], [5.0, 6.0]])
        >>> layers = torch.zeros(4, 8), torch.zeros(4), torch.zeros(2, 4), torch.zeros(2)
        >>> last = torch.ones(1, 2), torch.zeros(1)  # each weight is 2 · σ(0)
        >>> jagged_activation_unit(query, history, torch.tensor([0, 2, 3]), *layers, *last)
        tensor([[4., 4.],
                [5., 6.]])

    Source:
        Deep Interest Network (KDD '18, https://arxiv.org/abs/1706.06978), Section 4.3.
    """
    check_tensor(query, "query")
    check_offsets_metadata(offsets, "offsets")
    check_one_target(query, "query")
    check_shape(query, "query", "[B, D]", (offsets.numel() - 1, None))
    check_float(query, "query")
    width = query.shape[1]
    check_shape(history, "history", "[N, D]", (None, width))
    check_same(query, "query", dtype=True, history=history)
    check_same(query, "query", dtype=False, offsets=offsets)
    check_tensor(weight_1, "weight_1")
    check_tensor(weight_2, "weight_2")
    hidden = [x.shape[0] if x.dim() else 0 for x in (weight_1, weight_2)]
    check_hidden_dims(hidden, width)
    for x, name, symbols, shape in (
        (weight_1, "weight_1", "[H1, 4·D]", (hidden[0], 4 * width)),
        (bias_1, "bias_1", "[H1]", (hidden[0],)),
        (weight_2, "weight_2", "[H2, H1]", (hidden[1], hidden[0])),
        (bias_2, "bias_2", "[H2]", (hidden[1],)),
        (weight_3, "weight_3", "[1, H2]", (1, hidden[1])),
        (bias_3, "bias_3", "[1]", (1,)),
    ):
        check_float(x, name)
        check_shape(x, name, symbols, shape)
        check_same(query, "query", dtype=False, **{name: x})
    biases = Biases(None, position_bias, age_bias, timestamps)
    check_biases(
        query.unsqueeze(1), "query", history.shape[0], offsets.numel() - 1, biases, prior_weights
    )
    check_activation(activation)
    drops = drops_of(row_dropout, "row_dropout")
    dropped = draw_dropout(drops, query.device) if drops > 0 else None
    return call_activation_unit(
        query, history, offsets, weight_1, bias_1, weight_2, bias_2, weight_3, bias_3,
        position_bias, age_bias, timestamps, dropped, prior_weights, activation,
    )  # fmt: skip


def check_one_target(query: Tensor, name: str) -> None:
    """Each sample must have one target."""
    if query.dim() == 3:
        raise NotImplementedError(
            f"{name} must have one target per sample, [B, D], for an activation unit, got "
            f"{list(query.shape)}"
        )


def _forward(args: ActivationUnitArguments) -> ActivationUnitOutputs:
    check_offsets_values(args.offsets, args.history.shape[0], "offsets")
    if args.prior_weights is not None:
        check_finite(args.prior_weights, "prior_weights")
    if implementation(args.query.device)[0] == "reference":
        return cpu.forward(args)
    return kernels.forward(args)


def _fake(args: ActivationUnitArguments) -> ActivationUnitOutputs:
    return ActivationUnitOutputs(args.query.new_empty(args.query.shape))


def _backward(
    grad_out: Tensor,
    args: ActivationUnitArguments,
    outputs: ActivationUnitOutputs,
    needs: ActivationUnitArguments,
) -> ActivationUnitGradients:
    if implementation(args.query.device)[0] == "reference":
        return cpu.backward(grad_out, args)
    return kernels.backward(grad_out, args, bool(needs.prior_weights))


activation_unit, call_activation_unit = register_op(
    "activation_unit",
    arguments=ActivationUnitArguments,
    outputs=ActivationUnitOutputs,
    forward=_forward,
    fake=_fake,
    backward=_backward,
    non_differentiable=("timestamps", "row_dropout"),
    axes=dict.fromkeys(
        ("query", "history", "offsets", "timestamps", "prior_weights", "out"),
        0,
    ),
    unsaved=ActivationUnitOutputs._fields,
)
