"""Inputs of tests of ``JaggedTargetAttention``, and its formula on each sample."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torchrec import JaggedTensor

from tests.cases import offsets_of
from tests.combinations import each_pair
from torchrec_jagged_attn import JaggedTargetAttention
from torchrec_jagged_attn.modules import target_attention

CPU = torch.device("cpu")


def each_pair_by_dtype(interpreted, in_bf16, *axes):
    """Each pair with either list of dtypes: the interpreter does not support bf16."""
    return each_pair(interpreted, *axes) + each_pair(in_bf16, *axes)


def make_inputs(
    module,
    lengths,
    device=CPU,
    dtype=torch.float32,
    *,
    targets=None,
    index_dtype=torch.int64,
    seed=0,
):
    """Random arguments of :func:`attend`, and random parameters of a usual size.

    ``targets``: ``None`` for ``[B, C]``, a number for ``[B, T, C]``, or a number for each sample.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.as_tensor(lengths, dtype=torch.int64)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(device, dtype)

    shape = [lengths.numel()] if targets is None else [lengths.numel(), targets]
    inputs = {}
    if not isinstance(targets, (int, type(None))):
        targets = torch.as_tensor(targets, dtype=torch.int64)
        shape = [int(targets.sum())]
        inputs["target_offsets"] = offsets_of(targets, index_dtype, device)
    inputs |= {
        "target": draw(*shape, module.target_dim),
        "history": draw(int(lengths.sum()), module.history_dim),
        "offsets": offsets_of(lengths, index_dtype, device),
    }
    for name, parameter in module.named_parameters():
        fan_in = parameter.shape[1] if "proj" in name and parameter.dim() == 2 else 1
        inputs[name] = draw(*parameter.shape) / (2 * fan_in) ** 0.5
    return inputs


def attend(
    module,
    *,
    target,
    history,
    offsets,
    target_offsets=None,
    timestamps=None,
    request_time=None,
    prior_weights=None,
    indices=None,
    **parameters,
):
    """Call ``module`` with other ``parameters``."""
    if target_offsets is not None:
        target = JaggedTensor(target, offsets=target_offsets)
    history = JaggedTensor(history, offsets=offsets)
    arguments = (target, history, timestamps, prior_weights, indices, request_time)
    return functional_call(module, parameters, arguments, strict=True)


def bucket(distance, num_buckets):
    """Four per octave below 2^32, and one per octave above; in exact arithmetic for integers."""
    quarter, octave = int((1 + distance) ** 4).bit_length() - 1, int(1 + distance).bit_length() - 1
    return min(quarter, 96 + octave, num_buckets - 1)


class MaterializedAttention(JaggedTargetAttention):
    """A module that materializes keys and values for any number of targets."""

    IS_MATERIALIZED = True

    def forward(self, *args, **kwargs):
        rule = target_attention.is_materialized
        target_attention.is_materialized = lambda *_: self.IS_MATERIALIZED
        try:
            return super().forward(*args, **kwargs)
        finally:
            target_attention.is_materialized = rule


class AbsorbedAttention(MaterializedAttention):
    """A module that absorbs projections for any number of targets."""

    IS_MATERIALIZED = False


KEYS_AND_VALUES = {
    "auto": JaggedTargetAttention,
    "materialized": MaterializedAttention,
    "absorbed": AbsorbedAttention,
}


def make_module(embed_dim, num_heads, *, keys_and_values="auto", **options):
    """A module with ``"materialized"`` keys and values, ``"absorbed"`` projections, or its rule."""
    return KEYS_AND_VALUES[keys_and_values](embed_dim, num_heads, **options)


def projected(embed_dim, num_heads, **options):
    """A module with a value projection."""
    return make_module(embed_dim, num_heads, value_projection=True, **options)


def assert_same_uniform(ours, theirs):
    """Two draws of ``n`` from one uniform distribution about zero.

    The largest is within ``16 / n`` of its end but for a probability of ``exp(-16)``; the standard
    deviation has a relative standard error of ``1 / √(5 n)``; four standard errors are allowed.
    """
    n = ours.numel()
    torch.testing.assert_close(ours.abs().max(), theirs.abs().max(), rtol=16 / n, atol=0)
    torch.testing.assert_close(ours.std(), theirs.std(), rtol=4 * (2 / (5 * n)) ** 0.5, atol=0)


