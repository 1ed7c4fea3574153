"""The ahead-of-time audit: what it finds of kernels, and that it would find what is wrong."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from bench.audit import budgets
from bench.audit import cases as audit_cases
from bench.audit import command as audit
from bench.audit.attention import PRODUCTS
from bench.pages.audit import AUDIT, OTHERS
from fused_remat.triton.tables import EXPERTS_TILES, TILES, Tile

ROOT = Path(__file__).resolve().parents[2]
#: Targets whose committed audits are not compiled again in tests.
OTHER_ARCHES = (80, 86, 89, 100, 103, 120)
GFX942 = 0
GOOD = {"default": True, "product": True, "spills": 0, "stack": 0, "shared": 1000,
        "tensor_core": 4, "registers": 100, "repetition": 1.0, "loops": []}  # fmt: skip


def reads_through_pointers(name):
    """Experts; attention whose rows end early, additive masks' gradients, tiles that require it."""
    wide = re.search(r"attention_d\w+_bwd.* 256 .*mask|attention_dkdv_bwd d. 256 causal \d", name)
    return (
        "mask_bwd" in name
        or name.startswith("experts_")
        or wide is not None
        or any(call in name for call in ("lengths", "packed", "everything"))
    )


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Every default configuration for Hopper: committed, or compiled where its source is new."""
    out = tmp_path_factory.mktemp("audit")
    command = ["--arch", "90", "--defaults", "--check", "--reuse", str(AUDIT), "--out", str(out)]
    assert audit.main(command) == 0, "complaints: see what was printed"
    return json.loads((out / "audit.json").read_text())["rows"]


def test_every_default_configuration_for_hopper_is_clean(rows):
    products = [row for row in rows if row["product"]]
    assert all(row["tensor_core"] for row in products)
    kernels = {name for name, tiles in (TILES | EXPERTS_TILES).items() if "hopper" in tiles}
    assert {row["name"].split()[0] for row in products} == kernels | PRODUCTS
    pointers = {row["name"] for row in products if not row["tma"]}
    assert pointers == {row["name"] for row in products if reads_through_pointers(row["name"])}


def test_what_is_reused_is_what_would_be_compiled():
    """One committed row of each kernel without products, compiled again."""
    committed = {(r["name"], r["digest"]): r for r in json.loads(AUDIT.read_text())["rows"]}
    seen = set()
    for case in audit_cases.cases(audit_cases.target(90), audit.DTYPES["bf16"]):
        kernel = case.launch.kernel
        known = committed.get((case.name, audit.digest(case.launch, 90)))
        if known is not None and not case.product and kernel not in seen:
            seen.add(kernel)
            found = {"target": "sm_90 bf16"} | audit.examine(case, 90)
            assert found == {name: known[name] for name in known if name != "waves"}


def test_what_changes_a_compiled_kernel_changes_its_digest():
    products = audit_cases.Products(audit_cases.target(90), audit.DTYPES["bf16"])
    tiles = [Tile(64, 64, 64, 4, 3), Tile(64, 64, 64, 8, 3), Tile(64, 64, 64, 4, 4)]
    launches = [
        products.launches("mlp_bwd", tile)[name]
        for tile in tiles
        for name in ("gelu", "relu dropout")
    ]
    digests = {audit.digest(launch, arch) for launch in launches for arch in (80, 90)}
    assert len(digests) == 2 * len(launches)
    assert audit.digest(products.launches("mlp_bwd", tiles[0])["gelu"], 80) in digests


def test_complaints():
    assert audit.complaints(GOOD, 90, None) == []
    assert "spills" in audit.complaints(GOOD | {"spills": 2}, 90, None)[0]
    assert "spills" in audit.complaints(GOOD | {"stack": 8}, 90, None)[0]
    assert audit.complaints(GOOD | {"spills": 2, "default": False}, 90, None) == []
    assert "over the limit" in audit.complaints(GOOD | {"shared": 240_000}, 90, None)[0]
    assert "no HGMMA" in audit.complaints(GOOD | {"tensor_core": 0}, 90, None)[0]
    assert "no HMMA" in audit.complaints(GOOD | {"tensor_core": 0}, 80, None)[0]
    assert "2 times" in audit.complaints(GOOD | {"repetition": 2.0}, 90, None)[0]
    assert audit.complaints(GOOD | {"repetition": 2.0, "default": False}, 90, None) == []
    loops = [{"tensor": 4, "share": 0.5, "spills": 3}, {"tensor": 0, "share": 0.0, "spills": 0}]
    assert audit.complaints(GOOD | {"loops": loops}, 90, None) == ["3 spills in a hot loop"]
    most = {"registers": 100, "shared": 1000, "stack": 0, "tensor_share": 51}
    over = audit.complaints(GOOD, 90, most | {"registers": 99, "tensor_share": 0})
    assert over == ["registers 100 over its budget 99"]
    loops[0]["spills"] = 0
    for read, share in ((loops, 50), (None, 0), (loops[1:], 0)):
        (said,) = audit.complaints(GOOD | {"loops": read}, 90, most)
        assert f"{share}% of a loop" in said


def test_a_budget_is_the_worst_configuration():
    loop = {"tensor": 1, "share": 0.8}
    entry = GOOD | {"name": "linear relu", "target": "sm_90"}
    large = entry | {"registers": 200, "loops": [loop, loop | {"share": 0.6}]}
    uneven = entry | {"registers": 250, "default": False}
    known = budgets.summed((entry | {"loops": [loop]}, large, uneven), "3")
    default, other = (("3", "sm_90", "linear", cases) for cases in ("default", "other"))
    assert list(known) == [default, other] and known[default]["tensor_share"] == 60
    assert budgets.over(large, known[default]) == []
    grown = budgets.over(large | {"registers": 201}, known[default])
    assert grown == ["registers 201 over its budget 200"]


def test_every_kernel_has_a_budget_on_every_target(rows):
    known = budgets.read()
    triton = json.loads(AUDIT.read_text())["triton"]
    assert {budgets.key_of(row, triton) for row in rows} <= known.keys()
    targets = {target for version, target, *_ in known if version == triton}
    assert targets == {f"sm_{arch} bf16" for arch in (90, *OTHER_ARCHES)}


@pytest.mark.parametrize("arch", [90, *OTHER_ARCHES, GFX942])
def test_the_committed_audit_of_a_gpu_is_of_these_kernels_and_clean(arch):
    found, known = json.loads((AUDIT if arch == 90 else OTHERS).read_text()), budgets.read()
    if found["triton"] != audit.triton.__version__:
        pytest.skip(f"audited with Triton {found['triton']}")
    assert found["reader"] == audit.READER
    target = f"sm_{arch} bf16" if arch else "gfx942 bf16"
    committed = {row["name"]: row for row in found["rows"] if row["target"] == target}
    defaults = [case for case in audit._cases(arch, "bf16") if case.default]
    assert committed.keys() == {case.name for case in defaults}
    for case in defaults:
        row = committed[case.name]
        remedy = f"the kernel changed: audit {target} again (docs/kernels.md#evidence)"
        assert row["digest"] == audit.digest(case.launch, arch), f"{case.name}: {remedy}"
        budget = known.get(budgets.key_of(row, found["triton"]))
        assert (budget is None) == (arch == GFX942)
        assert audit.complaints(row, arch, budget) == [], case.name


def test_a_digest_is_of_all_that_a_kernel_calls_and_names(monkeypatch):
    products = audit_cases.Products(audit_cases.target(90), audit.DTYPES["bf16"])
    launch = products.launches("mlp_bwd", Tile(64, 64, 64, 4, 3))["relu dropout"]
    scope, callee = launch.kernel.fn.__globals__, launch.kernel.fn.__globals__["row_keys"]
    site = scope["Site"]
    other_order = NamedTuple("Site", [(name, object) for name in reversed(site._fields)])

    def digest():
        audit._text.cache_clear()
        return audit.digest(launch, 90)

    first = digest()
    for names, name, value in (
        (callee.fn.__globals__["split_key"].fn.__globals__, "GOLDEN64", tl.constexpr(3)),
        (scope, "Site", other_order),
        (scope, "row_keys", scope["part"]),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(names, name, value)
            assert digest() != first, name
    with monkeypatch.context() as patch:
        patch.setattr(callee, "_src", callee._src + "    # a comment")
        assert digest() == first
    audit._text.cache_clear()


def groups_of(values):
    for value in values:
        if isinstance(value, tuple):
            yield value
            yield from groups_of(value)


@pytest.mark.parametrize("arch", [80, 90])
def test_a_tensor_descriptor_is_an_argument_of_its_own(arch):
    """Triton's launcher makes descriptors of arguments only, and would not find one in a group."""
    described = 0
    for case in audit_cases.cases(audit_cases.target(arch), audit.DTYPES["bf16"]):
        described += any(isinstance(x, TensorDescriptor) for x in case.launch.args)
        for group in groups_of(case.launch.args):
            assert not any(isinstance(x, TensorDescriptor) for x in group), case.name
    assert bool(described) == (arch == 90)


