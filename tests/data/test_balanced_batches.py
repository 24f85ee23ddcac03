"""Batches of equal size and cost: the assignment of examples, and resumption of an epoch."""

import json
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from torchrec_jagged_attn.data import BalancedBatchSampler


def log_normal(count: int, sigma: float = 1.0) -> torch.Tensor:
    """Lengths with a mean of about 200."""
    normal = torch.randn(count, generator=torch.Generator().manual_seed(0))
    return (200 * torch.exp(sigma * normal - sigma**2 / 2)).long()


def all_ranks(lengths, batch_size: int, num_replicas: int, epoch: int = 0, **options):
    """Index lists by step and rank."""
    samplers = [
        BalancedBatchSampler(lengths, batch_size, num_replicas, rank, **options)
        for rank in range(num_replicas)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return list(zip(*samplers, strict=True))


def loads(lengths: torch.Tensor, steps, power: int = 1) -> torch.Tensor:
    """Costs ``[steps, ranks]``."""
    return (lengths.double() ** power)[torch.tensor(steps)].sum(2)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=60),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_each_example_once_and_equal_batches(
    lengths, batch_size, num_replicas, balanced_steps, epoch
):
    options = {"epoch": epoch, "balanced_steps": balanced_steps, "seed": 5}
    steps = all_ranks(lengths, batch_size, num_replicas, **options)
    full, left = divmod(len(lengths), batch_size * num_replicas)
    last = [-(-left // num_replicas)] if left else []
    sizes = [batch_size] * full + last
    assert [{len(batch) for batch in step} for step in steps] == [{size} for size in sizes]
    seen = [i for step in steps for batch in step for i in batch]
    assert set(seen) == set(range(len(lengths)))
    assert len(seen) == len(lengths) + -left % num_replicas
    if full:
        assert (
            all_ranks(lengths, batch_size, num_replicas, drop_last=True, **options)
            == (steps[:full])
        )
        in_full = [i for step in steps[:full] for batch in step for i in batch]
        assert len(set(in_full)) == len(in_full)


def test_global_batches_follow_the_shuffle():
    steps = all_ranks(log_normal(103), 5, 4, epoch=2, seed=7)
    shuffled = torch.randperm(103, generator=torch.Generator().manual_seed(7 + 2)).tolist()
    place = {example: position for position, example in enumerate(shuffled)}
    for number, step in enumerate(steps[:-1]):
        all_places = [place[i] for batch in step for i in batch]
        assert sorted(all_places) == list(range(20 * number, 20 * number + 20))
        for batch in step:
            assert batch == sorted(batch, key=place.get)
    padding = [place[i] for batch in steps[-1] for i in batch]
    assert sorted(padding) == [0, 100, 101, 102]


@pytest.mark.parametrize(("cost", "power"), [("linear", 1), ("quadratic", 2)])
def test_ranks_have_nearly_equal_costs(cost, power):
    lengths = log_normal(2 * 8 * 512).clamp(max=2000)
    rank_costs = loads(lengths, all_ranks(lengths, 512, 8, cost=cost), power)
    assert (rank_costs.amax(1) / rank_costs.mean(1)).max() < 1.001
    other = "quadratic" if cost == "linear" else "linear"
    other_costs = loads(lengths, all_ranks(lengths, 512, 8, cost=other), power)
    assert rank_costs.std() < other_costs.std()


def test_balanced_steps_have_nearly_equal_costs():
    lengths = log_normal(16 * 8 * 256)
    one, eight = (
        loads(lengths, all_ranks(lengths, 256, 8, balanced_steps=steps)).sum(1).view(2, 8)
        for steps in (1, 8)
    )
    excess = [(step_costs.amax(1) / step_costs.mean(1) - 1).mean() for step_costs in (one, eight)]
    assert excess[1] < excess[0] / 10


def test_the_longest_histories_meet_in_one_step():
    lengths = torch.ones(4 * 2 * 10, dtype=torch.int64)
    lengths[:2] = 1000
    rank_costs = loads(lengths, all_ranks(lengths, 10, 2, balanced_steps=4))
    assert sorted(rank_costs.tolist()) == [[10, 10]] * 3 + [[1009, 1009]]


def test_the_longest_history_comes_in_any_step_and_on_any_rank():
    lengths, epochs = [100, *range(31)], 400
    found = torch.zeros(4, 2)
    for epoch in range(epochs):
        for step, batches in enumerate(all_ranks(lengths, 4, 2, epoch, balanced_steps=4)):
            for rank, batch in enumerate(batches):
                found[step, rank] += 0 in batch
    assert found.sum() == epochs
    for counts, share in ((found.sum(1), 1 / 4), (found.sum(0), 1 / 2)):
        # Five standard deviations of a binomial distribution.
        bound = 5 * (epochs * share * (1 - share)) ** 0.5
        assert ((counts - epochs * share).abs() < bound).all()


def test_the_default_device_changes_nothing():
    expected = all_ranks([5, 1, 9, 3], 1, 2)
    with torch.device("meta"):
        assert all_ranks([5, 1, 9, 3], 1, 2) == expected


def test_an_epoch_is_shuffled_by_seed_and_epoch():
    lengths = log_normal(64)
    first = all_ranks(lengths, 4, 2)
    assert all_ranks(lengths.numpy().astype(np.int32), 4, 2) == first
    assert all_ranks(lengths, 4, 2, epoch=1) == all_ranks(lengths, 4, 2, seed=1)
    assert all_ranks(lengths, 4, 2, epoch=1) != first


@pytest.mark.parametrize("balanced_steps", [1, 4])
@pytest.mark.parametrize("given_batches", [0, 5, 13])
def test_a_resumed_epoch_has_the_same_rest(balanced_steps, given_batches):
    def sampler():
        return BalancedBatchSampler(log_normal(101), 4, 2, 1, balanced_steps=balanced_steps)

    whole = sampler()
    whole.set_epoch(3)
    batches = iter(whole)
    for _ in range(given_batches):
        next(batches)
    state = json.loads(json.dumps(whole.state_dict()))
    assert state == {"epoch": 3, "batches": given_batches}
    resumed = sampler()
    resumed.load_state_dict(state)
    resumed.set_epoch(3)  # as the loop over epochs does
    assert resumed.state_dict() == state
    assert len(resumed) == 13
    rest = list(batches)
    assert list(resumed) == rest
    assert len(rest) == 13 - given_batches
    assert resumed.state_dict() == whole.state_dict() == {"epoch": 3, "batches": 13}
    assert list(resumed) == list(whole)  # again, and whole
    for one in (whole, resumed):
        one.set_epoch(4)
        assert one.state_dict() == {"epoch": 4, "batches": 0}
    assert list(resumed) == list(whole)


def test_other_epochs_are_complete():
    sampler = BalancedBatchSampler(log_normal(40), 4, 2, 0)
    sampler.load_state_dict({"epoch": 1, "batches": 3})
    sampler.set_epoch(2)
    assert len(list(sampler)) == len(sampler) == 5


def test_a_loader_goes_on_from_the_sampler():
    lengths = log_normal(64)
    sampler = BalancedBatchSampler(lengths, 4, 2, 0)
    loader = DataLoader(lengths, batch_sampler=sampler, num_workers=2)
    expected = [lengths[torch.tensor(batch)].tolist() for batch in sampler]
    assert [batch.tolist() for batch in loader] == expected
    sampler.load_state_dict({"epoch": 0, "batches": 3})
    assert [batch.tolist() for batch in loader] == expected[3:]


def test_set_epoch_of_loaders():
    """Lightning and Accelerate call it on the samplers of a loader and of its batch sampler."""
    sampler = BalancedBatchSampler(log_normal(40), 4, 2, 1, drop_last=True, seed=3)
    loader = DataLoader(torch.arange(40), batch_sampler=sampler)
    epochs = []
    for epoch in range(3):
        for holder in (loader, loader.batch_sampler):
            if callable(set_epoch := getattr(holder.sampler, "set_epoch", None)):
                set_epoch(epoch)
        epochs.append([batch.tolist() for batch in loader])
        assert sampler.state_dict()["epoch"] == epoch
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert (sampler.batch_size, sampler.drop_last) == (4, True)
    assert (sampler.num_replicas, sampler.rank, sampler.seed) == (2, 1, 3)
    again = pickle.loads(pickle.dumps(sampler))  # as workers that are spawned get it
    assert list(again) == epochs[2]


@pytest.mark.parametrize(
    "lengths",
    [
        pd.Series([4, 1, 3, 2], index=[7, 3, 0, 9]),
        pd.Series([9, 4, 1, 3, 2])[lambda x: x < 9],
        pd.Series([4, 1, 3, 2], index=list("abcd"), dtype="UInt16"),
        *(np.array([4, 1, 3, 2], dtype) for dtype in ("i1", "u8", ">i4")),
        np.array([2, 3, 1, 4])[::-1],
        np.array([4, 1, 3, 2], dtype=object),
        [np.uint16(x) for x in (4, 1, 3, 2)],
        torch.tensor([4, 1, 3, 2], dtype=torch.uint16),
    ],
    ids=lambda x: f"{type(x).__name__} {getattr(x, 'dtype', '')}",
)
def test_lengths_of_any_kind(lengths):
    assert all_ranks(lengths, 1, 2) == all_ranks([4, 1, 3, 2], 1, 2)


def test_the_largest_seed():
    sampler = BalancedBatchSampler([1, 2, 3], 3, 1, 0, seed=2**64 - 1)
    sampler.set_epoch(1)
    assert list(sampler) == list(BalancedBatchSampler([1, 2, 3], 3, 1, 0, seed=0))


def test_ranks_come_from_the_process_group():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        sampler = BalancedBatchSampler([3, 1, 2], 3)
    finally:
        dist.destroy_process_group()
    assert [sorted(batch) for batch in sampler] == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lengths": [[1, 2]]}, ValueError, r"lengths must have shape \[S\], S > 0, got \[1, 2\]"),
        ({"lengths": []}, ValueError, r"lengths must have shape \[S\], S > 0, got \[0\]"),
        ({"lengths": [1.0]}, TypeError, "lengths must be integers, got torch.float32"),
        ({"lengths": [1, True]}, TypeError, "lengths must be integers, got a bool"),
        ({"lengths": ["a"]}, TypeError, "lengths must be a tensor, an array, a list or a S"),
        ({"lengths": np.array([True])}, TypeError, "lengths must be integers, got a bool"),
        ({"lengths": pd.Series([1.5])}, TypeError, "lengths must be integers, got torch.float"),
        ({"lengths": {1: 2}}, TypeError, "lengths must be a tensor, .* of integers, got a dict"),
        (
            {"lengths": np.array([1, 2**63], "u8")},
            ValueError,
            r"lengths must be 0 to 2\*\*63 - 1, got -9223372036854775808 at index 1",
        ),
        ({"lengths": [1, -2]}, ValueError, r"must be 0 to 2\*\*63 - 1, got -2 at index 1"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
        ({"num_replicas": None}, ValueError, "num_replicas must be given before init_process"),
        ({"rank": None}, ValueError, "rank must be given before init_process_group, got None"),
        ({"rank": 2}, ValueError, "rank must be less than num_replicas 2, got 2"),
        ({"rank": -1}, ValueError, "rank must be at least 0, got -1"),
        ({"cost": "cubic"}, ValueError, "cost must be one of linear, quadratic, got 'cubic'"),
        ({"seed": 2**64}, ValueError, r"seed must be less than 2\*\*64, got 18446744073709551616"),
        (
            {"drop_last": True},
            ValueError,
            r"batch_size .* must be at most the 4 examples .*, got 4 \* 2",
        ),
    ],
)
def test_wrong_arguments_are_named(options, error, message):
    arguments = {"lengths": [1, 2, 3, 4], "batch_size": 4, "num_replicas": 2, "rank": 0}
    with pytest.raises(error, match=message):
        BalancedBatchSampler(**(arguments | options))


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ({"epoch": 1}, ValueError, r"state_dict must have batches, got \['epoch'\]"),
        (3, TypeError, "state_dict must be a dict, got a int"),
        ({"epoch": 1, "batches": "2"}, TypeError, r"state_dict\['batches'\] must be an int"),
        ({"epoch": -1, "batches": 2}, ValueError, r"state_dict\['epoch'\] must be at least 0"),
        ({"epoch": 0, "batches": 3}, ValueError, r"\['batches'\] must be at most the 2 of an"),
    ],
)
def test_wrong_states_are_named(state, error, message):
    sampler = BalancedBatchSampler([1, 2, 3, 4], 1, 2, 0)
    with pytest.raises(error, match=message):
        sampler.load_state_dict(state)
    assert len(list(sampler)) == 2
