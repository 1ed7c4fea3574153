"""`FusedRematLayer` and `FusedRematDecoderLayer`, drop-ins for the two layers of `torch.nn`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused_remat.execution.observe import DECISIONS
from fused_remat.graph.build import block_graph
from fused_remat.graph.graph import Graph
from fused_remat.layer_specs import nn_layer_spec
from fused_remat.layers.eligibility import (
    PLAIN,
    Reason,
    Unsupported,
    check_dropout,
    check_mask,
    low_dtype,
    precision_of,
    qualified,
    wants_grad,
)
from fused_remat.layers.fused_layer import FusedLayer
from fused_remat.layers.modules import read_activation
from fused_remat.layers.read import BlockInputs, LayerMap, Parts, read_block
from fused_remat.ops.activation import activation_name
from fused_remat.ops.checks import CASTABLE
from fused_remat.policies import Policy

_EXACT = Reason("evaluation without gradients is PyTorch's own if that is exact", quiet=True)
_NESTED = Reason("an argument is a nested tensor", quiet=True)
#: What PyTorch's inference kernel computes for `layer.activation_relu_or_gelu`; at 0 it is not run.
_COMPUTED = {1: "relu", 2: "gelu"}


class _TorchLayer(FusedLayer):
    """The constructor of both layers of `torch.nn`, with the options of a fused layer."""

    self_attn: nn.MultiheadAttention

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        policy: str | Policy = "full",
        backend: str = "auto",
        accumulate_into: str | None = None,
    ) -> None:
        super().__init__(
            d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps,
            batch_first, norm_first, bias, device, dtype,
        )  # fmt: skip
        self._set_options(policy, backend, accumulate_into)

    def _read(self, **arguments: Any) -> BlockInputs | Reason:
        if any(isinstance(value, Tensor) and value.is_nested for value in arguments.values()):
            return _NESTED
        return read_block(self, self._map, arguments)

    def _fall_back(self, reason: Reason, compiling: bool, arguments: Mapping[str, Any]) -> Any:
        if compiling or reason not in (_EXACT, _NESTED):
            return super()._fall_back(reason, compiling, arguments)
        for observe in DECISIONS:
            observe(self, reason.text)
        if reason is _NESTED and not self.training and self._is_paddable(arguments):
            return _padded(self.forward, arguments["src"])
        return self.stock.forward(self, **arguments)  # which raises for most nested tensors

    def _is_paddable(self, arguments: Mapping[str, Any]) -> bool:
        """Return whether nested sequences have one width, and one is not empty; without masks."""
        src, *others = [value for value in arguments.values() if value is not None]
        if any(isinstance(value, Tensor) for value in others) or not src.is_floating_point():
            return False
        sequences = src.unbind() if src.layout is torch.strided and src.dim() == 3 else ()
        one_width = len({sequence.shape[1] for sequence in sequences}) == 1
        return self.self_attn.batch_first and one_width and any(map(len, sequences))

    def _heads(self) -> dict[str, int]:
        return {"heads": int(self.self_attn.num_heads)}

    def _tokens_dim(self, x: Tensor) -> int:
        return 0 if x.dim() == 2 or not self.self_attn.batch_first else 1


class FusedRematLayer(_TorchLayer, nn.TransformerEncoderLayer):
    """A transformer encoder layer that keeps its input and rebuilds what backward needs.

    Same constructor, parameters, `state_dict`, initialization and forward as
    `nn.TransformerEncoderLayer`. Calls that the fused path does not support run PyTorch's own
    forward, under `torch.utils.checkpoint` when training, with one `FusedRematWarning` that gives
    the reason. In evaluation without gradients and masks, PyTorch's inference kernel runs if it
    computes the same.

    Args:
        policy: what to keep between forward and backward: a preset ("full", "lean", "balanced",
            "fast", "none": fewest bytes first) or a `Policy`.
        backend: "auto" (by device) or a registered name.
        accumulate_into: "main_grad" or "grad": backward adds weight gradients to that attribute of
            every parameter, in float32 and unrounded, and returns none to autograd (see below).
        (all others): as `nn.TransformerEncoderLayer`.

    Shapes: src (S, B, D), (B, S, D) if `batch_first`, or (S, D); returns the same, in src.dtype;
        under autocast in the dtype of the stock layer's output.
    Units: bytes kept per token at 16 bits, F = 4·D, pre-norm: full 2·D, lean 4·D, balanced 6·D,
        fast 12·D, none 20·D, plus statistics (16 bytes, and 4·nhead if `attn` is kept).
        Under autocast, float32 src: 4·D, 6·D, 10·D, 16·D, 24·D.
    Accumulation: set `main_grad` of each parameter to a tensor of its shape, in float32 (float64
        for float64); `grad` likewise, or to None, with the same `param.grad_dtype`. RuntimeError
        for hooks on parameters, DDP, FSDP, parameters that are not leaves, calls that do not take
        the fused path, and create_graph=True. `torch.autograd.grad` returns gradients as usual.
        After an exception in backward, what was added until then remains.
    Raises: ValueError for an unknown policy, activation name, backend or accumulate_into; the
        errors of `nn.TransformerEncoderLayer` for bad arguments and inputs; RuntimeError in
        backward if a tensor that backward needs was changed in place, and for double backward.
    Source: Vaswani et al. 2017; Chen et al. 2016 (recompute); Korthikanti et al. 2022 (selective).

    >>> import torch
    >>> layer = FusedRematLayer(64, 4, 256, batch_first=True, norm_first=True, policy="lean")
    >>> x = torch.randn(2, 16, 64, requires_grad=True)
    >>> layer(x).sum().backward()
    >>> x.grad.shape
    torch.Size([2, 16, 64])
    """

    stock = nn.TransformerEncoderLayer

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Compute `nn.TransformerEncoderLayer.forward`; bool masks are True where excluded."""
        out: Tensor = self._call(
            src=src, src_mask=src_mask, src_key_padding_mask=src_key_padding_mask,
            is_causal=is_causal,
        )  # fmt: skip
        low = None if self.training else low_dtype(src)
        if low is not None and out.dtype in CASTABLE and self._runs_kernel(src):
            out = out.to(low)  # with any masks: the kernel has no float32 stream
        return out

    def _example(self) -> Graph:
        return block_graph(nn_layer_spec(self.norm_first, 1, 1, "relu"))

    def _read(self, **arguments: Any) -> BlockInputs | Reason:
        """Return the block of a call; `_EXACT` or `_NESTED` if PyTorch's own kernel runs first."""
        src, mask = arguments["src"], arguments["src_mask"]
        evaluates = not self.training and self._tensor_parallel is None
        if evaluates and torch.is_grad_enabled():  # parameters() visits all submodules
            evaluates = not (wants_grad(src) or self._trains())
        if evaluates and mask is None:  # PyTorch's kernel ignores is_causal without a mask
            arguments = {**arguments, "is_causal": False}
        inputs = one = super()._read(**arguments)
        if not evaluates or mask is not None or arguments["src_key_padding_mask"] is not None:
            return inputs
        if inputs is _NESTED and src.size(0) > 0:  # one of its sequences has the answer for all
            one = read_block(self, ENCODER, {**arguments, "src": src.unbind()[0].unsqueeze(0)})
        return _EXACT if self._is_exact(one) else inputs

    def _is_exact(self, inputs: BlockInputs | Reason) -> bool:
        """Return whether PyTorch's inference kernel computes this call; in eval, without masks."""
        # It ignores adapters, dropout and an activation that `activation_relu_or_gelu` does not
        # match. It crashes on a missing bias or norm weight, unless all are missing.
        if isinstance(inputs, Reason) or inputs.spec is None or inputs.spec.drops:
            return False
        flag = self.activation_relu_or_gelu
        if flag and _COMPUTED.get(flag) != activation_name(self.activation):
            return False
        if any(inputs.tensors.get(name) is None for name in inputs.spec.weights):
            return False
        return type(self.linear1) is nn.Linear and type(self.linear2) is nn.Linear

    def _runs_kernel(self, src: Tensor) -> bool:
        """Return whether PyTorch's layer would run its inference kernel on `src`, exact or not."""
        attn, norms = self.self_attn, (self.norm1, self.norm2)
        return (
            not self.training
            and src.dim() == 3
            and src.numel() > 0  # of nothing it returns the input
            and torch.backends.mha.get_fastpath_enabled()
            and not torch.is_autocast_enabled()
            and isinstance(attn, nn.MultiheadAttention)
            and attn.batch_first
            and attn.in_proj_bias is not None
            and attn.num_heads % 2 == 0
            and bool(self.activation_relu_or_gelu)
            and all(type(norm) is nn.LayerNorm for norm in norms)
            and norms[0].eps == norms[1].eps
            and not any(m._forward_hooks or m._forward_pre_hooks for m in self.modules())
            and not (torch.is_grad_enabled() and (wants_grad(src) or self._trains()))
        )


