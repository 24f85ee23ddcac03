"""Models and arguments that ``TrainPipelineCudaGraph`` does not support."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.types import ShardedModule, ShardingType

from torchrec_jagged_attn.collection.embedding_bag_collection import (
    TargetAttentionEmbeddingBagCollection,
)
from torchrec_jagged_attn.collection.sharding.sharder import ShardedHistoryEmbeddingCollection
from torchrec_jagged_attn.pipeline.dense import dense_modules, dense_parameters

# Arguments of TrainPipelineSparseDist that replace the forward, or free or reuse inputs.
REFUSED_ARGUMENTS = (
    "apply_jit",
    "custom_model_fwd",
    "enable_inplace_copy_batch",
    "async_inplace_copy",
    "free_features_storage_early",
    "clear_data_dist_inputs",
)

# Attributes of sharded modules and their lookups that a ModelDeltaTracker sets.
TRACKERS = ("post_lookup_tracker_fn", "post_odist_tracker_fn", "optim_state_tracker_fn")


def refusal(what: str, got: str, use: str = "TrainPipelineSparseDist") -> NotImplementedError:
    return NotImplementedError(f"{what} with TrainPipelineCudaGraph, got {got}: use {use}")


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise an error for arguments of ``TrainPipelineSparseDist`` that are not supported."""
    for name in REFUSED_ARGUMENTS:
        if value := arguments.get(name):
            got = "True" if value is True else f"a {type(value).__name__}"
            raise refusal(f"{name} must not be given", got)


def check_model(model: nn.Module) -> None:
    """Raise an error for wrappers, hooks and optimizers that a capture does not include."""
    if isinstance(model, DMPCollection):
        raise refusal("the model must be a DistributedModelParallel", "a DMPCollection")
    if not isinstance(model, DistributedModelParallel):
        raise TypeError(
            "model must be a DistributedModelParallel with TrainPipelineCudaGraph, got a "
            f"{type(model).__name__}"
        )
    for name, module in model.named_modules():
        if isinstance(module, (FullyShardedDataParallel, FSDPModule)):
            name = name.removeprefix("_dmp_wrapped_module.").removeprefix("module.")
            raise refusal("dense layers must not be sharded", f"FSDP in {name!r}")
    wrapper = model._dmp_wrapped_module
    for module in (model, wrapper):
        if module._forward_hooks or module._forward_pre_hooks:
            raise refusal(
                "DistributedModelParallel and DistributedDataParallel must have no forward hooks",
                f"hooks of {type(module).__name__}",
            )
    if isinstance(wrapper, DistributedDataParallel):
        if wrapper._comm_hooks:
            raise refusal(
                "DistributedDataParallel must average gradients in their own dtype",
                f"the communication hook {wrapper._comm_hooks[0][0].__qualname__}",
            )
        if wrapper.will_sync_module_buffers():
            raise refusal("DistributedDataParallel must not broadcast buffers", "buffers")
    for x in dense_parameters(model.module):
        if hasattr(x.parameter, "_in_backward_optimizers"):
            raise refusal(
                "optimizers in backward must have parameters of tables alone", repr(x.full_name)
            )
        if x.parameter._backward_hooks or x.parameter._post_accumulate_grad_hooks:  # pyright: ignore
            raise refusal("parameters must have no hooks", f"hooks of {x.full_name!r}")


def check_modules(model: nn.Module, pipelined: Collection[nn.Module], world_size: int) -> None:
    """Raise an error for sharded modules that a capture does not support."""
    attended = {
        lookup
        for collection in model.modules()
        if isinstance(collection, TargetAttentionEmbeddingBagCollection)
        for lookup in collection.embedding_collections.values()
    }
    children = (x for parent in dense_modules(model) for x in parent.children())
    for module in children:
        if not isinstance(module, ShardedModule):
            continue
        name = next(name for name, x in model.named_modules() if x is module)
        if module not in pipelined:
            raise refusal(
                f"the sharded module {name!r} must be pipelined",
                "one whose input is changed in the forward (with max_history, give the pipeline "
                "pipeline_postproc=True)",
            )
        kind = type(module).__name__
        if isinstance(module, ShardedEmbeddingBagCollection):
            if type(module) is not ShardedEmbeddingBagCollection:
                raise refusal("sharded modules must be classes of TorchRec", f"a {kind}")
        elif not isinstance(module, ShardedEmbeddingCollection):
            raise refusal(
                "sharded modules must be of an EmbeddingBagCollection or "
                "TargetAttentionEmbeddingBagCollection",
                f"a {kind}, {name!r}",
            )
        elif module not in attended:
            raise refusal(
                "rows of an EmbeddingCollection must go to a TargetAttentionEmbeddingBagCollection",
                f"the EmbeddingCollection {name!r}",
            )
        elif module._use_index_dedup:
            raise refusal("use_index_dedup must be False", f"True for {name!r}")
        elif (
            world_size > 1
            and not isinstance(module, ShardedHistoryEmbeddingCollection)
            and set(module._sharding_type_to_sharding) != {ShardingType.DATA_PARALLEL.value}
        ):
            raise refusal(
                f"the EmbeddingCollection {name!r} must be sharded by a "
                "HistoryEmbeddingCollectionSharder on several ranks",
                "TorchRec's EmbeddingCollectionSharder",
                "HistoryEmbeddingCollectionSharder, or TrainPipelineSparseDist",
            )
        parts = (module, *(x for lookup in module._lookups for x in lookup.modules()))
        if any(getattr(x, tracker, None) for x in parts for tracker in TRACKERS):
            raise refusal("lookups must not be tracked", f"a tracker of {name!r}")


def check_step(model: nn.Module, has_given_optimizer: bool) -> None:
    """Raise an error for settings of a step that are not supported."""
    wrapper = model._dmp_wrapped_module
    if not has_given_optimizer or not getattr(wrapper, "require_backward_grad_sync", True):
        raise refusal("gradients must not be accumulated over batches", "gradient accumulation")
    if torch.is_anomaly_enabled():
        raise refusal("anomaly detection must be off", "torch.autograd.detect_anomaly")


def set_group(module: nn.Module, old: dist.ProcessGroup, new: dist.ProcessGroup) -> None:
    """Set the process group of the input dist of a sharded module."""
    if isinstance(module, ShardedHistoryEmbeddingCollection):
        module._exchange.group = new
        return
    for input_dist in module._input_dists:  # pyright: ignore[reportGeneralTypeIssues]
        for part in input_dist.modules():
            # Pipelines replace the forward of TorchRec's all-to-alls by an object with a group.
            for x in (part, part.__dict__.get("forward")):
                for name, value in list(getattr(x, "__dict__", {}).items()):
                    if value is old:
                        setattr(x, name, new)
