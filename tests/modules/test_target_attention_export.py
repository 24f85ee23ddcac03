"""Initialization, copies, export, compilation and quantization of ``JaggedTargetAttention``."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torchrec import JaggedTensor

from tests.modules.target_attention_inputs import (
    OPTIONS,
    assert_same_uniform,
    draw_prior_weights,
    example,
    make_module,
    outputs_and_gradients_of,
    projected,
)
from torchrec_jagged_attn import JaggedTargetAttention
from torchrec_jagged_attn.modules.projections import is_materialized
from torchrec_jagged_attn.ops.flash_attention import cpu as flash_attention


class OfTensors(nn.Module):
    """An attention that takes the history as two tensors, as exported programs do."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, target, rows, offsets, *others):
        return self.module(target, JaggedTensor(rows, offsets=offsets), *others)


# Options, and what else a call is given.
VARIANTS = {
    "values": ({"value_projection": True}, []),
    "many targets": ({}, []),
    "prior weights": ({}, ["prior_weights"]),
    "request time": ({"age_bias": True, "score": "silu"}, ["timestamps", "request_time"]),
    "indices": ({"value_projection": True}, ["indices"]),
}


def arguments_of(module, names, lengths, device, num_targets=1):
    """Arguments of ``forward``; None for others than ``names``."""
    target, history, *_ = example(module, lengths, device, num_targets)
    places = torch.arange(sum(lengths), device=device)
    given = {
        "timestamps": places**2,
        "prior_weights": draw_prior_weights(lengths, device),
        "indices": places**2 % 12,
        "request_time": torch.arange(len(lengths), device=device) * 500,
    }
    if "indices" in names:
        history = JaggedTensor(history.values()[:12], lengths=history.lengths())
    order = ("timestamps", "prior_weights", "indices", "request_time")
    return target.squeeze(1), history, *(given[x] if x in names else None for x in order)


@pytest.mark.parametrize("name", VARIANTS)
def test_traced_scripted_compiled_and_exported(name, device):
    """With FX, TorchScript, torch.compile and, for any number of samples, ``torch.export``."""
    options, names = VARIANTS[name]
    module = make_module(16, 2, **options).to(device).eval()
    if options.get("age_bias"):
        nn.init.normal_(module.recency_bias.age_weight)
    num_targets = 64 if name == "many targets" else 1  # which materialize keys
    arguments = arguments_of(module, names, [5, 0, 40], device, num_targets)
    expected = module(*arguments)
    if names and "indices" not in names:
        dense_only = [x if i < 3 else None for i, x in enumerate(arguments)]
        assert not torch.allclose(expected, module(*dense_only))
    traced = torch.fx.symbolic_trace(module)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    for same in (traced, torch.jit.script(traced), torch.jit.script(module), compiled):
        assert torch.equal(same(*arguments), expected)

    def tensors(lengths):
        target, history, *others = arguments_of(module, names, lengths, device, num_targets)
        return target, history.values(), history.offsets(), *others

    inputs = tensors([5, 0, 40])
    shapes = [None if x is None else {0: torch.export.Dim.DYNAMIC} for x in inputs]
    shapes = (*shapes[:3], tuple(shapes[3:]))
    exported = torch.export.export(OfTensors(module), inputs, dynamic_shapes=shapes).module()
    for lengths in ([5, 0, 40], [7, 1, 0, 30, 2]):
        assert torch.equal(exported(*tensors(lengths)), OfTensors(module)(*tensors(lengths)))


@pytest.mark.parametrize(
    ("name", "jagged", "by_index"),
    [
        ("ages", False, False),
        ("another-width", True, True),
        ("another-target-width", True, False),
        ("materialized", True, True),
        ("materialized-all-widths", True, False),
        ("materialized-rows", False, False),
    ],
)
def test_compiles_once_for_all_batches(name, jagged, by_index, device):
    options = ({"keys_and_values": "absorbed"} if by_index else {}) | OPTIONS[name]
    module = make_module(64, 2, **options).to(device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=True)
    # No two sizes of a batch are equal, so that none is taken for another; and targets are so few
    # that "auto" absorbs them all, but of rows by index, where it is compiled for either way.
    for lengths, num_targets, num_rows in (
        ([9, 0, 2, 23], 3, 11),
        ([30, 1, 0, 5, 8, 70, 4], 6, 300),
        ([2, 90, 31], 5, 17),
    ):
        target, history, *times = example(module, lengths, device, num_targets, jagged=jagged)
        rows, others = history.values(), {}
        if by_index:
            rows = torch.randn(num_rows, module.history_dim, device=device)
            others["indices"] = torch.arange(sum(lengths), device=device) ** 2 % num_rows
        results = []
        for run in (module, compiled):
            leaf = rows.detach().requires_grad_()
            arguments = target, JaggedTensor(leaf, lengths=history.lengths()), *times
            results.append(
                [*outputs_and_gradients_of(module, run, *arguments, **others), leaf.grad]
            )
        torch.testing.assert_close(*results, rtol=0, atol=0)
    assert counter.frame_count == 1


