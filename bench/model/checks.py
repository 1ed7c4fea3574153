"""Whether a way's loss and gradients are right: no speed is reported of one whose are not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bench.measure import contest
from bench.measure.admission import WrongResultError
from bench.measure.case import DTYPES
from bench.measure.checks import GROSS, no_fallback, poisoned
from bench.measure.contest import TOLERANCE
from bench.subjects.configs import dropout_free
from bench.subjects.forwards import Forward
from bench.subjects.model_ways import BASELINE, WAYS
from bench.subjects.models import Case, Subject, build

#: Layers, sequences and tokens of the model that is compared with float64: layers are alike, and
#: float64 takes twice to four times the memory.
LAYERS, BATCH, TOKENS = 2, 2, 128
#: Bytes that the float64 copy of the parameters may take; a vocabulary beyond that is cut.
_LARGEST = 4 << 30
_FEW_WORDS = 8192
#: Roundings follow one another in a model: of how many single operations a result may be off.
_FACTOR = 3.0
#: Beside the largest gradient, the norm of one that float64 itself finds to be zero: a key's bias
#: in softmax, where nothing is rotated.
_ZERO = 1e-6


def checked_subject(case: Case, device: torch.device | str) -> Subject:
    """The case's model for comparing results: few layers at full width, few tokens, no dropout."""
    published = dropout_free(case.published)
    seq_len = published.image_tokens or min(TOKENS, case.seq_len)
    layers = min(LAYERS, case.layers)
    small = dataclasses.replace(case, layers=layers, batch=BATCH, seq_len=seq_len)
    model = build(published, layers, torch.float32, "meta", 0)
    if 8 * sum(p.numel() for p in model.parameters()) > _LARGEST:
        words = {"vocab_size": _FEW_WORDS, "bos_token_id": 0, "eos_token_id": 0}
        published = dataclasses.replace(published, values=published.values | words)
    return small.subject(device, published)


def results_of(forward: Forward, subject: Subject) -> dict[str, Tensor]:
    """The loss and the gradients of all that is trained, by name."""
    leaves = subject.leaves()
    subject.zero()
    loss = forward(subject.x)
    loss.backward()
    gradients = {n: t.grad.clone() for n, t in leaves.items() if t.grad is not None}
    return {"loss": loss.value.detach(), **gradients}


class Checks:
    """The checks of one subject's ways, without dropout, by the error rule of every contest.

    The model in float64 is the truth (where transformers' own code computes in float32 whatever
    the dtype is, in norms and the loss, so does that one). Every result of a way may be off by what
    the dtype's rounding explains or by 1.5 times the unconverted model's own error, whichever is
    more; that one may be off by `GROSS` at most.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._poison = subject.device.type == "cpu"  # on a GPU it would choose other kernels
        build_eager = WAYS[BASELINE].build
        with poisoned(self._poison):
            exact = subject.double()
            self._truth = results_of(build_eager(exact), exact)
            theirs = results_of(build_eager(subject), subject)
        self._groups = _groups(self._truth)
        self._truth = self._grouped(self._truth)
        self._theirs = contest.errors(self._grouped(theirs), self._truth)
        for name, error in self._theirs.items():
            if not error <= GROSS["output" if name == "loss" else "gradient"]:
                raise WrongResultError(f"the unconverted model's own {name} is off by {error:.2g}")

    def check(self, forward: Forward) -> dict[str, Any]:
        """How the results were found right. Raises: WrongResultError, or what the way raises."""
        with no_fallback(), poisoned(self._poison):
            found = self._grouped(results_of(forward, self.subject))
        missing = self._truth.keys() - found.keys()
        if missing:
            raise WrongResultError(f"no gradient of {min(missing)}")
        return contest.check(found, self._truth, _FACTOR, self._theirs) | {
            "layers": self.subject.case.layers
        }

    def _grouped(self, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As they are compared: the loss in the model's dtype, by whose rounding it is judged."""
        found = dict(results)
        if found["loss"].dtype != torch.float64:
            found["loss"] = found["loss"].to(DTYPES[self.subject.case.dtype])
        for zero, beside in self._groups.items():
            if zero in found and beside in found:
                parts = found.pop(zero), found[beside]
                found[beside] = torch.cat([part.flatten() for part in parts])
        return found


def _groups(truth: Mapping[str, Tensor]) -> dict[str, str]:
    """Gradients that are zero but for rounding -> the weight's beside which they are compared."""
    norms = {name: t.norm().item() for name, t in truth.items() if name != "loss"}
    least = _ZERO * max(norms.values())
    return {
        name: name.removesuffix("bias") + "weight"
        for name, norm in norms.items()
        if norm < least and name.endswith("bias")
    }


def same_loss(found: float, theirs: float, dtype: torch.dtype) -> float:
    """How far a loss is from that of the unconverted model, of the whole size that is measured.

    Raises: WrongResultError beyond the roundings of ten results of the dtype: of a sum over all
        tokens that is generous, and what is wrong in a layer moves it by more.
    """
    error, allowed = abs(found - theirs) / abs(theirs), 10 * TOLERANCE[dtype]
    if not error <= allowed:
        raise WrongResultError(
            f"the loss at the measured size is {found:.6g}, the unconverted model's {theirs:.6g}"
        )
    return error
