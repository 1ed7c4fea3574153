"""The pages' own code runs, top to bottom."""

import re
from pathlib import Path

import pytest

from fused_remat.policies import EXACT_PRESETS
from fused_remat.steps.activation import ACTIVATIONS

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "docs/compression.md",
    "docs/huggingface.md",
    "docs/lora.md",
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
    before = dict(ACTIVATIONS), {preset: dict(rows) for preset, rows in EXACT_PRESETS.items()}
    yield
    for table, rows in [
        (ACTIVATIONS, before[0]),
        *((EXACT_PRESETS[r], before[1][r]) for r in EXACT_PRESETS),
    ]:
        table.clear()
        table.update(rows)


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page, tables):
    found = list(blocks(page))
    assert found
    names = {"__name__": "__page__"}
    for source in found:
        exec(compile(source, page, "exec"), names)


def test_pages_are_merged():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        text = page.read_text(encoding="utf-8")
        assert not re.search("^(<{7}|>{7})", text, flags=re.MULTILINE), f"a conflict in {page}"
