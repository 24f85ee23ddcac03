"""Attention over history rows that stay on the ranks whose shards they are in.

The *home* of a sample is the rank whose batch has it, the *owner* of a row the rank whose shard has
it. Homes send queries ``[E]`` to all owners. An owner attends them over the rows that it has of
each sample, and sends back the outputs, and the logarithms of the sums that these were divided by.
A home adds up what all owners sent, in the order of their ranks: weighted by the softmax of the
logarithms, it is the output over the whole history. Backward is the mirror image, and gradients of
rows stay where the rows are. How much is sent does not depend on the lengths of histories.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_jagged_attn.arguments import TargetArguments
from torchrec_jagged_attn.modules.target_attention_arguments import Learned, Options
from torchrec_jagged_attn.ops.autocast import autocast_off
from torchrec_jagged_attn.ops.dropout import draw_dropout
from torchrec_jagged_attn.ops.target_attention import (
    call_target_attention,
    target_attention_with_lse,
)

__all__ = ["OwnedRows", "RemoteHistory", "attend_at_owners", "exchange"]


class OwnedRows(NamedTuple):
    """What this rank's shard has of a history of the samples of all ranks, one home after another.

    Attributes:
        rows: ``[N', D]``. Their gradient goes to the table.
        lengths: ``[S]`` int64, how many of them each sample has.
        places: ``[N']`` int64, of each row in its whole history, where -1 is the newest.
        ages: ``[N']`` int64, or None.
        prior_weights: ``[N']``, or None.
        rows_per_home: how many of the rows each home's samples have.
        samples_per_home: how many samples each home has.
        group: of the ranks.
    """

    rows: Tensor
    lengths: Tensor
    places: Tensor
    ages: Tensor | None
    prior_weights: Tensor | None
    rows_per_home: list[int]
    samples_per_home: list[int]
    group: dist.ProcessGroup


class RemoteHistory(JaggedTensor):
    """A history as its home has it, whose rows are on their owners: its values are NaN ``[N, D]``
    that take no memory, and ``owned`` is what this rank has of the histories of all homes.
    """

    def __init__(self, lengths: Tensor, num_rows: int, owned: OwnedRows) -> None:
        width = owned.rows.shape[1]
        super().__init__(
            owned.rows.new_full((1, 1), torch.nan).expand(num_rows, width), lengths=lengths
        )
        self.owned = owned

    def without_samples(self) -> RemoteHistory:
        """The same of a home without samples, of which owners have one that is empty."""
        return RemoteHistory(self.lengths()[:0], 0, self.owned)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, received, sent, group):
        ctx.sizes = sent, received, group
        return _all_to_all(x, received, sent, group)

    @staticmethod
    def backward(ctx, grad):
        return _all_to_all(grad, *ctx.sizes), None, None, None


def exchange(x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    """All-to-all of ``sent[r]`` rows to each rank ``r`` and ``received[r]`` from it, in their
    order; and of gradients the other way.
    """
    return _Exchange.apply(x, received, sent, group)


def _all_to_all(
    x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


class _Homes(NamedTuple):
    """How many rows of something each home has, such as samples or queries."""

    counts: list[int]
    rank: int
    group: dist.ProcessGroup

    @property
    def own(self) -> int:
        return self.counts[self.rank]

    def to_owners(self, x: Tensor) -> Tensor:
        """``[own, …]`` of this home to all owners: ``[sum of counts, …]``, of all homes."""
        copies = x.expand(len(self.counts), *x.shape).flatten(0, 1)
        return exchange(copies, self.counts, [self.own] * len(self.counts), self.group)

    def from_owners(self, x: Tensor) -> Tensor:
        """The way back: ``[ranks, own, …]``, what each owner made for this home."""
        received = [self.own] * len(self.counts)
        return exchange(x, received, self.counts, self.group).unflatten(
            0, (len(self.counts), self.own)
        )


@torch.compiler.disable()  # a compiled model breaks its graph here: ranks talk to each other
def attend_at_owners(
    query: Tensor,
    query_offsets: Tensor | None,
    history: RemoteHistory,
    learned: Learned,
    options: Options,
    dtype: torch.dtype,
) -> Tensor:
    """``JaggedTargetAttention.forward`` over rows that stay.

    Args:
        query: targets ``[B, C]``; or ``[ΣT, C]``, with ``query_offsets``.
        query_offsets: ``[B + 1]``.
        history: of ``B`` samples.
        learned: the parameters.
        options: what the module was made with.
        dtype: of products and of the output.

    Returns:
        ``[B, E]`` or ``[ΣT, E]``.

    Raises:
        NotImplementedError: somebody has replaced the values of ``history``.
    """
    if history.values().requires_grad:
        raise NotImplementedError(
            "rows of histories that stay with HistoryEmbeddingCollectionSharder must be trained in "
            "loss.backward(), got histories that were detached, as TrainPipelineSemiSync does: use "
            "TrainPipelineSparseDist"
        )
    owned, num_queries = history.owned, query.shape[0]
    rank = dist.get_rank(owned.group)
    samples = queries = _Homes(owned.samples_per_home, rank, owned.group)
    missing = samples.own - history.lengths().shape[0]  # one, where there is no sample
    counts = None
    if query_offsets is None:
        query = F.pad(query, (0, 0, 0, missing)) if missing else query
    else:
        counts = samples.to_owners(F.pad(query_offsets.diff().long(), (0, missing)))
        queries = _Homes(_gather_counts(query, owned.group), rank, owned.group)
    with autocast_off(owned.rows):
        w_q, w_k, w_v, b_q, b_v = _projections(learned, dtype)
        q = queries.to_owners(F.linear(query.to(dtype), w_q, b_q))
        of_heads = options.num_heads, w_k.shape[0] // options.num_heads
        u = torch.einsum("rhe,hed->rhd", q.unflatten(1, of_heads), w_k.unflatten(0, of_heads))
        u = u.to(owned.rows.dtype)
        pooled, lse = _attend(
            u, counts, samples, queries, history, learned, options, of_heads[1] ** -0.5
        )
        if w_v is None:  # the columns of each head
            values = pooled.unflatten(2, of_heads).diagonal(dim1=1, dim2=2).transpose(1, 2)
        else:
            by_head = w_v.unflatten(0, of_heads)
            values = torch.einsum("rhd,hed->rhe", pooled.to(dtype), by_head)
        sums = torch.promote_types(values.dtype, torch.float32)
        parts = torch.cat([values.flatten(1).to(sums), lse.to(sums)], dim=1)
        values, lse = queries.from_owners(parts)[:, :num_queries].split(
            [w_k.shape[0], lse.shape[1]], dim=2
        )
        if options.score == "softmax":
            is_empty = (lse == -torch.inf).all(0)
            weights = torch.softmax(lse.masked_fill(is_empty, 0), 0).unsqueeze(-1)
            values = values.unflatten(2, of_heads) * weights
            is_filled = ~is_empty.all(1)
        else:
            is_filled = history.lengths() > 0
            if query_offsets is not None:
                repeats = query_offsets.diff()
                is_filled = is_filled.repeat_interleave(repeats, output_size=num_queries)
        out = values.sum(0).flatten(1).to(dtype)
        if learned.out_weight is not None:
            if b_v is not None:
                out = out + is_filled.unsqueeze(1).to(dtype) * b_v
            b_out = None if learned.out_bias is None else learned.out_bias.to(dtype)
            out = F.linear(out, learned.out_weight.to(dtype), b_out)
    return out


def _projections(
    learned: Learned, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Weights of queries, keys and values, and the biases of queries and values."""
    w_q, w_k, w_v = learned.q_weight.to(dtype), learned.k_weight, learned.v_weight
    if w_k is None:
        w_q, w_k, w_v = w_q.chunk(3)
    b_q, b_v = learned.in_bias, None
    if b_q is not None and w_v is not None:
        b_q, _, b_v = b_q.chunk(3)
    w_v, b_q, b_v = (None if x is None else x.to(dtype) for x in (w_v, b_q, b_v))
    return w_q, w_k.to(dtype), w_v, b_q, b_v


def _gather_counts(x: Tensor, group: dist.ProcessGroup) -> list[int]:
    """How many rows ``x`` has on each rank."""
    counts = torch.empty(group.size(), dtype=torch.int64, device=x.device)
    dist.all_gather_into_tensor(counts, counts.new_full((1,), x.shape[0]), group=group)
    return counts.tolist()


def _attend(
    u: Tensor,
    counts: Tensor | None,
    samples: _Homes,
    queries: _Homes,
    history: RemoteHistory,
    learned: Learned,
    options: Options,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """``[R, H, D]`` of ``u`` over the rows of this owner, and their log-sum-exps ``[R, H]``; of
    other scores than the softmax, ``[R, 0]``.

    Args:
        u: ``[R, H, D]``, queries of all homes.
        counts: ``[S]``, how many of them each sample has, if not one.
        samples: how many there are.
        queries: likewise.
        history: see :class:`RemoteHistory`.
        learned: the parameters.
        options: what the module was made with.
        scale: of the scores.
    """
    owned = history.owned
    places, ends = owned.places, torch.zeros_like(owned.lengths)
    drops = options.row_drops, options.weight_drops
    seeds: list[tuple[Tensor | None, ...]] = [(None, None)]
    per_home = [[x.shape[0]] for x in (u, owned.lengths, owned.rows)]
    if any(drops):
        # Draws are by the numbers that rows and queries have at home, where queries begin at zero.
        missing = samples.own - history.lengths().shape[0]
        ends = samples.to_owners(F.pad(history.offsets()[1:].long(), (0, missing)))
        places = places + ends.repeat_interleave(owned.lengths, output_size=places.shape[0])
        seeds = _gather_seeds(drops, owned)
        per_home = [queries.counts, samples.counts, owned.rows_per_home]

    of_homes = [
        _split_all(xs, sizes)
        for xs, sizes in zip(
            (
                [u],
                [owned.lengths, ends, counts],
                [owned.rows, places, owned.ages, owned.prior_weights],
            ),
            per_home,
            strict=True,
        )
    ]
    outs, lses = [], []
    for (u,), (lengths, ends, counts), (rows, places, ages, weights), of_home in zip(
        *of_homes, seeds, strict=True
    ):
        args = TargetArguments(
            query=u.unsqueeze(1) if counts is None else u,
            history=rows,
            offsets=_offsets(lengths),
            query_offsets=None if counts is None else _offsets(counts),
            indices=None,
            bias=weights,
            position_bias=learned.position_bias,
            age_bias=learned.age_bias,
            timestamps=None if ages is None else -ages,
            request_time=None if ages is None else torch.zeros_like(lengths),
            row_dropout=of_home[0],
            dropout=of_home[1],
            places=places,
            ends=ends,
            scale=scale,
            score=options.score,
            num_levels=0,
            for_backward=torch.is_grad_enabled(),
        )
        if options.score == "softmax":
            out, lse = target_attention_with_lse(args)
        else:
            out = call_target_attention(*args)
            lse = out.new_empty(*out.shape[:-2], 0)
        outs.append(out.flatten(0, -3))
        lses.append(lse.flatten(0, -2))
    return torch.cat(outs), torch.cat(lses)


def _split_all(
    tensors: Sequence[Tensor | None], sizes: list[int]
) -> Iterator[tuple[Tensor | None, ...]]:
    none = [None] * len(sizes)
    return zip(*(none if x is None else x.split(sizes) for x in tensors), strict=True)


def _gather_seeds(drops: tuple[int, int], owned: OwnedRows) -> list[tuple[Tensor | None, ...]]:
    """What rows and weights of each home are dropped by, drawn there as any attention draws it."""
    device = owned.rows.device
    own = torch.cat(
        [
            draw_dropout(n, device) if n else torch.zeros(2, dtype=torch.int64, device=device)
            for n in drops
        ]
    )
    of_all = own.new_empty(len(owned.samples_per_home) * 4)
    dist.all_gather_into_tensor(of_all, own, group=owned.group)
    return [
        tuple(x if n else None for x, n in zip(of_home, drops, strict=True))
        for of_home in of_all.view(-1, 2, 2)
    ]


def _offsets(lengths: Tensor) -> Tensor:
    return F.pad(lengths.cumsum(0), (1, 0))
