"""``TargetAttentionEmbeddingBagCollection``: an EmbeddingBagCollection that attends to a target."""

# FX and torch.jit.script read annotations, so they are no strings here.
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_configs import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    pooling_type_to_str,
)
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_jagged_attn.layout import should_validate
from torchrec_jagged_attn.modules.self_attention import HistoryEncoderLayer
from torchrec_jagged_attn.modules.target_attention import JaggedTargetAttention

__all__ = [
    "TargetAttentionConfig",
    "TargetAttentionEmbeddingBagCollection",
    "embedding_parameters",
]


@dataclass
class TargetAttentionConfig:
    """Which history attends to which target, and how.

    Side information rides along: with several targets and histories, their rows are laid side by
    side and attended together, once, over the sum of their widths.

    Args:
        target: feature, or features, with exactly one id per sample.
        history: as many features, oldest id first, pooled by attention to ``target``. Several must
            have equal lengths: they describe the same events.
        num_heads: ``H``, a divisor of the summed width of the histories.
        timestamps: key of the KeyedJaggedTensor with one integer time per history row, in any
            unit. It is not embedded, so no table may hold it. It is read after the lookups, so a
            pipeline must not be told ``free_features_storage_early=True``.
        recency_bias: whether scores have a learned bias by position in the history, and by age
            where there are ``timestamps``.
        init: ``"recency"`` or ``"mha"``, as in :class:`JaggedTargetAttention`.
        encoder_layers: how many times the rows of a history first attend to each other, each time
            in a :class:`HistoryEncoderLayer` of ``num_heads``.

    Example:
        >>> config = TargetAttentionConfig(target=["item", "tag"], history=["items", "tags"])
        >>> config.num_heads
        4
    """

    target: str | list[str]
    history: str | list[str]
    num_heads: int = 4
    timestamps: str | None = None
    recency_bias: bool = True
    init: Literal["recency", "mha"] = "recency"
    encoder_layers: int = 0

    @property
    def targets(self) -> list[str]:
        """The target features, always as a list."""
        return [self.target] if isinstance(self.target, str) else list(self.target)

    @property
    def histories(self) -> list[str]:
        """The history features, always as a list."""
        return [self.history] if isinstance(self.history, str) else list(self.history)


