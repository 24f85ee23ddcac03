"""Checks of modules and their JaggedTensors, for files that need TorchRec anyway."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torchrec.sparse.jagged_tensor import JaggedTensor


def check_jagged(value: object, name: str) -> None:
    """Check that ``value`` is a JaggedTensor."""
    if not isinstance(value, JaggedTensor):
        is_nested = isinstance(value, Tensor) and value.is_nested
        way_out = ": give JaggedTensor(x.values(), offsets=x.offsets())" if is_nested else ""
        raise TypeError(f"{name} must be a JaggedTensor, got a {type(value).__name__}{way_out}")


def check_not_fsdp(module: nn.Module) -> None:
    """Check that ``module``, which does not return a tensor, is not sharded by FSDP."""
    if isinstance(module, (FSDPModule, FullyShardedDataParallel)):
        name = type(getattr(module, "module", module)).__name__.removeprefix("FSDP")
        raise NotImplementedError(
            f"fully_shard must get modules that return tensors, got a {name}, whose gradients "
            "PyTorch would not reduce: apply it to each of collection.pooling.attentions, or to a "
            "module around it that returns tensors"
        )
