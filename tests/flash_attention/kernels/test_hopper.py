"""The Hopper kernels of flash attention, in numpy and on a GPU, and calls that others serve."""

from functools import partial

import pytest
import torch

from tests.combinations import each_pair
from tests.flash_attention.test_flash_attention import (
    assert_right,
    assert_rows_behind_never_matter_to,
    assert_tiles_beyond_a_window_are_not_read,
    inputs_of,
)
from tests.samples import assert_other_samples_never_matter
from tests.tolerance import outputs_and_gradients
from torchrec_jagged_attn import jagged_flash_attention
from torchrec_jagged_attn.ops.attention.arguments import Biases
from torchrec_jagged_attn.ops.flash_attention.arguments import FlashArguments
from torchrec_jagged_attn.ops.flash_attention.kernels import attention as flash_attention

SHORT_FIRST = ["hopper_short"] * 2  # of two sizes of samples


@pytest.mark.parametrize("width", [32, 48, 64, 128])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_kernels_for_hopper(causal, width, hopper):
    device, launched = hopper
    lengths = [257, 33, 0, 65, 1, 17, 64]
    for kv_lengths in (lengths, lengths[::-1]):
        inputs = inputs_of(lengths, kv_lengths, device, torch.float16, width=width)
        assert_right(inputs, causal)
    short = SHORT_FIRST if width in (48, 64) else []
    expected = [*short, "hopper_forward", *short, "hopper_backward"] * 2
    assert launched in (expected, None)


@pytest.mark.parametrize(
    ("window", "width", "more_keys"),
    each_pair([1, 65, 128, 2**40], [48, 64, 128], [0, 90, -30]),
    ids=str,
)
def test_windows_on_hopper(window, width, more_keys, hopper):
    device, launched = hopper
    lengths = [330 if launched is None else 200, 33, 0, 65, 1, 17, 64]
    kv_lengths = [max(length + more_keys, 0) for length in lengths]
    inputs = inputs_of(lengths, kv_lengths, device, torch.float16, width=width)
    assert_right(inputs, True, window=window)
    short = SHORT_FIRST if width <= 64 else []
    assert launched in ([*short, "hopper_forward", *short, "hopper_backward"], None)


@pytest.mark.parametrize("width", [64, 128])
def test_tiles_beyond_a_window_are_not_read_on_hopper(width, hopper):
    device, launched = hopper
    length = [700 if launched is None else 420]
    inputs = inputs_of(length, length, device, torch.float16, width=width)
    assert_tiles_beyond_a_window_are_not_read(inputs, 38)


@pytest.mark.parametrize(("window", "width"), [(1, 64), (50, 128), (150, 64)], ids=str)
def test_windows_and_distances_on_hopper(window, width, hopper):
    device, launched = hopper
    lengths = [300, 0, 70, 64, 1, 5], [330, 3, 33, 200, 0, 1]
    inputs = inputs_of(*lengths, device, torch.float16, width=width, kv_heads=2)
    inputs["relative_bias"] = torch.linspace(-2, 2, 40, device=device).view(20, 2)
    assert_right(inputs, True, window=window)
    assert launched in (["hopper_forward", "hopper_backward"], None)


@pytest.mark.usefixtures("nan_filled_memory")
@pytest.mark.parametrize(
    ("options", "width", "is_self", "num_behind"),
    [
        ({}, 64, False, (1, 0)),
        ({"causal": True}, 64, True, (0, 70)),
        ({"causal": True, "window": 50}, 128, False, (70, 130)),
        ({"by_distance": True}, 128, True, (0, 1)),
    ],
    ids=str,
)
def test_rows_behind_the_last_offset_on_hopper(options, width, is_self, num_behind, hopper):
    device, launched = hopper
    lengths = [130, 0, 65, 1], [140, 3, 0, 5]
    inputs = inputs_of(lengths[0], lengths[0 if is_self else 1], device, torch.float16, width=width)
    if is_self:
        del inputs["kv_offsets"]
    options = dict(options)
    if options.pop("by_distance", False):
        inputs["relative_bias"] = torch.linspace(-2, 2, 40, device=device).view(20, 2)
    assert_rows_behind_never_matter_to(inputs, *num_behind, **options)
    expected = {"hopper_forward", "hopper_backward"}
    if width == 64 and "relative_bias" not in inputs:
        expected.add("hopper_short")
    assert launched is None or set(launched) == expected


