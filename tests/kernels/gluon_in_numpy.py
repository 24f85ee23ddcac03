"""Runs the package's Gluon kernels in numpy: Gluon has no interpreter as Triton has.

The code of a kernel runs as it stands, program by program, in an order that is none of a GPU's and
another at each launch.
What it calls of Gluon is here. Layouts mean nothing; asynchronous copies arrive as late as
``wait_group`` allows, and fill what their mask leaves out with zeros; fresh shared memory is NaN;
every access is held against the bounds of its tensor.
"""

from __future__ import annotations

import contextlib
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.experimental.gluon import language as real
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import ConstexprFunction

from torchrec_jagged_attn import devices
from torchrec_jagged_attn.kernels.common.launch import Launcher
from torchrec_jagged_attn.kernels.target import attention
from torchrec_jagged_attn.kernels.target.plan import Plan

__all__ = ["gluon_in_numpy", "in_numpy", "launched_by"]

BFLOAT16 = object()  # of which numpy knows nothing
HOPPER_SHARED_MEMORY = 232_448


class Layout:
    """Any layout, of anything."""

    def __init__(self, *_: object, **__: object) -> None:
        self.parent = self.layout = self


class Block:
    """A tensor of a program."""

    __hash__ = None

    def __init__(self, values: object) -> None:
        self.values = np.asarray(values)
        self.shape, self.dtype = list(self.values.shape), self.values.dtype
        self.type = Layout()

    def to(self, dtype: type, bitcast: bool = False) -> Block:
        if dtype is BFLOAT16:  # in the numbers that it has, as fp32
            return Block(torch.from_numpy(self.values).bfloat16().float().numpy())
        return Block(self.values.view(dtype) if bitcast else self.values.astype(dtype))

    def __getitem__(self, index: tuple) -> Block:
        return Block(self.values[index])

    def reshape(self, shape: list[int]) -> Block:
        return Block(self.values.reshape(shape))

    def permute(self, order: tuple[int, ...]) -> Block:
        return Block(self.values.transpose(order))

    def __bool__(self) -> bool:
        return bool(self.values)

    def __index__(self) -> int:
        return int(self.values)


def _values(x: object) -> object:
    return x.values if isinstance(x, Block) else x


def _define(name: str, function) -> None:
    setattr(Block, f"__{name}__", lambda a, b: Block(function(a.values, _values(b))))
    setattr(Block, f"__r{name}__", lambda a, b: Block(function(_values(b), a.values)))


Block.__neg__ = lambda a: Block(-a.values)
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "rshift"):
    _define(_name, getattr(operator, _name))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _define(_name, getattr(operator, _name))
_define("and", operator.and_)
_define("or", operator.or_)


