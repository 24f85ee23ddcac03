"""Runs the package's Gluon kernels in numpy, because Gluon has no interpreter.

Kernels run unchanged. Each program is a thread; as many run at a time as the device has
multiprocessors, in a random order that differs between launches. The partitions of a
warp-specialized kernel are threads, too.

This module implements the Gluon functions that kernels call. Layouts are ignored; fresh shared
memory is NaN; every access is checked against the bounds of its tensor. Asynchronous copies
complete as late as waits allow. Loads of the tensor memory accelerator may also complete at once;
its rows are at the 64-bit addresses of the descriptor. Asynchronous products read their operands
when they are waited for. A deadlock fails the test.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import random
import sys
import threading
import time
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

from torchrec_jagged_attn.base import devices
from torchrec_jagged_attn.ops.launch import Launcher

BFLOAT16 = object()  # numpy has no bfloat16
HOPPER_SHARED_MEMORY = 232_448
PATIENCE_S = 20.0
PRODUCT_S = 1e-3  # duration of a product, in which other threads may act too early


class Layout:
    """Any layout; numpy ignores them."""

    def __init__(self, *_: object, **__: object) -> None:
        self.parent = self.layout = self


class BarrierLayout:
    """Layout of barriers."""


class Block:
    """A tensor of a program."""

    __hash__ = None
    type = Layout()

    def __init__(self, values: object) -> None:
        self.values = values if isinstance(values, (np.ndarray, np.generic)) else np.asarray(values)

    @property
    def shape(self) -> list[int]:
        return list(self.values.shape)

    @property
    def dtype(self) -> np.dtype:
        return self.values.dtype

    def to(self, dtype: type, bitcast: bool = False) -> Block:
        if dtype is BFLOAT16:  # rounded to bfloat16, stored as fp32
            return Block(torch.from_numpy(np.asarray(self.values)).bfloat16().float().numpy())
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
    return x.values if type(x) is Block else x


def _define(name: str, function) -> None:
    def operate(a: Block, b: object) -> Block:
        return Block(function(a.values, b.values if type(b) is Block else b))

    def operate_reversed(a: Block, b: object) -> Block:
        return Block(function(_values(b), a.values))

    setattr(Block, f"__{name}__", operate)
    setattr(Block, f"__r{name}__", operate_reversed)


Block.__neg__ = lambda a: Block(-a.values)
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "rshift"):
    _define(_name, getattr(operator, _name))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _define(_name, getattr(operator, _name))
_define("and", operator.and_)
_define("or", operator.or_)
_define("xor", operator.xor)


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
        """Copy the elements that ``mask`` selects to ``into``."""
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
    """A piece of shared memory; slices are views of it."""

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
        view = self.values.view()
        view.shape = shape  # raises if it would copy
        return SharedMemory(view)

    def load(self, layout: object) -> Block:
        return Block(self.values.copy())

    def store(self, block: Block) -> None:
        assert (self.shape, self.dtype) == (block.shape, block.dtype)
        self.values[...] = block.values


class AsyncCopies:
    """Groups of asynchronous copies in flight."""

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


class Machine:
    """The state that threads of a launch share."""

    def __init__(self, seed: int) -> None:
        self.lock = threading.Condition()
        self.errors: list[BaseException] = []
        self.random = random.Random(seed)
        self.running, self.idle = 1, 0  # numbers of threads, and of waiting threads

    def run(self, calls: list[Callable[[], object]], num_threads: int) -> None:
        """Run all ``calls``, as many at a time as there are threads."""
        if num_threads == 1:
            for call in calls:
                call()
            return
        waiting = iter(calls)
        threads = [threading.Thread(target=self._work, args=(waiting,)) for _ in range(num_threads)]
        self._count_threads(num_threads - 1)  # this thread only waits for them
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._count_threads(1)
        if self.errors:
            raise self.errors[0]

    def _work(self, calls: Iterator[Callable[[], object]]) -> None:
        try:
            with np.errstate(all="ignore"):
                for call in calls:
                    call()
        except BaseException as error:
            self.errors.append(error)
        self._count_threads(-1)

    def _count_threads(self, change: int) -> None:
        with self.lock:
            self.running += change
            self.notify()

    def notify(self) -> None:
        """Wake up all waiting threads; the lock is held."""
        self.idle = 0
        self.lock.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.lock:
            while not condition():
                assert not self.errors, "another thread failed"
                self.idle += 1
                assert self.idle < self.running, "all threads wait"
                assert self.lock.wait(PATIENCE_S), "waits for ever"


class Barrier:
    """An mbarrier: its phase completes once all threads and all expected bytes have arrived."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.phase = machine, 0
        self.copies: list[Callable[[], None]] = []  # that complete when waited for

    def init(self, count: int) -> None:
        self.count = self.missing = count
        self.num_bytes = 0

    def arrive(self, num_arrivals: int, num_bytes: int) -> None:
        """Count arrived threads, and expected bytes, or arrived ones if ``num_bytes`` < 0."""
        with self.machine.lock:
            self.missing -= num_arrivals
            self.num_bytes += num_bytes
            assert self.missing >= 0, "more arrive than the barrier is for"
            if self.missing == 0 and self.num_bytes == 0:
                self.phase, self.missing = self.phase + 1, self.count
                self.machine.notify()

    def wait(self, parity: object) -> None:
        self.machine.wait_for(lambda: self._has_ended(int(parity)))

    def _has_ended(self, parity: int) -> bool:
        while self.copies:
            self.copies.pop(0)()
        return self.phase % 2 != parity


