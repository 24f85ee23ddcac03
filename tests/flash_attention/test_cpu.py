"""Guarantees of the CPU kernels alone: batch-invariant results, and memory linear in the rows."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.cases import Case, make_flash_inputs, offsets_of
from tests.combinations import each_pair
from tests.oracles import target_attention_oracle
from tests.runs import assert_same_run
from tests.tolerance import assert_matches_oracle, outputs_and_gradients
from torchrec_jagged_attn import jagged_flash_attention, jagged_target_attention

pytestmark = pytest.mark.reference

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
        "prior_weights": draw(num_rows).abs(),
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


def select_samples(inputs, order):
    """Inputs of the samples in ``order``, and their rows of ``query`` and ``history``."""
    ranges = {"history": inputs["offsets"]}
    if "query_offsets" in inputs:
        ranges["query"] = inputs["query_offsets"]
    rows = {"query": torch.tensor(order)}
    for name, offsets in ranges.items():
        bounds = offsets.tolist()
        rows[name] = torch.cat([torch.arange(bounds[b], bounds[b + 1]) for b in order])
    fewer = {**inputs, "query": inputs["query"][rows["query"]]}
    for name in ("history", "prior_weights", "timestamps"):
        fewer[name] = inputs[name][rows["history"]]
    for name in ("offsets", "query_offsets"):
        if name in inputs:
            fewer[name] = offsets_of(inputs[name].diff()[order], torch.int64, "cpu")
    return fewer, rows


def assert_bits_do_not_depend_on_the_batch(inputs, grad_out):
    whole = outputs_and_gradients(jagged_target_attention, inputs, grad_out)
    for order in [[12, 7, 0, 9, 3, 2, 5], [9, 6], [9], [3], [2], [1], [0]]:
        fewer, rows = select_samples(inputs, order)
        results = outputs_and_gradients(jagged_target_attention, fewer, grad_out[rows["query"]])
        for name in ("out", "query", "history", "prior_weights"):
            kept = rows["query" if name in ("out", "query") else "history"]
            assert torch.equal(results[name], whole[name][kept]), f"{name} depends on the batch"


@pytest.mark.parametrize(
    ("threads", "shape", "dtype", "targets"),
    each_pair(
        [1, 2],
        [(1, 8), (2, 20), (3, 33), (4, 128), (1, 256)],
        [torch.float32, torch.bfloat16, torch.float64],
        [1, 9, [1, 2, 3, 0, 1, 2, 2, 9, 1, 2, 1, 0, 9]],
    ),
    ids=str,
    indirect=["threads"],
)
@pytest.mark.usefixtures("threads")
def test_bits_do_not_depend_on_the_batch(shape, dtype, targets):
    num_heads, width = shape
    inputs = inputs_of(LENGTHS, targets=targets, num_heads=num_heads, width=width, dtype=dtype)
    assert_bits_do_not_depend_on_the_batch(inputs, torch.randn_like(inputs["query"]))


@pytest.mark.usefixtures("threads")
def test_bits_beside_a_sample_that_all_cores_share():
    """The sample of 700 rows, whose products have more than 2²⁴ multiply-adds, uses all cores."""
    inputs = inputs_of(LENGTHS, targets=64, num_heads=8, width=64)
    assert_bits_do_not_depend_on_the_batch(inputs, torch.randn_like(inputs["query"]))


def test_bits_do_not_depend_on_the_number_of_threads():
    inputs, before = inputs_of(LENGTHS, targets=3), torch.get_num_threads()
    grad_out = torch.randn_like(inputs["query"])
    results = []
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        results.append(outputs_and_gradients(jagged_target_attention, inputs, grad_out))
    torch.set_num_threads(before)
    for others in results[1:]:
        assert all(torch.equal(others[name], results[0][name]) for name in results[0])


def test_concurrent_calls():
    """Calls from several threads of the process give equal results."""
    inputs = inputs_of(LENGTHS, targets=3)
    grad_out = torch.randn_like(inputs["query"])

    def call(_):
        return outputs_and_gradients(jagged_target_attention, inputs, grad_out)

    with ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(call, range(16))
    for results in others:
        assert all(torch.equal(results[name], first[name]) for name in first)


@pytest.mark.usefixtures("threads")
def test_gradients_of_tables_repeat():
    inputs = inputs_of([300] * 50, num_heads=4, width=8)
    grad_out = torch.randn_like(inputs["query"])
    first = outputs_and_gradients(jagged_target_attention, inputs, grad_out)
    for _ in range(3):
        again = outputs_and_gradients(jagged_target_attention, inputs, grad_out)
        assert all(torch.equal(again[name], first[name]) for name in first)


@pytest.mark.parametrize("width", [1, 33, 50])
def test_odd_widths(width):
    inputs = inputs_of([3, 0, 70, 1], targets=3, width=width)
    del inputs["position_bias"], inputs["age_bias"], inputs["timestamps"]
    assert_matches_oracle(jagged_target_attention, target_attention_oracle, inputs)


def test_history_at_any_address():
    inputs = inputs_of([3, 0, 70, 1])
    buffer = torch.empty(inputs["history"].numel() + 1)
    buffer[1:] = inputs["history"].flatten()
    inputs["history"] = buffer[1:].view(inputs["history"].shape)
    assert_matches_oracle(jagged_target_attention, target_attention_oracle, inputs)


def test_sums_over_long_histories():
    inputs = inputs_of([20_000, 3])
    del inputs["position_bias"], inputs["age_bias"], inputs["timestamps"]
    assert_matches_oracle(jagged_target_attention, target_attention_oracle, inputs)


def peak_bytes(call):
    """Peak memory of ``call``, on one thread: the profiler does not see the other ones."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    torch.set_num_threads(before)
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    allocated = torch.tensor([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())])
    return allocated.cumsum(0).max()


