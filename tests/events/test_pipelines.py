"""Events are selected and boosted in TorchRec's training pipeline, before the exchange of ids."""

import pytest
import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.types import ShardingType
from torchrec.models.dlrm import DLRMTrain
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.torchrec.two_ranks import (
    HISTORY_LENGTHS,
    NUM_STEPS,
    batches,
    dense_optimizer,
    make_model,
    run_ranks,
    shard_with_weights,
    train_on,
)
from torchrec_jagged_attn.events import (
    EventBoosting,
    EventSelection,
    Relevance,
)

CPU = torch.device("cpu")
HISTORY = ["hist", "hist_cat", "times"]
KEEP = 2


class RelevanceOfBatch(nn.Module):
    """Relevance of events, with times as dwell times and categories as surfaces."""

    def __init__(self) -> None:
        super().__init__()
        self.relevance = Relevance(30)
        torch.manual_seed(1)
        self.relevance.coefficients.normal_()

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.relevance(features["times"].values(), features["hist_cat"].values())


class SelectingModel(nn.Module):
    """A DLRM on the most relevant events, weighted by relevance."""

    def __init__(self, train_model: DLRMTrain) -> None:
        super().__init__()
        relevance = RelevanceOfBatch()
        self.selection = EventSelection(HISTORY, KEEP, scores=relevance)
        self.boosting = EventBoosting(HISTORY, relevance)
        self.train_model = train_model

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        features = self.boosting(self.selection(batch.sparse_features))
        logits = self.train_model.model(batch.dense_features, features)
        loss = self.train_model.loss_fn(logits.squeeze(-1), batch.labels.float())
        return loss, (loss.detach(), logits.detach())


def make_sharded(device: torch.device) -> DistributedModelParallel:
    model = SelectingModel(make_model(is_weighted=True))
    return shard_with_weights(model, device, ShardingType.TABLE_WISE)


def train(device: torch.device) -> dict[str, list[Tensor]]:
    """Losses without a pipeline, and with one that selects events before the lookup."""
    losses = [loss for loss, _ in train_on(make_sharded(device), batches(device))]
    model = make_sharded(device)
    pipeline = TrainPipelineSparseDist(
        model, dense_optimizer(model), device, pipeline_postproc=True
    )
    collection = model.module.train_model.model.sparse_arch.embedding_bag_collection
    lookup = collection.embedding_collections["8"]
    input_dist, seen = lookup.input_dist, []
    lookup.input_dist = lambda context, features: (
        seen.append(features.to_dict()) or input_dist(context, features)
    )
    from_host = batches(CPU)
    pipelined = [pipeline.progress(from_host)[0].detach() for _ in range(NUM_STEPS)]
    assert len(pipeline._pipelined_modules) == 2
    modules = {type(x.postproc_module).__name__ for x in pipeline._pipelined_postprocs}
    assert modules == {"EventSelection", "EventBoosting"}
    for step, features in enumerate(seen):
        lengths = HISTORY_LENGTHS[step][torch.distributed.get_rank()]
        for key in ("hist", "hist_cat"):
            assert features[key].lengths().tolist() == [min(length, KEEP) for length in lengths]
    assert len(seen) == NUM_STEPS
    return {"none": losses, "pipelined": pipelined}


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list:
    """Losses of each rank."""
    return run_ranks(train, tmp_path_factory.mktemp("trained"), request.param)


def test_selected_before_the_exchange_between_ranks(trained: list):
    for losses in trained:
        assert torch.equal(torch.stack(losses["pipelined"]), torch.stack(losses["none"]))
        assert len(losses["none"]) == NUM_STEPS
