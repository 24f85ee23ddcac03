"""Names of tables in checkpoints of models with attention, and of models that pool histories."""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module

from torchrec_jagged_attn.base.checks import check_module
from torchrec_jagged_attn.collection.embedding_bag_collection import (
    TargetAttentionEmbeddingBagCollection,
)


def embedding_bag_keys(model: nn.Module) -> dict[str, str]:
    """Map names of tables in the state dict of ``model`` to names in a model that pools histories.

    The other model has an EmbeddingBagCollection in place of each
    TargetAttentionEmbeddingBagCollection. With :func:`rename_keys`, checkpoints of one model can be
    loaded into the other.

    Args:
        model: sharded or not, and wrapped or not: in DistributedModelParallel,
            DistributedDataParallel, FullyShardedDataParallel, ``torch.compile`` or
            ``checkpoint_wrapper``. Keys are names in ``model.state_dict()``.

    Returns:
        A dict from names in ``model`` to names in the other model.

    Raises:
        TypeError: ``model`` is not a Module.

    Example:
        >>> from torchrec.modules.embedding_configs import EmbeddingBagConfig
        >>> from torchrec_jagged_attn import TargetAttentionConfig
        >>> table = EmbeddingBagConfig(
        ...     name="t", embedding_dim=8, num_embeddings=9, feature_names=["item", "hist"]
        ... )
        >>> collection = TargetAttentionEmbeddingBagCollection(
        ...     [table], TargetAttentionConfig(target="item", history="hist")
        ... )
        >>> embedding_bag_keys(nn.ModuleDict({"sparse": collection}))
        {'sparse.embedding_collections.8.embeddings.t.weight': 'sparse.embedding_bags.t.weight'}
    """
    check_module(model, "model")
    keys = {}
    for prefix, collection in _collections(model):
        for table, key in collection.table_keys().items():
            name = prefix + _state_dict_key(collection, key)
            keys[name] = f"{prefix}embedding_bags.{table}.weight"
    return keys


def _collections(
    module: nn.Module, prefix: str = ""
) -> Iterator[tuple[str, TargetAttentionEmbeddingBagCollection]]:
    """Yield the collections in ``module`` with the prefixes of their names in state dicts."""
    module, wrapper_prefix = _unwrap(module)
    prefix += wrapper_prefix
    if isinstance(module, TargetAttentionEmbeddingBagCollection):
        yield prefix, module
    else:
        for name, child in module._modules.items():  # named_children() omits repetitions
            if child is not None:
                yield from _collections(child, f"{prefix}{name}.")


def _state_dict_key(module: nn.Module | None, key: str) -> str:
    """Return the name of ``key`` in state dicts of ``module``, whose submodules may be wrapped."""
    names = []
    for name in key.split("."):
        prefix = ""
        if module is not None:
            module, prefix = _unwrap(module)
            module = module._modules.get(name)
        names.append(prefix + name)
    return ".".join(names)


def _unwrap(module: nn.Module) -> tuple[nn.Module, str]:
    """Return the module inside all wrappers, and the prefix of its names in state dicts."""
    prefix = ""
    while True:
        if isinstance(module, DistributedModelParallel):
            module = get_unwrapped_module(module)
        elif isinstance(module, FullyShardedDataParallel):
            module = module.module
        elif isinstance(module, ActivationWrapper):
            module = module.get_submodule("_checkpoint_wrapped_module")
        elif isinstance(module, DistributedDataParallel):
            prefix, module = f"{prefix}module.", module.module
        elif isinstance(module, OptimizedModule):
            prefix, module = f"{prefix}_orig_mod.", module._orig_mod
        else:
            return module, prefix


def rename_keys(state: Any, names: dict[str, str]) -> Any:
    """Return a copy of the state dict ``state``, of a model or an optimizer, with renamed keys.

    Args:
        state: nested dicts and lists, whose values are not copied.
        names: from names in ``state`` to new ones. Other names are kept.

    Raises:
        TypeError: ``state`` or ``names`` is not a dict.
        ValueError: ``state`` has none of the ``names``.

    Example:
        >>> state = {"state": {"a": 1, "b": 2}, "param_groups": [{"params": ["a"]}]}
        >>> rename_keys(state, {"a": "c"})
        {'state': {'c': 1, 'b': 2}, 'param_groups': [{'params': ['c']}]}
    """
    if not isinstance(state, (dict, list)):
        raise TypeError(f"state must be a state dict, got a {type(state).__name__}")
    if not isinstance(names, dict):
        raise TypeError(f"names must be a dict of names, got a {type(names).__name__}")
    found = set()

    def new_name(old: Any) -> Any:
        found.update(names.keys() & {old})
        return names.get(old, old)

    def renamed(part: Any) -> Any:
        if isinstance(part, dict):
            return {new_name(key): renamed(value) for key, value in part.items()}
        if isinstance(part, list):
            return [new_name(x) if isinstance(x, str) else renamed(x) for x in part]
        return part

    copy = renamed(state)
    if not found:
        raise ValueError(
            f"names must have keys of state, got {list(names)[:3]}, none of which is in it"
        )
    return copy
