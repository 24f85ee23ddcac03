"""Histories of codes, in ``JaggedTargetAttention`` and in the collection."""

import copy

import pytest
import torch
from torch import Tensor
from torchrec.fx import symbolic_trace
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from tests.collection.scenarios import table
from tests.modules.target_attention_inputs import (
    attend,
    attend_by_sample,
    each_pair_by_dtype,
    make_inputs,
)
from tests.rounding import RoundingErrors
from tests.tolerance import assert_close, assert_matches_oracle
from torchrec_jagged_attn import (
    EncoderConfig,
    JaggedTargetAttention,
    TargetAttentionConfig,
    TargetAttentionEmbeddingBagCollection,
)
from torchrec_jagged_attn.base.devices import supported_dtypes
from torchrec_jagged_attn.semantic_ids import DiscretePCA, PackedCodes

CPU = torch.device("cpu")
LENGTHS = [40, 0, 3, 1, 20]
WIDTH = 16


def fitted(num_codes: int = 20, *, trainable: bool = False, num_levels: int = 3) -> DiscretePCA:
    rows = torch.randn(200, WIDTH, generator=torch.Generator().manual_seed(0))
    pca = DiscretePCA(WIDTH, num_codes, num_levels, trainable=trainable)
    pca.fit(rows)
    return pca


def draw_codes(ids: PackedCodes, num_rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    most = ids.largest_code
    shape = num_rows, ids.num_codes
    return ids.pack(torch.randint(-most, most + 1, shape, generator=generator))


def assert_right(codes, targets, dtype, device, autocast=None, request_time=None, **options):
    """The module over codes equals ``nn.MultiheadAttention`` over the decoded rows."""
    module = JaggedTargetAttention(
        WIDTH, 2, history_codes=codes, dtype=dtype, device=device, init="mha", **options
    )
    inputs = make_inputs(module, LENGTHS, device, dtype, targets=targets)
    ids = codes if isinstance(codes, PackedCodes) else codes.packed_codes
    inputs["history"] = draw_codes(ids, sum(LENGTHS)).to(device)
    if module.history_basis is not None:
        inputs["history_mean"] = module.history_mean.detach()
        inputs["history_basis"] = module.history_basis.detach()
    if module.score == "softmax":
        weights = torch.rand(sum(LENGTHS), generator=torch.Generator().manual_seed(3)) + 0.5
        inputs["prior_weights"] = weights.to(device, dtype)
    times = {}
    if options.get("age_bias"):
        times["timestamps"] = torch.arange(sum(LENGTHS), device=device) ** 2
    if request_time is not None:
        times["request_time"] = torch.tensor(request_time, device=device)

    def over_rows(history, history_mean=None, history_basis=None, **inputs):
        rows = ids.unpack(history).to(inputs["target"].dtype)
        if history_basis is not None:
            rows = history_mean + rows @ history_basis
        return attend_by_sample(module, history=rows, **times, **inputs)

    def over_codes(**inputs):
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            out = attend(module, **times, **inputs)
        assert out.dtype == (autocast or dtype)
        return out

    assert_matches_oracle(over_codes, over_rows, inputs)


@pytest.mark.parametrize(
    ("dtype", "basis", "targets"),
    each_pair_by_dtype(
        [torch.float32, torch.float16],
        [torch.bfloat16],
        ["none", "fixed", "learned"],
        [None, 5, [0, 3, 1, 0, 9]],
    ),
    ids=str,
)
def test_is_attention_over_decoded_rows(basis, targets, dtype, device):
    if dtype not in supported_dtypes(device):
        pytest.skip(f"{dtype} is not computed on {device}")
    codes = PackedCodes(20) if basis == "none" else fitted(trainable=basis == "learned")
    assert_right(codes, targets, dtype, device, age_bias=targets is None)


@pytest.mark.parametrize(
    ("codes", "targets", "options"),
    [
        (PackedCodes(12), None, {"age_bias": True, "request_time": [600, 7, 10**12, -4, 3000]}),
        (fitted(12, num_levels=5), 2, {"target_dim": 24, "recency_bias": False}),
        (fitted(12, num_levels=15), 2, {"target_dim": 24, "recency_bias": False}),
    ],
    ids=["ages at a request", "5 levels", "15 levels"],
)
def test_other_options(codes, targets, options, device):
    assert_right(codes, targets, torch.float32, device, **options)


@pytest.mark.parametrize("score", ["silu", "sigmoid"])
def test_scores_have_the_mean(score):
    """Softmax is invariant to it. Attention weights include it, too."""
    pca = fitted()
    assert_right(pca, None, torch.float32, CPU, recency_bias=False, score=score)
    module = JaggedTargetAttention(WIDTH, 2, history_codes=pca, init="mha", score=score)
    packed, lengths = draw_codes(pca.packed_codes, sum(LENGTHS)), torch.tensor(LENGTHS)
    target = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(2))
    codes, exact = JaggedTensor(packed, lengths=lengths), copy.deepcopy(module).double()
    weights, parameters = [], dict(exact.named_parameters())
    with torch.no_grad(), RoundingErrors(torch.float32) as errors:
        rows = exact.history_mean + pca.packed_codes.unpack(packed).double() @ exact.history_basis
        inputs = {"target": target.double(), "history": rows, "offsets": codes.offsets()}
        attend_by_sample(exact, **inputs, weights=weights, **parameters)
        expected = torch.cat(weights).squeeze(1)
    actual = module.attention_weights(target, codes).values()
    assert_close(actual, expected, errors, name="weights")


