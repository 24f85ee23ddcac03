"""Errors and warnings of the attention collection."""

import dataclasses
import math

import pytest
import torch
from torch.distributed.optim.apply_optimizer_in_backward import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchrec.modules.embedding_configs import EmbeddingConfig, PoolingType
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.collection.scenarios import (
    GOOD,
    ITEM,
    NUM_IDS,
    PAIR,
    PAIRS,
    SCENARIOS,
    Scenario,
    make_batch,
    make_collection,
    table,
    to_features,
)
from torchrec_jagged_attn import (
    EncoderConfig,
    HistoryEmbeddingCollectionSharder,
    TargetAttentionConfig,
    TargetAttentionEmbeddingBagCollection,
)
from torchrec_jagged_attn.collection.history_truncation import HistoryTruncation


def pair(target: str | list[str] = "item", history: str | list[str] = "hist", **options):
    return TargetAttentionConfig(target, history, **options)


OTHER_ITEM, TAG = table("t_other", "item"), table("t_tag", "tag", "tags")
TIMED = pair(timestamps="time")
REQUEST_TIME = r"request_time must differ from all timestamps and histories, got \['time'\]"
REFUSED = [
    ([], [PAIR], "tables must hold at least one"),
    ([ITEM, table("t_item", "x")], [PAIR], r"tables .* \['t_item'\]"),
    *(
        ([ITEM, table(name, "x")], [PAIR], f"names that torch.nn.ModuleDict accepts, got '{name}'$")
        for name in ("items", "keys", "t.x")
    ),
    ([ITEM], [pair("itme")], r"target must be a .*, one of \['item', 'hist'\], got 'itme'"),
    ([ITEM], [pair(history=["hits"])], "history must be a feature of tables, .* got 'hits'"),
    (
        [ITEM, table("t_other", "hist")],
        [PAIR],
        r"history must be one of \['hist@t_item', 'hist@t_other'\], since several tables",
    ),
    (
        [ITEM, OTHER_ITEM],
        [PAIR],
        r"target must be one of .* 'item@t_other'\], since several",
    ),
    ([ITEM, TAG], [pair(history="hist@t_tag")], "history must be .* got 'hist@t_tag'"),
    ([ITEM], [PAIR, PAIR], r"in one attention only, got \['hist@t_item'\]"),
    ([ITEM], [pair(["item"] * 2, ["hist"] * 2)], "history must appear in one attention only"),
    ([ITEM], [PAIR, pair("hist", "item")], r"target must not be a hist.*, got \['hist', 'item'\]"),
    (
        [ITEM, TAG],
        [
            pair(timestamps="time", max_history=2),
            pair(history="tags", timestamps="time", max_history=3),
        ],
        "max_history must be one for all attentions that read 'time', got 2 and 3",
    ),
    ([table("t_item", "item", "hist", width=6)], [PAIR], "a multiple of 4, got {'t_item': 6}"),
    ([ITEM], [pair(num_heads=3)], "num_heads must divide the 8 columns of history 'hist', got 3"),
    (
        [ITEM, table("hist", "user", "tags"), table("t_other", "user")],
        [pair(encoder=EncoderConfig(user_embedding=True))],
        "user_embedding must add a new key to the output, got 'user@hist', which a feature has",
    ),
    (
        [ITEM, table("t_time", "time")],
        [TIMED],
        "timestamps must be a key without a table, got 'time', a feature of table 't_time'",
    ),
    (
        [ITEM, table("t_time", "now")],
        [pair(timestamps="time", request_time="now")],
        "request_time must be a key without a table, got 'now', a feature of table 't_time'",
    ),
    ([ITEM], [pair(timestamps="time", request_time="time")], REQUEST_TIME),
    (
        [ITEM, TAG],
        [TIMED, pair("tag", "tags", timestamps="tag_time", request_time="time")],
        REQUEST_TIME,
    ),
    ([dataclasses.replace(ITEM, pooling=PoolingType.NONE)], [PAIR], "pooling"),
]


@pytest.mark.parametrize(("tables", "attentions", "message"), REFUSED)
def test_refused_at_construction(tables: list, attentions: list, message: str):
    with pytest.raises(ValueError, match=message) as error:
        TargetAttentionEmbeddingBagCollection(tables, attentions)
    assert "\n" not in str(error.value)


