"""Docstrings as Markdown: their roles become links, and their formulas MathML.

Browsers draw MathML themselves, so the site needs no script for formulas.
"""

import re
from pathlib import Path

from griffe import Docstring, Extension, Object
from latex2mathml.converter import convert

BLOCK = re.compile(r"^( *)\.\. math:: *(.*(?:\n\1 +\S.*)*)", re.MULTILINE)
INLINE = re.compile(r":math:`([^`]+)`")
ROLE = re.compile(r":(?:func|class|meth):`([^`]+)`")
PAGES = Path(__file__).parents[1] / "api"
PATHS = {
    path.rpartition(".")[2]: path
    for page in PAGES.glob("*.md")
    for path in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)
}
"""Where the reference has each object, by its name."""


class Readable(Extension):
    """Rewrites each docstring before it is parsed."""

    def on_object(self, *, obj: Object, **_: object) -> None:
        if isinstance(obj.docstring, Docstring):
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    text = BLOCK.sub(lambda m: f"{m[1]}<div>{block(m[2])}</div>", text)
    text = INLINE.sub(lambda m: formula(m[1], "inline"), text)
    text = ROLE.sub(lambda m: f"[`{m[1]}`][{path_of(m[1])}]", text)
    return re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.MULTILINE)


def path_of(name: str) -> str:
    """The dotted path of an object, or of a method of one."""
    first, dot, method = name.partition(".")
    return f"{PATHS.get(first, first)}{dot}{method}"


def block(latex: str) -> str:
    """A formula on lines of its own: one for each part between wide spaces."""
    return "".join(formula(part, "block") for part in latex.split(r"\qquad"))


def formula(latex: str, display: str) -> str:
    """One line of MathML."""
    return convert(" ".join(latex.split()), display=display).replace("\n", "")
