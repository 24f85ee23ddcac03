"""Ranking with items that are kept in few bytes: what is kept, and what content says."""

import pandas as pd
import pytest
import torch

from tests.runs import assert_same_run

pytest.importorskip("rich")

import quality
import semantic_ids_ranking as ranking
from semantic_ids import Kept, fit_discrete_pca, fit_k_means, make_up

WAYS = [
    "rows",
    *(f"integers, {bits} bits" for bits in (2, 4, 8)),
    *("k-means", "k-means + tables", "discrete PCA", "discrete PCA + basis"),
    *("FSQ", "hashed table", "VQ fusion + basis"),
]


@pytest.fixture
def folder(tmp_path):
    """MovieLens of 20 users, who each rate 8 of 15 films, one kind after the other."""
    kinds = "War", "Comedy"
    films = "".join(
        f"{3 * film}::Film {film % 4} of {film} ({1980 + film})::{kinds[film % 2]}\n"
        for film in range(15)
    )
    ratings = "".join(
        f"{user}::{3 * ((user + 2 * event) % 15)}::5::{100 * user + event}\n"
        for user in range(1, 21)
        for event in range(8)
    )
    users = "".join(f"{user}::F::25::3::12345\n" for user in range(1, 21))
    for name, text in (("movies", films), ("ratings", ratings), ("users", users)):
        (tmp_path / f"{name}.dat").write_text(text)
    quality.read.cache_clear()
    quality.events_of.cache_clear()
    return tmp_path


def test_table(folder, monkeypatch, capsys):
    monkeypatch.setattr(ranking, "STEPS", 3)
    path = folder / "figures.csv"
    options = ["--width", "8", "--bytes", "2", "--epochs", "1", "--csv", str(path)]
    assert ranking.main(["--data", str(folder), *options]) == 0
    assert "VQ fusion + basis" in capsys.readouterr().out
    lines = pd.read_csv(path).set_index("way")
    assert lines.index.tolist() == WAYS
    assert lines["auc"].between(0, 1).all()
    assert lines.loc["rows", "bytes"] == 8 * 4
    for way in ("k-means", "discrete PCA + basis", "FSQ", "VQ fusion + basis"):
        assert lines.loc[way, "bytes"] == 2
    assert lines.loc["discrete PCA", "shared, KiB"] == (1 + 10) * 8 * 4 / 1024
    assert lines.loc["hashed table", "footprint, KiB"] == 8 * 4 / 1024
    assert lines.loc["FSQ", "shared, KiB"] == (4 + 1) * 8 * 4 / 1024


def test_what_is_finished_is_not_trained_again(folder, monkeypatch):
    monkeypatch.setattr(ranking, "STEPS", 3)
    monkeypatch.setattr(ranking, "ways", lambda *args: found)
    rows = make_up(15, 8)
    found = [ranking.Way("rows", 0, Kept([rows], [], rows), ranking.Rows(rows))]
    path = folder / "figures.csv"
    options = ["--data", str(folder), "--width", "8", "--epochs", "1", "--csv", str(path)]
    assert ranking.main(options) == 0
    first = path.read_text()
    assert ranking.main([*options, "--seeds", "2"]) == 0
    assert path.read_text().startswith(first)
    assert pd.read_csv(path)["seed"].tolist() == [0, 1]
    assert pd.read_csv(path)["data"].tolist() == [folder.name] * 2


def test_a_file_of_something_else_is_named(folder, capsys):
    (folder / "figures.csv").write_text("way,auc\nrows,0.5\n")
    options = ["--data", str(folder), "--width", "8", "--csv", str(folder / "figures.csv")]
    assert ranking.main([*options, "--epochs", "1", "--bytes", "1"]) == 1
    assert "has no column budget, data, epochs" in capsys.readouterr().err


def test_what_is_trained_begins_with_what_is_kept():
    rows = make_up(600, 8)
    pca = fit_discrete_pca(rows, 3, 3)(rows)
    k_means = fit_k_means(rows, 2)(rows)
    ids = torch.tensor([[5, 0], [17, 599]])
    for items, kept in (
        (ranking.codes_of(pca), pca),
        (ranking.Tables(k_means.stored[0], k_means.shared), k_means),
        (ranking.Rows(rows), None),
    ):
        expected = rows if kept is None else kept.rows
        assert_same_run(items(ids), expected[ids], num_terms=4)
        assert (sum(1 for _ in items.parameters()) > 0) == (kept is not None)


def test_more_bytes_lose_less(monkeypatch):
    monkeypatch.setattr(ranking, "STEPS", 50)
    rows = make_up(200, 8)
    errors = [(rows - ranking.fit_fsq(rows, size).rows).square().sum() for size in (1, 4)]
    assert errors[1] < 0.5 * errors[0]


def test_content(folder):
    data = f"{folder}@12"
    embeddings, labels = ranking.content_of(data, quality.events_of(data, 50, 0), "cpu")
    assert {name: len(x) for name, x in embeddings.items()} == dict.fromkeys(
        ("title", "genres", "neighbours"), 15
    )
    assert embeddings["genres"].sum(1).tolist() == [1.0] * 15
    assert embeddings["genres"].argmax(1).tolist() == [(film + 1) % 2 for film in range(15)]
    assert labels["genres combined"].tolist() == [(film + 1) % 2 for film in range(15)]
    assert labels["decade"].tolist() == [0] * 10 + [1] * 5
    # Films are rated two apart: those are alike that have a neighbour in common, four apart.
    neighbours = torch.nn.functional.normalize(embeddings["neighbours"])
    nearest = (neighbours @ neighbours.T).fill_diagonal_(-1).argmax(1)
    assert ((nearest - torch.arange(15)) % 15).sub(7.5).abs().eq(3.5).all()
    assert not torch.equal(embeddings["title"][0], embeddings["title"][1])


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--width", "6", "multiple of 4, got 6"),
        ("--seeds", "0", "--seeds must be at least 1"),
        ("--bytes", "0", "--bytes must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_named(option, value, message, capsys):
    with pytest.raises(SystemExit):
        ranking.main(["--data", "folder", option, value])
    assert message in capsys.readouterr().err


def test_no_such_folder(capsys):
    assert ranking.main(["--data", "nowhere"]) == 1
    assert "--data must be 'synthetic', a folder" in capsys.readouterr().err
