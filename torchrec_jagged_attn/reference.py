"""Each op in plain PyTorch, on jagged tensors and without padding: what runs on CPU.

Sums and the softmax are taken in fp32 (fp64 for fp64 inputs), as in the kernels. In names, ``B``
are samples, ``N`` their history rows (``L`` those of one sample), and ``R`` the query rows of a
sample: its targets' heads, one target after the other.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrec_jagged_attn.layout import JaggedLayout

__all__ = [
    "flash_attention",
    "flash_attention_backward",
    "target_attention",
    "target_attention_backward",
]

# History rows, and pairs of a query row and a history row, to work on at a time. It bounds what is
# made of them for attention over raw rows: lists of pairs, and rows of half precision in fp32.
SLAB_ROWS = 1 << 16
SLAB_PAIRS = 1 << 18

# Rows of queries and keys to convert at a time, of half precision or of heads that are shared: what
# a core's cache holds.
BLOCK_ROWS = 1 << 12

# Up to so many query rows a sample, lists of pairs take less time than calls for each sample. But
# they add up one history row after the other, which rounds too often where a sample has very many.
MAX_LISTED_QUERY_ROWS = 12
MAX_LISTED_HISTORY_ROWS = 1 << 12

# Multiply-adds of a sample's product from which on it takes less time with more than one thread.
LEAST_SHARED_WORK = 1 << 19

# Fractional bits of the least fp32 numbers at or above 2^(1/4), 2^(2/4) and 2^(3/4).
QUARTER_OCTAVES = (0x1837F1, 0x3504F4, 0x5744FD)


def target_attention(
    query: Tensor,
    history: Tensor,
    offsets: Tensor,
    query_offsets: Tensor | None,
    bias: Tensor | None,
    position_bias: Tensor | None,
    age_bias: Tensor | None,
    timestamps: Tensor | None,
    scale: float,
    for_backward: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``[B, T, H, D]``, ``[1, T, H, D]`` or ``[ΣT, H, D]`` queries over ``[N, D]`` rows.

    Returns the output, shaped as one query row per sample and target, and zeros for what the
    kernels keep of rounding and for their statistics: the gradient needs neither here.
    """
    if query_offsets is None:
        query = query.expand(offsets.numel() - 1, -1, -1, -1)
    out = query.new_zeros(query.shape)
    for slab in _slabs(query, offsets, query_offsets):
        x_ND = slab.history_rows(history)
        q_BRD = slab.query_rows(query) * scale
        buckets = slab.buckets(position_bias, age_bias, timestamps)
        bias_NH = slab.bias(bias, position_bias, age_bias, buckets, x_ND.dtype)
        attend = _attend_by_pairs if slab.lists_pairs else _attend_by_samples
        slab.put_query_rows(out, attend(slab, q_BRD, x_ND, bias_NH))
    rest = out.new_zeros(out.shape if for_backward and out.element_size() == 2 else [0])
    return out, rest, query.new_zeros(2, *query.shape[:-1], dtype=torch.float32)


