"""Checks of numbers and flags in public functions and modules."""

import functools
import inspect
import math

import numpy as np
import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import JaggedTensor

import torchrec_jagged_attn as package
from torchrec_jagged_attn import data, events, ops, semantic_ids
from torchrec_jagged_attn.modules.recency_bias import RecencyBias

pytestmark = pytest.mark.reference  # alike with any kernels

OFFSETS = torch.tensor([0, 4, 4, 9])
QUERY, ROWS, HEADS = torch.zeros(3, 2, 8), torch.zeros(9, 8), torch.zeros(9, 2, 8)
PAIRS = torch.zeros(41)
HISTORY = JaggedTensor(ROWS, offsets=OFFSETS)
TABLE = EmbeddingBagConfig(
    name="t", embedding_dim=8, num_embeddings=9, feature_names=["item", "hist"]
)
CALLS = {
    "packed": functools.partial(
        package.jagged_target_attention, QUERY, torch.zeros(9, 2, dtype=torch.uint8), OFFSETS
    ),
    "target": functools.partial(package.jagged_target_attention, QUERY, ROWS, OFFSETS),
    "flash": functools.partial(package.jagged_flash_attention, HEADS, HEADS, HEADS, OFFSETS),
    "pairs": functools.partial(ops.jagged_jagged_bmm_jagged_out, ROWS, ROWS, OFFSETS),
    "array": functools.partial(ops.array_jagged_bmm_jagged_out, PAIRS, ROWS, OFFSETS),
    "select": functools.partial(events.select_events, HISTORY, keep=2),
    "layout": functools.partial(ops.JaggedLayout, OFFSETS),
    "of lengths": functools.partial(ops.JaggedLayout.from_lengths, OFFSETS.diff()),
    "target module": functools.partial(package.JaggedTargetAttention, 8),
    "self": functools.partial(package.JaggedSelfAttention, 8, 2),
    "layer": functools.partial(package.HistoryEncoderLayer, 8, 2),
    "interaction": package.JaggedFeatureInteraction,
    "recency": functools.partial(RecencyBias, 2),
    "config": functools.partial(package.TargetAttentionConfig, "item", "hist"),
    "encoder": package.EncoderConfig,
    "collection": functools.partial(
        package.TargetAttentionEmbeddingBagCollection,
        [TABLE],
        package.TargetAttentionConfig("item", "hist"),
    ),
    "relevance": functools.partial(events.Relevance, num_surfaces=2),
    "information": events.Relevance(num_surfaces=2).mutual_information,
    "codes": functools.partial(semantic_ids.PackedCodes, num_codes=2),
    "pca": functools.partial(semantic_ids.DiscretePCA, embed_dim=4, num_codes=2),
    "fusion": functools.partial(semantic_ids.VQFusion, {"a": 8}, latent_dim=4, num_codes=2),
    "sampler": functools.partial(data.BalancedBatchSampler, [1] * 9, 2, num_replicas=1, rank=0),
}
INTEGERS = {  # the least that is taken
    ("packed", "num_levels"): 0,
    ("flash", "window"): 1,
    ("pairs", "total"): 0,
    ("array", "num_rows"): 0,
    ("select", "keep"): 0,
    ("select", "capacity"): 0,
    ("layout", "num_rows"): 0,
    ("of lengths", "num_rows"): 0,
    ("target module", "num_heads"): 0,
    ("target module", "history_dim"): 1,
    ("target module", "target_dim"): 1,
    ("self", "num_heads"): 0,
    ("self", "embed_dim"): 0,
    ("self", "window"): 1,
    ("layer", "feedforward_dim"): 1,
    ("recency", "num_heads"): 1,
    ("config", "num_heads"): 1,
    ("config", "max_history"): 1,
    ("encoder", "num_layers"): 1,
    ("encoder", "window"): 1,
    ("relevance", "num_surfaces"): 1,
    ("relevance", "num_bins"): 1,
    ("information", "num_bins"): 1,
    ("codes", "num_codes"): 1,
    ("codes", "num_levels"): 0,
    ("pca", "embed_dim"): 1,
    ("pca", "num_codes"): 1,
    ("pca", "num_levels"): 0,
    ("fusion", "latent_dim"): 1,
    ("fusion", "hidden_dim"): 1,
    ("fusion", "num_codes"): 1,
    ("sampler", "num_replicas"): 1,
    ("sampler", "balanced_steps"): 1,
    ("sampler", "seed"): 0,
}
NUMBERS = [
    *(("target", "scale"), ("flash", "scale"), ("interaction", "scale")),
    *((name, "dropout") for name in ("target", "flash", "target module", "self", "layer")),
    ("layer", "attention_dropout"),
    *(("config", "dropout"), ("encoder", "dropout")),
]
FLAGS = [
    ("flash", "causal"),
    ("flash", "return_lse"),
    *(("target module", x) for x in ("bias", "recency_bias", "age_bias", "value_projection")),
    *((name, x) for name in ("self", "layer") for x in ("causal", "recency_bias")),
    ("self", "bias"),
    ("interaction", "fused"),
    ("recency", "ages"),
    *(("config", "recency_bias"), ("config", "value_projection")),
    *(("encoder", "causal"), ("encoder", "user_embedding")),
    *(("collection", "is_weighted"), ("collection", "single_lookup")),
    *(("pca", "trainable"), ("sampler", "drop_last")),
]


