"""Outputs and log-sum-exps of target attention; attention merged over shards of rows."""

import functools
import itertools

import pytest
import torch

from tests.cases import Case, offsets_of
from tests.fixtures import skip_unless_supported
from tests.oracles import target_attention_oracle, weight_factors
from tests.samples import assert_rows_behind_never_matter
from tests.target_attention.test_target_attention import arguments_of, draw_prior_weights, inputs_of
from tests.tolerance import assert_matches_oracle
from torchrec_jagged_attn.ops.registration import flatten
from torchrec_jagged_attn.ops.target_attention.api import call_target_attention
from torchrec_jagged_attn.ops.target_attention.api import (
    target_attention_with_lse as attend_with_lse,
)

CPU = torch.device("cpu")
LENGTHS = [700, 0, 3, 64, 1, 5]  # no row of the 64 counts, where there are prior weights
FEWER = [40, 0, 3, 20, 1]


def joined(out, lse):
    """Concatenate ``out`` and ``lse``, for :func:`assert_matches_oracle`."""
    return torch.cat([out.to(lse.dtype), lse.unsqueeze(-1)], -1)


def attend(**inputs):
    """Call the op; gradients of log-sum-exps of ``-inf`` are set to NaN, which it must ignore."""
    out, lse = attend_with_lse(arguments_of(inputs))
    if lse.requires_grad:
        lse.register_hook(lambda grad: grad.masked_fill(lse == -torch.inf, torch.nan))
    return joined(out, lse)


def attend_by_owner(owners, **inputs):
    """Merge the attention over the rows of each owner rank."""
    num_samples = inputs["offsets"].numel() - 1
    samples = torch.repeat_interleave(
        torch.arange(num_samples, device=owners.device), inputs["offsets"].diff()
    )
    outs, lses = [], []
    for owner in range(4):
        owned = (owners == owner).nonzero().flatten()
        lengths = torch.bincount(samples[owned], minlength=num_samples)
        owned_inputs = {
            name: inputs[name][owned]
            for name in ("history", "prior_weights", "timestamps", "indices")
            if name in inputs and not (name == "history" and "indices" in inputs)
        }
        args = arguments_of(
            inputs | owned_inputs,
            offsets=offsets_of(lengths, torch.int64, owners.device),
            row_numbers=owned.to(inputs["offsets"].dtype),
            row_number_ends=inputs["offsets"][1:],
        )
        out, lse = attend_with_lse(args)
        outs.append(out)
        lses.append(lse)
    stacked = torch.stack(lses)
    empty = (stacked == -torch.inf).all(0)
    weights = torch.softmax(stacked.masked_fill(empty, 0), 0)
    lse = torch.logsumexp(stacked.masked_fill(empty, 0), 0).masked_fill(empty, -torch.inf)
    return joined((torch.stack(outs) * weights.unsqueeze(-1)).sum(0), lse)


def oracle_of(inputs):
    """``target_attention_oracle`` with the arguments of ``inputs``."""
    num_samples, num_rows = inputs["offsets"].numel() - 1, int(inputs["offsets"][-1])
    factors, query = None, inputs["query"]
    if "dropout" in inputs:
        num_targets = query.shape[0] if query.dim() == 3 else num_samples * query.shape[1]
        shape = num_targets, query.shape[-2], num_rows
        r, n = (torch.arange(x, device=query.device) for x in (shape[0] * shape[1], num_rows))
        factors = weight_factors(inputs["dropout"], r, n).view(shape)

    def oracle(history, indices=None, dropout=None, **others):
        others |= {"weight_factors": factors, "return_lse": True}
        rows = history if indices is None else history[indices]
        return joined(*target_attention_oracle(history=rows, **others))

    return oracle


def make_inputs(
    device, dtype, num_targets=1, num_heads=2, others="", lengths=LENGTHS, width=16, layout="dense"
):
    """Random inputs. ``others`` names optional ones: prior, tables, indices, drops (dropout)."""
    skip_unless_supported(Case("lse", 5, 300, 2, width, dtype=dtype), device)
    inputs = inputs_of(lengths, device, dtype, num_heads, num_targets, width)
    num_rows, generator = sum(lengths), torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(device, dtype)

    if layout == "shared":
        inputs["query"] = inputs["query"][:1].contiguous()
    elif layout == "jagged":
        targets = torch.tensor([num_targets + 2, 1, 0, *[num_targets] * (len(lengths) - 3)])
        inputs["query_offsets"] = offsets_of(targets, torch.int64, device)
        inputs["query"] = draw(int(targets.sum()), num_heads, width)
    if "prior" in others:
        inputs["prior_weights"] = draw_prior_weights(lengths, device, dtype)
    if "tables" in others:
        inputs["position_bias"], inputs["age_bias"] = draw(30, num_heads), draw(60, num_heads)
        inputs["timestamps"] = (14 * torch.rand(num_rows, generator=generator)).exp().long()
        inputs["timestamps"] = inputs["timestamps"].to(device)
        inputs["request_time"] = torch.full([len(lengths)], 10**6, device=device)
    if "indices" in others:  # some indices occur once, some several times
        inputs["indices"] = torch.randint(num_rows, [num_rows], generator=generator).to(device)
    if "drops" in others:
        inputs["dropout"] = torch.tensor([7, 2**30], device=device)
    return inputs


