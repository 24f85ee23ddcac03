"""``TargetAttentionPooling``: pools the rows that a collection looked up."""

# torch.jit.script reads annotations, so they must not be strings.
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]
from torchrec.distributed.types import Awaitable
from torchrec.modules.embedding_configs import EmbeddingBagConfig, pooling_type_to_str
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_jagged_attn.collection.batch_checks import (
    check_bags,
    check_equal_lengths,
    check_history_weights,
    check_single_rows,
    read_feature,
)
from torchrec_jagged_attn.collection.config import TargetAttentionConfig, find_features
from torchrec_jagged_attn.collection.optimizers import refuse_optimizers_in_backward
from torchrec_jagged_attn.collection.requests import repeat_per_candidate
from torchrec_jagged_attn.collection.sharding.padding import PaddedJaggedTensor
from torchrec_jagged_attn.collection.sharding.tables import HistoryFeature
from torchrec_jagged_attn.modules.self_attention import HistoryEncoderLayer
from torchrec_jagged_attn.modules.target_attention import JaggedTargetAttention
from torchrec_jagged_attn.modules.target_attention_arguments import (
    default_num_heads,
    packed_codes_of,
    width_of_codes,
)


class _Source(NamedTuple):
    """A feature that is looked up by an EmbeddingCollection."""

    feature: str  # key in the batch
    key: str  # key in the output of the collection
    width: int
    lookup: int  # index of the EmbeddingCollection
    name: str  # key in the output of the EmbeddingCollection


class _Attention(NamedTuple):
    """The inputs and outputs of one attention."""

    targets: list[_Source]
    histories: list[_Source]  # empty for a history of codes
    features: list[str]  # keys of the history in the batch
    keys: list[str]  # keys of the history in the output
    width: int  # summed width of the keys
    num_bytes: int  # bytes per row of a history of codes, otherwise 0
    timestamps: str  # key in the batch, or empty
    request_time: str  # key in the batch, or empty
    user_key: str  # key of the user embedding, or empty


class _Encoder(nn.Sequential):
    """Any number of encoder layers. Without layers, it returns the history unchanged."""

    def forward(self, history: JaggedTensor, prior_weights: Tensor | None = None) -> JaggedTensor:
        for layer in self:
            history = layer(history, prior_weights)
        return history


class _Slice(NamedTuple):
    """Columns of a block. Blocks are the tensors computed, whose slices are the output."""

    block: int
    begin: int
    width: int
    is_whole_block: bool