class TargetAttentionEmbeddingBagCollection(nn.Module):
    r"""An EmbeddingBagCollection whose histories are pooled by attention to the sample's target.

    It takes the place of ``EmbeddingBagCollection(tables)`` in a model such as
    ``torchrec.models.dlrm.DLRM``: same input, and an output with the same keys, in the same order
    and widths. For a history with rows :math:`x_n` and its target's row :math:`t`, the sum becomes

    .. math:: \sum_n x_n \quad\to\quad \mathrm{JaggedTargetAttention}(t, x)

    and every other feature is pooled by sum or mean, as its table says.

    Tables that hold a target or a history live in ``embedding_collection``, the others in
    ``embedding_bag_collection`` (``None`` where there is no other), so that TorchRec's planner and
    sharders find the two modules they know. A feature pooled by sum or mean costs the communication
    of its single rows when it shares a table with a target or a history.

    Args:
        tables: as for EmbeddingBagCollection. Those that hold a target or a history have one
            ``embedding_dim``, a multiple of 4.
        attentions: one entry per attention. A history belongs to one entry, a target to any number.
        device: of all parameters; CPU by default.

    Raises:
        ValueError: tables and attentions do not fit together.

    Example:
        >>> tables = [
        ...     EmbeddingBagConfig(
        ...         name="t_item", embedding_dim=8, num_embeddings=9, feature_names=["item", "hist"]
        ...     ),
        ...     EmbeddingBagConfig(
        ...         name="t_user", embedding_dim=8, num_embeddings=5, feature_names=["user"]
        ...     ),
        ... ]
        >>> collection = TargetAttentionEmbeddingBagCollection(
        ...     tables, [TargetAttentionConfig(target="item", history="hist")]
        ... )
        >>> features = KeyedJaggedTensor(
        ...     keys=["item", "hist", "user"],
        ...     values=torch.tensor([1, 2, 3, 4, 5, 0, 1]),
        ...     lengths=torch.tensor([1, 1, 0, 3, 1, 1]),  # item, then hist, then user
        ... )
        >>> pooled = collection(features)
        >>> pooled.keys(), pooled.values().shape
        (['item', 'hist', 'user'], torch.Size([2, 24]))
    """

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        attentions: list[TargetAttentionConfig],
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        tables = [
            dataclasses.replace(table, feature_names=list(table.feature_names) or [table.name])
            for table in tables
        ]
        _check_configs(tables, attentions)
        attended = {name for config in attentions for name in config.targets + config.histories}
        sequence_tables = [table for table in tables if attended & set(table.feature_names)]
        bag_tables = [table for table in tables if not attended & set(table.feature_names)]

        self._tables = tables
        self._device = torch.device("cpu") if device is None else device
        self.embedding_collection = EmbeddingCollection(
            [_embedding_config(table) for table in sequence_tables], device=device
        )
        self.embedding_bag_collection = (
            EmbeddingBagCollection(bag_tables, device=device) if bag_tables else None
        )
        self.pooling = _Pooling(tables, sequence_tables, bag_tables, attentions, device)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Embed and pool ``features``.

        Args:
            features: unweighted, with all features of the tables and all timestamps, in any order.
                With sharded tables, keys may differ in batch size and have ``inverse_indices``: a
                user's history is then sent and looked up once for all samples that have it.

        Returns:
            ``[B, sum of widths]`` by the keys of ``EmbeddingBagCollection(tables)``.

        Raises:
            KeyError: a feature is missing.
            ValueError: a target without exactly one id in each sample, or histories (and
                timestamps) of one attention with different lengths. Counts of rows are always
                checked; the lengths of each sample on CPU, and on CUDA with
                ``TORCHREC_JAGGED_ATTN_VALIDATE=1``. No sample, weights, missing timestamps, or
                batch sizes that vary by feature without ``inverse_indices``.
            NotImplementedError: batch sizes that vary by feature, of tables that are not sharded,
                or on CPU with gradients.
        """
        _check_features(features, isinstance(self.embedding_collection, ShardedModule))
        sequences = self.embedding_collection(features)
        bags = None
        if self.embedding_bag_collection is not None:
            bags = self.embedding_bag_collection(features)
        return self.pooling(features, sequences, bags)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """All tables, as EmbeddingBagCollection gives them."""
        return self._tables

    def is_weighted(self) -> bool:
        """False: rows of a KeyedJaggedTensor with weights are not pooled."""
        return False

    @property
    def device(self) -> torch.device:
        """Where the tables were made."""
        return self._device


class _Pooling(nn.Module):
    """Everything after the lookups.

    A module of its own, with no sharded child, is a leaf for TorchRec's tracers: what branches on
    the batch must be in here for the two collections to be pipelined.
    """

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        sequence_tables: list[EmbeddingBagConfig],
        bag_tables: list[EmbeddingBagConfig],
        attentions: list[TargetAttentionConfig],
        device: torch.device | None,
    ) -> None:
        super().__init__()
        # A feature is called "feature@table" in the output where several of *all* tables hold it,
        # and in each collection where several of *its* tables do.
        names_by_table = get_embedding_names_by_table(tables)
        self._keys = [name for names in names_by_table for name in names]
        self._widths = [table.embedding_dim for table in tables for _ in table.feature_names]
        output_names = {
            table.name: names for table, names in zip(tables, names_by_table, strict=True)
        }

        def keys(part: list[EmbeddingBagConfig]) -> Iterator[tuple[EmbeddingBagConfig, str, str]]:
            """Each table of a collection, with the names of a feature in it and in the output."""
            for table, names in zip(part, get_embedding_names_by_table(part), strict=True):
                for name, output_name in zip(names, output_names[table.name], strict=True):
                    yield table, name, output_name

        histories = {name for config in attentions for name in config.histories}
        targets = {name for config in attentions for name in config.targets}
        self._target_keys = sorted(targets)
        self._pooled_keys = [
            (name, output_name, pooling_type_to_str(table.pooling))
            for table, name, output_name in keys(sequence_tables)
            if name not in histories | targets
        ]
        self._bag_keys = [(name, output_name) for _, name, output_name in keys(bag_tables)]
        self._configs = attentions
        self._width = sequence_tables[0].embedding_dim
        self.encoders = nn.ModuleList(
            nn.Sequential(
                *(
                    HistoryEncoderLayer(
                        self._width * len(config.histories),
                        config.num_heads,
                        recency_bias=config.recency_bias,
                        device=device,
                    )
                    for _ in range(config.encoder_layers)
                )
            )
            for config in attentions
        )
        self.attentions = nn.ModuleList(
            JaggedTargetAttention(
                self._width * len(config.histories),
                config.num_heads,
                recency_bias=config.recency_bias,
                age_bias=config.timestamps is not None,
                init=config.init,
                device=device,
            )
            for config in attentions
        )

    def forward(
        self,
        features: KeyedJaggedTensor,
        sequences: dict[str, JaggedTensor],
        bags: KeyedTensor | None,
    ) -> KeyedTensor:
        columns = {name: _single_rows(sequences[name], name) for name in self._target_keys}
        for name, output_name, mode in self._pooled_keys:
            columns[output_name] = _segment_reduce(sequences[name], mode)
        for config, encoder, attention in zip(
            self._configs, self.encoders, self.attentions, strict=True
        ):
            history = _side_by_side(
                [sequences[name] for name in config.histories], config.histories
            )
            timestamps = None
            if config.timestamps is not None:
                timestamps = _timestamps(features, config.timestamps, history, config.histories[0])
            attended = attention(
                torch.cat([columns[name] for name in config.targets], dim=1),
                encoder(history),
                timestamps,
            )
            for column, name in enumerate(config.histories):
                columns[name] = attended.narrow(1, column * self._width, self._width)
        # Last, so that the exchange of the pooled rows between ranks overlaps with the attention.
        if bags is not None:
            bag_columns = bags.to_dict()
            columns |= {output_name: bag_columns[name] for name, output_name in self._bag_keys}
        return KeyedTensor(
            keys=self._keys,
            length_per_key=self._widths,
            values=torch.cat([columns[name] for name in self._keys], dim=1),
        )


def embedding_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """The weights of all embedding tables in ``module``, and nothing else.

    For ``apply_optimizer_in_backward``, which would also take the weights of the attention if it
    were given ``module.parameters()``. Call it before sharding.

    Args:
        module: holds any number of EmbeddingCollections and EmbeddingBagCollections.

    Returns:
        An iterator over parameters of shape ``[num_embeddings, embedding_dim]``.

    Raises:
        ValueError: ``module`` is sharded.

    Example:
        >>> table = EmbeddingBagConfig(
        ...     name="t", embedding_dim=8, num_embeddings=9, feature_names=["item", "hist"]
        ... )
        >>> collection = TargetAttentionEmbeddingBagCollection(
        ...     [table], [TargetAttentionConfig(target="item", history="hist")]
        ... )
        >>> [weight.shape for weight in embedding_parameters(collection)]
        [torch.Size([9, 8])]
    """
    for child in module.modules():
        if isinstance(child, ShardedModule):
            raise ValueError(f"module must not be sharded yet, got a {type(child).__name__} in it")
        if isinstance(child, (EmbeddingBagCollection, EmbeddingCollection)):
            yield from child.parameters()


def _embedding_config(table: EmbeddingBagConfig) -> EmbeddingConfig:
    shared = [field.name for field in dataclasses.fields(EmbeddingConfig)]
    return EmbeddingConfig(**{name: getattr(table, name) for name in shared})


# What branches on the batch is a leaf for FX. torch.jit.script compiles these, but not the checks.


@torch.fx.wrap
def _check_features(features: KeyedJaggedTensor, sharded: bool) -> None:
    if not is_scripting():
        if features.weights_or_none() is not None:
            raise ValueError("features must have no weights, got a weighted KeyedJaggedTensor")
        if features.stride() == 0:  # which lookups fail on, each in another way
            raise ValueError("features must have at least one sample, got none")
        if features.variable_stride_per_key():
            if not sharded:
                raise NotImplementedError(
                    "features must have one batch size for all keys unless tables are sharded, "
                    f"got {features.stride_per_key()} for {features.keys()}"
                )
            if features.inverse_indices_or_none() is None:
                raise ValueError(
                    "features of several batch sizes must have inverse_indices, got none"
                )
            if features.device().type == "cpu" and torch.is_grad_enabled():
                raise NotImplementedError(
                    "features of several batch sizes must be on CUDA to train, got cpu, where "
                    "TorchRec's lookups of them have no gradient"
                )


@torch.fx.wrap
def _single_rows(sequence: JaggedTensor, name: str) -> Tensor:
    """``[B, D]`` rows of a target: as they are, since each sample has one."""
    if not is_scripting():
        _check_single_rows(sequence, name)
    return sequence.values()


@torch.fx.wrap
def _segment_reduce(sequence: JaggedTensor, mode: str) -> Tensor:
    """``[B, D]`` fp32 sum or mean of each sample's rows, zero where there are none."""
    return torch.segment_reduce(
        sequence.values().float(), mode, lengths=sequence.lengths(), initial=0, unsafe=True
    )


