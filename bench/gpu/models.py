"""Training steps of whole Hugging Face models on a GPU: which of `bench.model`, in which order.

Rows are those of `bench.model.measure`, and besides of each way what a contest's rows have.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench.gpu.layers import as_contest
from bench.layers.subjects import DTYPES
from bench.measure.contest import Rig
from bench.model.configs import MODELS
from bench.model.measure import Options, measure
from bench.model.subjects import Case

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
_LONGER = 2.5  # than a kernel's contest, for steps take longer

Entry = tuple[dict[str, Any], Callable[[Rig], dict[str, Any]]]


def model_entries(rig: Rig) -> Iterator[Entry]:
    """Both models with everything trained, then with LoRA; then their largest batches."""
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
    dtype = next(name for name, dtype in DTYPES.items() if dtype == rig.dtype)
    layers, batch = rig.size(MODELS[model].layers, 1), rig.size(BATCHES[model], 1)
    case = Case(model, layers, batch, rig.size(TOKENS, 5), dtype, lora, tiny=rig.dry)
    kind = f"LoRA {lora}" if lora else "full fine-tuning"
    named = {"name": f"{model}, {kind}{', the largest batch' if cap else ''}"}
    options = Options(
        rig.device.type, ways, rig.rounds, memory=cap, backend="triton" if rig.dry else "auto"
    )
    return named, lambda rig: _measure(case, options, rig)


def _measure(case: Case, options: Options, rig: Rig) -> dict[str, Any]:
    longer = dataclasses.replace(rig, seconds=_LONGER * rig.seconds)
    row = measure(case, options, rig=longer)
    ways = {}
    for name, found in row["ways"].items():
        kept = {"held_bytes": found["kept_bytes"]} if "kept_bytes" in found else {}
        ways[name] = as_contest(found) | kept
    return row | {"model": row.pop("case"), "ways": ways}
