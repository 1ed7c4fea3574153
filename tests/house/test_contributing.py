"""The worked changes of CONTRIBUTING.md: each diff applies to a copy and passes its check."""

import re
import shutil
import subprocess

import pytest
from processes import ROOT, printed

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(python|diff)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def sections():
    """The diff and the check of each worked change, by the words that its row links to."""
    for part in TEXT.split("\n### ")[1:]:
        found = dict(BLOCK.findall(part))
        if "diff" in found:
            yield part.partition("\n")[0].lower().replace(" ", "-"), found["diff"], found["python"]


def test_the_table_counts_the_lines_of_the_diffs():
    for anchor, diff, _ in sections():
        (row,) = [line for line in TEXT.splitlines() if f"](#{anchor})" in line]
        lines = [line[0] for line in diff.splitlines() if line[:3] not in ("+++", "---")]
        files = diff.count("\n+++ ")
        removed = f" −{lines.count('-')}" if "-" in lines else ""
        said = f"+{lines.count('+')}{removed}, {files} file{'s' * (files > 1)}"
        assert said in row, f"{anchor}: {said}"


def test_the_diffs_add_what_they_say(tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed")
    ignore = shutil.ignore_patterns("__pycache__")
    for room in ("fused_remat", "kernels"):
        shutil.copytree(ROOT / room, tmp_path / room, symlinks=True, ignore=ignore)
    for _, diff, _ in sections():
        command = ["git", "apply", "-C1", "-"]
        subprocess.run(command, input=diff, cwd=tmp_path, text=True, check=True)
    (tmp_path / "checks.py").write_text("\n".join(check for *_, check in sections()))
    printed("checks.py", cwd=tmp_path, TRITON_INTERPRET="1", PYTHONPATH=str(tmp_path))
