"""``PaddedStep``: forward and backward of a model on static tensors, in one CUDA graph."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, is_tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.modules.module import register_module_forward_pre_hook

from torchrec_jagged_attn.collection.looked_up import Capacities
from torchrec_jagged_attn.collection.padding import PaddedValuesError, Segments
from torchrec_jagged_attn.pipeline.batches import (
    StepInputs,
    clone_tensors,
    is_same,
    replace_tensors,
    with_static_tensors,
)
from torchrec_jagged_attn.pipeline.dense import dense_parameters
from torchrec_jagged_attn.pipeline.lookups import Lookup

# The first passes compile kernels and initialize libraries, which a capture does not permit.
PASSES_BEFORE_CAPTURE = 2
LARGE = 1 << 20
"""Elements of a tensor for which a copy of its own is faster than one kernel for many tensors."""


class Misfit(NamedTuple):
    """Why a batch cannot be trained by a captured step."""

    reason: str
    is_capacity: bool = False  # whether a larger capacity would do


class StaticTensors:
    """Tensors with fixed addresses and capacities, which each step fills."""

    def __init__(self, inputs: StepInputs, capacities: Capacities) -> None:
        self._inputs, self._capacities = inputs, capacities
        self._tensors: dict[str, Tensor] = {}
        self._blocks: dict[
            str, list[int]
        ] = {}  # of Segments: their capacities, spare rows included
        self._fixed: dict[str, list[bool]] = {}

    def __getitem__(self, name: str) -> Tensor:
        """The static tensor ``name``, filled with the first batch when it is first asked for."""
        if name not in self._tensors:
            x = self._inputs.tensors[name]
            if isinstance(x, Segments):
                blocks = [
                    self._capacities(capacity, count) + x.spare
                    for capacity, count in zip(x.names, x.counts, strict=True)
                ]
                shape = sum(blocks), *x.tensor.shape[1:]
                tensor = x.tensor.detach().new_full(shape, x.fill)
                self._blocks[name] = blocks
                self._fixed[name] = [capacity is None for capacity in x.names]
                tensor.requires_grad_(x.tensor.requires_grad)
            else:
                tensor = torch.empty_like(x, memory_format=torch.contiguous_format)
                tensor.requires_grad_(x.requires_grad)
            self._tensors[name] = tensor
            self._fill([(tensor, name, x)])
        return self._tensors[name]

    def misfit(self, inputs: StepInputs) -> Misfit | None:
        """Why ``inputs`` do not fit, if they do not."""
        overflow = None
        for name, static in self._tensors.items():
            x = inputs.tensors.get(name)
            if x is None:
                return Misfit(f"no {name}")
            tensor = x.tensor if isinstance(x, Segments) else x
            is_segments = name in self._blocks
            same = static.shape[1:] == tensor.shape[1:] if is_segments else static.shape == x.shape  # pyright: ignore
            if not same or static.dtype != tensor.dtype or is_segments != isinstance(x, Segments):
                return Misfit(f"another shape or dtype of {name}")
            if isinstance(x, Segments):
                if len(x.counts) != len(self._blocks[name]):
                    return Misfit(f"another number of segments of {name}")
                rows = zip(x.counts, self._blocks[name], self._fixed[name], strict=True)
                for count, block, is_fixed in rows:
                    capacity = block - x.spare
                    if is_fixed and count != capacity:
                        return Misfit(f"another number of rows of {name}")
                    if count > capacity:
                        overflow = Misfit(f"more rows of {name} than the capacity", True)
        return overflow

    def fill(self, inputs: StepInputs) -> None:
        """Copy ``inputs`` into the static tensors, and zeros behind them."""
        self._fill([(static, name, inputs.tensors[name]) for name, static in self._tensors.items()])

    @torch.no_grad()
    def _fill(self, tensors: list[tuple[Tensor, str, Tensor | Segments]]) -> None:
        copies: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for static, name, x in tensors:
            parts = [(static, x)]
            if isinstance(x, Segments):
                parts = []
                blocks, begin, first = self._blocks[name], 0, 0
                for count, block in zip(x.counts, blocks, strict=True):
                    static.narrow(0, begin + count, block - count).fill_(x.fill)
                    part = x.tensor.narrow(0, first, count)
                    parts.append((static.narrow(0, begin, count), part))
                    begin, first = begin + block, first + count
            for to, source in parts:
                if to.numel() > LARGE:
                    to.copy_(source)
                elif to.numel() > 0:
                    into, sources = copies.setdefault(to.dtype, ([], []))
                    into.append(to)
                    sources.append(source.detach())
        for into, sources in copies.values():
            torch._foreach_copy_(into, sources)

    def capacities(self) -> dict[str, list[int]]:
        """The capacities of :class:`Segments`, spare rows included."""
        return self._blocks

    def trained(self) -> dict[str, Tensor]:
        """Those that have a gradient."""
        return {name: x for name, x in self._tensors.items() if x.requires_grad}

    def compact(self, name: str, gradient: Tensor, x: Tensor | Segments) -> Tensor:
        """The ``gradient`` of the rows of ``x``, without those behind the segments."""
        if not isinstance(x, Segments):
            return gradient
        begins = itertools.accumulate(self._blocks[name], initial=0)
        parts = [gradient.narrow(0, at, n) for at, n in zip(begins, x.counts, strict=False)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class PaddedStep:
    """The part of a training step behind the lookups, on static tensors of a fixed size.

    On a GPU it is captured in a CUDA graph, on a CPU it runs each time.

    Args:
        model: without DistributedModelParallel and DistributedDataParallel.
        group: the ranks over which gradients of dense parameters are averaged, or None.
        batch, results, lookups: a batch, the results of modules that ran on it before the input
            dist, and what sharded modules looked up, by the names of the modules.
        inputs: all tensors and constants of these three.
        capacities: the capacities of segments.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None,
        batch: Any,
        results: Mapping[str, Any],
        lookups: Mapping[str, Lookup],
        inputs: StepInputs,
        capacities: Capacities,
    ) -> None:
        self.read: set[str] = set()  # keys of KeyedJaggedTensors that the model reads
        self._model, self._group = model, group
        self._static = static = StaticTensors(inputs, capacities)
        args = static.__getitem__, self.read.add
        self._batch = with_static_tensors(batch, "batch", *args)
        self._results = {
            name: with_static_tensors(result, name, *args) for name, result in results.items()
        }
        self._lookups = {}
        for name, lookup in lookups.items():
            tensors = {key: static[f"{name}: {key}"] for key in lookup.tensors()}
            self._lookups[name] = lookup.with_tensors(
                tensors, lambda key, n, name=name: capacities(key and f"{name}: {key}", n)
            )
        self.constants = inputs.constants
        # Gradients of a parameter are accumulated on the stream on which autograd first met it, in
        # DistributedDataParallel the one on which the model was built: a capture needs new ones.
        self._parameters = [x for x in dense_parameters(model) if x.parameter.requires_grad]
        self._trained = list(dict.fromkeys(x.parameter for x in self._parameters))
        self._aliases = {x: nn.Parameter(x.detach()) for x in self._trained}
        self._graph: torch.cuda.CUDAGraph | None = None
        self.run()

    def misfit(self, inputs: StepInputs) -> Misfit | None:
        """Why ``inputs`` cannot be trained by this step, if they cannot."""
        for name, value in self.constants.items():
            if not is_same(value, inputs.constants.get(name)):
                return Misfit(f"another value of {name}")
        if self.constants.keys() != inputs.constants.keys():
            return Misfit("other attributes of the batch")
        return self._static.misfit(inputs)

    def run(self) -> None:
        """Forward and backward on the static tensors, as they are."""
        rows = self._static.trained()
        with self._static_modules(), self._alias_parameters():
            losses, outputs = self._model(self._batch)
            loss = torch.sum(losses, dim=0)
        rows = self._static.trained()  # the first pass can add some
        inputs = [*rows.values(), *self._aliases.values()]
        gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
        self._row_gradients = dict(zip(rows, gradients, strict=False))
        self._gradients = list(gradients[len(rows) :])
        if self._group is not None:
            self._average(self._gradients, self._group)
        # Detached, or they would keep autograd's nodes for parameters, on the stream of this pass.
        self._losses = losses.detach()
        self._outputs = replace_tensors(outputs, lambda _, x: x.detach() if is_tensor(x) else x)

    def capture(self, stream: torch.cuda.Stream) -> None:
        """Capture :meth:`run` in a CUDA graph. All ranks must do so together."""
        with autocast_cache_off():
            for _ in range(PASSES_BEFORE_CAPTURE):
                self.run()
            self._losses = self._outputs = None
            self._row_gradients, self._gradients = {}, []
            gc.collect()
            torch.cuda.empty_cache()  # eager steps have left blocks that the graph cannot use
            stream.wait_stream(torch.cuda.current_stream())
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self.run()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = graph

    def train(self, inputs: StepInputs) -> tuple[Tensor, Any, Callable[[], None]]:
        """Run the step on ``inputs``, which fit.

        Returns copies of losses and outputs, and a function that computes the gradients of the
        lookups, which updates their tables, and sets those of dense parameters.
        """
        self._static.fill(inputs)
        if self._graph is None:
            self.run()
        else:
            self._graph.replay()

        def backward() -> None:
            rows, gradients = [], []
            for name, gradient in self._row_gradients.items():
                if gradient is not None:
                    x = inputs.tensors[name]
                    rows.append(x.tensor if isinstance(x, Segments) else x)
                    gradients.append(self._static.compact(name, gradient, x))
            torch.autograd.backward(rows, gradients)
            for parameter, gradient in zip(self._trained, self._gradients, strict=True):
                parameter.grad = gradient

        return clone_tensors(self._losses), clone_tensors(self._outputs), backward

    def capacities(self) -> dict[str, list[int]]:
        """The numbers of rows that fit, by name of the tensor."""
        return self._static.capacities()

    def epsilon(self) -> float:
        """The relative precision of the least precise dtype."""
        dtypes = [x.dtype for x in (*self._trained, *self._static.trained().values())]
        for device_type in ("cuda", "cpu"):
            if torch.is_autocast_enabled(device_type):
                dtypes.append(torch.get_autocast_dtype(device_type))
        return max((torch.finfo(x).eps for x in dtypes), default=torch.finfo(torch.float32).eps)

    def without_gradient(self) -> set[nn.Parameter]:
        """Parameters that have none."""
        pairs = zip(self._trained, self._gradients, strict=True)
        return {parameter for parameter, gradient in pairs if gradient is None}

    @contextlib.contextmanager
    def _static_modules(self) -> Iterator[None]:
        outputs = {name: lookup.output for name, lookup in self._lookups.items()}
        results = {name: (lambda x=x: x) for name, x in self._results.items()}
        with modules_return(self._model, outputs | results):
            yield

    @contextlib.contextmanager
    def _alias_parameters(self) -> Iterator[None]:
        # By setattr: recurrent layers keep a list of their parameters, which it updates.
        try:
            for x in self._parameters:
                setattr(x.module, x.name, self._aliases[x.parameter])
            yield
        finally:
            for x in self._parameters:
                setattr(x.module, x.name, x.parameter)

    def _average(self, gradients: list[Tensor | None], group: dist.ProcessGroup) -> None:
        """Average over the ranks, as DistributedDataParallel does."""
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                by_dtype.setdefault(gradient.dtype, []).append(i)
        for indices in by_dtype.values():
            of_dtype = [gradients[i] for i in indices]
            flat = _flatten_dense_tensors(of_dtype).div_(group.size())
            dist.all_reduce(flat, group=group)
            views = _unflatten_dense_tensors(flat, of_dtype)
            for i, gradient in zip(indices, views, strict=True):
                gradients[i] = gradient


