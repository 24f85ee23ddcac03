"""Rows that a ShardedHistoryEmbeddingCollection has looked up, padded to a fixed size: outputs and
gradients are those without padding.
"""

import dataclasses
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.types import ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.torchrec.test_rows_that_stay import make_sharded
from tests.torchrec.two_ranks import (
    STEPS_OF_EQUAL_BATCHES,
    assert_same_run,
    collection_of,
    make_batch,
    make_model,
    reads_weights,
    run_ranks,
)
from torchrec_jagged_attn import EncoderConfig
from torchrec_jagged_attn.collection.sharding.looked_up import LookedUp, block_sizes
from torchrec_jagged_attn.collection.sharding.padding import Segments
from torchrec_jagged_attn.collection.sharding.sharder import ShardedHistoryEmbeddingCollection

ROW_WISE, TABLE_WISE = ShardingType.ROW_WISE, ShardingType.TABLE_WISE
MHA = {"init": "mha", "side_by_side": False}
DROPOUT = {"dropout": 0.4}


@dataclasses.dataclass
class Case:
    sharding: ShardingType
    options: dict[str, Any]
    others: dict[str, ShardingType] = dataclasses.field(default_factory=dict)


CASES = {
    "by row": Case(ROW_WISE, MHA),
    "by table": Case(TABLE_WISE, MHA | {"value_projection": True}),
    "weighted": Case(ROW_WISE, MHA | {"is_weighted": True, "single_lookup": True}),
    "encoder layers by row": Case(ROW_WISE, {"encoder": EncoderConfig(user_embedding=True)}),
    "encoder layers by table": Case(TABLE_WISE, MHA | {"encoder": EncoderConfig()}),
    "side by side": Case(ROW_WISE, {"init": "mha"}),
    "candidates by row": Case(ROW_WISE, MHA | {"candidates": "jagged", "value_projection": True}),
    "candidates by table": Case(TABLE_WISE, MHA | DROPOUT | {"candidates": "jagged"}),
    "silu": Case(ROW_WISE, MHA | {"score": "silu", "value_projection": True}),
    "pooled with histories": Case(
        ROW_WISE,
        MHA | {"single_lookup": True, "single_id_features": ["user"]},
        {"t_cat": TABLE_WISE, "t_tag": ROW_WISE, "t_user": ShardingType.DATA_PARALLEL},
    ),
    "dropout": Case(ROW_WISE, MHA | DROPOUT),
}


def capacity_of(name: str | None, count: int) -> int:
    """Another one for most names."""
    if name is None:
        return count
    capacity = 60 + zlib.crc32(name.encode()) % 11
    assert count <= capacity
    return capacity


class Static:
    """Static tensors, which batches are copied to."""

    def __init__(self, tensors: dict[str, Tensor | Segments]) -> None:
        self.tensors: dict[str, Tensor] = {}
        for name, x in tensors.items():
            if isinstance(x, Segments):
                num_rows = sum(self.blocks(x))
                tensor = x.tensor.detach().new_empty(num_rows, *x.tensor.shape[1:])
                self.tensors[name] = tensor.requires_grad_(x.tensor.requires_grad)
            else:
                self.tensors[name] = torch.empty_like(x)

    @staticmethod
    def blocks(x: Segments) -> list[int]:
        return block_sizes(x.names, x.counts, capacity_of, x.spare)

    @torch.no_grad()
    def copy(self, tensors: dict[str, Tensor | Segments]) -> None:
        """Rows between a segment and its spare rows are NaN, if they have a gradient."""
        assert tensors.keys() == self.tensors.keys()
        for name, x in tensors.items():
            static = self.tensors[name]
            if not isinstance(x, Segments):
                static.copy_(x)
                continue
            static.fill_(x.fill)
            blocks = static.split(self.blocks(x))
            segments = x.tensor.detach().split(x.counts)
            for block, segment in zip(blocks, segments, strict=True):
                block[: len(segment)] = segment
                if static.requires_grad:
                    block[len(segment) : len(block) - x.spare] = torch.nan

    def compact(self, grad: Tensor, x: Segments) -> Tensor:
        """The gradients of the rows of segments; all other gradients must be zero."""
        blocks = grad.split(self.blocks(x))
        assert all((blocks[i][n:] == 0).all() for i, n in enumerate(x.counts))
        return torch.cat([blocks[i][:n] for i, n in enumerate(x.counts)])


