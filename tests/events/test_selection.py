"""Selection and boosting of events, in batches and in looked-up rows."""

import math

import numpy as np
import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from tests.collection.scenarios import table
from tests.fixtures import sync_debug_mode
from tests.runs import assert_same_run
from torchrec_jagged_attn import (
    JaggedTargetAttention,
    TargetAttentionConfig,
    TargetAttentionEmbeddingBagCollection,
    jagged_target_attention,
)
from torchrec_jagged_attn.collection.history_truncation import HistoryTruncation
from torchrec_jagged_attn.events import (
    EventBoosting,
    EventSelection,
    Relevance,
    boost_weights,
    segment_sessions,
    select_events,
)

LENGTHS = [4, 0, 7, 1]
HISTORY = ["item", "surface", "dwell"]


def make_features(device="cpu", *, weighted=False, seed=0):
    """``user`` and ``tags``, and events of an item, a surface and a dwell time."""
    generator = torch.Generator().manual_seed(seed)
    lengths = {"user": [1] * 4, "item": LENGTHS, "tags": [2, 0, 1, 3]}
    lengths |= {"surface": LENGTHS, "dwell": LENGTHS}
    all_lengths = torch.tensor([n for key_lengths in lengths.values() for n in key_lengths])
    values = torch.randint(0, 20, (int(all_lengths.sum()),), generator=generator)
    weights = torch.rand(len(values), generator=generator) if weighted else None
    return KeyedJaggedTensor(list(lengths), values, weights, lengths=all_lengths).to(device)


def scores_of(features):
    """The dwell time, which has ties."""
    return features["dwell"].values().float()


def rows_kept(scores, keep, threshold=-torch.inf):
    """Numbers of the events of one user that are kept."""
    newest_first = (scores >= threshold).nonzero().flatten().flip(0)
    best = scores[newest_first].sort(descending=True, stable=True).indices[:keep]
    return newest_first[best].sort().values


def assert_kept(actual, features, rows):
    """The events ``rows`` of each user, and all of the other keys."""
    assert actual.keys() == features.keys()
    assert actual.stride() == features.stride()
    assert actual.values().numel() == sum(actual.length_per_key())
    for key in features.keys():  # noqa: SIM118
        for user, (got, had) in enumerate(
            zip(actual[key].to_dense(), features[key].to_dense(), strict=True)
        ):
            kept = rows[user] if key in HISTORY else slice(None)
            assert torch.equal(got, had[kept]), (key, user)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("keep", "threshold"), [(2, None), (0, None), (None, 9.0), (3, 9.0)])
def test_events_of_highest_scores(keep, threshold, weighted, device):
    features = make_features(device, weighted=weighted)
    selection = EventSelection(HISTORY, keep, scores=scores_of, threshold=threshold)
    limit = -torch.inf if threshold is None else threshold
    rows = [rows_kept(x.float(), keep, limit) for x in features["dwell"].to_dense()]
    actual = selection(features)
    assert_kept(actual, features, rows)
    if weighted:
        expected = features.__class__(
            features.keys(), features.weights(), lengths=features.lengths()
        )
        weights = KeyedJaggedTensor(
            actual.keys(), actual.weights(), lengths=actual.lengths(), stride=actual.stride()
        )
        assert_kept(weights, expected, rows)


def test_newest_events_equal_history_truncation(device):
    features = make_features(device)
    actual = EventSelection(HISTORY, 3)(features)
    expected = HistoryTruncation([(HISTORY, 3)])(features)
    assert torch.equal(actual.values(), expected.values())
    assert torch.equal(actual.lengths(), expected.lengths())
    assert actual.lengths().dtype == expected.lengths().dtype


def test_segments_have_budgets(device):
    features = make_features(device)

    def surface_of(x):
        return x["surface"].values() % 2

    actual = EventSelection(HISTORY, [1, 3], scores=scores_of, segments=surface_of)(features)
    rows = []
    for dwell, surface in zip(
        features["dwell"].to_dense(), features["surface"].to_dense(), strict=True
    ):
        parts = []
        for segment, keep in enumerate([1, 3]):
            candidates = (surface % 2 == segment).nonzero().flatten()
            parts.append(candidates[rows_kept(dwell[candidates].float(), keep)])
        rows.append(torch.cat(parts).sort().values)
    assert_kept(actual, features, rows)


