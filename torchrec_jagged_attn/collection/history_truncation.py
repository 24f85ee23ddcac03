"""``HistoryTruncation``: keeps the newest rows of each history, before the lookups."""

import torch
from torch import nn
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_jagged_attn.base.checks import has_values
from torchrec_jagged_attn.collection.batch_checks import check_equal_keys, replace_rows


class HistoryTruncation(nn.Module):
    """Keeps the newest rows of some keys of a KeyedJaggedTensor, and all rows of other keys.

    TorchRec's pipelines can run it before the lookups, with ``pipeline_postproc=True``, because it
    has no parameters and reads only its input. The number of rows kept is known only on the device:
    without a pipeline, the host waits for it.

    Args:
        histories: for each history, its keys, which have equal lengths, and the number of newest
            rows to keep.
    """

    def __init__(self, histories: list[tuple[list[str], int]]) -> None:
        super().__init__()
        self._histories = [keys for keys, _ in histories]
        self._limits = {key: limit for keys, limit in histories for key in keys}

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return ``features`` with at most the given number of rows per sample.

        On the meta device and in FakeTensorMode, all rows are kept.
        """
        return _truncate(features, self._histories, self._limits)


@torch.fx.wrap
def _truncate(
    features: KeyedJaggedTensor, histories: list[list[str]], limits: dict[str, int]
) -> KeyedJaggedTensor:
    if not is_scripting():
        for keys in histories:
            check_equal_keys(features, keys)  # different lengths may be equal once truncated
        if not torch.compiler.is_compiling() and not has_values(features.lengths()):
            return features
    old, weights = features.lengths(), features.weights_or_none()
    new = old.clone()
    begin = 0
    for key, stride in zip(features.keys(), features.stride_per_key()):  # noqa: B905 (scripted)
        if key in limits:
            new[begin : begin + stride].clamp_(max=limits[key])
        begin += stride
    num_rows = features.values().numel()
    first = torch.repeat_interleave(features.offsets()[1:] - new, old, output_size=num_rows)
    is_kept = torch.arange(num_rows, device=old.device) >= first
    values = features.values()[is_kept]
    if weights is not None:
        weights = weights[is_kept]
    if is_scripting():  # torch.jit.script cannot compile replace_rows
        return KeyedJaggedTensor(
            keys=features.keys(),
            values=values,
            weights=weights,
            lengths=new,
            stride=features.stride(),
        )
    return replace_rows(features, values, weights, new)
