"""Parts of blocks as functions: MLPs, norms, dropout with its sum, rotary embedding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fused_remat.autograd import run_block
from fused_remat.graph.build import block_graph, dropout_add_graph, norm_graph, rotary_graph
from fused_remat.graph.graph import Graph
from fused_remat.ops.activation import ActivationLike, known_activation, resolve_activation
from fused_remat.ops.checks import (
    argument_name,
    check_alike,
    check_heads,
    check_norm_kind,
    check_p,
    check_shape,
    check_tensor,
    check_weights,
    hidden_width,
    run_tokens,
    seed_tensor,
)
from fused_remat.policies import Policy
from fused_remat.spec import AttentionSpec, BlockSpec, BranchSpec, MLPSpec, NormSpec, RotarySpec
from fused_remat.steps.replay import Function


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
    """Compute dropout(activation(x @ fc1_weight.T + fc1_bias)) @ fc2_weight.T + fc2_bias.

    Shapes: x (..., D), fc1_weight (F, D), fc1_bias (F,), fc2_weight (Dout, F), fc2_bias (Dout,);
        returns (..., Dout) in x.dtype. Biases may be None.
    activation: a name ("relu", "gelu", "gelu_tanh", "silu", "relu2", "tanh"), or any function from
        (tokens, F) to the same shape that treats each token by itself, draws no random numbers and
        calls PyTorch's operators only; tensors that it captures get their gradients.
    seed: of dropout: an int, an int64 tensor () on x's device, or None to draw one.
    Units: bytes kept = the input (policy "none": and F elements a token); FLOPs = 4·D·F a token
        forward, and 2·D·F more in backward than the unfused MLP's ("none": none more).
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
        "fc1.weight": fc1_weight, "fc1.bias": fc1_bias,
        "fc2.weight": fc2_weight, "fc2.bias": fc2_bias,
    }  # fmt: skip
    return run_tokens(*_mlp(x, weights, activation, dropout_p, seed), policy, backend)


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
    """Compute dropout(act(x @ gate_weight.T) * (x @ up_weight.T)) @ down_weight.T, with biases.

    The activation has a name (as in `mlp`): "silu" makes it SwiGLU, "gelu" GeGLU, "relu" ReGLU.

    Shapes: x (..., D), gate_weight and up_weight (F, D), down_weight (Dout, F), gate_bias and
        up_bias (F,), down_bias (Dout,); returns (..., Dout) in x.dtype.
    Units: bytes kept = the input (policy "none": and 2·F elements a token); FLOPs = 6·D·F a token
        forward, and 4·D·F more in backward than the unfused MLP's ("none": none more).
    Raises: as `mlp`.
    Source: Shazeer 2020.

    >>> import torch
    >>> x = torch.randn(3, 8, requires_grad=True)
    >>> gate, up, down = (torch.randn(s) for s in ((16, 8), (16, 8), (8, 16)))
    >>> gated_mlp(x, gate, up, down).shape
    torch.Size([3, 8])
    """
    weights = {
        "gate.weight": gate_weight, "gate.bias": gate_bias, "fc1.weight": up_weight,
        "fc1.bias": up_bias, "fc2.weight": down_weight, "fc2.bias": down_bias,
    }  # fmt: skip

    def shown(name: str) -> str:
        return argument_name(name).replace("fc1", "up").replace("fc2", "down")

    return run_tokens(*_mlp(x, weights, activation, dropout_p, seed, shown=shown), policy, backend)


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
    """Compute x + dropout(mlp(norm(x))), the second half of a pre-norm transformer block.

    With `gate_weight` the MLP is gated, act(gate) * fc1, as in `gated_mlp`.

    Shapes: x (..., D), norm_weight and norm_bias (D,) or None, fc1_weight and gate_weight (F, D),
        fc2_weight (D, F), biases (F,), (D,) or None; returns (..., D) in x.dtype.
    norm: "layer_norm" or "rms_norm", each with an optional bias.
    activation, seed: as in `mlp`; a gated MLP takes a name.
    Units: bytes kept = the input and the norm's statistics (policy "none": and F elements a token,
        2·F if gated).
    Raises: as `mlp`.
    Source: Vaswani et al. 2017; pre-norm after Xiong et al. 2020.

    >>> import torch
    >>> x = torch.randn(2, 5, 8, requires_grad=True)
    >>> w1, w2 = torch.randn(32, 8), torch.randn(8, 32)
    >>> mlp_block(x, torch.ones(8), None, w1, None, w2, None, norm="rms_norm").shape
    torch.Size([2, 5, 8])
    """
    weights = {
        "fc1.weight": fc1_weight, "fc1.bias": fc1_bias,
        "fc2.weight": fc2_weight, "fc2.bias": fc2_bias,
        "norm.weight": norm_weight, "norm.bias": norm_bias,
    }  # fmt: skip
    if gate_weight is not None:
        weights |= {"gate.weight": gate_weight, "gate.bias": gate_bias}
    elif gate_bias is not None:
        raise ValueError("gate_bias needs gate_weight")
    spec = NormSpec(kind=check_norm_kind(norm), eps=float(eps))
    block = _mlp(x, weights, activation, dropout_p, seed, spec, residual_dropout_p)
    return run_tokens(*block, policy, backend)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    policy: str | Policy = "full",
    backend: str = "auto",
) -> Tensor:
    """Compute (x - mean) / sqrt(var + eps) * weight + bias over the last dimension.

    Shapes: x (..., D), weight and bias (D,) or None; returns (..., D) in x.dtype.
    Units: bytes kept = the input, and 8 a token (mean and rstd in float32; 16 for float64).
    Raises: ValueError for shapes that do not fit, RuntimeError for mixed dtypes or devices.
    Source: Ba, Kiros, Hinton 2016.

    >>> layer_norm(torch.tensor([[1.0, 3.0]]), eps=0.0)
    tensor([[-1.,  1.]])
    """
    return run_tokens(*_norm("layer_norm", x, weight, bias, eps), policy, backend)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    policy: str | Policy = "full",
    backend: str = "auto",
) -> Tensor:
    """Compute x / sqrt(mean(x**2) + eps) * weight over the last dimension.

    Shapes: x (..., D), weight (D,) or None; returns (..., D) in x.dtype. `eps` None is the machine
        epsilon of the dtype computed in (float32 for 16 bits), as `torch.nn.functional.rms_norm`
        has it.
    Units: bytes kept = the input, and 4 a token (rstd in float32; 8 for float64).
    Raises: ValueError for shapes that do not fit, RuntimeError for mixed dtypes or devices.
    Source: Zhang, Sennrich 2019.

    >>> rms_norm(torch.tensor([[3.0, 3.0]]), eps=0.0)
    tensor([[1., 1.]])
    """
    check_alike({"x": x})
    eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if eps is None else eps
    return run_tokens(*_norm("rms_norm", x, weight, None, eps), policy, backend)


