"""Whether a way's results are right: no speed is reported of one whose results are not."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from bench.measure.admission import WrongResultError
from bench.measure.by_head import exact_by_head
from bench.measure.case import Forward, Subject
from bench.measure.contest import errors, within
from fused_remat import FusedRematWarning

SEED = 1
# The error may be 1.5 times that of PyTorch's layer in the same dtype, plus this: a sixth of what
# rounding once costs in bfloat16 or float16; in float32, sums in another order.
FLOORS = {torch.bfloat16: 1e-3, torch.float16: 1e-4, torch.float32: 1e-5}
#: Nobody may be off by more, PyTorch's layer itself included, by whose error the others are judged:
#: its gradients of norms, summed in 16 bits on a CPU, are off by several percent.
GROSS = {"output": 0.1, "gradient": 0.5}
#: What keeps 8 bits may be off by so many times what our layer that keeps all is, in bfloat16; in
#: dtypes that round less than 8 bits do, by so much. Its output is that of any other preset.
LOSSY_TIMES, LOSSY_FLOOR = 2.5, 1.2e-2
#: How far dropout may push an output, against how far it pushes the stock layer's: a few hundred
#: elements are enough for that ratio to be well within these.
SPREAD = (0.5, 2.0)
#: Of a leaf's norm, the largest step of a difference quotient; a leaf whose gradient stands out of
#: the outputs' rounding (by `_CLEAR`) takes a smaller one, down to an eighth: ReLU has kinks.
STEPS = {torch.bfloat16: 3e-2, torch.float16: 1e-2, torch.float32: 2e-3}
_CLEAR = 500.0


@contextlib.contextmanager
def no_fallback() -> Iterator[None]:
    """The fused layer runs as such, or raises FusedRematWarning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FusedRematWarning)
        yield


@contextlib.contextmanager
def poisoned(active: bool = True) -> Iterator[None]:
    """`torch.empty` is full of NaN: what is not written shows."""
    mode = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if active:
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)


def results_of(forward: Forward, subject: Subject, seed: int = SEED) -> dict[str, Tensor]:
    """The output and all gradients of one step at a seed, by name."""
    subject.zero()
    torch.manual_seed(seed)
    y = forward(subject.x)
    y.backward(subject.dy)
    leaves = subject.leaves().items()
    gradients = {f"gradient of {n}": t.grad.clone() for n, t in leaves if t.grad is not None}
    return {"output": y.detach(), **gradients}


