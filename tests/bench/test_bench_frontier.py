"""`python -m bench frontier`: who is on the frontier and who wins, the picture, and the files."""

from bench.figures import STYLES
from bench.pages.frontier import Panel, Point, family, panel_table, panels
from bench.subjects.layers import WAYS
from fused_remat.policies import EXACT_PRESETS

CASE = {
    "dtype": "float32", "norm": "pre", "dropout": 0.0, "batch": 4, "seq_len": 512, "d_model": 512,
    "nhead": 8, "activation": "gelu",
}  # fmt: skip


def panel(spread=0.0, /, *, shape=None, **ways):
    """Ways by name: (kept, time), both relative to eager's, which is there."""
    given = {"eager": (1.0, 1.0), **ways}
    points = [
        Point(way, kept, 1000 * kept, {"p20": t - spread / 2, "p50": t, "p80": t + spread / 2})
        for way, (kept, t) in given.items()
    ]
    return Panel(CASE | (shape or {}), {"cpu": "a CPU", "date": "today"}, tuple(points))


def test_the_frontier_is_who_nobody_beats_in_both():
    found = panel(checkpoint=(0.06, 1.2), full=(0.06, 1.1), lean=(0.12, 1.1), fast=(0.4, 0.9))
    assert [p.way for p in found.frontier()] == ["full", "fast"]
    text = panel_table(found)
    assert "Frontier: `full` 0.060 at 1.10×, `fast` 0.400 at 0.90×." in text
    assert "| at most 1 | `fast` | 0.90× | 400 |" in text


def test_every_way_of_the_registry_has_its_family():
    for way in WAYS:
        preset = way.split("_")[0] in EXACT_PRESETS
        assert family(way).startswith("ours") == preset, way
        assert (family(way) == "stock") == (way == "eager"), way
        assert family(way) in STYLES


def row(**ways):
    eager = {"kept_bytes": 4096, "step_ratio": {"eager": {"p20": 1.0, "p50": 1.0, "p80": 1.0}}}
    return {"case": CASE, "machine": {"cpu": "a CPU"}, "ways": {"eager": eager, **ways}}


RIGHT = {"kept_bytes": 256, "step_ratio": {"eager": {"p20": 1.0, "p50": 1.1, "p80": 1.2}}}


def test_what_is_wrong_or_absent_is_listed_and_no_point():
    on_gpu = {"held_bytes": 512, "ratio": {"eager": {"p20": 1.0, "p50": 1.2, "p80": 1.2}}}
    wrong = RIGHT | {"failure": "relative error of output is 1"}
    given = row(full=RIGHT, lean=on_gpu, fast=wrong, torch_remat={"unavailable": "not there"})
    (found,) = panels({"machine": {"cpu": "a CPU"}, "results": [given]})
    points = {p.way: p.kept for p in found.points}
    assert points == {"eager": 1, "full": 1 / 16, "lean": 0.125}
    text = panel_table(found)
    assert "Wrong results: `fast` (relative error of output is 1)" in text
    assert "Absent: `torch_remat` (not there)" in text


def test_rows_of_bench_gpu_say_which_layer_and_are_put_together():
    """Sections of one shape, each with its own eager; steps without memory are no points."""
    rows = [row(full=RIGHT), row(compile=RIGHT, full=RIGHT), row(compile={"error": "late"})]
    for index, found in enumerate(rows):
        found |= {"layer": found["case"], "case": {"section": str(index), "name": "pre-norm"}}
    mlp = row(full=RIGHT) | {"case": {"section": "mlp", "name": "mlp"}}
    replayed = row(full={"ratio": RIGHT["step_ratio"]}) | {"layer": CASE | {"d_model": 64}}
    del replayed["ways"]["eager"]["kept_bytes"]
    (found,) = panels({"machine": {"cpu": "a CPU"}, "results": [*rows, mlp, replayed]})
    assert [p.way for p in found.points] == ["eager", "full", "compile"]
    assert found.case == CASE and found.wrong == {"compile": "late"}