def test_budgets_of_users(device):
    features = make_features(device)
    budgets = torch.tensor([1, 5, 3, 0], device=device)
    selection = EventSelection(HISTORY, lambda x: budgets, scores=scores_of)
    kept = zip(features["dwell"].to_dense(), budgets.tolist(), strict=True)
    assert_kept(selection(features), features, [rows_kept(x.float(), n) for x, n in kept])

    def half(x):
        return (x["item"].lengths() + 1) // 2

    halved = EventSelection(HISTORY, half)(features)
    assert halved["item"].lengths().tolist() == [2, 0, 4, 1]
    selection = EventSelection(HISTORY, lambda x: budgets[:2])
    with pytest.raises(ValueError, match=r"keep must have shape \[B\] = \[4\], got \[2\]"):
        selection(features)


def test_no_event_at_all(device):
    features = KeyedJaggedTensor(
        ["user", *HISTORY],
        torch.tensor([1, 2], device=device),
        lengths=torch.tensor([1, 1, 0, 0, 0, 0, 0, 0], device=device),
    )
    actual = EventSelection(HISTORY, 2, scores=scores_of)(features)
    assert torch.equal(actual.values(), features.values())
    assert torch.equal(actual.lengths(), features.lengths())


def test_keys_of_several_batch_sizes():
    """Two samples share a history."""
    features = KeyedJaggedTensor(
        ["user", *HISTORY],
        torch.tensor([1, 2, 1, 2, 3, 4, 1, 2, 3, 4, 9, 1, 5, 3]),
        lengths=torch.tensor([1, 1, 4, 4, 4]),
        stride_per_key_per_rank=[[2], [1], [1], [1]],
        inverse_indices=(["user", *HISTORY], torch.tensor([[0, 1], [0, 0], [0, 0], [0, 0]])),
    )
    actual = EventSelection(HISTORY, 2, scores=scores_of)(features)
    assert actual.stride_per_key() == [2, 1, 1, 1]
    assert actual["item"].values().tolist() == [1, 3]
    assert actual["dwell"].values().tolist() == [9, 5]
    assert actual.inverse_indices() is features.inverse_indices()


@pytest.mark.parametrize("weighted", [False, True])
def test_looked_up_rows(weighted, device):
    """Outputs and table gradients equal a lookup without the removed events."""
    features = make_features(device)
    table = EmbeddingConfig(
        name="t", embedding_dim=8, num_embeddings=20, feature_names=["item", "surface"]
    )
    lookup = EmbeddingCollection([table], device=device)
    scores = scores_of(features)
    query = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(1)).to(device)
    weight = lookup.embeddings["t"].weight

    def pooled_gradient(rows):
        out = [jagged_target_attention(query, x.values(), x.offsets()) for x in rows.values()]
        weight.grad = None
        torch.cat(out).square().sum().backward()
        return torch.cat(out).detach(), weight.grad

    rows = lookup(features)
    weights = torch.rand(len(scores), device=device, requires_grad=True) if weighted else None
    if weighted:
        rows = {
            key: JaggedTensor(x.values(), weights, offsets=x.offsets()) for key, x in rows.items()
        }
    selected = select_events(rows, scores, keep=2)
    actual = pooled_gradient(selected)
    expected = pooled_gradient(lookup(EventSelection(HISTORY, 2, scores=scores_of)(features)))
    for got, wanted in zip(actual, expected, strict=True):
        assert torch.equal(got, wanted)
    if weighted:
        selected["item"].weights().sum().backward()
        kept = [rows_kept(x.float(), 2) for x in features["dwell"].to_dense()]
        begins = features["item"].offsets()[:-1]
        at = torch.cat([x + begin for x, begin in zip(kept, begins, strict=True)])
        assert torch.equal(weights.grad.nonzero().flatten(), at)


def test_truncated_with_room_to_spare(device):
    rows = JaggedTensor(
        torch.randn(12, 3, device=device), lengths=torch.tensor(LENGTHS, device=device)
    )
    exact = select_events(rows, keep=2)
    roomy = select_events(rows, keep=2, capacity=8)
    assert [x.tolist() for x in exact.to_dense()] == [x[-2:].tolist() for x in rows.to_dense()]
    assert torch.equal(roomy.lengths(), exact.lengths())
    assert torch.equal(roomy.values()[:5], exact.values())
    assert not roomy.values()[5:].any()


@pytest.mark.gpu
def test_attention_after_a_selection_without_waiting():
    rows = JaggedTensor(
        torch.randn(12, 8, device="cuda", requires_grad=True),
        offsets=torch.tensor([0, 4, 4, 11, 12], device="cuda"),
    )
    scores = torch.rand(12, device="cuda")
    module = JaggedTargetAttention(8, 2, device="cuda")
    target = torch.randn(4, 8, device="cuda")

    def call():
        return module(target, select_events(rows, scores, keep=2, capacity=8))

    expected = module(target, select_events(rows, scores, keep=2))
    call()
    with sync_debug_mode("error"):
        out = call()
    assert torch.equal(out, expected)


