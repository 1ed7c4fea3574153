"""MLPs as functions: plain, gated, and with their norm and residual."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from fused_remat.graph.build import block_graph
from fused_remat.ops.activation import ActivationLike
from fused_remat.ops.inputs import (
    check_alike,
    check_norm,
    check_p,
    check_shape,
    resolve_activation,
    run_tokens,
    seed_tensor,
)
from fused_remat.policies import Policy
from fused_remat.spec import BlockSpec, BranchSpec, MLPSpec, NormSpec


def mlp(
    x: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    activation: ActivationLike = "gelu",
    dropout_p: float = 0.0,
    *,
    policy: str | Policy = "full",
    seed: int | Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """dropout(activation(x @ fc1_weight.T + fc1_bias)) @ fc2_weight.T + fc2_bias.

    Shapes: x (..., D), fc1_weight (F, D), fc1_bias (F,), fc2_weight (Dout, F), fc2_bias (Dout,);
        returns (..., Dout) in x.dtype. Biases may be None.
    activation: a name ("relu", "gelu", "gelu_tanh", "silu", "tanh"), or any function that maps
        (tokens, F) to the same shape, each token by itself, without random numbers; tensors that
        it captures get their gradients.
    Units: bytes kept = the input (policy "none": and F a token); FLOPs = 4·D·F a token forward,
        and 2·D·F more in backward than the unfused MLP's ("none": none more).
    Raises: ValueError for shapes that do not fit, an unknown activation or policy, dropout_p
        outside [0, 1]; RuntimeError for mixed dtypes or devices.
    Source: Vaswani et al. 2017.

    >>> import torch
    >>> x = torch.randn(2, 5, 8, requires_grad=True)
    >>> w1, w2 = torch.randn(32, 8, requires_grad=True), torch.randn(8, 32)
    >>> y = mlp(x, w1, None, w2, None, "relu")
    >>> y.sum().backward(); y.shape, w1.grad.shape
    (torch.Size([2, 5, 8]), torch.Size([32, 8]))
    """
    weights = {
        "fc1_weight": fc1_weight, "fc1_bias": fc1_bias,
        "fc2_weight": fc2_weight, "fc2_bias": fc2_bias,
    }  # fmt: skip
    width = _check(x, weights)
    name, captured, functions = resolve_activation(activation, x, (2, width))
    p = check_p("dropout_p", dropout_p)
    branch = BranchSpec(op=MLPSpec(activation=name, captured=len(captured), dropout=p))
    return _run(branch, x, {**_named(weights), **captured}, functions, policy, seed, backend)


def gated_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    dropout_p: float = 0.0,
    *,
    policy: str | Policy = "full",
    seed: int | Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """dropout(act(x @ gate_weight.T) * (x @ up_weight.T)) @ down_weight.T, biases added if given.

    "silu" is SwiGLU, "gelu" GeGLU, "relu" ReGLU; "gelu_tanh" and "tanh" work too.

    Shapes: x (..., D), gate_weight and up_weight (F, D), down_weight (Dout, F), gate_bias and
        up_bias (F,), down_bias (Dout,); returns (..., Dout) in x.dtype.
    Units: bytes kept = the input (policy "none": and 2·F a token); FLOPs = 6·D·F a token forward,
        and 4·D·F more in backward than the unfused MLP's ("none": none more).
    Raises: as `mlp`.
    Source: Shazeer 2020.

    >>> import torch
    >>> x = torch.randn(3, 8, requires_grad=True)
    >>> gate, up, down = (torch.randn(s) for s in ((16, 8), (16, 8), (8, 16)))
    >>> gated_mlp(x, gate, up, down).shape
    torch.Size([3, 8])
    """
    weights = {
        "gate_weight": gate_weight, "gate_bias": gate_bias, "fc1_weight": up_weight,
        "fc1_bias": up_bias, "fc2_weight": down_weight, "fc2_bias": down_bias,
    }  # fmt: skip
    width = _check(x, weights, {"fc1": "up", "fc2": "down"})
    name, _, functions = resolve_activation(activation, x, (2, width))
    if functions:
        raise ValueError(f"a gated MLP takes the name of an activation, got {activation!r}")
    p = check_p("dropout_p", dropout_p)
    branch = BranchSpec(op=MLPSpec(activation=name, gated=True, dropout=p))
    return _run(branch, x, _named(weights), {}, policy, seed, backend)


def mlp_block(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    activation: ActivationLike = "gelu",
    dropout_p: float = 0.0,
    residual_dropout_p: float = 0.0,
    *,
    gate_weight: Tensor | None = None,
    gate_bias: Tensor | None = None,
    norm: str = "layer_norm",
    eps: float = 1e-5,
    policy: str | Policy = "full",
    seed: int | Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """x + dropout(mlp(norm(x))): the second half of a pre-norm transformer block.

    With `gate_weight` the MLP is gated: act(gate) * fc1, as `gated_mlp`.

    Shapes: x (..., D), norm_weight and norm_bias (D,) or None, fc1_weight and gate_weight (F, D),
        fc2_weight (D, F), biases (F,), (D,) or None; returns (..., D) in x.dtype.
    norm: "layer_norm" or "rms_norm" (a bias is added there too, if given).
    activation: as in `mlp`; a name where gated.
    Units: bytes kept = the input and the norm's statistics (policy "none": and F a token, 2·F
        gated).
    Raises: as `mlp`.
    Source: Vaswani et al. 2017; pre-norm after Xiong et al. 2020.

    >>> import torch
    >>> x = torch.randn(2, 5, 8, requires_grad=True)
    >>> w1, w2 = torch.randn(32, 8), torch.randn(8, 32)
    >>> mlp_block(x, torch.ones(8), None, w1, None, w2, None, norm="rms_norm").shape
    torch.Size([2, 5, 8])
    """
    weights = {
        "fc1_weight": fc1_weight, "fc1_bias": fc1_bias,
        "fc2_weight": fc2_weight, "fc2_bias": fc2_bias,
    }  # fmt: skip
    gated = gate_weight is not None
    if gated:
        weights |= {"gate_weight": gate_weight, "gate_bias": gate_bias}
    elif gate_bias is not None:
        raise ValueError("gate_bias without gate_weight")
    width = _check(x, weights)
    check_shape("fc2_weight", fc2_weight, (x.shape[-1], width), "x", x)
    check_norm(x, norm_weight, norm_bias, norm)
    name, captured, functions = resolve_activation(activation, x, (2, width))
    if functions and gated:
        raise ValueError(f"a gated MLP takes the name of an activation, got {activation!r}")
    p = check_p("dropout_p", dropout_p)
    branch = BranchSpec(
        op=MLPSpec(activation=name, gated=gated, captured=len(captured), dropout=p),
        norm=NormSpec(kind=norm, eps=float(eps)),
        dropout=check_p("residual_dropout_p", residual_dropout_p),
    )
    named = {**_named(weights), "norm.weight": norm_weight, "norm.bias": norm_bias, **captured}
    return _run(branch, x, named, functions, policy, seed, backend)


def _check(
    x: Tensor, weights: Mapping[str, Tensor | None], shown: Mapping[str, str] | None = None
) -> int:
    """Check shapes and dtypes of an MLP's weights; returns F. `shown`: the caller's names."""
    names = {"fc1": "fc1", "fc2": "fc2", "gate": "gate"} | dict(shown or {})
    called = {f"{names[k.split('_')[0]]}_{k.split('_')[1]}": t for k, t in weights.items()}
    check_alike(x, called)
    fc1, fc2 = weights["fc1_weight"], weights["fc2_weight"]
    gate = weights.get("gate_weight", fc1)
    if fc1 is None or fc2 is None or gate is None or x.dim() < 1:
        raise ValueError("x must have at least one dimension and the weights must be given")
    first, second = (f"{names[n]}_weight" for n in ("fc1", "fc2"))
    check_shape(first, fc1, ("F", x.shape[-1]), "x", x)
    width = fc1.shape[0]
    check_shape(second, fc2, ("Dout", width), first, fc1)
    check_shape(f"{names['fc1']}_bias", weights["fc1_bias"], (width,), first, fc1)
    check_shape(f"{names['fc2']}_bias", weights["fc2_bias"], (fc2.shape[0],), second, fc2)
    if "gate_weight" in weights:
        check_shape("gate_weight", gate, tuple(fc1.shape), first, fc1)
        check_shape("gate_bias", weights["gate_bias"], (width,), "gate_weight", gate)
    return width


def _named(weights: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """The graph's names: "fc1_weight" is "fc1.weight"."""
    return {name.replace("_", "."): t for name, t in weights.items()}


def _run(
    branch: BranchSpec,
    x: Tensor,
    tensors: Mapping[str, Tensor | None],
    functions: Mapping[str, Callable[[Tensor], Tensor]],
    policy: str | Policy,
    seed: int | Tensor | None,
    backend: str,
) -> Tensor:
    given = {**tensors, "input": x, "seed": seed_tensor(seed, x.device)}
    assert isinstance(branch.op, MLPSpec)
    block = branch.norm is not None
    kind = f"{'gated_' if branch.op.gated else ''}mlp{'_block' if block else ''}"
    graph = block_graph(BlockSpec(kind=kind, branches=(branch,), residual=block))
    return run_tokens(graph, policy, backend, given, functions)