def dropout_add(
    x: Tensor,
    residual: Tensor,
    p: float,
    *,
    policy: str | Policy = "full",
    seed: int | Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute residual + dropout(x), rounded once; the mask is never stored.

    Shapes: x and residual (..., D); returns the same, in x.dtype.
    Units: bytes kept = 8 (the seed), or nothing at p = 0.
    Raises: ValueError for different shapes or p outside [0, 1], RuntimeError for mixed dtypes.
    Source: Srivastava et al. 2014; the generator is defined in `fused_remat.random`.

    >>> dropout_add(torch.ones(4), torch.zeros(4), p=0.5, seed=0)
    tensor([0., 0., 0., 2.])
    """
    check_alike({"x": x, "residual": residual})
    check_shape("residual", residual, x.shape, {"x": x})
    tensors = {"input": x, "residual": residual, "seed": seed_tensor(seed, x.device)}
    return run_tokens(dropout_add_graph(check_p("p", p)), tensors, {}, policy, backend)


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
    """Rotate queries and keys of qkv in pairs: y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin.

    Shapes: qkv (B, S, (H + 2·Hkv)·E), the query heads first, then the key heads, then the value
        heads, which stay unchanged; returns the same in qkv.dtype. cos and sin (S, R/2) or
        (B, S, R/2), of qkv's dtype or float32; they rotate the first R elements of each head,
        R <= E. Both None: nothing is rotated. Hkv is `kv_heads`, or H.
    interleaved: (x1, x2) are neighbors, elements 2i and 2i + 1 (GPT-J); else i and i + R/2
        (GPT-NeoX, and LLaMA in Hugging Face's layout).
    q_norm_weight, k_norm_weight: (E,) of an RMSNorm with `eps` of each query and key head before
        the rotation (Qwen3); both or neither.
    Arithmetic is float32 (float64 for float64), rounded once.
    Units: bytes kept = none, or qkv where heads are normed.
    Raises: ValueError for shapes that do not fit or nothing to do; RuntimeError for mixed dtypes or
        devices, and for tables that require a gradient: they get none.
    Source: Su et al. 2021; heads normed as in Dehghani et al. 2023.

    >>> angle = torch.tensor([[0.0], [torch.pi / 2]])
    >>> x = torch.tensor([3.0, 4.0]).repeat(1, 2, 3)  # a query, a key and a value head of two
    >>> rotary(x, angle.cos(), angle.sin(), nhead=1).round()
    tensor([[[ 3.,  4.,  3.,  4.,  3.,  4.],
             [-4.,  3., -4.,  3.,  3.,  4.]]])
    """
    check_alike({"qkv": qkv})
    kv_heads = nhead if kv_heads is None else kv_heads
    check_heads(nhead, kv_heads)
    heads = nhead + 2 * kv_heads
    if qkv.dim() != 3 or qkv.shape[-1] % heads:
        raise ValueError(
            f"qkv has shape {tuple(qkv.shape)}, expected (B, S, {heads}·E): {nhead} query, "
            f"{kv_heads} key and {kv_heads} value heads"
        )
    head_dim = qkv.shape[-1] // heads
    tensors = rotary_tensors(qkv, head_dim, cos, sin, q_norm_weight, k_norm_weight)
    if not tensors:
        raise ValueError(
            "rotary has nothing to do: pass cos and sin, or q_norm_weight and k_norm_weight"
        )
    spec = AttentionSpec(
        num_heads=nhead, num_kv_heads=kv_heads, head_dim=head_dim, scale=1.0,
        **rotary_fields(tensors, interleaved, eps),
    )  # fmt: skip
    return run_block(rotary_graph(spec), policy, {"input": qkv, **tensors}, backend=backend)


#: A graph, its tensors by name, and the caller's functions.
Block = tuple[Graph, dict[str, Tensor | None], Mapping[str, Function]]


def _mlp(
    x: Tensor,
    weights: Mapping[str, Tensor | None],
    activation: ActivationLike,
    dropout_p: float,
    seed: int | Tensor | None,
    norm: NormSpec | None = None,
    residual_dropout_p: float = 0.0,
    shown: Callable[[str], str] = argument_name,
) -> Block:
    """Return an MLP, gated if `weights` has a gate, with `norm` and a residual unless None.

    `shown` maps names of weights to the caller's.
    """
    check_alike({"x": x, **{shown(name): t for name, t in weights.items()}})
    gated = "gate.weight" in weights
    hidden = hidden_width(x, weights, shown)
    if gated:
        activation = known_activation(activation)
    act = resolve_activation(activation, x, (2, hidden))
    p = check_p("dropout_p", dropout_p)
    branch = BranchSpec(
        op=MLPSpec(activation=act.name, gated=gated, captured=len(act.captured), dropout=p),
        norm=norm,
        dropout=check_p("residual_dropout_p", residual_dropout_p),
    )
    kind = f"{'gated_' if gated else ''}mlp{'_block' if norm else ''}"
    spec = BlockSpec(kind=kind, branches=(branch,), residual=norm is not None)
    check_weights(x, weights, spec, shown)
    tensors = {**weights, **act.captured, "input": x, "seed": seed_tensor(seed, x.device)}
    return block_graph(spec), tensors, act.functions


def _norm(kind: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Block:
    check_alike({"x": x, "weight": weight, "bias": bias})
    for name, t in (("weight", weight), ("bias", bias)):
        check_shape(name, t, x.shape[-1:], {"x": x})
    tensors = {"input": x, "norm.weight": weight, "norm.bias": bias}
    return norm_graph(NormSpec(kind=kind, eps=float(eps))), tensors, {}


def split_rope(rope: object) -> tuple[Tensor | None, Tensor | None]:
    """Return cos and sin of `rope`, both None for None; raise TypeError for anything else."""
    if rope is None:
        return None, None
    if not isinstance(rope, tuple | list) or len(rope) != 2:
        shape = f" of shape {tuple(rope.shape)}" if isinstance(rope, Tensor) else ""
        raise TypeError(f"rope takes two Tensors, (cos, sin), got {type(rope).__name__}{shape}")
    return rope[0], rope[1]


def rotary_tensors(
    x: Tensor,
    head_dim: int,
    cos: Tensor | None,
    sin: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
) -> dict[str, Tensor]:
    """Return the tensors of a rotary step other than its input x (B, S, ...), by name, checked."""
    tensors: dict[str, Tensor] = {}
    if cos is not None or sin is not None:
        c = _table("cos", cos, x, head_dim, (x.dtype, torch.float32))
        s = _table("sin", sin, x, head_dim, (c.dtype,))
        check_shape("sin", s, c.shape, {"cos": c})
        tensors = {"cos": c, "sin": s}
    if (q_weight is None) != (k_weight is None):
        raise ValueError("q_norm_weight and k_norm_weight go together; one of them is None")
    check_alike({"x": x, "q_norm_weight": q_weight, "k_norm_weight": k_weight})
    for name, weight in (("q_norm", q_weight), ("k_norm", k_weight)):
        if weight is not None:
            check_shape(f"{name}_weight", weight, (head_dim,), {"x": x})
            tensors[f"{name}.weight"] = weight
    return tensors


def _table(
    name: str, table: Any, x: Tensor, head_dim: int, dtypes: Sequence[torch.dtype]
) -> Tensor:
    """Return a checked table, without a batch dimension of one."""
    check_tensor(name, table, dtypes, x, "" if name == "cos" else ", as cos")
    if table.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} requires a gradient, and rotary tables get none: detach it, or call without "
            "gradients"
        )
    batch, seq_len = x.shape[:2]
    shape = tuple(table.shape)
    lead, width = shape[:-1], 2 * shape[-1] if shape else 0
    if lead not in ((seq_len,), (batch, seq_len), (1, seq_len)) or not 0 < width <= head_dim:
        raise ValueError(
            f"{name} has shape {shape}, expected ({seq_len}, R/2) or ({batch}, {seq_len}, R/2) "
            f"with R at most {head_dim}, the width of a head, to go with x of shape "
            f"{tuple(x.shape)}"
        )
    squeezed: Tensor = table[0] if table.dim() == 3 and table.shape[0] == 1 else table
    return squeezed


def rotary_fields(
    tensors: Mapping[str, Tensor | None], interleaved: bool, eps: float
) -> dict[str, Any]:
    """Return the fields of an `AttentionSpec` for the tensors of `rotary_tensors`."""
    fields: dict[str, Any] = {}
    if "cos" in tensors:
        fields["rotary"] = RotarySpec(interleaved=bool(interleaved))
    if "q_norm.weight" in tensors:
        fields["head_norm"] = NormSpec(kind="rms_norm", eps=float(eps))
    return fields