class FusedRematDecoderLayer(_TorchLayer, nn.TransformerDecoderLayer):
    """A transformer decoder layer that keeps its inputs and rebuilds what backward needs.

    Same constructor, parameters, `state_dict`, initialization and forward as
    `nn.TransformerDecoderLayer`. Calls that the fused path does not support run PyTorch's own
    forward, under `torch.utils.checkpoint` when training, with one `FusedRematWarning` that gives
    the reason.

    Args:
        policy, backend, accumulate_into: as in `FusedRematLayer`.
        (all others): as `nn.TransformerDecoderLayer`.

    Shapes: tgt (S, B, D) and memory (M, B, D); (B, S, D) and (B, M, D) if `batch_first`; or (S, D)
        and (M, D). Returns a tensor like tgt, under autocast in the dtype of the stock layer's
        output.
    Units: bytes kept per token of tgt at 16 bits, F = 4·D: pre-norm full 2·D, lean 6·D, balanced
        10·D, fast 18·D, none 26·D; post-norm 2·D, 4·D, 8·D, 20·D, 28·D; of memory 4·D per token
        from "fast" on; plus statistics (24 bytes, 4·nhead for each of `attn` and `cross` that is
        kept), and the memory itself, which all layers of a model share.
    Raises: as `FusedRematLayer`; the errors of `nn.TransformerDecoderLayer` for bad arguments and
        inputs.
    Source: Vaswani et al. 2017; Chen et al. 2016 (recompute); Korthikanti et al. 2022 (selective).

    >>> import torch
    >>> layer = FusedRematDecoderLayer(64, 4, 256, batch_first=True, policy="lean")
    >>> tgt, memory = torch.randn(2, 16, 64), torch.randn(2, 9, 64, requires_grad=True)
    >>> layer(tgt, memory).sum().backward()
    >>> memory.grad.shape
    torch.Size([2, 9, 64])
    """

    stock = nn.TransformerDecoderLayer

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """Compute `nn.TransformerDecoderLayer.forward`; bool masks are True where excluded."""
        out: Tensor = self._call(
            tgt=tgt, memory=memory, tgt_mask=tgt_mask, memory_mask=memory_mask,
            tgt_key_padding_mask=tgt_key_padding_mask,
            memory_key_padding_mask=memory_key_padding_mask, tgt_is_causal=tgt_is_causal,
            memory_is_causal=memory_is_causal,
        )  # fmt: skip
        return out

    def _example(self) -> Graph:
        return block_graph(nn_layer_spec(self.norm_first, 1, 1, "relu", (1e-5,) * 3))


