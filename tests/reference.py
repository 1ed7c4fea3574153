"""What tests compare with: any block of a `BlockSpec` in plain PyTorch, and PyTorch's own layers.

The plain functions follow the definitions of `fused_remat.spec` and `fused_remat.random`; they
share no arithmetic with the library's steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused_remat import FusedRematLayer, random
from fused_remat.layer_specs import transformer_spec
from fused_remat.spec import (
    USER_FUNCTION,
    AttentionSpec,
    BlockSpec,
    BranchSpec,
    LoraSpec,
    MLPSpec,
    NormSpec,
)

Tensors = Mapping[str, Tensor | None]
Function = Callable[[Tensor], Tensor]
#: layer, A (rank, in), B (out, rank), scale, and DoRA's magnitudes; as
#: `ops.causal_block(lora=...)`.
Update = tuple[str | Tensor | float, ...]

ACTIVATIONS: dict[str, Function] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu2": lambda x: F.relu(x) ** 2,
    "tanh": torch.tanh,
}

# --- the parts of a block


def dropout(t: Tensor, site: int, p: float, seed: int | Tensor | None) -> Tensor:
    """Dropout with the mask that the generator's definition gives, rows in order."""
    if p == 0.0 or not t.numel():
        return t
    dtype = torch.promote_types(t.dtype, torch.float32)
    index, width = site % random.NUM_SITES, t.shape[-1]
    key = random.site_keys(torch.as_tensor(seed), site - index)[index]
    keep = random.keep_scale(key, 0, t.numel() // width, width, p, dtype)
    return (t * keep.view(t.shape)).to(t.dtype)


def norm(
    x: Tensor, spec: NormSpec, weight: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    weight = weight + spec.offset if weight is not None and spec.offset else weight
    if spec.kind == "layer_norm":
        return F.layer_norm(x, x.shape[-1:], weight, bias, spec.eps)
    y = F.rms_norm(x, x.shape[-1:], weight, spec.eps)
    return y if bias is None else y + bias


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Heads x (B, S, heads, E), rotated by cos and sin (S, R/2) or (B, S, R/2)."""
    cos, sin = cos.unsqueeze(-2).to(x.dtype), sin.unsqueeze(-2).to(x.dtype)
    r = 2 * cos.shape[-1]
    pairs = x[..., :r].unflatten(-1, (-1, 2) if interleaved else (2, -1))
    of = -1 if interleaved else -2  # the dimension of the two of a pair
    x1, x2 = pairs.unbind(of)
    turned = torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), of).flatten(-2)
    return torch.cat((turned, x[..., r:]), -1)


def visible(
    q_len: int, kv_len: int, window: tuple[int, int], is_causal: bool, align: str = "end"
) -> Tensor:
    """Which keys a query sees: the last query and key, or the first ones, are at one place."""
    left, right = window[0], 0 if is_causal else window[1]
    place = torch.arange(q_len)[:, None] + (kv_len - q_len if align == "end" else 0)
    key = torch.arange(kv_len)
    seen = torch.ones(q_len, kv_len, dtype=torch.bool)
    if left >= 0:
        seen &= key >= place - left
    if right >= 0:
        seen &= key <= place + right
    return seen


def visible_packed(
    cu_q: Tensor, cu_k: Tensor, grid: tuple[int, int], window: tuple[int, int], is_causal: bool
) -> Tensor:
    """Which keys a query sees of packed sequences: those of its own, as if that were alone."""
    seen = torch.zeros(grid, dtype=torch.bool)
    for n in range(len(cu_q) - 1):
        rows, keys = slice(*cu_q[n : n + 2].tolist()), slice(*cu_k[n : n + 2].tolist())
        seen[rows, keys] = visible(*seen[rows, keys].shape, window, is_causal)
    return seen


def attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, key_padding_mask: Tensor | None = None,
    key_lengths: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, window: tuple[int, int] = (-1, -1),
    scale: float | None = None, softcap: float = 0.0, sinks: Tensor | None = None,
    seed: int | Tensor | None = 0,
    align: str = "end", true_means: str = "attend", site: int = random.ATTENTION,
) -> Tensor:  # fmt: skip
    """`ops.attention`; the last three arguments are for blocks."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    grid = (q.shape[2], k.shape[2])
    if cu_seqlens_q is None:
        seen = visible(*grid, window, is_causal, align)
    else:
        cu_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        seen = visible_packed(cu_seqlens_q, cu_k, grid, window, is_causal)
    if key_lengths is not None:
        seen = seen & (torch.arange(grid[1]) < key_lengths[:, None, None, None])
    scores = scores.masked_fill(~seen, -torch.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        excluded = ~attn_mask if true_means == "attend" else attn_mask
        scores = scores.masked_fill(excluded, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    if key_padding_mask is not None and key_padding_mask.dtype == torch.bool:
        scores = scores.masked_fill(key_padding_mask[:, None, None], -torch.inf)
    elif key_padding_mask is not None:
        scores = scores + key_padding_mask[:, None, None]
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    dead = (scores == -torch.inf).all(-1, keepdim=True)
    probs = scores.masked_fill(dead, 0.0).softmax(-1).masked_fill(dead, 0.0)[..., : grid[1]]
    return (dropout(probs, site, dropout_p, seed) @ v).to(q.dtype)


# --- the block


@dataclass
class _Block:
    """A description, its tensors by their names, and a user's own activation function."""

    spec: BlockSpec
    tensors: Tensors
    function: Function | None

    def drop(self, x: Tensor, site: int, p: float) -> Tensor:
        return dropout(x, site, p, self.tensors.get("seed"))

    def norm(self, name: str, x: Tensor, spec: NormSpec) -> Tensor:
        return norm(x, spec, *(self.tensors.get(f"{name}.{kind}") for kind in ("weight", "bias")))

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))
        for i, lora in enumerate(self.spec.loras):
            if lora.layer == name:
                a, b = self.tensors[f"lora.{i}.A"], self.tensors[f"lora.{i}.B"]
                low = self.drop(x, random.LORA + i, lora.dropout)
                added = lora.scale * low.to(a.dtype) @ a.T @ b.T
                if lora.dora:  # as PEFT computes it
                    weight = self.tensors[f"{name}.weight"]
                    norms = (weight + lora.scale * b @ a).norm(dim=1).detach()
                    c = self.tensors[f"lora.{i}.M"] / norms
                    added = (c - 1) * F.linear(low, weight) + c * added
                y = y + added
        return y.to(x.dtype)

    def heads(self, op: AttentionSpec, x: Tensor) -> list[Tensor]:
        """q, k and v (B, S, heads, E): of x, or keys and values of another input."""
        own = op.keys == "input"
        keys = x if own else self.tensors[op.keys]
        counts, made = (op.num_heads, op.num_kv_heads, op.num_kv_heads), []
        for i, (name, source) in enumerate(zip("qkv", (x, keys, keys), strict=True)):
            if op.projection == "split":
                y = self.linear(name if own else f"cross_{name}", source)
            else:
                whole = self.linear("qkv" if own else "cross", source)
                y = whole.split([n * op.head_dim for n in counts], -1)[i]
            made.append(y.unflatten(-1, (counts[i], -1)))
        return made

    def attention(self, op: AttentionSpec, x: Tensor) -> Tensor:
        """Attention with its projections; masks of another input have its name in theirs."""
        q, k, v = self.heads(op, x)
        if op.head_norm is not None:
            q, k = self.norm("q_norm", q, op.head_norm), self.norm("k_norm", k, op.head_norm)
        if op.rotary is not None:
            tables = (self.tensors["cos"], self.tensors["sin"])
            q, k = (rotate(t, *tables, op.rotary.interleaved) for t in (q, k))
        own = op.keys == "input"
        mask, padding, lengths = (
            self.tensors.get(name if own else f"{op.keys}_{name}")
            for name in ("mask", "padding", "lengths")
        )
        merged = attention(
            *(t.transpose(1, 2) for t in (q, k, v)), mask, op.dropout, key_padding_mask=padding,
            key_lengths=lengths, cu_seqlens_q=self.tensors.get("cu_q"),
            cu_seqlens_k=self.tensors.get("cu_k"), window=op.window, scale=op.scale,
            softcap=op.softcap, seed=self.tensors.get("seed"), align=op.align,
            true_means=op.true_means, site=random.ATTENTION if own else random.CROSS_ATTENTION,
        )  # fmt: skip
        return self.linear("proj" if own else "cross_proj", merged.transpose(1, 2).flatten(2))

    def mlp(self, op: MLPSpec, x: Tensor) -> Tensor:
        act = self.function if op.activation == USER_FUNCTION else ACTIVATIONS[op.activation]
        up = self.linear("fc1", x)
        up = act(self.linear("gate", x)) * up if op.gated else act(up)
        return self.linear("fc2", self.drop(up, random.MLP, op.dropout))

    def run(self) -> Tensor:
        stream = self.tensors[self.spec.inputs[0]]
        for i, branch in enumerate(self.spec.branches, 1):
            number = str(i) if len(self.spec.branches) > 1 else ""
            if not branch.parallel:
                source = read = stream
            if branch.norm is not None and branch.placement != "post":
                read = self.norm(f"norm{number}", source, branch.norm)
            if isinstance(branch.op, MLPSpec):
                added, site = self.mlp(branch.op, read), random.RESIDUAL2
            else:
                own = branch.op.keys == "input"
                site = random.RESIDUAL1 if own else random.CROSS_RESIDUAL
                added = self.attention(branch.op, read)
            if branch.placement == "sandwich":
                added = self.norm(f"post{number}", added, branch.norm)
            added = self.drop(added, site, branch.dropout)
            stream = stream + added if self.spec.residual else added
            if branch.placement == "post":
                stream = self.norm(f"norm{number}", stream, branch.norm)
        return stream


def matrices(lora: Sequence[Update]) -> dict[str, Tensor]:
    """Return A and B of low-rank updates by their names in a block."""
    named = {}
    for i, (_, *tensors) in enumerate(lora):
        named |= dict(zip([f"lora.{i}.{name}" for name in "AB M"], tensors, strict=False))
        del named[f"lora.{i}. "]  # the scale
    return named


def plain_block(spec: BlockSpec, tensors: Tensors, function: Function | None = None) -> Tensor:
    """Return the block of `spec` on tensors by their names in its graph, as `run_block` takes them.

    `function`: the activation, if it is a user's own.
    """
    return _Block(spec, tensors, function).run()


def causal_block(
    x: Tensor, weights: Tensors, nhead: int, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = True, *, kv_heads: int | None = None,
    key_padding_mask: Tensor | None = None, key_lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None, rope: tuple[Tensor, Tensor] | None = None,
    rope_interleaved: bool = False, placement: str = "pre", norm: str = "rms_norm",
    eps: float = 1e-6, norm_offset: float = 0.0, qk_norm_eps: float | None = None,
    activation: str | Function = "silu", attention_dropout_p: float | None = None,
    lora: Sequence[Update] = (), lora_dropout_p: float = 0.0, seed: int | Tensor = 0,
    window: tuple[int, int] = (-1, -1), scale: float | None = None, softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    """`ops.causal_block`, and with other arguments `ops.encoder_block`."""
    head_dim, named = weights["proj.weight"].shape[1] // nhead, isinstance(activation, str)
    head_eps = eps if qk_norm_eps is None else qk_norm_eps
    p_attention = dropout_p if attention_dropout_p is None else attention_dropout_p
    loras = [
        LoraSpec(layer=n, scale=s, dropout=lora_dropout_p, dora=bool(m)) for n, _, _, s, *m in lora
    ]
    spec = transformer_spec(
        norm, eps, activation if named else USER_FUNCTION, offset=norm_offset, placement=placement,
        gated="gate.weight" in weights, dropout=(p_attention, dropout_p, dropout_p, dropout_p),
        rotary=rope is not None, interleaved=rope_interleaved,
        qk_norm_eps=head_eps if "q_norm.weight" in weights else None, loras=tuple(loras),
        num_heads=nhead, num_kv_heads=nhead if kv_heads is None else kv_heads, head_dim=head_dim,
        scale=head_dim**-0.5 if scale is None else scale, softcap=softcap,
        window=(window[0], 0 if is_causal else window[1]),
        projection="packed" if "qkv.weight" in weights else "split",
    )  # fmt: skip
    cos, sin = (None, None) if rope is None else rope
    given = {
        "input": x, "mask": attn_mask, "padding": key_padding_mask, "lengths": key_lengths,
        "cu_q": cu_seqlens, "cos": cos, "sin": sin, "seed": seed,
    }  # fmt: skip
    return plain_block(spec, {**weights, **matrices(lora), **given}, None if named else activation)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 0.0,
    logit_scale: float = 1.0, reduction: str = "mean", ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """`ops.linear_cross_entropy`, logits whole, in float32 at least, as Hugging Face has them."""
    logits = F.linear(hidden, weight, bias).reshape(-1, len(weight))
    logits = logit_scale * logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    options = {"label_smoothing": label_smoothing, "ignore_index": ignore_index}
    loss = F.cross_entropy(logits, target.flatten(), reduction="none", **options)
    used = target.flatten() != ignore_index
    loss = loss + z_loss * logits.logsumexp(-1).square() * used if z_loss else loss
    if reduction == "none":
        return loss.view_as(target)
    return loss.sum() if reduction == "sum" else loss.sum() / used.sum()


# --- PyTorch's own layers

EXACT_PRESETS = ("full", "lean", "balanced", "fast", "none")
#: (S, B, D) for the layers of `make`.
X = torch.randn(5, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def randomize(module: nn.Module, seed: int = 0) -> nn.Module:
    """Random values in every parameter: the stock initialization has zero biases, unit norms."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_(p.double() + 0.1 * noise)
    return module


def pair(*args: object, policy: object = "full", **kwargs: object) -> tuple[nn.Module, nn.Module]:
    """Return a stock encoder layer with random parameters, and a fused one with the same."""
    torch.manual_seed(0)
    stock = randomize(nn.TransformerEncoderLayer(*args, **kwargs))
    fused = FusedRematLayer(*args, policy=policy, **kwargs)
    fused.load_state_dict(stock.state_dict())
    return stock, fused


def make(policy="full", dropout=0.0, norm_first=True, **kwargs):
    own = {"dropout": dropout, "norm_first": norm_first, "dtype": torch.float64}
    return pair(8, 2, 12, policy=policy, **own, **kwargs)


def run(layer: nn.Module, x: Tensor, dy: Tensor | None = None) -> list[Tensor]:
    """Return the output, and the gradients of the input and of every parameter."""
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
    dy = torch.ones_like(y) if dy is None else dy
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def weights_of(layer: nn.Module) -> dict[str, Tensor | None]:
    """Return the weights of a stock layer by their names in a block."""
    made: dict[str, Tensor | None] = {}
    named = {"qkv": layer.self_attn, "cross": getattr(layer, "multihead_attn", None)}
    for name, attn in named.items():
        if attn is not None:
            made |= {f"{name}.weight": attn.in_proj_weight, f"{name}.bias": attn.in_proj_bias}
            proj = "proj" if name == "qkv" else "cross_proj"
            made |= {f"{proj}.{kind}": getattr(attn.out_proj, kind) for kind in ("weight", "bias")}
    for name in ("fc1", "fc2", "norm1", "norm2", "norm3"):
        part = getattr(layer, name.replace("fc", "linear"), None)
        if part is not None:
            made |= {f"{name}.weight": part.weight, f"{name}.bias": part.bias}
    return made


def masked_layer(layer: nn.Module, seed: Tensor, x: Tensor, memory: Tensor | None = None) -> Tensor:
    """Return a stock layer's output on x (B, S, D), memory (B, M, D), with drawn dropout masks."""

    def attends(attn: nn.MultiheadAttention, keys: str = "input") -> AttentionSpec:
        return AttentionSpec(
            num_heads=attn.num_heads, num_kv_heads=attn.num_heads, head_dim=attn.head_dim,
            scale=attn.head_dim**-0.5, dropout=attn.dropout, keys=keys,
        )  # fmt: skip

    ops: list[AttentionSpec | MLPSpec] = [attends(layer.self_attn)]
    if memory is not None:
        ops.append(attends(layer.multihead_attn, "memory"))
    ops.append(MLPSpec(activation=USER_FUNCTION, dropout=layer.dropout.p))
    branches = []
    for i, op in enumerate(ops, 1):
        eps, p = getattr(layer, f"norm{i}").eps, getattr(layer, f"dropout{i}").p
        placement = "pre" if layer.norm_first else "post"
        branches.append(BranchSpec(op=op, norm=NormSpec(eps=eps), placement=placement, dropout=p))
    spec = BlockSpec(kind="plain", branches=tuple(branches), inputs=("input", "memory"))
    given = {**weights_of(layer), "input": x, "memory": memory, "seed": seed}
    return plain_block(spec, given, layer.activation)