REFUSED_OPTIONS = {
    ValueError: [
        ({"history": []}, r"history must name at least one .*, got \[\]"),
        ({"timestamps": "t", "recency_bias": False}, "recency_bias must be True with timestamps"),
        ({"request_time": "now"}, "timestamps must be given with request_time='now', got None"),
        ({"score": "sofmax"}, "score must be one of .*, got 'sofmax'"),
        ({"init": "zeros"}, "init must be 'recency' or 'mha', got 'zeros'"),
    ],
    TypeError: [
        ({"target": 3}, "target must be a feature or a list .*, got 3"),
        ({"history": ["hist", 3]}, r"got \['hist', 3\]"),
        ({"timestamps": ["t"]}, "timestamps must be a key or None"),
        ({"timestamps": "t", "request_time": 3}, "request_time must be a key or None, got 3"),
        ({"encoder": 2}, "encoder must be an EncoderConfig or None, got 2"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [(kind, *case) for kind, cases in REFUSED_OPTIONS.items() for case in cases],
)
def test_a_config_refuses_its_options(kind: type[Exception], options: dict, message: str):
    with pytest.raises(kind, match=message) as error:
        TargetAttentionConfig(**{"target": "item", "history": "hist"} | options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"num_layers": None}, TypeError, "num_layers must be an int, got None"),
        ({"window": 3}, ValueError, "causal must be True with a window, got causal=False"),
    ],
    ids=str,
)
def test_an_encoder_config_refuses_its_options(options, kind, message):
    with pytest.raises(kind, match=message):
        EncoderConfig(**options)


