"""Attention over codes equals attention over decoded rows, gradients included."""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter

from tests.cases import offsets_of
from tests.combinations import each_pair
from tests.fixtures import sync_debug_mode
from tests.oracles import target_attention_oracle
from tests.tolerance import assert_matches_oracle
from torchrec_jagged_attn.base.devices import supported_dtypes
from torchrec_jagged_attn.semantic_ids import PackedCodes, jagged_target_attention_over_codes

LENGTHS = [30, 0, 3, 64, 1]


def inputs_of(
    lengths, device="cpu", dtype=torch.float32, *, num_levels=3, num_codes=12, width=16, **others
):
    """Random inputs whose scores have a standard deviation of a few units."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor(lengths, dtype=torch.int64)
    most = num_levels // 2

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(device, dtype)

    shape = (int(lengths.sum()), num_codes)
    codes = torch.randint(-most, most + 1, shape, generator=generator)
    return {
        "query": draw(len(lengths), others.get("num_targets", 3), 2, width),
        "packed": PackedCodes(num_codes, num_levels).pack(codes).to(device),
        "offsets": offsets_of(lengths, torch.int64, device),
        "mean": draw(width),
        "basis": draw(num_codes, width) / (num_codes**0.5 * most),
    }


def assert_right(inputs, num_levels=3, **options):
    def over_unpacked(query, packed, offsets, mean, basis, **others):
        """The reference, whose rows are codes and a constant 1, times basis and mean."""
        codes = PackedCodes(len(basis), num_levels).unpack(packed)
        rows = F.pad(codes.to(mean.dtype), (0, 1), value=1.0)
        matrix = torch.cat([basis, mean.unsqueeze(0)])
        given = {**options, "scale": options.get("scale") or len(mean) ** -0.5}
        return target_attention_oracle(query @ matrix.T, rows, offsets, **others, **given) @ matrix

    def over_codes(**inputs):
        return jagged_target_attention_over_codes(**inputs, num_levels=num_levels, **options)

    assert_matches_oracle(over_codes, over_unpacked, inputs)


@pytest.mark.parametrize(
    ("num_levels", "score", "dtype", "num_targets", "scale"),
    each_pair(
        [3, 5, 255],
        ["softmax", "silu", "sigmoid"],
        [torch.float32, torch.bfloat16, torch.float16],
        [1, 9],
        [None, 0.5],
    ),
    ids=str,
)
def test_decoded_rows(num_levels, score, dtype, num_targets, scale, device):
    if dtype not in supported_dtypes(device):
        pytest.skip(f"{dtype} is not computed on {device}")
    inputs = inputs_of(LENGTHS, device, dtype, num_levels=num_levels, num_targets=num_targets)
    assert_right(inputs, num_levels, score=score, scale=scale)


@pytest.mark.parametrize("num_codes", [1, 5, 40, 100])
def test_more_or_fewer_codes_than_columns(num_codes, device):
    assert_right(inputs_of(LENGTHS, device, num_codes=num_codes, width=24))


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0], [1], [0, 70, 1, 0]], ids=str)
def test_edges(lengths, device):
    assert_right(inputs_of(lengths, device))


def test_autocast_casts_all_operands(device):
    inputs = inputs_of(LENGTHS, device, torch.float32)
    cast = {key: x.half() if x.is_floating_point() else x for key, x in inputs.items()}
    with torch.autocast(device.type, torch.float16):
        out = jagged_target_attention_over_codes(**inputs | {"query": cast["query"]})
    assert torch.equal(out, jagged_target_attention_over_codes(**cast))


def test_biases_and_jagged_queries(device):
    inputs = inputs_of(LENGTHS, device)
    generator = torch.Generator().manual_seed(1)
    inputs["position_bias"] = torch.randn(20, 2, generator=generator).to(device)
    inputs["query"] = torch.randn(9, 2, 16, generator=generator).to(device)
    inputs["query_offsets"] = offsets_of(torch.tensor([2, 3, 0, 4, 0]), torch.int32, device)
    assert_right(inputs)


def test_rows_without_a_weight_give_zeros(device):
    """The mean is multiplied by the sum of the weights, also with prior weights of zero."""
    inputs = inputs_of([3, 0, 2], device)
    inputs["prior_weights"] = torch.tensor([0.0, 0, 0, 1, 2], device=device)
    out = jagged_target_attention_over_codes(**inputs)
    assert not out[:2].any()
    assert out[2].any()
    assert_right(inputs)


def test_compiled_once_for_changing_lengths(device):
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(
        jagged_target_attention_over_codes, backend=counter, fullgraph=True, dynamic=True
    )
    # The first sizes are all different, because equal ones would be treated as one symbol.
    for lengths in ([3, 4, 1, 0, 5], [9, 0, 2, 5], [2, 30, 1, 5, 8, 8]):
        inputs = inputs_of(lengths, device, num_targets=9)
        expected = jagged_target_attention_over_codes(**inputs)
        torch.testing.assert_close(compiled(**inputs), expected, rtol=0, atol=0)
    assert counter.frame_count == 1


@pytest.mark.gpu
def test_never_waits_for_the_device():
    inputs = inputs_of([30, 0, 700], "cuda")
    jagged_target_attention_over_codes(**inputs)
    with sync_debug_mode("error"):
        jagged_target_attention_over_codes(**inputs)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": [1.0]}, TypeError, "query must be a tensor, got a list"),
        ({"mean": torch.zeros(15)}, ValueError, r"mean must have shape \[D\] = \[16\], got \[15\]"),
        ({"basis": torch.zeros(12, 8)}, ValueError, r"basis must have shape \[L, D\]"),
        ({"basis": torch.zeros(12, 16).half()}, TypeError, "basis must be torch.float32 as query"),
        ({"packed": torch.zeros(98, 2).byte()}, ValueError, r"packed must have shape \[N, num_"),
        ({"packed": torch.full((98, 3), 243).byte()}, ValueError, "history must be at most 242"),
        ({"num_levels": 4}, ValueError, "num_levels must be odd and 3 to 255, got 4"),
        ({"offsets": torch.tensor([0, 9])}, ValueError, "query must have shape"),
        ({"score": "relu"}, ValueError, "score must be one of"),
    ],
)
def test_wrong_arguments_are_named(change, error, message):
    with pytest.raises(error, match=message):
        jagged_target_attention_over_codes(**(inputs_of(LENGTHS) | change))
