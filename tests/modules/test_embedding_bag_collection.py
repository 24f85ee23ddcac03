"""The facade in one process: against nn.MultiheadAttention and nn.EmbeddingBag on each sample."""

import dataclasses
import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim.apply_optimizer_in_backward import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec.fx import symbolic_trace
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from tests.fixtures import sync_debug_mode
from tests.plain import plain_config
from torchrec_jagged_attn import (
    TargetAttentionConfig,
    TargetAttentionEmbeddingBagCollection,
    embedding_parameters,
)
from torchrec_jagged_attn.modules import pooling
from torchrec_jagged_attn.modules.history_truncation import HistoryTruncation
from torchrec_jagged_attn.modules.target_attention import OUTPUT_DROPOUT, ROW_DROPOUT
from torchrec_jagged_attn.testing import assert_close

Batch = dict[str, list[list[int]]]  # the ids of each sample, by key

CPU = torch.device("cpu")
NUM_IDS = 40


def table(name: str, *features: str, width: int = 8, pooling: str = "SUM") -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name,
        embedding_dim=width,
        num_embeddings=NUM_IDS,
        feature_names=list(features),
        pooling=PoolingType[pooling],
        init_fn=nn.init.normal_,
    )


@dataclasses.dataclass
class Scenario:
    tables: list[EmbeddingBagConfig]
    attentions: list[TargetAttentionConfig]
    is_weighted: bool = False
    single_lookup: bool = False
    candidates: str = "one"
    candidate_features: tuple[str, ...] = ()

    def find(self, name: str) -> tuple[EmbeddingBagConfig, str]:
        """Table and feature of ``feature`` or ``feature@table``."""
        feature, _, table_name = name.partition("@")
        (found,) = (
            config
            for config in self.tables
            if feature in config.feature_names and table_name in ("", config.name)
        )
        return found, feature

    def features(self, names: list[str]) -> list[str]:
        return [self.find(name)[1] for name in names]


SCENARIOS = {
    "shared-table": Scenario(
        [table("t_user", "user"), table("t_item", "hist", "item"), table("t_tag", "tags")],
        [plain_config("item", "hist")],
    ),
    "own-tables": Scenario(
        [table("t_hist", "hist"), table("t_user", "user", width=12), table("t_item", "item")],
        [plain_config("item", "hist", num_heads=1)],
    ),
    "nothing-else": Scenario(
        [table("t_item", "item", "hist")], [plain_config("item", "hist", num_heads=8)]
    ),
    "pooled-neighbours": Scenario(
        [
            table("t_sum", "bought", "hist", "item"),
            table("t_mean", "liked", "brand", pooling="MEAN"),
            table("t_bag", "tags", pooling="MEAN"),
        ],
        [plain_config(["item", "brand"], ["hist", "liked"])],
    ),
    "side-information": Scenario(
        [
            table("t_user", "user", width=4),
            table("t_cat", "hist_cat", "cat", "tags", pooling="MEAN"),
            table("t_item", "item", "hist", "bought"),
        ],
        [plain_config(["item", "cat"], ["hist", "hist_cat"], num_heads=2)],
    ),
    "several-pairs": Scenario(
        [
            table("t_item", "clicks", "item", "orders", "seed"),
            table("t_query", "query", "queries"),
            table("t_user", "user"),
        ],
        [
            plain_config("item", "clicks"),
            plain_config("query", "queries", num_heads=2, recency_bias=False),
            plain_config("item", "orders", num_heads=1, init="mha"),
        ],
    ),
    "features-in-two-tables": Scenario(
        [
            table("t_user", "user", "tags"),
            table("t_item", "item", "bought", "hist", "tags"),
            table("t_cat", "cat", "bought", pooling="MEAN"),
            table("t_tag", "cat", pooling="MEAN"),
        ],
        [plain_config("item", "hist")],
    ),
    "different-widths": Scenario(
        [
            table("t_item", "item", "bought", width=16),
            table("t_hist", "hist", width=8),
            table("t_cat", "cats", "cat", width=4, pooling="MEAN"),
            table("t_user", "user", width=12),
        ],
        [
            plain_config("item", ["hist", "cats"], num_heads=2),
        ],
    ),
    "more-targets-than-histories": Scenario(
        [table("t_item", "item", "hist"), table("t_cat", "cat", width=4)],
        [plain_config(["item", "cat"], "hist", init="mha")],
    ),
    "attended-and-pooled": Scenario(
        [
            table("t_item", "item", "hist"),
            table("t_bag", "hist", "user", width=12),
            table("t_other", "hist", "likes", pooling="MEAN"),
        ],
        [
            plain_config("item", "hist@t_item"),
            plain_config("item", "likes", num_heads=2),
        ],
    ),
    "newest-rows": Scenario(
        [table("t_item", "item", "hist", "clicks", "bought"), table("t_cat", "cat", "cats")],
        [
            plain_config(["item", "cat"], ["hist", "cats"], timestamps="time", max_history=3),
            plain_config("item", "clicks", max_history=1),
        ],
    ),
    "weighted": Scenario(
        [
            table("t_item", "item", "hist", "bought"),
            table("t_cat", "cat", "cats", "tags", pooling="MEAN"),
            table("t_user", "user"),
        ],
        [plain_config(["item", "cat"], ["hist", "cats"], timestamps="time", max_history=5)],
        is_weighted=True,
    ),
    "projected": Scenario(
        [table("t_item", "item", "hist", "clicks", width=12), table("t_tag", "tag", "tags")],
        [
            plain_config("item", "hist", num_heads=3, value_projection=True),
            plain_config(["item", "tag"], "clicks", value_projection=True),
            plain_config("tag", "tags", num_heads=2),
        ],
    ),
    "timestamps": Scenario(
        [table("t_item", "item", "hist", "clicks"), table("t_user", "user")],
        [
            plain_config("item", "hist", timestamps="hist_times"),
            plain_config("item", "clicks", timestamps="click_times", num_heads=2),
        ],
    ),
}
SCENARIOS |= {
    f"{name}-single-lookup": dataclasses.replace(SCENARIOS[name], single_lookup=True)
    for name in ("shared-table", "different-widths", "features-in-two-tables", "weighted")
}
LENGTHS = {
    "mixed": [3, 0, 1, 7, 0, 0, 20],
    "empty-ends": [0, 2, 5, 0],
    "one-sample": [4],
    "all-empty": [0, 0, 0],
}


