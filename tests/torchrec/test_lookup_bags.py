"""Bags of the lookups of sharded histories."""

from pathlib import Path

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.combinations import each_pair
from tests.torchrec.two_ranks import batches, make_sharded_model, run_ranks
from torchrec_jagged_attn.collection.sharding import torchrec_fixes

LENGTHS = {
    "one key": [[5, 0, 3, 1]],
    "an item and its history": [[1, 1, 1], [400, 0, 7]],
    "a key without ids": [[3, 0], [0, 0], [0, 9]],
    "as many of each": [[2, 1], [0, 3], [3, 0]],
    "one id": [[0, 0], [1, 0]],
}


@pytest.mark.parametrize(
    ("name", "dtype", "weighted"),
    each_pair(LENGTHS, [torch.int32, torch.int64], [False, True]),
    ids=str,
)
def test_ids_of_each_key_are_spread_evenly(name, dtype, weighted, device):
    lengths = LENGTHS[name]
    counts = [*map(sum, lengths)]
    ids = torch.arange(sum(counts), device=device)
    features = KeyedJaggedTensor(
        keys=[f"key {k}" for k in range(len(lengths))],
        values=ids,
        weights=ids + 0.5 if weighted else None,
        lengths=torch.tensor(lengths, dtype=dtype, device=device).flatten(),
    )
    split = torchrec_fixes.split_bags(features)
    assert split.keys() == features.keys()
    assert torch.equal(split.values(), ids)
    assert split.weights_or_none() is features.weights_or_none()
    assert split.length_per_key() == counts
    bags = split.lengths().view(len(lengths), -1)
    assert bags.shape[1] == -(
        -sum(counts) // (torchrec_fixes.IDS_PER_BAG[device.type] * len(lengths))
    )
    assert (bags.amax(1) - bags.amin(1)).max() <= 1


def test_batch_sizes_that_vary_by_key_are_unchanged():
    features = KeyedJaggedTensor(
        keys=["item", "history"],
        values=torch.arange(9),
        lengths=torch.tensor([1, 1, 1, 6]),
        stride_per_key_per_rank=[[3], [1]],
    )
    assert torchrec_fixes.split_bags(features) is features


def longest_bags(device):
    """The longest bag of all batches, before and after it is split."""
    longest = [0, 0]
    split = torchrec_fixes.split_bags

    def spy(features):
        out = split(features)
        for at, x in enumerate((features, out)):
            longest[at] = max(longest[at], *x.lengths().tolist(), 0)
        return out

    torchrec_fixes.split_bags = spy
    torchrec_fixes.IDS_PER_BAG[device.type] = 1
    model = make_sharded_model(device)
    for batch in batches(device):
        model(batch)
    return longest


def test_lookups_of_ranks_take_short_bags(tmp_path: Path, backend: str):
    ranks = run_ranks(longest_bags, tmp_path, backend)
    before, after = map(max, zip(*ranks, strict=True))
    assert 0 < after < before
