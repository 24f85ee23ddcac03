"""The collection in the place of an EmbeddingBagCollection, in TorchRec's own way of training.

Also mistakes: each wrong line is refused, by a message that says what to write.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ModuleSharder, ShardedModule
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from tests.collection.scenarios import ITEM, PAIR
from tests.torchrec.two_ranks import (
    CPU,
    NUM_STEPS,
    batches,
    collection_of,
    make_batch,
    make_model,
    make_tables,
    optimize_tables,
    run_ranks,
)
from torchrec_jagged_attn import (
    TargetAttentionEmbeddingBagCollection,
    embedding_parameters,
)

META = torch.device("meta")
BAGS = EmbeddingBagCollectionSharder
SEQUENCES = EmbeddingCollectionSharder


def make_attended_model() -> DLRMTrain:
    """A model whose tables all have a target or a history."""
    collection = TargetAttentionEmbeddingBagCollection([ITEM], PAIR, device=META)
    return DLRMTrain(DLRM(collection, 3, [8], [8, 1]))


def train(
    device: torch.device,
    model: nn.Module,
    optimizer: type[torch.optim.Optimizer] = RowWiseAdagrad,
    parameters: Callable[[nn.Module], Any] = embedding_parameters,
    sharders: list[type[ModuleSharder]] | None = None,
    pipelined: bool = True,
) -> dict[str, Any]:
    """Train like TorchRec's ``examples/golden_training/train_dlrm.py``."""
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
    lookups = collection_of(model)._lookup_modules()
    replicated = {
        name: p.detach().clone()
        for name, p in model.named_parameters()
        if "embeddings." not in name and "embedding_bags." not in name
    }
    return {
        "losses": losses,
        "still": still,
        "sharded": [isinstance(lookup, ShardedModule) for lookup in lookups],
        "replicated": replicated,
    }


def whole_sparse_arch(
    device: torch.device, optimizer: type[torch.optim.Optimizer] = RowWiseAdagrad
) -> dict[str, Any]:
    """Train like TorchRec's example, whose optimizer also gets the attention weights."""
    return train(
        device,
        make_model(device),
        optimizer,
        parameters=lambda model: model.model.sparse_arch.parameters(),
    )


TRAINED: dict[str, Callable[[torch.device], dict[str, Any]]] = {
    "from meta": lambda device: train(device, make_model(META), sharders=[BAGS, SEQUENCES]),
    "from a real device": lambda device: train(device, make_model(device), torch.optim.Adagrad),
    "all sharders": lambda device: train(device, make_model(META)),
}


def weights_with_a_gradient(device: torch.device) -> None:
    """Weights like feature processors return; sharded bags have no gradient for them."""
    model = make_model(device, is_weighted=True)
    optimize_tables(model)
    sharded = DistributedModelParallel(model, device=device)
    features = make_batch(0, 0, is_weighted=True).to(device).sparse_features
    features.weights().requires_grad_()
    collection_of(sharded)(features)


def processed_features(device: torch.device) -> None:
    """All ranks fail, not only the planning rank."""
    names = [name for config in make_tables() for name in config.feature_names]
    model = FeatureProcessedEmbeddingBagCollection(
        collection_of(make_model(device, is_weighted=True)),
        PositionWeightedModuleCollection(dict.fromkeys(names, 5)),
    )
    message = r"call collection\(feature_processors\("
    with pytest.raises(NotImplementedError, match=message):
        DistributedModelParallel(model, device=device)


LACK = (
    r"^sharders of DistributedModelParallel must include {}\(\), got none that shards the tables "
)
NO_SEQUENCES = LACK.format(r"HistoryEmbeddingCollectionSharder\(\) or EmbeddingCollectionSharder")
NO_SEQUENCES += r"\['t_item'"
NO_BAGS = LACK.format("EmbeddingBagCollectionSharder") + r"\['t_"
WHOLE = r"embedding_parameters\(model\), .*, got pooling\.attentions"
REFUSED: list[tuple[Callable[[torch.device], Any], type[Exception], str]] = [
    (lambda x: train(x, make_model(META), sharders=[BAGS]), RuntimeError, NO_SEQUENCES),
    (lambda x: train(x, make_attended_model(), sharders=[BAGS]), RuntimeError, NO_SEQUENCES),
    (
        lambda x: train(x, make_attended_model(), sharders=[BAGS], pipelined=False),
        RuntimeError,
        NO_SEQUENCES,
    ),
    (lambda x: train(x, make_model(META), sharders=[SEQUENCES]), RuntimeError, NO_BAGS),
    (whole_sparse_arch, ValueError, WHOLE),
    (weights_with_a_gradient, NotImplementedError, "must require no gradient, .*single_lookup"),
    (lambda _: whole_sparse_arch(META), ValueError, WHOLE),
    (lambda _: whole_sparse_arch(META, torch.optim.Adagrad), ValueError, WHOLE),
]


def replicated_by_ddp(device: torch.device) -> Tensor:
    losses = []
    for model in (make_model(device), DistributedDataParallel(make_model(device))):
        losses += [model(batch)[0].detach() for batch in batches(device)]
    return torch.stack(losses)


def on_each_rank(device: torch.device) -> dict[str, Any]:
    trained = {name: how(device) for name, how in TRAINED.items()}
    processed_features(device)
    return {"trained": trained, "replicated": replicated_by_ddp(device)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(on_each_rank, tmp_path_factory.mktemp("ranks"), "gloo")


@pytest.mark.parametrize("way", TRAINED)
def test_trains(ranks: list[dict[str, Any]], way: str):
    for results in ranks:
        result = results["trained"][way]
        assert torch.stack(result["losses"]).isfinite().all()
        assert result["sharded"] == [True, True]
        assert result["still"] == []
        for name, weight in result["replicated"].items():
            assert torch.equal(weight, ranks[0]["trained"][way]["replicated"][name]), name


def refuse_each(device: torch.device) -> None:
    for how, error, message in REFUSED:
        with pytest.raises(error, match=message):
            how(device)


def test_refused(tmp_path: Path):
    run_ranks(refuse_each, tmp_path, "gloo", ranks=1)


def test_unsharded_tables_in_ddp(ranks: list[dict[str, Any]]):
    for results in ranks:
        assert results["replicated"].isfinite().all()
