"""The collection in one process, against nn.MultiheadAttention and nn.EmbeddingBag."""

import contextlib
import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec.fx import symbolic_trace
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from tests.collection.scenarios import (
    CPU,
    GOOD,
    ITEM,
    LENGTHS,
    NUM_IDS,
    PAIR,
    PAIRS,
    SCENARIOS,
    Scenario,
    check_against_oracle,
    check_that_nothing_waits,
    keys_of,
    make_batch,
    make_collection,
    table,
    table_weights,
    to_features,
)
from torchrec_jagged_attn import (
    EncoderConfig,
    TargetAttentionConfig,
    TargetAttentionEmbeddingBagCollection,
    embedding_parameters,
)

OF_EDGES = [
    *("shared-table", "features-in-two-tables", "newest-rows", "weighted", "request-time"),
    *("projected", "single-ids", "different-widths-single-lookup"),
]


@pytest.mark.parametrize(
    ("name", "lengths"),
    [(name, "mixed") for name in SCENARIOS]
    + [(name, lengths) for name in OF_EDGES for lengths in ("one-sample", "all-empty")],
)
def test_values_and_gradients(name: str, lengths: str, device: torch.device):
    scenario = SCENARIOS[name]
    # The gradient of one short sample is few numbers, and would be held against their luck.
    num_batches = 8 if lengths == "one-sample" else 1
    batches = [make_batch(scenario, LENGTHS[lengths], seed) for seed in range(num_batches)]
    check_against_oracle(make_collection(scenario, device), scenario, batches)


@pytest.mark.parametrize("name", SCENARIOS)
def test_output_layout(name: str):
    scenario, dtype = SCENARIOS[name], torch.int32  # of lengths
    batch = make_batch(scenario, LENGTHS["mixed"])
    collection = make_collection(scenario)
    expected = EmbeddingBagCollection(scenario.tables)(to_features(batch, dtype=dtype))
    actual = collection(to_features(batch, dtype=dtype, is_weighted=scenario.is_weighted))
    assert actual.keys() == expected.keys()
    assert actual.length_per_key() == expected.length_per_key()
    assert actual.values().shape == expected.values().shape
    assert actual.values().dtype == torch.float32
    assert collection.embedding_bag_configs() == scenario.tables
    assert collection.is_weighted() == scenario.is_weighted
    assert_composition(collection, name)


def assert_composition(collection: TargetAttentionEmbeddingBagCollection, name: str) -> None:
    """Tables of targets and histories are in EmbeddingCollections, one for each width."""
    scenario = SCENARIOS[name]
    in_sequences = {
        scenario.find(name)[0].name
        for config in scenario.attentions
        for name in config.targets + config.histories
    }
    if scenario.single_lookup or name in ("single-ids-alone", "single-ids-weighted"):
        widths = {t.embedding_dim for t in scenario.tables if t.name in in_sequences}
        in_sequences = {t.name for t in scenario.tables if t.embedding_dim in widths}
    found = set()
    for width, lookup in collection.embedding_collections.items():
        configs = lookup.embedding_configs()
        assert {config.embedding_dim for config in configs} == {int(width)}
        found |= {config.name for config in configs}
    assert found == in_sequences
    bags = collection.embedding_bag_collection
    pooled = set() if bags is None else {t.name for t in bags.embedding_bag_configs()}
    assert pooled == {t.name for t in scenario.tables} - in_sequences


ENCODED = Scenario(
    [table("t_item", "item", "hist"), table("t_user", "user")],
    [
        TargetAttentionConfig(
            "item",
            "hist",
            timestamps="time",
            max_history=3,
            encoder=EncoderConfig(num_layers=2, causal=True, window=3, user_embedding=True),
        )
    ],
)


