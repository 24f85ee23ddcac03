"""The tensors and Python values of a batch, and copies of it with other tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_jagged_attn.collection.sharding.padding import PaddedFeatures, Segments


@dataclass
class StepInputs:
    """Tensors, sizes and Python values of one batch that a training step reads.

    Attributes:
        device_type: device type of the model.
        tensors: tensors by name, :class:`Segments` if their sizes differ from batch to batch.
        counts: numbers of rows that must not exceed a capacity, by the name of the capacity.
        constants: Python values and sizes that must equal the values at the capture, by name.
    """

    device_type: str
    tensors: dict[str, Tensor | Segments] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)

    def add_batch(
        self, name: str, batch: Any, fixed_keys: Container[str], keys: Container[str] | None
    ) -> None:
        """Add the tensors and Python values of a batch.

        Args:
            name: name of the batch, with which all names start.
            batch: the batch.
            fixed_keys: keys of KeyedJaggedTensors whose number of rows is constant in a capture.
            keys: features of KeyedJaggedTensors whose values and weights are added, such as
                ``"batch.sparse_features[history]"``, or None for all. Lengths are always added.
        """

        def add(path: str, x: Tensor | KeyedJaggedTensor) -> None:
            if isinstance(x, Tensor):
                self.tensors[path] = x
                self.constants[f"the shape of {path}"] = x.shape
                self.constants[f"the dtype of {path}"] = x.dtype
                if x.device.type != self.device_type:  # a kernel gets its value when it is launched
                    self.constants[f"the values of {path}"] = x.clone()
                return
            if x.variable_stride_per_key():
                raise NotImplementedError(
                    "features must have one batch size for all keys with TrainPipelineCudaGraph, "
                    f"got {x.stride_per_key()} for {x.keys()}: use TrainPipelineSparseDist "
                    "and EmbeddingCollectionSharder"
                )
            self.tensors[f"{path}.lengths"] = x.lengths()
            self.constants[f"the keys of {path}"] = x.keys()
            self.constants[f"the number of samples of {path}"] = x.stride()
            weights = x.weights_or_none()
            dtypes = [y.dtype for y in (x.values(), x.lengths(), weights) if y is not None]
            self.constants[f"the dtypes of {path}"] = dtypes
            names = {f"{path}[{key}]": key for key in x.keys()}  # noqa: SIM118
            if keys is not None and not any(name in keys for name in names):
                return  # without asking for the numbers of rows, which may be on the device alone
            begin = 0
            for (feature, key), count in zip(names.items(), x.length_per_key(), strict=True):
                if keys is None or feature in keys:
                    capacity = None if key in fixed_keys else feature
                    if capacity is None:
                        self.constants[f"the number of rows of {feature}"] = count
                    else:
                        self.counts[capacity] = count
                    part = x.values().narrow(0, begin, count)
                    self.tensors[feature] = Segments(part, [count], [capacity])
                    if weights is not None:
                        part = weights.narrow(0, begin, count)
                        self.tensors[f"{feature}.weights"] = Segments(part, [count], [capacity])
                begin += count

        replace_tensors(batch, add, self.constants.__setitem__, name)

    def add_sizes(self, name: str, counts: Mapping[str, int], constants: Any) -> None:
        """Add the sizes of the ids that the sharded module ``name`` looks up."""
        self.counts |= {f"{name}: {key}": count for key, count in counts.items()}
        self.constants[f"sizes of {name}"] = constants

    def add_tensors(self, name: str, tensors: Mapping[str, Tensor | Segments]) -> None:
        """Add tensors of the sharded module ``name``."""
        for key, x in tensors.items():
            if isinstance(x, Segments):
                x = x._replace(names=[at and f"{name}: {at}" for at in x.names])
            self.tensors[f"{name}: {key}"] = x

    def has_no_sample(self) -> bool:
        """Return whether a KeyedJaggedTensor has no sample."""
        samples = "the number of samples of "
        return any(name.startswith(samples) and x == 0 for name, x in self.constants.items())


def with_static_tensors(
    batch: Any, name: str, static: Callable[[str], Tensor], read: Callable[[str], None]
) -> Any:
    """Return a copy of ``batch`` with other tensors.

    Args:
        batch: the batch.
        name: name of the batch.
        static: returns the tensor with a name of :meth:`StepInputs.add_batch`.
        read: called with the name of a feature of a KeyedJaggedTensor when it is first read.
    """

    def replace(path: str, x: Tensor | KeyedJaggedTensor) -> Tensor | KeyedJaggedTensor:
        if isinstance(x, Tensor):
            return static(path)
        is_weighted = x.weights_or_none() is not None

        def rows(key: str) -> tuple[Tensor, Tensor | None]:
            feature = f"{path}[{key}]"
            read(feature)
            return static(feature), static(f"{feature}.weights") if is_weighted else None

        return PaddedFeatures(x.keys(), static(f"{path}.lengths"), x.stride(), rows)

    return replace_tensors(batch, replace, lambda *_: None, name)


def replace_tensors(
    x: Any,
    replace: Callable[[str, Any], Any],
    constant: Callable[[str, Any], None] = lambda *_: None,
    path: str = "",
) -> Any:
    """Return a copy of ``x`` with ``replace(path, tensor)`` for each tensor and KeyedJaggedTensor.

    ``x`` may be a dict, list, tuple, TensorDict, dataclass, or another object with attributes, and
    each of these may hold others. ``constant`` is called with all other values.
    """
    if isinstance(x, TensorDict) and any(getattr(y, "is_nested", False) for y in x.values()):
        x = maybe_td_to_kjt(x)  # pyright: ignore[reportArgumentType]
    if isinstance(x, (Tensor, KeyedJaggedTensor)):
        return replace(path, x)
    if isinstance(x, (dict, TensorDict)):
        parts = {key: (f"{path}[{key!r}]", value) for key, value in x.items()}
    elif isinstance(x, (list, tuple)):
        parts = {i: (f"{path}[{i}]", value) for i, value in enumerate(x)}
    else:
        attributes = {} if isinstance(x, type) else _attributes(x)
        parts = {key: (f"{path}.{key}", value) for key, value in attributes.items()}
    if not parts:
        constant(path, x)
        return x
    new = {key: replace_tensors(v, replace, constant, at) for key, (at, v) in parts.items()}
    if all(new[key] is value for key, (_, value) in parts.items()):
        return x
    if isinstance(x, TensorDict):
        return TensorDict(new, batch_size=x.batch_size)  # pyright: ignore[reportArgumentType]
    if isinstance(x, (list, tuple)):
        values = new.values()
        return type(x)(*values) if hasattr(x, "_fields") else type(x)(values)
    result: Any = copy.copy(x)
    for key, value in new.items():
        if isinstance(x, dict):
            result[key] = value
        else:
            object.__setattr__(result, str(key), value)  # also of a frozen dataclass
    return result


def _attributes(x: Any) -> dict[str, Any]:
    """Return the attributes of ``x``, slots included."""
    slots = [name for kind in type(x).__mro__ for name in getattr(kind, "__slots__", ())]
    slot_values = {name: getattr(x, name) for name in slots if hasattr(x, name)}
    return slot_values | getattr(x, "__dict__", {})


def difference(x: Mapping[str, Any], y: Mapping[str, Any]) -> str | None:
    """Return the first name whose values differ, or None."""
    if x.keys() != y.keys():
        return min(x.keys() ^ y.keys())
    return next((name for name in x if not is_same(x[name], y[name])), None)


def is_same(x: Any, y: Any) -> bool:
    """Return whether ``x == y``. Values that cannot be compared differ."""
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return torch.equal(x, y)
    try:
        return x is y or (type(x) is type(y) and bool(x == y))
    except Exception:  # of arrays, for example
        return False


def clone_tensors(x: Any) -> Any:
    """Return a copy of ``x`` with detached copies of its tensors."""
    return replace_tensors(x, lambda _, tensor: _clone(tensor))


def _clone(x: Tensor | KeyedJaggedTensor) -> Tensor | KeyedJaggedTensor:
    return x.detach().clone() if isinstance(x, Tensor) else x


def tensors_of(x: Any) -> list[Tensor]:
    """Return all tensors in ``x``."""
    found: list[Tensor] = []

    def add(_: str, tensor: Any) -> Any:
        if isinstance(tensor, torch.Tensor):
            found.append(tensor)
        return tensor

    replace_tensors(x, add)
    return found
