"""Records what an op does on the host, as a program that ``replay.cpp`` runs again.

The op's own Python runs once, on real tensors that keep a record. Lengths that may differ in later
calls are objects that know the expression they came from. Where Python branches on one, a guard
says for which lengths the program holds. What cannot be recorded ends the recording.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import operator
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from torchrec_jagged_attn.runtime.launch import Launcher

_logger = logging.getLogger(__name__)


class UnrecordableError(Exception):
    """An op did what a program does not hold."""


def record(
    function: Callable[..., Sequence[Tensor | None]],
    tensors: Sequence[Tensor | None],
    axes: Sequence[int],
    lengths: Sequence[int],
    make_program: Callable[..., Any],
) -> Any | None:
    """The program of ``function(*tensors, *lengths)``, which is run; or None where it cannot be
    recorded.

    Args:
        function: from tensors and numbers to tensors.
        tensors: its first arguments, the very first of them no ``None``.
        axes: of each, the axis along which its length may differ in other calls, -1 for none.
        lengths: its other arguments, which may differ in other calls.
        make_program: ``Program`` of ``replay.cpp``.
    """
    recorder = Recorder()
    try:
        with torch.no_grad():
            traced = [
                None if tensor is None else recorder.input(number, tensor, axis)
                for number, (tensor, axis) in enumerate(zip(tensors, axes, strict=True))
            ]
            recorder.num_inputs = recorder.num_memories = len(traced)
            numbers = [
                Length(recorder, recorder.index_of(("length", at, 0)), length)
                for at, length in enumerate(lengths)
            ]
            Launcher.observer = recorder.launch
            try:
                outputs = function(*traced, *numbers)
            finally:
                Launcher.observer = None
        return recorder.program(outputs, make_program)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # UnrecordableError, or what the op says again when it is called
        _logger.debug("not replayed: %r", error)
        return None


Expression = tuple[str, int, int]  # see Recorder; replay.cpp has the names of operations


def _operators(operation: str) -> tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
    """Of a :class:`Length` and another number, and the other way round."""

    def combine(x: Length, other: Any) -> Any:
        return x.recorder.combine(operation, x, other)

    def reflected(x: Length, other: Any) -> Any:
        return x.recorder.combine(operation, other, x)

    return combine, reflected


class Length:
    """A length that knows its expression; and a guard wherever it decides something.

    It is no ``int``: Python and PyTorch would take its value without asking.
    """

    def __init__(self, recorder: Recorder, index: int, value: int) -> None:
        self.recorder, self.index, self.value = recorder, index, value

    def __index__(self) -> int:
        """Its value, which becomes the only one that the program is for."""
        self.recorder.decide("equal", self, self.value)
        return self.value

    def __bool__(self) -> bool:
        return self != 0

    __add__, __radd__ = _operators("add")
    __sub__, __rsub__ = _operators("subtract")
    __mul__, __rmul__ = _operators("multiply")
    __floordiv__, __rfloordiv__ = _operators("floor_divide")
    __mod__, __rmod__ = _operators("modulo")

    def __rlshift__(self, other: int) -> int:
        return other << self.__index__()

    def bit_length(self) -> Length:
        index = self.recorder.index_of(("bit_length", self.index, 0))
        return Length(self.recorder, index, self.value.bit_length())

    def __neg__(self) -> Any:
        return 0 - self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Number) and self.recorder.decide("equal", self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: Number) -> bool:
        return self.recorder.decide("less", self, other)

    def __gt__(self, other: Number) -> bool:
        return self.recorder.decide("less", other, self)

    def __le__(self, other: Number) -> bool:
        return not self > other

    def __ge__(self, other: Number) -> bool:
        return not self < other


Number = int | Length
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "floor_divide": operator.floordiv,
    "modulo": operator.mod,
}


def _value(number: Any) -> int:
    return number.value if isinstance(number, Length) else number


class Traced(Tensor):
    """A real tensor, of which the recorder knows what it is a view of."""

    recorder: Recorder
    plain: Tensor
    memory: int  # its number among the inputs and what is allocated
    offset: Number  # in elements
    sizes: tuple[Number, ...]
    strides: tuple[Number, ...]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None or not isinstance(args[0], Traced):
            of_getter = getattr(func, "__self__", func)
            raise UnrecordableError(getattr(of_getter, "__name__", str(func)))
        with torch._C.DisableTorchFunctionSubclass():
            try:
                return handler(*args, **(kwargs or {}))
            except TypeError as error:  # an argument that it does not know
                raise UnrecordableError(func.__name__) from error


class Recorder:
    """What a program is made of: expressions, guards, and steps, each of which may make a memory.

    An expression is an operation and its operands; others name it by its index in the list.
    """

    def __init__(self) -> None:
        self.expressions: list[Expression] = []
        self.indices: dict[Expression, int] = {}
        self.guards: dict[int, int] = {}
        self.steps: list[tuple[str, tuple]] = []
        self.num_inputs = self.num_memories = 0
        self.thread = threading.get_ident()
        self.descriptors: list[tuple] = []

    def index_of(self, expression: Expression) -> int:
        """Where an expression is, which is added if it is new."""
        if expression not in self.indices:
            self.indices[expression] = len(self.expressions)
            self.expressions.append(expression)
        return self.indices[expression]

    def index(self, value: Number) -> int:
        """Where ``value`` is among the expressions."""
        return value.index if isinstance(value, Length) else self.index_of(("constant", value, 0))

    def combine(self, operation: str, a: Any, b: Any) -> Any:
        """``a`` and ``b`` combined, which are integers."""
        if not (isinstance(a, Number) and isinstance(b, Number)):
            raise UnrecordableError(f"{operation} of {a!r} and {b!r}")
        if operation == "multiply":
            for one, other in ((a, b), (b, a)):
                if not isinstance(one, Length) and one == 1:
                    return other
        value = _OPERATORS[operation](_value(a), _value(b))
        return Length(self, self.index_of((operation, self.index(a), self.index(b))), value)

    def decide(self, operation: str, a: Number, b: Number) -> bool:
        """Compare, and guard what comes out."""
        plain = [_value(x) for x in (a, b)]
        result = plain[0] == plain[1] if operation == "equal" else plain[0] < plain[1]
        if self.index(a) != self.index(b):
            self.guards[self.index_of((operation, self.index(a), self.index(b)))] = int(result)
        return result

    def tensor(
        self,
        real: Tensor,
        memory: int,
        offset: Number,
        sizes: Sequence[Number],
        strides: Sequence[Number],
    ) -> Traced:
        """``real``, which is this view of a memory."""
        traced = real.as_subclass(Traced)
        traced.recorder, traced.plain, traced.memory = self, real, memory
        traced.offset, traced.sizes, traced.strides = offset, tuple(sizes), tuple(strides)
        return traced

    def axis(self, kind: str, number: int, axis: int, numbers: Sequence[int]) -> Length:
        """The ``"size"`` or the ``"stride"`` of an input along an axis, one of its ``numbers``."""
        return Length(self, self.index_of((kind, number, axis)), numbers[axis])

    def input(self, number: int, tensor: Tensor, axis: int) -> Traced:
        """An argument by its number; its length along ``axis``, if that is not -1, is a Length."""
        sizes: list[Any] = list(tensor.shape)
        strides: list[Any] = list(tensor.stride())
        if axis >= 0:
            sizes[axis] = self.axis("size", number, axis, tensor.shape)
            for before in reversed(range(axis)):
                strides[before] = self.axis("stride", number, before, tensor.stride())
                if strides[before] != sizes[before + 1] * strides[before + 1]:
                    raise UnrecordableError("a tensor that is not contiguous")
        return self.tensor(tensor.detach(), number, 0, sizes, strides)

    def allocate(self, like: Traced, sizes: Sequence[Number], dtype: Any = None) -> Traced:
        dtype = like.plain.dtype if dtype is None else dtype
        real = like.plain.new_empty([_value(size) for size in sizes], dtype=dtype)
        self.steps.append(("allocate", (dtype, [self.index(size) for size in sizes])))
        return self._made(real, sizes)

    def operator(
        self, op: torch._ops.OpOverload, arguments: Sequence[Any], sizes: Sequence[Number]
    ) -> Traced:
        """``op(*arguments)``, of PyTorch, which returns a contiguous tensor of these ``sizes``."""
        named = [*zip(op._schema.arguments, map(_plain, arguments), strict=False)]
        real = op(
            *(value for of_schema, value in named if not of_schema.kwarg_only),
            **{of_schema.name: value for of_schema, value in named if of_schema.kwarg_only},
        )
        if not real.is_contiguous() or [*real.shape] != [_value(size) for size in sizes]:
            raise UnrecordableError(f"{op} of such a shape")
        operands = [self._view(_traced(x)) if isinstance(x, Tensor) else x for x in arguments]
        self.steps.append(("operator", (op._schema.name, op._schema.overload_name, operands)))
        return self._made(real, sizes)

    def _made(self, real: Tensor, sizes: Sequence[Number]) -> Traced:
        memory, self.num_memories = self.num_memories, self.num_memories + 1
        return self.tensor(real, memory, 0, sizes, _contiguous_strides(sizes))

    def copy(self, x: Traced, dtype: torch.dtype | None = None) -> Traced:
        """``x`` contiguous, in memory of its own."""
        dtype = x.plain.dtype if dtype is None else dtype
        arguments = (x, dtype, False, True, torch.contiguous_format)
        return self.operator(torch.ops.aten.to.dtype, arguments, x.sizes)

    def launch(
        self, launcher: Launcher, grid: tuple[int, ...], arguments: tuple, constants: dict
    ) -> None:
        """Launch a kernel, and record that, unless another thread launches it."""
        if threading.get_ident() != self.thread:
            launcher.launch(grid, arguments, constants)
            return
        plain = _plain(arguments)
        compiled = launcher.launch(tuple(_value(n) for n in grid), plain, constants)
        indices = [self.index(n) for n in grid]
        if compiled is None:
            self.steps.append(self._call_of_interpreter(launcher, indices, arguments, constants))
            return
        _decide_traits(arguments, launcher.specialized)
        meta = compiled.metadata
        if (
            torch.version.cuda is None
            or meta.num_ctas != 1
            or meta.launch_cooperative_grid
            or meta.global_scratch_size
            or meta.profile_scratch_size
        ):
            raise UnrecordableError("a kernel that needs more than its parameters")
        parameters: list[tuple[str, int, int, int]] = []
        boxes = list(getattr(meta, "tensordesc_meta", None) or [])
        types = list(compiled.src.signature.values())
        self.add_parameters(types, arguments, boxes, parameters)
        handle = (compiled.function, meta.num_warps, meta.shared, bool(meta.launch_pdl))
        indices += [self.index(1)] * (3 - len(indices))
        self.steps.append(("launch", (*handle, indices, parameters)))

    def add_parameters(
        self, types: Sequence, arguments: Sequence, boxes: list, parameters: list
    ) -> None:
        """Add a kernel's parameters, as ``replay.cpp`` packs them.

        Args:
            types: of the kernel's signature, in Triton's words.
            arguments: of the launch, traced.
            boxes: what Triton says of each descriptor among them, in their order; is emptied.
            parameters: kind, memory, and what goes with the kind.
        """
        for kind, argument in zip(types, arguments, strict=False):
            if isinstance(kind, tuple):
                self.add_parameters(kind, argument, boxes, parameters)
            elif kind == "constexpr" or argument is None:
                continue
            elif kind.startswith("*") and isinstance(argument, Traced):
                size = argument.plain.element_size()
                parameters.append(("pointer", argument.memory, self.index(argument.offset), size))
            elif kind in ("i1", "u1", "i8", "i16", "i32", "i64", "u32", "u64"):
                parameters.append(("expression", 0, self.index(argument), 0))
            elif kind in ("fp32", "fp64"):
                packed = struct.pack("<f4x" if kind == "fp32" else "<d", argument)
                parameters.append(("constant_bits", 0, struct.unpack("<q", packed)[0], 0))
            elif kind.startswith("tensordesc") and boxes:
                self._add_descriptor(argument, boxes.pop(0), parameters)
            else:
                raise UnrecordableError(f"a parameter of type {kind}")

    def _add_descriptor(self, x: TensorDescriptor, meta: dict[str, Any], parameters: list) -> None:
        """Parameters of a descriptor: that itself, its shape and its strides."""
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

        if meta["fp4_padded"]:
            raise UnrecordableError("a descriptor of this kind")
        base = _traced(x.base)
        sizes, strides = ([self.index(n) for n in numbers] for numbers in (x.shape, x.strides))
        box = (
            TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], meta["swizzle"], x.padding == "nan",
            sizes, strides, list(meta["block_size"]),
        )  # fmt: skip
        self.descriptors.append(box)
        at = self.index(base.offset), len(self.descriptors) - 1
        parameters.append(("descriptor", base.memory, *at))
        parameters += [("expression", 0, index, 0) for index in (*sizes, *strides)]

    def _call_of_interpreter(
        self, launcher: Launcher, indices: list[int], arguments: tuple, constants: dict
    ) -> tuple[str, tuple]:
        flat: list[Any] = []

        def flatten(argument: Any) -> Callable[[list], Any]:
            if isinstance(argument, tuple):
                fields = [flatten(field) for field in argument]
                make = getattr(argument, "_make", tuple)  # of a record
                return lambda values: make(field(values) for field in fields)
            if isinstance(argument, TensorDescriptor):
                made = _rebuild(argument, flatten)
                return lambda values: _rebuild(made, lambda field: field(values))
            if not isinstance(argument, (Tensor, Length)):
                return lambda _: argument
            is_length, at = isinstance(argument, Length), len(flat)
            flat.append(argument.index if is_length else self._view(_traced(argument)))
            return lambda values: values[at]

        rebuild = [flatten(argument) for argument in arguments]

        def call(grid: tuple[int, ...], values: list) -> None:
            launcher.launch(grid, tuple(make(values) for make in rebuild), constants)

        return ("call", (call, indices, flat))

    def _view(self, x: Traced) -> tuple[int, int, list[int], list[int]]:
        sizes, strides = ([self.index(n) for n in numbers] for numbers in (x.sizes, x.strides))
        return x.memory, self.index(x.offset), sizes, strides

    def program(self, outputs: Sequence[Tensor | None], make_program: Callable[..., Any]) -> Any:
        views = [None if x is None else self._view(_traced(x)) for x in outputs]
        program = make_program(self.expressions, list(self.guards.items()))
        for descriptor in self.descriptors:
            program.descriptor(*descriptor)
        for name, arguments in self.steps:
            getattr(program, name)(*arguments)
        for view in views:
            program.output(view)
        program.finish(self.num_inputs)
        return program


def _traced(x: Any) -> Traced:
    if not isinstance(x, Traced):
        raise UnrecordableError("a tensor that was made of nothing")
    return x


def _plain(argument: Any) -> Any:
    """``argument`` without a record."""
    if isinstance(argument, Traced):
        return argument.plain
    if isinstance(argument, Length):
        return argument.value
    if isinstance(argument, tuple):
        fields = [_plain(field) for field in argument]
        return type(argument)(*fields) if hasattr(argument, "_fields") else tuple(fields)
    if isinstance(argument, TensorDescriptor):
        return _rebuild(argument, _plain)
    return argument


def _rebuild(x: TensorDescriptor, make: Callable[[Any], Any]) -> TensorDescriptor:
    """``x`` with another base, shape and strides."""
    shape, strides = ([make(n) for n in numbers] for numbers in (x.shape, x.strides))
    return dataclasses.replace(x, base=make(x.base), shape=shape, strides=strides)


def _decide_traits(arguments: tuple, specialized: Iterable[bool]) -> None:
    """Guard what Triton compiles a kernel for, see ``launch.py``."""
    for argument, is_specialized in zip(arguments, specialized, strict=False):
        if isinstance(argument, Length):
            _ = argument >= 2**31, is_specialized and (argument == 1, argument % 16 == 0)
        elif isinstance(argument, Traced):
            _ = _Address(argument) % 16
        elif isinstance(argument, tuple):
            _decide_traits(argument, itertools.repeat(True))


def _contiguous_strides(sizes: Sequence[Number]) -> list[Any]:
    strides: list[Any] = []
    step: Any = 1
    for size in reversed(sizes):
        strides.append(step)
        step = size * step
    return strides[::-1]


def _product(numbers: Sequence[Number]) -> Any:
    product: Any = 1
    for number in numbers:
        product = number * product
    return product


def _is_contiguous(x: Traced) -> bool:
    """Whatever the lengths are."""
    for size, step, expected in zip(x.sizes, x.strides, _contiguous_strides(x.sizes), strict=True):
        is_one = not isinstance(size, Length) and size == 1
        same = x.recorder.index(step) == x.recorder.index(expected)
        if not (is_one or same or step == expected):
            return False
    return True


def _sizes(arguments: tuple) -> list[Any]:
    """Of ``f(2, 3)``, ``f([2, 3])`` or ``f(size=…)``."""
    return list(
        arguments[0] if len(arguments) == 1 and not isinstance(arguments[0], Number) else arguments
    )


def _new_empty(x: Traced, *sizes: Any, dtype: Any = None) -> Traced:
    return x.recorder.allocate(x, _sizes(sizes), dtype)


def _new_full(x: Traced, sizes: Any, value: Any, dtype: Any = None) -> Traced:
    out = x.recorder.allocate(x, sizes, dtype)
    return x.recorder.operator(torch.ops.aten.fill_.Scalar, (out, value), sizes)


def _new_zeros(x: Traced, *sizes: Any, dtype: Any = None) -> Traced:
    return _new_full(x, _sizes(sizes), 0, dtype)


def _empty_like(x: Traced, dtype: Any = None) -> Traced:
    return x.recorder.allocate(_contiguous(x), x.sizes, dtype)


def _contiguous(x: Traced) -> Traced:
    return x if _is_contiguous(x) else x.recorder.copy(x)


def _reshape(x: Traced, *sizes: Any) -> Traced:
    """Where PyTorch copies, a copy; else a view, since products may round by their strides."""
    if _is_contiguous(x):
        return _view(x, *sizes)
    new = _new_sizes(x, sizes)
    strides = _strides_of_view(x, new)
    if strides is None:
        return _view(x.recorder.copy(x), *new)
    real = x.plain.reshape([_value(size) for size in new])
    return x.recorder.tensor(real, x.memory, x.offset, new, strides)


def _strides_of_view(x: Traced, sizes: Sequence[Number]) -> list[Any] | None:
    """Those of ``x`` as a view of these ``sizes``; ``None`` where there is none.

    Axes of ``x`` that lie one in the other are a run, which axes of the view divide.
    """
    if _product(x.sizes) == 0:
        return None
    strides: list[Any] = []
    left, step, old, new = list(sizes), x.strides[-1], 1, 1  # of a run: elements seen of each
    for axis in reversed(range(len(x.sizes))):
        old = old * x.sizes[axis]
        if axis > 0 and (x.sizes[axis - 1] == 1 or x.strides[axis - 1] == old * step):
            continue
        while left and (new < old or left[-1] == 1):
            strides.insert(0, new * step)
            new = new * left.pop()
        if new != old:
            return None
        if axis > 0:
            step, old, new = x.strides[axis - 1], 1, 1
    return strides


def _view(x: Traced, *sizes: Any) -> Traced:
    if not _is_contiguous(x):
        raise UnrecordableError("a view of what is not contiguous")
    new = _new_sizes(x, sizes)
    real = x.plain.reshape([_value(size) for size in new])
    return x.recorder.tensor(real, x.memory, x.offset, new, _contiguous_strides(new))


def _new_sizes(x: Traced, sizes: tuple) -> list[Any]:
    """What ``x.view`` is given, with the size that stands for -1."""
    new = _sizes(sizes)
    if not all(isinstance(size, Number) for size in new):
        raise UnrecordableError("view")
    unknown = [at for at, size in enumerate(new) if not isinstance(size, Length) and size == -1]
    for at in unknown:
        known = [size for other, size in enumerate(new) if other != at]
        new[at] = _product(x.sizes) // _product(known)
    return new


def _unsqueeze(x: Traced, dim: int) -> Traced:
    sizes, strides = list(x.sizes), list(x.strides)
    dim = dim if dim >= 0 else dim + len(sizes) + 1
    strides.insert(dim, sizes[dim] * strides[dim] if dim < len(sizes) else 1)
    sizes.insert(dim, 1)
    return x.recorder.tensor(x.plain.unsqueeze(dim), x.memory, x.offset, sizes, strides)


def _narrow(x: Traced, begin: Any, end: Any) -> Traced:
    """Rows of the first axis, from ``begin`` to ``end``."""
    sizes = (end - begin, *x.sizes[1:])
    real = x.plain[_value(begin) : _value(end)]
    return x.recorder.tensor(real, x.memory, x.offset + begin * x.strides[0], sizes, x.strides)


def _getitem(x: Traced, index: Any) -> Traced:
    size = x.sizes[0]
    if isinstance(index, Number) and 0 <= index < size:
        return _select(x, 0, index)
    if isinstance(index, slice) and index.step is None:
        begin = 0 if index.start is None else index.start
        end = size if index.stop is None else index.stop
        if 0 <= begin <= end <= size:
            return _narrow(x, begin, end)
    raise UnrecordableError(f"[{index}]")


def _select(x: Traced, dim: int, index: Number) -> Traced:
    sizes, strides = list(x.sizes), list(x.strides)
    offset = x.offset + index * strides[dim]
    del sizes[dim], strides[dim]
    return x.recorder.tensor(x.plain.select(dim, _value(index)), x.memory, offset, sizes, strides)


def _unbind(x: Traced, dim: int = 0) -> tuple[Traced, ...]:
    return tuple(_select(x, dim, at) for at in range(x.sizes[dim]))


def _chunk(x: Traced, chunks: int, dim: int = 0) -> tuple[Traced, ...]:
    size = x.sizes[0]
    if dim != 0 or size % chunks:
        raise UnrecordableError("chunk")
    return tuple(_narrow(x, size // chunks * i, size // chunks * (i + 1)) for i in range(chunks))


def _to(x: Traced, *arguments: Any, dtype: Any = None, copy: bool = False) -> Traced:
    (wanted,) = [*arguments, *([] if dtype is None else [dtype])]
    if not isinstance(wanted, torch.dtype):
        raise UnrecordableError("to")
    return _clone(x, wanted) if copy or wanted != x.plain.dtype else x


def _clone(x: Traced, dtype: torch.dtype | None = None) -> Traced:
    """A copy, which in PyTorch has the strides of ``x`` if that has no gaps."""
    if not _is_contiguous(x) and not torch.empty_like(x.plain).is_contiguous():
        raise UnrecordableError("a copy that is not contiguous")
    return x.recorder.copy(x, dtype)


def _transpose(x: Traced) -> Traced:
    sizes, strides = ([*n[:-2], n[-1], n[-2]] for n in (x.sizes, x.strides))
    return x.recorder.tensor(x.plain.mT, x.memory, x.offset, sizes, strides)


def _sum(x: Traced, dim: int, keepdim: bool = False, out: Traced | None = None) -> Traced:
    """Contiguous, as ``out`` is."""
    sizes = _reduced(x, dim, keepdim)
    out = x.recorder.allocate(x, sizes) if out is None else out
    arguments = (x, [dim], keepdim, None, out)
    return x.recorder.operator(torch.ops.aten.sum.IntList_out, arguments, sizes)


def _any(x: Traced, dim: int, keepdim: bool = False) -> Traced:
    sizes = _reduced(_same_sizes(x), dim, keepdim)
    return x.recorder.operator(torch.ops.aten.any.dim, (x, dim, keepdim), sizes)


def _reduced(x: Traced, dim: int, keepdim: bool) -> list[Number]:
    sizes = list(x.sizes)
    sizes[dim : dim + 1] = [1] if keepdim else []
    return sizes


def _same_sizes(x: Traced, *others: Any) -> Traced:
    """``x``, which like all tensors among the ``others`` is contiguous, and of the same sizes."""
    for tensor in (x, *(other for other in others if isinstance(other, Traced))):
        if not _is_contiguous(tensor) or tensor.sizes != x.sizes:
            raise UnrecordableError("tensors that are not contiguous, or not of one size")
    return x


def _elementwise(op: torch._ops.OpOverload) -> Callable[..., Traced]:
    return lambda x, *others: x.recorder.operator(op, (_same_sizes(x, *others), *others), x.sizes)


def _subtract(x: Traced, y: Any) -> Traced:
    op = torch.ops.aten.sub
    return _elementwise(op.Tensor if isinstance(y, Traced) else op.Scalar)(x, y)


def _argsort(x: Traced, dim: int = -1, descending: bool = False, stable: bool = False) -> Traced:
    arguments = (_same_sizes(x), stable, dim, descending)
    return x.recorder.operator(torch.ops.aten.argsort.stable, arguments, x.sizes)


def _matmul(x: Traced, y: Traced) -> Traced:
    sizes = (*x.sizes[:1], *y.sizes[1:])
    return x.recorder.operator(torch.ops.aten.mm.default, (x, y), sizes)


def _linear(x: Traced, weight: Traced, bias: Traced | None = None) -> Traced:
    sizes = (*x.sizes[:-1], weight.sizes[0])
    return x.recorder.operator(torch.ops.aten.linear.default, (x, weight, bias), sizes)


def _in_place(op: torch._ops.OpOverload) -> Callable[..., Traced]:
    def run(x: Traced, *others: Traced) -> Traced:
        x.recorder.operator(op, (x, *others), x.sizes)
        return x

    return run


def _plus_product(x: Traced, a: Traced, b: Traced) -> Traced:
    op = torch.ops.aten.addcmul.default
    return x.recorder.operator(op, (_same_sizes(x), a, b), x.sizes)


class _Address:
    """Where a tensor begins: an op may ask for its alignment, and whether another begins there."""

    def __init__(self, of: Traced) -> None:
        self.of = of

    def __mod__(self, number: int) -> int:
        """Of 16 at most. The kind has that of inputs; what is allocated is at a multiple."""
        x = self.of
        if 16 % number:
            raise UnrecordableError("an address by another number")
        remainder: Any = x.offset * x.plain.element_size() % 16
        x.recorder.decide("equal", remainder, _value(remainder))
        return x.plain.data_ptr() % number

    def __eq__(self, other: object) -> bool:
        """The kind has which inputs begin where others do."""
        if not isinstance(other, _Address):
            raise UnrecordableError("an address")
        x, y = self.of, other.of
        if x.memory == y.memory:
            return x.recorder.decide("equal", x.offset, y.offset)
        if not (
            isinstance(x.offset, int) and isinstance(y.offset, int) and x.offset == y.offset == 0
        ):
            raise UnrecordableError("an address within a tensor")
        return x.plain.data_ptr() == y.plain.data_ptr()

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def _same(name: str) -> Callable[..., Any]:
    """What of a tensor is part of the kind."""

    def read(x: Traced, *arguments: Any) -> Any:
        value = getattr(x.plain, name)
        return value(*arguments) if callable(value) else value

    return read


# What is given lengths is overridden: PyTorch would ask for their values before it calls a handler.
for _name, _method in (
    ("new_empty", _new_empty),
    ("new_zeros", _new_zeros),
    ("new_full", _new_full),
    ("view", _view),
    ("reshape", _reshape),
):
    setattr(Traced, _name, _method)

_HANDLERS: dict[Any, Callable[..., Any]] = {
    Tensor.shape.__get__: lambda x: x.sizes,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.stride: lambda x, dim=None: x.strides if dim is None else x.strides[dim],
    Tensor.numel: lambda x: _product(x.sizes),
    torch.empty_like: _empty_like,
    Tensor.contiguous: _contiguous,
    Tensor.is_contiguous: _is_contiguous,
    Tensor.view_as: lambda x, other: _view(x, *other.sizes),
    Tensor.reshape_as: lambda x, other: _reshape(x, *other.sizes),
    Tensor.unsqueeze: _unsqueeze,
    Tensor.chunk: _chunk,
    Tensor.__getitem__: _getitem,
    Tensor.unbind: _unbind,
    Tensor.to: _to,
    Tensor.sum: _sum,
    torch.sum: _sum,
    Tensor.any: _any,
    Tensor.div: _elementwise(torch.ops.aten.div.Tensor),
    Tensor.sub: _subtract,
    Tensor.ne: _elementwise(torch.ops.aten.ne.Scalar),
    Tensor.eq: _elementwise(torch.ops.aten.eq.Scalar),
    Tensor.masked_fill: _elementwise(torch.ops.aten.masked_fill.Scalar),
    Tensor.log: _elementwise(torch.ops.aten.log.default),
    Tensor.nan_to_num: _elementwise(torch.ops.aten.nan_to_num.default),
    Tensor.cumsum: _elementwise(torch.ops.aten.cumsum.default),
    Tensor.argsort: _argsort,
    Tensor.matmul: _matmul,
    F.linear: _linear,
    torch.addcmul: _plus_product,
    Tensor.copy_: _in_place(torch.ops.aten.copy_.default),
    Tensor.addmm_: _in_place(torch.ops.aten.addmm_.default),
    Tensor.clone: _clone,
    Tensor.mT.__get__: _transpose,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.data_ptr: _Address,
}
for _name in ("dtype", "device", "is_cpu", "is_cuda", "is_meta", "layout"):
    _HANDLERS[getattr(Tensor, _name).__get__] = _same(_name)
for _name in ("dim", "element_size", "get_device"):  # the last for torch.cuda.device_of
    _HANDLERS[getattr(Tensor, _name)] = _same(_name)
