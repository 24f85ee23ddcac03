"""``jagged_target_attention`` over rows that are packed in codes."""

import functools

import pytest
import torch
import torch.nn.functional as F

from tests.cases import offsets_of
from tests.combinations import each_pair
from tests.fixtures import opcheck
from tests.oracles import target_attention_oracle
from tests.samples import assert_rows_behind_never_matter
from tests.target_attention.test_target_attention import arguments_of
from tests.tolerance import assert_matches_oracle, outputs_and_gradients
from torchrec_jagged_attn import jagged_target_attention
from torchrec_jagged_attn.base.devices import supported_dtypes
from torchrec_jagged_attn.ops.registration import flatten
from torchrec_jagged_attn.semantic_ids import PackedCodes

CPU = torch.device("cpu")
LENGTHS = [70, 0, 3, 1200, 1]


def inputs_of_codes(
    lengths, dtype, num_levels=3, num_codes=25, num_heads=2, row_bytes=None, *, num_targets=1,
    biased=True, device=CPU,
):  # fmt: skip
    """Random inputs, of packed rows that are ``row_bytes`` apart."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor(lengths, dtype=torch.int64)
    num_rows, ids = int(lengths.sum()), PackedCodes(num_codes, num_levels)

    def draw(*shape, factor=1.0):
        return (factor * torch.randn(shape, generator=generator)).to(device, dtype)

    codes = torch.randint(-ids.largest_code, ids.largest_code + 1, (num_rows, num_codes),
                           generator=generator)  # fmt: skip
    memory = torch.full((num_rows, row_bytes or ids.num_bytes), 255, dtype=torch.uint8)
    memory[:, : ids.num_bytes] = ids.pack(codes)
    factor = 1 / ids.largest_code
    inputs = {
        "query": draw(len(lengths), num_targets, num_heads, num_codes + 1, factor=factor),
        "history": memory.to(device)[:, : ids.num_bytes],
        "offsets": offsets_of(lengths, torch.int64, device),
    }
    if biased:
        inputs["position_bias"] = draw(20, num_heads)
        inputs["age_bias"] = draw(9, num_heads)
        inputs["prior_weights"] = draw(num_rows).abs()
        times = (14 * torch.rand(num_rows, generator=generator)).exp().long()
        inputs["timestamps"] = times.to(device)
    return inputs


def assert_codes_behind_never_matter(inputs):
    attend = functools.partial(jagged_target_attention, num_levels=3)
    behind = dict.fromkeys(("history", "prior_weights", "timestamps"), 700)
    grad_out = torch.ones_like(inputs["query"])
    assert_rows_behind_never_matter(attend, inputs, grad_out, behind)


def over_rows(attend, num_levels, **options):
    """``attend`` over the codes and ones as rows."""

    def call(query, history, offsets, **others):
        codes = PackedCodes(query.shape[-1] - 1, num_levels).unpack(history)
        rows = F.pad(codes.to(query.dtype), (0, 1), value=1.0)
        return attend(query, rows, offsets, **others, **options)

    return call


def assert_right_over_codes(inputs, num_levels=3, **options):
    assert_matches_oracle(
        functools.partial(jagged_target_attention, num_levels=num_levels, **options),
        over_rows(target_attention_oracle, num_levels, **options),
        inputs,
    )


@pytest.mark.usefixtures("nan_filled_memory")
@pytest.mark.parametrize("num_targets", [1, 9, 40])
def test_rows_behind_the_last_offset(num_targets, device):
    inputs = inputs_of_codes(LENGTHS, torch.float32, num_targets=num_targets, device=device)
    assert_codes_behind_never_matter(inputs)


@pytest.mark.parametrize(
    ("num_levels", "num_codes", "score", "dtype", "num_heads", "num_targets", "biased"),
    each_pair(
        [3, 5, 255],
        [1, 25, 130],
        ["softmax", "silu", "sigmoid"],
        [torch.float32, torch.bfloat16, torch.float16],
        [1, 4],
        [1, 9],
        [False, True],
    ),
    ids=str,
)
def test_codes_as_rows(num_levels, num_codes, score, dtype, num_heads, num_targets, biased, device):
    if dtype not in supported_dtypes(device):
        pytest.skip(f"{dtype} is not computed on {device}")
    inputs = inputs_of_codes(
        LENGTHS, dtype, num_levels, num_codes, num_heads,
        num_targets=num_targets, biased=biased, device=device,
    )  # fmt: skip
    if score != "softmax":
        inputs.pop("prior_weights", None)
    assert_right_over_codes(inputs, num_levels, score=score)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [1], [0, 2100, 1, 0]], ids=str)
def test_edges(lengths, device):
    assert_right_over_codes(inputs_of_codes(lengths, torch.float32, device=device))


def test_every_byte(device):
    """Codes of all possible bytes: each head attends to one row of a sample."""
    num_heads = 8 if device.type == "cuda" else 32
    # Ages of 2^n - 1, in bucket 4n
    age_bias = torch.full((4 * num_heads, num_heads), -1e4, device=device)
    age_bias[::4].fill_diagonal_(0)
    for num_levels in range(3, 256, 2):
        width = PackedCodes(1, num_levels).codes_per_byte
        ids, count = PackedCodes(width, num_levels), num_levels**width
        rows = torch.arange(count, device=device)
        packed = rows.byte().unsqueeze(1)
        offsets = torch.arange(0, count + num_heads, num_heads, device=device).clamp(max=count)
        out = jagged_target_attention(
            torch.zeros(len(offsets) - 1, num_heads, width + 1, device=device), packed, offsets,
            age_bias=age_bias, timestamps=1 - 2 ** (rows % num_heads),
            request_time=torch.zeros(len(offsets) - 1, dtype=torch.int64, device=device),
            num_levels=num_levels,
        )  # fmt: skip
        codes = ids.unpack(packed)
        assert torch.equal(out.flatten(0, 1)[:count], F.pad(codes.float(), (0, 1), value=1.0))
        assert torch.equal(ids.pack(codes), packed)


def assert_indexed_equals_gathered(num_targets, device=CPU):
    inputs = inputs_of_codes(LENGTHS, torch.float32, num_targets=num_targets, device=device)
    table = inputs_of_codes([50], torch.float32, row_bytes=8, device=device)["history"]
    generator = torch.Generator().manual_seed(1)
    indices = torch.randint(50, (sum(LENGTHS),), generator=generator).to(device)
    grad_out = torch.ones_like(inputs["query"])

    def run(**others):
        call = functools.partial(jagged_target_attention, num_levels=3)
        return outputs_and_gradients(call, inputs | others, grad_out)

    by_index, copied = run(history=table, indices=indices), run(history=table[indices])
    assert by_index.keys() == copied.keys()
    for name, value in by_index.items():
        assert torch.equal(value, copied[name]), name


@pytest.mark.parametrize("num_targets", [1, 9])
def test_rows_by_index(num_targets, device):
    assert_indexed_equals_gathered(num_targets, device)


def test_opcheck(device):
    inputs = inputs_of_codes([3, 0, 5], torch.float32, device=device)
    del inputs["prior_weights"]
    for name in ("query", "position_bias", "age_bias"):
        inputs[name].requires_grad_()
    history = inputs["history"].contiguous()
    arguments = flatten(arguments_of(inputs, history=history, num_levels=3))
    opcheck(torch.ops.torchrec_jagged_attn.target_attention.default, arguments)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_levels": 4}, ValueError, "num_levels must be odd and 3 to 255, got 4"),
        ({"num_levels": True}, TypeError, "num_levels must be an int, got True"),
        ({"history": torch.zeros(8, 5)}, TypeError, "history must be uint8, got torch.float32"),
        (
            {"history": torch.zeros(8, 4).byte()},
            ValueError,
            r"history must have shape \[N, num_bytes\] = \[any, 5\], got \[8, 4\]",
        ),
        (
            {"history": torch.full((8, 5), 243).byte()},
            ValueError,
            "history must be at most 242, got 243",
        ),
        (
            {"query": torch.zeros(3, 1, 23), "history": torch.full((8, 5), 9).byte()},
            ValueError,
            "history must be at most 8 in the last byte of a row, got 9",
        ),
        ({"num_levels": None}, ValueError, "num_levels must be given for history of torch.uint8"),
        ({"query": torch.zeros(3, 1, 1)}, ValueError, "query must have a width of at least 2"),
    ],
)
def test_wrong_arguments_are_named(change, error, message):
    inputs = inputs_of_codes([3, 0, 5], torch.float32, biased=False) | {"num_levels": 3} | change
    if inputs["num_levels"] is None:
        inputs["query"] = inputs["query"][..., :5]
    with pytest.raises(error, match=message):
        jagged_target_attention(**inputs)
