"""The pages: their code runs from top to bottom, and their links and anchors exist."""

import re
from pathlib import Path

import pytest

from fused_remat.execution.choose import BACKENDS
from fused_remat.formats import FORMATS
from fused_remat.huggingface.rows import ARCHITECTURES
from fused_remat.policies import ALL_PRESETS, PRESETS
from fused_remat.steps.activation import ACTIVATIONS
from fused_remat.steps.norm import NORMS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("examples/**/*.md")])
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
RUN = (
    "README.md",
    "docs/index.md",
    "docs/guide.md",
    "docs/compression.md",
    "docs/lora.md",
    "docs/scale.md",
    "docs/write_your_own.md",
)


def blocks(page):
    """Each python block of a page, padded so that a traceback gives the page's own line."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for match in re.finditer(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        yield "\n" * text[: match.start(1)].count("\n") + match.group(1)


@pytest.fixture
def tables():
    """The registries that a page may add rows to, put back afterwards."""
    registries = [ACTIVATIONS, ARCHITECTURES, BACKENDS, FORMATS, NORMS, PRESETS, ALL_PRESETS]
    registries += ALL_PRESETS.values()
    before = [dict(table) for table in registries]
    yield
    for table, rows in zip(registries, before, strict=True):
        table.clear()
        table.update(rows)


@pytest.mark.parametrize("page", RUN)
def test_the_code_of_a_page_runs(page, tables):
    found = list(blocks(page))
    assert found
    names = {"__name__": "__page__"}
    for source in found:
        exec(compile(source, page, "exec"), names)


def test_every_page_with_code_is_run():
    with_code = {str(p.relative_to(ROOT)) for p in PAGES if any(blocks(p.relative_to(ROOT)))}
    assert with_code - {"CONTRIBUTING.md"} == set(RUN)  # CONTRIBUTING.md: test_contributing.py


def test_pages_are_merged():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert not re.search("^(<{7}|>{7})", text, flags=re.MULTILINE), f"a conflict in {page}"


def links(page):
    """Targets of a page's links and pictures that are not on another server."""
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))
    found = re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"", text)
    return [t for pair in found for t in pair if t and not re.match(r"\w+:", t)]


def anchors(page):
    """The anchors of a page's headings, as GitHub and the site make them."""
    found = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in found]
    return {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    dead = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        wanted = "" if target.suffix == ".svg" else anchor  # of a picture: for which theme it is
        if not target.exists() or (wanted and wanted not in anchors(target)):
            dead.append(link)
    assert not dead


def test_how_it_works_names_what_exists():
    text = (ROOT / "docs/how-it-works.md").read_text(encoding="utf-8")
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
    dead = set()
    for file in [p for room in ("fused_remat", "kernels", "bench", "tests", "examples")
                 for p in (ROOT / room).rglob("*.py")]:  # fmt: skip
        for page in re.findall(r"docs/[\w/-]+\.md", file.read_text(encoding="utf-8")):
            if not (ROOT / page).exists():
                dead.add((str(file.relative_to(ROOT)), page))
    assert not dead