class TargetAttentionPooling(nn.Module):
    """Pools histories by attention, and other features by sum or mean.

    It branches on the batch, which TorchRec's tracers do not support. As a module without sharded
    submodules it is a leaf for these tracers, so that training pipelines find the lookups.

    Args:
        tables: all tables, in the order of the output.
        sequence_tables: tables of each EmbeddingCollection.
        bag_tables: tables of the EmbeddingBagCollection.
        attentions: configurations of the attentions.
        is_weighted: whether batches have weights.
        candidates: keys with one id per candidate; empty with one candidate per sample.
        single_ids: keys with exactly one id per sample.
        device: device of the parameters.
    """

    # torch.jit.script infers no types of records and of empty lists.
    _targets: list[_Source]
    _histories: list[_Source]
    _single_ids: list[_Source]
    _attentions: list[_Attention]
    _pooled: list[tuple[list[_Source], str]]
    _slices: list[_Slice]
    _bag_names: list[str]

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        sequence_tables: list[list[EmbeddingBagConfig]],
        bag_tables: list[EmbeddingBagConfig],
        attentions: list[TargetAttentionConfig],
        is_weighted: bool,
        candidates: list[str],
        single_ids: list[str],
        device: torch.device | None,
    ) -> None:
        super().__init__()
        keys = _names(tables)
        sources = _sources(sequence_tables, keys)
        widths = {
            keys[table.name, name]: table.embedding_dim
            for table in tables
            for name in table.feature_names
        }
        self._is_weighted, self._has_requests = is_weighted, bool(candidates)
        self._attentions = [_attention(config, tables, sources) for config in attentions]
        self._num_lookups = len(sequence_tables)
        for attention in self._attentions:
            if attention.num_bytes > 0:
                _check_is_new("history", attention.keys[0], widths)
                widths[attention.keys[0]] = attention.width
        for attention in self._attentions:
            if attention.user_key:
                _check_is_new("user_embedding", attention.user_key, widths)
                widths[attention.user_key] = attention.width
        self._keys, self._widths = list(widths), list(widths.values())
        targets = {
            source.key: source for attention in self._attentions for source in attention.targets
        }
        targets |= {
            source.key: source for source in sources.values() if source.feature in candidates
        }
        histories = {source.key for attention in self._attentions for source in attention.histories}
        self._targets = list(targets.values())
        self._histories = [x for attention in self._attentions for x in attention.histories]
        self._single_ids = [x for x in sources.values() if x.feature in single_ids]
        modes = {table.name: pooling_type_to_str(table.pooling) for table in tables}
        pooled: dict[tuple[int, str], list[_Source]] = {}
        for (table, _), source in sources.items():
            is_pooled = source.key not in targets and source.key not in histories
            if is_pooled and source.feature not in single_ids:
                pooled.setdefault((source.lookup, modes[table]), []).append(source)
        self._pooled = [(same_mode, mode) for (_, mode), same_mode in pooled.items()]
        bags = {name: keys[feature] for feature, name in _names(bag_tables).items()}
        self._bag_names = list(bags)
        # The keys of each block that forward computes, in its order.
        candidate_blocks = [
            *([source.key] for source in self._targets),
            *(attention.keys for attention in self._attentions),
        ]
        sample_blocks = [
            *([source.key] for source in self._single_ids),
            *([source.key for source in same_mode] for same_mode, _ in self._pooled),
            *([x.user_key] for x in self._attentions if x.user_key),
            list(bags.values()),
        ]
        if candidates:
            sample_blocks = [list(itertools.chain.from_iterable(sample_blocks))]
        self._slices = _slices(widths, candidate_blocks + sample_blocks)

        self.encoders = nn.ModuleList(
            _encoder(config, attention.width, device)
            for config, attention in zip(attentions, self._attentions, strict=True)
        )
        self.attentions = nn.ModuleList(
            JaggedTargetAttention(
                attention.width,
                config.num_heads,
                target_dim=_width(attention.targets),
                recency_bias=config.recency_bias,
                age_bias=config.timestamps is not None,
                init=config.init,
                score=config.score,
                value_projection=config.value_projection,
                dropout=config.dropout,
                history_codes=config.history_codes,
                device=device,
            )
            for config, attention in zip(attentions, self._attentions, strict=True)
        )
        refuse_optimizers_in_backward(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)
        refuse_optimizers_in_backward(self)  # parameters may be new
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:  # of a copy, too
        super().__setstate__(state)
        refuse_optimizers_in_backward(self)

    def forward(
        self,
        features: KeyedJaggedTensor,
        sequences: list[dict[str, JaggedTensor]],
        bags: KeyedTensor | None,
        indices: dict[str, Tensor] | None = None,
        keep_dtype: bool = False,
        is_empty: bool = False,
    ) -> KeyedTensor:
        """Return the output of the collection.

        Args:
            features: the batch.
            sequences: output of each EmbeddingCollection.
            bags: output of the EmbeddingBagCollection.
            indices: gather indices ``[N]`` of histories with values ``[U, D]``, by their keys in
                the output.
            keep_dtype: whether the output has the dtype of the sequences.
            is_empty: whether the batch has no sample. ``bags`` has one sample then: all ranks must
                wait for it at the same point, so that backward exchanges rows in the same order.
        """
        target_rows = [_rows(x, sequences) for x in self._targets]
        names = [x.feature for x in self._targets]
        histories = [_rows(x, sequences) for x in self._histories]
        rows = _single_rows(target_rows, names, "target", self._has_requests, histories)
        targets: dict[str, Tensor] = {}
        blocks: list[Tensor] = []
        for i, x in enumerate(self._targets):
            targets[x.key] = rows[i]
            weighted = rows[i]
            if self._is_weighted:
                weighted = weighted * _weights(features, x.feature).unsqueeze(1)
            blocks.append(weighted)
        # Before pooling: with attention on owner ranks, queries are sent in the meantime.
        users: list[Tensor] = []
        for i, (encode, attend) in enumerate(zip(self.encoders, self.attentions)):  # noqa: B905
            attention = self._attentions[i]
            keys = attention.features
            if attention.num_bytes > 0:
                history = _codes(features, keys, attention.num_bytes)
            else:
                history = _concatenate_columns(
                    [_rows(x, sequences) for x in attention.histories], keys
                )
            reference = history
            gathered: Tensor | None = None
            if indices is not None and attention.keys[0] in indices:
                gathered = indices[attention.keys[0]]
                reference = _with_offsets_of(history, gathered)
            timestamps: Tensor | None = None
            if attention.timestamps != "":
                timestamps = _timestamps(features, attention.timestamps, reference, keys[0])
            request_time: Tensor | None = None
            if attention.request_time != "":
                request_time = _request_time(features, attention.request_time)
            weights: Tensor | None = None
            if self._is_weighted:
                weights = _prior_weights(features, keys[0])
            history = encode(history, weights)
            joined = _join([targets[x.key] for x in attention.targets])
            target: Tensor | JaggedTensor = joined
            if self._has_requests:
                target = _with_offsets_of(target_rows[0], joined)
            pooled_history = attend(
                target, history, timestamps, weights, indices=gathered, request_time=request_time
            )
            blocks.append(pooled_history)
            if attention.user_key != "":
                users.append(_newest_rows(history))
        single_rows = [_rows(x, sequences) for x in self._single_ids]
        names = [x.feature for x in self._single_ids]
        rows = _single_rows(single_rows, names, "single_id_features", False, [])
        sample_blocks: list[Tensor] = []
        for i, x in enumerate(self._single_ids):
            single = rows[i]
            if self._is_weighted:
                single = (single * _weights(features, x.feature).unsqueeze(1)).to(single.dtype)
            sample_blocks.append(single)
        for same_mode, mode in self._pooled:
            pooled_weights: list[Tensor] | None = None
            if self._is_weighted:
                pooled_weights = [_weights(features, x.feature) for x in same_mode]
            pooled = [_rows(x, sequences) for x in same_mode]
            sample_blocks.append(_segment_reduce(pooled, pooled_weights, mode))
        sample_blocks = sample_blocks + users
        blocks = _wait_for_all(blocks)
        # Last, so that the exchange of the pooled rows between ranks overlaps with the attention.
        if bags is not None:
            bag_block = _bag_columns(bags, self._bag_names)
            sample_blocks.append(bag_block[:0] if is_empty else bag_block)
        if self._has_requests and len(sample_blocks) > 0:
            sample_blocks = [repeat_per_candidate(_join(sample_blocks), target_rows[0])]
        blocks = blocks + sample_blocks
        values = _join([_columns(blocks[x.block], x) for x in self._slices])
        if keep_dtype and len(target_rows) > 0:
            values = values.to(target_rows[0].values().dtype)
        return KeyedTensor(keys=self._keys, length_per_key=self._widths, values=values)

    def histories(self) -> list[dict[str, HistoryFeature]]:
        """Return the histories of each EmbeddingCollection, by their names in its output."""
        histories: list[dict[str, HistoryFeature]] = [{} for _ in range(self._num_lookups)]
        capacities = self.capacities()
        for attention, encoder in zip(self._attentions, self.encoders, strict=True):
            is_local = not any(encoder.children()) and len(attention.histories) == 1
            for source in attention.histories:
                histories[source.lookup][source.name] = HistoryFeature(
                    source.feature,
                    source.key,
                    is_local,
                    attention.timestamps,
                    attention.request_time,
                    self._is_weighted,
                    capacities[source.feature],
                )
        return histories

    def capacities(self) -> dict[str, str]:
        """Return names of the capacities of histories and timestamps, by their keys in the batch.

        Features with equal numbers of rows share a capacity, whose name is one of the features.
        """
        names: dict[str, str] = {}
        for attention in self._attentions:
            keys = [*attention.features, *([attention.timestamps] if attention.timestamps else [])]
            known = {names[key] for key in keys if key in names}
            names |= {key: attention.features[0] for key, name in names.items() if name in known}
            names |= dict.fromkeys(keys, attention.features[0])
        return names

    def fixed_rows(self) -> list[set[str]]:
        """Return the features of each EmbeddingCollection with one row per sample or candidate, by
        their names in its output.
        """
        fixed_rows: list[set[str]] = [set() for _ in range(self._num_lookups)]
        for source in (*self._targets, *self._single_ids):
            fixed_rows[source.lookup].add(source.name)
        return fixed_rows

    def fixed_keys(self) -> set[str]:
        """Return the keys of the batch with one value per sample or candidate."""
        keys = {source.feature for source in (*self._targets, *self._single_ids)}
        return keys | {x.request_time for x in self._attentions if x.request_time}


