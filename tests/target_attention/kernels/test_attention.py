"""The host code of target attention, apart from launches."""

import pytest
import torch

from torchrec_jagged_attn.ops.target_attention.kernels import attention


@pytest.mark.parametrize("num_tables", [1, 2, 31, 32, 33, 100, 5000])
def test_every_table_counts_in_the_sum(num_tables, kernel_device, monkeypatch):
    """Integers, whose sums are exact in any order."""
    monkeypatch.setattr(attention, "SUMMED_COLUMNS", 8)
    generator = torch.Generator().manual_seed(0)
    tables = torch.randint(-9, 10, (num_tables, 5, 2, 3), generator=generator).float()
    tables = tables.to(kernel_device)
    assert torch.equal(attention.sum_of_tables(tables, overlap=False), tables.sum((0, 2)))


def test_the_sum_does_not_depend_on_unused_partial_results(kernel_device):
    """300 samples, in a buffer with more rows; partial results follow the first 70."""
    torch.manual_seed(0)
    samples, partials = torch.randn(300, 5, 1, 3), torch.randn(150, 5, 1, 3)
    sums = []
    for unused in (0, 1, 700):
        parts = samples[:70], partials, partials.new_zeros(unused, 5, 1, 3), samples[70:]
        tables = torch.cat(parts).to(kernel_device)
        sums.append(attention.sum_of_tables(tables, False, 70, 150 + unused))
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])
    torch.testing.assert_close(sums[0].cpu(), samples.sum((0, 2)) + partials.sum((0, 2)))
