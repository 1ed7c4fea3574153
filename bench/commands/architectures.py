"""Every architecture: a converted model's step compared with its own checkpointing.

    python -m bench architectures                                    # hours: all, in every variant
    python -m bench architectures --names LlamaForCausalLM unet --variants bare lora
    python -m bench architectures --names flux wan --policy lean --tokens 256 --out build/lean

Of each model of bench/subjects/architectures.py and each variant that it has, three copies of equal
weights take two steps: stock, with its own checkpointing (transformers', diffusers', or
torch.utils.checkpoint around its layers), and converted with a policy. Gradients are added to those
that exist. The second step is compared: gradients with the stock model's; live bytes between
forward and backward, and the most at any moment, with checkpointing's; also the most of the first
step, which traces. Bytes are those of torch's allocator. Times are medians of later steps, each
after another one of the same way. A case that has its row in architectures.json already is not
measured again; the status is 1 if any check fails, and what fails is listed. Bytes are checked of
the policy "full" alone: others keep more than checkpointing does.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import itertools
import math
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.measure.machine import environment, version
from bench.measure.options import Parser, positive, progress
from bench.measure.registry import Absent, described, refusal
from bench.pages import architectures as report
from bench.subjects.architectures import ARCHITECTURES, Batch, build
from bench.subjects.models import quantize
from bench.tables import ResultsFile, Row
from fused_remat import conversion, convert
from fused_remat.execution.observe import OBSERVERS, BlockRun
from fused_remat.execution.program import FEW
from fused_remat.graph.schedule import kept_bytes
from fused_remat.policies import EXACT_PRESETS
from fused_remat.report.allocations import AllocationTrace
from fused_remat.tracing.discovery import repeated_layers
from tests.tracing import models

#: A gradient further than this from the stock model's, relative to its norm, is wrong. Sums in
#: another order change 1e-6 of most in float32, and up to 5e-5 of those of scalars and of norms of
#: heads, whose terms cancel; transformers computes those in float32 even in a float64 model.
ALLOWED = 1e-4
#: Kept bytes, and the peak, as multiples of checkpointing's.
KEPT, PEAK = 1.02, 1.05
#: Bytes for each parameter of the largest layer that the first step may take beyond: a float64 copy
#: of the layer, and a float32 one of its gradients.
TRACED = 12
STEPS, ROUNDS = 2, 3
#: Steps of each way before any is timed: until passes run as programs.
WARM_UP = FEW + 2
#: How the reason ends of a layer whose forward updates a buffer or a cache, which checkpointing
#: would do again: it runs plainly, and keeps more.
_EFFECTS = "which a block would not repeat", "fills a cache that other modules may read"
_PLAIN = {"use_reentrant": False}


# Variants.


def _adapted(model: Any, dora: bool = False) -> nn.Module:
    """Put random adapters on all linear layers, and freeze everything else."""
    peft = importlib.import_module("peft")
    options = peft.LoraConfig(r=8, target_modules="all-linear", use_dora=dora)
    try:
        adapted: nn.Module = peft.get_peft_model(model, options)
    except ValueError as error:  # no linear layer that it knows
        raise Absent(described(error)) from error
    with torch.no_grad():
        for p in adapted.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape), alpha=0.02)
    return adapted


def _quantized(model: nn.Module, kind: str) -> nn.Module:
    """Quantize the linear layers of a model's layers as bitsandbytes does, and add adapters."""
    quantize(model, kind)
    return _adapted(model)


class Variant(NamedTuple):
    change: Callable[[Any], nn.Module] = lambda model: model
    batch: Callable[[Any, Batch], Batch] = lambda model, batch: batch
    needs: tuple[str, ...] = ()


def _cached(model: Any, batch: Batch) -> Batch:
    if "use_cache" not in batch:
        raise Absent("it has no cache")
    return {name: value for name, value in batch.items() if name != "use_cache"}