SHORT = [0, 5, 64, 16, 1, 0, 33, 17, 63, 15, 0, 32, 31, 65, 2]


@pytest.mark.parametrize(
    ("mask", "kv_heads", "width", "kv_lengths"),
    each_pair(
        [(False, None), *((True, window) for window in (None, 1, 7, 33))],
        [1, 2],
        [48, 64],
        [SHORT, SHORT[::-1], [17] * 15, [0, 40, 3] * 5],
    ),
    ids=str,
)
def test_short_samples_on_hopper(mask, kv_heads, width, kv_lengths, hopper):
    device, _ = hopper
    causal, window = mask
    inputs = inputs_of(SHORT, kv_lengths, device, torch.float16, width=width, kv_heads=kv_heads)
    assert_right(inputs, causal, window=window)


@pytest.mark.usefixtures("nan_filled_memory")
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_other_samples_never_matter_to_short_ones(causal, kv_heads, hopper):
    device, _ = hopper
    queries, keys = [20, 64, 0, 3, 40, 16, 31, 90], [7, 64, 2, 16, 5, 0, 32, 1]
    inputs = inputs_of(queries, keys, device, torch.float16, width=64, kv_heads=kv_heads)
    lengths = dict.fromkeys(("q", "out", "q_offsets"), queries)
    lengths |= dict.fromkeys(("k", "v", "kv_offsets"), keys)
    attend = partial(jagged_flash_attention, causal=causal)
    grad_out = torch.randn_like(inputs["q"][..., :32])
    assert_other_samples_never_matter(attend, inputs, grad_out, lengths)


