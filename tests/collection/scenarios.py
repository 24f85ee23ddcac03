"""Scenarios, batches and the oracle of tests of the attention collection."""

import dataclasses
import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from tests.cases import offsets_of
from tests.fixtures import sync_debug_mode
from tests.modules.target_attention_inputs import attend_by_sample
from tests.rounding import RoundingErrors
from tests.tolerance import assert_close
from torchrec_jagged_attn import (
    EncoderConfig,
    TargetAttentionConfig,
    TargetAttentionEmbeddingBagCollection,
)
from torchrec_jagged_attn.collection.pooling import TargetAttentionPooling

Batch = dict[str, list[list[int]]]  # the ids of each sample, by key

CPU = torch.device("cpu")

NUM_IDS = 40


def table(
    name: str,
    *features: str,
    width: int = 8,
    pooling: str = "SUM",
    num_rows: int = NUM_IDS,
    data_type: DataType = DataType.FP32,
) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name,
        embedding_dim=width,
        num_embeddings=num_rows,
        feature_names=list(features),
        data_type=data_type,
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
    single_id_features: tuple[str, ...] = ()

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
        [TargetAttentionConfig("item", "hist")],
    ),
    "nothing-else": Scenario(
        [table("t_item", "item", "hist")], [TargetAttentionConfig("item", "hist", num_heads=8)]
    ),
    "pooled-neighbours": Scenario(
        [
            table("t_sum", "bought", "hist", "item"),
            table("t_mean", "liked", "brand", pooling="MEAN"),
            table("t_bag", "tags", pooling="MEAN"),
        ],
        [TargetAttentionConfig(["item", "brand"], ["hist", "liked"])],
    ),
    "side-information": Scenario(
        [
            table("t_user", "user", width=4),
            table("t_cat", "hist_cat", "cat", "tags", pooling="MEAN"),
            table("t_item", "item", "hist", "bought"),
        ],
        [TargetAttentionConfig(["item", "cat"], ["hist", "hist_cat"], num_heads=2)],
    ),
    "several-pairs": Scenario(
        [
            table("t_item", "clicks", "item", "orders", "seed"),
            table("t_query", "query", "queries"),
            table("t_user", "user"),
        ],
        [
            TargetAttentionConfig("item", "clicks"),
            TargetAttentionConfig("query", "queries", num_heads=2, recency_bias=False),
            TargetAttentionConfig("item", "orders", num_heads=1, init="mha"),
        ],
    ),
    "features-in-two-tables": Scenario(
        [
            table("t_user", "user", "tags"),
            table("t_item", "item", "bought", "hist", "tags"),
            table("t_cat", "cat", "bought", pooling="MEAN"),
            table("t_tag", "cat", pooling="MEAN"),
        ],
        [TargetAttentionConfig("item", "hist")],
    ),
    "different-widths": Scenario(
        [
            table("t_item", "item", "bought", width=16),
            table("t_hist", "hist", width=8),
            table("t_cat", "cats", "cat", width=4, pooling="MEAN"),
            table("t_user", "user", width=12),
        ],
        [
            TargetAttentionConfig("item", ["hist", "cats"], num_heads=2),
        ],
    ),
    "more-targets-than-histories": Scenario(
        [table("t_item", "item", "hist"), table("t_cat", "cat", width=4)],
        [TargetAttentionConfig(["item", "cat"], "hist", init="mha")],
    ),
    "attended-and-pooled": Scenario(
        [
            table("t_item", "item", "hist"),
            table("t_bag", "hist", "user", width=12),
            table("t_other", "hist", "likes", pooling="MEAN"),
        ],
        [
            TargetAttentionConfig("item", "hist@t_item"),
            TargetAttentionConfig("item", "likes", num_heads=2),
        ],
    ),
    "newest-rows": Scenario(
        [table("t_item", "item", "hist", "clicks", "bought"), table("t_cat", "cat", "cats")],
        [
            TargetAttentionConfig(
                ["item", "cat"], ["hist", "cats"], timestamps="time", max_history=3
            ),
            TargetAttentionConfig("item", "clicks", max_history=1),
        ],
    ),
    "weighted": Scenario(
        [
            table("t_item", "item", "hist", "bought"),
            table("t_cat", "cat", "cats", "tags", pooling="MEAN"),
            table("t_user", "user"),
        ],
        [
            TargetAttentionConfig(
                ["item", "cat"], ["hist", "cats"], timestamps="time", max_history=5
            )
        ],
        is_weighted=True,
    ),
    "projected": Scenario(
        [table("t_item", "item", "hist", "clicks", width=12), table("t_tag", "tag", "tags")],
        [
            TargetAttentionConfig("item", "hist", num_heads=3, value_projection=True),
            TargetAttentionConfig(["item", "tag"], "clicks", value_projection=True),
            TargetAttentionConfig("tag", "tags", num_heads=2),
        ],
    ),
    "request-time": Scenario(
        [table("t_item", "item", "hist", "clicks"), table("t_user", "user")],
        [
            TargetAttentionConfig(
                "item", "hist", timestamps="hist_times", request_time="now", max_history=4
            ),
            TargetAttentionConfig("item", "clicks", timestamps="click_times", request_time="now"),
        ],
    ),
    "single-ids": Scenario(  # of a table with a target, one without, one of bags, another width
        [
            table("t_item", "bought", "hist", "item"),
            table("t_user", "user", "age", pooling="MEAN"),
            table("t_tag", "tags", "city"),
            table("t_wide", "device", "city", width=12),
        ],
        [TargetAttentionConfig("item", "hist")],
        single_id_features=("bought", "user", "age", "city", "device"),
    ),
    "single-ids-alone": Scenario(
        [table("t_item", "hist", "item", "cat"), table("t_user", "user", "age", pooling="MEAN")],
        [TargetAttentionConfig("item", "hist")],
        single_id_features=("user", "age", "cat"),
    ),
}

