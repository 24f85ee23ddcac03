"""Requests of several candidates equal samples of one candidate with copies of other features."""

import dataclasses
import random

import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.collection.scenarios import (
    NUM_IDS,
    SCENARIOS,
    USERS,
    Batch,
    Scenario,
    check_against_oracle,
    check_that_nothing_waits,
    make_batch,
    make_collection,
    table,
    to_features,
)
from tests.tolerance import assert_matches_oracle
from torchrec_jagged_attn import (
    TargetAttentionConfig,
    TargetAttentionEmbeddingBagCollection,
    repeat_per_candidate,
)
from torchrec_jagged_attn.collection.config import keys_of_candidates

# Features of candidates beside the targets: of a table of a target, of bags, of several tables.
CANDIDATE_FEATURES = {
    "shared-table": ("tags",),
    "pooled-neighbours": ("bought", "tags"),
    "side-information": ("tags",),
    "several-pairs": (),
    "features-in-two-tables": ("cat",),
    "attended-and-pooled": (),
    "newest-rows": ("bought",),
    "weighted": ("tags", "user"),
    "request-time": (),
    "single-ids": (),
    "shared-table-single-lookup": ("user",),
    "weighted-single-lookup": (),
}


def as_requests(scenario: Scenario, *candidate_features: str) -> Scenario:
    return dataclasses.replace(scenario, candidates="jagged", candidate_features=candidate_features)


REQUESTS = {
    name: as_requests(SCENARIOS[name], *features) for name, features in CANDIDATE_FEATURES.items()
}
REQUESTS["target-of-two-tables"] = as_requests(
    Scenario(
        [
            table("t_item", "item", "hist"),
            table("t_brand", "item", "brand", width=12, pooling="MEAN"),
            table("t_user", "user"),
        ],
        [TargetAttentionConfig("item@t_item", "hist")],
    ),
    "brand",
)
# Rows of histories, and candidates, of each request.
LENGTHS = {
    "mixed": ([4, 3, 0, 1, 7, 0, 20, 4], [0, 2, 1, 0, 5, 3, 9, 1]),
    "one-each": ([3, 0, 7], [1, 1, 1]),
    "one-request": ([9], [7]),
    "empty-histories": ([0, 0, 0], [2, 0, 4]),
}
OF_EDGES = ["pooled-neighbours", "features-in-two-tables", "newest-rows", "weighted", "single-ids"]


def keys_of(scenario: Scenario) -> list[str]:
    return keys_of_candidates(
        scenario.tables, scenario.attentions, "jagged", scenario.candidate_features
    )


def make_requests(scenario: Scenario, lengths: list[int], counts: list[int]) -> Batch:
    """Random ids, with ``counts`` candidates."""
    rng = random.Random(0)
    batch = make_batch(scenario, lengths)
    for key in keys_of(scenario):
        batch[key] = [[rng.randrange(NUM_IDS) for _ in range(count)] for count in counts]
    return batch


def to_samples(scenario: Scenario, batch: Batch) -> Batch:
    """Each candidate as a sample, with a copy of the features of its request."""
    keys = keys_of(scenario)
    return {
        key: [
            [candidate] if key in keys else ids
            for ids, candidates in zip(ids_per_sample, batch[keys[0]], strict=True)
            for candidate in (ids if key in keys else candidates)
        ]
        for key, ids_per_sample in batch.items()
    }


@pytest.mark.parametrize(
    ("name", "lengths"),
    [(name, "mixed") for name in REQUESTS]
    + [(name, lengths) for name in OF_EDGES for lengths in LENGTHS if lengths != "mixed"],
)
def test_values_and_gradients(name: str, lengths: str, device: torch.device):
    scenario = REQUESTS[name]
    batch = make_requests(scenario, *LENGTHS[lengths])
    check_against_oracle(
        make_collection(scenario, device),
        scenario,
        [batch],
        lambda batch: to_samples(scenario, batch),
    )


@pytest.mark.parametrize("name", OF_EDGES)
def test_no_candidate_at_all(name: str, device: torch.device):
    scenario = REQUESTS[name]
    collection = make_collection(scenario, device)
    batch = make_requests(scenario, [3, 0, 5], [0, 0, 0])
    out = collection(to_features(batch, device, is_weighted=scenario.is_weighted))
    assert out.values().shape == (0, sum(out.length_per_key()))
    out.values().sum().backward()
    for name, parameter in collection.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_tables_of_candidates_are_looked_up_by_row():
    tables = [
        table("t_item", "item", "hist"),
        table("t_cat", "cat", width=12),
        table("t_user", "u"),
    ]
    collection = TargetAttentionEmbeddingBagCollection(
        tables,
        TargetAttentionConfig("item", "hist"),
        candidates="jagged",
        candidate_features="cat",
    )
    assert collection.table_keys() == {
        "t_item": "embedding_collections.8.embeddings.t_item.weight",
        "t_cat": "embedding_collections.12.embeddings.t_cat.weight",
        "t_user": "embedding_bag_collection.embedding_bags.t_user.weight",
    }


