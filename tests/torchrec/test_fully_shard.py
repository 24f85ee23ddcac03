"""FSDP2 of attentions, and of modules whose output hides tensors from PyTorch."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.collection.scenarios import USERS, make_batch, make_collection, to_features
from tests.torchrec.two_ranks import run_ranks
from torchrec_jagged_attn import TargetAttentionEmbeddingBagCollection


class Model(nn.Module):
    """Returns a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.collection = make_collection(USERS)

    def forward(self, features):
        return self.collection(features).values()


Parts = Callable[[TargetAttentionEmbeddingBagCollection], list[nn.Module]]
REFUSED: dict[str, Parts] = {
    "TargetAttentionEmbeddingBagCollection": lambda x: [x],
    "TargetAttentionPooling": lambda x: [x.pooling],
    "_Encoder": lambda x: [*x.pooling.encoders],
    "HistoryEncoderLayer": lambda x: [y for encoder in x.pooling.encoders for y in encoder],
    "JaggedSelfAttention": lambda x: [
        y.self_attn for encoder in x.pooling.encoders for y in encoder
    ],
}


def on_each_rank(device: torch.device) -> None:
    features = [to_features(make_batch(USERS, [2, 0, 3, 1], rank)) for rank in range(2)]
    for is_whole in (False, True):
        model, expected = Model(), Model()
        for attention in model.collection.pooling.attentions:
            fully_shard(attention)
        if is_whole:
            tables = set(model.collection.embedding_collections.parameters())
            tables |= set(model.collection.embedding_bag_collection.parameters())
            fully_shard(model, ignored_params=tables)
        model(features[dist.get_rank()]).square().sum().backward()
        (sum(expected(x).square().sum() for x in features) / 2).backward()
        parts = ("collection.pooling",) if is_whole else ("collection.pooling.attentions",)
        expected_grads = {name: p.grad for name, p in expected.named_parameters()}
        for name, p in model.named_parameters():
            if name.startswith(parts):
                assert isinstance(p.grad, DTensor), name
                torch.testing.assert_close(p.grad.full_tensor(), expected_grads[name])
    for name, parts in REFUSED.items():
        model = copy.deepcopy(expected)
        for part in parts(model.collection):
            fully_shard(part)
        with pytest.raises(NotImplementedError, match=f"got a {name}, whose gradients"):
            model(features[dist.get_rank()])


def test_attentions_are_sharded(tmp_path: Path):
    run_ranks(on_each_rank, tmp_path, "gloo")
