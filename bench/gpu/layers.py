"""Training steps of layers, models and plans on a GPU: which, in which order.

Rows are those of `bench layers`, `model` and `plan`, with the keys of a contest's ways.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from bench.commands import plan
from bench.measure.case import Subject, dtype_name
from bench.measure.contest import Entry, P, Rig
from bench.measure.models import Options
from bench.measure.models import measure as measure_model
from bench.measure.steps import Step
from bench.measure.steps import measure as measure_ways
from bench.subjects import models, stacks
from bench.subjects.configs import MODELS
from bench.subjects.layer_ways import BUDGETS
from bench.subjects.layer_ways import WAYS as LAYER_WAYS
from bench.subjects.layers import Case
from fused_remat.policies import EXACT_PRESETS

SEQ_LEN, HEAD_DIM = 2048, 128
WIDTHS = (2048, 1024, 4096)
_STOCK = ("eager", "checkpoint")
_PEERS = ("selective_matmuls", "torch_remat")
WAYS = (*_STOCK, *_PEERS, *EXACT_PRESETS)
COMPILED = (*_STOCK, "compile", "full", "full_compiled", "fast", "fast_compiled")
#: Of one long sequence.
LONG_LEN, LONG = 32768, (*_STOCK, *EXACT_PRESETS)
_BUDGETS = tuple(f"compile_budget_{budget:g}" for budget in BUDGETS)
BUDGETED = (*_STOCK, "compile", *_BUDGETS, "full", "lean", "fast")
#: Of all of them in a dry run, but for its first layer: the interpreter is slow.
DRY = ("eager", "checkpoint", "full", "none")
_LONGER = 2.5  # than a kernel's contest, for steps take longer

#: Model -> batches of sequences of `MODEL_TOKENS`; where eager's does not fit, it is absent.
BATCHES = {"smollm-135m": (8, 200), "qwen2-1.5b": (4,)}
MODEL_TOKENS = 2048
RANK = 16
_HF = ("eager", "checkpoint", "liger", "liger_checkpoint")
MODEL_WAYS = (*_HF, "full", "lean", "fast", "full_loss", "fast_loss")
#: Of all of them in a dry run: the interpreter is slow.
MODELS_DRY = ("eager", "checkpoint", "liger", "full")
#: Than a kernel's contest, for there are many ways.
_PLANS_LONGER = 5.0


def measure(
    subject: Subject, names: Sequence[str], rig: Rig, timer: type[Step] = Step, **beside: Any
) -> dict[str, Any]:
    """Return a row, with ratios to the baselines and `beside`."""
    if rig.dry:
        subject.backend, subject.compiler = "triton", "aot_eager_decomp_partition"
    given = subject, LAYER_WAYS, names, rig.longer(_LONGER), timer
    return as_contest(measure_ways(*given, **beside))


def as_contest(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose ways have the keys of a contest's."""
    words, ways = {"failure": "error", "unavailable": "absent"}, {}
    for name, found in row["ways"].items():
        ways[name] = {word: found[key] for key, word in words.items() if key in found}
        if not ways[name]:
            ways[name] = found | {
                "us": {level: 1e6 * t for level, t in found["step_seconds"].items()},
                "ratio": found["step_ratio"],
                "host_us": 1e6 * found["host_seconds"]["p50"],
            }
    return row | {"ways": ways}


def _entry(layer: Case, ways: Sequence[str], what: str = "", *timer: Any, **rest: Any) -> Entry:
    """Return an encoder layer's case, and a function that measures it."""

    def run(rig: Rig) -> dict[str, Any]:
        row = measure(layer.subject(rig.device), ways, rig, *timer, **rest)
        return {"layer": dataclasses.asdict(layer), **row}

    told = {name: getattr(layer, name) for name in ("seq_len", "dropout")}
    return {"name": f"{layer.norm}-norm{what}", "width": layer.d_model, **told}, run


def tokens_of(width: int) -> int:
    return 16384 if width <= 2048 else 8192


