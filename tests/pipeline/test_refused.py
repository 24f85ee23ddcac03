"""Models and arguments that are not supported, and errors that say what to use instead."""

import inspect
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.gradient_accumulation import (
    GradientAccumulationConfig,
    GradientAccumulationWrapper,
)
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

from tests.pipeline.training import (
    WithLayer,
    assert_equal_on_cpu,
    make_batch,
    make_optimizer,
    make_pipeline,
    make_sharded,
    short_warm_up,
    train,
)
from tests.torchrec.test_options import with_equal_samples_once
from tests.torchrec.two_ranks import collection_of, make_model
from torchrec_jagged_attn import TrainPipelineCudaGraph
from torchrec_jagged_attn.pipeline.support import REFUSED_ARGUMENTS, check_modules

USE_TORCHREC = "use TrainPipelineSparseDist"
ARGUMENTS = inspect.signature(TrainPipelineSparseDist.__init__).parameters


@pytest.mark.parametrize("name", [x for x in REFUSED_ARGUMENTS if x in ARGUMENTS])
def test_arguments(name: str, device: torch.device):
    model = make_sharded(make_model(), device)
    value = model if name == "custom_model_fwd" else True
    with pytest.raises(NotImplementedError, match=f"{name} must not be given .*{USE_TORCHREC}"):
        TrainPipelineCudaGraph(model, make_optimizer(model), device, **{name: value})


def test_arguments_that_torchrec_does_not_have(device: torch.device):
    model = make_sharded(make_model(), device)
    with pytest.raises(TypeError, match="unknown"):
        TrainPipelineCudaGraph(model, make_optimizer(model), device, unknown=True)


def test_the_model_must_be_distributed(device: torch.device):
    model = make_model()
    with pytest.raises(TypeError, match=r"model must be a DistributedModelParallel .*DLRMTrain"):
        TrainPipelineCudaGraph(model, torch.optim.SGD(model.parameters()), device)


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, logits: Tensor, batch: Any) -> Tensor:
        return logits + self.norm(batch.dense_features).sum(dim=1)


def sharded_dense_layer(model: DistributedModelParallel) -> None:
    mesh = dist.device_mesh.init_device_mesh(next(model.module.parameters()).device.type, (1,))
    fully_shard(model.module.model.over_arch, mesh=mesh)


def dense_parameter(model: DistributedModelParallel) -> nn.Parameter:
    return next(model.module.model.over_arch.parameters())


def broadcast_buffers(model: DistributedModelParallel) -> None:
    ddp = model._dmp_wrapped_module
    ddp.broadcast_buffers = ddp.forward_sync_buffers = True


