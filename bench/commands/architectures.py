"""How the layers of many architectures are read, and what a training step of each keeps.

    python -m bench architectures --names llama bert

Each is a tiny random model of tests/recognition/models.py. It takes a step as it is, with its own
gradient checkpointing if it has any, and converted under three presets. Of each: the bytes that the
model's forward saves for backward, each storage once, without parameters and buffers; loss and
gradients beside those of the stock model. Bytes are counted in float32; what is compared is
computed in float64, except by layers of others that run in float32 alone.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bench.measure.machine import environment, version
from bench.measure.options import Parser, positive
from bench.measure.registry import refusal
from bench.measure.results import ResultsFile, Row
from bench.pages import architectures as report
from fused_remat import FusedRematWarning, conversion, convert
from fused_remat.report.allocations import SavedBytes
from tests.recognition import models

PRESETS = ("full", "balanced", "none")
WAYS = ("stock", "checkpoint", *PRESETS)
#: In the order in which they are tried: what is compared is of the last that runs.
DTYPES = {"float32": torch.float32, "float64": torch.float64}
#: Packages that have another name than their module.
PACKAGES = {"whisper": "openai-whisper"}
#: A gradient this far from the stock model's is wrong: the test of the same models has this bound.
ALLOWED = 3e-5


#: The method by which a model is told to checkpoint: transformers', diffusers', timm's.
SWITCHES = (
    "activation_checkpointing_enable", "gradient_checkpointing_enable",
    "enable_gradient_checkpointing", "set_grad_checkpointing",
)  # fmt: skip


def checkpointed(model: Any) -> list[nn.Module] | None:
    """Turns a model's own checkpointing on; None if it has none.

    Returns: transformers' layers, whose arguments by name a closure holds, unseen by autograd.
    """
    switch = next((name for name in SWITCHES if hasattr(model, name)), None)
    if switch is None or not getattr(model, "supports_gradient_checkpointing", True):
        return None
    getattr(model, switch)()
    kind = "GradientCheckpointingLayer"
    found = [m for m in model.modules() if kind in [base.__name__ for base in type(m).__mro__]]
    within = {part for outer in found for part in outer.modules() if part is not outer}
    return [layer for layer in found if layer not in within]  # Swin's layers, in its stages


def step(model: nn.Module, batch: Row, closures: Sequence[nn.Module]) -> Row:
    """Loss, gradients and bytes of a step: `kept`, and with what closures hold, `held`."""
    model.zero_grad(set_to_none=True)
    own = [t for t in (*model.parameters(), *model.buffers()) if t.layout == torch.strided]
    saved, beside = SavedBytes(own), list[Tensor]()

    def see(layer: nn.Module, args: Any, kwargs: Any) -> None:
        beside.extend(t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor))

    hooks = [m.register_forward_pre_hook(see, with_kwargs=True) for m in closures]
    with saved:
        output = model(**batch)
    for hook in hooks:
        hook.remove()
    kept = saved.total
    for tensor in beside:
        saved._pack(tensor)  # each storage once, those that autograd has saved included
    loss = models.loss_of(output)
    loss.backward()
    grads = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.item(), "kept": kept, "held": saved.total, "grads": grads}


def run(name: str, way: str, dtype: torch.dtype, tokens: int) -> tuple[nn.Module, Row | None]:
    """The second step of a fresh model: the first one reads layers, and fills caches."""
    model, batch = models.build(name, tokens)
    model.to(dtype)
    batch = {
        key: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
        for key, x in batch.items()
    }
    closures: list[nn.Module] | None = []
    if way in PRESETS:
        convert(model, policy=way)
    elif way == "checkpoint":
        closures = checkpointed(model)
    if closures is None:
        return model, None
    step(model, batch, ())
    return model, step(model, batch, closures)


def compared(found: Row, stock: Row) -> Row:
    """Relative distances of the loss, and of the gradient that differs most.

    One that is zero but for rounding, as that of a key's bias, is compared with the largest.
    """
    loss = abs(found["loss"] - stock["loss"]) / abs(stock["loss"])
    least = 1e-6 * max(float(g.norm()) for g in stock["grads"].values())
    if found["grads"].keys() != stock["grads"].keys():
        return {"loss": loss, "gradient": float("inf"), "parameter": "another set"}
    distances = {
        n: float((found["grads"][n] - g).norm()) / (float(g.norm()) + least)
        for n, g in stock["grads"].items()
    }
    worst = max(distances, key=distances.__getitem__)
    return {"loss": loss, "gradient": distances[worst], "parameter": worst}


def measure(name: str, tokens: int) -> Row:
    """What `convert` made of an architecture, and its ways."""
    row: Row = {"layers": models.MODELS[name].layers, "ways": {}}
    for dtype_name, dtype in DTYPES.items():
        try:
            stock = run(name, "stock", dtype, tokens)[1]
        except RuntimeError:
            if dtype == torch.float32:
                raise
            return row
        assert stock is not None
        for way in WAYS:
            model, found = run(name, way, dtype, tokens) if way != "stock" else (None, stock)
            if found is None:
                row["ways"][way] = {"absent": "has none"}
                continue
            if dtype == torch.float32:
                row["ways"][way] = {"kept": found["kept"], "held": found["held"]}
            row["ways"][way] |= {"dtype": dtype_name, "error": compared(found, stock)}
            if way == PRESETS[0] and dtype == torch.float32 and model is not None:
                row["conversion"] = [dataclasses.asdict(kind) for kind in conversion(model)]
    return row


def measured(name: str, tokens: int) -> Row:
    try:
        return measure(name, tokens)
    except ImportError:
        return {"absent": f"{models.MODELS[name].needs} is not installed"}
    except Exception as error:  # one broken architecture must not cost the others' rows
        return refusal(error)


def main(arguments: Sequence[str]) -> int:
    """Run, print, and write architectures.json; 1 if a gradient is wrong or a model fails."""
    parser = Parser("architectures", __doc__, "threads out fresh")
    parser.several("names", choices=models.MODELS, default=list(models.MODELS), metavar="NAME")
    parser.add("--tokens", type=positive, default=64, help="of text or sound, 64 at most")
    args = parser.parse(arguments)
    where = environment("cpu")
    needed = {row.needs for row in models.MODELS.values() if row.needs}
    packages = sorted(PACKAGES.get(name, name) for name in needed)
    where["versions"] = {name: version(name) for name in packages}
    config = {"batch": models.B, "tokens": args.tokens}
    results = ResultsFile(args.out / "architectures.json", where, config)
    for name in args.names:
        case = {"name": name}
        row = None if args.fresh else results.find(case, WAYS)
        if row is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FusedRematWarning)  # what is left is in the row
                row = {"case": case} | measured(name, args.tokens)
            results.put(row)
        print(report.line(row), flush=True)
    wrong = [row["case"]["name"] for row in results.rows if not report.is_right(row, ALLOWED)]
    if wrong:
        print(f"wrong: {', '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))
