"""Triton's interpreter, quicker, and with products that no CPU rounds in its own way.

Nearly all of its time goes into types, not into numbers: for each operation it promotes the types
of both operands and describes the shape of what comes out. What it decides stays as it is; here it
decides once for operands that are alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import numpy as np
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

__all__ = ["install"]


def install() -> None:
    """Change Triton's interpreter, for as long as this process runs."""
    # Its own are BLAS's, which round by the CPU's model and by which operand comes first; a GPU's
    # are the same either way.
    InterpreterBuilder.create_dot = _product_rounded_once
    # It computes every sum of integers again, in int64, for an assertion that it then leaves out.
    interpreter.interpreter_builder.options = replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )
    # It looks through all of Triton's language at every call of a function, and makes the table of
    # NumPy's dtypes for every block.
    interpreter._patch_lang = functools.partial(_patch_once, interpreter._patch_lang, set())
    interpreter._patch_attr = _patch_attribute
    dtype_of_scalar = functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = functools.partial(_numpy_dtype, dtype_of_scalar)

    core.block_type.__new__ = _block_type
    core.block_type.__init__ = lambda self, element_ty, shape: None
    core.dtype.__eq__ = _equal_or(core.dtype.__eq__)
    core.tensor.__init__ = _init_tensor
    core._unwrap_if_constexpr = _unwrap_or(core._unwrap_if_constexpr)
    TensorHandle.__init__ = _init_handle
    InterpreterBuilder.create_splat = _splat
    for name in ("binary_op_type_checking_impl", "broadcast_impl_value"):
        setattr(TritonSemantic, name, _decide_once(getattr(TritonSemantic, name)))


def _product_rounded_once(_builder: Any, a: Any, b: Any, acc: Any, *_options: Any) -> TensorHandle:
    product = np.matmul(_numbers(a), _numbers(b), dtype=np.float64)
    return TensorHandle(product.astype(acc.data.dtype) + acc.data, acc.dtype.scalar)


def _numbers(operand: Any) -> np.ndarray:
    if operand.dtype.scalar == core.bfloat16:  # the interpreter has the upper half of an fp32
        return (operand.data.astype(np.uint32) << 16).view(np.float32)
    return operand.data


def _patch_once(patch: Any, patched: set[int], function: Any) -> Any:
    if id(function.__globals__) not in patched:  # of a module
        patched.add(id(function.__globals__))
        patch(function)
    return NOTHING_TO_RESTORE


NOTHING_TO_RESTORE = interpreter._LangPatchScope()


def _patch_attribute(obj: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
    function = getattr(member, "__wrapped__", member)  # which takes _semantic

    def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        return function(*args, _semantic=interpreter.interpreter_semantic, **kwargs)

    scope.set_attr(obj, name, call)


def _numpy_dtype(of_scalar: Any, dtype: Any) -> np.dtype:
    scalar = dtype.scalar
    return np.dtype(np.uint64) if scalar.is_ptr() else of_scalar(scalar)


def _block_type(cls: Any, element_ty: Any, shape: Any) -> Any:
    """The one type of blocks of this element and shape."""
    sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
    key = element_ty.name, getattr(element_ty, "address_space", None), sizes
    found = BLOCK_TYPES.get(key)
    if found is None:
        found = object.__new__(cls)
        INIT_BLOCK_TYPE(found, element_ty, list(sizes))
        found.sizes = sizes
        found.shape_and_numel_of_tensor = (
            core.tuple([core.constexpr(size) for size in sizes]),
            core.constexpr(found.numel),
        )
        BLOCK_TYPES[key] = found
    return found


BLOCK_TYPES: dict[tuple, Any] = {}
INIT_BLOCK_TYPE = core.block_type.__init__
SHAPE_AND_NUMEL_OF_SCALAR = core.tuple([]), core.constexpr(1)


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = (
        type.shape_and_numel_of_tensor if type.is_block() else SHAPE_AND_NUMEL_OF_SCALAR
    )


def _init_handle(self: Any, data: np.ndarray, dtype: Any) -> None:
    self.data, self.dtype, self.attr = data, dtype, {}
    if not dtype.is_ptr() and data.itemsize > 1:
        assert data.itemsize * 8 <= dtype.primitive_bitwidth, "numbers are wider than their type"


def _equal_or(compare: Callable) -> Callable:
    def quick(self: Any, other: Any) -> bool:
        if type(self) is type(other) is core.dtype:
            return self.name == other.name
        return self is other or compare(self, other)

    return quick


def _unwrap_or(unwrap: Callable) -> Callable:
    nothing_to_unwrap = {core.tensor, int, float, bool, type(None)}
    return lambda x: x if type(x) in nothing_to_unwrap else unwrap(x)


def _splat(_builder: Any, type: Any, scalar: TensorHandle) -> TensorHandle:
    return TensorHandle(np.broadcast_to(scalar.data, type.sizes), scalar.dtype.scalar)


def _likeness(x: Any) -> Hashable:
    return (type(x), x) if isinstance(x, (int, float)) else x.type.name


def _decide_once(decide: Callable) -> Callable:
    """Two operands, of the types and shapes that ``decide`` gave operands like them."""
    types_of: dict[tuple, list[Any]] = {}

    def quick(self: TritonSemantic, lhs: Any, rhs: Any, *args: bool, **kwargs: bool) -> tuple:
        key = _likeness(lhs), _likeness(rhs), args, *kwargs.items()
        types = types_of.get(key)
        if types is None:
            decided = decide(self, lhs, rhs, *args, **kwargs)
            types_of[key] = [x.type for x in decided]
            return decided
        return _of_type(self, lhs, types[0]), _of_type(self, rhs, types[1])

    return quick


def _of_type(semantic: TritonSemantic, x: Any, type: Any) -> Any:
    """``x`` as one of ``type``, which has its shape or one that it can be broadcast to."""
    if isinstance(x, (int, float)):
        key = x.__class__, x, type.name
        found = CONSTANTS.get(key)
        if found is None:
            constant = semantic.scalar_constant(x, type.scalar)
            found = CONSTANTS[key] = _of_type(semantic, constant, type)
        return found
    if x.type is type:
        return x
    if x.dtype is not type.scalar:
        x = semantic.cast(x, type.scalar)
    if x.type is type or not type.is_block():
        return x
    data = np.broadcast_to(x.handle.data, type.sizes)
    return core.tensor(TensorHandle(data, type.scalar), type)


CONSTANTS: dict[tuple, Any] = {}  # tensors, which nothing changes
