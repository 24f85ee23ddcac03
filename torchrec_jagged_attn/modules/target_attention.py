"""``JaggedTargetAttention``: a target item attends to its user's history."""

# FX and torch.jit.script read annotations, so they are no strings here.
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_jagged_attn.base.autocast import autocast_dtype, autocast_off
from torchrec_jagged_attn.base.checks import (
    check_bool,
    check_device,
    check_dtype,
    check_int,
)
from torchrec_jagged_attn.base.devices import supported_dtypes
from torchrec_jagged_attn.base.layout import is_behind
from torchrec_jagged_attn.base.module_checks import check_jagged
from torchrec_jagged_attn.codes.api import rows_of_codes
from torchrec_jagged_attn.codes.linear_decoder import LinearDecoder
from torchrec_jagged_attn.codes.packed_codes import PackedCodes
from torchrec_jagged_attn.modules.projections import (
    Projections,
    ProjectionWeights,
    absorb_keys,
    has_history,
    is_materialized,
    project_outputs,
    project_values,
    split_projections,
)
from torchrec_jagged_attn.modules.recency_bias import RecencyBias
from torchrec_jagged_attn.modules.target_attention_arguments import (
    Options,
    RemoteHistory,
    check_codes,
    check_inputs,
    check_options,
    default_num_heads,
    packed_codes_of,
    width_of_codes,
)
from torchrec_jagged_attn.ops.attention.arguments import Biases
from torchrec_jagged_attn.ops.attention.checks import check_heads, check_width
from torchrec_jagged_attn.ops.attention.dropout import draw_dropout, dropout_threshold
from torchrec_jagged_attn.ops.flash_attention.api import flash_attention
from torchrec_jagged_attn.ops.target_attention.api import target_attention
from torchrec_jagged_attn.ops.target_attention.weights import attention_weights


