"""``BalancedBatchSampler``: batches of equal size and nearly equal cost on all ranks."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler

from torchrec_jagged_attn.checks import check_bool, check_int

POWERS = {"linear": 1, "quadratic": 2}
"""Of the length, by the name of the cost."""
NUM_SEEDS = 2**64


class BalancedBatchSampler(Sampler[list[int]]):
    r"""Samples batches such that all ranks have nearly the same cost in each step.

    In each step, ranks wait for the slowest one. Each epoch is shuffled by ``seed`` and ``epoch``
    as by :class:`torch.utils.data.DistributedSampler`, and divided into global batches of
    ``batch_size * num_replicas`` examples. The examples of a global batch are assigned to ranks,
    longest history first, each to the rank with the lowest cost whose batch is not full. Unless
    ``balanced_steps`` is more than 1, global batches have the same examples as without balancing.
    All ranks compute the same assignment, without communication.

    Use it as the ``batch_sampler`` of a ``DataLoader``. It divides the examples among the ranks: a
    framework must not do so again (in Lightning, ``Trainer(use_distributed_sampler=False)``).

    Args:
        lengths: ``[S]`` integers, the number of rows of each example's history: a tensor, an array,
            a list or a pandas Series, whose index is ignored.
        batch_size: examples of a rank in a step.
        num_replicas: number of ranks; without it, that of the default process group.
        rank: number of this rank; without it, that of the default process group.
        cost: of a batch: ``"linear"``, :math:`\sum L`, as of lookups and target attention, or
            ``"quadratic"``, :math:`\sum L^2`, as of self-attention, over its histories of ``L``
            rows.
        balanced_steps: number of consecutive global batches whose examples are assigned together,
            so that steps have nearly the same cost, too. With more than 1, each example still comes
            once in an epoch, and in each step with equal probability, but the lengths in one step
            are no longer independent.
        seed: of the shuffle; the same on all ranks, and less than ``2**64``.
        drop_last: whether to drop the examples of the last, incomplete global batch. Otherwise it
            is padded to a multiple of ``num_replicas`` with the first examples of the epoch.

    Attributes:
        batch_size, num_replicas, rank, seed, drop_last: the arguments.
        sampler: this object, in which training loops look for ``set_epoch``.

    Yields:
        ``batch_size`` indices into ``lengths``, in their shuffled order. All ranks yield equally
        many, also in a smaller last batch.

    Raises:
        TypeError: an argument has another type.
        ValueError: an argument is out of its range, or ``num_replicas`` or ``rank`` is missing
            without a process group.

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
        if not isinstance(cost, str) or cost not in POWERS:
            raise ValueError(f"cost must be one of {', '.join(POWERS)}, got {cost!r}")
        self._costs = _checked_lengths(lengths).double() ** POWERS[cost]
        size = self.batch_size * self.num_replicas
        self._full_steps, self._num_left = divmod(len(self._costs), size)
        if drop_last:
            self._num_left = 0
        if len(self) == 0:
            raise ValueError(
                f"batch_size * num_replicas must be at most the {len(self._costs)} examples of "
                f"lengths with drop_last=True, got {batch_size} * {num_replicas}"
            )
        self._epoch = self._given = self._resume_at = 0

    @property
    def sampler(self) -> BalancedBatchSampler:
        """This object: loops over epochs look for ``loader.batch_sampler.sampler.set_epoch``."""
        return self

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self._full_steps + (self._num_left > 0)

    def __iter__(self) -> Iterator[list[int]]:
        """The batches of this epoch, or, once after ``load_state_dict``, the rest of them."""
        # At the first batch, not before: a loader with workers makes two iterators and uses one.
        start, self._resume_at = self._resume_at, 0
        self._given = start
        generator = torch.Generator("cpu").manual_seed((self.seed + self._epoch) % NUM_SEEDS)
        shuffled = torch.randperm(len(self._costs), generator=generator, device="cpu")
        windows = self._windows(shuffled, start // self._balanced_steps * self._balanced_steps)
        for step, examples, num_steps in windows:
            for batch in self._share(examples, num_steps)[max(start - step, 0) :]:
                self._given += 1
                yield batch

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle of the next iteration, as ``DistributedSampler.set_epoch`` does.

        The epoch of a state just loaded keeps its position; another one starts at its beginning.

        Args:
            epoch: number of the epoch, from 0.
        """
        epoch = check_int(epoch, "epoch", 0)
        if epoch != self._epoch:
            self._epoch, self._given, self._resume_at = epoch, 0, 0

    def state_dict(self) -> dict[str, int]:
        """``epoch``, and how many of its ``batches`` were given; the same on all ranks.

        A loader with workers asks ahead. Its batches that were not trained on are given again if
        the number of those that were is saved as ``batches`` instead. A loader that keeps the state
        of its sampler for each batch, as torchdata's ``StatefulDataLoader`` does, needs no such
        care.
        """
        return {"epoch": self._epoch, "batches": self._given}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Let the next iteration go on behind the batches given, by a sampler of equal arguments.

        Args:
            state_dict: ``epoch`` and ``batches``, as ``state_dict`` returns them.

        Raises:
            TypeError: ``state_dict`` is not a mapping, or one of them is not an int.
            ValueError: one is missing, negative, or more than an epoch has.
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
        self._epoch, self._given, self._resume_at = epoch, batches, batches

    def _windows(self, shuffled: Tensor, first: int) -> Iterator[tuple[int, Tensor, int]]:
        """First step, examples and number of steps of what is shared out together."""
        size = self.batch_size * self.num_replicas
        for step in range(first, self._full_steps, self._balanced_steps):
            end = min(step + self._balanced_steps, self._full_steps)
            yield step, shuffled[step * size : end * size], end - step
        if self._num_left:
            left = shuffled[self._full_steps * size :]
            missing = -len(left) % self.num_replicas
            again = shuffled.repeat(-(-missing // len(shuffled)))[:missing]
            yield self._full_steps, torch.cat([left, again]), 1

    def _share(self, examples: Tensor, num_steps: int) -> list[list[int]]:
        """This rank's batches of ``num_steps`` steps.

        Shares of like cost become one step: of what is too long to be balanced, ranks have some
        each. Which step comes first, and which rank has which share, is decided by the first of
        their examples in the shuffle: that does not depend on lengths.
        """
        costs = self._costs[examples]
        shares = _equal_shares(costs, num_steps * self.num_replicas)
        order = costs[torch.tensor(shares, device="cpu")].sum(1).argsort(stable=True).tolist()
        steps = [
            sorted(shares[i] for i in order[begin : begin + self.num_replicas])
            for begin in range(0, len(order), self.num_replicas)
        ]
        return [
            examples[torch.tensor(step[self.rank], device="cpu")].tolist() for step in sorted(steps)
        ]


def _equal_shares(costs: Tensor, num_shares: int) -> list[list[int]]:
    """Positions in ``costs``, ascending, in shares of equal size and nearly equal sum.

    The greedy rule "longest processing time first": the largest cost left goes to the share with
    the least sum that has room.
    """
    size = len(costs) // num_shares
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    with_room = [(0.0, share) for share in range(num_shares)]
    largest_first, positions = costs.sort(descending=True, stable=True)
    for cost, position in zip(largest_first.tolist(), positions.tolist(), strict=True):
        total, share = with_room[0]
        shares[share].append(position)
        if len(shares[share]) < size:
            heapq.heapreplace(with_room, (total + cost, share))
        else:
            heapq.heappop(with_room)
    return [sorted(share) for share in shares]


def _checked_lengths(lengths: Any) -> Tensor:
    """``[S]`` int64."""
    kind = type(lengths).__name__
    if hasattr(lengths, "__array__") and not isinstance(lengths, Tensor):
        lengths = lengths.__array__()  # a Series has an index of its own
        if lengths.dtype.kind not in "iuO":
            raise TypeError(f"lengths must be integers, got {lengths.dtype}")
        # PyTorch takes neither another order of bytes, nor strides below zero, nor objects.
        is_integer, native = lengths.dtype.kind in "iu", lengths.dtype.newbyteorder("=")
        lengths = lengths.astype(native, order="C") if is_integer else lengths.tolist()
    if isinstance(lengths, (list, tuple)) and any(isinstance(x, bool) for x in lengths):
        raise TypeError("lengths must be integers, got a bool")
    try:
        given = torch.as_tensor(lengths, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"lengths must be a tensor, an array, a list or a Series of integers, got a {kind}: "
            f"{error}"
        ) from error
    if given.dim() != 1 or given.numel() == 0:
        raise ValueError(f"lengths must have shape [S], S > 0, got {list(given.shape)}")
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise TypeError(f"lengths must be integers, got {given.dtype}")
    lengths = given.long()  # PyTorch has no minimum of most unsigned dtypes
    if (lengths[at := int(lengths.argmin())]) < 0:
        number = given[at].item()
        excess = "negative" if number < 0 else "2**63 or more"
        raise ValueError(f"lengths must not be {excess}, got {number} at position {at}")
    return lengths