def _names(tables: list[EmbeddingBagConfig]) -> dict[tuple[str, str], str]:
    """Return the name of each feature of each table in the output of a lookup: ``feature``, or
    ``feature@table`` if several tables contain the feature.
    """
    return {
        (table.name, feature): name
        for table, names in zip(tables, get_embedding_names_by_table(tables), strict=True)
        for feature, name in zip(table.feature_names, names, strict=True)
    }


def _rows(source: _Source, sequences: list[dict[str, JaggedTensor]]) -> JaggedTensor:
    """Return the rows of ``source``."""
    return sequences[source.lookup][source.name]


def _sources(
    sequence_tables: list[list[EmbeddingBagConfig]], keys: dict[tuple[str, str], str]
) -> dict[tuple[str, str], _Source]:
    """Return the source of each feature of each table, given their keys in the output."""
    sources = {}
    for lookup, tables in enumerate(sequence_tables):
        widths = {table.name: table.embedding_dim for table in tables}
        for (table, feature), name in _names(tables).items():
            key = keys[table, feature]
            sources[table, feature] = _Source(feature, key, widths[table], lookup, name)
    return sources


def _attention(
    config: TargetAttentionConfig,
    tables: list[EmbeddingBagConfig],
    sources: dict[tuple[str, str], _Source],
) -> _Attention:
    targets = [sources[t.name, key] for t, key in find_features("target", [config], tables)]
    histories = [sources[t.name, key] for t, key in find_features("history", [config], tables)]
    has_user = config.encoder is not None and config.encoder.user_embedding
    user_key = f"user@{histories[0].key}" if has_user else ""
    if config.history_codes is None:
        features, keys = [x.feature for x in histories], [x.key for x in histories]
        width, num_bytes = _width(histories), 0
    else:
        features, keys = config.histories, config.histories[:1]
        width = width_of_codes(config.history_codes)
        num_bytes = packed_codes_of(config.history_codes).num_bytes
    times = config.timestamps or "", config.request_time or ""
    return _Attention(targets, histories, features, keys, width, num_bytes, *times, user_key)


