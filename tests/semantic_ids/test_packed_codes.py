"""Packing and unpacking of codes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrec_jagged_attn.semantic_ids import PackedCodes

CPU = torch.device("cpu")
LEVELS = st.integers(1, 127).map(lambda half: 2 * half + 1)


def draw_codes(num_rows, ids, device=CPU, dtype=torch.int8):
    generator = torch.Generator().manual_seed(0)
    most = ids.largest_code
    codes = torch.randint(-most, most + 1, (num_rows, ids.num_codes), generator=generator)
    return codes.to(device, dtype)


@given(LEVELS, st.integers(1, 40), st.data())
def test_round_trip(num_levels, num_codes, data):
    ids = PackedCodes(num_codes, num_levels)
    code = st.integers(-ids.largest_code, ids.largest_code)
    row = st.lists(code, min_size=num_codes, max_size=num_codes)
    codes = torch.tensor(data.draw(st.lists(row, max_size=4)), dtype=torch.int8)
    codes = codes.view(-1, num_codes)
    packed = ids.pack(codes)
    assert packed.shape == (len(codes), ids.num_bytes)
    assert torch.equal(ids.unpack(packed), codes)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("num_levels", [3, 17, 255])
def test_round_trip_on_each_device(num_levels, dtype, device):
    ids = PackedCodes(13, num_levels)
    codes = draw_codes(1000, ids, device, dtype)
    packed = ids.pack(codes)
    assert packed.dtype == torch.uint8
    assert torch.equal(packed.cpu(), ids.pack(codes.cpu()))
    assert torch.equal(ids.unpack(packed), codes.to(torch.int8))


def test_bytes_follow_the_formula():
    ids = PackedCodes(10, 5)
    codes = draw_codes(50, ids)
    expected = [
        [
            sum((int(code) + 2) * 5**place for place, code in enumerate(row[begin : begin + 3]))
            for begin in range(0, 10, 3)
        ]
        for row in codes
    ]
    assert ids.pack(codes).tolist() == expected


@given(LEVELS)
def test_a_byte_is_full(num_levels):
    count = PackedCodes(1, num_levels).codes_per_byte
    assert num_levels**count <= 256 < num_levels ** (count + 1)


def with_all_strides(x):
    """``x`` transposed, with gaps between columns or rows, and every other row of it."""
    transposed = torch.empty(x.shape[1], x.shape[0], dtype=x.dtype, device=x.device).T
    wide = x.new_empty(x.shape[0], 3 * x.shape[1])
    return transposed.copy_(x), wide[:, ::3].copy_(x), wide[:, : x.shape[1]].copy_(x), x[::2]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("num_codes", [1, 5, 6, 10, 41])
def test_noncontiguous_rows(num_codes, dtype, device):
    """Also with a single byte per row, and with codes that fill their bytes."""
    ids = PackedCodes(num_codes)
    codes = draw_codes(40, ids, device, dtype)
    packed = ids.pack(codes)
    for method, rows in ((ids.pack, codes), (ids.unpack, packed), (ids.to_int64, packed)):
        for other in with_all_strides(rows):
            assert torch.equal(method(other), method(other.contiguous())), method


def test_compiled_with_changing_lengths(device):
    ids = PackedCodes(12)
    torch.compiler.reset()
    whole = torch.compile(lambda x: ids.unpack(ids.pack(x)), fullgraph=True, backend="eager")
    for num_rows in (3, 50, 1000):
        codes = draw_codes(num_rows, ids, device)
        assert torch.equal(whole(codes), codes)


@pytest.mark.parametrize("num_codes", [1, 40, 41, 83])
def test_int64_values_hold_the_bytes(num_codes, device):
    ids = PackedCodes(num_codes)
    packed = ids.pack(draw_codes(20, ids, device))
    values = ids.to_int64(packed)
    assert values.shape == (20, ids.num_int64)
    stored = values.view(torch.uint8)
    assert torch.equal(stored[:, : ids.num_bytes], packed)
    assert not stored[:, ids.num_bytes :].any()
    first = sum(int(byte) << 8 * at for at, byte in enumerate(packed[0, :8]))
    assert int(values[0, 0]) % 2**64 == first


@pytest.mark.parametrize(
    ("method", "value", "error", "message"),
    [
        ("pack", [[0, 0]], TypeError, "codes must be a tensor, got a list"),
        ("pack", torch.zeros(1, 2), TypeError, "codes must be integers, got torch.float32"),
        ("pack", torch.tensor([[True, True]]), TypeError, "codes must be integers, got"),
        ("pack", torch.tensor([[0]]), ValueError, r"codes must have shape \[N, L\]"),
        ("pack", torch.tensor([[0, 2]]), ValueError, "codes must be -1 to 1, got 0 to 2"),
        ("to_int64", torch.tensor([[0]]), TypeError, "packed must be uint8, got torch.int64"),
        ("unpack", torch.tensor([[0]]), TypeError, "packed must be uint8, got torch.int64"),
        ("unpack", torch.zeros(1, 2).byte(), ValueError, r"packed must have shape \[N, num_bytes"),
        ("unpack", torch.tensor([[243]]).byte(), ValueError, "packed must be at most 242, got 243"),
        ("unpack", torch.tensor([[9]]).byte(), ValueError, "at most 8 in the last byte .*, got 9"),
    ],
)
def test_wrong_values_are_named(method, value, error, message):
    with pytest.raises(error, match=message):
        getattr(PackedCodes(2), method)(value)
