"""``TargetAttentionConfig`` and ``EncoderConfig``: the attentions of a collection."""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from torchrec_jagged_attn.base.checks import check_bool, check_int
from torchrec_jagged_attn.codes.linear_decoder import LinearDecoder
from torchrec_jagged_attn.codes.packed_codes import PackedCodes
from torchrec_jagged_attn.modules.target_attention_arguments import (
    check_codes,
    check_options,
    packed_codes_of,
    width_of_codes,
)
from torchrec_jagged_attn.ops.attention.checks import check_window
from torchrec_jagged_attn.ops.attention.dropout import dropout_threshold


@dataclass(frozen=True)
class EncoderConfig:
    """Encoder layers: the rows of a history attend to each other before a target attends to them.

    Each layer is a :class:`HistoryEncoderLayer` with the ``num_heads`` of the attention, by default
    at most 4, and its ``recency_bias`` and ``dropout`` (of attention weights).

    Args:
        num_layers: number of layers.
        causal, window: see :class:`JaggedSelfAttention`.
        dropout: ``dropout`` of :class:`HistoryEncoderLayer`: probability, while training, that an
            element of a residual branch or of the feed-forward activations is set to zero.
        user_embedding: whether to also return the newest encoded row of each history, an embedding
            of the user that depends on no target. Its key is ``user@`` followed by the output's key
            of the (first) history, and its width is the summed width of the histories. It is zero
            for empty histories. These keys follow all others, in the order of the attentions.

    Raises:
        TypeError: an argument has another type.
        ValueError: ``num_layers`` or ``window`` is below one, ``window`` is given without
            ``causal``, or ``dropout`` is not in ``[0, 1)``.

    Example:
        >>> encoder = EncoderConfig(num_layers=2, causal=True, window=50)
        >>> config = TargetAttentionConfig("item", "hist", encoder=encoder)
    """

    num_layers: int = 1
    causal: bool = False
    window: int | None = None
    dropout: float = 0.0
    user_embedding: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_layers", check_int(self.num_layers, "num_layers", 1))
        object.__setattr__(self, "window", check_window(self.window, self.causal))
        dropout_threshold(self.dropout, "dropout")
        check_bool(self.user_embedding, "user_embedding")


