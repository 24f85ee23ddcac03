"""Checks of the batches of a collection.

Counts of rows are always checked. Values (ids, lengths, weights) are read on CPU, and on CUDA with
``TORCHREC_JAGGED_ATTN_VALIDATE=1``.
"""

import functools
from collections.abc import Callable

import torch
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_jagged_attn.checks import check_finite, check_float, check_integers, should_validate
from torchrec_jagged_attn.collection.sharding.padding import PaddedFeatures
from torchrec_jagged_attn.layout import check_order
from torchrec_jagged_attn.modules.owned_rows import RemoteHistory


def of_each_sample(features: KeyedJaggedTensor, name: str) -> JaggedTensor:
    """The rows of a key, repeated where several samples have them, as lookups do."""
    if not is_scripting():  # which would compile the operands of an ``and``
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


def with_counts(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """On the meta device, where lengths have no values: one id of each key in each sample.

    ``length_per_key`` is taken if it is given. Without it TorchRec divides the ids among the keys,
    which makes neither one id of a target in each sample nor keys of equal lengths.
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


def has_no_sample(features: KeyedJaggedTensor) -> bool:
    """Whether the batch is empty, which TorchRec's lookups fail on.

    Not of an FX proxy, nor while compiling: programs are made for one sample and more.
    """
    if not isinstance(features, KeyedJaggedTensor) or torch.compiler.is_compiling():
        return False
    return not features.variable_stride_per_key() and features.stride() == 0


def one_sample_without_ids(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """What lookups take instead of ``features`` that have no sample."""
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
    """``features`` with other rows and lengths, and the same keys and samples.

    Without ``length_per_key``, a GPU will have to be asked.
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
    """What lookups of :func:`one_sample_without_ids` give, of no sample."""
    return [
        {
            key: x.without_samples()
            if isinstance(x, RemoteHistory)
            else JaggedTensor(x.values(), lengths=x.lengths()[:0])
            for key, x in of_one.items()
        }
        for of_one in sequences
    ]


def check_bags(bags: KeyedTensor) -> None:
    """Waits for pooled rows, which FBGEMM must be able to copy to their samples."""
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
    is_sharded: bool,
) -> None:
    """``features`` must have each key of ``num_embeddings``, with ids below its number, and of
    ``others``, whose values are the arguments that named them.
    """
    if isinstance(features, PaddedFeatures):  # of a batch that was checked
        return
    if not isinstance(features, KeyedJaggedTensor):
        raise TypeError(
            "features must be a KeyedJaggedTensor, or a TensorDict of jagged nested tensors, got a "
            f"{type(features).__name__}"
        )
    check_integers(features.values(), "values of features (ids and times)")
    keys = features.keys()
    known = set(keys)
    if missing := [name for name in num_embeddings if name not in known]:
        raise ValueError(f"features must have the keys {missing}, got {keys}")
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
        for name in (name for name, of in others.items() if of == "timestamps"):
            times = features[name]  # before histories are cut to their newest rows
            check_order(times.values(), times.offsets(), f"timestamps {name!r}")


def _check_ids(features: KeyedJaggedTensor, num_embeddings: dict[str, int]) -> None:
    lengths, count = features.length_per_key(), features.values().numel()
    if sum(lengths) != count:
        raise ValueError(
            "features must have as many ids as their lengths add up to, "
            f"{sum(lengths)}, got {count}"
        )
    of_keys = features.values().split(lengths)
    checked = [
        (key, ids)
        for key, ids in zip(features.keys(), of_keys, strict=True)
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


def check_history_weights(weights: torch.Tensor, name: str) -> None:
    """``weights`` of the history ``name`` must be able to be prior weights of its rows."""
    check_float(weights, f"weights of history {name!r}")
    check_finite(weights, f"weights of history {name!r}")


def check_single_rows(
    sequences: list[JaggedTensor], names: list[str], argument: str, kind: str = "id"
) -> None:
    """Each sample must have one row, or value, of each of ``names``, which ``argument`` named."""
    lengths = [sequence.lengths() for sequence in sequences]

    def message(key: int, count: int, *where: object) -> str:
        return (
            f"{argument} {names[key]!r} must have exactly one {kind} in each sample, got "
            f"{count} in {' '.join(map(str, where))}"
        )

    if lengths and should_validate(lengths[0]):
        of_keys = torch.stack(lengths)
        if (wrong := torch.nonzero(of_keys != 1)).numel():
            key, sample = wrong[0].tolist()
            raise ValueError(message(key, int(of_keys[key, sample]), "sample", sample))
    for key, sequence in enumerate(sequences):
        rows, samples = sequence.values().shape[0], lengths[key].numel()
        _check_equal(rows, samples, functools.partial(message, key, rows, samples, "samples"))


def check_equal_lengths(
    sequence: JaggedTensor, name: str, like: JaggedTensor, like_name: str
) -> None:
    """``sequence`` must be as long as ``like`` in each sample."""
    message = f"{name!r} must be as long as {like_name!r} in each sample, got "
    lengths, expected = sequence.lengths(), like.lengths()
    if should_validate(lengths) and (wrong := torch.nonzero(lengths != expected)).numel():
        sample = int(wrong[0])
        raise ValueError(
            f"{message}{int(lengths[sample])} and {int(expected[sample])} in sample {sample}"
        )
    rows, expected_rows = sequence.values().shape[0], like.values().shape[0]
    _check_equal(rows, expected_rows, lambda: f"{message}{rows} and {expected_rows} rows in all")


def check_equal_keys(features: KeyedJaggedTensor, keys: list[str]) -> None:
    """All ``keys`` must have as many rows in each sample as the first."""
    for key in keys[1:]:
        first = of_each_sample(features, keys[0])
        check_equal_lengths(of_each_sample(features, key), key, first, keys[0])


def _check_equal(rows: int, expected: int, message: Callable[[], str]) -> None:
    """In eager mode a ValueError; while compiling a fact, which the program checks as it runs."""
    if torch.compiler.is_compiling():
        torch._check(rows == expected)
    elif rows != expected:
        raise ValueError(message())