def attend_by_sample(
    module,
    *,
    target,
    history,
    offsets,
    target_offsets=None,
    timestamps=None,
    request_time=None,
    prior_weights=None,
    weights=None,
    **parameters,
):
    """Run ``nn.MultiheadAttention``, or :func:`attend_by_score`, on each sample.

    The mask holds biases and the logarithms of prior weights. Without a value projection, values
    are projected by the identity. Weights ``[L, T, H]`` of each sample are appended to ``weights``.
    """
    if not module.value_projection:
        parameters = with_identities(module, parameters)
    tables = {name: parameters.pop(name) for name in list(parameters) if "recency_bias" in name}
    if module.target_dim != module.embed_dim:  # which it does not know: queries are made before
        target = F.linear(target, parameters.pop("q_proj_weight"))
        identity = torch.eye(module.embed_dim, dtype=target.dtype, device=target.device)
        if module.history_dim == module.embed_dim:
            others = [parameters.pop(f"{name}_proj_weight") for name in "kv"]
            parameters["in_proj_weight"] = torch.cat([identity, *others])
        else:
            parameters["q_proj_weight"] = identity
    mha = nn.MultiheadAttention(
        module.embed_dim,
        module.num_heads,
        bias="in_proj_bias" in parameters,
        kdim=module.history_dim,
        vdim=module.history_dim,
        device="meta",
    )
    lengths = offsets.diff().tolist()
    if target_offsets is not None:
        targets = target.split(target_offsets.diff().tolist())
    else:
        targets = (target if target.dim() == 3 else target.unsqueeze(1)).unbind()
    times = [None] * len(lengths) if timestamps is None else timestamps.split(lengths)
    if timestamps is not None and request_time is None:
        request_time = [t_L[-1] if len(t_L) else None for t_L in times]
    requests = times if timestamps is None else request_time
    if prior_weights is None:
        prior_weights = history.new_ones(len(history))
    priors = prior_weights.split(lengths)
    outs = [target.new_zeros(0, module.embed_dim)]
    for q_TE, x_LD, t_L, request, w_L in zip(
        targets, history.split(lengths), times, requests, priors, strict=True
    ):
        left = w_L > 0
        p_LTH = x_LD.new_zeros(len(x_LD), len(q_TE), module.num_heads)
        if weights is not None:
            weights.append(p_LTH)
        if not left.any():
            out_bias = parameters.get("out_proj.bias")
            outs.append(F.linear(torch.zeros_like(q_TE), parameters["out_proj.weight"], out_bias))
            continue
        if len(q_TE) == 0:
            continue
        mask = w_L.masked_fill(~left, 1).log().unsqueeze(1).expand(-1, module.num_heads)
        if tables:
            table = tables["recency_bias.position_weight"]
            positions = range(len(x_LD) - 1, -1, -1)
            mask = mask + table[[bucket(position, len(table)) for position in positions]]
        if t_L is not None:
            table = tables["recency_bias.age_weight"]
            ages = [max(request.item() - time, 0) for time in t_L.tolist()]
            mask = mask + table[[bucket(age, len(table)) for age in ages]]
        x_LD, mask = x_LD[left], mask[left].to(x_LD.dtype)
        mask = mask.T.unsqueeze(1).expand(-1, len(q_TE), -1)
        if module.score == "softmax":
            options = {"attn_mask": mask, "average_attn_weights": False}
            out, p_HTL = functional_call(mha, parameters, (q_TE, x_LD, x_LD), options, strict=True)
        else:
            out, p_HTL = attend_by_score(module, parameters, q_TE, x_LD, mask)
        outs.append(out)
        p_LTH[left] = p_HTL.detach().permute(2, 1, 0).to(p_LTH.dtype)
    out = torch.cat(outs)
    return out if target_offsets is not None else out.view(target.shape)


