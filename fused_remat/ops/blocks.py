"""The encoder block as a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import Unpack

from fused_remat.autograd.accumulate import Accumulation
from fused_remat.autograd.function import run_block, warn_of_kept_input
from fused_remat.graph.build import block_graph
from fused_remat.graph.graph import Graph
from fused_remat.graph.precision import mixed_precision
from fused_remat.ops.activation import ActivationLike
from fused_remat.ops.checks import (
    check_alike,
    check_heads,
    check_norm_kind,
    check_p,
    check_shape,
    check_weights,
    lengths_of,
    lists_attention_options,
    mask_of,
    masks_given,
    padding_of,
    resolve_activation,
    seed_tensor,
)
from fused_remat.ops.pieces import rotary_tensors
from fused_remat.policies import Policy
from fused_remat.spec import (
    AttentionOptions,
    LoraSpec,
    lora_params,
    nn_layer_spec,
    score_fields,
    transformer_spec,
)


def encoder_block(
    x: Tensor,
    weights: Mapping[str, Tensor | None],
    nhead: int,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    key_padding_mask: Tensor | None = None,
    norm_first: bool = False,
    activation: ActivationLike = "relu",
    eps: float = 1e-5,
    lora: Sequence[Update] = (),
    lora_dropout_p: float = 0.0,
    policy: str | Policy = "full",
    seed: int | Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """A whole transformer encoder block, pre- or post-norm, keeping what `policy` names.

    Shapes: x (B, S, D); returns the same, in x.dtype. `weights` maps "qkv.weight" (3D, D),
        "proj.weight" (D, D), "fc1.weight" (F, D), "fc2.weight" (D, F) and, where they are to be,
        "norm1.weight" and "norm2.weight" (D,) and a ".bias" of each to tensors.
    attn_mask, key_padding_mask, is_causal: as in `attention`: an attn_mask's True **takes part**,
        a key_padding_mask's True is **excluded**.
    dropout_p: of all four sites: attention's probabilities, both residual branches, the MLP.
    activation: as in `mlp`; a function is given whole (B, S, F) tensors.
    lora, lora_dropout_p: updates of "qkv", "proj", "fc1" and "fc2", as in `causal_block`.
    Units: bytes kept = 2·D (full, 16-bit) to 22·D (none) per token, plus statistics.
    Raises: ValueError for shapes that do not fit, unknown or missing weights, an unknown policy or
        activation; RuntimeError for mixed dtypes or devices.
    Source: Vaswani et al. 2017; pre-norm after Xiong et al. 2020.

    >>> import torch
    >>> shapes = {"qkv": (24, 8), "proj": (8, 8), "fc1": (16, 8), "fc2": (8, 16)}
    >>> weights = {f"{k}.weight": torch.randn(s, requires_grad=True) for k, s in shapes.items()}
    >>> y = encoder_block(torch.randn(3, 5, 8), weights, nhead=2, norm_first=True, policy="lean")
    >>> y.sum().backward(); y.shape, weights["fc1.weight"].grad.shape
    (torch.Size([3, 5, 8]), torch.Size([16, 8]))
    """
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights must map names to tensors, got {type(weights).__name__}")
    check_alike(x, weights)
    if x.dim() != 3:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected (B, S, D)")
    batch, seq_len, d_model = x.shape
    if not isinstance(nhead, int):
        raise TypeError(f"nhead must be an int, got {nhead!r}")
    if nhead < 1 or d_model % nhead:
        raise ValueError(f"nhead must divide x's width, got {nhead} and {d_model}")
    grid = (batch, nhead, seq_len, seq_len)
    fc1 = weights.get("fc1.weight")
    width = 1 if fc1 is None else fc1.shape[0]
    name, captured, functions = resolve_activation(activation, x, (1, 2, width))
    if functions:
        functions = {"activation": _on_whole(functions["activation"], batch, seq_len)}
    masks = {"mask": mask_of(attn_mask, grid, x), "padding": padding_of(key_padding_mask, grid, x)}
    spec = nn_layer_spec(
        norm_first,
        nhead,
        d_model // nhead,
        name,
        (float(eps), float(eps)),
        check_p("dropout_p", dropout_p),
        causal=is_causal,
        masks=masks_given(masks),
        true_means="attend",
        captured=len(captured),
        loras=loras_of(lora, check_p("lora_dropout_p", lora_dropout_p), x),
    )
    check_weights(x, weights, spec)
    tensors = {
        **weights, **captured, **lora_tensors(lora), "input": x, **masks,
        "seed": seed_tensor(seed, x.device),
    }  # fmt: skip
    check_loras(lora, spec.linears, tensors)
    return run_layer(
        block_graph(spec), tensors, policy=policy, backend=backend, functions=functions,
        preserve_strides=norm_first,
    )  # fmt: skip


def _on_whole(
    fn: Callable[[Tensor], Tensor], batch: int, seq_len: int
) -> Callable[[Tensor], Tensor]:
    return lambda up: fn(up.view(batch, seq_len, -1)).reshape(up.shape)


@lists_attention_options
def causal_block(
    x: Tensor,
    weights: Mapping[str, Tensor | None],
    nhead: int,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = True,
    *,
    kv_heads: int | None = None,
    key_padding_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    rope_interleaved: bool = False,
    placement: str = "pre",
    norm: str = "rms_norm",
    eps: float = 1e-6,
    norm_offset: float = 0.0,
    qk_norm_eps: float | None = None,
    activation: ActivationLike = "silu",
    attention_dropout_p: float | None = None,
    lora: Sequence[tuple[str, Tensor, Tensor, float]] = (),
    lora_dropout_p: float = 0.0,
    policy: str | Policy = "full",
    seed: int | Tensor | None = None,
    backend: str = "auto",
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """A whole block of a language model, keeping what `policy` names: Llama's, by default.

    h = x + proj(attention(rotary(qkv(norm1(x))))), h + fc2(act(gate(norm2(h))) * fc1(norm2(h)))

    Shapes: x (B, S, D); returns the same, in x.dtype. `weights` maps names to tensors, of H query
        and Hkv key heads, each E wide:
        "qkv.weight" ((H + 2·Hkv)·E, D), or "q.weight" (H·E, D), "k.weight" and "v.weight"
        (Hkv·E, D); "proj.weight" (D, H·E); "fc1.weight" (F, D), "fc2.weight" (D, F); a
        "gate.weight" (F, D) makes the MLP gated, as above, and without it is fc2(act(fc1)).
        Where they are to be: "norm1.weight", "norm2.weight" (D,), a ".bias" of each of the above,
        "q_norm.weight" and "k_norm.weight" (E,), with placement "sandwich" "post1.weight" and
        "post2.weight" (D,).
    placement: "pre"; "post": norm1(x + attention), norm2(h + mlp); "sandwich": both halves normed
        before and after, x + post1(attention(norm1(x))) (Gemma-2).
    norm: "rms_norm" or "layer_norm". norm_offset: added to all norms' weights, in float32 (1 for
        Gemma). qk_norm_eps: None for eps.
    activation: a name, or a function or module that has one (`F.silu`, `nn.GELU("tanh")`).
    dropout_p: of attention's probabilities, both residual branches and the MLP;
        attention_dropout_p: of the first alone, None for dropout_p.
    rope, rope_interleaved: (cos, sin), (S, R/2) or (B, S, R/2), as in `rotary`: the first R
        elements of a head are rotated.
    is_causal, window, attn_mask, key_padding_mask, key_lengths, cu_seqlens, scale, softcap: as in
        `attention_block`: an attn_mask's True **takes part**, a key_padding_mask's True is
        **excluded**; padding may be on either side. Positions are those of the rope tables.
    lora: (layer, A, B, scale): + scale * dropout(x) @ A.T @ B.T for a layer by its name above;
        A (rank, in), B (out, rank), in x.dtype or float32. lora_dropout_p: of x, each of its own.
    Units: bytes kept a token at 16 bits = 2·D (full), 2·(D + H·E) (lean), 4·D + 2·H·E (balanced),
        and 2·(H + 2·Hkv)·E (fast), and 4·F (none; 2·F not gated), plus statistics.
    Raises: ValueError for shapes that do not fit, unknown or missing weights, an unknown policy,
        activation, norm or placement; RuntimeError for mixed dtypes or devices.
    Source: Touvron et al. 2023; GQA: Ainslie et al. 2023; LoRA: Hu et al. 2021.

    >>> import torch
    >>> shapes = {"q": (8, 8), "k": (4, 8), "v": (4, 8), "proj": (8, 8), "gate": (16, 8),
    ...           "fc1": (16, 8), "fc2": (8, 16), "norm1": (8,), "norm2": (8,)}
    >>> weights = {f"{k}.weight": torch.randn(s, requires_grad=True) for k, s in shapes.items()}
    >>> angles = torch.outer(torch.arange(5), torch.tensor([1.0, 0.01]))
    >>> rope = (angles.cos(), angles.sin())
    >>> y = causal_block(torch.randn(3, 5, 8), weights, nhead=2, kv_heads=1, rope=rope)
    >>> y.sum().backward(); y.shape, weights["gate.weight"].grad.shape
    (torch.Size([3, 5, 8]), torch.Size([16, 8]))
    """
    kv_heads = nhead if kv_heads is None else kv_heads
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights must map names to tensors, got {type(weights).__name__}")
    check_alike(x, weights)
    if x.dim() != 3:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected (B, S, D)")
    check_heads(nhead, kv_heads, "nhead and kv_heads")
    head_dim = _head_dim(weights, nhead, kv_heads, x)
    grid = (x.shape[0], nhead, x.shape[1], x.shape[1])
    p, p_lora = check_p("dropout_p", dropout_p), check_p("lora_dropout_p", lora_dropout_p)
    p_attention = p if attention_dropout_p is None else attention_dropout_p
    act, _, functions = resolve_activation(activation, x, (1, 2))
    if functions:
        raise ValueError(f"a transformer block takes the name of an activation, got {activation!r}")
    lengths = lengths_of(key_lengths, cu_seqlens, None, grid, x, "cu_seqlens")
    q_norm, k_norm = weights.get("q_norm.weight"), weights.get("k_norm.weight")
    tensors: dict[str, Tensor | None] = {
        **weights, **lengths, **rotary_tensors(x, head_dim, rope, q_norm, k_norm),
        "mask": mask_of(attn_mask, grid, x), "padding": padding_of(key_padding_mask, grid, x),
        "seed": seed_tensor(seed, x.device),
    }  # fmt: skip
    qk_eps = float(eps if qk_norm_eps is None else qk_norm_eps)
    spec = transformer_spec(
        check_norm_kind(norm),
        float(eps),
        act,
        offset=float(norm_offset),
        placement=_one_of("placement", placement, ("pre", "post", "sandwich")),
        gated=weights.get("gate.weight") is not None,
        dropout=(check_p("attention_dropout_p", p_attention), p, p, p),
        loras=loras_of(lora, p_lora, x),
        num_heads=nhead,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        **score_fields(head_dim, is_causal, options),
        projection="split" if weights.get("qkv.weight") is None else "packed",
        rotary=rope is not None,
        interleaved=bool(rope_interleaved),
        qk_norm_eps=None if q_norm is None else qk_eps,
        masks=masks_given(tensors),
    )
    tensors.update(lora_tensors(lora))
    check_weights(x, weights, spec)
    check_loras(lora, spec.linears, tensors)
    tensors["input"] = x
    return run_layer(block_graph(spec), tensors, policy=policy, backend=backend)


def _one_of(name: str, value: str, valid: tuple[str, ...]) -> str:
    if value not in valid:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, valid))}, got {value!r}")
    return value


def _head_dim(weights: Mapping[str, Tensor | None], nhead: int, kv_heads: int, x: Tensor) -> int:
    """E, from the projection's rows.

    Raises: ValueError if there is none, both kinds, or rows that are no multiple of the heads.
    """
    packed, q = weights.get("qkv.weight"), weights.get("q.weight")
    if (packed is None) == (q is None):
        raise ValueError("weights must have either qkv.weight, or q.weight, k.weight and v.weight")
    name, heads = ("qkv", nhead + 2 * kv_heads) if packed is not None else ("q", nhead)
    weight = weights[f"{name}.weight"]
    assert weight is not None
    check_shape(f"{name}.weight", weight, (f"{heads}·E", x.shape[-1]), "x", x)
    if weight.shape[0] % heads or not weight.shape[0]:
        raise ValueError(
            f"{name}.weight has shape {tuple(weight.shape)}, expected rows in multiples of "
            f"{heads} heads to go with x of shape {tuple(x.shape)}"
        )
    return weight.shape[0] // heads


#: Names of the params that are no weights, in any block of a layer.
NOT_WEIGHTS = (
    "mask", "padding", "memory_mask", "memory_padding", "seed", "cos", "sin", "lengths", "cu_q",
    "cu_k",
)  # fmt: skip


def run_layer(
    graph: Graph,
    tensors: Mapping[str, Tensor | None],
    *,
    policy: str | Policy = "full",
    backend: str = "auto",
    seq_first: bool = False,
    preserve_strides: bool = True,
    functions: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    accumulate_into: str | None = None,
    compute: torch.dtype | None = None,
    tell: Callable[[str], None] = warn_of_kept_input,
) -> Tensor:
    """Run a layer's block on `tensors`, by the names of `graph.tensors`.

    Shapes: inputs (B, S, D), or (S, B, D) if `seq_first`; masks (S, S), (B*H, S, S) or four
        dimensions, paddings (B, S).
    compute: the dtype outside the residual stream (`graph.precision`); None for the input's.
    tell: as in `run_block`.
    """
    if compute is not None:
        graph = mixed_precision(graph, compute)
    accumulation = None
    if accumulate_into is not None:
        names = frozenset(graph.params).difference(NOT_WEIGHTS)
        accumulation = Accumulation(accumulate_into, names)
    return run_block(
        graph,
        policy,
        tensors,
        backend=backend,
        seq_first=seq_first,
        preserve_strides=preserve_strides,
        functions=functions,
        accumulation=accumulation,
        warn_of_input=tell,
    )


#: layer, A (rank, in), B (out, rank), scale.
Update = tuple[str, Tensor, Tensor, float]


def loras_of(given: Sequence[Update], p: float, x: Tensor) -> tuple[LoraSpec, ...]:
    """The plain numbers of updates in a block of `x`, with dropout `p` of what each reads.

    Raises: TypeError for what is no update; RuntimeError for a dtype that is neither that of `x`
        nor float32, or another device.

    >>> loras_of([("q", torch.zeros(1, 4), torch.zeros(4, 1), 2)], 0.0, torch.zeros(3, 4))
    (LoraSpec(layer='q', scale=2.0, dropout=0.0, dtype=None),)
    """
    loras = []
    for update in given:
        if not isinstance(update, tuple) or len(update) != 4:
            raise TypeError(f"lora takes (layer, A, B, scale), got {type(update).__name__}")
        layer, a, b, factor = update
        for name, matrix in (("A", a), ("B", b)):
            if not isinstance(matrix, Tensor):
                raise TypeError(f"{name} of {layer} must be a Tensor, got {type(matrix).__name__}")
            if matrix.dtype not in (x.dtype, torch.float32) or matrix.device != x.device:
                raise RuntimeError(
                    f"{name} of {layer} is {matrix.dtype} on {matrix.device}, expected {x.dtype} "
                    f"or float32 on {x.device}"
                )
        if a.dtype != b.dtype:
            raise RuntimeError(f"A of {layer} is {a.dtype}, B {b.dtype}")
        dtype = None if a.dtype == x.dtype else a.dtype
        loras.append(LoraSpec(layer=layer, scale=float(factor), dropout=p, dtype=dtype))
    return tuple(loras)


def lora_tensors(given: Sequence[Update]) -> dict[str, Tensor | None]:
    """The matrices by the block's names.

    >>> list(lora_tensors([("q", torch.zeros(1, 4), torch.zeros(4, 1), 2.0)]))
    ['lora.0.A', 'lora.0.B']
    """
    matrices = [matrix for _, a, b, _ in given for matrix in (a, b)]
    return dict(zip(lora_params(len(given)), matrices, strict=True))


def check_loras(
    given: Sequence[Update], layers: Sequence[str], tensors: Mapping[str, Tensor | None]
) -> None:
    """Raise ValueError unless every update is of one of `layers` and fits its weight.

    >>> check_loras([("q", torch.zeros(1, 4), torch.zeros(4, 1), 2.0)], ("qkv",), {})
    Traceback (most recent call last):
    ValueError: no layer 'q' to update; valid: qkv
    """
    for layer, a, b, _ in given:
        if layer not in layers:
            raise ValueError(f"no layer {layer!r} to update; valid: {', '.join(layers)}")
        weight = tensors[f"{layer}.weight"]
        assert weight is not None
        out, width = weight.shape
        check_shape(f"A of {layer}", a, ("rank", width), f"{layer}.weight", weight)
        check_shape(f"B of {layer}", b, (out, a.shape[0]), "A", a)
