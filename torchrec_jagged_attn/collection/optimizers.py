"""The parameters of embedding tables, and checks of the optimizers of attention weights."""

import functools
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from torchrec_jagged_attn.base.checks import check_module

# Modules that ``check_optimizers`` has checked.
_checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
# Modules that are trained, until it is known whether an optimizer changes their weights.
_watched: weakref.WeakKeyDictionary[nn.Module, "_Weights | None"] = weakref.WeakKeyDictionary()

NUM_WATCHED_STEPS = 3
"""Number of steps of one optimizer after which weights that never changed cause a warning."""


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


def refuse_optimizers_in_backward(pooling: nn.Module) -> None:
    """Let ``apply_optimizer_in_backward`` raise an error for the weights of ``pooling``.

    It calls ``view_as`` of each parameter first. Later would be too late: RowWiseAdagrad fails on
    biases, and ``DistributedModelParallel`` drops the optimizers of weights on the meta device.
    """
    if pooling in _checked:
        return
    for name, parameter in pooling.named_parameters():
        parameter.view_as = functools.partial(_refuse_optimizer, name)  # pyright: ignore


def _refuse_optimizer(name: str, _: object = None) -> NoReturn:
    raise ValueError(
        "apply_optimizer_in_backward must get embedding_parameters(model), the weights of tables "
        f"alone, got pooling.{name}, an attention weight, which belongs to the optimizer of the "
        "dense layers"
    )


def check_optimizers(pooling: nn.Module) -> None:
    """Check that no weight of ``pooling`` has an optimizer in backward, once. In training, warn if
    no optimizer updates the weights.
    """
    is_compiling = torch.compiler.is_compiling()
    if is_compiling or pooling not in _checked:
        for name, parameter in pooling.named_parameters():
            if hasattr(parameter, "_in_backward_optimizers"):
                _refuse_optimizer(name)
            if not is_compiling:
                vars(parameter).pop("view_as", None)
        if not is_compiling:
            _checked.add(pooling)
    if is_compiling or not pooling.training or not torch.is_grad_enabled():
        return
    if pooling not in _watched and not torch._C._are_functorch_transforms_active():
        _watched[pooling] = _Weights(pooling)
        _register_hook()
    weights = _watched.get(pooling)
    if weights is not None:
        weights.num_forwards += 1


class _Weights:
    """The weights of a module at its first training step, and how often optimizers stepped."""

    def __init__(self, module: nn.Module) -> None:
        self.before = {
            name: (p._version, p.detach().clone())
            for name, p in module.named_parameters()
            if p.requires_grad  # others may be inference tensors, without a version
        }
        self.num_forwards = 0
        self.steps = Counter[int]()  # after a forward of the module, by the id of the optimizer
        self.last_step: dict[int, int] = {}  # the number of forwards at the last of these steps


@functools.cache
def _register_hook() -> None:
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for module, weights in list(_watched.items()):
        if weights is not None and _is_decided(module, weights, optimizer):
            _watched[module] = None


def _is_decided(module: nn.Module, weights: _Weights, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether all weights changed. Warn if some have a gradient and did not change after
    ``NUM_WATCHED_STEPS`` steps of ``optimizer``.
    """
    unchanged = {
        name: p
        for name, p in module.named_parameters()
        if name in weights.before
        and weights.before[name][0] == p._version
        and not isinstance(p, DTensor)
    }
    if not unchanged:
        return True
    key = id(optimizer)
    if any(p.grad is not None for p in unchanged.values()):
        # Optimizers of other models step without a forward of this one.
        weights.steps[key] += weights.last_step.get(key) != weights.num_forwards
        weights.last_step[key] = weights.num_forwards
    if weights.steps[key] < NUM_WATCHED_STEPS:
        return False
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return True
    # Only weights with a gradient, and not all optimizers that change values count a version.
    names = [
        name
        for name, p in unchanged.items()
        if p.grad is not None and torch.equal(p.detach(), weights.before[name][1])
    ]
    if names:
        warnings.warn(
            f"{len(names)} of {len(weights.before)} attention weights, such as pooling.{names[0]}, "
            f"have gradients but did not change in {NUM_WATCHED_STEPS} steps of "
            f"{type(optimizer).__name__}: give them to the optimizer of the dense layers, which "
            "must get all parameters of the model but embedding_parameters(model)",
            stacklevel=2,
        )
    return True
