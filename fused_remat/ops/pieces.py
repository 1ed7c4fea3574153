"""MLPs as functions: plain, gated, and with their norm and residual."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fused_remat.autograd import run_block
from fused_remat.graph.build import block_graph, dropout_add_graph, norm_graph, rotary_graph
from fused_remat.ops.activation import ActivationLike
from fused_remat.ops.checks import (
    check_alike,
    check_heads,
    check_norm,
    check_p,
    check_shape,
    resolve_activation,
    run_tokens,
    seed_tensor,
)
from fused_remat.policies import Policy
from fused_remat.spec import AttentionSpec, BlockSpec, BranchSpec, MLPSpec, NormSpec, RotarySpec


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


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    policy: str | Policy = "full",
    backend: str = "auto",
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension.

    Shapes: x (..., D), weight and bias (D,) or None; returns (..., D) in x.dtype.
    Units: bytes kept = the input, and 8 a token (mean and rstd in float32; 16 for float64).
    Raises: ValueError for shapes that do not fit, RuntimeError for mixed dtypes or devices.
    Source: Ba, Kiros, Hinton 2016.

    >>> layer_norm(torch.tensor([[1.0, 3.0]]), eps=0.0)
    tensor([[-1.,  1.]])
    """
    return _norm("layer_norm", x, weight, bias, eps, policy, backend)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    policy: str | Policy = "full",
    backend: str = "auto",
) -> Tensor:
    """x / sqrt(mean(x**2) + eps) * weight over the last dimension.

    Shapes: x (..., D), weight (D,) or None; returns (..., D) in x.dtype. `eps` None is the machine
        epsilon of the dtype computed in (float32 for 16 bits), as `torch.nn.functional.rms_norm`
        has it.
    Units: bytes kept = the input, and 4 a token (rstd in float32; 8 for float64).
    Raises: ValueError for shapes that do not fit, RuntimeError for mixed dtypes or devices.
    Source: Zhang, Sennrich 2019.

    >>> rms_norm(torch.tensor([[3.0, 3.0]]), eps=0.0)
    tensor([[1., 1.]])
    """
    check_alike(x, {})
    eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if eps is None else eps
    return _norm("rms_norm", x, weight, None, eps, policy, backend)


def _norm(
    kind: str,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    policy: str | Policy,
    backend: str,
) -> Tensor:
    check_alike(x, {"weight": weight, "bias": bias})
    for name, t in (("weight", weight), ("bias", bias)):
        check_shape(name, t, tuple(x.shape[-1:]), "x", x)
    tensors = {"input": x, "norm.weight": weight, "norm.bias": bias}
    return run_tokens(norm_graph(NormSpec(kind=kind, eps=float(eps))), policy, backend, tensors)


