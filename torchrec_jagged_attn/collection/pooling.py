"""Everything after the lookups of a ``TargetAttentionEmbeddingBagCollection``."""

# torch.jit.script reads annotations, so they are no strings here.
import itertools
from typing import NamedTuple

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
from torchrec_jagged_attn.collection.requests import repeat_per_candidate
from torchrec_jagged_attn.collection.sharding.padding import PaddedJaggedTensor
from torchrec_jagged_attn.collection.sharding.tables import HistoryFeature
from torchrec_jagged_attn.modules.self_attention import HistoryEncoderLayer
from torchrec_jagged_attn.modules.target_attention import JaggedTargetAttention
from torchrec_jagged_attn.modules.target_attention_arguments import (
    check_codes,
    check_target_heads,
    packed_codes_of,
)


class _Source(NamedTuple):
    """Where rows of a sequence come from, and the column that they end in."""

    feature: str  # key of the KeyedJaggedTensor
    key: str  # of the output
    width: int
    lookup: int  # number of the EmbeddingCollection
    name: str  # what that one calls the feature


class _Attention(NamedTuple):
    """What one attention reads, and where it goes."""

    targets: list[_Source]
    histories: list[_Source]  # none where they come as codes
    features: list[str]  # keys of the KeyedJaggedTensor that the history has
    keys: list[str]  # of the output
    width: int  # of all these
    num_bytes: int  # of a row of codes; 0 where rows are looked up
    timestamps: str  # key of the KeyedJaggedTensor, empty if there are none
    request_time: str  # likewise
    user_key: str  # of the user embedding; empty without one


class _Encoder(nn.Sequential):
    """Encoder layers, one after the other; of none, rows stay as they are."""

    def forward(self, history: JaggedTensor, prior_weights: Tensor | None = None) -> JaggedTensor:
        for layer in self:
            history = layer(history, prior_weights)
        return history


class _Slice(NamedTuple):
    """Columns of one of several tensors."""

    block: int
    begin: int
    width: int
    is_whole: bool


