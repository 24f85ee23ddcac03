"""One exchange of fixed sizes on two ranks: the ids that TorchRec's input dists send."""

import functools
import itertools
import math
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from torchrec.distributed.sharding.tw_sharding import TwSparseFeaturesDist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.torchrec.two_ranks import CPU, run_ranks
from torchrec_jagged_attn.collection.sharding.fixed_exchange import (
    ExchangedIds,
    FixedExchange,
)
from torchrec_jagged_attn.collection.sharding.id_router import (
    NUM_VALUES,
    IdRouter,
    Route,
    as_weights,
)

NUM_IDS = 11  # rows 0 to 5 are on the first of two ranks
NUM_BATCHES = 6
KEYS = [["a", "b", "c", "d"], ["e", "b"]]
# Of each lookup: the index of the batch's KeyedJaggedTensor, its features, and the number of those
# on each rank; or "rows" if all ranks have rows of all of them, or "replicated".
LOOKUPS: dict[str, tuple[int, list[str], Any]] = {
    "table-wise": (0, ["d", "a", "b"], "tables"),
    "row-wise": (0, ["c", "a"], "rows"),
    "column-wise": (0, ["c", "d", "c"], "tables"),
    "replicated": (1, ["b", "e"], "replicated"),
    "row-wise, another input": (1, ["e"], "rows"),
}
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "weights": {"is_weighted": True},
    "long": {"max_length": 40},
    "no id on a rank": {"max_length": [0, 3]},
    "no id": {"max_length": 0},
    "equal ids": {"num_ids": 1},
    "int32 lengths": {"dtype": torch.int32},
}


def make_inputs(
    rank: int,
    num_samples: list[int],
    max_length: int | list[int] = 3,
    num_ids: int = NUM_IDS,
    is_weighted: bool = False,
    dtype: torch.dtype = torch.int64,
    device: torch.device = CPU,
    step: int = 0,
) -> list[KeyedJaggedTensor]:
    rng, inputs = random.Random(10 * step + rank), []
    longest = max_length if isinstance(max_length, int) else max_length[rank]
    for keys in KEYS:
        lengths = [rng.randint(0, longest) for _ in range(len(keys) * num_samples[rank])]
        values = torch.tensor([rng.randrange(num_ids) for _ in range(sum(lengths))]).long()
        inputs.append(
            KeyedJaggedTensor(
                keys,
                values.to(device),
                values.to(device) / 7 if is_weighted and keys == KEYS[0] else None,
                lengths=torch.tensor(lengths, dtype=dtype, device=device),
            )
        )
    return inputs


