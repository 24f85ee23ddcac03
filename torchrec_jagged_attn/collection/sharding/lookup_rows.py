"""The rows of a sharded lookup, before TorchRec copies them to every position of the batch.

Where ids are deduplicated (``use_index_dedup``), or batch sizes vary by key, a sharded
EmbeddingCollection exchanges each row once. Its awaitable then copies them, ``[N, D]`` by an
``index_select``. Attention takes gather indices, so it needs no copy: this file returns the unique
rows and the indices by which TorchRec would copy them.
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
    """What an EmbeddingCollection returned, where rows of the keys ``by_index`` are not copied.

    Returns the sequences, and indices ``[N]`` of those whose values are rows ``[U, D]`` of all keys
    of the lookup. Others are as TorchRec has them, but their copies have a gradient on a CPU, too.
    Where TorchRec would make no copy: its sequences, which are waited for, and no indices.
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
        lengths, counts, of_positions = _gather_indices(sequences, sharding, rows)
        of_keys = of_positions.split(counts)
        columns: dict[str, list[int]] = {}  # several of a key that is sharded by column
        for at, key in enumerate(sequences._embedding_names_per_sharding[sharding]):
            columns.setdefault(key, []).append(at)
        copied = [ats for key, ats in columns.items() if key not in by_index or len(ats) > 1]
        copies = _copies(rows, of_keys, [at for ats in copied for at in ats])
        for key, ats in columns.items():
            if ats[0] not in copies:
                indices[key], values = of_keys[ats[0]], rows
            else:
                ordered = [ats[at] for at in orders[key]] if key in orders else ats
                values = copies[ats[0]]
                if len(ats) > 1:
                    values = torch.cat([copies[at] for at in ordered], dim=1)
            taken[key] = JaggedTensor(values, lengths=lengths[ats[0]])
    for awaitable in sequences._resize_awaitables or []:
        awaitable.wait()
    return taken, indices


def _would_copy(sequences: EmbeddingCollectionAwaitable) -> bool:
    """Whether TorchRec is yet to copy rows, and no callback is to be given the copies."""
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
    """Lengths ``[keys, B]`` and their sums, and the gather index at each position of all keys."""
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


def _copies(rows: Tensor, of_keys: tuple[Tensor, ...], keys: list[int]) -> dict[int, Tensor]:
    """Copies of the rows of ``keys``, in one."""
    if not keys:
        return {}
    joined = torch.cat([of_keys[at] for at in keys])
    copied = rows.index_select(0, joined).split([of_keys[at].shape[0] for at in keys])
    return dict(zip(keys, copied, strict=True))
