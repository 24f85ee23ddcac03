"""Batches of a collection: checks, single features, and batches without samples.

Numbers of rows are always checked. Values (ids, lengths, weights) are checked on CPU, and on CUDA
with ``TORCHREC_JAGGED_ATTN_VALIDATE=1``.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_jagged_attn.base.checks import (
    check_finite,
    check_float,
    check_integers,
    should_validate,
)
from torchrec_jagged_attn.base.layout import check_order
from torchrec_jagged_attn.collection.sharding.padding import PaddedFeatures
from torchrec_jagged_attn.modules.target_attention_arguments import RemoteHistory


def read_feature(features: KeyedJaggedTensor, name: str) -> JaggedTensor:
    """Return a feature with one segment per sample. With batch sizes that vary by key, segments are
    repeated by the inverse indices, as in lookups.
    """
    if not is_scripting():  # torch.jit.script would compile the operands of an ``and``
        if isinstance(features, PaddedFeatures):
            return features.rows_of(name)
        if features.variable_stride_per_key():
            sequence = features[name]
            keys, inverse_indices = features.inverse_indices()
            lengths, values, weights = torch.ops.fbgemm.permute_1D_sparse_data(
                inverse_indices[keys.index(name)].int(),
                sequence.lengths(),
                sequence.values(),
                sequence.weights_or_none(),
            )
            return JaggedTensor(values, lengths=lengths, weights=weights)
    return features[name]


def set_meta_lengths(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """On the meta device, return features with one id of each key in each sample, unless they have
    ``length_per_key``; on other devices, return ``features``.

    TorchRec would divide the ids evenly among the keys: targets would not have one id in each
    sample, and features of one history would differ in length.
    """
    if not isinstance(features, KeyedJaggedTensor) or isinstance(features, PaddedFeatures):
        return features
    if not features.values().is_meta:
        return features
    num_keys, num_samples = len(features.keys()), features.stride()
    each, left = divmod(features.values().numel(), num_keys)
    if features.length_per_key_or_none() not in (None, [each + left, *[each] * (num_keys - 1)]):
        return features
    weights, count = features.weights_or_none(), num_keys * num_samples
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values().new_empty(count),
        weights=None if weights is None else weights.new_empty(count),
        lengths=features.lengths(),
        stride=num_samples,
        length_per_key=[num_samples] * num_keys,
    )


def pad_empty_batch(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return ``features``, or one sample without ids if it has no sample: TorchRec cannot look up
    an empty batch.

    FX proxies are returned unchanged, and all batches while compiling: compiled programs require at
    least one sample.
    """
    if not isinstance(features, KeyedJaggedTensor) or torch.compiler.is_compiling():
        return features
    if features.variable_stride_per_key() or features.stride() > 0:
        return features
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        weights=features.weights_or_none(),
        lengths=features.lengths().new_zeros(len(features.keys())),
        stride=1,
    )


def replace_rows(
    features: KeyedJaggedTensor,
    values: torch.Tensor,
    weights: torch.Tensor | None,
    lengths: torch.Tensor,
    length_per_key: list[int] | None = None,
) -> KeyedJaggedTensor:
    """Return ``features`` with other values, weights and lengths, and the same keys and samples.

    Without ``length_per_key``, TorchRec reads it from the device when it needs it.
    """
    varies = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        features.keys(),
        values,
        weights,
        lengths=lengths,
        stride=None if varies else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if varies else None,
        length_per_key=length_per_key,
        inverse_indices=features.inverse_indices_or_none(),
    )


def without_samples(sequences: list[dict[str, JaggedTensor]]) -> list[dict[str, JaggedTensor]]:
    """Return outputs of lookups of :func:`pad_empty_batch` with zero samples."""
    return [
        {
            key: x.without_samples()
            if isinstance(x, RemoteHistory)
            else JaggedTensor(x.values(), lengths=x.lengths()[:0])
            for key, x in lookup.items()
        }
        for lookup in sequences
    ]


def check_bags(bags: KeyedTensor) -> None:
    """Wait for the pooled rows of a lookup, and explain an error of FBGEMM."""
    try:
        bags.keys()
    except RuntimeError as error:
        if "supports only either float or half" not in str(error):
            raise
        raise NotImplementedError(
            "features of several batch sizes must be pooled in fp32 or fp16 on a GPU, got bf16: "
            "give EmbeddingBagCollectionSharder another output_dtype, or the collection "
            "single_lookup=True"
        ) from error


