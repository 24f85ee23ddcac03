"""Docstrings as Markdown: their roles become links, and their formulas MathML.

Browsers draw MathML themselves, so the site needs no script for formulas.
"""

import re

from griffe import Docstring, Extension, Object
from latex2mathml.converter import convert

PACKAGE = "torchrec_jagged_attn"
BLOCK = re.compile(r"^( *)\.\. math:: *(.*(?:\n\1 +\S.*)*)", re.MULTILINE)
INLINE = re.compile(r":math:`([^`]+)`")
ROLE = re.compile(r":(?:func|class|meth):`([^`]+)`")
INTERNAL = {"RecencyBias": f"{PACKAGE}.modules.recency_bias.RecencyBias"}
"""What docstrings name and the package does not export."""


class Readable(Extension):
    """Rewrites each docstring before it is parsed."""

    def on_object(self, *, obj: Object, **_: object) -> None:
        if isinstance(obj.docstring, Docstring):
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    text = BLOCK.sub(lambda m: f"{m[1]}<div>{block(m[2])}</div>", text)
    text = INLINE.sub(lambda m: formula(m[1], "inline"), text)
    text = ROLE.sub(lambda m: f"[`{m[1]}`][{INTERNAL.get(m[1], f'{PACKAGE}.{m[1]}')}]", text)
    return re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.MULTILINE)


def block(latex: str) -> str:
    """A formula on lines of its own: one for each part between wide spaces."""
    return "".join(formula(part, "block") for part in latex.split(r"\qquad"))


def formula(latex: str, display: str) -> str:
    """One line of MathML."""
    return convert(" ".join(latex.split()), display=display).replace("\n", "")
