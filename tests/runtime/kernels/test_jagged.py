"""Search of samples and tiles of jagged rows on the device."""

import pytest
import torch
import triton
import triton.language as tl

from tests.cases import offsets_of
from torchrec_jagged_attn.runtime.kernels.jagged import find_tile


@triton.jit(do_not_specialize=["num_samples"])  # as the kernels that find tiles
def _find_tiles_kernel(out_ptr, offsets_ptr, num_samples, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    sample, begin, end, start = find_tile(offsets_ptr, num_samples, tile, SCALE, BLOCK)
    tl.store(out_ptr + tile * 4, sample)
    tl.store(out_ptr + tile * 4 + 1, begin)
    tl.store(out_ptr + tile * 4 + 2, end)
    tl.store(out_ptr + tile * 4 + 3, start)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize(("scale", "block"), [(1, 1), (1, 7), (3, 16)])
@pytest.mark.parametrize(
    "lengths",
    [[5, 0, 16, 17, 0, 0, 1, 40, 0], [0, 0], [33], [1] * 70, [0, 0, 100, 2]],
    ids=lambda lengths: f"{len(lengths)} samples",
)
def test_tiles_cover_each_row_once(lengths, scale, block, dtype, kernel_device):
    offsets = offsets_of(torch.tensor(lengths), dtype, kernel_device)
    num_rows, num_samples = sum(lengths) * scale, len(lengths)
    tiles = torch.full((num_rows // block + num_samples, 4), -1, device=kernel_device)
    _find_tiles_kernel[(tiles.shape[0],)](tiles, offsets, num_samples, SCALE=scale, BLOCK=block)
    bounds = (offsets * scale).tolist()
    covered, idle = [], 0
    for sample, begin, end, start in tiles.tolist():
        assert [begin, end] == bounds[sample : sample + 2]
        covered += range(begin + start, min(begin + start + block, end))
        idle += begin + start >= end
    assert covered == list(range(num_rows))
    assert idle <= num_samples
