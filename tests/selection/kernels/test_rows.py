"""The kernels behind ``select_rows``, where their op does not lead."""

import pytest
import torch

from tests.cases import offsets_of
from tests.selection.test_selection import draw_scores, expected_rows
from torchrec_jagged_attn.selection.kernels import rows as kernels


def select(offsets, scores, segments, num_rows, num_segments, limit, capacity):
    found, inverse, new = kernels.select_rows(
        offsets, scores, segments, None, num_rows, capacity, num_segments, limit, -torch.inf
    )
    return new, found, inverse


def test_rows_behind_the_last_sample(kernel_device):
    """As a selection with room to spare leaves them: they are of nobody, whatever their score."""
    offsets = torch.tensor([0, 2, 3], device=kernel_device)
    scores = torch.tensor([1.0, 2.0, 3.0, torch.nan, 9.0], device=kernel_device)
    new, rows, inverse = select(offsets, scores, None, 5, 1, 1, 4)
    assert new.tolist() == [0, 1, 2]
    assert rows.tolist() == [1, 2, -1, -1]
    assert inverse.tolist() == [-1, 0, 1, -1, -1]


@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize("block", [128, 1024, 2048])
def test_samples_around_a_block(block, segmented, kernel_device, monkeypatch):
    """Whole in a program's hands, one row more, and several times as long."""
    for name in ("MIN_BLOCK", "MAX_BLOCK"):
        monkeypatch.setattr(kernels, name, block)
    lengths = torch.tensor([block - 1, block, 0, block + 1, 1, 3 * block + 5])
    offsets = offsets_of(lengths, torch.int32, kernel_device)
    num_rows = int(lengths.sum())
    scores = draw_scores(num_rows, kernel_device)
    generator = torch.Generator().manual_seed(1)
    segments = torch.randint(0, 2, (num_rows,), generator=generator) if segmented else None
    limits = [[block // 3] * (2 if segmented else 1)] * len(lengths)
    expected, counts = expected_rows(offsets, scores.cpu(), limits, None, segments)
    segments = None if segments is None else segments.to(kernel_device)
    sizes = num_rows, len(limits[0]), block // 3, num_rows
    new, rows, inverse = select(offsets, scores, segments, *sizes)
    assert torch.equal(new.diff().cpu(), counts)
    assert torch.equal(rows[: len(expected)].cpu(), expected)
    assert (rows[len(expected) :] == -1).all()
    assert torch.equal(inverse[rows[: len(expected)]], torch.arange(len(expected)).to(rows))
    assert int((inverse >= 0).sum()) == len(expected)


@pytest.mark.parametrize("kind", ["scored", "newest", "segmented"])
def test_sums_of_many_samples(kind, kernel_device, monkeypatch):
    """By several programs, each of which adds up several blocks of what comes before."""
    monkeypatch.setattr(kernels, "SUMS", {"SAMPLES": 16, "BLOCK": 32, "num_warps": 1})
    lengths = torch.arange(150) % 7
    offsets = offsets_of(lengths, torch.int64, kernel_device)
    num_rows = int(lengths.sum())
    scores = None if kind == "newest" else draw_scores(num_rows, kernel_device)
    segments = torch.arange(num_rows) % 3 if kind == "segmented" else None
    limits = [[2] * (3 if kind == "segmented" else 1)] * len(lengths)
    values = torch.zeros(num_rows) if scores is None else scores.cpu()
    expected, counts = expected_rows(offsets.cpu(), values, limits, None, segments)
    segments = None if segments is None else segments.to(kernel_device)
    sizes = num_rows, len(limits[0]), 2, len(expected)
    new, rows, _ = select(offsets, scores, segments, *sizes)
    assert torch.equal(new.diff().cpu(), counts)
    assert torch.equal(rows.cpu(), expected)