def test_a_tile_that_is_too_large_spills():
    products = audit_cases.Products(audit_cases.target(90), audit.DTYPES["bf16"])
    launch = products.launches("mlp_bwd", Tile(128, 256, 64, 8, 3))["relu dropout"]
    row = audit.examine(audit_cases.Case("too large", launch, True, True), 90)
    assert row["tensor_core"] and any("spills" in c for c in audit.complaints(row, 90, None))


AS_LAUNCHED = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.tools.tensor_descriptor import TensorDescriptor

from bench.audit import budgets
from bench.audit import cases as audit_cases
from bench.audit import command as audit
from bench.audit.attention import launches_of, variants

class Device:
    "As much of a GPU's driver as compiling requires."
    def get_current_device(self): return 0
    def get_current_stream(self, device=None): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_device_interface(self): return torch.cuda

triton.runtime.driver.set_active(Device())
dtype, at = torch.bfloat16, audit_cases.target(90)
launches = list(launches_of(80, variants(dtype)["mask padding dropout"], at, dtype))
for case in audit_cases.cases(at, dtype):
    if case.name in (
        "norm_fwd layer_norm 512 dropout residual", "gated_bwd silu dropout",
        "rotary_norm_bwd norm half", "gated_mlp_fwd silu 64x64x64 w4 s4",
        "cross_entropy_bwd plain 64x128/2x64 w4 s4",
    ):
        launches.append((case.name, case.launch))
assert len(launches) >= 10
for kernel, launch in launches:
    options = dict(grid=launch.grid, num_warps=launch.num_warps, num_stages=launch.num_stages)
    ran = launch.kernel.warmup(*launch.args, **launch.keywords, **options)
    assert ran.asm["ptx"] == audit.compile_ahead(launch, 90).asm["ptx"], kernel
"""


def test_what_a_launch_compiles_is_what_is_audited():
    """Triton's own path from arguments (tuples of pointers, descriptors, None) to code."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_DISABLE_LINE_INFO"] = "1"  # the cache does not know where a kernel stands
    done = subprocess.run(
        [sys.executable, "-c", AS_LAUNCHED], cwd=ROOT, env=environment, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
