"""``CachedHistoryCollection``: a trained collection whose histories come from a HistoryCache."""

from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchrec_jagged_attn.modules.embedding_bag_collection import (
    TargetAttentionEmbeddingBagCollection,
)
from torchrec_jagged_attn.serving import CachedHistories

__all__ = ["CachedHistoryCollection"]


class CachedHistoryCollection(nn.Module):
    """A trained collection whose histories come from a :class:`HistoryCache`, for serving.

    It takes the collection's place in a model that hands its input on, as
    ``torchrec.models.dlrm.DLRM`` does. A batch is then a pair: features whose histories have new
    events alone, and where the cache has the whole histories. The rows of new events are looked up,
    written to the cache, and attended over with those that are there. The width of the cache is
    that of the history's rows, side by side; its ``max_history`` that of the trained histories.

    Args:
        collection: with one attention, without timestamps and weights.

    Raises:
        NotImplementedError: ``collection`` has several attentions, timestamps or weights.

    Example:
        >>> import torch
        >>> from torchrec.modules.embedding_configs import EmbeddingBagConfig
        >>> from torchrec_jagged_attn import HistoryCache, TargetAttentionConfig
        >>> table = EmbeddingBagConfig(
        ...     name="t_item", embedding_dim=8, num_embeddings=9, feature_names=["item", "hist"]
        ... )
        >>> collection = CachedHistoryCollection(
        ...     TargetAttentionEmbeddingBagCollection(
        ...         [table], TargetAttentionConfig(target="item", history="hist")
        ...     )
        ... )
        >>> cache = HistoryCache(width=8, max_history=100, capacity=1000)
        >>> for num_events, ids in ((3, [5, 1, 2, 3]), (4, [6, 4])):
        ...     lacks, cached = cache.append(["ann"], [num_events])
        ...     ids, lengths = torch.tensor(ids), torch.tensor([1, *lacks])
        ...     features = KeyedJaggedTensor(["item", "hist"], ids, lengths=lengths)
        ...     print(lacks, collection((features, cached)).values().shape)
        [3] torch.Size([1, 16])
        [1] torch.Size([1, 16])
    """

    def __init__(self, collection: TargetAttentionEmbeddingBagCollection) -> None:
        super().__init__()
        collection.check_cacheable()
        self.collection = collection

    def forward(self, batch: tuple[KeyedJaggedTensor, CachedHistories]) -> KeyedTensor:
        """As the collection, of whole histories.

        Args:
            batch: features, with the new events of each history; and :class:`CachedHistories`.

        Raises:
            ValueError: as the collection; there are not as many samples as users; new events are
                not as many as the cache lacks, or histories longer than the config's
                ``max_history`` (both read on CPU, or under ``TORCHREC_JAGGED_ATTN_VALIDATE=1``).
        """
        return self.collection.embed(*batch)
