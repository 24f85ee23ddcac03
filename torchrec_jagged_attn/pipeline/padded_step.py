"""``PaddedStep``: forward and backward of a model on static tensors, in one CUDA graph."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.modules.module import register_module_forward_pre_hook
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_jagged_attn.collection.sharding.looked_up import Capacities, block_sizes
from torchrec_jagged_attn.collection.sharding.padding import PaddedValuesError, Segments
from torchrec_jagged_attn.pipeline.batches import (
    StepInputs,
    clone_tensors,
    replace_tensors,
    tensors_of,
    with_static_tensors,
)
from torchrec_jagged_attn.pipeline.dense import dense_parameters
from torchrec_jagged_attn.pipeline.learning_rates import LearningRateError, LearningRates
from torchrec_jagged_attn.pipeline.lookups import Ids, Lookup

# The first passes compile kernels and initialize libraries, which a capture does not permit.
PASSES_BEFORE_CAPTURE = 2
LARGE = 1 << 20
"""Elements of a tensor for which a copy of its own is faster than one kernel for many tensors."""


class StaticTensors:
    """Tensors with fixed addresses and sizes, which each step fills."""

    def __init__(self, inputs: StepInputs, capacities: Capacities) -> None:
        self._inputs, self._capacities = inputs, capacities
        self._tensors: dict[str, Tensor] = {}
        self._blocks: dict[str, list[int]] = {}  # the sizes of the blocks of Segments

    def __getitem__(self, name: str) -> Tensor:
        """Return the static tensor ``name``, which the first access creates and fills."""
        if name not in self._tensors:
            x = self._inputs.tensors[name]
            if isinstance(x, Segments):
                blocks = block_sizes(x.names, x.counts, self._capacities, x.spare)
                self._blocks[name] = blocks
                shape = sum(blocks), *x.tensor.shape[1:]
                static = x.tensor.detach().new_full(shape, x.fill or 0)
                if x.fill is None:  # all ids must be valid, and not all alike
                    segments = zip(static.split(blocks), x.tensor.split(x.counts), strict=True)
                    for block, segment in segments:
                        if segment.shape[0] > 0:
                            repeats = -(-block.shape[0] // segment.shape[0])
                            block.copy_(segment.repeat(repeats)[: block.shape[0]])
                is_trained = x.tensor.requires_grad
            else:
                static = torch.empty_like(x, memory_format=torch.contiguous_format)
                is_trained = x.requires_grad
            self._tensors[name] = static.requires_grad_(is_trained)
            self._fill({name: static}, self._inputs)
        return self._tensors[name]

    def close(self) -> None:
        """Release the first batch."""
        self._inputs = StepInputs(self._inputs.device_type)

    def fill(self, inputs: StepInputs) -> None:
        """Copy ``inputs`` into the static tensors."""
        self._fill(self._tensors, inputs)

    @torch.no_grad()
    def _fill(self, tensors: Mapping[str, Tensor], inputs: StepInputs) -> None:
        copies: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        fills: dict[int, list[Tensor]] = {}
        for name, static in tensors.items():
            x = inputs.tensors[name]
            parts: Any = [(static, x)]
            if isinstance(x, Segments):
                blocks = static.split(self._blocks[name])
                segments = zip(blocks, x.tensor.split(x.counts), strict=True)
                parts = [(block[: part.shape[0]], part) for block, part in segments]
                if x.fill is not None:
                    rest = (block[n:] for block, n in zip(blocks, x.counts, strict=True))
                    fills.setdefault(x.fill, []).extend(y for y in rest if y.numel() > 0)
            for to, source in parts:
                if to.numel() > LARGE:
                    to.copy_(source)
                elif to.numel() > 0:
                    into, sources = copies.setdefault(to.dtype, ([], []))
                    into.append(to)
                    sources.append(source.detach())
        for value, rest in fills.items():
            if rest:
                torch._foreach_zero_(rest)  # pyright: ignore[reportPrivateImportUsage]
                if value:
                    torch._foreach_add_(rest, value)  # pyright: ignore[reportPrivateImportUsage]
        for into, sources in copies.values():
            torch._foreach_copy_(into, sources)  # pyright: ignore[reportPrivateImportUsage]

    def trained(self) -> dict[str, Tensor]:
        """Return the static tensors that require a gradient, by name."""
        return {name: x for name, x in self._tensors.items() if x.requires_grad}

    def compact(self, name: str, gradient: Tensor, x: Tensor | Segments) -> Tensor:
        """Return the ``gradient`` of the segments of ``x``, without the rows of padding."""
        if not isinstance(x, Segments):
            return gradient
        blocks = zip(gradient.split(self._blocks[name]), x.counts, strict=True)
        parts = [block[:count] for block, count in blocks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class PaddedStep:
    """A training step on static tensors of fixed sizes, without the optimizers of dense layers.

    On a GPU it is captured in a CUDA graph, on a CPU it runs eagerly. It includes lookups inside
    the graph, forward and backward with the update of their tables. It reads the rows of lookups
    outside the graph, and returns a function that runs their backward.

    Args:
        model: without DistributedModelParallel and DistributedDataParallel.
        group: the ranks over which gradients of dense parameters are averaged, or None.
        batch: a batch.
        results: results of modules that ran on the batch before the input dist, by name.
        lookups: rows of sharded modules whose lookups are outside the graph, by name.
        ids: ids of sharded modules whose lookups are inside the graph, by name.
        inputs: tensors of the batch, results, rows and ids.
        capacities: capacities by name.
        optimized: parameters of the optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None,
        batch: Any,
        results: Mapping[str, Any],
        lookups: Mapping[str, Lookup],
        ids: Mapping[str, Ids],
        inputs: StepInputs,
        capacities: Mapping[str, int],
        optimized: set[Tensor],
    ) -> None:
        self.capacities, self._optimized = capacities, optimized
        self.read: set[str] = set()  # keys of KeyedJaggedTensors that the model reads
        self._model, self._group = model, group

        def capacity(name: str | None, count: int, prefix: str = "") -> int:
            return count if name is None else capacities[f"{prefix}{name}"]

        self._static = static = StaticTensors(inputs, capacity)
        args = static.__getitem__, self.read.add
        self._batch = with_static_tensors(batch, "batch", *args)
        self._results = {
            name: with_static_tensors(result, name, *args) for name, result in results.items()
        }

        def with_static(name: str, x: Any) -> Any:
            tensors = {key: static[f"{name}: {key}"] for key in x.tensors()}
            return x.with_tensors(tensors, functools.partial(capacity, prefix=f"{name}: "))

        self._lookups: dict[str, Lookup] = {
            name: with_static(name, x) for name, x in lookups.items()
        }
        self._ids: dict[str, Ids] = {name: with_static(name, x) for name, x in ids.items()}
        # Autograd accumulates the gradient of a parameter on the stream of its first use, which is
        # not the stream of the capture: a capture needs new parameters with the same memory.
        self._parameters = [x for x in dense_parameters(model) if x.parameter.requires_grad]
        self._trained = list(dict.fromkeys(x.parameter for x in self._parameters))
        self._aliases = {x: nn.Parameter(x.detach()) for x in self._trained}
        self._graph: torch.cuda.CUDAGraph | None = None
        self._learning_rates: LearningRates | None = None
        # The gradients of the last step, in the order of parameters, and their versions.
        self._last_gradients: list[tuple[Tensor | None, int]] = []
        self.run(update_tables=False)

    def run(self, update_tables: bool = True) -> None:
        """Run forward and backward on the current values of the static tensors."""
        outputs = {name: x.output for name, x in self._lookups.items()}
        outputs |= {
            name: (lambda x=x: x.look_up(detach=not update_tables).output())
            for name, x in self._ids.items()
        }
        outputs |= {name: (lambda x=x: x) for name, x in self._results.items()}
        # Also in backward, where activation checkpoints run layers again.
        with modules_return(self._model, outputs), self._alias_parameters():
            losses, outputs = self._model(self._batch)
            # Detached, or they would keep autograd's nodes, which belong to a stream.
            self._losses = losses.detach()
            self._outputs = replace_tensors(outputs, _detach_output)
            leaves = [*self._static.trained().values(), *self._aliases.values()]
            for leaf in leaves:
                leaf.grad = None
            with self._gradients_of_aliases_alone():
                torch.sum(losses, dim=0).backward()
            gradients = [leaf.grad for leaf in leaves]
            for leaf in leaves:
                leaf.grad = None
        self._row_gradients = dict(zip(self._static.trained(), gradients, strict=False))
        self._gradients = gradients[len(self._row_gradients) :]
        if self._group is not None:
            self._average(self._gradients, self._group)

    def capture(self, stream: torch.cuda.Stream, learning_rates: LearningRates) -> None:
        """Capture :meth:`run` in a CUDA graph. All ranks must do so together."""
        with autocast_cache_off():
            for _ in range(PASSES_BEFORE_CAPTURE):
                self.run(update_tables=False)
            self._losses = self._outputs = None
            self._row_gradients, self._gradients = {}, []
            gc.collect()
            torch.cuda.empty_cache()  # eager steps have left blocks that the graph cannot use
            stream.wait_stream(torch.cuda.current_stream())
            graph = torch.cuda.CUDAGraph(keep_graph=bool(self._ids))
            random_state = torch.get_rng_state(), random.getstate()
            with (
                learning_rates.marked(),
                _random_generator_survives(stream.device),
                torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
            ):
                self.run()
            now = torch.get_rng_state(), random.getstate()
            if not torch.equal(now[0], random_state[0]) or now[1] != random_state[1]:
                raise NotImplementedError(
                    "a forward must draw random numbers on the GPU with TrainPipelineCudaGraph, "
                    "got some of a generator on the CPU: use TrainPipelineSparseDist"
                )
        torch.cuda.current_stream().wait_stream(stream)
        if self._ids:
            learning_rates.find_in(graph)
            graph.instantiate()
        self._graph, self._learning_rates = graph, learning_rates

    def close(self) -> None:
        """Release the batch of the capture."""
        self._static.close()

    def train(self, inputs: StepInputs) -> tuple[Tensor, Any, Callable[[], None]]:
        """Run the step on ``inputs``, which must fit the capacities.

        Returns:
            Copies of losses and outputs, and a function that runs the backward of lookups outside
            the graph, with the update of their tables, and sets gradients of dense parameters.
        """
        self._check_cleared()
        self._static.fill(inputs)
        if self._graph is None or self._learning_rates is None:
            with autocast_cache_off():
                self.run()
        else:
            self._learning_rates.update(self._graph)
            self._graph.replay()

        def backward() -> None:
            rows, gradients = [], []
            for name, gradient in self._row_gradients.items():
                if gradient is not None:
                    x = inputs.tensors[name]
                    rows.append(x.tensor if isinstance(x, Segments) else x)
                    gradients.append(self._static.compact(name, gradient, x))
            if rows:
                torch.autograd.backward(rows, gradients)
            for parameter, gradient in zip(self._trained, self._gradients, strict=True):
                parameter.grad = gradient
            self._last_gradients = [(x, 0 if x is None else x._version) for x in self._gradients]

        return clone_tensors(self._losses), clone_tensors(self._outputs), backward

    def epsilon(self) -> float:
        """Return the machine epsilon of the least precise dtype."""
        tensors = tensors_of(self._outputs), self._static.trained().values(), self._trained
        dtypes = [x.dtype for x in itertools.chain(*tensors) if x.is_floating_point()]
        for device_type in ("cuda", "cpu"):
            if torch.is_autocast_enabled(device_type):
                dtypes.append(torch.get_autocast_dtype(device_type))
        return max((torch.finfo(x).eps for x in dtypes), default=torch.finfo(torch.float32).eps)

    def without_gradient(self) -> set[nn.Parameter]:
        """Return the parameters without a gradient."""
        pairs = zip(self._trained, self._gradients, strict=True)
        return {parameter for parameter, gradient in pairs if gradient is None}

    def _check_cleared(self) -> None:
        """Raise an error if the optimizer did not clear the gradients of the last step."""
        for parameter, (gradient, version) in zip(
            self._trained, self._last_gradients, strict=False
        ):
            if (
                gradient is not None
                and parameter.grad is gradient
                and gradient._version == version
                and parameter in self._optimized
            ):
                raise NotImplementedError(
                    "the optimizer must clear gradients before each step with "
                    "TrainPipelineCudaGraph, got gradients of the last step: use "
                    "TrainPipelineSparseDist"
                )

    @contextlib.contextmanager
    def _gradients_of_aliases_alone(self) -> Iterator[None]:
        """Raise an error if a parameter itself, rather than its alias, gets a gradient."""
        saved = [parameter.grad for parameter in self._trained]
        try:
            for parameter in self._trained:
                parameter.grad = None
            yield
            found = {parameter for parameter in self._trained if parameter.grad is not None}
        finally:
            for parameter, gradient in zip(self._trained, saved, strict=True):
                parameter.grad = gradient
        if found:
            names = [x.full_name for x in self._parameters if x.parameter in found]
            raise NotImplementedError(
                "parameters must be read as attributes of their modules with "
                f"TrainPipelineCudaGraph, got {names}, which are also read elsewhere, such as from "
                "a list: use TrainPipelineSparseDist"
            )

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
        """Average gradients over ranks, as DistributedDataParallel does."""
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                by_dtype.setdefault(gradient.dtype, []).append(i)
        for indices in by_dtype.values():
            tensors = [gradients[i] for i in indices]
            flat = _flatten_dense_tensors(tensors).div_(group.size())
            dist.all_reduce(flat, group=group)
            views = _unflatten_dense_tensors(flat, tensors)
            for i, gradient in zip(indices, views, strict=True):
                gradients[i] = gradient


