"""Write the tables of the docs from the figures under ``results/`` and from the rules of the paths.

    python benchmarks/tables.py            # rewrite every table
    python benchmarks/tables.py --check    # change nothing; exit with 1 if a table is stale

A document marks the place of a table by two comments, ``<!-- table: NAME -->`` and
``<!-- end of table -->``. NAME is one of TABLES or of GOALS; or ``absorbed_or_explicit``; or, for
the table of which path takes a call, a module of the package that defines ``PATHS``. While a file
of its figures is not there, the place says so. Rows and columns of which nothing is known are left
out.

A file under ``results/`` is what ``run.py --csv`` writes, or a part of it: the columns ``suite``,
``case``, ``provider``, ``mode``, ``metric``, ``median`` and ``unit``, then what was measured, on
what, and when. Where only a ratio was kept, its row has the unit ``× ours`` (a provider's figure
over ours), ``of floor`` (the floor's time over a provider's) or ``saved`` (one less ours over a
provider's). From a run, which has times and memory, the same ratios are computed. A provider that
was refused has a row of the metric ``refused``, which says why in its ``note``. The trainings of
``quality.py --csv`` become such rows, too.
"""

import argparse
import csv
import importlib
import itertools
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pandas as pd
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout, whatever is installed

from model_specs import GOALS, MODEL_TABLES, Goals
from quality_results import figure_rows, ways_rows
from table_specs import OP_TABLES, Cell, Table

from torchrec_jagged_attn.arguments import MultiHeadArguments
from torchrec_jagged_attn.ops import multi_head_target_attention

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = (
    *(ROOT / "README.md", ROOT / "benchmarks" / "TABLES.md"),
    *sorted((ROOT / "docs").rglob("*.md")),
)
PACKAGE = "torchrec_jagged_attn"
LACKS_MEMORY = ("out of memory", "alloc_failed")  # in what CUDA and its libraries raise
NO_MEMORY = "out of memory"
UNKNOWN = "Not measured yet."
UNMEASURED = "not measured"
SCORES = ("AUC", "HR@10", "NE", "nats")
TABLES = MODEL_TABLES | OP_TABLES
SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
# Providers of which a table shows the fastest, or the one that takes least memory.
GROUPS: dict[str, Callable[[str], bool]] = {
    "best-peer": lambda provider: not provider.startswith(("ours", "floor")),
    "dense-flash": lambda provider: provider in ("padded-flash", "full-flash"),
    "fbgemm": lambda provider: provider.startswith("fbgemm-"),
}
CROSSOVERS = {
    "GPU, bf16 and fp16": ("cuda", torch.bfloat16),
    "GPU, fp32": ("cuda", torch.float32),
    "CPU": ("cpu", torch.float32),
}


