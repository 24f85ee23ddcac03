"""``BalancedBatchSampler``: batches of equal size and nearly equal cost on all ranks."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler

from torchrec_jagged_attn.base.checks import check_bool, check_int

EXPONENTS = {"linear": 1, "quadratic": 2}
"""Exponent of the length in each cost."""
NUM_SEEDS = 2**64


class BalancedBatchSampler(Sampler[list[int]]):
    r"""Samples batches such that all ranks have nearly the same cost in each step.

    In each step, ranks wait for the slowest one. Each epoch is shuffled by ``seed`` and ``epoch``
    like in ``torch.utils.data.DistributedSampler``, and divided into global batches of
    ``batch_size * num_replicas`` examples. The examples of a global batch are assigned to ranks,
    longest history first, each to the rank with the lowest cost whose batch is not full. Unless
    ``balanced_steps`` is more than 1, global batches have the same examples as without balancing.
    All ranks compute the same assignment, without communication.

    Use it as the ``batch_sampler`` of a ``DataLoader``. It divides the examples among the ranks: a
    framework must not do so again (in Lightning, ``Trainer(use_distributed_sampler=False)``).

    Args:
        lengths: ``[S]`` integers, the number of rows of each example's history: a tensor, an array,
            a list or a pandas Series, whose index is ignored.
        batch_size: number of examples per rank and step.
        num_replicas: number of ranks; by default, the size of the default process group.
        rank: index of this rank; by default, its rank in the default process group.
        cost: cost of a batch of histories of ``L`` rows: ``"linear"``, :math:`\sum L`, like lookups
            and target attention, or ``"quadratic"``, :math:`\sum L^2`, like self-attention.
        balanced_steps: number of consecutive global batches whose examples are assigned together,
            so that steps have nearly the same cost, too. With more than 1, each example still
            occurs once in an epoch, and in each step with equal probability, but the lengths in one
            step are no longer independent.
        seed: seed of the shuffle; the same on all ranks, and less than ``2**64``.
        drop_last: whether to drop the examples of the last, incomplete global batch. Otherwise it
            is padded to a multiple of ``num_replicas`` with the first examples of the epoch.

    Attributes:
        batch_size, num_replicas, rank, seed, drop_last: the arguments.
        sampler: this object, on which training loops look for ``set_epoch``.

    Yields:
        ``batch_size`` indices into ``lengths``, in their shuffled order. All ranks yield equally
        many, also in a smaller last batch.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument is out of range, or ``num_replicas`` or ``rank`` is missing without
            a process group.

    Example:
        >>> lengths = [900, 10, 20, 30, 400, 300, 40, 200]
        >>> for rank in range(2):
        ...     sampler = BalancedBatchSampler(lengths, batch_size=4, num_replicas=2, rank=rank)
        ...     print([sorted(lengths[i] for i in batch) for batch in sampler])
        [[30, 200, 300, 400]]
        [[10, 20, 40, 900]]
    """

    def __init__(
        self,
        lengths: Any,
        batch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        cost: str = "linear",
        balanced_steps: int = 1,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if (num_replicas is None or rank is None) and not (
            dist.is_available() and dist.is_initialized()
        ):
            missing = "num_replicas" if num_replicas is None else "rank"
            raise ValueError(f"{missing} must be given before init_process_group, got None")
        num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        rank = dist.get_rank() if rank is None else rank
        self.batch_size = check_int(batch_size, "batch_size", 1)
        self.num_replicas = check_int(num_replicas, "num_replicas", 1)
        self.rank = check_int(rank, "rank", 0)
        self._balanced_steps = check_int(balanced_steps, "balanced_steps", 1)
        if self.rank >= self.num_replicas:
            raise ValueError(f"rank must be less than num_replicas {num_replicas}, got {rank}")
        self.seed = check_int(seed, "seed", 0, bits=64)
        check_bool(drop_last, "drop_last")
        self.drop_last = drop_last
        if not isinstance(cost, str) or cost not in EXPONENTS:
            raise ValueError(f"cost must be one of {', '.join(EXPONENTS)}, got {cost!r}")
        self._costs = _check_lengths(lengths).double() ** EXPONENTS[cost]
        self._global_size = self.batch_size * self.num_replicas
        self._full_steps, remainder = divmod(len(self._costs), self._global_size)
        self._has_partial_step = remainder > 0 and not drop_last
        if len(self) == 0:
            raise ValueError(
                f"batch_size * num_replicas must be at most the {len(self._costs)} examples of "
                f"lengths with drop_last=True, got {batch_size} * {num_replicas}"
            )
        self._epoch = self._num_yielded = self._start = 0

    @property
    def sampler(self) -> BalancedBatchSampler:
        """This object: training loops call ``loader.batch_sampler.sampler.set_epoch``."""
        return self

    def __len__(self) -> int:
        """Number of batches per epoch."""
        return self._full_steps + self._has_partial_step

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of this epoch; once after ``load_state_dict``, the remaining ones."""
        # Runs at the first batch: a loader with workers makes two iterators and uses one.
        start, self._start = self._start, 0
        self._num_yielded = start
        generator = torch.Generator("cpu").manual_seed((self.seed + self._epoch) % NUM_SEEDS)
        shuffled = torch.randperm(len(self._costs), generator=generator, device="cpu")
        first = start - start % self._balanced_steps
        for step, examples, num_steps in self._windows(shuffled, first):
            for batch in self._assign(examples, num_steps)[max(start - step, 0) :]:
                self._num_yielded += 1
                yield batch

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle of the next iteration, like ``DistributedSampler.set_epoch``.

        The epoch of a state just loaded keeps its position; another epoch starts from its first
        batch.

        Args:
            epoch: number of the epoch, from 0.
        """
        epoch = check_int(epoch, "epoch", 0)
        if epoch != self._epoch:
            self._epoch, self._num_yielded, self._start = epoch, 0, 0

    def state_dict(self) -> dict[str, int]:
        """Return ``epoch`` and the number of ``batches`` yielded; the same on all ranks.

        A loader with workers prefetches batches. To yield prefetched batches again that were not
        trained on, save the number of trained batches as ``batches`` instead. Loaders that save the
        state of their sampler with each batch, like torchdata's ``StatefulDataLoader``, handle
        this.
        """
        return {"epoch": self._epoch, "batches": self._num_yielded}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue from the state of a sampler with equal arguments in the next iteration.

        Args:
            state_dict: ``epoch`` and ``batches``, as returned by ``state_dict``.

        Raises:
            TypeError: ``state_dict`` is not a mapping, or a value is not an int.
            ValueError: a value is missing, negative, or more than an epoch has.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict must be a dict, got a {type(state_dict).__name__}")
        if missing := {"epoch", "batches"} - set(state_dict):
            raise ValueError(f"state_dict must have {min(missing)}, got {sorted(state_dict)}")
        epoch, batches = (
            check_int(state_dict[name], f"state_dict[{name!r}]", 0) for name in ("epoch", "batches")
        )
        if batches > len(self):
            raise ValueError(
                f"state_dict['batches'] must be at most the {len(self)} of an epoch, got {batches}"
            )
        self._epoch, self._num_yielded, self._start = epoch, batches, batches

    def _windows(self, shuffled: Tensor, first: int) -> Iterator[tuple[int, Tensor, int]]:
        """Yield the first step, the examples and the number of steps of joint assignments."""
        size = self._global_size
        for step in range(first, self._full_steps, self._balanced_steps):
            end = min(step + self._balanced_steps, self._full_steps)
            yield step, shuffled[step * size : end * size], end - step
        if self._has_partial_step:
            last = shuffled[self._full_steps * size :]
            missing = -len(last) % self.num_replicas
            padding = shuffled.repeat(-(-missing // len(shuffled)))[:missing]
            yield self._full_steps, torch.cat([last, padding]), 1

    def _assign(self, examples: Tensor, num_steps: int) -> list[list[int]]:
        """Assign the examples of ``num_steps`` steps, and return this rank's batches.

        Batches of similar cost form a step, so that batches that cannot be balanced, with a very
        long history, meet in one step. The order of steps, and of ranks within a step, follows the
        first example of each in the shuffle, which does not depend on lengths.
        """
        costs = self._costs[examples]
        batches = _balance(costs, num_steps * self.num_replicas)
        order = costs[torch.tensor(batches, device="cpu")].sum(1).argsort(stable=True).tolist()
        steps = sorted(
            sorted(batches[i] for i in order[begin : begin + self.num_replicas])
            for begin in range(0, len(order), self.num_replicas)
        )
        return [examples[torch.tensor(step[self.rank], device="cpu")].tolist() for step in steps]


def _balance(costs: Tensor, num_batches: int) -> list[list[int]]:
    """Divide the indices of ``costs`` into batches of equal size and nearly equal cost, ascending.

    The greedy rule "longest processing time first": the largest remaining cost goes to the batch
    with the lowest total that is not full.
    """
    size = len(costs) // num_batches
    batches: list[list[int]] = [[] for _ in range(num_batches)]
    not_full = [(0.0, batch) for batch in range(num_batches)]
    descending, indices = costs.sort(descending=True, stable=True)
    for cost, index in zip(descending.tolist(), indices.tolist(), strict=True):
        total, batch = not_full[0]
        batches[batch].append(index)
        if len(batches[batch]) < size:
            heapq.heapreplace(not_full, (total + cost, batch))
        else:
            heapq.heappop(not_full)
    return [sorted(batch) for batch in batches]


def _check_lengths(lengths: Any) -> Tensor:
    """Convert ``lengths`` to ``[S]`` int64 and check their range."""
    kind = type(lengths).__name__
    if hasattr(lengths, "__array__") and not isinstance(lengths, Tensor):
        array = lengths.__array__()  # without the index of a Series
        # PyTorch accepts neither foreign byte orders, nor negative strides, nor arrays of objects.
        is_integer = array.dtype.kind in "iu"
        lengths = array.astype("int64", order="C") if is_integer else array.tolist()
    if isinstance(lengths, (list, tuple)) and any(isinstance(x, bool) for x in lengths):
        raise TypeError("lengths must be integers, got a bool")
    try:
        lengths = torch.as_tensor(lengths, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"lengths must be a tensor, an array, a list or a Series of integers, got a {kind}: "
            f"{error}"
        ) from error
    if lengths.dim() != 1 or lengths.numel() == 0:
        raise ValueError(f"lengths must have shape [S], S > 0, got {list(lengths.shape)}")
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise TypeError(f"lengths must be integers, got {lengths.dtype}")
    lengths = lengths.long()
    if (lengths < 0).any():  # unsigned lengths that int64 does not hold, too
        at = int(lengths.argmin())
        raise ValueError(f"lengths must be 0 to 2**63 - 1, got {int(lengths[at])} at index {at}")
    return lengths