class Pointer:
    """Addresses of elements of one tensor."""

    def __init__(self, elements: np.ndarray, offsets: object = 0) -> None:
        self.elements, self.offsets = elements, np.asarray(offsets, np.int64)
        self.dtype = types.SimpleNamespace(element_ty=elements.dtype.type)

    def __add__(self, offsets: object) -> Pointer:
        return Pointer(self.elements, self.offsets + np.asarray(_values(offsets), np.int64))

    def __sub__(self, offsets: object) -> Pointer:
        return self + -np.asarray(_values(offsets), np.int64)

    def read(self, mask: object, into: np.ndarray) -> None:
        """Write what ``mask`` lets through ``into`` its place."""
        at, mask = self._masked(mask, into.shape)
        into[mask] = self.elements[at]

    def write(self, values: object, mask: object) -> None:
        at, mask = self._masked(mask, self.offsets.shape)
        self.elements[at] = np.broadcast_to(_values(values), mask.shape)[mask]

    def _masked(self, mask: object, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        mask = np.broadcast_to(True if mask is None else _values(mask), shape)
        at = np.broadcast_to(self.offsets, shape)[mask]
        assert ((at >= 0) & (at < self.elements.size)).all(), "out of bounds"
        return at, mask


class SharedMemory:
    """A piece of shared memory."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.shape, self.dtype = list(values.shape), values.dtype.type

    def index(self, at: object) -> SharedMemory:
        assert 0 <= int(at) < self.shape[0], "out of bounds"
        return SharedMemory(self.values[int(at)])

    def slice(self, start: int, length: int, dim: int = 0) -> SharedMemory:
        assert start + length <= self.shape[dim], "out of bounds"
        return SharedMemory(self.values.swapaxes(0, dim)[start : start + length].swapaxes(0, dim))

    def permute(self, order: tuple[int, ...]) -> SharedMemory:
        return SharedMemory(self.values.transpose(order))

    def reshape(self, shape: list[int]) -> SharedMemory:
        return SharedMemory(self.values.reshape(shape))

    def load(self, layout: object) -> Block:
        return Block(self.values.copy())

    def store(self, block: Block) -> None:
        assert (self.shape, self.dtype) == (block.shape, block.dtype)
        self.values[...] = block.values


class AsyncCopies:
    """Groups of copies that are on their way."""

    def __init__(self) -> None:
        self.groups, self.group = [], []

    def async_copy_global_to_shared(self, tile: SharedMemory, ptrs: Pointer, mask: Block) -> None:
        self.group.append((tile, ptrs, mask))

    def commit_group(self) -> None:
        self.groups.append(self.group)
        self.group = []

    def wait_group(self, num_outstanding: int) -> None:
        while len(self.groups) > num_outstanding:
            for tile, ptrs, mask in self.groups.pop(0):
                tile.values[...] = 0
                ptrs.read(mask, tile.values)


class Boxes:
    """What a descriptor of boxes of two bytes an element says."""

    def __init__(self, desc: TensorDescriptor) -> None:
        self.elements = _argument(desc.base).elements
        self.shape, self.strides = desc.shape, desc.strides
        self.dtype, self.layout = self.elements.dtype.type, desc.layout
        size = int(np.prod(desc.block_shape)) * self.elements.itemsize
        self.block_type = types.SimpleNamespace(shape=list(desc.block_shape), nbytes=size)

    def rows(self, place: list) -> Iterator[tuple[tuple[int, ...], slice]]:
        """The rows of the box at ``place`` that are within bounds: where in the box, and where."""
        *box, width = self.block_type.shape
        for index in np.ndindex(*box):
            at = [int(begin) + i for begin, i in zip(place, (*index, 0), strict=True)]
            if all(0 <= i < size for i, size in zip(at, self.shape, strict=True)):
                offset = sum(i * stride for i, stride in zip(at, self.strides, strict=True)) % 2**63
                count = min(width, self.shape[-1] - at[-1])
                assert offset + count <= self.elements.size, "out of bounds"
                yield index, slice(offset, offset + count)


class TensorMemoryAccelerator:
    """Copies of boxes, which arrive as late as the barriers that wait for them allow."""

    MBarrierLayout = Layout

    def __init__(self) -> None:
        self.barriers, self.stores = {}, []

    def _barrier(self, barrier: SharedMemory) -> types.SimpleNamespace:
        new = types.SimpleNamespace(bytes=0, copies=[], phases=0)
        return self.barriers.setdefault(barrier.values.ctypes.data, new)

    def init(self, barrier: SharedMemory, count: int) -> None:
        assert count == 1
        assert not self._barrier(barrier).phases

    def expect(self, barrier: SharedMemory, size: int, pred: object = True) -> None:
        self._barrier(barrier).bytes += size * bool(pred)

    def wait(self, barrier: SharedMemory, phase: object) -> None:
        of_barrier = self._barrier(barrier)
        for desc, place, tile in of_barrier.copies:
            of_barrier.bytes -= desc.block_type.nbytes
            tile.values[...] = 0
            for index, at in desc.rows(place):
                tile.values[index][: at.stop - at.start] = desc.elements[at]
        of_barrier.phases += bool(of_barrier.copies)
        of_barrier.copies = []
        assert of_barrier.bytes == 0, "not all bytes come"
        assert (of_barrier.phases - 1) & 1 == int(phase), "waits forever"

    def async_copy_global_to_shared(
        self, desc: Boxes, place: list, barrier: SharedMemory, tile: SharedMemory, pred: object
    ) -> None:
        if pred:
            self._barrier(barrier).copies.append((desc, place, tile))

    def async_copy_shared_to_global(self, desc: Boxes, place: list, tile: SharedMemory) -> None:
        self.stores.append((desc, place, tile))

    def store_wait(self, pendings: int) -> None:
        while len(self.stores) > pendings:
            desc, place, tile = self.stores.pop(0)
            for index, at in desc.rows(place):
                desc.elements[at] = tile.values[index][: at.stop - at.start]


def _load(ptr: Pointer, mask: object = None, other: float = 0) -> Block:
    shape = np.broadcast_shapes(ptr.offsets.shape, np.shape(_values(mask)))
    out = np.full(shape, other, ptr.elements.dtype)
    ptr.read(mask, out)
    return Block(out)


def _atomic_add(ptr: Pointer, value: int, **_: str) -> Block:
    before = _load(ptr)
    ptr.write(before + value, None)
    return before


def _where(condition: object, a: object, b: object) -> Block:
    a, b = _values(a), _values(b)
    dtype = np.result_type(a, b)  # which leaves Python's numbers their say only among themselves
    return Block(np.where(_values(condition), np.asarray(a, dtype), np.asarray(b, dtype)))


def _full(shape: list[int], value: float, dtype: type, layout: object = None) -> Block:
    return Block(np.full(shape, value, dtype))


def _multiply(a: Block, b: Block, acc: Block) -> Block:
    assert a.dtype == b.dtype
    assert [a.shape[0], b.shape[1]] == acc.shape
    return Block(acc.values + a.values.astype(np.float32) @ b.values.astype(np.float32))


def _multiply_by_group(a, b, acc: Block, use_acc: bool = True, is_async: bool = False) -> Block:
    a, b = (x.load(None) if isinstance(x, SharedMemory) else x for x in (a, b))
    return _multiply(a, b, acc if use_acc else Block(np.zeros_like(acc.values)))


def _wait_for_products(outstanding: int, deps: tuple) -> object:
    return deps[0] if len(deps) == 1 else deps


def _multiply_add(a: Block, b: float, c: Block) -> Block:
    """Rounded once; ``b`` is a number in fp32, too."""
    return Block((a.values.astype(np.float64) * np.float32(b) + c.values).astype(np.float32))


def _of_blocks(function):
    return lambda *blocks: Block(function(*map(_values, blocks)))


def _language(program: int, num_programs: int, num_warps: int) -> types.SimpleNamespace:
    """Gluon's language, as one program sees it."""
    layouts = {name: Layout for name in dir(real) if name.endswith("Layout")}
    return types.SimpleNamespace(
        **layouts,
        **{name: getattr(np, name) for name in ("float32", "int16", "int32", "int64")},
        program_id=lambda axis: Block(np.int32(program)),
        num_programs=lambda axis: Block(np.int32(num_programs)),
        num_warps=lambda: num_warps,
        static_range=range,
        arange=lambda start, end, layout: Block(np.arange(start, end, dtype=np.int32)),
        full=_full,
        zeros=lambda shape, dtype, layout: _full(shape, 0, dtype),
        load=_load,
        store=lambda ptr, value, mask=None: ptr.write(value, mask),
        atomic_add=_atomic_add,
        where=_where,
        maximum=_of_blocks(np.maximum),
        minimum=_of_blocks(np.minimum),
        bfloat16=BFLOAT16,
        exp2=_of_blocks(np.exp2),
        log=_of_blocks(np.log),
        log2=_of_blocks(np.log2),
        div_rn=_of_blocks(np.divide),
        fma=_multiply_add,
        cdiv=lambda a, b: (a + (b - 1)) // b,
        max=lambda block, axis: Block(block.values.max(axis)),
        min=lambda block, axis: Block(block.values.min(axis)),
        sum=lambda block, axis: Block(block.values.sum(axis, dtype=block.dtype)),
        join=lambda a, b: Block(np.stack([a.values, b.values], -1)),
        permute=lambda block, order: Block(block.values.transpose(order)),
        reshape=lambda block, shape: Block(block.values.reshape(shape)),
        expand_dims=lambda block, axis: Block(np.expand_dims(_values(block), axis)),
        convert_layout=lambda block, layout: block,
        allocate_shared_memory=lambda dtype, shape, layout: SharedMemory(
            np.full(shape, np.nan, np.float32 if dtype is BFLOAT16 else dtype)
        ),
    )


def _range(*bounds: object) -> Iterator[Block]:
    return (Block(np.int32(i)) for i in range(*map(int, bounds)))


def in_numpy(kernel: Any, replaced: dict) -> types.FunctionType:
    """The function of ``kernel``, and of those that it calls, with other globals."""
    namespace = dict(kernel.fn.__globals__)
    for name in set(kernel.fn.__code__.co_names) & namespace.keys():
        value = namespace[name]
        if isinstance(value, real.constexpr):
            namespace[name] = value.value
        elif isinstance(value, ConstexprFunction):
            namespace[name] = Layout if name.endswith("layout") else value.fn
        elif hasattr(value, "fn"):
            namespace[name] = in_numpy(value, replaced)
    function = kernel.fn
    defaults = (getattr(default, "value", default) for default in function.__defaults__ or ())
    return types.FunctionType(function.__code__, namespace | replaced, argdefs=tuple(defaults))


def _argument(x: object) -> object:
    if isinstance(x, torch.Tensor):
        last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        size = last + 1 if x.numel() else 0
        return Pointer(x.detach().as_strided((size,), (1,)).numpy())
    if isinstance(x, TensorDescriptor):
        return Boxes(x)
    if isinstance(x, tuple):
        return type(x)(*map(_argument, x))
    if isinstance(x, (int, float)):
        return Block(np.int32(x) if isinstance(x, int) else np.float32(x))
    return x


def _launch(
    launcher: Launcher, grid: tuple, arguments: tuple, constants: dict, launched: list[str]
) -> None:
    constants = dict(constants)
    num_warps = constants.pop("num_warps")
    constants.pop("maxnreg", None)
    names = launcher.kernel.arg_names
    assert set(names[len(arguments) :]) == constants.keys(), "arguments and constants do not fit"
    for program in np.random.default_rng(len(launched)).permutation(grid[0]):
        copies, gl = AsyncCopies(), _language(program, grid[0], num_warps)
        accelerator = TensorMemoryAccelerator()
        replaced = {
            "gl": gl,
            "tl": gl,
            "range": _range,
            "async_copy": copies,
            "mbarrier": accelerator,
            "tma": accelerator,
            "mma_v2": _multiply,
            "warpgroup_mma": _multiply_by_group,
            "warpgroup_mma_wait": _wait_for_products,
            "fence_async_shared": lambda: None,
            "thread_barrier": lambda: None,
        }
        with np.errstate(all="ignore"):
            in_numpy(launcher.kernel, replaced)(*map(_argument, arguments), **constants)
        on_their_way = [barrier.copies for barrier in accelerator.barriers.values()]
        left = [*copies.groups, copies.group, accelerator.stores, *on_their_way]
        assert not any(left), "copies are left on their way"


@contextlib.contextmanager
def launched_by(launch_gluon: Callable[..., None]) -> Iterator[list[str]]:
    """Gluon kernels are launched by ``launch_gluon``; yields those that were.

    It takes what the launcher takes, and the names of those launched so far.
    """
    launched: list[str] = []
    launch = Launcher.__call__

    def launch_any(launcher: Launcher, grid: tuple, arguments: tuple, constants: dict) -> None:
        if isinstance(launcher.kernel, GluonJITFunction):
            launched.append(launcher.kernel.fn.__module__.split(".")[-1])
            launch_gluon(launcher, grid, arguments, constants, launched)
        else:
            launch(launcher, grid, arguments, constants)

    with mock.patch.object(Launcher, "__call__", launch_any):
        yield launched


@contextlib.contextmanager
def gluon_in_numpy(groups: bool = False) -> Iterator[list[str]]:
    """Gluon kernels run, on CPU, where they would on a Hopper GPU; yields those that did.

    Those that only Hopper has run if ``groups``.
    """
    with (
        launched_by(_launch) as launched,
        mock.patch.object(devices, "gluon_shared_memory", return_value=HOPPER_SHARED_MEMORY),
        mock.patch.object(devices, "hopper_multiprocessors", return_value=groups),
        mock.patch.object(attention, "plan_of", Plan),  # which remembers no other device
    ):
        yield launched
