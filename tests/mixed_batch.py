"""Every kernel of attention once, forward and backward, on a batch of short and long samples.

For tools that watch kernels, such as compute-sanitizer: see ``make sanitize``.
"""

import itertools

import torch

from torchrec_jagged_attn import jagged_flash_attention, jagged_target_attention
from torchrec_jagged_attn.testing import offsets_of

LENGTHS = torch.tensor([700, 0, 3, 33, 64, 1, 257, 20, 129])


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)


def run() -> None:
    offsets = offsets_of(LENGTHS, torch.int64, "cuda")
    num_rows, num_samples = int(LENGTHS.sum()), LENGTHS.numel()
    for dtype, rows, tables in itertools.product(
        (torch.bfloat16, torch.float32), (1, 8, 20, 70), (False, True)
    ):
        inputs = [draw(num_samples, rows, 1, 64, dtype=dtype), draw(num_rows, 64, dtype=dtype)]
        position_bias = draw(30, 1, dtype=dtype) if tables else None
        out = jagged_target_attention(*inputs, offsets, position_bias=position_bias)
        out.sum().backward()
        torch.cuda.synchronize()
        print("target attention", dtype, rows, "query rows", "and a table" * tables, flush=True)
    for dtype, width, causal in itertools.product(
        (torch.bfloat16, torch.float32), (64, 128), (False, True)
    ):
        q = draw(num_rows, 2, width, dtype=dtype)
        k, v = (draw(num_rows, 1 if causal else 2, width, dtype=dtype) for _ in range(2))
        jagged_flash_attention(q, k, v, offsets, causal=causal).sum().backward()
        torch.cuda.synchronize()
        print("flash attention", dtype, width, "causal, grouped" * causal, flush=True)


if __name__ == "__main__":
    run()