def dropout_add(
    x: Tensor,
    residual: Tensor,
    p: float,
    *,
    policy: str | Policy = "full",
    seed: int | Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """residual + dropout(x), rounded once; the mask is never stored.

    Shapes: x and residual (..., D); returns the same, in x.dtype.
    Units: bytes kept = 8 (the seed), or nothing at p = 0.
    Raises: ValueError for different shapes or p outside [0, 1], RuntimeError for mixed dtypes.
    Source: Srivastava et al. 2014; the generator is defined in `fused_remat.random`.

    >>> dropout_add(torch.ones(4), torch.zeros(4), p=0.5, seed=0)
    tensor([0., 0., 0., 2.])
    """
    check_alike(x, {"residual": residual})
    if x.shape != residual.shape:
        raise ValueError(
            f"residual has shape {tuple(residual.shape)}, expected x's {tuple(x.shape)}"
        )
    tensors = {"input": x, "residual": residual, "seed": seed_tensor(seed, x.device)}
    return run_tokens(dropout_add_graph(check_p("p", p)), policy, backend, tensors)


def rotary(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    nhead: int,
    kv_heads: int | None = None,
    interleaved: bool = False,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    policy: str | Policy = "full",
    backend: str = "auto",
) -> Tensor:
    """qkv, its queries and keys rotated in pairs: y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin.

    Shapes: qkv (B, S, (H + 2·Hkv)·E), the query heads first, then the key heads, then the value
        heads, which stay as they are; returns the same in qkv.dtype. cos and sin (S, R/2) or
        (B, S, R/2), of qkv's dtype or float32, constants; both None: nothing is rotated. The
        first R elements of a head are, R <= E. Hkv is `kv_heads`, or H.
    interleaved: (x1, x2) are neighbours, elements 2i and 2i + 1 (GPT-J); else i and i + R/2
        (GPT-NeoX, and LLaMA in Hugging Face's layout).
    q_norm_weight, k_norm_weight: (E,) of an RMSNorm of each query and key head, with `eps`, before
        it is rotated (Qwen3); both or neither.
    Arithmetic is float32 (float64 for float64), rounded once.
    Units: bytes kept = none, or qkv where heads are normed.
    Raises: ValueError for shapes that do not fit or nothing to do; RuntimeError for mixed dtypes or
        devices, and for tables that require a gradient, which they cannot be given.
    Source: Su et al. 2021; heads normed as in Dehghani et al. 2023.

    >>> angle = torch.tensor([[0.0], [torch.pi / 2]])
    >>> x = torch.tensor([3.0, 4.0]).repeat(1, 2, 3)  # a query, a key and a value head of two
    >>> rotary(x, angle.cos(), angle.sin(), nhead=1).round()
    tensor([[[ 3.,  4.,  3.,  4.,  3.,  4.],
             [-4.,  3., -4.,  3.,  3.,  4.]]])
    """
    check_alike(qkv, {})
    kv_heads = nhead if kv_heads is None else kv_heads
    check_heads(nhead, kv_heads, "nhead and kv_heads")
    heads = nhead + 2 * kv_heads
    if qkv.dim() != 3 or qkv.shape[-1] % heads:
        raise ValueError(
            f"qkv has shape {tuple(qkv.shape)}, expected (B, S, {heads}·E): {nhead} query, "
            f"{kv_heads} key and {kv_heads} value heads"
        )
    rope = None if cos is None and sin is None else (cos, sin)
    tensors = rotary_tensors(qkv, qkv.shape[-1] // heads, rope, q_norm_weight, k_norm_weight)
    if not tensors:
        raise ValueError("nothing to do: neither cos and sin nor q_norm_weight and k_norm_weight")
    spec = AttentionSpec(
        num_heads=nhead, num_kv_heads=kv_heads, head_dim=qkv.shape[-1] // heads, scale=1.0,
        **rotary_fields(tensors, interleaved, eps),
    )  # fmt: skip
    return run_block(rotary_graph(spec), policy, {"input": qkv, **tensors}, backend=backend)


def rotary_tensors(
    x: Tensor,
    head_dim: int,
    rope: tuple[Tensor | None, Tensor | None] | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
) -> dict[str, Tensor]:
    """What a rotary step takes besides its input, by name, checked; x is (B, S, ...).

    Raises: TypeError, ValueError, RuntimeError for what does not fit x and heads of `head_dim`.
    """
    found: dict[str, Tensor] = {}
    if rope is not None:
        if (
            not isinstance(rope, tuple | list)
            or [isinstance(t, Tensor) for t in rope] != [True] * 2
        ):
            raise TypeError(f"rope takes two Tensors, (cos, sin), got {_types(rope)}")
        for name, table in zip(("cos", "sin"), rope, strict=True):
            assert table is not None
            found[name] = _checked_table(name, table, x, head_dim)
        check_shape("sin", found["sin"], tuple(found["cos"].shape), "cos", found["cos"])
        if found["sin"].dtype != found["cos"].dtype:
            raise RuntimeError(f"sin is {found['sin'].dtype}, cos {found['cos'].dtype}")
    if (q_weight is None) != (k_weight is None):
        raise ValueError("q_norm_weight and k_norm_weight go together, got one of them")
    check_alike(x, {"q_norm_weight": q_weight, "k_norm_weight": k_weight})
    for name, weight in (("q_norm", q_weight), ("k_norm", k_weight)):
        if weight is not None:
            check_shape(f"{name}_weight", weight, (head_dim,), "x", x)
            found[f"{name}.weight"] = weight
    return found


def _types(rope: object) -> str:
    if isinstance(rope, tuple | list):
        return f"({', '.join(type(t).__name__ for t in rope)})"
    return type(rope).__name__


def _checked_table(name: str, table: Tensor, x: Tensor, head_dim: int) -> Tensor:
    """The table, without a batch dimension of one."""
    batch, seq_len = x.shape[:2]
    shape = tuple(table.shape)
    lead, width = shape[:-1], 2 * shape[-1] if shape else 0
    if lead not in ((seq_len,), (batch, seq_len), (1, seq_len)) or not 0 < width <= head_dim:
        raise ValueError(
            f"{name} has shape {shape}, expected ({seq_len}, R/2) or ({batch}, {seq_len}, R/2) "
            f"with R at most {head_dim}, the width of a head, to go with x of shape "
            f"{tuple(x.shape)}"
        )
    if table.dtype not in (x.dtype, torch.float32) or table.device != x.device:
        raise RuntimeError(
            f"{name} is {table.dtype} on {table.device}, expected {x.dtype} or float32 on "
            f"{x.device}, as the input"
        )
    if table.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{name} requires a gradient, and rotary tables are given none")
    return table[0] if table.dim() == 3 and table.shape[0] == 1 else table


def rotary_fields(tensors: Mapping[str, Tensor], interleaved: bool, eps: float) -> dict[str, Any]:
    """What an `AttentionSpec` says of the tensors that `rotary_tensors` found: nothing, or more."""
    fields: dict[str, Any] = {}
    if "cos" in tensors:
        fields["rotary"] = RotarySpec(interleaved=bool(interleaved))
    if "q_norm.weight" in tensors:
        fields["head_norm"] = NormSpec(kind="rms_norm", eps=float(eps))
    return fields
