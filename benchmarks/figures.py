"""The figures under ``results/``, as ``report.py`` reads them.

A file there is what ``run.py --csv`` writes, or a part of it: the columns ``suite``, ``case``,
``provider``, ``mode``, ``metric``, ``median`` and ``unit``, then what was measured, on what, and
when. Where only a ratio was kept, its row has the unit ``× ours`` (a provider's figure over ours),
``of floor`` (the floor's time over a provider's) or ``saved`` (one less ours over a provider's).
From a run, which has times and memory, the same ratios are computed. A provider that was refused
has a row of the metric ``refused``, which says why in its ``note``. The trainings of ``quality.py
--csv`` become such rows, too.
"""

import csv
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path

import pandas as pd
from quality_results import figure_rows, ways_rows

RESULTS = Path(__file__).parent / "results"
NO_MEMORY = "out of memory"
LACKS_MEMORY = (NO_MEMORY, "alloc_failed")  # in what CUDA and its libraries raise
MODES = ("forward", "backward", "both", "step", "test")
METRICS = {
    **dict.fromkeys(
        ("time", "graph_time", "host_time", "host_time_one_thread", "gpu_busy", "p50", "p99"), "ms"
    ),
    **dict.fromkeys(("memory", "peak_memory", "sent", "sent_by_length", "sent_rows"), "MiB"),
    **dict.fromkeys(("throughput", "training", "inference"), "samples/s"),
    **dict.fromkeys(("auc", "auc_se", "ahead", "ahead_se"), "AUC"),
    **dict.fromkeys(("ne", "ne_se"), "NE"),
    "served": "requests/s",
}
"""The metrics that documents show, and the units in which files have them."""
UNITS = {
    "µs": "µs",  # of what files have in ms
    "×": "× ours",
    "floor": "of floor",
    "saved": "saved",
    "ratio": "padded over jagged",
}
SCORES = ("AUC", "NE", "weight")
# Providers of which a table shows the fastest.
GROUPS: dict[str, Callable[[str], bool]] = {
    "best-peer": lambda provider: not provider.startswith(("ours", "floor")),
    "fbgemm": lambda provider: provider.startswith("fbgemm-"),
}


@dataclass(frozen=True)
class Cell:
    """A figure: case, provider, mode, metric and unit as ``run.py`` writes them.

    Args:
        named: whether the provider is named, of a group of providers of which this is the best.
    """

    case: str
    provider: str
    mode: str = "both"
    metric: str = "graph_time"
    unit: str = "ms"
    named: bool = False


def parsed(text: str, key: str = "", mode: str = "both") -> Cell:
    """A figure by its words, as ``"ours forward µs"``: by default its graph time in ms.

    Args:
        text: with ``*`` for ``key``, and ``@`` before the case, if that is not ``key``.
        mode: if ``text`` has none.
    """
    provider, options = [], {"case": key, "mode": mode}
    for word in text.split():
        if word in MODES:
            options["mode"] = word
        elif word in METRICS:
            options["metric"] = word
        elif word in UNITS:
            options["unit"] = UNITS[word]
        elif word == "named":
            options["named"] = True
        elif word.startswith("@"):
            options["case"] = word[1:].replace("*", key)
        else:
            provider.append(word.replace("*", key))
    unit = METRICS[options.get("metric", "graph_time")]
    return Cell(**{"unit": unit, "provider": " ".join(provider), **options})


def files_of(results: Iterable[str], folder: Path) -> list[Path]:
    """Files by their names without ``.csv``."""
    return [folder / f"{name}.csv" for name in results]


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a file under ``results/``."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if "case" in rows[0]:
        return rows
    return (ways_rows if "way" in rows[0] else figure_rows)(pd.read_csv(path))


