"""What MkDocs does beyond its plugins to make the site.

- A file of the repository outside `docs/` that a page links to becomes a page under `repository/`:
  links work on a code host, and on the site, which needs no other host.
- A page that loads something from another host is an error: the site is whole by itself.
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
"""The folder of the site for what is not in `docs/`."""
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
    source, here = source_of(page.file.src_uri), PurePosixPath(page.file.src_uri).parent

    def rewritten(match: re.Match[str]) -> str:
        to = resolve(source, match[1])
        return match[1] if to is None else relpath(page_of(to), here)

    return LINK.sub(rewritten, markdown) if source.endswith(".md") else markdown


def on_post_page(output: str, page: Page, **_: object) -> None:
    """Refuse what would be loaded from another host."""
    for pattern in (REMOTE, REMOTE_STYLE):
        if found := pattern.search(output):
            raise PluginError(f"{page.file.src_uri} must load nothing remote, got {found[0]}")


def in_docs(path: str) -> bool:
    return path.startswith("docs/")


def page_of(path: str) -> str:
    """The page, or the file, of the site that shows `path` of the repository."""
    if in_docs(path):
        return path.removeprefix("docs/")
    return f"{OUTSIDE}/{path}" if path.endswith(".md") else f"{OUTSIDE}/{path}.md"


def source_of(page: str) -> str:
    """The path in the repository of what a page shows."""
    if not page.startswith(f"{OUTSIDE}/"):
        return f"docs/{page}"
    path = page.removeprefix(f"{OUTSIDE}/")
    return path if (ROOT / path).is_file() else path.removesuffix(".md")


def resolve(source: str, link: str) -> str | None:
    """The path in the repository that `link` of the file `source` leads to, if it is a file."""
    path = normpath(PurePosixPath(source).parent / link)
    return path if not path.startswith("..") and (ROOT / path).is_file() else None


def as_markdown(path: Path) -> str:
    """A file as a page: Markdown as it is, a notebook by its cells, other text as code."""
    text = path.read_text()
    if path.suffix == ".md":
        return text
    title = f"# {path.relative_to(ROOT)}\n\n"
    if path.suffix == ".ipynb":
        return title + "\n\n".join(cell_parts(json.loads(text)["cells"]))
    language = {".py": "python", ".json": "json", ".toml": "toml"}.get(path.suffix, "text")
    return f"{title}````{language}\n{text}\n````\n"


def cell_parts(cells: list[dict]) -> list[str]:
    """The cells of a notebook, with what they print and draw."""
    parts = []
    for cell in cells:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                image = "".join(data["image/png"]).replace("\n", "")
                parts.append(f'<img alt="what the cell draws" src="data:image/png;base64,{image}">')
            elif text := output.get("text") or data.get("text/plain"):
                parts.append(f"```text\n{''.join(text).rstrip()}\n```")
    return parts
