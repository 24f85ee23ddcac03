"""``TrainPipelineCudaGraph``: TorchRec's TrainPipelineSparseDist, whose steps are CUDA graphs."""

from __future__ import annotations

import collections
import contextlib
import inspect
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from torchrec_jagged_attn.collection.embedding_bag_collection import (
    TargetAttentionEmbeddingBagCollection,
)
from torchrec_jagged_attn.pipeline.batches import StepInputs, are_equal, tensors_of
from torchrec_jagged_attn.pipeline.dense import dense_buffers, dense_modules, dense_parameters
from torchrec_jagged_attn.pipeline.lookups import Lookup, look_up
from torchrec_jagged_attn.pipeline.padded_step import (
    PaddedStep,
    autocast_cache_off,
    errors_name_modules,
    modules_return,
)
from torchrec_jagged_attn.pipeline.support import (
    check_arguments,
    check_model,
    check_modules,
    check_step,
    set_group,
)

logger = logging.getLogger(__name__)

WARM_UP_STEPS = 10
HEADROOM = 1.2
# After more eager steps than these, among the last ones, the step is captured again.
MOST_EAGER_STEPS, LAST_STEPS = 5, 100


class TrainPipelineCudaGraph(TrainPipelineSparseDist):
    """TorchRec's ``TrainPipelineSparseDist``, with most of a training step in one CUDA graph.

    It trains as ``TrainPipelineSparseDist`` does, in less time if the host limits the speed. The
    first 10 steps are eager. Then everything behind the embedding lookups is captured: exchanges
    between ranks, attention, dense layers, and their backward. Lookups, the updates of tables and
    the optimizers of dense layers run eagerly in each step. Lookups are copied into buffers with
    1.2 times as many rows as the largest batch of the first steps. A batch that does not fit is
    trained by an eager step, and after more than 5 such steps of the last 100 the step is captured
    again.

    On a CPU the same padded step runs without a graph.

    All ranks train as many batches as the rank with the fewest. With
    ``TORCHREC_JAGGED_ATTN_VALIDATE=1`` all steps are eager.

    Python numbers that a forward reads, such as a temperature that a schedule changes, are those of
    the capture. ``docs/how_to/cuda_graphs.md`` lists what is captured and what is refused.

    Args:
        model: a ``DistributedModelParallel`` whose sharded modules are EmbeddingBagCollections and
            TargetAttentionEmbeddingBagCollections.
        optimizer, device, args, kwargs: as for the ``TrainPipelineSparseDist`` of the installed
            version of TorchRec.

    Attributes:
        num_replayed_steps: steps trained by the captured (on a CPU, the padded) step.
        eager_steps: the number of eager steps by their reason.
        num_captures: how often the step was captured.
        lookups: ``"outside"`` the graph.

    Raises:
        TypeError: ``model`` is not a ``DistributedModelParallel``.
        NotImplementedError: the model, an argument or a batch cannot be captured; raised here, in
            the first ``progress``, or at the capture.
        RuntimeError: the capture failed, or a replay differs from an eager step.

    Example:
        >>> pipeline = TrainPipelineCudaGraph(model, optimizer, device)  # doctest: +SKIP
        >>> output = pipeline.progress(batches)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        signature = inspect.signature(TrainPipelineSparseDist.__init__)
        arguments = signature.bind(self, model, optimizer, device, *args, **kwargs).arguments
        check_arguments(arguments)
        check_model(model)
        super().__init__(model, optimizer, device, *args, **kwargs)
        self.num_replayed_steps = self.num_captures = 0
        self.eager_steps: collections.Counter[str] = collections.Counter()
        self.lookups = "outside"
        self._given_optimizer = optimizer
        self._model_fwd = self._forward
        env: Any = model._env
        self._ranks = _Ranks(env.process_group, env.world_size)
        # Collectives of one group wait for each other: the input dist must not wait for a graph.
        self._input_group: dist.ProcessGroup | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            if env.world_size > 1:
                self._input_group = dist.new_group(dist.get_process_group_ranks(env.process_group))
        # Whether all ranks have a further batch is agreed together with other decisions of a step.
        self._agrees_late = self._execute_all_batches and not self._enqueue_batch_after_forward
        self._dense: list[nn.Module] = []  # modules outside sharded ones
        # Each pipelined module with its name, and its features with a fixed number of rows.
        self._sharded: list[tuple[str, Any, set[str]]] = []
        self._fixed_keys: set[str] = set()
        self._captured_step: PaddedStep | None = None
        self._captured_state: list[Any] | None = None
        self._is_verified = False
        self._counts: dict[str, int] = {}  # the largest number of rows, by name of the capacity
        self._with_gradient: set[nn.Parameter] = set()  # dense ones that eager steps train
        self._num_warm_up_steps = 0
        self._last_steps: collections.deque[bool] = collections.deque(maxlen=LAST_STEPS)
        self._num_repeated, self._last_sizes = 0, None
        self._backward_of_replay: Callable[[], None] | None = None

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Train on a batch, see ``TrainPipelineSparseDist.progress``."""
        check_step(self._model, self._optimizer is self._given_optimizer)
        self._backward_of_replay = None
        return super().progress(dataloader_iter)

    def register_backward_hook(self, site: Any, work: Any) -> None:
        raise NotImplementedError(
            "register_backward_hook must not be called with TrainPipelineCudaGraph, whose backward "
            "is captured: use TrainPipelineSparseDist"
        )

    def _next_batch(self, dataloader_iter: Iterator[Any]) -> Any:
        batch = super()._next_batch(dataloader_iter)
        if self._agrees_late and len(self.batches) == 2:
            return batch
        if not self._ranks.agree(batch is not None)[0]:
            self._dataloader_exhausted, batch = True, None
        return batch

    def _pipeline_model(self, *args: Any, **kwargs: Any) -> None:
        super()._pipeline_model(*args, **kwargs)
        model = self._unwrapped
        self._dense = [*dense_modules(model)]
        check_modules(model, self._pipelined_modules, self._ranks.size)
        fixed: dict[nn.Module, set[str]] = {}
        for collection in model.modules():
            if isinstance(collection, TargetAttentionEmbeddingBagCollection):
                lookups = collection.embedding_collections.values()
                fixed |= dict(zip(lookups, collection.pooling.fixed_rows(), strict=True))
                self._fixed_keys |= collection.pooling.fixed_keys()
        self._sharded = [(x.forward.name, x, fixed.get(x, set())) for x in self._pipelined_modules]
        if self._input_group is not None:
            for module in self._pipelined_modules:
                set_group(module, self._ranks.group, self._input_group)
        self._captured_step = None

    @property
    def _unwrapped(self) -> nn.Module:
        """The model without DistributedModelParallel and DistributedDataParallel."""
        return self._model.module  # pyright: ignore[reportReturnType]

    def _forward(self, batch: Any) -> tuple[Tensor, Any]:
        """What TorchRec's pipeline calls in place of the model."""
        step = self._look_up(batch)
        refusal = self._why_eager(step)
        state = _state(self._dense, self._device.type)
        is_unchanged = self._captured_step is not None and state == self._captured_state
        misfit = (
            self._captured_step.misfit(step.inputs) if self._captured_step is not None else None
        )
        has_last, can_capture, is_unchanged, fits, is_capacity, is_repeated = self._ranks.agree(
            len(self.batches) == 3,
            refusal is None,
            is_unchanged,
            misfit is None,
            misfit is None or misfit.is_capacity,
            misfit is None or are_equal(step.inputs.sizes(), self._last_sizes),
        )
        if self._agrees_late and not has_last:
            self._end_epoch()
        if can_capture and is_unchanged and fits:
            return self._replay(step) if self._is_verified else self._verify(step)
        if not can_capture:
            reason = refusal or "another rank cannot capture its batch"
        elif self._num_warm_up_steps < WARM_UP_STEPS:
            self._num_warm_up_steps += 1
            reason = "warm-up"
        elif not is_unchanged or self._is_frequent(is_capacity, is_repeated):
            self._capture(step, state)
            return self._replay(step)
        else:
            reason = misfit.reason if misfit else "the batch of another rank does not fit"
        return self._run_eagerly(step, reason)

    def _backward(self, losses: Tensor) -> None:
        if self._backward_of_replay is not None:
            self._backward_of_replay()
            return
        super()._backward(losses)
        parameters = (x.parameter for x in dense_parameters(self._unwrapped))
        self._with_gradient = {x for x in parameters if x.grad is not None}

    def _look_up(self, batch: Any) -> _Step:
        """Look up the rows of the batch that is trained next."""
        context: Any = self.contexts[0]
        lookups: dict[str, Lookup] = {}
        for name, module, fixed in self._sharded:
            with self._stream_context(self._data_dist_stream):
                ids = context.input_dist_tensors_requests.pop(name).wait()
            of_module = context.module_contexts.pop(name)
            if self._stream is not None:
                current = torch.cuda.current_stream()
                current.wait_stream(self._data_dist_stream)
                ids.record_stream(current)
                of_module.record_stream(current)
            lookups[name] = look_up(module, of_module, ids, fixed)
        results = {x.fqn: context.postproc_fwd_results[x.fqn] for x in self._pipelined_postprocs}
        read = None if self._captured_step is None else self._captured_step.read
        return _Step(batch, results, lookups, self._fixed_keys, read)

    def _why_eager(self, step: _Step) -> str | None:
        """Why a step on this batch is not captured, if it is not."""
        if not self._model.training:
            return "evaluation"
        if os.environ.get("TORCHREC_JAGGED_ATTN_VALIDATE") == "1":
            if not self.eager_steps["validation"]:
                logger.warning("all steps are eager with TORCHREC_JAGGED_ATTN_VALIDATE=1")
            return "validation"
        if step.inputs.has_no_sample():
            return "no sample"
        return None

    def _end_epoch(self) -> None:
        """Another rank has no further batch."""
        if len(self.batches) == 3:
            self.batches.pop()
            self.contexts.pop()
        self._dataloader_exhausted = True

    def _is_frequent(self, is_capacity: bool, is_repeated: bool) -> bool:
        """Whether so many steps were eager that the step is captured again."""
        self._num_repeated = self._num_repeated + 1 if is_repeated else 0
        if is_capacity:
            return sum(self._last_steps) > MOST_EAGER_STEPS
        # Only for a new size that lasts: the next batch would not fit a capture of varying ones.
        return self._num_repeated >= MOST_EAGER_STEPS

    def _run_eagerly(self, step: _Step, reason: str) -> tuple[Tensor, Any]:
        self.eager_steps[reason] += 1
        self._note(step)
        self._last_sizes = step.inputs.sizes()
        if self._captured_step is not None:
            self._last_steps.append(True)
        with modules_return(self._unwrapped, step.outputs()):
            return self._model(step.batch)

    def _note(self, step: _Step) -> None:
        """Update the largest numbers of rows."""
        for name, count in step.inputs.counts():
            self._counts[name] = max(self._counts.get(name, 0), count)

    def _replay(self, step: _Step) -> tuple[Tensor, Any]:
        assert self._captured_step is not None
        self.num_replayed_steps += 1
        self._num_repeated = 0
        self._last_steps.append(False)
        losses, outputs, self._backward_of_replay = self._captured_step.train(step.inputs)
        return losses, outputs

    def _capture(self, step: _Step, state: list[Any]) -> None:
        self._captured_step = None
        if self._stream is not None:
            torch.cuda.empty_cache()  # the graph has memory of its own
        step.read_all_keys(self._fixed_keys)
        self._note(step)
        counts = self._ranks.largest(self._counts)

        def capacity(name: str | None, count: int) -> int:
            return count if name is None else max(1, math.ceil(HEADROOM * counts[name]))

        model = self._unwrapped
        error = None
        try:
            with errors_name_modules(model), self._nothing_changes():
                args = step.batch, step.results, step.lookups, step.inputs, capacity
                captured = PaddedStep(model, self._group_of_gradients(), *args)
                if self._stream is not None:
                    captured.capture(self._stream)
            self._check_gradients(captured)
        except Exception as caught:
            error = caught
        if not self._ranks.agree(error is None)[0]:
            raise error or RuntimeError("the capture failed on another rank, see its error")
        self._captured_step, self._captured_state, self._is_verified = captured, state, False
        self.num_captures += 1
        self._last_steps.clear()
        self._num_repeated = 0
        what = "Captured" if self._stream is not None else "Made"
        logger.info("%s a step with capacities %s", what, captured.capacities())

    def _group_of_gradients(self) -> dist.ProcessGroup | None:
        """The ranks over which gradients of dense parameters are averaged."""
        is_averaged = isinstance(self._model._dmp_wrapped_module, DistributedDataParallel)
        return self._ranks.group if is_averaged and self._ranks.size > 1 else None

    def _check_gradients(self, captured: PaddedStep) -> None:
        without = captured.without_gradient() & self._with_gradient
        if without:
            dense = dense_parameters(self._unwrapped)
            names = [x.full_name for x in dense if x.parameter in without]
            raise RuntimeError(
                "all parameters with a gradient in eager steps must have one in captured steps, "
                f"got none for {names}: use TrainPipelineSparseDist"
            )

    def _verify(self, step: _Step) -> tuple[Tensor, Any]:
        """Replay the first batch after a capture, and compare its outputs with an eager forward."""
        eager = []
        with self._nothing_changes(), torch.no_grad(), autocast_cache_off():
            for _ in range(2):  # which differ if layers are random
                with modules_return(self._unwrapped, step.all_outputs()):
                    eager.append(tensors_of(self._unwrapped(step.batch)))
        result = self._replay(step)
        assert self._captured_step is not None
        difference = _difference(tensors_of(result), *eager, self._captured_step.epsilon())
        if not self._ranks.agree(not difference)[0]:
            raise RuntimeError(
                "outputs of the captured step must be those of an eager step, got "
                f"{difference or 'a difference on another rank'}. A forward that reads Python "
                "numbers which change from batch to batch must use TrainPipelineSparseDist"
            )
        self._is_verified = True
        return result

    @contextlib.contextmanager
    def _nothing_changes(self) -> Iterator[None]:
        """Restore buffers and the states of random generators at the end."""
        buffers = [*dense_buffers(self._unwrapped)]
        saved = [x.clone() for x in buffers]
        devices = [] if self._stream is None else [self._stream.device]
        with torch.random.fork_rng(devices):
            yield
        with torch.no_grad():
            for buffer, value in zip(buffers, saved, strict=True):
                buffer.copy_(value)