class Checks:
    """The checks of one subject's ways, by whose dropout they draw ("stock", "ours", "own").

    Without dropout: the output and every gradient against the stock forward in float64; the error
    may be 1.5 times the stock forward's own in the sample's dtype, plus `FLOORS`, up to `GROSS`.

    With dropout, every way: the same seed gives the same output, another seed another one. And

    - "ours" likewise against our block in float64 on the eager backend, which draws the same bits;
      its yardstick is that block in the sample's dtype;
    - "stock" has the stock forward's bits at the same seed; on a GPU, where sums may be in any
      order, it is as near to them as ours has to be to float64;
    - "own": the output is about as far from the output without dropout as the stock forward's is,
      and every gradient is that of the forward which drew the mask: the difference quotient along
      it, at the same seed.

    A lossy way's gradients may be off by `LOSSY_TIMES` the error of our layer that keeps everything
    as it is, or by `LOSSY_FLOOR`; its output by no more than another's.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._poison = subject.device.type == "cpu"  # on a GPU it would choose other kernels
        build = subject.stock
        if self.subject.dropout:
            build = lambda module: subject.fused(module, "full", "eager")  # noqa: E731
        with no_fallback(), poisoned(self._poison), exact_by_head():
            exact = subject.double()
            self._truth = results_of(build(exact.module), exact)
            theirs = errors(results_of(build(subject.module), subject), self._truth)
        self._allowed = {name: self._allow(name, error) for name, error in theirs.items()}
        self._allowed_lossy: dict[str, float] = {}
        if self.subject.dropout:
            self._stock = results_of(subject.stock(subject.module), subject)
            with exact_by_head():  # gradients wanted: the forward that is trained
                exact = subject.double()
                self._plain = subject.stock(exact.module.eval())(exact.x).detach()

    def check(
        self, forward: Forward, draws: str, compiled: bool = False, lossy: bool = False
    ) -> dict[str, Any]:
        """How the results were found right. Raises: WrongResultError, or what the way raises.

        Args:
            compiled: nothing is poisoned, which would be another setting than it was compiled for.
            lossy: it is one of our presets that keep 8 bits ("ours").
        """
        allowed = self._lossy() if lossy else self._allowed
        with no_fallback(), poisoned(self._poison and not compiled):
            found = results_of(forward, self.subject)
            for name, t in found.items():
                if not t.isfinite().all():
                    raise WrongResultError(f"{name} is not finite")
            if not self.subject.dropout:
                return {"against": "float64"} | self._near(found, self._truth, allowed)
            self._seeded(forward, found)
            if draws == "ours":
                near = self._near(found, self._truth, allowed)
                return {"against": "float64, the same bits"} | near
            if draws == "stock":
                return self._as_stock(found)
            self._spread(found)
            return {"against": "itself, dropout fixed"} | self._derivatives(forward, found)

    def _allow(self, name: str, error: float) -> float:
        """The most that a result may be off whose yardstick is off by `error`."""
        gross = GROSS["output" if name == "output" else "gradient"]
        return min(gross, 1.5 * error + FLOORS[self.subject.dy.dtype])  # the former, too, if NaN

    def _lossy(self) -> dict[str, float]:
        """What a lossy way's results may be off."""
        if not self._allowed_lossy:
            subject, dtype = self.subject, self.subject.dy.dtype
            native = subject.fused(subject.module, "none", subject.backend)
            with no_fallback(), poisoned(self._poison):
                exact = errors(results_of(native, subject), self._truth)
            most = {n: LOSSY_TIMES * e + FLOORS[dtype] for n, e in exact.items()}
            if dtype != torch.bfloat16:
                most = {name: max(error, LOSSY_FLOOR) for name, error in most.items()}
            most = {name: min(error, GROSS["gradient"]) for name, error in most.items()}
            self._allowed_lossy = most | {"output": self._allowed["output"]}
        return self._allowed_lossy

    def _near(
        self, found: Mapping[str, Tensor], truth: Mapping[str, Tensor], allowed: Mapping[str, float]
    ) -> dict[str, Any]:
        """Every error within what is allowed; reports the one that comes nearest to it."""
        worst, error = within(found, truth, allowed)
        return {"worst": worst, "error": error, "allowed": allowed[worst]}

    def _seeded(self, forward: Forward, found: Mapping[str, Tensor]) -> None:
        """On a GPU too a forward has the same bits at the same seed: no kernel adds atomically."""
        if not torch.equal(self._output(forward, SEED), found["output"]):
            raise WrongResultError("the same seed gives another output")
        if torch.equal(self._output(forward, SEED + 1), found["output"]):
            raise WrongResultError("another seed gives the same output: no dropout")

    def _output(self, forward: Forward, seed: int) -> Tensor:
        torch.manual_seed(seed)
        return forward(self.subject.x).detach()

    def _as_stock(self, found: Mapping[str, Tensor]) -> dict[str, Any]:
        if self.subject.device.type == "cuda":
            near = self._near(found, {n: t.double() for n, t in self._stock.items()}, self._allowed)
            return {"against": "eager at the same seed"} | near
        for name, t in self._stock.items():
            if not torch.equal(found[name], t):
                raise WrongResultError(f"{name} is not, bit for bit, that of eager")
        return {"against": "same seed, bits of eager"}

    def _spread(self, found: Mapping[str, Tensor]) -> None:
        mine, theirs = (
            (y["output"].double() - self._plain).norm().item() for y in (found, self._stock)
        )
        if not SPREAD[0] * theirs < mine < SPREAD[1] * theirs:
            raise WrongResultError(
                f"dropout moves the output {mine / theirs:.2g} times as far as eager's does"
            )

    def _derivatives(self, forward: Forward, found: Mapping[str, Tensor]) -> dict[str, Any]:
        """The leaf whose gradient is farthest from the difference quotient, of what is allowed."""
        worst: dict[str, Any] = {"error": -1.0, "allowed": 1.0}
        for name, leaf in self.subject.leaves().items():
            gradient = found[f"gradient of {name}"].double()
            if gradient.norm() == 0:
                raise WrongResultError(f"gradient of {name} is zero")
            error, allowed = self._derivative(forward, found["output"], leaf, gradient)
            if not error <= allowed:
                raise WrongResultError(
                    f"gradient of {name} is not that of the forward at the same seed: off by "
                    f"{error:.2g} along it, allowed {allowed:.2g}"
                )
            if error / allowed > worst["error"] / worst["allowed"]:
                worst = {"worst": f"gradient of {name}", "error": error, "allowed": allowed}
        return worst

    def _derivative(
        self, forward: Forward, y: Tensor, leaf: Tensor, gradient: Tensor
    ) -> tuple[float, float]:
        """|<dy, f(a) - f(b)> / <gradient, a - b> - 1| of points a, b around the leaf; its limit.

        Where backward draws a mask again, it is off by about 2 p. p / 2 is allowed, or 10% where
        that is less, and five times what the rounding of both outputs comes to.
        """
        dtype, dy = self.subject.dy.dtype, self.subject.dy.double()
        kept = leaf.detach().clone()
        noise = torch.finfo(dtype).eps * (y.double().norm() * dy.norm()).item() / y.numel() ** 0.5
        size, slope = kept.double().norm().item(), gradient.norm().item()
        largest = STEPS[dtype]
        step = min(largest, max(largest / 8, _CLEAR * noise / (2 * size * slope)))
        at, outputs = [], []
        try:
            for sign in (1.0, -1.0):
                with torch.no_grad():
                    leaf.copy_(kept.double() + sign * step * size / slope * gradient)
                    at.append(leaf.detach().double().clone())
                outputs.append(self._output(forward, SEED).double())
        finally:
            with torch.no_grad():
                leaf.copy_(kept)
        along = (gradient * (at[0] - at[1])).sum().item()
        change = (dy * (outputs[0] - outputs[1])).sum().item()
        return abs(change / along - 1.0), min(0.1, self.subject.dropout / 2) + 5 * noise / along
