"""Calls that are replayed do what the op does: the same bits, gradients, errors."""

import contextlib
import functools
import itertools
import operator
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.modules.target_attention_inputs import make_module
from tests.target_attention.test_target_attention import arguments_of
from torchrec_jagged_attn import (
    JaggedSelfAttention,
    checks,
    jagged_dense_bmm,
    jagged_flash_attention,
    jagged_jagged_bmm,
    jagged_softmax,
    jagged_target_attention,
    layout,
)
from torchrec_jagged_attn.interaction import gradients as interaction_gradients
from torchrec_jagged_attn.modules.owned_rows import OwnedRows, RemoteHistory
from torchrec_jagged_attn.ops import (
    array_jagged_bmm_jagged_out,
    jagged2_softmax,
    jagged_dense_add,
    jagged_dense_mul,
    jagged_jagged_bmm_jagged_out,
    select_rows,
    take_rows,
)
from torchrec_jagged_attn.runtime import calls
from torchrec_jagged_attn.runtime.launch import Launcher
from torchrec_jagged_attn.runtime.registration import flatten
from torchrec_jagged_attn.target_attention import api as target_attention

LENGTHS = [3, 0, 5], [1, 9, 2, 30], [0, 0], [4]


@pytest.fixture
def device(kernel_device):
    """Each device that launches kernels: what has none is not replayed."""
    return kernel_device


@pytest.fixture(autouse=True)
def programs(device, monkeypatch):
    """All that are recorded, ``None`` for what cannot be. Devices replay what has no values to
    check, as a GPU does.
    """
    recorded = []

    def record(*arguments):
        recorded.append(plain_record(*arguments))
        return recorded[-1]

    plain_record = calls.record
    monkeypatch.setattr(calls, "record", record)
    monkeypatch.setattr(calls, "DEVICES", {torch.device(device).type})
    monkeypatch.setattr(calls, "ENABLED", True)
    # Which asks GPU's tensors alone for their device.
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: torch.cuda.device(x.get_device()))
    for module in (checks, layout, interaction_gradients):
        monkeypatch.setattr(module, "should_validate", lambda x: False)
    return recorded


def offsets_of(lengths, device):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=device)


def draw(*shape, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device).requires_grad_()


def of_target(lengths, device, **options):
    leaves = {
        "query": draw(len(lengths), 2, 2, 16, device=device),
        "history": draw(sum(lengths), 16, device=device, seed=1),
    }
    return jagged_target_attention, leaves, {"offsets": offsets_of(lengths, device), **options}


def of_biased_target(lengths, device, **options):
    attend, leaves, rest = of_target(lengths, device, **options)
    leaves["position_bias"] = draw(9, 2, device=device, seed=2)
    leaves["age_bias"] = draw(7, 2, device=device, seed=3)
    times = torch.arange(sum(lengths), device=device) ** 2
    return attend, leaves, rest | {"timestamps": times}


def of_target_of_requests(lengths, device):
    request_time = torch.arange(len(lengths), device=device) * 50
    return of_biased_target(lengths, device, request_time=request_time)


def of_shared_query(lengths, device):
    attend, leaves, rest = of_target(lengths, device)
    return attend, leaves | {"query": draw(1, 2, 2, 16, device=device)}, rest


