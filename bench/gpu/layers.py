"""Training steps of whole layers and MLPs on a GPU: every rung beside PyTorch's own, in turns.

A step is forward and backward; gradients are added into `.grad`s that exist, the input wants one.
"host" is the time the host takes to launch a step, "replayed" the step as a CUDA graph.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.layers.checks import errors, results_of
from bench.layers.ways import Forward, Sample
from bench.measure.clock import captured
from bench.measure.contest import P, Rig, WrongResultError, described, in_turns, summary
from fused_remat import FusedRematLayer, FusedRematWarning, ops
from fused_remat.memory import SavedBytes, measure_allocations
from fused_remat.policies import RUNGS

SEQ_LEN, HEAD_DIM = 2048, 128
WIDTHS = (2048, 1024, 4096)
#: What is called, with what it is: a function of the subject.
Build = Callable[["Subject"], Forward]
# The error may be 1.5 times that of PyTorch's layer in the same dtype, plus this: a sixth of what
# rounding once costs in bfloat16 or float16; in float32, sums in another order.
FLOORS = {torch.bfloat16: 1e-3, torch.float16: 1e-4, torch.float32: 1e-5}
_TIMED_SECONDS = 1e-2  # of a sample, about


@dataclass
class Subject:
    """What is trained a step: its module, data, and how the stock and our forwards are built.

    Attributes:
        stock: PyTorch's own forward of the module.
        fused: (module, policy, backend) -> ours, on the same parameters.
        masks: the caller's own tensors, which no way is said to keep.
    """

    rig: Rig
    sample: Sample
    stock: Callable[[nn.Module], Forward]
    fused: Callable[[nn.Module, str, str], Forward]
    masks: tuple[Tensor, ...] = ()

    @property
    def backend(self) -> str:
        return "triton" if self.rig.dry else "auto"


# --- ways


def _checkpointed(subject: Subject) -> Forward:
    forward = subject.stock(subject.sample.layer)
    return functools.partial(checkpoint, forward, use_reentrant=False)


def _replayable_checkpoint(subject: Subject) -> Forward:
    """Without the generator's state, which a capture cannot read and no dropout here needs."""
    forward = subject.stock(subject.sample.layer)
    return functools.partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)


def _compiled(subject: Subject) -> Forward:
    forward = subject.stock(subject.sample.layer)
    backend = "inductor" if subject.rig.device.type == "cuda" else "aot_eager"
    compiled: Forward = torch.compile(forward, backend=backend, dynamic=False)
    return compiled


def _rung(policy: str, subject: Subject) -> Forward:
    return subject.fused(subject.sample.layer, policy, subject.backend)


_EAGER: dict[str, Build] = {"eager": lambda subject: subject.stock(subject.sample.layer)}
_OURS: dict[str, Build] = {rung: functools.partial(_rung, rung) for rung in RUNGS}
WAYS = {**_EAGER, "checkpoint": _checkpointed, **_OURS}
REPLAYED = {**_EAGER, "checkpoint": _replayable_checkpoint, **_OURS}
COMPILED = {**_EAGER, "compile": _compiled, "full": _OURS["full"], "fast": _OURS["fast"]}
BASELINES = ("eager", "checkpoint")


# --- right or not


class Gate:
    """Output and gradients against float64, beside the error of PyTorch's own in the same dtype.

    With dropout the truth is our block in float64 on the eager backend, which draws the same bits,
    and the yardstick that in the same dtype; PyTorch's own draws others, so that only whether its
    results are finite is seen.
    """

    def __init__(self, subject: Subject) -> None:
        sample, wide = subject.sample, subject.sample.double()
        self.own_bits = bool(sample.dropout)
        build = subject.stock if not self.own_bits else _eager_backend(subject)
        self.truth = results_of(build(wide.layer), wide)
        theirs = errors(results_of(build(sample.layer), sample), self.truth)
        floor = FLOORS[sample.x.dtype]
        self.allowed = {name: 1.5 * error + floor for name, error in theirs.items()}

    def check(self, forward: Forward, sample: Sample, ours: bool) -> dict[str, Any]:
        """How the results were found right. Raises: WrongResultError, or what the way raises."""
        with warnings.catch_warnings():
            warnings.simplefilter("error", FusedRematWarning)  # a fallback is not ours
            found = results_of(forward, sample)
        for name, value in found.items():
            if not value.isfinite().all():
                raise WrongResultError(f"{name} is not finite")
        if self.own_bits and not ours:
            return {"against": "nothing: it draws dropout of its own"}
        mine = errors(found, self.truth)
        worst = max(mine, key=lambda name: mine[name] / self.allowed[name])
        if not mine[worst] <= self.allowed[worst]:
            limit = self.allowed[worst]
            raise WrongResultError(f"relative error of {worst} is {mine[worst]:.2g}, > {limit:.2g}")
        return {"worst": worst, "error": mine[worst], "allowed": self.allowed[worst]}