def assert_right(inputs):
    assert_matches_oracle(attend, oracle_of(inputs), inputs)


def assert_merges(inputs, dtype=torch.int64):
    """Check :func:`attend_by_owner` with four owners, one of which has no rows."""
    inputs["offsets"] = inputs["offsets"].to(dtype)
    num_rows, device = int(inputs["offsets"][-1]), inputs["history"].device
    generator = torch.Generator().manual_seed(2)
    owners = torch.tensor([0, 1, 1, 3])[torch.randint(4, [num_rows], generator=generator)]
    merge = functools.partial(attend_by_owner, owners.to(device))
    assert_matches_oracle(merge, oracle_of(inputs), inputs)


CASES = [  # from one query row (targets times heads) to more than a block has
    ("dense", 1, 1, torch.float32, ""),
    ("dense", 1, 1, torch.bfloat16, "prior tables"),
    ("dense", 1, 4, torch.float32, "prior tables drops"),
    ("dense", 1, 4, torch.float16, "tables"),
    ("dense", 4, 2, torch.float32, "indices"),
    ("dense", 4, 2, torch.float16, "tables drops indices"),
    ("dense", 9, 2, torch.float32, "prior tables drops"),
    ("dense", 9, 2, torch.float16, "prior tables indices"),
    ("dense", 10, 4, torch.float32, "tables"),
    ("dense", 10, 4, torch.float16, "prior tables drops"),
    ("dense", 40, 2, torch.float16, "prior"),
    ("shared", 9, 2, torch.bfloat16, "tables"),
    ("jagged", 9, 2, torch.float32, "tables drops"),
    ("jagged", 1, 2, torch.float16, "prior indices"),
    ("dense", 3, 2, torch.float64, "prior tables drops"),
    ("jagged", 2, 2, torch.float64, "tables drops indices"),
]


@pytest.mark.parametrize(("layout", "num_targets", "num_heads", "dtype", "others"), CASES, ids=str)
def test_right(layout, num_targets, num_heads, dtype, others, device):
    assert_right(make_inputs(device, dtype, num_targets, num_heads, others, layout=layout))


@pytest.mark.parametrize(("layout", "num_targets", "num_heads", "dtype", "others"), CASES, ids=str)
def test_owners_of_rows(layout, num_targets, num_heads, dtype, others, device):
    """Merging gives the results of one owner of all rows, with the same dropout mask."""
    inputs = make_inputs(device, dtype, num_targets, num_heads, others, FEWER, layout=layout)
    assert_merges(inputs, torch.int32 if "prior" in others else torch.int64)


@pytest.mark.parametrize("num_targets", [1, 20])
def test_owners_of_long_samples(num_targets, device):
    """Each owner splits its rows into chunks."""
    lengths = [2500, 0, 1400]
    assert_merges(make_inputs(device, torch.float32, num_targets, 2, "prior tables", lengths))


@pytest.mark.parametrize("num_targets", [1, 9, 40])
def test_far_scores(num_targets, device):
    """Scores whose exponentials overflow or underflow in fp32."""
    for added in (-2000.0, 2000.0):
        inputs = make_inputs(device, torch.float32, num_targets, 2, "tables", FEWER)
        inputs["position_bias"] += added
        assert_right(inputs)


@pytest.mark.parametrize("num_targets", [1, 9, 40])
def test_without_a_gradient(num_targets, device):
    inputs = make_inputs(device, torch.float16, num_targets, 2, "prior tables", FEWER)
    args = arguments_of(inputs)
    out, lse = attend_with_lse(args)
    for x, expected in zip(
        attend_with_lse(args._replace(for_backward=False)), (out, lse), strict=True
    ):
        assert torch.equal(x, expected)
    assert torch.equal(out, call_target_attention(*flatten(args)))


