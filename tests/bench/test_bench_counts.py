"""`python -m bench counts`: peers compiled for a GPU and executed on a CPU, and its tables."""

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from places import INTERPRETED

from bench import tables
from bench.measure.contest import Rig, Way
from bench.measure.machine import environment
from bench.pages import counts as page

pytest.importorskip("triton", reason="Triton is not installed")
if INTERPRETED:
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

from bench.counts.cases import CASES, GATED, Gated
from bench.counts.command import ARCHES, main
from bench.counts.peers import peers
from bench.counts.tally import Aten, Tally
from bench.kernels.problem import ways_of
from fused_remat.triton.launch import target_of
from tests.ptx.driver import installed

CPU = torch.device("cpu")


def test_whole_sectors_are_counted_once():
    with installed(80, count=True) as driver, peers(driver):
        problem = Gated(Rig(CPU, torch.bfloat16, target=target_of(CPU)), 4, 1024)
        tally, made = Tally(driver), {}
        for name in ("fused_remat triton", "compile"):
            provider = dataclasses.replace(GATED[name], needs=None)
            way = tally.of(name, ways_of(provider, problem)["fwd"])
            made[name] = way.run(way.prepare(0))["y"]
    for name, y in made.items():
        torch.testing.assert_close(y.double(), problem.truth("fwd")["y"], rtol=1e-2, atol=1e-2)
        row = tally.rows[name]
        assert page.moved(row) == page.moved(row, touched=False) == 3 * 4 * 1024 * 2
        assert row["aten"] == {} and len(row["launches"]) == 1
        assert page.instructions(row) > 0 and page.conflicts(row) == 0


def test_what_is_left_to_aten_is_its_inputs_and_results():
    a, b = torch.ones(4, 8), torch.ones(8, 16)
    with Aten() as aten:
        y = torch.mm(a, b)
        y.t()[0].view(2, 2)  # views and new tensors cost nothing
        torch.empty(100)
        y += torch.ones(1, 16).expand(4, 16)
    assert aten.names == {"mm": 1, "ones": 1, "add_": 1}
    assert aten.found["mma"] == 4 * 8 * 16
    assert aten.found["bytes"] == 4 * ((32 + 128 + 64) + 16 + (64 + 16 + 64))


def test_inductor_writes_for_the_architecture():
    """A row as a whole is one program's, as on CUDA; on a CPU there would be no kernel at all."""
    norm = torch.compile(lambda x: F.rms_norm(x, (64,)), dynamic=False)
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    with installed(90) as driver, peers(driver):
        y = norm(x)
        (launch,) = driver.launches
    assert launch.kernel.startswith("triton_per_fused")
    torch.testing.assert_close(y, F.rms_norm(x, (64,)), rtol=2e-2, atol=2e-2)


def test_every_case_has_ours_and_the_command_counts_them(tmp_path, capsys):
    assert all(any(n.startswith(page.OURS) for n in case.op) for case in CASES)
    status = main(["--dry-run", "--op", "swiglu", "--arch", "80", "--out", str(tmp_path)])
    out = capsys.readouterr().out
    assert status == 0, out
    assert "sm_80 swiglu fwd: tokens 5, width 48" in out
    assert "| sm_80 | swiglu | both | triton | compile | 1.00× | 1.00× |" in out


def way(sectors, instructions, **aten):
    counts = {"touched load sectors": sectors, "load sectors": 2 * sectors}
    counts |= {"warp instructions": instructions, "shared passes": 7, "shared passes least": 7}
    return {"counts": counts, "aten": aten, "launches": [{}]}


def test_the_page_shows_every_case():
    """One of another commit would be left out: `--fresh` without `--op` measures all."""
    data = tables.load(tables.RESULTS / "counts.json")
    shown = {(row["case"]["arch"], row["case"]["name"]) for row in tables.current(data)}
    names = {row["case"]["name"] for row in data["results"]}
    assert shown == set(itertools.product(ARCHES, names)) and len(names) == len(CASES)
    for row in tables.current(data):
        assert any(page.OURS in name and "counts" in way for name, way in row["ways"].items())


def test_ratios_are_of_all_bytes_and_a_mark_says_who_leaves_work_to_aten():
    ours, theirs = way(100, 10), way(100, 5, calls=2, bytes=3200)
    case = {"arch": 90, "op": "norm", "name": "rms_norm", "sizes": {"tokens": 1}}
    machine = environment("cpu")
    rows = [
        {"case": case | {"direction": d}, "work": {"bytes": 6400.0}, "machine": machine,
         "ways": {"fused_remat triton": ours, "liger": theirs, "compile": {"absent": "why"}}}
        for d in ("fwd", "bwd")
    ]  # fmt: skip
    text = page.section({"machine": machine, "config": {}, "results": rows})
    for direction in ("fwd", "bwd", "both"):
        assert (
            f"| sm_90 | rms_norm | {direction} | triton | liger | 0.50× | 0.67× | 2.00× *" in text
        )
    assert "absent: why" in text
    with pytest.raises(ValueError, match="dry run"):
        page.section({"machine": machine, "config": {"dry_run": True}, "results": rows})


def test_a_wrong_result_has_no_counts():
    from bench.measure.contest import Contest, Work, admit

    wrong = Way(lambda index: {"y": torch.ones(4)})
    rows = admit(Contest({"wrong": wrong}, lambda: {"y": torch.zeros(4).double()}, Work(), ()))
    assert page.failures([{"case": {"arch": 80, "name": "n", "direction": "fwd", "sizes": {}},
                           "ways": rows}])  # fmt: skip
