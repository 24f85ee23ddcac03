"""The bias by distance and its gradient."""

import pytest
import torch

from torchrec_jagged_attn.ops.flash_attention.kernels.distance_bias import bias_by_distance


def test_relative_bias_of_more_rows_than_its_list_counts():
    rows = 2**30 - 128
    message = f"at most {rows - 1} rows with relative_bias, got {rows}"
    with pytest.raises(NotImplementedError, match=message):
        bias_by_distance(torch.zeros(3, 2), rows)