class Descriptor:
    """The tensor that a descriptor describes, by addresses of 64 bits."""

    def __init__(self, descriptor: TensorDescriptor) -> None:
        self.elements, self.box = _argument(descriptor.base).elements, descriptor.block_shape
        self.bounds, self.strides = descriptor.shape, descriptor.strides
        self.dtype, self.layout = self.elements.dtype.type, Layout()
        num_bytes = int(np.prod(self.box)) * self.elements.itemsize
        self.block_type = types.SimpleNamespace(shape=list(self.box), nbytes=num_bytes)

    def locate(self, coordinates: list) -> tuple[tuple[slice, ...], np.ndarray]:
        """Slices of the box that are in bounds, and the addresses of their elements."""
        item = self.elements.itemsize
        inside, address = [], np.zeros((), np.uint64)
        for first, size, bound, stride in zip(
            map(int, coordinates), self.box, self.bounds, self.strides, strict=True
        ):
            begin = min(max(-first, 0), size)
            at = np.arange(first + begin, max(first + begin, min(first + size, bound)))
            inside.append(slice(begin, begin + len(at)))
            address = address[..., None] + at.astype(np.uint64) * np.uint64(stride * item)
        index = (address // np.uint64(item)).astype(np.int64)
        assert ((index >= 0) & (index < self.elements.size)).all(), "out of bounds"
        return tuple(inside), index


class TensorMemoryAccelerator:
    """Copies of boxes of a program: loads complete at once or as late as barriers allow, stores as
    late as waits of their thread allow.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.loads: list[list] = []  # pending copies of each barrier
        self.stores: dict[int, list] = {}  # pending copies of each thread

    def async_copy_global_to_shared(
        self,
        descriptor: Descriptor,
        coordinates: list,
        barrier: Barrier,
        tile: SharedMemory,
        pred: object = True,
    ) -> None:
        def arrive() -> None:
            inside, index = descriptor.locate(coordinates)
            tile.values[...] = 0
            tile.values[inside] = descriptor.elements[index]
            barrier.arrive(0, -descriptor.block_type.nbytes)

        if not pred:
            return
        with self.machine.lock:
            if self.machine.random.random() < 0.5:
                arrive()
            else:
                barrier.copies.append(arrive)
                self.loads.append(barrier.copies)
                self.machine.notify()

    def async_copy_shared_to_global(
        self, descriptor: Descriptor, coordinates: list, tile: SharedMemory
    ) -> None:
        copies = self.stores.setdefault(threading.get_ident(), [])
        copies.append((descriptor, coordinates, tile))

    def store_wait(self, pendings: int) -> None:
        copies = self.stores.get(threading.get_ident(), [])
        while len(copies) > pendings:
            descriptor, coordinates, tile = copies.pop(0)
            inside, index = descriptor.locate(coordinates)
            descriptor.elements[index] = tile.values[inside]


class Product:
    """A product in flight; its operands are read when it is waited for."""

    def __init__(self, a: Any, b: SharedMemory, acc: Any, use_acc: bool) -> None:
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc

    def value(self) -> Block:
        acc = self.acc.value() if isinstance(self.acc, Product) else self.acc
        assert self.a.dtype == self.b.dtype
        product = self.a.values.astype(np.float32) @ self.b.values.astype(np.float32)
        assert list(product.shape) == acc.shape
        return Block(product + acc.values if self.use_acc else product)


def _load(ptr: Pointer, mask: object = None, other: float = 0, cache_modifier: str = "") -> Block:
    shape = np.broadcast_shapes(ptr.offsets.shape, np.shape(_values(mask)))
    out = np.full(shape, other, ptr.elements.dtype)
    ptr.read(mask, out)
    return Block(out)


def _where(condition: object, a: object, b: object) -> Block:
    a, b = _values(a), _values(b)
    if isinstance(a, float) and isinstance(b, float):
        a = np.float32(a)  # as in Gluon
    dtype = np.result_type(a, b)  # Python scalars are weak
    return Block(np.where(_values(condition), np.asarray(a, dtype), np.asarray(b, dtype)))


def _full(shape: list[int], value: float, dtype: type, layout: object = None) -> Block:
    return Block(np.full(shape, value, dtype))


def _multiply(a: Block, b: Block, acc: Block) -> Block:
    assert a.dtype == b.dtype
    assert [a.shape[0], b.shape[1]] == acc.shape
    return Block(acc.values + a.values.astype(np.float32) @ b.values.astype(np.float32))


def _multiply_async(
    a: Any, b: SharedMemory, acc: Any, use_acc: bool = True, is_async: bool = False
) -> Block | Product:
    product = Product(a, b, acc, use_acc)
    return product if is_async else product.value()


def _multiply_add(a: Block, b: float, c: Block) -> Block:
    """Fused multiply-add, rounded once; ``b`` is an fp32 scalar."""
    return Block((a.values.astype(np.float64) * np.float32(b) + c.values).astype(np.float32))


def _on_blocks(function):
    return lambda *blocks: Block(function(*map(_values, blocks)))


def _language(
    machine: Machine, program: int, num_programs: int, num_warps: int
) -> types.SimpleNamespace:
    """Gluon's language for one program."""

    def allocate(dtype: Any, shape: list[int], layout: object) -> object:
        if isinstance(layout, BarrierLayout):
            barriers = [Barrier(machine) for _ in range(shape[0])]
            return types.SimpleNamespace(index=lambda at: barriers[int(at)], shape=shape)
        dtype = np.dtype(np.float32 if dtype is BFLOAT16 else dtype)
        fresh = np.nan if dtype.kind == "f" else np.iinfo(dtype).min // 2
        return SharedMemory(np.full(shape, fresh, dtype))

    def atomic_add(ptr: Pointer, value: object, sem: str = "", scope: str = "") -> Block:
        with machine.lock:
            before = _load(ptr)
            ptr.write(before + value, None)
        return before

    def warp_specialize(trades: list[tuple], num_warps: list[int], num_registers: list[int]):
        assert len(trades) == 1 + len(num_warps) == 1 + len(num_registers)
        machine.run([functools.partial(trade, *inputs) for trade, inputs in trades], len(trades))

    layouts = {name: Layout for name in dir(real) if name.endswith("Layout")}
    return types.SimpleNamespace(
        **layouts,
        **{name: getattr(np, name) for name in ("float32", "int16", "int32", "int64", "uint32")},
        program_id=lambda axis: Block(np.int32(program)),
        num_programs=lambda axis: Block(np.int32(num_programs)),
        num_warps=lambda: num_warps,
        static_range=range,
        arange=lambda start, end, layout: Block(np.arange(start, end, dtype=np.int32)),
        full=_full,
        zeros=lambda shape, dtype, layout: _full(shape, 0, dtype),
        load=_load,
        store=lambda ptr, value, mask=None: ptr.write(value, mask),
        atomic_add=atomic_add,
        where=_where,
        maximum=_on_blocks(np.maximum),
        minimum=_on_blocks(np.minimum),
        bfloat16=BFLOAT16,
        exp2=_on_blocks(np.exp2),
        log=_on_blocks(np.log),
        log2=_on_blocks(np.log2),
        div_rn=_on_blocks(np.divide),
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
        allocate_shared_memory=allocate,
        to_tensor=lambda x: Block(x if isinstance(x, bool) else np.int32(x)),
        warp_specialize=warp_specialize,
    )


def _range(*bounds: object) -> Iterator[Block]:
    return (Block(np.int32(i)) for i in range(*map(int, bounds)))


def _in_numpy(kernel: Any, replaced: dict) -> types.FunctionType:
    """The Python function of ``kernel``, with globals replaced, also in functions that it calls."""
    namespace = dict(kernel.fn.__globals__)
    for name in set(kernel.fn.__code__.co_names) & namespace.keys():
        value = namespace[name]
        if isinstance(value, real.constexpr):
            namespace[name] = value.value
        elif isinstance(value, ConstexprFunction):
            namespace[name] = Layout if name.endswith("layout") else value.fn
        elif hasattr(value, "fn"):
            namespace[name] = _in_numpy(value, replaced)
    function = kernel.fn
    defaults = (getattr(default, "value", default) for default in function.__defaults__ or ())
    return types.FunctionType(function.__code__, namespace | replaced, argdefs=tuple(defaults))


def _argument(x: object) -> object:
    if isinstance(x, torch.Tensor):
        last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        size = last + 1 if x.numel() else 0
        return Pointer(x.detach().as_strided((size,), (1,)).numpy())
    if isinstance(x, TensorDescriptor):
        return Descriptor(x)
    if isinstance(x, tuple):
        return type(x)(*map(_argument, x))
    if isinstance(x, (int, float)):
        return Block(np.int32(x) if isinstance(x, int) else np.float32(x))
    return x


def _launch(
    kernel: GluonJITFunction,
    grid: tuple,
    arguments: tuple,
    constants: dict,
    multiprocessors: int,
    seed: int,
) -> None:
    names = kernel.arg_names[len(arguments) :]
    constants = dict(constants)
    num_warps = constants.pop("num_warps")
    constants.pop("maxnreg", None)
    assert set(names) == constants.keys(), "arguments and constants do not fit"
    arguments = tuple(map(_argument, arguments))
    machine = Machine(seed)
    barriers = types.SimpleNamespace(
        MBarrierLayout=BarrierLayout,
        init=lambda barrier, count: barrier.init(count),
        expect=lambda barrier, num_bytes, pred=True: pred and barrier.arrive(1, num_bytes),
        arrive=lambda barrier: barrier.arrive(1, 0),
        wait=lambda barrier, phase: barrier.wait(phase),
    )

    def wait_for_products(num_outstanding: int, deps: tuple) -> object:
        if machine.running > 1:
            time.sleep(PRODUCT_S)
        values = [dep.value() if isinstance(dep, Product) else dep for dep in deps]
        return values[0] if len(values) == 1 else tuple(values)

    def run(program: int) -> None:
        gl = _language(machine, program, grid[0], num_warps)
        copies, accelerator = AsyncCopies(), TensorMemoryAccelerator(machine)
        replaced = {
            "gl": gl,
            "tl": gl,
            "range": _range,
            "async_copy": copies,
            "mbarrier": barriers,
            "tma": accelerator,
            "mma_v2": _multiply,
            "warpgroup_mma": _multiply_async,
            "warpgroup_mma_wait": wait_for_products,
            "fence_async_shared": lambda: None,
            "thread_barrier": lambda: None,
        }
        with np.errstate(all="ignore"):
            _in_numpy(kernel, replaced)(*arguments, **constants)
        pending = [*copies.groups, copies.group, *accelerator.loads, *accelerator.stores.values()]
        assert not any(pending), "copies are still pending"

    order = np.random.default_rng(seed).permutation(grid[0])
    num_threads = max(1, min(multiprocessors, grid[0]))
    machine.run([functools.partial(run, program) for program in order], num_threads)


@contextlib.contextmanager
def ops_take_the_cpu_for(**facts: int) -> Iterator[None]:
    """Pretend that the CPU has these properties of a device, see ``devices.py``; clears cached
    plans.
    """
    with mock.patch.multiple(
        devices, **{name: lambda device, fact=fact: fact for name, fact in facts.items()}
    ):
        _forget_plans()
        yield
    _forget_plans()


def _forget_plans() -> None:
    for name, module in list(sys.modules.items()):
        parts = name.split(".")
        folders = {"kernels", "device", "launch", "plan"}
        if parts[0] == "torchrec_jagged_attn" and folders & {*parts}:
            for value in vars(module).values():
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()


@contextlib.contextmanager
def gluon_in_numpy(multiprocessors: int = 0) -> Iterator[list[str]]:
    """Run Gluon kernels on CPU, with Hopper's shared memory; yields the module names of launched
    kernels.

    Kernels for Hopper only run if ``multiprocessors`` is not 0.
    """
    launched: list[str] = []
    launch = Launcher.__call__

    def launch_any(launcher: Launcher, grid: tuple, arguments: tuple, constants: dict) -> None:
        kernel = launcher.kernel
        if isinstance(kernel, GluonJITFunction):
            launched.append(kernel.fn.__module__.split(".")[-1])
            _launch(kernel, grid, arguments, constants, multiprocessors, seed=len(launched))
        else:
            launch(launcher, grid, arguments, constants)

    with (
        mock.patch.object(Launcher, "__call__", launch_any),
        ops_take_the_cpu_for(
            gluon_shared_memory=HOPPER_SHARED_MEMORY, hopper_multiprocessors=multiprocessors
        ),
    ):
        yield launched