def check_features(
    features: KeyedJaggedTensor,
    num_embeddings: dict[str, int],
    others: dict[str, str],
    is_weighted: bool,
    bag_features: list[str],
    bag_dtype: torch.dtype,
    is_sharded: bool,
) -> None:
    """Check the batch of a collection.

    Args:
        features: the batch.
        num_embeddings: keys that are looked up, and the numbers of rows of their tables.
        others: keys that are not looked up, and the arguments that name them.
        bag_features, bag_dtype: keys and dtype of the tables of the EmbeddingBagCollection.
        is_weighted, is_sharded: of the collection.
    """
    if isinstance(features, PaddedFeatures):  # its batch was checked before padding
        return
    if not isinstance(features, KeyedJaggedTensor):
        raise TypeError(
            "features must be a KeyedJaggedTensor, or a TensorDict of jagged nested tensors, got a "
            f"{type(features).__name__}"
        )
    check_integers(features.values(), "values of features (ids and times)")
    check_keys(features, num_embeddings)
    keys = features.keys()
    known = set(keys)
    if missing := [name for name in others if name not in known]:
        argument = others[missing[0]]
        missing = [name for name in missing if others[name] == argument]
        raise ValueError(f"features must have the keys {missing} of {argument}, got {keys}")
    if is_weighted and features.weights_or_none() is None:
        raise ValueError("features must have weights for is_weighted=True, got none")
    if not is_weighted and features.weights_or_none() is not None:
        raise ValueError(
            "features must have no weights unless is_weighted=True, got a weighted "
            "KeyedJaggedTensor"
        )
    if is_weighted and bag_features:
        _check_bag_weights(features.weights(), bag_features, bag_dtype, is_sharded)
    _check_sizes(features)
    if features.variable_stride_per_key():
        if not is_sharded:
            raise NotImplementedError(
                "features must have one batch size for all keys unless tables are sharded, "
                f"got {features.stride_per_key()} for {keys}"
            )
        if features.inverse_indices_or_none() is None:
            raise ValueError("features of several batch sizes must have inverse_indices, got none")
    if should_validate(features.values()) and features.stride() > 0:
        _check_ids(features, num_embeddings)
        for name in (name for name, argument in others.items() if argument == "timestamps"):
            times = features[name]  # before truncation
            check_order(times.values(), times.offsets(), f"timestamps {name!r}")


def check_keys(features: KeyedJaggedTensor, expected: Iterable[str]) -> None:
    """Check that ``features`` have all ``expected`` keys."""
    keys = features.keys()
    known = set(keys)
    if missing := [name for name in expected if name not in known]:
        raise ValueError(f"features must have the keys {missing}, got {keys}")


def _check_sizes(features: KeyedJaggedTensor) -> None:
    """Check the numbers of lengths and weights."""
    lengths, offsets = features.lengths_or_none(), features.offsets_or_none()
    count = offsets.numel() - 1 if lengths is None and offsets is not None else None
    count = lengths.numel() if lengths is not None else count
    expected = sum(features.stride_per_key())
    if count not in (None, expected):
        raise ValueError(
            f"features must have {expected} lengths, one per sample of each of the "
            f"{len(features.keys())} keys, got {count}"
        )
    weights, count = features.weights_or_none(), features.values().numel()
    if weights is not None and weights.numel() != count:
        raise ValueError(
            f"features must have {count} weights, one per id of any key, got {weights.numel()}"
        )


def check_tables_device(lookups: list[torch.nn.Module], features: object) -> None:
    """Check that tables that are not sharded are on the device of ``features``."""
    if not isinstance(features, KeyedJaggedTensor) or features.values().is_meta:
        return
    for weight in itertools.chain.from_iterable(x.parameters() for x in lookups):
        if weight.is_meta:
            raise ValueError(
                f"tables must be on {features.values().device} as features are, got meta: wrap the "
                "model in DistributedModelParallel, or call to_empty(device=...) and "
                "reset_parameters() of the collection"
            )


