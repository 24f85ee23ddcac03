"""Rows with the highest scores, against PyTorch's sort of each sample."""

import contextlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.cases import jagged_lengths, offsets_of
from tests.combinations import each_pair
from tests.fixtures import opcheck, sync_debug_mode
from torchrec_jagged_attn.base.devices import supported_dtypes
from torchrec_jagged_attn.events import rows, select_events

CPU = torch.device("cpu")
LENGTHS = {
    "edges": jagged_lengths(14, 70, "edges", torch.Generator().manual_seed(0)),
    "many rows": torch.tensor([2500, 0, 3, 129, 1]),
    "one": torch.tensor([1]),
    "all empty": torch.tensor([0, 0, 0]),
    "no sample": torch.tensor([], dtype=torch.int64),
}
MANY_SAMPLES = torch.ones(70_000, dtype=torch.int64)
OFFSETS = torch.tensor([0, 2, 5])


def draw_scores(num_rows, device=CPU, dtype=torch.float32, *, ties=True, seed=0):
    """With zeros of both signs, subnormals and infinities; many alike, if ``ties``."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(num_rows, generator=generator)
    if ties:
        scores = (2 * scores).round() / 2
    special = torch.tensor([0.0, -0.0, 1e-40, -1e-40, torch.inf, -torch.inf])
    at = torch.randint(0, 50, (num_rows,), generator=generator)
    scores = torch.where(at < 6, special[at.clamp(max=5)], scores)
    return scores.to(device, dtype)


def rows_kept(scores, keep, threshold=None):
    """Numbers of one sample's rows, by PyTorch's stable sort of the newest first."""
    allowed = ~scores.isnan() if threshold is None else scores >= threshold
    newest_first = allowed.nonzero().flatten().flip(0)
    best = scores[newest_first].sort(descending=True, stable=True).indices
    return newest_first[best[:keep]].sort().values


def expected_rows(offsets, scores, keep, threshold=None, segments=None):
    """Rows that are kept, and how many of each sample; ``keep`` is of each sample and segment."""
    kept = []
    for begin, end, limits in zip(offsets[:-1], offsets[1:], keep, strict=True):
        sample_rows = [torch.zeros(0, dtype=torch.int64)]
        for segment, limit in enumerate(limits):
            candidates = torch.arange(int(begin), int(end))
            if segments is not None:
                candidates = candidates[segments[candidates] == segment]
            sample_rows.append(candidates[rows_kept(scores[candidates], limit, threshold)])
        kept.append(torch.cat(sample_rows).sort().values)
    rows = torch.cat([torch.zeros(0, dtype=torch.int64), *kept])
    return rows, torch.tensor([len(x) for x in kept], dtype=torch.int64)


def select_rows(offsets, scores=None, *, num_rows=None, **options):
    """Row numbers that are kept, as a history."""
    num_rows = num_rows if scores is None else len(scores)
    numbers = torch.arange(num_rows, device=offsets.device)
    return select_events(JaggedTensor(numbers, offsets=offsets), scores, **options)


def assert_selected(selected, rows, counts):
    assert torch.equal(selected.values().cpu(), rows)
    assert torch.equal(selected.offsets().diff().cpu().long(), counts)
    assert int(selected.offsets()[0]) == 0


@pytest.mark.parametrize(
    ("lengths", "dtype", "keep", "threshold", "ties"),
    each_pair(
        LENGTHS,
        [torch.float32, torch.bfloat16, torch.float16, torch.float64],
        [None, 0, 1, 16, 100],
        [None, 0.0, 0.5, -torch.inf, torch.inf],
        [False, True],
    ),
    ids=str,
)
def test_highest_scores(lengths, dtype, keep, threshold, ties, device):
    if dtype not in supported_dtypes(device):
        pytest.skip(f"{dtype} is not computed on {device}")
    offsets = offsets_of(LENGTHS[lengths], torch.int64, device)
    scores = draw_scores(int(LENGTHS[lengths].sum()), device, dtype, ties=ties)
    if keep is None and threshold is None:
        threshold = -torch.inf
    selected = select_rows(offsets, scores, keep=keep, threshold=threshold)
    limits = [[keep]] * len(LENGTHS[lengths])
    assert_selected(selected, *expected_rows(offsets, scores.cpu().double(), limits, threshold))


@pytest.mark.parametrize(
    ("budget", "scored", "index_dtype"),
    each_pair(
        [0, 1, 16, 1000, "by sample", "by segment", "by sample and segment"],
        [True, False],
        [torch.int32, torch.int64],
    ),
    ids=str,
)
def test_budgets(budget, scored, index_dtype, device):
    """Without scores, the newest rows are kept."""
    lengths = LENGTHS["edges"]
    offsets = offsets_of(lengths, index_dtype, device)
    num_rows, num_samples = int(lengths.sum()), len(lengths)
    generator = torch.Generator().manual_seed(1)
    segments = torch.randint(-1, 4, (num_rows,), generator=generator)  # of 0, 1 and 2
    if budget == "by sample":
        limits = torch.arange(num_samples).unsqueeze(1) * 3
        keep = limits.squeeze(1).to(device, index_dtype)
    elif budget == "by sample and segment":
        limits = torch.randint(0, 9, (num_samples, 3), generator=generator)
        keep = limits.to(device, index_dtype)
    else:
        keep = [2, 0, 7] if budget == "by segment" else budget
        limits = torch.tensor([keep]).view(1, -1).expand(num_samples, -1)
    options = {"segments": segments.to(device, index_dtype)} if "segment" in str(budget) else {}
    scores = draw_scores(num_rows, device) if scored else None
    selected = select_rows(offsets, scores, num_rows=num_rows, keep=keep, **options)
    assert selected.offsets().dtype == index_dtype
    values = torch.zeros(num_rows) if scores is None else scores.cpu()
    segments = segments if options else None
    assert_selected(selected, *expected_rows(offsets, values, limits, None, segments))


@settings(max_examples=25)
@given(st.lists(st.integers(0, 40), max_size=6), st.integers(0, 12), st.integers(0, 99))
def test_any_lengths(lengths, keep, seed):
    offsets = offsets_of(torch.tensor(lengths, dtype=torch.int64), torch.int64, CPU)
    scores = draw_scores(sum(lengths), seed=seed)
    expected = expected_rows(offsets, scores, [[keep]] * len(lengths))
    assert_selected(select_rows(offsets, scores, keep=keep), *expected)


@pytest.mark.reference
def test_scores_that_only_fp64_tells_apart():
    scores = torch.tensor([1 + 2**-40, 1, 1 + 2**-41], dtype=torch.float64)
    assert select_rows(torch.tensor([0, 3]), scores, keep=2).values().tolist() == [0, 2]
    assert select_rows(torch.tensor([0, 3]), scores, threshold=1 + 2**-40).values().tolist() == [0]


@pytest.mark.gpu
def test_more_samples_than_a_grid_has_rows():
    offsets = offsets_of(MANY_SAMPLES, torch.int64, "cuda")
    scores = draw_scores(len(MANY_SAMPLES), torch.device("cuda"))
    selected = select_rows(offsets, scores, keep=1)
    assert torch.equal(selected.values(), (~scores.isnan()).nonzero().flatten())


@pytest.mark.parametrize("capacity", [30, 300])
def test_capacity(capacity, device):
    """Values after the last event are zeros, whose gradient no event receives."""
    lengths = LENGTHS["edges"]
    offsets = offsets_of(lengths, torch.int64, device)
    scores = draw_scores(int(lengths.sum()), device)
    kept = select_rows(offsets, scores, keep=2).values()
    x = torch.randn(len(scores), 3, device=device, requires_grad=True)
    selected = select_events(JaggedTensor(x, offsets=offsets), scores, keep=2, capacity=capacity)
    assert torch.equal(selected.offsets(), select_rows(offsets, scores, keep=2).offsets())
    out = selected.values()
    assert out.shape == (capacity, 3)
    assert torch.equal(out[: len(kept)], x[kept])
    assert not out[len(kept) :].any()
    grad = torch.randn_like(out)
    grad[len(kept) :] = torch.nan
    out.backward(grad)
    expected = torch.zeros_like(x).index_put_((kept,), grad[: len(kept)])
    assert torch.equal(x.grad, expected)


@pytest.mark.gpu
def test_rows_beyond_the_capacity_are_dropped():
    offsets = torch.tensor([0, 3, 6], device="cuda")
    scores = torch.arange(6.0, device="cuda")
    selected = select_rows(offsets, scores, keep=2, capacity=3)
    assert selected.values().tolist() == [1, 2, 4]
    assert selected.offsets().tolist() == [0, 2, 3]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((), torch.bool),
        ((1,), torch.uint8),
        ((3,), torch.int64),
        ((3,), torch.bfloat16),
        ((5, 0), torch.bfloat16),
        ((2, 700), torch.bool),
        ((2, 700), torch.float64),
    ],
    ids=str,
)
@pytest.mark.parametrize("capacity", [None, 300])
def test_rows_of_any_shape(shape, dtype, capacity, device):
    offsets = offsets_of(LENGTHS["edges"], torch.int64, device)
    num_rows = int(offsets[-1])
    x = (torch.randn(num_rows, *shape) * 50).to(device, dtype)
    scores = draw_scores(num_rows, device)
    kept = select_rows(offsets, scores, keep=5).values()
    for values in (x, x.repeat_interleave(2, 0)[::2]):
        history = JaggedTensor(values, offsets=offsets)
        selected = select_events(history, scores, keep=5, capacity=capacity).values()
        assert selected.dtype == dtype
        assert torch.equal(selected[: len(kept)], x[kept])
        assert not selected[len(kept) :].any()


@pytest.mark.parametrize("lengths", ["all empty", "no sample"])
@pytest.mark.parametrize("capacity", [None, 2])
@pytest.mark.parametrize("scored", [False, True])
def test_no_rows(lengths, capacity, scored, device):
    offsets = offsets_of(LENGTHS[lengths], torch.int64, device)
    x = torch.zeros(0, 4, device=device, requires_grad=True)
    scores = torch.zeros(0, device=device) if scored else None
    history = JaggedTensor(x, offsets=offsets)
    out = select_events(history, scores, keep=3, capacity=capacity).values()
    assert out.shape == (capacity or 0, 4)
    assert not out.any()
    out.sum().backward()
    assert x.grad.shape == (0, 4)


def test_a_sample_does_not_depend_on_others(device):
    lengths = LENGTHS["many rows"]
    offsets = offsets_of(lengths, torch.int64, device)
    scores = draw_scores(int(lengths.sum()), device)
    batched = select_rows(offsets, scores, keep=40)
    splits = batched.values().split(batched.lengths().tolist())
    for begin, end, expected in zip(offsets[:-1], offsets[1:], splits, strict=True):
        alone = select_rows(offsets[:2] * 0 + (end - begin) * offsets.new_tensor([0, 1]),
                            scores[begin:end], keep=40)  # fmt: skip
        assert torch.equal(alone.values() + begin, expected)


def test_scores_with_strides(device):
    offsets = offsets_of(LENGTHS["edges"], torch.int64, device)
    scores = draw_scores(2 * int(offsets[-1]), device)
    expected = select_rows(offsets, scores[::2].contiguous(), keep=3).values()
    assert torch.equal(select_rows(offsets, scores[::2], keep=3).values(), expected)


def test_scores_have_no_gradient(device):
    scores = torch.rand(5, device=device, requires_grad=True)
    x = torch.rand(5, 2, device=device)
    history = JaggedTensor(x, offsets=OFFSETS.to(device))
    assert not select_events(history, scores, keep=1).values().requires_grad


@pytest.mark.gpu
def test_never_waits_with_a_capacity():
    offsets = offsets_of(LENGTHS["many rows"], torch.int64, "cuda")
    scores = draw_scores(int(offsets[-1]), torch.device("cuda"))
    segments = torch.zeros_like(scores, dtype=torch.int64)
    x = torch.randn(len(scores), 8, device="cuda", requires_grad=True)

    def call():
        history = JaggedTensor(x, offsets=offsets)
        for options in ({"keep": 9}, {"keep": [3, 4], "segments": segments}, {"threshold": 0.5}):
            selected = select_events(history, scores, capacity=len(scores), **options)
            selected.values().sum().backward()
        select_events(history, keep=9, capacity=len(scores)).values().sum().backward()

    call()
    with sync_debug_mode("error"):
        call()


@pytest.mark.reference  # traced alike with any kernels
@pytest.mark.parametrize("scored", [False, True])
def test_compiled_once_for_changing_lengths(scored, device):
    torch.compiler.reset()
    counter = CompileCounter()

    def call(x, offsets, scores, keep):
        history = JaggedTensor(x, lengths=offsets.diff(), offsets=offsets)
        selected = select_events(history, scores, keep=keep, capacity=50)
        return selected.values(), selected.offsets()

    compiled = torch.compile(call, backend=counter, fullgraph=True, dynamic=True)
    for lengths in ([30, 2, 0, 17], [5, 9, 8], [11, 12, 0, 1, 40, 3]):
        offsets = offsets_of(torch.tensor(lengths), torch.int64, device)
        scores = draw_scores(sum(lengths), device) if scored else None
        x = torch.randn(sum(lengths), 3, device=device)
        for actual, expected in zip(
            compiled(x, offsets, scores, 6), call(x, offsets, scores, 6), strict=True
        ):
            assert torch.equal(actual, expected)
    assert counter.frame_count == 1


@pytest.mark.parametrize("segmented", [False, True])
def test_op_is_registered_as_it_behaves(segmented, device):
    offsets = offsets_of(torch.tensor([5, 0, 3]), torch.int64, device)
    scores = draw_scores(8, device)
    segments = torch.zeros(8, dtype=torch.int64, device=device) if segmented else None
    keep = torch.full((3, 2 if segmented else 1), 2, device=device)
    opcheck(rows.highest_rows, (offsets, scores, segments, keep, -torch.inf))


@pytest.mark.reference  # alike with any kernels
@pytest.mark.parametrize("on", ["meta", "fake"])
def test_tensors_without_values(on):
    """Have the shapes of tensors with values if a capacity is given."""
    mode = FakeTensorMode() if on == "fake" else contextlib.nullcontext()
    with mode:
        factory = {"device": "meta" if on == "meta" else "cpu"}
        offsets = torch.zeros(4, dtype=torch.int64, **factory)
        x = torch.zeros(9, 3, requires_grad=True, **factory)
        history = JaggedTensor(x, lengths=offsets[1:], offsets=offsets)
        for scores in (None, x[:, 0]):
            selected = select_events(history, scores, keep=2, capacity=6)
            assert selected.values().shape == (6, 3)
            assert selected.offsets().shape == (4,)
            selected.values().sum().backward()
            assert x.grad.shape == (9, 3)
            with pytest.raises(ValueError, match="capacity must be given for tensors without"):
                select_events(history, scores, keep=2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"scores": torch.zeros(5).long(), "keep": 1}, TypeError, "scores must be one of"),
        ({"scores": torch.zeros(5, 1), "keep": 1}, ValueError, r"scores must have shape \[N\]"),
        (
            {"scores": torch.zeros(4), "keep": 1},
            ValueError,
            r"scores must have shape \[N\] = \[5\]",
        ),
        ({"threshold": 0.5}, ValueError, "threshold must be None without scores"),
        ({"keep": -1}, ValueError, "keep must be at least 0, got -1"),
        ({"keep": 2**63}, ValueError, r"keep must be less than 2\*\*63, got 922"),
        (
            {"keep": torch.tensor([1, -1])},
            ValueError,
            "keep must be at least 0, got -1",
        ),
        (
            {"scores": torch.zeros(5), "threshold": "a"},
            TypeError,
            "threshold must be a number or N",
        ),
        ({"scores": torch.zeros(5), "threshold": math.nan}, ValueError, "or None, got nan"),
        ({"keep": 2.0}, TypeError, r"keep must be an int or \[B\] integers, got 2"),
        ({"keep": [2]}, TypeError, r"keep must be an int or \[B\] integers, got \["),
        ({"keep": torch.ones(2)}, TypeError, "keep must be int32 or int64, got"),
        ({"keep": torch.tensor([1])}, ValueError, r"keep must have shape \[B\]"),
        (
            {"segments": torch.zeros(5), "keep": [1]},
            TypeError,
            "segments must be int32 or int64, got",
        ),
        (
            {"segments": torch.zeros(5).long(), "scores": torch.zeros(5), "threshold": 0.5},
            TypeError,
            "a number for each segment, got None",
        ),
        ({"segments": torch.zeros(5).long(), "keep": [1, True]}, TypeError, "keep must be ints"),
        (
            {"segments": torch.zeros(5).long(), "keep": torch.ones(2).long()},
            ValueError,
            r"keep must have shape \[B, S\]",
        ),
        ({"keep": 1, "capacity": -3}, ValueError, "capacity must be at least 0, or None, got"),
        (
            {"keep": 2, "capacity": 3},
            ValueError,
            "capacity must be at least the 4 rows that are kept, got 3",
        ),
    ],
)
def test_wrong_arguments_are_named(arguments, error, message):
    history = JaggedTensor(torch.zeros(5), offsets=OFFSETS)
    with pytest.raises(error, match=message):
        select_events(history, **arguments)