@dataclass
class TargetAttentionConfig:
    """One attention of a collection: its target, its history and its options.

    Embeddings of several targets, and of several histories, are concatenated along the columns, as
    side information of the events.

    A feature of several tables is named ``feature@table``, as in the output of
    EmbeddingBagCollection.

    Args:
        target: feature, or list of features, with exactly one id per sample; with any number if the
            collection has ``candidates="jagged"``.
        history: feature, or list of features, with ids from oldest to newest, pooled by attention
            to ``target``. Several must have equal lengths: they describe the same events.
        num_heads: number of heads ``H``, which must divide the summed width ``E`` of the histories.
            ``None``, the default, chooses 8, 4, 2 or 1 by ``E``, as in
            :class:`JaggedTargetAttention`.
        score: ``"softmax"``, ``"silu"`` or ``"sigmoid"``, as in :class:`JaggedTargetAttention`.
        init: ``"recency"`` or ``"mha"``, as in :class:`JaggedTargetAttention`.
        value_projection: whether values and outputs are projected, as in
            :class:`JaggedTargetAttention`. ``None``, the default, projects with ``init="mha"`` or
            ``history_codes`` only; otherwise, pooled rows stay in the embedding space of their
            tables.
        recency_bias: whether scores have a learned bias by position in the history and, with
            ``timestamps``, by age.
        timestamps: key of the KeyedJaggedTensor with one integer time per history row, in any unit.
            It must not be a feature of a table. It is read after the lookups, so a training
            pipeline must not be given ``free_features_storage_early=True``.
        request_time: key of the KeyedJaggedTensor with exactly one integer per sample: the time of
            scoring, in the unit of ``timestamps``, which it requires. Ages are relative to it, and
            zero for newer rows. By default, ages are relative to the newest row of the history. It
            must not be a feature of a table; several attentions may share it.
        encoder: layers in which history rows attend to each other before a target attends to them.
            ``None``, the default, for no layers.
        dropout: probability, while training, that an attention weight is set to zero, in encoder
            layers, too; as in :class:`JaggedTargetAttention`.
        max_history: maximum number of history rows. Only the newest are kept, with their timestamps
            and weights; older ones are dropped before the lookups, also for other tables that pool
            the same feature. A training pipeline overlaps this with ``pipeline_postproc=True``.
            ``None``, the default, keeps all.
        history_codes: experimental: the packing of the history, if its features are codes instead
            of ids. A fitted :class:`DiscretePCA` decodes codes to rows, with a basis that is fixed
            or, if it is trainable, learned; with :class:`PackedCodes`, the codes are the rows. The
            history has no table and no lookup, but an int64 feature for each column of
            :meth:`PackedCodes.to_int64`. Its key in the output is the first feature, after the keys
            of tables. ``embedding_bag_configs`` of the collection lists it as a table with one row,
            so that a DLRM finds it. Requires ``encoder=None``.

    Raises:
        TypeError: an argument has another type.
        ValueError: an argument is out of range or unknown, or requires another one.

    Example:
        >>> config = TargetAttentionConfig(target=["item", "tag"], history=["items", "tags"])
        >>> config.histories
        ['items', 'tags']
    """

    target: str | list[str]
    history: str | list[str]
    num_heads: int | None = None
    _: KW_ONLY
    score: Literal["softmax", "silu", "sigmoid"] = "softmax"
    init: Literal["recency", "mha"] = "recency"
    value_projection: bool | None = None
    recency_bias: bool = True
    timestamps: str | None = None
    request_time: str | None = None
    encoder: EncoderConfig | None = None
    dropout: float = 0.0
    max_history: int | None = None
    history_codes: LinearDecoder | PackedCodes | None = None

    def __post_init__(self) -> None:
        for name in ("target", "history"):
            if not names_of(getattr(self, name), name):
                raise ValueError(
                    f"{name} must name at least one feature, got {getattr(self, name)}"
                )
        for name in ("timestamps", "request_time"):
            key = getattr(self, name)
            if key is not None and not isinstance(key, str):
                raise TypeError(f"{name} must be a key or None, got {key!r}")
        check_options(self.score, self.init, self.dropout, self.recency_bias, self.value_projection)
        for name in ("num_heads", "max_history"):
            if getattr(self, name) is not None:
                setattr(self, name, check_int(getattr(self, name), name, 1))
        if self.encoder is not None and not isinstance(self.encoder, EncoderConfig):
            raise TypeError(f"encoder must be an EncoderConfig or None, got {self.encoder!r}")
        if self.timestamps is not None and not self.recency_bias:
            raise ValueError(
                "recency_bias must be True with timestamps, from which it learns, got False and "
                f"timestamps={self.timestamps!r}"
            )
        if self.request_time is not None and self.timestamps is None:
            raise ValueError(
                f"timestamps must be given with request_time={self.request_time!r}, got None"
            )
        if self.history_codes is not None:
            check_codes(self.history_codes)
            num_int64 = packed_codes_of(self.history_codes).num_int64
            if len(self.histories) != num_int64:
                raise ValueError(
                    f"history must name a feature for each of the {num_int64} int64 values of "
                    f"history_codes, got {self.history!r}"
                )
            if self.encoder is not None:
                raise ValueError(f"encoder must be None with history_codes, got {self.encoder}")

    @property
    def targets(self) -> list[str]:
        """The target features as a list."""
        return names_of(self.target, "target")

    @property
    def histories(self) -> list[str]:
        """The history features as a list."""
        return names_of(self.history, "history")


