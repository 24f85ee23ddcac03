"""The kernels behind ``select_rows``, where their op does not lead."""

import pytest
import torch

from tests.ops.test_selection import draw_scores, expected_rows
from torchrec_jagged_attn.arguments import ScoredRows
from torchrec_jagged_attn.kernels.selection import rows as kernels
from torchrec_jagged_attn.testing import offsets_of


def select(rows, num_segments, limit, capacity):
    lowest, first, counts = kernels.find_cuts(rows, None, num_segments, limit, -torch.inf)
    new = counts.sum(1).cumsum(0)
    return new, *kernels.place_rows(rows, new, lowest, first, capacity)


def test_rows_behind_the_last_sample(kernel_device):
    """As a selection with room to spare leaves them: they are of nobody, whatever their score."""
    offsets = torch.tensor([0, 2, 3], device=kernel_device)
    scores = torch.tensor([1.0, 2.0, 3.0, torch.nan, 9.0], device=kernel_device)
    new, rows, places = select(ScoredRows(offsets, scores, None, 5), 1, 1, 4)
    assert new.tolist() == [0, 1, 2]
    assert rows.tolist() == [1, 2, -1, -1]
    assert places.tolist() == [-1, 0, 1, -1, -1]


@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize("block", [128, 1024, 2048])
def test_samples_around_a_block(block, segmented, kernel_device, monkeypatch):
    """Whole in a program's hands, one row more, and several times as long."""
    constants = {"BLOCK": block, "num_warps": max(block // 256, 1)}
    monkeypatch.setattr(kernels, "_constants", lambda mean_length: constants)
    lengths = torch.tensor([block - 1, block, 0, block + 1, 1, 3 * block + 5])
    offsets = offsets_of(lengths, torch.int32, kernel_device)
    num_rows = int(lengths.sum())
    scores = draw_scores(num_rows, kernel_device)
    generator = torch.Generator().manual_seed(1)
    segments = torch.randint(0, 2, (num_rows,), generator=generator) if segmented else None
    limits = [[block // 3] * (2 if segmented else 1)] * len(lengths)
    expected, counts = expected_rows(offsets, scores.cpu(), limits, None, segments)
    segments = None if segments is None else segments.to(kernel_device)
    given = ScoredRows(offsets, scores, segments, num_rows)
    new, rows, places = select(given, len(limits[0]), block // 3, num_rows)
    assert torch.equal(new.diff().cpu(), counts)
    assert torch.equal(rows[: len(expected)].cpu(), expected)
    assert (rows[len(expected) :] == -1).all()
    assert torch.equal(places[rows[: len(expected)]], torch.arange(len(expected)).to(rows))
    assert int((places >= 0).sum()) == len(expected)
