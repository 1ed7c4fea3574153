"""Docstrings, comments, messages and pages have no retired words, and docstrings pass ruff.

`english.tsv` lists files that still have retired words, with the number of hits; `pyproject.toml`
those that ruff does not check. Both may only shrink: `python tests/house/test_english.py --write`.
"""

import ast
import csv
import io
import json
import re
import shutil
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIST, PROJECT = Path(__file__).with_name("english.tsv"), ROOT / "pyproject.toml"
RUFF = shutil.which("ruff", path=Path(sys.executable).parent) or shutil.which("ruff")
RULES = ("D205", "D401", "D403", "D415")
#: Retired words, or the phrases in which they have their retired meaning, and what replaces them.
RETIRED = {
    r"pieces?": "chunk, submodule, part",
    r"(has|have|is|as|by|without|with) (a|no|its own) rows?(?! of)|row of `[A-Z_]+`": "entry",
    r"says?|said|tells?|told": "describes, reports, warns",
    r"(is|are|was|were|if) given|given (it|them|anew|to it)|mine": "receives, passed",
    r"(is|are|was|were) left (out|as|to|alone|in)": "not converted, remains",
    r"(a|the|as a) whole|wholly|whole (layer|model|tensor|matri|batch|logit)\w*": "entire, full",
    r"what is there|(is|are) there (for|already|by|before)": "exists, is present",
    r"ask(s|ed|ing)? for|asked|wants?|wanted": "requires, requested",
    r"serves?|served|serving": "supports, applies",
    r"rungs?|rooms|room of|walks?|the house|ways of training": "preset, package, call path, method",
    r"twice(?! as)|once more|anew|alike|besides": "duplicated, again, equal, also",
    r"beside": "compared with, next to",
    r"(in|at|from) (the|its|their) places?|places? where": "position, instead of",
    r"behaviours?|colours?|neighbours?|honours?|honoured|labelled|modelled"
    r"|(initial|optim|normal|quant|recogn|special|general|real|organ|minim|maxim|local)is(e|ed|es"
    r"|ing|ation|er)": "American spelling",
}
WORDS = re.compile("|".join(rf"\b(?:{words})\b" for words in RETIRED), re.IGNORECASE)
#: Code in text: fences, examples, spans, link targets and HTML.
CODE = re.compile(r"```.*?```|^ *(>>>|\.\.\.) .*?$|`[^`\n]*`|\]\([^)]*\)|<[^>]*>", re.DOTALL | re.M)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def files() -> list[Path]:
    folders = ("fused_remat", "kernels", "bench", "tests", "examples")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    skipped = ("docs/tables/", "fused_remat/kernels/", "tests/house/test_english.py")
    return [p for p in (*sources, *pages) if not name_of(p).startswith(skipped)]


def prose(path: Path) -> list[str]:
    """Return the docstrings, comments and messages of a source; the text of a page."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return [text]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = [token.string for token in tokens if token.type == tokenize.COMMENT]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(ast.get_docstring(node) or "")
        called = getattr(node, "func", None)
        warns = getattr(called, "id", getattr(called, "attr", "")) in ("warn", "warning_once")
        if isinstance(node, ast.Raise) or warns:
            parts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
            found += [part for part in parts if isinstance(part, str)]
    return found


def hits(path: Path) -> list[str]:
    return [word.group() for text in prose(path) for word in WORDS.finditer(CODE.sub(" ", text))]


def unchecked() -> list[str]:
    """Return the files in which ruff finds docstrings that break `RULES`."""
    command = [RUFF, "check", "--isolated", "--select", ",".join(RULES), "--output-format=json"]
    run = subprocess.run([*command, "."], cwd=ROOT, capture_output=True, text=True, check=False)
    return sorted({name_of(Path(entry["filename"])) for entry in json.loads(run.stdout)})


def listed() -> list[str]:
    """Return the files that `pyproject.toml` excepts from `RULES`."""
    return re.findall(r'^"(\S+)" = \["D"\]$', PROJECT.read_text(encoding="utf-8"), re.MULTILINE)


def write() -> None:
    counts = {name_of(path): len(hits(path)) for path in files()}
    lines = [f"{name}\t{count}\n" for name, count in sorted(counts.items()) if count]
    LIST.write_text("file\thits\n" + "".join(lines), encoding="utf-8")
    text = re.sub(r'^"\S+" = \["D"\]\n', "", PROJECT.read_text(encoding="utf-8"), flags=re.M)
    entries = "".join(f'"{name}" = ["D"]\n' for name in unchecked())
    head = "[tool.ruff.lint.per-file-ignores]\n"
    PROJECT.write_text(text.replace(head, head + entries), encoding="utf-8")


def test_no_file_has_more_retired_words_than_listed():
    with LIST.open(newline="", encoding="utf-8") as file:
        allowed = {row["file"]: int(row["hits"]) for row in csv.DictReader(file, delimiter="\t")}
    found = {name_of(path): hits(path) for path in files()}
    more = {name: words for name, words in found.items() if len(words) > allowed.get(name, 0)}
    assert not more, f"rewrite; instead of these words: {RETIRED}"
    fewer = {name for name, count in allowed.items() if len(found.get(name, ())) < count}
    assert not fewer, "good: now lower the list, python tests/house/test_english.py --write"


@pytest.mark.skipif(RUFF is None, reason="ruff is not installed")
def test_docstrings_that_ruff_does_not_check_are_listed():
    assert sorted(listed()) == unchecked(), "python tests/house/test_english.py --write"


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    write()