@torch.fx.wrap
def _side_by_side(sequences: list[JaggedTensor], names: list[str]) -> JaggedTensor:
    """The rows of equally long sequences, concatenated to ``[N, sum of widths]``."""
    first = sequences[0]
    if len(sequences) == 1:
        return first
    if not is_scripting():
        for sequence, name in zip(sequences, names, strict=True):
            _check_equal_lengths(sequence, name, first, names[0])
    return JaggedTensor(
        torch.cat([sequence.values() for sequence in sequences], dim=1),
        lengths=first.lengths(),
        offsets=first.offsets(),
    )


@torch.fx.wrap
def _timestamps(
    features: KeyedJaggedTensor, name: str, history: JaggedTensor, history_name: str
) -> Tensor:
    """``[N]`` times of the rows of ``history``."""
    if is_scripting():
        return features[name].values()
    timestamps = _of_each_sample(features, name)
    _check_equal_lengths(timestamps, name, history, history_name)
    return timestamps.values()


def _of_each_sample(features: KeyedJaggedTensor, name: str) -> JaggedTensor:
    """The rows of timestamps, repeated where several samples have them, as lookups do."""
    keys = features.keys()
    if name not in keys:
        raise ValueError(f"features must have the timestamps {name!r}, got {keys}")
    timestamps = features[name]
    if not features.variable_stride_per_key():
        return timestamps
    keys, inverse_indices = features.inverse_indices()
    lengths, values, _ = torch.ops.fbgemm.permute_1D_sparse_data(
        inverse_indices[keys.index(name)].int(), timestamps.lengths(), timestamps.values()
    )
    return JaggedTensor(values, lengths=lengths)


