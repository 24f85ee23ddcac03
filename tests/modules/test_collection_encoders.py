"""Encoder layers and user columns of the attention collection."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torchrec.fx import symbolic_trace
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from tests.modules.collection_scenarios import (
    LENGTHS,
    USERS,
    Scenario,
    make_batch,
    make_collection,
    table,
    table_weights,
    to_features,
)
from torchrec_jagged_attn import (
    TargetAttentionConfig,
    TargetAttentionEmbeddingBagCollection,
)
from torchrec_jagged_attn.testing import RoundingErrors, assert_close


def test_encoder_layers_drop_what_the_config_says():
    config = TargetAttentionConfig("item", "hist", encoder_layers=1)
    collection = TargetAttentionEmbeddingBagCollection([table("t_item", "item", "hist")], config)
    (attention,), ((layer,),) = collection.pooling.attentions, collection.pooling.encoders
    assert (attention.row_dropout, attention.dropout) == (0, 0)
    assert (layer.self_attn.row_dropout, layer.dropout.p) == (0, 0)
    config = dataclasses.replace(config, encoder_dropout=0.1, row_dropout=0.3, dropout=0.2)
    collection = TargetAttentionEmbeddingBagCollection([table("t_item", "item", "hist")], config)
    ((layer,),) = collection.pooling.encoders
    dropouts = layer.self_attn.row_dropout, layer.self_attn.dropout, layer.dropout.p
    assert dropouts == (0.3, 0.2, 0.1)


@pytest.mark.parametrize(
    ("options", "heads"),
    [({}, (8, 4)), ({"num_heads": 16}, (16, 16))],
    ids=str,
)
def test_heads_of_attention_and_of_encoder_layers(options, heads):
    """By the width of both histories together."""
    tables = [table("t", "item", "hist", width=16), table("u", "cat", "cats", width=16)]
    config = TargetAttentionConfig(["item", "cat"], ["hist", "cats"], encoder_layers=1, **options)
    pooling = TargetAttentionEmbeddingBagCollection(tables, config).pooling
    layer = pooling.encoders[0][0]
    assert (pooling.attentions[0].num_heads, layer.self_attn.num_heads) == heads


def peer_encoders(layers: nn.Module, width: int, dtype: torch.dtype) -> list[nn.Module]:
    """Layers of torch's own with the same weights."""
    encoders = []
    for layer in layers.children():
        encoder = nn.TransformerEncoderLayer(
            width,
            layer.self_attn.num_heads,
            4 * width,
            dropout=0.0,
            activation="gelu",
            norm_first=True,
            batch_first=True,
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
    config = TargetAttentionConfig(
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
    multi_head = nn.MultiheadAttention(8, attention.num_heads, batch_first=True)
    multi_head.load_state_dict(attention.state_dict())
    multi_head.double().to(device)
    expected = torch.zeros(len(lengths), 8, dtype=torch.float64, device=device)
    with torch.no_grad(), RoundingErrors(torch.float32) as errors:
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
    assert_close(out, expected, errors)


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

    def reference() -> tuple[Tensor, list[Tensor]]:
        weights = {
            name: x.detach().double().requires_grad_()
            for name, x in table_weights(collection).items()
        }
        tables = {"hist": weights["t_item"], "clicks": weights["t_item"], "cats": weights["t_cat"]}
        columns = []
        for names, layers, config in zip(
            histories, collection.pooling.encoders, USERS.attentions, strict=True
        ):
            width = sum(tables[x].shape[1] for x in names)
            encoders = peer_encoders(layers, width, torch.float64)
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
        out.backward(grad.double())
        return out.detach(), [weights[name].grad for name in ("t_item", "t_cat")]

    with RoundingErrors(torch.float32) as errors:
        expected, expected_grads = reference()
    assert_close(users.detach(), expected, errors)
    for name, grad in zip(("t_item", "t_cat"), expected_grads, strict=True):
        assert_close(table_weights(collection)[name].grad, grad, errors, name=name)


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
    config = TargetAttentionConfig("item", "hist", encoder_layers=1, user_column=True)
    scenario = Scenario(tables, [config])
    features = to_features(make_batch(scenario, LENGTHS["mixed"]))
    dense = torch.rand(features.stride(), 3)
    logits = []
    for given in (scenario, without_users(scenario)):
        torch.manual_seed(0)
        logits.append(DLRM(make_collection(given), 3, [4, 8], [8, 1])(dense, features))
    assert torch.equal(*logits)
