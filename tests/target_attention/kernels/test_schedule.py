"""How histories are cut into chunks, and which slot has which."""

import pytest
import torch

from tests.cases import offsets_of
from torchrec_jagged_attn.target_attention.kernels.records import SlotList
from torchrec_jagged_attn.target_attention.kernels.schedule import list_slots_kernel

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
def test_slots_are_listed(lengths, dtype, kernel_device):
    """A sample of CHUNK rows or more has a slot for each chunk, of up to 2 · CHUNK rows; no other
    slot has a sample.
    """
    offsets = offsets_of(torch.tensor(lengths), dtype, kernel_device)
    num_slots = sum(lengths) // CHUNK
    slots = torch.full((2, num_slots + 1), 77, dtype=torch.int32, device=kernel_device)
    listed = slots.flatten()[: 2 * num_slots].view(2, num_slots)
    list_slots_kernel[(-(-len(lengths) // BLOCK_B),)](
        SlotList(listed, offsets),
        len(lengths),
        num_slots,
        CHUNK=CHUNK,
        BLOCK_B=BLOCK_B,
        OVERLAP=False,
    )
    expected = [-1] * num_slots
    begin = 0
    for sample, length in enumerate(lengths):
        if length >= CHUNK:
            for slot in range(begin // CHUNK, begin // CHUNK + -(-length // (2 * CHUNK))):
                assert expected[slot] == -1  # of one sample only
                expected[slot] = sample
        begin += length
    assert listed[0].tolist() == expected
    assert not listed[1].any()  # counters of chunks that have ended
    assert (slots.flatten()[2 * num_slots :] == 77).all()