def names_of(value: object, name: str) -> list[str]:
    """Return ``value``, the name of a feature or several names, as a list."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not all(isinstance(x, str) for x in names):
        raise TypeError(f"{name} must be a feature or a list of features, got {value!r}")
    return list(names)


def check_list(value: object, name: str, kind: type) -> None:
    """Check that ``value`` is a list of ``kind``."""
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name} must be a list of {kind.__name__}s, got a {type(value).__name__}")
    for item in value:
        if not isinstance(item, kind):
            raise TypeError(f"{name} must hold {kind.__name__}s, got a {type(item).__name__}")


def find_feature(
    argument: str, name: str, tables: list[EmbeddingBagConfig]
) -> tuple[EmbeddingBagConfig, str]:
    """Return table and feature of ``name``, which is ``feature`` or ``feature@table``."""
    known = [(table, feature) for table in tables for feature in table.feature_names]
    found = [
        (table, feature) for table, feature in known if name in (feature, f"{feature}@{table.name}")
    ]
    if not found:
        features = list(dict.fromkeys(feature for _, feature in known))
        raise ValueError(f"{argument} must be a feature of tables, one of {features}, got {name!r}")
    if len(found) > 1:
        choices = [f"{feature}@{table.name}" for table, feature in found]
        raise ValueError(
            f"{argument} must be one of {choices}, since several tables have {name!r}, got {name!r}"
        )
    return found[0]


def find_features(
    argument: Literal["target", "history"],
    attentions: Iterable[TargetAttentionConfig],
    tables: list[EmbeddingBagConfig],
) -> list[tuple[EmbeddingBagConfig, str]]:
    """Return table and feature of all targets, or of all histories with tables."""
    return [
        find_feature(argument, name, tables)
        for config in attentions
        for name in (config.targets if argument == "target" else table_histories(config))
    ]


def check_configs(
    tables: list[EmbeddingBagConfig], attentions: list[TargetAttentionConfig]
) -> None:
    """Check that ``tables``, whose ``feature_names`` are set, and ``attentions`` fit together."""
    if not tables:
        raise ValueError("tables must hold at least one EmbeddingBagConfig, got none")
    if repeated := _repeated(table.name for table in tables):
        raise ValueError(f"tables must have different names, got {repeated} more than once")
    for table in tables:
        try:
            nn.ModuleDict({table.name: nn.Identity()})
        except KeyError as error:  # a name with a dot, or of a method
            raise ValueError(
                f"tables must have names that torch.nn.ModuleDict accepts, got {table.name!r}"
            ) from error
    targets = {feature for _, feature in find_features("target", attentions, tables)}
    histories = find_features("history", attentions, tables)
    codes = [name for config in attentions for name in code_histories(config)]
    names = [*(f"{feature}@{table.name}" for table, feature in histories), *codes]
    if repeated := _repeated(names):
        raise ValueError(
            f"history must appear in one attention only, got {repeated} more than once"
        )
    if both := sorted(targets & {feature for _, feature in histories}):
        raise ValueError(f"target must not be a history, too, got {both}")
    for config in attentions:
        _check_config(config, tables)
    events = [config.timestamps for config in attentions] + codes
    if both := [x.request_time for x in attentions if x.request_time and x.request_time in events]:
        raise ValueError(f"request_time must differ from all timestamps and histories, got {both}")
    _check_max_history(tables, attentions)


def _check_config(config: TargetAttentionConfig, tables: list[EmbeddingBagConfig]) -> None:
    attended = {
        name: find_feature(argument, name, tables)[0]
        for argument, names in (("target", config.targets), ("history", table_histories(config)))
        for name in names
    }
    widths = {table.name: table.embedding_dim for table in attended.values()}
    if wrong := {name: width for name, width in widths.items() if width % 4 != 0}:
        raise ValueError(
            "tables that hold a target or a history must have an embedding_dim that is a multiple "
            f"of 4, got {wrong}"
        )
    if config.history_codes is None:
        embed_dim = sum(attended[name].embedding_dim for name in config.histories)
    else:
        embed_dim = width_of_codes(config.history_codes)
        for table in tables:
            if both := sorted({*config.histories} & {*table.feature_names}):
                raise ValueError(
                    "history must be a key without a table with history_codes, got "
                    f"{both}, of table {table.name!r}"
                )
    if config.num_heads is not None and embed_dim % config.num_heads != 0:
        raise ValueError(
            f"num_heads must divide the {embed_dim} columns of history {config.history!r}, "
            f"got {config.num_heads}"
        )
    for table, name in itertools.product(tables, ("timestamps", "request_time")):
        if (key := getattr(config, name)) in table.feature_names:
            raise ValueError(
                f"{name} must be a key without a table, got {key!r}, a feature of table "
                f"{table.name!r}"
            )


def table_histories(config: TargetAttentionConfig) -> list[str]:
    """Return the history features with tables."""
    return config.histories if config.history_codes is None else []


def code_histories(config: TargetAttentionConfig) -> list[str]:
    """Return the history features that are codes."""
    return [] if config.history_codes is None else config.histories


def _check_max_history(
    tables: list[EmbeddingBagConfig], attentions: list[TargetAttentionConfig]
) -> None:
    """Check that all attentions that read a key have the same ``max_history``."""
    limits: dict[str, int | None] = {}
    for config in attentions:
        for key in keys_of_history(config, tables):
            if limits.setdefault(key, config.max_history) != config.max_history:
                raise ValueError(
                    f"max_history must be one for all attentions that read {key!r}, "
                    f"got {limits[key]} and {config.max_history}"
                )


def keys_of_history(config: TargetAttentionConfig, tables: list[EmbeddingBagConfig]) -> list[str]:
    """Return all keys of a batch that describe the events of a history, timestamps last."""
    keys = [feature for _, feature in find_features("history", [config], tables)]
    keys += code_histories(config)
    return keys if config.timestamps is None else [*keys, config.timestamps]


def keys_without_tables(attentions: list[TargetAttentionConfig]) -> tuple[list[str], list[str]]:
    """Return keys of a batch that are not looked up, and the argument that names each."""
    times = {
        getattr(config, name): name
        for name in ("timestamps", "request_time")
        for config in attentions
        if getattr(config, name) is not None
    }
    codes = [name for config in attentions for name in code_histories(config)]
    arguments = times | dict.fromkeys(codes, "history_codes")
    return [*arguments], [*arguments.values()]


def keys_of_candidates(
    tables: list[EmbeddingBagConfig],
    attentions: list[TargetAttentionConfig],
    candidates: str,
    candidate_features: str | Sequence[str],
) -> list[str]:
    """Return keys with one id per candidate, targets first; none with one candidate per sample."""
    candidate_features = names_of(candidate_features, "candidate_features")
    if candidates not in ("one", "jagged"):
        raise ValueError(f"candidates must be 'one' or 'jagged', got {candidates!r}")
    if candidates == "one":
        if candidate_features:
            raise ValueError(
                "candidates must be 'jagged' with candidate_features, got 'one' and "
                f"candidate_features={candidate_features}"
            )
        return []
    features = {feature for table in tables for feature in table.feature_names}
    if unknown := [name for name in candidate_features if name not in features]:
        raise ValueError(
            f"candidate_features must be features of tables, {sorted(features)}, got {unknown}"
        )
    targets = [feature for _, feature in find_features("target", attentions, tables)]
    if not targets and not candidate_features:
        raise ValueError(
            "attentions must hold at least one TargetAttentionConfig with candidates='jagged' and "
            "no candidate_features, got none"
        )
    histories = [feature for _, feature in find_features("history", attentions, tables)]
    if both := [name for name in candidate_features if name in histories]:
        raise ValueError(f"candidate_features must not be histories, got {both}")
    return list(dict.fromkeys([*targets, *candidate_features]))


def check_single_id_features(
    tables: list[EmbeddingBagConfig],
    attentions: list[TargetAttentionConfig],
    single_id_features: str | Sequence[str],
    candidate_features: list[str],
) -> list[str]:
    """Return ``single_id_features`` as a list, after checking that none has another role."""
    single_id_features = names_of(single_id_features, "single_id_features")
    features = {feature for table in tables for feature in table.feature_names}
    features -= {*candidate_features}
    for argument in ("target", "history"):
        features -= {feature for _, feature in find_features(argument, attentions, tables)}
    if wrong := [name for name in single_id_features if name not in features]:
        raise ValueError(
            "single_id_features must be features of tables that are not targets, histories or "
            f"candidate features, {sorted(features)}, got {wrong}"
        )
    return single_id_features


def _repeated(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]
