"""Rows of sharded lookups that TorchRec copies reach the attention without a copy."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchrec.datasets.utils import Batch
from torchrec.distributed.embedding import (
    EmbeddingCollectionAwaitable,
    EmbeddingCollectionContext,
    EmbeddingCollectionSharder,
)
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import NoWait, ShardingType
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.utils import SequenceVBEContext
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.torchrec.test_options import with_equal_samples_once
from tests.torchrec.test_requests import REQUESTS, make_requests
from tests.torchrec.two_ranks import (
    NUM_STEPS,
    assert_same_run,
    collection_of,
    dense_optimizer,
    full_state_dict,
    make_batch,
    make_model,
    run_ranks,
    shard_with_weights,
    train_on,
)
from torchrec_jagged_attn import EncoderConfig, JaggedTargetAttention
from torchrec_jagged_attn.collection.lookup_rows import take_rows

KEYS = ["item", "hist", "tags"]
NO_COPY = {"hist"}


# What TorchRec itself makes of its private things is the oracle: these fail where it changes them.


def of_unique_ids() -> tuple[EmbeddingCollectionContext, KeyedJaggedTensor, int]:
    """Places of 3 keys and 2 samples, which have 5 rows."""
    places = KeyedJaggedTensor(
        keys=KEYS, values=torch.arange(9), lengths=torch.tensor([1, 1, 3, 0, 2, 2])
    )
    context = EmbeddingCollectionContext(
        input_features=[places], reverse_indices=[torch.tensor([4, 0, 1, 4, 1, 0, 3, 3, 2])]
    )
    of_rows = KeyedJaggedTensor(
        keys=KEYS, values=torch.arange(5), lengths=torch.tensor([5, 0, 0, 0, 0, 0])
    )
    return context, of_rows, 5


def of_batch_sizes(unique_ids: bool = False) -> tuple[EmbeddingCollectionContext, Any, int]:
    """2, 1 and 2 samples of keys, for 3 of the batch; lookups have them with zeros up to 2."""
    lengths = torch.tensor([1, 1, 3, 2, 2])
    recat = torch.tensor([0, 1, 1, 2, 2, 2, 4, 3, 4], dtype=torch.int32)
    of_batch = lengths[recat].view(3, 3)
    context = EmbeddingCollectionContext(
        seq_vbe_ctx=[SequenceVBEContext(recat, lengths, of_batch, of_batch.sum(1).tolist())]
    )
    padded = KeyedJaggedTensor(
        keys=KEYS, values=torch.arange(9), lengths=torch.tensor([1, 1, 3, 0, 2, 2])
    )
    if not unique_ids:
        return context, padded, 9
    of_ids, of_rows, num_rows = of_unique_ids()
    context.input_features, context.reverse_indices = of_ids.input_features, of_ids.reverse_indices
    return context, of_rows, num_rows


CONTEXTS: dict[str, Callable[[], tuple[EmbeddingCollectionContext, KeyedJaggedTensor, int]]] = {
    "unique ids": of_unique_ids,
    "batch sizes": of_batch_sizes,
    "both": functools.partial(of_batch_sizes, unique_ids=True),
}


def awaited(context: str, rows: Tensor) -> EmbeddingCollectionAwaitable:
    made, features, num_rows = CONTEXTS[context]()
    return EmbeddingCollectionAwaitable([NoWait(rows[:num_rows])], [features], [KEYS], made)


@pytest.mark.filterwarnings("ignore:fbgemm")
@pytest.mark.parametrize("context", CONTEXTS)
def test_rows_and_indices_are_what_torchrec_copies(context: str):
    rows = torch.randn(9, 4)
    expected = awaited(context, rows).wait()
    taken, indices = take_rows(awaited(context, rows), NO_COPY)
    assert indices.keys() == NO_COPY
    assert [*taken] == [*expected] == KEYS
    for key in KEYS:
        values = taken[key].values()
        if key in NO_COPY:
            assert values.data_ptr() == rows.data_ptr()
            values = values[indices[key]]
        assert torch.equal(values, expected[key].values()), key
        assert torch.equal(taken[key].lengths(), expected[key].lengths()), key


def test_sequences_of_which_torchrec_makes_no_copy_are_waited_for_once():
    _, places, _ = of_batch_sizes()
    context, rows = EmbeddingCollectionContext(), torch.randn(9, 4)

    def sequences() -> EmbeddingCollectionAwaitable:
        return EmbeddingCollectionAwaitable([NoWait(rows)], [places], [KEYS], context)

    taken, indices = take_rows(sequences(), NO_COPY)
    assert type(taken) is dict  # whose keys no longer ask
    assert indices == {}
    expected = sequences().wait()
    assert [*taken] == [*expected] == KEYS
    for key in KEYS:
        assert torch.equal(taken[key].values(), expected[key].values()), key
        assert torch.equal(taken[key].lengths(), expected[key].lengths()), key


@pytest.mark.parametrize("order", [None, [2, 0, 1]])
def test_keys_sharded_by_column_are_copied(order: list[int] | None):
    names = ["hist", "item", "hist", "hist"]
    places = KeyedJaggedTensor(
        keys=names, values=torch.arange(11), lengths=torch.tensor([1, 2, 1, 1, 1, 2, 1, 2])
    )
    rows, indices = torch.randn(7, 4), torch.tensor([4, 0, 1, 4, 1, 0, 3, 3, 2, 6, 5])

    def sequences() -> EmbeddingCollectionAwaitable:
        context = EmbeddingCollectionContext(input_features=[places], reverse_indices=[indices])
        orders = None if order is None else {"hist": order}
        return EmbeddingCollectionAwaitable(
            [NoWait(rows)], [places], [names], context, features_to_permute_indices=orders
        )

    taken, by_index = take_rows(sequences(), {"hist", "item"})
    assert by_index.keys() == {"item"}
    expected = sequences().wait()
    assert torch.equal(taken["hist"].values(), expected["hist"].values())
    assert torch.equal(taken["item"].values()[by_index["item"]], expected["item"].values())


class LargestTensor(TorchDispatchMode):
    """Remembers how many elements the largest tensor has that any operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        returned = [x.numel() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.numel = max([self.numel, *returned])
        return out


def test_no_tensor_is_as_large_as_a_copy():
    """Forward and backward: of 300 places in 3 samples, of 5 rows."""
    attention = JaggedTargetAttention(16, 2)
    places = KeyedJaggedTensor(
        keys=["item", "hist"], values=torch.arange(303), lengths=torch.tensor([1, 1, 1, 99, 0, 201])
    )
    results, largest = [], []
    for by_index in ({"hist"}, set()):
        rows = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
        context = EmbeddingCollectionContext(
            input_features=[places], reverse_indices=[torch.arange(303) ** 2 % 5]
        )
        sequences = EmbeddingCollectionAwaitable(
            [NoWait(rows)], [places], [["item", "hist"]], context
        )
        with LargestTensor() as seen:
            taken, indices = take_rows(sequences, by_index)
            out = attention(taken["item"].values(), taken["hist"], indices=indices.get("hist"))
            out.sum().backward()
        results.append([out, rows.grad])
        largest.append(seen.numel)
    for actual, expected in zip(*results, strict=True):
        assert_same_run(actual, expected)
    assert largest[0] < 300 * 16 <= largest[1]


def test_what_nobody_copies_is_left_alone():
    _, features, _ = of_batch_sizes()
    plain = EmbeddingCollectionAwaitable(
        [NoWait(torch.randn(9, 4))], [features], [KEYS], EmbeddingCollectionContext()
    )
    assert take_rows(plain, NO_COPY) == (plain, {})
    unsharded = plain.wait()
    assert take_rows(unsharded, NO_COPY) == (unsharded, {})


@pytest.mark.filterwarnings("ignore:fbgemm")
def test_copies_that_somebody_waited_for_are_taken():
    sequences = awaited("unique ids", torch.randn(9, 4))
    copied = sequences["hist"]
    taken, indices = take_rows(sequences, NO_COPY)
    assert taken["hist"] is copied
    assert indices == {}


@pytest.mark.filterwarnings("ignore:fbgemm")
def test_copies_without_a_gradient_are_refused():
    sequences = awaited("batch sizes", torch.randn(9, 4, requires_grad=True))
    sequences.keys()  # waits
    with pytest.raises(NotImplementedError, match="must have no hook that reads the rows, got one"):
        take_rows(sequences, NO_COPY)
    with torch.no_grad():
        assert take_rows(sequences, NO_COPY) == (sequences, {})


# On two ranks


def unique_ids_on_cpu(
    base_of_features: Tensor, features_of_tables: Tensor, offsets: Tensor, ids: Tensor
) -> tuple[Tensor, ...]:
    """FBGEMM's ``jagged_unique_indices``, which has no CPU kernel."""
    num_features = len(base_of_features) - 1
    num_samples = (len(offsets) - 1) // num_features
    of_places = torch.repeat_interleave(offsets[::num_samples].diff())
    unique, reverse = torch.unique(ids + base_of_features[of_places], return_inverse=True)
    lengths = torch.zeros(len(offsets) - 1, dtype=torch.int64)
    first_features = torch.nonzero(features_of_tables.diff()).flatten().tolist()
    for begin, end in zip(first_features, [*first_features[1:], num_features], strict=True):
        own = (unique >= base_of_features[begin]) & (unique < base_of_features[end])
        lengths[begin * num_samples] = own.sum()  # samples share them out in any way
        unique[own] -= base_of_features[begin]
    return lengths, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]), unique, reverse


