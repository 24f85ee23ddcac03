"""Fixes of sharded lookups, and checks that all lookups are sharded or quantized."""

import functools
import itertools
import weakref
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.quant_embedding import ShardedQuantEmbeddingCollection
from torchrec.distributed.quant_embeddingbag import ShardedQuantEmbeddingBagCollection
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.quant import embedding_modules as quantized
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_jagged_attn.collection.batch_checks import check_keys, pad_empty_batch
from torchrec_jagged_attn.collection.sharding.sharder import ShardedHistoryEmbeddingCollection

PRUNING_DATA = quantized.MODULE_ATTR_EMB_CONFIG_NAME_TO_NUM_ROWS_POST_PRUNING_DICT

QUANTIZED = (
    quantized.EmbeddingBagCollection,
    quantized.EmbeddingCollection,
    ShardedQuantEmbeddingBagCollection,
    ShardedQuantEmbeddingCollection,
)

# Sharded lookups that ``prepare_lookups`` has prepared.
_prepared: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def prepare_lookups(lookups: list[nn.Module]) -> bool:
    """Return whether ``lookups`` are sharded, and fix sharded lookups when first called.

    Fixed lookups support ``output_dtype`` on ranks without a table, and batches without samples,
    and are fast for long histories.

    Raises:
        RuntimeError: some lookups have no sharder.
        ValueError: tables of one lookup have several ``output_dtype``.
    """
    not_sharded = [lookup for lookup in lookups if not isinstance(lookup, ShardedModule)]
    if not not_sharded:
        for lookup in lookups:
            if lookup not in _prepared:
                _set_placeholder_dtype(lookup)
                if not isinstance(lookup, ShardedHistoryEmbeddingCollection):
                    _accept_empty_batches(lookup)
                _shorten_bags(lookup)
                _prepared.add(lookup)
        return True
    if len(not_sharded) < len(lookups) or _is_in_distributed_model_parallel():
        names = {f"{type(lookup).__name__}Sharder()" for lookup in not_sharded}
        if "EmbeddingCollectionSharder()" in names:
            names.remove("EmbeddingCollectionSharder()")
            names.add("HistoryEmbeddingCollectionSharder() or EmbeddingCollectionSharder()")
        tables = [name for lookup in not_sharded for name in _table_names(lookup)]
        raise RuntimeError(
            f"sharders of DistributedModelParallel must include {', and '.join(sorted(names))}, "
            f"got none that shards the tables {tables}"
        )
    return False


def _table_names(lookup: Any) -> list[str]:
    name = "embedding_configs" if hasattr(lookup, "embedding_configs") else "embedding_bag_configs"
    return [config.name for config in getattr(lookup, name, list)()]


def _is_in_distributed_model_parallel() -> bool:
    """Return whether a model in DistributedModelParallel runs its forward. Such a model has an
    attribute that DistributedModelParallel sets in its DistributedDataParallel.
    """
    if torch.compiler.is_compiling():
        return False
    replicas = DistributedDataParallel._active_ddp_module
    return hasattr(getattr(replicas, "module", None), "_ddp_params_and_buffers_to_ignore")


def _set_placeholder_dtype(module: nn.Module) -> None:
    """Give the empty tensor that ranks without a table send the ``output_dtype`` of the tables.

    TorchRec creates it in fp32: ranks then disagree on the number of bytes sent, and hang.
    """
    shardings = getattr(module, "_sharding_type_to_sharding", {}).values()
    shardings = getattr(module, "_embedding_shardings", shardings)
    for sharding, lookup in zip(shardings, getattr(module, "_lookups", ()), strict=False):
        placeholder = getattr(lookup, "_dummy_embs_tensor", None)
        configs = getattr(sharding, "_grouped_embedding_configs_per_rank", ())
        dtypes = {
            (config.fused_params or {}).get("output_dtype", SparseType.FP32)
            for config in itertools.chain(*configs)
        }
        if len(dtypes) > 1 and len(configs) > 1:
            names = sorted(str(dtype) for dtype in dtypes)
            raise ValueError(
                "output_dtype must be one for all tables that ranks look up together, got "
                f"{', '.join(names)}"
            )
        for dtype in dtypes:
            if placeholder is not None and placeholder.dtype != dtype.as_dtype():
                placeholder = placeholder.detach().to(dtype.as_dtype()).requires_grad_()
                lookup._dummy_embs_tensor = placeholder