@pytest.mark.parametrize("candidates", ["one", "jagged"])
@pytest.mark.parametrize("name", [*OF_EDGES, "encoded"])
def test_no_sample_at_all(name: str, candidates: str, device: torch.device):
    scenario = dataclasses.replace((SCENARIOS | {"encoded": ENCODED})[name], candidates=candidates)
    collection = make_collection(scenario, device)
    some = to_features(make_batch(scenario, [2]), device=device, is_weighted=scenario.is_weighted)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    weights = torch.zeros(0, device=device) if scenario.is_weighted else None
    pooled = collection(KeyedJaggedTensor(keys_of(scenario), none, weights, lengths=none))
    assert pooled.keys() == collection(some).keys()
    assert pooled.values().shape == (0, collection(some).values().shape[1])
    pooled.values().sum().backward()
    for parameter in collection.parameters():  # DDP waits for gradients of all of them
        assert parameter.grad is not None
        assert not parameter.grad.any()


@pytest.mark.parametrize(
    ("name", "candidates"),
    [
        ("weighted", "jagged"),
        ("encoded", "one"),
        ("single-ids-weighted", "one"),
    ],
)
def test_scripted(name: str, candidates: str, device: torch.device):
    scenario = dataclasses.replace((SCENARIOS | {"encoded": ENCODED})[name], candidates=candidates)
    collection = make_collection(scenario, device)
    scripted = torch.jit.script(collection)
    for lengths in ([3, 0, 1, 7], [0, 2]):
        features = to_features(
            make_batch(scenario, lengths), device=device, is_weighted=scenario.is_weighted
        )
        actual, expected = scripted(features), collection(features)
        assert actual.keys() == expected.keys()
        assert torch.equal(actual.values(), expected.values())


def test_device():
    meta = torch.device("meta")
    with meta:
        collection = TargetAttentionEmbeddingBagCollection([ITEM], PAIR)
    assert collection.device == EmbeddingBagCollection([ITEM], device=meta).device == meta
    torch.set_default_device(meta)
    try:
        assert TargetAttentionEmbeddingBagCollection([ITEM], PAIR).device == meta
    finally:
        torch.set_default_device(None)
    assert TargetAttentionEmbeddingBagCollection([ITEM], PAIR).device == CPU
    assert TargetAttentionEmbeddingBagCollection([ITEM], PAIR, device=CPU).to(meta).device == meta


def test_default_device():
    """Including ``meta``, though CPU inputs are computed on the CPU."""
    values, lengths = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([1, 1, 0, 3])
    config = TargetAttentionConfig(
        "item", "hist", encoder=EncoderConfig(causal=True, window=2), dropout=0.3
    )
    results = []
    for default in ("cpu", "meta"):
        torch.manual_seed(0)
        with torch.device(default):
            collection = TargetAttentionEmbeddingBagCollection([ITEM], config, device=CPU)
            out = collection(KeyedJaggedTensor(["item", "hist"], values, lengths=lengths)).values()
            out.square().sum().backward()
        results.append([out, *(parameter.grad for parameter in collection.parameters())])
    for with_cpu, with_meta in zip(*results, strict=True):
        assert torch.equal(with_cpu, with_meta)


@pytest.mark.parametrize("mode", ["meta", "fake"])
@pytest.mark.parametrize("candidates", ["one", "jagged"])
@pytest.mark.parametrize("name", [*OF_EDGES, "encoded"])
def test_shapes_without_values(name: str, candidates: str, mode: str):
    """With one id per sample for each key."""
    scenario = dataclasses.replace((SCENARIOS | {"encoded": ENCODED})[name], candidates=candidates)
    keys, meta = keys_of(scenario), torch.device("meta")
    context = meta if mode == "meta" else FakeTensorMode(allow_non_fake_inputs=True)
    with context:
        collection = TargetAttentionEmbeddingBagCollection(
            scenario.tables,
            scenario.attentions,
            scenario.is_weighted,
            single_lookup=scenario.single_lookup,
            candidates=candidates,
            single_id_features=scenario.single_id_features,
        )
        features = KeyedJaggedTensor(
            keys,
            torch.zeros(3 * len(keys), dtype=torch.int64),
            torch.zeros(3 * len(keys)) if scenario.is_weighted else None,
            lengths=torch.ones(3 * len(keys), dtype=torch.int64),
            length_per_key=[3] * len(keys),
        )
        pooled = collection(features)
        pooled.values().sum().backward()
    assert pooled.values().shape == (3, sum(pooled.length_per_key()))
    assert all(parameter.grad is not None for parameter in collection.parameters())


