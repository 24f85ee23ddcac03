"""Read the figures under ``results/``.

A file has the columns of ``run.py --csv``, or some of them: ``suite``, ``case``, ``provider``,
``mode``, ``metric``, ``median`` and ``unit``, then shapes, hardware, versions and date. Ratios are
computed from times and memory. If only a ratio was recorded, its row has the unit ``× ours`` (a
provider's figure divided by ours), ``of floor`` (the roofline time divided by a provider's time) or
``saved`` (one minus ours divided by a provider's figure). A provider that could not be measured has
a row with the metric ``refused`` and the reason in ``note``. The trainings of ``quality.py --csv``
are converted to such rows.
"""

import csv
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path

import pandas as pd
from quality_results import figure_rows, ways_rows

RESULTS = Path(__file__).parent / "results"
OUT_OF_MEMORY = "out of memory"
OUT_OF_MEMORY_ERRORS = (OUT_OF_MEMORY, "alloc_failed")  # in messages of CUDA and its libraries
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
"""Metrics in documents, and their units in files."""
UNITS = {
    "µs": "µs",  # converted from ms
    "×": "× ours",
    "floor": "of floor",
    "saved": "saved",
    "ratio": "padded over jagged",
}
SCORES = ("AUC", "NE", "weight")
# Groups of providers; a table has the figure of the fastest.
GROUPS: dict[str, Callable[[str], bool]] = {
    "best-peer": lambda provider: not provider.startswith(("ours", "floor")),
    "fbgemm": lambda provider: provider.startswith("fbgemm-"),
}


@dataclass(frozen=True)
class FigureQuery:
    """Case, provider, mode, metric and unit of a figure, as in the CSV.

    Args:
        named: for a group of providers, whether to name the fastest.
    """

    case: str
    provider: str
    mode: str = "both"
    metric: str = "graph_time"
    unit: str = "ms"
    named: bool = False


