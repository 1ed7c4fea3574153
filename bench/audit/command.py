"""What the compiler makes of every kernel, without a GPU: `python -m bench audit --arch 90`.

Registers, spills, shared memory, occupancy, tensor-core instructions, TMA and code size of each
kernel in each configuration it can launch with, as a table and as JSON; and what
`bench.audit.machine_code` reads of its products and loops. `--check` fails, in a default
configuration, on a spill in a hot loop (of sm_90 on any), and on products that warps repeat; on
shared memory over the limit, on a 16-bit product without tensor cores, and on what exceeds its
budget in `bench/audit/budgets.tsv` or leaves the tensor cores idle for
longer. `--reuse FILE` takes from an earlier run's JSON what would be compiled from the same source
with the same compiler.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from bench.audit import budgets, machine_code
from bench.audit import cases as audit_cases
from bench.measure.options import progress
from fused_remat.triton.launch import INTERPRETED, Launch

ARCHES = {str(arch or "gfx942"): arch for arch in audit_cases.SMS}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# Architecture -> bytes of shared memory a block may have, a multiprocessor has, and its warps.
LIMITS = {
    80: (166912, 167936, 64), 86: (101376, 102400, 48), 87: (166912, 167936, 48),
    89: (101376, 102400, 48), 90: (232448, 233472, 64), 100: (232448, 233472, 64),
    103: (232448, 233472, 64), 120: (101376, 102400, 48), 121: (101376, 102400, 48),
}  # fmt: skip
# Architecture -> the instruction of its tensor cores that a 16-bit product should be made of.
TENSOR_CORES = {
    80: "HMMA", 86: "HMMA", 87: "HMMA", 89: "HMMA", 90: "HGMMA", 100: "UTCHMMA", 103: "UTCHMMA",
    120: "HMMA", 121: "HMMA",
}  # fmt: skip


def _reader() -> str:
    """Return a hash of the code that reads machine code, docstrings apart.

    Loops in the rows of another reader are read again.
    """
    tree = ast.parse(Path(machine_code.__file__).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            del node.body[0]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16]


READER = _reader()
_COUNTED = ("HMMA", "HGMMA", "UTCHMMA", "UTMALDG", "LDL", "STL")


@functools.cache
def _binder(kernel: Any) -> tuple[Any, Any]:
    """Return Triton's binder of a kernel's arguments: Nvidia's backend for all targets."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    return backend, create_function_from_signature(kernel.signature, kernel.params, backend)


def source(launch: Launch) -> ASTSource:
    """Return the kernel as Triton compiles it for this launch: types, constants, divisibility."""
    backend, bind = _binder(launch.kernel)
    bound, found, options = bind(*launch.args, **launch.keywords)
    pack = launch.kernel._pack_args
    _, signature, constants, attributes = pack(backend, launch.keywords, bound, found, options)
    known = {place: attribute for place, attribute in attributes.items() if attribute}
    return ASTSource(launch.kernel, signature, constants, known)


def compile_ahead(launch: Launch, arch: int) -> Any:
    """Compile the kernel of a launch; `arch` 0 is gfx942."""
    gpu = GPUTarget("cuda", arch, 32) if arch else GPUTarget("hip", "gfx942", 64)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    return triton.compile(source(launch), target=gpu, options=options)


@functools.cache
def _text(kernel: triton.JITFunction[Any]) -> str:
    """Return the syntax of a kernel and of all it calls, with the constants that it names.

    It is the same on Python 3.11 to 3.13.

    Not Triton's hash, which has the numbers of lines, and depends on what was hashed before.
    """
    (function,) = kernel.parse().body
    if ast.get_docstring(function) is not None:
        del function.body[0]
    names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    found = [ast.unparse(function)]
    for name in sorted(names & kernel.fn.__globals__.keys()):
        value = kernel.fn.__globals__[name]
        if isinstance(value, triton.JITFunction):
            found.append(_text(value))
        elif isinstance(value, tl.constexpr):
            found.append(f"{name}={value.value!r}")
        elif hasattr(value, "_fields"):
            found.append(f"{name}{value._fields}{value._field_defaults}")
    return "\n".join(found)


