"""``boost_weights`` and ``EventBoosting``: prior weights of events."""

# FX reads annotations, so they are no strings here.
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_jagged_attn.base.checks import (
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
    r"""Compute prior weights from relevance and segments of events: :math:`r_n^s \cdot f_{g(n)}`.

    Attention multiplies the softmax weight of a row by the row's prior weight and normalizes again.
    Only ratios of prior weights within one user matter.

    Args:
        relevance: ``[N]``, not negative, such as the output of :class:`Relevance`.
        strength: ``s``, at least 0; 0 disables relevance.
        segments: ``[N]`` int32 or int64, 0 to G - 1, such as the output of
            :func:`segment_sessions`.
        factors: ``[G]``, not negative, the factor of each segment.

    Returns:
        ``[N]``, in the dtype of ``relevance``: the ``prior_weights`` of attention.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape or a device does not fit, ``strength`` is negative, only one of
            ``segments`` and ``factors`` is given, or (on CPU, or under
            ``TORCHREC_JAGGED_ATTN_VALIDATE=1``) a segment is not in 0 to G - 1, or relevance or a
            factor is negative or not finite.

    Example:
        >>> segments, factors = torch.tensor([0, 1, 1]), torch.tensor([1.0, 4.0])
        >>> boost_weights(torch.tensor([0.5, 0.5, 0.25]), segments=segments, factors=factors)
        tensor([0.5000, 2.0000, 1.0000])
    """
    check_shape(relevance, "relevance", "[N]", (None,))
    check_float(relevance, "relevance")
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

    In such a collection, the weights of a history are prior weights in attention, and the weights
    of a pooled feature are factors of its rows. If the batch has weights, they are multiplied by
    the new weights; if not, keys other than ``keys`` get weights of one.

    Args:
        keys: the features of an event, equally long in each sample.
        weights: a function of the KeyedJaggedTensor that returns the weight of each event, ``[N]``
            in the order of the keys' rows, such as :func:`boost_weights`.

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
        segments of users. The use of prior weights is ours.
    """

    def __init__(self, keys: list[str], weights: Callable[[KeyedJaggedTensor], Tensor]) -> None:
        super().__init__()
        check_keys(keys)
        check_callable(weights, "weights")
        self.keys, self.weights = keys, weights

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return ``features`` with the same rows and new weights.

        Raises:
            TypeError: the dtype of the weights is not supported.
            ValueError: a key is missing, or keys differ in length or batch size; the number of
                weights is not the number of events; or (on CPU, or under
                ``TORCHREC_JAGGED_ATTN_VALIDATE=1``) a weight is negative or not finite.
        """
        return _boost(features, self.keys, self.weights(features))


@torch.fx.wrap  # a leaf for FX, because it branches on the batch
def _boost(features: KeyedJaggedTensor, keys: list[str], weights: Tensor) -> KeyedJaggedTensor:
    check_events(features, keys)
    counts = dict(zip(features.keys(), features.length_per_key(), strict=True))
    check_shape(weights, "weights", "[N]", (counts[keys[0]],))
    check_float(weights, "weights")
    check_finite(weights, "weights", not_negative=True)
    new = [weights if key in keys else weights.new_ones(count) for key, count in counts.items()]
    weights, old = torch.cat(new), features.weights_or_none()
    return replace_rows(
        features,
        features.values(),
        weights if old is None else old * weights,
        features.lengths(),
        features.length_per_key(),
    )