def _eager_backend(subject: Subject) -> Callable[[nn.Module], Forward]:
    return lambda module: subject.fused(module, "full", "eager")


# --- memory


def memory(forward: Forward, subject: Subject, hooks: bool) -> dict[str, Any]:
    """Bytes: saved by autograd's account, held by the allocator's, and peaks above what was there.

    Parameters, masks and (`held`) the input and the output are not counted.
    """
    names = ("kept_bytes", "held_bytes", "forward_peak_bytes", "step_peak_bytes")
    sample, device = subject.sample, subject.rig.device
    if device.type != "cuda":
        return dict.fromkeys(names)
    kept = None
    if hooks:
        with SavedBytes([*sample.layer.parameters(), *subject.masks]) as saved:
            forward(sample.x)
        kept = saved.total
        del saved  # it holds what it counted
    first = measure_allocations(lambda: forward(sample.x), device)
    step = measure_allocations(lambda: forward(sample.x).backward(sample.dy), device)
    found = (kept, first.net - sample.dy.nbytes, first.peak, step.peak)
    return dict(zip(names, found, strict=True))


# --- time


class Step:
    """Times a few training steps; returns the seconds of one."""

    def __init__(self, forward: Forward, subject: Subject) -> None:
        self.forward, self.sample = forward, subject.sample
        self.on_gpu = subject.rig.device.type == "cuda"
        self.count, self.host_seconds = 1, 0.0
        if self.on_gpu:
            self()
            self.count = max(1, min(10, round(_TIMED_SECONDS / self())))

    def once(self) -> None:
        """One step."""
        self.forward(self.sample.x).backward(self.sample.dy)

    def __call__(self) -> float:
        if not self.on_gpu:
            start = time.perf_counter()
            self.once()
            self.host_seconds = time.perf_counter() - start
            return self.host_seconds
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.once()  # keeps the device busy while the host gets ahead
        start.record()
        before = time.perf_counter()
        for _ in range(self.count):
            self.once()
        self.host_seconds = (time.perf_counter() - before) / self.count
        end.record()
        end.synchronize()
        return 1e-3 * start.elapsed_time(end) / self.count


class ReplayedStep(Step):
    """The same of a step captured as a CUDA graph: the host's share does not show."""

    def __init__(self, forward: Forward, subject: Subject) -> None:
        super().__init__(forward, subject)
        self.once = captured(super().once) if self.on_gpu else super().once


# --- a row


def measure(
    subject: Subject,
    ways: Mapping[str, Build] = WAYS,
    timer: Callable[[Forward, Subject], Step] = Step,
) -> dict[str, Any]:
    """Every way checked, and those that are right measured."""
    gate = Gate(subject)
    rows: dict[str, dict[str, Any]] = {}
    forwards: dict[str, Forward] = {}
    for name, build in ways.items():
        try:
            forward = build(subject)
            rows[name] = {"check": gate.check(forward, subject.sample, name in RUNGS)}
            forwards[name] = forward
        except Exception as error:  # one broken way must not cost the others' results
            rows[name] = {"error": described(error)}
    del gate
    steps: dict[str, Step] = {}
    for name, forward in forwards.items():
        try:
            if timer is Step:
                rows[name] |= memory(forward, subject, hooks=name != "compile")
            steps[name] = timer(forward, subject)
        except Exception as error:
            rows[name]["error"] = described(error)
    times = in_turns(steps, subject.rig, longer=2.5)
    for name, found in summary(times, BASELINES).items():
        rows[name] |= found | {"host_us": 1e6 * steps[name].host_seconds}
    return {"rounds": max(map(len, times.values()), default=0), "ways": rows}


# --- subjects


