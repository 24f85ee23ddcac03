"""The layers of a model outside its sharded modules: their parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn
from torchrec.distributed.types import ShardedModule


class DenseParameter(NamedTuple):
    """A parameter, the module that has it, and its names in this module and in the model."""

    module: nn.Module
    name: str
    full_name: str
    parameter: nn.Parameter


def dense_modules(model: nn.Module) -> dict[nn.Module, str]:
    """All modules in ``model`` but sharded ones and their children, with their names."""
    modules: dict[nn.Module, str] = {}

    def add(module: nn.Module, name: str) -> None:
        if module not in modules and not isinstance(module, ShardedModule):
            modules[module] = name
            for child_name, child in module.named_children():
                add(child, f"{name}.{child_name}" if name else child_name)

    add(model, "")
    return modules


def dense_parameters(model: nn.Module) -> list[DenseParameter]:
    """The parameters of :func:`dense_modules`, for each module one that several share."""
    return [
        DenseParameter(module, name, f"{prefix}.{name}" if prefix else name, parameter)
        for module, prefix in dense_modules(model).items()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def dense_buffers(model: nn.Module) -> Iterator[Tensor]:
    """The buffers of :func:`dense_modules`."""
    for module in dense_modules(model):
        yield from (x for x in module._buffers.values() if x is not None)
