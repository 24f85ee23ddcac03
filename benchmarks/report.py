"""Write the tables and draw the plots of the documents.

    python benchmarks/report.py            # all of them
    python benchmarks/report.py --check    # change nothing; exit with 1 if one is stale

A document marks the place of a table by two comments, ``<!-- table: NAME -->`` and ``<!-- end of
table -->``, that of a plot by ``<!-- plot: NAME -->`` and ``<!-- end of plot -->``. A table is one
of TABLES of ``specs.py``, from the figures under ``results/``; or ``absorbed_or_materialized``; or,
for a table of kernel variants, a module of the package that defines ``VARIANTS``. Plots are those
of ``plots.py``. While a file of its figures is not there, the place of a table says so, and that of
a plot stays empty. Rows and columns of which nothing is known are left out.
"""

import argparse
import importlib
import itertools
import os
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout, whatever is installed

import plots
from figures import RESULTS, Figures, files_of, parsed, shown
from specs import TABLES, Table

from torchrec_jagged_attn.modules.projections import is_materialized

ROOT = Path(__file__).parents[1]
DOCUMENTS = (
    *(ROOT / "README.md", ROOT / "benchmarks" / "TABLES.md"),
    *sorted((ROOT / "docs").rglob("*.md")),
)
PLOTS = ROOT / "docs" / "plots"
PACKAGE = "torchrec_jagged_attn"
UNKNOWN = "Not measured yet."
SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
CROSSOVERS = {
    "GPU, bf16 and fp16": ("cuda", torch.bfloat16),
    "GPU, fp32": ("cuda", torch.float32),
    "CPU": ("cpu", torch.float32),
}


def columns_of(table: Table) -> list[tuple[str, str]]:
    """Heads and templates."""
    text = re.sub(
        r"\{([^}]*) forward/both\b([^}]*)\}", r"{\1 forward\2} / {\1 both\2}", table.columns
    )
    return [tuple(line.strip().split(" = ")) for line in text.splitlines()]


def figures_table(table: Table, results: Path = RESULTS) -> str:
    """The lines of one of TABLES; below, notes on its figures, and on what they were measured.

    No lines while a file is not there, or none of its figures.
    """
    files = files_of(table.results, results)
    if not all(path.exists() for path in files):
        return ""
    figures = Figures(files, table.ours)
    columns = columns_of(table)
    notes: dict[str, str] = {}
    rows: list[list[str]] = []
    for label, key in table.rows.items():
        cells = []
        for _, template in columns:
            values, marks = [], set()
            for words in re.findall(r"\{([^}]*)\}", template):
                cell = parsed(words, key, table.mode)
                text = shown(figures.find(cell), cell.unit)
                if cell.named and text != "–":
                    text += f" ({table.names[figures.best(cell)]})"
                values.append(text)
                if note := figures.note(cell):
                    mark = str(len(notes) + 1).translate(SUPERSCRIPTS)
                    marks.add(notes.setdefault(note, mark))
            cells.append(" ".join([_filled(template, values), *sorted(marks)]))
        if set(cells) != {"–"}:
            rows.append([label, *cells])
    if not rows:
        return ""
    known = [{row[i] for row in rows} != {"–"} for i in range(len(columns) + 1)]
    heads = [table.heads]
    for head, template in columns:
        case = parsed(re.findall(r"\{([^}]*)\}", template)[0]).case
        gpu = figures.gpu(case)
        heads.append(head.format(batch=figures.batch(case), gpu=f", {gpu}" * bool(gpu)))
    lines = [" | ".join(itertools.compress(row, known)) for row in rows]
    below = [f"{mark} {note}." for note, mark in notes.items()]
    names = ", ".join(f"`{path.name}`" for path in files)
    below.append(f"From {names}: {figures.stamps()}.")
    return _markdown([*itertools.compress(heads, known)], lines, below)


def _filled(template: str, values: list[str]) -> str:
    """A cell, without those of its parts, between commas, that name their unit and have no figure.

    A dash if no figure of the cell is known. A mean of one seed has no error, and stands alone.
    """
    if {*values} == {"–"}:
        return "–"
    rest, parts = iter(values), []
    for part in template.split(", "):
        words = re.split(r"\{[^}]*\}", part)
        own = [*itertools.islice(rest, len(words) - 1)]
        if {*own} != {"–"} or re.fullmatch(r"[() ]*", "".join(words)):
            text = "".join(itertools.chain(*zip(words, [*own, ""], strict=True)))
            parts.append(text.removesuffix(" ± –"))
    return ", ".join(parts)