class Figures:
    """The figures of some files, as they were written: a figure keeps its number of digits.

    Args:
        paths: CSV files.
        ours: the provider that ratios are to.
        by_suite: whether the name of a case has that of its suite before it, as in
            ``table1/jagged_softmax-paper``: suites may have a case, and its roofline, of one name.

    Raises:
        ValueError: a figure is there twice, or those of a case are of several kinds of GPU, scores
            of a model aside.
    """

    def __init__(
        self, paths: Iterable[Path], ours: str = "ours", *, by_suite: bool = False
    ) -> None:
        self.ours = ours
        self._rows: dict[tuple[str, ...], tuple[Decimal, str]] = {}
        self._labels: dict[str, dict[str, str]] = {}
        self._gpus: dict[str, str] = {}
        self._stamps: dict[str, None] = {}  # in their order
        for path in paths:
            for row in rows_of(path):
                case = f"{row['suite']}/{row['case']}" if by_suite else row["case"]
                names = ("provider", "mode", "metric", "unit")
                key = (case, *(row.get(name) or "" for name in names))
                if key in self._rows:
                    raise ValueError(f"{path.name} must have each figure once, got {key} twice")
                self._rows[key] = Decimal(row["median"]), row.get("note") or ""
                self._labels.setdefault(case, row)
                if not row["gpu"]:  # the paper's
                    continue
                self._stamps[_stamp(row)] = None
                if row["unit"] in SCORES:  # which do not depend on how fast a GPU is
                    continue
                other = self._gpus.setdefault(case, row["gpu"])
                if other != row["gpu"]:
                    raise ValueError(
                        f"{path.name} must have the figures of {case} from one kind of GPU, got "
                        f"{other} and {row['gpu']}"
                    )
        self.providers = dict.fromkeys(provider for _, provider, *_ in self._rows)

    @property
    def cases(self) -> list[str]:
        """All of them, in the order of the files."""
        return [*self._labels]

    def batch(self, case: str) -> str:
        """Samples of a step and rank; a dash if they are not known."""
        batch = self._labels.get(case, {}).get("batch")
        return f"{int(batch):,}" if batch else "–"

    def gpu(self, case: str) -> str:
        """What a case was measured on, if not all cases were measured on the same; else nothing."""
        several = len({*self._gpus.values()}) > 1
        return self._gpus.get(case, "") if several else ""

    def stamps(self) -> str:
        """On what and when the figures were measured."""
        return "; ".join(self._stamps)

    def note(self, cell: Cell) -> str:
        """The note on a figure, or the reason why it is missing; empty for most."""
        of = (cell.case, cell.provider, cell.mode)
        cell = replace(cell, unit="ms") if cell.unit == "µs" else cell
        keys = [
            *((*of, metric, cell.unit) for metric in (cell.metric, "time")),
            (*of, "refused", ""),
        ]
        note = next((self._rows[key][1] for key in keys if key in self._rows), "")
        if not note and cell.metric == "graph_time" and self._recorded(cell) is None:
            note = "eager: cannot be captured in a CUDA graph" * (self.find(cell) is not None)
        # Without what varies from one to the next: the bytes.
        return NO_MEMORY if any(words in note.lower() for words in LACKS_MEMORY) else note

    def find(self, cell: Cell) -> Decimal | None:
        """A figure as it was written, or computed from others; ``None`` if it is not known."""
        if cell.unit == "µs":
            found = self.find(replace(cell, unit="ms"))
            return None if found is None else found.scaleb(3)
        found = self._recorded(cell)
        if found is None and cell.metric == "graph_time":  # of calls that no graph captures
            found = self._recorded(replace(cell, metric="time"))
        return found

    def best(self, cell: Cell) -> str:
        """The provider of the group ``cell.provider`` whose figure is the least."""
        members = self._members(cell)
        return min(members, key=members.__getitem__)

    def _members(self, cell: Cell) -> dict[str, Decimal]:
        """The figures of a group of providers."""
        names = [x for x in self.providers if x not in GROUPS and GROUPS[cell.provider](x)]
        of = {name: self._recorded(replace(cell, provider=name)) for name in names}
        return {name: figure for name, figure in of.items() if figure is not None}

    def _recorded(self, cell: Cell) -> Decimal | None:
        """A figure of exactly this metric."""
        key = (cell.case, cell.provider, cell.mode, cell.metric, cell.unit)
        if key in self._rows:
            return self._rows[key][0]
        if cell.provider in GROUPS and cell.unit != "saved":
            return min(self._members(cell).values(), default=None)
        if (cell.metric, cell.unit) == ("memory", "MiB"):
            parts = [self._recorded(replace(cell, metric=x)) for x in ("operands", "peak_memory")]
            return None if None in parts else sum(parts)
        own = replace(cell, unit=METRICS.get(cell.metric, "ms"))
        if cell.unit == "of floor":
            floor = replace(cell, provider="floor", metric="time", unit="ms")
            return _ratio(self._recorded(floor), self._recorded(own))
        ours = replace(own, provider=self.ours)
        if cell.unit == "× ours":
            return _ratio(self._recorded(own), self._recorded(ours))
        if cell.unit == "saved":
            left = _ratio(self._recorded(ours), self._recorded(own))
            return None if left is None else 1 - left
        return None


def _stamp(row: dict[str, str]) -> str:
    """What was measured on, its versions, and when."""
    names = ("torch", "triton", "torchrec", "fbgemm")
    versions = [f"{name} {row[name]}" for name in names if row.get(name)]
    return ", ".join([row["gpu"], *versions, row["date"].partition("T")[0]])


def _ratio(above: Decimal | None, below: Decimal | None) -> Decimal | None:
    """``None`` if one of them is not known."""
    return None if above is None or below is None else above / below


def shown(value: Decimal | None, unit: str) -> str:
    """A figure of three digits, a score of four decimals, or fewer where no more were written; a
    dash for none.
    """
    if value is None:
        return "–"
    percent = unit in ("of floor", "saved")
    value = value.scaleb(2) if percent else value
    decimals = 0 if percent else max(0, 2 - value.adjusted())
    if unit in SCORES:
        decimals = 4
    if -value.as_tuple().exponent > decimals:
        value = round(value, decimals)
    return f"{value:,f} %" if percent else f"{value:,f}"
