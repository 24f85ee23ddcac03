"""The parameters of embedding tables, and a check of their optimizers."""

import weakref
from collections.abc import Iterator

import torch
from torch import nn
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from torchrec_jagged_attn.base.checks import check_module

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


def check_optimizers(pooling: nn.Module) -> None:
    """Check that no weight of ``pooling`` has an optimizer in backward. Checks a module once."""
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