def test_encoded_histories_and_user_embeddings(device: torch.device):
    requests = as_requests(USERS)
    batch = make_requests(requests, *LENGTHS["mixed"])
    collection = make_collection(requests, device)
    check_against_oracle(collection, requests, [batch], lambda batch: to_samples(requests, batch))


def test_one_lookup_for_all_candidates():
    scenario = REQUESTS["side-information"]
    collection = make_collection(scenario)
    lookups = [*collection.embedding_collections.values(), collection.embedding_bag_collection]
    looked_up, attended = [], []
    for lookup in lookups:
        lookup.register_forward_pre_hook(lambda _, inputs: looked_up.append(inputs[0]))
    collection.pooling.attentions[0].register_forward_pre_hook(
        lambda _, inputs: attended.append(inputs[1].values().shape[0])
    )
    lengths, counts = LENGTHS["mixed"]
    features = to_features(make_requests(scenario, lengths, counts))
    collection(features)
    assert len(looked_up) == len(lookups)
    for received in looked_up:
        assert received.length_per_key() == features.length_per_key()
    assert attended == [sum(lengths)]


ITEM = table("t_item", "item", "hist")
PAIR = TargetAttentionConfig("item", "hist")
REFUSED = {
    "unknown-candidates": (PAIR, {"candidates": "many"}, "candidates must be 'one' or 'jagged'"),
    "features-of-one": (
        PAIR,
        {"candidate_features": ["user"]},
        r"candidates must be 'jagged' with candidate_features, got 'one' and candidate_features",
    ),
    "unknown-feature": (
        PAIR,
        {"candidates": "jagged", "candidate_features": ["price"]},
        r"candidate_features must be features of tables, \['hist', 'item', 'user'\], got \['pr",
    ),
    "history": (
        PAIR,
        {"candidates": "jagged", "candidate_features": "hist"},
        r"candidate_features must not be histories, got \['hist'\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_at_construction(case: str):
    config, arguments, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        TargetAttentionEmbeddingBagCollection([ITEM, table("t_user", "user")], config, **arguments)


def test_candidate_features_of_different_lengths(monkeypatch: pytest.MonkeyPatch):
    scenario = as_requests(
        Scenario(
            [ITEM, table("t_cat", "cat", "cats"), table("t_brand", "brand")],
            [TargetAttentionConfig(["item", "cat"], ["hist", "cats"])],
        ),
        "brand",
    )
    collection = make_collection(scenario)
    good = make_requests(scenario, [2, 0, 3], [2, 0, 3])
    collection(to_features(good))
    for key in ("cat", "brand"):
        batch = good | {key: [good[key][0][:1], [7], good[key][2]]}
        message = f"candidate feature '{key}' must .* as candidate feature 'item', got 1 and 2 in s"
        with pytest.raises(ValueError, match=message):
            collection(to_features(batch))
    # Counts are checked where lengths are not read, too.
    monkeypatch.setattr(
        "torchrec_jagged_attn.collection.batch_checks.should_validate", lambda _: False
    )
    batch = good | {"brand": [*good["brand"][:2], good["brand"][2][:1]]}
    with pytest.raises(ValueError, match=r"'brand' must have .* 'item', got 3 and 5 rows"):
        collection(to_features(batch))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("counts", [[2, 0, 300, 1], [0, 0], [5]])
def test_rows_are_repeated_by_request(counts: list[int], dtype: torch.dtype, device: torch.device):
    lengths = torch.tensor(counts, device=device)
    candidates = JaggedTensor(torch.zeros(sum(counts), device=device), lengths=lengths)

    def copied(rows: Tensor) -> Tensor:
        return torch.cat([row.expand(n, -1) for row, n in zip(rows, counts, strict=True)])

    rows = torch.randn(len(counts), 5, device=device).to(dtype)
    assert torch.equal(repeat_per_candidate(rows, candidates), copied(rows))
    assert_matches_oracle(
        lambda rows: repeat_per_candidate(rows, candidates), copied, {"rows": rows}
    )


def test_invalid_rows_to_repeat():
    candidates = JaggedTensor(torch.arange(3), lengths=torch.tensor([2, 1]))
    with pytest.raises(ValueError, match=r"rows must have shape \[B, D\] = \[2, any\], got \[3, 4"):
        repeat_per_candidate(torch.rand(3, 4), candidates)
    with pytest.raises(TypeError, match=r"rows must be one of .*, got torch.int64"):
        repeat_per_candidate(torch.ones(2, 4).long(), candidates)


@pytest.mark.gpu
@pytest.mark.parametrize("name", REQUESTS)
def test_nothing_after_the_lookups_waits_for_the_device(name: str):
    scenario = REQUESTS[name]
    batch = make_requests(scenario, *LENGTHS["mixed"])
    check_that_nothing_waits(scenario, batch)