class _Step:
    """A batch, what modules before the input dist made of it, and what was looked up."""

    def __init__(
        self,
        batch: Any,
        results: dict[str, Any],
        lookups: dict[str, Lookup],
        fixed_keys: set[str],
        read: set[str] | None,
    ) -> None:
        self.batch, self.results, self.lookups = batch, results, lookups
        self.inputs = StepInputs()
        for name, x in {"batch": batch, **results}.items():
            self.inputs.add_batch(name, x, fixed_keys, read)
        for name, lookup in lookups.items():
            self.inputs.add(name, lookup.tensors(), lookup.constants())

    def read_all_keys(self, fixed_keys: set[str]) -> None:
        """Take in all keys of KeyedJaggedTensors, of which a model may read any."""
        for name, x in {"batch": self.batch, **self.results}.items():
            self.inputs.add_batch(name, x, fixed_keys, None)

    def outputs(self) -> dict[str, Callable[[], Any]]:
        """What the forwards of sharded modules return, by their names."""
        return {name: lookup.output for name, lookup in self.lookups.items()}

    def all_outputs(self) -> dict[str, Callable[[], Any]]:
        """The same, and that of modules before the input dist."""
        return self.outputs() | {name: lambda x=x: x for name, x in self.results.items()}


class _Ranks:
    """Decisions that all ranks of ``group`` make alike, on their CPUs."""

    def __init__(self, group: dist.ProcessGroup, size: int) -> None:
        self.group, self.size = group, size
        self._cpu_group: Any = None
        if size > 1:
            ranks = dist.get_process_group_ranks(group)
            self._cpu_group = dist.new_group(ranks, backend="gloo")

    def agree(self, *flags: bool) -> list[bool]:
        """Whether each of ``flags`` is true on all ranks."""
        if self.size == 1:
            return list(flags)
        bits = torch.tensor([sum(flag << i for i, flag in enumerate(flags))])
        dist.all_reduce(bits, dist.ReduceOp.BAND, group=self._cpu_group)
        agreed = int(bits)
        return [bool(agreed >> i & 1) for i in range(len(flags))]

    def largest(self, counts: dict[str, int]) -> dict[str, int]:
        """The largest of the ranks' counts, by name."""
        if self.size == 1:
            return counts
        per_rank: list[Any] = [None] * self.size
        dist.all_gather_object(per_rank, counts, group=self._cpu_group)
        names = dict.fromkeys(name for x in per_rank for name in x)
        return {name: max(x.get(name, 0) for x in per_rank) for name in names}


