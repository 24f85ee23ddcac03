"""The list of splits: which sample each belongs to."""

import pytest
import torch

from tests.cases import offsets_of
from torchrec_jagged_attn.target_attention.kernels.records import SplitList
from torchrec_jagged_attn.target_attention.kernels.schedule import list_splits_kernel

CHUNK = 16
BLOCK_B = 4  # fewer than there are samples, so that several programs list them


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize(
    "lengths",
    [
        [0, 15, 16, 17, 31, 32, 33, 0, 64, 1],
        [5, 300, 2],
        [300],
        [16] * 9,
        [0, 0, 40, 0, 0],
        [7] * 5,
    ],
    ids=str,
)
def test_splits_are_listed(lengths, dtype, kernel_device):
    """A sample of CHUNK rows or more has a split for each chunk, of up to 2 · CHUNK rows; no other
    split has a sample.
    """
    offsets = offsets_of(torch.tensor(lengths), dtype, kernel_device)
    num_splits = sum(lengths) // CHUNK
    splits = torch.full((2, num_splits + 1), 77, dtype=torch.int32, device=kernel_device)
    listed = splits.flatten()[: 2 * num_splits].view(2, num_splits)
    list_splits_kernel[(-(-len(lengths) // BLOCK_B),)](
        SplitList(listed, offsets),
        len(lengths),
        num_splits,
        CHUNK=CHUNK,
        BLOCK_B=BLOCK_B,
        OVERLAP=False,
    )
    expected = [-1] * num_splits
    begin = 0
    for sample, length in enumerate(lengths):
        if length >= CHUNK:
            for split in range(begin // CHUNK, begin // CHUNK + -(-length // (2 * CHUNK))):
                assert expected[split] == -1  # of one sample only
                expected[split] = sample
        begin += length
    assert listed[0].tolist() == expected
    assert not listed[1].any()  # counters of finished chunks
    assert (splits.flatten()[2 * num_splits :] == 77).all()
