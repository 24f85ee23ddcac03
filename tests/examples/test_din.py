"""``examples/din.py``: its unit against padded rows, and a short training."""

import sys

import din
import pytest
import torch
from torchrec import JaggedTensor

from tests.runs import assert_same_run


def pool_padded(unit, target, rows, lengths, longest=9):
    """The weighted sum of each sample, over rows padded with zeros."""
    pooled = []
    for q, x in zip(target, rows.split(lengths), strict=True):
        padded = torch.cat([x, x.new_zeros(longest - len(x), x.shape[1])])
        queries = q.expand_as(padded)
        features = torch.cat([queries, padded, queries - padded, queries * padded], dim=1)
        is_row = torch.arange(longest).unsqueeze(1) < len(x)
        pooled.append((unit.weigh(features) * is_row * padded).sum(0))
    return torch.stack(pooled)


@pytest.mark.parametrize("lengths", [[3, 0, 9, 1], [0, 0]], ids=str)
def test_matches_padded_rows(lengths):
    torch.manual_seed(0)
    unit = din.ActivationUnit(8, hidden_dims=(6, 5)).double()
    target = torch.randn(len(lengths), 8, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(sum(lengths), 8, dtype=torch.float64, requires_grad=True)
    out = unit(target, JaggedTensor(rows, lengths=torch.tensor(lengths)))
    expected = pool_padded(unit, target, rows, lengths)
    assert_same_run(out, expected, num_terms=100, dtype=torch.float64)
    leaves, weights = [target, rows, *unit.parameters()], torch.randn_like(out)
    gradients = [torch.autograd.grad(x, leaves, weights) for x in (out, expected)]
    for actual, wanted in zip(*gradients, strict=True):
        assert_same_run(actual, wanted, num_terms=200, dtype=torch.float64)


def test_trains(monkeypatch, capsys):
    monkeypatch.setattr(din, "BATCH_SIZE", 64)
    monkeypatch.setattr(sys, "argv", ["din.py", "--steps", "30"])
    din.main()
    first, last = (float(line.split()[-1]) for line in capsys.readouterr().out.splitlines())
    assert last < first
