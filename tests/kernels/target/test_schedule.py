"""How target attention is cut into programs."""

import pytest
import torch

from torchrec_jagged_attn.kernels.common.launch import Launcher
from torchrec_jagged_attn.kernels.target.schedule import list_slots_kernel
from torchrec_jagged_attn.testing import offsets_of

CHUNK = 64
FAR_APART = [0, 63, 64, 65, 1, 900, 0, 127, 128, 129]


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param(FAR_APART, id="far apart"),
        pytest.param(FAR_APART[::-1] * 30, id="many samples"),
        pytest.param([5000], id="one sample"),
        pytest.param([63] * 9, id="none is cut"),
    ],
)
def test_slots_are_those_of_long_samples_in_their_order(lengths, kernel_device):
    """From the chunk on that a sample begins in, one for each two chunks that it has."""
    offsets = offsets_of(torch.tensor(lengths), torch.int64, kernel_device)
    num_slots = sum(lengths) // CHUNK
    slots = torch.full((2, num_slots), -7, dtype=torch.int32, device=kernel_device)
    Launcher(list_slots_kernel)(
        (-(-len(lengths) // 128),),
        (slots, offsets, len(lengths), num_slots),
        {"CHUNK": CHUNK, "BLOCK_B": 128, "OVERLAP": False},
    )
    expected = [-1] * num_slots
    for sample, (first, length) in enumerate(zip(offsets.tolist(), lengths, strict=False)):
        chunks = -(-length // (2 * CHUNK)) if length >= CHUNK else 0
        for chunk in range(chunks):
            assert expected[first // CHUNK + chunk] == -1
            expected[first // CHUNK + chunk] = sample
    assert slots[0].tolist() == expected
    assert not slots[1].any()
