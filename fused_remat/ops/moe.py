"""A mixture of experts as a function, and the losses of its router."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fused_remat.graph.build import block_graph, with_side_outputs
from fused_remat.moe_spec import CLAMPED, MoESpec, RouterSpec
from fused_remat.ops.activation import ActivationLike, known_activation
from fused_remat.ops.checks import check_alike, check_shape, check_tensor, run_tokens
from fused_remat.policies import Policy
from fused_remat.spec import BlockSpec, BranchSpec, MLPSpec

#: The arguments of `moe`, by the block's names of the tensors.
_ARGUMENTS = {
    "router.weight": "router_weight", "router.bias": "router_bias",
    "experts_up.weight": "up_weight", "experts_up.bias": "up_bias",
    "experts_down.weight": "down_weight", "experts_down.bias": "down_bias",
    "shared_gate.weight": "shared_gate_weight", "shared_fc1.weight": "shared_up_weight",
    "shared_fc2.weight": "shared_down_weight", "shared_router.weight": "shared_router_weight",
}  # fmt: skip


def moe(
    x: Tensor,
    router_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    *,
    top_k: int,
    router_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    scores: str = "softmax",
    normalize: bool = False,
    scale: float = 1.0,
    correction: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    best: int = 1,
    activation: ActivationLike = "silu",
    gated: bool = True,
    interleaved: bool = False,
    transposed: bool = False,
    weighs_input: bool = False,
    limit: float = 0.0,
    alpha: float = 0.0,
    shared_up_weight: Tensor | None = None,
    shared_down_weight: Tensor | None = None,
    shared_gate_weight: Tensor | None = None,
    shared_router_weight: Tensor | None = None,
    return_router_logits: bool = False,
    policy: str | Policy = "full",
    backend: str = "auto",
) -> Any:
    """Compute a mixture of experts: sum of w_e · down_e(act(gate_e(x)) * up_e(x)) over top_k of E.

    Shapes: x (..., D), router_weight (E, D), router_bias (E,), up_weight (E, 2·F, D) with the rows
        of gate_e before those of up_e, down_weight (E, D, F), up_bias (E, 2·F), down_bias (E, D);
        returns (..., D) in x.dtype; with `return_router_logits` also the logits (T, E) of the T
        tokens, whose gradients reach x and the router.
    scores: "softmax" or "sigmoid" of the logits, of which the top_k largest are a token's weights;
        "top_k_softmax": the softmax of the top_k largest logits (gpt-oss). normalize: weights are
        divided by their sum; scale: and multiplied by it.
    correction: (E,), in x.dtype or float32; added to the scores by which experts are chosen, not to
        weights; gets no gradient. groups, top_groups, best: experts are chosen from the
        `top_groups` of `groups` with the largest sum of their `best` scores (DeepSeek-V3).
    activation: a name, or a function or module that has one; or "clamped_swish" with limit and
        alpha, gpt-oss's gate (`moe_spec.ExpertsSpec`). gated: if False, up_weight is (E, F, D).
    interleaved: rows of gate_e and up_e alternate. transposed: weights are (E, D, 2·F) and
        (E, F, D). weighs_input: w_e multiplies x, not the result (Llama 4).
    shared_up_weight (Fs, D), shared_down_weight (D, Fs), shared_gate_weight (Fs, D): an expert that
        all tokens are sent to, gated if it has a gate; shared_router_weight (1, D): its result is
        multiplied by sigmoid(x @ shared_router_weight.T) (Qwen2-MoE).
    Units: bytes kept = the input and top_k a token, the chosen experts ("balanced": and 4·top_k;
        "fast": and 2·F·top_k elements), whatever the routing; "none" also E and the shared
        expert's 2·Fs elements. FLOPs = 6·D·F·top_k a token forward.
    Raises: ValueError for shapes that do not fit, top_k above E, an unknown policy, activation or
        kind of scores; TypeError for counts that are no ints; RuntimeError for mixed dtypes or
        devices, or a correction that requires a gradient.
    Source: Shazeer et al. 2017; Fedus et al. 2021; Dai et al. 2024 (shared experts).

    >>> import torch
    >>> x = torch.randn(2, 5, 8, requires_grad=True)
    >>> router, up, down = torch.randn(4, 8), torch.randn(4, 32, 8), torch.randn(4, 8, 16)
    >>> y, logits = moe(x, router, up, down, top_k=2, return_router_logits=True)
    >>> (y.sum() + 0.01 * load_balancing_loss(logits, top_k=2)).backward()
    >>> y.shape, logits.shape, x.grad.shape
    (torch.Size([2, 5, 8]), torch.Size([10, 4]), torch.Size([2, 5, 8]))
    """
    tensors = {
        "router.weight": router_weight, "router.bias": router_bias,
        "experts_up.weight": up_weight, "experts_up.bias": up_bias,
        "experts_down.weight": down_weight, "experts_down.bias": down_bias,
        "shared_gate.weight": shared_gate_weight, "shared_fc1.weight": shared_up_weight,
        "shared_fc2.weight": shared_down_weight, "shared_router.weight": shared_router_weight,
    }  # fmt: skip
    check_alike({"x": x, **{_ARGUMENTS[name]: t for name, t in tensors.items()}})
    for name in ("router.weight", "experts_up.weight", "experts_down.weight"):
        if tensors[name] is None:
            raise TypeError(f"{_ARGUMENTS[name]} must be a Tensor, got None")
    counts = {"top_k": top_k, "groups": groups, "top_groups": top_groups, "best": best}
    for argument, count in counts.items():
        if type(count) is not int:
            raise TypeError(f"{argument} must be an int, got {count!r}")
    check_shape("router_weight", router_weight, ("E", x.shape[-1]), {"x": x})
    router = RouterSpec(
        experts=router_weight.shape[0], top_k=top_k, scores=scores,  # type: ignore[arg-type]
        normalize=bool(normalize), scale=float(scale), groups=groups, top_groups=top_groups,
        best=best, corrected=correction is not None,
    )  # fmt: skip
    act = CLAMPED if activation == CLAMPED else known_activation(activation)
    spec = MoESpec(
        router=router, activation=act, gated=bool(gated), interleaved=bool(interleaved),
        transposed=bool(transposed), weighs_input=bool(weighs_input), limit=float(limit),
        alpha=float(alpha), shared=_shared(tensors, activation),
        shared_gate=shared_router_weight is not None,
    )  # fmt: skip
    _check_shapes(x, spec, {**tensors, "router.correction": correction})
    block = BlockSpec(kind="moe", branches=(BranchSpec(op=spec),), residual=False)
    tensors |= {"input": x, "router.correction": correction}
    graph = block_graph(block)
    if return_router_logits:
        graph = with_side_outputs(graph, ("router",))
    out: Any = run_tokens(graph, tensors, {}, policy, backend)
    return (out[0], out[1].reshape(-1, router.experts)) if return_router_logits else out


def _shared(tensors: Mapping[str, Tensor | None], activation: ActivationLike) -> MLPSpec | None:
    """Return the shared expert of `moe`, or None if it has no weights."""
    names = [name for name in _ARGUMENTS if name.startswith("shared_")]
    given = [name for name in names if tensors[name] is not None]
    if not given:
        return None
    for name in ("shared_fc1.weight", "shared_fc2.weight"):
        if tensors[name] is None:
            raise ValueError(f"{_ARGUMENTS[given[0]]} needs {_ARGUMENTS[name]}, got None")
    act = known_activation(activation, f"{CLAMPED!r} without a shared expert")
    return MLPSpec(activation=act, gated=tensors["shared_gate.weight"] is not None)


def _check_shapes(x: Tensor, spec: MoESpec, tensors: Mapping[str, Tensor | None]) -> None:
    """Raise unless the tensors of `moe` fit each other."""
    width, experts = x.shape[-1], spec.router.experts
    down, fc1 = tensors["experts_down.weight"], tensors["shared_fc1.weight"]
    assert down is not None
    expected = (experts, "F", width) if spec.transposed else (experts, width, "F")
    check_shape("down_weight", down, expected, {"x": x})
    hidden = down.shape[1 if spec.transposed else 2]
    check_shape("shared_up_weight", fc1, ("Fs", width), {"x": x})
    linears = spec.linear_shapes(width, 0 if fc1 is None else fc1.shape[0])
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": s for name, s in linears.items()}
    shapes |= {"router.bias": (experts,), **spec.stack_shapes(width, hidden)}
    for name, argument in _ARGUMENTS.items():
        if name in shapes:
            check_shape(argument, tensors[name], shapes[name], {"x": x, "down_weight": down})
    correction = tensors["router.correction"]
    if correction is not None:
        check_tensor("correction", correction, (x.dtype, torch.float32), x)
        check_shape("correction", correction, (experts,))
        if correction.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                "correction requires a gradient, and gets none: detach it, or call without "
                "gradients"
            )


def load_balancing_loss(
    router_logits: Tensor | Sequence[Tensor], top_k: int, attention_mask: Tensor | None = None
) -> Tensor:
    """Compute E times the sum over experts of (pairs per token) · (mean probability).

    It is smallest, top_k, where tokens are divided equally among experts.

    Shapes: router_logits (T, E) or (..., E), or a sequence of these, one of each layer, which are
        averaged over; attention_mask with as many elements as tokens, 0 (or False) for padding,
        which is not counted; returns () in float32 (float64 for float64).
    Raises: ValueError for a mask that does not fit the logits, an empty sequence, layers that
        differ in E, or top_k above E; TypeError for None, RuntimeError for integers.
    Source: Fedus et al. 2021, equations 4 to 6; as `load_balancing_loss_func` of transformers.

    >>> load_balancing_loss(torch.eye(4) * 9, top_k=1).round()
    tensor(1.)
    """
    layers = _layers(router_logits)
    experts = layers[0].shape[-1]
    if {experts} != (sizes := {logits.shape[-1] for logits in layers}):
        raise ValueError(f"layers differ in their number of experts: {sorted(sizes)}")
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k must be from 1 to the number of experts, {experts}, got {top_k}")
    pairs, probs, tokens = [], [], []
    for logits in layers:
        flat = logits.reshape(-1, experts)
        p = flat.softmax(-1)
        wide = p.to(torch.promote_types(p.dtype, torch.float32))
        weight = wide.new_ones(len(flat))
        if attention_mask is not None:
            if attention_mask.numel() != len(flat):
                raise ValueError(
                    f"attention_mask has shape {tuple(attention_mask.shape)}, expected "
                    f"{len(flat)} elements to go with router_logits of shape {tuple(logits.shape)}"
                )
            weight = attention_mask.reshape(-1).to(wide)
        chosen = p.detach().topk(top_k, -1).indices
        pairs.append(torch.zeros_like(wide).scatter_(1, chosen, 1.0).mul_(weight[:, None]).sum(0))
        probs.append((wide * weight[:, None]).sum(0))
        tokens.append(weight.sum())
    count = sum(tokens[1:], tokens[0])
    return experts * (sum(pairs[1:], pairs[0]) / count * sum(probs[1:], probs[0]) / count).sum()


def router_z_loss(router_logits: Tensor | Sequence[Tensor]) -> Tensor:
    """Compute the mean of log(sum(exp(logits)))² over tokens, which keeps logits small.

    Shapes: router_logits (..., E), or a sequence of these, one of each layer, as a model's
        `output.router_logits`, over all of whose tokens the mean is; returns () in float32 (float64
        for float64).
    Raises: ValueError for an empty sequence; TypeError for None, RuntimeError for integers.
    Source: Zoph et al. 2022, equation 5.

    >>> router_z_loss((torch.zeros(3, 1), torch.zeros(2, 1)))
    tensor(0.)
    """
    squares = []
    for logits in _layers(router_logits):
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        squares.append(wide.logsumexp(-1).square().reshape(-1))
    return torch.cat(squares).mean()


def _layers(router_logits: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Return the logits of each layer; raise unless they are floating tensors."""
    if router_logits is None:
        raise TypeError(
            "router_logits must be a Tensor or a sequence of Tensors, got None; call the model "
            "with output_router_logits=True, or the layer with return_router_logits=True"
        )
    single = isinstance(router_logits, Tensor)
    layers = [router_logits] if isinstance(router_logits, Tensor) else [*router_logits]
    if not layers:
        raise ValueError("router_logits must have the logits of one layer at least, got none")
    for i, logits in enumerate(layers):
        name = "router_logits" if single else f"router_logits[{i}]"
        if not isinstance(logits, Tensor):
            raise TypeError(
                f"{name} must be a Tensor, got {type(logits).__name__}; leave out layers without "
                "a router"
            )
        if not logits.is_floating_point():
            raise RuntimeError(
                f"{name} is {logits.dtype}, expected a floating dtype: logits, not chosen experts"
            )
    return layers
