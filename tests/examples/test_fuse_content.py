"""Semantic ids of films: their embeddings and labels, and the script on a small log."""

import argparse

import fuse_content
import pytest
import torch

from torchrec_jagged_attn.semantic_ids import VQFusion

TITLES = ["Heat (1995)", "Heat 2 (1999)", "Pi (1998)", "No Year"]
GENRES = ["Action|Crime", "Action", "Drama", "Action|Crime"]


def test_titles_genres_and_labels():
    titles = fuse_content.hashed_titles(TITLES)
    assert titles.abs().sum(1).tolist() == [2, 3, 2, 2]  # as many as words
    assert ((titles[0] * titles[1]).sum()) == 1  # "heat"
    genres = fuse_content.genre_columns(GENRES)
    assert genres.tolist() == [[1, 1, 0], [1, 0, 0], [0, 0, 1], [1, 1, 0]]
    labels = fuse_content.make_labels(TITLES, GENRES)
    assert labels["genres combined"].tolist() == [1, 0, 2, 1]
    assert labels["decade"].tolist() == [1, 1, 1, 0]


def test_similar_films(monkeypatch):
    monkeypatch.setattr(fuse_content, "HASHES", 6)
    before = torch.tensor([0, 0, 1, 1, 3, 3, 4, 4] * 3)
    after = torch.tensor([2, 2, 2, 2, 5, 5, 5, 5] * 3)  # 0 and 1 come before 2, 3 and 4 before 5
    rows = torch.nn.functional.normalize(fuse_content.co_rating_factors(before, after, 6))
    alike = rows @ rows.T
    assert alike[0, 1] > 0.99
    assert alike[3, 4] > 0.99
    assert alike[0, 3].abs() < 0.1


@pytest.fixture
def folder(tmp_path):
    films = "".join(f"{i + 1}::{title}::{GENRES[i]}\n" for i, title in enumerate(TITLES))
    ratings = "".join(f"1::{1 + i % 4}::5::{100 * i}\n" for i in range(30))
    for name, text in (("movies", films), ("ratings", ratings), ("users", "1::F::25::3::12345\n")):
        (tmp_path / f"{name}.dat").write_text(text)
    return tmp_path


def test_codes_and_their_model_are_saved(folder, monkeypatch, capsys):
    monkeypatch.setattr(fuse_content, "HASHES", 4)
    monkeypatch.setattr(fuse_content, "SHOWN", ("Pi (1998)", "not there"))
    out = folder / "of" / "mine.pt"
    options = {"data": folder, "download": False, "bytes": 2, "width": 8, "steps": 5, "seed": 0}
    fuse_content.main(argparse.Namespace(**options, out=out))
    printed = capsys.readouterr().out
    assert "Decoded from codes" in printed
    assert "4 codes of 2 bytes" in printed
    saved = torch.load(out)
    assert saved["codes"].shape == (4, 2)
    assert saved["codes"].dtype == torch.uint8
    fusion = VQFusion(
        {"title": 4, "genres": 3, "co-ratings": 4},
        {"genres combined": 3, "decade": 2},
        latent_dim=8,
        num_codes=10,
    )
    fusion.load_state_dict(saved["fusion"])
    assert fusion.pca(saved["codes"]).shape == (4, 8)
