"""What is shipped: the wheel from the tree, the sdist, and the wheel rebuilt from the sdist."""

import importlib
import inspect
import pkgutil
import shutil
import subprocess
import tarfile
import zipfile

import pytest
from processes import ROOT, printed

import fused_remat
from fused_remat.graph.build import norm_graph
from fused_remat.graph.schedule import schedule
from fused_remat.spec import NormSpec

NOT_COPIED = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "build", "dist")
SOURCES = (("fused_remat", "fused_remat"), ("kernels", "fused_remat/kernels"))


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The wheel from the tree, and the sdist with the wheel from it, built offline from a copy."""
    tmp = tmp_path_factory.mktemp("packaging")
    shutil.copytree(ROOT, tmp / "tree", symlinks=True, ignore=NOT_COPIED)
    build = ("-m", "build", "--no-isolation", tmp / "tree", "--outdir")
    printed(*build, tmp / "wheel", "--wheel")
    shutil.rmtree(tmp / "tree" / "build")
    printed(*build, tmp / "sdist")
    return tmp


@pytest.mark.parametrize("source", ["wheel", "sdist"])
def test_a_wheel_ships_every_module_once_and_nothing_else(dist, source):
    expected = {"fused_remat/py.typed"}
    for room, there in SOURCES:
        files = (path.relative_to(ROOT / room).as_posix() for path in (ROOT / room).rglob("*.py"))
        expected |= {f"{there}/{file}" for file in files}
    (wheel,) = (dist / source).glob("*.whl")
    shipped = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert sorted(shipped) == sorted(expected)


def test_the_sdist_has_each_file_once_and_the_license(dist):
    (sdist,) = dist.glob("sdist/*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = [m.name.partition("/")[2] for m in archive.getmembers() if not m.isdir()]
    assert len(names) == len(set(names))
    assert {"LICENSE", "pyproject.toml", "kernels/dropout.py"} <= set(names)
    assert not [n for n in names if n.startswith(("fused_remat/kernels", "tests/"))]


IMPORT = """
import importlib.util, sys
import fused_remat
spec = importlib.util.find_spec("kernels")
assert spec is None or "site-packages" in str(spec.origin), "importable as `kernels`"
for name in ("fused_remat", "fused_remat.kernels.dropout"):
    assert importlib.util.find_spec(name).origin.startswith(sys.argv[1]), name
print(fused_remat.__version__)
"""


def test_an_unpacked_wheel_imports_in_a_clean_folder(dist, tmp_path):
    site, (wheel,) = tmp_path / "site", dist.glob("wheel/*.whl")
    shutil.unpack_archive(wheel, site, "zip")
    version = printed("-c", IMPORT, site, cwd=tmp_path, PYTHONPATH=str(site))
    assert (site / f"fused_remat-{version.strip()}.dist-info").is_dir()


def test_the_checkout_has_one_copy_of_the_kernels():
    """A link, which is committed as one."""
    assert (ROOT / "fused_remat" / "kernels").resolve() == ROOT / "kernels"
    if (ROOT / ".git").exists() and shutil.which("git"):
        command = ["git", "ls-files", "-s", "fused_remat/kernels"]
        assert subprocess.check_output(command, cwd=ROOT).startswith(b"120000 ")


@pytest.mark.parametrize("module", [name for name, names in fused_remat._MOVED.items() if names])
def test_names_of_an_earlier_version_warn_and_are_the_new_ones(module):
    old = importlib.import_module(f"fused_remat.{module}")
    for name, now in fused_remat._MOVED[module].items():
        with pytest.warns(DeprecationWarning, match=f"{module}.{name} is now fused_remat.{now}"):
            found = getattr(old, name)
        new = pkgutil.resolve_name(f"fused_remat.{now}")
        assert found is new or inspect.unwrap(found) is inspect.unwrap(new)
    assert not hasattr(old, "nothing")


def test_a_documented_call_of_an_earlier_version_still_runs():
    with pytest.warns(DeprecationWarning):
        from fused_remat.blocks.program import programs
    graph = norm_graph(NormSpec(kind="rms_norm"))
    plan = programs(graph, save=frozenset(), wants=frozenset({"input"}), tiled=False)
    assert plan is schedule(graph, save=frozenset(), needs_grad=frozenset({"input"}), tiled=False)
