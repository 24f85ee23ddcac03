"""A row of an event is the linear layer over its pooled attributes and its time."""

import math

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from tests.events.test_layout import INNER, LENGTHS, make_events
from tests.rounding import RoundingErrors
from tests.runs import assert_same_run
from tests.tolerance import assert_close
from torchrec_jagged_attn import JaggedTargetAttention
from torchrec_jagged_attn.events import EventBasedFeature, Events, TimeEncoding


def make_tables():
    return [
        EmbeddingBagConfig(
            name=f"{name}_table", embedding_dim=4, num_embeddings=40, feature_names=[name]
        )
        for name in INNER
    ]


def test_rows_are_made_of_attributes_and_times(device):
    module = EventBasedFeature(make_tables(), 6, periods=(40.0,), is_weighted=True, device=device)
    events = make_events(device)
    history = module(events)
    assert torch.equal(history.offsets(), events.offsets)
    columns = []
    for name in INNER:
        table = module.embedding_bag_collection.embedding_bags[f"{name}_table"].weight
        attribute = events.attributes[name]
        rows = [
            (table[ids] * weights.unsqueeze(1)).sum(0)
            for ids, weights in zip(attribute.to_dense(), attribute.to_dense_weights(), strict=True)
        ]
        columns.append(torch.stack(rows))
    times = events.timestamps.double()
    newest = torch.tensor([20.0] * 3 + [70.0] * 5 + [80.0], device=device)
    phase = times * (2 * math.pi / 40)
    columns.append(torch.stack([(newest - times).log1p(), phase.sin(), phase.cos()], 1).float())
    features, (weight, bias) = torch.cat(columns, 1), module.compression.parameters()
    with RoundingErrors(torch.float32) as errors:
        expected = features.double() @ weight.double().T + bias.double()
    assert_close(history.values(), expected, errors)


def test_gradients_reach_tables_and_weights(device):
    module = EventBasedFeature(make_tables(), 8, is_weighted=True, device=device)
    attend = JaggedTargetAttention(8, 2, device=device)
    events = make_events(device)
    newest = events.truncate(2)
    target = torch.randn(len(LENGTHS), 8, device=device)
    attend(target, module(newest)).sum().backward()
    table = module.embedding_bag_collection.embedding_bags["item_table"].weight
    seen = newest.attributes["item"].values()
    assert table.grad[seen].any()
    assert not table.grad[[i for i in range(40) if i not in seen.tolist()]].any()
    assert module.compression.weight.grad.any()
    assert events.attributes.weights().grad.any()


def test_a_layer_of_another_dtype_than_lookups(device):
    module = EventBasedFeature(make_tables(), 6, is_weighted=True, device=device)
    events = make_events(device)
    expected = module(events).values()
    module.compression.double()
    rows = module(events).values()
    assert rows.dtype == torch.float64
    assert_same_run(rows, expected, num_terms=15)


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_no_event(lengths, device):
    module = EventBasedFeature(make_tables(), 6, is_weighted=True, device=device)
    events = make_events(device, lengths=lengths, inner={key: [] for key in INNER})
    rows = module(events)
    assert rows.values().shape == (0, 6)
    assert rows.lengths().tolist() == lengths
    rows.values().sum().backward()
    assert all(not weight.grad.any() for weight in module.parameters())


def test_events_without_times(device):
    events = make_events(device, weighted=False)
    untimed = Events(events.offsets, events.attributes)
    module = EventBasedFeature(make_tables(), 6, periods=None, device=device)
    assert torch.equal(module(untimed).values(), module(events).values())
    assert module.compression.in_features == 12
    timed = EventBasedFeature(make_tables(), 6, device=device)
    with pytest.raises(TypeError, match="timestamps must be a tensor, got a NoneType"):
        timed(untimed)


def test_seconds_of_this_century():
    """Times of day are exact, and ages to the second."""
    now = 1_790_000_000
    timestamps = torch.tensor([now - 2, now - 1, now])
    encoding = TimeEncoding(periods=(86_400.0,))
    encoded = encoding(timestamps, torch.tensor([0, 3]))
    assert_same_run(encoded[:, 0], [math.log(3), math.log(2), 0], num_terms=1)
    angle = torch.atan2(encoded[:, 1], encoded[:, 2]).double() % (2 * math.pi)
    seconds = angle / (2 * math.pi) * 86_400
    of_turn = 86_400 * torch.finfo(torch.float32).eps
    assert torch.all((seconds - timestamps % 86_400).abs() <= of_turn)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="tables must hold at least one EmbeddingBagConfig"):
        EventBasedFeature([], 6)
    with pytest.raises(ValueError, match="periods must be positive and finite, got"):
        TimeEncoding(periods=(3.0, 0.0))
    with pytest.raises(TypeError, match=r"periods must be a tuple of numbers, got 3\.0"):
        TimeEncoding(periods=3.0)
    with pytest.raises(TypeError, match="periods must be a number, got '3'"):
        TimeEncoding(periods=("3",))


@pytest.mark.parametrize(
    ("timestamps", "offsets", "error", "message"),
    [
        (torch.tensor([0.0, 1.0]), [0, 2], TypeError, "timestamps must be int32 or int64, got"),
        (torch.tensor([2, 1]), [0, 2], ValueError, "timestamps must not decrease within a sample"),
        (torch.tensor([2, 1]), [0, 1], ValueError, "offsets must end at the 2 rows they divide"),
        (torch.tensor(2), [0, 1], ValueError, r"timestamps must have shape \[N\]"),
    ],
)
def test_wrong_times_are_named(timestamps, offsets, error, message):
    with pytest.raises(error, match=message):
        TimeEncoding()(timestamps, torch.tensor(offsets))


def test_times_may_begin_anew_with_each_user():
    encoding = TimeEncoding(periods=())
    ages = encoding(torch.tensor([7, 9, 2, 2]), torch.tensor([0, 2, 2, 4])).expm1().round()
    assert ages.flatten().tolist() == [2, 0, 0, 0]


def test_ages_that_int32_does_not_hold():
    times = torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32)
    ages = TimeEncoding(periods=())(times, torch.tensor([0, 2]))
    assert_same_run(ages[0], [math.log(2**32)], num_terms=1)


def test_wrong_events_are_named():
    weighted, plain = (
        EventBasedFeature(make_tables(), 6, is_weighted=is_weighted)
        for is_weighted in (True, False)
    )
    with pytest.raises(TypeError, match="events must be Events, got a Tensor"):
        plain(torch.zeros(3))
    with pytest.raises(ValueError, match="weights of ids for is_weighted=True, got none"):
        weighted(make_events(weighted=False))
    with pytest.raises(ValueError, match="no weights of ids for is_weighted=False, got some"):
        plain(make_events())
    other = make_events(weighted=False, inner={"item": INNER["item"]})
    with pytest.raises(ValueError, match=r"events must have the attributes \['tags', 'empty'\]"):
        plain(other)
