"""The Gluon kernels of target attention, in numpy; on a GPU, other tests run them."""

import functools

import pytest
import torch

from tests.attention.test_dropout import assert_weights_are_dropped
from tests.combinations import each_pair
from tests.kernels.gluon_in_numpy import gluon_in_numpy
from tests.oracles import target_attention_oracle
from tests.samples import assert_other_samples_never_matter
from tests.target_attention.test_log_sum_exp import assert_merges as assert_owners_merge
from tests.target_attention.test_log_sum_exp import assert_right as assert_right_with_lse
from tests.target_attention.test_log_sum_exp import assert_rows_behind_never_matter_to
from tests.target_attention.test_log_sum_exp import make_inputs as make_inputs_of_lse
from tests.target_attention.test_target_attention import (
    FAR_TIMES,
    REQUEST_TIMES,
    arguments_of,
    assert_right,
    bucket_distances,
    cancelling_gradients_inputs,
    draw_prior_weights,
    inputs_of,
    inputs_of_ages,
    inputs_of_far_times,
)
from tests.target_attention.test_target_attention_codes import (
    assert_codes_behind_never_matter,
    assert_indexed_equals_gathered,
    assert_right_over_codes,
    inputs_of_codes,
)
from tests.target_attention.test_target_attention_rows import FUNCTIONS as INDEXED_FUNCTIONS
from tests.target_attention.test_target_attention_rows import indexed_inputs
from tests.tolerance import assert_matches_oracle, outputs_and_gradients
from torchrec_jagged_attn import jagged_target_attention
from torchrec_jagged_attn.ops.registration import flatten

pytestmark = pytest.mark.interpreter  # and Triton's kernels around them

CPU = torch.device("cpu")
LENGTHS = [560, 0, 3, 1, 33, 0]  # one_warp cuts the first one


@pytest.fixture
def launched():
    """The kernels that a test has launched."""
    with gluon_in_numpy() as names:
        yield names


def make_inputs(lengths, dtype, num_heads=2, num_targets=1, width=16, num_positions=0, num_ages=0):
    """Inputs with tables of so many positions and ages, and timestamps for them."""
    inputs = inputs_of(lengths, CPU, dtype, num_heads, num_targets, width)
    generator = torch.Generator().manual_seed(1)
    timestamps = None
    if num_positions:
        table = torch.randn(num_positions, num_heads, generator=generator)
        inputs["position_bias"] = table.to(dtype)
    if num_ages:
        inputs["age_bias"] = torch.randn(num_ages, num_heads, generator=generator).to(dtype)
        timestamps = (14 * torch.rand(sum(lengths), generator=generator)).exp().long()
    return inputs, timestamps


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("num_targets", "num_heads", "width", "num_positions", "num_ages"),
    [
        (1, 4, 16, 0, 0),
        (1, 4, 16, 30, 0),
        (2, 3, 48, 12, 30),
        (1, 1, 256, 0, 70),
        (4, 2, 16, 12, 0),
        (1, 8, 24, 5, 0),
    ],
)
def test_right(num_targets, num_heads, width, num_positions, num_ages, dtype, launched):
    shape = num_heads, num_targets, width, num_positions, num_ages
    inputs, timestamps = make_inputs(LENGTHS, dtype, *shape)
    assert_right(inputs, timestamps=timestamps)
    assert set(launched) == {"one_warp_forward", "one_warp_backward"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("num_levels", "num_codes", "num_heads", "row_bytes"),
    [(3, 25, 1, 5), (3, 25, 4, 8), (3, 12, 2, 3), (5, 40, 8, 14), (255, 3, 1, 3), (3, 160, 2, 32)],
)
def test_rows_of_codes(num_levels, num_codes, num_heads, row_bytes, dtype, launched):
    """With biases, and any stride of bytes."""
    inputs = inputs_of_codes(LENGTHS, dtype, num_levels, num_codes, num_heads, row_bytes)
    assert_right_over_codes(inputs, num_levels)
    assert set(launched) == {"one_warp_forward", "one_warp_backward"}


@pytest.mark.usefixtures("nan_filled_memory")
def test_rows_of_codes_behind_the_last_offset(launched):
    assert_codes_behind_never_matter(inputs_of_codes(LENGTHS, torch.float32))
    assert set(launched) == {"one_warp_forward", "one_warp_backward"}


