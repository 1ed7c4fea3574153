"""Checks of a way's results: no speed is reported of one whose results are wrong."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.measure.case import Forward, Subject
from bench.measure.contest import errors, within
from bench.measure.registry import WrongResultError
from fused_remat import FusedRematWarning, ops

SEED = 1
# The error may be 1.5 times that of PyTorch's layer in the same dtype, plus this: a sixth of what
# rounding once costs in bfloat16 or float16; in float32, sums in another order.
FLOORS = {torch.bfloat16: 1e-3, torch.float16: 1e-4, torch.float32: 1e-5}
#: Nobody may be off by more, PyTorch's layer itself included, by whose error the others are judged:
#: its gradients of norms, summed in 16 bits on a CPU, are off by several percent.
GROSS = {"output": 0.1, "gradient": 0.5}
#: How far dropout may push an output, against how far it pushes the stock layer's: a few hundred
#: elements are enough for that ratio to be well within these.
SPREAD = (0.5, 2.0)
#: Relative to the largest gradient, the norm of one that is zero in float64 but for rounding: a
#: key's bias in softmax, where nothing is rotated.
_ZERO = 1e-6
_MOST_SCORES = 2**31  # bytes of scores in float64 that are written at once


@contextlib.contextmanager
def no_fallback() -> Iterator[None]:
    """Turn FusedRematWarning into an error: the fused layer runs as such, or raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FusedRematWarning)
        yield


@contextlib.contextmanager
def poisoned(active: bool = True) -> Iterator[None]:
    """Fill `torch.empty` with NaN, which shows what is not written."""
    mode = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if active:
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)


@contextlib.contextmanager
def exact_in_blocks() -> Iterator[None]:
    """Compute float64 attention by ours, in blocks, where PyTorch's would write more scores."""
    stock = F.scaled_dot_product_attention

    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Tensor:
        nbytes = q.shape[:-1].numel() * k.shape[-2] * q.itemsize  # of the scores
        if q.dtype != torch.float64 or nbytes <= _MOST_SCORES:
            return stock(q, k, v, *rest, **options)
        options.pop("enable_gqa", None)
        return ops.attention(q, k, v, *rest, **options, backend="eager")

    F.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        F.scaled_dot_product_attention = stock


def results_of(forward: Forward, subject: Subject) -> dict[str, Tensor]:
    """Return the output and all gradients of one step at `SEED`, by name."""
    subject.zero()
    leaves = subject.leaves()
    torch.manual_seed(SEED)
    y = forward(subject.x)
    y.backward(subject.dy)
    return {"output": y.detach()} | {f"gradient of {n}": t.grad.clone() for n, t in leaves.items()}


class Checks:
    """The checks of one subject's ways, by whose dropout they draw ("stock", "ours", "own").

    Without dropout: the output and every gradient against the stock forward in float64; the error
    may be 1.5 times the stock forward's own in the sample's dtype, plus `floor` (by default that of
    `FLOORS`), up to `GROSS`. A bias whose gradient is zero is taken together with its weight.

    With dropout, every way: the same seed gives the same output, another seed another one. And

    - "ours" likewise against our block in float64 on the eager backend, which draws the same bits;
      its yardstick is that block in the sample's dtype;
    - "stock" has the stock forward's bits at the same seed; on a GPU, where sums may be in any
      order, it is as near to them as ours has to be to float64;
    - "own": the output is about as far from the output without dropout as the stock forward's is,
      and no gradient is zero; gradients themselves are compared without dropout only.
    """

    def __init__(self, subject: Subject, floor: float | None = None) -> None:
        self.subject = subject
        self._poison = subject.device.type == "cpu"  # on a GPU it would choose other kernels
        self._floor = FLOORS[subject.dtype] if floor is None else floor
        build = subject.stock
        if subject.dropout:
            build = lambda module: subject.fused(module, "full", "eager")  # noqa: E731
        with no_fallback(), poisoned(self._poison), exact_in_blocks():
            exact = subject.double()
            self._truth = results_of(build(exact.module), exact)
            theirs = errors(*self._paired(results_of(build(subject.module), subject)))
        self._allowed = {  # NaN of theirs allows no more than what is gross
            name: min(GROSS[name.split()[0]], 1.5 * error + self._floor)
            for name, error in theirs.items()
        }
        if subject.dropout:
            self._stock = results_of(subject.stock(subject.module), subject)
            with exact_in_blocks():  # with gradients: the forward that is trained
                exact = subject.double()
                self._plain = subject.stock(exact.module.eval())(exact.x).detach()

    def check(
        self, forward: Forward, draws: str = "stock", compiled: bool = False
    ) -> dict[str, Any]:
        """Return how the results were compared. Raises: WrongResultError, or what the way raises.

        `compiled`: nothing is poisoned, which would be another setting than it was compiled for.
        """
        with no_fallback(), poisoned(self._poison and not compiled):
            found = results_of(forward, self.subject)
            for name, t in found.items():
                if not t.isfinite().all():
                    raise WrongResultError(f"{name} is not finite")
            if not self.subject.dropout:
                return {"against": "float64"} | within(*self._paired(found), self._allowed)
            # On a GPU too: no kernel adds atomically.
            if not torch.equal(self._output(forward, SEED), found["output"]):
                raise WrongResultError("the same seed gives another output")
            if torch.equal(self._output(forward, SEED + 1), found["output"]):
                raise WrongResultError("another seed gives the same output: no dropout")
            if draws == "ours":
                near = within(*self._paired(found), self._allowed)
                return {"against": "float64, the same bits"} | near
            if draws == "stock":
                return self._as_stock(found)
            return {"against": "the spread of eager's dropout"} | self._as_itself(found)

    def _paired(self, found: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return results and the truth; a bias's gradient that is zero joins its weight's."""
        mine, truth = dict(found), dict(self._truth)
        norms = {name: t.norm().item() for name, t in truth.items() if name != "output"}
        for name, norm in norms.items():
            if name.endswith("bias") and norm < _ZERO * max(norms.values()):
                for results in (mine, truth):
                    weight = name.removesuffix("bias") + "weight"
                    both = results.pop(name), results[weight]
                    results[weight] = torch.cat([t.flatten() for t in both])
        return mine, truth

    def _output(self, forward: Forward, seed: int) -> Tensor:
        torch.manual_seed(seed)
        return forward(self.subject.x).detach()

    def _as_stock(self, found: Mapping[str, Tensor]) -> dict[str, Any]:
        if self.subject.device.type == "cuda":
            stock = {name: t.double() for name, t in self._stock.items()}
            return {"against": "eager at the same seed"} | within(found, stock, self._allowed)
        for name, t in self._stock.items():
            if not torch.equal(found[name], t):
                raise WrongResultError(f"{name} is not, bit for bit, that of eager")
        return {"against": "same seed, bits of eager"}

    def _as_itself(self, found: Mapping[str, Tensor]) -> dict[str, Any]:
        """Check how far dropout moves the output, and that every leaf has a gradient."""
        moved = [(r["output"].double() - self._plain).norm().item() for r in (found, self._stock)]
        if not SPREAD[0] < (times := moved[0] / moved[1]) < SPREAD[1]:
            raise WrongResultError(
                f"dropout moves the output {times:.2g} times as far as eager's does"
            )
        zero = [name for name, t in found.items() if not t.any()]
        if zero:
            raise WrongResultError(f"{zero[0]} is zero")
        return {"moved": times}
