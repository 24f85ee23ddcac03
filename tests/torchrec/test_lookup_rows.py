"""Attention reads deduplicated rows by gather indices, without TorchRec's copies."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
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
from torchrec_jagged_attn import EncoderConfig
from torchrec_jagged_attn.collection.sharding.lookup_rows import take_rows


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


# On two ranks


def unique_ids_on_cpu(
    base_of_features: Tensor, features_of_tables: Tensor, offsets: Tensor, ids: Tensor
) -> tuple[Tensor, ...]:
    """FBGEMM's ``jagged_unique_indices``, which has no CPU kernel."""
    num_features = len(base_of_features) - 1
    num_samples = (len(offsets) - 1) // num_features
    feature_index = torch.repeat_interleave(offsets[::num_samples].diff())
    unique, reverse = torch.unique(ids + base_of_features[feature_index], return_inverse=True)
    lengths = torch.zeros(len(offsets) - 1, dtype=torch.int64)
    first_features = torch.nonzero(features_of_tables.diff()).flatten().tolist()
    for begin, end in zip(first_features, [*first_features[1:], num_features], strict=True):
        in_range = (unique >= base_of_features[begin]) & (unique < base_of_features[end])
        lengths[begin * num_samples] = in_range.sum()  # samples share them out in any way
        unique[in_range] -= base_of_features[begin]
    return lengths, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]), unique, reverse


# Sharding, optimizer of tables, options of the model, and whether equal ids, and equal samples of a
# key, are looked up once.
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
    """Logits of each step, parameters after the last, rows and indices of gathered histories."""
    model, seen = sharded(device, case, once), []

    def look(_module: nn.Module, inputs: tuple, keywords: dict[str, Tensor]) -> None:
        if keywords["indices"] is not None:
            seen.append((inputs[1].values().shape[0], keywords["indices"].shape[0]))

    for attention in collection_of(model).pooling.attentions:
        attention.register_forward_pre_hook(look, with_kwargs=True)
    if pipelined:
        optimizer = dense_optimizer(model)
        pipeline = TrainPipelineSparseDist(model, optimizer, device, pipeline_postproc=True)
        case_batches = batches(case, once)
        logits = [pipeline.progress(case_batches)[1].cpu() for _ in range(NUM_STEPS)]
        names = {type(module).__name__ for module in pipeline._pipelined_modules}
        assert "ShardedEmbeddingCollection" in names
        return logits, full_state_dict(model, device), seen
    on_device = (batch.to(device) for batch in batches(case, once))
    logits = [step_logits.detach().cpu() for _, (_, step_logits, _) in train_on(model, on_device)]
    return logits, full_state_dict(model, device), seen


def read(sequences: EmbeddingCollectionAwaitable) -> None:
    sequences.keys()


def with_copies(device: torch.device, case: str) -> tuple[nn.Module, Batch]:
    """A model with a hook that makes TorchRec copy all rows, and a batch."""
    model, batch = sharded(device, case, once=True), next(batches(case, once=True))
    lookup = collection_of(model).embedding_collections["8"]
    lookup.register_forward_hook(lambda _lookup, _inputs, sequences: read(sequences))
    return model, batch


def check_copies(device: torch.device) -> None:
    model, batch = with_copies(device, "ids, by table")
    expected = sharded(device, "ids, by table", once=True)(batch)
    for actual, expected_rows in zip(model(batch), expected, strict=True):
        torch.testing.assert_close(actual, expected_rows)
    model, batch = with_copies(device, "samples, by table")
    with pytest.raises(NotImplementedError, match="must have no hook that reads the rows, got one"):
        model(batch)
    with torch.no_grad():
        model(batch)


def train(device: torch.device) -> dict[str, list[tuple]]:
    if device.type == "cpu":
        library = torch.library.Library("fbgemm", "IMPL")
        library.impl("jagged_unique_indices", unique_ids_on_cpu, "CPU")
        check_copies(device)
    results = {}
    for case in CASES:
        results[case] = [trained(device, case, once=once) for once in (False, True)]
        if case in PIPELINED:
            results[case].append(trained(device, case, once=True, pipelined=True))
    return results


@pytest.fixture(scope="module", name="ranks")
def train_on_ranks(
    backend: str, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, list[tuple]]]:
    return run_ranks(train, tmp_path_factory.mktemp("ranks"), backend)


@pytest.mark.parametrize("case", CASES)
def test_trains_as_with_all_copies(ranks: list[dict[str, list[tuple]]], case: str):
    for results in ranks:
        (expected, state, _), *others = results[case]
        for logits, parameters_once, _ in others:
            for step, (actual, expected_logits) in enumerate(zip(logits, expected, strict=True), 1):
                assert_same_run(actual, expected_logits, num_steps=step)
            assert parameters_once.keys() == state.keys()
            for name, value in state.items():
                assert_same_run(parameters_once[name], value, num_steps=NUM_STEPS, name=name)


@pytest.mark.parametrize("case", CASES)
def test_no_row_of_a_history_is_copied(ranks: list[dict[str, list[tuple]]], case: str):
    """If gather indices are supported; the rows are then the rows of a whole lookup."""
    for results in ranks:
        (_, _, plain), *others = results[case]
        assert plain == []
        assert len(others) == 1 + (case in PIPELINED)
        (_, _, once), *pipelined = others
        assert len(once) == (0 if case in COPIED else 2 * NUM_STEPS)
        assert all(looked_up == once for _, _, looked_up in pipelined)
