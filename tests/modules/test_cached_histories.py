"""``CachedHistoryCollection``: new events alone give what whole histories give."""

import copy
from typing import Any

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from tests.plain import plain_config
from torchrec_jagged_attn import (
    CachedHistoryCollection,
    HistoryCache,
    TargetAttentionConfig,
    TargetAttentionEmbeddingBagCollection,
)
from torchrec_jagged_attn.testing import assert_close

KEYS = ["item", "cat", "item_history", "cat_history", "user"]
MAX_HISTORY = 6
NUM_IDS = 50
Request = tuple[int, int, int]  # user, candidates, events so far
BATCHES: list[list[Request]] = [
    [(1, 3, 4), (2, 1, 0), (3, 2, 9)],
    [(3, 1, 9), (1, 2, 5)],
    [(2, 4, 1), (1, 0, 12), (4, 1, 2), (3, 2, 11)],
    [(5, 2, 6), (3, 1, 4)],  # fewer events than before
]


def make_collection(device: torch.device, **options: Any) -> TargetAttentionEmbeddingBagCollection:
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(
            name=name, embedding_dim=8, num_embeddings=NUM_IDS, feature_names=features
        )
        for name, features in {
            "t_item": ["item", "item_history"],
            "t_cat": ["cat", "cat_history"],
            "t_user": ["user"],
        }.items()
    ]
    config = TargetAttentionConfig(
        target=["item", "cat"],
        history=["item_history", "cat_history"],
        num_heads=2,
        init="mha",
        length_power=options.get("score", "softmax") == "softmax",
        length_bias=options.get("score", "softmax") == "softmax",
        **options,
    )
    collection = TargetAttentionEmbeddingBagCollection(tables, config, candidates="jagged")
    (attention,) = collection.pooling.attentions
    for parameter in (attention.length_power, attention.length_bias):
        if parameter is not None:
            torch.nn.init.normal_(parameter)
    return collection.to(device).eval()


