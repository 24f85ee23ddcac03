"""Hooks of MkDocs that build the site.

- A file of the repository outside `docs/` that a page links to becomes a page under `repository/`,
  so that links work both on a code host and on the site.
- A page that loads something from another host is an error.
"""

import json
import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
OUTSIDE = "repository"
"""Folder of the site for files outside `docs/`."""
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]+)")
REMOTE = re.compile(r"""<(?:script|img|iframe|source)\b[^>]*\ssrc=["']?(?:https?:)?//""")
REMOTE_STYLE = re.compile(
    r"""<link\b[^>]*rel=["']?(?:stylesheet|preload|preconnect)[^>]*href=["']?(?:https?:)?//"""
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside `docs/` that pages, and these files in turn, link to."""
    in_nav = {source_of(page) for page in re.findall(rf"{OUTSIDE}/[\w./-]+", str(config.nav))}
    pending = [*in_nav, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    seen = set()
    while pending:
        path = pending.pop()
        if path in seen:
            continue
        seen.add(path)
        text = as_markdown(ROOT / path)
        if not path.startswith("docs/"):
            level = InclusionLevel.INCLUDED if path in in_nav else InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, page_of(path), content=text, inclusion=level))
        if path.endswith(".md"):
            linked = (resolve(path, link) for link in LINK.findall(text))
            pending += [to for to in linked if to and (to.endswith(".md") or not in_docs(to))]
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Turn links of the repository into links of the site."""
    source, folder = source_of(page.file.src_uri), PurePosixPath(page.file.src_uri).parent

    def rewritten(match: re.Match[str]) -> str:
        to = resolve(source, match[1])
        return match[1] if to is None else relpath(page_of(to), folder)

    return LINK.sub(rewritten, markdown) if source.endswith(".md") else markdown


def on_post_page(output: str, page: Page, **_: object) -> None:
    """Raise an error if the page would load something from another host."""
    for pattern in (REMOTE, REMOTE_STYLE):
        if found := pattern.search(output):
            raise PluginError(f"{page.file.src_uri} must load nothing remote, got {found[0]}")


def in_docs(path: str) -> bool:
    return path.startswith("docs/")


def page_of(path: str) -> str:
    """Return the path in the site of a page or file of the repository."""
    if in_docs(path):
        return path.removeprefix("docs/")
    return f"{OUTSIDE}/{path}" if path.endswith(".md") else f"{OUTSIDE}/{path}.md"


def source_of(page: str) -> str:
    """Return the path in the repository of a page or file of the site."""
    if not page.startswith(f"{OUTSIDE}/"):
        return f"docs/{page}"
    path = page.removeprefix(f"{OUTSIDE}/")
    return path if (ROOT / path).is_file() else path.removesuffix(".md")


def resolve(source: str, link: str) -> str | None:
    """Return the path in the repository of the target of `link` in `source`, if it is a file."""
    path = normpath(PurePosixPath(source).parent / link)
    return path if not path.startswith("..") and (ROOT / path).is_file() else None


def as_markdown(path: Path) -> str:
    """Return a file as Markdown: a notebook as its cells, other text as a code block."""
    text = path.read_text()
    if path.suffix == ".md":
        return text
    title = f"# {path.relative_to(ROOT)}\n\n"
    if path.suffix == ".ipynb":
        return title + "\n\n".join(notebook_blocks(json.loads(text)["cells"]))
    language = {".py": "python", ".json": "json", ".toml": "toml"}.get(path.suffix, "text")
    return f"{title}````{language}\n{text}\n````\n"


def notebook_blocks(cells: list[dict]) -> list[str]:
    """Return the cells of a notebook, with their output."""
    blocks = []
    for cell in cells:
        source = "".join(cell["source"])
        blocks.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                image = "".join(data["image/png"]).replace("\n", "")
                blocks.append(f'<img alt="output of the cell" src="data:image/png;base64,{image}">')
            elif text := output.get("text") or data.get("text/plain"):
                blocks.append(f"```text\n{''.join(text).rstrip()}\n```")
    return blocks