def digest(launch: Launch, arch: int) -> str:
    """Return a hash of source, types, constants and options: equal kernels have equal ones."""
    made = source(launch)
    constants = [
        (place, _text(value) if isinstance(value, triton.JITFunction) else value)
        for place, value in sorted(made.constants.items())
    ]
    given = (
        _text(launch.kernel), sorted(made.attrs.items()), sorted(made.signature.items()), constants,
        launch.num_warps, launch.num_stages, arch, triton.__version__,
    )  # fmt: skip
    return hashlib.sha256(repr(given).encode()).hexdigest()[:32]


def dump(cubin: bytes, flag: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [str(tool), flag, file.name], capture_output=True, text=True, check=True
        )
    return done.stdout


def occupancy(registers: int, shared: int, warps: int, arch: int) -> float:
    """Return the share of a multiprocessor's warps that its blocks of a kernel fill."""
    _, per_sm, most = LIMITS[arch]
    granted = -(-max(registers, 1) // 8) * 8 * 32  # a warp's, in steps of 8 a thread
    blocks = min(65536 // (granted * warps), per_sm // (shared + 1024), most // warps, 32)
    return blocks * warps / most


def examine(case: audit_cases.Case, arch: int) -> dict[str, Any]:
    kernel = compile_ahead(case.launch, arch)
    row: dict[str, Any] = {"name": case.name, "default": case.default, "product": case.product}
    row |= {"digest": digest(case.launch, arch)}
    row |= {"warps": case.launch.num_warps, "shared": kernel.metadata.shared}
    if not arch:
        return row | {"code": len(kernel.asm["hsaco"])}
    cubin = kernel.asm["cubin"]
    usage = dict(re.findall(r"(\w+):(\d+)", dump(cubin, "-res-usage").splitlines()[-1]))
    sass = dump(cubin, "-sass")
    found = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9_]*)", sass, re.M)
    counts = {name: found.count(name) for name in _COUNTED}
    dots = re.findall(r"= (\w+\.\w*dot\w*) ", kernel.asm["ttgir"])
    registers, warps = int(usage["REG"]), kernel.metadata.num_warps
    return row | {
        "registers": registers,
        "stack": int(usage["STACK"]),
        "spills": counts["LDL"] + counts["STL"],
        "occupancy": occupancy(registers, row["shared"], warps, arch),
        "tensor_core": counts[TENSOR_CORES[arch]],
        "hmma": counts["HMMA"],
        "tma": counts["UTMALDG"],
        "dots": dict(Counter(dot for dot in dots if not dot.endswith("_wait"))),
        "code": 16 * len(found),
        **machine_code.examine(kernel.asm["ttgir"], sass, arch, warps),
    }


def complaints(row: Mapping[str, Any], arch: int, budget: budgets.Budget | None) -> list[str]:
    if not arch:
        return []
    found = []
    if row["default"] and arch == 90 and (row["spills"] or row["stack"]):
        found.append(f"spills: {row['spills']} instructions, {row['stack']} bytes of stack")
    if row["shared"] > LIMITS[arch][0]:
        found.append(f"shared memory {row['shared']} over the limit {LIMITS[arch][0]}")
    if row["product"] and not row["tensor_core"]:
        found.append(f"no {TENSOR_CORES[arch]} in a product")
    if row["default"] and row["repetition"] > 1:
        found.append(f"warps compute a product {row['repetition']:g} times")
    if row["default"] and (spilled := sum(loop["spills"] for loop in row["loops"] or ())):
        found.append(f"{spilled} spills in a hot loop")
    return found + budgets.over(row, budget)


def _line(row: Mapping[str, Any]) -> str:
    if "registers" not in row:
        return f"{row['name']:<58} shared {row['shared']:>6}  code {row['code']}"
    return (
        f"{row['name']:<58} {row['registers']:>4} {row['stack']:>6} {row['shared']:>7} "
        f"{row['occupancy']:>5.0%} {row['tensor_core']:>6} {row['tma']:>4} {row['code']:>7} "
        f"{row['repetition']:>4g}"
    )


