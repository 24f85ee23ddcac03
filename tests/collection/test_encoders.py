"""Encoder layers and user embeddings of the attention collection."""

import dataclasses

import pytest
import torch
from torchrec.fx import symbolic_trace
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from tests.collection.scenarios import (
    LENGTHS,
    USERS,
    Scenario,
    check_against_oracle,
    make_batch,
    make_collection,
    table,
    to_features,
)
from torchrec_jagged_attn import (
    EncoderConfig,
    TargetAttentionConfig,
    TargetAttentionEmbeddingBagCollection,
)


def test_dropout_of_encoder_layers():
    config = TargetAttentionConfig("item", "hist", encoder=EncoderConfig())
    collection = TargetAttentionEmbeddingBagCollection([table("t_item", "item", "hist")], config)
    (attention,), ((layer,),) = collection.pooling.attentions, collection.pooling.encoders
    assert (attention.dropout, layer.self_attn.dropout, layer.dropout.p) == (0, 0, 0)
    encoder = EncoderConfig(dropout=0.1)
    config = dataclasses.replace(config, encoder=encoder, dropout=0.2)
    collection = TargetAttentionEmbeddingBagCollection([table("t_item", "item", "hist")], config)
    ((layer,),) = collection.pooling.encoders
    assert (layer.self_attn.dropout, layer.dropout.p) == (0.2, 0.1)


@pytest.mark.parametrize(
    ("options", "heads"),
    [({}, (8, 4)), ({"num_heads": 16}, (16, 16))],
    ids=str,
)
def test_heads_of_attention_and_of_encoder_layers(options, heads):
    """By the total width of both histories."""
    tables = [table("t", "item", "hist", width=16), table("u", "cat", "cats", width=16)]
    config = TargetAttentionConfig(
        ["item", "cat"], ["hist", "cats"], encoder=EncoderConfig(), **options
    )
    pooling = TargetAttentionEmbeddingBagCollection(tables, config).pooling
    layer = pooling.encoders[0][0]
    assert (pooling.attentions[0].num_heads, layer.self_attn.num_heads) == heads


def without_users(scenario: Scenario) -> Scenario:
    attentions = []
    for config in scenario.attentions:
        encoder = dataclasses.replace(config.encoder, user_embedding=False)
        attentions.append(dataclasses.replace(config, encoder=encoder))
    return dataclasses.replace(scenario, attentions=attentions)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_user_embeddings_are_the_newest_encoded_rows(lengths, device):
    """Including gradients of the rows before the encoder."""
    batch = make_batch(USERS, LENGTHS[lengths])
    check_against_oracle(make_collection(USERS, device), USERS, [batch])


def test_user_embeddings_come_after_all_others(device):
    """Other columns equal a collection without user embeddings."""
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


def test_dlrm_ignores_user_embeddings():
    tables = [table("t_item", "item", "hist"), table("t_user", "user", "tags")]
    config = TargetAttentionConfig("item", "hist", encoder=EncoderConfig(user_embedding=True))
    scenario = Scenario(tables, [config])
    features = to_features(make_batch(scenario, LENGTHS["mixed"]))
    dense = torch.rand(features.stride(), 3)
    logits = []
    for given in (scenario, without_users(scenario)):
        torch.manual_seed(0)
        logits.append(DLRM(make_collection(given), 3, [4, 8], [8, 1])(dense, features))
    assert torch.equal(*logits)
