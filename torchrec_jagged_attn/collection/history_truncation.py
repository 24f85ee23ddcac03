"""``HistoryTruncation``: the newest rows of each history, before anything is looked up."""

import torch
from torch import nn
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_jagged_attn.checks import has_values
from torchrec_jagged_attn.collection.batch_checks import check_equal_keys, replace_rows


class HistoryTruncation(nn.Module):
    """Keeps the newest rows of some keys of a KeyedJaggedTensor, and all rows of the others.

    It has no parameter and reads nothing but its input, so TorchRec's pipelines run it before the
    lookups, with ``pipeline_postproc=True``. The number of rows left is known only on the device:
    without a pipeline, the host waits for it. ``histories`` are the keys of each, equally long in
    each sample, and how many of its newest rows to keep.
    """

    def __init__(self, histories: list[tuple[list[str], int]]) -> None:
        super().__init__()
        self._histories = [keys for keys, _ in histories]
        self._limits = {key: limit for keys, limit in histories for key in keys}

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """``features`` with the same keys and samples, and no more rows than the limits.

        Where there are no values, as on the meta device or in FakeTensorMode, no row is dropped.
        """
        return _truncate(features, self._histories, self._limits)


@torch.fx.wrap
def _truncate(
    features: KeyedJaggedTensor, histories: list[list[str]], limits: dict[str, int]
) -> KeyedJaggedTensor:
    if not is_scripting():
        for keys in histories:
            check_equal_keys(features, keys)  # they would look alike once they are cut
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
    if is_scripting():  # and compiles no more than this call
        return KeyedJaggedTensor(
            keys=features.keys(),
            values=values,
            weights=weights,
            lengths=new,
            stride=features.stride(),
        )
    return replace_rows(features, values, weights, new)