# How tables are sharded and learn, what the model does, and whether ids are looked up once, and
# samples of a key.
CASES: dict[str, tuple[ShardingType, str, dict[str, Any], bool, bool]] = {
    "ids, by table": (ShardingType.TABLE_WISE, "SGD", {}, True, False),
    "ids, by row": (ShardingType.ROW_WISE, "RowWiseAdagrad", {}, True, False),
    "ids, by column": (ShardingType.COLUMN_WISE, "Adagrad", {}, True, False),
    "samples, by table": (ShardingType.TABLE_WISE, "RowWiseAdagrad", {}, False, True),
    "samples, by row, weighted": (
        ShardingType.ROW_WISE,
        "SGD",
        {"max_history": 2, "is_weighted": True, "tags": PoolingType.SUM},
        False,
        True,
    ),
    "samples, by column": (ShardingType.COLUMN_WISE, "SGD", {}, False, True),
    "samples, side by side": (ShardingType.TABLE_WISE, "SGD", {"side_by_side": True}, False, True),
    "samples, encoder": (ShardingType.TABLE_WISE, "SGD", {"encoder": EncoderConfig()}, False, True),
    "samples and ids": (
        ShardingType.ROW_WISE,
        "SGD",
        {"single_lookup": True, "single_id_features": ["user"]},
        True,
        True,
    ),
    "requests": (ShardingType.TABLE_WISE, "SGD", dict(REQUESTS), True, True),
}
PIPELINED = {"ids, by row", "samples, by row, weighted", "samples and ids", "requests"}
COPIED = {"ids, by column", "samples, by column", "samples, side by side", "samples, encoder"}