def test_values_are_the_rows_of_the_history(monkeypatch):
    """Without a copy, for any strides."""
    seen = []
    attend = flash_attention.forward
    monkeypatch.setattr(flash_attention, "forward", lambda x: seen.append(x) or attend(x))
    module = make_module(16, 2, value_projection=False, keys_and_values="materialized")
    target, lengths = torch.randn(2, 16), torch.tensor([2, 3])
    rows = torch.randn(5, 24)[:, 4:20]
    module(target, JaggedTensor(rows, lengths=lengths))
    assert seen[0].v.data_ptr() == rows.data_ptr()
    assert seen[0].v.stride() == (24, 8, 1)


@pytest.mark.parametrize("target_dim", [64, 20])
def test_recency_init_is_identity(target_dim):
    module = projected(64, 4, target_dim=target_dim)
    values = module.v_proj_weight if target_dim == 20 else module.in_proj_weight[128:]
    assert torch.equal(values, torch.eye(64))
    assert torch.equal(module.out_proj.weight, torch.eye(64))
    other = projected(64, 4, history_dim=20)
    assert not torch.equal(other.out_proj.weight, torch.eye(64))


@pytest.mark.parametrize(
    ("init", "history_dim"), [("mha", 64), ("mha", 48), ("recency", 48)], ids=str
)
def test_init_has_the_distribution_of_multihead_attention(init, history_dim):
    torch.manual_seed(0)
    module = projected(64, 4, history_dim=history_dim, recency_bias=False, init=init)
    mha = nn.MultiheadAttention(64, 4, kdim=history_dim, vdim=history_dim)
    for name, theirs in mha.state_dict().items():
        ours = module.state_dict()[name]
        if init == "recency" and name == "q_proj_weight":
            assert torch.all(ours == 0)
            continue
        assert_same_uniform(ours, theirs)
        if name.endswith("bias"):
            assert torch.all(ours == 0), name


@pytest.mark.parametrize("init", ["recency", "mha"])
@pytest.mark.parametrize("value_projection", [True, False])
def test_queries_and_keys_are_initialized_like_multihead_attention(value_projection, init):
    """With ``init="recency"``, queries are initialized to zero."""
    torch.manual_seed(0)
    module = JaggedTargetAttention(64, 4, value_projection=value_projection, init=init)
    if value_projection:
        queries, keys, _ = module.in_proj_weight.chunk(3)
    else:
        queries, keys = module.q_proj_weight, module.k_proj_weight
    theirs = nn.MultiheadAttention(64, 4).in_proj_weight.chunk(3)
    assert_same_uniform(keys, theirs[1])
    if init == "mha":
        assert_same_uniform(queries, theirs[0])
    else:
        assert torch.all(queries == 0)
    assert torch.all(module.in_proj_bias == 0)


@pytest.mark.parametrize("name", OPTIONS)
def test_from_the_meta_device(name):
    """Initialize children first, like DistributedModelParallel."""

    def reset(child):
        if child._parameters:
            child.to_empty(device="cpu", recurse=False)
            torch.manual_seed(1)
            child.reset_parameters()

    module = make_module(16, 2, device="meta", **OPTIONS[name])
    assert all(parameter.is_meta for parameter in module.parameters())
    module.apply(reset)
    expected = make_module(16, 2, **OPTIONS[name])
    torch.manual_seed(1)
    expected.reset_parameters()
    torch.testing.assert_close(module.state_dict(), expected.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name in OPTIONS if "half" not in name])
def test_copies_compute_the_same(name, tmp_path):
    module = make_module(16, 2, **OPTIONS[name])
    arguments = example(module, [5, 0, 40])
    expected = module(*arguments)
    loaded = make_module(16, 2, **OPTIONS[name])
    torch.save(module.state_dict(), tmp_path / "state.pt")
    loaded.load_state_dict(torch.load(tmp_path / "state.pt"), strict=True)
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded]
    copies.append(copy.deepcopy(module).eval())
    for other in copies:
        assert repr(other).splitlines()[0] == repr(module).splitlines()[0]
        assert torch.equal(other(*arguments), expected)


def test_compiles_under_autocast():
    module = projected(16, 2)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    arguments, autocast = example(module, [5, 0, 40]), torch.autocast("cpu", torch.bfloat16)
    results = [
        outputs_and_gradients_of(module, autocast(run), *arguments) for run in (module, compiled)
    ]
    assert results[0][0].dtype == torch.bfloat16
    torch.testing.assert_close(*results, rtol=0, atol=0)


