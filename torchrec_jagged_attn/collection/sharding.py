"""Checks of sharded models: their sharders, and the optimizers of their tables.

TorchRec's planner, sharders and pipelines support EmbeddingCollection and EmbeddingBagCollection.
All else is replicated, also tables without a sharder, and the weights of attentions, whose
gradients are averaged over ranks before a step.
"""

import functools
import weakref
from collections.abc import Iterator
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
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_jagged_attn.checks import check_module
from torchrec_jagged_attn.collection.batch_checks import has_no_sample, one_sample_without_ids
from torchrec_jagged_attn.collection.history_sharding import ShardedHistoryEmbeddingCollection
from torchrec_jagged_attn.collection.lookup_bags import shorten_bags

QUANTIZED = (
    quantized.EmbeddingBagCollection,
    quantized.EmbeddingCollection,
    ShardedQuantEmbeddingBagCollection,
    ShardedQuantEmbeddingCollection,
)

# Sharded lookups that ``check_sharded`` has prepared.
_prepared: weakref.WeakSet[nn.Module] = weakref.WeakSet()

# Modules that ``check_optimizers`` has checked.
_checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def embedding_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Return the weights of all embedding tables in ``module``, and no other parameters.

    For ``apply_optimizer_in_backward``. Call it before sharding.

    Args:
        module: holds any number of EmbeddingCollections and EmbeddingBagCollections.

    Returns:
        An iterator over parameters of shape ``[num_embeddings, embedding_dim]``.

    Raises:
        TypeError: ``module`` is not a Module.
        ValueError: ``module`` is sharded.

    Example:
        >>> from torchrec.modules.embedding_configs import EmbeddingBagConfig
        >>> from torchrec_jagged_attn import TargetAttentionConfig
        >>> from torchrec_jagged_attn import TargetAttentionEmbeddingBagCollection
        >>> table = EmbeddingBagConfig(
        ...     name="t", embedding_dim=8, num_embeddings=9, feature_names=["item", "hist"]
        ... )
        >>> collection = TargetAttentionEmbeddingBagCollection(
        ...     [table], TargetAttentionConfig(target="item", history="hist")
        ... )
        >>> [weight.shape for weight in embedding_parameters(collection)]
        [torch.Size([9, 8])]
    """
    check_module(module, "module")
    weights: list[nn.Parameter] = []
    for child in module.modules():
        if isinstance(child, ShardedModule):
            raise ValueError(f"module must not be sharded yet, got a {type(child).__name__} in it")
        if isinstance(child, (EmbeddingBagCollection, EmbeddingCollection)):
            weights += child.parameters()
    return iter(weights)


def check_sharded(lookups: list[nn.Module]) -> bool:
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


def check_optimizers(pooling: nn.Module) -> None:
    """Check once that no weight of ``pooling`` has an optimizer in backward, as tables have."""
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling and pooling in _checked:
        return
    for name, parameter in pooling.named_parameters():
        if hasattr(parameter, "_in_backward_optimizers"):
            raise ValueError(
                "apply_optimizer_in_backward must get embedding_parameters(model), the weights of "
                f"tables alone, got pooling.{name}, which belongs to the optimizer of the dense "
                "layers"
            )
    if not is_compiling:
        _checked.add(pooling)


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
