"""What only the CPU path promises: bits that no other sample touches, and memory as the rows."""

import subprocess
import sys
import threading

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from torchrec_jagged_attn import jagged_flash_attention, jagged_target_attention, reference
from torchrec_jagged_attn.ops import implementation
from torchrec_jagged_attn.testing import (
    assert_matches_oracle,
    offsets_of,
    outputs_and_gradients,
    target_attention_oracle,
    target_attention_plain,
)

pytestmark = pytest.mark.skipif(
    implementation(torch.device("cpu"))[0] != "reference", reason="the kernels are interpreted"
)

LENGTHS = [1, 17, 0, 64, 1, 17, 130, 17, 3, 700, 1, 64, 2]


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def inputs_of(lengths, *, targets=1, num_heads=2, width=16, dtype=torch.float32):
    """Random inputs; ``targets`` is a number, or one for each sample (then ``query`` is jagged)."""
    generator = torch.Generator().manual_seed(0)
    num_rows = sum(lengths)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    inputs = {
        "history": draw(num_rows, width),
        "bias": draw(num_rows, num_heads),
        "position_bias": draw(30, num_heads),
        "age_bias": draw(80, num_heads),
        "offsets": offsets_of(torch.tensor(lengths), torch.int64, "cpu"),
        "timestamps": torch.randint(10**6, (num_rows,), generator=generator),
    }
    if isinstance(targets, int):
        inputs["query"] = draw(len(lengths), targets, num_heads, width)
    else:
        inputs["query"] = draw(sum(targets), num_heads, width)
        inputs["query_offsets"] = offsets_of(torch.tensor(targets), torch.int64, "cpu")
    return inputs


def some_samples(inputs, order):
    """Inputs of the samples in ``order``, and the rows of ``query`` and ``history`` they have."""
    ranges = {"history": inputs["offsets"]}
    if "query_offsets" in inputs:
        ranges["query"] = inputs["query_offsets"]
    rows = {"query": torch.tensor(order)}
    for name, offsets in ranges.items():
        bounds = offsets.tolist()
        rows[name] = torch.cat([torch.arange(bounds[b], bounds[b + 1]) for b in order])
    fewer = {**inputs, "query": inputs["query"][rows["query"]]}
    for name in ("history", "bias", "timestamps"):
        fewer[name] = inputs[name][rows["history"]]
    for name in ("offsets", "query_offsets"):
        if name in inputs:
            fewer[name] = offsets_of(inputs[name].diff()[order], torch.int64, "cpu")
    return fewer, rows


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("targets", [1, 9, [1, 2, 3, 0, 1, 2, 2, 9, 1, 2, 1, 0, 9]], ids=str)
@pytest.mark.parametrize(
    ("num_heads", "width", "dtype"),
    [
        (1, 8, torch.float32),
        (2, 20, torch.float32),
        (3, 33, torch.float32),  # does not fit grouped_mm
        (4, 128, torch.float32),
        (1, 256, torch.float32),
        (4, 32, torch.bfloat16),
        (2, 16, torch.float64),
    ],
)
def test_bits_do_not_depend_on_the_batch(num_heads, width, dtype, targets):
    inputs = inputs_of(LENGTHS, targets=targets, num_heads=num_heads, width=width, dtype=dtype)
    grad_out = torch.randn_like(inputs["query"])
    whole = outputs_and_gradients(jagged_target_attention, inputs, grad_out)
    alone = [[sample] for sample in range(len(LENGTHS))]
    for order in [[12, 7, 0, 9, 3, 2, 5], [9, 6], *alone]:
        fewer, rows = some_samples(inputs, order)
        results = outputs_and_gradients(jagged_target_attention, fewer, grad_out[rows["query"]])
        for name in ("out", "query", "history", "bias"):
            of = rows["query" if name in ("out", "query") else "history"]
            assert torch.equal(results[name], whole[name][of]), f"{name} depends on the batch"


