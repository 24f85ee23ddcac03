"""The comparison of methods that store rows: their bytes and their errors."""

import pandas as pd
import pytest
import semantic_ids


def test_table_of_synthetic_rows(monkeypatch, capsys):
    found, compare = [], semantic_ids.compare

    def compare_few(rows):
        found.extend(compare(rows, [2, 8]))
        return found

    for name, value in {"ROWS": 600, "WIDTH": 16, "compare": compare_few}.items():
        monkeypatch.setattr(semantic_ids, name, value)
    semantic_ids.main()
    assert "discrete PCA" in capsys.readouterr().out
    lines = pd.DataFrame(found).set_index(["method", "bytes"])
    methods = ["k-means", "discrete PCA, 3 levels", "discrete PCA, 15 levels"]
    assert lines.index.tolist() == [
        *(("integers, 2 bits", 8), ("integers, 4 bits", 12), ("integers, 8 bits", 20)),
        *((method, size) for size in (2, 8) for method in methods),
    ]
    for column in ("error", "held-out error"):
        errors = lines[column]
        assert errors.between(0, 1).all()
        assert all(errors[method, 8] < errors[method, 2] for method in methods)
        assert errors["integers, 8 bits", 20] < errors["integers, 2 bits", 8]
    shared = lines["shared, KiB"]
    assert shared["discrete PCA, 3 levels", 8] == (1 + 40) * 16 * 4 / 1024
    assert shared["discrete PCA, 15 levels", 8] == (1 + 16) * 16 * 4 / 1024
    assert shared["k-means", 8] == 8 * 256 * 16 * 4 / 1024


def test_held_out_rows_are_not_fitted():
    """With so few rows, each fitted row is a center, but held-out rows are not."""
    rows = semantic_ids.synthetic_rows(300, 16)
    line = list(semantic_ids.compare(rows, [1]))[len(semantic_ids.BITS)]
    assert line["method"] == "k-means"
    assert line["error"] == pytest.approx(0, abs=1e-12)
    assert line["held-out error"] > 0.1
