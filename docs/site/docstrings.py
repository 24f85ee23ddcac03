"""Docstrings as Markdown: roles become links, and formulas MathML.

Browsers render MathML, so that the site needs no script for formulas.
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
"""Dotted paths of the objects in the API reference, by name."""


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
    """Return the dotted path of an object or method."""
    first, dot, method = name.partition(".")
    return f"{PATHS.get(first, first)}{dot}{method}"


def block(latex: str) -> str:
    """Return a block formula, with a line for each part between wide spaces."""
    return "".join(formula(part, "block") for part in latex.split(r"\qquad"))


def formula(latex: str, display: str) -> str:
    """Return one line of MathML."""
    return convert(" ".join(latex.split()), display=display).replace("\n", "")