# Changes of a sharded model, and the error.
MODELS: dict[str, tuple[Callable[[DistributedModelParallel], Any], str]] = {
    "FSDP": (sharded_dense_layer, "dense layers must not be sharded .*FSDP in 'model.over_arch'"),
    "communication hook": (
        lambda model: model._dmp_wrapped_module.register_comm_hook(None, allreduce_hook),
        "average gradients in their own dtype .*the communication hook allreduce_hook",
    ),
    "buffers that are broadcast": (broadcast_buffers, "must not broadcast buffers"),
    "hook of DistributedModelParallel": (
        lambda model: model.register_forward_hook(lambda *_: None),
        "must have no forward hooks .*hooks of DistributedModelParallel",
    ),
    "hook of DistributedDataParallel": (
        lambda model: model._dmp_wrapped_module.register_forward_pre_hook(lambda *_: None),
        "must have no forward hooks .*hooks of DistributedDataParallel",
    ),
    "hook of a parameter": (
        lambda model: dense_parameter(model).register_hook(lambda x: x),
        r"parameters must have no hooks .*hooks of 'model.over_arch.*weight'",
    ),
    "hook behind the gradient of a parameter": (
        lambda model: dense_parameter(model).register_post_accumulate_grad_hook(lambda _: None),
        r"parameters must have no hooks .*hooks of 'model.over_arch.*weight'",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, device: torch.device):
    change, match = MODELS[name]
    model = make_sharded(WithLayer(make_model(), Normalized()), device)
    TrainPipelineCudaGraph(model, make_optimizer(model), device)
    change(model)
    with pytest.raises(NotImplementedError, match=f"{match}.*{USE_TORCHREC}"):
        TrainPipelineCudaGraph(model, torch.optim.SGD([nn.Parameter(torch.ones(1))]), device)


def test_groups_of_ranks_that_replicate_tables(device: torch.device):
    model = DMPCollection.__new__(DMPCollection)
    with pytest.raises(NotImplementedError, match=f"got a DMPCollection: {USE_TORCHREC}"):
        TrainPipelineCudaGraph(model, torch.optim.SGD([nn.Parameter(torch.ones(1))]), device)


def test_optimizers_in_backward_of_dense_layers(device: torch.device):
    model = make_model()
    parameters = model.model.over_arch.parameters()
    apply_optimizer_in_backward(torch.optim.SGD, parameters, {"lr": 0.1})
    sharded = make_sharded(model, device)
    match = f"optimizers in backward must have parameters of tables alone .*{USE_TORCHREC}"
    with pytest.raises(NotImplementedError, match=match):
        TrainPipelineCudaGraph(sharded, make_optimizer(sharded), device)


class LookingUp(nn.Module):
    """Adds rows of an EmbeddingCollection of its own."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingConfig(
            name="t_user", embedding_dim=8, num_embeddings=30, feature_names=["user"]
        )
        self.users = EmbeddingCollection([table])
        self.model = make_model()

    def forward(self, batch: Any) -> tuple[Tensor, Any]:
        loss, outputs = self.model(batch)
        return loss + self.users(batch.sparse_features)["user"].values().sum(), outputs


def with_another_collection(device: torch.device) -> Any:
    return make_pipeline(device, LookingUp())


def with_max_history(device: torch.device) -> Any:
    return make_pipeline(device, make_model(max_history=2))


def with_tracker(register: Callable[[Any], None]) -> Callable[[torch.device], Any]:
    """A pipeline with a tracker that ``register`` adds to its sharded EmbeddingCollection."""

    def make(device: torch.device) -> Any:
        pipeline = make_pipeline(device)
        for collection in collection_of(pipeline._model).embedding_collections.values():
            register(collection)
        return pipeline

    return make


TRACKED = f"lookups must not be tracked .*{USE_TORCHREC}"

# Pipelines whose first step is refused.
STEPS: dict[str, tuple[Callable[[torch.device], Any], str]] = {
    "another EmbeddingCollection": (
        with_another_collection,
        f"must go to a TargetAttentionEmbeddingBagCollection .*'users'.*{USE_TORCHREC}",
    ),
    "max_history": (
        with_max_history,
        "must be pipelined .*with max_history, give the pipeline pipeline_postproc=True",
    ),
    "tracker of rows": (
        with_tracker(lambda x: x.register_post_lookup_tracker_fn(lambda *_: None)),
        TRACKED,
    ),
    "tracker of the output dist": (
        with_tracker(lambda x: x.register_post_odist_tracker_fn(lambda: None)),
        TRACKED,
    ),
    "tracker of optimizer states": (
        with_tracker(lambda x: x._lookups[0].register_optim_state_tracker_fn(lambda *_: None)),
        TRACKED,
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_first_steps(name: str, device: torch.device):
    make, match = STEPS[name]
    pipeline = make(device)
    with pytest.raises(NotImplementedError, match=match):
        pipeline.progress(make_batch(step) for step in range(3))


class OtherBags(ShardedEmbeddingBagCollection):
    pass


def as_other_bags(model: nn.Module) -> None:
    collection_of(model).embedding_bag_collection.__class__ = OtherBags


def as_other_module(model: nn.Module) -> None:
    other = type("OtherModule", (ShardedModule,), {"__abstractmethods__": frozenset()})
    collection_of(model).embedding_collections["8"].__class__ = other


def with_unique_ids(model: nn.Module) -> None:
    collection_of(model).embedding_collections["8"]._use_index_dedup = True


# Changes of sharded modules, the number of ranks, and the error.
SHARDED: dict[str, tuple[Callable[[nn.Module], None], int, str]] = {
    "other bags": (as_other_bags, 1, "must be classes of TorchRec .*got a OtherBags"),
    "other module": (as_other_module, 1, "must be of an EmbeddingBagCollection .*a OtherModule"),
    "use_index_dedup": (with_unique_ids, 1, "use_index_dedup must be False"),
    "two ranks": (lambda _: None, 2, "sharded by a HistoryEmbeddingCollectionSharder on several"),
}


@pytest.mark.parametrize("name", SHARDED)
def test_sharded_modules(name: str, device: torch.device):
    change, world_size, match = SHARDED[name]
    sharders = [EmbeddingCollectionSharder(), EmbeddingBagCollectionSharder()]
    model = make_sharded(make_model(), device, sharders=sharders).module
    modules = [x for x in model.modules() if isinstance(x, ShardedModule)]
    assert len(modules) == 2
    check_modules(model, modules, 1)
    change(model)
    with pytest.raises(NotImplementedError, match=f"{match}.*TrainPipelineSparseDist"):
        check_modules(model, modules, world_size)


def test_batch_sizes_that_vary_by_feature(device: torch.device):
    pipeline = make_pipeline(device)
    match = f"features must have one batch size for all .*{USE_TORCHREC} and EmbeddingColl"
    with pytest.raises(NotImplementedError, match=match):
        pipeline.progress(with_equal_samples_once(make_batch(step)) for step in range(3))


def test_accumulated_gradients(device: torch.device):
    pipeline = make_pipeline(device)
    wrapped = GradientAccumulationWrapper(
        pipeline,
        pipeline._optimizer,
        pipeline._model,
        GradientAccumulationConfig(is_enabled=True, num_steps=2),
    )
    match = f"gradients must not be accumulated over batches .*{USE_TORCHREC}"
    with pytest.raises(NotImplementedError, match=match):
        wrapped.progress(make_batch(step) for step in range(3))


def test_gradients_without_averaging(device: torch.device):
    pipeline = make_pipeline(device)
    match = f"gradients must not be accumulated over batches .*{USE_TORCHREC}"
    with (
        pipeline._model._dmp_wrapped_module.no_sync(),
        pytest.raises(NotImplementedError, match=match),
    ):
        pipeline.progress(make_batch(step) for step in range(3))


def test_anomaly_detection(device: torch.device):
    pipeline = make_pipeline(device)
    with (
        pytest.warns(UserWarning, match="Anomaly Detection"),
        torch.autograd.detect_anomaly(),
        pytest.raises(NotImplementedError, match=f"anomaly detection must be off .*{USE_TORCHREC}"),
    ):
        pipeline.progress(make_batch(step) for step in range(3))


def test_injected_work_in_backward(device: torch.device):
    pipeline = make_pipeline(device)
    match = f"register_backward_hook must not be called .*{USE_TORCHREC}"
    with pytest.raises(NotImplementedError, match=match):
        pipeline.register_backward_hook(None, None)


class Waiting(nn.Module):
    """Reads a number from the device, which a capture does not permit."""

    def forward(self, logits: Tensor, batch: Any) -> Tensor:
        return logits * logits.detach().sum().item()


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_layers_that_wait_for_the_device(device: torch.device):
    pipeline = make_pipeline(device, WithLayer(make_model(), Waiting()))
    match = "(?s)the last module whose forward began was 'layer', a Waiting: .*Use TrainPipelineSp"
    with short_warm_up(), pytest.raises(RuntimeError, match=match):
        train(pipeline, (make_batch(step) for step in range(5)))
    torch.rand(1, device=device)  # the failed capture has not changed the random generator


def test_validation_is_eager(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("TORCHREC_JAGGED_ATTN_VALIDATE", "1")
    name = "torchrec_jagged_attn.pipeline.train_pipeline"
    with short_warm_up(), caplog.at_level(logging.WARNING, name):
        runs = [
            train(pipeline, (make_batch(step) for step in range(5)))
            for pipeline in (
                make_pipeline(device, pipeline_type=TrainPipelineSparseDist),
                make_pipeline(device),
            )
        ]
    expected, run = runs
    assert_equal_on_cpu(run, expected, device)
    assert run.eager_steps == {"validation": 5}
    assert run.num_captures == 0
    warnings = [record.message for record in caplog.records if record.name == name]
    assert warnings == ["all steps are eager with TORCHREC_JAGGED_ATTN_VALIDATE=1"]
