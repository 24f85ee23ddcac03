"""``TargetAttentionEmbeddingBagCollection``: pools histories by attention to a target."""

# FX and torch.jit.script read annotations, so they must not be strings.
import dataclasses
import sys
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_jagged_attn.base.checks import check_bool, check_device
from torchrec_jagged_attn.base.module_checks import check_not_fsdp
from torchrec_jagged_attn.collection.batch_checks import (
    check_features,
    check_tables_device,
    pad_empty_batch,
    set_meta_lengths,
    without_samples,
)
from torchrec_jagged_attn.collection.config import (
    TargetAttentionConfig,
    check_configs,
    check_list,
    check_single_id_features,
    find_features,
    keys_of_candidates,
    keys_of_history,
    keys_without_tables,
)
from torchrec_jagged_attn.collection.history_truncation import HistoryTruncation
from torchrec_jagged_attn.collection.optimizers import check_optimizers
from torchrec_jagged_attn.collection.pooling import TargetAttentionPooling
from torchrec_jagged_attn.collection.sharding.lookup_rows import take_rows
from torchrec_jagged_attn.collection.sharding.tables import HistoryTableConfig, set_histories
from torchrec_jagged_attn.collection.sharding.torchrec_fixes import (
    check_quantized,
    prepare_lookups,
    refuse_pruning,
)
from torchrec_jagged_attn.modules.target_attention_arguments import width_of_codes

NO_BOUND = torch.iinfo(torch.int64).max