OTHER = EmbeddingConfig(name="t", embedding_dim=8, num_embeddings=9, feature_names=["item", "hist"])


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((PAIR, [ITEM]), {}, "tables must be a list of EmbeddingBagConfigs, got a Target.*"),
        ((ITEM, PAIR), {}, "tables must be a list of EmbeddingBagConfigs, got a Embedd.*"),
        (([OTHER], PAIR), {}, "tables must hold .*s, got a EmbeddingConfig"),
        (([ITEM], torch.device("cpu")), {}, "attentions must be a list of Targ.*, got a device"),
        (([ITEM], ["hist"]), {}, "attentions must hold TargetAttentionConfigs, got a str"),
        (([ITEM], PAIR, 3), {}, "is_weighted must be a bool, got 3"),
        (([ITEM], PAIR, False, True), {}, "device must be a torch.device .*, got True"),
        (([ITEM], PAIR), {"single_lookup": "no"}, "single_lookup must be a bool, got 'no'"),
        (([ITEM], PAIR), {"candidate_features": 3}, "candidate_features must be .*, got 3"),
        (([ITEM], PAIR), {"single_id_features": 3}, "single_id_features must be .*, got 3"),
        (([ITEM], PAIR, False, None, True), {}, ".* positional arguments .*"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arguments_of_other_types_are_named(arguments: tuple, options: dict, message: str):
    with pytest.raises(TypeError, match=f"^{message}$"):
        TargetAttentionEmbeddingBagCollection(*arguments, **options)


BAD_BATCHES = {
    "target-with-no-id": ({"item": [[1], [], [3]]}, "target 'item' .* got 0 in sample 1"),
    "target-with-two-ids": ({"cat": [[4], [5], [6, 7]]}, "target 'cat' .* got 2 in sample 2"),
    "target-with-0-and-2": ({"item": [[1], [], [2, 3]]}, "target 'item' .* got 0 in sample 1"),
    "longer-history": (
        {"hist2": [[4, 5], [], [6, 7]]},
        "history 'hist2' must have as many values in each sample as history 'hist', got 2 and 1 in "
        "sample 2",
    ),
    "shifted-history": ({"hist2": [[4], [5], [6]]}, "'hist2' .* got 1 and 2 in sample 0"),
    "shorter-timestamps": (
        {"time": [[1], [], [1]]},
        "timestamps 'time' must have as many values in each sample as history 'hist', got 1 and 2",
    ),
    "newest-first": (
        {"hist": [[4, 5], [], [6]], "hist2": [[4, 5], [], [6]], "time": [[9, 8], [], [1]]},
        "timestamps 'time' must not decrease within a sample, from the oldest event to the newest, "
        "got 9 then 8 at position 1",
    ),
    "no-timestamps": ({"time": None}, r"features must have the keys \['time'\] of timestamps, got"),
    "no-request-time": (
        {"now": None},
        r"features must have the keys \['now'\] of request_time, got",
    ),
    "two-request-times": (
        {"now": [[5], [], [1, 2]]},
        "request_time 'now' must have exactly one integer in each sample, got 0 in sample 1",
    ),
    "no-feature": ({"hist2": None, "user": None}, r"must have the keys \['hist2', 'user'\], got"),
    "unknown-id": ({"hist": [[1, NUM_IDS], [], [3]]}, r"ids of 'hist' must lie in 0…39, got 40"),
    "unknown-id-in-a-bag": ({"user": [[0], [], [-1, 2]]}, r"ids of 'user' must lie in .* got -1"),
}


@pytest.mark.parametrize("case", BAD_BATCHES)
def test_refused_at_run_time(case: str):
    change, message = BAD_BATCHES[case]
    collection = make_collection(PAIRS)
    collection(to_features(GOOD))
    batch = {key: bags for key, bags in (GOOD | change).items() if bags is not None}
    with pytest.raises(ValueError, match=message) as error:
        collection(to_features(batch))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("history", [[[1], [2]], [[1], []]])
def test_swapped_target_and_history(history: list[list[int]]):
    """The message asks for it only if the history has one id in each sample."""
    collection = TargetAttentionEmbeddingBagCollection([ITEM], pair("hist", "item"))
    hint = r" \(are target and history swapped\?\)" if history[1] else ""
    message = f"^target 'hist' must have exactly one id in each sample, got 2 in sample 0{hint}$"
    with pytest.raises(ValueError, match=message):
        collection(to_features({"hist": [[1, 2], [3]], "item": history}))


@pytest.mark.parametrize("bags", [[[0], [], [1]], [[0], [], [1, 2]]])
@pytest.mark.parametrize("feature", ["user", "bought"])  # of a table of its own, and a target's
def test_missing_or_duplicate_single_ids_are_refused(feature: str, bags: list[list[int]]):
    scenario = Scenario(
        [table("t_item", "item", "hist", "bought"), table("t_user", "user")],
        [PAIR],
        single_id_features=("user", "bought"),
    )
    good = {key: [[1], [2], [3]] for key in ("item", "hist", "user", "bought")}
    message = f"single_id_features '{feature}' must have exactly one id in each sample, got 0 in sa"
    with pytest.raises(ValueError, match=message):
        make_collection(scenario)(to_features(good | {feature: bags}))


@pytest.mark.parametrize("names", ["item", ["user", "hist"], ["usr"], "brand"])
def test_invalid_single_id_features(names: str | list[str]):
    tables = [ITEM, table("t_user", "user", "brand")]
    options = {"candidates": "jagged", "candidate_features": "brand"}
    message = (
        "single_id_features must be features of tables that are not targets, histories or "
        r"candidate features, \['user'\], got "
    )
    with pytest.raises(ValueError, match=message):
        TargetAttentionEmbeddingBagCollection(tables, PAIR, single_id_features=names, **options)


def test_invalid_features():
    good = to_features(GOOD)
    values, count = good.values(), good.values().numel()

    def with_values(values: torch.Tensor) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(good.keys(), values, lengths=good.lengths())

    no_ids = "^values of features .ids and times. must be int32 or int64, got torch.float64$"
    for features, error, message in (
        ({"item": torch.zeros(1)}, TypeError, "features must be a KeyedJaggedTensor, .* a dict"),
        (with_values(values.double()), TypeError, no_ids),
        (
            with_values(torch.cat([values, values[:2]])),
            ValueError,
            f"as many ids as .* add up to, {count}, got {count + 2}",
        ),
    ):
        with pytest.raises(error, match=message):
            make_collection(PAIRS)(features)


def test_numbers_of_lengths_and_weights():
    keys, lengths = ["item", "hist"], torch.tensor([1, 1, 2, 3])
    for arguments, message in (
        ({"lengths": torch.cat([lengths, lengths[:1]])}, "4 lengths, .* of the 2 keys, got 5"),
        ({"offsets": torch.tensor([0, 1, 2, 4, 7, 7])}, "4 lengths, .* of the 2 keys, got 5"),
        ({"lengths": lengths, "weights": torch.ones(5)}, "7 weights, one per id of any key, got 5"),
    ):
        collection = TargetAttentionEmbeddingBagCollection([ITEM], PAIR, "weights" in arguments)
        with pytest.raises(ValueError, match=message):
            collection(KeyedJaggedTensor(keys, torch.arange(7), **arguments))


def test_tables_on_meta_are_refused():
    collection = TargetAttentionEmbeddingBagCollection([ITEM], PAIR, device=torch.device("meta"))
    features = KeyedJaggedTensor(["item", "hist"], torch.arange(3), lengths=torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"got meta: .* DistributedModelParallel, or .* to_empty"):
        collection(features)
    collection.to_empty(device="cpu").reset_parameters()
    assert collection(features).values().isfinite().all()


def test_requests_without_candidates_are_refused():
    with pytest.raises(ValueError, match="at least one TargetAttentionConfig with candidates='jag"):
        TargetAttentionEmbeddingBagCollection([ITEM], [], candidates="jagged")


def test_index_dedup_is_refused():
    HistoryEmbeddingCollectionSharder(use_index_dedup=False)
    message = r"EmbeddingCollectionSharder\(use_index_dedup=True\)"
    with pytest.raises(NotImplementedError, match=message):
        HistoryEmbeddingCollectionSharder(use_index_dedup=True)


def test_counts_are_checked_without_validation(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "torchrec_jagged_attn.collection.batch_checks.should_validate", lambda _: False
    )
    collection = make_collection(PAIRS)
    for change, message in (
        ({"item": [[1], [], [3]]}, "target 'item' .* got 2 in 3 samples"),
        ({"hist2": [[4, 5], [], [6, 7]]}, "'hist2' .* got 4 and 3 rows in all"),
        ({"time": [[1], [], [1]]}, "'time' .* got 2 and 3 rows in all"),
    ):
        with pytest.raises(ValueError, match=message):
            collection(to_features(GOOD | change))
    collection(to_features(GOOD | {"item": [[1], [], [2, 3]]}))


def test_weights_if_and_only_if_weighted():
    with pytest.raises(ValueError, match="features must have no weights unless is_weighted=True"):
        make_collection(PAIRS)(to_features(GOOD, is_weighted=True))
    weighted = dataclasses.replace(PAIRS, is_weighted=True)
    with pytest.raises(ValueError, match="features must have weights for is_weighted=True"):
        make_collection(weighted)(to_features(GOOD))
    with pytest.raises(NotImplementedError, match="is_weighted must be False unless score is 'sof"):
        TargetAttentionEmbeddingBagCollection(
            [ITEM], TargetAttentionConfig("item", "hist", score="silu"), is_weighted=True
        )


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_weights_of_a_history_are_named_by_its_key(weight: float):
    scenario = SCENARIOS["weighted"]
    features = to_features(make_batch(scenario, [2, 0, 3]), is_weighted=True)
    for key in ("bought", "item", "tags", "hist"):  # but for the last, any weight will do
        begin = features.offset_per_key()[features.keys().index(key)]
        features.weights()[begin] = weight
        if key != "hist":
            make_collection(scenario)(features)
    message = rf"weights of history 'hist' must be finite, got {weight} at pos"
    with pytest.raises(ValueError, match=message):
        make_collection(scenario)(features)


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        (
            "weighted",
            torch.float64,
            r"weights of \['user'\] must be torch.float32 .* got .*float64",
        ),
        ("nothing-else", torch.int64, "weights of history 'hist' must be one of float32, .*int64"),
        ("nothing-else", torch.float64, None),
    ],
)
def test_dtypes_of_weights_are_refused_by_key(name: str, dtype: torch.dtype, message: str | None):
    scenario = dataclasses.replace(SCENARIOS[name], is_weighted=True)
    features = to_features(make_batch(scenario, [2, 0, 3]), is_weighted=True)
    features = KeyedJaggedTensor(
        features.keys(), features.values(), features.weights().to(dtype), lengths=features.lengths()
    )
    collection = make_collection(scenario)
    if message is None:
        collection(features)
    else:
        with pytest.raises(TypeError, match=message):
            collection(features)