def of_target_by_index(lengths, device):
    """Of another number of rows for each batch."""
    attend, leaves, rest = of_target(lengths, device)
    leaves["history"] = draw(1 + sum(lengths) // 3, 16, device=device, seed=1)
    leaves["position_bias"] = draw(9, 2, device=device, seed=2)
    indices = torch.arange(sum(lengths), device=device) ** 2 % len(leaves["history"])
    return attend, leaves, rest | {"indices": indices}


def of_jagged_target_by_index(lengths, device):
    """By indices in int32, over a part of the columns of a table."""
    attend, leaves, rest = of_target_by_index(lengths, device)
    leaves["query"] = draw(3 * len(lengths), 2, 16, device=device)
    leaves["table"] = draw(*leaves.pop("history").shape, device=device).repeat(1, 2).detach()
    steps = torch.arange(len(lengths) + 1, device=device)

    def attend_to_columns(table, **inputs):
        return attend(history=table[:, 16:], **inputs)

    rest = rest | {"query_offsets": 3 * steps, "indices": rest["indices"].int()}
    return attend_to_columns, leaves, rest


def of_flash(lengths, device, **options):
    leaves = {
        name: draw(sum(lengths), 2, 16, device=device, seed=seed)
        for seed, name in enumerate(("q", "k", "v"))
    }
    rest = {"q_offsets": offsets_of(lengths, device), "causal": True}
    return jagged_flash_attention, leaves, rest | options


def of_cross_flash(lengths, device):
    """Of the shapes of ``of_flash``, but other samples."""
    return of_flash(lengths, device, kv_offsets=offsets_of([*reversed(lengths)], device))


def of_relative_flash(lengths, device, **options):
    attend, leaves, rest = of_flash(lengths, device, **options)
    leaves["relative_bias"] = draw(9, 2, device=device, seed=4)
    return attend, leaves, rest


def of_biased_flash(lengths, device):
    attend, leaves, rest = of_relative_flash(lengths, device, causal=False)
    leaves["position_bias"] = draw(9, 2, device=device, seed=3)
    return attend, leaves, rest


def of_self_attention(lengths, device, width=16, dtype=torch.float32, **options):
    """Whose queries, keys and values lie side by side."""
    module = JaggedSelfAttention(width, 2, causal=True, device="meta", **options)
    shapes = {"rows": (sum(lengths), width)}
    shapes |= {name: x.shape for name, x in module.named_parameters()}
    leaves = {
        name: draw(*shape, device=device, seed=seed).detach().to(dtype).requires_grad_()
        for seed, (name, shape) in enumerate(shapes.items())
    }

    def attend(rows, **parameters):
        history = JaggedTensor(rows, offsets=offsets_of(lengths, device))
        return torch.func.functional_call(module, parameters, (history,)).values()

    return attend, leaves, {}


def of_half_flash(lengths, device, kind=of_flash, **rest):
    """Which takes the kernels for Hopper, where it may."""
    attend, leaves, given = kind(lengths, device)
    leaves = {name: x.detach().half().requires_grad_() for name, x in leaves.items()}
    widened = {name: x.repeat_interleave(4, 2) for name, x in leaves.items() if x.dim() == 3}
    return attend, leaves | widened, given | rest


def of_module(
    lengths, device, jagged=False, history_dim=16, value_projection=True, by_index=False, **options
):
    module = make_module(
        16, 2, history_dim=history_dim, value_projection=value_projection, device="meta", **options
    )
    num_targets = [n % 3 for n in range(len(lengths))] if jagged else [1] * len(lengths)
    num_rows = 1 + sum(lengths) // 3 if by_index else sum(lengths)
    indices = torch.arange(sum(lengths), device=device) ** 2 % num_rows if by_index else None
    leaves = {
        "target": draw(sum(num_targets), 16, device=device),
        "rows": draw(num_rows, history_dim, device=device, seed=1),
        **{
            name: draw(*x.shape, device=device, seed=seed)
            for seed, (name, x) in enumerate(module.named_parameters())
        },
    }

    def attend(target, rows, prior_weights=None, **parameters):
        if jagged:
            target = JaggedTensor(target, offsets=offsets_of(num_targets, device))
        history = JaggedTensor(rows, offsets=offsets_of(lengths, device))
        inputs = {"target": target, "history": history, "prior_weights": prior_weights}
        inputs["indices"] = indices
        return torch.func.functional_call(module, parameters, (), inputs)

    return attend, leaves, {}


def weighted(kind):
    """With prior weights, some of which are zero."""

    def of_weighted(lengths, device):
        attend, leaves, rest = kind(lengths, device)
        weights = draw(sum(lengths), device=device, seed=9).detach().clamp_(min=0)
        return attend, leaves | {"prior_weights": weights.requires_grad_()}, rest

    return of_weighted


def seeded(kind):
    """Which drops the same in each call."""

    def of_seeded(lengths, device):
        attend, leaves, rest = kind(lengths, device)

        def attend_with_seed(**tensors):
            torch.manual_seed(5)
            return attend(**tensors)

        return attend_with_seed, leaves, rest

    return of_seeded


def of_placed_target(lengths, device):
    """Rows that are every second one of a larger batch."""
    _, leaves, rest = of_target_of_requests(lengths, device)
    rest["row_numbers"] = 2 * torch.arange(sum(lengths), device=device)
    rest["row_number_ends"] = 2 * rest["offsets"][1:]
    rest["dropout"] = torch.tensor([7, 2**30], device=device)

    def attend(**inputs):
        arguments = arguments_of(inputs, score="silu", for_backward=torch.is_grad_enabled())
        return target_attention.call_target_attention(*flatten(arguments))

    return attend, leaves, rest


def with_lse(lengths, device):
    """Outputs and log-sum-exps side by side: their gradients are views."""
    _, leaves, rest = of_placed_target(lengths, device)
    leaves["bias"] = draw(sum(lengths), device=device, seed=4)

    def attend(**inputs):
        arguments = arguments_of(inputs, for_backward=torch.is_grad_enabled())
        out, lse = target_attention.target_attention_with_lse(arguments)
        return torch.cat([out, lse.unsqueeze(-1)], -1)

    return attend, leaves, rest


def of_dense(lengths, device):
    """Products of rows by their sample's matrix, and of rows by rows, and softmax of columns."""
    leaves = {
        "x": draw(sum(lengths), 8, device=device),
        "y": draw(len(lengths), 8, 3, device=device, seed=1),
    }

    def attend(x, y, offsets):
        weights = jagged_softmax(jagged_dense_bmm(x, y, offsets), offsets)
        return jagged_jagged_bmm(weights, x, offsets)

    return attend, leaves, {"offsets": offsets_of(lengths, device)}


def of_transposed(lengths, device):
    """As a batch of targets is multiplied: by a view."""
    leaves = {
        "x": draw(sum(lengths), 8, device=device),
        "y": draw(len(lengths), 3, 8, device=device, seed=1),
    }

    def multiply(x, y, offsets):
        return jagged_dense_bmm(x, y.mT, offsets)

    return multiply, leaves, {"offsets": offsets_of(lengths, device)}


def of_pairs(lengths, device):
    others = [*reversed(lengths)]
    leaves = {
        "x": draw(sum(lengths), 8, device=device),
        "y": draw(sum(others), 8, device=device, seed=1),
    }
    total = sum(map(operator.mul, lengths, others))

    def attend(x, y, x_offsets, y_offsets):
        p = jagged_jagged_bmm_jagged_out(x, y, x_offsets, y_offsets, total=total)
        p = jagged2_softmax(p, x_offsets, y_offsets)
        return array_jagged_bmm_jagged_out(p, y, x_offsets, y_offsets, num_rows=len(x))

    offsets = {"x_offsets": offsets_of(lengths, device), "y_offsets": offsets_of(others, device)}
    return attend, leaves, offsets


def of_rows(lengths, device):
    leaves = {
        "x": draw(sum(lengths), 8, device=device),
        "y": draw(len(lengths), 8, device=device, seed=1),
    }

    def add_and_multiply(x, y, offsets):
        return jagged_dense_mul(jagged_dense_add(x, y, offsets), y, offsets)

    return add_and_multiply, leaves, {"offsets": offsets_of(lengths, device)}


def of_taken_rows(lengths, device):
    """Three of each sample, and room for more."""
    num_rows = sum(lengths)
    offsets = offsets_of(lengths, device)
    selected = select_rows(offsets, num_rows=num_rows, keep=3, capacity=num_rows + 5)
    return take_rows, {"x": draw(num_rows, 8, device=device)}, {"selected": selected}


materialized = functools.partial(of_module, keys_and_values="materialized")
of_module_of_rows = functools.partial(of_module, value_projection=False)
INTERACTIONS = {"dense": of_dense, "transposed": of_transposed, "pairs": of_pairs, "rows": of_rows}
KINDS = {
    "target": of_target,
    "target of requests": of_target_of_requests,
    "target of a shared query": of_shared_query,
    "target by index": of_target_by_index,
    "target by index, jagged": of_jagged_target_by_index,
    "target, weighted": weighted(of_target),
    "target, dropped": seeded(functools.partial(of_target, dropout=0.4)),
    "target, SiLU": functools.partial(of_biased_target, score="silu"),
    "target of some rows": of_placed_target,
    "target and log-sum-exps": with_lse,
    "module": of_module,
    "module, jagged": functools.partial(of_module, jagged=True),
    "module by index": functools.partial(of_module, by_index=True),
    "module, weighted": weighted(of_module),
    "module, dropped": seeded(functools.partial(of_module, dropout=0.4)),
    "module, sigmoid": functools.partial(of_module, score="sigmoid"),
    "module, materialized": materialized,
    # Which has a weight for each projection.
    "module, materialized, jagged": functools.partial(materialized, jagged=True, history_dim=8),
    # Whose copy of the rows is made before the op is called.
    "module, materialized, by index": functools.partial(materialized, by_index=True),
    "module, materialized, weighted": weighted(materialized),
    "module, materialized, dropped": seeded(functools.partial(materialized, dropout=0.4)),
    "rows": of_module_of_rows,
    "rows, jagged, by index": functools.partial(of_module_of_rows, jagged=True, by_index=True),
    "rows, materialized": functools.partial(materialized, value_projection=False),
    "rows, materialized, jagged": functools.partial(
        materialized, value_projection=False, jagged=True, bias=False
    ),
    "flash": of_flash,
    "flash, cross": of_cross_flash,
    "flash, biased": of_biased_flash,
    "flash of a window": functools.partial(of_relative_flash, window=9),
    "flash, weighted": weighted(of_flash),
    "flash, dropped": seeded(functools.partial(of_flash, dropout=0.4)),
    "flash of a module": of_self_attention,
    "taken rows": of_taken_rows,
    **{f"op: {name}": kind for name, kind in INTERACTIONS.items()},
}
NUM_OPS = {"op: dense": 3, "op: pairs": 4, "op: rows": 2, "taken rows": 2}


def results_of(attend, leaves, rest, needs=None):
    """The output and the gradients of ``needs``, by default of all leaves."""
    needs = [*leaves] if needs is None else needs
    leaves = {name: x.detach().requires_grad_(name in needs) for name, x in leaves.items()}
    out = attend(**leaves, **rest)
    grad_out = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)
    wanted = [x for name, x in leaves.items() if name in needs]
    return [out, *torch.autograd.grad(out, wanted, grad_out, allow_unused=True)]


