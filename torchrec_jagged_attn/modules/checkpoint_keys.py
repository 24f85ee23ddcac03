"""Names of tables in checkpoints, of models with attention and of those that pool histories."""

from typing import Any

from torch import nn
from torchrec.distributed.model_parallel import get_unwrapped_module

from torchrec_jagged_attn.modules.embedding_bag_collection import (
    TargetAttentionEmbeddingBagCollection,
)

__all__ = ["embedding_bag_keys", "rename_keys"]


def embedding_bag_keys(model: nn.Module) -> dict[str, str]:
    """What state dicts call the tables of ``model``, and what they call them in the same model with
    EmbeddingBagCollections in place of its TargetAttentionEmbeddingBagCollections.

    Args:
        model: sharded or not.

    Returns:
        From each name here to the one there.

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
    keys = {}
    for path, module in get_unwrapped_module(model).named_modules():
        if isinstance(module, TargetAttentionEmbeddingBagCollection):
            prefix = f"{path}." if path else ""
            for table, key in module.table_keys().items():
                keys[prefix + key] = f"{prefix}embedding_bags.{table}.weight"
    return keys


def rename_keys(state: Any, names: dict[str, str]) -> Any:
    """A copy of the state dict ``state``, of a model or of an optimizer, with keys renamed.

    Args:
        state: dicts and lists in each other; what they hold is not copied.
        names: from each name in ``state`` to another. Others stay.

    Example:
        >>> state = {"state": {"a": 1, "b": 2}, "param_groups": [{"params": ["a"]}]}
        >>> rename_keys(state, {"a": "c"})
        {'state': {'c': 1, 'b': 2}, 'param_groups': [{'params': ['c']}]}
    """
    if isinstance(state, dict):
        return {names.get(key, key): rename_keys(value, names) for key, value in state.items()}
    if isinstance(state, list):
        return [
            names.get(item, item) if isinstance(item, str) else rename_keys(item, names)
            for item in state
        ]
    return state
