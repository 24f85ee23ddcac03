"""Kernels of the exchange of ids, for all ranks in one process."""

import random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_jagged_attn.collection.sharding import fixed_exchange, id_router
from torchrec_jagged_attn.collection.sharding.fixed_exchange import (
    ExchangedIds,
    FixedExchange,
    SentIds,
)
from torchrec_jagged_attn.collection.sharding.id_router import NUM_VALUES, IdRouter, Route
from torchrec_jagged_attn.collection.sharding.kernels import pack_ids
from torchrec_jagged_attn.collection.sharding.tables import HistoryFeature

NUM_RANKS = 3
RANKS = range(NUM_RANKS)
NUM_IDS, ROWS = 10, 4  # rows on each rank but the last
KEYS = ["item", "history", "other", "bag", "times", "now"]
INT64 = torch.iinfo(torch.int64)


def make_routes(rank: int) -> tuple[list[Route], list[list[int]]]:
    """Targets, a history with ages and one whose rows are sent back, and bags."""
    local = HistoryFeature("history", "history", True, "times", "now", True, "history")
    newest = HistoryFeature("history", "newest", True, "times", "", True, "newest")
    other = HistoryFeature("other", "other", False, "", "", True, "other")
    ranks = [*RANKS]
    routes = [
        Route(0, "item", ranks, ROWS, group="others"),
        Route(0, "bag", [1], 0, group="others"),
        Route(0, "other", ranks, ROWS, group="other", history=other),
        Route(0, "history", ranks, ROWS, history=local),
        Route(0, "history", [2], 0, history=newest),
        Route(0, "bag", ranks, ROWS),
        Route(0, "bag", [rank], 0, is_replicated=True),
        Route(0, "item", [0], 0),
    ]
    return routes, [[3, 2, 0], [1, 4], [5], [6], [7]]


def make_batch(rank: int, device: torch.device, max_length: int, dtype: torch.dtype) -> Any:
    rng = random.Random(rank)
    num_samples = 4 + rank
    lengths = [[rng.choice([0, 1, max_length]) for _ in range(num_samples)] for _ in KEYS]
    lengths[4], lengths[0], lengths[5] = lengths[1], [1] * num_samples, [1] * num_samples
    ids = [rng.choice([-1, *range(NUM_IDS + 2)]) for _ in range(sum(map(sum, lengths[:4])))]
    times = [
        rng.choice([INT64.min, -5, 0, 7, INT64.max]) for _ in range(sum(map(sum, lengths[4:])))
    ]
    values = torch.tensor([*ids, *times], device=device)
    return KeyedJaggedTensor(
        KEYS,
        values,
        torch.arange(values.numel(), device=device) / 7 - 3,
        lengths=torch.tensor(lengths, dtype=dtype, device=device).flatten(),
    )


def exchange(batches: list[Any], headroom: float, device: torch.device) -> list[list[Tensor]]:
    """Ids of each rank after the exchange, without a process group."""
    routers = [IdRouter(make_routes(i)[0], [KEYS], [True], i, NUM_RANKS, device) for i in RANKS]
    counts = [router.count([x]) for router, x in zip(routers, batches, strict=True)]
    capacities = {name: int(headroom * n) for x in counts for name, n in x.items()}
    group: Any = None
    samples = [x.stride() for x in batches]
    with mock.patch.object(fixed_exchange, "_Graph"):
        exchanges = [
            FixedExchange(router, make_routes(i)[1], group, samples, capacities)
            for i, router in enumerate(routers)
        ]
    messages, results = [], []
    sent: list[SentIds] = []
    for fixed, x in zip(exchanges, batches, strict=True):

        def all_to_all(_: Tensor, message: Tensor, *args: Any, **kwargs: Any) -> None:
            messages.append(message.split(args[1]))

        with (
            mock.patch("torch.distributed.all_to_all_single", all_to_all),
            mock.patch.object(FixedExchange, "_unpack", lambda _, ids, __: sent.append(ids)),
        ):
            fixed._exchange(fixed.router.join([x]))
    for i, fixed in enumerate(exchanges):
        received = torch.cat([parts[i] for parts in messages])
        ids = ExchangedIds(fixed, 0, *fixed._unpack(sent[i], received))
        assert ids.is_complete() == (headroom >= 1)
        num_ids = sum(counts[i].values()) - counts[i][NUM_VALUES]
        results.append([sent[i].block_counts, sent[i].order[: num_ids if headroom >= 1 else 0]])
        if headroom >= 1:
            for routes in make_routes(i)[1]:
                lengths, columns = ids.owned(routes)
                results[-1] += [lengths, *columns.values()]
    return results


@pytest.mark.parametrize("headroom", [1, 1.5, 0.5])
@pytest.mark.parametrize(("max_length", "dtype"), [(5, torch.int32), (0, torch.int64)])
def test_kernels_equal_operations(headroom, max_length, dtype, kernel_device, monkeypatch):
    sizes = {"COUNT_BLOCK": 4, "PACK_BLOCK": 4, "UNPACK_BLOCK": 8, "NUM_CHUNKS": 2}
    for name, size in (sizes | {"NUM_PROGRAMS": 1, "MAX_SAMPLES": 4}).items():
        monkeypatch.setattr(pack_ids, name, size)
    batches = [make_batch(rank, kernel_device, max_length, dtype) for rank in RANKS]
    actual = exchange(batches, headroom, kernel_device)
    for module in (fixed_exchange, id_router):
        monkeypatch.setattr(module, "implementation", lambda _: ("reference", ""))
    expected = exchange([x.to(torch.device("cpu")) for x in batches], headroom, torch.device("cpu"))
    for xs, ys in zip(actual, expected, strict=True):
        for x, y in zip(xs, ys, strict=True):
            assert torch.equal(x.cpu(), y)