def test_memory_is_linear_in_the_rows():
    inputs = inputs_of([20_000] + [8] * 500, width=64)
    grad_out = torch.randn_like(inputs["query"])
    input_bytes = sum(value.nbytes for value in inputs.values())
    peak = peak_bytes(lambda: outputs_and_gradients(jagged_target_attention, inputs, grad_out))
    assert peak < 4 * input_bytes  # padded, the history alone would take 400 times


def test_attention_over_keys_converts_few_at_a_time():
    """Keys and values are in half precision and shared by several heads."""
    lengths = torch.full((400,), 50)
    offsets = offsets_of(lengths, torch.int64, "cpu")
    q_offsets = offsets_of(torch.ones_like(lengths), torch.int64, "cpu")
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator).bfloat16().requires_grad_()

    q, k, v = draw(400, 8, 16), draw(20_000, 2, 16), draw(20_000, 2, 16)
    peak = peak_bytes(
        lambda: torch.autograd.grad(
            jagged_flash_attention(q, k, v, q_offsets, offsets).sum(), (q, k, v)
        )
    )
    gradients = k.nbytes + v.nbytes
    assert peak < 1.5 * gradients  # in fp32, keys and values alone would be twice as much


def test_forward_takes_less_memory_than_the_rows():
    inputs = inputs_of([100] * 500, num_heads=4, width=64)
    for name in ("position_bias", "age_bias", "timestamps", "prior_weights"):
        del inputs[name]
    with torch.inference_mode():
        peak = peak_bytes(lambda: jagged_target_attention(**inputs))
    assert peak - inputs["query"].nbytes < inputs["history"].nbytes / 2


def with_element_stride(x, stride):
    """Copy ``x`` to rows with this stride between elements; the C++ loops read only stride 1."""
    return x.new_zeros(*x.shape, stride).index_copy_(-1, torch.tensor([0]), x.unsqueeze(-1))[..., 0]


