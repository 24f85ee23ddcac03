"""The op of ``JaggedTargetAttention``: its schema, its gradients, and how it runs on a GPU."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from torchrec import JaggedTensor

from tests.cases import offsets_of
from tests.combinations import each_pair
from tests.fixtures import PATHS, assert_graph_replays, opcheck, sync_debug_mode
from tests.modules.target_attention_inputs import CPU, example, make_module, projected
from tests.samples import assert_rows_behind_never_matter

OP = torch.ops.torchrec_jagged_attn.multi_head_target_attention.default


def op_arguments(
    device=CPU,
    *,
    jagged=False,
    history_dtype=torch.float32,
    history_dim=16,
    target_dim=16,
    prior=False,
    value_projection=True,
    keys_and_values="auto",
    by_index=False,
):
    """All arguments of the op, by name; the floating-point ones need a gradient."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

    def draw_weight(*shape):
        return (draw(*shape).detach() / shape[-1] ** 0.5).requires_grad_()

    target_offsets = torch.tensor([0, 1, 1, 6], device=device) if jagged else None
    prior_weights = torch.tensor([0.5, 0, 2, 0, 0, 1, 3, 0.25], device=device)
    others = {"in_bias": draw(48), "out_weight": draw_weight(16, 16), "out_bias": draw(16)}
    if not value_projection:
        weights = {"q_weight": draw_weight(16, target_dim), "k_weight": draw_weight(16, 16)}
        weights["v_weight"] = None
        others = {"in_bias": draw(16), "out_weight": None, "out_bias": None}
    elif history_dim == target_dim == 16:
        weights = {"q_weight": draw_weight(48, 16), "k_weight": None, "v_weight": None}
    else:
        weights = {"q_weight": draw_weight(16, target_dim)}
        weights |= {name: draw_weight(16, history_dim) for name in ("k_weight", "v_weight")}
    return {
        "target": draw(6, target_dim) if jagged else draw(3, 2, target_dim),
        "history": draw(5 if by_index else 8, history_dim, dtype=history_dtype),
        "offsets": torch.tensor([0, 3, 3, 8], device=device),
        "query_offsets": target_offsets,
        "indices": torch.arange(8, device=device) ** 2 % 5 if by_index else None,
        **weights,
        **others,
        "bias": prior_weights.requires_grad_() if prior else None,
        "position_bias": draw(3, 2),
        "age_bias": draw(5, 2),
        "timestamps": torch.arange(8, device=device),
        "request_time": torch.tensor([9, 0, 6], device=device) if jagged else None,
        "dropout": None,
        "num_heads": 2,
        "dtype": torch.float32,
        "keys_and_values": keys_and_values,
        "score": "softmax",
        "num_levels": 0,
        "for_backward": True,
    }


@pytest.mark.parametrize(
    ("projections", "jagged", "history_dtype", "prior", "by_index", "path"),
    each_pair(
        [{}, {"history_dim": 20}, {"target_dim": 24}, {"value_projection": False}],
        [False, True],
        [torch.float32, torch.float16],
        [False, True],
        [False, True],
        PATHS,
    ),
    ids=str,
    indirect=["path"],
)
def test_opcheck(projections, jagged, history_dtype, prior, by_index, path, device):
    options = {"jagged": jagged, "history_dtype": history_dtype, "prior": prior}
    arguments = op_arguments(device, by_index=by_index, **options, **projections, **path)
    opcheck(OP, tuple(arguments.values()))


