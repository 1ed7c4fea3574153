"""`python -m bench frontier`: who is on the frontier and who wins, the picture, and the files."""

import dataclasses
import json
import sys

import pytest

from bench.commands import frontier as command
from bench.figures import frontier as figure
from bench.figures import labels
from bench.figures.drawing import STYLES, digest, drawn_of
from bench.frontier import files
from bench.frontier.pareto import MEMORY_POINTS, changes, derive, frontier, winner
from bench.frontier.points import Panel, Point, family, is_lossy, panels
from bench.frontier.report import report, sentences
from bench.subjects.layer_ways import WAYS
from bench.tables import measured_on, read
from fused_remat.policies import ALL_PRESETS

CASE = {
    "dtype": "float32", "norm": "pre", "dropout": 0.0, "batch": 4, "seq_len": 512, "d_model": 512,
    "nhead": 8, "activation": "gelu",
}  # fmt: skip
TINY = ["--device", "cpu", "--tokens", "16", "--seq-len", "8", "16", "--d-model", "16",
        "--head-dim", "8"]  # fmt: skip
QUICK = [*TINY, "--rounds", "2", "--seconds", "1", "--ways", "checkpoint", "full", "lean", "fast8"]


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
    assert [p.way for p in frontier(found.points)] == ["full", "fast"]


def test_winners_are_within_the_bytes_and_ties_within_the_spread():
    found = panel(0.03, full=(0.0635, 1.10), checkpoint=(0.062, 1.12), compile=(0.5, 0.9))
    win = winner(found, 1 / 16)  # 1.6% above a sixteenth: statistics
    assert win and (win["way"], win["runner_up"]["way"]) == ("full", "checkpoint")
    assert win["runner_up"]["tie"] and win["other"]["way"] == "checkpoint"
    clear = winner(panel(0.01, full=(0.0635, 1.10), checkpoint=(0.062, 1.12)), 1 / 16)
    assert clear and not clear["runner_up"]["tie"]
    assert winner(panel(full=(0.065, 1.1)), 1 / 16) is None
    half = winner(found, 0.5)
    assert half and half["way"] == "compile" and half["other"]["way"] == "full"
    alone = winner(panel(), 1.0)
    assert alone and alone["way"] == "eager" and alone["runner_up"] is None


def test_what_keeps_8_bits_is_shown_and_wins_nothing():
    derived = derive([panel(fast8=(0.5, 0.8), none=(0.6, 0.9))])
    (found,) = derived["panels"]
    points = {p["way"]: (p["family"], p["on_frontier"]) for p in found["points"]}
    assert points["fast8"] == ("ours, lossy", False) and points["none"] == ("ours", True)
    assert {w["fastest"]["way"] for w in found["winners"] if w["fastest"]} == {"none"}
    text = report(derived)
    assert "Frontier: `none` 0.600 at 0.90×." in text
    assert "With 8 bits, which no exact way is held against: `fast8` 0.500 at 0.80×." in text