def _routed(model: Any, batch: Batch) -> Batch:
    """Request the loss that balances the experts."""
    if not hasattr(getattr(model, "config", None), "output_router_logits"):
        raise Absent("it gives no router logits")
    labels = batch.get("decoder_input_ids", batch["input_ids"])
    return batch | {"output_router_logits": True, "labels": labels}


VARIANTS = {
    "bare": Variant(),
    "cache": Variant(batch=_cached),
    "router": Variant(batch=_routed),
    "lora": Variant(_adapted, needs=("peft",)),
    "dora": Variant(functools.partial(_adapted, dora=True), needs=("peft",)),
    # Quantized weights are frozen, so that these have LoRA's adapters, too.
    **{
        kind: Variant(functools.partial(_quantized, kind=kind), needs=("peft", "bitsandbytes"))
        for kind in ("nf4", "int8")
    },
}


def variant_of(name: str, kind: str, tokens: int) -> tuple[nn.Module, Batch]:
    """Build a model in a variant, and its batch."""
    row, variant = ARCHITECTURES[name], VARIANTS[kind]
    for package in (row.needs, *variant.needs):
        if package and importlib.util.find_spec(package) is None:
            raise Absent(f"{package} is not installed")
    model, batch = build(name, tokens)
    return variant.change(model), variant.batch(model, batch)


# Ways.


def checkpointed(model: Any) -> nn.Module:
    """Turn a model's own checkpointing on, or PyTorch's around its layers if it has none."""
    if getattr(model, "supports_gradient_checkpointing", False):
        model.activation_checkpointing_enable(_PLAIN)
    elif getattr(model, "_supports_gradient_checkpointing", False):
        model.enable_gradient_checkpointing(functools.partial(checkpoint, **_PLAIN))
    elif hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing()
    else:
        for layer in repeated_layers(model):
            layer.forward = functools.partial(checkpoint, layer.forward, **_PLAIN)
    return model


WAYS: dict[str, Callable[..., nn.Module]] = {
    "stock": lambda model, policy: model,
    "own": lambda model, policy: checkpointed(model),
    "converted": convert,
}


def main_output(output: Any) -> Tensor:
    """Return the loss if the output has one, else the tensor that the model is called for."""
    if type(output) is tuple:
        output = output[0]
    if isinstance(output, list):  # Z-Image's
        output = torch.stack(output)
    loss = None if isinstance(output, Tensor) else output.get("loss")
    return models.main_output(output) if loss is None else loss


def step(model: nn.Module, batch: Batch) -> Row:
    """Return bytes of a step that adds to existing gradients.

    The output is held to the end, as a training loop holds it, and is not what is kept for
    backward; its gradient is no one's.
    """
    torch.manual_seed(3)
    with AllocationTrace() as trace:
        output = model(**batch)
        y = main_output(output)
        trace.mark("gradient")
        # The same random gradient for every way.
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=y.dtype)
        trace.mark("backward")
        y.backward(dy)
    forward, _, backward = trace.spans
    peak = max(forward.peak, backward.peak - dy.nbytes)
    return {"kept": forward.end - y.untyped_storage().nbytes(), "peak": peak}


def timed(model: nn.Module, batch: Batch) -> float:
    """Return the seconds of a step."""
    start = time.perf_counter()
    y = main_output(model(**batch))
    y.backward(torch.ones_like(y))
    return time.perf_counter() - start


@contextlib.contextmanager
def counting(found: list[int]) -> Iterator[None]:
    """Add the bytes of norms' statistics that each call within keeps."""

    def count(run: BlockRun) -> None:
        block = run.call
        dtypes = dict.fromkeys(block.graph.inputs, run.tensors[0].dtype)
        shapes = block.named_shapes(run.execution.given)
        kept = kept_bytes(block.graph, block.save, block.needs_grad, shapes, dtypes)
        found.append(sum(n for name, n in kept.items() if name.endswith((".mean", ".rstd"))))

    OBSERVERS.append(count)
    try:
        yield
    finally:
        OBSERVERS.remove(count)


