"""``HistoryCache``: rows of users' histories, kept between requests in pages of one pool."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrec_jagged_attn.checks import check_int, check_same, check_shape, should_validate
from torchrec_jagged_attn.layout import JaggedLayout

__all__ = ["CachedHistories", "HistoryCache"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)


class CachedHistories(NamedTuple):
    """Where a batch's histories lie in a :class:`HistoryCache`.

    Tensors alone, so that a model takes them as inputs, and can be exported. They hold until the
    next :meth:`HistoryCache.append`.

    Attributes:
        rows: ``[capacity, D]``, those of the cache itself.
        scales: ``[capacity]`` fp32, of int8 rows, or ``None``: a row's values are its integers
            times its scale.
        offsets: ``[B + 1]`` int32, of histories.
        indices: ``[N]`` int32: the history of sample ``b`` is
            ``rows[indices[offsets[b] : offsets[b + 1]]]``, from its oldest row to its newest.
        lacks: ``[B]`` int32, how many of the newest rows of each are not there yet.
    """

    rows: Tensor
    scales: Tensor | None
    offsets: Tensor
    indices: Tensor
    lacks: Tensor

    def write(self, rows: Tensor) -> None:
        """Put the rows ``[M, D]`` that the cache lacked where they belong, in its dtype.

        An int8 row's scale is its largest absolute value over 127; a row that is not finite is read
        as one without a finite value. No gradient goes through the cache.

        Raises:
            ValueError: they are of another width or device, or (on CPU, or under
                ``TORCHREC_JAGGED_ATTN_VALIDATE=1``) not as many.
        """
        check_shape(rows, "rows", "[M, D]", (None, self.rows.shape[1]))
        check_same(self.rows, "the cache", dtype=False, rows=rows)
        rows = rows.detach()  # or the cache would keep the graph of every request
        if should_validate(rows) and (lacks := int(self.lacks.sum())) != rows.shape[0]:
            raise ValueError(f"rows must be the {lacks} that the cache lacked, got {len(rows)}")
        layout = JaggedLayout.from_lengths(self.lacks, rows.shape[0])
        begins = self.offsets[1:] - layout.offsets[1:]  # of each sample, less its rows before
        places = begins[layout.sample_ids()] + torch.arange(rows.shape[0], device=rows.device)
        slots = self.indices[places]
        if self.scales is not None:
            rows = rows.float()
            # Not zero, nor subnormal, which has few bits.
            scales = (rows.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
            self.scales[slots] = scales
            rows = (rows / scales.unsqueeze(1)).round()
        self.rows[slots] = rows.to(self.rows.dtype)

    def read(self) -> Tensor:
        """A copy of the histories' rows, ``[N, D]``; of int8 rows their values, in fp32.

        ``jagged_target_attention(…, rows, offsets, indices=indices)`` needs none: it reads fp32,
        bf16 and fp16 rows where they lie.
        """
        rows = self.rows.index_select(0, self.indices)
        if self.scales is None:
            return rows
        return rows.float() * self.scales.index_select(0, self.indices).unsqueeze(1)


@dataclass
class _User:
    """A history: ``length`` rows, which begin at row ``first`` of the first of its ``pages``.

    ``num_events`` is how many events the user has had up to the newest row.
    """

    pages: list[int] = field(default_factory=list)
    first: int = 0
    length: int = 0
    num_events: int = 0


class HistoryCache:
    """Keeps the looked-up rows of users' histories between requests.

    A request of a user who is in the cache needs look-ups of new events alone. All rows lie in one
    tensor, ``[capacity, D]``, in pages of ``page_size`` rows that belong to one user each. Nothing
    is moved or copied as histories grow: attention reads rows by index. Where pages run out, users
    whose last request is longest ago leave the cache.

    Which row is where is kept on the host, and nothing waits for the device. Rows are written and
    read in the order of one stream. One thread at a time may use a cache.

    A cache holds rows, not ids: after the tables change, :meth:`clear` it. After past events of a
    user change, :meth:`remove` the user: the cache sees their number alone.

    Attributes:
        max_users: so many users always fit into a batch, whatever their histories.

    Args:
        width: ``D``, columns of a row.
        max_history: newest rows kept of a user.
        capacity: rows in all, in whole pages.
        capacity_bytes: the same in bytes, of rows and scales; give one of the two.
        page_size: rows of a page. A user wastes less than two pages.
        dtype: of the rows: fp32, bf16, fp16; or int8, with an fp32 scale for each.
        device: of the rows.

    Raises:
        TypeError: ``dtype`` is none of these, or a number is no int.
        ValueError: a number is out of its range, none or both of ``capacity`` and
            ``capacity_bytes`` are given, or they do not hold one history.

    Example:
        >>> cache = HistoryCache(width=2, max_history=3, capacity=64)
        >>> lacks, cached = cache.append(["ann", "bob"], num_events=[2, 1])
        >>> lacks
        [2, 1]
        >>> cached.write(torch.tensor([[1.0, 1.0], [2.0, 2.0], [9.0, 9.0]]))

        Two more events of Ann; of her four, the newest three stay:

        >>> lacks, cached = cache.append(["ann"], num_events=[4])
        >>> lacks
        [2]
        >>> cached.write(torch.tensor([[3.0, 3.0], [4.0, 4.0]]))
        >>> cached.read()
        tensor([[2., 2.],
                [3., 3.],
                [4., 4.]])
    """

    def __init__(
        self,
        width: int,
        max_history: int,
        *,
        capacity: int | None = None,
        capacity_bytes: int | None = None,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, value in (
            ("width", width),
            ("max_history", max_history),
            ("page_size", page_size),
            ("capacity", capacity),
            ("capacity_bytes", capacity_bytes),
        ):
            if value is not None:
                check_int(value, name, 1)
        if dtype not in DTYPES:
            names = ", ".join(str(each).removeprefix("torch.") for each in DTYPES)
            raise TypeError(f"dtype must be one of {names}, got {dtype}")
        if (capacity is None) == (capacity_bytes is None):
            got = "none" if capacity is None else "both"
            raise ValueError(f"one of capacity and capacity_bytes must be given, got {got}")
        if capacity is None:
            row_bytes = width * dtype.itemsize + (4 if dtype == torch.int8 else 0)
            capacity = (capacity_bytes or 0) // row_bytes
        num_pages = capacity // page_size
        # A history that begins at the last row of a page has the most pages.
        most = (max_history + 2 * page_size - 2) // page_size
        if not most <= num_pages < 2**31 // page_size:
            raise ValueError(
                f"the capacity must be {most * page_size} to {2**31 - 1} rows for max_history "
                f"{max_history} in pages of {page_size}, got {capacity}"
            )
        self.max_history, self.page_size = max_history, page_size
        self.max_users = num_pages // most
        self.rows = torch.zeros(num_pages * page_size, width, dtype=dtype, device=device)
        self.scales = None
        if dtype == torch.int8:
            self.scales = torch.zeros(len(self.rows), device=device)
        self._users: OrderedDict[Hashable, _User] = OrderedDict()  # the longest idle first
        self._free = list(range(num_pages))

    def __len__(self) -> int:
        """Users who are in the cache."""
        return len(self._users)

    def __contains__(self, user: Hashable) -> bool:
        """Whether ``user`` is in the cache."""
        return user in self._users

    def append(
        self, users: Sequence[Hashable], num_events: Sequence[int]
    ) -> tuple[list[int], CachedHistories]:
        """Make room for the events that ``users`` have had since their last request.

        Their rows are to be looked up and given to :meth:`CachedHistories.write` before anything
        reads them; where this fails, :meth:`remove` the users. A user who has left the cache, or
        has fewer events than before, comes in anew.

        Args:
            users: of ``B`` samples, each once: what identifies them, by its hash.
            num_events: of each user: how many events there have been so far, also those before the
                newest ``max_history``.

        Returns:
            How many of the newest events of each user are to be looked up, at most
            ``max_history``; and where their histories are, these included.

        Raises:
            TypeError: a number of events is no int, or a user a tensor, whose hash is not of its
                value.
            ValueError: a user is named twice, numbers are not as many as users, or negative, or the
                histories of the batch do not fit into the cache together. The cache is as before.
        """
        if len(users) != len(num_events):
            raise ValueError(
                f"num_events must be as many as users, {len(users)}, got {len(num_events)}"
            )
        for number in num_events:
            check_int(number, "num_events", 0)
        if any(isinstance(user, Tensor) for user in users):
            raise TypeError("users must be ints, strings or the like, got tensors")
        if len(set(users)) < len(users):
            twice = next(user for at, user in enumerate(users) if user in users[:at])
            raise ValueError(f"users must be named once each, got {twice!r} twice")

        size, lacks, batch = self.page_size, [], []
        for user, number in zip(users, num_events, strict=True):
            known = self._users.get(user, _User())
            new = number - known.num_events
            if not 0 <= new < self.max_history:
                known, new = _User(), min(number, self.max_history)
            dropped = max(0, known.length + new - self.max_history)
            lacks.append(new)
            batch.append(
                _User(
                    known.pages[(known.first + dropped) // size :],
                    (known.first + dropped) % size,
                    known.length + new - dropped,
                    number,
                )
            )
        num_pages = [-(-(user.first + user.length) // size) for user in batch]
        if sum(num_pages) * size > len(self.rows):
            raise ValueError(
                f"histories of a batch must fit into the {len(self.rows)} rows of the cache "
                f"together, got {sum(num_pages) * size} rows of {len(users)} users, in whole pages"
            )

        for user, after in zip(users, batch, strict=True):
            kept = set(after.pages)
            before = self._users.pop(user, _User())
            self._free += [page for page in before.pages if page not in kept]
            if after.length:
                self._users[user] = after  # at the end
        for after, needed in zip(batch, num_pages, strict=True):
            missing = needed - len(after.pages)
            while len(self._free) < missing:
                _, longest_idle = self._users.popitem(last=False)
                self._free += longest_idle.pages
            after.pages += [self._free.pop() for _ in range(missing)]
        return lacks, self._histories_of(batch, lacks)

    def remove(self, users: Sequence[Hashable]) -> None:
        """Forget ``users``; those who are not in the cache are ignored."""
        for user in users:
            self._free += self._users.pop(user, _User()).pages

    def clear(self) -> None:
        """Forget all users."""
        self.remove(list(self._users))

    def _histories_of(self, batch: list[_User], lacks: list[int]) -> CachedHistories:
        """Where the rows of ``batch`` are, of which the newest ``lacks`` of each are new."""
        size, numbers = self.page_size, functools.partial(torch.tensor, dtype=torch.int64)
        layout = JaggedLayout.from_lengths(numbers([user.length for user in batch]))
        pages = numbers([page for user in batch for page in user.pages])
        counts = numbers([len(user.pages) for user in batch])
        # Of each sample: its first row, if all pages lay one after the other.
        begins = (counts.cumsum(0) - counts) * size + numbers([user.first for user in batch])
        sample = layout.sample_ids()
        places = torch.arange(layout.num_rows) + (begins - layout.offsets[:-1])[sample]
        indices = pages[places // size] * size + places % size
        tensors = [layout.offsets, indices, numbers(lacks)]
        # Each begins at a multiple of 16 bytes, as a tensor of its own does.
        padded = [F.pad(x, (0, -len(x) % 4)) for x in tensors]
        packed = torch.cat(padded).int()
        if self.rows.is_cuda:  # one copy, which the host does not wait for
            packed = packed.pin_memory().to(self.rows.device, non_blocking=True)
        views = packed.split([len(x) for x in padded])
        views = [view[: len(x)] for view, x in zip(views, tensors, strict=True)]
        return CachedHistories(self.rows, self.scales, *views)
