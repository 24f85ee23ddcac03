"""Attributes of events stay with their events."""

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_jagged_attn.events import Events

LENGTHS = [3, 0, 5, 1]
INNER = {"item": [1] * 9, "tags": [2, 0, 1, 3, 0, 0, 1, 2, 1], "empty": [0] * 9}


def make_events(device="cpu", *, weighted=True, lengths=LENGTHS, inner=INNER):
    of_all = torch.tensor(
        [n for of_key in inner.values() for n in of_key], dtype=torch.int64, device=device
    )
    values = torch.arange(int(of_all.sum()), device=device)
    weights = None
    if weighted:
        generator = torch.Generator().manual_seed(0)
        weights = torch.rand(len(values), generator=generator).to(device).requires_grad_()
    attributes = KeyedJaggedTensor(
        list(inner), values, weights, lengths=of_all, stride=len(inner["item"])
    )
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
    times = torch.arange(sum(lengths), device=device) * 10
    return Events(offsets, attributes, times)


def assert_kept(actual, events, kept):
    """The events ``kept``, with all that they had."""
    assert actual.num_events == len(kept)
    assert torch.equal(actual.timestamps, events.timestamps[kept])
    for key in events.attributes.keys():  # noqa: SIM118
        for part in ("to_dense", "to_dense_weights"):
            if part == "to_dense_weights" and events.attributes.weights_or_none() is None:
                continue
            had = getattr(events.attributes[key], part)()
            got = getattr(actual.attributes[key], part)()
            assert len(got) == len(kept)
            for at, x in zip(kept, got, strict=True):
                assert torch.equal(x, had[at]), key


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("keep", "kept"), [(2, [1, 2, 6, 7, 8]), (0, []), (9, list(range(9)))])
def test_newest_events(keep, kept, weighted, device):
    events = make_events(device, weighted=weighted)
    actual = events.truncate(keep)
    assert actual.offsets.diff().tolist() == [min(n, keep) for n in LENGTHS]
    assert_kept(actual, events, kept)


def test_events_of_highest_scores(device):
    events = make_events(device)
    scores = torch.tensor([0.5, 0.1, 0.5, 0, 0.9, 0.3, 0.9, 0.9, torch.nan], device=device)
    assert_kept(events.select(scores, keep=2), events, [0, 2, 6, 7])
    assert_kept(events.select(scores, threshold=0.5), events, [0, 2, 4, 6, 7])
    segments = torch.tensor([0, 1, 0, 1, 1, 1, 0, 0, 1], device=device)
    actual = events.select(scores, keep=[1, 1], segments=segments)
    assert_kept(actual, events, [1, 2, 4, 7])


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_no_event(lengths, device):
    events = make_events(device, lengths=lengths, inner={key: [] for key in INNER})
    actual = events.truncate(2)
    assert actual.num_events == 0
    assert torch.equal(actual.offsets, events.offsets)


def test_of_features_with_one_id_an_event(device):
    features = KeyedJaggedTensor(
        ["time", "user", "item", "surface"],
        torch.tensor([5, 6, 7, 1, 2, 10, 11, 12, 20, 21, 22], device=device),
        torch.arange(11.0, device=device),
        lengths=torch.tensor([2, 1, 1, 1, 2, 1, 2, 1], device=device),
    )
    events = Events.of_features(features, ["surface", "item"], "time")
    assert events.offsets.tolist() == [0, 2, 3]
    assert events.timestamps.tolist() == [5, 6, 7]
    assert events.attributes.stride() == events.num_events == 3
    assert [x.tolist() for x in events.attributes["surface"].to_dense()] == [[20], [21], [22]]
    assert events.attributes["item"].weights().tolist() == [5, 6, 7]
    with pytest.raises(ValueError, match=r"features must have the keys \['place'\], got"):
        Events.of_features(features, ["place"])
    with pytest.raises(TypeError, match="timestamps must be a key or None, got True"):
        Events.of_features(features, ["item"], timestamps=True)
    with pytest.raises(ValueError, match=r"keys must be at least one name, each once, got \[\]"):
        Events.of_features(features, [])


@pytest.mark.parametrize("timed", [False, True])
def test_moved_to_a_device(timed, device):
    events = make_events()
    if not timed:
        events = Events(events.offsets, events.attributes)
    moved = events.to(device)
    for x in (moved.offsets, moved.attributes.values(), moved.attributes.weights()):
        assert x.device.type == device.type
    assert (moved.timestamps is not None) == timed
    back = moved.to("cpu")
    assert torch.equal(back.offsets, events.offsets)
    assert torch.equal(back.attributes.values(), events.attributes.values())
    assert torch.equal(back.attributes.lengths(), events.attributes.lengths())
    assert not timed or torch.equal(back.timestamps, events.timestamps)


@pytest.mark.gpu
def test_pinned_and_used_on_another_stream():
    pinned = make_events(weighted=False).pin_memory()
    assert pinned.offsets.is_pinned()
    assert pinned.attributes.values().is_pinned()
    assert pinned.timestamps.is_pinned()
    pinned.to("cuda", non_blocking=True).record_stream(torch.cuda.Stream())


def test_wrong_arguments_are_named():
    events = make_events()
    with pytest.raises(TypeError, match="attributes must be a KeyedJaggedTensor, got a Tensor"):
        Events(events.offsets, torch.zeros(3))
    with pytest.raises(ValueError, match=r"timestamps must have shape \[N\] = \[9\], got \[3\]"):
        Events(events.offsets, events.attributes, torch.zeros(3))
    with pytest.raises(TypeError, match=r"timestamps must be int32 or int64, got torch\.float32"):
        Events(events.offsets, events.attributes, torch.arange(9.0))
    with pytest.raises(
        ValueError, match=r"timestamps must not decrease .* got 2 then 1 at position"
    ):
        Events(events.offsets, events.attributes, torch.tensor([0, 2, 1, *range(6)]))
    for method in (events.select, events.truncate):
        with pytest.raises(ValueError, match="keep or threshold must be given, got neither"):
            method(None)
    with pytest.raises(TypeError, match="keys must be a list of names, got 'item'"):
        Events.of_features(events.attributes, "item")
    with pytest.raises(TypeError, match=r"offsets must be int32 or int64, got torch\.float32"):
        Events(events.offsets.float(), events.attributes)
    with pytest.raises(ValueError, match="offsets must end at the 9 rows they divide, got 4"):
        Events(torch.tensor([0, 4]), events.attributes).truncate(1)
    of_two = KeyedJaggedTensor(
        ["a", "b"], torch.zeros(3), lengths=torch.ones(3).int(), stride_per_key_per_rank=[[1], [2]]
    )
    with pytest.raises(ValueError, match=r"one batch size, the number of events, got \[1, 2\] for"):
        Events(events.offsets, of_two)