def test_basis_is_copied_and_comes_back():
    pca = fitted(trainable=True)
    module = JaggedTargetAttention(WIDTH, 2, history_codes=pca)
    with torch.no_grad():
        module.history_basis.zero_()
    assert pca.basis.any()
    module.reset_parameters()
    assert torch.equal(module.history_basis, pca.basis)
    names = {name for name, _ in module.named_parameters()}
    assert {"history_mean", "history_basis"} <= names
    fixed = JaggedTargetAttention(WIDTH, 2, history_codes=fitted())
    assert {"history_mean", "history_basis"} <= {name for name, _ in fixed.named_buffers()}
    on_meta = JaggedTargetAttention(WIDTH, 2, history_codes=pca, device="meta")
    on_meta.to_empty(device="cpu").reset_parameters()
    assert torch.equal(on_meta.history_basis, pca.basis)


def test_under_autocast(device):
    if torch.bfloat16 not in supported_dtypes(device):
        pytest.skip(f"no bfloat16 on {device}")
    assert_right(fitted(), None, torch.float32, device, autocast=torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"history_codes": 3}, TypeError, "history_codes must be a DiscretePCA, PackedCodes or No"),
        ({"history_dim": 8}, ValueError, "history_dim must be 16 as history_codes is, got 8"),
        (
            {"value_projection": False},
            ValueError,
            "value_projection must be True or None with hist",
        ),
    ],
)
def test_wrong_options_are_named(change, error, message):
    with pytest.raises(error, match=message):
        JaggedTargetAttention(WIDTH, 2, **({"history_codes": fitted()} | change))


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        (torch.zeros(4, WIDTH), TypeError, r"history.values\(\) must be uint8, got torch.float32"),
        (torch.zeros(4, 3).byte(), ValueError, r"history.values\(\) must have shape \[N, num_byte"),
        (torch.full((4, 4), 250).byte(), ValueError, "history.* must be at most 242, got 250"),
    ],
)
def test_wrong_codes_are_named(values, error, message):
    module = JaggedTargetAttention(WIDTH, 2, history_codes=fitted())
    for call in (module, module.attention_weights):
        with pytest.raises(error, match=message):
            call(torch.zeros(1, WIDTH), JaggedTensor(values, lengths=torch.tensor([4])))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_codes_are_attended_in_the_dtype_of_parameters(dtype, device):
    module = JaggedTargetAttention(WIDTH, 2, history_codes=fitted(), dtype=dtype, device=device)
    history = JaggedTensor(
        torch.zeros(4, 4, dtype=torch.uint8, device=device), offsets=torch.tensor([0, 4]).to(device)
    )
    target = torch.zeros(1, WIDTH, device=device)
    if dtype in supported_dtypes(device):
        assert module(target, history).dtype == dtype
    else:
        message = f"parameters must have a dtype that .* supports with history_codes, got {dtype}"
        with pytest.raises(TypeError, match=message):
            module(target, history)


# The collection

TABLES = [table(f"t_{name}", name, width=WIDTH) for name in ("item", "user")]


def make_features(words: Tensor, names: list[str], *, times: str | None = None):
    """Five samples with an item, a user and packed codes as int64."""
    lengths = torch.tensor(LENGTHS)
    values = [torch.arange(10), *words.unbind(1)]
    if times is not None:
        names, values = [*names, times], [*values, torch.arange(sum(LENGTHS))]
    return KeyedJaggedTensor(
        keys=["item", "user", *names],
        values=torch.cat(values),
        lengths=torch.cat([torch.ones(10, dtype=torch.int64), *[lengths] * len(names)]),
    )


@pytest.mark.parametrize(("num_codes", "names"), [(20, ["h"]), (60, ["h", "h_1"])])
@pytest.mark.parametrize("basis", ["none", "learned"])
def test_collection_attends_codes(basis, num_codes, names):
    codes = PackedCodes(num_codes) if basis == "none" else fitted(num_codes, trainable=True)
    ids = codes if basis == "none" else codes.packed_codes
    width = num_codes if basis == "none" else WIDTH
    config = TargetAttentionConfig("item", names, timestamps="t", history_codes=codes)
    collection = TargetAttentionEmbeddingBagCollection(TABLES, config)
    packed = draw_codes(ids, sum(LENGTHS))
    features = make_features(ids.to_int64(packed), names, times="t")
    pooled = collection(features)
    assert pooled.keys() == ["item", "user", "h"]
    assert pooled.length_per_key() == [WIDTH, WIDTH, width]
    attention = collection.pooling.attentions[0]
    lengths = torch.tensor(LENGTHS)
    history = JaggedTensor(packed, lengths=lengths)
    expected = attention(pooled["item"], history, torch.arange(sum(LENGTHS)))
    assert torch.equal(pooled["h"], expected)
    pooled.values().sum().backward()
    assert all(x.grad is not None for x in collection.parameters())
    traced = symbolic_trace(collection)
    assert torch.equal(traced(features).values(), pooled.values())
    assert torch.equal(torch.jit.script(traced)(features).values(), pooled.values())


