"""Batches of a sharded collection: without samples, as TensorDict; and ranks without a table."""

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
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.torchrec.two_ranks import (
    assert_same_run,
    dense_optimizer,
    load,
    optimize_tables,
    run_ranks,
)
from torchrec_jagged_attn import TargetAttentionConfig, TargetAttentionEmbeddingBagCollection

KEYS = ["item", "hist", "user", "times"]
PIPELINED = [(0, 0), (3, 3), (3, 0), (0, 2), (0, 0)]
"""Samples of each rank, step by step."""
OPTIONS: dict[str, dict[str, Any]] = {
    "one candidate": {},
    "requests": {"candidates": "jagged"},
    "encoded": {"encoder_layers": 2, "user_column": True, "max_history": 3},
}


def make_collection(
    candidates: str = "one", **options: Any
) -> TargetAttentionEmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(name=name, embedding_dim=8, num_embeddings=50, feature_names=features)
        for name, features in (("t_item", ["item", "hist"]), ("t_user", ["user"]))
    ]
    torch.manual_seed(0)
    config = TargetAttentionConfig("item", "hist", num_heads=2, timestamps="times", **options)
    return TargetAttentionEmbeddingBagCollection(tables, config, candidates=candidates)


def make_batch(num_samples: int) -> KeyedJaggedTensor:
    history = [4, 0, 2][:num_samples]
    lengths = [1] * num_samples + history + [2] * num_samples + history
    count = sum(lengths)
    values = (torch.arange(count) * 7919) % 50
    values[count - sum(history) :] = torch.arange(sum(history))
    return KeyedJaggedTensor(KEYS, values, lengths=torch.tensor(lengths, dtype=torch.int64))


def as_tensor_dict(features: KeyedJaggedTensor) -> TensorDict:
    of_keys = {
        key: torch.nested.nested_tensor_from_jagged(jagged.values(), jagged.offsets())
        for key, jagged in features.to_dict().items()
    }
    return TensorDict(of_keys, batch_size=[features.stride()])


def sharded(collection: nn.Module, **fused_params: Any) -> DistributedModelParallel:
    """By table: of two ranks, one has the attended table, and the other the pooled one."""
    state = {name: value.clone() for name, value in collection.state_dict().items()}
    optimize_tables(collection)
    sharders = [
        EmbeddingCollectionSharder(fused_params=dict(fused_params)),
        EmbeddingBagCollectionSharder(fused_params=dict(fused_params)),
    ]
    ranks = dist.get_world_size()
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=ranks, local_world_size=ranks, compute_device="cpu"),
        constraints={
            name: ParameterConstraints(sharding_types=[ShardingType.TABLE_WISE.value])
            for name in ("t_item", "t_user")
        },
    )
    plan = planner.collective_plan(collection, sharders, dist.group.WORLD)
    model = DistributedModelParallel(
        collection, device=torch.device("cpu"), plan=plan, sharders=sharders
    )
    load(model, state)
    return model


def losses_of_half(_: torch.device) -> Tensor:
    """Of each step, where all ranks have one batch."""
    model = sharded(make_collection(), output_dtype=SparseType.FP16)
    optimizer, losses = dense_optimizer(model), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(make_batch(3)).values().float().square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


class Loss(nn.Module):
    """What a pipeline takes."""

    def __init__(self, collection: TargetAttentionEmbeddingBagCollection) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        pooled = self.collection(features).values()
        return pooled.square().sum(), pooled.detach()


def pipelined(sizes: list[tuple[int, int]]) -> list[tuple[int, ...]]:
    """The shapes that this rank puts out in a training pipeline."""
    model = sharded(Loss(make_collection()))
    pipeline = TrainPipelineSparseDist(model, dense_optimizer(model), torch.device("cpu"))
    batches = iter([make_batch(of_ranks[dist.get_rank()]) for of_ranks in sizes])
    shapes = [tuple(pipeline.progress(batches).shape) for _ in sizes]
    assert len(pipeline._pipelined_modules) == 2
    return shapes


def results(_: torch.device) -> dict[str, Tensor]:
    """What this rank puts out, for each case."""
    rank, outputs = dist.get_rank(), {}
    for name, options in OPTIONS.items():
        model = sharded(make_collection(**options))
        for sizes in ((3, 0), (0, 2), (0, 0), (3, 3)):
            out = model(make_batch(sizes[rank])).values()
            out.square().sum().backward()
            outputs[f"{name} {sizes}"] = out.detach()
            load(model, make_collection(**options).state_dict())
        assert model.module.device == torch.device("cpu")
        out = model(as_tensor_dict(make_batch(3))).values()
        out.square().sum().backward()
        outputs[f"{name} tensordict"] = out.detach()
    outputs["half"] = losses_of_half(_)
    outputs["pipelined"] = torch.tensor(pipelined(PIPELINED))
    return outputs


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    return run_ranks(results, tmp_path_factory.mktemp("ranks"), "gloo")


@functools.cache
def expected(name: str, num_samples: int) -> Tensor:
    """Of one process."""
    return make_collection(**OPTIONS[name])(make_batch(num_samples)).values().detach()


@pytest.mark.parametrize("sizes", [(3, 0), (0, 2), (0, 0), (3, 3)], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_ranks_without_a_sample(on_ranks: list[dict[str, Tensor]], name: str, sizes: tuple):
    for outputs, size in zip(on_ranks, sizes, strict=True):
        assert outputs[f"{name} {sizes}"].shape == (size, expected(name, 3).shape[1])
        assert_same_run(outputs[f"{name} {sizes}"], expected(name, size))


def test_ranks_without_a_sample_in_a_pipeline(on_ranks: list[dict[str, Tensor]]):
    for rank, outputs in enumerate(on_ranks):
        expected = [[sizes[rank], 24] for sizes in PIPELINED]
        assert outputs["pipelined"].tolist() == expected


@pytest.mark.parametrize("name", OPTIONS)
def test_a_tensordict_is_taken(on_ranks: list[dict[str, Tensor]], name: str):
    for outputs in on_ranks:
        assert_same_run(outputs[f"{name} tensordict"], expected(name, 3))
    alone = make_collection(**OPTIONS[name])(as_tensor_dict(make_batch(3)))
    assert torch.equal(alone.values(), expected(name, 3))


def test_half_lookups_where_ranks_have_no_table(on_ranks: list[dict[str, Tensor]], tmp_path):
    (of_one,) = run_ranks(losses_of_half, tmp_path, "gloo", ranks=1)
    assert of_one[0] > of_one[2]
    for outputs in on_ranks:
        assert_same_run(outputs["half"], of_one, num_steps=None, dtype=torch.float16)