def _encoder(config: TargetAttentionConfig, width: int, device: torch.device | None) -> _Encoder:
    encoder = config.encoder
    if encoder is None:
        return _Encoder()
    num_heads = config.num_heads
    if num_heads is None:
        num_heads = min(4, default_num_heads(width))
    return _Encoder(
        *(
            HistoryEncoderLayer(
                width,
                num_heads,
                dropout=encoder.dropout,
                causal=encoder.causal,
                window=encoder.window,
                recency_bias=config.recency_bias,
                attention_dropout=config.dropout,
                device=device,
            )
            for _ in range(encoder.num_layers)
        )
    )


def _check_is_new(argument: str, key: str, keys: dict[str, int]) -> None:
    if key in keys:
        raise ValueError(
            f"{argument} must add a new key to the output, got {key!r}, which a feature has"
        )


def _width(sources: list[_Source]) -> int:
    return sum(source.width for source in sources)


def _columns(block: Tensor, columns: _Slice) -> Tensor:
    return block if columns.is_whole_block else block.narrow(1, columns.begin, columns.width)


def _slices(widths: dict[str, int], blocks: list[list[str]]) -> list[_Slice]:
    """Return the slices of the output from left to right, as few as possible.

    Args:
        widths: width of each key of the output, in order.
        blocks: keys of each block.
    """
    begins = {}
    for block, keys in enumerate(blocks):
        ends = itertools.accumulate(widths[key] for key in keys)
        begins |= {key: (block, end - widths[key]) for key, end in zip(keys, ends, strict=True)}
    block_widths = [sum(widths[key] for key in keys) for keys in blocks]
    slices: list[_Slice] = []
    for key, width in widths.items():
        block, begin = begins[key]
        if slices and slices[-1].block == block and sum(slices[-1][1:3]) == begin:
            begin, width = slices[-1].begin, slices.pop().width + width
        slices.append(_Slice(block, begin, width, width == block_widths[block]))
    return slices