@pytest.mark.parametrize("score", ["silu", "sigmoid"])
def test_rows_of_codes_and_other_scores(score, launched):
    """Codes beyond the end of a sample are not zeros, and must be masked."""
    inputs = inputs_of_codes(LENGTHS, torch.float32, biased=False)
    assert_right_over_codes(inputs, score=score)
    assert set(launched) == {"one_warp_forward", "one_warp_backward"}


def test_rows_of_codes_by_index(launched):
    assert_indexed_equals_gathered(1)
    assert "one_warp_forward" in launched


ONE_OR_NINE_TARGETS = pytest.mark.parametrize(
    ("num_targets", "path"), [(1, "one_warp"), (9, "warpgroup")]
)


@ONE_OR_NINE_TARGETS
@pytest.mark.parametrize("times", [None, *FAR_TIMES], ids=str)
def test_buckets_of_ages(times, num_targets, path):
    options = CPU, torch.float16, num_targets, 64
    if times is None:
        inputs, expected = inputs_of_ages(*options)
    else:
        inputs, expected = inputs_of_far_times(times, *options)
    with gluon_in_numpy(path == "warpgroup") as launched:
        distances = bucket_distances(jagged_target_attention(**inputs))
    assert launched == [f"{path}_forward"]
    assert torch.equal(distances, expected.view(-1, 1, 1, 1).expand_as(distances))


@ONE_OR_NINE_TARGETS
def test_ages_from_the_request(num_targets, path):
    inputs, _ = make_inputs(LENGTHS[:5], torch.float16, 4, num_targets, 64, num_ages=70)
    times, request_time = torch.arange(sum(LENGTHS)) ** 2, torch.tensor(REQUEST_TIMES)
    with gluon_in_numpy(path == "warpgroup") as launched:
        assert_right(inputs, timestamps=times, request_time=request_time)
    assert f"{path}_forward" in launched


@pytest.mark.parametrize("seed", [0, 2, 5, 8])
def test_tables_of_few_buckets(seed, launched):
    """One bucket has most rows of a sample, whose gradients of scores sum to zero."""
    generator = torch.Generator().manual_seed(seed)
    inputs = inputs_of([600, 0, 40], CPU)
    for name in ("query", "history"):
        inputs[name] = torch.randn(inputs[name].shape, generator=generator)
    inputs["position_bias"] = torch.randn(1 + seed, 2, generator=generator)
    inputs["age_bias"] = torch.randn(9 - seed, 2, generator=generator)
    timestamps = (14 * torch.rand(640, generator=generator)).exp().long()
    assert_right(inputs, timestamps=timestamps)
    assert set(launched) == {"one_warp_forward", "one_warp_backward"}


@pytest.mark.parametrize(
    ("num_targets", "num_heads", "width", "num_positions", "num_ages", "shared"),
    [
        (8, 4, 128, 0, 0, False),
        (9, 1, 64, 30, 160, False),
        (16, 1, 16, 0, 0, True),
        (5, 9, 96, 0, 0, False),
        (8, 4, 128, 12, 20, False),
    ],
)
@pytest.mark.parametrize("lengths", [[1100, 0, 3, 1, 65, 0], [0, 0], [128]], ids=str)
def test_warpgroup(num_targets, num_heads, width, num_positions, num_ages, shared, lengths):
    inputs, timestamps = make_inputs(
        lengths, torch.float16, num_heads, num_targets, width, num_positions, num_ages
    )
    if shared:
        inputs["query"] = inputs["query"][:1].contiguous()
    with gluon_in_numpy(multiprocessors=1) as launched:
        assert_right(inputs, timestamps=timestamps)
    assert set(launched) == {"warpgroup_forward", "warpgroup_backward"}


