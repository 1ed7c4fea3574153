"""The commands at tiny sizes: their options, and when they fail."""

import dataclasses
import importlib.util
import json
import subprocess
import sys

import pytest

from bench.__main__ import COMMANDS, main
from bench.audit import command as audit
from bench.commands import frontier, gpu, layers, model, plan
from bench.measure.machine import ROOT
from bench.measure.options import Parser
from bench.subjects.layers import WAYS
from bench.subjects.stacks import PEERS

#: Of `bench layers`.
TINY = "--batch 2 --seq-len 9 --d-model 16 --nhead 2 --norm pre --rounds 2"


def options(text):
    return ["--device", "cpu", *text.split()]


@pytest.mark.parametrize(("arguments", "status"), [([], 2), (["nonsense"], 2), (["--help"], 0)])
def test_the_help_has_a_line_per_command(arguments, status, capsys):
    assert main(arguments) == status
    lines = "".join(capsys.readouterr()).splitlines()
    for name, command in COMMANDS.items():
        (line,) = [line for line in lines if line.startswith(f"{name} ")]
        assert all(text in line for text in (command.measures, command.takes, command.writes))
        assert importlib.util.find_spec(command.module)
    assert any("--publish" in line for line in lines)


def test_the_plan_of_a_gpu_is_printed_without_loading_torch():
    code = (
        "import sys; from bench.__main__ import main; main(['gpu', '--list']); "
        "assert not {'torch', 'numpy', 'triton'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (_, *lines), (note, _) = (part.splitlines() for part in done.stdout.split("\n\n"))
    assert [line[:17].strip() for line in lines] == list(gpu.SECTIONS)
    total = sum(section.minutes for section in gpu.SECTIONS.values())
    assert f" {total:.1f}  " in lines[-1] and "--minutes 4 the first 3 sections" in note


def test_results_are_published_on_request():
    for options, folder in (([], ("build", "bench")), (["--publish"], ("bench", "results"))):
        args = Parser("it", "about", "device", folder="{device}").parse(["--device=cpu", *options])
        assert args.out.parts[-3:] == (*folder, "cpu")


#: Command -> what it refuses, each to be split at spaces.
BAD = {
    layers: ("--nhead=3", "--ways=fastest", "--dropout=1", "--rounds=0"),
    frontier: ("--seq-len=100", "--d-model=100"),
    model: ("--layers=31", "--lora=-1 --layers=1"),
    plan: ("--d-model=100", "--nhead=5"),
    audit: ("--only=norm --write-budgets",),
}  # fmt: skip


@pytest.mark.parametrize(
    ("command", "text"),
    [(command, text) for command, given in BAD.items() for text in given],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_bad_options_are_usage_errors(command, text, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(text.split())
    assert "error: " in capsys.readouterr().err


#: Command -> its registry, and options.
QUICK = {
    layers: (WAYS, f"{TINY} --dropout 0 --ways"),
    frontier: (WAYS, "--tokens 8 --seq-len 8 --d-model 16 --head-dim 8 --rounds 1 --ways"),
    plan: (PEERS, "--layers 2 --batch 1 --seq 8 --d-model 16 --nhead 2 --rounds 1 --no-compile"),
}


@pytest.mark.parametrize(("way", "status"), [("full", 1), ("eager", 1), ("selective_matmuls", 0)])
@pytest.mark.parametrize("command", QUICK, ids=lambda command: command.__name__)
def test_no_speed_of_what_is_wrong_and_ours_fails_the_command(
    command, way, status, tmp_path, monkeypatch, capsys
):
    """Errors of PyTorch's own only show in the table; by eager all are judged."""
    pytest.importorskip("matplotlib")
    if way == "eager" and command is frontier:
        status = 2  # there is nothing to draw
    registry, text = QUICK[command]

    def doubled(build):
        return lambda *given: lambda x: 2 * build(*given)(x)

    if way in registry:
        wrong = dataclasses.replace(registry[way], build=doubled(registry[way].build))
        monkeypatch.setitem(registry, way, wrong)
    else:
        monkeypatch.setattr(plan, "forward_of", doubled(plan.forward_of))
    given = options(text) if command is plan else options(f"{text} {way}")
    assert command.main([*given, "--out", str(tmp_path)]) == status
    if command is layers:
        (row,) = json.loads((tmp_path / "layers-cpu.json").read_text())["results"]
        assert list(row["ways"][way]) == ["error"]
    assert status == 2 or "relative error of " in "".join(capsys.readouterr())