@pytest.mark.usefixtures("nan_filled_memory")
@pytest.mark.parametrize("kv_lengths", [[0, 3, 0], [0, 3, 80]], ids=str)
def test_long_samples_without_keys_on_hopper(kv_lengths, hopper):
    device, _ = hopper
    inputs = inputs_of([70, 3, 0], kv_lengths, device, torch.float16, width=64)
    grad_out = torch.randn_like(inputs["q"][..., :32])
    results = outputs_and_gradients(jagged_flash_attention, inputs, grad_out)
    assert all(torch.isfinite(value).all() for value in results.values())
    assert torch.all(results["q"][:70] == 0)
    assert torch.all(results["k"][3:] == 0)
    assert torch.all(results["v"][3:] == 0)


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("width", [32, 64], ids=["triton", "gluon"])
def test_infinities_of_a_side_without_the_other(width, kv_heads, hopper):
    """Without pairs, gradients are zero."""
    device, _ = hopper
    inputs = inputs_of(
        [3, 40, 0, 20, 0], [20, 0, 50, 0, 9], device, torch.float16, width=width, kv_heads=kv_heads
    )
    inputs["q"][10] = torch.inf
    inputs["k"][30], inputs["v"][40], inputs["v"][72] = torch.inf, torch.nan, torch.inf
    grad_out = torch.randn_like(inputs["q"][..., : width // 2])
    grad_out[50, 0] = torch.inf
    results = outputs_and_gradients(jagged_flash_attention, inputs, grad_out)
    assert torch.all(results["q"][3:] == 0)
    assert torch.all(results["k"][20:] == 0)
    assert torch.all(results["v"][20:] == 0)


@pytest.mark.parametrize("width", [64, 128])
def test_gradients_in_halves_of_one_tensor(width, hopper):
    device, _ = hopper
    inputs = inputs_of([3, 40, 70], [20, 64, 5], device, torch.float16, width=width)
    args = FlashArguments(
        *(inputs[name] for name in ("q", "k", "v", "q_offsets", "kv_offsets")), Biases(),
        bias=None, relative_bias=None, causal=False, window=0, scale=0.2, needs_stats=True,
    )  # fmt: skip
    outputs = flash_attention.forward(args)

    def differentiate(grad_k, grad_v):
        grad_out = torch.ones_like(outputs.out)
        grads = flash_attention.backward(grad_out, args, outputs, grad_k, grad_v)
        return grads.q, grad_k, grad_v

    halves = inputs["k"].new_empty(89, 1, 2 * width)
    packed_grads = differentiate(halves[..., :width], halves[..., width : 3 * width // 2])
    separate_grads = differentiate(torch.empty_like(inputs["k"]), torch.empty_like(inputs["v"]))
    assert all(map(torch.equal, packed_grads, separate_grads))


@pytest.mark.parametrize(("width", "scale"), [(40, 0.2), (64, -0.2)], ids=str)
def test_unsupported_on_hopper(width, scale, hopper):
    device, launched = hopper
    inputs = inputs_of([3, 40, 70], [3, 40, 70], device, torch.float16, width=width)
    assert_right(inputs, scale=scale)
    assert launched in ([], None)


def test_heads_packed_with_keys_and_values(hopper):
    device, launched = hopper
    packed = torch.randn(280, 3, 2, 64, device=device, dtype=torch.float16)
    offsets = torch.tensor([0, 70, 90, 130, 260, 280], device=device)
    separate = dict(zip("qkv", packed.transpose(0, 1).contiguous(), strict=True))
    expected = outputs_and_gradients(
        partial(jagged_flash_attention, q_offsets=offsets), separate, separate["q"]
    )
    packed_views = dict(zip("qkv", packed.unbind(1), strict=True))
    results = outputs_and_gradients(
        partial(jagged_flash_attention, q_offsets=offsets), packed_views, separate["q"]
    )
    assert all(torch.equal(results[name], value) for name, value in expected.items())
    num_launched = len(launched or ())
    unaligned = torch.empty(280 * 128 + 1, device=device, dtype=torch.float16)[1:]
    unaligned = unaligned.view(280, 2, 64).copy_(packed_views["q"])
    assert_right(packed_views | {"q": unaligned, "q_offsets": offsets})
    assert len(launched or ()) == num_launched


@pytest.mark.parametrize(
    ("width", "causal", "kv_heads", "is_self"),
    each_pair([32, 64, 128], [False, True], [1, 2], [True, False]),
    ids=str,
)
def test_relative_bias_on_hopper(width, causal, kv_heads, is_self, hopper):
    device, launched = hopper
    lengths = [140, 0, 70, 64, 1, 5]
    kv_lengths = lengths if is_self else [150, 3, 33, 200, 0, 1]
    inputs = inputs_of(lengths, kv_lengths, device, torch.float16, width=width, kv_heads=kv_heads)
    table = torch.linspace(-2, 2, 40, device=device).view(20, 2)
    if is_self:  # each query sees itself
        table[12:] = -torch.inf
    assert_right(inputs | {"relative_bias": table}, causal)
    assert launched in (["hopper_forward", "hopper_backward"], None)


@pytest.mark.parametrize(
    ("width", "causal", "value"), [(64, False, torch.nan), (128, True, torch.inf)], ids=str
)
def test_distances_of_padding_alone_do_not_matter(width, causal, value, hopper):
    device, launched = hopper
    inputs = inputs_of([70], [70], device, torch.float16, width=width)
    inputs["relative_bias"] = torch.linspace(-2, 2, 80, device=device).view(40, 2)
    attend = partial(jagged_flash_attention, causal=causal)
    grad_out = torch.randn_like(inputs["q"][..., : width // 2])
    expected = outputs_and_gradients(attend, inputs, grad_out)
    inputs["relative_bias"] = inputs["relative_bias"].clone()
    inputs["relative_bias"][25:] = value  # distances from 75 on, which a tile of 128 has
    results = outputs_and_gradients(attend, inputs, grad_out)
    for name, expected_value in expected.items():
        assert torch.equal(results[name], expected_value), name
    assert launched in (["hopper_forward", "hopper_backward"] * 2, None)