def keys_of(scenario: Scenario) -> list[str]:
    features = {name for config in scenario.tables for name in config.feature_names}
    timestamps = {config.timestamps for config in scenario.attentions} - {None}
    return sorted(features | timestamps)


def make_batch(scenario: Scenario, lengths: list[int], seed: int = 0) -> Batch:
    """Random ids: one per target, histories as long as ``lengths``, other features by chance."""
    rng = random.Random(seed)
    targets, histories = (
        {name for config in scenario.attentions for name in scenario.features(names(config))}
        for names in (lambda config: config.targets, lambda config: config.histories)
    )
    batch: Batch = {}
    for key in keys_of(scenario):
        if key in targets:
            counts = [1] * len(lengths)
        elif key in histories:
            counts = lengths
        else:
            counts = [rng.randint(0, 4) for _ in lengths]
        batch[key] = [[rng.randrange(NUM_IDS) for _ in range(count)] for count in counts]
    for config in scenario.attentions:
        if config.timestamps is not None:
            batch[config.timestamps] = [
                sorted(rng.randrange(1000) for _ in ids)
                for ids in batch[scenario.features(config.histories)[0]]
            ]
    return batch


def weight_of(number: int) -> float:
    """The weight of a row, by its id or time."""
    return number % 4 / 2


def to_features(
    batch: Batch,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.int64,
    is_weighted: bool = False,
) -> KeyedJaggedTensor:
    ids = [i for bags in batch.values() for ids in bags for i in ids]
    return KeyedJaggedTensor(
        keys=list(batch),
        values=torch.tensor(ids).long(),
        lengths=torch.tensor([len(ids) for bags in batch.values() for ids in bags], dtype=dtype),
        weights=torch.tensor([weight_of(i) for i in ids]) if is_weighted else None,
    ).to(device)


def make_collection(
    scenario: Scenario, device: torch.device = CPU, seed: int = 0
) -> TargetAttentionEmbeddingBagCollection:
    """A collection with every parameter random, biases included."""
    torch.manual_seed(seed)
    collection = TargetAttentionEmbeddingBagCollection(
        scenario.tables,
        scenario.attentions,
        is_weighted=scenario.is_weighted,
        single_lookup=scenario.single_lookup,
        candidates=scenario.candidates,
        candidate_features=scenario.candidate_features,
    )
    for parameter in collection.parameters():
        nn.init.normal_(parameter, std=0.5)
    return collection.to(device)


def table_weights(collection: nn.Module) -> dict[str, Tensor]:
    """The parameter of each table, by the table's name."""
    return {
        name.split(".")[-2]: weight
        for name, weight in collection.named_parameters()
        if "embeddings." in name or "embedding_bags." in name
    }


def attention_parameters(collection: TargetAttentionEmbeddingBagCollection) -> dict[str, Tensor]:
    return dict(collection.pooling.attentions.named_parameters())


def bucket(distance: int, num_buckets: int) -> int:
    return min(math.floor(4 * math.log2(1 + distance)), num_buckets - 1)


def attend(
    config: TargetAttentionConfig,
    parameters: dict[str, Tensor],
    target: Tensor,
    rows: Tensor,
    times: list[int] | None,
    weights: list[float],
) -> Tensor:
    """One sample by torch.nn.MultiheadAttention: target ``[T]``, rows ``[L, E]``."""
    embed_dim = rows.shape[1]
    parameters = dict(parameters)
    bias = {name: parameters.pop(name) for name in list(parameters) if "recency_bias" in name}
    if "out_proj.weight" not in parameters:  # as by the identity
        identity, zeros = torch.eye(embed_dim).to(rows), rows.new_zeros(embed_dim)
        in_bias = torch.cat([parameters["in_proj_bias"], zeros, zeros])
        parameters |= {"v_proj_weight": identity, "in_proj_bias": in_bias}
        parameters |= {"out_proj.weight": identity, "out_proj.bias": zeros}
    if "q_proj_weight" in parameters:  # of targets that are not as wide as histories
        q, k, v = (parameters.pop(f"{name}_proj_weight") for name in "qkv")
        target = q @ target
        parameters["in_proj_weight"] = torch.cat([torch.eye(embed_dim).to(q), k, v])
    attention = nn.MultiheadAttention(embed_dim, config.num_heads, dtype=rows.dtype)
    kept = [n for n, weight in enumerate(weights) if weight > 0]
    if not kept:
        return torch.func.functional_call(
            attention.out_proj,
            {name: parameters[f"out_proj.{name}"] for name in ("weight", "bias")},
            rows.new_zeros(embed_dim),
        )
    mask = torch.tensor([[weights[n]] for n in kept], dtype=rows.dtype).log()
    mask = mask.repeat(1, config.num_heads)
    if config.recency_bias:
        positions = bias["recency_bias.position_weight"]
        mask = mask + positions[[bucket(len(rows) - 1 - n, len(positions)) for n in kept]]
    if times is not None:
        ages = bias["recency_bias.age_weight"]
        mask = mask + ages[[bucket(times[-1] - times[n], len(ages)) for n in kept]]
    inputs = (target.unsqueeze(0), rows[kept], rows[kept])
    arguments = {"attn_mask": mask.T.unsqueeze(1), "need_weights": False}
    out, _ = torch.func.functional_call(attention, parameters, inputs, arguments)
    return out.squeeze(0)


