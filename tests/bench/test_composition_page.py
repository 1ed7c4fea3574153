"""The marks that make docs/tables/composition.md (that it is up to date: test_docs.py)."""

from bench.pages.composition import Mark, marks, table, works

FILE = """
import pytest

@pytest.mark.composes("DDP", "static graph", "two processes")
@pytest.mark.parametrize("x", [1, 2])
def test_one(x): ...

@pytest.mark.composes("DDP", "static graph", limits="no mask")
def test_two(): ...

@pytest.mark.composes("DDP", "join")
@pytest.mark.xfail(reason="it hangs")
def test_three(): ...

@pytest.mark.composes("FSDP1", "training")
@pytest.mark.gpu
def test_four(): ...
"""


def of(source, tmp_path):
    path = tmp_path / "test_it.py"
    path.write_text(source)
    return list(marks([path], root=tmp_path))


def test_marks_make_rows(tmp_path):
    made = table(of(FILE, tmp_path), {})
    assert made.count("| what | works |") == 2  # no groups without a mark
    one = "[test_it.py::test_one](test_it.py)"
    two = "[test_it.py::test_two](test_it.py)"
    assert f"| static graph | yes | {one}, {two} | two processes; no mask |" in made
    assert "| join | no: it hangs |" in made
    assert "| training | by its GPU test, not yet run on hardware |" in made


def test_what_works():
    cpu = Mark("a.py", "test_a", False, "", "DDP", "x")
    gpu, broken = cpu._replace(gpu=True), cpu._replace(fails="no such op")
    ran = {"machine": {"gpu": "H100", "commit": "0123456789"}}
    passed, failed = (ran | {"tests": {"a.py::test_a": how}} for how in ("passed", "failed"))
    assert works([cpu, broken], {}) == "yes, but not: no such op"
    assert works([gpu], passed) == "yes, on H100 at 0123456"
    assert works([gpu], failed) == "no: failed on H100 at 0123456"
    assert works([cpu, gpu], {}) == "yes, on a CPU; by its GPU test, not yet run on hardware"