def test_collection_with_truncation_weights_and_candidates():
    """Weights of their first key are prior weights."""
    codes, names, counts = fitted(60), ["h", "h_1"], torch.tensor([2, 0, 1, 3, 1])
    config = TargetAttentionConfig("item", names, history_codes=codes, max_history=3)
    collection = TargetAttentionEmbeddingBagCollection(
        TABLES, config, is_weighted=True, candidates="jagged"
    )
    packed, lengths = draw_codes(codes.packed_codes, sum(LENGTHS)), torch.tensor(LENGTHS)
    values = [torch.arange(7), torch.arange(5), *codes.packed_codes.to_int64(packed).unbind(1)]
    weights = torch.rand(12 + 2 * sum(LENGTHS), generator=torch.Generator().manual_seed(3))
    features = KeyedJaggedTensor(
        keys=["item", "user", *names],
        values=torch.cat(values),
        lengths=torch.cat([counts, torch.ones_like(counts), lengths, lengths]),
        weights=weights,
    )
    pooled = collection(features)
    ends = lengths.cumsum(0).repeat_interleave(lengths)
    kept = ends - torch.arange(sum(LENGTHS)) <= 3
    expected = collection.pooling.attentions[0](
        JaggedTensor(pooled["item"], lengths=counts),
        JaggedTensor(packed[kept], lengths=lengths.clamp(max=3)),
        None,
        weights[12 : 12 + sum(LENGTHS)][kept],
    )
    assert torch.equal(pooled["h"], expected)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"history": "user"},
            ValueError,
            r"history must be a key without a table .* \['user'\], of table",
        ),
        ({"history": ["h", "h_1"]}, ValueError, "history must name a feature for each of the 1 in"),
        (
            {"encoder": EncoderConfig()},
            ValueError,
            "encoder must be None with history_codes, got",
        ),
        ({"num_heads": 3}, ValueError, "num_heads must divide the 16 columns of history 'h', got"),
        ({"history_codes": "pca"}, TypeError, "history_codes must be a DiscretePCA, PackedCodes"),
    ],
)
def test_wrong_configurations_are_named(change, error, message):
    options = {"target": "item", "history": "h", "history_codes": fitted()} | change
    with pytest.raises(error, match=message):
        TargetAttentionEmbeddingBagCollection(TABLES, TargetAttentionConfig(**options))


def test_a_key_of_the_output_is_named():
    tables = [table(name, "x", width=WIDTH) for name in ("a", "b")]
    config = TargetAttentionConfig("item", "x@a", history_codes=fitted())
    with pytest.raises(ValueError, match=r"history must add a new key to the output, got 'x@a'"):
        TargetAttentionEmbeddingBagCollection([*TABLES, *tables], config)


def test_wrong_features_are_named():
    codes = fitted()
    config = TargetAttentionConfig("item", "h", history_codes=codes)
    collection = TargetAttentionEmbeddingBagCollection(TABLES, config)
    words = codes.packed_codes.to_int64(draw_codes(codes.packed_codes, sum(LENGTHS)))
    with pytest.raises(ValueError, match=r"features must have the keys \['h'\] of history_codes"):
        collection(make_features(words, ["other"]))
    features = make_features(words[:, :0], [])
    values = torch.cat([features.values(), words[:, 0]]).int()
    features = KeyedJaggedTensor(
        keys=["item", "user", "h"],
        values=values,
        lengths=torch.cat([features.lengths(), torch.tensor(LENGTHS)]),
    )
    with pytest.raises(TypeError, match=r"codes of \['h'\] must be int64, got torch.int32"):
        collection(features)


def test_an_unfitted_basis_is_refused():
    unfitted = DiscretePCA(WIDTH, 20)
    with pytest.raises(ValueError, match="DiscretePCA must be fitted"):
        JaggedTargetAttention(WIDTH, history_codes=unfitted)
    with pytest.raises(ValueError, match="DiscretePCA must be fitted"):
        TargetAttentionConfig("item", "hist", history_codes=unfitted)
    unfitted.load_state_dict(fitted().state_dict())
    assert JaggedTargetAttention(WIDTH, history_codes=unfitted).history_basis.any()
    without_values = DiscretePCA(WIDTH, 20, device="meta")
    assert JaggedTargetAttention(WIDTH, history_codes=without_values, device="meta")