def oracle(
    scenario: Scenario,
    batch: Batch,
    tables: dict[str, Tensor],
    attentions: dict[str, Tensor],
) -> list[Tensor]:
    """Columns of the output, feature by feature, in the order of EmbeddingBagCollection."""
    batch = dict(batch)
    for config in scenario.attentions:
        if config.max_history is not None:
            for name in {*scenario.features(config.histories), config.timestamps} - {None}:
                batch[name] = [ids[-config.max_history :] for ids in batch[name]]

    def weights_of(ids: list[int]) -> list[float]:
        return [weight_of(i) if scenario.is_weighted else 1.0 for i in ids]

    def rows_of(names: list[str], sample: int) -> Tensor:
        found = [scenario.find(name) for name in names]
        return torch.cat([tables[t.name][batch[feature][sample]] for t, feature in found], dim=1)

    attended: dict[tuple[str, str], Tensor] = {}
    for index, config in enumerate(scenario.attentions):
        parameters = {
            name.removeprefix(f"{index}."): parameter
            for name, parameter in attentions.items()
            if name.startswith(f"{index}.")
        }
        first = scenario.features(config.histories)[0]
        outputs = [
            attend(
                config,
                parameters,
                rows_of(config.targets, b)[0],
                rows_of(config.histories, b),
                None if config.timestamps is None else batch[config.timestamps][b],
                weights_of(batch[first][b]),
            )
            for b in range(len(batch[first]))
        ]
        found = [scenario.find(name) for name in config.histories]
        parts = torch.stack(outputs).split([t.embedding_dim for t, _ in found], dim=1)
        attended |= {
            (t.name, feature): part for (t, feature), part in zip(found, parts, strict=True)
        }
    columns = []
    for config in scenario.tables:
        for name in config.feature_names:
            if (config.name, name) in attended:
                columns.append(attended[config.name, name])
                continue
            weight = tables[config.name]
            bags = []
            for ids in batch[name]:
                factors = torch.tensor(weights_of(ids), dtype=weight.dtype).unsqueeze(1)
                bag = (weight[ids] * factors).sum(0)
                bags.append(bag / max(1, len(ids)) if config.pooling == PoolingType.MEAN else bag)
            columns.append(torch.stack(bags))
    return columns


def check_against_oracle(
    collection: TargetAttentionEmbeddingBagCollection,
    scenario: Scenario,
    batches: list[Batch],
    to_samples: Callable[[Batch], Batch] = lambda batch: batch,
) -> None:
    """Outputs, and all gradients added up over ``batches``, lie within the rule of the oracle's.

    ``to_samples`` makes of a batch one whose samples have one candidate each, which the oracle
    takes.
    """
    device = next(collection.parameters()).device
    generator = torch.Generator().manual_seed(1)
    outs, grads_out = [], []
    for batch in batches:
        features = to_features(batch, device, is_weighted=scenario.is_weighted)
        outs.append(collection(features).values())
        grads_out.append(torch.randn(outs[-1].shape, generator=generator))
        outs[-1].backward(grads_out[-1].to(device))

    def reference(dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
        leaves = {
            kind: {name: p.detach().cpu().to(dtype).requires_grad_() for name, p in named.items()}
            for kind, named in (
                ("tables", table_weights(collection)),
                ("attentions", attention_parameters(collection)),
            )
        }
        expected = []
        for batch, grad_out in zip(batches, grads_out, strict=True):
            expected.append(torch.cat(oracle(scenario, to_samples(batch), **leaves), dim=1))
            expected[-1].backward(grad_out.to(dtype))
        grads = {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for named in leaves.values()
            for name, p in named.items()
        }
        return torch.cat(expected), grads

    expected, expected_grads = reference(torch.float64)
    plain, plain_grads = reference(torch.float32)
    assert_close(torch.cat(outs).cpu(), expected, plain)
    actual = {**table_weights(collection), **attention_parameters(collection)}
    assert actual.keys() == expected_grads.keys()
    for name, parameter in actual.items():
        assert parameter.grad is not None, f"{name} has no gradient"
    # Those of one attention together: a bias of few numbers would be held against its own luck.
    for owner in {name.split(".")[0] for name in actual}:
        names = [name for name in actual if name.split(".")[0] == owner]
        grads = ({name: actual[name].grad.cpu() for name in names}, expected_grads, plain_grads)
        joined = (torch.cat([of[name].flatten() for name in names]) for of in grads)
        assert_close(*joined, gradient=True, name=" ".join(names))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_values_and_gradients(name: str, lengths: str, device: torch.device):
    scenario = SCENARIOS[name]
    # The gradient of one short sample is few numbers, and would be held against their luck.
    num_batches = 8 if lengths == "one-sample" else 1
    batches = [make_batch(scenario, LENGTHS[lengths], seed) for seed in range(num_batches)]
    check_against_oracle(make_collection(scenario, device), scenario, batches)


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_output_is_laid_out_as_by_embedding_bag_collection(name: str, dtype: torch.dtype):
    scenario = SCENARIOS[name]
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


@pytest.mark.parametrize("name", SCENARIOS)
def test_composition(name: str):
    scenario = SCENARIOS[name]
    collection = make_collection(scenario)
    in_sequences = {
        scenario.find(name)[0].name
        for config in scenario.attentions
        for name in config.targets + config.histories
    }
    if scenario.single_lookup:
        widths = {t.embedding_dim for t in scenario.tables if t.name in in_sequences}
        in_sequences = {t.name for t in scenario.tables if t.embedding_dim in widths}
    configs = []
    for width, lookup in collection.embedding_collections.items():
        assert type(lookup) is EmbeddingCollection
        configs += lookup.embedding_configs()
        assert {config.embedding_dim for config in lookup.embedding_configs()} == {int(width)}
    assert {config.name for config in configs} == in_sequences
    if len(in_sequences) == len(scenario.tables):
        assert collection.embedding_bag_collection is None
    else:
        assert type(collection.embedding_bag_collection) is EmbeddingBagCollection
        bags = collection.embedding_bag_collection.embedding_bag_configs()
        assert {t.name for t in bags} == {t.name for t in scenario.tables} - in_sequences


@pytest.mark.parametrize("model_type", [DLRM, DLRM_DCN])
def test_takes_the_place_of_an_embedding_bag_collection_in_dlrm(model_type: type[DLRM]):
    scenario = Scenario(
        [
            table("t_user", "user"),
            table("t_item", "bought", "item", "hist"),
            table("t_tag", "tags"),
        ],
        [plain_config("item", "hist")],
    )
    arguments = {
        "dense_in_features": 3,
        "dense_arch_layer_sizes": [8],
        "over_arch_layer_sizes": [16, 1],
    }
    if model_type is DLRM_DCN:
        arguments |= {"dcn_num_layers": 2, "dcn_low_rank_dim": 4}
    collection = make_collection(scenario)
    model = model_type(collection, **arguments)
    features = to_features(make_batch(scenario, LENGTHS["mixed"]))
    batch_size = len(LENGTHS["mixed"])
    logits = model(torch.randn(batch_size, 3), features)
    assert logits.shape == (batch_size, 1)
    sparse = model.sparse_arch(features)
    torch.testing.assert_close(sparse.flatten(1), collection(features).values(), rtol=0, atol=0)
    logits.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_reads_jagged_tensors_that_are_views():
    """Lookups of a sharded collection are slices of one tensor, with nothing but lengths."""
    scenario = SCENARIOS["pooled-neighbours"]
    collection = make_collection(scenario)
    features = to_features(make_batch(scenario, LENGTHS["mixed"]))
    expected = collection(features)
    (lookup,) = collection.embedding_collections.values()
    sliced = {}
    for name, sequence in lookup(features).items():
        rows, lengths = sequence.values(), sequence.lengths()
        poisoned = torch.full((len(rows) + 5, rows.shape[1] + 3), torch.nan)
        poisoned[2:-3, 1:-2] = rows
        sliced[name] = JaggedTensor(poisoned[2:-3, 1:-2], lengths=lengths.repeat(2)[len(lengths) :])
    actual = collection.pooling(features, [sliced], collection.embedding_bag_collection(features))
    assert torch.equal(actual.values(), expected.values())


def test_no_sample_at_all():
    """TorchRec's lookups do not take a batch of none, what follows them does."""
    scenario = SCENARIOS["pooled-neighbours"]
    collection = make_collection(scenario)
    none = torch.zeros(0, dtype=torch.int64)
    features = KeyedJaggedTensor(keys=keys_of(scenario), values=none, lengths=none)
    empty = {
        name: JaggedTensor(torch.zeros(0, 8), lengths=none)
        for lookup in collection.embedding_collections.values()
        for config in lookup.embedding_configs()
        for name in config.feature_names
    }
    with pytest.raises(ValueError, match="features must have at least one sample, got none"):
        collection(features)
    bags = KeyedTensor(["tags"], [8], torch.zeros(0, 8))
    assert collection.pooling(features, [empty], bags).values().shape == (0, 6 * 8)


def test_state_dict_round_trip():
    scenario = SCENARIOS["several-pairs"]
    features = to_features(make_batch(scenario, LENGTHS["mixed"]))
    first, second = make_collection(scenario, seed=0), make_collection(scenario, seed=1)
    assert not torch.equal(first(features).values(), second(features).values())
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(features).values(), second(features).values())


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
    collection = TargetAttentionEmbeddingBagCollection([full], [plain_config("item", "hist")])
    (config,) = collection.embedding_collections["8"].embedding_configs()
    for field in dataclasses.fields(config):
        assert getattr(config, field.name) == getattr(full, field.name), field.name
    (weight,) = embedding_parameters(collection)
    assert weight.dtype == torch.float16
    assert (weight == 0.5).all()