def _state(modules: Iterable[nn.Module], device_type: str) -> list[Any]:
    """What a replay assumes of layers and of PyTorch's settings, besides values on the device."""
    state: list[Any] = [
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    ]
    for module in modules:
        state.append(module.training)
        state += module._modules.values()
        for x in (*module._parameters.values(), *module._buffers.values()):
            if x is not None:
                state += x.data_ptr(), x.requires_grad
    return state


def _difference(
    outputs: list[Tensor], eager: list[Tensor], again: list[Tensor], epsilon: float
) -> str:
    """How ``outputs`` differ from those of an eager forward, if they do by more than rounding.

    The bound is half of the digits of the least precise dtype, relative to the largest output, and
    what two eager forwards differ by, as with dropout.
    """
    for i, (x, y, z) in enumerate(zip(outputs, eager, again, strict=True)):
        x, y, z = x.double(), y.double(), z.double()
        if x.numel() == 0:
            continue
        largest, noise = (t.abs().nan_to_num(0, 0).max() for t in (y, y - z))
        bound = (epsilon**0.5 * largest + 4 * noise).item()
        if not torch.allclose(x, y, rtol=0, atol=bound, equal_nan=True):
            worst = (x - y).abs().max().item()
            return f"a difference of {worst:.3g} in tensor {i}, of at most {bound:.3g}"
    return ""