def call(name, **others):
    function = CALLS[name]
    if "window" in others:
        others["causal"] = True
    if others.keys() & {"num_heads", "embed_dim"} and name in ("self", "recency"):
        given = {"embed_dim": 8} if name == "self" else {}
        return function.func(**given | {"num_heads": 2} | others)
    return function(**others)


@pytest.mark.parametrize(("name", "argument"), INTEGERS)
def test_invalid_integers(name, argument):
    for value in (2.0, "2", True, np.float64(2)):
        with pytest.raises(TypeError, match=rf"^{argument} must .*got .*{value}"):
            call(name, **{argument: value})
    for value in (-1, 2**64):
        with pytest.raises(ValueError, match=rf"^{argument} must .*got .*{value}"):
            call(name, **{argument: value})
    if (least := INTEGERS[name, argument]) > 0:
        message = rf"^{argument} must be at least {least}(, or None)?, got 0"
        with pytest.raises(ValueError, match=message):
            call(name, **{argument: 0})


@pytest.mark.parametrize(("name", "argument"), INTEGERS)
def test_integers_of_numpy_are_taken(name, argument):
    fitting = {
        "num_levels": 3,
        "total": 41,
        "num_rows": 9,
        "capacity": 9,
        "history_dim": 8,
        "embed_dim": 8,
    }
    for convert in (np.int64, np.int32, np.uint8, np.int8):
        call(name, **{argument: convert(fitting.get(argument, 2))})


@pytest.mark.parametrize(("name", "argument"), NUMBERS)
def test_invalid_numbers(name, argument):
    for value in ("0.5", True, [0.5], torch.tensor(0.5)):
        with pytest.raises(TypeError, match=f"^{argument} must be a number, got "):
            call(name, **{argument: value})
    for value in (math.nan, math.inf, -math.inf, 10**400):
        with pytest.raises(ValueError, match=f"^{argument} must be .*, got {value}"):
            call(name, **{argument: value})
    is_attention = "dropout" in argument and (name, argument) != ("layer", "dropout")
    for value in (-0.1, 1.0, 2) if is_attention else ():
        with pytest.raises(ValueError, match=f"^{argument} must be at least 0 and below 1, got "):
            call(name, **{argument: value})


@pytest.mark.parametrize(("name", "argument"), NUMBERS)
def test_numbers_of_numpy_are_taken(name, argument):
    for value in (np.float16(0.5), np.float32(0.5), np.float64(0.25), 0, np.int64(0)):
        call(name, **{argument: value})