def sharded(device: torch.device, case: str, once: bool) -> nn.Module:
    sharding, optimizer, options, unique_ids, _ = CASES[case]
    model = make_model(**({"side_by_side": False} | options))
    sharders = [
        EmbeddingCollectionSharder(use_index_dedup=once and unique_ids),
        EmbeddingBagCollectionSharder(),
    ]
    return shard_with_weights(model, device, sharding, optimizer, sharders=sharders)


def batches(case: str, once: bool) -> Iterator[Batch]:
    _, _, options, _, samples_once = CASES[case]
    make = make_requests if "candidates" in options else make_batch
    for step in range(NUM_STEPS):
        batch = make(step, dist.get_rank(), options.get("is_weighted", False))
        yield with_equal_samples_once(batch) if once and samples_once else batch


def trained(
    device: torch.device, case: str, once: bool, pipelined: bool = False
) -> tuple[list[Tensor], dict[str, Tensor], list[tuple[int, int]]]:
    """Logits of each step, parameters after the last, rows and places of what is read by index."""
    model, seen = sharded(device, case, once), []

    def look(_module: nn.Module, inputs: tuple, keywords: dict[str, Tensor]) -> None:
        if keywords["indices"] is not None:
            seen.append((inputs[1].values().shape[0], keywords["indices"].shape[0]))

    for attention in collection_of(model).pooling.attentions:
        attention.register_forward_pre_hook(look, with_kwargs=True)
    if pipelined:
        optimizer = dense_optimizer(model)
        pipeline = TrainPipelineSparseDist(model, optimizer, device, pipeline_postproc=True)
        made = batches(case, once)
        logits = [pipeline.progress(made)[1].cpu() for _ in range(NUM_STEPS)]
        names = {type(module).__name__ for module in pipeline._pipelined_modules}
        assert "ShardedEmbeddingCollection" in names
        return logits, full_state_dict(model, device), seen
    on_device = (batch.to(device) for batch in batches(case, once))
    logits = [of_step.detach().cpu() for _, (_, of_step, _) in train_on(model, on_device)]
    return logits, full_state_dict(model, device), seen


def train(device: torch.device) -> dict[str, list[tuple]]:
    if device.type == "cpu":
        library = torch.library.Library("fbgemm", "IMPL")
        library.impl("jagged_unique_indices", unique_ids_on_cpu, "CPU")
    results = {}
    for case in CASES:
        results[case] = [trained(device, case, once=once) for once in (False, True)]
        if case in PIPELINED:
            results[case].append(trained(device, case, once=True, pipelined=True))
    return results


@pytest.fixture(
    scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.gpu)], name="ranks"
)
def train_on_ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, list[tuple]]]:
    return run_ranks(train, tmp_path_factory.mktemp("ranks"), request.param)


@pytest.mark.parametrize("case", CASES)
def test_trains_as_with_all_copies(ranks: list[dict[str, list[tuple]]], case: str):
    for results in ranks:
        (expected, state, _), *others = results[case]
        for logits, of_once, _ in others:
            for step, (actual, of_all) in enumerate(zip(logits, expected, strict=True), 1):
                assert_same_run(actual, of_all, num_steps=step)
            assert of_once.keys() == state.keys()
            for name, value in state.items():
                assert_same_run(of_once[name], value, num_steps=NUM_STEPS, name=name)


@pytest.mark.parametrize("case", CASES)
def test_no_row_of_a_history_is_copied(ranks: list[dict[str, list[tuple]]], case: str):
    """Where it can be read by index; then the rows are those of a whole lookup."""
    for results in ranks:
        (_, _, plain), *others = results[case]
        assert plain == []
        assert len(others) == 1 + (case in PIPELINED)
        (_, _, once), *pipelined = others
        assert len(once) == (0 if case in COPIED else 2 * NUM_STEPS)
        assert all(looked_up == once for _, _, looked_up in pipelined)