class JaggedTargetAttention(nn.Module):
    r"""Multi-head attention of targets (queries) to the history of their sample (keys and values).

    By default it differs from ``torch.nn.MultiheadAttention(embed_dim, num_heads,
    kdim=history_dim, vdim=history_dim)`` on each sample in two ways: scores have a learned bias by
    position in the history (``recency_bias``, see :class:`RecencyBias`), and pooled rows stay in
    the embedding space (``value_projection``). With ``recency_bias=False`` and
    ``value_projection=True``, it is the same function, with the same parameter names and shapes.

    With few targets per sample, keys and values are not computed. Their projections are absorbed:
    they are applied to the targets and to the pooled rows,

    .. math:: q_h \cdot (W_{K,h} x_n + b_{K,h}) = (W_{K,h}^T q_h) \cdot x_n + const, \qquad
              \sum_n p_n (W_{V,h} x_n + b_{V,h}) = W_{V,h} \sum_n p_n x_n + b_{V,h}

    where the softmax cancels the constant. The score of a target and a row then takes ``H`` times
    the arithmetic. With many targets per sample (if they are jagged, on average), keys and values
    are materialized instead, once for each row. The choice depends on shapes only; results differ
    by rounding. If another number of targets ``T`` changes the choice, ``torch.compile`` recompiles
    once.

    The attention of a sample with an empty history is zero: with a value projection, its output is
    the bias of ``out_proj``.

    Args:
        embed_dim: width ``E`` of outputs.
        num_heads: number of heads ``H``, which must divide ``embed_dim``. ``None``, the default, is
            the largest of 8, 4 and 2 that divides it into heads of at least four columns, else 1.
        history_dim: width ``D`` of history rows. Default: ``embed_dim``.
        target_dim: width ``C`` of targets. Default: ``embed_dim``.
        bias: whether the projections have biases.
        recency_bias: whether to add the learned bias by position in the history.
        age_bias: whether that bias also depends on the ages of rows. Requires ``recency_bias``, and
            ``timestamps`` in ``forward``.
        init: ``"recency"`` starts as pooling by recency: queries are zero, and value and output
            projections, if any, are the identity where ``D = E``. ``"mha"`` initializes projections
            as ``torch.nn.MultiheadAttention`` does.
        score: how scores become weights: by ``"softmax"``, or elementwise by ``"silu"`` or
            ``"sigmoid"``, see :func:`jagged_target_attention`. With the latter two, outputs grow
            with the length of the history, the value bias is added once to the output rather than
            once per row, keys have no bias, and ``prior_weights`` are not supported.
        value_projection: whether values and outputs are projected. If False, which requires
            ``D = E``, the output of a head is its ``E / H`` columns of the weighted sum of rows, as
            if both projections were the identity; an empty history gives zeros. The parameters are
            then ``q_proj_weight`` ``[E, C]``, ``k_proj_weight`` ``[E, E]`` and, with ``bias``,
            ``in_proj_bias`` ``[E]`` of queries. ``None``, the default, projects if ``D`` is not
            ``E``, if ``init="mha"``, or if ``history_codes`` are given.
        dropout: probability, while training, that a weight of a target, head and row is set to
            zero, as in ``torch.nn.MultiheadAttention``; the others are divided by ``1 - dropout``.
            The bias of values is still added once.
        history_codes: experimental: the format of a packed history. Its values are then ``[N,
            num_bytes]`` uint8 of :class:`PackedCodes`. With a :class:`DiscretePCA`, the rows are
            decoded codes of width ``D``; its basis and mean are absorbed like the projections, and
            copied to parameters if they are trainable, else to buffers. With :class:`PackedCodes`,
            the rows are the ``D`` codes. Projections are always absorbed, and values are projected.
        device, dtype: of the parameters.

    Raises:
        TypeError: an argument has another type.
        ValueError: an argument is out of range or unknown, ``num_heads`` does not divide
            ``embed_dim``, ``age_bias`` is given without ``recency_bias``, ``history_dim`` is not
            ``embed_dim`` without a value projection, or does not fit ``history_codes``, or
            ``value_projection`` is False with ``history_codes``.
        NotImplementedError: ``history_dim`` is over 512.

    Example:
        >>> attention = JaggedTargetAttention(embed_dim=8, num_heads=2)
        >>> history = JaggedTensor(torch.randn(5, 8), lengths=torch.tensor([2, 0, 3]))
        >>> attention(torch.randn(3, 8), history).shape
        torch.Size([3, 8])
    """

    history_mean: Tensor | None
    history_basis: Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int | None = None,
        *,
        history_dim: int | None = None,
        target_dim: int | None = None,
        bias: bool = True,
        recency_bias: bool = True,
        age_bias: bool = False,
        init: Literal["recency", "mha"] = "recency",
        score: Literal["softmax", "silu", "sigmoid"] = "softmax",
        value_projection: bool | None = None,
        dropout: float = 0.0,
        history_codes: LinearDecoder | PackedCodes | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_heads is None:
            embed_dim = check_int(embed_dim, "embed_dim", 1)
            num_heads = default_num_heads(embed_dim)
        else:
            num_heads, embed_dim = check_heads(num_heads, embed_dim)
        check_options(score, init, dropout, recency_bias, value_projection)
        check_device(device)
        check_dtype(dtype)
        check_bool(bias, "bias")
        check_bool(age_bias, "age_bias")
        if age_bias and not recency_bias:
            raise ValueError("recency_bias must be True with age_bias=True, got False")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        if history_codes is not None:
            check_codes(history_codes)
            width = width_of_codes(history_codes)
            if history_dim not in (None, width):
                raise ValueError(
                    f"history_dim must be {width} as history_codes is, got {history_dim}"
                )
            history_dim = width
            if value_projection is False:
                raise ValueError(
                    "value_projection must be True or None with history_codes, got False"
                )
            value_projection = True
        widths = {"history_dim": history_dim, "target_dim": target_dim}
        self.history_dim, self.target_dim = (
            embed_dim if width is None else check_int(width, name, 1, "an int or None")
            for name, width in widths.items()
        )
        check_width(self.history_dim, "history_dim")
        if value_projection is None:
            value_projection = self.history_dim != embed_dim or init == "mha"
        if not value_projection and self.history_dim != embed_dim:
            raise ValueError(
                f"history_dim must be embed_dim {embed_dim} where value_projection=False, got "
                f"{self.history_dim}"
            )
        self.init = init
        self.score = score
        self.value_projection = value_projection
        self.dropout = dropout
        # An integer: torch.compile makes a float symbolic when it changes, and compiles again.
        self._dropout_threshold = dropout_threshold(dropout, "dropout")

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self._num_levels = self._num_codes = 0
        if history_codes is not None:
            ids = packed_codes_of(history_codes)
            self._num_levels, self._num_codes = ids.num_levels, ids.num_codes
        # Initial values of ``history_mean`` and ``history_basis``
        self._codes: dict[str, Tensor] = {}
        for name in ("mean", "basis"):
            given = getattr(history_codes, name, None)
            copy = None
            if given is not None:
                self._codes[name] = given.detach().clone()
                copy = parameter(*given.shape)
            if copy is None or isinstance(given, nn.Parameter):
                self.register_parameter(f"history_{name}", copy)
            else:
                self.register_buffer(f"history_{name}", copy.detach())

        # The same names, shapes and two cases as in torch.nn.MultiheadAttention.
        self.in_proj_weight = self.v_proj_weight = self.in_proj_bias = self.out_proj = None
        if value_projection and self.history_dim == self.target_dim == embed_dim:
            self.in_proj_weight = parameter(3 * embed_dim, embed_dim)
        else:
            self.q_proj_weight = parameter(embed_dim, self.target_dim)
            self.k_proj_weight = parameter(embed_dim, self.history_dim)
            if value_projection:
                self.v_proj_weight = parameter(embed_dim, self.history_dim)
        if bias:
            self.in_proj_bias = parameter((3 if value_projection else 1) * embed_dim)
        if value_projection:
            # As in torch.nn.MultiheadAttention: dynamic quantization must not replace the layer,
            # since its weight is read.
            self.out_proj = NonDynamicallyQuantizableLinear(
                embed_dim, embed_dim, bias=bias, device=device, dtype=dtype
            )
        self.recency_bias = (
            RecencyBias(num_heads, age_bias, device, dtype) if recency_bias else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize parameters as ``init`` says, mean and basis from ``history_codes``."""
        with torch.no_grad():
            for name, value in self._codes.items():
                getattr(self, f"history_{name}").copy_(value)
        if self.recency_bias is not None:
            self.recency_bias.reset_parameters()
        if self.in_proj_weight is not None:
            nn.init.xavier_uniform_(self.in_proj_weight)
        else:
            # As with a value projection: weights of one width are parts of a single weight.
            is_part = self.v_proj_weight is None and self.target_dim == self.embed_dim
            for weight in (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
                if weight is not None:
                    nn.init.xavier_uniform_(weight, 0.5**0.5 if is_part else 1.0)
        if self.init == "recency":
            queries = self.q_proj_weight if self.in_proj_weight is None else self.in_proj_weight
            nn.init.zeros_(queries[: self.embed_dim])
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
        if self.out_proj is not None:
            self.out_proj.reset_parameters()
            if self.out_proj.bias is not None:
                nn.init.zeros_(self.out_proj.bias)
            if self.init == "recency" and self.history_dim == self.embed_dim:
                if self.in_proj_weight is not None:
                    nn.init.eye_(self.in_proj_weight[2 * self.embed_dim :])
                elif self.v_proj_weight is not None:
                    nn.init.eye_(self.v_proj_weight)
                nn.init.eye_(self.out_proj.weight)

    def forward(
        self,
        target: Tensor | JaggedTensor,
        history: JaggedTensor,
        timestamps: Tensor | None = None,
        prior_weights: Tensor | None = None,
        indices: Tensor | None = None,
        request_time: Tensor | None = None,
    ) -> Tensor:
        """Attend from ``target`` to ``history``.

        Args:
            target: ``[B, C]``; ``[B, T, C]`` for ``T`` targets per sample; or a JaggedTensor with
                values ``[ΣT, C]`` for any number of targets per sample.
            history: values ``[N, D]`` of ``B`` samples, each from its oldest row to its newest,
                read in their own dtype, also under autocast. Its weights are not read. With
                ``history_codes``, values ``[N, num_bytes]`` uint8. Rows behind the last offset are
                ignored; they must be finite where keys and values are materialized.
            timestamps: ``[N]`` times of the rows, for ``age_bias=True`` only. Use integers or fp64:
                fp32 rounds current Unix times to multiples of 128 seconds.
            prior_weights: ``[N]`` factors of attention weights before normalization, see
                :func:`jagged_target_attention`. Zero or less masks the row, which still counts in
                positions and ages. A history with all rows masked is pooled like an empty history.
            indices: ``[N]`` int32 or int64 gather indices into ``history.values()``, then
                ``[U, D]``. The kernels gather rows without a copy, forward and backward; only
                materialized keys and values need a copy, ``[N, D]``. Lengths, timestamps and prior
                weights belong to positions, not to rows.
            request_time: ``[B]`` in the dtype of ``timestamps``, the time when each sample is
                scored. The ages of its rows are counted from it, and are zero for newer rows. By
                default they are counted from the time of the newest row.

        Returns:
            One row per target: ``[B, E]``, ``[B, T, E]`` or ``[ΣT, E]``, in the dtype of the
            module's parameters, or of autocast, whatever dtypes target and history have.

        Raises:
            TypeError: ``history`` is not a JaggedTensor, ``target`` or ``history`` has ids instead
                of embeddings, or a dtype does not fit.
            ValueError: a shape or a device does not fit, timestamps are missing, or given without
                ``age_bias``; or (on CPU, or under ``TORCHREC_JAGGED_ATTN_VALIDATE=1``) the values
                of offsets, indices or prior weights are invalid, or timestamps decrease within a
                sample.

        Example:
            Gather indices; both samples have the last row:

            >>> attention = JaggedTargetAttention(embed_dim=8, num_heads=2)
            >>> history = JaggedTensor(torch.randn(3, 8), lengths=torch.tensor([2, 3]))
            >>> attention(torch.randn(2, 8), history, indices=torch.tensor([0, 2, 1, 0, 2])).shape
            torch.Size([2, 8])
        """
        biases = self._biases(prior_weights, timestamps, request_time)
        return _attend(
            target, history, indices, self._weights(), biases, self.history_basis,
            self.history_mean, self._options(),
        )  # fmt: skip

    def _weights(self) -> ProjectionWeights:
        in_weight, out_proj = self.in_proj_weight, self.out_proj
        if in_weight is not None:
            input_weights = (in_weight, None, None)
        else:
            input_weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        out_weight = out_bias = None
        if out_proj is not None:
            out_weight, out_bias = out_proj.weight, out_proj.bias
        return ProjectionWeights(*input_weights, self.in_proj_bias, out_weight, out_bias)

    def _biases(
        self, prior_weights: Tensor | None, timestamps: Tensor | None, request_time: Tensor | None
    ) -> Biases:
        recency_bias = self.recency_bias
        position_bias = age_bias = None
        if recency_bias is not None:
            position_bias, age_bias = recency_bias.position_weight, recency_bias.age_weight
        return Biases(prior_weights, position_bias, age_bias, timestamps, request_time)

    def _options(self) -> Options:
        return Options(
            target_dim=self.target_dim,
            history_dim=self.history_dim,
            num_codes=self._num_codes,
            num_levels=self._num_levels,
            num_heads=self.num_heads,
            score=self.score,
            dropout_threshold=self._dropout_threshold if self.training else 0,
        )

    @torch.no_grad()
    def attention_weights(
        self,
        target: Tensor,
        history: JaggedTensor,
        timestamps: Tensor | None = None,
        prior_weights: Tensor | None = None,
        request_time: Tensor | None = None,
    ) -> JaggedTensor:
        """Return the attention weights of the rows of each history, by target and head.

        Up to rounding, :meth:`forward` in eval mode sums the rows with these weights. They are
        computed in fp32, also under autocast (in fp64 for an fp64 history), and have no gradient.

        Args:
            target: ``[B, C]``, or ``[B, T, C]`` for ``T`` targets per sample.
            history, timestamps, prior_weights, request_time: see :meth:`forward`.

        Returns:
            ``[N, H]`` for ``target`` ``[B, C]``, else ``[N, T, H]``, with the lengths of
            ``history`` and in its dtype; with packed codes, in the dtype of the parameters.

        Raises:
            TypeError: as in :meth:`forward`, or ``target`` is a JaggedTensor.
            ValueError: as in :meth:`forward`.
            NotImplementedError: HistoryEmbeddingCollectionSharder leaves the rows of ``history`` on
                other ranks.

        Example:
            >>> attention = JaggedTargetAttention(embed_dim=8, num_heads=2, recency_bias=False)
            >>> history = JaggedTensor(torch.randn(5, 8), lengths=torch.tensor([2, 0, 3]))
            >>> attention.attention_weights(torch.zeros(3, 8), history).values()[:3]
            tensor([[0.5000, 0.5000],
                    [0.5000, 0.5000],
                    [0.3333, 0.3333]])
        """
        if isinstance(target, JaggedTensor):
            raise TypeError("target must be a tensor [B, C] or [B, T, C], got a JaggedTensor")
        check_jagged(history, "history")
        if isinstance(history, RemoteHistory):
            raise NotImplementedError(
                "history must have its rows on this rank, got one whose rows "
                "HistoryEmbeddingCollectionSharder leaves on other ranks: give "
                "DistributedModelParallel an EmbeddingCollectionSharder"
            )
        rows, offsets = history.values(), history.offsets()
        biases = self._biases(prior_weights, timestamps, request_time)
        check_inputs(target, None, rows, offsets, None, biases, self._options())
        projection_weights = self._weights()
        if self._num_levels:
            projection_weights = _fold_decoder(
                projection_weights, self.history_basis, self.history_mean, self.score
            )
            dtype = projection_weights.q_weight.dtype
            rows = rows_of_codes(rows, self._num_codes + 1, self._num_levels, dtype)
        dtype = torch.promote_types(rows.dtype, torch.float32)
        with autocast_off(rows):
            projections = split_projections(projection_weights, self.num_heads, dtype)
            q = F.linear(target.to(dtype), projections.query, projections.query_bias)
            absorbed_query = absorb_keys(q.flatten(0, -2), projections.key)
            num_targets = 1 if target.dim() == 2 else target.shape[1]
            weights = attention_weights(
                absorbed_query.unflatten(0, (target.shape[0], num_targets)), rows.to(dtype),
                offsets, biases, self.head_dim**-0.5, self.score,
            ).to(rows.dtype)  # fmt: skip
        return JaggedTensor(
            weights.squeeze(1) if target.dim() == 2 else weights,
            lengths=history.lengths(),
            offsets=offsets,
        )

    def extra_repr(self) -> str:
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, "
            f"history_dim={self.history_dim}, target_dim={self.target_dim}, init={self.init!r}, "
            f"score={self.score!r}, value_projection={self.value_projection}, "
            f"dropout={self.dropout}"
            + (
                f", num_codes={self._num_codes}, num_levels={self._num_levels}, "
                f"basis={self.history_basis is not None}"
                if self._num_levels
                else ""
            )
        )


@torch.fx.wrap  # a leaf for FX, since it branches on the batch; torch.jit.script compiles it
def _attend(
    target: Tensor | JaggedTensor,
    history: JaggedTensor,
    indices: Tensor | None,
    weights: ProjectionWeights,
    biases: Biases,
    basis: Tensor | None,
    mean: Tensor | None,
    options: Options,
) -> Tensor:
    """``JaggedTargetAttention.forward`` as a function of inputs, parameters and options."""
    query_offsets: Tensor | None = None
    if isinstance(target, JaggedTensor):
        query, query_offsets = target.values(), target.offsets()
    else:
        query = target
    if not is_scripting():
        check_jagged(history, "history")
    rows, offsets = history.values(), history.offsets()
    out_weight = weights.out_weight
    dtype = weights.q_weight.dtype if out_weight is None else out_weight.dtype
    num_levels = options.num_levels
    if not is_scripting():
        check_inputs(query, query_offsets, rows, offsets, indices, biases, options)
        autocast = autocast_dtype(rows)
        if autocast is not None and dtype != torch.float64:
            dtype = autocast
        if num_levels > 0 and dtype not in supported_dtypes(rows.device):
            raise TypeError(
                f"parameters must have a dtype that {rows.device} supports with history_codes, "
                f"got {dtype}"
            )
        if isinstance(history, RemoteHistory):
            if biases.prior_weights is not None and biases.prior_weights.requires_grad:
                raise NotImplementedError(
                    "prior_weights must require no gradient where "
                    "HistoryEmbeddingCollectionSharder leaves rows of histories on other ranks, "
                    "got some that do: give "
                    "DistributedModelParallel an EmbeddingCollectionSharder"
                )
            # An awaitable, which waits when it is used as a tensor.
            return history.attend(  # pyright: ignore[reportReturnType]
                query, query_offsets, weights, biases, options, dtype
            )
    if num_levels > 0:
        weights = _fold_decoder(weights, basis, mean, options.score)
    biases = Biases(*biases[:5], draw_dropout(options.dropout_threshold, rows.device))
    args = query, query_offsets, rows, offsets, indices, weights, biases, options, dtype
    if not is_scripting():
        with autocast_off(rows):
            return _attend_to_rows(*args)
    return _attend_to_rows(*args)


def _attend_to_rows(
    target: Tensor,
    target_offsets: Tensor | None,
    rows: Tensor,
    offsets: Tensor,
    indices: Tensor | None,
    weights: ProjectionWeights,
    biases: Biases,
    options: Options,
    dtype: torch.dtype,
) -> Tensor:
    """Attend to ``rows`` of this rank, with projections in ``dtype``."""
    shape = list(target.shape[:-1])
    target = target.to(dtype).reshape(-1, target.shape[-1])
    behind: Tensor | None = None
    if target_offsets is not None:  # they may end before the targets
        behind = is_behind(target_offsets, target.shape[0]).unsqueeze(1)
        target = target.masked_fill(behind, 0)
    projections = split_projections(weights, options.num_heads, dtype)
    q = F.linear(target, projections.query, projections.query_bias)
    has_value_projection = projections.value is not None
    if is_materialized(
        shape, rows, offsets, target_offsets is not None, q.shape[1], options.num_heads,
        has_value_projection, options.score, options.num_levels,
    ):  # fmt: skip
        if indices is not None:
            rows = _gather_rows(rows, indices, offsets)
        values = _attend_to_keys(q, shape, target_offsets, rows, offsets, projections, biases)
        values = values.to(dtype)
    else:
        absorbed_query = absorb_keys(q, projections.key)
        if options.num_levels == 0:
            absorbed_query = absorbed_query.to(rows.dtype)
        query = absorbed_query
        if target_offsets is None:
            num_targets = shape[1] if len(shape) > 1 else 1
            query = absorbed_query.view(
                shape[0], num_targets, absorbed_query.shape[1], absorbed_query.shape[2]
            )
        pooled = _target_attention(
            query, rows, offsets, target_offsets, indices, biases.prior_weights,
            biases.position_bias, biases.age_bias, biases.timestamps, biases.request_time,
            biases.dropout, None, None, (q.shape[1] // options.num_heads) ** -0.5, options.score,
            options.num_levels, torch.is_grad_enabled(),
        )[0]  # fmt: skip
        values = project_values(pooled.view(absorbed_query.shape).to(dtype), projections.value)
    has_rows: Tensor | None = None
    if projections.value_bias is not None:
        has_rows = has_history(offsets, biases.prior_weights, target_offsets, q.shape[0])
    out = project_outputs(values, has_rows, projections)
    if behind is not None:
        out = out.masked_fill(behind, 0)
    return out.reshape(shape + list(out.shape[1:]))


def _attend_to_keys(
    q: Tensor,
    shape: list[int],
    target_offsets: Tensor | None,
    rows: Tensor,
    offsets: Tensor,
    projections: Projections,
    biases: Biases,
) -> Tensor:
    """Return values ``[R, E]`` without their bias, by attention over materialized keys and values,
    in the dtype of ``rows``. Keys have no bias, since a softmax cancels it.
    """
    num_heads, head_dim = projections.key.shape[0], projections.key.shape[1]
    w_v = projections.value
    k = F.linear(rows, projections.key.flatten(0, 1).to(rows.dtype))
    v = rows if w_v is None else F.linear(rows, w_v.flatten(0, 1).to(rows.dtype))
    if target_offsets is None:
        num_targets = shape[1] if len(shape) > 1 else 1
        target_offsets = torch.arange(shape[0] + 1, device=rows.device) * num_targets
    return _flash_attention(
        q.to(rows.dtype).view(-1, num_heads, head_dim), k.view(-1, num_heads, head_dim),
        v.reshape(-1, num_heads, head_dim), target_offsets, offsets, biases.prior_weights,
        biases.position_bias, biases.age_bias, biases.timestamps, biases.request_time,
        biases.dropout, None, None, False, 0, head_dim**-0.5, False,
    )[0].flatten(1)  # fmt: skip


def _gather_rows(rows: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
    """Return ``[N, D]``: the rows with the indices, which may be invalid behind the last offset."""
    first = indices[:1].masked_fill(offsets[-1] == 0, 0)
    indices = torch.where(is_behind(offsets, indices.shape[0]), first, indices)
    # The gradient of index_select is not deterministic on a GPU, and the gradient of embedding is
    # summed in 16 bits on a CPU.
    return F.embedding(indices, rows) if rows.is_cuda else rows.index_select(0, indices)


def _fold_decoder(
    weights: ProjectionWeights, basis: Tensor | None, mean: Tensor | None, score: str
) -> ProjectionWeights:
    """Fold the decoder of packed codes into the projections of keys and values, ``[E, D]``. They
    become ``[E, L + 1]``, applied to ``L`` codes and a constant 1.

    Keys have no constant with a softmax, which cancels it: it would only cost precision.
    """
    q_weight, k_weight, v_weight, in_bias, out_weight, out_bias = weights
    if k_weight is None or v_weight is None:
        q_weight, k_weight, v_weight = q_weight.chunk(3)
    k_weight = _fold_decoder_into(k_weight, basis, mean, score != "softmax")
    v_weight = _fold_decoder_into(v_weight, basis, mean, True)
    return ProjectionWeights(q_weight, k_weight, v_weight, in_bias, out_weight, out_bias)


def _fold_decoder_into(
    weight: Tensor, basis: Tensor | None, mean: Tensor | None, has_constant: bool
) -> Tensor:
    if basis is None or mean is None:
        return F.pad(weight, (0, 1))
    constant = mean if has_constant else torch.zeros_like(mean)
    rows = torch.cat([basis, constant.unsqueeze(0)])
    if not is_scripting():
        with autocast_off(weight):
            return weight @ rows.T
    return weight @ rows.T


# torch.jit.script supports op packets, not overloads.
_target_attention = target_attention.overloadpacket
_flash_attention = flash_attention.overloadpacket