def test_attentions_keep_what_restrains_them():
    dropouts = {"row_dropout": 0.1, "dropout": 0.2, "output_dropout": 0.3}
    config = plain_config("item", "hist", **dropouts, length_power=True)
    collection = TargetAttentionEmbeddingBagCollection([table("t_item", "item", "hist")], config)
    (attention,) = collection.pooling.attentions
    for name, p in dropouts.items():
        assert getattr(attention, name) == p, name
    assert attention.length_power.shape == (attention.embed_dim,)


def test_encoder_layers_drop_no_rows_unless_told():
    config = TargetAttentionConfig("item", "hist", encoder_layers=1)
    collection = TargetAttentionEmbeddingBagCollection([table("t_item", "item", "hist")], config)
    (attention,), ((layer,),) = collection.pooling.attentions, collection.pooling.encoders
    assert (attention.row_dropout, attention.output_dropout) == (ROW_DROPOUT, OUTPUT_DROPOUT)
    assert attention.length_power is not None
    assert (layer.self_attn.row_dropout, layer.dropout.p) == (0, 0)
    config = dataclasses.replace(config, encoder_dropout=0.1, row_dropout=0.3, dropout=0.2)
    collection = TargetAttentionEmbeddingBagCollection([table("t_item", "item", "hist")], config)
    ((layer,),) = collection.pooling.encoders
    dropouts = layer.self_attn.row_dropout, layer.self_attn.dropout, layer.dropout.p
    assert dropouts == (0.3, 0.2, 0.1)