def make_collection(is_weighted, device="cpu"):
    tables = [table("target", "target", "item"), table("user", "user")]
    torch.manual_seed(0)
    attention = TargetAttentionConfig("target", "item", num_heads=2, recency_bias=False)
    return TargetAttentionEmbeddingBagCollection(tables, attention, is_weighted, device)


def with_target(features):
    """The features with a key ``target`` of one id."""
    ids = torch.arange(4, device=features.device())
    target = KeyedJaggedTensor(["target"], ids, lengths=torch.ones_like(ids))
    return KeyedJaggedTensor.concat([features, target])


def test_boosts_are_prior_weights(device):
    """Twice the weight is the event twice."""
    features = with_target(make_features(device))
    counts = torch.tensor([1.0, 2, 0, 1, 1, 1, 3, 1, 1, 1, 1, 2], device=device)
    boosted = make_collection(True, device)(EventBoosting(HISTORY, lambda x: counts)(features))
    repeated = {}
    for key in features.keys():  # noqa: SIM118
        lists = features[key].to_dense()
        if key == "item":
            user_counts = counts.long().split(LENGTHS)
            lists = [x.repeat_interleave(n) for x, n in zip(lists, user_counts, strict=True)]
        repeated[key] = lists
    flat = [x for lists in repeated.values() for x in lists]
    again = KeyedJaggedTensor(
        list(repeated), torch.cat(flat), lengths=torch.tensor([len(x) for x in flat]).to(device)
    )
    expected = make_collection(False, device)(again)
    assert_same_run(boosted.values(), expected.values(), num_terms=100)


def test_boosts_multiply_weights():
    features = make_features(weighted=True)
    factor = torch.arange(12.0)
    boosted = EventBoosting(HISTORY, lambda x: factor)(features)
    for key in features.keys():  # noqa: SIM118
        expected = features[key].weights() * (factor if key in HISTORY else 1)
        assert torch.equal(boosted[key].weights(), expected)
    assert torch.equal(boosted.values(), features.values())


def test_relevance_selects_and_boosts(device):
    """Selection and boosting together, with segments by active sessions."""
    features = make_features(device)
    relevance = Relevance(20, device=device)
    dwell, surface = (features[key].values() for key in ("dwell", "surface"))
    relevance.update(dwell, surface, dwell > 9)
    relevance.fit()

    def scores(x):
        return relevance(x["dwell"].values(), x["surface"].values())

    def segments(x):
        times = torch.arange(len(x["item"].values()), device=device) * 1000
        offsets = x["item"].offsets()
        return segment_sessions(scores(x), offsets, times, gap=1500, threshold=0.9)

    factors = torch.tensor([0.5, 2.0], device=device)
    selection = EventSelection(HISTORY, [1, 4], scores=scores, segments=segments)
    boosting = EventBoosting(
        HISTORY, lambda x: boost_weights(scores(x), segments=segments(x), factors=factors)
    )
    out = boosting(selection(features))
    assert out["item"].lengths().tolist() == selection(features)["item"].lengths().tolist()
    expected = scores(out) * factors[segments(out)]
    assert torch.equal(out["surface"].weights(), expected)
    assert (out["tags"].weights() == 1).all()


def test_traced_by_fx():
    features = make_features()
    chain = torch.nn.Sequential(
        EventSelection(HISTORY, 2, scores=scores_of), EventBoosting(HISTORY, scores_of)
    )
    actual, expected = torch.fx.symbolic_trace(chain)(features), chain(features)
    assert torch.equal(actual.values(), expected.values())
    assert torch.equal(actual.lengths(), expected.lengths())
    assert torch.equal(actual.weights(), expected.weights())


@pytest.mark.parametrize(
    ("keys", "keep", "options", "error", "message"),
    [
        ([], 2, {}, ValueError, r"keys must be at least one name, each once, got \[\]"),
        (["a", "a"], 2, {}, ValueError, "keys must be at least one name, each once, got"),
        ("item", 2, {}, TypeError, "keys must be a list of names, got 'item'"),
        (["a"], [2, 3], {}, TypeError, r"keep must be an int or .*, got \[2, 3\]"),
        (["a"], 2, {"segments": len}, TypeError, "keep must have a number for each segment, got 2"),
        (["a"], None, {}, ValueError, "keep or threshold must be given, got neither"),
        (["a"], -1, {}, ValueError, "keep must be at least 0, got -1"),
        (["a"], True, {}, TypeError, "keep must be an int or .*, got True"),
        (["a"], [1, -1], {"segments": len}, ValueError, "keep must be at least 0, got"),
        (["a"], [], {"segments": len}, ValueError, "keep must have a number for each se"),
        (["a"], [2], {"segments": 1}, TypeError, "segments must be a function of a Keyed"),
        (["a"], 2, {"scores": "dwell"}, TypeError, "scores must be a function of a Keyed"),
        (["a"], None, {"threshold": 0.5}, ValueError, "threshold must be None without scores, got"),
        (
            ["a"],
            None,
            {"scores": len, "threshold": math.nan},
            ValueError,
            "threshold must be a number or None, got nan",
        ),
    ],
)
def test_wrong_options_are_named(keys, keep, options, error, message):
    with pytest.raises(error, match=message):
        EventSelection(keys, keep, **options)


