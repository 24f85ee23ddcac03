"""``HistoryTableConfig``: a table configuration that names histories, for sharders and planners."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection


class HistoryFeature(NamedTuple):
    """A feature that is a history, and the keys of the batch that describe its events."""

    feature: str  # key in the batch
    key: str  # key in the output
    # Whether attention can read the rows on their owner ranks, and by gather indices: the history
    # has one feature and no encoder layers.
    is_local: bool
    timestamps: str  # key in the batch, or empty
    request_time: str  # key in the batch, or empty
    is_weighted: bool  # whether the batch has prior weights
    capacity: str  # name of the capacity of its rows, see ``padding.py``

    @property
    def has_ages(self) -> bool:
        """Whether ages are sent with ids."""
        return self.is_local and bool(self.timestamps)

    @property
    def has_weights(self) -> bool:
        """Whether prior weights are sent with ids."""
        return self.is_local and self.is_weighted

    @property
    def payload_width(self) -> int:
        """Numbers sent per row: its id and, of local histories, position, age and weight."""
        return 1 + self.is_local + self.has_ages + self.has_weights


@dataclass
class HistoryTableConfig(EmbeddingConfig):
    """An EmbeddingConfig of a :class:`TargetAttentionEmbeddingBagCollection`.

    Sharders and planners read it from ``EmbeddingCollection.embedding_configs()``.

    Args:
        histories: histories by their names in the output of the EmbeddingCollection.
        fixed_rows: names in this output of features with one row per sample or candidate.
    """

    histories: dict[str, HistoryFeature] = field(default_factory=dict)
    fixed_rows: set[str] = field(default_factory=set)


def set_histories(
    collection: EmbeddingCollection, histories: dict[str, HistoryFeature], fixed_rows: set[str]
) -> None:
    """Set ``histories`` and ``fixed_rows`` of the tables of ``collection``."""
    names_by_table = collection.embedding_names_by_table()
    for table, names in zip(_tables(collection), names_by_table, strict=True):
        table.histories = {name: histories[name] for name in names if name in histories}
        table.fixed_rows = fixed_rows.intersection(names)


def histories_in(collection: EmbeddingCollection) -> dict[str, HistoryFeature]:
    """Return the histories of all tables of ``collection``, by name."""
    return {name: x for table in _tables(collection) for name, x in table.histories.items()}


def fixed_rows_in(collection: EmbeddingCollection) -> set[str]:
    """Return the names of all features with one row per sample or candidate."""
    return {name for table in _tables(collection) for name in table.fixed_rows}


def _tables(collection: EmbeddingCollection) -> list[HistoryTableConfig]:
    return [x for x in collection.embedding_configs() if isinstance(x, HistoryTableConfig)]