def test_table_without_feature_names_serves_its_own_name():
    collection = TargetAttentionEmbeddingBagCollection(
        [table("item"), table("hist"), table("user")], [plain_config("item", "hist")]
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


def test_meta_device():
    """Built on meta and then filled by DistributedModelParallel's rule: module by module."""
    scenario = SCENARIOS["shared-table"]
    collection = TargetAttentionEmbeddingBagCollection(
        scenario.tables, scenario.attentions, device=torch.device("meta")
    )
    assert collection.device == torch.device("meta")
    assert {parameter.device.type for parameter in collection.parameters()} == {"meta"}

    def fill(module: nn.Module) -> None:
        own = dict(module.named_parameters(recurse=False))
        for name, parameter in own.items():
            fresh = torch.full_like(parameter, torch.nan, device="cpu")
            module.register_parameter(name, nn.Parameter(fresh))
        if own:
            module.reset_parameters()

    collection.apply(fill)
    pooled = collection(to_features(make_batch(scenario, LENGTHS["mixed"])))
    assert pooled.values().isfinite().all()
    started = TargetAttentionEmbeddingBagCollection(scenario.tables, scenario.attentions)
    for name in ("q_proj_weight", "in_proj_bias", "recency_bias.position_weight"):
        actual = attention_parameters(collection)[f"0.{name}"]
        assert torch.equal(actual, attention_parameters(started)[f"0.{name}"]), name


@pytest.mark.parametrize("name", ["several-pairs", "nothing-else", "timestamps"])
def test_fx_traces_around_the_pooling(name: str):
    scenario = SCENARIOS[name]
    collection = make_collection(scenario)
    traced = symbolic_trace(collection, leaf_modules=[type(collection.pooling).__name__])
    for seed, lengths in enumerate(LENGTHS.values()):
        features = to_features(make_batch(scenario, lengths, seed))
        assert torch.equal(traced(features).values(), collection(features).values())


ITEM = table("t_item", "item", "hist")
PAIR = plain_config("item", "hist")
REFUSED = {
    "no-tables": ([], [PAIR], "tables must hold at least one"),
    "no-attentions": ([ITEM], [], "attentions must hold at least one"),
    "same-table-twice": ([ITEM, table("t_item", "x")], [PAIR], r"tables .* \['t_item'\]"),
    "unknown-target": (
        [ITEM],
        [plain_config("itme", "hist")],
        r"target must be a feature of tables, one of \['item', 'hist'\], got 'itme'",
    ),
    "unknown-history": (
        [ITEM],
        [plain_config("item", ["hits"])],
        "history must be a feature of tables, .* got 'hits'",
    ),
    "history-in-two-tables": (
        [ITEM, table("t_other", "hist")],
        [PAIR],
        r"history must name one table .*, one of \['hist@t_item', 'hist@t_other'\], got 'hist'",
    ),
    "target-in-two-tables": (
        [ITEM, table("t_other", "item")],
        [PAIR],
        r"target must name one table .* 'item@t_other'\], got 'item'",
    ),
    "history-of-another-table": (
        [ITEM, table("t_other", "user")],
        [plain_config("item", "hist@t_other")],
        "history must be a feature of tables, .* got 'hist@t_other'",
    ),
    "history-attended-twice": ([ITEM], [PAIR, PAIR], r"attended once, got \['hist@t_item'\]"),
    "history-twice-in-one": (
        [ITEM],
        [plain_config(["item", "item"], ["hist", "hist"])],
        "history must be attended once",
    ),
    "target-is-a-history": (
        [ITEM],
        [PAIR, plain_config("hist", "item")],
        r"target must be no history of any attention, got \['hist', 'item'\]",
    ),
    "empty-lists": ([ITEM], [plain_config([], [])], "at least one"),
    "no-rows-at-all": (
        [ITEM],
        [plain_config("item", "hist", max_history=0)],
        "max_history must be at least 1, or None, got 0",
    ),
    "two-lengths-of-one-key": (
        [ITEM, table("t_other", "other")],
        [
            plain_config("item", "hist", timestamps="time", max_history=2),
            plain_config("item", "other", timestamps="time", max_history=3),
        ],
        "max_history must be one for all attentions that read 'time', got 2 and 3",
    ),
    "odd-width": (
        [table("t_item", "item", "hist", width=6)],
        [PAIR],
        "a multiple of 4, got {'item': 6",
    ),
    "heads-do-not-divide": (
        [ITEM],
        [plain_config("item", "hist", num_heads=3)],
        "num_heads must divide the 8 columns of history 'hist', got 3",
    ),
    "less-than-no-encoder": (
        [ITEM],
        [plain_config("item", "hist", encoder_layers=-1)],
        "encoder_layers must be at least 0, got -1",
    ),
    "causal-without-encoder": (
        [ITEM],
        [plain_config("item", "hist", encoder_causal=True)],
        "encoder_causal must go with encoder_layers, at least 1, got 0",
    ),
    "dropout-without-encoder": (
        [ITEM],
        [plain_config("item", "hist", encoder_dropout=0.1)],
        "encoder_dropout must go with encoder_layers, at least 1, got 0",
    ),
    "encoder-dropout": (
        [ITEM],
        [plain_config("item", "hist", encoder_layers=1, encoder_dropout=1.0)],
        "encoder_dropout must be at least 0 and below 1, got 1.0",
    ),
    "user-column-without-encoder": (
        [ITEM],
        [plain_config("item", "hist", user_column=True)],
        "user_column must go with encoder_layers, at least 1, got 0",
    ),
    "window-that-is-not-causal": (
        [ITEM],
        [plain_config("item", "hist", encoder_layers=1, encoder_window=3)],
        "encoder_window must go with encoder_causal=True, got encoder_window=3 and encoder_caus",
    ),
    "window-of-nothing": (
        [ITEM],
        [plain_config("item", "hist", encoder_layers=1, encoder_causal=True, encoder_window=0)],
        "encoder_window must be at least 1, or None, got 0",
    ),
    "user-column-of-a-feature's-name": (
        [ITEM, table("hist", "user", "tags"), table("t_other", "user")],
        [plain_config("item", "hist", encoder_layers=1, user_column=True)],
        "user_column must make a key that no feature has in the output, got 'user@hist'",
    ),
    "no-heads": ([ITEM], [plain_config("item", "hist", num_heads=0)], "num_heads"),
    "timestamps-in-a-table": (
        [ITEM, table("t_time", "time")],
        [plain_config("item", "hist", timestamps="time")],
        "timestamps must be a key that no table holds, got 'time' of table 't_time'",
    ),
    "timestamps-without-recency": (
        [ITEM],
        [plain_config("item", "hist", timestamps="time", recency_bias=False)],
        "timestamps must go with recency_bias=True",
    ),
    "unknown-init": ([ITEM], [plain_config("item", "hist", init="zeros")], "init must be"),
    "no-pooling": (
        [dataclasses.replace(table("t", "item", "hist", "x"), pooling=PoolingType.NONE)],
        [PAIR],
        "pooling",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_at_construction(case: str):
    tables, attentions, message = REFUSED[case]
    with pytest.raises(ValueError, match=message) as error:
        TargetAttentionEmbeddingBagCollection(tables, attentions)
    assert "\n" not in str(error.value)


PAIRS = Scenario(
    [table("t_item", "item", "hist", "hist2", "cat"), table("t_user", "user")],
    [plain_config(["item", "cat"], ["hist", "hist2"], timestamps="time")],
)
GOOD = {
    "item": [[1], [2], [3]],
    "cat": [[4], [5], [6]],
    "hist": [[1, 2], [], [3]],
    "hist2": [[4, 5], [], [6]],
    "user": [[0], [], [1, 2]],
    "time": [[1, 2], [], [1]],
}
BAD_BATCHES = {
    "target-with-no-id": ({"item": [[1], [], [3]]}, "target 'item' .* got 0 in sample 1"),
    "target-with-two-ids": ({"cat": [[4], [5], [6, 7]]}, "target 'cat' .* got 2 in sample 2"),
    "target-with-0-and-2": ({"item": [[1], [], [2, 3]]}, "target 'item' .* got 0 in sample 1"),
    "longer-history": (
        {"hist2": [[4, 5], [], [6, 7]]},
        "'hist2' must be as long as 'hist' in each sample, got 2 and 1 in sample 2",
    ),
    "shifted-history": ({"hist2": [[4], [5], [6]]}, "'hist2' .* got 1 and 2 in sample 0"),
    "shorter-timestamps": ({"time": [[1], [], [1]]}, "'time' must be as long as 'hist'"),
    "no-timestamps": ({"time": None}, r"features must have the timestamps \['time'\], got"),
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


def test_ids_that_belong_to_no_sample_are_refused():
    good = to_features(GOOD)
    features = KeyedJaggedTensor(
        keys=good.keys(),
        values=torch.cat([good.values(), good.values()[:2]]),
        lengths=good.lengths(),
    )
    count = good.values().numel()
    with pytest.raises(ValueError, match=f"as many ids as .* add up to, {count}, got {count + 2}"):
        make_collection(PAIRS)(features)


def test_counts_are_checked_where_lengths_are_not_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "torchrec_jagged_attn.modules.batch_checks.should_validate", lambda _: False
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


def check_that_nothing_waits(scenario: Scenario, batch: Batch) -> None:
    cuda = torch.device("cuda")
    collection = make_collection(scenario, cuda)
    features = to_features(batch, cuda, is_weighted=scenario.is_weighted)
    features.length_per_key()  # which a batch brings along from the host
    sequences = [
        {
            key: JaggedTensor(rows.values().detach().requires_grad_(), lengths=rows.lengths())
            for key, rows in lookup(features).items()
        }
        for lookup in collection.embedding_collections.values()
    ]
    bags = None
    if collection.embedding_bag_collection is not None:
        bags = collection.embedding_bag_collection(features)
        bags = KeyedTensor(bags.keys(), bags.length_per_key(), bags.values().detach())
    for mode in ("default", "error"):  # the first time, kernels are compiled
        with sync_debug_mode(mode):
            pooled = collection.pooling(features, sequences, bags).values()
            pooled.backward(torch.ones_like(pooled))


def peer_encoders(layers: nn.Module, width: int, dtype: torch.dtype) -> list[nn.Module]:
    """Layers of torch's own with the same weights."""
    encoders = []
    for layer in layers.children():
        encoder = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", norm_first=True, batch_first=True
        )
        encoder.load_state_dict(layer.state_dict())
        encoders.append(encoder.to(layer.norm1.weight.device, dtype))
    return encoders


def hidden_pairs(num_rows: int, causal: bool, window: int | None, device: torch.device) -> Tensor:
    """``[L, L]``: which rows each row does not see."""
    distance = torch.arange(num_rows, device=device).unsqueeze(1) - torch.arange(
        num_rows, device=device
    )
    return ((distance < 0) & causal) | (distance >= (num_rows if window is None else window))


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 3)])
def test_rows_of_a_history_attend_to_each_other_first(causal, window, device):
    config = plain_config(
        "item",
        "hist",
        recency_bias=False,
        value_projection=True,
        encoder_layers=2,
        encoder_causal=causal,
        encoder_window=window,
    )
    scenario = Scenario([table("t_item", "item", "hist")], [config])
    collection = make_collection(scenario, device)
    lengths = [3, 0, 1, 7]
    batch = make_batch(scenario, lengths)
    weight = table_weights(collection)["t_item"].detach().double()
    layers, attention = collection.pooling.encoders[0], collection.pooling.attentions[0]
    encoders = peer_encoders(layers, 8, torch.float64)
    multi_head = nn.MultiheadAttention(8, 4, batch_first=True)
    multi_head.load_state_dict(attention.state_dict())
    multi_head.double().to(device)
    expected = torch.zeros(len(lengths), 8, dtype=torch.float64, device=device)
    for sample, ids in enumerate(batch["hist"]):
        if ids:
            rows = weight[torch.tensor(ids, device=device)].unsqueeze(0)
            for encoder in encoders:
                rows = encoder(rows, hidden_pairs(len(ids), causal, window, device))
            target = weight[torch.tensor(batch["item"][sample], device=device)].unsqueeze(0)
            expected[sample] = multi_head(target, rows, rows, need_weights=False)[0][0, 0]
        else:
            expected[sample] = multi_head.out_proj.bias
    out = collection(to_features(batch, device)).to_dict()["hist"]
    torch.testing.assert_close(out.double(), expected.detach(), rtol=1e-4, atol=1e-4)


