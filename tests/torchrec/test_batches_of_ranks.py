"""Batches without samples, batches as TensorDict, and ranks without a table."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import SparseType
from tensordict import TensorDict
from torch import Tensor, nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.torchrec.two_ranks import (
    LEARNING_RATE,
    assert_same_run,
    dense_optimizer,
    full_state_dict,
    load,
    run_ranks,
    shard_with_weights,
)
from torchrec_jagged_attn import (
    EncoderConfig,
    HistoryEmbeddingCollectionSharder,
    TargetAttentionConfig,
    TargetAttentionEmbeddingBagCollection,
)

KEYS = ["item", "hist", "user", "times", "now"]
PIPELINED = [(0, 0), (3, 3), (3, 0), (0, 2), (0, 0)]
"""Number of samples of each rank, by step."""
OPTIONS: dict[str, dict[str, Any]] = {
    "one candidate": {},
    "requests": {"candidates": "jagged", "request_time": "now"},
    "encoded": {
        "encoder": EncoderConfig(num_layers=2, user_embedding=True),
        "max_history": 3,
        "request_time": "now",
    },
    "projected": {"value_projection": True, "init": "mha", "request_time": "now"},
    "silu": {"score": "silu", "candidates": "jagged", "single_lookup": True},
    "a lookup of one history": {"history_dim": 16, "request_time": "now"},
}
DROPPED = {"dropout": 0.4, "candidates": "jagged"}
WAYS: dict[str, tuple[ShardingType, type[EmbeddingCollectionSharder]]] = {
    "sent by table": (ShardingType.TABLE_WISE, EmbeddingCollectionSharder),
    "sent by row": (ShardingType.ROW_WISE, EmbeddingCollectionSharder),
    "owner-side by table": (ShardingType.TABLE_WISE, HistoryEmbeddingCollectionSharder),
    "owner-side by row": (ShardingType.ROW_WISE, HistoryEmbeddingCollectionSharder),
}
# Each option with sent history rows, and with attention on owner ranks.
CASES = [
    *(
        (name, way)
        for name in ("one candidate", "encoded", "silu")
        for way in ("sent by row", "owner-side by table")
    ),
    *(
        (name, way)
        for name in ("requests", "projected", "a lookup of one history")
        for way in ("sent by table", "owner-side by row")
    ),
]
SIZES = [(3, 0), (0, 2), (0, 0), (3, 3)]
"""Number of samples of each rank."""


def make_collection(
    candidates: str = "one",
    single_lookup: bool = False,
    num_items: int = 50,
    history_dim: int = 8,
    **options: Any,
) -> TargetAttentionEmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(name=name, embedding_dim=8, num_embeddings=rows, feature_names=features)
        for name, rows, features in (
            ("t_item", num_items, ["item", "hist"]),
            ("t_user", 50, ["user"]),
        )
    ]
    if history_dim != 8:
        tables[0].feature_names.remove("hist")
        tables.append(
            EmbeddingBagConfig(
                name="t_hist",
                embedding_dim=history_dim,
                num_embeddings=num_items,
                feature_names=["hist"],
            )
        )
    torch.manual_seed(0)
    config = TargetAttentionConfig("item", "hist", num_heads=2, timestamps="times", **options)
    return TargetAttentionEmbeddingBagCollection(
        tables, config, candidates=candidates, single_lookup=single_lookup
    )


def make_batch(num_samples: int, num_ids: int = 50) -> KeyedJaggedTensor:
    history = [4, 0, 2][:num_samples]
    lengths = [1] * num_samples + history + [2] * num_samples + history + [1] * num_samples
    values = (torch.arange(sum(lengths)) * 7919) % num_ids
    times = sum(history) + num_samples  # of the events, and of the requests
    values[len(values) - times :] = torch.arange(times)
    return KeyedJaggedTensor(KEYS, values, lengths=torch.tensor(lengths, dtype=torch.int64))


def as_tensor_dict(features: KeyedJaggedTensor) -> TensorDict:
    tensors = {
        key: torch.nested.nested_tensor_from_jagged(jagged.values(), jagged.offsets())
        for key, jagged in features.to_dict().items()
    }
    return TensorDict(tensors, batch_size=[features.stride()])


def sharded(
    device: torch.device,
    collection: nn.Module,
    way: str = "sent by table",
    pooled: ShardingType = ShardingType.TABLE_WISE,
    **fused_params: Any,
) -> DistributedModelParallel:
    """By table on two ranks, one has the attended table, and the other the pooled one."""
    sharding, sharder = WAYS[way]
    sharders = [
        sharder(fused_params=dict(fused_params)),
        EmbeddingBagCollectionSharder(fused_params=dict(fused_params)),
    ]
    others = {"t_hist": sharding}
    return shard_with_weights(
        collection.to(device), device, sharding, bags=pooled, sharders=sharders, others=others
    )


def losses_of_steps(model: nn.Module, optimizer: torch.optim.Optimizer, device: Any) -> Tensor:
    """Losses of steps in which all ranks have the same batch."""
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(make_batch(3).to(device)).values().float().square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


class Loss(nn.Module):
    """The input of a pipeline."""

    def __init__(self, collection: TargetAttentionEmbeddingBagCollection) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        pooled = self.collection(features).values()
        return pooled.square().sum(), pooled.detach()


def pipelined(
    device: torch.device, way: str, sizes: list[tuple[int, int]]
) -> list[tuple[int, ...]]:
    """Output shapes of this rank in a training pipeline."""
    model = sharded(device, Loss(make_collection(**OPTIONS["requests"])), way)
    pipeline = TrainPipelineSparseDist(model, dense_optimizer(model), device)
    batches = iter([make_batch(per_rank[dist.get_rank()]) for per_rank in sizes])
    shapes = [tuple(pipeline.progress(batches).shape) for _ in sizes]
    assert len(pipeline._pipelined_modules) == 2
    return shapes


def results(device: torch.device) -> dict[str, dict[str, Tensor]]:
    """Outputs of this rank, for each way and case."""
    rank = dist.get_rank()
    results: dict[str, dict[str, Tensor]] = {way: {} for way in WAYS}
    for name, way in CASES:
        model = sharded(device, make_collection(**OPTIONS[name]), way)
        for sizes in SIZES:
            out = model(make_batch(sizes[rank]).to(device)).values()
            out.square().sum().backward()
            results[way][f"{name} {sizes}"] = out.detach()
            load(model, make_collection(**OPTIONS[name]).state_dict())
        assert model.module.device == device
        out = model(as_tensor_dict(make_batch(3).to(device))).values()
        out.square().sum().backward()
        results[way][f"{name} tensordict"] = out.detach()
    for way, outputs in results.items():
        for sizes in ((3, 0), (0, 2)):
            model = sharded(device, make_collection(**DROPPED), way)
            torch.manual_seed(rank)
            out = model(make_batch(sizes[rank]).to(device)).values()
            out.square().sum().backward()
            outputs[f"dropped {sizes}"] = out.detach()
        outputs["pipelined"] = torch.tensor(pipelined(device, way, PIPELINED))
        half = sharded(device, make_collection(), way, output_dtype=SparseType.FP16)
        outputs["half"] = losses_of_steps(half, dense_optimizer(half), device)
    return results


OnRanks = list[dict[str, dict[str, Tensor]]]


@pytest.fixture(scope="module")
def on_ranks(backend: str, tmp_path_factory: pytest.TempPathFactory) -> OnRanks:
    return run_ranks(results, tmp_path_factory.mktemp("ranks"), backend)


@functools.cache
def expected(name: str, num_samples: int) -> Tensor:
    """The output of one process."""
    return make_collection(**OPTIONS[name])(make_batch(num_samples)).values().detach()


@pytest.mark.parametrize(("name", "way"), CASES)
def test_ranks_without_a_sample(on_ranks: OnRanks, name: str, way: str):
    for sizes in SIZES:
        for outputs, size in zip(on_ranks, sizes, strict=True):
            assert outputs[way][f"{name} {sizes}"].shape == (size, expected(name, 3).shape[1])
            assert_same_run(outputs[way][f"{name} {sizes}"], expected(name, size))


@pytest.mark.parametrize("way", WAYS)
def test_dropout_if_a_rank_has_no_sample(on_ranks: OnRanks, way: str):
    """If rows are sent, dropout does not depend on the sharding; else each rank draws its own."""
    for rank, outputs in enumerate(on_ranks):
        for sizes in ((3, 0), (0, 2)):
            name = f"dropped {sizes}"
            assert outputs[way][name].shape == (sizes[rank], 24)
            if way.startswith("sent"):
                assert_same_run(outputs[way][name], outputs["sent by table"][name])
            elif sizes[rank]:
                assert outputs[way][name].isfinite().all()
                assert not torch.equal(outputs[way][name], outputs["sent by table"][name])


@pytest.mark.parametrize("way", WAYS)
def test_ranks_without_a_sample_in_a_pipeline(on_ranks: OnRanks, way: str):
    for rank, outputs in enumerate(on_ranks):
        expected = [[sizes[rank], 24] for sizes in PIPELINED]
        assert outputs[way]["pipelined"].tolist() == expected


@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_tensordict_is_taken(on_ranks: OnRanks, name: str, way: str):
    for outputs in on_ranks:
        assert_same_run(outputs[way][f"{name} tensordict"], expected(name, 3))
    alone = make_collection(**OPTIONS[name])(as_tensor_dict(make_batch(3)))
    assert torch.equal(alone.values(), expected(name, 3))


def test_half_precision_on_ranks_without_tables(on_ranks: OnRanks):
    model = make_collection()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = losses_of_steps(model, optimizer, "cpu")
    assert losses[0] > losses[2]
    for way in WAYS:
        for outputs in on_ranks:
            assert_same_run(outputs[way]["half"], losses, num_steps=None, dtype=torch.float16)


FEW = [
    {"num_items": num_items, "single_lookup": True, **OPTIONS[name]}
    for name in ("projected", "encoded")
    for num_items in (50, 3)
]
"""With ids below 3, one of four ranks has all rows that are looked up, or one has none."""


def train_on_four_ranks(device: torch.device) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """The output of this rank after a step, and the trained parameters."""
    results = []
    for options in FEW:
        # FBGEMM takes no lookup on CPU all of whose tables are empty.
        collection = make_collection(**options)
        model = sharded(device, collection, "owner-side by row", ShardingType.ROW_WISE)
        optimizer = dense_optimizer(model)
        batch = make_batch(dist.get_rank(), num_ids=3).to(device)
        model(batch).values().square().sum().backward()
        optimizer.step()
        results.append((model(batch).values().detach(), full_state_dict(model, device)))
    return results


def test_four_ranks_some_without_rows(backend: str, tmp_path):
    ranks = run_ranks(train_on_four_ranks, tmp_path, backend, ranks=4)
    for at, options in enumerate(FEW):
        model = make_collection(**options)
        batches = [make_batch(rank, num_ids=3) for rank in range(4)]
        loss = torch.stack([model(batch).values().square().sum() for batch in batches]).mean()
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=LEARNING_RATE).step()
        for batch, results in zip(batches, ranks, strict=True):
            assert_same_run(results[at][0], model(batch).values(), num_steps=2)
        for key, value in model.state_dict().items():
            assert_same_run(ranks[0][at][1][key], value, num_steps=1, name=key)


# Of each sample, when its events were and when it is scored. Times that are not known are the
# least, and ages may be larger than an integer holds; some rows are newer than the request.
LEAST = -(2**63)
TIMES = {
    torch.int64: [
        ([LEAST, LEAST, 5, 5], 5),
        ([1, 2**40, 2**62], 2**62 + 7),
        ([-(2**62), 0, 2**62 + 1], 0),
        ([LEAST, 2**63 - 1], 2**63 - 1),
        ([], LEAST),
    ],
    torch.int32: [([-(2**31), 1000, 2**31 - 1], 5), ([], 7), ([10, 20], 2**31 - 1)],
}


def make_events(rank: int, dtype: torch.dtype) -> KeyedJaggedTensor:
    times = [TIMES[dtype][(sample + rank) % len(TIMES[dtype])] for sample in range(4)]
    lengths = [len(event_times) for event_times, _ in times]
    events = [time for event_times, _ in times for time in event_times]
    ids = (torch.arange(8 + sum(lengths)) * 7919 % 50).tolist()
    values = [*ids, *events, *(now for _, now in times)]
    return KeyedJaggedTensor(
        KEYS,
        torch.tensor(values, dtype=dtype),
        lengths=torch.tensor([*[1] * 4, *lengths, *[1] * 4, *lengths, *[1] * 4], dtype=dtype),
    )


def make_aged(**options: Any) -> TargetAttentionEmbeddingBagCollection:
    """With random recency biases, so that all age buckets differ."""
    collection = make_collection(**options)
    for table in collection.pooling.attentions[0].recency_bias.parameters():
        nn.init.normal_(table)
    return collection


AGED = [
    (dtype, options)
    for dtype in TIMES
    for options in ({}, {"request_time": "now"}, {"score": "silu"})
]


def train_with_ages(device: torch.device) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """The output of this rank, and gradients of the attention."""
    results = []
    for dtype, options in AGED:
        model = sharded(device, make_aged(**options), "owner-side by row")
        out = model(make_events(dist.get_rank(), dtype).to(device)).values()
        out.square().sum().backward()
        grads = {
            name: parameter.grad
            for name, parameter in model.named_parameters()
            if name.startswith("pooling")
        }
        results.append((out.detach(), grads))
    return results


def test_ages_equal_one_rank(backend: str, tmp_path):
    ranks = run_ranks(train_with_ages, tmp_path, backend)
    for at, (dtype, options) in enumerate(AGED):
        model = make_aged(**options)
        outs = [model(make_events(rank, dtype)).values() for rank in range(len(ranks))]
        torch.stack([out.square().sum() for out in outs]).mean().backward()
        for expected, rank_results in zip(outs, ranks, strict=True):
            out, grads = rank_results[at]
            assert_same_run(out, expected)
            for name, grad in grads.items():
                assert_same_run(grad, model.get_parameter(name).grad, name=name)
            assert any("age_weight" in name for name in grads)