class TargetAttentionPooling(nn.Module):
    """Pools what was looked up: histories by attention, other sequences by sum or mean.

    A module of its own, with no sharded child, is a leaf for TorchRec's tracers: what branches on
    the batch must be in here for the lookups to be pipelined.
    """

    # torch.jit.script infers neither records nor what empty lists hold.
    _targets: list[_Source]
    _singles: list[_Source]
    _attentions: list[_Attention]
    _pooled: list[tuple[list[_Source], str]]
    _slices: list[_Slice]
    _bags: list[str]

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],  # all of them, in the order of the output
        sequence_tables: list[list[EmbeddingBagConfig]],  # of each EmbeddingCollection
        bag_tables: list[EmbeddingBagConfig],  # of the EmbeddingBagCollection
        attentions: list[TargetAttentionConfig],
        is_weighted: bool,
        candidates: list[str],  # keys with an id per candidate; none where samples are candidates
        singles: list[str],  # keys with exactly one id in each sample
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
        for config in attentions:
            if config.history_codes is not None:
                _check_is_new("history", config.histories[0], widths)
                widths[config.histories[0]] = check_codes(config.history_codes, None)
        self._is_weighted, self._is_of_requests = is_weighted, bool(candidates)
        self._attentions = [_attention(config, tables, sources) for config in attentions]
        self._num_lookups = len(sequence_tables)
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
        self._singles = [source for source in sources.values() if source.feature in singles]
        modes = {table.name: pooling_type_to_str(table.pooling) for table in tables}
        pooled: dict[tuple[int, str], list[_Source]] = {}
        for (table, _), source in sources.items():
            is_pooled = source.key not in targets and source.key not in histories
            if is_pooled and source.feature not in singles:
                pooled.setdefault((source.lookup, modes[table]), []).append(source)
        self._pooled = [(of_mode, mode) for (_, mode), of_mode in pooled.items()]
        bags = {name: keys[feature] for feature, name in _names(bag_tables).items()}
        self._bags = list(bags)
        # The keys of the tensors that forward makes, in its order.
        of_candidates = [
            *([source.key] for source in self._targets),
            *(attention.keys for attention in self._attentions),
        ]
        of_samples = [
            *([source.key] for source in self._singles),
            *([source.key for source in of_mode] for of_mode, _ in self._pooled),
            *([x.user_key] for x in self._attentions if x.user_key),
            list(bags.values()),
        ]
        if candidates:
            of_samples = [list(itertools.chain.from_iterable(of_samples))]
        blocks = [*of_candidates, *of_samples]
        self._slices = _slices(widths, blocks)

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
                row_dropout=config.row_dropout,
                dropout=config.dropout,
                history_codes=config.history_codes,
                device=device,
            )
            for config, attention in zip(attentions, self._attentions, strict=True)
        )

    def forward(
        self,
        features: KeyedJaggedTensor,
        sequences: list[dict[str, JaggedTensor]],
        bags: KeyedTensor | None,
        indices: dict[str, Tensor] | None = None,
        keep_dtype: bool = False,
        is_empty: bool = False,
    ) -> KeyedTensor:
        """``[B, sum of widths]`` by the keys of ``EmbeddingBagCollection(tables)``, then users'; of
        requests ``[ΣT, sum of widths]``. With ``keep_dtype``, in the dtype of the sequences.

        ``sequences`` are of each EmbeddingCollection, ``bags`` of the EmbeddingBagCollection.
        Histories with gather ``indices`` ``[N]``, by their keys of the output, have values ``[U,
        D]``. ``bags`` have a sample where ``is_empty``: they are waited for at the same point on
        all ranks, or the exchanges of backward would be out of order.
        """
        looked_up = [_rows(x, sequences) for x in self._targets]
        candidates = looked_up[0]
        names = [x.feature for x in self._targets]
        rows = _rows_of_features(looked_up, names, "target", self._is_of_requests)
        targets: dict[str, Tensor] = {}
        blocks: list[Tensor] = []
        for i, x in enumerate(self._targets):
            targets[x.key] = rows[i]
            weighted = rows[i]
            if self._is_weighted:
                weighted = weighted * _weights(features, x.feature).unsqueeze(1)
            blocks.append(weighted)
        # First, since queries are sent meanwhile where rows stay.
        users: list[Tensor] = []
        for i, (encode, attend) in enumerate(zip(self.encoders, self.attentions)):  # noqa: B905
            attention = self._attentions[i]
            keys = attention.features
            if attention.num_bytes > 0:
                history = _codes(features, keys, attention.num_bytes)
            else:
                history = _side_by_side([_rows(x, sequences) for x in attention.histories], keys)
            reference = history
            gathered: Tensor | None = None
            if indices is not None and attention.keys[0] in indices:
                gathered = indices[attention.keys[0]]
                reference = _of_samples(gathered, history)
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
            if self._is_of_requests:
                target = _of_samples(joined, candidates)
            pooled_history = attend(
                target, history, timestamps, weights, indices=gathered, request_time=request_time
            )
            blocks.append(pooled_history)
            if attention.user_key != "":
                users.append(_newest_rows(history))
        singles = [_rows(x, sequences) for x in self._singles]
        names = [x.feature for x in self._singles]
        rows = _rows_of_features(singles, names, "single_id_features", False)
        of_samples: list[Tensor] = []
        for i, x in enumerate(self._singles):
            single = rows[i]
            if self._is_weighted:
                single = (single * _weights(features, x.feature).unsqueeze(1)).to(single.dtype)
            of_samples.append(single)
        for of_mode, mode in self._pooled:
            pooled_weights: list[Tensor] | None = None
            if self._is_weighted:
                pooled_weights = [_weights(features, x.feature) for x in of_mode]
            pooled = [_rows(x, sequences) for x in of_mode]
            of_samples.append(_segment_reduce(pooled, pooled_weights, mode))
        of_samples = of_samples + users
        blocks = _waited_for(blocks)
        # Last, so that the exchange of the pooled rows between ranks overlaps with the attention.
        if bags is not None:
            of_bags = _in_order(bags, self._bags)
            of_samples.append(of_bags[:0] if is_empty else of_bags)
        if self._is_of_requests and len(of_samples) > 0:
            of_samples = [repeat_per_candidate(_join(of_samples), candidates)]
        blocks = blocks + of_samples
        values = _join([_columns(blocks[x.block], x) for x in self._slices])
        if keep_dtype:
            values = values.to(candidates.values().dtype)
        return KeyedTensor(keys=self._keys, length_per_key=self._widths, values=values)

    def histories(self) -> list[dict[str, HistoryFeature]]:
        """The histories of each lookup, by what it calls their rows."""
        histories: list[dict[str, HistoryFeature]] = [{} for _ in range(self._num_lookups)]
        capacities = self.capacities()
        for attention, encoder in zip(self._attentions, self.encoders, strict=True):
            stays = not any(encoder.children()) and len(attention.histories) == 1
            for source in attention.histories:
                histories[source.lookup][source.name] = HistoryFeature(
                    source.feature,
                    source.key,
                    stays,
                    attention.timestamps,
                    attention.request_time,
                    self._is_weighted,
                    capacities[source.feature],
                )
        return histories

    def capacities(self) -> dict[str, str]:
        """Names of the capacities of histories and their timestamps, by keys of batches.

        Features with equal numbers of rows share a capacity, which has the name of one of them.
        """
        names: dict[str, str] = {}
        for attention in self._attentions:
            keys = [*attention.features, *([attention.timestamps] if attention.timestamps else [])]
            known = {names[key] for key in keys if key in names}
            names |= {key: attention.features[0] for key, name in names.items() if name in known}
            names |= dict.fromkeys(keys, attention.features[0])
        return names

    def fixed_rows(self) -> list[set[str]]:
        """The features of each lookup that have one row per sample or candidate, by their names in
        its output.
        """
        fixed_rows: list[set[str]] = [set() for _ in range(self._num_lookups)]
        for source in (*self._targets, *self._singles):
            fixed_rows[source.lookup].add(source.name)
        return fixed_rows

    def fixed_keys(self) -> set[str]:
        """The keys of batches that have one value per sample or candidate."""
        keys = {source.feature for source in (*self._targets, *self._singles)}
        return keys | {x.request_time for x in self._attentions if x.request_time}


