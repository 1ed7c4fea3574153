"""The command line: what it prints and returns, and its errors."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from processes import ROOT, printed
from torch import nn

from fused_remat import MemoryReport, Plan
from fused_remat.cli import COMMANDS, doctor, main, plan, report, scale
from fused_remat.scale import models
from fused_remat.scale.shapes import MODELS

METHODS = ["optimal", "greedy", "uniform", "sqrt"]
NONE_FITS = [f"{method} – – – no plan within the budget: needs" for method in METHODS]
PARSERS = {"report": report.parse, "plan": plan.parse, "scale": scale.parse}
MINE = """
import torch
from torch import nn

def step(batch, seq=16, device="cpu"):
    layer = nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).to(device)
    return model, torch.randn(batch, seq, 32, device=device)

def with_loss():
    model, x = step(2)
    return model, {"src": x}, lambda y: y.square().mean()

def wants_more(seq, heads): return step(1, seq)
def linear(dtype): return nn.Linear(4, 4, dtype=dtype), (torch.ones(2, 4, dtype=dtype),)
def one(): return nn.Linear(4, 4)
def raises(): raise RuntimeError("boom")
def frozen():
    model, x = step(2)
    return model.requires_grad_(False), x
def bad_loss(): return *step(2), lambda y: 1 / 0
def numbered(): return step(2)[0], {1: step(2)[1]}
def no_model(): return "gpt2", torch.ones(2)
def no_loss(): return nn.Linear(4, 4), torch.ones(2, 4), 0.5
"""


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch, one_thread):
    """A folder to work in, with the user's module; one thread, since two would wait for each other
    at every tiny product while other tests run."""
    (tmp_path / "mine_for_cli.py").write_text(MINE)
    (tmp_path / "broken_for_cli.py").write_text("undefined\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("mine_for_cli", None)


def said(capsys, *arguments):
    """Status, stdout, stderr."""
    try:
        status = main([*map(str, arguments)])
    except SystemExit as left:  # argparse's
        status = left.code
    return status, *capsys.readouterr()


def test_help_teaches_with_examples_that_parse(capsys):
    helps = [said(capsys, "--help"), *(said(capsys, name, "--help") for name in COMMANDS)]
    assert {status for status, *_ in helps} == {0}
    text = "".join(text for _, text, _ in helps)
    text += (ROOT / "README.md").read_text()
    found = re.findall(r"^ *python -m fused_remat ([a-z]+)((?: [^\s#>]+)*)", text, re.MULTILINE)
    assert {name for name, _ in found} == set(COMMANDS) and len(found) > 10
    for name, rest in found:
        if name in PARSERS:
            PARSERS[name](rest.split())


def test_the_module_and_the_installed_command_are_the_same():
    text = printed("-m", "fused_remat", "doctor")
    for section in ("devices", "versions", "backends", "attention", "replay check"):
        assert re.search(f"^{section}", text, re.MULTILINE), section
    assert text.rstrip().endswith("result: ok")
    assert 'fused-remat = "fused_remat.cli:main"' in (ROOT / "pyproject.toml").read_text()


def test_doctor_as_json_has_every_device_and_dtype(capsys, mine, monkeypatch):
    """And the version of a package that is distributed under another name."""
    info = mine / "pytorch_gizmo-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: pytorch-gizmo\nVersion: 1.2\n")
    (info / "top_level.txt").write_text("gizmo\n")
    monkeypatch.syspath_prepend(mine)
    monkeypatch.setitem(doctor._PACKAGES, "gizmo", "")
    status, text, _ = said(capsys, "doctor", "--json")
    found = json.loads(text)
    assert (status, found["ok"]) == (0, True)
    steps = [(step["device"], step["dtype"]) for step in found["steps"]]
    dtypes = ("float32", "bfloat16", "float16")
    assert steps == [(d["device"], dtype) for d in found["devices"] for dtype in dtypes]
    assert found["versions"]["torch"] == torch.__version__ and found["versions"]["gizmo"] == "1.2"
    assert found["steps"][0]["backend"] == "eager" and found["steps"][0]["attention"]


def test_doctor_is_1_where_the_fused_path_is_not_taken(capsys):
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        status, text, _ = said(capsys, "doctor")
    finally:
        hook.remove()
    assert status == 1 and "FAIL" in text and "not fused: " in text and "result: failed" in text


@pytest.mark.parametrize("name", MODELS)
def test_a_shape_computes_what_its_stock_layers_do(name):
    shape = MODELS[name]
    heads = {"nhead": 4, "kv_heads": 4 if shape.kv_heads == shape.nhead else 2, "head_dim": 8}
    small = dataclasses.replace(
        shape, d_model=32, d_ff=48, layers=2, vocab=min(shape.vocab, 50), **heads
    )
    fused, inputs = models.build(small, 2, 7)
    stock, _ = models.build(small, 2, 7, stock=True)
    stock.load_state_dict(fused.state_dict())
    losses = [model(*inputs) for model in (fused, stock)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    grads = ([p.grad for p in model.parameters()] for model in (fused, stock))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)  # sums in another order


VIT = ("vit-l", "--layers", 1, "--seq", 8, "--device", "cpu")


def test_report_of_a_shape_as_json(capsys):
    _, text, _ = said(capsys, "report", *VIT, "--policy", "names:attn,qkv", "--json", "r.json")
    found = MemoryReport.from_json(Path("r.json").read_text())
    assert str(found) in text and "vit-l: 1 of 24 layers, batch 1" in text
    assert {"input", "attn", "qkv"} <= {a.name for a in found.layers[0].activations}


SMALL = ("scale", "--model", "smollm-135m", "--mesh", "2x3", "--seq", 768)
ANY = ("plan", "mine_for_cli:with_loss", "--costs", "analytic", "--optimizer", "none")


@pytest.mark.parametrize(
    ("arguments", "status", "parts"),
    [
        ((), 2, ("missing", "doctor, report, plan, scale")),
        (("run",), 2, ("'run'", "doctor, report, plan, scale")),
        (("report", *VIT, "--stock"), 0, ("layers.0 TransformerEncoderLayer",)),
        (("report", "mine_for_cli:with_loss", "--policy", "lean"), 0,
         ("layers.2 (2×) FusedRematLayer lean", "predicted", "PowBackward0")),  # the loss's own
        (ANY, 0, ("budget any", "frontier")),
        ((*ANY, "--budget", "10kB", "--compare"), 1,
         ("the least possible peak is", *NONE_FITS)),
        ((*SMALL, "--policy", "lean"), 0,
         ("0.13 B parameters on 6 devices", "lean", "eager", "checkpoint", "planner",
          *(f"{rate} (assumed, not measured" for rate in (
            "989.5 TFLOP/s", "780 TFLOP/s", "644 TFLOP/s", "541 TFLOP/s", "3000 GB/s", "50 GB/s",
            "55 GB/s", "2 µs")),
          "optimizer states", "tensor parallel", "longest sequence")),
        ((*SMALL, "--policy", "full", "--device-memory", "10MiB"), 1,
         ("no policy fits into 10.0 MiB", "planner finds no policies that fit",
          "longest sequence that fits at batch 1: nothing fits")),
    ],
)  # fmt: skip
def test_a_command(capsys, arguments, status, parts):
    found, text, error = said(capsys, *arguments)
    shown = " ".join((text + error).split())
    assert found == status and not [part for part in parts if part not in shown]
    assert "Traceback" not in error and ("predicted" in parts or "predicted" not in text)


@pytest.mark.parametrize(
    "command",
    [
        ("report", "mine_for_cli:step", "--batch", 2, "--seq", 8),
        ("plan", "mine_for_cli:with_loss", "--costs", "analytic", "--optimizer", "sgd"),
    ],
)
def test_a_command_draws(capsys, command):
    pytest.importorskip("matplotlib")
    assert said(capsys, *command, "--plot", "drawn.png")[0] == 0
    assert Path("drawn.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("gpt3",), "'gpt3'"),
        (("no_such_module:step",), "No module named 'no_such_module'"),
        (("mine_for_cli:nothing",), "its functions: step, with_loss"),
        (("mine_for_cli:one",), "then a function; got (Linear)"),
        (("mine_for_cli:no_model",), "got (str, Tensor)"),
        (("mine_for_cli:no_loss",), "must be a function, got 0.5"),
        (("mine_for_cli:raises",), "RuntimeError: boom (mine_for_cli.py, line"),
        (("mine_for_cli:bad_loss",), "ZeroDivisionError: division by zero (mine_for_cli.py, line"),
        (("mine_for_cli:numbered",), "got (TransformerEncoder, dict)"),
        (("broken_for_cli:step",), "NameError: name 'undefined' is not defined"),
        (("mine_for_cli:linear",), "no layer to convert"),
        (("mine_for_cli:wants_more", "--seq", 4), "requires 'heads'"),
        (("mine_for_cli:step", "--dtype", "float16"), "no parameter 'dtype'"),
        (("gpt2", "--policy", "leaner"), "'leaner'; valid: full, lean"),
        (("vit-l", "--layers", 10**6), "vit-l with 1000000 layers has "),
        (("vit-l", "--device", "meta"), "'meta'"),
        (("vit-l", "--device", "cuda:99"), "'cuda:99'"),
        (("vit-l", "--json", "no/where.json"), "no folder 'no'"),
        (("mine_for_cli:step", "--plot", "picture.b"), "'picture.b'"),
        (("mine_for_cli:step", "--json", "/proc/none.json"), "cannot write '/proc/none.json'"),
        ((*SMALL, "--model", "llama4"), "smollm-135m, qwen2-1.5b, llama3-8b, gpt3-175b"),
        ((*SMALL, "--mesh", "2x4"), "9 query heads, which 4 tensor-parallel ranks"),
        ((*SMALL, "--mesh", "2x3x4"), "pipeline stages are not supported); got '2x3x4'"),
        ((*SMALL, "--seq", "0"), "--seq must be at least 1, got 0"),
        ((*SMALL, "--policy", "full", "--offload", "attn,mid"), "'attn', 'mid': not kept by 'full"),
        ((*SMALL, "--dtype", "fp32"), "give --costs FILE with products_tflops"),
        ((*SMALL, "--hardware", "here"), "'here' was removed: give --costs FILE"),
        ((*SMALL, "--costs", "none.json"), "none.json"),
        (("plan", "vit-l", "--layers", 1, "--seq", 8, "--offload"), "offload=True on cpu"),
        *(((*ANY, "--budget", b), f" '{b}'") for b in ("much", "0.8", "101%", f"{2**63}")),
        (("plan", "mine_for_cli:frozen"), "check that its parameters require gradients"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_with_the_value(capsys, arguments, what):
    command = arguments if arguments[0] in ("plan", "scale") else ("report", *arguments)
    status, _, error = said(capsys, *command)
    assert status == 2 and what in error and "Traceback" not in error


def test_plan_compares_and_writes_a_plan_that_applies(capsys):
    step = ("plan", "mine_for_cli:step", "--batch", 2, "--costs", "analytic", "--device", "cpu")
    status, text, _ = said(
        capsys, *step, "--budget", "80%", "--compare", "--frontier", "--json", "p.json"
    )
    assert status == 0 and "optimizer state" in text
    made = Plan.from_json(Path("p.json").read_text())
    assert str(made) in text and plan.frontier(made) in text
    assert re.findall(r"^(\w+) .* ms$", text, re.MULTILINE) == METHODS
    model = made.apply(sys.modules["mine_for_cli"].step(2)[0])
    assert [layer.policy for layer in model.layers] == list(made.policies.values())


def test_scale_as_json(capsys):
    status, text, _ = said(capsys, *SMALL, "--policy", "full", "--json")
    found = json.loads(text)
    assert status == 0 and found["parameters"] == 134_515_008
    row = found["rows"]["full"]
    assert row["peak"] == sum(row["memory"].values()) and row["fits"] is True
    assert found["costs"]["name"] == "h100" and not found["costs"]["peak"]["measured"]


def test_scale_of_one_policy_shows_its_own_parts_and_what_is_on_the_host(capsys):
    _, text, _ = said(capsys, *SMALL, "--policy", "lean", "--offload", "attn")
    assert "at its peak (lean)" in text and "time of a step (lean)" in text
    header, *rows = text.split("\n\n")[1].splitlines()
    hosted = {row.split()[0]: row[header.index("on the host") - 2 :].split()[0] for row in rows}
    assert "on the host" in header and hosted["eager"] == "0" != hosted["lean"]
    _, text, _ = said(capsys, *SMALL)
    assert "at its peak (planner)" in text and "on the host" not in text
