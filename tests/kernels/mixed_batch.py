"""Every kernel of attention once, forward and backward, on a batch of short and long samples.

For tools that watch kernels, such as compute-sanitizer: see ``make sanitize``. Names of functions
here, as arguments, run those alone.
"""

import itertools
import sys
from functools import partial

import torch

from tests.cases import offsets_of
from torchrec_jagged_attn import jagged_flash_attention, jagged_target_attention
from torchrec_jagged_attn.ops import jagged_jagged_bmm_jagged_out

LENGTHS = torch.tensor([700, 0, 3, 33, 64, 1, 257, 20, 129])
DTYPES = (torch.bfloat16, torch.float32)


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)


def tell(*what: object) -> None:
    torch.cuda.synchronize()
    print(*what, flush=True)


def target_attention(offsets: torch.Tensor, num_rows: int) -> None:
    for dtype, rows, tables in itertools.product(DTYPES, (1, 8, 20, 70), (False, True)):
        inputs = [draw(LENGTHS.numel(), rows, 1, 64, dtype=dtype), draw(num_rows, 64, dtype=dtype)]
        position_bias = draw(30, 1, dtype=dtype) if tables else None
        out = jagged_target_attention(*inputs, offsets, position_bias=position_bias)
        out.sum().backward()
        tell("target attention", dtype, rows, "query rows", "and a table" * tables)


def flash_attention(offsets: torch.Tensor, num_rows: int) -> None:
    for dtype, width, causal in itertools.product(DTYPES, (64, 128), (False, True)):
        q = draw(num_rows, 2, width, dtype=dtype)
        k, v = (draw(num_rows, 1 if causal else 2, width, dtype=dtype) for _ in range(2))
        for relative_bias in (None, draw(40, 2, dtype=dtype)):
            attend = partial(jagged_flash_attention, causal=causal, relative_bias=relative_bias)
            attend(q, k, v, offsets).sum().backward()
            tables = "with scores by distance" * (relative_bias is not None)
            tell("flash attention", dtype, width, "causal, grouped" * causal, tables)


def dropout(offsets: torch.Tensor, num_rows: int) -> None:
    for dtype, rows in itertools.product(DTYPES, (1, 8, 20, 70)):
        inputs = [draw(LENGTHS.numel(), rows, 1, 64, dtype=dtype), draw(num_rows, 64, dtype=dtype)]
        jagged_target_attention(*inputs, offsets, dropout=0.2).sum().backward()
        tell("target attention with dropout", dtype, rows, "query rows")
    for dtype in DTYPES:
        q, k, v = (draw(num_rows, 2, 64, dtype=dtype) for _ in range(3))
        jagged_flash_attention(q, k, v, offsets, causal=True, dropout=0.2).sum().backward()
        tell("flash attention with dropout", dtype)


def pairs(offsets: torch.Tensor, num_rows: int) -> None:
    for dtype in DTYPES:
        x, y = draw(num_rows, 64, dtype=dtype), draw(num_rows, 64, dtype=dtype)
        jagged_jagged_bmm_jagged_out(x, y, offsets).sum().backward()
        tell("pairs", dtype)


FUNCTIONS = (target_attention, flash_attention, dropout, pairs)
BY_NAME = {function.__name__: function for function in FUNCTIONS}

if __name__ == "__main__":
    for name in sys.argv[1:] or BY_NAME:
        BY_NAME[name](offsets_of(LENGTHS, torch.int64, "cuda"), int(LENGTHS.sum()))
