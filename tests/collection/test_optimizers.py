"""Optimizers that must train attention weights, and must not be in backward."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.optim import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from tests.collection.scenarios import SCENARIOS, make_batch, make_collection, to_features
from torchrec_jagged_attn import TargetAttentionEmbeddingBagCollection

SCENARIO = SCENARIOS["nothing-else"]
FEATURES = to_features(make_batch(SCENARIO, [2, 0, 3]))
REFUSED = r"embedding_parameters\(model\), .*, got pooling\.attentions\.0\.q_proj_weight,"
NEVER_TRAINED = r"4 of 4 attention weights, such as pooling\.attentions\.0\.q_proj_weight, have"


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, RowWiseAdagrad])
@pytest.mark.parametrize("is_copy", [False, True])
def test_in_backward_is_refused(device: str, optimizer: type, is_copy: bool):
    collection = make_collection(SCENARIO, torch.device(device))
    if is_copy:
        collection = copy.deepcopy(collection)
    with pytest.raises(ValueError, match=REFUSED):
        apply_optimizer_in_backward(optimizer, list(collection.parameters()), {"lr": 0.1})


def by_name(
    part: Callable[[str], bool],
) -> Callable[[nn.Module], list[torch.optim.Optimizer]]:
    return lambda module: [
        torch.optim.Adam([p for name, p in module.named_parameters() if part(name)], lr=0.1)
    ]


class InPlace(torch.optim.SGD):
    """Changes values without a new version, as some optimizers with kernels of their own do."""

    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(0.1)


def train(
    collection: TargetAttentionEmbeddingBagCollection,
    optimizers: list[torch.optim.Optimizer],
    accumulated: int = 1,
) -> None:
    for _ in range(4):
        for _ in range(accumulated):
            collection(FEATURES).values().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("make_optimizers", "message"),
    [
        (by_name(lambda name: "pooling" not in name), NEVER_TRAINED),
        (by_name(lambda name: "bias" not in name), "2 of 4 attention weights, such as .*_bias"),
        (by_name(lambda _: True), None),
        (lambda module: [InPlace(module.parameters())], None),
        (lambda module: [torch.optim.SGD([p], lr=0.1) for p in module.parameters()], None),
    ],
)
def test_weights_that_never_change(make_optimizers: Callable, message: str | None):
    collection = make_collection(SCENARIO)
    with torch.no_grad():
        collection(FEATURES)
    optimizers = make_optimizers(collection)
    if message is None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(collection, optimizers, accumulated=5)
    else:
        with pytest.warns(UserWarning, match=message) as caught:
            train(collection, optimizers)
        assert len(caught) == 1


def test_weights_without_a_gradient_may_stay():
    collection = make_collection(SCENARIO)
    collection.pooling.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(collection, by_name(lambda name: "pooling" not in name)(collection))


def test_optimizers_of_other_models_do_not_count():
    collection = make_collection(SCENARIO)
    collection(FEATURES).values().sum().backward()
    other = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            other(torch.ones(2)).backward()
            optimizer.step()