def test_weights_have_the_dtype_of_converted_tables():
    scenario = SCENARIOS["weighted"]
    collection = make_collection(scenario)
    features = to_features(make_batch(scenario, [2, 0, 3]), is_weighted=True)
    expected = collection(features).values()
    with pytest.raises(TypeError, match=r"\['user'\] must be torch.float64 .* got torch.float32"):
        collection.double()(features)
    features = KeyedJaggedTensor(
        features.keys(), features.values(), features.weights().double(), lengths=features.lengths()
    )
    values = collection(features).values()
    assert values.dtype == torch.float64
    torch.testing.assert_close(values.float(), expected)


def test_lengths_of_histories_with_several_batch_sizes():
    """Each key is expanded first: ``time`` has three samples, ``hist`` two."""
    truncation = HistoryTruncation([(["hist", "time"], 1)])

    def features(time_lengths: list[int]) -> KeyedJaggedTensor:
        lengths = torch.tensor([2, 1, *time_lengths])
        return KeyedJaggedTensor(
            keys=["hist", "time"],
            values=torch.arange(int(lengths.sum())),
            lengths=lengths,
            stride_per_key_per_rank=[[2], [3]],
            inverse_indices=(["hist", "time"], torch.tensor([[0, 1, 0], [0, 1, 2]])),
        )

    assert truncation(features([2, 1, 2])).lengths().tolist() == [1] * 5
    with pytest.raises(ValueError, match=r"key 'time' must have .* key 'hist', got 3 and 2"):
        truncation(features([2, 1, 3]))


