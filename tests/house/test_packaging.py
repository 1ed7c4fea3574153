"""What is shipped: the wheel from the tree, the sdist, and the wheel rebuilt from the sdist."""

import importlib
import inspect
import os
import pkgutil
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import fused_remat
from fused_remat import policies
from fused_remat.graph.build import norm_graph
from fused_remat.graph.schedule import schedule
from fused_remat.spec import NormSpec

ROOT = Path(__file__).resolve().parents[2]
NOT_COPIED = (".*", "*.egg-info", "__pycache__", "build", "dist")


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """A folder with `tree.whl`, `sdist.tar.gz` and `rebuilt.whl`, built offline from a copy."""
    tmp = tmp_path_factory.mktemp("packaging")
    tree, out = tmp / "tree", tmp / "out"
    out.mkdir()
    shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir")
    run(*build, tmp / "one", "--wheel", tree)
    shutil.rmtree(tree / "build")
    run(*build, tmp / "two", tree)  # the sdist, and from it a wheel
    shutil.move(*tmp.glob("one/*.whl"), out / "tree.whl")
    shutil.move(*tmp.glob("two/*.tar.gz"), out / "sdist.tar.gz")
    shutil.move(*tmp.glob("two/*.whl"), out / "rebuilt.whl")
    return out


@pytest.mark.parametrize("wheel", ["tree.whl", "rebuilt.whl"])
def test_a_wheel_ships_every_module_once_and_nothing_else(dist, wheel):
    package, kernels = ROOT / "fused_remat", ROOT / "kernels"
    expected = {p.relative_to(ROOT).as_posix() for p in package.rglob("*.py")}
    expected |= {f"fused_remat/kernels/{p.name}" for p in kernels.glob("*.py")}
    expected |= {"fused_remat/py.typed"}
    with zipfile.ZipFile(dist / wheel) as archive:
        shipped = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert sorted(shipped) == sorted(expected)


def test_the_sdist_has_each_file_once_and_the_license(dist):
    with tarfile.open(dist / "sdist.tar.gz") as archive:
        names = [m.name.partition("/")[2] for m in archive.getmembers() if not m.isdir()]
    assert len(names) == len(set(names))
    assert {"LICENSE", "pyproject.toml", "kernels/dropout.py"} <= set(names)
    assert not [n for n in names if n.startswith(("fused_remat/kernels", "tests/"))]


IMPORT_ALL = """
import importlib.util, pathlib, sys
import fused_remat
assert pathlib.Path(fused_remat.__file__).is_relative_to(sys.argv[1]), fused_remat.__file__
if importlib.util.find_spec("triton"):
    from fused_remat.kernels import dropout
    assert pathlib.Path(dropout.__file__).is_relative_to(sys.argv[1]), dropout.__file__
spec = importlib.util.find_spec("kernels")
assert spec is None or "site-packages" in str(spec.origin), "importable as `kernels`"
print(fused_remat.__version__)
"""


def test_an_unpacked_wheel_imports_in_a_clean_folder(dist, tmp_path):
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.unpack_archive(dist / "tree.whl", site, "zip")
    version = run(sys.executable, "-c", IMPORT_ALL, site, cwd=elsewhere, PYTHONPATH=str(site))
    assert (site / f"fused_remat-{version.strip()}.dist-info").is_dir()


def test_the_checkout_has_one_copy_of_the_kernels():
    """A link, which is committed as one."""
    assert (ROOT / "fused_remat" / "kernels").resolve() == ROOT / "kernels"
    if (ROOT / ".git").exists() and shutil.which("git"):
        assert run("git", "ls-files", "-s", "fused_remat/kernels").startswith("120000 ")


@pytest.mark.parametrize("module", [name for name, names in fused_remat._MOVED.items() if names])
def test_names_of_an_earlier_version_warn_and_are_the_new_ones(module):
    old = importlib.import_module(f"fused_remat.{module}")
    for name, now in fused_remat._MOVED[module].items():
        with pytest.warns(DeprecationWarning, match=f"{module}.{name} is now fused_remat.{now}"):
            found = getattr(old, name)
        new = pkgutil.resolve_name(f"fused_remat.{now}")
        assert found is new or inspect.unwrap(found) is inspect.unwrap(new)
    assert not hasattr(old, "nothing")


def test_the_tables_of_presets_have_their_old_names():
    for old, now in (("RUNGS", "EXACT_PRESETS"), ("ALL_RUNGS", "ALL_PRESETS")):
        with pytest.warns(DeprecationWarning, match=now):
            assert getattr(policies, old) is getattr(policies, now)


def test_a_documented_call_of_an_earlier_version_still_runs():
    with pytest.warns(DeprecationWarning):
        from fused_remat.blocks.program import programs
    graph = norm_graph(NormSpec(kind="rms_norm"))
    plan = programs(graph, save=frozenset(), wants=frozenset({"input"}), tiled=False)
    assert plan is schedule(graph, save=frozenset(), needs_grad=frozenset({"input"}), tiled=False)
