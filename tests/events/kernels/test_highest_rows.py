"""The kernel of ``highest_rows`` with arguments that ``select_events`` does not use."""

import pytest
import torch

from tests.cases import offsets_of
from tests.events.test_rows import draw_scores, expected_rows
from torchrec_jagged_attn.events.kernels import highest_rows as kernels


def select(offsets, scores, segments, keep):
    is_kept = kernels.highest_rows(offsets, scores, segments, keep, -torch.inf)
    return is_kept.nonzero().flatten().cpu()


def test_rows_after_the_last_sample(kernel_device):
    """They are never kept."""
    offsets = torch.tensor([0, 2, 3], device=kernel_device)
    scores = torch.tensor([1.0, 2.0, 3.0, torch.nan, 9.0], device=kernel_device)
    keep = torch.ones(2, 1, dtype=torch.int64, device=kernel_device)
    assert select(offsets, scores, None, keep).tolist() == [1, 2]


def test_budgets_below_zero(kernel_device):
    """No row is kept."""
    offsets = torch.tensor([0, 3, 4], device=kernel_device)
    scores = torch.tensor([torch.inf, 2.0, 2.0, 3.0], device=kernel_device)
    keep = torch.tensor([[-1], [1]], device=kernel_device)
    assert select(offsets, scores, None, keep).tolist() == [3]


@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize("block", [128, 1024, 2048])
def test_samples_around_a_block(block, segmented, kernel_device, monkeypatch):
    """Samples of one block, one row more, and several blocks."""
    for name in ("MIN_BLOCK", "MAX_BLOCK"):
        monkeypatch.setattr(kernels, name, block)
    lengths = torch.tensor([block - 1, block, 0, block + 1, 1, 3 * block + 5])
    offsets = offsets_of(lengths, torch.int32, kernel_device)
    num_rows = int(lengths.sum())
    scores = draw_scores(num_rows, kernel_device)
    generator = torch.Generator().manual_seed(1)
    segments = torch.randint(0, 2, (num_rows,), generator=generator) if segmented else None
    keep = torch.full((len(lengths), 2 if segmented else 1), block // 3)
    expected, _ = expected_rows(offsets.cpu(), scores.cpu(), keep, None, segments)
    segments = None if segments is None else segments.to(kernel_device)
    actual = select(offsets, scores, segments, keep.to(kernel_device))
    assert torch.equal(actual, expected)
