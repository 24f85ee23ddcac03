"""Write the tables and draw the plots of the documents.

    python benchmarks/report.py            # all of them
    python benchmarks/report.py --check    # change nothing; exit with 1 if one is stale

A table is written between the comments ``<!-- table: NAME -->`` and ``<!-- end of table -->`` of a
document, the link of a plot between ``<!-- plot: NAME -->`` and ``<!-- end of plot -->``. NAME is a
key of TABLES in ``specs.py``, ``absorbed_or_materialized``, a module of the package that defines
``VARIANTS``, or a plot of ``plots.py``. If a CSV file is missing, the block of a table says so, and
the block of a plot is empty. Rows and columns without figures are left out.
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
from figures import RESULTS, Figures, parse_query, result_files, shown
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


def parse_columns(table: Table) -> list[tuple[str, str]]:
    """Return heads and templates."""
    text = re.sub(
        r"\{([^}]*) forward/both\b([^}]*)\}", r"{\1 forward\2} / {\1 both\2}", table.columns
    )
    return [tuple(line.strip().split(" = ")) for line in text.splitlines()]


def figures_table(table: Table, results: Path = RESULTS) -> str:
    """Return the lines of a table of TABLES, with notes and the origin of its figures below.

    Empty if a file is missing or has none of the figures.
    """
    files = result_files(table.results, results)
    if not all(path.exists() for path in files):
        return ""
    figures = Figures(files, table.ours)
    columns = parse_columns(table)
    notes: dict[str, str] = {}
    rows: list[list[str]] = []
    for label, key in table.rows.items():
        cells = []
        for _, template in columns:
            values, marks = [], set()
            for words in re.findall(r"\{([^}]*)\}", template):
                query = parse_query(words, key, table.mode)
                text = shown(figures.find(query), query.unit)
                if query.named and text != "–":
                    text += f" ({table.names[figures.best(query)]})"
                values.append(text)
                if note := figures.note(query):
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
        case = parse_query(re.findall(r"\{([^}]*)\}", template)[0]).case
        gpu = figures.gpu(case)
        heads.append(head.format(batch=figures.batch(case), gpu=f", {gpu}" * bool(gpu)))
    lines = [" | ".join(itertools.compress(row, known)) for row in rows]
    below = [f"{mark} {note}." for note, mark in notes.items()]
    names = ", ".join(f"`{path.name}`" for path in files)
    below.append(f"From {names}: {figures.stamps()}.")
    return _markdown([*itertools.compress(heads, known)], lines, below)


def _filled(template: str, values: list[str]) -> str:
    """Fill the template of a table cell; a dash if it has no figures.

    Parts between commas are left out if they have no figures and text other than parentheses.
    Without a standard error, ``±`` is left out.
    """
    if {*values} == {"–"}:
        return "–"
    rest, parts = iter(values), []
    for part in template.split(", "):
        words = re.split(r"\{[^}]*\}", part)
        part_values = [*itertools.islice(rest, len(words) - 1)]
        if {*part_values} != {"–"} or re.fullmatch(r"[() ]*", "".join(words)):
            text = "".join(itertools.chain(*zip(words, [*part_values, ""], strict=True)))
            parts.append(text.removesuffix(" ± –"))
    return ", ".join(parts)


def _markdown(heads: list[str], rows: list[str], below: list[str]) -> str:
    """Return a Markdown table with paragraphs below it."""
    head = " | ".join(heads)
    rule = "|".join("---" for _ in head.split(" | "))
    lines = [f"| {head} |", f"|{rule}|", *(f"| {row} |" for row in rows)]
    for paragraph in below:
        lines += ["", *textwrap.wrap(paragraph, 104, break_on_hyphens=False)]
    return "\n".join(lines)


def variants_table(module: str) -> str:
    """Return a table of the kernel variants of a module in the order of dispatch.

    Common conditions of all but the last variant are below the table. ``VARIANTS`` is a list, or a
    dict of lists by op.
    """
    variants = importlib.import_module(f"{PACKAGE}.ops.{module}").VARIANTS
    by_op = variants if isinstance(variants, dict) else {"": variants}
    rows, below = [], []
    for op, op_variants in by_op.items():
        conditions = [[text for text, _ in variant.conditions] for variant in op_variants]
        common = []
        if len(op_variants) > 2:
            common = [text for text in conditions[0] if all(text in x for x in conditions[:-1])]
        for variant, texts in zip(op_variants, conditions, strict=True):
            texts = [text for text in texts if text not in common]
            calls = "; ".join([variant.samples] * bool(variant.samples) + texts) or "all else"
            runs_on = "any" if variant.runs_on(torch.device("cpu")) else variant.device
            rows.append(" | ".join([f"`{op}`"] * bool(op) + [f"`{variant.name}`", runs_on, calls]))
        if common:
            below += [f"All but `{op_variants[-1].name}` also require: {'; '.join(common)}."]
    heads = ["op"] * isinstance(variants, dict) + ["variant", "GPU", "calls"]
    return _markdown(heads, rows, below)


def crossover_table() -> str:
    """Return a table of the numbers of targets from which keys and values are materialized."""
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
    """Return the smallest number of targets with materialized keys and values, for width 128."""
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


def render_table(name: str) -> str:
    """Return the lines of the table of a block."""
    if name in TABLES:
        return figures_table(TABLES[name])
    return crossover_table() if name == "absorbed_or_materialized" else variants_table(name)


def find_blocks(kind: str) -> re.Pattern:
    """Return a pattern of the blocks of tables, or of plots, in a document."""
    return re.compile(rf"(<!-- {kind}: (?P<name>\S+) -->\n).*?(<!-- end of {kind} -->)", re.DOTALL)


def replace_blocks(text: str, kind: str, made: Callable[[str], str]) -> str:
    """Return a document whose blocks of a kind are replaced by the lines ``made(name)``."""

    def block(match: re.Match) -> str:
        lines = made(match["name"])
        return f"{match[1]}{lines}{chr(10) * bool(lines)}{match[3]}"

    return find_blocks(kind).sub(block, text)


def main(
    argv: list[str] | None = None, documents: Sequence[Path] = DOCUMENTS, folder: Path = PLOTS
) -> int:
    """Write tables and plots, or check them; return 1 if a checked one is stale."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 if something is stale")
    check = parser.parse_args(argv).check
    new: dict[Path, str] = {}
    there = {plots.plot_name(plot): plot for plot in plots.PLOTS if plot.files}
    for name, plot in there.items():
        path = folder / f"{name}.svg"
        if not path.exists() or plots.digest(plot) not in path.read_text():
            new[path] = plots.svg(plot)
    for path in documents:

        def image(name: str, path: Path = path) -> str:
            link = os.path.relpath(folder / f"{name}.svg", path.parent)
            return f"![{there[name].title}]({link})" if name in there else ""

        old = path.read_text()
        text = replace_blocks(old, "table", lambda name: render_table(name) or UNKNOWN)
        text = replace_blocks(text, "plot", image)
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