def test_wrong_boostings_are_named():
    for module in (EventSelection(["item"], 2), EventBoosting(["item"], scores_of)):
        module.weights = scores_of
        with pytest.raises(TypeError, match="features must be a KeyedJaggedTensor, got a dict"):
            module(make_features().to_dict())
    with pytest.raises(
        TypeError, match="weights must be a function of a KeyedJaggedTensor, got 'a'"
    ):
        EventBoosting(["item"], "a")
    for wrong in (-1.0, math.nan):
        boosting = EventBoosting(HISTORY, lambda x, wrong=wrong: torch.full((12,), wrong))
        with pytest.raises(ValueError, match="weights must be finite and not negative, got"):
            boosting(make_features())


def test_numbers_of_numpy():
    features = make_features()
    actual, expected = (EventSelection(HISTORY, keep)(features) for keep in (np.uint8(2), 2))
    assert torch.equal(actual.values(), expected.values())
    scores = scores_of(features)
    rows = JaggedTensor(features["item"].values(), lengths=features["item"].lengths())
    actual, expected = (
        select_events(rows, scores, keep=keep, capacity=capacity, threshold=threshold)
        for keep, capacity, threshold in ((np.uint8(2), np.int64(8), np.float32(9)), (2, 8, 9))
    )
    assert torch.equal(actual.values(), expected.values())


@pytest.mark.parametrize(
    ("keys", "options", "message"),
    [
        (["item", "where"], {}, r"features must have the keys \['where'\], got \['user', 'item'"),
        (["item", "tags"], {}, "key 'tags' must have as many .* as key 'item', got 2 and 4"),
        (["item"], {"scores": lambda x: torch.zeros(5)}, r"scores must have shape \[N\] = \[12\]"),
    ],
)
def test_wrong_batches_are_named(keys, options, message):
    with pytest.raises(ValueError, match=message):
        EventSelection(keys, 2, **options)(make_features())


def test_wrong_histories_are_named():
    long, short = (JaggedTensor(torch.zeros(n), lengths=torch.tensor([n])) for n in (3, 2))
    with pytest.raises(ValueError, match=r"events 'b' must have .* as events 'a', got 2 and 3"):
        select_events({"a": long, "b": short}, keep=1)
    with pytest.raises(ValueError, match="events must have one history or more, got none"):
        select_events({}, keep=1)
    with pytest.raises(TypeError, match="events must be a JaggedTensor, got a Tensor"):
        select_events(torch.zeros(3), keep=1)
    with pytest.raises(ValueError, match=r"scores must have shape \[N\] = \[3\], got \[2\]"):
        select_events(long, torch.zeros(2), keep=1)
    for scores in (None, torch.zeros(3)):
        with pytest.raises(ValueError, match="keep or threshold must be given, got neither"):
            select_events(long, scores)
        with pytest.raises(ValueError, match="keep or threshold must be given, got neither"):
            select_events({"a": long}, scores)
    with pytest.raises(TypeError, match="threshold must be a number or None, got '9'"):
        select_events(long, torch.zeros(3), threshold="9")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"relevance": torch.ones(2).long()}, TypeError, "relevance must be one of"),
        (
            {"relevance": torch.tensor([1.0, -1])},
            ValueError,
            "relevance must be finite .*, got -1.0",
        ),
        ({"strength": -1}, ValueError, "strength must be finite and not negative"),
        ({"strength": "1"}, TypeError, "strength must be a number, got '1'"),
        ({"factors": -torch.ones(2)}, ValueError, "factors must be finite and not .*, got -1"),
        ({"segments": None}, ValueError, "together, got factors alone"),
        ({"segments": torch.zeros(3).long()}, ValueError, r"segments must have shape \[N\] = \[2"),
        ({"segments": torch.tensor([-1, 0])}, ValueError, "segments must be 0 to 1, got -1 to 0"),
        ({"segments": torch.tensor([True, False])}, TypeError, "segments must be int32 or int64"),
    ],
)
def test_wrong_boosts_are_named(change, error, message):
    arguments = {
        "relevance": torch.ones(2),
        "segments": torch.zeros(2).long(),
        "factors": torch.ones(2),
    }
    with pytest.raises(error, match=message):
        boost_weights(**arguments | change)