@contextlib.contextmanager
def must_replay(monkeypatch):
    def refuse(*_):
        pytest.fail("the op was called")

    with monkeypatch.context() as patch:
        patch.setattr(calls.ReplayedOp, "plainly", refuse)
        yield


@contextlib.contextmanager
def by_the_op(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(calls, "ENABLED", False)
        yield


def assert_replayed(kind, lengths, device, monkeypatch, expected=None, **options):
    """Results are ``expected``, or else what the op gives; returns these."""
    call = kind(lengths, device)
    with must_replay(monkeypatch):
        found = results_of(*call, **options)
    if expected is None:
        with by_the_op(monkeypatch):
            expected = results_of(*call, **options)
    for x, y in zip(found, expected, strict=True):
        assert (x is None) == (y is None)
        if x is not None and y is not None:
            assert x.dtype == y.dtype
            assert torch.equal(x, y)
            assert x.stride() == y.stride() or x.numel() == 0
    return expected


@pytest.mark.parametrize("name", KINDS)
def test_same_bits(name, device, monkeypatch, programs):
    """With one program for many lengths, of which some are cut."""
    kind = KINDS[name]
    first, *others = LENGTHS
    if device.type == "cuda":
        others.append([150, 1, 150])
    else:
        others[0] = [1, 9, 2, 66 if "flash" in name else 130]
    expected = assert_replayed(kind, first, device, monkeypatch)
    for lengths in others:
        assert_replayed(kind, lengths, device, monkeypatch)
    assert_replayed(kind, first, device, monkeypatch, expected)
    forward_and_backward = 2
    assert len(programs) <= 4 * NUM_OPS.get(name, 1) * forward_and_backward
    assert None not in programs


@pytest.mark.parametrize(
    ("kind", "causal", "window"),
    [
        (of_flash, False, None),
        (of_flash, True, 70),
        (of_cross_flash, True, None),
        (of_relative_flash, False, None),
        (of_relative_flash, True, 70),
    ],
    ids=["full", "window", "cross", "relative", "relative-window"],
)
def test_kernels_for_hopper(kind, causal, window, hopper, monkeypatch, programs):
    device, launched = hopper
    calls_of = functools.partial(of_half_flash, kind=kind, causal=causal, window=window)
    longer = [[80, 5, 0, 64], [1, 0, 130, 70, 16]] if launched is None else [[70, 5, 0], [66]]
    for lengths in (longer[0], [3, 20], longer[1]):
        assert_replayed(calls_of, lengths, device, monkeypatch)
    assert launched is None or launched.count("hopper_backward") >= 6
    assert None not in programs


@pytest.mark.parametrize("recency_bias", [True, False], ids=["recency", "no-recency"])
def test_self_attention_on_hopper(recency_bias, hopper, monkeypatch, programs):
    device, launched = hopper
    kind = functools.partial(
        of_self_attention, width=128, dtype=torch.float16, recency_bias=recency_bias
    )
    for lengths in ([130, 5, 0, 64], [3, 20]):
        assert_replayed(kind, lengths, device, monkeypatch)
    assert launched is None or "hopper_forward" in launched
    assert None not in programs


def test_a_program_for_each_window(device, monkeypatch, programs):
    counts = []
    for window in (1, 77, 77, 1):
        attend, leaves, rest = of_flash([80, 5, 0], device)
        call = attend, leaves, rest | {"window": window}
        assert_replayed(lambda *_, call=call: call, [], device, monkeypatch)
        counts.append(len(programs))
    assert 0 < counts[0] < counts[1] == counts[2] == counts[3]
    assert None not in programs


@pytest.mark.parametrize("kind", [of_target, of_flash, of_module], ids=lambda kind: kind.__name__)
def test_no_sample_after_many(kind, device, monkeypatch):
    many = 300 if device.type == "cuda" else 20  # the interpreter takes 10 s for 300
    for lengths in ([2] * many, [0] * many, []):
        assert_replayed(kind, lengths, device, monkeypatch)


def made_of(run):
    """What replays an op of one tensor that does what ``run`` does, and has no gradient."""
    return calls.ReplayedOp(
        torch.ops.aten.clone.default,
        differentiable=[True],
        axes=[0, 0, 0],
        saved=[False, False],
        run=run,
        run_backward=run,
        call_backward=run,
    )


def test_a_number_that_divides_may_be_zero_later(device, monkeypatch, programs):
    def run(x):
        rows = x.shape[0]
        return [x.new_zeros(6 // rows if rows > 0 else 1)]

    op = made_of(run)
    with must_replay(monkeypatch):
        found = [op(torch.ones(rows, device=device)) for rows in (2, 3, 0, 6)]
    assert [x.tolist() for x in found] == [[0] * 3, [0] * 2, [0], [0]]
    assert len(programs) == 2


@pytest.mark.parametrize("options", ["scored", "newest", "segments", "budgets"])
def test_selected_rows(options, device, monkeypatch, programs):
    """All outputs of an op that has no gradient, with one program for many lengths."""
    for lengths in (*LENGTHS, [], LENGTHS[0]):
        num_rows = sum(lengths)
        scores = None if options == "newest" else draw(num_rows, device=device)
        given = {"scores": scores, "keep": 3, "num_rows": num_rows, "capacity": num_rows + 5}
        if options == "segments":
            given |= {"segments": torch.arange(num_rows, device=device) % 2, "keep": [1, 2]}
        if options == "budgets":
            given["keep"] = torch.arange(len(lengths), device=device)
        offsets = offsets_of(lengths, device)
        with must_replay(monkeypatch):
            found = select_rows(offsets, **given)
        with by_the_op(monkeypatch):
            expected = select_rows(offsets, **given)
        for x, y in zip(found, expected, strict=True):
            assert x.dtype == y.dtype
            assert torch.equal(x, y)
    assert len(programs) <= 5
    assert None not in programs


@pytest.mark.parametrize("sizes", [(-1, 4), (4, -1), (-1,), (-1, 2, 2)])
def test_strides_of_what_is_reshaped(sizes, device, monkeypatch, programs):
    """A view where the op has one: products may round by the strides of what they multiply."""

    def run(x):
        return [x.new_zeros(x.reshape(*sizes).stride())]

    op = made_of(run)
    for rows in (1, 2, 3, 4):
        wide = torch.ones(rows, 2, 8, device=device)
        for x in (
            wide[..., :4], wide[..., ::2], wide[:, :1, :4], wide[:1, :1, :1].expand(rows, 2, 4),
            wide[:, 0, :4], wide[:, 0].T, wide.transpose(0, 1), wide[:1, :, :4].expand(rows, 2, 4),
        ):  # fmt: skip
            with must_replay(monkeypatch):
                assert op(x).shape == run(x)[0].shape


def test_a_copy_that_keeps_its_strides(device, monkeypatch, programs):
    """It is left to the op; what has gaps is copied without them."""
    op = made_of(lambda x: [x.to(torch.float16)])
    x = torch.ones(3, 4, device=device)
    with must_replay(monkeypatch):
        assert op(x[:, :2]).is_contiguous()
    op(x.T)
    assert programs[1:] == [None]


def test_bits_of_targets_that_are_not_contiguous(device, monkeypatch):
    attend, leaves, rest = materialized(LENGTHS[0], device)
    leaves["target"] = leaves["target"].detach().T.contiguous().T
    assert_replayed(lambda *_: (attend, leaves, rest), LENGTHS[0], device, monkeypatch)


@pytest.fixture
def group(device):
    """Of one rank."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("value_projection", [True, False])
def test_rows_that_stay(value_projection, group, device, monkeypatch, programs):
    """Numbers of queries differ from batch to batch, and are no strides."""
    width = 40 if value_projection else 48  # of no other test: the kinds are new
    module = make_module(width, 2, value_projection=value_projection, device=device)
    for num_targets, lengths in (([2, 0, 1], [3, 0, 5]), ([1, 3, 2, 1], [1, 9, 2, 30])):
        rows = draw(sum(lengths), width, device=device)
        of_rows = torch.tensor(lengths, device=device)
        positions = torch.cat([torch.arange(-n, 0, device=device) for n in lengths])
        owned = OwnedRows(rows, of_rows, positions, None, None, [len(lengths)], [0], group)
        target = JaggedTensor(
            draw(sum(num_targets), width, device=device), offsets=offsets_of(num_targets, device)
        )
        with must_replay(monkeypatch):
            out = module(target, RemoteHistory(of_rows, sum(lengths), owned)).wait()
            out.square().sum().backward()
        assert len(programs) == 2
        assert None not in programs


def test_lengths_among_strides(device, monkeypatch, programs):
    """Each makes a kind, of which there are not more and more programs."""
    op = made_of(lambda x: [x.new_zeros(x.shape[0])])
    for rows in range(2, 602):
        op(torch.ones(3, rows, device=device).T)
    assert 0 < len(programs) < 300
    op(torch.ones(3, 601, device=device).T)  # a second time, from which on it is replayed
    with must_replay(monkeypatch):
        op(torch.ones(3, 601, device=device).T)


def test_what_two_inputs_share(device, monkeypatch):
    """Offsets that are one tensor, equal ones, and others: of one kind but for their address."""
    attend, leaves, rest = of_flash(LENGTHS[1], device)
    same = rest["q_offsets"]
    for kv_offsets in (same, same.clone(), offsets_of([*reversed(LENGTHS[1])], device), same):
        call = attend, leaves, rest | {"kv_offsets": kv_offsets}
        with must_replay(monkeypatch):
            found = results_of(*call)
        with by_the_op(monkeypatch):
            assert all(map(torch.equal, found, results_of(*call)))


def test_rows_that_are_not_aligned(device, monkeypatch):
    attend, leaves, rest = of_target(LENGTHS[1], device)
    for shift in (0, 1, 2, 3, 0):
        flat = torch.zeros(leaves["history"].numel() + 4, device=device)
        moved = flat[shift : shift + leaves["history"].numel()].view_as(leaves["history"])
        moved.copy_(leaves["history"].detach())
        out = attend(leaves["query"], moved, **rest)
        with by_the_op(monkeypatch):
            assert torch.equal(out, attend(leaves["query"], moved, **rest))


class Kernel(Launcher):
    """Sees what it is launched with."""

    def __init__(self):
        super().__init__(None)
        self.launched = []

    def launch(self, grid, arguments, constants):
        self.launched.append(arguments)


@pytest.mark.parametrize(
    ("rows", "num_allocations"),
    [(3, 3), (2**17, 4), (2**20 + 1, 5)],
    ids=["all-scratch-fits", "one-does-not", "none-fits"],
)
def test_scratch_is_one_allocation(rows, num_allocations, device, monkeypatch, programs):
    """Of up to 1 MiB. Neither what is returned nor what an operator takes is scratch."""
    kernel = Kernel()

    def run(x):
        dtypes = torch.uint8, torch.float64, torch.float32
        scratch = [x.new_empty(x.shape[0], dtype=dtype) for dtype in dtypes]
        out, zeros = x.new_empty(x.shape[0]), x.new_zeros(x.shape[0])
        kernel((1,), (*scratch, out, zeros), {})
        return [out, zeros]

    op, x = made_of(run), torch.ones(rows, device=device)
    op(x)
    with must_replay(monkeypatch):
        returned = op(x)
    assert len(programs) == 1
    made = kernel.launched[-1]
    assert len({x.untyped_storage().data_ptr() for x in made}) == num_allocations
    assert returned.data_ptr() == made[3].data_ptr()
    for x in made[3:]:
        assert x.untyped_storage().nbytes() == 4 * rows
    assert not made[4].any()
    for value, x in enumerate(made):
        assert x.data_ptr() % 16 == 0
        x.fill_(value)
    assert all(bool((x == value).all()) for value, x in enumerate(made))


@pytest.fixture
def forgets():
    """What is kept of calls is forgotten after the test."""
    yield
    target_attention.call_target_attention.replay = None


@pytest.mark.usefixtures("forgets")
def test_a_scale_that_changes(device, monkeypatch, programs):
    """It makes no program for each of its values, and leaves room for others."""
    attend, leaves, rest = of_target(LENGTHS[0], device)
    attend = functools.partial(attend, **leaves, **rest)
    for step in range(100):
        attend(scale=0.1 + step)
    assert 0 < len(programs) < 80
    expected = attend(scale=0.7)
    with must_replay(monkeypatch):
        assert torch.equal(attend(scale=0.7), expected)


@pytest.mark.parametrize("scales", [[1.0, 1, 1.0], [0.0, -0.0, 0.0]], ids=str)
def test_numbers_that_are_equal_but_not_the_same(scales, device, monkeypatch):
    attend, leaves, rest = of_flash(LENGTHS[0], device)
    for scale in scales:
        call = attend, leaves, rest | {"scale": scale}
        with must_replay(monkeypatch):
            found = results_of(*call)
        with by_the_op(monkeypatch):
            expected = results_of(*call)
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(x.view(torch.int32), y.view(torch.int32))  # zeros have signs


def test_what_does_not_fit_is_refused_after_replays(device, monkeypatch, programs):
    """A program is for what its checks passed alone; and what is refused ends no replays."""
    width = 24  # of no other test: the kind is new

    def call(num_samples, lengths):
        x, y = draw(sum(lengths), width, device=device), draw(num_samples, width, device=device)
        return jagged_dense_mul(x, y, offsets_of(lengths, device))

    call(2, [3, 4])
    with must_replay(monkeypatch):
        call(3, [1, 0, 2])
        assert len(programs) == 1
        for num_samples, lengths in ((3, [3, 4]), (2, [3, 4, 0])):
            with pytest.raises(ValueError, match=r"y must have shape \[B, D\] = "):
                call(num_samples, lengths)
        assert len(programs) == 1
        call(0, [])
    assert len(programs) == 2


def test_offsets_of_pairs_are_checked_after_replays(device, monkeypatch):
    lengths = LENGTHS[0]
    attend, leaves, rest = of_pairs(lengths, device)
    attend(**leaves, **rest)
    x, y, x_offsets = leaves["x"], leaves["y"], rest["x_offsets"]
    fewer, num_pairs = x_offsets[:-1].contiguous(), sum(n * n for n in lengths)
    p = draw(num_pairs, device=device)
    with must_replay(monkeypatch):
        attend(**leaves, **rest)
        for call in (
            lambda: jagged_jagged_bmm_jagged_out(x, y, x_offsets, fewer, total=num_pairs),
            lambda: array_jagged_bmm_jagged_out(p, y, x_offsets, fewer, num_rows=len(x)),
            lambda: jagged2_softmax(p, x_offsets, fewer),
        ):
            with pytest.raises(ValueError, match=r"y_offsets must have shape \[B \+ 1\] = \[4\]"):
                call()


def test_values_are_validated_if_asked_for(device, monkeypatch):
    monkeypatch.setenv("TORCHREC_JAGGED_ATTN_VALIDATE", "1")
    attend, leaves, rest = of_target(LENGTHS[0], device)
    called = []
    monkeypatch.setattr(calls.ReplayedOp, "plainly", lambda self, *_: called.append(self))
    with pytest.raises(AttributeError):  # there is no output
        attend(**leaves, **rest).shape  # noqa: B018
    assert called


@pytest.mark.parametrize("needs", [["query"], ["history"]])
def test_not_all_need_a_gradient(needs, device, monkeypatch):
    assert_replayed(of_target, LENGTHS[0], device, monkeypatch, needs=needs)


@pytest.mark.parametrize("kind", [of_target, with_lse])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_gradient(mode, kind, device, monkeypatch):
    attend, leaves, rest = kind(LENGTHS[0], device)
    expected = attend(**leaves, **rest)
    with mode(), must_replay(monkeypatch):
        out = attend(**leaves, **rest)
    assert not out.requires_grad
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


@pytest.mark.parametrize("of_out", [True, False])
def test_gradient_of_one_output_alone(of_out, device, monkeypatch):
    """That of the other is zeros."""
    attend, leaves, rest = with_lse(LENGTHS[0], device)

    def attend_to_one(**inputs):
        joined = attend(**inputs)
        return joined[..., :-1] if of_out else joined[..., -1]

    def kind(*_):
        return attend_to_one, leaves, rest

    assert_replayed(kind, LENGTHS[0], device, monkeypatch)


@pytest.mark.parametrize("kind", [of_target, of_rows])
def test_second_derivatives_are_refused(kind, device):
    attend, leaves, rest = kind(LENGTHS[0], device)
    out = attend(**leaves, **rest).sum()
    with pytest.raises(NotImplementedError, match="no second derivative, got create_graph=True"):
        torch.autograd.grad(out, [*leaves.values()], create_graph=True)


@pytest.mark.parametrize("kind", INTERACTIONS.values(), ids=INTERACTIONS)
@pytest.mark.parametrize("needs", [["x"], ["y"]])
def test_not_all_of_an_interaction_need_a_gradient(kind, needs, device, monkeypatch, programs):
    for lengths in LENGTHS[:3]:
        assert_replayed(kind, lengths, device, monkeypatch, needs=needs)
    assert None not in programs


def test_what_is_kept_for_backward(device):
    """No more than the op keeps: a sum needs neither of what it adds."""
    x, y = draw(8, 4, device=device) * 1, draw(3, 4, device=device, seed=1)
    kept = weakref.ref(x)
    out = jagged_dense_add(x, y, offsets_of(LENGTHS[0], device))
    del x
    assert kept() is None
    assert torch.autograd.grad(out.sum(), y)[0].shape == y.shape


def test_what_made_timestamps_is_not_kept(device, monkeypatch):
    """They have no gradient, even if they require one."""
    attend, leaves, rest = of_biased_target(LENGTHS[0], device)
    x = draw(8, device=device) * 1
    kept = weakref.ref(x)
    with must_replay(monkeypatch):
        out = attend(**leaves, **rest | {"timestamps": x * x})
    del x
    assert kept() is None
    assert torch.autograd.grad(out.sum(), leaves["age_bias"])


def test_graphs_are_kept_if_asked_for(device):
    attend, leaves, rest = of_target(LENGTHS[0], device)
    out = attend(**leaves, **rest).sum()
    first = torch.autograd.grad(out, leaves["history"], retain_graph=True)
    assert torch.equal(*first, *torch.autograd.grad(out, leaves["history"]))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, leaves["history"])


def test_what_was_saved_may_not_change(device):
    attend, leaves, rest = of_target(LENGTHS[0], device)
    history = leaves["history"] * 1
    out = attend(leaves["query"], history, **rest).sum()
    history.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_hooks_on_saved_tensors(device, programs):
    attend, leaves, rest = of_target(LENGTHS[0], device)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x):
        attend(**leaves, **rest).sum().backward()
    assert packed
    assert not programs


def test_modes_and_subclasses(device, programs):
    attend, leaves, rest = of_target(LENGTHS[0], device)
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) for name, x in (leaves | rest).items()}
        assert attend(**fake).shape == (3, 2, 2, 16)

    class Other(torch.Tensor):
        pass

    leaves["query"] = leaves["query"].detach().as_subclass(Other)
    assert isinstance(attend(**leaves, **rest), Other)
    assert not programs


def test_a_gradient_that_is_expanded(device, monkeypatch, programs):
    attend, leaves, rest = of_target(LENGTHS[0], device)
    grads = torch.autograd.grad(attend(**leaves, **rest).sum(), [*leaves.values()])
    monkeypatch.setattr(calls, "ENABLED", False)
    expected = torch.autograd.grad(attend(**leaves, **rest).sum(), [*leaves.values()])
    assert all(map(torch.equal, grads, expected))
    assert None not in programs


def test_threads(device):
    """Each of which may be the first to record."""
    failures = []
    call = of_target(LENGTHS[0], device)
    expected = results_of(*call)

    def attend():
        try:
            for _ in range(3):
                assert all(map(torch.equal, results_of(*call), expected))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=attend) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


SCALES = itertools.count(1e-3, 1e-3)


def of_new_kind(device):
    """One that no other call has."""
    attend, leaves, rest = of_target(LENGTHS[0], device)
    return attend, leaves, rest | {"scale": 0.3 + next(SCALES)}


def test_nothing_is_recorded_into_a_graph(device, monkeypatch, programs):
    """Where its launches would be, too; the kind is recorded later."""
    call = of_new_kind(device)
    with monkeypatch.context() as patch:
        patch.setattr(calls, "is_capturing", lambda: True)
        expected = results_of(*call)
    assert not programs
    with must_replay(monkeypatch):
        assert all(map(torch.equal, results_of(*call), expected))
    assert len(programs) == 2


def test_where_tangents_may_come(device, monkeypatch, programs):
    """The op looks for them, which cannot be recorded; a later call can."""
    call = of_new_kind(device)
    with forward_ad.dual_level():
        expected = results_of(*call)
    assert not programs
    with must_replay(monkeypatch):
        assert all(map(torch.equal, results_of(*call), expected))
    assert len(programs) == 2


def test_without_a_library(device, monkeypatch, programs):
    monkeypatch.setattr(target_attention.call_target_attention, "replay", lambda *_: None)
    attend, leaves, rest = of_target(LENGTHS[0], device)
    attend(**leaves, **rest).sum().backward()
    assert leaves["query"].grad is not None
    assert not programs
