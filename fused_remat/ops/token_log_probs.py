"""Log-probabilities of tokens under a language model's head, without a tensor of all logits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fused_remat.graph.build import linear_cross_entropy_graph
from fused_remat.ops.checks import run_tokens
from fused_remat.ops.cross_entropy import check_options, prepare


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    entropy: bool = False,
    ignore_index: int = -100,
    chunk: int | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Return log(softmax(logits)) of each target, and perhaps the entropy of each softmax.

    logits = cap(logit_scale · (hidden @ weight.T + bias)) / temperature, of which a block is
    computed at a time; backward computes them again, once for both results' gradients.

    Shapes: hidden (..., D), weight (V, D), targets (...), bias (V,); returns (...), or two of them
        with `entropy`, in float64 for float64 and in float32 for all other dtypes.
    targets: int64, a row of weight for each token, or `ignore_index`, whose results are 0 without
        a gradient. Nothing is shifted: pass the next token of each position, or hidden[:, :-1].
    softcap: cap(z) = softcap · tanh(z / softcap), as in Gemma 2; 0 for none. logit_scale: as in
        Cohere; Granite divides by it.
    entropy: in nats, differentiable as well.
    weight: with bias as DTensors, (Shard(0),), for a vocabulary divided among ranks.
    chunk, backend, autocast: as in `linear_cross_entropy`.
    Units: bytes kept = hidden, and 8 a token, 12 with `entropy` (16 and 24 for float64); FLOPs as
        `linear_cross_entropy`.
    Raises: ValueError for a temperature that is not positive; else as `linear_cross_entropy`.
    Source: Wijmans et al. 2024 (cut cross-entropy); dH/dz = -p · (log p + H).

    >>> hidden = torch.randn(2, 3, 8, requires_grad=True)
    >>> weight, tokens = torch.randn(1000, 8), torch.randint(1000, (2, 3))
    >>> log_probs, entropy = token_log_probs(hidden, weight, tokens, temperature=0.7, entropy=True)
    >>> exact = (hidden @ weight.T / 0.7).log_softmax(-1)
    >>> torch.allclose(log_probs, exact.gather(-1, tokens[..., None])[..., 0], atol=1e-5)
    True
    >>> (log_probs.sum() + 0.01 * entropy.sum()).backward()
    """
    outputs = ("entropy",) if entropy else ()
    losses, *more = token_losses(
        hidden, weight, bias, targets, temperature, logit_scale, softcap, outputs, ignore_index,
        chunk, backend,
    )  # fmt: skip
    return (-losses, more[0]) if entropy else -losses


def token_losses(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float = 0.0,
    outputs: tuple[str, ...] = (),
    ignore_index: int = -100,
    chunk: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, ...]:
    """Return -log(softmax(logits)) of each target, and `outputs` of `steps.token_losses`.

    Only the entropy has a gradient among these.
    """
    if not 0.0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive and finite, got {temperature}")
    check_options(0.0, 0.0, softcap, logit_scale, "none", chunk)
    # cap(s · z) / T is the soft-cap softcap / T of (s / T) · z.
    node, tensors = prepare(
        hidden,
        weight,
        targets,
        bias,
        ignore_index=ignore_index,
        softcap=softcap / temperature,
        logits=chunk or 0,
        logit_scale=logit_scale / temperature,
        outputs=outputs,
    )
    made = run_tokens(linear_cross_entropy_graph(node), tensors, {}, "full", backend)
    return torch.unbind(made, -1)
