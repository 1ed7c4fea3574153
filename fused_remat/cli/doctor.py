"""`doctor`: shows devices, packages and backends, and checks a small step on each device."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat.cli.options import new_parser
from fused_remat.execution import choose
from fused_remat.execution.observe import is_checked
from fused_remat.layers import FusedRematLayer, FusedRematWarning
from fused_remat.report.explain import explain
from fused_remat.report.units import aligned, device_memory, human
from fused_remat.version import __version__

_DESCRIPTION = """\
Lists devices and packages. For each device and dtype, shows which backend and attention
implementation run and why no faster one does, and compares the gradients of a small
FusedRematLayer with those of torch.nn.TransformerEncoderLayer.
"""
_EXAMPLES = """
examples:
  python -m fused_remat doctor
  python -m fused_remat doctor --json > machine.json     # for a bug report

The exit status is 1 if a step raises an error or computes wrong gradients on any device.
"""
#: Packages, with how to install those that are optional, and why.
_PACKAGES = {
    "torch": "",
    "numpy": "",
    "triton": "pip install triton (Linux): kernels for NVIDIA GPUs",
    "transformers": 'pip install "fused-remat[hf]": converting Hugging Face models',
    "peft": 'pip install "fused-remat[hf]": LoRA adapters in Hugging Face models',
    "matplotlib": 'pip install "fused-remat[bench]": charts',
}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SIZES: dict[str, Any] = {
    "d_model": 128, "nhead": 2, "dim_feedforward": 256, "batch_first": True, "norm_first": True
}  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Print the findings; return 1 if a step is wrong."""
    parser = new_parser("doctor", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(arguments)
    found = examine()
    print(json.dumps(found, indent=1) if args.json else "\n".join(_lines(found)))
    return 0 if found["ok"] else 1


def examine() -> dict[str, Any]:
    """Return everything that `doctor` prints, as plain data."""
    devices = _devices()
    steps = [_step(device["device"], dtype) for device in devices for dtype in _DTYPES]
    return {
        "fused_remat": __version__,
        "devices": devices,
        "versions": _versions(),
        "steps": steps,
        "replay_check": is_checked(),
        "ok": all(step["ok"] for step in steps),
    }


def _devices() -> list[dict[str, Any]]:
    """Return the CPU and all CUDA devices."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    what = f"{torch.get_num_threads()} threads"
    found = [{"device": "cpu", "name": name, "what": what, "memory": device_memory("cpu")}]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        gpu = torch.cuda.get_device_properties(index)
        what = f"compute capability {gpu.major}.{gpu.minor}"
        device = {"device": f"cuda:{index}", "name": gpu.name, "what": what}
        found.append(device | {"memory": gpu.total_memory})
    return found


def _versions() -> dict[str, str | None]:
    """Return the versions of the packages; some have another name where they are distributed."""
    names = importlib.metadata.packages_distributions()
    known = {p: importlib.metadata.version(names[p][0]) if p in names else None for p in _PACKAGES}
    # That of torch includes the CUDA version that it was built for.
    return {"python": platform.python_version(), **known, "torch": str(torch.__version__)}


def _step(device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Run a `FusedRematLayer` on a device; return its backend, attention and gradient errors.

    "error" is why the step raised or did not take the fused path. "ok" means that "difference", the
    relative error of the gradients, is at most double that of the stock layer plus the dtype's eps.
    """
    chosen = choose.ops_for("auto", torch.empty(1, device=device, dtype=dtype)).name
    others = [name for name in choose.BACKENDS if name != chosen]
    reasons = {n: choose.unsupported_reason(n, torch.device(device), dtype) for n in others}
    step: dict[str, Any] = {
        "device": device,
        "dtype": str(dtype).removeprefix("torch."),
        "backend": chosen,
        "unsupported": {name: reason for name, reason in reasons.items() if reason},
        **dict.fromkeys(("attention", "attention_dropout", "difference", "stock", "error")),
        "ok": False,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FusedRematWarning)  # the result has the reasons
        try:
            step["attention"] = _attention(device, dtype, 0.0)
            step["attention_dropout"] = _attention(device, dtype, 0.1)
            step["difference"], step["stock"] = _differences(device, dtype)
            # A comparison with NaN is False.
            step["ok"] = step["difference"] <= 2 * step["stock"] + torch.finfo(dtype).eps
        except Exception as error:  # any error is a finding
            step["error"] = f"{type(error).__name__}: {error}"
    return step


def _attention(device: str, dtype: torch.dtype, dropout: float) -> str:
    """Return the implementation that attention uses, with heads of width 64 and no masks."""
    layer = FusedRematLayer(**_SIZES, dropout=dropout, device=device, dtype=dtype)
    (block,) = explain(layer, _input(device, dtype))
    if block.reason:
        raise RuntimeError(f"not fused: {block.reason}")
    return dict(block.forward)["attn"]


def _input(device: str, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)  # leaves the global random state alone
    return torch.randn(2, 64, _SIZES["d_model"], generator=generator).to(device, dtype)


def _differences(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """Return relative errors |g − g'| / |g'| of gradients: of the fused and of the stock layer.

    g' are those of the stock layer in float64 with the rounded weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        stock = nn.TransformerEncoderLayer(**_SIZES, dropout=0.0).to(device, dtype)
    fused = FusedRematLayer(**_SIZES, dropout=0.0, device=device, dtype=dtype)
    fused.load_state_dict(stock.state_dict())
    x = _input(device, dtype)
    ours, theirs = _gradients(fused, x), _gradients(stock, x)
    exact = _gradients(stock.double(), x.double())
    norm = float(exact.norm())
    return float((ours - exact).norm()) / norm, float((theirs - exact).norm()) / norm


def _gradients(layer: nn.Module, x: Tensor) -> Tensor:
    """Return the gradients of the input and of all parameters in one float64 vector."""
    x = x.detach().requires_grad_()
    loss = (layer(x) * x.detach().flip(1)).sum()  # a plain sum has almost no gradient behind a norm
    grads = torch.autograd.grad(loss, [x, *layer.parameters()])
    return torch.cat([grad.double().flatten() for grad in grads])


def _lines(found: dict[str, Any]) -> Iterator[str]:
    steps = found["steps"]
    check = "on" if found["replay_check"] else "off"
    yield f"fused_remat {found['fused_remat']}"
    for title, table in (
        ("devices", [[d["device"], d["name"], d["what"], human(d["memory"])]
                     for d in found["devices"]]),
        ("versions", [[name, version or f"not installed; {_PACKAGES[name]}"]
                      for name, version in found["versions"].items()]),
        ('backends that "auto" chooses',
         [[step["device"], step["dtype"], step["backend"],
           "; ".join(f"not {name}: {reason}" for name, reason in step["unsupported"].items())]
          for step in steps]),
        ("attention, with heads of width 64 and no masks",
         [[step["device"], step["dtype"], shown, step[key] or "unknown"] for step in steps
          for key, shown in (("attention", "no dropout"), ("attention_dropout", "dropout"))]),
        ("replay check", [[f"{check} (FUSED_REMAT_CHECK)"]]),
        ("gradients of a small step, compared with the stock layer in float64",
         [[step["device"], step["dtype"], *_result(step)] for step in steps]),
    ):  # fmt: skip
        yield f"\n{title}"
        yield from (f"  {line}" for line in aligned(table, left=len(table[0])))
    yield "\nresult: ok" if found["ok"] else "\nresult: failed; see the small steps above"


def _result(step: dict[str, Any]) -> list[str]:
    if step["error"] is not None:
        return ["FAIL", step["error"]]
    errors = f"error {step['difference']:.1e} (stock layer in this dtype: {step['stock']:.1e})"
    return ["ok" if step["ok"] else "WRONG", errors]
