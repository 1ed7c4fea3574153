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
from bench.subjects import mixtures, models, stacks
from bench.subjects.layers import BUDGETS, Case
from bench.subjects.layers import WAYS as LAYER_WAYS
from bench.subjects.models import MODELS
from fused_remat.policies import EXACT_PRESETS

SEQ_LEN, HEAD_DIM = 2048, 128
WIDTHS = (2048, 1024, 4096)
_STOCK = ("eager", "checkpoint")
_PEERS = ("selective_matmuls", "torch_remat")
WAYS = (*_STOCK, *_PEERS, *EXACT_PRESETS)
COMPILED = (*_STOCK, "compile", "full", "full_compiled", "lean", "lean_compiled", "none")
MIXTURE_WAYS = (*_STOCK, *EXACT_PRESETS)
#: Of one long sequence.
LONG_LEN, LONG = 32768, (*_STOCK, *EXACT_PRESETS)
_BUDGETS = tuple(f"compile_budget_{budget:g}" for budget in BUDGETS)
BUDGETED = (*_STOCK, "compile", *_BUDGETS, "full", "lean", "fast")
#: Of all of them in a dry run, but for its first layer: the interpreter is slow.
DRY = ("eager", "checkpoint", "full", "none")
_LONGER = 2.5  # than a kernel's contest, for steps take longer

MODEL_TOKENS = 2048
RANK = 16
_CHECKPOINTS = ("checkpoint", "checkpoint_every_2", "checkpoint_offload", "save_on_cpu")
_LIGER = ("liger", "liger_checkpoint")
_HF = ("eager", "checkpoint", *_LIGER)
_LOSS = ("full_loss", "lean_loss", "fast_loss")
MODEL_WAYS = (
    "eager", *_CHECKPOINTS, "trl", "trl_checkpoint", *_LIGER, "full", "lean", "fast", *_LOSS,
)  # fmt: skip
#: Of SmolLM-135M: what is special, batch, ways; what does not fit is absent.
LOSS_CASES = (
    ("with its loss", 8, (*_HF, *_LOSS)),
    ("with its loss, large batch", 200, ("liger_checkpoint", *_LOSS)),
    ("with its loss, by chunk", 200, [f"full_loss_chunk_{tokens}" for tokens in models.CHUNKS]),
)
#: Model, rank of LoRA, batch.
MODELS_MEASURED = (("qwen2-1.5b", 0, 4), ("qwen2-1.5b", RANK, 4), ("smollm-135m", RANK, 8))
#: Of all of them in a dry run: the interpreter is slow.
MODELS_DRY = ("eager", "checkpoint", "liger", "full", "full_loss", "full_loss_chunk_16384")
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
    """Yield pre-norm and post-norm layers without dropout."""
    for layer in _encoders(rig):
        yield _entry(layer, WAYS, others=("none",))


def dropout_entries(rig: Rig) -> Iterator[Entry]:
    """Yield the same layers with dropout."""
    for layer in _encoders(rig, P):
        yield _entry(layer, _fewer(rig, WAYS), others=("none",))


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
    """Yield pre-norm layers, compiled and not, then with memory budgets."""
    for layer in (layer for layer in _encoders(rig) if layer.norm == "pre"):
        for what, ways in ((", compiled", COMPILED), (", budgets", BUDGETED)):
            yield _entry(layer, ways, what)


def mixture_entries(rig: Rig) -> Iterator[Entry]:
    """Yield decoder layers of published mixtures; in ATen in a dry run: 32 experts are many."""
    part, seq_len = rig.size(1, 45), rig.size(MODEL_TOKENS, 5)
    for name in ("gpt-oss-20b",) if rig.dry else mixtures.MIXTURES:
        case = mixtures.Case(name, part, 1, seq_len, dtype_name(rig.dtype))

        def run(rig: Rig, case: mixtures.Case = case) -> dict[str, Any]:
            if importlib.util.find_spec("transformers") is None:
                return {"found": {"absent": "transformers is not installed"}}
            longer = rig.longer(_LONGER)
            row = measure_ways(case.subject(rig.device), mixtures.WAYS, MIXTURE_WAYS, longer)
            return {"mixture": dataclasses.asdict(case), **row}

        yield {"name": name, "seq_len": seq_len}, run


# --- models and plans


def loss_entries(rig: Rig) -> Iterator[Entry]:
    """Yield SmolLM-135M with its loss at a small and a large batch, and by size of chunks."""
    for what, batch, ways in LOSS_CASES:
        yield _model_entry(rig, model_case(rig, "smollm-135m", 0, batch), ways, what)


def model_entries(rig: Rig) -> Iterator[Entry]:
    """Yield Qwen2-1.5B, then both models with LoRA."""
    for given in MODELS_MEASURED[: 1 if rig.dry else None]:
        yield _model_entry(rig, model_case(rig, *given), MODEL_WAYS)


def model_case(rig: Rig, name: str, lora: int, batch: int) -> models.Case:
    layers, batch = rig.size(MODELS[name].layers, 1), rig.size(batch, 1)
    seq_len, dtype = rig.size(MODEL_TOKENS, 5), dtype_name(rig.dtype)
    return models.Case(name, layers, batch, seq_len, dtype, lora, tiny=rig.dry)


def _model_entry(rig: Rig, case: models.Case, ways: Sequence[str], what: str = "") -> Entry:
    kind = what or (f"LoRA {case.lora}" if case.lora else "full fine-tuning")
    named = {"name": f"{case.model}, {kind}", "batch": case.batch}
    backend = "triton" if rig.dry else "auto"
    ways = [way for way in ways if way in MODELS_DRY] if rig.dry else ways

    def run(rig: Rig) -> dict[str, Any]:
        # Few rounds where a step takes seconds.
        rounds = 3 if case.batch > 100 else rig.rounds
        longer = dataclasses.replace(rig.longer(_LONGER), rounds=rounds)
        if importlib.util.find_spec("transformers") is None:
            return {"found": {"absent": "transformers is not installed"}}
        row = model.measure(case, longer, ways, backend)
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
