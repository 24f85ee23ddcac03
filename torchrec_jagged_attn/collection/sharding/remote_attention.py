"""Attention over history rows on the ranks whose shards contain them.

The *source rank* of a sample is the rank whose batch contains it, the *owner rank* of a row the
rank whose shard contains it. Source ranks send queries ``[E]`` to all owner ranks. Owner ranks
compute attention over their rows of each sample, and return the outputs and the log-sum-exps of the
scores. Source ranks sum the outputs, in the order of the ranks, weighted by the softmax of the
log-sum-exps: the output over the whole history. Backward reverses these steps, and gradients of
rows remain on their owner ranks. The number of bytes sent does not depend on the lengths of
histories.

All sizes and splits are known to the host without reading lengths, so that a CUDA graph can capture
these steps. Rows behind the last sample are ignored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torchrec.distributed.types import LazyAwaitable, QuantizedCommCodecs

from torchrec_jagged_attn.base.autocast import autocast_off
from torchrec_jagged_attn.base.row_gradients import scale_gradient
from torchrec_jagged_attn.modules.projections import (
    ProjectionWeights,
    absorb_keys,
    has_history,
    project_outputs,
    project_values,
    split_projections,
)
from torchrec_jagged_attn.modules.target_attention_arguments import Options, RemoteHistory
from torchrec_jagged_attn.ops.attention.arguments import Biases
from torchrec_jagged_attn.ops.attention.dropout import draw_dropout
from torchrec_jagged_attn.ops.registration import flatten
from torchrec_jagged_attn.ops.target_attention.api import (
    call_target_attention,
    target_attention_with_lse,
)
from torchrec_jagged_attn.ops.target_attention.arguments import TargetArguments


class OwnedRows(NamedTuple):
    """History rows on this rank, for the samples of all ranks, grouped by source rank."""

    rows: Tensor  # [N', D]; their gradient goes to the table
    lengths: Tensor  # [S] int64, their number for each sample
    positions: Tensor  # [N'] int64, of each row in its whole history; the newest row has -1
    ages: Tensor | None  # [N'] int64
    prior_weights: Tensor | None  # [N']
    samples_per_rank: list[int]  # of each source rank
    owners: list[int]  # the ranks that have rows of the table; on other ranks, S is 0
    group: dist.ProcessGroup
    # With jagged queries, their number on each source rank. By default it is gathered in each call;
    # an empty list is filled in the first one.
    queries_per_rank: list[int] | None = None
    gradient_factor: float = 1.0  # of the gradient of `rows`


class OwnedHistory(RemoteHistory):
    """History whose rows are on their owner ranks. ``values()`` is a NaN placeholder ``[N, D]``
    (one expanded scalar). ``owned`` holds this rank's rows of the histories of all ranks.
    """

    def __init__(self, lengths: Tensor, num_rows: int, owned: OwnedRows) -> None:
        width = owned.rows.shape[1]
        super().__init__(
            owned.rows.new_full((1, 1), torch.nan).expand(num_rows, width), lengths=lengths
        )
        self.owned = owned

    def without_samples(self) -> OwnedHistory:
        """Copy with zero samples. Owner ranks still have one empty sample, because TorchRec cannot
        look up an empty batch.
        """
        return OwnedHistory(self.lengths()[:0], 0, self.owned)

    @torch.compiler.disable()  # a graph break, because ranks communicate
    def attend(
        self,
        query: Tensor,
        query_offsets: Tensor | None,
        weights: ProjectionWeights,
        biases: Biases,
        options: Options,
        dtype: torch.dtype,
    ) -> LazyAwaitable[Tensor]:
        """Compute ``JaggedTargetAttention.forward`` on the owner ranks, in ``dtype``.

        Queries are sent at once. Everything else is computed when the output is waited for. All
        ranks must wait for the outputs of several attentions in the same order.

        Args:
            query: ``[B, C]``, or ``[ΣT, C]`` with ``query_offsets`` ``[B + 1]``.

        Returns:
            ``[B, E]`` or ``[ΣT, E]``.
        """
        if self.values().requires_grad:
            raise NotImplementedError(
                "rows of histories that HistoryEmbeddingCollectionSharder leaves on other ranks "
                "must be trained in loss.backward(), got histories that were detached, as by "
                "TrainPipelineSemiSync: use TrainPipelineSparseDist"
            )
        steps = _attend_in_steps(query, query_offsets, self, weights, biases, options, dtype)
        return _Attention(steps)


class _Transfer:
    """All-to-alls of values and later of their gradients, one at a time, encoded by ``codecs``."""

    def __init__(self, group: dist.ProcessGroup, codecs: QuantizedCommCodecs | None) -> None:
        self._group, self._codecs = group, codecs

    def start(self, x: Tensor, received: list[int], sent: list[int], is_grad: bool) -> None:
        self._shape, self._codec = x.shape[1:], None
        x = x.contiguous()
        if self._codecs is not None:
            codec = self._codecs.backward if is_grad else self._codecs.forward
            context, width = codec.create_context(), self._shape.numel()
            x = codec.encode(x.flatten().float(), context)  # int8 codecs misread other dtypes
            received, sent = (
                [codec.calc_quantized_size(n * width, context) for n in counts]
                for counts in (received, sent)
            )
            self._codec = codec, context
        self._out = x.new_empty(sum(received), *x.shape[1:])
        self._work: Any = dist.all_to_all_single(
            self._out, x, received, sent, group=self._group, async_op=True
        )

    def finish(self) -> Tensor:
        self._work.wait()
        out = self._out
        if self._codec is not None:
            codec, context = self._codec
            out = codec.decode(out, context).view(-1, *self._shape)
        del self._out, self._work, self._codec
        return out


class _Start(torch.autograd.Function):
    """Starts a transfer. Backward waits for the transfer of gradients."""

    @staticmethod
    def forward(ctx, x, transfer, received, sent):
        ctx.transfer = transfer
        transfer.start(x, received, sent, is_grad=False)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx, _):
        return ctx.transfer.finish(), None, None, None


class _Finish(torch.autograd.Function):
    """Waits for a transfer. Backward starts the transfer of gradients."""

    @staticmethod
    def forward(ctx, _, transfer, received, sent):
        ctx.transfer, ctx.sizes = transfer, (sent, received)
        return transfer.finish()

    @staticmethod
    def backward(ctx, grad):
        ctx.transfer.start(grad, *ctx.sizes, is_grad=True)
        return grad.new_empty(0), None, None, None


def start_exchange(
    x: Tensor,
    received: list[int],
    sent: list[int],
    group: dist.ProcessGroup,
    codecs: QuantizedCommCodecs | None = None,
) -> Callable[[], Tensor]:
    """Start an all-to-all of ``sent[r]`` rows to each rank ``r`` and ``received[r]`` rows from it,
    in the order of ranks. Backward sends gradients in the other direction. Returns a function that
    waits for the result.
    """
    transfer = _Transfer(group, codecs)
    started = _Start.apply(x, transfer, received, sent)
    return functools.partial(_Finish.apply, started, transfer, received, sent)


class _Splits(NamedTuple):
    """How the samples, or the queries, of each source rank are sent to owner ranks and back."""

    counts: list[int]  # of each source rank
    owners: list[int]
    group: dist.ProcessGroup

    @property
    def local_count(self) -> int:
        return self.counts[self.group.rank()]

    @property
    def recv_splits(self) -> list[int]:
        """Rows received from each source rank: zero, unless this rank is an owner rank."""
        return self.counts if self.group.rank() in self.owners else [0] * len(self.counts)

    @property
    def send_splits(self) -> list[int]:
        """Rows sent to each rank."""
        return [self.local_count if rank in self.owners else 0 for rank in range(len(self.counts))]

    def to_owners(self, x: Tensor) -> Callable[[], Tensor]:
        """Send ``x`` ``[local_count, …]`` to every owner rank. Returns a function that waits for
        the rows received, concatenated over source ranks.
        """
        copies = x.expand(len(self.owners), *x.shape).flatten(0, 1)
        return start_exchange(copies, self.recv_splits, self.send_splits, self.group)

    def from_owners(self, x: Tensor) -> Tensor:
        """Send results back. Returns ``[owners, local_count, …]`` of this source rank."""
        out = start_exchange(x, self.send_splits, self.recv_splits, self.group)()
        return out.view(len(self.owners), self.local_count, *x.shape[1:])


class _Attention(LazyAwaitable[Tensor]):
    """Attention whose queries are being sent to the owner ranks."""

    def __init__(self, steps: Iterator[Tensor]) -> None:
        super().__init__()
        self._steps = steps
        next(steps)

    @torch.compiler.disable()
    def _wait_impl(self) -> Tensor:
        if self._result is None:  # else a hook has already read it
            (self._result,) = self._steps
        return self._result


def _attend_in_steps(
    query: Tensor,
    query_offsets: Tensor | None,
    history: OwnedHistory,
    weights: ProjectionWeights,
    biases: Biases,
    options: Options,
    dtype: torch.dtype,
) -> Iterator[Tensor]:
    """See :meth:`OwnedHistory.attend`. Yields once after queries are sent, and then the output."""
    owned, num_queries = history.owned, query.shape[0]
    samples = queries = _Splits(owned.samples_per_rank, owned.owners, owned.group)
    missing = samples.local_count - history.lengths().shape[0]  # 1 if there is no sample, else 0
    counts = None
    if query_offsets is None:
        query = F.pad(query, (0, 0, 0, missing)) if missing else query
    else:
        counts = samples.to_owners(F.pad(query_offsets.diff().long(), (0, missing)))()
        queries = _Splits(_queries_per_rank(query, owned), owned.owners, owned.group)
    with autocast_off(owned.rows):
        projections = split_projections(weights, options.num_heads, dtype)
        q = F.linear(query.to(dtype), projections.query, projections.query_bias)
        get_q = queries.to_owners(q)
    yield query

    # On the owner rank: samples and queries of all source ranks.
    num_heads, head_dim = projections.key.shape[:2]
    with autocast_off(owned.rows):
        absorbed_query = absorb_keys(get_q(), projections.key).to(owned.rows.dtype)
        pooled, lse = _attend(absorbed_query, counts, owned, biases, options, head_dim**-0.5)
        values = project_values(pooled.to(dtype), projections.value)
        sum_dtype = torch.promote_types(values.dtype, torch.float32)
        results = torch.cat([values.to(sum_dtype), lse.to(sum_dtype)], dim=1)

        # On the source rank: local queries.
        results = queries.from_owners(results)
        if missing:
            results = results[:, :num_queries]
        values, lse = results.split([num_heads * head_dim, lse.shape[1]], dim=2)
        if options.score == "softmax":
            # Finite, so that the softmax is finite even if no owner rank has a visible row.
            least = torch.finfo(sum_dtype).min
            rank_weights = torch.softmax(F.threshold(lse, least, least), 0).unsqueeze(-1)
            values = (values.unflatten(2, (num_heads, head_dim)) * rank_weights).flatten(2)
            has_rows = lse.amax((0, 2)) != -torch.inf
        else:
            has_rows = has_history(history.offsets(), None, query_offsets, num_queries)
        out = project_outputs(values.sum(0).to(dtype), has_rows, projections)
    yield out


def _queries_per_rank(query: Tensor, owned: OwnedRows) -> list[int]:
    """Return the number of queries of each rank, gathered unless it is known."""
    known = owned.queries_per_rank
    if known:
        return known
    counts = torch.empty(owned.group.size(), dtype=torch.int64, device=query.device)
    dist.all_gather_into_tensor(counts, counts.new_full((1,), query.shape[0]), group=owned.group)
    queries_per_rank = counts.tolist()
    if known is not None:
        known += queries_per_rank
    return queries_per_rank


def _attend(
    absorbed_query: Tensor,
    counts: Tensor | None,
    owned: OwnedRows,
    biases: Biases,
    options: Options,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend from queries ``[R, H, D]`` to the rows of this rank.

    The gradient of rows is proportional to that of the output. So the latter is multiplied by
    ``gradient_factor``, and the gradients of all other inputs are divided by it.

    ``counts`` ``[S]`` are the numbers of queries of samples, by default one. Returns outputs
    ``[R, H, D]`` and log-sum-exps ``[R, H]`` or, without a softmax, ``[R, 0]``. Each rank draws its
    own dropout seed, since no other rank has its rows.
    """
    offsets = _offsets(owned.lengths)
    zeros = torch.zeros_like(owned.lengths)
    factor = owned.gradient_factor
    absorbed_query = scale_gradient(absorbed_query, 1 / factor)
    position_bias, age_bias = (
        None if x is None else scale_gradient(x, 1 / factor)
        for x in (biases.position_bias, biases.age_bias)
    )
    args = TargetArguments(
        query=absorbed_query.unsqueeze(1) if counts is None else absorbed_query,
        history=owned.rows,
        offsets=offsets,
        query_offsets=None if counts is None else _offsets(counts),
        indices=None,
        biases=Biases(
            owned.prior_weights,
            position_bias,
            age_bias,
            timestamps=None if owned.ages is None else -owned.ages,
            request_time=None if owned.ages is None else zeros,
            dropout=draw_dropout(options.dropout_threshold, absorbed_query.device),
        ),
        row_numbers=owned.positions,
        row_number_ends=zeros,
        scale=scale,
        score=options.score,
        num_levels=0,
        for_backward=torch.is_grad_enabled(),
    )
    if options.score == "softmax":
        out, lse = target_attention_with_lse(args)
        out, lse = scale_gradient(out, factor), scale_gradient(lse, factor)
        return out.view(absorbed_query.shape), lse.view(absorbed_query.shape[:2])
    out = scale_gradient(call_target_attention(*flatten(args)), factor).view(absorbed_query.shape)
    return out, out.new_empty(out.shape[0], 0)


def _offsets(lengths: Tensor) -> Tensor:
    return torch.ops.fbgemm.asynchronous_complete_cumsum(lengths)
