"""Digits come out of bytes as they went in."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrec_jagged_attn import SemanticIds

CPU = torch.device("cpu")
LEVELS = st.integers(1, 127).map(lambda half: 2 * half + 1)


def draw_digits(num_rows, ids, device=CPU, dtype=torch.int8):
    generator = torch.Generator().manual_seed(0)
    most = ids.largest_digit
    digits = torch.randint(-most, most + 1, (num_rows, ids.num_digits), generator=generator)
    return digits.to(device, dtype)


@given(LEVELS, st.integers(1, 40), st.data())
def test_round_trip(num_levels, num_digits, data):
    ids = SemanticIds(num_digits, num_levels)
    digit = st.integers(-ids.largest_digit, ids.largest_digit)
    row = st.lists(digit, min_size=num_digits, max_size=num_digits)
    digits = torch.tensor(data.draw(st.lists(row, max_size=4)), dtype=torch.int8)
    digits = digits.view(-1, num_digits)
    packed = ids.pack(digits)
    assert packed.shape == (len(digits), ids.num_bytes)
    assert torch.equal(ids.unpack(packed), digits)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("num_levels", [3, 5, 7, 15, 17, 255])
def test_round_trip_on_each_device(num_levels, dtype, device):
    ids = SemanticIds(13, num_levels)
    digits = draw_digits(1000, ids, device, dtype)
    packed = ids.pack(digits)
    assert packed.dtype == torch.uint8
    assert torch.equal(packed.cpu(), ids.pack(digits.cpu()))
    assert torch.equal(ids.unpack(packed), digits.to(torch.int8))


def test_bytes_are_numbers_of_their_digits():
    ids = SemanticIds(10, 5)
    digits = draw_digits(50, ids)
    expected = [
        [
            sum((int(digit) + 2) * 5**place for place, digit in enumerate(row[begin : begin + 3]))
            for begin in range(0, 10, 3)
        ]
        for row in digits
    ]
    assert ids.pack(digits).tolist() == expected


@given(LEVELS)
def test_a_byte_is_full(num_levels):
    count = SemanticIds(1, num_levels).digits_per_byte
    assert num_levels**count <= 256 < num_levels ** (count + 1)


def test_no_row(device):
    ids = SemanticIds(7)
    packed = ids.pack(torch.empty(0, 7, dtype=torch.int8, device=device))
    assert packed.shape == (0, 2)
    assert ids.unpack(packed).shape == (0, 7)


def of_all_strides(x):
    """``x`` with strides of other orders, and ones that no element needs."""
    transposed = torch.empty(x.shape[1], x.shape[0], dtype=x.dtype, device=x.device).T
    wide = x.new_empty(x.shape[0], 3 * x.shape[1])
    return transposed.copy_(x), wide[:, ::3].copy_(x), wide[:, : x.shape[1]].copy_(x), x[::2]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("num_digits", [1, 5, 6, 10, 41])
def test_rows_that_are_not_contiguous(num_digits, dtype, device):
    """With a byte or a word of one column, and with digits that fill their bytes, too."""
    ids = SemanticIds(num_digits)
    digits = draw_digits(40, ids, device, dtype)
    packed = ids.pack(digits)
    words = ids.to_words(packed)
    for method, rows in ((ids.pack, digits), (ids.unpack, packed), (ids.to_words, packed)):
        for other in of_all_strides(rows):
            assert torch.equal(method(other), method(other.contiguous())), method
    for other in of_all_strides(words):
        assert torch.equal(ids.from_words(other), packed if len(other) == 40 else packed[::2])


def test_numbers_of_numpy():
    ids = SemanticIds(np.uint8(200), np.uint8(5))
    assert ids == SemanticIds(200, 5)
    assert (type(ids.num_digits), type(ids.num_levels)) == (int, int)
    with pytest.raises(TypeError, match="num_levels must be an int, got True"):
        SemanticIds(3, True)


def test_compiled_with_changing_lengths(device):
    ids = SemanticIds(12)
    torch.compiler.reset()
    whole = torch.compile(lambda x: ids.unpack(ids.pack(x)), fullgraph=True, backend="eager")
    for num_rows in (3, 50, 1000):
        digits = draw_digits(num_rows, ids, device)
        assert torch.equal(whole(digits), digits)


@pytest.mark.parametrize("num_digits", [1, 40, 41, 83])
def test_words_hold_the_bytes(num_digits, device):
    ids = SemanticIds(num_digits)
    packed = ids.pack(draw_digits(20, ids, device))
    words = ids.to_words(packed)
    assert words.shape == (20, ids.num_words)
    assert torch.equal(ids.from_words(words), packed)
    assert torch.equal(ids.from_words(words.T.contiguous().T), packed)
    first = sum(int(byte) << 8 * at for at, byte in enumerate(packed[0, :8]))
    assert int(words[0, 0]) % 2**64 == first


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0,), ValueError, "num_digits must be at least 1, got 0"),
        ((2.0,), TypeError, r"num_digits must be an int, got 2\.0"),
        ((True,), TypeError, "num_digits must be an int, got True"),
        ((4, 4), ValueError, "num_levels must be odd and 3 to 255, got 4"),
        ((4, 1), ValueError, "num_levels must be odd and 3 to 255, got 1"),
        ((4, 257), ValueError, "num_levels must be odd and 3 to 255, got 257"),
    ],
)
def test_wrong_formats_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        SemanticIds(*arguments)


@pytest.mark.parametrize(
    ("method", "value", "error", "message"),
    [
        ("pack", [[0, 0]], TypeError, "digits must be a tensor, got a list"),
        ("pack", torch.zeros(1, 2), TypeError, "digits must be integers, got torch.float32"),
        ("pack", torch.tensor([[True, True]]), TypeError, "digits must be integers, got"),
        ("pack", torch.tensor([[0]]), ValueError, r"digits must have shape \[N, L\]"),
        ("pack", torch.tensor([[0, 2]]), ValueError, "digits must be -1 to 1, got 0 to 2"),
        ("to_words", torch.tensor([[0]]), TypeError, "packed must be uint8, got torch.int64"),
        (
            "from_words",
            torch.tensor([[0]]).int(),
            TypeError,
            "words must be int64, got torch.int32",
        ),
        ("from_words", torch.tensor([0]), ValueError, r"words must have shape \[N, num_words\] = "),
        ("unpack", torch.tensor([[0]]), TypeError, "packed must be uint8, got torch.int64"),
        ("unpack", torch.zeros(1, 2).byte(), ValueError, r"packed must have shape \[N, num_bytes"),
        ("unpack", torch.tensor([[243]]).byte(), ValueError, "packed must be at most 242, got 243"),
        ("unpack", torch.tensor([[9]]).byte(), ValueError, "at most 8 in the last byte .*, got 9"),
    ],
)
def test_wrong_values_are_named(method, value, error, message):
    with pytest.raises(error, match=message):
        getattr(SemanticIds(2), method)(value)