def segment(**options):
    times = torch.arange(9)
    return events.segment_sessions(ROWS[:, 0], OFFSETS, times, threshold=0.5, **options)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: segment(gap=x), "gap"),
        (lambda x: events.boost_weights(PAIRS, strength=x), "strength"),
        (lambda x: events.Relevance(2, prior=x), "prior"),
    ],
)
def test_numbers_beyond_float(call, name):
    with pytest.raises(ValueError, match=f"^{name} must be .*finite.*, got 1000"):
        call(10**400)


def test_numpy_numbers_are_converted():
    """NumPy numbers may overflow, and cannot be written to JSON."""
    relevance = events.Relevance(np.int8(100), num_bins=np.int8(2), prior=np.float16(1))
    layout = ops.JaggedLayout(OFFSETS, np.int8(9))
    few = np.uint8(1)
    sampler = data.BalancedBatchSampler([1] * 9, few, few, few - few, seed=few)
    sampler.set_epoch(few)
    encoder = package.EncoderConfig(few, causal=True, window=few)
    config = package.TargetAttentionConfig("item", "hist", num_heads=few, max_history=few)
    for number in (
        *(config.num_heads, config.max_history, encoder.num_layers, encoder.window),
        *(relevance.num_surfaces, relevance.num_bins, relevance.prior, layout.num_rows),
        *(sampler.batch_size, sampler.num_replicas, sampler.rank, sampler.seed),
        sampler.state_dict()["epoch"],
    ):
        assert type(number) in (int, float)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: package.jagged_target_attention(QUERY, x, OFFSETS), "history"),
        (lambda x: package.jagged_dense_bmm(x, torch.zeros(3, 8, 2), OFFSETS), "x"),
    ],
)
def test_tensors_have_strides(call, name):
    nested = torch.nested.nested_tensor([ROWS[:4], ROWS[4:]], layout=torch.jagged)
    for tensor in (ROWS.to_sparse(), nested):
        with pytest.raises(TypeError, match=rf"^{name} must be a tensor of torch\.strided, got "):
            call(tensor)


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(package.JaggedTargetAttention, 8),
        functools.partial(package.JaggedSelfAttention, 8, 2),
        functools.partial(package.HistoryEncoderLayer, 8, 2),
        functools.partial(events.Relevance, 2),
        functools.partial(semantic_ids.DiscretePCA, 8, 2),
        functools.partial(semantic_ids.VQFusion, {"a": 8}, latent_dim=4, num_codes=2),
    ],
)
def test_devices_and_dtypes_are_named(make):
    for device, error in ((True, TypeError), (1.5, TypeError), ("gpu", ValueError)):
        with pytest.raises(error, match=r"^device must be .*got "):
            make(device=device)
    if "dtype" in inspect.signature(make).parameters:
        for dtype in (torch.int64, "float32"):
            with pytest.raises(TypeError, match=r"^dtype must be .*got "):
                make(dtype=dtype)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (package.embedding_bag_keys, "model"),
        (package.embedding_parameters, "module"),
        (lambda x: package.rename_keys(x, {"a": "b"}), "state"),
        (lambda x: package.rename_keys({"a": 1}, x), "names"),
        (lambda x: semantic_ids.VQFusion({"a": 8}, x, latent_dim=4, num_codes=2), "labels"),
        (semantic_ids.VQFusion({"a": 8}, latent_dim=4, num_codes=2).fit, "batches"),
        (lambda x: package.jagged_flash_attention(HEADS, HEADS, HEADS, x), "q_offsets"),
        (lambda x: package.JaggedFeatureInteraction(fused=x), "fused"),
    ],
)
def test_invalid_objects(call, name):
    with pytest.raises(TypeError, match=f"^{name} must "):
        call(object())


