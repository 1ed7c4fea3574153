"""A hook of MkDocs: links from pages to the rest of the repository work on the site too.

Pages link to tests, examples and pictures by relative paths, as GitHub resolves them. On the site a
linked picture is copied, and a linked file becomes a page with its text. `CONTRIBUTING.md`, which
stands above docs/, becomes a page as it is.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

DOCS = Path(__file__).parent
ROOT = DOCS.parent
CONTRIBUTING = "CONTRIBUTING.md"
PICTURES = {".png", ".svg"}
LANGUAGES = {".py": "python", ".toml": "toml", ".txt": "text", "": "text"}
#: A fenced block, or a link with its target and anchor.
LINK = re.compile(
    r"^```.*?^```|(\]\()(?!\w+:)([^)#\s]+)(#[^)\s]*)?(?=\))", re.DOTALL | re.MULTILINE
)


def _path(src_uri: str) -> Path:
    return ROOT / src_uri if src_uri == CONTRIBUTING else DOCS / src_uri


def _uri(path: Path) -> str | None:
    """Where a file of the repository is on the site; None for one that is not there."""
    if not path.is_file():
        return None
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    if name == CONTRIBUTING:
        return name
    uri = name if path.suffix in PICTURES else f"{name}.md"
    return f"repository/{uri}"


def _targets(src_uri: str) -> list[Path]:
    """The files of the repository that a page links to."""
    page = _path(src_uri)
    found = [m for m in LINK.finditer(page.read_text(encoding="utf-8")) if m.group(1)]
    paths = [(page.parent / m.group(2)).resolve() for m in found]
    return [path for path in paths if path.is_relative_to(ROOT)]


def on_files(files: Any, config: Any) -> Any:
    """Add what pages link to outside of docs/."""
    if (ROOT / CONTRIBUTING).exists():
        text = (ROOT / CONTRIBUTING).read_text(encoding="utf-8")
        files.append(File.generated(config, CONTRIBUTING, content=text))
    for page in list(files.documentation_pages()):
        for path in _targets(page.src_uri):
            uri = _uri(path)
            if uri is None or files.get_file_from_path(uri) is not None:
                continue
            if path.suffix in PICTURES:
                files.append(File.generated(config, uri, abs_src_path=str(path)))
            else:
                files.append(File.generated(config, uri, content=_source(path)))
    return files


def _source(path: Path) -> str:
    """A page with a file's text, which the site's search leaves out."""
    text = path.read_text(encoding="utf-8")
    name, language = path.relative_to(ROOT).as_posix(), LANGUAGES.get(path.suffix, "text")
    front = "---\nsearch:\n  exclude: true\nhide:\n  - toc\n---\n"
    return f"{front}# `{name}`\n\n````{language}\n{text}````\n"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links at where their files are on the site; tables inside <details> are Markdown."""
    src_uri = page.file.src_uri
    if src_uri.startswith("repository/"):
        return markdown
    here = posixpath.dirname(src_uri)

    def replace(match: re.Match[str]) -> str:
        if not match.group(1):
            return match.group(0)
        path = (_path(src_uri).parent / match.group(2)).resolve()
        uri = _uri(path) if path.is_relative_to(ROOT) else None
        if uri is None:
            return match.group(0)  # MkDocs reports it
        return f"]({posixpath.relpath(uri, here or '.')}{match.group(3) or ''}"

    return LINK.sub(replace, markdown).replace("<details>", '<details markdown="1">')