def target_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    history: Tensor,
    offsets: Tensor,
    query_offsets: Tensor | None,
    bias: Tensor | None,
    position_bias: Tensor | None,
    age_bias: Tensor | None,
    timestamps: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of ``query``, ``history``, ``bias``, ``position_bias`` and ``age_bias``."""
    shared = query_offsets is None and query.shape[0] == 1 != grad_out.shape[0]
    queries = query.expand(grad_out.shape)
    grad_query_dtype = _compute_dtype(query) if shared else query.dtype
    grad_query = grad_out.new_zeros(grad_out.shape, dtype=grad_query_dtype)
    grad_history = None
    grad_bias = None if bias is None else bias.new_zeros(bias.shape)
    grad_tables = [
        None if table is None else table.new_zeros(table.shape, dtype=torch.float64)
        for table in (position_bias, age_bias)
    ]
    for slab in _slabs(queries, offsets, query_offsets):
        x_ND = slab.history_rows(history)
        q_BRD, grad_out_BRD = slab.query_rows(queries) * scale, slab.query_rows(grad_out)
        buckets = slab.buckets(position_bias, age_bias, timestamps)
        bias_NH = slab.bias(bias, position_bias, age_bias, buckets, x_ND.dtype)
        differentiate = _differentiate_pairs if slab.lists_pairs else _differentiate_samples
        grad_q_BRD, grad_x_ND, grad_bias_NH = differentiate(
            slab, grad_out_BRD, q_BRD, x_ND, bias_NH
        )
        slab.put_query_rows(grad_query, grad_q_BRD * scale)
        if query_offsets is None and grad_x_ND.shape == history.shape:  # all rows, in their order
            grad_history = grad_x_ND.to(history.dtype)
        else:
            grad_history = (
                history.new_zeros(history.shape) if grad_history is None else grad_history
            )
            grad_history[slab.rows] = grad_x_ND.to(history.dtype)
        if grad_bias_NH is None:
            continue
        if grad_bias is not None:
            grad_bias[slab.rows] = grad_bias_NH.to(grad_bias.dtype)
        for grad, bucket in zip(grad_tables, buckets, strict=True):
            if grad is not None and bucket is not None:
                grad.index_add_(0, bucket, grad_bias_NH.double())
    grad_history = history.new_zeros(history.shape) if grad_history is None else grad_history
    if shared:
        grad_query = grad_query.sum(0, keepdim=True).to(query.dtype)
    grad_position, grad_age = (
        None if table is None or grad is None else grad.to(table.dtype)
        for table, grad in zip((position_bias, age_bias), grad_tables, strict=True)
    )
    return grad_query, grad_history, grad_bias, grad_position, grad_age


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """While entered, the calling thread computes each product with one thread.

    A thread of the process that begins meanwhile is given one by PyTorch, too, and keeps it.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _for_each(
    work: Callable[..., None], samples: Iterable[tuple[Any, ...]], sizes: list[int]
) -> None:
    """Do ``work`` on each sample, whose products have ``sizes`` multiply-adds.

    On small samples with one thread: threads that wait for each other after each little product
    gain nothing, and wait for long where a machine has other work. Which are small depends on the
    sample alone, as its bits do.
    """
    small = []
    for sample, size in zip(samples, sizes, strict=True):
        if size < LEAST_SHARED_WORK:
            small.append(sample)
        else:
            work(*sample)
    with _one_thread():
        for sample in small:
            work(*sample)