@pytest.mark.parametrize("targets", [2, [1, 2, 3, 0, 1, 2, 2, 9, 1, 2, 1, 0, 9]], ids=str)
def test_bits_do_not_depend_on_the_slabs(targets, monkeypatch):
    inputs = inputs_of(LENGTHS, targets=targets)
    grad_out = torch.randn_like(inputs["query"])
    expected = outputs_and_gradients(jagged_target_attention, inputs, grad_out)
    monkeypatch.setattr(reference, "SLAB_ROWS", 50)
    results = outputs_and_gradients(jagged_target_attention, inputs, grad_out)
    for name in ("out", "query", "history", "bias"):
        assert torch.equal(results[name], expected[name])
    for name in ("position_bias", "age_bias"):  # sums over all samples, in fp64
        torch.testing.assert_close(results[name], expected[name])


@pytest.mark.usefixtures("threads")
def test_gradients_of_tables_repeat():
    inputs = inputs_of([300] * 200, num_heads=4, width=8)
    grad_out = torch.randn_like(inputs["query"])
    first = outputs_and_gradients(jagged_target_attention, inputs, grad_out)
    for _ in range(3):
        again = outputs_and_gradients(jagged_target_attention, inputs, grad_out)
        assert all(torch.equal(again[name], first[name]) for name in first)


@pytest.mark.parametrize("width", [1, 33, 50])
def test_widths_that_do_not_fit_grouped_mm(width):
    inputs = inputs_of([3, 0, 70, 1], targets=3, width=width)
    del inputs["position_bias"], inputs["age_bias"], inputs["timestamps"]
    assert_matches_oracle(
        jagged_target_attention, target_attention_oracle, target_attention_plain, inputs
    )


def test_history_at_any_address():
    inputs = inputs_of([3, 0, 70, 1])
    expected = jagged_target_attention(**inputs)
    buffer = torch.empty(inputs["history"].numel() + 1)
    buffer[1:] = inputs["history"].flatten()
    inputs["history"] = buffer[1:].view(inputs["history"].shape)
    torch.testing.assert_close(jagged_target_attention(**inputs), expected)


def test_sums_over_long_histories():
    inputs = inputs_of([20_000, 3])
    del inputs["position_bias"], inputs["age_bias"], inputs["timestamps"]
    assert_matches_oracle(
        jagged_target_attention, target_attention_oracle, target_attention_plain, inputs
    )


@pytest.mark.parametrize("history_rows", [1, 64, 200])
@pytest.mark.parametrize("query_rows", [1, 4])
def test_bits_of_a_sample_do_not_depend_on_what_others_take(query_rows, history_rows, monkeypatch):
    """Where lists of pairs end, and calls for each sample begin."""
    inputs = inputs_of(LENGTHS, targets=[1, 2, 3, 0, 1, 2, 2, 9, 1, 2, 1, 0, 9])
    grad_out = torch.randn_like(inputs["query"])
    monkeypatch.setattr(reference, "MAX_LISTED_QUERY_ROWS", query_rows)
    monkeypatch.setattr(reference, "MAX_LISTED_HISTORY_ROWS", history_rows)
    whole = outputs_and_gradients(jagged_target_attention, inputs, grad_out)
    for order in [[12, 7, 0, 9, 3, 2, 5], [9], [6, 5]]:
        fewer, rows = some_samples(inputs, order)
        results = outputs_and_gradients(jagged_target_attention, fewer, grad_out[rows["query"]])
        for name in ("out", "query", "history", "bias"):
            of = rows["query" if name in ("out", "query") else "history"]
            assert torch.equal(results[name], whole[name][of]), f"{name} depends on the batch"