def _check_ids(features: KeyedJaggedTensor, num_embeddings: dict[str, int]) -> None:
    lengths, count = features.length_per_key(), features.values().numel()
    if sum(lengths) != count:
        raise ValueError(
            "features must have as many ids as their lengths add up to, "
            f"{sum(lengths)}, got {count}"
        )
    checked = [
        (key, ids)
        for key, ids in zip(features.keys(), features.values().split(lengths), strict=True)
        if key in num_embeddings and ids.numel() > 0
    ]
    if not checked:
        return
    extremes = torch.stack([extreme for _, ids in checked for extreme in ids.aminmax()]).tolist()
    for (key, _), least, most in zip(checked, extremes[::2], extremes[1::2], strict=True):
        if least < 0 or most >= num_embeddings[key]:
            raise ValueError(
                f"ids of {key!r} must lie in 0…{num_embeddings[key] - 1}, "
                f"got {least if least < 0 else most}"
            )


def _check_bag_weights(
    weights: torch.Tensor, names: list[str], dtype: torch.dtype, is_sharded: bool
) -> None:
    """Check the ``weights`` of a batch for features ``names`` of an EmbeddingBagCollection."""
    if is_sharded and weights.requires_grad:
        raise NotImplementedError(
            f"weights of {names} must require no gradient, since TorchRec's sharded lookups of "
            "embedding_bag_collection have none for them, got some that do: use single_lookup=True "
            "with tables of one width, or detach the weights"
        )
    # Sharded lookups convert weights.
    if not is_sharded and weights.dtype != dtype:
        raise TypeError(f"weights of {names} must be {dtype} as their tables, got {weights.dtype}")


def check_history_weights(weights: torch.Tensor, name: str) -> None:
    """Check ``weights`` of the history ``name``, which are prior weights of its rows."""
    check_float(weights, f"weights of history {name!r}")
    check_finite(weights, f"weights of history {name!r}")


def check_single_rows(
    sequences: list[JaggedTensor],
    names: list[str],
    argument: str,
    kind: str = "id",
    histories: Sequence[JaggedTensor] = (),
) -> None:
    """Check that each sample has one row of each sequence. ``argument`` gave their ``names``.

    The message asks whether target and history are swapped if a history has one row per sample.
    """
    lengths = [sequence.lengths() for sequence in sequences]

    def message(key: int, count: int, *where: object) -> str:
        return (
            f"{argument} {names[key]!r} must have exactly one {kind} in each sample, got "
            f"{count} in {' '.join(map(str, where))}"
        )

    if lengths and should_validate(lengths[0]):
        stacked = torch.stack(lengths)  # [keys, B]
        if (wrong := torch.nonzero(stacked != 1)).numel():
            key, sample = wrong[0].tolist()
            are_single = [bool((history.lengths() == 1).all()) for history in histories]
            hint = " (are target and history swapped?)" if any(are_single) else ""
            raise ValueError(message(key, int(stacked[key, sample]), "sample", f"{sample}{hint}"))
    for key, sequence in enumerate(sequences):
        rows, samples = sequence.values().shape[0], lengths[key].numel()
        _check_equal(rows, samples, functools.partial(message, key, rows, samples, "samples"))


def check_equal_lengths(
    sequence: JaggedTensor,
    name: str,
    like: JaggedTensor,
    like_name: str,
    kind: str = "timestamps",
    like_kind: str = "history",
) -> None:
    """Check that ``sequence`` has the lengths of ``like``. The message names both with a kind."""
    message = (
        f"{kind} {name!r} must have as many values in each sample as {like_kind} {like_name!r}, "
        "got "
    )
    lengths, expected = sequence.lengths(), like.lengths()
    if should_validate(lengths) and (wrong := torch.nonzero(lengths != expected)).numel():
        sample = int(wrong[0])
        raise ValueError(
            f"{message}{int(lengths[sample])} and {int(expected[sample])} in sample {sample}"
        )
    rows, expected_rows = sequence.values().shape[0], like.values().shape[0]
    _check_equal(rows, expected_rows, lambda: f"{message}{rows} and {expected_rows} rows in all")


def check_equal_keys(features: KeyedJaggedTensor, keys: list[str]) -> None:
    """Check that all ``keys`` have the same lengths."""
    for key in keys[1:]:
        first = read_feature(features, keys[0])
        check_equal_lengths(read_feature(features, key), key, first, keys[0], "key", "key")


def _check_equal(rows: int, expected: int, message: Callable[[], str]) -> None:
    """Raise a ValueError in eager mode; while compiling, add a runtime assertion."""
    if torch.compiler.is_compiling():
        torch._check(rows == expected)
    elif rows != expected:
        raise ValueError(message())
