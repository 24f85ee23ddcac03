"""The list of a batch's tiles."""

import pytest
import torch

from tests.cases import offsets_of
from torchrec_jagged_attn.ops.device import tile_list
from torchrec_jagged_attn.ops.device.tile_list import list_tiles, max_tiles


@pytest.mark.parametrize("is_self", [True, False], ids=["self", "cross"])
@pytest.mark.parametrize("short", [0, 32, 64], ids=str)
@pytest.mark.parametrize(("rows_per_group", "scan"), [(0, 256), (1024, 256), (1024, 2048)], ids=str)
def test_tiles_are_listed_the_longest_first(
    rows_per_group, scan, short, is_self, kernel_device, monkeypatch
):
    monkeypatch.setattr(tile_list, "SCAN", scan)
    monkeypatch.setattr(tile_list, "CLASSES", 16)
    generator = torch.Generator().manual_seed(0)
    tiled, other = torch.randint(0, 70, (2, 600), generator=generator)  # more than a program scans
    tiled[7], other[300] = 700, 3000
    other = tiled if is_self else other
    offsets = [offsets_of(lengths, torch.int64, kernel_device) for lengths in (tiled, other)]
    rows = int(tiled.sum()), 0 if is_self else int(other.sum())
    capacity = max_tiles(*rows, 600, short, 64)
    tiles = list_tiles(*offsets, capacity, short, 64, rows_per_group).cpu()
    begins = [x[:-1].tolist() for x in offsets]
    expected = {
        (b, begins[0][b] + start, n - start, begins[1][b], m)
        for b, (n, m) in enumerate(zip(tiled.tolist(), other.tolist(), strict=True))
        for start in range(0, n if max(n, m) > short else 0, 64)
    }
    listed = tiles[1 : 1 + int(tiles[0, 0])].tolist()
    assert int(tiles[0, 0]) == len(expected) <= capacity
    assert set(map(tuple, listed)) == expected
    assert sorted(listed, key=lambda tile: tile[0]) == sorted(listed)  # a sample's in their order
    octaves = [max(tile[-1].bit_length(), 1) for tile in listed]
    assert octaves == sorted(octaves, reverse=True)
