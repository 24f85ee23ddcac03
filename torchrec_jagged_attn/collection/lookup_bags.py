"""Short bags for the lookups of histories, instead of one bag for each history."""

import torch
from torch import nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def shorten_bags(collection: nn.Module) -> None:
    """Have the lookups of a sharded EmbeddingCollection take ids in bags of :func:`split_bags`.

    FBGEMM's kernels are serial along a bag, and TorchRec hands them each history as one. This reads
    a private name of TorchRec's; ``tests/torchrec/test_lookup_bags.py`` fails where it has changed.
    """
    if isinstance(collection, ShardedEmbeddingCollection):
        for lookup in collection._lookups:
            lookup.register_forward_pre_hook(lambda _, inputs: (split_bags(*inputs),))


def split_bags(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same ids of each key, in the same order, in bags of about as many ids as there are keys.

    A sequence embedding puts out a row for each id, whatever the bags. All keys must have as many
    bags, so each key's ids are spread evenly over them::

        item    [7] [8] [9]                [7] [8] [ ] [9] [ ]
        history [1 2 3 4] [ ] [5 6]   ->   [1] [2] [3] [4] [5 6]

    ``N`` ids of ``K`` keys are returned in ``ceil(N / K)`` bags per key. Those of batch sizes that
    vary by key are as they were.
    """
    num_keys, ids, stride = len(features.keys()), features.values(), features.stride()
    if ids.numel() == 0 or stride == 0 or features.variable_stride_per_key():
        return features
    num_bags = -(-ids.numel() // num_keys)
    bags = torch.arange(num_bags + (num_keys == 1), device=ids.device)
    offsets = bags
    if num_keys > 1:
        ends = features.offsets()[::stride].long()  # [K + 1], of the keys
        begins = ends[:-1, None] + bags * ends.diff()[:, None] // num_bags
        offsets = torch.cat([begins.flatten(), ends[-1:]])
    return KeyedJaggedTensor(
        features.keys(),
        ids,
        features.weights_or_none(),
        offsets=offsets,
        stride=num_bags,
        length_per_key=features.length_per_key_or_none(),  # else it would be read from the device
    )