SCENARIOS |= {
    f"{name}-single-lookup": dataclasses.replace(SCENARIOS[name], single_lookup=True)
    for name in (
        *("shared-table", "different-widths", "features-in-two-tables", "weighted"),
        "single-ids",
    )
}
SCENARIOS["single-ids-weighted"] = dataclasses.replace(
    SCENARIOS["single-ids-alone"], is_weighted=True
)

LENGTHS = {
    "mixed": [0, 3, 0, 1, 7, 0, 0, 20, 0],
    "one-sample": [4],
    "all-empty": [0, 0, 0],
}


def keys_of(scenario: Scenario) -> list[str]:
    features = {name for config in scenario.tables for name in config.feature_names}
    times = {x for config in scenario.attentions for x in (config.timestamps, config.request_time)}
    return sorted(features | times - {None})


def make_batch(scenario: Scenario, lengths: list[int], seed: int = 0) -> Batch:
    """Random ids: one per target or single id, ``lengths`` for histories, else random lengths."""
    rng = random.Random(seed)
    targets, histories = (
        {name for config in scenario.attentions for name in scenario.features(names(config))}
        for names in (lambda config: config.targets, lambda config: config.histories)
    )
    batch: Batch = {}
    for key in keys_of(scenario):
        if key in targets or key in scenario.single_id_features:
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
        if config.request_time is not None:
            batch[config.request_time] = [[rng.randrange(1500)] for _ in lengths]
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
        single_id_features=scenario.single_id_features,
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


def encoder_parameters(collection: TargetAttentionEmbeddingBagCollection) -> dict[str, Tensor]:
    parameters = collection.pooling.encoders.named_parameters()
    return {f"encoder.{name}": parameter for name, parameter in parameters}


def within(parameters: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): x for k, x in parameters.items() if k.startswith(prefix)}


def encode(
    config: TargetAttentionConfig, parameters: dict[str, Tensor], num_heads: int, rows: Tensor
) -> Tensor:
    """Rows ``[L, E]`` of one sample, encoded by PyTorch's layers."""
    encoder = config.encoder
    if encoder is None:
        return rows
    length, embed_dim = rows.shape
    places = torch.arange(length)
    distance = places[:, None] - places
    masked = (distance < 0) & encoder.causal
    masked |= distance >= (encoder.window or length)
    layer = nn.TransformerEncoderLayer(
        embed_dim, num_heads, 4 * embed_dim, 0.0, "gelu", norm_first=True, batch_first=True,
        device="meta",
    )  # fmt: skip
    for index in range(encoder.num_layers if length else 0):
        inputs = rows.unsqueeze(0), masked.to(rows.device)
        rows = functional_call(layer, within(parameters, f"{index}."), inputs, strict=True)[0]
    return rows


