"""``JaggedTargetAttention`` with gather indices, against a copy of the gathered rows."""

import functools

import pytest
import torch
from torchrec import JaggedTensor

from tests.combinations import each_pair
from tests.fixtures import sync_debug_mode
from tests.modules.target_attention_inputs import (
    OPTIONS,
    attend,
    attend_by_sample,
    draw_prior_weights,
    make_inputs,
    make_module,
)
from tests.samples import assert_rows_behind_never_matter
from tests.tolerance import assert_matches_oracle, outputs_and_gradients

CPU = torch.device("cpu")
LENGTHS = [70, 0, 3, 33, 1]
NUM_ROWS = 20
NAMED = torch.arange(NUM_ROWS)[torch.arange(NUM_ROWS) % 3 < 2]  # the others are NaN
NAMES = [name for name in OPTIONS if "half" not in name]


def by_index(module, device=CPU, dtype=torch.float32, lengths=LENGTHS, **options):
    """Random inputs of :func:`attend`, over NUM_ROWS rows."""
    inputs = make_inputs(module, lengths, device, dtype, **options)
    generator = torch.Generator().manual_seed(2)
    rows = torch.full((NUM_ROWS, module.history_dim), torch.nan)
    rows[NAMED] = torch.randn(len(NAMED), module.history_dim, generator=generator)
    drawn = torch.randint(len(NAMED), (sum(lengths),), generator=generator)
    indices = NAMED[drawn].to(device, options.get("index_dtype"))
    return inputs | {"history": rows.to(device, dtype), "indices": indices}


def attend_copies(module, *, history, indices, **inputs):
    """Attend to a copy of the rows, one sample at a time."""
    return attend_by_sample(module, history=history.index_select(0, indices), **inputs)


def assert_right(module, inputs, **times):
    functions = (
        functools.partial(function, module, **times) for function in (attend, attend_copies)
    )
    assert_matches_oracle(*functions, inputs)


def ages_of(module, device=CPU):
    """Timestamps for a module with an age bias."""
    learns = module.recency_bias is not None and module.recency_bias.age_weight is not None
    return {"timestamps": torch.arange(sum(LENGTHS), device=device) ** 2} if learns else {}


@pytest.mark.parametrize(
    ("name", "targets", "dtype", "index_dtype", "prior"),
    each_pair(
        NAMES,
        [None, 3, (0, 3, 1, 9, 2)],
        [torch.float32, torch.float16],
        [torch.int32, torch.int64],
        [False, True],
    ),
    ids=str,
)
def test_right(name, targets, dtype, index_dtype, prior, device):
    module = make_module(32, 2, device="meta", **OPTIONS[name])
    inputs = by_index(module, device, dtype, targets=targets, index_dtype=index_dtype)
    if prior:
        inputs["prior_weights"] = draw_prior_weights(LENGTHS, device, dtype)
    assert_right(module, inputs, **ages_of(module, device))


@pytest.mark.parametrize("name", ["default", "materialized-rows"])
@pytest.mark.parametrize("num_rows", [0, 4])
@pytest.mark.parametrize("lengths", [[], [0], [0, 0]], ids=str)
def test_empty_histories(lengths, num_rows, name, device):
    module = make_module(32, 2, device="meta", **OPTIONS[name])
    inputs = by_index(module, device, lengths=lengths)
    inputs["history"] = inputs["history"][:num_rows]
    results = outputs_and_gradients(
        functools.partial(attend, module), inputs, torch.ones(len(lengths), 32, device=device)
    )
    assert torch.all(results["out"] == 0)
    assert torch.all(results["history"] == 0)


def test_repeated_row(device):
    """Its gradient is a sum of too many terms for accumulation in 16 bits."""
    module = make_module(32, 2, device="meta", **OPTIONS["materialized-rows"])
    inputs = by_index(module, device, torch.float16, lengths=[3000])
    inputs["indices"] = NAMED[torch.arange(3000) % 2].to(device)
    assert_right(module, inputs)


@pytest.mark.usefixtures("nan_filled_memory")
@pytest.mark.parametrize("num_targets", [2, [2, 0, 1, 3, 1]], ids=str)
def test_rows_behind_the_last_offset(num_targets, path, device):
    module = make_module(16, 2, value_projection=True, **path)
    inputs = by_index(module, device, lengths=[5, 0, 40, 3, 1], targets=num_targets)
    behind = {"indices": 70}
    if "target_offsets" in inputs:
        behind |= {"target": 5, "out": 5}
    grad_out = torch.ones_like(inputs["target"])
    assert_rows_behind_never_matter(
        functools.partial(attend, module), inputs, grad_out, behind,
        num_terms=2 * (16 + 8 + 40 + 16),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("indices", "error", "message"),
    [
        ([0, 1], TypeError, "indices must be a tensor, got a list"),
        (torch.zeros(7), TypeError, "indices must be int32 or int64, got torch.float32"),
        (torch.zeros(7, 1).long(), ValueError, r"indices must have shape \[N\] = \[any\], got \[7"),
        (torch.zeros(6).long(), ValueError, r"history.offsets\(\) must end at or before the 6 "),
        (torch.zeros(7, device="meta").long(), ValueError, "indices must be on cpu as history is"),
        (torch.tensor([0, 3, 1, 4, 0, 5, 0]), ValueError, "indices must be 0 to 3, .* got 4 at"),
        (torch.tensor([0, 3, 1, 2, 0, 1, -1]), ValueError, "got -1 at position 6"),
    ],
    ids=str,
)
@pytest.mark.parametrize("keys_and_values", ["absorbed", "materialized"])
def test_errors_name_the_argument(keys_and_values, indices, error, message):
    module = make_module(8, 2, keys_and_values=keys_and_values)
    history = JaggedTensor(torch.zeros(4, 8), lengths=torch.tensor([3, 4]))
    with pytest.raises(error, match=message):
        module(torch.zeros(2, 8), history, indices=indices)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["default", "values", "materialized"])
def test_never_waits_for_the_device_and_repeats_are_bit_equal(name):
    module = make_module(32, 2, device="meta", **OPTIONS[name])
    inputs = by_index(module, "cuda")
    inputs |= ages_of(module, "cuda")
    grad_out = torch.ones_like(inputs["target"])
    run = functools.partial(
        outputs_and_gradients, functools.partial(attend, module), inputs, grad_out
    )
    expected = run()  # compiles
    with sync_debug_mode("error"):
        again = [run() for _ in range(20)]
    assert all(torch.equal(x[name], expected[name]) for x in again for name in expected)