def _detach_output(_: str, x: Tensor | KeyedJaggedTensor) -> Tensor:
    if not isinstance(x, Tensor):
        raise NotImplementedError(
            "outputs of the model must have no KeyedJaggedTensor with TrainPipelineCudaGraph, got "
            "one: use TrainPipelineSparseDist"
        )
    return x.detach()


@contextlib.contextmanager
def _random_generator_survives(device: torch.device) -> Iterator[None]:
    """Make the generator of a GPU usable after a capture that failed.

    PyTorch leaves it in the state of a capture, in which it raises an error in eager steps.
    """
    generator = torch.cuda.default_generators[device.index]
    try:
        yield
    except Exception:
        generator.graphsafe_set_state(generator.clone_state())
        raise


@contextlib.contextmanager
def autocast_cache_off() -> Iterator[None]:
    """Disable autocast's cache of casts, and clear it on entry and exit."""
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
    """Add the module of ``model`` that ran, and what to use instead, to errors of a capture."""
    entered: list[nn.Module] = []
    hook = register_module_forward_pre_hook(lambda module, _: entered.append(module))
    try:
        yield
    except (NotImplementedError, LearningRateError, torch.OutOfMemoryError):
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
    """Replace the forward of each module in ``outputs``, by name, with a call of its output."""
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