def features_per_rank(count: int) -> list[int]:
    """Numbers of features per rank, for table-wise lookups."""
    size = dist.get_world_size()
    return [count // size + (rank < count % size) for rank in range(size)]


def make_routes() -> tuple[list[Route], list[list[int]]]:
    routes, lookups = [], []
    ranks = range(dist.get_world_size())
    for index, keys, kind in LOOKUPS.values():
        owners = [[*ranks]] * len(keys)
        if kind == "tables":
            owners = [[rank] for rank in ranks for _ in range(features_per_rank(len(keys))[rank])]
        lookups.append([*range(len(routes), len(routes) + len(keys))])
        rows = math.ceil(NUM_IDS / len(ranks))
        routes += [
            Route(index, key, owner_ranks, rows, is_replicated=kind == "replicated")
            for key, owner_ranks in zip(keys, owners, strict=True)
        ]
    return routes, lookups


def expected(inputs: list[KeyedJaggedTensor], name: str, device: torch.device) -> KeyedJaggedTensor:
    """The ids that TorchRec's input dists send to a lookup on this rank."""
    index, keys, kind = LOOKUPS[name]
    features = inputs[index].permute([inputs[index].keys().index(key) for key in keys])
    group: Any = dist.group.WORLD
    if kind == "tables":
        return TwSparseFeaturesDist(group, features_per_rank(len(keys)))(features).wait().wait()
    if kind == "rows":
        sizes = [NUM_IDS] * len(keys)
        return RwSparseFeaturesDist(group, len(keys), sizes, device=device)(features).wait().wait()
    return features


def make_exchange(
    batches: list[list[KeyedJaggedTensor]], num_samples: list[int], device: torch.device
) -> FixedExchange:
    """Make an exchange whose capacities are the largest numbers of ids in these batches."""
    routes, lookups = make_routes()
    is_weighted = [x.weights_or_none() is not None for x in batches[0]]
    size = dist.get_world_size()
    router = IdRouter(routes, KEYS, is_weighted, dist.get_rank(), size, device)
    counts = [router.count(inputs) for inputs in batches]
    largest = {name: max(x[name] for x in counts) for name in counts[0]}
    per_rank: list[Any] = [None] * size
    dist.all_gather_object(per_rank, largest)
    capacities = dict(itertools.chain(*(x.items() for x in [*per_rank, largest])))
    group: Any = dist.group.WORLD
    capacities[NUM_VALUES] *= 10
    dtype = batches[0][0].lengths().dtype
    return FixedExchange(router, lookups, group, num_samples, capacities, dtype)


def received_ids(ids: ExchangedIds, lookups: list[list[int]]) -> list[tuple]:
    """Values, weights and lengths of all lookups."""
    results = []
    for routes in lookups:
        lengths, columns = ids.owned(routes)
        assert sum(sum(ids.received(route)) for route in routes) == len(columns["ids"])
        weights = as_weights(columns["weights"]) if "weights" in columns else None
        results.append((columns["ids"], weights, lengths))
    return results


def exchange(device: torch.device, case: str) -> list[tuple]:
    """Values, weights and lengths of each lookup, of TorchRec and of the exchange.

    While the ids of a batch are used, the next batch is exchanged.
    """
    rank, num_samples = dist.get_rank(), [4, 3][: dist.get_world_size()]
    options: dict[str, Any] = CASES[case] | {"device": device}
    batches = [make_inputs(rank, num_samples, **options, step=step) for step in range(NUM_BATCHES)]
    fixed = make_exchange(batches, num_samples, device)
    results, exchanged = [], []
    for step in range(NUM_BATCHES + 1):
        if step < NUM_BATCHES:
            exchanged.append(fixed.start(batches[step], True))
        if step > 0:
            results += compare(exchanged[step - 1], batches[step - 1], device)
    return results


def compare(
    ids: ExchangedIds, inputs: list[KeyedJaggedTensor], device: torch.device
) -> list[tuple]:
    """Copies of values, weights and lengths of each lookup, of TorchRec and of the exchange."""
    assert ids.is_complete()
    results = []
    for name, (values, weights, lengths) in zip(
        LOOKUPS, received_ids(ids, make_routes()[1]), strict=True
    ):
        kjt = expected(inputs, name, device)
        other = kjt.weights_or_none()
        if other is None:
            weights = None
        tensors = kjt.values(), values, kjt.lengths(), lengths, other, weights
        results.append(tuple(None if x is None else x.clone() for x in tensors))
    return results


def exchange_misfits(device: torch.device) -> dict[str, bool]:
    """Whether batches are complete on this rank."""
    rank, num_samples = dist.get_rank(), [4, 3][: dist.get_world_size()]
    inputs = make_inputs(rank, num_samples, device=device)
    fixed = make_exchange([inputs], num_samples, device)
    # More ids, another number of samples, values that belong to no sample, and a batch that is not
    # accepted, on the first rank.
    long = make_inputs(rank, num_samples, [8, 3], device=device)
    huge = make_inputs(rank, num_samples, [100, 3], device=device)
    smaller = make_inputs(rank, [2, 3], device=device)
    first, *others = inputs
    values = torch.cat([first.values(), first.values()[:1]]) if rank == 0 else first.values()
    padded = KeyedJaggedTensor(first.keys(), values, lengths=first.lengths())
    return {
        "fits": fixed.start(inputs, True).is_complete(),
        "long": fixed.start(long, True).is_complete(),
        "huge": fixed.start(huge, True).is_complete(),
        "smaller": fixed.start(smaller, True).is_complete(),
        "values of no sample": fixed.start([padded, *others], True).is_complete(),
        "not accepted": fixed.start(inputs, rank != 0).is_complete(),
        "fits again": all(fixed.start(inputs, True).is_complete() for _ in range(NUM_BATCHES)),
        "long again": fixed.start(long, True).is_complete(),
        "accepts": fixed.router.accepts(inputs),
        "accepts other keys": fixed.router.accepts(inputs[::-1]),
    }


def on_each_rank(device: torch.device) -> dict[str, Any]:
    stream = torch.cuda.Stream() if device.type == "cuda" else None  # a capture needs one
    with torch.cuda.stream(stream):
        return results_by_name(device)


def results_by_name(device: torch.device) -> dict[str, Any]:
    functions: dict[str, Any] = {case: functools.partial(exchange, device, case) for case in CASES}
    functions["misfits"] = lambda: exchange_misfits(device)
    return {name: function() for name, function in functions.items()}


@pytest.fixture(scope="module")
def ranks(backend: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(on_each_rank, tmp_path_factory.mktemp("ranks"), backend)


@pytest.mark.parametrize("case", CASES)
def test_lookups_receive_the_ids_of_torchrec(ranks: list[dict[str, Any]], case: str):
    for results in ranks:
        for values, actual, lengths, actual_lengths, weights, actual_weights in results[case]:
            assert torch.equal(actual, values)
            assert torch.equal(actual_lengths, lengths)
            assert actual_lengths.dtype == lengths.dtype
            assert (weights is None) == (actual_weights is None)
            if weights is not None:
                assert torch.equal(actual_weights, weights)


def test_ranks_know_whether_they_have_all_ids(ranks: list[dict[str, Any]]):
    for rank, results in enumerate(ranks):
        misfits = results["misfits"]
        assert misfits["fits"]
        assert misfits["fits again"]
        assert misfits["accepts"]
        assert not misfits["accepts other keys"]
        assert not misfits["smaller"]
        assert not misfits["values of no sample"]
        assert not misfits["not accepted"]
        if rank == 0:
            assert not misfits["long"]
            assert not misfits["long again"]
            assert not misfits["huge"]