def parse_query(text: str, key: str = "", mode: str = "both") -> FigureQuery:
    """Parse a query such as ``"ours forward µs"``; the default is the graph time in ms.

    Args:
        text: words of the query. ``*`` is replaced by ``key``, and ``@`` precedes the case.
        key: the default case.
        mode: the default mode.
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
    return FigureQuery(**{"unit": unit, "provider": " ".join(provider), **options})


def result_files(results: Iterable[str], folder: Path) -> list[Path]:
    """Return paths of files from their names without ``.csv``."""
    return [folder / f"{name}.csv" for name in results]


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file under ``results/``."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if "case" in rows[0]:
        return rows
    return (ways_rows if "way" in rows[0] else figure_rows)(pd.read_csv(path))


class Figures:
    """The figures of some files, with the number of digits in the file.

    Args:
        paths: CSV files.
        ours: the provider in the denominator of ratios.
        by_suite: whether cases are named with their suite, as ``table1/jagged_softmax-paper``, for
            suites with cases of the same name.

    Raises:
        ValueError: a figure is duplicated, or the times of a case are from several kinds of GPU.
    """

    def __init__(
        self, paths: Iterable[Path], ours: str = "ours", *, by_suite: bool = False
    ) -> None:
        self.ours = ours
        self._rows: dict[tuple[str, ...], tuple[Decimal, str]] = {}
        self._labels: dict[str, dict[str, str]] = {}
        self._gpus: dict[str, str] = {}
        self._stamps: dict[str, None] = {}  # an ordered set
        for path in paths:
            for row in read_rows(path):
                case = f"{row['suite']}/{row['case']}" if by_suite else row["case"]
                names = ("provider", "mode", "metric", "unit")
                key = (case, *(row.get(name) or "" for name in names))
                if key in self._rows:
                    raise ValueError(f"{path.name} must have each figure once, got {key} twice")
                self._rows[key] = Decimal(row["median"]), row.get("note") or ""
                self._labels.setdefault(case, row)
                if not row["gpu"]:  # figures of the paper
                    continue
                self._stamps[_stamp(row)] = None
                if row["unit"] in SCORES:  # independent of the GPU
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
        """All cases, in the order of the files."""
        return [*self._labels]

    def batch(self, case: str) -> str:
        """Return the number of samples per step and rank; a dash if it is unknown."""
        batch = self._labels.get(case, {}).get("batch")
        return f"{int(batch):,}" if batch else "–"

    def gpu(self, case: str) -> str:
        """Return the GPU of a case, or an empty string if all cases have the same GPU."""
        several = len({*self._gpus.values()}) > 1
        return self._gpus.get(case, "") if several else ""

    def stamps(self) -> str:
        """Return hardware, versions and dates of the figures."""
        return "; ".join(self._stamps)

    def note(self, query: FigureQuery) -> str:
        """Return the note on a figure, or the reason why it is missing, or an empty string."""
        call = (query.case, query.provider, query.mode)
        query = replace(query, unit="ms") if query.unit == "µs" else query
        keys = [
            *((*call, metric, query.unit) for metric in (query.metric, "time")),
            (*call, "refused", ""),
        ]
        note = next((self._rows[key][1] for key in keys if key in self._rows), "")
        if not note and query.metric == "graph_time" and self._recorded(query) is None:
            note = "eager: cannot be captured in a CUDA graph" * (self.find(query) is not None)
        is_out_of_memory = any(words in note.lower() for words in OUT_OF_MEMORY_ERRORS)
        return OUT_OF_MEMORY if is_out_of_memory else note

    def find(self, query: FigureQuery) -> Decimal | None:
        """Return a recorded or computed figure; ``None`` if it is unknown."""
        if query.unit == "µs":
            found = self.find(replace(query, unit="ms"))
            return None if found is None else found.scaleb(3)
        found = self._recorded(query)
        if found is None and query.metric == "graph_time":  # calls that cannot be captured
            found = self._recorded(replace(query, metric="time"))
        return found

    def best(self, query: FigureQuery) -> str:
        """Return the provider with the smallest figure of the group ``query.provider``."""
        members = self._members(query)
        return min(members, key=members.__getitem__)

    def _members(self, query: FigureQuery) -> dict[str, Decimal]:
        """Return the figures of a group of providers."""
        names = [x for x in self.providers if x not in GROUPS and GROUPS[query.provider](x)]
        figures = {name: self._recorded(replace(query, provider=name)) for name in names}
        return {name: figure for name, figure in figures.items() if figure is not None}

    def _recorded(self, query: FigureQuery) -> Decimal | None:
        """Return a figure of exactly this metric, or a ratio of such figures."""
        key = (query.case, query.provider, query.mode, query.metric, query.unit)
        if key in self._rows:
            return self._rows[key][0]
        if query.provider in GROUPS and query.unit != "saved":
            return min(self._members(query).values(), default=None)
        if (query.metric, query.unit) == ("memory", "MiB"):
            parts = [self._recorded(replace(query, metric=x)) for x in ("operands", "peak_memory")]
            return None if None in parts else sum(parts)
        measured = replace(query, unit=METRICS.get(query.metric, "ms"))
        if query.unit == "of floor":
            floor = replace(query, provider="floor", metric="time", unit="ms")
            return _ratio(self._recorded(floor), self._recorded(measured))
        ours = replace(measured, provider=self.ours)
        if query.unit == "× ours":
            return _ratio(self._recorded(measured), self._recorded(ours))
        if query.unit == "saved":
            ratio = _ratio(self._recorded(ours), self._recorded(measured))
            return None if ratio is None else 1 - ratio
        return None


def _stamp(row: dict[str, str]) -> str:
    """Return hardware, versions and date of a row."""
    names = ("torch", "triton", "torchrec", "fbgemm")
    versions = [f"{name} {row[name]}" for name in names if row.get(name)]
    return ", ".join([row["gpu"], *versions, row["date"].partition("T")[0]])


def _ratio(above: Decimal | None, below: Decimal | None) -> Decimal | None:
    """Return a ratio; ``None`` if a figure is unknown."""
    return None if above is None or below is None else above / below


def shown(value: Decimal | None, unit: str) -> str:
    """Format a figure with up to 3 digits, a score with up to 4 decimals, ``None`` as a dash."""
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