class TargetAttentionEmbeddingBagCollection(nn.Module):
    r"""An EmbeddingBagCollection whose histories are pooled by attention to the sample's target.

    It replaces ``EmbeddingBagCollection(tables)`` in a model such as
    ``torchrec.models.dlrm.DLRM``, with the same input, and the same keys, order and widths of the
    output. For a history with rows :math:`x_n` and its target's row :math:`t`, the sum becomes

    .. math:: \sum_n x_n \quad\to\quad \mathrm{JaggedTargetAttention}(t, x)

    All other features are pooled by sum or mean, as configured by their tables. A batch of two
    samples, and its output::

        features   sample 0   sample 1       output     item    hist                     user
        item       [1]        [2]            sample 0   row 1   attention(1, [])         row 0
        hist       []         [3, 4, 5]      sample 1   row 2   attention(2, [3, 4, 5])  row 1
        user       [0]        [1]

    With ``user_embedding``, keys of user embeddings follow. Models that read features by name, such
    as DLRM, ignore them.

    Tables of targets and histories are in ``embedding_collections``, one EmbeddingCollection per
    width. The other tables are in ``embedding_bag_collection``, or it is ``None``. TorchRec's
    planner and sharders support both. The rows of a feature that is pooled by sum or mean are sent
    individually if it shares a table with a target or a history.

    ``DistributedModelParallel`` requires the sharders of both, which are its defaults:
    ``EmbeddingCollectionSharder`` and ``EmbeddingBagCollectionSharder``. On several ranks,
    :class:`HistoryEmbeddingCollectionSharder` is recommended in place of the first. The weights of
    attentions are dense: pass only :func:`embedding_parameters` to ``apply_optimizer_in_backward``.

    Args:
        tables: as for EmbeddingBagCollection. Tables of targets and histories must have an
            ``embedding_dim`` that is a multiple of 4.
        attentions: one entry per attention, or a single entry. A history is in one entry, a target
            in any number. Without entries, all features are pooled as by EmbeddingBagCollection.
        is_weighted: whether batches have weights. Pooled rows are multiplied by their weights. The
            weights of a history are the prior weights of its rows in
            :class:`JaggedTargetAttention`; an attention over several histories uses the weights of
            the first. The row of a target is multiplied by its weight in the output, but not as a
            query.
        device: device of all parameters, by default PyTorch's default device.
        single_lookup: whether pooled features are looked up together with targets and histories if
            their tables have the same width, and pooled afterwards. One sharded module instead of
            two reduces host time per step, but rows are sent to other ranks before pooling: use it
            for features of about one id per sample, or on a single rank. In state dicts, these
            tables are in ``embedding_collections``.
        candidates: ``"one"`` candidate per sample; or ``"jagged"``: a sample is a request with any
            number of candidates, also none. Targets have one id, and the output one row, per
            candidate, ``ΣT`` in total. The history of a request is sent, looked up and read once;
            other features are pooled once and repeated for each candidate. Repeat dense features
            with :func:`repeat_per_candidate`. Parameters are the same.
        candidate_features: with ``candidates="jagged"``, features besides the targets that have
            one id per candidate. Their rows are returned without pooling. As with
            ``single_lookup``, their tables are in ``embedding_collections``.
        single_id_features: features besides targets with exactly one id per sample. Their rows are
            returned without pooling, which reduces host time. If all tables without a target or a
            history contain only such features and have the width of a table with a target or a
            history, they are looked up as with ``single_lookup``, with the same number of bytes
            sent. Otherwise, tables in ``embedding_bag_collection`` pool these features like all
            others, and their lengths are not checked.

    Raises:
        TypeError: an argument has another type.
        ValueError: tables, attentions and features of candidates do not fit together.
        NotImplementedError: ``is_weighted`` with an attention of another score than the softmax.

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
        ...     tables, TargetAttentionConfig(target="item", history="hist")
        ... )
        >>> features = KeyedJaggedTensor(
        ...     keys=["item", "hist", "user"],
        ...     values=torch.tensor([1, 2, 3, 4, 5, 0, 1]),
        ...     lengths=torch.tensor([1, 1, 0, 3, 1, 1]),  # item, then hist, then user
        ... )
        >>> pooled = collection(features)
        >>> pooled.keys(), pooled.values().shape
        (['item', 'hist', 'user'], torch.Size([2, 24]))

        Requests of two candidates, and of none:

        >>> collection = TargetAttentionEmbeddingBagCollection(
        ...     tables, TargetAttentionConfig(target="item", history="hist"), candidates="jagged"
        ... )
        >>> features = KeyedJaggedTensor(
        ...     keys=["item", "hist", "user"],
        ...     values=torch.tensor([1, 2, 3, 4, 5, 0, 1]),
        ...     lengths=torch.tensor([2, 0, 1, 2, 1, 1]),  # item, then hist, then user
        ... )
        >>> collection(features).values().shape
        torch.Size([2, 24])
    """

    __jit_unused_properties__ = ["device", "embedding_bags"]  # noqa: RUF012 (scripting reads a list)
    __jit_ignored_attributes__ = ["_no_bags"]  # noqa: RUF012

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        attentions: TargetAttentionConfig | list[TargetAttentionConfig],
        is_weighted: bool = False,
        device: torch.device | None = None,
        *,
        single_lookup: bool = False,
        candidates: Literal["one", "jagged"] = "one",
        candidate_features: str | Sequence[str] = (),
        single_id_features: str | Sequence[str] = (),
    ) -> None:
        super().__init__()
        if isinstance(attentions, TargetAttentionConfig):
            attentions = [attentions]
        check_list(tables, "tables", EmbeddingBagConfig)
        check_list(attentions, "attentions", TargetAttentionConfig)
        check_bool(is_weighted, "is_weighted")
        check_bool(single_lookup, "single_lookup")
        check_device(device)
        tables = [
            dataclasses.replace(table, feature_names=list(table.feature_names) or [table.name])
            for table in tables
        ]
        check_configs(tables, attentions)
        for config in attentions:
            if is_weighted and config.score != "softmax":
                raise NotImplementedError(
                    "is_weighted must be False unless score is 'softmax' in all attentions, got "
                    f"score={config.score!r}"
                )
        keys = keys_of_candidates(tables, attentions, candidates, candidate_features)
        single_ids = check_single_id_features(tables, attentions, single_id_features, keys)
        attended = [
            *find_features("target", attentions, tables),
            *find_features("history", attentions, tables),
        ]
        by_row = {table.name for table, _ in attended}
        by_row |= {x.name for x in tables if not set(keys).isdisjoint(x.feature_names)}
        widths = {table.embedding_dim for table in tables if table.name in by_row}
        # In this case one sharded module contains all tables.
        single_lookup |= all(
            table.embedding_dim in widths and set(single_ids).issuperset(table.feature_names)
            for table in tables
            if table.name not in by_row
        )
        by_width: dict[int, list[EmbeddingBagConfig]] = {}
        bag_tables: list[EmbeddingBagConfig] = []
        for table in tables:
            if table.name in by_row or (single_lookup and table.embedding_dim in widths):
                by_width.setdefault(table.embedding_dim, []).append(table)
            else:
                bag_tables.append(table)

        self._tables = tables
        self._bag_tables = {table.name for table in bag_tables}
        self._is_weighted = is_weighted
        self._bag_features = [name for table in bag_tables for name in table.feature_names]
        # Lists: torch.jit.script cannot infer the type of an empty dict in an FX graph.
        self._others, self._arguments = keys_without_tables(attentions)
        self._num_embeddings: dict[str, int] = {}
        for table in tables:
            # All ids are valid in a virtual table.
            bound = NO_BOUND if table.use_virtual_table else table.num_embeddings
            for name in table.feature_names:
                self._num_embeddings[name] = min(self._num_embeddings.get(name, bound), bound)

        truncated = [
            (keys_of_history(config, tables), config.max_history)
            for config in attentions
            if config.max_history is not None
        ]
        self.history_truncation = HistoryTruncation(truncated) if truncated else None
        lookups = {
            str(width): EmbeddingCollection([*map(_table_config, same_width)], device=device)
            for width, same_width in by_width.items()
        }
        self.embedding_collections = nn.ModuleDict(lookups)
        bags = EmbeddingBagCollection(bag_tables, is_weighted, device)
        self.embedding_bag_collection = bags if bag_tables else None
        # TorchRec quantizes it, and sets its pruning data, as of any EmbeddingBagCollection.
        self._no_bags = None if bag_tables else bags
        self._tables_of_codes = [
            EmbeddingBagConfig(
                name=config.histories[0],
                embedding_dim=width_of_codes(config.history_codes),
                num_embeddings=1,
                feature_names=config.histories[:1],
            )
            for config in attentions
            if config.history_codes is not None
        ]
        self.pooling = TargetAttentionPooling(
            tables,
            list(by_width.values()),
            bag_tables,
            attentions,
            is_weighted,
            keys,
            single_ids,
            device,
        )
        # For each lookup, the histories that attention can read by gather indices: their keys in
        # the output, by their names in the lookup.
        self._by_index: list[dict[str, str]] = []
        for lookup, histories, fixed_rows in zip(
            lookups.values(),
            self.pooling.histories(),
            self.pooling.fixed_rows(),
            strict=True,
        ):
            set_histories(lookup, histories, fixed_rows)
            refuse_pruning(lookup, bags)
            self._by_index.append({name: x.key for name, x in histories.items() if x.is_local})

    @classmethod
    def from_embedding_bag_collection(
        cls,
        embedding_bag_collection: EmbeddingBagCollection,
        attentions: TargetAttentionConfig | list[TargetAttentionConfig],
        *,
        single_lookup: bool = False,
        candidates: Literal["one", "jagged"] = "one",
        candidate_features: str | Sequence[str] = (),
        single_id_features: str | Sequence[str] = (),
    ) -> "TargetAttentionEmbeddingBagCollection":
        """Return a collection that shares the parameters of a trained EmbeddingBagCollection.

        Optimizers of these parameters remain valid. For a sharded model, see
        :func:`embedding_bag_keys`.

        Args:
            embedding_bag_collection: not sharded.
            attentions, single_lookup, candidates, candidate_features, single_id_features: as for
                the class.

        Raises:
            TypeError: ``embedding_bag_collection`` is not an EmbeddingBagCollection.
        """
        source = embedding_bag_collection
        if not isinstance(source, EmbeddingBagCollection):
            raise TypeError(
                "embedding_bag_collection must be an EmbeddingBagCollection that is not sharded, "
                f"got a {type(source).__name__}"
            )
        device = next(source.parameters()).device  # may differ from source.device
        tables = source.embedding_bag_configs()
        collection = cls(
            tables,
            attentions,
            source.is_weighted(),
            device,
            single_lookup=single_lookup,
            candidates=candidates,
            candidate_features=candidate_features,
            single_id_features=single_id_features,
        )
        for name, key in collection.table_keys().items():
            table = collection.get_submodule(key.removesuffix(".weight"))
            table.weight = source.embedding_bags[name].weight
        return collection

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Embed and pool ``features``.

        Args:
            features: a KeyedJaggedTensor, or a TensorDict of jagged nested tensors, with all
                features of the tables, timestamps, request times and codes, in any order, and with
                weights if and only if ``is_weighted``. With sharded tables, keys may differ in
                batch size and have ``inverse_indices``: a user's history is then sent and looked
                up once for all samples of the user.

        Returns:
            ``[B, sum of widths]``, with the keys of ``EmbeddingBagCollection(tables)``, followed by
            the keys of histories of codes and user embeddings. With ``candidates="jagged"``,
            ``[ΣT, sum of widths]``.

        Raises:
            TypeError: ``features`` is neither a KeyedJaggedTensor nor a TensorDict, or is not int32
                or int64.
            ValueError: a key is missing; a target or one of ``single_id_features`` does not have
                exactly one id per sample (with requests: features of candidates differ in length);
                a request time does not have exactly one integer per sample; histories and
                timestamps of one attention differ in length; timestamps decrease within a history;
                weights are missing or unexpected; batch sizes vary by feature without
                ``inverse_indices``; or weights of attentions have an optimizer in backward. Numbers
                of rows are always checked; ids, lengths of samples and the order of timestamps on
                CPU, and on CUDA with ``TORCHREC_JAGGED_ATTN_VALIDATE=1``.
            NotImplementedError: batch sizes vary by feature, and tables are not sharded, or pooled
                in bf16 on a GPU; weights of sharded bags require a gradient; or ``fully_shard`` was
                applied to the collection, its ``pooling`` or encoders.
            RuntimeError: ``DistributedModelParallel`` has no sharder of some tables.
        """
        features = maybe_td_to_kjt(features)
        keep_dtype = is_empty = False
        if not is_scripting():
            lookups = self._lookup_modules()
            for module in (self, self.pooling, *self.pooling.encoders):
                check_not_fsdp(module)
            check_optimizers(self.pooling)
            is_sharded = prepare_lookups(lookups)
            if not is_sharded and not torch.compiler.is_compiling():
                check_tables_device(lookups, features)
            features = set_meta_lengths(features)
            _check_features(
                features,
                self._num_embeddings,
                self._others,
                self._arguments,
                self._is_weighted,
                self._bag_features,
                self._dtype_of_bags(),
                is_sharded,
            )
            keep_dtype = check_quantized(lookups, self._no_bags)
        if self.history_truncation is not None:
            features = self.history_truncation(features)
        padded = features
        if not is_scripting():
            padded = pad_empty_batch(features)
            is_empty = padded is not features
        sequences: list[dict[str, JaggedTensor]] = []
        for lookup in self.embedding_collections.values():
            sequences.append(lookup(padded))
        bags: KeyedTensor | None = None
        if self.embedding_bag_collection is not None:
            bags = self.embedding_bag_collection(padded)
        indices: dict[str, Tensor] | None = None
        if not is_scripting():
            indices = {}
            for i, keys in enumerate(self._by_index):
                # This waits for the rows, so the lookup of bags starts before.
                sequences[i], found = take_rows(sequences[i], keys)
                indices |= {keys[name]: rows for name, rows in found.items()}
            if is_empty:
                sequences = without_samples(sequences)
        return self.pooling(features, sequences, bags, indices, keep_dtype, is_empty)

    def reset_parameters(self) -> None:
        """Initialize all parameters: tables by ``init_fn``, attentions by ``init``."""
        children_first = reversed(list(self.pooling.modules()))
        for module in (*self._lookup_modules(), *children_first):
            if isinstance(module, (EmbeddingBagCollection, EmbeddingCollection)):
                # TorchRec's reset_parameters does nothing if they were built on the meta device.
                module._device = next(module.parameters()).device
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()

    def table_keys(self) -> dict[str, str]:
        """Return the name of the weight of each table in the state dict, by table name."""
        keys = {}
        for table in self._tables:
            lookup = f"embedding_collections.{table.embedding_dim}.embeddings"
            if table.name in self._bag_tables:
                lookup = "embedding_bag_collection.embedding_bags"
            keys[table.name] = f"{lookup}.{table.name}.weight"
        return keys

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the configurations of all tables, with their current data types and numbers of
        rows after pruning, followed by a table with one row for each history of codes.
        """
        # All ranks call this, unlike methods that only the planner calls.
        if sys._getframe(1).f_globals.get("__name__") == "torchrec.distributed.embeddingbag":
            raise NotImplementedError(
                "FeatureProcessedEmbeddingBagCollection cannot wrap a sharded "
                "TargetAttentionEmbeddingBagCollection: call collection(feature_processors(features"
                ")) in a module of your own, see 'Feature processors' in "
                "docs/how_to/swap_and_migrate.md"
            )
        current = {}
        for lookup in self._lookup_modules():
            for name in ("embedding_configs", "embedding_bag_configs"):
                configs = getattr(lookup, name, list)()  # sharded modules for training have neither
                current |= {config.name: config for config in configs}
        tables = []
        for table in self._tables:
            config = current.get(table.name, table)
            changes = {x: getattr(config, x) for x in ("data_type", "num_embeddings_post_pruning")}
            tables.append(dataclasses.replace(table, **changes))
        return tables + self._tables_of_codes

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Raise an error: TorchRec's ManagedCollision wrappers call this, and cannot wrap it."""
        raise NotImplementedError(
            "ManagedCollisionEmbeddingBagCollection and ManagedCollisionEmbeddingCollection cannot "
            "wrap a TargetAttentionEmbeddingBagCollection: remap ids by the "
            "ManagedCollisionCollection first, and give it the result, see 'Zero-collision "
            "hashing' in docs/how_to/swap_and_migrate.md"
        )

    def is_weighted(self) -> bool:
        """Whether batches have weights."""
        return self._is_weighted

    @property
    def embedding_bags(self) -> nn.ModuleDict:
        """The modules of all tables by name, with the ``weight`` of each, as in
        EmbeddingBagCollection.
        """
        names = {name: key.removesuffix(".weight") for name, key in self.table_keys().items()}
        return nn.ModuleDict({name: self.get_submodule(x) for name, x in names.items()})

    @property
    def device(self) -> torch.device:
        """The device of the tables."""
        modules = (*self._lookup_modules(), self.pooling)  # a rank may store no rows
        tensors = (x for module in modules for x in (*module.parameters(), *module.buffers()))
        return next(tensors).device

    def _dtype_of_bags(self) -> torch.dtype:
        bags = self.embedding_bag_collection
        weights = () if bags is None else bags.parameters()  # quantized tables are buffers
        return next((x.dtype for x in weights), torch.float32)

    def _lookup_modules(self) -> list[nn.Module]:
        bags = self.embedding_bag_collection
        return [*self.embedding_collections.values(), *([] if bags is None else [bags])]


def _table_config(table: EmbeddingBagConfig) -> HistoryTableConfig:
    shared = [field.name for field in dataclasses.fields(EmbeddingConfig)]
    return HistoryTableConfig(**{name: getattr(table, name) for name in shared})


@torch.fx.wrap  # a leaf for FX, because it branches on the batch
def _check_features(
    features: KeyedJaggedTensor,
    num_embeddings: dict[str, int],
    others: list[str],
    arguments: list[str],
    is_weighted: bool,
    bag_features: list[str],
    bag_dtype: torch.dtype,
    is_sharded: bool,
) -> None:
    if not is_scripting():  # FX graphs that call this function can be scripted
        others_by_key = dict(zip(others, arguments, strict=True))
        check_features(
            features,
            num_embeddings,
            others_by_key,
            is_weighted,
            bag_features,
            bag_dtype,
            is_sharded,
        )
