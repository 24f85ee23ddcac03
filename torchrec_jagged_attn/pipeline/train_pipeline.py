"""``TrainPipelineCudaGraph``: TorchRec's TrainPipelineSparseDist, whose steps are CUDA graphs."""

from __future__ import annotations

import collections
import contextlib
import inspect
import logging
import math
import os
from collections.abc import Callable, Container, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from torchrec_jagged_attn.collection.embedding_bag_collection import (
    TargetAttentionEmbeddingBagCollection,
)
from torchrec_jagged_attn.pipeline.batches import StepInputs, difference, tensors_of
from torchrec_jagged_attn.pipeline.dense import (
    dense_modules,
    dense_parameters,
    restored_buffers,
)
from torchrec_jagged_attn.pipeline.exchange import BatchExchange, ModelExchange
from torchrec_jagged_attn.pipeline.learning_rates import (
    LearningRateError,
    LearningRates,
    capturable_tables,
    state_of_tables,
)
from torchrec_jagged_attn.pipeline.lookups import Ids, Lookup, ids_of
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
# After more steps beyond a capacity than these, among the last ones, the step is captured again.
MOST_EAGER_STEPS, LAST_STEPS = 5, 100


class TrainPipelineCudaGraph(TrainPipelineSparseDist):
    """TorchRec's ``TrainPipelineSparseDist``, with most of a training step in one CUDA graph.

    It trains as ``TrainPipelineSparseDist`` does, in less time if the host limits the speed. The
    first 10 steps are eager. Then everything behind the input dist is captured: lookups (see
    ``lookups``), exchanges between ranks, attention, dense layers, and their backward. The
    optimizers of dense layers run eagerly in each step. Ids, or rows, are copied into buffers for
    1.2 times as many as the largest batch of the first steps has. A batch that does not fit is
    trained by an eager step, or its ids are exchanged twice if only their exchange has too small
    buffers. After more than 5 such steps of the last 100 the step is captured again.

    On a CPU the same padded step runs without a graph.

    - ``progress`` returns the second value that the forward returns: ``(loss, logits, labels)`` of
      a ``DLRMTrain``.
    - Batches of another size than the captured one are trained by eager steps: use
      ``drop_last=True``.
    - For evaluation, call ``model.eval()`` and ``pipeline.progress(batches)``, or
      ``pipeline.detach()`` before ``model(batch)``.
    - On several ranks, histories require a :class:`HistoryEmbeddingCollectionSharder`.
    - Delete the pipeline, or call ``pipeline.detach()``, before ``dist.destroy_process_group()``.

    All ranks train as many batches as the rank with the fewest. With
    ``TORCHREC_JAGGED_ATTN_VALIDATE=1`` all steps are eager.

    A replay uses the Python numbers that the forward read at the capture, such as a temperature
    that a schedule changes. ``docs/how_to/cuda_graphs.md`` lists supported models and options.

    Args:
        model: a ``DistributedModelParallel`` whose sharded modules are EmbeddingBagCollections and
            TargetAttentionEmbeddingBagCollections.
        optimizer, device, args, kwargs: arguments of ``TrainPipelineSparseDist`` in the installed
            version of TorchRec.

    Attributes:
        num_replayed_steps: number of steps trained by the captured (on a CPU, the padded) step.
        eager_steps: number of eager steps by reason.
        num_captures: number of captures.
        exchanges: ``"fixed"`` or ``"exact"`` for each sharded module, by name: whether the exchange
            of its ids has fixed sizes, which needs no sizes sent before.
        lookups: ``"inside"`` or ``"outside"`` for each sharded module, by name: whether its lookups
            are inside the graph. They are inside for tables in GPU memory that SGD, Adagrad or
            RowWiseAdagrad trains without weight decay, but not with
            ``torch.use_deterministic_algorithms``, since padding changes the order of sums.

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
        self.exchanges: dict[str, str] = {}
        self.lookups: dict[str, str] = {}
        self._given_optimizer = optimizer
        self._model_fwd = self._forward
        env: Any = model._env
        self._ranks = _Ranks(env.process_group, env.world_size)
        # Collectives of one group wait for each other: the input dist must not wait for a graph.
        self._input_group: Any = None
        self._exchange: ModelExchange | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            if env.world_size > 1:
                self._input_group = _new_group(env.process_group)
        self._dense: list[nn.Module] = []  # modules outside sharded ones
        # Each pipelined module with its name, and its features with a fixed number of rows.
        self._sharded: list[tuple[str, Any, set[str]]] = []
        self._fixed_keys: set[str] = set()
        self._next_step: tuple[_Step, _Agreement] | None = None
        self._captured_step: PaddedStep | None = None
        self._captured_state: list[Any] | None = None
        self._captured_sizes: dict[str, Any] = {}
        self._captured_num_ids: dict[str, tuple[Any, ...] | None] = {}
        self._is_unchanged = _Agreement((False,), None)
        self._is_verified = False
        self._counts: dict[str, int] = {}  # the largest numbers of rows, by name of the capacity
        self._num_ids: dict[Any, Any] = {}  # numbers of ids of lookups, by module and its sizes
        self._with_varying_ids: set[str] = set()  # modules where these differ between batches
        self._with_gradient: set[nn.Parameter] = set()  # dense ones that eager steps train
        self._num_warm_up_steps = 0
        self._last_steps: collections.deque[bool] = collections.deque(maxlen=LAST_STEPS)
        self._num_repeated = 0
        self._last_sizes: dict[str, Any] = {}
        self._backward_of_replay: Callable[[], None] | None = None

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Train on a batch and return the second value that the forward returns, see
        ``TrainPipelineSparseDist.progress``.
        """
        check_step(self._model, self._optimizer is self._given_optimizer)
        self._backward_of_replay = None
        is_captured = self._captured_step is not None
        self._is_unchanged = self._ranks.start(
            is_captured and self._state_of_model() == self._captured_state
        )
        if self._next_step is not None and not _StepFlags(*self._next_step[1].wait()).has_next:
            if len(self.batches) == 2:  # another rank has no further batch
                self.batches.pop()
                self.contexts.pop()
            self._dataloader_exhausted = True
        return super().progress(dataloader_iter)

    def reset(self) -> None:
        super().reset()
        self._next_step = None

    def register_backward_hook(self, site: Any, work: Any) -> None:
        raise NotImplementedError(
            "register_backward_hook must not be called with TrainPipelineCudaGraph, whose backward "
            "is captured: use TrainPipelineSparseDist"
        )

    def detach(self) -> nn.Module:
        model = super().detach()
        self._close_exchange()
        self._set_input_group(self._input_group, self._ranks.group)
        self._captured_step = self._backward_of_replay = None
        return model

    def _close_exchange(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    def _set_input_group(self, old: Any, new: Any) -> None:
        """Have input dists communicate in another group."""
        if self._input_group is not None:
            for module in self._pipelined_modules:
                set_group(module, old, new)

    def start_sparse_data_dist(self, batch: Any, context: Any) -> None:
        exchange: BatchExchange | None = getattr(context, "exchange", None)
        is_fixed = self._exchange is not None and self._exchange.is_fixed
        if is_fixed and exchange is not None and exchange.is_fixed:
            return  # it was started in a call of progress that raised an error
        # Batches of an evaluation often have another size.
        self._start_exchange(batch, context, is_fixed and self._model.training)

    def _start_exchange(self, batch: Any, context: Any, is_fixed: bool) -> None:
        """Start the exchange of the ids of a batch, with fixed or with true sizes."""
        if batch is None:
            super().start_sparse_data_dist(batch, context)
            return
        if self._exchange is None:
            pipelined: list[Any] = self._pipelined_modules
            modules = {x.forward.name: x for x in pipelined}
            rank = self._ranks.group.rank()
            self._exchange = ModelExchange(modules, rank, self._ranks.size, self._device)
        with self._exchange.replaced_input_dists(is_fixed):
            super().start_sparse_data_dist(batch, context)
        stream: Any = self._data_dist_stream
        if is_fixed and stream is not None:  # for the last use of the tensors that it writes
            stream.wait_stream(torch.cuda.current_stream())
        # Capacities are computed from the first batches, and from batches that do not fit.
        is_counted = self._captured_step is None or self._exchange.is_fixed
        with self._stream_context(stream):  # pyright: ignore
            context.exchange = self._exchange.start(is_fixed, is_counted and self._model.training)

    def _next_batch(self, dataloader_iter: Iterator[Any]) -> Any:
        batch = super()._next_batch(dataloader_iter)
        if self._execute_all_batches and len(self.batches) == 2 and self._model.training:
            return batch  # ranks agree in _prepare
        if not self._ranks.start(batch is not None).wait()[0]:
            self._dataloader_exhausted, batch = True, None
        return batch

    def _pipeline_model(self, *args: Any, **kwargs: Any) -> None:
        self._close_exchange()
        super()._pipeline_model(*args, **kwargs)
        model = self._unwrapped
        self._dense = [*dense_modules(model)]
        check_model(self._model)
        check_modules(model, self._pipelined_modules, self._ranks.size)
        fixed: dict[nn.Module, set[str]] = {}
        for collection in model.modules():
            if isinstance(collection, TargetAttentionEmbeddingBagCollection):
                lookups = collection.embedding_collections.values()
                fixed |= dict(zip(lookups, collection.pooling.fixed_rows(), strict=True))
                self._fixed_keys |= collection.pooling.fixed_keys()
        pipelined: list[Any] = self._pipelined_modules
        self._sharded = [(x.forward.name, x, fixed.get(x, set())) for x in pipelined]
        self._set_input_group(self._ranks.group, self._input_group)
        self._captured_step = None

    @property
    def _unwrapped(self) -> nn.Module:
        """The model without DistributedModelParallel and DistributedDataParallel."""
        return self._model.module  # pyright: ignore[reportReturnType]

    def _forward(self, batch: Any) -> tuple[Tensor, Any]:
        """Run the forward of a step. TorchRec's pipeline calls it in place of the model."""
        prepared, self._next_step = self._next_step, None
        if prepared is None or prepared[0].batch is not batch:
            prepared = self._prepare(0)
        step, agreement = prepared
        if not _StepFlags(*agreement.wait()).is_complete:
            step, agreement = self._prepare_exactly()
        flags = _StepFlags(*agreement.wait())
        can_capture = flags.can_capture and self._model.training  # which may have changed
        if self._stream is not None:
            step.wait(torch.cuda.current_stream())
        (is_unchanged,) = self._is_unchanged.wait()
        can_replay = can_capture and is_unchanged and flags.fits
        if can_replay and (flags.fits_exchange or sum(self._last_steps) <= MOST_EAGER_STEPS):
            self._last_steps.append(not flags.fits_exchange)
            if not flags.fits_exchange:
                self._note(step)
            return self._replay(step) if self._is_verified else self._verify(step)
        if not can_capture:
            reason = self._why_eager(step) or "another rank cannot capture its batch"
        elif self._num_warm_up_steps < WARM_UP_STEPS:
            self._num_warm_up_steps += 1
            reason = "warm-up"
        elif not is_unchanged or self._is_frequent(flags.is_capacity, flags.is_repeated):
            self._capture(step)
            return self._replay(step)
        else:
            self._last_steps.append(flags.is_capacity)
            reason = self._misfit(step)[0] or "the batch of another rank does not fit"
        return self._run_eagerly(step, reason)

    def _backward(self, losses: Tensor) -> None:
        if len(self.batches) > 1:
            self._next_step = self._prepare(1)
        if self._backward_of_replay is not None:
            self._backward_of_replay()
            return
        super()._backward(losses)
        parameters = (x.parameter for x in dense_parameters(self._unwrapped))
        self._with_gradient = {x for x in parameters if x.grad is not None}

    def _prepare(self, at: int) -> tuple[_Step, _Agreement]:
        """Wait for the ids of a batch in the pipeline, and start to agree on its step."""
        context: Any = self.contexts[at]
        exchange: BatchExchange = context.exchange
        has_next = len(self.batches) == at + 2
        inputs = StepInputs(self._device.type)
        if not exchange.is_complete():
            step = _Step(self.batches[at], {}, {}, [], inputs, exchange)
            return step, self._ranks.start(*_StepFlags(has_next, is_complete=False))
        ids: dict[str, Ids] = {}
        received: list[Any] = []
        results = {x.fqn: context.postproc_fwd_results[x.fqn] for x in self._pipelined_postprocs}
        with self._stream_context(self._data_dist_stream):  # pyright: ignore
            for name, module, fixed in self._sharded:
                dist_input = context.input_dist_tensors_requests.pop(name).wait()
                module_context = context.module_contexts.pop(name)
                module_ids = exchange.result(name, module_context, dist_input)
                ids[name] = ids_of(module, module_context, module_ids, fixed)
                received += module_ids, module_context
            step = _Step(self.batches[at], results, ids, received, inputs, exchange)
            step.read_keys(self._fixed_keys, self._captured_step and self._captured_step.read)
        if self._stream is not None:
            step.record_event(self._data_dist_stream)  # pyright: ignore
        reason, is_capacity = self._misfit(step)
        flags = _StepFlags(
            has_next,
            can_capture=self._why_eager(step) is None,
            fits=reason is None,
            is_capacity=reason is None or is_capacity,
            is_repeated=reason is None
            or difference(step.inputs.constants, self._last_sizes) is None,
            fits_exchange=exchange.is_fixed or self._exceeded(exchange.counts()) is None,
        )
        return step, self._ranks.start(*flags)

    def _prepare_exactly(self) -> tuple[_Step, _Agreement]:
        """Exchange the ids of the current batch again, with their true numbers."""
        self._start_exchange(self.batches[0], self.contexts[0], is_fixed=False)
        self.wait_sparse_data_dist(self.contexts[0])
        return self._prepare(0)

    def _misfit(self, step: _Step) -> tuple[str | None, bool]:
        """Return why a batch does not fit the captured step, and whether by a capacity."""
        if self._captured_step is None:
            return None, True
        differs = difference(step.inputs.constants, self._captured_sizes)
        if differs is not None:
            return f"another value: {differs}", False
        for name, number in self._captured_num_ids.items():
            if step.ids[name].num_ids() != number:
                return f"another number of ids of {name}", True
        name = self._exceeded(step.inputs.counts)
        return name and f"more rows of {name} than the capacity", True

    def _exceeded(self, counts: dict[str, int]) -> str | None:
        """Return the name of a capacity of the captured step that ``counts`` exceed, or None."""
        capacities = {} if self._captured_step is None else self._captured_step.capacities
        return next((x for x, count in counts.items() if count > capacities.get(x, count)), None)

    def _inside(self) -> list[str]:
        """Return the names of modules whose lookups are inside the graph."""
        return [name for name, where in self.lookups.items() if where == "inside"]

    def _why_eager(self, step: _Step) -> str | None:
        """Return why a step on this batch must be eager, or None."""
        if not self._model.training:
            return "evaluation"
        if os.environ.get("TORCHREC_JAGGED_ATTN_VALIDATE") == "1":
            return "validation"
        if step.inputs.has_no_sample():
            return "no sample"
        return None

    def _is_frequent(self, is_capacity: bool, is_repeated: bool) -> bool:
        """Return whether batches did not fit so often that the step is captured again."""
        self._num_repeated = self._num_repeated + 1 if is_repeated else 0
        if is_capacity:
            return sum(self._last_steps) > MOST_EAGER_STEPS
        # Only for a new size that lasts: the next batch would not fit a capture of varying ones.
        return self._num_repeated >= MOST_EAGER_STEPS

    def _run_eagerly(self, step: _Step, reason: str) -> tuple[Tensor, Any]:
        if reason == "validation" and reason not in self.eager_steps:
            logger.warning("all steps are eager with TORCHREC_JAGGED_ATTN_VALIDATE=1")
        self.eager_steps[reason] += 1
        self._note(step)
        self._last_sizes = step.inputs.constants
        if self._captured_step is not None and self.eager_steps[reason] == MOST_EAGER_STEPS + 1:
            sizes = self._describe_sizes(step, reason)
            logger.warning("%d steps were eager: %s%s", MOST_EAGER_STEPS + 1, reason, sizes)
        with modules_return(self._unwrapped, step.look_up().outputs()):
            return self._model(step.batch)

    def _describe_sizes(self, step: _Step, reason: str) -> str:
        """Return the sizes of the batch and of the capture if ``reason`` is a size, else ""."""
        name = reason.removeprefix("another value: ")
        sizes = [x.get(name) for x in (step.inputs.constants, self._captured_sizes)]
        if not name.startswith(("the shape of ", "the number of samples of ")) or None in sizes:
            return ""
        got, captured = ([*x] if isinstance(x, torch.Size) else x for x in sizes)
        return f": got {got}, captured {captured}; with drop_last=True batches have one size"

    def _note(self, step: _Step) -> None:
        """Update the largest numbers of rows and ids of training, and which modules look up
        varying numbers of ids.
        """
        if not self._model.training:
            return
        for name, count in (step.inputs.counts | step.exchange.counts()).items():
            self._counts[name] = max(self._counts.get(name, 0), count)
        for name, ids in step.ids.items():
            number = ids.num_ids()
            key = name, ids.constants()
            if number is None or self._num_ids.setdefault(key, number) != number:
                self._with_varying_ids.add(name)

    def _replay(self, step: _Step) -> tuple[Tensor, Any]:
        assert self._captured_step is not None
        self.num_replayed_steps += 1
        self._num_repeated = 0
        step.look_up(self._inside())
        losses, outputs, self._backward_of_replay = self._captured_step.train(step.inputs)
        return losses, outputs

    def _capture(self, step: _Step) -> None:
        self._captured_step = None
        if self._stream is not None:
            torch.cuda.empty_cache()  # the graph has memory of its own
        step.read_keys(self._fixed_keys, None)  # a model may read any
        self._note(step)
        self._check_model_of_all_ranks()
        counts, varying = self._ranks.largest(self._counts, self._with_varying_ids)
        self._with_varying_ids = varying
        capacities = {name: math.ceil(HEADROOM * n) for name, n in counts.items()}
        captured, error = self._try_to_capture(step, capacities, self._choose_inside())
        if not self._ranks.start(not isinstance(error, LearningRateError)).wait()[0]:
            logger.warning("lookups are outside the CUDA graph: %s", error or "see another rank")
            captured, error = self._try_to_capture(step, capacities, {})
        self._raise_on_all_ranks(error)
        assert captured is not None
        self._captured_step, self._is_verified = captured, False
        self._captured_state = self._state_of_model()
        step.read_keys(self._fixed_keys, captured.read)
        self._captured_sizes = step.inputs.constants
        self._captured_num_ids = {name: step.ids[name].num_ids() for name in self._inside()}
        per_rank = self._ranks.gather(step.exchange.signature)
        group = self._input_group or self._ranks.group
        assert self._exchange is not None
        with self._stream_context(self._data_dist_stream):  # pyright: ignore
            fixed = self._exchange.fix(group, per_rank, captured.capacities)
        names = [name for name, *_ in self._sharded]
        self.exchanges = {name: "fixed" if name in fixed else "exact" for name in names}
        captured.close()
        self.num_captures += 1
        self._last_steps.clear()
        self._num_repeated = 0
        what = "Captured" if self._stream is not None else "Made"
        logger.info("%s a step; lookups: %s; capacities: %s", what, self.lookups, capacities)

    def _check_model_of_all_ranks(self) -> None:
        """Raise an error on all ranks if the model of one is not supported."""
        error = None
        try:
            check_model(self._model)
        except Exception as e:  # other ranks would wait for this one
            error = e
        self._raise_on_all_ranks(error)

    def _raise_on_all_ranks(self, error: Exception | None) -> None:
        """Raise an error on all ranks if one has an ``error``."""
        if not self._ranks.start(error is None).wait()[0]:
            raise error or RuntimeError("the capture failed on another rank, see its error")

    def _try_to_capture(
        self, step: _Step, capacities: dict[str, int], inside: dict[str, list[Any]]
    ) -> tuple[PaddedStep | None, Exception | None]:
        try:
            with errors_name_modules(self._unwrapped), self._nothing_changes():
                captured = self._make_step(step, capacities, inside)
            self._check_gradients(captured)
        except Exception as error:
            return None, error
        return captured, None

    def _choose_inside(self) -> dict[str, list[Any]]:
        """Return the tables of modules whose lookups can be inside the graph, by module name."""
        inside = {}
        if not torch.are_deterministic_algorithms_enabled():
            for name, module, _ in self._sharded:
                tables = capturable_tables(module)
                if tables is not None and name not in self._with_varying_ids:
                    inside[name] = tables
        return inside

    def _make_step(
        self, step: _Step, capacities: dict[str, int], inside: dict[str, list[Any]]
    ) -> PaddedStep:
        names = [name for name, *_ in self._sharded]
        self.lookups = {name: "inside" if name in inside else "outside" for name in names}
        step.look_up(inside)
        captured = PaddedStep(
            self._unwrapped,
            self._group_of_gradients(),
            step.batch,
            step.results,
            {name: lookup for name, lookup in step.lookups.items() if name not in inside},
            {name: step.ids[name] for name in inside},
            step.inputs,
            capacities,
            {x for group in self._optimizer.param_groups for x in group["params"]},
        )
        if self._stream is not None:
            rates = LearningRates([table for tables in inside.values() for table in tables])
            captured.capture(self._stream, rates)
        return captured

    def _group_of_gradients(self) -> dist.ProcessGroup | None:
        """Return the process group over which gradients of dense parameters are averaged."""
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
        inside = self._inside()
        step.look_up(inside)
        with torch.no_grad():
            lookups = step.lookups | {name: step.ids[name].look_up() for name in inside}
        outputs = _outputs(lookups) | {name: lambda x=x: x for name, x in step.results.items()}
        eager, again, *others = (
            self._eager_outputs(step.batch, outputs, seed) for seed in (None, None, 0, 1, 2)
        )
        result = self._replay(step)
        assert self._captured_step is not None
        epsilon = self._captured_step.epsilon()
        # The first two are equal, unless they depend on how often a forward has run.
        found = _difference(again, eager, [], epsilon)
        found = found or _difference(tensors_of(result), eager, others, epsilon)
        if not self._ranks.start(not found).wait()[0]:
            raise RuntimeError(
                "outputs of the captured step must equal the outputs of an eager step, got "
                f"{found or 'a difference on another rank'}. A forward that reads Python "
                "numbers which change from batch to batch, or that changes its batch, must use "
                "TrainPipelineSparseDist"
            )
        self._is_verified = True
        return result

    def _eager_outputs(
        self, batch: Any, outputs: dict[str, Callable[[], Any]], seed: int | None
    ) -> list[Tensor]:
        """Return the output tensors of an eager forward, with ``outputs`` of sharded modules."""
        with self._nothing_changes(), autocast_cache_off():
            if seed is not None:
                torch.manual_seed(seed)
            with modules_return(self._unwrapped, outputs):
                return [x.detach() for x in tensors_of(self._unwrapped(batch))]

    @contextlib.contextmanager
    def _nothing_changes(self) -> Iterator[None]:
        """Restore buffers and the states of random generators on exit."""
        devices = [] if self._stream is None else [self._stream.device]
        with torch.random.fork_rng(devices), restored_buffers(self._unwrapped):
            yield

    def _state_of_model(self) -> list[Any]:
        """Return the settings, modules and addresses that must not change between replays."""
        state: list[Any] = [
            torch.is_autocast_enabled(self._device.type),
            torch.get_autocast_dtype(self._device.type),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
        ]
        for module in self._dense:
            state.append(module.training)
            state += module._modules.values()
            for x in (*module._parameters.values(), *module._buffers.values()):
                if x is not None:
                    hooks: Any = x._backward_hooks, x._post_accumulate_grad_hooks
                    state += x.data_ptr(), x.requires_grad, any(hooks)
        for name, module, _ in self._sharded:
            state += module._lookups
            if self.lookups.get(name) == "inside":
                for table in capturable_tables(module) or ():
                    state += state_of_tables(table)
        return state


class _StepFlags(NamedTuple):
    """Flags of a step, of one rank or reduced over all ranks by logical and."""

    has_next: bool  # whether there is a next batch
    is_complete: bool = True  # whether this rank sent its batch, and has all ids of its rows
    can_capture: bool = True
    fits: bool = False  # whether the batch fits the captured step
    is_capacity: bool = True  # whether it fits, or only exceeds a capacity
    is_repeated: bool = False  # whether it fits, or has the sizes of the last eager step
    fits_exchange: bool = True  # whether its ids do not exceed the capacities of their exchange


class _Step:
    """A batch, results of modules that ran on it before the input dist, and ids to look up.

    Attributes:
        lookups: rows of sharded modules, by name, after :meth:`look_up`.
        inputs: inputs of a captured step.
        exchange: the exchange of ids.
    """

    def __init__(
        self,
        batch: Any,
        results: dict[str, Any],
        ids: dict[str, Ids],
        received: list[Any],
        inputs: StepInputs,
        exchange: BatchExchange,
    ) -> None:
        self.batch, self.results, self.ids, self.inputs = batch, results, ids, inputs
        self.exchange = exchange
        self._received = received
        self._event: Any = None
        self.lookups: dict[str, Lookup] = {}

    def read_keys(self, fixed_keys: set[str], read: set[str] | None) -> None:
        """Create ``inputs`` with the features ``read`` of KeyedJaggedTensors, or all if None."""
        self.inputs = StepInputs(self.inputs.device_type)
        for name, x in {"batch": self.batch, **self.results}.items():
            self.inputs.add_batch(name, x, fixed_keys, read)
        for name, ids in self.ids.items():
            self.inputs.add_sizes(name, ids.counts(), ids.constants())

    def record_event(self, stream: torch.cuda.Stream) -> None:
        """Record that the ids are ready when ``stream`` is here."""
        self._event = stream.record_event()

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Make ``stream`` wait for the ids, and record that it uses their memory."""
        assert self._event is not None
        stream.wait_event(self._event)
        for x in self._received:
            x.record_stream(stream)

    def look_up(self, inside: Container[str] = ()) -> _Step:
        """Look up the rows of modules whose lookups are not ``inside`` the graph."""
        for name, ids in self.ids.items():
            if name in inside:
                self.inputs.add_tensors(name, ids.tensors())
            else:
                if name not in self.lookups:  # a second forward would count a step of Adam
                    self.lookups[name] = ids.look_up()
                self.inputs.add_tensors(name, self.lookups[name].tensors())
        return self

    def outputs(self) -> dict[str, Callable[[], Any]]:
        """Return functions that compute the outputs of sharded modules, by module name."""
        return _outputs(self.lookups)


def _outputs(lookups: dict[str, Lookup]) -> dict[str, Callable[[], Any]]:
    return {name: lookup.output for name, lookup in lookups.items()}


class _Agreement:
    """Flags of one rank, reduced over all ranks by logical and."""

    def __init__(self, flags: tuple[bool, ...], group: dist.ProcessGroup | None) -> None:
        self._flags, self._work = [*flags], None
        if group is not None:
            self._bits = torch.tensor([sum(flag << i for i, flag in enumerate(flags))])
            self._work = dist.all_reduce(self._bits, dist.ReduceOp.BAND, group, async_op=True)

    def wait(self) -> list[bool]:
        """Return whether each flag is true on all ranks."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            bits = int(self._bits)
            self._flags = [bool(bits >> i & 1) for i in range(len(self._flags))]
        return self._flags


def _new_group(group: dist.ProcessGroup, **options: Any) -> Any:
    """Create another process group of the ranks of ``group``, which may be a subset of all."""
    ranks = dist.get_process_group_ranks(group)
    is_part = len(ranks) < dist.get_world_size()
    return dist.new_group(ranks, use_local_synchronization=is_part, **options)


class _Ranks:
    """Collectives on the CPU, by which all ranks of ``group`` make the same decisions."""

    def __init__(self, group: dist.ProcessGroup, size: int) -> None:
        self.group, self.size = group, size
        self._cpu_group: Any = None
        if size > 1:
            self._cpu_group = _new_group(group, backend="gloo")

    def start(self, *flags: bool) -> _Agreement:
        """Start to reduce ``flags`` over all ranks."""
        return _Agreement(flags, self._cpu_group)

    def gather(self, x: Any) -> list[Any]:
        """Return the objects ``x`` of all ranks."""
        if self.size == 1:
            return [x]
        per_rank: list[Any] = [None] * self.size
        dist.all_gather_object(per_rank, x, group=self._cpu_group)
        return per_rank

    def largest(self, counts: dict[str, int], names: set[str]) -> tuple[dict[str, int], set[str]]:
        """Return the largest of the ranks' counts, by name, and the union of ``names``."""
        per_rank = self.gather((counts, names))
        keys = dict.fromkeys(key for x, _ in per_rank for key in x)
        largest = {key: max(x.get(key, 0) for x, _ in per_rank) for key in keys}
        return largest, set().union(*(x for _, x in per_rank))


def _difference(
    outputs: list[Tensor], eager: list[Tensor], others: list[list[Tensor]], epsilon: float
) -> str:
    """Describe how outputs differ from an eager forward by more than rounding, or return "".

    The bound is ``sqrt(epsilon)`` times the largest absolute output, plus 10 times the differences
    between eager forwards with different seeds, for example with dropout.

    Args:
        outputs: outputs of the captured step.
        eager: outputs of an eager forward.
        others: outputs of eager forwards with other seeds.
        epsilon: machine epsilon of the least precise dtype.
    """
    for i, (x, y, *with_other_seeds) in enumerate(zip(outputs, eager, *others, strict=True)):
        if x.numel() == 0:
            continue
        x, y = x.double(), y.double()
        noise = [(z.double() - y).abs().nan_to_num(0, 0).max().item() for z in with_other_seeds]
        largest = y.abs().nan_to_num(0, 0).max().item()
        bound = epsilon**0.5 * largest + 10 * max(noise, default=0.0)
        if not torch.allclose(x, y, rtol=0, atol=bound, equal_nan=True):
            worst = (x - y).abs().max().item()
            return f"a difference of {worst:.3g} in tensor {i}, of at most {bound:.3g}"
    return ""