def _padded(forward: Callable[..., Tensor], src: Tensor) -> Tensor:
    """Compute `forward` on a strided nested tensor as a padded batch; return a nested tensor."""
    lengths = [len(sequence) for sequence in src.unbind()]
    x = src.to_padded_tensor(0.0)
    positions = torch.arange(x.shape[1], device=src.device)
    excluded = positions >= torch.tensor(lengths, device=src.device).unsqueeze(1)
    out = forward(x, src_key_padding_mask=excluded)
    sequences = [y[:length] for y, length in zip(out, lengths, strict=True)]
    nested: Tensor = torch.nested.as_nested_tensor(sequences)
    return nested


def _describe(parts: Parts, arguments: Mapping[str, Any]) -> BlockInputs:
    layer, x, name = parts.layer, parts.x, parts.layer_map.input
    attn = parts.modules["self_attn"]
    decodes = "memory" in arguments
    unbatched = x.dim() == 2
    seq_first = not unbatched and not attn.batch_first
    causal, masks = _masks(parts, arguments, name, x)
    inputs, dropout = {"input": x, **masks}, parts.dropout
    memory_causal = False
    memory_masks: dict[str, Tensor] = {}
    ps = [float(attn.dropout) if attn.training else 0.0, dropout["dropout1"]]
    if decodes:
        cross = parts.modules["multihead_attn"]
        for what in ("num_heads", "batch_first", "_qkv_same_embed_dim"):
            if getattr(cross, what) != getattr(attn, what):
                raise Unsupported(f"multihead_attn differs from self_attn in {what}")
        _check_memory(parts, arguments["memory"], attn.batch_first)
        inputs["memory"] = memory = arguments["memory"]
        memory_causal, memory_masks = _masks(parts, arguments, "memory", memory)
        inputs |= {f"memory_{key}": mask for key, mask in memory_masks.items()}
        ps += [float(cross.dropout) if cross.training else 0.0, dropout["dropout2"]]
    ps += [dropout["dropout"], dropout["dropout3" if decodes else "dropout2"]]
    check_dropout(*ps[::2])
    if unbatched:
        for key in ("input", "memory", "padding", "memory_padding"):
            if key in inputs:
                inputs[key] = inputs[key].unsqueeze(0)
    precision = None
    if parts.low is not None:
        precision = precision_of(x, parts.weights, parts.low, layer.norm_first)
    activation, captured, functions = read_activation(
        layer.activation, x, parts.rows["fc1"], seq_first, precision
    )
    spec = nn_layer_spec(
        bool(layer.norm_first),
        int(attn.num_heads),
        int(attn.embed_dim // attn.num_heads),
        activation,
        tuple(parts.eps),
        tuple(ps),
        causal=causal,
        masks=tuple(masks),
        memory_causal=memory_causal,
        memory_masks=tuple(memory_masks),
        projection="packed" if attn._qkv_same_embed_dim else "split",
        captured=len(captured),
        loras=parts.loras,
        packed=parts.packed,
    )
    return BlockInputs(
        block_graph(spec), {**parts.weights, **captured, **inputs}, spec, functions, seq_first,
        unbatched, precision,
    )  # fmt: skip


def _masks(
    parts: Parts, arguments: Mapping[str, Any], name: str, keys: Tensor
) -> tuple[bool, dict[str, Tensor]]:
    """Return whether attention to `keys` is causal, and its masks; arguments begin with `name`."""
    mask_name, padding_name = f"{name}_mask", f"{name}_key_padding_mask"
    hint = "is_causal" if name == "src" else f"{name}_is_causal"
    mask, padding, is_causal = arguments[mask_name], arguments[padding_name], bool(arguments[hint])
    if is_causal and mask is None:
        raise Unsupported(f"{hint}=True needs a {mask_name}")
    if mask is None and padding is None:
        return False, {}
    x, attn = parts.x, parts.modules["self_attn"]
    causal = is_causal and padding is None  # as in PyTorch: the hint stands for the mask
    tokens = 1 if attn.batch_first and x.dim() == 3 else 0
    batch = 1 if x.dim() == 2 else x.shape[1 - tokens]
    grid = (x.shape[tokens], keys.shape[tokens])
    masks: dict[str, Tensor] = {}
    if mask is not None:
        shapes = (grid, (batch * attn.num_heads, *grid))
        unchecked = causal and type(mask) in PLAIN and mask.dim() in (2, 3)
        check_mask(mask_name, mask, x, parts.low, *((mask.shape,) if unchecked else shapes))
        if not causal:
            masks["mask"] = mask
    if padding is not None:
        shape = grid[1:] if x.dim() == 2 else (batch, grid[1])
        check_mask(padding_name, padding, x, parts.low, shape)
        masks["padding"] = padding
    return causal, masks


def _check_memory(parts: Parts, memory: Any, batch_first: bool) -> None:
    tgt = parts.x
    if type(memory) not in PLAIN or memory.is_nested:
        raise Unsupported(f"memory is a {qualified(type(memory))}, nested or of a subclass")
    castable = parts.low is not None and tgt.dtype in CASTABLE and memory.dtype in CASTABLE
    fits = memory.device == tgt.device and (memory.dtype is tgt.dtype or castable)
    fits = fits and memory.dim() == tgt.dim() and memory.shape[-1] == tgt.shape[-1]
    if tgt.dim() == 3:
        batch = 0 if batch_first else 1
        fits = fits and memory.shape[batch] == tgt.shape[batch] and memory.shape[1 - batch] > 0
    if not fits or (tgt.dim() == 2 and memory.shape[0] == 0):
        raise Unsupported(
            f"memory is {memory.dtype} of shape {tuple(memory.shape)} on {memory.device} and tgt "
            f"{tgt.dtype} of shape {tuple(tgt.shape)} on {tgt.device}; expected the same dtype, "
            "device, batch size and width, and at least one token"
        )


_SELF = {"self_attn": ("qkv", "q", "k", "v", "proj")}
_CROSS = {"multihead_attn": ("cross", "cross_q", "cross_k", "cross_v", "cross_proj")}
ENCODER = LayerMap(
    describe=_describe,
    input="src",
    dims=(2, 3),
    methods={n: getattr(nn.TransformerEncoderLayer, n) for n in ("_sa_block", "_ff_block")},
    projections=_SELF,
    linears={"fc1": "linear1", "fc2": "linear2"},
    norms={"norm1": "norm1", "norm2": "norm2"},
    norm="layer_norm",
    dropouts={name: name for name in ("dropout", "dropout1", "dropout2")},
)
DECODER = replace(
    ENCODER,
    input="tgt",
    methods={n: getattr(nn.TransformerDecoderLayer, n) for n in (*ENCODER.methods, "_mha_block")},
    projections={**_SELF, **_CROSS},
    norms={name: name for name in ("norm1", "norm2", "norm3")},
    dropouts={name: name for name in ("dropout", "dropout1", "dropout2", "dropout3")},
)
FusedRematLayer._map, FusedRematDecoderLayer._map = ENCODER, DECODER