@pytest.mark.parametrize("step", [-40.0, 40.0])
def test_warpgroup_with_scores_far_apart(step):
    """The shift of the softmax is raised if later scores are far above it."""
    inputs, _ = make_inputs([300], torch.float16, 1, 9, 64)
    inputs["query"][...] = 0
    inputs["query"][..., 0] = 8.0
    inputs["history"][:, 0] = step * (torch.arange(300) // 60)
    with gluon_in_numpy(multiprocessors=1) as launched:
        assert_right(inputs)
    assert "warpgroup_forward" in launched


@pytest.mark.parametrize(
    ("num_targets", "num_heads", "width", "dtype", "path", "tables"),
    [
        (1, 3, 16, torch.float16, "one_warp", False),
        (3, 2, 48, torch.float32, "one_warp", True),
        (9, 2, 64, torch.float16, "warpgroup", False),
        (5, 9, 96, torch.float16, "warpgroup", True),
    ],
)
def test_prior_weights(num_targets, num_heads, width, dtype, path, tables):
    lengths = [1100 if path == "warpgroup" else 560, 0, 3, 64, 1]
    buckets = (20, 20) if tables else (0, 0)
    inputs, timestamps = make_inputs(lengths, dtype, num_heads, num_targets, width, *buckets)
    inputs["prior_weights"] = draw_prior_weights(lengths, CPU)
    with gluon_in_numpy(path == "warpgroup") as launched:
        assert_right(inputs, timestamps=timestamps)
        inputs["prior_weights"].zero_()
        grad_out = torch.ones_like(inputs["query"])
        results = outputs_and_gradients(
            functools.partial(jagged_target_attention, timestamps=timestamps), inputs, grad_out
        )
    assert all(torch.all(value == 0) for value in results.values())
    assert set(launched) == {f"{path}_forward", f"{path}_backward"}


@pytest.mark.parametrize(
    ("num_targets", "dtype", "path", "score"),
    [
        (1, torch.float16, "one_warp", "softmax"),
        (3, torch.float32, "one_warp", "silu"),
        (9, torch.float16, "warpgroup", "softmax"),
        (9, torch.float16, "warpgroup", "silu"),
    ],
)
def test_dropout(num_targets, dtype, path, score):
    lengths = [1100 if path == "warpgroup" else 560, 0, 3, 64, 1]
    inputs, _ = make_inputs(lengths, dtype, 2, num_targets, 64, num_positions=20)
    functions = jagged_target_attention, target_attention_oracle
    shape = num_targets * len(lengths), 2, sum(lengths)
    with gluon_in_numpy(path == "warpgroup") as launched:
        assert_weights_are_dropped(functions, inputs, *shape, score=score)
    assert set(launched) == {f"{path}_forward", f"{path}_backward"}


@pytest.mark.parametrize("score", ["silu", "sigmoid"])
@pytest.mark.parametrize(
    ("num_targets", "dtype", "path"),
    [
        (1, torch.float16, "one_warp"),
        (3, torch.float32, "one_warp"),
        (9, torch.float16, "warpgroup"),
    ],
)
def test_scores(num_targets, dtype, path, score):
    lengths = [1100 if path == "warpgroup" else 560, 0, 3, 64, 1]
    inputs, _ = make_inputs(lengths, dtype, 2, num_targets, 64, num_positions=20)
    with gluon_in_numpy(path == "warpgroup") as launched:
        assert_right(inputs, score=score)
    assert set(launched) == {f"{path}_forward", f"{path}_backward"}


@pytest.mark.parametrize("num_targets", [2, 7])
def test_queries_of_all_samples(num_targets):
    inputs, _ = make_inputs(LENGTHS, torch.float16, num_targets=num_targets, num_positions=20)
    inputs["query"] = inputs["query"][:1].contiguous()
    with gluon_in_numpy(num_targets == 7) as launched:
        assert_right(inputs)
    assert launched


@pytest.mark.parametrize("num_targets", [1, 9])
def test_gradient_of_a_shared_query_is_summed_in_fp32(num_targets):
    inputs, grad_out = cancelling_gradients_inputs(num_targets, CPU)
    with gluon_in_numpy(num_targets == 9) as launched:
        results = outputs_and_gradients(jagged_target_attention, inputs, grad_out)
    assert torch.all(results["query"] == 4)
    assert launched


@pytest.mark.parametrize("lengths", [[], [0, 0], [1], [16, 0], [31, 1030]], ids=str)
@pytest.mark.parametrize("num_targets", [0, 1, 9])
def test_lengths(lengths, num_targets):
    inputs, _ = make_inputs(lengths, torch.float16, num_targets=num_targets, num_positions=20)
    with gluon_in_numpy(num_targets == 9) as launched:
        assert_right(inputs)
    assert bool(launched) == bool(lengths)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_repeats_are_bit_equal(dtype, launched):
    """Results do not depend on which chunk of a sample finishes last."""
    inputs, _ = make_inputs([2500, 0, 40, 900], dtype, num_positions=20)
    grad_out = torch.ones_like(inputs["query"])
    first, second = (
        outputs_and_gradients(jagged_target_attention, inputs, grad_out) for _ in range(2)
    )
    for name in first:
        assert torch.equal(first[name], second[name])
    assert launched


@pytest.mark.usefixtures("nan_filled_memory")
@pytest.mark.parametrize("for_backward", [False, True])
def test_without_a_gradient_nothing_is_stored_for_it(for_backward, launched):
    inputs = inputs_of([500, 0, 40], CPU, torch.float16)
    arguments = flatten(arguments_of(inputs, for_backward=for_backward))
    out, residual, _ = torch.ops.torchrec_jagged_attn.target_attention(*arguments)
    assert torch.isfinite(out).all()
    assert residual.numel() == (out.numel() if for_backward else 0)
    assert torch.isfinite(residual).all()
    assert launched


@pytest.mark.parametrize("num_targets", [1, 9])
def test_other_samples_never_matter(num_targets):
    rows = [5, 40, 600, 31]
    inputs, _ = make_inputs(rows, torch.float16, num_targets=num_targets, num_positions=20)
    lengths = {"query": [1] * 4, "out": [1] * 4, "history": rows, "offsets": rows}
    grad_out = torch.ones_like(inputs["query"])
    with gluon_in_numpy(num_targets == 9) as launched:
        assert_other_samples_never_matter(jagged_target_attention, inputs, grad_out, lengths)
    assert launched


@pytest.mark.parametrize(
    ("shape", "num_rows", "dtype"),
    each_pair(
        [(1, 4, 16, 0), (2, 3, 48, 12), (1, 1, 256, 0)],
        [12, 4000],
        [torch.float16, torch.float32],
    ),
    ids=str,
)
def test_rows_by_index(shape, num_rows, dtype, launched):
    """Rows whose index occurs once, and several times."""
    num_targets, num_heads, width, num_positions = shape
    lengths = LENGTHS if num_rows > 12 else [70, 0, 3, 1, 33, 0]
    inputs = indexed_inputs(
        lengths, dtype=dtype, num_rows=num_rows, num_targets=num_targets, num_heads=num_heads,
        width=width,
    )  # fmt: skip
    if num_positions:
        generator = torch.Generator().manual_seed(1)
        table = torch.randn(num_positions, num_heads, generator=generator)
        inputs["position_bias"] = table.to(dtype)
    assert_matches_oracle(*INDEXED_FUNCTIONS, inputs)
    assert set(launched) == {"one_warp_forward", "one_warp_backward"}


@pytest.mark.usefixtures("nan_filled_memory")
def test_dropout_of_rows_by_index(launched):
    inputs = indexed_inputs(LENGTHS, dtype=torch.float32, num_rows=300)
    assert_weights_are_dropped(INDEXED_FUNCTIONS, inputs, len(LENGTHS), 2, sum(LENGTHS))
    assert launched


@pytest.mark.usefixtures("nan_filled_memory")
@pytest.mark.parametrize(
    ("num_targets", "dtype", "others", "path"),
    [
        (1, torch.float16, "prior tables drops", "one_warp"),
        (1, torch.float32, "tables", "one_warp"),
        (4, torch.float32, "prior tables drops indices", "one_warp"),
        (9, torch.float16, "prior tables drops", "warpgroup"),
        (20, torch.float16, "prior", "warpgroup"),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("assert_right", "longest"),
    # Each owner of rows cuts its part of the first sample into chunks.
    [
        (assert_right_with_lse, 1100),
        (assert_owners_merge, 2100),
        *(
            (functools.partial(assert_rows_behind_never_matter_to, num_behind=n), 560)
            for n in (1, 900)
        ),
    ],
    ids=["whole", "owners", "one behind", "many behind"],
)
def test_log_sum_exps(assert_right, longest, num_targets, dtype, others, path):
    inputs = make_inputs_of_lse(CPU, dtype, num_targets, 2, others, [longest, 0, 3, 1, 33])
    with gluon_in_numpy(path == "warpgroup") as launched:
        assert_right(inputs)
    assert set(launched) == {f"{path}_forward", f"{path}_backward"}
