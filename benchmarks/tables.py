"""Write the tables of the docs from the figures under ``results/`` and from the rules of the paths.

    python benchmarks/tables.py            # rewrite every table
    python benchmarks/tables.py --check    # change nothing; exit with 1 if a table is stale

A document marks the place of a table by two comments, ``<!-- table: NAME -->`` and
``<!-- end of table -->``. NAME is one of TABLES, or, for the table of which path takes a call, a
module of the package that defines ``PATHS``.

A file under ``results/`` is what ``run.py --csv`` writes, or a part of it: the columns ``suite``,
``case``, ``provider``, ``mode``, ``metric``, ``median`` and ``unit``, then what was measured, on
what, and when. Where only a ratio was kept, its row has the unit ``× ours`` (a provider's figure
over ours), ``of floor`` (the floor's time over a provider's) or ``saved`` (one less ours over a
provider's). From a run, which has times and memory, the same ratios are computed.
"""

import argparse
import csv
import importlib
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout, whatever is installed

from table_specs import TABLES, Cell, Table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
PACKAGE = "torchrec_jagged_attn"
BLOCK = re.compile(r"(<!-- table: (?P<name>\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
# Providers of which a table shows the fastest, or the one that takes least memory.
GROUPS: dict[str, Callable[[str], bool]] = {
    "best-peer": lambda provider: not provider.startswith(("ours", "floor")),
    "dense-flash": lambda provider: provider in ("padded-flash", "full-flash"),
    "fbgemm": lambda provider: provider.startswith("fbgemm-"),
}


class Figures:
    """The figures of some files, as they were written: a figure keeps its number of digits.

    Args:
        paths: CSV files.
        ours: the provider that ratios are to.

    Raises:
        ValueError: a figure is there twice.
    """

    def __init__(self, paths: Sequence[Path], ours: str) -> None:
        self.ours = ours
        self._rows: dict[tuple[str, ...], tuple[Decimal, str]] = {}
        self._stamps: dict[str, None] = {}  # in their order
        for path in paths:
            with path.open(newline="") as file:
                for row in csv.DictReader(file):
                    names = ("case", "provider", "mode", "metric", "unit")
                    key = tuple(row[name] for name in names)
                    if key in self._rows:
                        raise ValueError(f"{path.name} must have each figure once, got {key} twice")
                    self._rows[key] = Decimal(row["median"]), row.get("note") or ""
                    if row["gpu"]:  # not the paper's
                        self._stamps[_stamp(row)] = None

    def note(self, case: str, cell: Cell) -> str:
        """What is said of a figure; nothing of most."""
        clocks = dict.fromkeys((cell.metric, "time"))
        keys = [(case, cell.provider, cell.mode, metric, cell.unit) for metric in clocks]
        return next((self._rows[key][1] for key in keys if key in self._rows), "")

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
        absolute = "MiB" if metric in ("memory", "peak_memory") else "ms"
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


def _ratio(above: Decimal | None, below: Decimal | None) -> Decimal | None:
    return None if above is None or below is None else above / below


def shown(value: Decimal | None, unit: str) -> str:
    """A figure of three digits, or of fewer where no more were written, and a dash for none."""
    if value is None:
        return "–"
    percent = unit in ("of floor", "saved")
    value = value.scaleb({"µs": 3, "of floor": 2, "saved": 2}.get(unit, 0))
    decimals = 0 if percent else max(0, 2 - value.adjusted())
    if -value.as_tuple().exponent > decimals:
        value = round(value, decimals)
    return f"{value:,f} %" if percent else f"{value:,f}"


def figures_table(table: Table, results: Path = RESULTS) -> str:
    """The lines of one of TABLES; below, notes on its figures, and on what they were measured."""
    figures = Figures([results / f"{name}.csv" for name in table.results], table.ours)
    notes: dict[str, str] = {}
    rows = []
    for label, key in table.rows.items():
        cells = [label]
        for column in table.columns:
            case = column.case.format(key)
            values, marks = [], set()
            for cell in column.cells:
                text = shown(figures.find(case, cell.in_units_of_csv()), cell.unit)
                if cell.named and text != "–":
                    text += f" ({table.names[figures.best(case, cell)]})"
                values.append(text)
                note = figures.note(case, cell.in_units_of_csv())
                if note:
                    mark = str(len(notes) + 1).translate(SUPERSCRIPTS)
                    marks.add(notes.setdefault(note, mark))
            mark = "".join(f" {mark}" for mark in sorted(marks))
            known = set(values) != {"–"}
            cells.append(column.template.format(*values) + mark if known else "–")
        rows.append(" | ".join(cells))
    heads = [table.heads, *(column.head for column in table.columns)]
    below = [f"{mark} {note}." for note, mark in notes.items()]
    files = ", ".join(f"`{name}.csv`" for name in table.results)
    return _markdown(heads, rows, [*below, f"From {files}: {figures.stamps()}."])


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


def _markdown(heads: list[str], rows: list[str], below: list[str]) -> str:
    """A table, and paragraphs below it."""
    head = " | ".join(heads)
    rule = "|".join("---" for _ in head.split(" | "))
    lines = [f"| {head} |", f"|{rule}|", *(f"| {row} |" for row in rows)]
    for paragraph in below:
        lines += ["", *textwrap.wrap(paragraph, 104, break_on_hyphens=False)]
    return "\n".join(lines)


def rewritten(text: str) -> str:
    """A document with its tables made anew."""

    def block(match: re.Match) -> str:
        name = match["name"]
        made = figures_table(TABLES[name]) if name in TABLES else paths_table(name)
        return f"{match[1]}{made}\n{match[3]}"

    return BLOCK.sub(block, text)


def main(argv: list[str] | None = None, documents: Sequence[Path] = DOCUMENTS) -> int:
    """Rewrite the tables of ``documents``, or check them; 1 if one of those checked is stale."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 if a table is stale")
    args = parser.parse_args(argv)
    stale = []
    for path in documents:
        text = path.read_text()
        new = rewritten(text)
        if new != text:
            stale.append(path)
            if not args.check:
                path.write_text(new)
    for path in stale:
        print(f"{path.name}: {'stale; run python benchmarks/tables.py' if args.check else 'new'}")
    return int(args.check and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
