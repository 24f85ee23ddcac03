"""Readers of public logs for ``quality.py``: users and items of events, in order of time."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pandas as pd
from events import DataError

__all__ = ["first_users", "is_kuairand", "is_taobao", "read_kuairand", "read_taobao"]

KUAIRAND = "log_standard*.csv*"
TAOBAO = ("user", "item", "category", "behavior", "time")
TAOBAO_TIMES = (1511539200, 1512316800)  # from 2017-11-25 to 2017-12-03, in Beijing


def is_kuairand(path: Path) -> bool:
    """Whether it is a folder of KuaiRand's logs."""
    return path.is_dir() and any(path.glob(KUAIRAND))


def read_kuairand(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Clicks in the standard logs of KuaiRand, of all files in the folder.

    Returns:
        ``[M]`` users and ``[M]`` videos.

    Raises:
        DataError: a file has not the columns that it should have.

    Source:
        KuaiRand (CIKM '22, https://kuairand.com), in the form of its ``data`` folders.
    """
    names = ("user_id", "video_id", "time_ms", "is_click")
    parts = [_read(path, usecols=names) for path in sorted(folder.glob(KUAIRAND))]
    frame = pd.concat(parts)
    frame = frame[frame["is_click"] == 1].sort_values("time_ms", kind="stable")
    return _events(frame["user_id"], frame["video_id"], folder)


def is_taobao(path: Path) -> bool:
    """Whether it is a CSV, perhaps compressed."""
    return ".csv" in path.suffixes


def read_taobao(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Page views in ``UserBehavior.csv`` of Taobao, of the nine days that it is about.

    Returns:
        ``[M]`` users and ``[M]`` items.

    Raises:
        DataError: the file has not the five columns that it should have.

    Source:
        User Behavior Data from Taobao for Recommendation (https://tianchi.aliyun.com/dataset/649).
    """
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as file:
        first = file.readline()
    if len(first.split(",")) != len(TAOBAO):
        raise DataError(f"{path}:1: expected {','.join(TAOBAO)}; got {first!r}")
    frame = _read(path, names=TAOBAO, usecols=("user", "item", "behavior", "time"))
    in_days = frame["time"].between(*TAOBAO_TIMES, inclusive="left")
    frame = frame[in_days & (frame["behavior"] == "pv")].sort_values("time", kind="stable")
    return _events(frame["user"], frame["item"], path)


def first_users(user: np.ndarray, item: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The events of the ``count`` users of the lowest ids."""
    kept = np.isin(user, np.unique(user)[:count])
    return user[kept], item[kept]


def _read(path: Path, usecols: tuple[str, ...], **options: object) -> pd.DataFrame:
    """Columns of a file, of integers but for the behavior."""
    dtypes = {name: str if name == "behavior" else np.int64 for name in usecols}
    try:
        return pd.read_csv(path, usecols=list(usecols), dtype=dtypes, **options)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"{path}: expected integers in {', '.join(usecols)}; {error}") from None


def _events(user: pd.Series, item: pd.Series, path: Path) -> tuple[np.ndarray, np.ndarray]:
    if user.empty:
        raise DataError(f"{path} has no event")
    return user.to_numpy(), item.to_numpy()
