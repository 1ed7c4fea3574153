"""Whether a way's results are right: no speed is reported of one whose results are not."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bench.layers.ways import BASELINE, WAYS, Forward, Sample, Way
from fused_remat import FusedRematWarning

SEED = 1


class WrongResultError(Exception):
    """What is wrong with a way's results."""


@contextmanager
def strict() -> Iterator[None]:
    """Deterministic algorithms, `torch.empty` full of NaN, and no fallback of the fused layer."""
    mode = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FusedRematWarning)
            yield
    finally:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)


def results_of(forward: Forward, sample: Sample) -> dict[str, Tensor]:
    """The output and all gradients of one step at `SEED`, by name."""
    leaves = sample.leaves()
    for leaf in leaves.values():
        assert leaf.grad is not None
        leaf.grad.zero_()
    torch.manual_seed(SEED)
    y = forward(sample.x)
    y.backward(sample.dy)
    gradients = {
        f"gradient of {n}": t.grad.clone() for n, t in leaves.items() if t.grad is not None
    }
    return {"output": y.detach(), **gradients}


def errors(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> dict[str, float]:
    """Relative L2 errors, by name."""
    return {
        name: ((found[name].double() - t).norm() / t.norm().clamp_min(1e-300)).item()
        for name, t in truth.items()
    }


class Checks:
    """The checks of one sample's ways.

    Without dropout: the output and every gradient against the same layer in float64; the error may
    be 1.5 times eager's own in the sample's dtype, plus four roundings of it. With dropout: the
    same seed gives the same output and another seed another one, and at the same seed the output
    and every gradient have the bits of the way's twin's.
    """

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self._twins: dict[str, dict[str, Tensor]] = {}
        if not sample.dropout:
            with strict():
                exact = sample.double()
                self._truth = results_of(exact.layer, exact)
                theirs = errors(results_of(WAYS[BASELINE].build(sample.layer), sample), self._truth)
            floor = 4 * torch.finfo(sample.x.dtype).eps
            self._allowed = {name: 1.5 * error + floor for name, error in theirs.items()}

    def check(self, way: Way, forward: Forward) -> dict[str, Any]:
        """How the results were found right. Raises: WrongResultError, or what the way raises."""
        with strict():
            found = results_of(forward, self.sample)
            for name, t in found.items():
                if not t.isfinite().all():
                    raise WrongResultError(f"{name} is not finite")
            return (
                self._same_bits(way, forward, found) if self.sample.dropout else self._near(found)
            )

    def _near(self, found: dict[str, Tensor]) -> dict[str, Any]:
        """Every error within what is allowed; reports the one that comes nearest to it."""
        mine, allowed = errors(found, self._truth), self._allowed
        worst = max(mine, key=lambda name: mine[name] / allowed[name])
        if not mine[worst] <= allowed[worst]:
            raise WrongResultError(
                f"relative error of {worst} is {mine[worst]:.2g}, allowed {allowed[worst]:.2g}"
            )
        report = {"worst": worst, "error": mine[worst], "allowed": allowed[worst]}
        return {"against": "float64"} | report

    def _same_bits(self, way: Way, forward: Forward, found: dict[str, Tensor]) -> dict[str, Any]:
        if not torch.equal(self._output(forward, SEED), found["output"]):
            raise WrongResultError("the same seed gives another output")
        if torch.equal(self._output(forward, SEED + 1), found["output"]):
            raise WrongResultError("another seed gives the same output: no dropout")
        for name, t in self._twin(way.twin).items():
            if not torch.equal(found[name], t):
                raise WrongResultError(f"{name} is not, bit for bit, that of {way.twin}")
        return {"against": f"same seed, bits of {way.twin}"}

    def _output(self, forward: Forward, seed: int) -> Tensor:
        torch.manual_seed(seed)
        return forward(self.sample.x).detach()

    def _twin(self, name: str) -> dict[str, Tensor]:
        if name not in self._twins:
            self._twins[name] = results_of(WAYS[name].build(self.sample.layer), self.sample)
        return self._twins[name]