def _join(tensors: list[Tensor], dim: int = 1) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=dim)


# Leaves for FX, because they branch on the batch. torch.jit.script compiles all but the checks.


@torch.fx.wrap
def _single_rows(
    sequences: list[JaggedTensor],
    names: list[str],
    argument: str,
    has_requests: bool,
    histories: list[JaggedTensor],
) -> list[Tensor]:
    """Return the rows of each feature, ``[B, D]``; of candidates of requests, ``[ΣT, D]``.
    ``histories`` are for the message of an error.
    """
    if not is_scripting():
        if has_requests:
            for sequence, name in zip(sequences[1:], names[1:], strict=True):
                kind = "candidate feature"
                check_equal_lengths(sequence, name, sequences[0], names[0], kind, kind)
        else:
            check_single_rows(sequences, names, argument, histories=histories)
    return [sequence.values() for sequence in sequences]


@torch.fx.wrap
def _with_offsets_of(like: JaggedTensor, rows: Tensor) -> JaggedTensor:
    """Return a JaggedTensor of ``rows`` with the lengths and offsets of ``like``."""
    return JaggedTensor(rows, lengths=like.lengths(), offsets=like.offsets())


@torch.fx.wrap
def _segment_reduce(
    sequences: list[JaggedTensor], weights: list[Tensor] | None, mode: str
) -> Tensor:
    """Return the sum or mean of each sample's rows in ``F`` sequences, ``[B, F D]``; zero for empty
    samples.

    Like FBGEMM, this accumulates in fp32, rounds to the dtype of the rows, and divides the mean of
    weighted rows by their number.
    """
    if not is_scripting() and _have_padding(sequences):
        return _segment_reduce_padded(sequences, weights, mode)
    values = _join([sequence.values() for sequence in sequences], 0)
    rows = values.float()
    if weights is not None:
        rows = rows * _join(weights, 0).unsqueeze(1)
    lengths = _join([sequence.lengths() for sequence in sequences], 0)
    reduced = torch.segment_reduce(rows, mode, lengths=lengths, initial=0, unsafe=True)
    by_sample = reduced.view(len(sequences), -1, rows.shape[1]).transpose(0, 1)
    return by_sample.to(values.dtype, memory_format=torch.contiguous_format).flatten(1)


def _have_padding(sequences: list[JaggedTensor]) -> bool:
    return len(sequences) > 1 and any(isinstance(x, PaddedJaggedTensor) for x in sequences)


def _segment_reduce_padded(
    sequences: list[JaggedTensor], weights: list[Tensor] | None, mode: str
) -> Tensor:
    """Apply :func:`_segment_reduce` to each sequence, because there is padding between sequences.
    Gradients of padding are zero.
    """
    reduced = [
        _segment_reduce([sequence], None if weights is None else [weights[i]], mode)
        for i, sequence in enumerate(sequences)
    ]
    return torch.cat(reduced, dim=1)