USERS = Scenario(
    [
        table("t_item", "item", "hist", "clicks"),
        table("t_cat", "cat", "cats", width=4),
        table("t_user", "user", "tags"),
        table("t_other", "hist"),
    ],
    [
        plain_config(
            ["item", "cat"],
            ["hist@t_item", "cats"],
            recency_bias=False,
            encoder_layers=2,
            encoder_causal=True,
            encoder_window=3,
            user_column=True,
        ),
        plain_config("item", "clicks", recency_bias=False, encoder_layers=1, user_column=True),
    ],
)


def without_users(scenario: Scenario) -> Scenario:
    attentions = [dataclasses.replace(x, user_column=False) for x in scenario.attentions]
    return dataclasses.replace(scenario, attentions=attentions)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_user_columns_are_the_newest_encoded_rows(lengths, device):
    """And their gradient, of what they were encoded from."""
    batch = make_batch(USERS, LENGTHS[lengths])
    collection = make_collection(USERS, device)
    actual = collection(to_features(batch, device)).to_dict()
    users = torch.cat([actual["user@hist@t_item"], actual["user@clicks"]], dim=1)
    grad = torch.randn(users.shape, generator=torch.Generator().manual_seed(1)).to(device)
    users.backward(grad)
    histories = (("hist", "cats"), ("clicks",))

    def reference(dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        weights = {
            name: x.detach().to(dtype).requires_grad_()
            for name, x in table_weights(collection).items()
        }
        tables = {"hist": weights["t_item"], "clicks": weights["t_item"], "cats": weights["t_cat"]}
        columns = []
        for names, layers, config in zip(
            histories, collection.pooling.encoders, USERS.attentions, strict=True
        ):
            encoders = peer_encoders(layers, sum(tables[x].shape[1] for x in names), dtype)
            newest = []
            for sample in zip(*(batch[name] for name in names), strict=True):
                rows = torch.cat(
                    [
                        tables[name][torch.tensor(ids, dtype=torch.int64, device=device)]
                        for name, ids in zip(names, sample, strict=True)
                    ],
                    dim=1,
                )
                hidden = hidden_pairs(
                    len(rows), config.encoder_causal, config.encoder_window, device
                )
                for encoder in encoders if len(rows) else ():
                    rows = encoder(rows.unsqueeze(0), hidden).squeeze(0)
                newest.append(rows[-1] if len(rows) else rows.sum(0))
            columns.append(torch.stack(newest))
        out = torch.cat(columns, dim=1)
        out.backward(grad.to(dtype))
        return out.detach(), [weights[name].grad for name in ("t_item", "t_cat")]

    expected, expected_grads = reference(torch.float64)
    plain, plain_grads = reference(torch.float32)
    assert_close(users.detach(), expected, plain)
    for name, *of_table in zip(("t_item", "t_cat"), expected_grads, plain_grads, strict=True):
        found = table_weights(collection)[name].grad
        assert_close(found, *of_table, gradient=True, name=name)


def test_user_columns_come_after_all_others(device):
    """Which are what they are without."""
    batch = make_batch(USERS, LENGTHS["mixed"])
    features = to_features(batch, device)
    collection, plain = (make_collection(x, device) for x in (USERS, without_users(USERS)))
    assert collection.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(collection.state_dict())
    out, expected = collection(features), plain(features)
    assert expected.keys() == EmbeddingBagCollection(USERS.tables)(to_features(batch)).keys()
    assert out.keys() == [*expected.keys(), "user@hist@t_item", "user@clicks"]
    assert out.length_per_key() == [*expected.length_per_key(), 12, 8]
    assert torch.equal(out.values()[:, :-20], expected.values())
    traced = symbolic_trace(collection, leaf_modules=[type(collection.pooling).__name__])
    assert torch.equal(traced(features).values(), out.values())


def test_dlrm_passes_user_columns_by():
    tables = [table("t_item", "item", "hist"), table("t_user", "user", "tags")]
    config = plain_config("item", "hist", encoder_layers=1, user_column=True)
    scenario = Scenario(tables, [config])
    features = to_features(make_batch(scenario, LENGTHS["mixed"]))
    dense = torch.rand(features.stride(), 3)
    logits = []
    for given in (scenario, without_users(scenario)):
        torch.manual_seed(0)
        logits.append(DLRM(make_collection(given), 3, [4, 8], [8, 1])(dense, features))
    assert torch.equal(*logits)


def test_older_rows_are_not_looked_up(device: torch.device):
    scenario = SCENARIOS["newest-rows"]
    collection = make_collection(scenario, device)
    lengths = LENGTHS["mixed"]
    seen = []
    collection.embedding_collections["8"].register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0])
    )
    features = to_features(make_batch(scenario, lengths), device)
    collection(features)
    (looked_up,) = seen
    assert looked_up.keys() == features.keys()
    for key in features.to_dict():
        limit = {"hist": 3, "cats": 3, "time": 3, "clicks": 1}.get(key, 100)
        expected, actual = features[key].to_dense(), looked_up[key].to_dense()
        for old, new in zip(expected, actual, strict=True):
            assert torch.equal(new, old[-limit:]), key