@pytest.mark.parametrize("is_compiled", [False, True])
def test_an_optimizer_in_backward_of_attentions_is_refused(is_compiled):
    """Also if it is attached to parameters that were replaced."""
    scenario = SCENARIOS["nothing-else"]
    collection = make_collection(scenario)
    attention = collection.pooling.attentions[0]
    attention.q_proj_weight = torch.nn.Parameter(attention.q_proj_weight.detach())
    apply_optimizer_in_backward(torch.optim.SGD, [attention.q_proj_weight], {"lr": 0.1})
    if is_compiled:
        collection = torch.compile(collection, backend="eager")
    with pytest.raises(
        ValueError,
        match=r"embedding_parameters\(model\), .*, got pooling\.attentions\.0\.q_proj_weight,",
    ):
        collection(to_features(make_batch(scenario, [2, 0, 3])))


def test_batch_sizes_that_vary_by_feature_are_refused():
    features = KeyedJaggedTensor(
        keys=["item", "hist"],
        values=torch.tensor([1, 2, 3, 4]),
        lengths=torch.tensor([1, 1, 2]),
        stride_per_key_per_rank=[[2], [1]],
    )
    with pytest.raises(NotImplementedError, match=r"one batch size .* got \[2, 1\]"):
        make_collection(SCENARIOS["nothing-else"])(features)


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        (
            "batch_index_select_dim0 supports only either float or half",
            NotImplementedError,
            "must be pooled in fp32 or fp16 on a GPU, got bf16",
        ),
        ("of another kind", RuntimeError, "of another kind"),
    ],
)
def test_pooled_dtype_that_fbgemm_cannot_copy(said, error, message):
    class Bags:
        def keys(self):
            raise RuntimeError(said)

    scenario = SCENARIOS["shared-table"]
    collection = make_collection(scenario)
    collection.embedding_bag_collection.register_forward_hook(lambda *_: Bags())
    features = to_features(make_batch(scenario, [2, 0, 3]))

    with pytest.raises(error, match=message):
        collection(features)


@pytest.mark.parametrize(
    "wrapper", [ManagedCollisionEmbeddingBagCollection, ManagedCollisionEmbeddingCollection]
)
def test_wrappers_that_hash_are_refused(wrapper: type):
    """The error says to remap ids before the collection."""
    hashing = MCHManagedCollisionModule(
        zch_size=NUM_IDS,
        device=torch.device("cpu"),
        input_hash_size=1000,
        eviction_interval=2,
        eviction_policy=DistanceLFU_EvictionPolicy(),
    )
    hashes = ManagedCollisionCollection({ITEM.name: hashing}, [ITEM])
    collection = TargetAttentionEmbeddingBagCollection([ITEM], PAIR)
    with pytest.raises(
        NotImplementedError, match="remap ids by the ManagedCollisionCollection first"
    ):
        wrapper(collection, hashes)
    features = KeyedJaggedTensor(
        ["item", "hist"], torch.tensor([900, 7, 7, 900]), lengths=torch.tensor([1, 3])
    )
    for _ in range(3):  # it learns first
        hashed = hashes(features)
    target, *history = hashed.values().tolist()
    assert history[2] == target != history[0] == history[1]
    assert collection(hashed).values().isfinite().all()
