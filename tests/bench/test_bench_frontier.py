"""`python -m bench frontier`: who is on the frontier and who wins, the picture, and the files."""

import dataclasses
import json
import sys
from itertools import combinations

import numpy as np
import pytest
from bench.figures.drawing import STYLES
from bench.figures.frontier import picture

from bench.commands import frontier as command
from bench.figures import labels
from bench.frontier import DATA, Panel, Point, family, panels, sets, sweeps
from bench.pages import pictures
from bench.pages.frontier import brief, panel_table, readme, sweep_tables
from bench.subjects.layer_ways import WAYS
from bench.tables import load, measured_on
from fused_remat.policies import EXACT_PRESETS

CASE = {
    "dtype": "float32", "norm": "pre", "dropout": 0.0, "batch": 4, "seq_len": 512, "d_model": 512,
    "nhead": 8, "activation": "gelu",
}  # fmt: skip
TINY = ["--device", "cpu", "--tokens", "16", "--seq-len", "8", "16", "--d-model", "16",
        "--head-dim", "8", "--rounds", "2", "--seconds", "1"]  # fmt: skip


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


@pytest.mark.parametrize(("spread", "gap"), [(0.03, "tie (1.8% slower)"), (0.01, "1.8% slower")])
def test_winners_are_within_the_bytes_and_ties_within_the_spread(spread, gap):
    found = panel(spread, full=(0.0635, 1.10), checkpoint=(0.062, 1.12), compile=(0.5, 0.5))
    lines = panel_table(found).splitlines()
    behind = f"`checkpoint`, {gap}"  # full: 1.6% above a sixteenth, statistics
    assert f"| at most 1/16 | `full` | 1.10× | 64 | {behind} | {behind} |" in lines
    others = "`full`, 2.2 times its time | `full`, 2.2 times its time"
    assert f"| at most 1/2 | `compile` | 0.50× | 500 | {others} |" in lines
    text = panel_table(panel(full=(0.065, 1)))
    assert "| at most 1/16 | nobody keeps so little | | | | |" in text
    assert "| at most 1 | `eager` | 1.00× | 1,000 | nobody | nobody |" in panel_table(panel())