def features_of(batch: list[Request], lacks: list[int], device: torch.device) -> KeyedJaggedTensor:
    """With the newest ``lacks`` events of each history."""
    item = [[(7 * user + 3 * n) % NUM_IDS for n in range(count)] for user, count, _ in batch]
    history = [
        [(11 * user + n * n) % NUM_IDS for n in range(end - lack, end)]
        for (user, _, end), lack in zip(batch, lacks, strict=True)
    ]
    cats, cat_history = ([[i // 5 for i in ids] for ids in of] for of in (item, history))
    columns = [item, cats, history, cat_history, [[user] for user, *_ in batch]]
    return KeyedJaggedTensor(
        keys=KEYS,
        values=torch.tensor([i for of in columns for ids in of for i in ids], device=device),
        lengths=torch.tensor([len(ids) for of in columns for ids in of], device=device),
    )


def whole(batch: list[Request], device: torch.device) -> KeyedJaggedTensor:
    return features_of(batch, [min(end, MAX_HISTORY) for *_, end in batch], device)


def make_cache(device: torch.device, dtype: torch.dtype = torch.float32) -> HistoryCache:
    return HistoryCache(16, MAX_HISTORY, capacity=64, page_size=4, dtype=dtype, device=device)


@pytest.fixture
def validated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are checked on a GPU, too."""
    monkeypatch.setenv("TORCHREC_JAGGED_ATTN_VALIDATE", "1")


def append(cache: HistoryCache, batch: list[Request]):
    return cache.append([user for user, *_ in batch], [end for *_, end in batch])


def assert_as_whole(
    pooled: KeyedTensor,
    collection: TargetAttentionEmbeddingBagCollection,
    batch: list[Request],
    device: torch.device,
) -> None:
    """Bit for bit on a CPU; on a GPU, rows without indices may have other kernels."""
    plain = collection(whole(batch, device))
    assert pooled.keys() == plain.keys()
    if device.type == "cpu":
        assert torch.equal(pooled.values(), plain.values())
        return
    exact = copy.deepcopy(collection).cpu().double()(whole(batch, torch.device("cpu")))
    assert_close(pooled.values().cpu(), exact.values(), plain.values().cpu())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"value_projection": False},
        {"encoder_layers": 1, "user_column": True},
        {"score": "silu", "recency_bias": False},
    ],
    ids=str,
)
@torch.no_grad()
def test_new_events_alone_give_what_whole_histories_give(
    device: torch.device, options: dict[str, Any]
):
    collection = make_collection(device, **options)
    cached_collection, cache = CachedHistoryCollection(collection), make_cache(device)
    looked_up = []
    for batch in BATCHES:
        lacks, cached = append(cache, batch)
        pooled = cached_collection((features_of(batch, lacks, device), cached))
        assert_as_whole(pooled, collection, batch, device)
        looked_up.append(lacks)
    assert looked_up == [[4, 0, 6], [0, 1], [1, 6, 2, 2], [6, 4]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
@torch.no_grad()
def test_narrow_rows(device: torch.device, dtype: torch.dtype):
    """As histories whose rows are what the cache's stand for."""
    collection, cache = make_collection(device), make_cache(device, dtype)
    cached_collection, calls = CachedHistoryCollection(collection), []
    attention = collection.pooling.attentions[0]
    handle = attention.register_forward_hook(lambda _, inputs, out: calls.append((*inputs, out)))
    for batch in BATCHES:
        lacks, cached = append(cache, batch)
        cached_collection((features_of(batch, lacks, device), cached))
        collection(whole(batch, device))
    handle.remove()
    for (target, of_cache, *_, out), (_, history, *_) in zip(calls[::2], calls[1::2], strict=True):
        is_copied = of_cache.values().data_ptr() != cache.rows.data_ptr()
        assert is_copied == (dtype == torch.int8)
        rows = history.values()
        if dtype == torch.int8:
            scales = rows.abs().amax(1, keepdim=True) / 127
            rows = (rows / scales).round() * scales
        else:
            rows = rows.to(dtype)
        history = JaggedTensor(rows, lengths=history.lengths())
        indices = None if dtype == torch.int8 else torch.arange(len(rows), device=device)
        assert torch.equal(attention(target, history, indices=indices), out)


@pytest.mark.parametrize(
    ("timestamps", "is_weighted", "num_attentions"),
    [("times", False, 1), (None, True, 1), (None, False, 2)],
    ids=["timestamps", "weights", "two attentions"],
)
def test_what_a_cache_does_not_hold_is_refused(
    timestamps: str | None, is_weighted: bool, num_attentions: int
):
    names = [f"history_{n}" for n in range(num_attentions)]
    table = EmbeddingBagConfig(
        name="t", embedding_dim=8, num_embeddings=9, feature_names=["item", *names]
    )
    collection = TargetAttentionEmbeddingBagCollection(
        [table],
        [plain_config(target="item", history=x, timestamps=timestamps) for x in names],
        is_weighted=is_weighted,
    )
    with pytest.raises(NotImplementedError, match="collection must have one attention, no times"):
        CachedHistoryCollection(collection)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([4, 0, 5], "'item_history' must have the 6 newest .* lacked, got 5 in sample 2"),
        ([6, 0, 4], "'item_history' must have the 4 newest .* lacked, got 6 in sample 0"),
        ([4, 0], "features must have a sample for each user of cached, 3, got 2"),
    ],
    ids=["fewer", "of another sample", "fewer samples"],
)
def test_other_new_events_than_the_cache_lacks(
    device: torch.device, validated: None, lengths: list[int], message: str
):
    collection, cache = CachedHistoryCollection(make_collection(device)), make_cache(device)
    _, cached = append(cache, BATCHES[0])
    before = cache.rows.clone()
    with pytest.raises(ValueError, match=message):
        collection((features_of(BATCHES[0][: len(lengths)], lengths, device), cached))
    assert torch.equal(cache.rows, before)


@torch.no_grad()
def test_a_cache_of_longer_histories_than_those_trained(device: torch.device, validated: None):
    collection = make_collection(device, max_history=MAX_HISTORY - 1)
    cached_collection, cache = CachedHistoryCollection(collection), make_cache(device)
    batch = BATCHES[1][1:]
    lacks, cached = append(cache, batch)
    pooled = cached_collection((features_of(batch, lacks, device), cached))
    assert_as_whole(pooled, collection, batch, device)
    lacks, cached = append(cache, BATCHES[0])
    with pytest.raises(ValueError, match=r"at most max_history=5 rows .*, got 6 in sample 2"):
        cached_collection((features_of(BATCHES[0], lacks, device), cached))
