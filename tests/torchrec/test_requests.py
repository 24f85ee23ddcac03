"""Requests of several candidates on two ranks: trained as their candidates are, each a sample."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingType
from torchrec.inference.modules import quantize_inference_model
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.torchrec.test_inference import KEYS, QUANTIZED, Scorer, trace
from tests.torchrec.two_ranks import (
    LEARNING_RATE,
    NUM_IDS,
    NUM_STEPS,
    OPTIMIZERS,
    assert_same_run,
    collection_of,
    dense_optimizer,
    device_of,
    full_state_dict,
    make_batch,
    make_model,
    run_ranks,
    shard_with_weights,
)
from torchrec_jagged_attn import (
    EncoderConfig,
    HistoryEmbeddingCollectionSharder,
    embedding_parameters,
    repeat_per_candidate,
)

CPU = torch.device("cpu")
CANDIDATES = ("item", "cat", "bought")  # the last one is no target
REQUESTS = {"candidates": "jagged", "candidate_features": ["bought"]}
# Of the requests of each rank in each step: a request, all of a rank, or all have none.
COUNTS = [
    ([2, 0, 3, 1], [1, 4, 2, 5]),
    ([1, 1, 1, 1], [3, 0, 0, 2]),
    ([0, 0, 0, 0], [2, 6, 1, 1]),
    ([4, 2], [0, 1, 0, 7, 3]),
    ([0, 0, 0, 0], [0, 0, 0, 0]),
]
ENCODED = {"encoder": EncoderConfig(causal=True, user_embedding=True)}
SEPARATE = {"side_by_side": False, "init": "mha"}
# Sharding and optimizer of tables, and options of the model.
CASES: dict[str, tuple[ShardingType, str, dict[str, Any]]] = {
    "by table": (ShardingType.TABLE_WISE, "SGD", {}),
    "by row": (ShardingType.ROW_WISE, "RowWiseAdagrad", {}),
    "by column": (ShardingType.COLUMN_WISE, "Adagrad", {}),
    "newest rows, weighted": (
        ShardingType.ROW_WISE,
        "SGD",
        {"max_history": 2, "is_weighted": True, "tags": PoolingType.SUM},
    ),
    "single lookup": (ShardingType.TABLE_WISE, "SGD", {"single_lookup": True}),
    "single ids": (
        ShardingType.ROW_WISE,
        "RowWiseAdagrad",
        {"single_lookup": True, "single_id_features": ["user"]},
    ),
    "encoder layers": (ShardingType.TABLE_WISE, "SGD", ENCODED),
    "owner-side, by row": (ShardingType.ROW_WISE, "RowWiseAdagrad", SEPARATE),
    "owner-side, by table, newest rows, weighted": (
        ShardingType.TABLE_WISE,
        "SGD",
        SEPARATE | {"max_history": 2, "is_weighted": True, "tags": PoolingType.SUM},
    ),
    "owner-side, single lookup": (
        ShardingType.ROW_WISE,
        "Adagrad",
        SEPARATE | {"value_projection": True, "score": "silu", "single_lookup": True},
    ),
    "owner-side, encoder layers": (ShardingType.ROW_WISE, "SGD", SEPARATE | ENCODED),
}


def make_requests(step: int, rank: int, is_weighted: bool) -> Batch:
    """``make_batch``, with as many candidates as ``COUNTS``."""
    batch = make_batch(step, rank)
    generator = torch.Generator().manual_seed(100 * step + rank)
    counts = torch.tensor(COUNTS[step][rank % 2])
    lengths, values = [], []
    for key in batch.sparse_features.keys():  # noqa: SIM118
        ids = batch.sparse_features[key]
        is_of_candidates = key in CANDIDATES
        lengths.append(counts if is_of_candidates else ids.lengths())
        drawn = torch.randint(NUM_IDS, (int(counts.sum()),), generator=generator)
        values.append(drawn if is_of_candidates else ids.values())
    features = keyed(batch.sparse_features.keys(), lengths, values, is_weighted)
    return Batch(
        dense_features=repeat_per_candidate(batch.dense_features, features["item"]),
        sparse_features=features,
        labels=torch.arange(int(counts.sum())) % 2,
    )


def keyed(
    keys: list[str], lengths: list[Tensor], values: list[Tensor], is_weighted: bool
) -> KeyedJaggedTensor:
    ids = torch.cat(values)
    return KeyedJaggedTensor(
        keys=keys,
        values=ids,
        weights=ids % 4 / 2 if is_weighted else None,
        lengths=torch.cat(lengths),
    )


def to_samples(batch: Batch) -> Batch:
    """Each candidate as a sample, with a copy of the features of its request."""
    features = batch.sparse_features
    lengths, values = [], []
    for key in features.keys():  # noqa: SIM118
        rows = features[key].to_dense()
        for request, count in enumerate(features["item"].lengths().tolist()):
            copies = (
                list(rows[request].unsqueeze(1)) if key in CANDIDATES else [rows[request]] * count
            )
            lengths += [torch.tensor([len(ids)]) for ids in copies]
            values += copies
    is_weighted = features.weights_or_none() is not None
    samples = keyed(features.keys(), lengths, values, is_weighted)
    return Batch(batch.dense_features, samples, batch.labels)


def train_samples(
    model: nn.Module, optimizer: str, ranks: int, device: torch.device
) -> list[list[Tensor]]:
    """Logits by step and rank, of one process whose samples are the candidates of all ranks."""
    _, unfused, arguments = OPTIMIZERS[optimizer]
    tables = list(embedding_parameters(model))
    dense = [p for p in model.parameters() if not any(p is table for table in tables)]
    optimizers = [torch.optim.SGD(dense, lr=LEARNING_RATE), unfused(tables, **arguments)]
    is_weighted = collection_of(model).is_weighted()
    results = []
    for step in range(NUM_STEPS):
        logits, losses = [], [torch.zeros((), device=device, requires_grad=True)]
        for rank in range(ranks):
            batch = make_requests(step, rank, is_weighted)
            if len(batch.labels) == 0:  # which a batch of samples cannot be
                logits.append(torch.zeros(0))
                continue
            loss, (_, rank_logits, _) = model(to_samples(batch).to(device))
            losses.append(loss)
            logits.append(rank_logits.cpu())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        (torch.stack(losses).sum() / ranks).backward()
        for each in optimizers:
            each.step()
        results.append(logits)
    return results


def make_sharded(device: torch.device, case: str) -> nn.Module:
    sharding, optimizer, options = CASES[case]
    is_local = case.startswith("owner-side")
    sharder = HistoryEmbeddingCollectionSharder if is_local else EmbeddingCollectionSharder
    sharders = [sharder(), EmbeddingBagCollectionSharder()]
    model = make_model(**options, **REQUESTS)
    return shard_with_weights(model, device, sharding, optimizer, sharders=sharders)


def lookups_of(case: str) -> set[str]:
    """The pipelined modules."""
    kind = "History" if case.startswith("owner-side") else ""
    lookups = {f"Sharded{kind}EmbeddingCollection"}
    if "single_lookup" not in CASES[case][2]:
        lookups.add("ShardedEmbeddingBagCollection")
    return lookups


def requests_of_steps(is_weighted: bool) -> Iterator[Batch]:
    for step in range(NUM_STEPS):
        yield make_requests(step, dist.get_rank(), is_weighted)


def train_sharded(device: torch.device) -> dict[str, dict[str, Any]]:
    results = {}
    for case, (_, _, options) in CASES.items():
        model = make_sharded(device, case)
        pipeline = TrainPipelineSparseDist(
            model, dense_optimizer(model), device, pipeline_postproc=True
        )
        from_host = requests_of_steps(options.get("is_weighted", False))
        steps = [pipeline.progress(from_host) for _ in range(NUM_STEPS)]
        for loss, logits, _ in steps:
            assert loss.isnan() == (len(logits) == 0)  # a mean; it has no gradient then
        lookups = {type(module).__name__ for module in pipeline._pipelined_modules}
        assert lookups == lookups_of(case)
        logits = [step_logits.detach().cpu() for _, step_logits, _ in steps]
        results[case] = {"logits": logits, "state": full_state_dict(model, device)}
    return results


def test_requests_train_like_samples(tmp_path: Path, backend: str):
    ranks = run_ranks(train_sharded, tmp_path, backend)
    device = device_of(backend)
    for case, (_, optimizer, options) in CASES.items():
        model = make_model(**options).to(device)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        logits = train_samples(model, optimizer, len(ranks), device)
        for rank, results in enumerate(ranks):
            for step, expected in enumerate(logits):
                actual = results[case]["logits"][step]
                assert_same_run(actual, expected[rank], num_steps=step + 1, name=case)
        state = ranks[0][case]["state"]
        assert state.keys() == before.keys()
        for name, value in model.state_dict().items():
            assert not torch.equal(value, before[name]), f"{name} was not trained"
            assert_same_run(state[name], value, num_steps=NUM_STEPS, name=f"{case}, {name}")


class OfRequests(nn.Module):
    """A DLRM that repeats the dense features of requests."""

    def __init__(self, dlrm: nn.Module) -> None:
        super().__init__()
        self.dlrm = dlrm

    def forward(self, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
        return self.dlrm(repeat_per_candidate(dense, features["item"]), features)


def inputs(device: torch.device) -> list[tuple[Tensor, ...]]:
    batches = []
    for step in range(NUM_STEPS):
        features = make_requests(step, 0, is_weighted=False).sparse_features
        dense = make_batch(step, 0).dense_features
        lengths = features.lengths().view(len(KEYS), -1)
        batches.append(tuple(x.to(device) for x in (dense, features.values(), lengths)))
    return batches


@torch.no_grad()
@pytest.mark.parametrize(
    ("tables", "options"),
    [
        ("fp32", {"encoder": EncoderConfig(causal=True, window=3, user_embedding=True)}),
        ("int8", {"single_lookup": True, "single_id_features": ["user"]}),
    ],
    ids=["fp32, encoded", "int8, single ids"],
)
def test_traced_scripted_and_exported(
    tables: str, options: dict[str, Any], device: torch.device, fake_classes
):
    scorer = Scorer(OfRequests(make_model(**REQUESTS, **options).model).to(device)).eval()
    if tables == "int8":
        quantize_inference_model(scorer, quantization_dtype=QUANTIZED[tables][0])
    expected = [scorer(*batch) for batch in inputs(device)]
    traced = trace(scorer)
    dynamic = torch.export.Dim.DYNAMIC
    exported = torch.export.export(
        scorer,
        inputs(device)[0],
        dynamic_shapes={"dense": {0: dynamic}, "ids": {0: dynamic}, "lengths": {1: dynamic}},
        strict=tables == "fp32",
    )
    scripted, program = torch.jit.script(traced), exported.module()
    for batch, logits in zip(inputs(device), expected, strict=True):
        assert torch.equal(traced(*batch), logits)
        assert torch.equal(scripted(*batch), logits)
        if (
            len(logits) > 0 or tables == "fp32"
        ):  # exported lookups of int8 take no batch without ids
            # On a GPU, a program for any number of candidates has projections in another order.
            assert_same_run(program(*batch), logits)