def _check_single_rows(sequence: JaggedTensor, name: str) -> None:
    message = f"target {name!r} must have exactly one id in each sample, got "
    lengths = sequence.lengths()
    if should_validate(lengths) and (wrong := torch.nonzero(lengths != 1)).numel():
        sample = int(wrong[0])
        raise ValueError(f"{message}{int(lengths[sample])} in sample {sample}")
    rows, samples = sequence.values().shape[0], lengths.numel()
    _check_equal(rows, samples, lambda: f"{message}{rows} in {samples} samples")


def _check_equal_lengths(
    sequence: JaggedTensor, name: str, reference: JaggedTensor, reference_name: str
) -> None:
    message = f"{name!r} must be as long as {reference_name!r} in each sample, got "
    lengths, expected = sequence.lengths(), reference.lengths()
    if should_validate(lengths) and (wrong := torch.nonzero(lengths != expected)).numel():
        sample = int(wrong[0])
        raise ValueError(
            f"{message}{int(lengths[sample])} and {int(expected[sample])} in sample {sample}"
        )
    rows, expected_rows = sequence.values().shape[0], reference.values().shape[0]
    _check_equal(rows, expected_rows, lambda: f"{message}{rows} and {expected_rows} rows in all")


def _check_equal(rows: int, expected: int, message: Callable[[], str]) -> None:
    """In eager mode a ValueError; while compiling a fact, which the program checks as it runs."""
    if torch.compiler.is_compiling():
        torch._check(rows == expected)
    elif rows != expected:
        raise ValueError(message())