@pytest.mark.parametrize("num_targets", [1, 9])
def test_gradient_of_one_output(num_targets, device):
    """Gradients of the two outputs add up; NaN gradients of log-sum-exps of -inf are ignored."""
    inputs = make_inputs(device, torch.float32, num_targets, 2, "prior", FEWER)
    inputs = {name: x.requires_grad_(x.is_floating_point()) for name, x in inputs.items()}
    leaves = [inputs[name] for name in ("query", "history", "prior_weights")]
    out, lse = attend_with_lse(arguments_of(inputs))
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    grad_lse = grad_lse.masked_fill(lse == -torch.inf, torch.nan)
    assert grad_lse.isnan().any()
    out_grads, lse_grads, both_grads = (
        torch.autograd.grad(outputs, leaves, grads, retain_graph=True)
        for outputs, grads in (
            (out, grad_out), (lse, grad_lse), ((out, lse), (grad_out, grad_lse)),
        )
    )  # fmt: skip
    for out_grad, lse_grad, both in zip(out_grads, lse_grads, both_grads, strict=True):
        torch.testing.assert_close(out_grad + lse_grad, both)


ROWS_BEHIND = [1, 70, 900]  # fewer than a tile, about one, and several chunks


def assert_rows_behind_never_matter_to(inputs, num_behind):
    """Outputs of query rows behind the last offset are zeros, and their log-sum-exps ``-inf``."""
    rows = ["indices" if "indices" in inputs else "history", "prior_weights", "timestamps"]
    behind = dict.fromkeys(rows, num_behind)
    if "query_offsets" in inputs:
        behind |= dict.fromkeys(("query", "out"), num_behind)
    generator = torch.Generator().manual_seed(4)
    query = inputs["query"]
    samples = query.shape[:1] if "query_offsets" in inputs else [inputs["offsets"].numel() - 1]
    shape = *samples, *query.shape[1:-1], query.shape[-1] + 1
    out_behind = torch.zeros(shape[-1], device=query.device)
    out_behind[-1] = -torch.inf
    grad_out = torch.randn(shape, generator=generator).to(query.device)
    assert_rows_behind_never_matter(attend, inputs, grad_out, behind, out_behind)


@pytest.mark.usefixtures("nan_filled_memory")
@pytest.mark.parametrize(
    ("case", "num_behind"), [*zip(CASES, itertools.cycle(ROWS_BEHIND), strict=False)], ids=str
)
def test_rows_behind_the_last_offset(case, num_behind, device):
    layout, num_targets, num_heads, dtype, others = case
    inputs = make_inputs(device, dtype, num_targets, num_heads, others, FEWER, layout=layout)
    assert_rows_behind_never_matter_to(inputs, num_behind)


@pytest.mark.usefixtures("nan_filled_memory")
@pytest.mark.parametrize("num_samples", [0, 4])
@pytest.mark.parametrize("layout", ["dense", "jagged"])
def test_only_rows_behind(layout, num_samples, device):
    lengths = [0] * num_samples
    for num_targets in (1, 9, 40):
        inputs = inputs_of(lengths, device, torch.float16, num_targets=num_targets)
        inputs["position_bias"] = torch.randn(30, 2, device=device).half()
        if layout == "jagged":
            inputs["query_offsets"] = torch.zeros(num_samples + 1, device=device).long()
            inputs["query"] = inputs["query"].flatten(0, 1)[:0]
        assert_rows_behind_never_matter_to(inputs, 300)


def test_errors(device):
    inputs = make_inputs(device, torch.float32, others="tables", lengths=FEWER)
    numbers, ends = torch.arange(64, device=device), inputs["offsets"][1:]

    def refuses(match, error=ValueError, **others):
        with pytest.raises(error, match=match):
            attend_with_lse(arguments_of(inputs, **others))

    refuses("score must be \"softmax\" for log-sum-exps, got 'silu'", score="silu")
    refuses(
        "row_numbers and row_number_ends must be given together, got row_numbers alone",
        row_numbers=numbers,
    )
    refuses(
        "row_numbers and row_number_ends must be given together, got row_number_ends alone",
        row_number_ends=ends,
    )
    refuses(r"row_numbers must have shape \[N\]", row_numbers=numbers[:3], row_number_ends=ends)
    refuses(r"row_number_ends must have shape \[B\]", row_numbers=numbers, row_number_ends=ends[:3])
    refuses(
        "row_number_ends must be torch.int64 as row_numbers is",
        TypeError,
        row_numbers=numbers,
        row_number_ends=ends.int(),
    )
    refuses(
        "request_time must be given with row_numbers and timestamps, got None",
        row_numbers=numbers, row_number_ends=ends, request_time=None,
    )  # fmt: skip
