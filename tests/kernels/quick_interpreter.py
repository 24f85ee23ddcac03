"""A faster Triton interpreter, whose matrix products round equally on every CPU.

The interpreter spends nearly all its time on types, not on numbers: for each operation it promotes
the types of both operands and infers the shape of the result. Here these results are the same, but
computed once for operands of equal signature.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Hashable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from triton.language import core
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def install() -> None:
    """Patch Triton's interpreter for the rest of this process."""
    # Triton calls BLAS, which rounds by CPU model and by the order of the operands; on a GPU, the
    # order does not matter.
    InterpreterBuilder.create_dot = _product_rounded_once
    InterpreterBuilder.create_fma = _multiply_add
    # Triton repeats every sum of integers in int64, for an assertion that it does not evaluate.
    interpreter.interpreter_builder.options = replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )
    # Triton patches its whole language at every call of a function, and builds the table of NumPy
    # dtypes for every block.
    interpreter._patch_lang = functools.partial(_patch_once, interpreter._patch_lang, set())
    interpreter._patch_attr = _patch_attribute
    scalar_dtype = functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = functools.partial(_numpy_dtype, scalar_dtype)

    core.dtype.scalar = _cached_scalar(lambda dtype: dtype)
    core.pointer_type.scalar = _cached_scalar(lambda dtype: dtype)
    core.block_type.scalar = _cached_scalar(lambda dtype: dtype.element_ty)
    core.block_type.__new__ = _block_type
    core.block_type.__init__ = lambda self, element_ty, shape: None
    core.dtype.__eq__ = _equal_or(core.dtype.__eq__)
    core.tensor.__init__ = _init_tensor
    core.tensor.dtype = property(lambda self: self.type.scalar)
    core.tensor.shape = property(lambda self: _shape_and_numel(self)[0])
    core.tensor.numel = property(lambda self: _shape_and_numel(self)[1])
    core._unwrap_if_constexpr = _unwrap_or(core._unwrap_if_constexpr)
    TensorHandle.__init__ = _init_handle
    InterpreterBuilder.create_splat = _splat
    InterpreterBuilder.binary_op = _binary_op
    InterpreterBuilder.create_expand_dims = _expand_dims
    InterpreterBuilder.create_load = _load
    for name in ("grid_idx", "grid_dim"):
        setattr(InterpreterBuilder, name, _thread_local(name, threading.local()))


def _thread_local(name: str, values: threading.local) -> property:
    """A property with a value per thread; each thread runs one program."""

    def get(_builder: Any) -> Any:
        return getattr(values, name, None)

    return property(get, lambda _builder, value: setattr(values, name, value))


def _product_rounded_once(_builder: Any, a: Any, b: Any, acc: Any, *_options: Any) -> TensorHandle:
    product = np.matmul(_numbers(a), _numbers(b), dtype=np.float64)
    return TensorHandle(product.astype(acc.data.dtype) + acc.data, acc.dtype.scalar)


def _multiply_add(_builder: Any, a: Any, b: Any, c: Any) -> TensorHandle:
    """Fused multiply-add, rounded once, like on a GPU."""
    exact = a.data.astype(np.float64) * b.data + c.data
    return TensorHandle(exact.astype(a.data.dtype), a.dtype.scalar)


def _numbers(operand: Any) -> np.ndarray:
    if operand.dtype.scalar == core.bfloat16:  # stored as the upper half of an fp32
        return (operand.data.astype(np.uint32) << 16).view(np.float32)
    return operand.data


def _patch_once(patch: Any, patched: set[int], function: Any) -> Any:
    if id(function.__globals__) not in patched:  # globals of a module
        patched.add(id(function.__globals__))
        patch(function)
    return NOTHING_TO_RESTORE


NOTHING_TO_RESTORE = interpreter._LangPatchScope()
BUILDER = interpreter.interpreter_builder
SEMANTIC = interpreter.interpreter_semantic
TENSOR = core.tensor


