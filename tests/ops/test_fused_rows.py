"""``fused_rows`` against FBGEMM's own ops."""

import pytest
import torch

from torchrec_jagged_attn import fused_rows, jagged_target_attention

pytest.importorskip("fbgemm_gpu")

OFFSETS = [0, 30, 30, 33, 50]


def quantized(num_rows=50, width=16):
    rows = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(0))
    return torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(rows)


def wide(x):
    return x.history * x.row_scale.float().unsqueeze(1) + x.row_bias.float().unsqueeze(1)


def table_of(rows, width):
    """An INT8 table that holds ``rows``, and what it is looked up as."""
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
        IntNBitTableBatchedEmbeddingBagsCodegen,
    )

    table = IntNBitTableBatchedEmbeddingBagsCodegen(
        [("table", len(rows), width, SparseType.INT8, EmbeddingLocation.HOST)],
        device="cpu",
        output_dtype=SparseType.FP32,
        pooling_mode=PoolingMode.NONE,
    )
    table.fill_random_weights()
    ((weights, _),) = table.split_embedding_weights(split_scale_shifts=False)
    scales = rows[:, width:].contiguous().view(torch.float32).half()
    weights[:, :4], weights[:, 4 : 4 + width] = scales.view(torch.uint8), rows[:, :width]
    every = torch.arange(len(rows), dtype=torch.int32)
    return weights, table(every, torch.arange(len(rows) + 1, dtype=torch.int32))


@pytest.mark.parametrize("width", [4, 16, 128])
def test_rows_of_the_op(width):
    rows = quantized(width=width)
    x = fused_rows(rows, width)
    expected = torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(rows)
    torch.testing.assert_close(wide(x), expected, rtol=0, atol=1e-6)
    assert all(part.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr() for part in x)


@pytest.mark.parametrize("width", [4, 16, 128])
def test_rows_of_a_table(width):
    weights, expected = table_of(quantized(width=width), width)
    x = fused_rows(weights, width, scale_bias_last=False)
    torch.testing.assert_close(wide(x), expected, rtol=0, atol=1e-6)
    assert x.history.untyped_storage().data_ptr() == weights.untyped_storage().data_ptr()


@pytest.mark.parametrize("scale_bias_last", [True, False])
def test_attention(scale_bias_last, device):
    rows = quantized()
    if not scale_bias_last:
        rows, _ = table_of(rows, 16)
    rows = rows.to(device)
    x = fused_rows(rows, 16, scale_bias_last=scale_bias_last)
    query = torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(1)).to(device)
    offsets = torch.tensor(OFFSETS, device=device)
    out = jagged_target_attention(query, offsets=offsets, **x._asdict())
    torch.testing.assert_close(out, jagged_target_attention(query, wide(x), offsets))


@pytest.mark.parametrize(
    ("rows", "width", "error", "message"),
    [
        (torch.zeros(3, 24), 16, TypeError, "rows must be uint8, got torch.float32"),
        (torch.zeros(24).byte(), 16, ValueError, r"rows must have shape \[U, R\]"),
        (torch.zeros(3, 24).byte(), 18, ValueError, "width must be a multiple of 4, got 18"),
        (torch.zeros(3, 23).byte(), 16, ValueError, "rows must have 24 bytes or more each"),
        (torch.zeros(3, 25).byte(), 16, ValueError, "rows must begin at multiples of 4 bytes"),
        (torch.zeros(24, 24).byte().T, 16, ValueError, "each byte next to the last, got strides"),
    ],
    ids=str,
)
def test_errors_name_the_argument(rows, width, error, message):
    with pytest.raises(error, match=message):
        fused_rows(rows, width)
