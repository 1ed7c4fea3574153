"""Training steps of layers, models and plans on a GPU: which, in which order.

Rows are those of `bench layers`, `model` and `plan`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from bench.commands import model, plan
from bench.measure.case import dtype_name
from bench.measure.contest import Entry, P, Rig
from bench.measure.steps import measure as measure_ways
from bench.subjects import models, stacks
from bench.subjects.layers import BUDGETS, Case
from bench.subjects.layers import WAYS as LAYER_WAYS
from bench.subjects.models import MODELS
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


def _entry(layer: Case, ways: Sequence[str], what: str = "", others: Sequence[str] = ()) -> Entry:
    """Return an encoder layer's case, and a function that measures it."""

    def run(rig: Rig) -> dict[str, Any]:
        subject = layer.subject(rig.device)
        if rig.dry:
            subject.backend, subject.compiler = "triton", "aot_eager_decomp_partition"
        row = measure_ways(subject, LAYER_WAYS, ways, rig.longer(_LONGER), others=others)
        return {"layer": dataclasses.asdict(layer), **row}

    sizes = {"width": layer.d_model, "seq_len": layer.seq_len, "dropout": layer.dropout}
    return {"name": f"{layer.norm}-norm{what}", **sizes}, run


def encoder(rig: Rig, norm: str, width: int, dropout: float = 0.0) -> Case:
    """Return a causal encoder layer, head dim 128; dropout of the residuals and in the MLP."""
    tokens = 16384 if width <= 2048 else 8192
    batch, seq_len = rig.size(tokens // SEQ_LEN, 2), rig.size(SEQ_LEN, 9)
    return Case(
        dtype_name(rig.dtype), norm, dropout, batch, seq_len, width, rig.size(width // HEAD_DIM, 2),
        causal=True, attention_dropout=0.0,
    )  # fmt: skip


def long_encoder(rig: Rig) -> Case:
    base = encoder(rig, "pre", rig.size(WIDTHS[0], 32))
    return dataclasses.replace(base, batch=1, seq_len=rig.size(LONG_LEN, 5))


# --- what is measured, the most telling first


def _encoders(rig: Rig, dropout: float = 0.0) -> Iterator[Case]:
    norms, widths = (("pre",), (32,)) if rig.dry else (("pre", "post"), WIDTHS)
    for norm, width in itertools.product(norms, widths):
        yield encoder(rig, norm, width, dropout)


def _fewer(rig: Rig, ways: Sequence[str]) -> Sequence[str]:
    return [way for way in ways if way in DRY] if rig.dry else ways


def layer_entries(rig: Rig) -> Iterator[Entry]:
    for dropout in (0.0, P):
        for layer in _encoders(rig, dropout):
            yield _entry(layer, _fewer(rig, WAYS) if dropout else WAYS, others=("none",))


def frontier_entries(rig: Rig) -> Iterator[Entry]:
    """Yield short and long sequences at one width: with the layers', the frontier over S."""
    base = next(_encoders(rig))
    for seq_len in (7,) if rig.dry else (16384, 512, 4096):
        batch = max(1, base.batch * base.seq_len // seq_len)
        layer = dataclasses.replace(base, batch=batch, seq_len=seq_len)
        yield _entry(layer, _fewer(rig, WAYS))


def long_entries(rig: Rig) -> Iterator[Entry]:
    """Yield one long sequence, of which attention takes most of the time: presets and eager."""
    ways = ("eager", "none") if rig.dry else LONG
    yield _entry(long_encoder(rig), ways, others=("none",))


def compile_entries(rig: Rig) -> Iterator[Entry]:
    for layer in _encoders(rig):
        for what, ways in ((", compiled", COMPILED), (", budgets", BUDGETED)):
            yield _entry(layer, ways, what)


# --- models and plans


def model_entries(rig: Rig) -> Iterator[Entry]:
    if importlib.util.find_spec("transformers") is None:
        yield {"name": "models"}, lambda rig: {"found": {"absent": "transformers is not installed"}}
        return
    for lora in (0,) if rig.dry else (0, RANK):
        for name in list(BATCHES)[: 1 if rig.dry else None]:
            for batch in BATCHES[name][: 1 if rig.dry or lora else None]:
                yield _model_entry(rig, name, lora, batch)


def _model_entry(rig: Rig, name: str, lora: int, batch: int) -> Entry:
    layers, batch = rig.size(MODELS[name].layers, 1), rig.size(batch, 1)
    seq_len, dtype = rig.size(MODEL_TOKENS, 5), dtype_name(rig.dtype)
    case = models.Case(name, layers, batch, seq_len, dtype, lora, tiny=rig.dry)
    kind = f"LoRA {lora}" if lora else "full fine-tuning"
    named = {"name": f"{name}, {kind}", "batch": batch}
    ways, backend = (MODELS_DRY, "triton") if rig.dry else (MODEL_WAYS, "auto")

    def run(rig: Rig) -> dict[str, Any]:
        row = model.measure(case, rig.longer(_LONGER), ways, backend)
        return {"model": dataclasses.asdict(case)} | row

    return named, run


def plan_entries(rig: Rig) -> Iterator[Entry]:
    """Yield a causal stack in this dtype, without `torch.compile`, which takes long."""
    layers, batch, seq_len, width, heads = (3, 1, 8, 16, 2) if rig.dry else plan.SIZES["cuda"]
    kind = layers, dtype_name(rig.dtype), "pre", 0.0
    case = stacks.Case(*kind, batch, seq_len, width, heads, causal=True)

    def run(rig: Rig) -> dict[str, Any]:
        row = plan.measure(case, rig.longer(_PLANS_LONGER), plan.peers(compiled=False))
        return {"stack": dataclasses.asdict(case)} | row

    yield {"name": "plans", "layers": layers, "width": width}, run
