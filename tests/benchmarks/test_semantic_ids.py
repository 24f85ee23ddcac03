"""The comparison of ways to keep rows: its bytes, and its errors."""

import pandas as pd
import pytest
import semantic_ids
import torch

from tests.runs import assert_same_run


def test_table_of_made_up_rows(monkeypatch, capsys):
    monkeypatch.setattr(semantic_ids, "ROWS", 600)
    semantic_ids.main()
    assert "discrete PCA" in capsys.readouterr().out
    lines = pd.DataFrame(semantic_ids.compare(semantic_ids.make_up(600, 16), [2, 8]))
    lines = lines.set_index(["way", "bytes"])
    ways = ["k-means", "discrete PCA, 3 levels", "discrete PCA, 15 levels"]
    assert lines.index.tolist() == [
        *(("integers, 2 bits", 8), ("integers, 4 bits", 12), ("integers, 8 bits", 20)),
        *((way, size) for size in (2, 8) for way in ways),
    ]
    for column in ("error", "of others"):
        errors = lines[column]
        assert errors.between(0, 1).all()
        assert all(errors[way, 8] < errors[way, 2] for way in ways)
        assert errors["integers, 8 bits", 20] < errors["integers, 2 bits", 8]
    shared = lines["shared, KiB"]
    assert shared["discrete PCA, 3 levels", 8] == (1 + 40) * 16 * 4 / 1024
    assert shared["discrete PCA, 15 levels", 8] == (1 + 16) * 16 * 4 / 1024
    assert shared["k-means", 8] == 8 * 256 * 16 * 4 / 1024


def test_others_are_not_fitted():
    """Centers are rows where there are so few, and others lie elsewhere."""
    rows = semantic_ids.make_up(300, 16)
    line = list(semantic_ids.compare(rows, [1]))[len(semantic_ids.BITS)]
    assert line["way"] == "k-means"
    assert line["error"] == pytest.approx(0, abs=1e-12)
    assert line["of others"] > 0.1


@pytest.mark.parametrize("bits", semantic_ids.BITS)
def test_integers_lie_within_half_a_step(bits):
    rows = semantic_ids.make_up(50, 10)
    kept = semantic_ids.keep_integers(rows, bits)
    packed, low, step = kept.stored
    assert packed.shape == (50, -(-10 * bits // 8))
    rounding = 2**-10 * rows.abs().amax(1, keepdim=True)  # of the ends of a range, in fp16
    assert torch.all((rows - kept.rows).abs() <= step.float() / 2 + 2 * rounding)
    shifts = torch.arange(8 // bits) * bits
    codes = (packed.unsqueeze(2) >> shifts & 2**bits - 1).flatten(1)[:, :10]
    assert torch.equal(low.float() + step.float() * codes, kept.rows)


def test_k_means_keeps_the_nearest_centers():
    rows = semantic_ids.make_up(900, 4)
    keep = semantic_ids.fit_k_means(rows, 2)
    kept = keep(rows[:50])
    first, second = kept.shared
    codes = torch.cdist(rows[:50], first).argmin(1)
    again = torch.cdist(rows[:50] - first[codes], second).argmin(1)
    assert torch.equal(kept.stored[0], torch.stack([codes, again], 1).byte())
    assert_same_run(kept.rows, first[codes] + second[again], num_terms=2)
