"""The README and docs: their tables and pictures are generated from the committed results."""

from bench.pages import command, pictures


def test_generated_parts_and_figures_are_up_to_date():
    assert not command.stale_pages(), "run python -m bench report"
    assert not pictures.stale(), "run python -m bench report"