def _accept_empty_batches(lookup: nn.Module) -> None:
    """Replace ``input_dist``, which pipelines call directly, by :func:`_input_dist`."""
    if isinstance(lookup, ShardedEmbeddingCollection) and "input_dist" not in vars(lookup):
        shardings = lookup._sharding_type_to_sharding.values()
        keys = [key for sharding in shardings for key in sharding.feature_names()]
        lookup.input_dist = functools.partial(_input_dist, lookup, [*dict.fromkeys(keys)])


def _input_dist(
    lookup: ShardedEmbeddingCollection, keys: list[str], ctx: Any, features: Any
) -> Any:
    features = pad_empty_batch(maybe_td_to_kjt(features))
    check_keys(features, keys)  # pipelines call this before the checks of the collection
    return ShardedEmbeddingCollection.input_dist(lookup, ctx, features)


def check_quantized(lookups: list[nn.Module], no_bags: nn.Module | None) -> bool:
    """Return whether ``lookups`` are quantized: all or none of them must be.

    ``no_bags`` is an EmbeddingBagCollection without tables, if ``lookups`` contain none.
    """
    are_quantized = [isinstance(lookup, QUANTIZED) for lookup in lookups]
    any_quantized = any(are_quantized) or isinstance(no_bags, QUANTIZED)
    if any_quantized and not all(are_quantized):
        raise RuntimeError(
            "quantize_embeddings must quantize EmbeddingCollections, too, which contain the tables "
            "of targets and histories, got only EmbeddingBagCollections quantized: give it "
            "additional_qconfig_spec_keys=[EmbeddingCollection] and additional_mapping="
            "{EmbeddingCollection: torchrec.quant.EmbeddingCollection}, or call "
            "quantize_inference_model"
        )
    return all(are_quantized)


def refuse_pruning(lookup: EmbeddingCollection, bags: EmbeddingBagCollection) -> None:
    """Let the quantization of ``lookup`` raise an error if its tables have pruning data.

    TorchRec prunes only EmbeddingBagCollections. It reads the state dict while it quantizes.
    """
    lookup.register_state_dict_pre_hook(functools.partial(_check_pruning, bags))


def _check_pruning(bags: nn.Module, lookup: EmbeddingCollection, *_: Any) -> None:
    pruned = {x for module in (bags, lookup) for x in getattr(module, PRUNING_DATA, ())}
    if names := sorted(pruned.intersection(x.name for x in lookup.embedding_configs())):
        raise NotImplementedError(
            "set_pruning_data must name tables of embedding_bag_collection alone, since TorchRec "
            f"prunes no EmbeddingCollection, got {names}, which targets or histories read: remove "
            "them from tables_to_rows_post_pruning"
        )


def _shorten_bags(collection: nn.Module) -> None:
    """Pass ids to a sharded EmbeddingCollection in short bags, see :func:`split_bags`.

    FBGEMM's kernels are serial along a bag, and TorchRec passes each history as one bag.
    """
    if isinstance(collection, ShardedEmbeddingCollection):
        for lookup in collection._lookups:
            lookup.register_forward_pre_hook(lambda _, inputs: (split_bags(*inputs),))


IDS_PER_BAG = {"cuda": 8, "cpu": 1}
"""Mean number of ids of a bag by device type. With one, bags of a single key are not pooled by
FBGEMM's lookups of replicated tables on a CPU, which pool all others."""


def split_bags(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return the same ids in short bags: ``N`` ids of ``K`` keys in ``ceil(N / nK)`` bags per key,
    where ``n`` is :data:`IDS_PER_BAG`.

    Lookups without pooling return a row for each id, however ids are divided into bags. As all keys
    must have the same number of bags, the ids of each key are spread evenly over them. With a mean
    of two ids::

        item    [7] [8] [9]                [7] [8] [9]
        history [1 2 3 4] [ ] [5 6]   ->   [1 2] [3 4] [5 6]

    Batches whose size varies by key are returned unchanged.
    """
    num_keys, ids, stride = len(features.keys()), features.values(), features.stride()
    if ids.numel() == 0 or stride == 0 or features.variable_stride_per_key():
        return features
    num_bags = -(-ids.numel() // (num_keys * IDS_PER_BAG[ids.device.type]))
    ends = features.offsets()[::stride].long()  # [K + 1], of keys
    bags = torch.arange(num_bags, device=ids.device)
    begins = ends[:-1, None] + bags * ends.diff()[:, None] // num_bags
    offsets = torch.cat([begins.flatten(), ends[-1:]])
    return KeyedJaggedTensor(
        features.keys(),
        ids,
        features.weights_or_none(),
        offsets=offsets,
        stride=num_bags,
        length_per_key=features.length_per_key_or_none(),  # otherwise read from the device
    )
