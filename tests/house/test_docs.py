"""The pages: their code runs from top to bottom, and what they and the code name exists.

Anchors are checked by the site's build, in `make check`.
"""

import re

import pytest
from processes import ROOT

from bench.pages import command
from fused_remat.execution.choose import BACKENDS
from fused_remat.huggingface.rows import ARCHITECTURES
from fused_remat.policies import EXACT_PRESETS, PRESETS
from fused_remat.steps.activation import ACTIVATIONS
from fused_remat.steps.norm import NORMS

PAGES = {
    str(p.relative_to(ROOT)): p.read_text(encoding="utf-8")
    for p in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
}
PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
#: With code; that of CONTRIBUTING.md: test_contributing.py.
RUN = [page for page, text in PAGES.items() if PYTHON.search(text) and page != "CONTRIBUTING.md"]


@pytest.fixture
def tables():
    """The registries that a page may add rows to, put back afterwards."""
    registries = [ACTIVATIONS, ARCHITECTURES, BACKENDS, NORMS, PRESETS, EXACT_PRESETS]
    registries += EXACT_PRESETS.values()
    before = [dict(table) for table in registries]
    yield
    for table, rows in zip(registries, before, strict=True):
        table.clear()
        table.update(rows)


@pytest.mark.parametrize("page", RUN)
def test_the_code_of_a_page_runs(page, tables):
    names = {"__name__": "__page__"}
    for match in PYTHON.finditer(PAGES[page]):
        above = "\n" * PAGES[page][: match.start(1)].count("\n")  # a traceback has the page's line
        exec(compile(above + match.group(1), page, "exec"), names)


def test_the_pages_that_teach_have_code():
    assert {"README.md", "docs/guide.md", "docs/write_your_own.md"} <= set(RUN)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", PAGES[page], flags=re.DOTALL | re.MULTILINE)
    assert not re.search("^(<{7}|>{7})", text, flags=re.MULTILINE), "a conflict"
    found = re.findall(r"(?:\]\(|(?:src|srcset|href)=\")(?!\w+:|#)([^)\s\"#]+)", text)
    assert not [path for path in found if not (ROOT / page).parent.joinpath(path).exists()]


def test_generated_parts_and_figures_are_up_to_date():
    assert not command.stale_pages(), "run python -m bench report"
    assert not command.stale_files(), "run python -m bench report"


def test_how_it_works_names_what_exists():
    text = PAGES["docs/how-it-works.md"]
    named = re.findall(r"\*\*`([\w/]+\.py)`, `(?:\w+\.)?(\w+)[`(]", text)
    assert len(named) > 10
    for path, name in named:
        file = ROOT / path if path.startswith("kernels/") else ROOT / "fused_remat" / path
        code = file.read_text(encoding="utf-8")
        assert re.search(rf"^ *(def|class) {name}\b", code, re.MULTILINE), f"{name} in {path}"
    for path in re.findall(r"`([\w/]+\.py)`", text):
        found = [ROOT / room / path for room in ("", "fused_remat", "fused_remat/autograd")]
        assert any(file.exists() for file in found), path


def test_what_the_code_says_of_pages_is_there():
    """Docstrings, messages and comments name pages by their path from the root."""
    rooms = ("fused_remat", "kernels", "bench", "tests", "examples")
    files = [file for room in rooms for file in (ROOT / room).rglob("*.py")]
    texts = [file.read_text(encoding="utf-8") for file in files]
    named = {page for text in texts for page in re.findall(r"docs/[\w/-]+\.md", text)}
    assert named and named <= set(PAGES)