MANY = 40  # targets per sample of a module of 8 heads: materialized keys and values are the cheaper


@pytest.mark.parametrize("jagged", [False, True], ids=["dense", "jagged"])
@pytest.mark.parametrize(("history_dim", "by_index"), [(64, False), (48, False), (64, True)])
def test_many_targets_materialize_keys_and_values(history_dim, by_index, jagged, device):
    """Bit-equal to that option; few targets are bit-equal to the other option."""
    generator = torch.Generator().manual_seed(0)
    history = torch.randn(12 if by_index else 40, history_dim, generator=generator).to(device)
    indices = torch.arange(40, device=device) ** 2 % 12 if by_index else None
    history = JaggedTensor(history, lengths=torch.tensor([30, 0, 10], device=device))
    results = {}
    for option in ("auto", "absorbed", "materialized"):
        torch.manual_seed(0)
        module = projected(
            64, 8, history_dim=history_dim, keys_and_values=option
        ).to(device)  # fmt: skip
        for num_targets in (2, MANY):
            target = torch.randn(3 * num_targets, 64, generator=generator.manual_seed(1)).to(device)
            if jagged:
                lengths = torch.tensor([1, 3, 3 * num_targets - 4], device=device)
                target = JaggedTensor(target, lengths=lengths)
            else:
                target = target.view(3, num_targets, 64)
            tensors = outputs_and_gradients_of(module, module, target, history, indices=indices)
            results[option, num_targets] = tensors
    for num_targets, option, other in (
        (2, "absorbed", "materialized"),
        (MANY, "materialized", "absorbed"),
    ):
        chosen = results["auto", num_targets]
        assert all(map(torch.equal, chosen, results[option, num_targets]))
        assert not all(map(torch.equal, chosen, results[other, num_targets]))


@pytest.mark.parametrize(
    ("device_type", "dtype", "num_samples", "most_absorbed", "projected"),
    [
        ("cuda", torch.bfloat16, 1000, 18, True),
        ("cuda", torch.bfloat16, 1000, 12, False),
        ("cuda", torch.float32, 1000, 8, True),
        ("cuda", torch.float32, 1000, 4, False),
        ("cuda", torch.bfloat16, 1, 163, True),  # too few to fill a GPU by themselves
        ("cpu", torch.float32, 1000, 46, True),
        ("cpu", torch.float32, 1000, 26, False),
        ("cpu", torch.float32, 1, 46, True),
    ],
)
def test_auto_rule(device_type, dtype, num_samples, most_absorbed, projected):
    """The numbers in ``docs/kernels.md``, for 4 heads and width 128."""

    def makes_keys(num_targets, jagged):
        with FakeTensorMode():
            history = torch.empty(9, 128, device=device_type, dtype=dtype)
            offsets = torch.empty(num_samples + 1, device=device_type, dtype=torch.int64)
        shape = [num_samples * num_targets] if jagged else [num_samples, num_targets]
        return is_materialized(shape, history, offsets, jagged, 128, 4, projected, "softmax", 0)

    kinds = [True, False] if num_samples > 1 else [True]  # the batch size of others plays no part
    for jagged in kinds:
        assert not makes_keys(most_absorbed, jagged)
        assert makes_keys(most_absorbed + 1, jagged)


@pytest.mark.parametrize(
    ("device_type", "width", "expected"),
    [
        ("cpu", 16, False),  # one head saves no arithmetic
        ("cuda", 512, True),
        ("cuda", 516, False),  # attention over keys has heads of up to 512 columns
    ],
)
def test_materialized_keys_of_one_head(device_type, width, expected):
    with FakeTensorMode():
        history = torch.empty(9, width, device=device_type)
        offsets = torch.empty(2, dtype=torch.int64, device=device_type)
    args = [1, 5000], history, offsets, False, width, 1, True, "softmax", 0
    assert is_materialized(*args) == expected


def test_recompiles_at_the_crossover(device):
    module = projected(64, 2).to(device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=True)
    for lengths, num_targets in (
        ([9, 0, 2, 23], 3),
        ([30, 1, 4], 700),
        ([5, 7, 1], 4),
        ([3, 8], 650),
    ):
        arguments = example(module, lengths, device, num_targets)
        torch.testing.assert_close(compiled(*arguments), module(*arguments), rtol=0, atol=0)
    assert counter.frame_count == 2


def test_dynamic_quantization():
    """Quantization of linear layers must not replace weights that attention reads."""
    module = projected(16, 2)
    arguments = example(module, [5, 0, 40])
    quantized_module = torch.ao.quantization.quantize_dynamic(module)
    assert torch.equal(quantized_module(*arguments), module(*arguments))