@contextlib.contextmanager
def autocast_cache_off() -> Iterator[None]:
    """Neither take casts of parameters from autocast's cache, nor leave some in it."""
    was_on = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(was_on)


@contextlib.contextmanager
def errors_name_modules(model: nn.Module) -> Iterator[None]:
    """Have errors of a capture say which module of ``model`` ran, and what to use instead."""
    entered: list[nn.Module] = []
    hook = register_module_forward_pre_hook(lambda module, _: entered.append(module))
    try:
        yield
    except (NotImplementedError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        names = {module: name for name, module in model.named_modules()}
        at = next((x for x in reversed(entered) if x in names), model)
        where = f"{names[at]!r}, a {type(at).__name__}"
        if isinstance(error, PaddedValuesError):
            raise NotImplementedError(
                "a captured model must read values of a KeyedJaggedTensor in sharded modules and "
                f"attention alone, got {where}, which reads {error}: use TrainPipelineSparseDist"
            ) from error
        raise RuntimeError(
            "the model must be one that TrainPipelineCudaGraph can capture, got an error; the last "
            f"module whose forward began was {where}: {error}. Use TrainPipelineSparseDist"
        ) from error
    finally:
        hook.remove()


@contextlib.contextmanager
def modules_return(model: nn.Module, outputs: Mapping[str, Callable[[], Any]]) -> Iterator[None]:
    """Have the forward of each module in ``outputs``, by its name, return the output instead."""
    forwards = []
    try:
        for name, output in outputs.items():
            module = model.get_submodule(name)
            forwards.append((module, module.__dict__.get("forward")))
            module.__dict__["forward"] = lambda *_, output=output, **__: output()
        yield
    finally:
        for module, forward in forwards:
            if forward is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = forward