class Way:
    """A copy of a model in one way, and the measurements of its steps."""

    def __init__(
        self, way: str, name: str, kind: str, tokens: int, policy: str, wide: bool = False
    ) -> None:
        model, batch = variant_of(name, kind, tokens)
        if wide:
            model, batch = model.double(), {key: _double(x) for key, x in batch.items()}
        self.batch = batch
        counts = [sum(p.numel() for p in m.parameters()) for m in repeated_layers(model)]
        self.largest = max(counts, default=0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            if way == "converted" and ARCHITECTURES[name].keeps_own:
                model = checkpointed(model)
            self.model = WAYS[way](model, policy=policy)
            self.trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
            steps = [self._step() for _ in range(STEPS)]
        self.found = steps[-1] | {"first_peak": steps[0]["peak"]}
        self.warned = [str(w.message) for w in caught]

    def _step(self) -> Row:
        for p in self.trained.values():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad.zero_()
        return step(self.model, self.batch)

    @property
    def grads(self) -> dict[str, Tensor]:
        grads = {n: p.grad for n, p in self.trained.items() if p.grad is not None}
        return {n: g.detach().double() for n, g in grads.items()}


def _double(x: Any) -> Any:
    if isinstance(x, list | tuple):
        return type(x)(map(_double, x))
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def distance(found: dict[str, Tensor], stock: dict[str, Tensor]) -> tuple[float, str]:
    """Return the relative distance of the gradient that differs most, and its name."""
    least = 1e-4 * max(float(g.norm()) for g in stock.values())
    far = {n: float((found[n] - g).norm()) / (float(g.norm()) + least) for n, g in stock.items()}
    return max((x if math.isfinite(x) else math.inf, n) for n, x in far.items())


def repeated(found: Sequence[str], stock: Sequence[str]) -> list[str]:
    """Return the warnings that repeat, numbers aside, more often than in the stock model."""
    kinds = Counter(re.sub(r"\d+", "#", text) for text in found)
    kinds.subtract(re.sub(r"\d+", "#", text) for text in stock)
    return [text for text, times in kinds.items() if times > 1]


def measure(name: str, kind: str, tokens: int, rounds: int, policy: str) -> Row:
    """Return what the steps of a model take in every way; `rounds` of them are timed."""
    make = functools.partial(Way, name=name, kind=kind, tokens=tokens, policy=policy)
    ways, row = {"stock": make("stock")}, Row(ways={})
    stock = ways["stock"].grads
    if not all(bool(g.isfinite().all()) for g in stock.values()):
        raise Absent("its gradients are not finite")
    counts: list[int] = []
    for way in ("own", "converted"):
        try:
            with counting(counts) if way == "converted" else contextlib.nullcontext():
                ways[way] = make(way)
        except Exception as error:  # the row reports a crash
            row["ways"][way] = refusal(error)
            continue
        error, parameter = distance(ways[way].grads, stock)
        ways[way].found |= {"gradient": error, "parameter": parameter}
    if "converted" in ways:
        new = ways["converted"]
        new.found["statistics"] = sum(counts) // STEPS
        kinds = conversion(new.model)
        states = Counter[str]()
        for layer in kinds:
            states["blocks" if layer.state == "converted" else layer.state] += layer.count
        row["layers"], row["largest"] = dict(states), new.largest
        notable = [k for k in kinds if k.pieces or k.state != "converted"]
        plain = [k.reason for k in notable if k.state == "plain"]
        row["effects"] = bool(plain) and all(reason.endswith(_EFFECTS) for reason in plain)
        row["conversion"] = list(map(str, notable))
        row["repeated"] = repeated(new.warned, ways["stock"].warned)
        if new.found["gradient"] > ALLOWED:
            with contextlib.suppress(Exception):  # not every model runs in float64
                wide = [make(way, wide=True).grads for way in ("stock", "converted")]
                new.found["gradient64"], new.found["parameter"] = distance(wide[1], wide[0])
    times: dict[str, list[float]] = {way: [] for way in ways}
    for one in ways.values() if rounds else ():
        for _ in range(WARM_UP):
            timed(one.model, one.batch)
    for _ in range(rounds):
        for way, one in ways.items():
            timed(one.model, one.batch)  # in training, a step follows another one like it
            times[way].append(timed(one.model, one.batch))
    for way, one in ways.items():
        row["ways"][way] = one.found | {"seconds": median(times[way]) if rounds else None}
    return row


def measured(name: str, kind: str, tokens: int, rounds: int = ROUNDS, policy: str = "full") -> Row:
    """Return what `measure` does, with violations, or why there is nothing to compare with."""
    gc.collect()  # models in cycles with their hooks
    gc.freeze()  # modules and caches, which every trace would look for garbage in
    try:
        with warnings.catch_warnings(action="ignore"):  # a conversion's are in the row
            row = measure(name, kind, tokens, rounds, policy)
            return row | {"violations": violations(row, policy)}
    except Absent as error:
        return {"absent": str(error), "violations": {}}
    except Exception as error:  # of the stock model: no fault of a conversion
        return {"absent": described(error), "violations": {}}


def violations(row: Row, policy: str = "full") -> dict[str, str]:
    """Return what is worse than with checkpointing, by check, in words."""
    ways = row["ways"]
    new, own = ways["converted"], ways["own"]
    if "kept" not in new:
        return {"crash": new.get("error") or new["absent"]}
    wrong = {}
    error = new.get("gradient64", new["gradient"])
    if error > max(ALLOWED, 2 * own.get("gradient", 0.0)):
        wrong["gradients"] = f"{error:.1e} of {new['parameter']}"
    if row["repeated"]:
        wrong["warnings"] = row["repeated"][0]
    effects = row.get("effects", False)
    if "plain" in row["layers"] and not effects:
        wrong["plain"] = "; ".join(row["conversion"])
    if "kept" not in own or effects or policy != "full":
        return wrong
    extra = TRACED * row["largest"]
    limits = {
        "kept": KEPT * own["kept"] + new["statistics"],
        "peak": PEAK * own["peak"],
        "first_peak": own["first_peak"] + extra,
    }
    for check, limit in limits.items():
        if new[check] > limit:
            ratio = new[check] / max(own[check], 1)
            wrong[check] = f"{ratio:.2f}× of {own[check]:,} bytes; allowed {limit:,.0f}"
    return wrong


def main(arguments: Sequence[str]) -> int:
    """Run, print, and write architectures.json; 1 if a check fails."""
    parser = Parser("architectures", __doc__, "threads fresh rounds", rounds=ROUNDS)
    parser.several("names", choices=ARCHITECTURES, default=list(ARCHITECTURES), metavar="NAME")
    parser.several("variants", choices=VARIANTS, default=list(VARIANTS))
    parser.add("--policy", choices=EXACT_PRESETS, default="full", help="(%(default)s)")
    help_ = "of a text, 256 at most, or of an image (%(default)s)"
    parser.add("--tokens", type=positive, default=128, help=help_)
    args = parser.parse(arguments)
    where = environment("cpu")
    packages = {row.needs for row in ARCHITECTURES.values()} | {"peft", "bitsandbytes"}
    where["versions"] = {name: version(name) for name in sorted(packages - {""})}
    config: Row = {"tokens": args.tokens}
    if args.policy != "full":
        config["policy"] = args.policy
    results = ResultsFile(args.out / "architectures.json", where, config)
    rows = []
    every = list(itertools.product(args.variants, args.names))
    for kind, name in progress(every, len(every), "model"):
        case = {"name": name, "variant": kind}
        row = None if args.fresh else results.find(case, ())
        if row is None:
            row = {"case": case} | measured(name, kind, args.tokens, args.rounds, args.policy)
            results.put(row)
        rows.append(row)
        print(report.line(row), flush=True)
    wrong = [row for row in rows if row["violations"]]
    for row in wrong:
        case = " ".join(row["case"].values())
        for check, words in row["violations"].items():
            print(f"{case}: {check}: {words}", file=sys.stderr)
    return int(bool(wrong))