def _patch_attribute(obj: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
    function = getattr(member, "__wrapped__", member)  # which takes _semantic
    scope.set_attr(obj, name, _record_once(name, function))


def _cached_scalar(function: Callable) -> functools.cached_property:
    """Return ``function`` as the cached property ``scalar``."""
    prop = functools.cached_property(function)
    prop.__set_name__(None, "scalar")
    return prop


def _numpy_dtype(scalar_dtype: Callable, dtype: Any) -> np.dtype:
    scalar = dtype.scalar
    return np.dtype(np.uint64) if scalar.is_ptr() else scalar_dtype(scalar)


def _block_type(cls: Any, element_ty: Any, shape: Any) -> Any:
    """Return the block type of this element and shape, from a cache."""
    sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
    key = element_ty.name, getattr(element_ty, "address_space", None), sizes
    block_type = BLOCK_TYPES.get(key)
    if block_type is None:
        block_type = object.__new__(cls)
        INIT_BLOCK_TYPE(block_type, element_ty, list(sizes))
        block_type.sizes = sizes
        block_type.tensor_shape_and_numel = (
            core.tuple([core.constexpr(size) for size in sizes]),
            core.constexpr(block_type.numel),
        )
        BLOCK_TYPES[key] = block_type
    return block_type


BLOCK_TYPES: dict[tuple, Any] = {}
INIT_BLOCK_TYPE = core.block_type.__init__
SCALAR_SHAPE_AND_NUMEL = core.tuple([]), core.constexpr(1)


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type = handle, type


def _shape_and_numel(tensor: Any) -> tuple[Any, Any]:
    if tensor.type.is_block():
        return tensor.type.tensor_shape_and_numel
    return SCALAR_SHAPE_AND_NUMEL


def _init_handle(self: Any, data: np.ndarray, dtype: Any) -> None:
    self.data, self.dtype, self.attr = data, dtype, {}
    assert not _is_wider(data, dtype), "numbers are wider than their type"


def _is_wider(data: np.ndarray, dtype: Any) -> bool:
    """Whether the elements of ``data`` have more bits than ``dtype``, if that is no pointer."""
    return (
        data.itemsize > 1
        and type(dtype) is core.dtype
        and data.itemsize * 8 > dtype.primitive_bitwidth
    )


def _equal_or(compare: Callable) -> Callable:
    def quick(self: Any, other: Any) -> bool:
        if type(self) is type(other) is core.dtype:
            return self.name == other.name
        return self is other or compare(self, other)

    return quick


def _unwrap_or(unwrap: Callable) -> Callable:
    nothing_to_unwrap = {core.tensor, int, float, bool, type(None)}
    return lambda x: x if type(x) in nothing_to_unwrap else unwrap(x)


def _binary_op(_builder: Any, lhs: TensorHandle, rhs: TensorHandle, op: Callable) -> TensorHandle:
    output, dtype = op(lhs.data, rhs.data), lhs.dtype.scalar
    if _is_wider(output, dtype):
        output = output.astype(interpreter._get_np_dtype(dtype))
    return TensorHandle(output, dtype)


def _splat(_builder: Any, type: Any, scalar: TensorHandle) -> TensorHandle:
    return TensorHandle(np.broadcast_to(scalar.data, type.sizes), scalar.dtype.scalar)


def _load(builder: InterpreterBuilder, ptr: TensorHandle, *options: Any) -> TensorHandle:
    return builder.create_masked_load(ptr, _full_mask(ptr.data.shape), None, *options)


@functools.cache
def _full_mask(shape: tuple[int, ...]) -> TensorHandle:
    return TensorHandle(np.ones(shape, bool), core.int1)


def _expand_dims(_builder: Any, arg: TensorHandle, axis: int) -> TensorHandle:
    return TensorHandle(arg.data[(slice(None),) * axis + (None,)], arg.dtype.scalar)


class NoSignatureError(Exception):
    """A call may depend on more than the signature of its arguments."""


CONSTANTS = {int, float, bool, str, type(None)}


def _signature(x: Any, operands: list[Any], is_operator: bool = False) -> Hashable:
    """Signature of an argument: all that a call's decisions may depend on. Values that the call
    only computes with are appended to ``operands``.

    These are tensors and, if ``is_operator``, integers, which count loops: their signature is the
    sign and the number of bits.
    """
    kind = type(x)
    if kind is TENSOR:
        operands.append(x.handle)
        return x.type.name
    if kind is int and is_operator:
        operands.append(x)
        return x < 0, (~x if x < 0 else x).bit_length()
    if kind in CONSTANTS:
        return (kind, x) if x != 0 else (kind, str(x))  # 0.0 is not -0.0
    if kind is core.constexpr:
        return kind, _signature(x.value, operands)
    if kind is list or kind is tuple:
        return kind, *[_signature(y, operands) for y in x]
    if kind is slice and x.start is x.stop is x.step is None:
        return kind
    if kind is slice:
        return kind, *[_signature(y, operands) for y in (x.start, x.stop, x.step)]
    if isinstance(x, core.dtype):
        return kind, x.name
    raise NoSignatureError


def _record_once(name: str, function: Callable) -> Callable:
    """Wrap a function of Triton's language: record it once per signature, and then repeat it."""
    known: dict[tuple, Callable | None] = {}
    is_operator = name.startswith("__")

    def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        if SEMANTIC.builder is not BUILDER:  # called by a function that is being recorded
            return function(*args, _semantic=SEMANTIC, **kwargs)
        if len(args) == 2 and not kwargs:  # most calls
            a, b = args
            if type(a) is type(b) is TENSOR:
                repeat = known.get((a.type.name, b.type.name))
                if repeat is not None:
                    return repeat(a.handle, b.handle)
        key: list[Hashable] = []
        operands: list[Any] = []
        try:
            for x in args:
                if type(x) is TENSOR:
                    key.append(x.type.name)
                    operands.append(x.handle)
                else:
                    key.append(_signature(x, operands, is_operator))
            for name, x in kwargs.items():
                key.append((name, _signature(x, operands)))
            repeat = known[tuple(key)]
        except NoSignatureError:
            repeat = None
        except KeyError:
            recording = Recording()
            result = recording.run(function, args, kwargs, is_operator)
            known[tuple(key)] = recording.finish(result)
            return result
        if repeat is None:
            return function(*args, _semantic=SEMANTIC, **kwargs)
        return repeat(*operands)

    return call


class Operand(int):
    """An integer that the recorded call may only pass on to the builder."""


class Recording:
    """Records the calls that a function makes to the interpreter's builder.

    It replaces the builder meanwhile. Values are numbered as registers: first the operands of the
    function, then the results in order.
    """

    def __init__(self) -> None:
        self.registers: list[Any] = []
        self.register_ids: dict[int, int] = {}  # by id() of a handle or an Operand
        self.steps: list[tuple[str, Callable, list[int], int]] = []
        self.is_repeatable = True

    def run(self, function: Callable, args: tuple, kwargs: dict, is_operator: bool) -> Any:
        args = [self._operand(x, is_operator) for x in args]
        kwargs = {name: self._operand(x) for name, x in kwargs.items()}
        self.num_operands = len(self.registers)
        SEMANTIC.builder = self
        try:
            return function(*args, _semantic=SEMANTIC, **kwargs)
        finally:
            SEMANTIC.builder = BUILDER

    def _operand(self, x: Any, is_operator: bool = False) -> Any:
        """Copy ``x`` with a new handle each: two operands may be the same tensor."""
        kind = type(x)
        if kind is core.tensor:
            handle = TensorHandle(x.handle.data, x.handle.dtype)
            self._new_register(handle)
            return core.tensor(handle, x.type)
        if kind is int and is_operator:
            number = Operand(x)
            self._new_register(number)
            return number
        if kind is list or kind is tuple:
            return kind([self._operand(y) for y in x])
        return x

    def _new_register(self, value: Any) -> int:
        self.registers.append(value)
        if isinstance(value, (TensorHandle, Operand)):
            self.register_ids[id(value)] = len(self.registers) - 1
        return len(self.registers) - 1

    def _register(self, value: Any) -> int:
        if id(value) in self.register_ids:
            return self.register_ids[id(value)]
        self.is_repeatable &= not isinstance(value, TensorHandle)  # of unknown origin
        if isinstance(value, (list, tuple)):
            self.is_repeatable &= not any(isinstance(x, TensorHandle) for x in value)
        return self._new_register(value)

    def _is_constant(self, value: Any) -> bool:
        at = self.register_ids.get(id(value), -1)
        return at >= self.num_operands and all(at != out for *_, out in self.steps)

    def __getattr__(self, name: str) -> Any:
        member = getattr(BUILDER, name)
        return functools.partial(self._step, name, member) if callable(member) else member

    def _step(self, name: str, method: Callable, *args: Any) -> Any:
        result = method(*args)
        is_constant = name.startswith("get_") and not any(type(x) is Operand for x in args)
        if name in BROADCASTS:
            is_constant = self._is_constant(args[BROADCASTS[name]])
        at = [] if is_constant else [self._register(x) for x in args]
        out = self._new_register(result)
        if not is_constant:
            self.steps.append((name, method, at, out))
        if isinstance(result, tuple):
            for i, x in enumerate(result):
                part = operator.itemgetter(i)
                self.steps.append(("", part, [out], self._new_register(x)))
        return result

    def finish(self, result: Any) -> Callable[[list[Any]], Any] | None:
        """Return a function that repeats the recording with other operands, if that is possible."""
        is_several = type(result) is tuple
        results = result if is_several else (result,)
        types = []
        for x in results:
            self.is_repeatable &= type(x) in CONSTANTS or isinstance(
                x, (core.tensor, core.constexpr)
            )
            types.append(x.type if isinstance(x, core.tensor) else None)
        outs = [self._register(getattr(x, "handle", x)) for x in results]
        self._remove_broadcasts(outs)
        read = {i for *_, at, _ in self.steps for i in at}
        for i, x in enumerate(self.registers[: self.num_operands]):
            self.is_repeatable &= type(x) is not Operand or x in (0, -1) or i in read
        if not self.is_repeatable:
            return None
        return self._compiled(outs, types, is_several)

    def _compiled(self, outs: list[int], types: list[Any], is_several: bool) -> Callable:
        body = Body(self.registers, self.num_operands, self.steps)
        for step in self.steps:
            body.add(*step)
        results = []
        for i, type_ in zip(outs, types, strict=True):
            results.append(body.handle(i))
            if type_ is not None:
                results[-1] = f"tensor({results[-1]}, {body.constant(type_)})"
        body.lines.append(f"return {', '.join(results)}{',' * is_several}")
        return body.function()

    def _remove_broadcasts(self, outs: list[int]) -> None:
        sources = {
            out: at[BROADCASTS[name]] for name, _, at, out in self.steps if name in BROADCASTS
        }
        for name, _, at, out in self.steps:
            if name in ELEMENTWISE:
                shorter = [sources.get(i, i) for i in at]
                shapes = [self.registers[i].data.shape for i in shorter]
                if np.broadcast_shapes(*shapes) == self.registers[out].data.shape:
                    at[:] = shorter
        read = {*outs}.union(*(at for *_, at, _ in self.steps))
        self.steps = [step for step in self.steps if step[0] not in BROADCASTS or step[3] in read]


class Body:
    """Code of a function that repeats recorded steps.

    Steps that are a single NumPy call become that call; their results get a handle only if other
    steps or the caller need it. The handle of register 3 is ``r3``, its array is ``d3``.
    """

    def __init__(self, registers: list[Any], num_operands: int, steps: list[tuple]) -> None:
        self.registers, self.num_operands = registers, num_operands
        self.computed = {*range(num_operands)} | {out for *_, out in steps}
        self.may_inline = all(name != "create_ashr" for name, *_ in steps)  # writes into operands
        self.lines: list[str] = []
        self.known = {f"r{i}" for i in range(num_operands)}
        self.names = {"tensor": core.tensor, "new": object.__new__, "Handle": TensorHandle}

    def constant(self, value: Any) -> str:
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def handle(self, i: int) -> str:
        name = f"r{i}"
        if name not in self.known:
            if i in self.computed:  # by NumPy
                dtype = self.constant(self.registers[i].dtype)
                self.lines.append(f"{name} = new(Handle)")
                self.lines.append(f"{name}.data, {name}.dtype, {name}.attr = d{i}, {dtype}, {{}}")
            else:
                self.names[name] = self.registers[i]
            self.known.add(name)
        return name

    def data(self, i: int) -> str:
        name = f"d{i}"
        if name not in self.known:
            if i in self.computed:
                self.lines.append(f"{name} = r{i}.data")
            else:
                self.names[name] = self.registers[i].data
            self.known.add(name)
        return name

    def add(self, name: str, method: Callable, at: list[int], out: int) -> None:
        expression = self._by_numpy(name, at, out) if self.may_inline else None
        if expression is None:
            arguments = ", ".join(map(self.handle, at))
            self.lines.append(f"r{out} = {self.constant(method)}({arguments})")
            self.known.add(f"r{out}")
        else:
            self.lines.append(f"d{out} = {expression}")
            self.known.add(f"d{out}")

    def _by_numpy(self, name: str, at: list[int], out: int) -> str | None:
        args, result = [self.registers[i] for i in at], self.registers[out]
        if name in NUMPY_FUNCTIONS:
            function, count = NUMPY_FUNCTIONS[name]
            with np.errstate(all="ignore"):
                dtype = function(*(x.data for x in args[:count])).dtype
            call = f"{self.constant(function)}({', '.join(map(self.data, at[:count]))})"
            same = dtype == result.data.dtype
            return call if same else f"{call}.astype({self.constant(result.data.dtype)})"
        if name in INTEGERS and type(args[0]) is Operand:
            make, dtype = self.constant(np.array), self.constant(result.data.dtype)
            return f"{make}((r{at[0]},), {dtype})"
        if name in CASTS and core.bfloat16 not in (args[0].dtype.scalar, result.dtype):
            return f"{self.data(at[0])}.astype({self.constant(result.data.dtype)})"
        if name == "create_addptr":
            width = max(1, args[0].get_element_ty().primitive_bitwidth // 8)
            offset = f"{self.data(at[1])}.astype({self.constant(np.dtype(np.uint64))})"
            return f"{self.data(at[0])} + {width} * {offset}"
        if name == "create_expand_dims":
            return f"{self.data(at[0])}[{':, ' * args[1]}None]"
        if name == "create_reshape":
            return f"{self.data(at[0])}.reshape({self.constant(result.data.shape)})"
        if name in BROADCASTS:
            source = at[BROADCASTS[name]]
            shape, dtype = map(self.constant, (result.data.shape, result.data.dtype))
            self.lines.append(f"d{out} = {self.constant(np.empty)}({shape}, {dtype})")
            self.lines.append(f"d{out}[...] = {self.data(source)}")
            return f"d{out}"
        if name == "create_masked_load" and args[2] is not None:
            load, dtype = map(self.constant, (interpreter._interpreter.load, result.data.dtype))
            return f"{load}({', '.join(map(self.data, at[:3]))}, {dtype})"
        return None

    def function(self) -> Callable:
        operands = ", ".join(f"r{i}" for i in range(self.num_operands))
        exec("\n    ".join([f"def repeat({operands}):", *self.lines]), self.names)
        return self.names["repeat"]


def _attribute_names(method: Any) -> tuple[str, ...]:
    """Names of the attributes that ``method`` uses."""
    return getattr(getattr(method, "__code__", None), "co_names", ())


BROADCASTS = {"create_broadcast": 0, "create_splat": 1}  # which argument is broadcast
ELEMENTWISE = {
    name
    for name, method in vars(InterpreterBuilder).items()
    if name == "create_addptr" or {"binary_op", "ternary_op"} & {*_attribute_names(method)}
} - {"create_ashr"}  # which writes into its operands


def _numpy_function(method: Callable) -> tuple[Callable, int]:
    """The NumPy function of an operation, and its number of operands."""
    probe = SimpleNamespace(
        unary_op=lambda *operands: (operands[-1], 1),
        binary_op=lambda *operands: (operands[-1], 2),
        ternary_op=lambda *operands: (operands[-1], 3),
    )
    return method(probe, *[None] * (method.__code__.co_argcount - 1))


NUMPY_FUNCTIONS = {
    name: _numpy_function(method)
    for name, method in vars(InterpreterBuilder).items()
    if {"unary_op", "binary_op", "ternary_op"} & {*_attribute_names(method)}
    and method.__name__ == "<lambda>"
}
CASTS = {
    name
    for name, method in vars(InterpreterBuilder).items()
    if "cast_impl" in _attribute_names(method)
}
INTEGERS = {f"get_{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
