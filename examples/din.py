"""DIN's local activation unit without padding, composed of ops of this package.

    python examples/din.py
    python examples/din.py --steps 1000 --device cuda

A small network computes the weight of each history row x from the row and the target q. Weights are
not normalized by a softmax:

    w_n = MLP([q, x_n, q - x_n, q * x_n]),    out = sum of w_n x_n

The input of the network is the rows of all samples, without padding. In the synthetic training
data, the label is whether the history has an event of the target's kind.

Source: Deep Interest Network (KDD '18, https://arxiv.org/abs/1706.06978).
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from options import HelpFormatter, number
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor

from torchrec_jagged_attn import jagged_jagged_bmm, repeat_per_candidate

NUM_ITEMS, NUM_KINDS, MAX_HISTORY, BATCH_SIZE = 100, 10, 20, 128


class ActivationUnit(nn.Module):
    """Pools histories ``[N, D]`` for targets ``[B, D]``, to ``[B, D]``."""

    def __init__(self, width: int, hidden_dims: tuple[int, int] = (80, 40)) -> None:
        super().__init__()
        first, second = hidden_dims
        self.weigh = nn.Sequential(
            nn.Linear(4 * width, first), nn.PReLU(), nn.Linear(first, second), nn.PReLU(),
            nn.Linear(second, 1),
        )  # fmt: skip

    def forward(self, target: Tensor, history: JaggedTensor) -> Tensor:
        x = history.values()
        q = repeat_per_candidate(target, history)  # [N, D], the target of each row's sample
        weights = self.weigh(torch.cat([q, x, q - x, q * x], dim=1))  # [N, 1]
        return jagged_jagged_bmm(x, weights, history.offsets()).squeeze(2)


class Din(nn.Module):
    """Computes logits ``[B]`` of targets and their histories, which share a table."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        table = EmbeddingConfig(
            name="item_table", embedding_dim=width, num_embeddings=NUM_ITEMS,
            feature_names=["target", "history"],
        )  # fmt: skip
        self.lookup = EmbeddingCollection(tables=[table])
        self.unit = ActivationUnit(width)
        self.over = nn.Sequential(nn.Linear(2 * width, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        rows = self.lookup(features)
        target = rows["target"].values()
        pooled = self.unit(target, rows["history"])
        return self.over(torch.cat([target, pooled], dim=1)).squeeze(1)


def draw_batch() -> tuple[KeyedJaggedTensor, Tensor]:
    lengths = torch.randint(MAX_HISTORY + 1, (BATCH_SIZE,))
    target, history = (torch.randint(NUM_ITEMS, (n,)) for n in (BATCH_SIZE, int(lengths.sum())))
    is_same_kind = history % NUM_KINDS == target.repeat_interleave(lengths) % NUM_KINDS
    labels = torch.segment_reduce(is_same_kind.float(), "sum", lengths=lengths) > 0
    features = KeyedJaggedTensor(
        ["target", "history"], torch.cat([target, history]),
        lengths=torch.cat([torch.ones_like(lengths), lengths]),
    )  # fmt: skip
    return features, labels.float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--steps", type=number(int, 1, 10**6), default=300, help="training steps")
    parser.add_argument("--device", type=torch.device, default="cpu", help="such as cuda")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Din().to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(1, args.steps + 1):
        features, labels = draw_batch()
        logits = model(features.to(args.device))
        loss = F.binary_cross_entropy_with_logits(logits, labels.to(args.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (1, args.steps) or step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
