"""``jagged_target_attention`` with gather indices, against oracles on gathered rows."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter

from tests.attention.test_dropout import assert_weights_are_dropped
from tests.cases import Case, offsets_of
from tests.combinations import each_pair
from tests.fixtures import assert_graph_replays, opcheck, skip_unless_supported
from tests.oracles import target_attention_oracle
from tests.target_attention.test_target_attention import (
    LAYOUTS,
    LENGTHS,
    REQUEST_TIMES,
    arguments_of_op,
    draw_prior_weights,
    inputs_of,
    lay_out_queries,
    on_every_kernel,
)
from tests.tolerance import assert_matches_oracle, outputs_and_gradients
from torchrec_jagged_attn import jagged_target_attention

CPU = torch.device("cpu")
MANY_ROWS = 2000  # with LENGTHS, most indices that occur, occur once


def indexed_inputs(
    lengths, device=CPU, dtype=torch.float32, num_rows=20, index_dtype=None, **shape
):
    """Random inputs over ``num_rows`` rows. Every third row is NaN and not indexed; the other
    indices are drawn uniformly.
    """
    inputs = inputs_of(lengths, device, dtype, **shape)
    num_indices = inputs["history"].shape[0]
    generator = torch.Generator().manual_seed(2)
    history = torch.randn(num_rows, inputs["history"].shape[1], generator=generator)
    history[2::3] = torch.nan
    inputs["history"] = history.to(device, dtype)
    drawn = torch.randint(2**30, (num_indices,), generator=generator)
    valid = torch.arange(num_rows)[torch.arange(num_rows) % 3 < 2]
    indices = valid[drawn % max(len(valid), 1)] if num_indices else drawn
    inputs["indices"] = indices.to(device, index_dtype)
    return inputs


def on_gathered_rows(attend):
    """Wrap ``attend`` to gather the indexed rows first."""

    def call(*, history, indices, **inputs):
        return attend(history=history.index_select(0, indices), **inputs)

    return call


FUNCTIONS = jagged_target_attention, on_gathered_rows(target_attention_oracle)


def distinct_rows_oracle(query, history, offsets, indices):
    """Attention over each sample's distinct rows; an index repeated ``n`` times has prior weight n.

    The tolerance rule assumes independent errors, but copies of one row have equal errors.
    """
    shape = offsets.numel() - 1, history.shape[0]
    bins = torch.repeat_interleave(offsets.diff()) * shape[1] + indices
    counts = torch.bincount(bins, minlength=shape[0] * shape[1]).view(shape)
    samples, rows = counts.nonzero(as_tuple=True)
    weights = counts[samples, rows].to(query.dtype)
    offsets = F.pad((counts > 0).sum(1).cumsum(0), (1, 0))
    distinct = history.index_select(0, rows)
    return target_attention_oracle(query, distinct, offsets, prior_weights=weights)


def assert_right(inputs, timestamps=None, **options):
    assert_matches_oracle(*FUNCTIONS, inputs, timestamps=timestamps, **options)


TARGETS = {"one-target": 1, "many-targets": 40}  # other layouts have 9
BIASES = ["none", "tables", "prior weights and ages"]


def lay_out(inputs, layout, biases):
    """Change the query layout of ``inputs`` of LENGTHS, and add biases; also returns timestamps."""
    device, dtype = inputs["query"].device, inputs["query"].dtype
    generator = torch.Generator().manual_seed(1)
    timestamps = None
    lay_out_queries(inputs, layout, generator)
    if biases == "tables":
        inputs["position_bias"] = torch.randn(20, 2, generator=generator).to(device, dtype)
    if biases == "prior weights and ages":
        inputs["prior_weights"] = draw_prior_weights(LENGTHS, device, dtype)
    if biases != "none":
        inputs["age_bias"] = torch.randn(70, 2, generator=generator).to(device, dtype)
        timestamps = torch.exp(14 * torch.rand(368, generator=generator)).to(device).long()
    return inputs, timestamps


@pytest.mark.parametrize(
    ("layout", "biases", "dtype", "index_dtype"),
    each_pair(
        LAYOUTS,
        BIASES,
        [torch.float32, torch.float16, torch.bfloat16, torch.float64],
        [torch.int32, torch.int64],
    ),
    ids=str,
)
def test_right(layout, biases, dtype, index_dtype, device):
    skip_unless_supported(Case("rows", 5, 300, 2, 16, dtype=dtype), device)
    num_targets = TARGETS.get(layout, 9)
    inputs = indexed_inputs(
        LENGTHS, device, dtype, MANY_ROWS, index_dtype=index_dtype, num_targets=num_targets
    )
    assert_right(*lay_out(inputs, layout, biases))


@pytest.mark.parametrize("layout", ["one-target", "many-targets", "jagged"])
def test_ages_from_the_request(layout, device):
    inputs = indexed_inputs(LENGTHS, device, num_rows=MANY_ROWS, num_targets=TARGETS.get(layout, 9))
    request_time = torch.tensor(REQUEST_TIMES, device=device)
    inputs, timestamps = lay_out(inputs, layout, "tables")
    assert_right(inputs, timestamps, request_time=request_time)


@pytest.mark.parametrize(
    ("num_targets", "num_heads", "widths"),
    [(1, 1, (8, 128, 512)), (1, 4, (20, 64, 256)), (5, 3, (20, 64, 256)), (2, 40, (8, 128, 512))],
)
def test_widths(num_targets, num_heads, widths, device):
    for width in widths:
        shape = {"num_targets": num_targets, "num_heads": num_heads, "width": width}
        assert_right(indexed_inputs([33, 0, 70], device, num_rows=300, **shape))


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("num_targets", [1, 9, 40])
def test_tf32(num_targets, device):
    assert_right(indexed_inputs([70, 0, 17], device, num_targets=num_targets, width=64))


@pytest.mark.parametrize(
    ("num_targets", "score", "num_rows"),
    each_pair([1, 9, 40], ["silu", "sigmoid"], [20, MANY_ROWS]),
)
def test_scores(num_targets, score, num_rows, device):
    inputs = indexed_inputs(LENGTHS, device, num_rows=num_rows, num_targets=num_targets)
    assert_right(inputs, score=score)


@pytest.mark.parametrize("num_rows", [1, 2, 4, 1000], ids="{} rows".format)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_number_of_rows(num_rows, dtype, device):
    """With few rows, runs of equal indices are split into chunks."""
    inputs = indexed_inputs([70, 0, 3, 64, 1, 70, 60], device, dtype, num_rows)
    assert_matches_oracle(jagged_target_attention, distinct_rows_oracle, inputs)


@pytest.mark.gpu
def test_row_with_nearly_all_indices():
    """The number of chunks per row is limited, so the chunks are longer."""
    inputs = indexed_inputs([200] * 1000, "cuda", num_rows=3)
    inputs["indices"][::1000] = 0
    inputs["indices"][1::2] = 1
    assert_matches_oracle(jagged_target_attention, distinct_rows_oracle, inputs)


@pytest.mark.parametrize("num_rows", [0, 7])
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]], ids=str)
def test_no_index(lengths, num_rows, device):
    inputs = indexed_inputs(lengths, device, num_rows=num_rows)
    assert_right(inputs)
    results = outputs_and_gradients(
        jagged_target_attention, inputs, torch.ones_like(inputs["query"])
    )
    assert all(torch.all(value == 0) for value in results.values())


@pytest.mark.parametrize("num_targets", [0, 1, 9])
@pytest.mark.parametrize("lengths", [[1], [0, 0, 70, 1, 1, 0], [64] * 3], ids=str)
def test_edges(lengths, num_targets, device):
    assert_right(indexed_inputs(lengths, device, num_targets=num_targets))


def test_gradients_of_unindexed_rows_are_zeros(device):
    inputs = indexed_inputs(LENGTHS, device)
    results = outputs_and_gradients(
        jagged_target_attention, inputs, torch.ones_like(inputs["query"])
    )
    assert all(torch.isfinite(value).all() for value in results.values())
    grad = results["history"].view(-1, 16)
    assert torch.all(grad[2::3] == 0)
    assert torch.all(grad[0::3].any(1))


@pytest.mark.parametrize(
    ("num_targets", "dtype", "num_rows"),
    each_pair([1, 9, 40], [torch.float32, torch.float16], [20, MANY_ROWS]),
    ids=str,
)
def test_dropout(num_targets, dtype, num_rows, device):
    """Dropout is by position: weights of equal indices are dropped independently."""
    inputs = indexed_inputs(LENGTHS, device, dtype, num_rows, num_targets=num_targets)
    assert_weights_are_dropped(FUNCTIONS, inputs, 5 * num_targets, 2, 368)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_one_target_is_bit_equal_to_gathered_rows(dtype, device):
    """All results except the gradient of rows, whose order of summation differs."""
    inputs = indexed_inputs([400, 0, 3, 64, 1], device, dtype)
    inputs["position_bias"] = torch.ones(20, 2, device=device, dtype=dtype)
    grad_out = torch.randn_like(inputs["query"])
    expected = outputs_and_gradients(on_gathered_rows(jagged_target_attention), inputs, grad_out)
    results = outputs_and_gradients(jagged_target_attention, inputs, grad_out)
    for name in ("out", "query", "position_bias"):
        assert torch.equal(results[name], expected[name]), name


@pytest.mark.parametrize("num_targets", [1, 9, 40])
def test_strided_rows_and_indices(num_targets, device):
    inputs = indexed_inputs([7, 0, 70], device, num_targets=num_targets)
    buffer = torch.full((30, 37), torch.nan, device=device)
    buffer[5:25, 3:19] = inputs["history"]
    strided = inputs | {
        "history": buffer[5:25, 3:19],
        "indices": inputs["indices"].repeat_interleave(2)[::2],
    }
    assert_right(strided)


@pytest.mark.parametrize("num_targets", [1, 9, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_without_the_gradient_of_rows(num_targets, dtype, device):
    """The other gradients are bit-equal without it."""
    inputs = indexed_inputs(LENGTHS, device, dtype, MANY_ROWS, num_targets=num_targets)
    inputs["position_bias"] = torch.ones(20, 2, device=device, dtype=dtype)
    grad_out = torch.randn_like(inputs["query"])
    expected = outputs_and_gradients(jagged_target_attention, inputs, grad_out)
    attend = functools.partial(jagged_target_attention, history=inputs.pop("history"))
    for name, value in outputs_and_gradients(attend, inputs, grad_out).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.usefixtures("nan_filled_memory")
@pytest.mark.parametrize(
    ("num_targets", "dtype"),
    [(1, torch.float16), (9, torch.float32), (9, torch.float16), (40, torch.float32)],
    ids=str,
)
def test_other_samples_never_matter(num_targets, dtype, device):
    """Nor does the number of rows. Each sample has its own rows, some indexed many times."""
    lengths = [3, 0, 40, 17, 600 if device.type == "cuda" else 300]  # of several chunks
    inputs = indexed_inputs(lengths, device, dtype, num_targets=num_targets)
    offsets = inputs["offsets"]
    sample = torch.repeat_interleave(torch.tensor(lengths, device=device))
    inputs["indices"] = 4 * sample + torch.arange(sum(lengths), device=device) % 7 % 3
    inputs["history"] = torch.randn(20, 16, device=device).to(dtype)
    grad_out = torch.randn_like(inputs["query"])
    whole = outputs_and_gradients(jagged_target_attention, inputs, grad_out)
    assert all(torch.isfinite(value).all() for value in whole.values())
    again = outputs_and_gradients(jagged_target_attention, inputs, grad_out)
    assert all(torch.equal(whole[name], again[name]) for name in whole)

    poisoned = inputs | {name: inputs[name].clone() for name in ("query", "history")}
    poisoned["query"][2] = poisoned["history"][8:11] = torch.nan
    results = outputs_and_gradients(jagged_target_attention, poisoned, grad_out)
    order = [4, 3, 1, 0]  # without sample 2, and in another order
    bounds = offsets.tolist()
    positions = torch.cat([torch.arange(bounds[b], bounds[b + 1]) for b in order])
    fewer = {
        "query": inputs["query"][order],
        "history": torch.cat([inputs["history"], inputs["history"].new_full((99, 16), torch.nan)]),
        "indices": inputs["indices"][positions],
        "offsets": offsets_of(torch.tensor(lengths)[order], torch.int64, device),
    }
    permuted = outputs_and_gradients(jagged_target_attention, fewer, grad_out[order])
    rows = [*range(4), *range(12, 20)]
    for name in whole:
        kept = rows if name == "history" else order
        permuted_kept = rows if name == "history" else slice(None)
        expected = whole[name][kept]
        assert torch.equal(results[name][kept], expected), f"{name} sees a poisoned sample"
        assert torch.equal(permuted[name][permuted_kept], expected), f"{name} depends on the batch"


@pytest.mark.parametrize(
    ("jagged", "index_dtype"),
    [(False, torch.int32), (True, torch.int64)],
    ids=["dense-int32", "jagged-int64"],
)
def test_opcheck(jagged, index_dtype, device):
    inputs = indexed_inputs([3, 0, 5], device, num_targets=2, index_dtype=index_dtype)
    inputs["history"] = inputs["history"].nan_to_num().requires_grad_()
    arguments = arguments_of_op(inputs, jagged=jagged)
    opcheck(torch.ops.torchrec_jagged_attn.target_attention.default, arguments)


@pytest.mark.reference  # traced alike with any kernels
def test_compiles_once_for_all_batches(device):
    counter = CompileCounter()
    compiled = torch.compile(jagged_target_attention, backend=counter, fullgraph=True, dynamic=True)
    for num_rows, lengths in ((9, [3, 4, 1]), (7, [9, 0, 2, 5]), (30, [2, 30, 1, 5, 8])):
        inputs = indexed_inputs(lengths, device, num_rows=num_rows)
        torch.testing.assert_close(
            compiled(**inputs), jagged_target_attention(**inputs), rtol=0, atol=0
        )
    assert counter.frame_count == 1


@on_every_kernel
def test_cuda_graph_replays_with_other_indices(num_targets, dtype):
    inputs = indexed_inputs([60, 1200, 140, 600], "cuda", dtype, num_targets=num_targets)
    inputs["history"] = inputs["history"].nan_to_num(0.5)
    grad_out = torch.randn_like(inputs["query"])

    def change():
        inputs["offsets"].copy_(torch.tensor([0, 1800, 1800, 1820, 1900]))
        inputs["indices"].copy_(torch.arange(2000) ** 2 % 20)

    assert_graph_replays(
        lambda: outputs_and_gradients(jagged_target_attention, inputs, grad_out), change
    )


@on_every_kernel
def test_repeats_are_bit_equal(num_targets, dtype):
    lengths = torch.arange(100) * 29 % 4001
    inputs = indexed_inputs(lengths, "cuda", dtype, 3000, num_targets=num_targets, width=64)
    grad_out = torch.randn_like(inputs["query"])
    first = outputs_and_gradients(jagged_target_attention, inputs, grad_out)
    for _ in range(50):
        again = outputs_and_gradients(jagged_target_attention, inputs, grad_out)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1500, 100_000])
def test_allocates_no_gathered_rows(num_rows):
    """Backward allocates only a few integers per index, and partial sums.

    Gathering holds the gathered rows, their gradient and the gradient of the rows at a time.
    """
    inputs = indexed_inputs([100] * 1000, "cuda", torch.bfloat16, num_rows, width=256)
    row_bytes, num_indices = 256 * 2, 100_000

    def peak(attend, needs_gradients):
        with torch.set_grad_enabled(needs_gradients):
            leaves = {
                name: x.detach().requires_grad_(needs_gradients) if x.is_floating_point() else x
                for name, x in inputs.items()
            }
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            out = attend(**leaves)
            if needs_gradients:
                out.backward(torch.ones_like(out))
            return torch.cuda.max_memory_allocated() - before

    copied_rows = max(2 * num_indices, num_indices + num_rows)
    for needs_gradients, saved in ((False, num_indices), (True, 0.8 * (copied_rows - num_rows))):
        for _ in range(2):  # the first time compiles
            peak_bytes = peak(jagged_target_attention, needs_gradients)
            gathered_peak_bytes = peak(on_gathered_rows(jagged_target_attention), needs_gradients)
        assert peak_bytes + saved * row_bytes <= gathered_peak_bytes


@pytest.mark.parametrize(
    ("indices", "error", "message"),
    [
        ([0, 1], TypeError, "indices must be a tensor, got a list"),
        (torch.zeros(7), TypeError, "indices must be int32 or int64, got torch.float32"),
        (torch.zeros(7, 1).long(), ValueError, r"indices must have shape \[N\] = \[any\], got \[7"),
        (torch.zeros(6).long(), ValueError, "must end at or before the 6 rows they .*, got 7"),
        (
            torch.zeros(7, device="meta").long(),
            ValueError,
            "indices must be on cpu as query is, got meta",
        ),
        (
            torch.tensor([0, 3, 1, 4, 0, 5, 0]),
            ValueError,
            "indices must be 0 to 3, of the 4 rows of history, got 4 at position 3",
        ),
        (torch.tensor([0, 3, 1, 2, 0, 1, -1]), ValueError, "got -1 at position 6"),
    ],
    ids=str,
)
def test_errors_name_the_argument(indices, error, message):
    arguments = torch.zeros(2, 2, 8), torch.zeros(4, 8), torch.tensor([0, 3, 7])
    with pytest.raises(error, match=message):
        jagged_target_attention(*arguments, indices=indices)


def test_biases_are_per_position(device):
    inputs = indexed_inputs([3, 4], device, num_rows=4)
    message = r"prior_weights must have shape \[N\] = \[7\], got \[4\]"
    with pytest.raises(ValueError, match=message):
        jagged_target_attention(**inputs, prior_weights=torch.ones(4, device=device))


@pytest.mark.gpu
def test_indices_are_validated_on_cuda_when_asked(monkeypatch):
    inputs = indexed_inputs([3, 4], "cuda", num_rows=4)
    inputs["indices"][5] = 4
    monkeypatch.setenv("TORCHREC_JAGGED_ATTN_VALIDATE", "1")
    with pytest.raises(ValueError, match="indices must be 0 to 3, of the 4 rows"):
        jagged_target_attention(**inputs)