def test_histories_that_differ_in_length_are_refused_before_they_are_cut():
    scenario = SCENARIOS["newest-rows"]
    collection = make_collection(scenario)
    batch = make_batch(scenario, [5, 4])
    batch["time"][0].pop()
    with pytest.raises(ValueError, match=r"'time' must be as long as 'hist' .* got 4 and 5"):
        collection(to_features(batch))


def test_weights_must_be_there_where_they_are_read_and_nowhere_else():
    with pytest.raises(ValueError, match="features must have no weights unless is_weighted=True"):
        make_collection(PAIRS)(to_features(GOOD, is_weighted=True))
    weighted = dataclasses.replace(PAIRS, is_weighted=True)
    with pytest.raises(ValueError, match="features must have weights for is_weighted=True"):
        make_collection(weighted)(to_features(GOOD))


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_weights_of_a_history_are_named_by_its_key(weight: float):
    scenario = SCENARIOS["weighted"]
    features = to_features(make_batch(scenario, [2, 0, 3]), is_weighted=True)
    for key in ("bought", "item", "tags", "hist"):  # but for the last, any weight will do
        begin = features.offset_per_key()[features.keys().index(key)]
        features.weights()[begin] = weight
        if key != "hist":
            make_collection(scenario)(features)
    message = rf"weights of history 'hist' must be finite and not negative, got {weight} at pos"
    with pytest.raises(ValueError, match=message):
        make_collection(scenario)(features)


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("weighted", torch.float64, r"weights of \['user'\] must be torch.float32, got .*float64"),
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


def test_names_of_features_are_made_once_for_each_collection(monkeypatch: pytest.MonkeyPatch):
    counted, made = [], pooling.get_embedding_names_by_table
    monkeypatch.setattr(
        pooling,
        "get_embedding_names_by_table",
        lambda tables: counted.append(tables) or made(tables),
    )
    make_collection(SCENARIOS["different-widths"])
    assert len(counted) == 5  # all tables, those of three widths, and those of bags