def _check_configs(
    tables: list[EmbeddingBagConfig], attentions: list[TargetAttentionConfig]
) -> None:
    if not tables:
        raise ValueError("tables must hold at least one EmbeddingBagConfig, got none")
    if not attentions:
        raise ValueError("attentions must hold at least one TargetAttentionConfig, got none")
    if repeated := _repeated(table.name for table in tables):
        raise ValueError(f"tables must have different names, got {repeated} more than once")

    histories = [name for config in attentions for name in config.histories]
    targets = [name for config in attentions for name in config.targets]
    for config in attentions:
        if not config.histories or len(config.targets) != len(config.histories):
            raise ValueError(
                "target and history must name equally many features, at least one, "
                f"got {config.target!r} and {config.history!r}"
            )
    if repeated := _repeated(histories):
        raise ValueError(f"history must be attended once, got {repeated} more than once")
    if both := sorted(set(histories) & set(targets)):
        raise ValueError(f"target must be no history of any attention, got {both}")

    holders: dict[str, list[EmbeddingBagConfig]] = {}
    for table in tables:
        for name in table.feature_names:
            holders.setdefault(name, []).append(table)
    for argument, names in (("target", targets), ("history", histories)):
        for name in names:
            if name not in holders:
                raise ValueError(
                    f"{argument} must be a feature of tables, one of {list(holders)}, got {name!r}"
                )
            if len(holders[name]) > 1:
                in_tables = [table.name for table in holders[name]]
                raise ValueError(
                    f"{argument} must be a feature of one table, got {name!r} in {in_tables}"
                )
    widths = {name: holders[name][0].embedding_dim for name in targets + histories}
    width = widths[histories[0]]
    if set(widths.values()) != {width} or width % 4 != 0:
        raise ValueError(
            "tables that hold a target or a history must have one embedding_dim, a multiple of 4, "
            f"got {widths}"
        )
    for config in attentions:
        embed_dim = width * len(config.histories)
        if config.num_heads < 1 or embed_dim % config.num_heads != 0:
            raise ValueError(
                f"num_heads must divide the {embed_dim} columns of history {config.history!r}, "
                f"got {config.num_heads}"
            )
        if config.encoder_layers < 0:
            raise ValueError(f"encoder_layers must be at least 0, got {config.encoder_layers}")
        if config.timestamps in holders:
            raise ValueError(
                "timestamps must be a key that no table holds, "
                f"got {config.timestamps!r} of table {holders[config.timestamps][0].name!r}"
            )
        if config.timestamps is not None and not config.recency_bias:
            raise ValueError(
                "timestamps must go with recency_bias=True, which learns from them, "
                f"got {config.timestamps!r} and recency_bias=False"
            )


def _repeated(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]
