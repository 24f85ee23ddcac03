"""Checkpoints of a model that pools histories are loaded into one with attention, and back."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingType
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from tests.torchrec.test_resharding import Parts, assert_equal, parts_of, put_together
from tests.torchrec.two_ranks import (
    FEATURES,
    collection_of,
    full_state_dict,
    make_model,
    optimize_tables,
    run_ranks,
    shard,
    train,
)
from torchrec_jagged_attn import embedding_bag_keys, rename_keys


def make_pooled_model() -> DLRMTrain:
    tables = collection_of(make_model()).embedding_bag_configs()
    return DLRMTrain(DLRM(EmbeddingBagCollection(tables), 3, [8], [8, 1]))


def sharded(model: nn.Module, device: torch.device) -> DistributedModelParallel:
    """Bags by table, sequences by row."""
    optimize_tables(model, "RowWiseAdagrad")
    has_sequences = any(isinstance(module, EmbeddingCollection) for module in model.modules())
    sharding = ShardingType.ROW_WISE if has_sequences else ShardingType.TABLE_WISE
    return shard(model, device, sharding, bags=ShardingType.TABLE_WISE)


def state_of(model: DistributedModelParallel, names: dict[str, str]) -> dict[str, Any]:
    state = {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}
    return rename_keys(state, names) if names else state


def load(model: DistributedModelParallel, checkpoint: Path, names: dict[str, str]) -> None:
    """``names`` maps names in the model to names in the checkpoint."""
    state = state_of(model, names)
    planner = DefaultLoadPlanner(allow_partial_load=True)  # attentions lie in one of both alone
    dcp.load(state, checkpoint_id=checkpoint, planner=planner)
    state = rename_keys(state, {old: new for new, old in names.items()})
    model.load_state_dict(state["model"])
    model.fused_optimizer.load_state_dict(state["optimizer"])


def remembered(model: DistributedModelParallel) -> dict[str, Parts]:
    """Optimizer states of each table."""
    return {
        name: {begin: part.clone() for begin, part in parts_of(value).items()}
        for state in model.fused_optimizer.state_dict()["state"].values()
        for name, value in state.items()
        if not isinstance(value, float)
    }


def result(model: DistributedModelParallel, device: torch.device) -> dict[str, Any]:
    return {"model": full_state_dict(model, device), "optimizer": remembered(model)}


def there_and_back(device: torch.device, folder: Path) -> list[dict[str, Any]]:
    torch.manual_seed(1)
    pooled, attended, again = (
        sharded(make(), device) for make in (make_pooled_model, make_model, make_pooled_model)
    )
    train(pooled, device)
    dcp.save(state_of(pooled, {}), checkpoint_id=folder / "pooled")
    names = embedding_bag_keys(attended)
    load(attended, folder / "pooled", names)
    results = [result(pooled, device), result(attended, device)]
    dcp.save(state_of(attended, {}), checkpoint_id=folder / "attended")
    load(again, folder / "attended", {old: new for new, old in names.items()})
    results.append(result(again, device))
    train(attended, device)
    results.append(result(attended, device))
    return results


def test_load_tables_and_optimizer(tmp_path: Path, backend: str):
    ranks = run_ranks(there_and_back, tmp_path, backend, tmp_path)
    pooled, attended, again, trained = (each["model"] for each in ranks[0])
    names = embedding_bag_keys(make_model())
    assert len(names) == len(FEATURES)
    assert {names.get(name, name) for name in attended} >= set(pooled)
    assert_equal(
        {names[name]: attended[name] for name in names},
        {name: pooled[name] for name in names.values()},
    )
    assert_equal(again, pooled)
    for name in names:
        assert not torch.equal(trained[name], attended[name]), name
    optimizers = [put_together([rank[at]["optimizer"] for rank in ranks]) for at in range(4)]
    assert len(optimizers[0]) == len(FEATURES)
    assert all(value.any() for value in optimizers[0].values())
    assert_equal(optimizers[1], optimizers[0])
    assert_equal(optimizers[2], optimizers[0])
    for name, value in optimizers[3].items():
        assert (value >= optimizers[1][name]).all(), name  # sums of squares go on


def compile_parts(model: nn.Module) -> nn.Module:
    """Compile all lookups together, and one table."""
    collection = collection_of(model)
    (lookup,) = collection.embedding_collections.values()
    lookup.embeddings["t_item"] = torch.compile(lookup.embeddings["t_item"])
    collection.embedding_collections = torch.compile(collection.embedding_collections)
    return model


def checkpoint_collection(model: nn.Module) -> nn.Module:
    arch = model.model.sparse_arch
    arch.embedding_bag_collection = checkpoint_wrapper(arch.embedding_bag_collection)
    return model


WRAPPERS = {
    "none": [],
    "DDP": [DistributedDataParallel],
    "checkpoint_wrapper of the collection": [checkpoint_collection],
    "torch.compile of parts": [compile_parts],
    "DDP in torch.compile": [checkpoint_wrapper, DistributedDataParallel, torch.compile],
    "FSDP": [lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu"))],
}


def names_under_wrappers(_: torch.device) -> dict[str, tuple[list[str], list[str]]]:
    """Names of tables, and all names of the state dict."""
    names = {}
    for name, wrappers in WRAPPERS.items():
        model = make_model()
        for wrap in wrappers:
            model = wrap(model)
        keys = embedding_bag_keys(model)
        with (
            FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT)
            if name == "FSDP"
            else contextlib.nullcontext()
        ):
            names[name] = list(keys), list(model.state_dict())
    return names


def test_names_are_keys_of_the_state_dict(tmp_path: Path):
    (names,) = run_ranks(names_under_wrappers, tmp_path, "gloo", ranks=1)
    for name, (tables, keys) in names.items():
        assert len(tables) == len(FEATURES), name
        assert set(tables) <= set(keys), name


def test_a_collection_in_two_places_has_two_names():
    collection = collection_of(make_model())
    twice = nn.ModuleDict({"first": collection, "second": collection})
    names = embedding_bag_keys(twice)
    assert len(names) == 2 * len(FEATURES)
    assert set(names) <= set(twice.state_dict())


def test_rename_without_keys():
    names = embedding_bag_keys(make_model())
    with pytest.raises(ValueError, match=r"names must have keys of state, got \['model"):
        rename_keys({"model": make_pooled_model().state_dict()}, names)
    with pytest.raises(ValueError, match=r"names must have keys of state, got \[\]"):
        rename_keys(make_model().state_dict(), {})
