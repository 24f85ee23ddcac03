"""The comparison of ways to keep rows: its bytes, and its errors."""

import pandas as pd
import pytest
import semantic_ids


def test_table_of_made_up_rows(monkeypatch, capsys):
    found, compare = [], semantic_ids.compare

    def compare_few(rows):
        found.extend(compare(rows, [2, 8]))
        return found

    for name, value in {"ROWS": 600, "WIDTH": 16, "compare": compare_few}.items():
        monkeypatch.setattr(semantic_ids, name, value)
    semantic_ids.main()
    assert "discrete PCA" in capsys.readouterr().out
    lines = pd.DataFrame(found).set_index(["way", "bytes"])
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