def test_batch_size_on_the_meta_device():
    meta = torch.device("meta")
    lengths = torch.tensor([1, 1, 0, 3, 1, 1], device=meta)
    features = KeyedJaggedTensor(
        ["item", "hist", "user"], torch.zeros(7, dtype=torch.int64, device=meta), lengths=lengths
    )
    tables = [ITEM, table("t_user", "user")]
    expected = EmbeddingBagCollection(tables, device=meta)(features).values()
    collection = TargetAttentionEmbeddingBagCollection(tables, PAIR, device=meta)
    assert collection(features).values().shape == expected.shape == (2, 24)


def test_tables_keep_every_field_they_share():
    class Marked:
        def __call__(self, weight: Tensor) -> Tensor:
            return nn.init.constant_(weight, 0.5)

    full = EmbeddingBagConfig(
        name="t_item",
        embedding_dim=8,
        num_embeddings=NUM_IDS,
        feature_names=["item", "hist"],
        data_type=DataType.FP16,
        weight_init_min=-0.25,
        weight_init_max=0.75,
        num_embeddings_post_pruning=30,
        init_fn=Marked(),
        need_pos=True,
        total_num_buckets=4,
    )
    collection = TargetAttentionEmbeddingBagCollection(
        [full], [TargetAttentionConfig("item", "hist")]
    )
    (config,) = collection.embedding_collections["8"].embedding_configs()
    for field in dataclasses.fields(EmbeddingConfig):
        assert getattr(config, field.name) == getattr(full, field.name), field.name
    (weight,) = embedding_parameters(collection)
    assert weight.dtype == torch.float16
    assert (weight == 0.5).all()


def test_table_without_feature_names():
    collection = TargetAttentionEmbeddingBagCollection(
        [table("item"), table("hist"), table("user")], [TargetAttentionConfig("item", "hist")]
    )
    batch = {"item": [[1], [2]], "hist": [[1, 2], []], "user": [[3], [4]]}
    assert collection(to_features(batch)).keys() == ["item", "hist", "user"]


def test_embedding_parameters_are_the_tables_alone():
    collection = make_collection(SCENARIOS["side-information"])
    model = nn.ModuleDict(
        {
            "facade": collection,
            "bags": EmbeddingBagCollection([table("t_bag", "tags")]),
            "dense": nn.Linear(2, 2),
        }
    )
    weights = list(embedding_parameters(model))
    expected = [*table_weights(collection).values(), model["bags"].embedding_bags["t_bag"].weight]
    assert len(weights) == len(expected) == 4
    assert {id(weight) for weight in weights} == {id(weight) for weight in expected}


@pytest.mark.gpu
def test_lengths_are_read_on_cuda_only_when_asked(monkeypatch: pytest.MonkeyPatch):
    cuda = torch.device("cuda")
    collection = make_collection(PAIRS, cuda)
    features = to_features(GOOD | {"item": [[1], [], [2, 3]]}, cuda)
    collection(features)
    monkeypatch.setenv("TORCHREC_JAGGED_ATTN_VALIDATE", "1")
    with pytest.raises(ValueError, match=r"target 'item' .* got 0 in sample 1"):
        collection(features)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_after_the_lookups_waits_for_the_device(name: str):
    check_that_nothing_waits(SCENARIOS[name], make_batch(SCENARIOS[name], LENGTHS["mixed"]))


def looked_up(
    collection: TargetAttentionEmbeddingBagCollection, features: KeyedJaggedTensor
) -> tuple[KeyedJaggedTensor, list[dict[str, JaggedTensor]], KeyedTensor | None]:
    """The inputs of the pooling of ``collection``."""
    sequences = [lookup(features) for lookup in collection.embedding_collections.values()]
    bags = collection.embedding_bag_collection
    return features, sequences, None if bags is None else bags(features)


