"""Imports go one way between the packages of the library, wherever in a file they stand."""

import ast
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import ROOT, printed

# A room may import those after it, and itself; a room stands for everything in it. `tests/` and
# `bench/` may import anything.
LINE = (
    "cli", "scale", "integrations", "planner", "convert", "parallel", "huggingface", "report",
    "tracing", "layers", "ops", "autograd", "execution", "graph", "triton", "steps",
)  # fmt: skip
LEAVES = ("layer_specs", "moe_spec", "policies", "random", "spec", "version")

# What a package or a file may import of the library. The longest prefix of a file's name is its
# entry, and a file without one fails until it is placed.
ARROWS: dict[str, tuple[str, ...]] = {
    **{room: LINE[i:] + LEAVES for i, room in enumerate(LINE)},
    **dict.fromkeys(LEAVES, ()),
    "__init__": (*LINE, *LEAVES),
    "__main__": ("cli",),
    "layer_specs": ("moe_spec", "spec"),
    "moe_spec": ("spec",),
    "policies": (),
    "convert": ("huggingface", *LINE[LINE.index("report") :], *LEAVES),
    "huggingface": ("huggingface", *LINE[LINE.index("layers") :], *LEAVES),
    "graph": ("graph", "steps", *LEAVES),
    # Steps know no backend; a backend registers itself when `execution.choose` imports it.
    "steps": ("steps", *LEAVES),
    "triton": ("kernels", "steps", "triton", *LEAVES),
    "kernels": ("kernels",),
    # Only `choose` knows which backends there are.
    "execution.prepare": ("execution", "graph", "steps", *LEAVES),
    "execution.executor": ("execution", "graph", "steps", *LEAVES),
    "planner.chain": (),
    "planner.steps": ("planner.chain",),
    "planner.rules": ("planner.chain", "planner.steps"),
    "report.plot": (),
    "scale.shapes": (),
}


def module_name(path: Path) -> str:
    """`graph.graph` for fused_remat/graph/graph.py, `graph` for its __init__.py."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removeprefix("fused_remat.").removesuffix(".__init__")


FILES = sorted([*(ROOT / "fused_remat").rglob("*.py"), *(ROOT / "kernels").glob("*.py")])
MODULES = {module_name(path): path for path in FILES if "fused_remat/kernels" not in str(path)}


def within(name: str, *rooms: str) -> bool:
    return any(name == room or name.startswith(room + ".") for room in rooms)


def runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below `node` that run, so not those under `if TYPE_CHECKING`."""
    yield node
    types = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
    for child in ast.iter_child_nodes(node):
        if not (types and child in node.body):
            yield from runtime_nodes(child)


def imports_of(name: str, nodes: Callable[[Any], Iterable[ast.AST]] = runtime_nodes) -> set[str]:
    """Return what a module imports, among `nodes` of its tree; `from a import b` gives `a.b`."""
    found, source = set(), MODULES[name].read_text(encoding="utf-8")
    assert "import_module(" not in source, "imports are statements"
    for node in nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_imports_are_found_in_functions_too_but_not_those_for_types():
    assert "fused_remat.report.plot.plot_plan" in imports_of("planner.plan")
    assert "fused_remat.steps.chunk.Chunk" not in imports_of("steps.norm")


@pytest.mark.parametrize("name", MODULES)
def test_arrows_go_one_way(name):
    row = max((room for room in ARROWS if within(name, room)), key=len, default=None)
    assert row is not None, f"{name} has no row in ARROWS: place it"
    ours = {i.removeprefix("fused_remat.") for i in imports_of(name) if within(i, "fused_remat")}
    wrong = {i for i in ours if not within(i, name, *ARROWS[row])}
    assert not wrong, f"{name} may import {ARROWS[row]}, and imports {sorted(wrong)}"


@pytest.mark.parametrize("within_package, nodes", [("", runtime_nodes), ("steps", ast.walk)])
def test_no_files_import_each_other_in_a_circle(within_package, nodes):
    """At run time, imports in functions included; in `steps`, imports for types as well."""
    rest = {}
    for name in MODULES:
        if not within_package or within(name, within_package):
            found = imports_of(name, nodes)
            ours = [i.removeprefix("fused_remat.") for i in found if within(i, "fused_remat")]
            targets = {i if i in MODULES else i.rpartition(".")[0] for i in ours}
            rest[name] = targets & MODULES.keys() - {name}
    while free := [name for name, others in rest.items() if not others & rest.keys()]:
        for name in free:
            del rest[name]
    assert not rest, f"these files import each other in a circle, or import one: {sorted(rest)}"


#: What runs at every call of a layer and in its backward, and what only some calls request.
COMMON = (
    "layers.eligibility", "layers.fallback", "layers.fused_layer", "layers.modules", "layers.read",
    "autograd.deliver", "autograd.engine", "autograd.function", "autograd.gradients", "execution",
)  # fmt: skip
RARE = (
    "autograd.graph_break", "autograd.offload", "autograd.operators", "autograd.partial",
    "autograd.replay_check", "autograd.segments", "autograd.shards", "layers.converted",
    "layers.tensor_parallel", "parallel", "planner", "report", "tracing",
)  # fmt: skip


def test_the_common_path_imports_nothing_for_rare_requests():
    for name in (name for name in MODULES if within(name, *COMMON)):
        found = {i.removeprefix("fused_remat.") for i in imports_of(name, lambda tree: tree.body)}
        assert not {i for i in found if within(i, *RARE)}, name


def test_kernels_import_triton_and_each_other_only():
    allowed = ("triton", "fused_remat.kernels", "__future__", "typing")
    for name in (name for name in MODULES if within(name, "kernels")):
        assert all(within(i, *allowed) for i in imports_of(name)), name
    # Hugging Face has a package called `kernels`; ours is `fused_remat.kernels`.
    assert {path.suffix for path in (ROOT / "kernels").iterdir()} <= {".py", ""}
    assert not (ROOT / "kernels" / "__init__.py").exists()


IMPORT_ALONE = """
import sys

class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")

sys.meta_path.insert(0, NoTriton())
import numpy, torch
before = set(sys.modules)
import fused_remat
print(*sorted(set(sys.modules) - before))
"""


def test_the_package_imports_without_triton_and_loads_little():
    loaded = printed("-c", IMPORT_ALONE).split()
    roots = {name.partition(".")[0] for name in loaded} - set(sys.stdlib_module_names)
    assert roots <= {"fused_remat", "torch", "numpy"}, "a third package at import"
    slow = ("torch._dynamo", "torch._inductor", "numpy.testing", "fused_remat.kernels")
    assert not [name for name in loaded if within(name, *slow)]
