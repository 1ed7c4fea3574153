"""The README and docs: their tables and pictures are generated from the committed results."""

from pathlib import Path

from bench.pages import command, pictures

ROOT = Path(__file__).resolve().parents[2]


def test_generated_parts_are_up_to_date():
    assert not command.stale_pages(), "run python -m bench report"


def test_the_figures_are_those_of_the_committed_data():
    assert pictures.stale() == [], "run python -m bench report"


def test_the_readme_is_one_screen():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
