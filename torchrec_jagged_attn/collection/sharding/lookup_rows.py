"""Unique rows of a sharded lookup and their gather indices, instead of TorchRec's copies.

With deduplicated ids (``use_index_dedup``), or with batch sizes that vary by key, a sharded
EmbeddingCollection exchanges each row once. Its awaitable then copies rows to all positions of the
batch, ``[N, D]`` by ``index_select``. Attention accepts gather indices and needs no copy.
"""

from collections.abc import Collection

import torch
from torch import Tensor
from torchrec.distributed.embedding import EmbeddingCollectionAwaitable
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import JaggedTensor


def take_rows(
    sequences: dict[str, JaggedTensor] | LazyAwaitable, by_index: Collection[str]
) -> tuple[dict[str, JaggedTensor], dict[str, Tensor]]:
    """Wait for the output of a sharded EmbeddingCollection, without copying the rows of some keys.

    Args:
        sequences: the output. If TorchRec would not copy its rows, they are returned.
        by_index: keys whose unique rows are returned, with gather indices.

    Returns:
        The sequences by key; and the gather indices ``[N]`` of the keys ``by_index``, whose values
        are the rows ``[U, D]`` of all keys of a lookup. The other keys are copied, with a gradient
        on CPU, too, where TorchRec's copies have none.
    """
    if not isinstance(sequences, LazyAwaitable):
        return sequences, {}
    if not isinstance(sequences, EmbeddingCollectionAwaitable) or not _would_copy(sequences):
        return dict(sequences.items()), {}  # each access to a key checks again whether to wait
    taken: dict[str, JaggedTensor] = {}
    indices: dict[str, Tensor] = {}
    orders = sequences._features_to_permute_indices or {}
    for sharding, awaitable in enumerate(sequences._awaitables_per_sharding):
        rows = awaitable.wait()
        lengths, counts, joined_indices = _gather_indices(sequences, sharding, rows)
        indices_per_feature = joined_indices.split(counts)
        # A key that is sharded by column has several features, one for each shard.
        features: dict[str, list[int]] = {}
        for i, key in enumerate(sequences._embedding_names_per_sharding[sharding]):
            features.setdefault(key, []).append(i)
        copied = [i for key, x in features.items() if key not in by_index or len(x) > 1 for i in x]
        copies = _copy_rows(rows, indices_per_feature, copied)
        for key, shards in features.items():
            if shards[0] in copies:
                ordered = [shards[i] for i in orders[key]] if key in orders else shards
                values = copies[shards[0]]
                if len(shards) > 1:
                    values = torch.cat([copies[i] for i in ordered], dim=1)
            else:
                indices[key], values = indices_per_feature[shards[0]], rows
            taken[key] = JaggedTensor(values, lengths=lengths[shards[0]])
    for awaitable in sequences._resize_awaitables or []:
        awaitable.wait()
    return taken, indices


def _would_copy(sequences: EmbeddingCollectionAwaitable) -> bool:
    """Return whether TorchRec has not copied rows yet and no callback needs the copies."""
    context = sequences._ctx
    is_copied = sequences._result is not None or bool(sequences.callbacks)
    if is_copied and context.seq_vbe_ctx and torch.is_grad_enabled():
        values = next(iter(sequences.values())).values()
        if not values.is_cuda:
            raise NotImplementedError(
                "lookups of features of several batch sizes must have no hook that reads the rows, "
                f"got one, on {values.device.type}, where TorchRec's copies have no gradient"
            )
    return not is_copied and bool(context.reverse_indices or context.seq_vbe_ctx)


def _gather_indices(
    sequences: EmbeddingCollectionAwaitable, sharding: int, rows: Tensor
) -> tuple[Tensor, list[int], Tensor]:
    """Return the lengths ``[features, B]``, their sums, and the gather indices of all features."""
    context = sequences._ctx
    if context.reverse_indices:
        features, indices = context.input_features[sharding], context.reverse_indices[sharding]
    else:
        features = sequences._features_per_sharding[sharding]
        indices = torch.arange(rows.shape[0], device=rows.device)
    if not context.seq_vbe_ctx:
        lengths = features.lengths().view(-1, features.stride())
        return lengths, features.length_per_key(), indices
    sizes = context.seq_vbe_ctx[sharding]
    counts = sizes.reindexed_length_per_key
    _, indices, _ = torch.ops.fbgemm.permute_1D_sparse_data(
        sizes.recat, sizes.unpadded_lengths, indices, None, sum(counts)
    )
    return sizes.reindexed_lengths, counts, indices


def _copy_rows(rows: Tensor, indices: tuple[Tensor, ...], features: list[int]) -> dict[int, Tensor]:
    """Return the copied rows of each of ``features``, made by one ``index_select``."""
    if not features:
        return {}
    counts = [indices[i].shape[0] for i in features]
    copies = rows.index_select(0, torch.cat([indices[i] for i in features])).split(counts)
    return dict(zip(features, copies, strict=True))
