"""``repeat_per_candidate``: repeats rows of requests, which have any number of candidates."""

# FX and torch.jit.script read annotations, so they must not be strings.
import torch
from torch import Tensor
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_jagged_attn.base.checks import check_float, check_shape
from torchrec_jagged_attn.base.module_checks import check_jagged
from torchrec_jagged_attn.collection.sharding.padding import num_rows
from torchrec_jagged_attn.ops.interaction.api import jagged_dense_add
from torchrec_jagged_attn.ops.interaction.gradients import jagged_dense_add as add_op


def repeat_per_candidate(rows: Tensor, candidates: JaggedTensor) -> Tensor:
    r"""Repeat each request's row for each of its candidates: :math:`out_n = rows_{b(n)}`.

    On CUDA the host does not wait for the device. The gradient is deterministic.

    Args:
        rows: ``[B, D]`` of requests, such as their dense features. fp32, bf16 or fp16 (on CPU also
            fp64).
        candidates: ids of a target, or their embeddings, of ``B`` requests. Only their number and
            lengths are read.

    Returns:
        ``[ΣT, D]``, in the dtype of ``rows``.

    Raises:
        TypeError: ``rows`` has another dtype.
        ValueError: ``rows`` does not have one row per request of ``candidates``.

    Example:
        >>> dense = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        >>> item = JaggedTensor(torch.tensor([7, 8, 9]), lengths=torch.tensor([2, 0, 1]))
        >>> repeat_per_candidate(dense, item)
        tensor([[1., 2.],
                [1., 2.],
                [5., 6.]])
    """
    return _repeat(rows, candidates)


_add = add_op.overloadpacket  # torch.jit.script supports the packet of an op, not its overloads


@torch.fx.wrap  # a leaf for FX, wherever the public function is called
def _repeat(rows: Tensor, candidates: JaggedTensor) -> Tensor:
    if not is_scripting():
        check_jagged(candidates, "candidates")
    offsets = candidates.offsets()
    if not is_scripting():
        check_float(rows, "rows")
        check_shape(rows, "rows", "[B, D]", (offsets.numel() - 1, None))
    zeros = rows.new_zeros((num_rows(candidates), rows.shape[1]))
    if is_scripting():
        return _add(zeros, rows, offsets)
    return jagged_dense_add(zeros, rows, offsets)
