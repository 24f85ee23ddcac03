"""Reads MovieLens-1M in the format of GroupLens: https://grouplens.org/datasets/movielens/1m/."""

from __future__ import annotations

import gzip
import io
import os
import urllib.request
import zipfile
from pathlib import Path

import numpy as np
from events import DataError, InteractionLog

URL = "https://files.grouplens.org/datasets/movielens/ml-1m.zip"
LIKED = 4
"""Minimum stars of a rating that converts."""
MAX_DIGITS = 18
"""Maximum number of digits for which any integer fits in 64 bits."""
COLUMNS = {
    "ratings.dat": ("UserID", "MovieID", "Rating", "Timestamp"),
    "movies.dat": ("MovieID", "Title", "Genres"),
    "users.dat": ("UserID", "Gender", "Age", "Occupation", "Zip-code"),
}


def read_movielens(directory: Path) -> InteractionLog:
    """Read all ratings of `ratings.dat` (or `ratings.dat.gz`) as interactions.

    The category of a film is its combination of genres, such as `Action|Drama`. Ratings of four
    stars or more convert.

    Raises:
        DataError: a file is missing, or not in the format that GroupLens documents.
    """
    ratings, movies, users = (_Table(directory, name) for name in COLUMNS)
    return InteractionLog(
        user=ratings.rows_of(users, "UserID"),
        item=ratings.rows_of(movies, "MovieID"),
        time=ratings.integers("Timestamp"),
        category=movies.codes("Genres"),
        user_features={
            "gender": users.codes("Gender"),
            "age": users.codes("Age"),
            "occupation": users.codes("Occupation"),
        },
        converted=ratings.integers("Rating") >= LIKED,
    )


def read_films(directory: Path) -> tuple[list[str], list[str]]:
    """Read titles and genres of `movies.dat`, such as `Toy Story (1995)` and `Comedy|Drama`, in the
    order of the items of `read_movielens`.

    Raises:
        DataError: the file is missing, or not in the format that GroupLens documents.
    """
    films = _Table(directory, "movies.dat").columns
    return list(films["Title"]), list(films["Genres"])


def download_movielens(directory: Path) -> None:
    """Download the files into `directory`, unless they exist.

    Raises:
        DataError: the download fails, or is not the expected archive.
    """
    if all((directory / name).exists() for name in COLUMNS):
        return
    try:
        with urllib.request.urlopen(URL, timeout=60) as response:
            archive = zipfile.ZipFile(io.BytesIO(response.read()))
        # Reading a member verifies its checksum.
        files = {name: archive.read(f"ml-1m/{name}") for name in COLUMNS}
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise DataError(
            f"cannot download {URL}: {error}; try again, or unpack it into {directory} yourself"
        ) from None
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        partial = directory / f"{name}.partial"
        partial.write_bytes(content)
        os.replace(partial, directory / name)


class _Table:
    """A file of lines such as `1::Toy Story (1995)::Animation|Children's|Comedy`."""

    def __init__(self, directory: Path, file_name: str) -> None:
        names = COLUMNS[file_name]
        self.path = directory / file_name
        compressed = directory / f"{file_name}.gz"
        if not self.path.exists() and compressed.exists():
            self.path = compressed
        try:
            with (gzip.open if self.path == compressed else open)(
                self.path, "rt", encoding="latin-1"
            ) as file:
                rows = [line.rstrip("\n").split("::") for line in file]
        except FileNotFoundError:
            raise DataError(
                f"{self.path} is missing; give --data the folder of MovieLens-1M, or --download it"
            ) from None
        except (OSError, EOFError) as error:
            raise DataError(f"cannot read {self.path}: {error}; fetch the file again") from None
        for number, row in enumerate(rows, 1):
            if len(row) != len(names):
                raise DataError(
                    f"{self.path}, line {number}: expected {len(names)} columns "
                    f"{'::'.join(names)}, got {len(row)}; restore the line as GroupLens ships it"
                )
        if not rows:
            raise DataError(f"{self.path} is empty; fetch the file again")
        self.columns = dict(zip(names, zip(*rows, strict=True), strict=True))

    def integers(self, name: str) -> np.ndarray:
        """Return a column as int64."""
        column = self.columns[name]
        for row, text in enumerate(column):
            if not text.isdecimal() or len(text) > MAX_DIGITS:
                raise self._error(row, name, f"an integer of at most {MAX_DIGITS} digits")
        return np.array(column).astype(np.int64)

    def codes(self, name: str) -> np.ndarray:
        """Return a column as ids from 0 of its sorted distinct values."""
        return np.unique(self.columns[name], return_inverse=True)[1]

    def rows_of(self, other: _Table, name: str) -> np.ndarray:
        """Return, for each row, the row of `other` with the same value of column `name`."""
        keys, other_keys = self.integers(name), other.integers(name)
        order = np.argsort(other_keys)
        found = order[np.searchsorted(other_keys, keys, sorter=order).clip(max=len(order) - 1)]
        for row in np.flatnonzero(other_keys[found] != keys):
            raise self._error(row, name, f"one that {other.path.name} knows")
        return found

    def _error(self, row: int, name: str, expected: str) -> DataError:
        return DataError(
            f"{self.path}, line {row + 1}, column {name}: expected {expected}, got "
            f"{self.columns[name][row]!r}; restore the line as GroupLens ships it"
        )
