import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrec_jagged_attn.base.layout import check_order, is_behind
from torchrec_jagged_attn.ops import JaggedLayout

LENGTHS = st.lists(st.integers(0, 40), max_size=12).map(
    lambda lengths: torch.tensor(lengths, dtype=torch.int64)
)


@given(LENGTHS)
def test_rows_are_numbered_sample_by_sample(lengths):
    layout = JaggedLayout.from_lengths(lengths)
    samples = [b for b, length in enumerate(lengths.tolist()) for _ in range(length)]
    from_end = [i for length in lengths.tolist() for i in reversed(range(length))]
    assert layout.num_rows == int(lengths.sum())
    assert layout.lengths.tolist() == lengths.tolist()
    assert layout.sample_ids().tolist() == samples
    assert layout.positions_from_end().tolist() == from_end


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_from_lengths_makes_int64_offsets(dtype):
    layout = JaggedLayout.from_lengths(torch.tensor([1, 2], dtype=dtype), num_rows=3)
    assert layout.offsets.dtype == torch.int64
    layout.validate()


def test_from_lengths_adds_up_beyond_int32():
    layout = JaggedLayout.from_lengths(torch.tensor([2**30, 2**30, 2**30], dtype=torch.int32))
    assert layout.offsets.tolist() == [0, 2**30, 2**31, 3 * 2**30]
    assert layout.num_rows == 3 * 2**30


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, 3], "history_offsets must start at 0, got 1"),
        ([0, 2], "history_offsets must end at the 3 rows they divide, got 2"),
        ([0, 2, 1, 3], "history_offsets must never decrease, got 2 then 1 at position 2"),
    ],
)
def test_validate_errors(offsets, message):
    with pytest.raises(ValueError, match=message):
        JaggedLayout(torch.tensor(offsets), 3).validate("history_offsets")


def test_offsets_may_end_before_the_rows():
    JaggedLayout(torch.tensor([0, 2]), 3).validate(exact=False)
    with pytest.raises(ValueError, match="offsets must end at or before the 3 rows they divide"):
        JaggedLayout(torch.tensor([0, 4]), 3).validate(exact=False)
    assert is_behind(torch.tensor([0, 2]), 4).tolist() == [False, False, True, True]
    check_order(torch.tensor([1, 2, 0]), torch.tensor([0, 2]))


def test_metadata_is_checked():
    with pytest.raises(TypeError, match=r"offsets must be int32 or int64, got torch\.float32"):
        JaggedLayout(torch.zeros(2), 0)
    with pytest.raises(ValueError, match=r"offsets must have shape \[B \+ 1\], got \[0\]"):
        JaggedLayout(torch.zeros(0, dtype=torch.int64), 0)