@torch.fx.wrap
def _bag_columns(bags: KeyedTensor, names: list[str]) -> Tensor:
    """Return the pooled rows of ``names``, ``[B, sum of widths]``. Lookups with several sharding
    types return them in another order.
    """
    if not is_scripting():
        check_bags(bags)
    if bags.keys() == names:
        return bags.values()
    columns = bags.to_dict()
    return torch.cat([columns[name] for name in names], dim=1)


@torch.fx.wrap
def _concatenate_columns(sequences: list[JaggedTensor], names: list[str]) -> JaggedTensor:
    """Concatenate the rows of sequences of equal lengths: ``[N, sum of widths]``."""
    first = sequences[0]
    if len(sequences) == 1:
        return first
    if not is_scripting():
        for sequence, name in zip(sequences[1:], names[1:], strict=True):
            check_equal_lengths(sequence, name, first, names[0], "history")
    return _with_offsets_of(first, torch.cat([x.values() for x in sequences], dim=1))


@torch.fx.wrap
def _codes(features: KeyedJaggedTensor, names: list[str], num_bytes: int) -> JaggedTensor:
    """Return the first bytes of the int64 values of ``names``, ``[N, num_bytes]`` uint8."""
    packed = [read_feature(features, name) for name in names]
    columns = [_with_offsets_of(x, x.values().unsqueeze(1)) for x in packed]
    history = _concatenate_columns(columns, names)
    rows = history.values()
    if is_scripting():  # torch.jit.script does not support views of another dtype
        shifts = 8 * torch.arange(8, device=rows.device)
        unpacked = torch.bitwise_right_shift(rows.unsqueeze(2), shifts).to(torch.uint8).flatten(1)
        return _with_offsets_of(history, unpacked[:, :num_bytes])
    if rows.dtype != torch.int64:
        raise TypeError(f"codes of {names} must be int64, got {rows.dtype}")
    return _with_offsets_of(history, rows.contiguous().view(torch.uint8)[:, :num_bytes])


@torch.fx.wrap
def _wait_for_all(blocks: list[Tensor]) -> list[Tensor]:
    """Wait for attention on owner ranks, whose outputs are ``LazyAwaitable[Tensor]``."""
    if not is_scripting():
        return [x.wait() if isinstance(x, Awaitable) else x for x in blocks]
    return blocks


@torch.fx.wrap
def _newest_rows(history: JaggedTensor) -> Tensor:
    """Return the last row of each history, ``[B, E]``; zeros for empty histories."""
    rows, offsets = history.values(), history.offsets()
    is_empty = offsets[1:] == offsets[:-1]
    padded = torch.cat([rows.new_zeros(1, rows.shape[1]), rows])
    return padded.index_select(0, offsets[1:].masked_fill(is_empty, 0))


@torch.fx.wrap
def _timestamps(
    features: KeyedJaggedTensor, name: str, history: JaggedTensor, history_name: str
) -> Tensor:
    """Return the timestamps of the rows of ``history``, ``[N]``."""
    timestamps = read_feature(features, name)
    if not is_scripting():
        check_equal_lengths(timestamps, name, history, history_name)
    return timestamps.values()


@torch.fx.wrap
def _request_time(features: KeyedJaggedTensor, name: str) -> Tensor:
    """Return the request time of each sample, ``[B]``."""
    times = read_feature(features, name)
    if not is_scripting():
        check_single_rows([times], [name], "request_time", "integer")
    return times.values()


@torch.fx.wrap
def _weights(features: KeyedJaggedTensor, name: str) -> Tensor:
    """Return the weights of the rows of ``name``, ``[N]``."""
    return read_feature(features, name).weights()


@torch.fx.wrap
def _prior_weights(features: KeyedJaggedTensor, name: str) -> Tensor:
    """Return the weights of the history ``name``, ``[N]``, which are prior weights of attention."""
    weights = _weights(features, name)
    if not is_scripting():
        check_history_weights(weights, name)
    return weights
