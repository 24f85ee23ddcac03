"""``boost_weights`` and ``EventBoosting``: events that count more, by prior weights."""

# FX reads annotations, so they are no strings here.
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_jagged_attn.checks import (
    check_finite,
    check_float,
    check_numbers,
    check_real,
    check_same,
    check_shape,
)
from torchrec_jagged_attn.collection.batch_checks import replace_rows
from torchrec_jagged_attn.events.selection import check_callable, check_events, check_keys


def boost_weights(
    relevance: Tensor,
    *,
    strength: float = 1.0,
    segments: Tensor | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    r"""Turn relevance and segments of events into prior weights: :math:`r_n^s \cdot f_{g(n)}`.

    Attention multiplies the softmax's weight of a row by the row's prior weight and normalizes
    again: its kernels add :math:`s \log r_n + \log f_{g(n)}` to the scores. Only ratios within one
    user matter.

    Args:
        relevance: ``[N]``, not negative, as :class:`Relevance` gives.
        strength: ``s``, at least 0, which disables relevance.
        segments: ``[N]`` int32 or int64, 0 to G - 1, such as those of :func:`segment_sessions`.
        factors: ``[G]``, not negative: the factor of the events of each segment.

    Returns:
        ``[N]``, in the dtype of ``relevance``: the ``prior_weights`` of attention.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape or a device does not fit, ``strength`` is negative, one of ``segments``
            and ``factors`` is missing, or (on CPU, or under
            ``TORCHREC_JAGGED_ATTN_VALIDATE=1``) a segment is not in 0 to G - 1, or relevance or a
            factor is negative or not finite.

    Example:
        >>> segments, factors = torch.tensor([0, 1, 1]), torch.tensor([1.0, 4.0])
        >>> boost_weights(torch.tensor([0.5, 0.5, 0.25]), segments=segments, factors=factors)
        tensor([0.5000, 2.0000, 1.0000])
    """
    check_float(relevance, "relevance")
    check_shape(relevance, "relevance", "[N]", (None,))
    check_finite(relevance, "relevance", not_negative=True)
    strength = check_real(strength, "strength")
    weights = relevance**strength
    if (segments is None) != (factors is None):
        given = "factors" if segments is None else "segments"
        raise ValueError(f"segments and factors must be given together, got {given} alone")
    if segments is None or factors is None:
        return weights
    check_shape(segments, "segments", "[N]", (relevance.shape[0],))
    check_shape(factors, "factors", "[G]", (None,))
    check_same(relevance, "relevance", dtype=False, segments=segments, factors=factors)
    check_numbers(segments, "segments", factors.shape[0])
    check_finite(factors, "factors", not_negative=True)
    return weights * factors[segments].to(weights.dtype)


class EventBoosting(nn.Module):
    """Weighs events of a KeyedJaggedTensor, for collections with ``is_weighted=True``.

    In such a collection, the weights of a history are prior weights of its rows, and those of a
    pooled feature are factors of its rows. If the batch has weights, they are multiplied by the new
    ones; if not, keys other than ``keys`` get weights of one.

    Args:
        keys: of the features of an event, equally long in each sample.
        weights: from the KeyedJaggedTensor to a weight of each event, ``[N]`` in the order of the
            keys' rows, as :func:`boost_weights` makes them.

    Raises:
        TypeError: ``keys`` is not a list of names, or ``weights`` cannot be called.
        ValueError: no keys, or a key twice.

    Example:
        >>> features = KeyedJaggedTensor.from_lengths_sync(
        ...     ["user", "item"], torch.tensor([5, 7, 3]), torch.tensor([1, 0, 1, 1])
        ... )
        >>> boosting = EventBoosting(["item"], lambda x: torch.tensor([2.0, 0.5]))
        >>> boosting(features).weights()
        tensor([1.0000, 2.0000, 0.5000])

    Source:
        After the abstract of DynamiX (https://arxiv.org/abs/2511.18331), which boosts events for
        segments of users. That boosts are prior weights of attention is ours.
    """

    def __init__(self, keys: list[str], weights: Callable[[KeyedJaggedTensor], Tensor]) -> None:
        super().__init__()
        check_keys(keys)
        check_callable(weights, "weights")
        self.keys, self.weights = keys, weights

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """``features`` with the same rows, weighted.

        Raises:
            TypeError: weights are of a dtype that is not computed with.
            ValueError: a key is missing, or keys differ in length or batch size; weights are not
                one for each event; or (on CPU, or under ``TORCHREC_JAGGED_ATTN_VALIDATE=1``) one is
                negative or not finite.
        """
        return _boost(features, self.keys, self.weights(features))


@torch.fx.wrap  # what branches on the batch is a leaf for FX
def _boost(features: KeyedJaggedTensor, keys: list[str], weights: Tensor) -> KeyedJaggedTensor:
    check_events(features, keys)
    check_float(weights, "weights")
    counts = dict(zip(features.keys(), features.length_per_key(), strict=True))
    check_shape(weights, "weights", "[N]", (counts[keys[0]],))
    check_finite(weights, "weights", not_negative=True)
    of_keys = [weights if key in keys else weights.new_ones(count) for key, count in counts.items()]
    weights, old = torch.cat(of_keys), features.weights_or_none()
    return replace_rows(
        features,
        features.values(),
        weights if old is None else old * weights,
        features.lengths(),
        features.length_per_key(),
    )