def looked_up(
    collection: TargetAttentionEmbeddingBagCollection, features: KeyedJaggedTensor
) -> tuple[KeyedJaggedTensor, list[dict[str, JaggedTensor]], KeyedTensor | None]:
    """What the pooling of ``collection`` takes."""
    sequences = [lookup(features) for lookup in collection.embedding_collections.values()]
    bags = collection.embedding_bag_collection
    return features, sequences, None if bags is None else bags(features)


def test_bags_may_come_in_another_order():
    """As those that are sharded in several ways do."""
    scenario = Scenario(
        [table(f"t_{i}", f"user_{i}", width=4 * i) for i in (1, 2, 3)] + [ITEM],
        [plain_config("item", "hist")],
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
def test_half_precision_rows_of_a_single_lookup_are_rounded_after_they_are_pooled(
    dtype: torch.dtype, pooling: str
):
    """Added up in fp32, and then in the dtype of the rows, as sharded bags are."""
    torch.manual_seed(0)
    tables = [table("t_item", "item", "hist"), table("t_user", "tags", "user", pooling=pooling)]
    collection = TargetAttentionEmbeddingBagCollection(
        tables, plain_config("item", "hist"), single_lookup=True
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


def test_a_single_lookup_is_of_all_tables_as_wide_as_an_attended_one():
    tables = [
        *(table("t_user", "user"), table("t_item", "item", "hist")),
        *(table("t_wide", "wide", width=12), table("t_tag", "tags")),
    ]
    bags = EmbeddingBagCollection(tables)
    collection = TargetAttentionEmbeddingBagCollection.from_embedding_bag_collection(
        bags, plain_config("item", "hist"), single_lookup=True
    )
    assert list(collection.embedding_collections) == ["8"]
    keys = collection.table_keys()
    assert [*collection.embedding_collections["8"].embeddings] == ["t_user", "t_item", "t_tag"]
    assert [*collection.embedding_bag_collection.embedding_bags] == ["t_wide"]
    assert {name: collection.state_dict()[key].data_ptr() for name, key in keys.items()} == {
        name: bag.weight.data_ptr() for name, bag in bags.embedding_bags.items()
    }


class CountOps(TorchDispatchMode):
    """Counts the ops that run."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("single_lookup", [False, True])
@pytest.mark.parametrize("table_of", [lambda name: f"t_{name}", lambda _: "t_shared"])
def test_more_features_are_no_more_work_for_the_host(
    table_of: Callable[[str], str], single_lookup: bool
):
    """Neither those of the EmbeddingBagCollection, nor those looked up with the target."""

    def num_ops(num_features: int) -> int:
        tables: dict[str, list[str]] = {table_of("item"): ["item", "hist"]}
        for name in (f"user_{i}" for i in range(num_features)):
            tables.setdefault(table_of(name), []).append(name)
        scenario = Scenario(
            [table(name, *features) for name, features in tables.items()],
            [plain_config("item", "hist")],
            single_lookup=single_lookup,
        )
        collection = make_collection(scenario)
        inputs = looked_up(collection, to_features(make_batch(scenario, [2, 0, 3])))
        with CountOps() as ops:
            collection.pooling(*inputs)
        return ops.number

    assert num_ops(20) == num_ops(2)


def test_histories_of_several_batch_sizes_are_compared_before_they_are_cut():
    """Each key is expanded first: ``time`` has three samples where ``hist`` has two."""
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
    with pytest.raises(ValueError, match=r"'time' must be as long as 'hist' .* got 3 and 2 in"):
        truncation(features([2, 1, 3]))


def test_the_warning_about_an_optimizer_of_tables_points_at_the_line_that_gave_it():
    collection = make_collection(SCENARIOS["nothing-else"])
    with pytest.warns(UserWarning, match="leaves out the weights of attentions") as caught:
        apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.1})
    assert [warning.filename for warning in caught] == [__file__]


def test_gradients_of_weights(device: torch.device):
    """Of a pooled row: its product with the gradient. Of an attended one: by finite differences."""
    collection = make_collection(SCENARIOS["weighted"], device)
    features = to_features(make_batch(SCENARIOS["weighted"], [2, 0, 3]), device, is_weighted=True)
    weights = torch.rand(features.values().numel(), device=device) + 0.5

    def pooled(weights: Tensor) -> dict[str, Tensor]:
        weighted = KeyedJaggedTensor(
            features.keys(), features.values(), weights, lengths=features.lengths()
        )
        return collection(weighted).to_dict()

    leaf = weights.clone().requires_grad_()
    columns = pooled(leaf)
    (columns["hist"].sum() + columns["bought"].sum()).backward()
    weighted = KeyedJaggedTensor(
        features.keys(), features.values(), leaf.grad, lengths=features.lengths()
    )
    ids = weighted["bought"].values()
    rows = table_weights(collection)["t_item"][ids]
    torch.testing.assert_close(weighted["bought"].weights(), rows.sum(1))
    begin = features.offset_per_key()[features.keys().index("hist")]
    for row in range(begin, begin + features["hist"].values().numel()):
        step = torch.zeros_like(weights)
        step[row] = 1e-2
        change = pooled(weights + step)["hist"].sum() - pooled(weights - step)["hist"].sum()
        torch.testing.assert_close(leaf.grad[row], change / 2e-2, rtol=1e-2, atol=1e-2)


def test_one_attention_needs_no_list():
    features = to_features(make_batch(SCENARIOS["nothing-else"], [2, 0]))
    torch.manual_seed(0)
    listed = TargetAttentionEmbeddingBagCollection([ITEM], [PAIR])
    torch.manual_seed(0)
    alone = TargetAttentionEmbeddingBagCollection([ITEM], PAIR)
    assert torch.equal(alone(features).values(), listed(features).values())
    with pytest.raises(TypeError, match="attentions must hold TargetAttentionConfigs, got a str"):
        TargetAttentionEmbeddingBagCollection([ITEM], ["hist"])


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


def test_goes_on_with_the_tables_of_an_embedding_bag_collection():
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
def test_pooled_rows_that_fbgemm_cannot_copy_to_their_samples(said, error, message):
    class Bags:
        def keys(self):
            raise RuntimeError(said)

    with pytest.raises(error, match=message):
        pooling._in_order(Bags(), [])
