"""The split schedule: which sample each partial result belongs to."""

import pytest
import torch

from tests.cases import offsets_of
from torchrec_jagged_attn.ops.target_attention.kernels.records import SplitSchedule
from torchrec_jagged_attn.ops.target_attention.kernels.schedule import split_schedule_kernel

CHUNK = 16
BLOCK_B = 4  # fewer than there are samples, so that several programs write the schedule


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
def test_schedule_of_partial_results(lengths, dtype, kernel_device):
    """A sample of CHUNK rows or more has a partial result for each chunk, of up to 2 · CHUNK rows.
    No other partial result has a sample.
    """
    offsets = offsets_of(torch.tensor(lengths), dtype, kernel_device)
    num_partials = sum(lengths) // CHUNK
    buffer = torch.full((2, num_partials + 1), 77, dtype=torch.int32, device=kernel_device)
    entries = buffer.flatten()[: 2 * num_partials].view(2, num_partials)
    split_schedule_kernel[(-(-len(lengths) // BLOCK_B),)](
        SplitSchedule(entries, offsets),
        len(lengths),
        num_partials,
        CHUNK=CHUNK,
        BLOCK_B=BLOCK_B,
        OVERLAP=False,
    )
    expected = [-1] * num_partials
    begin = 0
    for sample, length in enumerate(lengths):
        if length >= CHUNK:
            for partial in range(begin // CHUNK, begin // CHUNK + -(-length // (2 * CHUNK))):
                assert expected[partial] == -1  # of one sample only
                expected[partial] = sample
        begin += length
    assert entries[0].tolist() == expected
    assert not entries[1].any()  # counters of finished chunks
    assert (buffer.flatten()[2 * num_partials :] == 77).all()