def test_order_of_bags():
    """Bags with several sharding types return features in another order."""
    scenario = Scenario(
        [table(f"t_{i}", f"user_{i}", width=4 * i) for i in (1, 2, 3)] + [ITEM],
        [TargetAttentionConfig("item", "hist")],
    )
    collection = make_collection(scenario)
    features, sequences, bags = looked_up(collection, to_features(make_batch(scenario, [2, 0, 3])))
    columns = bags.to_dict()
    names = ["user_3", "user_1", "user_2"]
    shuffled = KeyedTensor(
        names, [columns[name].shape[1] for name in names], torch.cat([columns[n] for n in names], 1)
    )
    expected = collection.pooling(features, sequences, bags)
    actual = collection.pooling(features, sequences, shuffled)
    assert actual.keys() == expected.keys()
    assert torch.equal(actual.values(), expected.values())


@pytest.mark.parametrize("pooling", ["SUM", "MEAN"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pooling_of_half_precision_rows(dtype: torch.dtype, pooling: str):
    """Sums are in fp32, then rounded to the dtype of the rows, as in sharded bags."""
    torch.manual_seed(0)
    tables = [table("t_item", "item", "hist"), table("t_user", "tags", "user", pooling=pooling)]
    collection = TargetAttentionEmbeddingBagCollection(
        tables, TargetAttentionConfig("item", "hist"), single_lookup=True
    )
    batch = {"item": [[0], [1]], "hist": [[2], []], "tags": [[3, 4, 5], []], "user": [[6], [7, 8]]}
    features = to_features(batch)
    rows = {
        name: JaggedTensor(sequence.values().to(dtype), lengths=sequence.lengths())
        for name, sequence in collection.embedding_collections["8"](features).items()
    }
    with torch.autocast("cpu", dtype):
        out = collection.pooling(features, [rows], None)
    assert out.values().dtype == dtype
    for name in ("tags", "user"):
        lengths = rows[name].lengths()
        pooled = torch.segment_reduce(
            rows[name].values().double(), pooling.lower(), lengths=lengths, initial=0
        )
        assert torch.equal(out[name], pooled.to(dtype))


@pytest.mark.parametrize("is_weighted", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_single_ids_equal_pooling(dtype: torch.dtype, is_weighted: bool):
    """Bit-equal, since nothing is summed."""
    scenario = dataclasses.replace(
        SCENARIOS["single-ids-alone"], is_weighted=is_weighted, single_lookup=True
    )
    pooled = make_collection(dataclasses.replace(scenario, single_id_features=()))
    collection = make_collection(scenario)
    collection.load_state_dict(pooled.state_dict())
    features = to_features(make_batch(scenario, LENGTHS["mixed"]), is_weighted=is_weighted)
    features, (sequences,), _ = looked_up(collection, features)
    rows = {
        name: JaggedTensor(sequence.values().to(dtype), lengths=sequence.lengths())
        for name, sequence in sequences.items()
    }
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        actual, expected = (x.pooling(features, [rows], None) for x in (collection, pooled))
    assert actual.keys() == expected.keys()
    assert actual.values().dtype == expected.values().dtype
    assert torch.equal(actual.values(), expected.values())


class CountOps(TorchDispatchMode):
    """Counts the ops that run."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("ids", ["bags", "single lookup", "single ids"])
@pytest.mark.parametrize("table_of", [lambda name: f"t_{name}", lambda _: "t_shared"])
def test_host_work_is_independent_of_num_features(table_of: Callable[[str], str], ids: str):
    """For bags of the EmbeddingBagCollection, and features looked up with the target."""

    def num_ops(num_features: int) -> int:
        tables: dict[str, list[str]] = {table_of("item"): ["item", "hist"]}
        names = tuple(f"user_{i}" for i in range(num_features))
        for name in names:
            tables.setdefault(table_of(name), []).append(name)
        scenario = Scenario(
            [table(name, *features) for name, features in tables.items()],
            [TargetAttentionConfig("item", "hist")],
            single_lookup=ids == "single lookup",
            single_id_features=names if ids == "single ids" else (),
        )
        collection = make_collection(scenario)
        inputs = looked_up(collection, to_features(make_batch(scenario, [2, 0, 3])))
        with CountOps() as ops:
            collection.pooling(*inputs)
        return ops.number

    assert num_ops(20) == num_ops(2)


@pytest.mark.reference  # kernels compute no fp64
def test_gradients_of_weights():
    """Weights of history rows, and of pooled rows of the same lookup."""
    collection = make_collection(SCENARIOS["weighted"])
    features = to_features(make_batch(SCENARIOS["weighted"], [2, 0, 3]), is_weighted=True)
    _, sequences, bags = looked_up(collection, features)
    sequences = [
        {name: JaggedTensor(x.values().double(), lengths=x.lengths()) for name, x in rows.items()}
        for rows in sequences
    ]
    bags = KeyedTensor(bags.keys(), bags.length_per_key(), bags.values().double())
    collection.double()

    def pooled(weights: Tensor) -> Tensor:
        weighted = KeyedJaggedTensor(
            features.keys(), features.values(), weights, lengths=features.lengths()
        )
        out = collection.pooling(weighted, sequences, bags)
        return torch.cat([out["hist"], out["bought"]], 1)

    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(features.values().numel(), dtype=torch.float64, generator=generator) + 0.5
    torch.autograd.gradcheck(pooled, weights.requires_grad_())


@pytest.mark.parametrize("is_single_lookup", [False, True])
def test_without_attention(is_single_lookup: bool):
    """Outputs without attention equal the outputs of an EmbeddingBagCollection."""
    scenario = SCENARIOS["attended-and-pooled"]
    bags = EmbeddingBagCollection(scenario.tables)
    collection = TargetAttentionEmbeddingBagCollection(
        scenario.tables, [], single_lookup=is_single_lookup, single_id_features="likes"
    )
    for name, bag in bags.embedding_bags.items():
        collection.embedding_bags[name].weight = bag.weight
    features = to_features(make_batch(scenario, [2, 0, 3]))
    expected, pooled = bags(features), collection(features)
    assert pooled.keys() == expected.keys()
    assert torch.equal(pooled.values(), expected.values())
    scripted = torch.jit.script(symbolic_trace(collection))
    assert torch.equal(scripted(features).values(), expected.values())


def test_embedding_bags():
    collection = make_collection(SCENARIOS["side-information"])
    tables = collection.embedding_bags
    assert list(tables) == ["t_user", "t_cat", "t_item"]
    for name, key in collection.table_keys().items():
        assert tables[name].weight is collection.get_parameter(key)


@pytest.mark.parametrize("is_context", [False, True])
def test_reset_parameters_of_empty_tables(is_context: bool):
    scenario, meta = SCENARIOS["shared-table"], torch.device("meta")
    with meta if is_context else contextlib.nullcontext():
        collection = TargetAttentionEmbeddingBagCollection(
            scenario.tables, scenario.attentions, device=None if is_context else meta
        )
    collection.to_empty(device=CPU)
    with torch.no_grad():
        for parameter in collection.parameters():
            parameter.fill_(torch.nan)
    collection.reset_parameters()
    for name, parameter in collection.named_parameters():
        assert parameter.isfinite().all(), name


def test_reset_parameters_starts_anew():
    scenario = SCENARIOS["several-pairs"]
    torch.manual_seed(0)
    fresh = TargetAttentionEmbeddingBagCollection(scenario.tables, scenario.attentions)
    collection = make_collection(scenario)
    for parameter in collection.parameters():
        nn.init.constant_(parameter, torch.nan)
    collection.reset_parameters()
    drawn = (
        "k_proj_weight",
        "2.in_proj_weight",
        "2.out_proj.weight",
        "embeddings.",
        "embedding_bags.",
    )
    for name, parameter in collection.named_parameters():
        expected = fresh.state_dict()[name]
        if any(part in name for part in drawn):
            assert parameter.isfinite().all(), name
            assert not torch.equal(parameter, expected), name
        else:
            assert torch.equal(parameter, expected), name


def test_from_embedding_bag_collection():
    scenario = SCENARIOS["attended-and-pooled"]
    bags = EmbeddingBagCollection(scenario.tables)
    optimizer = torch.optim.Adagrad(bags.parameters(), lr=0.1)
    collection = TargetAttentionEmbeddingBagCollection.from_embedding_bag_collection(
        bags, scenario.attentions
    )
    for name, weight in table_weights(collection).items():
        assert weight is bags.embedding_bags[name].weight
    features = to_features(make_batch(scenario, LENGTHS["mixed"]))
    before = bags(features).to_dict()
    for key, column in collection(features).to_dict().items():
        assert torch.equal(column, before[key]) == (key not in ("hist@t_item", "likes")), key
    collection(features).values().sum().backward()
    optimizer.step()
    assert not torch.equal(bags(features).values(), torch.cat(list(before.values()), dim=1))

    moved = EmbeddingBagCollection([ITEM], device=torch.device("meta")).to_empty(device=CPU)
    collection = TargetAttentionEmbeddingBagCollection.from_embedding_bag_collection(moved, PAIR)
    assert {parameter.device for parameter in collection.parameters()} == {CPU}
    weighted = EmbeddingBagCollection([ITEM], is_weighted=True, device=torch.device("meta"))
    collection = TargetAttentionEmbeddingBagCollection.from_embedding_bag_collection(weighted, PAIR)
    assert collection.is_weighted()
    assert collection.device == torch.device("meta")
    with pytest.raises(TypeError, match=r"embedding_bag_collection must be an .*, got a Linear"):
        TargetAttentionEmbeddingBagCollection.from_embedding_bag_collection(nn.Linear(1, 1), PAIR)


def test_from_embedding_bag_collection_with_candidates():
    tables = [ITEM, table("t_user", "user"), table("t_tag", "tags", width=12)]
    bags = EmbeddingBagCollection(tables)
    collection = TargetAttentionEmbeddingBagCollection.from_embedding_bag_collection(
        bags,
        PAIR,
        candidates="jagged",
        candidate_features=["tags"],
        single_lookup=True,
        single_id_features=["user"],
    )
    for name, weight in table_weights(collection).items():
        assert weight is bags.embedding_bags[name].weight
    assert [*collection.embedding_collections["8"].embeddings] == ["t_item", "t_user"]
    # Of requests of three candidates and of one.
    keys, lengths = ["item", "hist", "user", "tags"], torch.tensor([3, 1, 2, 0, 1, 1, 3, 1])
    features = KeyedJaggedTensor(keys, torch.arange(12), lengths=lengths)
    columns = collection(features).to_dict()
    assert torch.equal(columns["tags"], bags.embedding_bags["t_tag"].weight[8:12])
    with pytest.raises(ValueError, match="'user' must have exactly one id"):
        collection(
            KeyedJaggedTensor(keys, features.values(), lengths=lengths[[0, 1, 4, 5, 2, 3, 6, 7]])
        )


def test_negative_learned_weights():
    """A negative weight counts as zero, also without gradients."""
    scenario = SCENARIOS["weighted"]
    batch = make_batch(scenario, [2, 0, 3])
    features = to_features(batch)
    weights = PositionWeightedModuleCollection(dict.fromkeys(features.keys(), 9))
    model = FeatureProcessedEmbeddingBagCollection(make_collection(scenario), weights)
    history_weights = weights.position_weights["hist"]
    with torch.no_grad():
        history_weights[1:] = -0.5
    pooled = model(features).values()
    pooled.sum().backward()
    assert history_weights.grad.isfinite().all()
    assert torch.all(history_weights.grad[1:] == 0)
    with torch.no_grad():
        torch.testing.assert_close(model(features).values(), pooled, rtol=0, atol=0)
        history_weights[1:] = 0
        torch.testing.assert_close(model(features).values(), pooled, rtol=0, atol=0)