def encoder(rig: Rig, norm: str, width: int, dropout: float) -> Subject:
    """A causal encoder layer, head dim 128; dropout of the residuals and in the MLP."""
    seq_len, nhead = rig.size(SEQ_LEN, 9), rig.size(width // HEAD_DIM, 2)
    layer = nn.TransformerEncoderLayer(
        width, nhead, rig.size(4 * width, 64), 0.0, "gelu", batch_first=True,
        norm_first=norm == "pre", device=rig.device, dtype=rig.dtype,
    )  # fmt: skip
    for module in (layer.dropout, layer.dropout1, layer.dropout2):
        module.p = dropout
    _perturb(layer)
    shape = (rig.size(tokens_of(width) // SEQ_LEN, 2), seq_len, width)
    sample = Sample(layer, rig.normal(*shape), rig.normal(*shape), dropout)
    # In the layer's dtype: of a bool mask the stock layer would make such a one at every call.
    mask = nn.Transformer.generate_square_subsequent_mask(seq_len, rig.device, rig.dtype)

    def causal(module: nn.Module) -> Forward:
        return lambda x: module(x, mask.to(x.dtype), is_causal=True)

    def fused(module: nn.Module, policy: str, backend: str) -> Forward:
        assert isinstance(module, nn.TransformerEncoderLayer)
        return causal(FusedRematLayer.from_layer(module, policy, backend))

    return Subject(rig, sample, causal, fused, (mask,))


def mlp(rig: Rig, width: int) -> Subject:
    """Linear, GELU, linear."""
    hidden = rig.size(4 * width, 64)
    module = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
    module.to(rig.device, rig.dtype)
    _perturb(module)
    tokens = rig.size(tokens_of(width), 32)
    x, dy = rig.normal(tokens, width), rig.normal(tokens, width)

    def fused(module: nn.Module, policy: str, backend: str) -> Forward:
        assert isinstance(module, nn.Sequential)
        first, _, last = module
        weights = first.weight, first.bias, last.weight, last.bias
        return lambda x: ops.mlp(x, *weights, "gelu", policy=policy, backend=backend)

    return Subject(rig, Sample(module, x, dy, 0.0), lambda module: module, fused)


def _perturb(module: nn.Module) -> None:
    """Random biases and norms, which are constants at first."""
    with torch.no_grad():
        for p in module.parameters():
            if p.dim() == 1:
                p.add_(0.1 * torch.randn_like(p))


def tokens_of(width: int) -> int:
    """Tokens of a step."""
    return 16384 if width <= 2048 else 8192


# --- what is measured, the most telling first

Entry = tuple[dict[str, Any], Callable[[Rig], dict[str, Any]]]


def _case(rig: Rig, name: str, width: int, **rest: Any) -> dict[str, Any]:
    if rig.dry:
        return {"name": name, "width": width, **rest}
    return {"name": name, "width": width, "tokens": tokens_of(width), **rest}


def _grid(rig: Rig) -> Iterator[tuple[str, int]]:
    for norm in ("pre", "post"):
        for width in (32,) if rig.dry else WIDTHS:
            yield norm, width


def layer_entries(rig: Rig) -> Iterator[Entry]:
    """Without dropout, then with."""
    for dropout in (0.0, P):
        for norm, width in list(_grid(rig))[: 1 if rig.dry and dropout else None]:
            case = _case(rig, f"{norm}-norm", width, dropout=dropout)
            yield case, lambda rig, given=(norm, width, dropout): measure(encoder(rig, *given))


def mlp_entries(rig: Rig) -> Iterator[Entry]:
    """The MLP alone: keeping its input only ("full"), and the pre-activation too ("none")."""
    ways = {name: way for name, way in WAYS.items() if name not in ("lean", "balanced", "fast")}
    for width in (32,) if rig.dry else WIDTHS:
        yield _case(rig, "mlp", width), lambda rig, w=width: measure(mlp(rig, w), ways)


def replay_entries(rig: Rig) -> Iterator[Entry]:
    """Layers as CUDA graphs."""
    for norm, width in list(_grid(rig))[: 1 if rig.dry else None]:
        case = _case(rig, f"{norm}-norm, replayed", width)
        given = (norm, width, 0.0)
        yield case, lambda rig, g=given: measure(encoder(rig, *g), REPLAYED, ReplayedStep)


def compile_entries(rig: Rig) -> Iterator[Entry]:
    """Beside `torch.compile` of the stock layer."""
    for norm, width in list(_grid(rig))[: 1 if rig.dry else None]:
        case = _case(rig, f"{norm}-norm, compiled", width)
        yield case, lambda rig, g=(norm, width, 0.0): measure(encoder(rig, *g), COMPILED)