def make_features(case: Case, step: int) -> KeyedJaggedTensor:
    is_weighted = case.options.get("is_weighted", False)
    features = make_batch(step, dist.get_rank(), is_weighted).sparse_features
    if case.options.get("candidates") == "jagged":
        counts = [2, 0, 1, 1]
        for key in ("item", "cat"):
            first = features.keys().index(key) * features.stride()
            lengths = torch.tensor(counts[step:] + counts[:step])
            features.lengths()[first : first + features.stride()] = lengths
    return features


def padded(
    features: KeyedJaggedTensor, case: Case, capacities: dict[str, str]
) -> KeyedJaggedTensor:
    """With padding behind the values, and weights, of each key whose number of ids varies."""
    fixed = ["item", "cat", "now", *case.options.get("single_id_features", ())]
    counts = features.length_per_key()
    sizes = [
        count if key in fixed else capacity_of(capacities.get(key, key), count)
        for key, count in zip(features.keys(), counts, strict=True)
    ]

    def pad(x: Tensor) -> Tensor:
        parts = zip(x.split(counts), sizes, strict=True)
        return torch.cat([torch.cat([part, part.new_zeros(n - len(part))]) for part, n in parts])

    weights = features.weights_or_none()
    return KeyedJaggedTensor(
        features.keys(),
        pad(features.values()),
        None if weights is None else pad(weights),
        lengths=features.lengths(),
        stride=features.stride(),
        length_per_key=sizes,
    )


Compared = tuple[str, Tensor, Tensor]


def compare(device: torch.device, case: Case) -> Iterator[Compared]:
    """Names, results with padding and results without it, of several batches."""
    model = make_sharded(device, case.sharding, make_model(**case.options), others=case.others)
    assert reads_weights(model) == case.options.get("is_weighted", False)
    collection = collection_of(model)
    lookup = collection.embedding_collections["8"]
    assert isinstance(lookup, ShardedHistoryEmbeddingCollection)
    bags = collection.embedding_bag_collection
    parameters = dict(collection.pooling.named_parameters())
    static = fixed = None

    def run(features: KeyedJaggedTensor, looked_up: LookedUp, rows: list[Tensor]) -> list[Tensor]:
        """Outputs, and gradients of rows and parameters."""
        torch.manual_seed(0)
        sequences = [dict(lookup.exchange(looked_up).items())]
        out = collection.pooling(features, sequences, None if bags is None else bags(unpadded))
        values = out.values()
        loss = (values * torch.linspace(-1, 2, values.numel(), device=device).view_as(values)).sum()
        grads = torch.autograd.grad(loss, [*rows, *parameters.values()])
        return [values.detach(), *grads]

    for step in STEPS_OF_EQUAL_BATCHES:
        unpadded = make_features(case, step).to(device)
        context = lookup.create_context()
        ids = lookup.input_dist(context, unpadded).wait().wait()
        looked_up = lookup.look_up(context, ids)
        tensors = looked_up.tensors()
        segments = {name: x for name, x in tensors.items() if isinstance(x, Segments)}
        trained = [name for name, x in segments.items() if x.tensor.requires_grad]
        expected = run(unpadded, looked_up, [segments[name].tensor for name in trained])
        if static is None or fixed is None:
            static = Static(tensors)
            fixed = looked_up.with_tensors(static.tensors, capacity_of)
            _, constants = lookup.sizes(context, ids)
        assert lookup.sizes(context, ids)[1] == constants
        static.copy(tensors)
        features = padded(unpadded, case, collection.pooling.capacities())
        actual = run(features, fixed, [static.tensors[name] for name in trained])
        rows = zip(actual[1 : len(trained) + 1], trained, strict=True)
        actual[1 : len(trained) + 1] = [static.compact(x, segments[name]) for x, name in rows]
        names = ["output", *trained, *parameters]
        for name, *results in zip(names, actual, expected, strict=True):
            yield f"{name}, step {step}", *results


Results = list[dict[str, list[Compared]]]


def compare_all(device: torch.device) -> dict[str, list[Compared]]:
    return {name: [*compare(device, case)] for name, case in CASES.items()}


@pytest.fixture(scope="module")
def ranks(backend: str, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_ranks(compare_all, tmp_path_factory.mktemp("ranks"), backend)


@pytest.mark.parametrize("case", CASES)
def test_padding_changes_nothing(ranks: Results, case: str):
    for results in ranks:
        for name, actual, expected in results[case]:
            assert_same_run(actual, expected, name=name)
    outputs = [actual for results in ranks for name, actual, _ in results[case] if "output" in name]
    assert all(x.any() for x in outputs)
