"""Changes to sharded lookups that TorchRec does not provide, and checks of their sharders."""

import functools
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
from torchrec.quant import embedding_modules as quantized
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_jagged_attn.collection.batch_checks import has_no_sample, one_sample_without_ids
from torchrec_jagged_attn.collection.sharding.sharder import ShardedHistoryEmbeddingCollection

QUANTIZED = (
    quantized.EmbeddingBagCollection,
    quantized.EmbeddingCollection,
    ShardedQuantEmbeddingBagCollection,
    ShardedQuantEmbeddingCollection,
)

# Sharded lookups that ``prepare_lookups`` has prepared.
_prepared: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def prepare_lookups(lookups: list[nn.Module]) -> bool:
    """Whether ``lookups`` are sharded, as all or none of them must be.

    The first time, sharded ones are prepared for what TorchRec's do not serve: ranks without a
    table, batches without samples, and long bags.
    """
    left = [lookup for lookup in lookups if not isinstance(lookup, ShardedModule)]
    if not left:
        for lookup in lookups:
            if lookup not in _prepared:
                _give_ranks_one_dtype(lookup)
                if not isinstance(lookup, ShardedHistoryEmbeddingCollection):
                    _take_batches_without_samples(lookup)
                shorten_bags(lookup)
                _prepared.add(lookup)
        return True
    if len(left) < len(lookups) or _is_in_distributed_model_parallel():
        names = sorted({f"{type(lookup).__name__}Sharder()" for lookup in left})
        raise RuntimeError(
            f"sharders of DistributedModelParallel must include {' and '.join(names)}, got no "
            "such sharder: without it, each rank trains its own copy of these tables"
        )
    return False


def _is_in_distributed_model_parallel() -> bool:
    """Whether the module whose forward runs was replicated by DistributedModelParallel.

    It sets the parameters that are not replicated on the module that DistributedDataParallel wraps.
    """
    if torch.compiler.is_compiling():
        return False
    replicated = DistributedDataParallel._active_ddp_module
    return hasattr(getattr(replicated, "module", None), "_ddp_params_and_buffers_to_ignore")


def _give_ranks_one_dtype(lookup: nn.Module) -> None:
    """The rows that a rank without a table sends, none, must have the dtype of the others'.

    TorchRec makes them fp32 whatever ``output_dtype`` is: ranks then disagree on the bytes that
    they exchange, and hang. ``tests/torchrec/test_options.py`` fails where private names change.
    """
    shardings = getattr(lookup, "_sharding_type_to_sharding", {}).values()
    shardings = getattr(lookup, "_embedding_shardings", shardings)
    for sharding, of_rank in zip(shardings, getattr(lookup, "_lookups", ()), strict=False):
        none = getattr(of_rank, "_dummy_embs_tensor", None)
        configs = getattr(sharding, "_grouped_embedding_configs_per_rank", ())
        dtypes = {
            (config.fused_params or {}).get("output_dtype", SparseType.FP32)
            for of_one in configs
            for config in of_one
        }
        if len(dtypes) > 1 and len(configs) > 1:
            names = sorted(str(dtype) for dtype in dtypes)
            raise ValueError(
                "output_dtype must be one for all tables that ranks look up together, got "
                f"{', '.join(names)}"
            )
        for dtype in dtypes:
            if none is not None and none.dtype != dtype.as_dtype():
                of_rank._dummy_embs_tensor = none.detach().to(dtype.as_dtype()).requires_grad_()


def _take_batches_without_samples(lookup: nn.Module) -> None:
    """Replace batches without samples in ``input_dist``, which pipelines call directly."""
    if isinstance(lookup, ShardedEmbeddingCollection) and "input_dist" not in vars(lookup):
        lookup.input_dist = functools.partial(_input_dist, lookup)


def _input_dist(lookup: ShardedEmbeddingCollection, ctx: Any, features: Any) -> Any:
    features = maybe_td_to_kjt(features)
    if has_no_sample(features):
        features = one_sample_without_ids(features)
    return ShardedEmbeddingCollection.input_dist(lookup, ctx, features)


def check_quantized(lookups: list[nn.Module]) -> bool:
    """Whether ``lookups`` are quantized, as all or none of them must be."""
    are_quantized = [isinstance(lookup, QUANTIZED) for lookup in lookups]
    if any(are_quantized) and not all(are_quantized):
        raise RuntimeError(
            "quantize_embeddings must quantize EmbeddingCollections, too, got only the "
            "EmbeddingBagCollection quantized: give it additional_qconfig_spec_keys="
            "[EmbeddingCollection] and additional_mapping={EmbeddingCollection: "
            "torchrec.quant.EmbeddingCollection}, as quantize_inference_model does"
        )
    return all(are_quantized)


def shorten_bags(collection: nn.Module) -> None:
    """Have the lookups of a sharded EmbeddingCollection take ids in bags of :func:`split_bags`.

    FBGEMM's kernels are serial along a bag, and TorchRec hands them each history as one. This reads
    a private name of TorchRec's; ``tests/torchrec/test_lookup_bags.py`` fails where it has changed.
    """
    if isinstance(collection, ShardedEmbeddingCollection):
        for lookup in collection._lookups:
            lookup.register_forward_pre_hook(lambda _, inputs: (split_bags(*inputs),))


def split_bags(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same ids of each key, in the same order, in bags of about as many ids as there are keys.

    A sequence embedding puts out a row for each id, whatever the bags. All keys must have as many
    bags, so each key's ids are spread evenly over them::

        item    [7] [8] [9]                [7] [8] [ ] [9] [ ]
        history [1 2 3 4] [ ] [5 6]   ->   [1] [2] [3] [4] [5 6]

    ``N`` ids of ``K`` keys are returned in ``ceil(N / K)`` bags per key. Those of batch sizes that
    vary by key are as they were.
    """
    num_keys, ids, stride = len(features.keys()), features.values(), features.stride()
    if ids.numel() == 0 or stride == 0 or features.variable_stride_per_key():
        return features
    num_bags = -(-ids.numel() // num_keys)
    bags = torch.arange(num_bags + (num_keys == 1), device=ids.device)
    offsets = bags
    if num_keys > 1:
        ends = features.offsets()[::stride].long()  # [K + 1], of the keys
        begins = ends[:-1, None] + bags * ends.diff()[:, None] // num_bags
        offsets = torch.cat([begins.flatten(), ends[-1:]])
    return KeyedJaggedTensor(
        features.keys(),
        ids,
        features.weights_or_none(),
        offsets=offsets,
        stride=num_bags,
        length_per_key=features.length_per_key_or_none(),  # else it would be read from the device
    )
