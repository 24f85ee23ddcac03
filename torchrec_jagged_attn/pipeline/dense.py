"""The layers of a model outside its sharded modules: their parameters and buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from torchrec.distributed.types import ShardedModule


class DenseParameter(NamedTuple):
    """A parameter, its module, and its names in the module and in the model."""

    module: nn.Module
    name: str
    full_name: str
    parameter: nn.Parameter


def dense_modules(model: nn.Module) -> dict[nn.Module, str]:
    """Return all modules of ``model`` except sharded modules and their children, with names."""
    modules: dict[nn.Module, str] = {}

    def add(module: nn.Module, name: str) -> None:
        if module not in modules and not isinstance(module, ShardedModule):
            modules[module] = name
            for child_name, child in module.named_children():
                add(child, f"{name}.{child_name}" if name else child_name)

    add(model, "")
    return modules


def dense_parameters(model: nn.Module) -> list[DenseParameter]:
    """Return the parameters of :func:`dense_modules`, a shared one once for each of its modules."""
    return [
        DenseParameter(module, name, f"{prefix}.{name}" if prefix else name, parameter)
        for module, prefix in dense_modules(model).items()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


@contextlib.contextmanager
def restored_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the values of the buffers of :func:`dense_modules` on exit.

    Raises:
        NotImplementedError: a buffer was replaced by another tensor.
    """
    buffers = [
        (module, name, buffer, buffer.clone(), f"{prefix}.{name}" if prefix else name)
        for module, prefix in dense_modules(model).items()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    replaced: list[str] = []
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value, full_name in buffers:
                if module._buffers.get(name) is not buffer:
                    replaced.append(full_name)
                    module._buffers[name] = buffer
                buffer.copy_(value)
    if replaced:
        raise NotImplementedError(
            "a forward must change buffers in place with TrainPipelineCudaGraph, got other tensors "
            f"for {replaced}: use TrainPipelineSparseDist"
        )