def test_where_the_winner_changes():
    sweep = [
        panel(shape={"seq_len": s, "batch": 2048 // s}, checkpoint=(0.06, c), full=(0.06, 1.2))
        for s, c in ((1024, 1.3), (256, 1.1), (512, 1.1))
    ]
    lines = sweep_tables(sweep).splitlines()
    assert lines[0] == "**Along S** (D = 512, float32, pre-norm, dropout 0)"
    assert lines[2].endswith("| S = 256 | S = 512 | S = 1024 |")
    assert lines[4] == "| at most 1/16 | `checkpoint` | `checkpoint` | `full` |"


def test_a_sweep_holds_everything_else_fixed():
    wide = {"d_model": 1024, "nhead": 16}
    apart = [panel(), panel(shape={"seq_len": 128, "batch": 4}), panel(shape={"d_model": 1024})]
    assert list(sweeps(apart)) == []  # other tokens; other heads
    assert [along for along, _ in sweeps([panel(), panel(shape=wide)])] == ["d_model"]
    assert list(sweeps([panel(), Panel(CASE | wide, {"cpu": "another"}, panel().points)])) == []
    assert "The shapes are no sweep" in sweep_tables(apart)


def test_what_is_said_counts_both_sides():
    ours, theirs = panel(full=(0.06, 0.8), checkpoint=(0.06, 0.9)), panel(compile=(0.06, 0.8))
    (line,) = brief([ours, theirs, panel(compile=(0.06, 0.8), none=(0.6, 1.0))]).splitlines()
    assert line == (
        "- float32, pre-norm, dropout 0: at 3 shapes and 5 memory points each, FusedRemat's ways "
        "are the fastest at 5 of 15, by more than the spread of the rounds at 5; another way by "
        "more than that at 1."
    )


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


def test_rows_of_another_commit_are_left_out():
    here = {"cpu": "a CPU", "commit": "now", "date": "today"}
    old = row() | {"machine": {"cpu": "a CPU", "commit": "before"}}
    assert panels({"machine": here, "results": [old]}) == []


def test_this_cpus_set_is_shown_first(tmp_path):
    for name in ("2030-01-01-xeon-0123456", "frontier-cpu", "frontier-dropout-cpu"):
        (tmp_path / name).mkdir()
        machine = {"machine": {"cpu": name}}
        data = machine | {"results": [row(full=RIGHT) | machine]}
        (tmp_path / name / DATA).write_text(json.dumps(data))
    first, *others = (folder.name for folder in sets(tmp_path))
    assert first == "frontier-cpu" and len(others) == 2
    assert readme(tmp_path).count("Measured on frontier-cpu") == 1


def test_rows_of_bench_gpu_say_which_layer_and_are_put_together():
    """Sections of one shape, each beside its own eager; steps without memory are no points."""
    rows = [row(full=RIGHT), row(compile=RIGHT, full=RIGHT), row(compile={"error": "late"})]
    for index, found in enumerate(rows):
        found |= {"layer": found["case"], "case": {"section": str(index), "name": "pre-norm"}}
    mlp = row(full=RIGHT) | {"case": {"section": "mlp", "name": "mlp"}}
    replayed = row(full={"ratio": RIGHT["step_ratio"]}) | {"layer": CASE | {"d_model": 64}}
    del replayed["ways"]["eager"]["kept_bytes"]
    (found,) = panels({"machine": {"cpu": "a CPU"}, "results": [*rows, mlp, replayed]})
    assert [p.way for p in found.points] == ["eager", "full", "compile"]
    assert found.case == CASE and found.wrong == {"compile": "late"}


def test_the_files_of_a_run(tmp_path):
    """And of one that is taken up with another shape; the settings stay the caller's."""
    matplotlib = pytest.importorskip("matplotlib")
    folder, settings = tmp_path / "frontier", dict(matplotlib.rcParams)
    run = ["--out", str(folder), *TINY, "--ways", "checkpoint", "full", "lean"]
    assert command.main(run) == 0 and pictures.stale(tmp_path) == []
    data = load(folder / DATA)
    found = panels(data)
    assert [len(p.points) for p in found] == [4, 4] and found[0].rounds == 2
    assert [p.case["seq_len"] for _, alike in sweeps(found) for p in alike] == [8, 16]
    svg = (folder / "frontier.svg").read_text()
    for text in ("checkpoint", "full", "lean", "eager", "frontier", measured_on(data["machine"])):
        assert f"<!-- {text} -->" in svg
    assert command.main([*run, "--seq-len", "4", "8"]) == 0 and pictures.stale(tmp_path) == []
    assert [p.case["seq_len"] for p in panels(load(folder / DATA))] == [8, 16, 4]
    assert dict(matplotlib.rcParams) == settings


def test_a_shape_without_eagers_step_fails_the_command_and_costs_no_other(tmp_path, monkeypatch):
    def build(subject):
        if subject.x.shape[1] == 8:
            return lambda x: 2 * subject.module(x)
        return subject.module

    monkeypatch.setitem(WAYS, "eager", dataclasses.replace(WAYS["eager"], build=build))
    assert command.main(["--out", str(tmp_path), *TINY, "--ways", "checkpoint"]) == 1
    assert [p.case["seq_len"] for p in panels(load(tmp_path / DATA))] == [16]


def test_labels_do_not_cover_points_or_each_other():
    """Eight ways at nearly the same bytes and time, in the corner of a panel."""
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    fig = Figure(figsize=(5, 4))
    renderer = FigureCanvasAgg(fig).get_renderer()
    axes = fig.add_subplot()
    axes.set(xlim=(0, 1), ylim=(0, 1))
    at = [(0.03 + 0.01 * i, 0.9 - 0.04 * (i % 3), f"a label {i}", "black") for i in range(8)]
    labels.place(axes, [labels.Label(*point) for point in at], renderer)
    boxes = np.array([text.get_window_extent(renderer).extents for text in axes.texts])
    area = labels.overlap(boxes, boxes)
    assert max(area[i, j] / area[i, i] for i, j in combinations(range(8), 2)) < 0.05  # an edge
    frame = np.array([axes.get_window_extent(renderer).extents])
    assert (labels.overlap(boxes, frame)[:, 0] > 0.99 * area.diagonal()).all()


def test_pictures_need_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"needs matplotlib: pip install"):
        picture(tmp_path, [panel()]).write()


def test_a_picture_of_times_far_apart(tmp_path):
    pytest.importorskip("matplotlib")
    made = picture(tmp_path, [panel(full=(0.06, 6.0))])  # a logarithmic axis
    assert made.stale() == list(made.files)
    made.write()
    assert made.stale() == []