def oracle(
    scenario: Scenario,
    batch: Batch,
    pooling: TargetAttentionPooling,
    tables: dict[str, Tensor],
    attentions: dict[str, Tensor],
    encoders: dict[str, Tensor],
) -> list[Tensor]:
    """Columns of the output by feature, as in EmbeddingBagCollection, then user embeddings.

    ``pooling`` is read for numbers and widths of heads.
    """
    batch = dict(batch)
    for config in scenario.attentions:
        if config.max_history is not None:
            for name in {*scenario.features(config.histories), config.timestamps} - {None}:
                batch[name] = [ids[-config.max_history :] for ids in batch[name]]

    def weights_of(ids: list[int]) -> list[float]:
        return [weight_of(i) if scenario.is_weighted else 1.0 for i in ids]

    def values_of(key: str | None) -> Tensor | None:
        return None if key is None else torch.tensor([i for ids in batch[key] for i in ids]).long()

    def rows_of(names: list[str], sample: int) -> Tensor:
        found = [scenario.find(name) for name in names]
        return torch.cat([tables[t.name][batch[feature][sample]] for t, feature in found], dim=1)

    attended: dict[tuple[str, str], Tensor] = {}
    users: list[Tensor] = []
    for index, config in enumerate(scenario.attentions):
        events = batch[scenario.features(config.histories)[0]]
        heads = next((x.self_attn.num_heads for x in pooling.encoders[index]), 1)
        layers = within(encoders, f"encoder.{index}.")
        histories = [
            encode(config, layers, heads, rows_of(config.histories, b)) for b in range(len(events))
        ]
        outputs = attend_by_sample(
            pooling.attentions[index],
            target=torch.cat([rows_of(config.targets, b) for b in range(len(events))]),
            history=torch.cat(histories),
            offsets=offsets_of(torch.tensor([len(ids) for ids in events]), torch.int64, CPU),
            timestamps=values_of(config.timestamps),
            request_time=values_of(config.request_time),
            prior_weights=torch.tensor([w for ids in events for w in weights_of(ids)]).double(),
            **within(attentions, f"{index}."),
        )
        found = [scenario.find(name) for name in config.histories]
        parts = outputs.split([t.embedding_dim for t, _ in found], dim=1)
        attended |= {
            (t.name, feature): part for (t, feature), part in zip(found, parts, strict=True)
        }
        if config.encoder is not None and config.encoder.user_embedding:
            users.append(
                torch.stack([rows[-1] if len(rows) else rows.sum(0) for rows in histories])
            )
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
    return columns + users


def check_against_oracle(
    collection: TargetAttentionEmbeddingBagCollection,
    scenario: Scenario,
    batches: list[Batch],
    to_samples: Callable[[Batch], Batch] = lambda batch: batch,
) -> None:
    """Outputs, and gradients summed over ``batches``, equal the oracle's by the tolerance rule.

    ``to_samples`` converts a batch of requests to samples with one candidate each, for the oracle.
    """
    device = next(collection.parameters()).device
    generator = torch.Generator().manual_seed(1)
    outs, grads_out = [], []
    for batch in batches:
        features = to_features(batch, device, is_weighted=scenario.is_weighted)
        outs.append(collection(features).values())
        grads_out.append(torch.randn(outs[-1].shape, generator=generator))
        outs[-1].backward(grads_out[-1].to(device))

    leaves = {
        kind: {name: p.detach().cpu().double().requires_grad_() for name, p in named.items()}
        for kind, named in (
            ("tables", table_weights(collection)),
            ("attentions", attention_parameters(collection)),
            ("encoders", encoder_parameters(collection)),
        )
    }
    with RoundingErrors(torch.float32) as errors:
        for batch, out, grad_out in zip(batches, outs, grads_out, strict=True):
            expected = torch.cat(
                oracle(scenario, to_samples(batch), collection.pooling, **leaves), dim=1
            )
            expected.backward(grad_out.double())
            assert_close(out.cpu(), expected, errors)
    actual = {
        **table_weights(collection),
        **attention_parameters(collection),
        **encoder_parameters(collection),
    }
    expected_grads = {name: p.grad for named in leaves.values() for name, p in named.items()}
    assert actual.keys() == expected_grads.keys()
    for name, parameter in actual.items():
        assert parameter.grad is not None, f"{name} has no gradient"
        grad = expected_grads[name]
        grad = torch.zeros_like(parameter.grad.cpu()).double() if grad is None else grad
        assert_close(parameter.grad.cpu(), grad, errors, name=name)


ITEM = table("t_item", "item", "hist")

PAIR = TargetAttentionConfig("item", "hist")

PAIRS = Scenario(
    [table("t_item", "item", "hist", "hist2", "cat"), table("t_user", "user")],
    [
        TargetAttentionConfig(
            ["item", "cat"], ["hist", "hist2"], timestamps="time", request_time="now"
        )
    ],
)

GOOD = {
    "item": [[1], [2], [3]],
    "cat": [[4], [5], [6]],
    "hist": [[1, 2], [], [3]],
    "hist2": [[4, 5], [], [6]],
    "user": [[0], [], [1, 2]],
    "time": [[1, 2], [], [1]],
    "now": [[5], [0], [1]],
}


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


USERS = Scenario(
    [
        table("t_item", "item", "hist", "clicks"),
        table("t_cat", "cat", "cats", width=4),
        table("t_user", "user", "tags"),
        table("t_other", "hist"),
    ],
    [
        TargetAttentionConfig(
            ["item", "cat"],
            ["hist@t_item", "cats"],
            recency_bias=False,
            encoder=EncoderConfig(num_layers=2, causal=True, window=3, user_embedding=True),
        ),
        TargetAttentionConfig(
            "item", "clicks", recency_bias=False, encoder=EncoderConfig(user_embedding=True)
        ),
    ],
)
