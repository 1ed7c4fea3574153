"""Training steps of Hugging Face models, and plans of a stack, on a GPU: which, in which order.

Rows are those of `bench model` and `bench plan`, and of each way what a contest's rows have.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

from bench.commands import plan
from bench.gpu.layers import as_contest
from bench.measure.case import dtype_name
from bench.measure.contest import Entry, Rig
from bench.model.measure import Options, measure
from bench.subjects import stacks
from bench.subjects.configs import MODELS
from bench.subjects.models import Case

#: Model -> sequences of `TOKENS` each: what the unconverted model keeps of them fits into 80 GB.
BATCHES = {"smollm-135m": 8, "qwen2-1.5b": 4}
TOKENS = 2048
RANK = 16
#: Of a card that many have.
CAP = 24 << 30
_HF = ("eager", "checkpoint", "checkpoint_reentrant", "liger", "liger_checkpoint")
WAYS = (*_HF, "full", "lean", "fast", "full_loss", "fast_loss")
SEARCHED = ("eager", "checkpoint", "liger_checkpoint", "full", "fast", "full_loss")
#: Of all of them in a dry run: the interpreter is slow.
DRY = ("eager", "checkpoint", "liger", "full")
#: Than a kernel's contest, for steps take longer, and of plans there are many ways.
_LONGER, _PLANS_LONGER = 2.5, 5.0


def model_entries(rig: Rig) -> Iterator[Entry]:
    if importlib.util.find_spec("transformers") is None:
        yield {"name": "models"}, lambda rig: {"found": {"absent": "transformers is not installed"}}
        return
    for lora in (0,) if rig.dry else (0, RANK):
        for model in list(BATCHES)[: 1 if rig.dry else None]:
            yield _entry(rig, model, lora, None, DRY if rig.dry else WAYS)
    if not rig.dry:
        for model in BATCHES:
            yield _entry(rig, model, 0, CAP, SEARCHED)


def _entry(rig: Rig, model: str, lora: int, cap: int | None, ways: Sequence[str]) -> Entry:
    layers, batch = rig.size(MODELS[model].layers, 1), rig.size(BATCHES[model], 1)
    seq_len, dtype = rig.size(TOKENS, 5), dtype_name(rig.dtype)
    case = Case(model, layers, batch, seq_len, dtype, lora, tiny=rig.dry)
    kind = f"LoRA {lora}" if lora else "full fine-tuning"
    named = {"name": f"{model}, {kind}{', the largest batch' if cap else ''}"}
    options = Options(ways, memory=cap, backend="triton" if rig.dry else "auto")

    def run(rig: Rig) -> dict[str, Any]:
        row = measure(case, options, rig.longer(_LONGER))
        return {"model": dataclasses.asdict(case)} | _row(row, {"held_bytes": "kept_bytes"})

    return named, run


def plan_entries(rig: Rig) -> Iterator[Entry]:
    """A causal stack in this dtype, without `torch.compile`, which takes long."""
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