def peak_bytes(call):
    """The most memory that ``call`` holds at any time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    allocated = torch.tensor([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())])
    return allocated.cumsum(0).max()


def test_memory_follows_the_rows():
    inputs = inputs_of([20_000] + [8] * 500, width=64)
    grad_out = torch.randn_like(inputs["query"])
    given = sum(value.nbytes for value in inputs.values())
    peak = peak_bytes(lambda: outputs_and_gradients(jagged_target_attention, inputs, grad_out))
    assert peak < 4 * given  # padded, the history alone would be 400 times


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_attention_over_keys_converts_few_at_a_time(dtype, monkeypatch):
    """Keys and values, of half precision or of fewer heads than queries."""
    lengths = torch.full((400,), 50)
    offsets = offsets_of(lengths, torch.int64, "cpu")
    q_offsets = offsets_of(torch.ones_like(lengths), torch.int64, "cpu")
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    q, k, v = draw(400, 8, 16), draw(20_000, 1, 16), draw(20_000, 1, 16)

    def both():
        return torch.autograd.grad(
            jagged_flash_attention(q, k, v, q_offsets, offsets).sum(), (q, k, v)
        )

    few = peak_bytes(both)
    results = both()
    monkeypatch.setattr(reference, "BLOCK_ROWS", 1 << 20)
    assert few < peak_bytes(both) / 2
    for one, other in zip(results, both(), strict=True):
        assert torch.equal(one, other)


def test_large_samples_have_their_size(monkeypatch):
    """Of 2³¹ multiply-adds, where int32 ends: on all threads."""
    seen = []
    monkeypatch.setattr(reference, "_for_each", lambda work, samples, sizes: seen.extend(sizes))
    jagged_target_attention(
        torch.zeros(1, 512, 8, 64), torch.zeros(8192, 64), torch.tensor([0, 8192])
    )
    assert seen == [2**31]


def test_forward_takes_less_memory_than_the_rows():
    inputs = inputs_of([100] * 500, num_heads=4, width=64)
    del inputs["position_bias"], inputs["age_bias"], inputs["timestamps"], inputs["bias"]
    with torch.inference_mode():
        peak = peak_bytes(lambda: jagged_target_attention(**inputs))
    assert peak - inputs["query"].nbytes < inputs["history"].nbytes / 2


@pytest.mark.parametrize("targets", [1, 20], ids=["pairs", "samples"])
def test_number_of_threads_stays(targets, monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        inputs = inputs_of(LENGTHS, targets=[targets] * len(LENGTHS))
        outputs_and_gradients(jagged_target_attention, inputs, torch.ones_like(inputs["query"]))
        assert torch.get_num_threads() == 2
        rows = inputs["history"].unsqueeze(1).requires_grad_()
        jagged_flash_attention(rows, rows, rows, inputs["offsets"]).sum().backward()
        assert torch.get_num_threads() == 2
        monkeypatch.setattr(reference, "_flash_weights", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            jagged_flash_attention(rows, rows, rows, inputs["offsets"])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_number_of_threads_of_loops_side_by_side():
    """Each thread has its own again, in whichever order they begin and end."""
    number, barrier, ends = torch.get_num_threads(), threading.Barrier(2), []

    def loop(leaves_first):
        torch.set_num_threads(2)
        assert torch.get_num_threads() == 2  # the first call sets what the process had last
        barrier.wait()
        with reference._one_thread():
            ends.append(torch.get_num_threads())
            barrier.wait()
            if not leaves_first:
                barrier.wait()
        if leaves_first:
            barrier.wait()
        ends.append(torch.get_num_threads())

    threads = [threading.Thread(target=loop, args=(first,)) for first in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.set_num_threads(number)
    assert sorted(ends) == [1, 1, 2, 2]


def test_threads_by_the_size_of_a_sample():
    seen, least = [], reference.LEAST_SHARED_WORK
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        reference._for_each(
            lambda name: seen.append((name, torch.get_num_threads())),
            zip("abcd", strict=True),
            [least - 1, least, 0, least + 1],
        )
        assert sorted(seen) == [("a", 1), ("b", 2), ("c", 1), ("d", 2)]
    finally:
        torch.set_num_threads(before)


def test_is_imported_under_a_fake_mode():
    """Where a tensor that is made is none, and has no values."""
    lines = (
        "from torch._subclasses import FakeTensorMode",
        "with FakeTensorMode(): import torchrec_jagged_attn",
    )
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", "\n".join(lines)], check=True)