@dataclass(frozen=True)
class _Slab:
    """Some samples of the batch, with equally many query rows each.

    Args:
        queries: where they are in the first dimension of the queries.
        num_rows: how many query rows each has.
        rows: which rows of the history they own.
        offsets: ``[B + 1]`` int32 offsets of their history rows, among themselves.
        sample_ids: ``[N]`` sample of each history row, among themselves.
        lists_pairs: whether to work on all samples at once, by lists of pairs.
    """

    queries: slice | Tensor
    num_rows: int
    rows: slice | Tensor
    offsets: Tensor
    sample_ids: Tensor
    lists_pairs: bool

    def query_rows(self, query: Tensor) -> Tensor:
        """``[B, R, D]``."""
        rows = query[self.queries].to(_compute_dtype(query))
        return rows.reshape(len(self.offsets) - 1, self.num_rows, query.shape[-1])

    def put_query_rows(self, query: Tensor, rows_BRD: Tensor) -> None:
        """Write what :meth:`query_rows` would read."""
        own = query[self.queries]
        query[self.queries] = rows_BRD.reshape(own.shape).to(query.dtype)

    def history_rows(self, history: Tensor) -> Tensor:
        """``[N, D]``."""
        return history[self.rows].to(_compute_dtype(history)).contiguous()

    def per_row(self, x_BR: Tensor) -> Tensor:
        """``[N, R]``: to each history row what its sample has."""
        return x_BR.index_select(0, self.sample_ids)

    def each(
        self, *queries: Tensor, rows: tuple[Tensor | None, ...]
    ) -> Iterator[tuple[Tensor | Any, ...]]:
        """Of each sample, its part of ``queries`` ``[B, …]`` and of ``rows`` ``[N, …]``."""
        lengths = self.offsets.diff().tolist()
        parts = (itertools.repeat(None) if x is None else x.split(lengths) for x in rows)
        return zip(*(x.unbind() for x in queries), *parts, strict=False)

    def sizes(self, q_BRD: Tensor) -> list[int]:
        """How many multiply-adds each sample's product of query rows and history rows has."""
        return (self.offsets.diff().long() * q_BRD[0].numel()).tolist()

    def buckets(
        self, position_bias: Tensor | None, age_bias: Tensor | None, timestamps: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """``[N]`` buckets of the rows' positions and ages, for the tables that there are."""
        newest = self.per_row(self.offsets[1:]) - 1
        positions = ages = None
        if position_bias is not None:
            rows = torch.arange(len(newest))
            positions = recency_buckets(newest - rows, len(position_bias))
        if age_bias is not None and timestamps is not None:
            times = timestamps[self.rows]
            times = times.long() if times.dtype == torch.int32 else times
            ages = recency_buckets((times[newest] - times).clamp(min=0), len(age_bias))
        return positions, ages

    def bias(
        self,
        bias: Tensor | None,
        position_bias: Tensor | None,
        age_bias: Tensor | None,
        buckets: tuple[Tensor | None, Tensor | None],
        dtype: torch.dtype,
    ) -> Tensor | None:
        """``[N, H]`` sum of all biases."""
        parts = [] if bias is None else [bias[self.rows].to(dtype)]
        for table, bucket in zip((position_bias, age_bias), buckets, strict=True):
            if table is not None and bucket is not None:
                parts.append(table.to(dtype).index_select(0, bucket))
        return sum(parts[1:], parts[0]) if parts else None


def _slabs(query: Tensor, offsets: Tensor, query_offsets: Tensor | None) -> Iterator[_Slab]:
    """Cut the batch into slabs, leaving out what has nothing to do.

    How a sample is worked on depends on its own numbers of rows alone, as its bits do.
    """
    lengths = offsets.diff()
    if query_offsets is None:
        groups = [(query.shape[1], torch.arange(len(lengths)))]
    else:
        targets = query_offsets.diff()
        groups = [(n, torch.nonzero(targets == n)[:, 0]) for n in targets.unique().tolist()]
    for num_targets, group in groups:
        num_rows = num_targets * query.shape[-2]
        if num_rows == 0:
            continue
        slab_rows = min(SLAB_ROWS, SLAB_PAIRS // min(num_rows, MAX_LISTED_QUERY_ROWS))
        lists = lengths[group] <= MAX_LISTED_HISTORY_ROWS
        lists &= num_rows <= MAX_LISTED_QUERY_ROWS
        slab_ids = (lengths[group].cumsum(0) - 1) // slab_rows * 2 + lists
        sizes = torch.unique_consecutive(slab_ids, return_counts=True)[1]
        for samples, lists_pairs in zip(
            group.split(sizes.tolist()), lists[sizes.cumsum(0) - 1].tolist(), strict=True
        ):
            layout = JaggedLayout.from_lengths(lengths[samples])
            if layout.num_rows == 0:
                continue
            sample_ids = layout.sample_ids()
            if query_offsets is None:
                first, last = int(samples[0]), int(samples[-1]) + 1
                queries, rows = slice(first, last), slice(int(offsets[first]), int(offsets[last]))
            else:
                queries = (query_offsets[samples, None] + torch.arange(num_targets)).flatten()
                shift = offsets[samples] - layout.offsets[:-1]
                rows = shift[sample_ids] + torch.arange(layout.num_rows)
            own = layout.offsets.int()
            yield _Slab(queries, num_rows, rows, own, sample_ids, lists_pairs)


def _attend_by_pairs(slab: _Slab, q_BRD: Tensor, x_ND: Tensor, bias_NH: Tensor | None) -> Tensor:
    """``[B, R, D]`` outputs of scaled queries, all samples at once."""
    pairs = _Pairs.of(slab)
    p_P, total_S = pairs.exp(q_BRD, x_ND, bias_NH)
    return pairs.pool(p_P, x_ND).div_(total_S.unsqueeze(1)).view_as(q_BRD)


def _differentiate_pairs(
    slab: _Slab, grad_out_BRD: Tensor, q_BRD: Tensor, x_ND: Tensor, bias_NH: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of scaled queries, of history rows and of their biases, all samples at once."""
    pairs = _Pairs.of(slab)
    p_P, total_S = pairs.exp(q_BRD, x_ND, bias_NH)
    p_P.div_(total_S.index_select(0, pairs.query_ids))
    dp_P = pairs.dots(grad_out_BRD, x_ND)
    mean_S = pairs.sum(p_P * dp_P)
    ds_P = dp_P.sub_(mean_S.index_select(0, pairs.query_ids)).mul_(p_P)
    grad_q_BRD = pairs.pool(ds_P, x_ND).view_as(q_BRD)

    place_NR = pairs.places()
    ds_NR, p_NR = (x_P[place_NR] for x_P in (ds_P, p_P))
    own_R = torch.arange(slab.num_rows, dtype=torch.int32)
    queries_NR = slab.sample_ids.int().unsqueeze(1) * slab.num_rows + own_R
    num_queries = q_BRD.shape[0] * slab.num_rows
    grad_x_ND = F.embedding_bag(
        torch.cat([queries_NR, queries_NR + num_queries], 1),
        torch.cat([q_BRD, grad_out_BRD]).flatten(0, 1),
        mode="sum",
        per_sample_weights=torch.cat([ds_NR, p_NR], 1),
    )
    if bias_NH is None:
        return grad_q_BRD, grad_x_ND, None
    return grad_q_BRD, grad_x_ND, ds_NR.unflatten(1, (-1, bias_NH.shape[1])).sum(1)


@dataclass(frozen=True)
class _Pairs:
    """All pairs of a query row and a history row of its sample, ``P`` in all.

    Those of one query row follow each other: a segment, of which there are ``S = B · R``.

    Args:
        slab: the samples.
        offsets: ``[S + 1]`` where segments begin and end.
        query_ids: ``[P]`` query row of each pair.
        history_ids: ``[P]`` history row of each pair.
    """

    slab: _Slab
    offsets: Tensor
    query_ids: Tensor
    history_ids: Tensor

    @classmethod
    def of(cls, slab: _Slab) -> _Pairs:
        """All int32: half the memory of int64, and ``SLAB_ROWS`` bounds them."""
        num_rows, lengths = slab.num_rows, slab.offsets.diff()
        num_pairs = len(slab.sample_ids) * num_rows
        lengths_S = lengths.repeat_interleave(num_rows)
        offsets = F.pad(lengths_S.cumsum(0, dtype=torch.int32), (1, 0))
        query_ids = torch.repeat_interleave(lengths_S, output_size=num_pairs)
        shift_S = slab.offsets[:-1].repeat_interleave(num_rows) - offsets[:-1]
        history_ids = torch.arange(num_pairs, dtype=torch.int32)
        history_ids += shift_S.index_select(0, query_ids)
        return cls(slab, offsets, query_ids, history_ids)

    def dots(self, q_BRD: Tensor, x_ND: Tensor, bias_P: Tensor | None = None) -> Tensor:
        """``[P]``: ``q · x + bias`` of each pair."""
        _be_warned_of_csr()
        bias_P = q_BRD.new_zeros(len(self.query_ids)) if bias_P is None else bias_P
        q_SD = q_BRD.flatten(0, 1)
        bias_SN = torch.sparse_csr_tensor(
            self.offsets, self.history_ids, bias_P, (len(q_SD), len(x_ND)), check_invariants=False
        )
        return torch.sparse.sampled_addmm(bias_SN, q_SD, x_ND.T).values()

    def exp(self, q_BRD: Tensor, x_ND: Tensor, bias_NH: Tensor | None) -> tuple[Tensor, Tensor]:
        """``[P]`` softmax before it is divided, and its ``[S]`` sums.

        Where no history row is visible, the softmax is zero and its sum one.
        """
        bias_P = None
        if bias_NH is not None:
            num_heads = bias_NH.shape[1]
            place = self.history_ids * num_heads + self.query_ids % num_heads
            bias_P = bias_NH.flatten().index_select(0, place)
        scores_P = self.dots(q_BRD, x_ND, bias_P)
        largest_S = torch.segment_reduce(scores_P, "max", offsets=self.offsets, unsafe=True)
        largest_S.clamp_(min=torch.finfo(scores_P.dtype).min)
        p_P = scores_P.sub_(largest_S.index_select(0, self.query_ids)).exp_()
        return p_P, self.sum(p_P).clamp_(min=1)

    def sum(self, x_P: Tensor) -> Tensor:
        """``[S]`` over each segment; in fp64, since one is added after the other."""
        total_S = torch.segment_reduce(x_P.double(), "sum", offsets=self.offsets, unsafe=True)
        return total_S.to(x_P.dtype)

    def pool(self, weights_P: Tensor, x_ND: Tensor) -> Tensor:
        """``[S, D]``: the weighted sum of the history rows of each segment."""
        return F.embedding_bag(
            self.history_ids, x_ND, self.offsets, mode="sum", per_sample_weights=weights_P,
            include_last_offset=True,
        )  # fmt: skip

    def places(self) -> Tensor:
        """``[N, R]``: where the pair of a history row and a query row is."""
        offsets, num_rows = self.slab.offsets, self.slab.num_rows
        before_N = self.slab.per_row(offsets[:-1] * (num_rows - 1))
        first_N = before_N.add_(torch.arange(len(before_N), dtype=torch.int32))
        step_N = self.slab.per_row(offsets.diff())
        steps_R = torch.arange(num_rows, dtype=torch.int32)
        return torch.addcmul(first_N.unsqueeze(1), step_N.unsqueeze(1), steps_R)


@functools.cache
def _be_warned_of_csr() -> None:
    """Take the warning of a process's first CSR tensor, that their support is in beta.

    What is used of it is one product, and tested.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        none = torch.zeros(1, dtype=torch.int32)
        torch.sparse_csr_tensor(none, none[:0], none[:0], (0, 0), check_invariants=False)


def _attend_by_samples(slab: _Slab, q_BRD: Tensor, x_ND: Tensor, bias_NH: Tensor | None) -> Tensor:
    """``[B, R, D]`` outputs of scaled queries, one sample after the other."""
    out_BRD = torch.empty_like(q_BRD)

    def attend(out_RD: Tensor, q_RD: Tensor, x_LD: Tensor, bias_LH: Tensor | None) -> None:
        torch.mm(_weights(q_RD, x_LD, bias_LH), x_LD, out=out_RD)

    _for_each(attend, slab.each(out_BRD, q_BRD, rows=(x_ND, bias_NH)), slab.sizes(q_BRD))
    return out_BRD


def _differentiate_samples(
    slab: _Slab, grad_out_BRD: Tensor, q_BRD: Tensor, x_ND: Tensor, bias_NH: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of scaled queries, of history rows and of their biases, sample by sample."""
    grad_q_BRD, grad_x_ND = torch.empty_like(q_BRD), torch.empty_like(x_ND)
    grad_bias_NH = None if bias_NH is None else torch.empty_like(bias_NH)

    def differentiate(
        grad_out_RD: Tensor, q_RD: Tensor, grad_q_RD: Tensor,
        x_LD: Tensor, bias_LH: Tensor | None, grad_x_LD: Tensor, grad_bias_LH: Tensor | None,
    ) -> None:  # fmt: skip
        p_RL = _weights(q_RD, x_LD, bias_LH)
        dp_RL = grad_out_RD @ x_LD.T
        ds_RL = torch.ops.aten._softmax_backward_data(dp_RL, p_RL, -1, p_RL.dtype)
        torch.mm(ds_RL, x_LD, out=grad_q_RD)
        torch.mm(ds_RL.T, q_RD, out=grad_x_LD).addmm_(p_RL.T, grad_out_RD)
        if grad_bias_LH is not None:
            grad_bias_LH.copy_(_by_target(ds_RL, grad_bias_LH).sum(0).T)

    queries = (grad_out_BRD, q_BRD, grad_q_BRD)
    rows = (x_ND, bias_NH, grad_x_ND, grad_bias_NH)
    _for_each(differentiate, slab.each(*queries, rows=rows), slab.sizes(q_BRD))
    return grad_q_BRD, grad_x_ND, grad_bias_NH


def _weights(q_RD: Tensor, x_LD: Tensor, bias_LH: Tensor | None) -> Tensor:
    """``[R, L]`` softmax over one sample's rows; zeros of a query row that sees none."""
    scores_RL = q_RD @ x_LD.T
    if bias_LH is None:
        return scores_RL.softmax(-1)
    _by_target(scores_RL, bias_LH).add_(bias_LH.T)
    return torch.ops.aten._safe_softmax(scores_RL, -1)


def _by_target(x_RL: Tensor, bias_LH: Tensor) -> Tensor:
    """``[T, H, L]``, of as many heads as ``bias_LH``."""
    num_heads = bias_LH.shape[1]
    return x_RL.view(len(x_RL) // num_heads, num_heads, x_RL.shape[1])


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def recency_buckets(distance: Tensor, num_buckets: int) -> Tensor:
    """``⌊4 log2(1 + distance)⌋``, of ``1 + distance`` rounded to fp32, at most the last bucket.

    Read from the bits of the number, so that it is the same on every device.
    """
    bits = (distance + 1).float().view(torch.int32)
    fraction = bits & 0x7FFFFF
    quarters = sum((fraction >= start).int() for start in QUARTER_OCTAVES)
    return (((bits >> 23) - 127) * 4 + quarters).clamp(0, num_buckets - 1).long()


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    bias: Tensor | None,
    position_bias: Tensor | None,
    age_bias: Tensor | None,
    timestamps: Tensor | None,
    relative_bias: Tensor | None,
    causal: bool,
    scale: float,
    needs_stats: bool,
) -> tuple[Tensor, Tensor]:
    """``[ΣLq, H, D]`` over ``[ΣLk, Hk, D]`` and ``[ΣLk, Hk, Dv]``, sample by sample.

    Returns the output ``[ΣLq, H, Dv]``, and the statistics ``[2, ΣLq, H]`` that the kernels keep:
    the largest score, times log2(e), and one by the sum of weights; zeros where no key is seen, or
    where ``needs_stats`` is false.
    """
    dtype, out = _compute_dtype(q), q.new_zeros(*q.shape[:2], v.shape[2])
    largest_MH, inverse_MH = stats = q.new_zeros(2, *q.shape[:2], dtype=dtype)
    all_keys = _all_keys(k, kv_offsets)
    buckets = all_keys.buckets(position_bias, age_bias, timestamps)
    bias_NH = all_keys.bias(bias, position_bias, age_bias, buckets, dtype)

    def attend(
        q_HLD: Tensor, out_HLD: Tensor, largest_HL: Tensor | None, inverse_HL: Tensor | None,
        k_HKD: Tensor, v_HKD: Tensor, bias_HK: Tensor | None,
    ) -> None:  # fmt: skip
        scores_HLK = torch.bmm(q_HLD, k_HKD.mT)
        p_HLK = _flash_weights(scores_HLK, bias_HK, relative_bias, causal)
        out_HLD.copy_(torch.bmm(p_HLK, v_HKD))
        if largest_HL is not None and inverse_HL is not None:
            torch.amax(scores_HLK, 2, out=largest_HL)
            torch.amax(p_HLK, 2, out=inverse_HL)

    for block in _blocks(q_offsets, kv_offsets):
        of_queries, of_keys = block.queries, block.keys
        scaled_q, parts_of_stats = q[of_queries].to(dtype) * scale, (None, None)
        if needs_stats:
            parts_of_stats = largest_MH[of_queries], inverse_MH[of_queries]
        queries = scaled_q, out[of_queries], *parts_of_stats
        keys = _by_head(k[of_keys], q), _by_head(v[of_keys], q), _rows(bias_NH, of_keys)
        _for_each(attend, *block.samples(queries, keys))
    if needs_stats:
        largest_MH.masked_fill_(inverse_MH == 0, 0).div_(math.log(2))
    return out, stats.float()


def flash_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    bias: Tensor | None,
    position_bias: Tensor | None,
    age_bias: Tensor | None,
    timestamps: Tensor | None,
    relative_bias: Tensor | None,
    grad_k: Tensor,
    grad_v: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of ``q``, ``bias``, ``position_bias``, ``age_bias`` and ``relative_bias``.

    Those of ``k`` and ``v`` are written into ``grad_k`` and ``grad_v``.
    """
    dtype = _compute_dtype(q)
    all_keys = _all_keys(k, kv_offsets)
    buckets = all_keys.buckets(position_bias, age_bias, timestamps)
    bias_NH = all_keys.bias(bias, position_bias, age_bias, buckets, dtype)
    grad_bias_NH = None if bias_NH is None else bias_NH.new_zeros(bias_NH.shape)
    grad_relative = None
    if relative_bias is not None:
        grad_relative = relative_bias.new_zeros(relative_bias.shape, dtype=torch.float64)
    grad_q = q.new_zeros(q.shape)

    def differentiate(
        q_HLD: Tensor, grad_out_HLD: Tensor, grad_q_HLD: Tensor,
        k_HKD: Tensor, v_HKD: Tensor, bias_HK: Tensor | None,
        grad_k_GKD: Tensor, grad_v_GKD: Tensor, grad_bias_HK: Tensor | None,
    ) -> None:  # fmt: skip
        p_HLK = _flash_weights(torch.bmm(q_HLD, k_HKD.mT), bias_HK, relative_bias, causal)
        dp_HLK = torch.bmm(grad_out_HLD, v_HKD.mT)
        ds_HLK = torch.ops.aten._softmax_backward_data(dp_HLK, p_HLK, 2, dtype)
        if grad_bias_HK is not None:
            grad_bias_HK.copy_(ds_HLK.sum(1))
        if grad_relative is not None:
            _, num_rows, num_keys = ds_HLK.shape
            bucket = _relative_buckets(num_rows, num_keys, len(grad_relative))
            grad_relative.index_add_(0, bucket.flatten(), ds_HLK.flatten(1).T.double())
        grad_q_HLD.copy_(torch.bmm(ds_HLK, k_HKD))
        for grad_GKD, grad_HKD in (
            (grad_k_GKD, torch.bmm(ds_HLK.mT, q_HLD)),
            (grad_v_GKD, torch.bmm(p_HLK.mT, grad_out_HLD)),
        ):
            if len(grad_GKD) != len(grad_HKD):
                grad_HKD = grad_HKD.unflatten(0, (len(grad_GKD), -1)).sum(1)
            grad_GKD.copy_(grad_HKD)

    for block in _blocks(q_offsets, kv_offsets):
        of_queries, of_keys = block.queries, block.keys
        scaled_q, grad_out_rows = q[of_queries].to(dtype) * scale, grad_out[of_queries].to(dtype)
        grad_scaled_q = torch.zeros_like(scaled_q)
        queries = scaled_q, grad_out_rows, grad_scaled_q
        keys = (
            _by_head(k[of_keys], q), _by_head(v[of_keys], q), _rows(bias_NH, of_keys),
            grad_k[of_keys], grad_v[of_keys], _rows(grad_bias_NH, of_keys),
        )  # fmt: skip
        _for_each(differentiate, *block.samples(queries, keys))
        grad_q[of_queries] = grad_scaled_q.mul_(scale).to(q.dtype)
    grad_bias, grad_position, grad_age = (
        _bias_gradient(grad_bias_NH, bucket, x)
        for bucket, x in zip((None, *buckets), (bias, position_bias, age_bias), strict=True)
    )
    if relative_bias is not None and grad_relative is not None:
        grad_relative = grad_relative.to(relative_bias.dtype)
    return grad_q, grad_bias, grad_position, grad_age, grad_relative


def _all_keys(k: Tensor, kv_offsets: Tensor) -> _Slab:
    """All key rows of the batch, for their biases."""
    layout = JaggedLayout(kv_offsets, k.shape[0])
    return _Slab(slice(0), 0, slice(None), kv_offsets, layout.sample_ids(), lists_pairs=False)


def _bias_gradient(
    grad_NH: Tensor | None, bucket: Tensor | None, x: Tensor | None
) -> Tensor | None:
    """Gradient of the bias ``x``: of the rows, or of a table that has a row for each bucket."""
    if grad_NH is None or x is None:
        return None
    if bucket is not None:
        grad_NH = grad_NH.new_zeros(x.shape, dtype=torch.float64).index_add_(
            0, bucket, grad_NH.double()
        )
    return grad_NH.to(x.dtype)


@dataclass(frozen=True)
class _Block:
    """Some samples one after the other: where the queries of each begin and end, and the keys."""

    q_offsets: list[int]
    k_offsets: list[int]

    @property
    def queries(self) -> slice:
        return slice(self.q_offsets[0], self.q_offsets[-1])

    @property
    def keys(self) -> slice:
        return slice(self.k_offsets[0], self.k_offsets[-1])

    def samples(
        self, queries: Sequence[Tensor | None], keys: Sequence[Tensor | None]
    ) -> tuple[list[tuple[Any, ...]], list[int]]:
        """Of each sample that has keys, its part of all tensors, and a product's multiply-adds.

        The first are scaled queries. The part of a tensor of the block's rows, ``[ΣL, H, …]``, is a
        view ``[H, L, …]``.
        """
        q_lengths, k_lengths = (
            [end - begin for begin, end in itertools.pairwise(offsets)]
            for offsets in (self.q_offsets, self.k_offsets)
        )
        parts = [
            itertools.repeat(None) if x is None else x.transpose(0, 1).split(lengths, 1)
            for tensors, lengths in ((queries, q_lengths), (keys, k_lengths))
            for x in tensors
        ]
        samples = list(itertools.compress(zip(*parts, strict=False), k_lengths))
        seen = [n for n in k_lengths if n]
        return samples, [q.numel() * n for (q, *_), n in zip(samples, seen, strict=True)]


def _blocks(q_offsets: Tensor, kv_offsets: Tensor) -> Iterator[_Block]:
    """All samples, in blocks of about BLOCK_ROWS rows or of one sample of more."""
    q_bounds, k_bounds = q_offsets.tolist(), kv_offsets.tolist()
    first, num_samples = 0, len(q_bounds) - 1
    for last in range(1, num_samples + 1):
        num_rows = q_bounds[last] - q_bounds[first] + k_bounds[last] - k_bounds[first]
        if last == num_samples or num_rows >= BLOCK_ROWS:
            yield _Block(q_bounds[first : last + 1], k_bounds[first : last + 1])
            first = last


def _rows(x: Tensor | None, rows: slice) -> Tensor | None:
    return None if x is None else x[rows]


def _by_head(x: Tensor, q: Tensor) -> Tensor:
    """``[N, H, D]``, in fp32 or fp64: each head of ``x`` for as many of ``q`` as read it."""
    x = x.to(_compute_dtype(x))
    group = q.shape[1] // x.shape[1]
    return x if group == 1 else x.repeat_interleave(group, 1)


def _relative_buckets(num_rows: int, num_keys: int, num_buckets: int) -> Tensor:
    """``[Lq, Lk]`` buckets of the distance between queries and keys that end together."""
    rows, keys = torch.arange(num_keys - num_rows, num_keys), torch.arange(num_keys)
    return recency_buckets((rows.unsqueeze(1) - keys).abs(), num_buckets)


def _flash_weights(
    scores_HLK: Tensor, bias_HK: Tensor | None, relative_bias: Tensor | None, causal: bool
) -> Tensor:
    """Add biases to scores; their softmax over the keys, zero where none is visible."""
    if bias_HK is None and relative_bias is None and not causal:
        return scores_HLK.softmax(2)
    num_rows, num_keys = scores_HLK.shape[1:]
    if bias_HK is not None:
        scores_HLK += bias_HK.unsqueeze(1)
    if relative_bias is not None:
        bucket = _relative_buckets(num_rows, num_keys, len(relative_bias))
        scores_HLK += relative_bias.T.to(scores_HLK.dtype)[:, bucket]
    if causal:
        hidden = torch.ones(num_rows, num_keys, dtype=torch.bool).triu(num_keys - num_rows + 1)
        scores_HLK.masked_fill_(hidden, -torch.inf)
    return torch.ops.aten._safe_softmax(scores_HLK, 2)
