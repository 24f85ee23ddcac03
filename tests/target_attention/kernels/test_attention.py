"""The host code of target attention, apart from launches."""

import pytest
import torch

from torchrec_jagged_attn.target_attention.kernels import attention


@pytest.mark.parametrize("num_tables", [1, 2, 31, 32, 33, 100, 5000])
def test_every_table_counts_in_the_sum(num_tables, kernel_device, monkeypatch):
    """Integers, whose sums are exact in any order."""
    monkeypatch.setattr(attention, "SUMMED_COLUMNS", 8)
    generator = torch.Generator().manual_seed(0)
    tables = torch.randint(-9, 10, (num_tables, 5, 2, 3), generator=generator).float()
    tables = tables.to(kernel_device)
    assert torch.equal(attention.sum_of_tables(tables, overlap=False), tables.sum((0, 2)))