def _names(tables: list[EmbeddingBagConfig]) -> dict[tuple[str, str], str]:
    """What a lookup calls each table's feature: ``feature@table`` where several tables hold it."""
    return {
        (table.name, feature): name
        for table, names in zip(tables, get_embedding_names_by_table(tables), strict=True)
        for feature, name in zip(table.feature_names, names, strict=True)
    }


def _rows(source: _Source, sequences: list[dict[str, JaggedTensor]]) -> JaggedTensor:
    """Those of ``source``, among what all lookups give."""
    return sequences[source.lookup][source.name]


def _sources(
    sequence_tables: list[list[EmbeddingBagConfig]], keys: dict[tuple[str, str], str]
) -> dict[tuple[str, str], _Source]:
    """Where the rows of each table's feature come from; ``keys`` are those of the output."""
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
        width = check_codes(config.history_codes, None)
        num_bytes = packed_codes_of(config.history_codes).num_bytes
    times = config.timestamps or "", config.request_time or ""
    return _Attention(targets, histories, features, keys, width, num_bytes, *times, user_key)


def _encoder(config: TargetAttentionConfig, width: int, device: torch.device | None) -> _Encoder:
    encoder = config.encoder
    if encoder is None:
        return _Encoder()
    num_heads = config.num_heads
    if num_heads is None:
        num_heads = min(4, check_target_heads(None, width))
    return _Encoder(
        *(
            HistoryEncoderLayer(
                width,
                num_heads,
                dropout=encoder.dropout,
                causal=encoder.causal,
                window=encoder.window,
                recency_bias=config.recency_bias,
                row_dropout=config.row_dropout,
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


def _columns(block: Tensor, of: _Slice) -> Tensor:
    return block if of.is_whole else block.narrow(1, of.begin, of.width)


def _slices(widths: dict[str, int], blocks: list[list[str]]) -> list[_Slice]:
    """Where columns of the output (keys and ``widths``) lie, from left to right, in tensors of the
    keys ``blocks``: as few slices as there can be.
    """
    begins = {}
    for block, keys in enumerate(blocks):
        ends = itertools.accumulate(widths[key] for key in keys)
        begins |= {key: (block, end - widths[key]) for key, end in zip(keys, ends, strict=True)}
    of_blocks = [sum(widths[key] for key in keys) for keys in blocks]
    slices: list[_Slice] = []
    for key, width in widths.items():
        block, begin = begins[key]
        if slices and slices[-1].block == block and sum(slices[-1][1:3]) == begin:
            begin, width = slices[-1].begin, slices.pop().width + width
        slices.append(_Slice(block, begin, width, width == of_blocks[block]))
    return slices


def _join(tensors: list[Tensor], dim: int = 1) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=dim)


# What branches on the batch is a leaf for FX. torch.jit.script compiles these, but not the checks.


@torch.fx.wrap
def _rows_of_features(
    sequences: list[JaggedTensor], names: list[str], argument: str, is_of_requests: bool
) -> list[Tensor]:
    """``[B, D]`` rows of each feature, one per sample; of candidates of requests, ``[ΣT, D]``."""
    if not is_scripting():
        if is_of_requests:
            for sequence, name in zip(sequences[1:], names[1:], strict=True):
                check_equal_lengths(sequence, name, sequences[0], names[0])
        else:
            check_single_rows(sequences, names, argument)
    return [sequence.values() for sequence in sequences]


@torch.fx.wrap
def _of_samples(rows: Tensor, like: JaggedTensor) -> JaggedTensor:
    """``rows`` as those of ``like`` are divided among samples."""
    return JaggedTensor(rows, lengths=like.lengths(), offsets=like.offsets())


@torch.fx.wrap
def _segment_reduce(
    sequences: list[JaggedTensor], weights: list[Tensor] | None, mode: str
) -> Tensor:
    """``[B, F D]`` sum or mean of each sample's rows in ``F`` sequences, zero for none.

    As FBGEMM takes it: added up in fp32 and rounded to the dtype of the rows, and the mean of
    weighted rows is divided by their number.
    """
    if not is_scripting() and _have_padding(sequences):
        return _segment_reduce_padded(sequences, weights, mode)
    looked_up = _join([sequence.values() for sequence in sequences], 0)
    rows = looked_up.float()
    if weights is not None:
        rows = rows * _join(weights, 0).unsqueeze(1)
    lengths = _join([sequence.lengths() for sequence in sequences], 0)
    reduced = torch.segment_reduce(rows, mode, lengths=lengths, initial=0, unsafe=True)
    by_sample = reduced.view(len(sequences), -1, rows.shape[1]).transpose(0, 1)
    return by_sample.to(looked_up.dtype, memory_format=torch.contiguous_format).flatten(1)


def _have_padding(sequences: list[JaggedTensor]) -> bool:
    return len(sequences) > 1 and any(isinstance(x, PaddedJaggedTensor) for x in sequences)


def _segment_reduce_padded(
    sequences: list[JaggedTensor], weights: list[Tensor] | None, mode: str
) -> Tensor:
    """:func:`_segment_reduce` of each sequence by itself, since padding is between them. Gradients
    of padding are zero.
    """
    reduced = [
        _segment_reduce([sequence], None if weights is None else [weights[i]], mode)
        for i, sequence in enumerate(sequences)
    ]
    return torch.cat(reduced, dim=1)


@torch.fx.wrap
def _in_order(bags: KeyedTensor, names: list[str]) -> Tensor:
    """``[B, sum of widths]`` of all bags; sharded in several ways, they come in another order."""
    if not is_scripting():
        check_bags(bags)
    if bags.keys() == names:
        return bags.values()
    columns = bags.to_dict()
    return torch.cat([columns[name] for name in names], dim=1)


@torch.fx.wrap
def _side_by_side(sequences: list[JaggedTensor], names: list[str]) -> JaggedTensor:
    """The rows of equally long sequences, concatenated to ``[N, sum of widths]``."""
    first = sequences[0]
    if len(sequences) == 1:
        return first
    if not is_scripting():
        for sequence, name in zip(sequences, names, strict=True):
            check_equal_lengths(sequence, name, first, names[0])
    return _of_samples(torch.cat([sequence.values() for sequence in sequences], dim=1), first)


@torch.fx.wrap
def _codes(features: KeyedJaggedTensor, names: list[str], num_bytes: int) -> JaggedTensor:
    """``[N, num_bytes]`` uint8: the first bytes of the int64 values of ``names``."""
    packed = [read_feature(features, name) for name in names]
    history = _side_by_side([_of_samples(x.values().unsqueeze(1), x) for x in packed], names)
    rows = history.values()
    if is_scripting():  # which knows no view of other numbers
        shifts = 8 * torch.arange(8, device=rows.device)
        bytes_of = torch.bitwise_right_shift(rows.unsqueeze(2), shifts).to(torch.uint8).flatten(1)
        return _of_samples(bytes_of[:, :num_bytes], history)
    if rows.dtype != torch.int64:
        raise TypeError(f"codes of {names} must be int64, got {rows.dtype}")
    return _of_samples(rows.contiguous().view(torch.uint8)[:, :num_bytes], history)


@torch.fx.wrap
def _waited_for(blocks: list[Tensor]) -> list[Tensor]:
    """All of ``blocks``, of which attention over rows that stay is yet to be waited for."""
    if not is_scripting():
        return [x.wait() if isinstance(x, Awaitable) else x for x in blocks]
    return blocks


@torch.fx.wrap
def _newest_rows(history: JaggedTensor) -> Tensor:
    """``[B, E]``: the last row of each history, zeros of one that is empty."""
    rows, offsets = history.values(), history.offsets()
    is_empty = offsets[1:] == offsets[:-1]
    padded = torch.cat([rows.new_zeros(1, rows.shape[1]), rows])
    return padded.index_select(0, offsets[1:].masked_fill(is_empty, 0))


@torch.fx.wrap
def _timestamps(
    features: KeyedJaggedTensor, name: str, history: JaggedTensor, history_name: str
) -> Tensor:
    """``[N]`` times of the rows of ``history``."""
    timestamps = read_feature(features, name)
    if not is_scripting():
        check_equal_lengths(timestamps, name, history, history_name)
    return timestamps.values()


@torch.fx.wrap
def _request_time(features: KeyedJaggedTensor, name: str) -> Tensor:
    """``[B]``, when each sample is scored."""
    times = read_feature(features, name)
    if not is_scripting():
        check_single_rows([times], [name], "request_time", "integer")
    return times.values()


@torch.fx.wrap
def _weights(features: KeyedJaggedTensor, name: str) -> Tensor:
    """``[N]`` weights of the rows of ``name``."""
    return read_feature(features, name).weights()


@torch.fx.wrap
def _prior_weights(features: KeyedJaggedTensor, name: str) -> Tensor:
    """:func:`_weights` of a history, of rows before they are compared with a target."""
    weights = _weights(features, name)
    if not is_scripting():
        check_history_weights(weights, name)
    return weights