def _markdown(heads: list[str], rows: list[str], below: list[str]) -> str:
    """A table, and paragraphs below it."""
    head = " | ".join(heads)
    rule = "|".join("---" for _ in head.split(" | "))
    lines = [f"| {head} |", f"|{rule}|", *(f"| {row} |" for row in rows)]
    for paragraph in below:
        lines += ["", *textwrap.wrap(paragraph, 104, break_on_hyphens=False)]
    return "\n".join(lines)


def variants_table(module: str) -> str:
    """The kernel variants of a module in the order of dispatch, where each runs, for what calls.

    Conditions of all but the last come below. ``VARIANTS`` may also be such lists, by op.
    """
    variants = importlib.import_module(f"{PACKAGE}.ops.{module}").VARIANTS
    by_op = variants if isinstance(variants, dict) else {"": variants}
    rows, below = [], []
    for op, of_op in by_op.items():
        asked = [[text for text, _ in variant.conditions] for variant in of_op]
        several = len(of_op) > 2
        common = [text for text in asked[0] if several and all(text in own for own in asked[:-1])]
        for variant, texts in zip(of_op, asked, strict=True):
            own = [text for text in texts if text not in common]
            takes = "; ".join([variant.samples] * bool(variant.samples) + own) or "all else"
            runs_on = "any" if variant.runs_on(torch.device("cpu")) else variant.device
            rows.append(" | ".join([f"`{op}`"] * bool(op) + [f"`{variant.name}`", runs_on, takes]))
        if common:
            below += [f"All but `{of_op[-1].name}` also require: {'; '.join(common)}."]
    heads = ["op"] * isinstance(variants, dict) + ["variant", "GPU", "calls"]
    return _markdown(heads, rows, below)


def crossover_table() -> str:
    """From how many targets on keys and values are materialized by default."""
    rows = []
    for label, (device, dtype) in CROSSOVERS.items():
        cells = []
        for projected in (True, False):
            least = [
                least_materialized(device, dtype, heads, projected=projected) for heads in (2, 4, 8)
            ]
            cells.append(", ".join(map(str, least)))
        rows.append(" | ".join([label, *cells]))
    return _markdown(["on", "from `T` on, with a value projection", "without"], rows, [])


def least_materialized(device: str, dtype: torch.dtype, num_heads: int, *, projected: bool) -> int:
    """The least number of targets per sample with materialized keys and values, of width 128."""
    with FakeTensorMode():
        history = torch.empty(1, 128, device=device, dtype=dtype)
        offsets = torch.empty(2, device=device, dtype=torch.int64)
    return next(
        targets
        for targets in itertools.count(1)
        if is_materialized(
            [1, targets], history, offsets, False, 128, num_heads, projected, "softmax", 0
        )
    )


def table_of(name: str) -> str:
    """The lines of a table, by what its place names."""
    if name in TABLES:
        return figures_table(TABLES[name])
    return crossover_table() if name == "absorbed_or_materialized" else variants_table(name)


def places(kind: str) -> re.Pattern:
    """Finds the places of tables, or of plots, in a document."""
    return re.compile(rf"(<!-- {kind}: (?P<name>\S+) -->\n).*?(<!-- end of {kind} -->)", re.DOTALL)


def refilled(text: str, kind: str, made: Callable[[str], str]) -> str:
    """A document, all places of a kind made anew: ``made`` gives the lines of a name, or none."""

    def place(match: re.Match) -> str:
        lines = made(match["name"])
        return f"{match[1]}{lines}{chr(10) * bool(lines)}{match[3]}"

    return places(kind).sub(place, text)


def main(
    argv: list[str] | None = None, documents: Sequence[Path] = DOCUMENTS, folder: Path = PLOTS
) -> int:
    """Make tables and plots anew, or check them; 1 if something that is checked is stale."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 if something is stale")
    check = parser.parse_args(argv).check
    new: dict[Path, str] = {}
    there = {plots.name_of(plot): plot for plot in plots.PLOTS if plot.files}
    for name, plot in there.items():
        path = folder / f"{name}.svg"
        if not path.exists() or plots.digest(plot) not in path.read_text():
            new[path] = plots.svg(plot)
    for path in documents:

        def image(name: str, path: Path = path) -> str:
            link = os.path.relpath(folder / f"{name}.svg", path.parent)
            return f"![{there[name].title}]({link})" if name in there else ""

        old = path.read_text()
        text = refilled(old, "table", lambda name: table_of(name) or UNKNOWN)
        text = refilled(text, "plot", image)
        if text != old:
            new[path] = text
    for path, text in new.items():
        print(f"{path.name}: {'stale; run python benchmarks/report.py' if check else 'new'}")
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    return int(check and bool(new))


if __name__ == "__main__":
    raise SystemExit(main())