def outcomes(inputs, grad_out):
    """Outputs and gradients of the loops, and of PyTorch's operators."""
    strided = {**inputs, "k": with_element_stride(inputs["k"], 2)}
    return [outputs_and_gradients(jagged_flash_attention, x, grad_out) for x in (inputs, strided)]


def special_inputs(lengths, *, biased):
    """Inputs with scores of NaN, +inf and -inf, in one sample each; the first sample is finite."""
    generator = torch.Generator().manual_seed(0)
    offsets = offsets_of(torch.tensor(lengths), torch.int64, "cpu")
    q, k, v = (torch.rand(sum(lengths), 2, 4, generator=generator) + 0.5 for _ in range(3))
    finite_rows, nan_rows, inf_rows, minus_inf_rows, masked_rows, _ = (
        slice(*bounds) for bounds in itertools.pairwise(offsets.tolist())
    )
    k[nan_rows.stop - 2, 0, 1] = torch.nan
    k[inf_rows.start, 1, 2] = torch.inf
    q[nan_rows.start, 1, 3] = torch.nan
    q[minus_inf_rows.start] = -torch.inf  # all keys are positive: the row has no other score
    inputs = {"q": q, "k": k, "v": v, "q_offsets": offsets}
    if biased:
        inputs["bias"] = torch.randn(sum(lengths), 2, generator=generator)
        inputs["bias"][masked_rows, 1] = -torch.inf
        inputs["bias"][finite_rows.start, 0] = -torch.inf  # one key of several
    return inputs, torch.randn(q.shape, generator=generator)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_nonfinite_scores(biased):
    """Rows whose scores are all -inf give zeros, rows with NaN or +inf give NaN."""
    lengths = [5, 4, 3, 3, 4, 5]
    inputs, grad_out = special_inputs(lengths, biased=biased)
    results = outcomes(inputs, grad_out)
    expected = torch.zeros(sum(lengths), 2, dtype=torch.bool)
    expected[5:9, 0] = expected[5, 1] = True
    expected[9:12, 1] = True
    for name, value in results[0].items():
        assert_same_run(results[1][name], value, num_terms=5 + 4, name=name)
    out = results[0]["out"]
    assert torch.equal(out.isnan().any(2), expected)
    assert torch.equal(out.isnan().all(2), expected)
    assert torch.all(out[12] == 0)
    if biased:
        assert torch.all(out[15:19, 1] == 0)
        assert torch.all(results[0]["bias"][15:19, 1] == 0)


def test_relative_bias_masks_all_keys():
    """Outputs and gradients of the head whose keys are all masked are zeros."""
    inputs = make_flash_inputs(Case("small", 4, 5, 2, 4), "cpu")
    grad_out = torch.ones_like(inputs["q"])
    inputs["relative_bias"] = torch.zeros(3, 2).index_fill_(1, torch.tensor([1]), -torch.inf)
    for results in outcomes(inputs, grad_out):
        for name in ("out", "q", "k", "v", "relative_bias"):
            assert torch.all(results[name][:, 1] == 0), name
            assert torch.all(results[name].isfinite()), name
        assert torch.any(results["out"][:, 0] != 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("nan_filled_memory")
def test_every_gradient_of_the_history_is_written(dtype):
    """Gradients of rows that no query reads are zeros, in memory filled with NaN before."""
    for lengths, targets in (
        ([3, 0, 400, 5], [0, 2, 0, 1]),
        ([3, 400], [0, 0]),
        ([3, 0, 400], 0),
        ([3, 0, 400], 2),
        ([0, 0], 1),
    ):
        inputs = inputs_of(lengths, targets=targets, dtype=dtype)
        grad_out = torch.ones_like(inputs["query"])
        results = outputs_and_gradients(jagged_target_attention, inputs, grad_out)
        for name, result in results.items():
            assert torch.all(result.isfinite()), f"{name} of {lengths}, {targets}"
        read = torch.tensor(targets).expand(len(lengths)).repeat_interleave(torch.tensor(lengths))
        assert torch.equal(results["history"].any(1), read > 0)