ABSOLUTE = {
    "memory": "MiB",
    "peak_memory": "MiB",
    "footprint": "KiB",
    "throughput": "samples/s",
    "training": "samples/s",
    "inference": "samples/s",
}
"""Units of what ratios are computed from, where it is not a time."""


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
            ``table1/jagged_softmax-paper``: suites may have a case, and its floor, of one name.

    Raises:
        ValueError: a figure is there twice, or those of a case are of several kinds of GPU, scores
            of a model aside.
    """

    def __init__(self, paths: Sequence[Path], ours: str, *, by_suite: bool = False) -> None:
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

    def note(self, case: str, cell: Cell) -> str:
        """What is said of a figure, or why there is none; nothing of most."""
        of = (case, cell.provider, cell.mode)
        keys = [(*of, metric, cell.unit) for metric in (cell.metric, "time")]
        notes = (self._rows[key][1] for key in (*keys, (*of, "refused", "")) if key in self._rows)
        return _in_words(next(notes, ""))

    def find(self, case: str, cell: Cell) -> Decimal | None:
        """A figure as it was written, or computed from others; ``None`` if it is not known."""
        of = (case, cell.provider, cell.mode)
        found = self._recorded(*of, cell.metric, cell.unit)
        if found is None and cell.metric == "graph_time":  # of calls that no graph captures
            found = self._recorded(*of, "time", cell.unit)
        return found

    def best(self, case: str, cell: Cell) -> str:
        """The provider of the group ``cell.provider`` whose figure is the least."""
        of_members = {
            member: self._recorded(case, member, cell.mode, cell.metric, cell.unit)
            for member in self._members(cell.provider)
        }
        known = {member: value for member, value in of_members.items() if value is not None}
        return min(known, key=known.__getitem__)

    def stamps(self) -> str:
        """On what and when the figures were measured."""
        return "; ".join(self._stamps)

    def _members(self, group: str) -> list[str]:
        """The providers of a group that have figures."""
        providers = dict.fromkeys(provider for _, provider, *_ in self._rows)
        return [name for name in providers if name not in GROUPS and GROUPS[group](name)]

    def _recorded(
        self, case: str, provider: str, mode: str, metric: str, unit: str
    ) -> Decimal | None:
        """A figure of exactly this metric."""
        key = (case, provider, mode, metric, unit)
        if key in self._rows:
            return self._rows[key][0]

        def of(provider: str, metric: str, unit: str) -> Decimal | None:
            return self._recorded(case, provider, mode, metric, unit)

        if provider in GROUPS and unit != "saved":
            figures = (of(member, metric, unit) for member in self._members(provider))
            return min((x for x in figures if x is not None), default=None)
        if (metric, unit) == ("memory", "MiB"):
            parts = [of(provider, part, unit) for part in ("operands", "peak_memory")]
            return None if None in parts else sum(parts)
        absolute = ABSOLUTE.get(metric, "ms")
        if unit == "of floor":
            return _ratio(of("floor", "time", "ms"), of(provider, metric, "ms"))
        if unit == "× ours":
            return _ratio(of(provider, metric, absolute), of(self.ours, metric, absolute))
        if unit == "saved":
            ratio = _ratio(of(self.ours, metric, absolute), of(provider, metric, absolute))
            return None if ratio is None else 1 - ratio
        return None


def _stamp(row: dict[str, str]) -> str:
    """What was measured on, its versions, and when."""
    names = ("torch", "triton", "torchrec", "fbgemm")
    versions = [f"{name} {row[name]}" for name in names if row.get(name)]
    return ", ".join([row["gpu"], *versions, row["date"].partition("T")[0]])


def _in_words(note: str) -> str:
    """A note without what varies from one to the next: the size that was tried, and the bytes."""
    size, reason = re.fullmatch(r"(\d+: )?(.*)", note, re.DOTALL).groups()
    if any(words in reason.lower() for words in LACKS_MEMORY):
        reason = NO_MEMORY + "; not bisected" * reason.endswith("; not bisected")
    return f"the next larger size: {reason}" if size else reason


def _ratio(above: Decimal | None, below: Decimal | None) -> Decimal | None:
    return None if above is None or below is None else above / below


def shown(value: Decimal | None, unit: str) -> str:
    """A figure of three digits, a score of four decimals, or fewer where no more were written; a
    dash for none.
    """
    if value is None:
        return "–"
    percent = unit in ("of floor", "saved")
    value = value.scaleb({"µs": 3, "of floor": 2, "saved": 2}.get(unit, 0))
    decimals = 0 if percent else max(0, 2 - value.adjusted())
    if unit in SCORES:
        decimals = 4
    if -value.as_tuple().exponent > decimals:
        value = round(value, decimals)
    return f"{value:,f} %" if percent else f"{value:,f}"


def figures_table(table: Table, results: Path = RESULTS) -> str:
    """The lines of one of TABLES; below, notes on its figures, and on what they were measured.

    No lines while a file is not there, or none of its figures.
    """
    if not are_there(table.results, results):
        return ""
    figures = Figures(files_of(table.results, results), table.ours)
    notes: dict[str, str] = {}
    rows: list[list[str]] = []
    for label, key in table.rows.items():
        cells = []
        for column in table.columns:
            case = column.case.format(key)
            values, marks = [], set()
            for cell in column.cells:
                cell = replace(cell, provider=cell.provider.format(key))
                text = shown(figures.find(case, cell.in_units_of_csv()), cell.unit)
                if cell.named and text != "–":
                    text += f" ({table.names[figures.best(case, cell)]})"
                values.append(text)
                note = figures.note(case, cell.in_units_of_csv())
                if note:
                    mark = str(len(notes) + 1).translate(SUPERSCRIPTS)
                    marks.add(notes.setdefault(note, mark))
            mark = "".join(f" {mark}" for mark in sorted(marks))
            cells.append(_filled(column.template, values) + mark)
        if set(cells) != {"–"}:
            rows.append([label, *cells])
    if not rows:
        return ""
    known = [{row[i] for row in rows} != {"–"} for i in range(len(table.columns) + 1)]
    heads = [table.heads]
    for column in table.columns:
        batch, gpu = figures.batch(column.case), figures.gpu(column.case)
        heads.append(column.head.format(batch=batch, gpu=f", {gpu}" * bool(gpu)))
    lines = [" | ".join(itertools.compress(row, known)) for row in rows]
    below = [f"{mark} {note}." for note, mark in notes.items()]
    below.append(_source(table.results, figures))
    return _markdown([*itertools.compress(heads, known)], lines, below)


def goals_table(goals: Goals, results: Path = RESULTS) -> str:
    """The lines of one of GOALS: what was aimed at, and whether it was met; as above."""
    if not are_there(goals.results, results):
        return ""
    figures = Figures(files_of(goals.results, results), "ours")
    rows = []
    for goal in goals.goals:
        ratio = _ratio(figures.find(*goal.above), figures.find(*goal.below))
        bound, failure = Decimal(goal.bound), figures.note(*goal.below)
        measured, verdict = shown(ratio, ""), UNMEASURED
        if ratio is not None and figures.gpu(goal.above[0]) != figures.gpu(goal.below[0]):
            measured, verdict = shown(None, ""), "not measured on one kind of GPU"
        elif ratio is not None:
            verdict = "yes" if (ratio <= bound if goal.at_most else ratio >= bound) else "no"
        elif failure == NO_MEMORY and not goal.at_most:
            measured, verdict = f"the peer is {NO_MEMORY}", "yes"
        aim = f"at {'most' if goal.at_most else 'least'} {bound}"
        rows.append(" | ".join([goal.what, aim, measured, verdict]))
    if all(row.endswith(UNMEASURED) for row in rows):
        return ""
    heads = ["what", "aim", "measured", "met"]
    return _markdown(heads, rows, [_source(goals.results, figures)])


def paths_table(module: str) -> str:
    """The paths of a module, in the order in which they are asked, where each runs, what it takes.

    What all but the last ask for stands below. ``PATHS`` may also be such lists, by op.
    """
    paths = importlib.import_module(f"{PACKAGE}.{module}").PATHS
    by_op = paths if isinstance(paths, dict) else {"": paths}
    rows, below = [], []
    for op, of_op in by_op.items():
        asked = [[text for text, _ in path.conditions] for path in of_op]
        several = len(of_op) > 2
        common = [text for text in asked[0] if several and all(text in own for own in asked[:-1])]
        for path, texts in zip(of_op, asked, strict=True):
            own = [text for text in texts if text not in common]
            takes = "; ".join([path.samples] * bool(path.samples) + own) or "all else"
            runs_on = "any" if path.runs_on(torch.device("cpu")) else path.device
            rows.append(" | ".join([f"`{op}`"] * bool(op) + [f"`{path.name}`", runs_on, takes]))
        if common:
            below += [f"All but `{of_op[-1].name}` ask for these, too: {'; '.join(common)}."]
    heads = ["op"] * isinstance(paths, dict) + ["path", "GPU", "takes"]
    return _markdown(heads, rows, below)


def crossover_table() -> str:
    """From how many targets on ``"auto"`` makes keys and values, and the constants it goes by."""
    op = multi_head_target_attention
    rows = []
    for label, (kind, dtype) in CROSSOVERS.items():
        key = kind, dtype.itemsize
        cells = [f"{op.FLOPS_PER_ELEMENT[key]}", f"{op.FLOPS_OF_ABSORBED[key]}"]
        for projected in (True, False):
            least = [least_explicit(kind, dtype, heads, projected=projected) for heads in (2, 4, 8)]
            cells.append(", ".join(map(str, least)))
        rows.append(" | ".join([label, *cells]))
    heads = ["on", "`f`", "`a`", "from `T` on, with a value projection", "without"]
    return _markdown(heads, rows, [])


def least_explicit(kind: str, dtype: torch.dtype, num_heads: int, *, projected: bool) -> int:
    """The least number of targets a sample of which keys and values are made, of width 128."""
    with FakeTensorMode():
        weight = torch.empty(128, 128)
        args = MultiHeadArguments(*[None] * len(MultiHeadArguments._fields))._replace(
            history=torch.empty(1, 128, device=kind, dtype=dtype), num_heads=num_heads,
            q_weight=weight, out_weight=weight if projected else None,
            keys_and_values="auto", score="softmax",
        )  # fmt: skip
        return next(
            targets
            for targets in itertools.count(1)
            if multi_head_target_attention.is_explicit(
                args._replace(target=torch.empty(1, targets, 128, device=kind, dtype=dtype))
            )
        )


def files_of(results: Sequence[str], folder: Path = RESULTS) -> list[Path]:
    """Files by their names without ``.csv``."""
    return [folder / f"{name}.csv" for name in results]


def are_there(results: Sequence[str], folder: Path = RESULTS) -> bool:
    """Whether all these files are."""
    return all(path.exists() for path in files_of(results, folder))


def _filled(template: str, values: list[str]) -> str:
    """A cell, without those of its parts, between commas, that name their unit and have no figure.

    A dash if no figure of the cell is known. A mean of one seed has no error, and stands alone.
    """
    if {*values} == {"–"}:
        return "–"
    rest, parts = iter(values), []
    for part in template.split(", "):
        own = [*itertools.islice(rest, part.count("{}"))]
        if {*own} != {"–"} or re.fullmatch(r"[{}() ]+", part):
            parts.append(part.format(*own).removesuffix(" ± –"))
    return ", ".join(parts)


def _source(results: Sequence[str], figures: Figures) -> str:
    files = ", ".join(f"`{name}.csv`" for name in results)
    return f"From {files}: {figures.stamps()}."


def _markdown(heads: list[str], rows: list[str], below: list[str]) -> str:
    """A table, and paragraphs below it."""
    head = " | ".join(heads)
    rule = "|".join("---" for _ in head.split(" | "))
    lines = [f"| {head} |", f"|{rule}|", *(f"| {row} |" for row in rows)]
    for paragraph in below:
        lines += ["", *textwrap.wrap(paragraph, 104, break_on_hyphens=False)]
    return "\n".join(lines)


def table_of(name: str) -> str:
    """The lines of a table, by what its place names."""
    if name in TABLES:
        return figures_table(TABLES[name])
    if name == "absorbed_or_explicit":
        return crossover_table()
    return goals_table(GOALS[name]) if name in GOALS else paths_table(name)


def places(kind: str) -> re.Pattern:
    """Finds the places of tables, or of plots, in a document."""
    return re.compile(rf"(<!-- {kind}: (?P<name>\S+) -->\n).*?(<!-- end of {kind} -->)", re.DOTALL)


def refill(
    documents: Sequence[Path], kind: str, made: Callable[[str, Path], str], *, check: bool
) -> list[Path]:
    """Makes anew what stands in all places of a kind.

    Args:
        made: from the name of a place, and its document, to its lines; none if there are none.
        check: whether nothing is written.

    Returns:
        The documents that were stale.
    """
    stale = []
    for path in documents:

        def place(match: re.Match, path: Path = path) -> str:
            lines = made(match["name"], path)
            return f"{match[1]}{lines}{chr(10) * bool(lines)}{match[3]}"

        text = path.read_text()
        new = places(kind).sub(place, text)
        if new != text:
            stale.append(path)
            if not check:
                path.write_text(new)
    return stale


def say(stale: Sequence[Path], command: str, *, check: bool) -> int:
    """Names the files that were stale; 1 if they still are."""
    for path in stale:
        print(f"{path.name}: {f'stale; run python benchmarks/{command}' if check else 'new'}")
    return int(check and bool(stale))


def main(argv: list[str] | None = None, documents: Sequence[Path] = DOCUMENTS) -> int:
    """Rewrite the tables of ``documents``, or check them; 1 if one of those checked is stale."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 if a table is stale")
    check = parser.parse_args(argv).check
    stale = refill(
        documents, "table", lambda name, document: table_of(name) or UNKNOWN, check=check
    )
    return say(stale, "tables.py", check=check)


if __name__ == "__main__":
    raise SystemExit(main())
