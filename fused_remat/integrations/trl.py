"""TRL's fused language model head, computed by `ops.token_log_probs`.

The forward that TRL's SFT, DPO, KTO, GRPO and RLOO trainers give a model calls one function of
TRL's, `trl.trainer.utils._ChunkedLogProbFunction.apply`, for the log-probability of each label, the
entropy and what is logged. No documented extension point replaces it, so `fused_lm_head` does.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from fused_remat.execution.executor import autocast_on
from fused_remat.huggingface.head import loss_computed
from fused_remat.ops.token_log_probs import token_losses
from fused_remat.steps.operations import warn

#: Versions of TRL that are tested, and the parameters of its function.
TESTED = "1.16"
_PARAMETERS = (
    "ctx", "hidden", "weight", "bias", "targets", "temperature", "chunk_size",
    "final_logit_softcapping", "logit_scale", "outputs",
)  # fmt: skip
_OUTPUTS = "entropy", "log_sum_sq_probs", "mean_logits", "is_top1"


@contextlib.contextmanager
def fused_lm_head(backend: str = "auto") -> Iterator[None]:
    """Compute the heads of TRL's trainers with `ops.token_log_probs` inside the context.

    Log-probabilities, losses and gradients equal TRL's within rounding, for SFT, DPO, KTO, GRPO and
    RLOO; the trainer may be created before. Calls that the op does not support run TRL's function,
    with one warning: DeepSpeed ZeRO-3, a head in another dtype than the hidden states without
    autocast, and a logit scale that is not positive.

    Raises: ImportError unless a tested version of TRL is installed.

    >>> from fused_remat.integrations.trl import fused_lm_head
    >>> with fused_lm_head():
    ...     pass  # trainer.train()
    """
    utils = _checked()
    stock = utils._ChunkedLogProbFunction
    utils._ChunkedLogProbFunction = _Function(stock, backend)
    try:
        with loss_computed():
            yield
    finally:
        utils._ChunkedLogProbFunction = stock


def _checked() -> Any:
    """Return TRL's module that holds the function, after checking both."""
    try:
        version = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    remedy = (
        f'install "trl=={TESTED}.*", or train without fused_lm_head(), which leaves the head to TRL'
    )
    if version.split(".")[:2] != TESTED.split("."):
        raise ImportError(f"fused_lm_head supports TRL {TESTED}, and TRL is {version}: {remedy}")
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer import utils

    found = tuple(inspect.signature(ChunkedLogProbFunction.forward).parameters)
    if found != _PARAMETERS or not hasattr(utils, "_ChunkedLogProbFunction"):
        raise ImportError(
            f"ChunkedLogProbFunction of TRL {version} takes {found[1:]}, expected "
            f"{_PARAMETERS[1:]}: {remedy}"
        )
    return utils


class _Function:
    """In place of the autograd Function `stock`."""

    def __init__(self, stock: Any, backend: str) -> None:
        self.stock, self.backend, self.warned = stock, backend, False

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = _OUTPUTS,
    ) -> tuple[Tensor | None, ...]:
        """Return log-probabilities and the four outputs, None for those not among `outputs`."""
        reason = _unsupported_reason(hidden, weight, bias, logit_scale)
        if reason is not None:
            if not self.warned:
                self.warned = True
                warn(f"TRL computes its head itself, in its own chunks: {reason}")
            given = hidden, weight, bias, targets, temperature, chunk_size, softcap
            return self.stock.apply(*given, logit_scale, outputs)  # type: ignore[no-any-return]
        names = tuple([name for name in _OUTPUTS if name in outputs])
        losses, *values = token_losses(
            hidden, weight, bias, targets, temperature, logit_scale, softcap or 0.0, names,
            backend=self.backend,
        )  # fmt: skip
        found: dict[str, Tensor] = dict(zip(names, values, strict=True))
        for name in found.keys() - {"entropy"}:
            found[name] = found[name].detach()
        if "is_top1" in found:
            found["is_top1"] = found["is_top1"].bool()
        return -losses, *(found.get(name) for name in _OUTPUTS)


def _unsupported_reason(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, logit_scale: float
) -> str | None:
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    if is_deepspeed_zero3_enabled():
        return "DeepSpeed ZeRO-3 frees the head's weight before backward"
    if not logit_scale > 0.0:
        return f"the model's logit scale is {logit_scale}"
    for tensor in (weight, bias):
        if tensor is not None and tensor.dtype != hidden.dtype and not autocast_on(hidden):
            return f"the head is {tensor.dtype}, and hidden states are {hidden.dtype}"
    return None