def encoder(rig: Rig, norm: str, width: int, dropout: float = 0.0) -> Case:
    """Return a causal encoder layer, head dim 128; dropout of the residuals and in the MLP."""
    batch, seq_len = rig.size(tokens_of(width) // SEQ_LEN, 2), rig.size(SEQ_LEN, 9)
    return Case(
        dtype_name(rig.dtype), norm, dropout, batch, seq_len, width, rig.size(width // HEAD_DIM, 2),
        causal=True, attention_dropout=0.0,
    )  # fmt: skip


def long_encoder(rig: Rig) -> Case:
    base = encoder(rig, "pre", rig.size(WIDTHS[0], 32))
    return dataclasses.replace(base, batch=1, seq_len=rig.size(LONG_LEN, 5))


# --- what is measured, the most telling first


def widths(rig: Rig) -> Sequence[int]:
    return (32,) if rig.dry else WIDTHS


def _grid(rig: Rig) -> Iterator[Case]:
    for norm, width in itertools.product(("pre",) if rig.dry else ("pre", "post"), widths(rig)):
        yield encoder(rig, norm, width)


def _fewer(rig: Rig, ways: Sequence[str]) -> Sequence[str]:
    return [way for way in ways if way in DRY] if rig.dry else ways


def layer_entries(rig: Rig) -> Iterator[Entry]:
    for dropout in (0.0, P):
        for norm in ("pre",) if rig.dry and dropout else ("pre", "post"):
            for width in widths(rig):
                ways = WAYS if (norm, dropout) == ("pre", 0.0) else _fewer(rig, WAYS)
                yield _entry(encoder(rig, norm, width, dropout), ways, beside=("none",))


def frontier_entries(rig: Rig) -> Iterator[Entry]:
    """Short and long sequences at one width: with the layers', the sweep over S of the frontier."""
    base = encoder(rig, "pre", widths(rig)[0])
    for seq_len in (7,) if rig.dry else (16384, 512, 4096):
        batch = max(1, base.batch * base.seq_len // seq_len)
        layer = dataclasses.replace(base, batch=batch, seq_len=seq_len)
        yield _entry(layer, _fewer(rig, WAYS))


def long_entries(rig: Rig) -> Iterator[Entry]:
    """One long sequence, of which attention takes most of the time: presets beside each other."""
    ways = ("eager", "none") if rig.dry else LONG
    yield _entry(long_encoder(rig), ways, beside=("none",))


def compile_entries(rig: Rig) -> Iterator[Entry]:
    for layer in _grid(rig):
        for what, ways in ((", compiled", COMPILED), (", budgets", BUDGETED)):
            yield _entry(layer, ways, what)


# --- whole models, and plans


def model_entries(rig: Rig) -> Iterator[Entry]:
    if importlib.util.find_spec("transformers") is None:
        yield {"name": "models"}, lambda rig: {"found": {"absent": "transformers is not installed"}}
        return
    for lora in (0,) if rig.dry else (0, RANK):
        for model in list(BATCHES)[: 1 if rig.dry else None]:
            for batch in BATCHES[model][: 1 if rig.dry or lora else None]:
                yield _model_entry(rig, model, lora, batch)


def _model_entry(rig: Rig, model: str, lora: int, batch: int) -> Entry:
    layers, batch = rig.size(MODELS[model].layers, 1), rig.size(batch, 1)
    seq_len, dtype = rig.size(MODEL_TOKENS, 5), dtype_name(rig.dtype)
    case = models.Case(model, layers, batch, seq_len, dtype, lora, tiny=rig.dry)
    kind = f"LoRA {lora}" if lora else "full fine-tuning"
    named = {"name": f"{model}, {kind}", "batch": batch}
    ways = MODELS_DRY if rig.dry else MODEL_WAYS
    options = Options(ways, backend="triton" if rig.dry else "auto")

    def run(rig: Rig) -> dict[str, Any]:
        row = measure_model(case, options, rig.longer(_LONGER))
        return {"model": dataclasses.asdict(case)} | _row(row, {"held_bytes": "kept_bytes"})

    return named, run


def plan_entries(rig: Rig) -> Iterator[Entry]:
    """Yield a causal stack in this dtype, without `torch.compile`, which takes long."""
    layers, batch, seq_len, width, heads = (3, 1, 8, 16, 2) if rig.dry else plan.SIZES["cuda"]
    kind = layers, dtype_name(rig.dtype), "pre", 0.0
    case = stacks.Case(*kind, batch, seq_len, width, heads, causal=True)

    def run(rig: Rig) -> dict[str, Any]:
        row = plan.measure(case, plan.peers(compiled=False), rig.longer(_PLANS_LONGER))
        known = {"held_bytes": "kept_bytes", "step_peak_bytes": "peak_bytes"}
        return {"stack": dataclasses.asdict(case)} | _row(row, known)

    yield {"name": "plans", "layers": layers, "width": width}, run


def _row(row: dict[str, Any], known: dict[str, str]) -> dict[str, Any]:
    """As rows of layers are, whose names of bytes are `known` here by others."""
    made = as_contest(row)
    for name, found in row["ways"].items():
        made["ways"][name] |= {name: found[key] for name, key in known.items() if key in found}
    return made
