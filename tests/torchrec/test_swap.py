"""The collection in the place of an EmbeddingBagCollection, in TorchRec's own way of training.

Also what goes wrong there: each wrong line is refused, by a message that says what to write.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ModuleSharder, ShardedModule
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from tests.torchrec.two_ranks import CPU, NUM_STEPS, batches, collection_of, make_model, run_ranks
from torchrec_jagged_attn import (
    TargetAttentionConfig,
    TargetAttentionEmbeddingBagCollection,
    embedding_parameters,
)

META = torch.device("meta")
BAGS = EmbeddingBagCollectionSharder
SEQUENCES = EmbeddingCollectionSharder


def make_attended_model() -> DLRMTrain:
    """All tables hold a target or a history."""
    table = EmbeddingBagConfig(
        name="t_item", embedding_dim=8, num_embeddings=30, feature_names=["item", "hist"]
    )
    collection = TargetAttentionEmbeddingBagCollection(
        [table], TargetAttentionConfig("item", "hist"), device=META
    )
    return DLRMTrain(DLRM(collection, 3, [8], [8, 1]))


def train(
    device: torch.device,
    model: nn.Module,
    optimizer: type[torch.optim.Optimizer] = RowWiseAdagrad,
    parameters: Callable[[nn.Module], Any] = lambda model: model.model.sparse_arch.parameters(),
    sharders: list[type[ModuleSharder]] | None = None,
    pipelined: bool = True,
) -> dict[str, Any]:
    """As TorchRec's ``examples/golden_training/train_dlrm.py`` trains."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        apply_optimizer_in_backward(optimizer, parameters(model), {"lr": 0.1})
    model = DistributedModelParallel(
        model, device=device, sharders=None if sharders is None else [type_() for type_ in sharders]
    )
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.Adagrad(params, lr=0.1),
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = []
    if pipelined:
        pipeline = TrainPipelineSparseDist(model, dense, device)
        from_host = batches(CPU)
        losses = [pipeline.progress(from_host)[0].detach() for _ in range(NUM_STEPS)]
    else:
        for batch in batches(device):
            loss, _ = model(batch)
            losses.append(loss.detach())
            loss.backward()
    still = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    lookups = collection_of(model)._lookups()
    replicated = {
        name: p.detach().clone()
        for name, p in model.named_parameters()
        if "embeddings." not in name and "embedding_bags." not in name
    }
    return {
        "warnings": [str(warning.message) for warning in caught],
        "losses": losses,
        "still": still,
        "sharded": [isinstance(lookup, ShardedModule) for lookup in lookups],
        "replicated": replicated,
    }


def from_meta(device: torch.device) -> dict[str, Any]:
    return train(device, make_model(META), sharders=[BAGS, SEQUENCES])


def from_real_device(device: torch.device) -> dict[str, Any]:
    return train(device, make_model(device), torch.optim.Adagrad)


def tables_alone(device: torch.device) -> dict[str, Any]:
    return train(device, make_model(META), parameters=embedding_parameters)


def train_each_way(device: torch.device) -> list[dict[str, Any]]:
    return [how(device) for how in (from_meta, from_real_device, tables_alone)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_trains(ranks: int, tmp_path: Path):
    results = run_ranks(train_each_way, tmp_path, "gloo", ranks=ranks)
    for ways in results:
        for way, result in enumerate(ways):
            assert torch.stack(result["losses"]).isfinite().all()
            assert result["sharded"] == [True, True]
            assert result["still"] == []
            for name, weight in result["replicated"].items():
                assert torch.equal(weight, results[0][way]["replicated"][name]), name
        for warned in (ways[0]["warnings"], ways[1]["warnings"]):
            (message,) = warned
            assert "leaves out the weights of attentions" in message
            assert "embedding_parameters(model)" in message
        assert ways[2]["warnings"] == []


def bags_alone(device: torch.device) -> dict[str, Any]:
    return train(device, make_model(META), sharders=[BAGS])


def bags_alone_without_bags(device: torch.device) -> dict[str, Any]:
    return train(device, make_attended_model(), sharders=[BAGS])


def bags_alone_without_a_pipeline(device: torch.device) -> dict[str, Any]:
    return train(device, make_attended_model(), sharders=[BAGS], pipelined=False)


def sequences_alone(device: torch.device) -> dict[str, Any]:
    return train(device, make_model(META), sharders=[SEQUENCES])


LACK = r"sharders of DistributedModelParallel must include {}Sharder\(\), got no such sharder"
REFUSED = {
    bags_alone: (RuntimeError, LACK.format("EmbeddingCollection")),
    bags_alone_without_bags: (RuntimeError, LACK.format("EmbeddingCollection")),
    bags_alone_without_a_pipeline: (RuntimeError, LACK.format("EmbeddingCollection")),
    sequences_alone: (RuntimeError, LACK.format("EmbeddingBagCollection")),
}


def refuse_each(device: torch.device) -> None:
    for how, (expected, message) in REFUSED.items():
        with pytest.raises(expected, match=message):
            how(device)


def test_refused(tmp_path: Path):
    run_ranks(refuse_each, tmp_path, "gloo", ranks=1)


def unsharded_beside_a_process_group(device: torch.device) -> torch.Tensor:
    assert dist.is_initialized()
    model = make_model(device)
    return torch.stack([model(batch)[0].detach() for batch in batches(device)])


def test_tables_may_be_whole_without_a_distributed_model_parallel(tmp_path: Path):
    for losses in run_ranks(unsharded_beside_a_process_group, tmp_path, "gloo", ranks=2):
        assert losses.isfinite().all()


def test_all_parameters_are_there_for_everybody_else():
    model = make_model()
    names = {name for name, _ in model.named_parameters()}
    assert any("pooling.attentions.0.k_proj_weight" in name for name in names)
    assert names == set(model.state_dict())