@pytest.mark.parametrize(
    ("value_projection", "history_dtype", "jagged", "path"),
    each_pair([True, False], [torch.float32, torch.float16], [False, True], PATHS),
    ids=str,
    indirect=["path"],
)
def test_opcheck_without_a_gradient(value_projection, history_dtype, jagged, path, device):
    options = {"jagged": jagged, "value_projection": value_projection}
    arguments = op_arguments(device, history_dtype=history_dtype, **options, **path)
    expected = OP(*arguments.values())[0]
    arguments["for_backward"] = False
    values = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments.values()]
    opcheck(OP, tuple(values))
    out, _, *absorbed, _, _, _ = OP(*values)
    assert torch.equal(out, expected)
    assert not any(x.numel() for x in absorbed)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"history_dim": 20},
        {"target_dim": 24},
        {"prior": True},
        {"value_projection": False, "prior": True},
        {"by_index": True},
    ],
    ids=str,
)
def test_gradients_are_those_asked_for(options, path, device):
    arguments = op_arguments(device, **options, **path)
    leaves = [name for name, x in arguments.items() if getattr(x, "requires_grad", False)]
    out = OP(*arguments.values())[0]
    grad_out = torch.randn_like(out)
    out.backward(grad_out)
    for name in leaves:
        alone = {n: x.detach() if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
        alone[name].requires_grad_()
        OP(*alone.values())[0].backward(grad_out)
        assert torch.equal(alone[name].grad, arguments[name].grad), name


@pytest.mark.usefixtures("nan_filled_memory")
@pytest.mark.parametrize(
    ("options", "jagged", "dropout", "path"),
    each_pair(
        [{}, {"prior": True, "history_dim": 20}, {"value_projection": False}, {"by_index": True}],
        [False, True],
        [False, True],
        PATHS,
    ),
    ids=str,
    indirect=["path"],
)
def test_rows_behind_the_last_one(options, jagged, dropout, path, device):
    arguments = op_arguments(device, jagged=jagged, **options, **path)
    if dropout:
        arguments["dropout"] = torch.tensor([7, 2**30], device=device)
    materialized = path["keys_and_values"] == "materialized" and not options.get("by_index")
    behind = {"indices" if options.get("by_index") else "history": 3, "timestamps": 3}
    behind |= {"bias": 3} if arguments["bias"] is not None else {}
    behind |= {"target": 2, "out": 2} if jagged else {}
    assert_rows_behind_never_matter(
        lambda **inputs: OP(*inputs.values())[0],
        arguments,
        torch.randn_like(arguments["target"]),
        behind,
        finite=("history",) if materialized else (),
        num_terms=2 * (16 + 8 + 8 + 16),  # products and sums over rows, forward and backward
    )


@pytest.mark.parametrize("value_projection", [True, False])
def test_is_one_node_of_autograd(value_projection, path):
    options = {"value_projection": value_projection, **path}
    module = make_module(16, 2, age_bias=True, **options)
    target, history, timestamps = example(module, [5, 0, 40])
    out = module(target.requires_grad_(), history, timestamps)
    nodes = [node for node, _ in out.grad_fn.next_functions if node is not None]
    assert {node.name() for node in nodes} == {"torch::autograd::AccumulateGrad"}
    assert len(nodes) == 1 + len(list(module.parameters()))


# CUDA


@pytest.fixture(params=[False, True], ids=["dense", "jagged"])
def run_on_cuda(request, path):
    """Computes an output and all gradients; long enough for the sums of large embedding tables."""
    module = projected(16, 2, age_bias=True, **path).to("cuda")
    target, history, times = example(module, [2000, 0, 3, 5000], "cuda", jagged=request.param)

    def run():
        module.zero_grad()
        rows = history.values().detach().requires_grad_()
        out = module(target, JaggedTensor(rows, lengths=history.lengths()), times)
        out.backward(torch.ones_like(out))
        return [out, rows.grad, *(parameter.grad for parameter in module.parameters())]

    run()  # compiles
    return run


@pytest.mark.gpu
def test_never_waits_and_repeats_are_equal_to_the_bit(run_on_cuda):
    with sync_debug_mode("error"):
        first = run_on_cuda()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(run_on_cuda(), first, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("jagged", [False, True], ids=["dense", "jagged"])
@pytest.mark.parametrize("value_projection", [True, False], ids=["values", "rows"])
def test_cuda_graph_replays_with_other_lengths(value_projection, jagged, path):
    options = {"jagged": jagged, "value_projection": value_projection}
    arguments = op_arguments("cuda", **options, **path)
    leaves = [x for x in arguments.values() if getattr(x, "requires_grad", False)]
    grad_out = torch.randn_like(arguments["target"])

    def run():
        out = OP(*arguments.values())[0]
        return dict(enumerate([out.detach(), *torch.autograd.grad(out, leaves, grad_out)]))

    assert_graph_replays(run, lambda: arguments["offsets"].copy_(torch.tensor([0, 0, 5, 6])))


@pytest.mark.gpu
@pytest.mark.parametrize("no_gradient", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("num_targets", [8, 256])
def test_inference_keeps_nothing_for_backward(num_targets, no_gradient):
    """Also where so many jagged targets take materialized keys and values."""
    width, num_heads, num_rows = 64, 4, 32768
    module = projected(width, num_heads, recency_bias=False, bias=False)
    module = module.to("cuda", torch.bfloat16)
    counts = torch.full([num_rows // num_targets], num_targets)
    offsets = [offsets_of(x, torch.int64, "cuda") for x in (counts, torch.full_like(counts, 2))]
    rows = [torch.randn(int(x[-1]), width, device="cuda").bfloat16() for x in offsets]
    arguments = [JaggedTensor(x, offsets=o) for x, o in zip(rows, offsets, strict=True)]
    with no_gradient():
        module(*arguments)  # compiles
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = module(*arguments)
    # Queries, values, the output and statistics; if absorbed, u and what is pooled by it, too.
    most = (5 + (2 * num_heads if num_targets == 8 else 0)) * out.nbytes
    assert torch.cuda.max_memory_allocated() - before < most


@pytest.mark.parametrize("jagged", [False, True])
@pytest.mark.parametrize("value_projection", [False, True])
@pytest.mark.parametrize("keys_and_values", PATHS)
def test_flops(keys_and_values, value_projection, jagged, device):
    """Of 6 targets of 16 columns, 8 rows, and 16 or, of jagged targets, 3 + 25 pairs, by 2 heads
    of 8.
    """
    arguments = op_arguments(
        device, jagged=jagged, value_projection=value_projection, keys_and_values=keys_and_values
    )
    with FlopCounterMode(display=False) as of_forward:
        out = OP(*arguments.values())[0]
    leaves = [x for x in arguments.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    with FlopCounterMode(display=False) as of_backward:
        torch.autograd.grad(out.sum(), leaves)
    pairs, product = 28 if jagged else 16, 2 * 16 * 16
    if keys_and_values == "absorbed":
        forward = 6 * product * (4 if value_projection else 2) + pairs * 2 * 64
        backward = 2 * 6 * product * (4 if value_projection else 2) + pairs * 2 * 160
    else:
        of_targets, of_rows = (2, 2) if value_projection else (1, 1)
        forward = product * (6 * of_targets + 8 * of_rows) + pairs * 64
        backward = product * (2 * 6 * of_targets + 3 * 8 * of_rows) + pairs * 160
    assert of_forward.get_total_flops() == forward
    assert of_backward.get_total_flops() == backward