def _as_json(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as JSON, a line for each."""
    versions = {"triton": triton.__version__, "torch": torch.__version__, "reader": READER}
    made = json.dumps({**versions, "rows": []})
    return made.removesuffix("]}") + "\n" + ",\n".join(map(json.dumps, rows)) + "\n]}\n"


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench audit", description=__doc__)
    usual = ["80", "90", "100"]
    parser.add_argument("--arch", choices=ARCHES, nargs="+", default=usual, help="e.g. 90")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=["bf16"])
    parser.add_argument("--defaults", action="store_true", help="default configurations only")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--check", action="store_true", help="exit with 1 if anything is wrong")
    parser.add_argument("--write-budgets", action="store_true", help="what is found is the budget")
    parser.add_argument("--reuse", type=Path, help="an audit.json whose rows of equal source hold")
    parser.add_argument("--out", type=Path, help="folder for audit.json")
    options = parser.parse_args(arguments)
    if options.write_budgets and options.only:
        parser.error("--write-budgets needs all cases: it replaces every row of a target")
    options.arch = [ARCHES[name] for name in options.arch]
    return options


@functools.cache
def _cases(arch: int, dtype: str) -> tuple[audit_cases.Case, ...]:
    return tuple(audit_cases.cases(audit_cases.target(arch), DTYPES[dtype]))


def _examine(work: tuple[int, str, int]) -> dict[str, Any]:
    """Examine a case of an architecture and dtype by its number, in a process of the pool."""
    arch, dtype, index = work
    return examine(_cases(arch, dtype)[index], arch)


def _rows(
    work: Sequence[tuple[int, str, int]], known: Mapping[str, dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield rows in order; those not known are compiled in processes, started if any are."""
    cases = {one: _cases(*one[:2])[one[2]] for one in work}
    names = {one: digest(case.launch, one[0]) if known else "" for one, case in cases.items()}
    new = [one for one in work if names[one] not in known]
    with contextlib.ExitStack() as stack:
        made: Iterator[dict[str, Any]] = iter(())
        if new:
            context = multiprocessing.get_context("spawn")
            made = stack.enter_context(context.Pool(min(os.cpu_count() or 1, len(new)))).imap(
                _examine, new
            )
        for one, case in cases.items():
            target = {"target": f"{f'sm_{one[0]}' if one[0] else 'gfx942'} {one[1]}"}
            row = known.get(names[one]) or next(made)
            named = {"name": case.name, "default": case.default, "product": case.product}
            yield target | row | named


def main(arguments: Sequence[str]) -> int:
    """Compile, print, write and check; the exit status."""
    options = _parse(arguments)
    if INTERPRETED:
        raise SystemExit("unset TRITON_INTERPRET: interpreted kernels cannot be compiled")
    known = {} if options.write_budgets else budgets.read()
    if not (options.write_budgets or any(key[0] == triton.__version__ for key in known)):
        print(f"no budgets for Triton {triton.__version__}: spills, memory, tensor cores only")
    print(f"{'':<70}  reg  stack  shared  occ. tensor  TMA    code rep.")
    work = [
        (arch, dtype, index)
        for arch, dtype in itertools.product(options.arch, options.dtype)
        for index, case in enumerate(_cases(arch, dtype))
        if options.only in case.name and (case.default or not options.defaults)
    ]
    rows, wrong = [], []
    reused = json.loads(options.reuse.read_text()) if options.reuse is not None else {"rows": []}
    same = reused.get("reader") == READER  # else loops are read again
    by_digest = {r.get("digest"): r for r in reused["rows"] if same or "registers" not in r}
    found = progress(_rows(work, by_digest), len(work), "kernel")
    for (arch, _, _), row in zip(work, found, strict=True):
        rows.append(row)
        print(f"{row['target']:<12}{_line(row)}", flush=True)
        budget = known.get(budgets.key_of(row, triton.__version__))
        wrong += [f"{row['target']}: {row['name']}: {c}" for c in complaints(row, arch, budget)]
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "audit.json").write_text(_as_json(rows))
    if options.write_budgets:
        budgets.write(rows, triton.__version__)
    same = sum(row["digest"] in by_digest for row in rows)
    print(f"\n{len(rows)} configurations, {len(wrong)} complaints, {same} reused", *wrong, sep="\n")
    return 1 if options.check and wrong else 0