def attend_by_score(module, parameters, q_TE, x_LD, mask):
    """One sample with a score that is not softmax. Keys have no bias; values have theirs once."""
    if "in_proj_weight" in parameters:
        w_q, w_k, w_v = parameters["in_proj_weight"].chunk(3)
    else:
        w_q, w_k, w_v = (parameters[f"{name}_proj_weight"] for name in "qkv")
    b_q, _, b_v = parameters["in_proj_bias"].chunk(3)
    q = F.linear(q_TE, w_q, b_q).unflatten(1, (module.num_heads, -1))
    k, v = (F.linear(x_LD, w).unflatten(1, (module.num_heads, -1)) for w in (w_k, w_v))
    scores = torch.einsum("thd,lhd->htl", q, k) / q.shape[2] ** 0.5 + mask
    p_HTL = {"silu": F.silu, "sigmoid": torch.sigmoid}[module.score](scores)
    pooled = torch.einsum("htl,lhd->thd", p_HTL, v).flatten(1) + b_v
    return F.linear(pooled, parameters["out_proj.weight"], parameters["out_proj.bias"]), p_HTL


def with_identities(module, parameters):
    """Parameters of a module with equal queries and keys, with identity value projections."""
    width, history_dim = module.k_proj_weight.shape
    q_weight, k_weight = (parameters[f"{name}_proj_weight"] for name in "qk")
    identity = torch.eye(width, dtype=k_weight.dtype, device=k_weight.device)
    full = {name: x for name, x in parameters.items() if "_proj_" not in name}
    full["out_proj.weight"] = identity
    if module.target_dim == history_dim == width:
        full["in_proj_weight"] = torch.cat([q_weight, k_weight, identity])
    else:
        full |= {"q_proj_weight": q_weight, "k_proj_weight": k_weight, "v_proj_weight": identity}
    if "in_proj_bias" in parameters:
        zeros = k_weight.new_zeros(width)
        full["in_proj_bias"] = torch.cat([parameters["in_proj_bias"], zeros, zeros])
        full["out_proj.bias"] = zeros
    return full


def draw_prior_weights(lengths, device=CPU, dtype=torch.float32):
    """About a third of them zeros, and all of the longest sample but one.

    None is small: its gradient has it as a divisor, and would be larger than all others.
    """
    generator = torch.Generator().manual_seed(3)
    weights = 1 + 2 * torch.rand(sum(lengths), generator=generator)
    weights = weights.masked_fill(torch.rand(sum(lengths), generator=generator) < 0.3, 0)
    by_sample = list(weights.split(lengths))
    longest_but_one = sorted(range(len(lengths)), key=lambda b: lengths[b])[-2]
    by_sample[longest_but_one].zero_()
    return weights.to(device, dtype)


OPTIONS = {
    "default": {},
    "values": {"value_projection": True},
    "ages": {"age_bias": True},
    "mha": {"init": "mha"},
    "another-width": {"history_dim": 20},
    "another-target-width": {"target_dim": 20},
    "half-without-bias": {"bias": False, "dtype": torch.bfloat16},
    "no-recency": {"recency_bias": False},
    "materialized": {"value_projection": True, "age_bias": True, "keys_and_values": "materialized"},
    "materialized-another-width": {"history_dim": 20, "keys_and_values": "materialized"},
    "materialized-all-widths": {
        "history_dim": 20,
        "target_dim": 24,
        "keys_and_values": "materialized",
    },
    "rows": {"value_projection": False},
    "rows-without-bias": {"value_projection": False, "bias": False, "age_bias": True},
    "materialized-rows": {
        "value_projection": False,
        "target_dim": 20,
        "keys_and_values": "materialized",
    },
}


def example(module, lengths, device=CPU, num_targets=3, seed=0, jagged=False):
    """Arguments of ``module``, on ``device``."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(device)

    target = draw(len(lengths), num_targets, module.target_dim)
    if jagged:
        counts = torch.tensor([b * num_targets % 4 for b in range(len(lengths))], device=device)
        target = JaggedTensor(draw(int(counts.sum()), module.target_dim), lengths=counts)
    rows = draw(sum(lengths), module.history_dim)
    history = JaggedTensor(rows, lengths=torch.tensor(lengths, device=device))
    if module.recency_bias is None or module.recency_bias.age_weight is None:
        return target, history
    return target, history, torch.arange(sum(lengths), device=device) ** 2


def outputs_and_gradients_of(module, run, *arguments, **options):
    """The output of ``run``, and parameter gradients of the sum of its squares."""
    module.zero_grad()
    out = run(*arguments, **options)
    out.float().square().sum().backward()
    return [out, *(parameter.grad for parameter in module.parameters())]


def zeros(lengths, width=8, dtype=torch.float32):
    return JaggedTensor(
        torch.zeros(sum(lengths), width, dtype=dtype), lengths=torch.tensor(lengths)
    )