def test_rows_have_two_dimensions():
    for y in (torch.tensor(1.0), torch.zeros(9)):
        with pytest.raises(ValueError, match=r"^y must have shape \[Ny, D\]"):
            ops.array_jagged_bmm_jagged_out(PAIRS, y, OFFSETS)
    packed, basis = torch.zeros(9, 2, dtype=torch.uint8), torch.zeros(7, 8)
    with pytest.raises(ValueError, match=r"^query must have 3 or 4 dimensions, got"):
        semantic_ids.jagged_target_attention_over_codes(
            torch.tensor(1.0), packed, OFFSETS, torch.zeros(8), basis
        )


@pytest.mark.parametrize(("name", "argument"), FLAGS)
def test_flags_are_bools(name, argument):
    for value in ("yes", 1, 0.0, torch.tensor(True)):
        with pytest.raises(TypeError, match=f"^{argument} must be a bool, got "):
            call(name, **{argument: value})


def test_lengths_are_integers():
    with pytest.raises(TypeError, match=r"^lengths must be int32 or int64, got torch\.float32"):
        ops.JaggedLayout.from_lengths(torch.ones(2))
    with pytest.raises(ValueError, match=r"^lengths must have shape \[B\]"):
        ops.JaggedLayout.from_lengths(torch.ones(2, 2, dtype=torch.int64))


def test_candidates_are_jagged():
    with pytest.raises(TypeError, match=r"^candidates must be a JaggedTensor, got a Tensor"):
        package.repeat_per_candidate(ROWS, OFFSETS)


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([ROWS[:4], ROWS[4:]], layout=torch.jagged)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: CALLS["target module"]()(QUERY[:, 0], nested()),
            TypeError,
            r"give JaggedTensor\(",
        ),
        (lambda: CALLS["layer"]()(nested()), TypeError, r"history must .*: give JaggedTensor\("),
        (lambda: events.select_events(nested(), keep=1), TypeError, "events .*: give JaggedTensor"),
        (
            lambda: package.jagged_target_attention(QUERY, nested(), OFFSETS),
            TypeError,
            "history must .*: give values",
        ),
        (lambda: CALLS["flash"](causal=False, window=2), ValueError, "give causal=True, or window"),
        (
            lambda: CALLS["flash"](softcap=3.0),
            NotImplementedError,
            "softcap .*: use flex_attention",
        ),
        (lambda: CALLS["flash"](score="silu"), NotImplementedError, "score .* JaggedTargetAtt"),
        (lambda: CALLS["self"](score="silu"), NotImplementedError, "score .* JaggedTargetAtt"),
        (lambda: CALLS["self"](casual=True), TypeError, "unexpected keyword argument 'casual'"),
        (
            lambda: CALLS["select"](scores=torch.full((9,), math.nan)),
            ValueError,
            "scores must not be NaN, got one at position 0",
        ),
    ],
)
def test_errors_name_the_way_out(call, error, message):
    with pytest.raises(error, match=message):
        call()


CODES = semantic_ids.PackedCodes(8)


class Attend(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = package.JaggedTargetAttention(8, history_codes=CODES)

    def forward(self, target, packed, offsets, weights):
        return self.attend(target, JaggedTensor(packed, offsets=offsets), None, weights)


@pytest.mark.parametrize("mode", ["eager", "scripted", "compiled"])
def test_programs_check_values(mode):
    module = Attend()
    if mode == "scripted":
        module = torch.jit.script(module)
    elif mode == "compiled":
        module = torch.compile(module, backend="eager", fullgraph=True)
    packed, weights = CODES.pack(ROWS.long()), torch.ones(9)
    for _ in range(2):  # an error does not disable checks of the next call
        module(QUERY[:, 0], packed, OFFSETS, weights)
        for message, changed in (
            (r"offsets(\(\))? must start at 0, got 1", (packed, OFFSETS + 1, weights)),
            ("history.* must be at most 242, got 255", (packed | 255, OFFSETS, weights)),
            ("prior_weights must be finite, got inf", (packed, OFFSETS, weights / 0)),
        ):
            with pytest.raises(Exception, match=message):
                module(QUERY[:, 0], *changed)