def test_where_the_winner_changes():
    """From checkpoint to full between S = 512 and 1024, clearly only if beyond the spread."""
    for spread, tie in ((0.01, False), (0.2, True)):
        sweep = [
            panel(spread, shape={"seq_len": s, "batch": 2048 // s}, checkpoint=(0.06, c),
                  full=(0.06, 1.2))
            for s, c in ((1024, 1.3), (256, 1.1), (512, 1.1))
        ]  # fmt: skip
        (found,) = changes(sweep)
        assert (found["along"], found["values"]) == ("seq_len", [256, 512, 1024])
        first = found["winners"][0]
        assert first["ways"] == ["checkpoint", "checkpoint", "full"]
        change = {"between": [512, 1024], "from": "checkpoint", "to": "full", "tie": tie}
        assert first["changes"] == [change]
        assert found["winners"][-1]["changes"] == []  # eager everywhere
        text = report(derive(sweep))
        note = " (within a tie)" * tie
        assert f"between S = 512 and 1024, from `checkpoint` to `full`{note} |" in text


def test_a_sweep_holds_everything_else_fixed():
    wide = {"d_model": 1024, "nhead": 16}
    apart = [panel(), panel(shape={"seq_len": 128, "batch": 4}), panel(shape={"d_model": 1024})]
    assert changes(apart) == []  # other tokens; other heads
    assert [s["along"] for s in changes([panel(), panel(shape=wide)])] == ["d_model"]
    other = Panel(CASE | wide, {"cpu": "another"}, panel().points)
    assert changes([panel(), other]) == []
    assert "The shapes are no sweep" in report(derive(apart))


def test_what_is_said_counts_both_sides():
    ours, theirs = panel(full=(0.06, 1.0), checkpoint=(0.06, 1.2)), panel(compile=(0.06, 0.8))
    text = sentences(derive([ours, theirs]))
    assert "within 1/16 of eager's bytes the fastest way takes 0.80 to 1.00× eager's time" in text
    assert "FusedRemat's ways win at 1 of 2 shapes, at 1 by more than the spread (20%)" in text
    behind = sentences(derive([panel(compile=(0.5, 0.8), none=(0.6, 1.0))]))
    assert "FusedRemat's ways win at 0 of 1 shapes, and lose at 1 by more than the spread" in behind
    assert "within 1/16 of eager's bytes nobody stays" in behind


def test_every_way_of_the_registry_has_its_family():
    for way in WAYS:
        preset = way.split("_")[0] in ALL_PRESETS
        assert family(way).startswith("ours") == preset, way
        assert (family(way) == "stock") == (way == "eager"), way
        assert is_lossy(way) == WAYS[way].traits["lossy"], way
        assert family(way) in STYLES


def row(**ways):
    eager = {"kept_bytes": 4096, "step_ratio": {"eager": {"p20": 1.0, "p50": 1.0, "p80": 1.0}}}
    return {"case": CASE, "machine": {"cpu": "a CPU"}, "ways": {"eager": eager, **ways}}


def test_what_is_wrong_or_absent_is_listed_and_no_point():
    right = {"kept_bytes": 256, "step_ratio": {"eager": {"p20": 1.0, "p50": 1.1, "p80": 1.2}}}
    on_gpu = {"held_bytes": 512, "ratio": {"eager": {"p20": 1.0, "p50": 1.2, "p80": 1.2}}}
    wrong = right | {"failure": "relative error of output is 1"}
    given = row(full=right, lean=on_gpu, fast=wrong, torch_remat={"unavailable": "not there"})
    found = panels({"machine": {"cpu": "a CPU"}, "results": [given]})
    assert [(p.way, p.kept) for p in found[0].points] == [
        ("eager", 1),
        ("full", 1 / 16),
        ("lean", 0.125),
    ]
    text = report(derive(found))
    assert "Wrong results: `fast` (relative error of output is 1)" in text
    assert "Absent: `torch_remat` (not there)" in text
    assert "| at most 1/16 | `full` | 1.10× | 0 | nobody | nobody |" in text


def test_rows_of_another_commit_are_left_out():
    here = {"cpu": "a CPU", "commit": "now", "date": "today"}
    old = row() | {"machine": {"cpu": "a CPU", "commit": "before"}}
    with pytest.raises(ValueError, match="no step of a layer was measured beside eager's"):
        panels({"machine": here, "results": [old]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("matplotlib")
    found = tmp_path_factory.mktemp("frontier")
    assert command.main(["--out", str(found), *QUICK]) == 0
    yield found


def test_the_files_of_a_run(folder):
    data = read(folder / files.DATA)
    assert [r["case"]["seq_len"] for r in data["results"]] == [8, 16]
    derived = data[files.DERIVED]
    assert derived == derive(panels(data))
    assert [len(p["points"]) for p in derived["panels"]] == [5, 5]
    assert [w["at_most"] for w in derived["panels"][0]["winners"]] == list(MEMORY_POINTS)
    assert derived["sweeps"][0]["values"] == [8, 16]
    for name in files.PICTURES:
        assert drawn_of(folder / name) == digest(derived)
    svg = (folder / "frontier.svg").read_text()
    where = measured_on(data["machine"])
    for text in ("checkpoint", "full", "lean", "eager", "frontier", where):
        assert f"<!-- {text} -->" in svg
    assert ", 2 rounds\n" in (folder / files.PAGE).read_text()
    assert files.stale(folder) == []


def test_a_run_is_taken_up_and_the_picture_is_the_same(folder, tmp_path, monkeypatch):
    (tmp_path / files.DATA).write_text((folder / files.DATA).read_text())
    known = lambda *_: pytest.fail("it is in the file already")  # noqa: E731
    monkeypatch.setattr("bench.commands.layers.measure", known)
    assert command.main(["--out", str(tmp_path), *QUICK]) == 0
    assert (tmp_path / "frontier.svg").read_bytes() == (folder / "frontier.svg").read_bytes()


def test_what_is_stale_is_found(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "frontier.png").unlink()
    (tmp_path / files.PAGE).write_text("typed by hand")
    assert {p.name for p in files.stale(tmp_path)} == {"frontier.png", files.PAGE}
    data = json.loads((tmp_path / files.DATA).read_text())
    data["results"][0]["ways"]["full"]["step_ratio"]["eager"]["p50"] *= 0.5
    (tmp_path / files.DATA).write_text(json.dumps(data))
    assert {p.name for p in files.stale(tmp_path)} == {files.DATA, files.PAGE, *files.PICTURES}


def test_drawing_what_files_hold(folder, tmp_path):
    here = read(folder / files.DATA)
    there = {**here["machine"], "cpu": "another CPU"}
    rows = [found | {"machine": there} for found in here["results"]]
    elsewhere = tmp_path / "there" / files.DATA  # of the same name
    elsewhere.parent.mkdir()
    elsewhere.write_text(json.dumps({"machine": there, "config": {}, "results": rows}))
    both, given = tmp_path / "both", [str(folder / files.DATA), str(elsewhere)]
    assert command.main(["--from", *given, "--out", str(both)]) == 0
    found = panels(read(both / files.DATA))
    assert [p.machine["cpu"] for p in found].count("another CPU") == 2 and len(found) == 4
    assert files.stale(both) == []


def test_a_shape_without_eagers_step_fails_the_command_and_costs_no_other(tmp_path, monkeypatch):
    def build(subject):
        if subject.x.shape[1] == 9:
            return lambda x: 2 * subject.module(x)
        return subject.module

    monkeypatch.setitem(WAYS, "eager", dataclasses.replace(WAYS["eager"], build=build))
    options = ["--device", "cpu", "--tokens", "72", "--seq-len", "9", "8", "--d-model", "16"]
    options += ["--head-dim", "8", "--rounds", "1"]
    assert command.main(["--out", str(tmp_path), *options, "--ways", "checkpoint"]) == 1
    found = read(tmp_path / files.DATA)[files.DERIVED]["panels"]
    assert [p["case"]["seq_len"] for p in found] == [8]


def test_rows_of_bench_gpu_say_which_layer_and_are_put_together():
    """Sections of one shape, each beside its own eager; steps without memory are no points."""
    right = {"kept_bytes": 256, "step_ratio": {"eager": {"p20": 1.0, "p50": 1.1, "p80": 1.2}}}
    rows = [row(full=right), row(compile=right, full=right), row(compile={"error": "late"})]
    for index, found in enumerate(rows):
        found |= {"layer": found["case"], "case": {"section": str(index), "name": "pre-norm"}}
    mlp = row(full=right) | {"case": {"section": "mlp", "name": "mlp"}}
    replayed = row(full={"ratio": right["step_ratio"]}) | {"layer": CASE | {"d_model": 64}}
    del replayed["ways"]["eager"]["kept_bytes"]
    (found,) = panels({"machine": {"cpu": "a CPU"}, "results": [*rows, mlp, replayed]})
    assert [p.way for p in found.points] == ["eager", "full", "compile"]
    assert found.case == CASE and found.wrong == {"compile": "late"}


def test_labels_do_not_cover_points_or_each_other():
    """Eight ways at nearly the same bytes and time, in the corner of a panel."""
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    fig = Figure(figsize=(5, 4))
    renderer = FigureCanvasAgg(fig).get_renderer()
    axes = fig.add_subplot()
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    points = [(0.03 + 0.01 * i, 0.9 - 0.04 * (i % 3), f"a label {i}", "black") for i in range(8)]
    labels.place(axes, points, renderer)
    boxes = [tuple(t.get_window_extent(renderer).extents) for t in axes.texts]
    frame = tuple(axes.get_window_extent(renderer).extents)
    area = (boxes[0][2] - boxes[0][0]) * (boxes[0][3] - boxes[0][1])
    covered = [labels.overlap(a, b) for i, a in enumerate(boxes) for b in boxes[:i]]
    assert max(covered) < 0.05 * area, covered  # a letter's edge
    assert all(labels.overlap(box, frame) > 0.99 * area for box in boxes)


def test_pictures_need_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"needs matplotlib: pip install"):
        figure.draw(derive([panel()]), tmp_path)


def test_drawing_changes_no_setting_of_matplotlib(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    before = dict(matplotlib.rcParams)
    figure.draw(derive([panel(full=(0.06, 6.0))]), tmp_path)  # a logarithmic axis
    assert dict(matplotlib.rcParams) == before
