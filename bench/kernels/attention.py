"""Scaled dot-product attention over heads: out, and the gradients of q, k and v."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.kernels.attention_problem import SEED, Attention
from bench.kernels.problem import (
    DIRECTIONS,
    Function,
    Op,
    Problem,
    Ways,
    compiled,
    failing,
    through_autograd,
)
from bench.kernels.shapes import Size
from bench.measure.admission import Absent
from bench.measure.contest import Rig
from fused_remat import ops

#: Bytes of scores that a provider may hold which holds all of them.
_MOST_SCORES = 1 << 30


def of_model(rig: Rig, size: Size) -> Iterator[Problem]:
    """The model's own heads."""
    model = size.model
    heads = model.nhead, model.kv_heads, size.seq_len, model.head_dim
    yield Attention(rig, "causal" if model.causal else "full", size.batch, *heads)


OP = Op("attention", of_model)


# --- PyTorch's


@OP.provider("aten", baseline=True)
def aten(p: Attention) -> Function:
    """scaled_dot_product_attention with the kernel that PyTorch chooses."""
    return p.reference


def _sdpa(p: Attention, backend: SDPBackend) -> Function:
    """The same with one kernel, which is absent where it says that it cannot."""

    def attend(*heads: Tensor) -> Tensor:
        try:
            with sdpa_kernel([backend]):
                return p.reference(*heads)
        except RuntimeError as error:
            if "No available kernel" in str(error):
                raise Absent("it does not serve this call") from error
            raise

    return attend


@OP.provider("flash", needs="cuda")
def flash(p: Attention) -> Function:
    """FlashAttention-2, as PyTorch has it."""
    return _sdpa(p, SDPBackend.FLASH_ATTENTION)


@OP.provider("cudnn", needs="cuda", optional=True)
def cudnn(p: Attention) -> Function:
    """cuDNN's; it may find no plan for what PyTorch believes it serves."""
    return _sdpa(p, SDPBackend.CUDNN_ATTENTION)


@OP.provider("efficient", needs="cuda")
def efficient(p: Attention) -> Function:
    """The memory-efficient one of xFormers."""
    return _sdpa(p, SDPBackend.EFFICIENT_ATTENTION)


@OP.provider("math")
def math(p: Attention) -> Function:
    """Explicit products and softmax, where the scores are not too many."""
    size = p.batch * p.nhead * p.seq_len**2 * p.rig.dtype.itemsize
    if size > _MOST_SCORES:
        raise Absent(f"its scores would be {size / 2**30:.1f} GiB")
    return _sdpa(p, SDPBackend.MATH)


@OP.provider("flex", optional=True)
def flex(p: Attention) -> Ways:
    """FlexAttention, compiled; on a CPU it has a forward only, without a gradient."""
    if p.form.p:
        raise Absent("it has no dropout")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    attend: Any = flex_attention if p.rig.dry else compiled(flex_attention)
    sees, length, device = p.sees(), p.seq_len, p.rig.device
    seen = None if sees is None else create_block_mask(sees, None, None, length, length, device)

    def function(*heads: Tensor) -> Tensor:
        heads = tuple(t.detach() for t in heads) if device.type == "cpu" else heads
        out = attend(*heads, block_mask=seen, enable_gqa=p.nhead != p.kv_heads)
        assert isinstance(out, Tensor)
        return out

    ways = through_autograd(function, p, optional=True)
    if device.type == "cpu":
        ways["bwd"] = failing(Absent("it has no backward on a CPU"))
    return ways


@OP.provider("varlen", needs="cuda", optional=True)
def varlen(p: Attention) -> Function:
    """torch.nn.attention.varlen: FlashAttention over packed sequences."""
    if not p.form.packed:
        raise Absent("it is for packed sequences")
    from torch.nn.attention.varlen import varlen_attn

    shared = {"enable_gqa": True} if p.nhead != p.kv_heads else {}

    def function(*heads: Tensor) -> Tensor:
        rows = [t[0].transpose(0, 1) for t in heads]
        bounds = p.cu, p.cu, p.longest, p.longest
        out = varlen_attn(*rows, *bounds, window_size=(-1, 0), **shared)
        assert isinstance(out, Tensor)
        return out.transpose(0, 1)[None]

    return function


# --- others'


def _flash_attn(p: Attention, fixed: Callable[..., Any], packed: Callable[..., Any]) -> Function:
    """FlashAttention's own functions, of tokens before heads; `packed`: of sequences by bounds."""
    if p.form.checkered:
        raise Absent("it takes no mask")
    options: dict[str, Any] = {"causal": p.form.causal}
    options |= {"window_size": (p.window - 1, 0)} if p.form.window else {}
    options |= {"dropout_p": p.form.p} if p.form.p else {}

    def first(made: Any) -> Tensor:
        """Some versions return the logsumexp too."""
        out = made[0] if isinstance(made, tuple) else made
        assert isinstance(out, Tensor)
        return out

    def of_batch(*heads: Tensor) -> Tensor:
        return first(fixed(*(t.transpose(1, 2) for t in heads), **options)).transpose(1, 2)

    def of_packed(*heads: Tensor) -> Tensor:
        rows = [t[0].transpose(0, 1) for t in heads]
        bounds = p.cu, p.cu, p.longest, p.longest
        return first(packed(*rows, *bounds, **options)).transpose(0, 1)[None]

    return of_packed if p.form.packed else of_batch


@OP.provider("flash-attn", module="flash_attn", needs="cuda", optional=True)
def flash_attn(p: Attention) -> Function:
    """FlashAttention-2 from its own package."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    return _flash_attn(p, flash_attn_func, flash_attn_varlen_func)


@OP.provider("flash-attn 3", module="flash_attn_interface", needs="cuda", optional=True)
def flash_attn_3(p: Attention) -> Function:
    """FlashAttention-3, for Hopper."""
    if p.form.p:
        raise Absent("it has no dropout")
    from flash_attn_interface import flash_attn_func, flash_attn_varlen_func

    return _flash_attn(p, flash_attn_func, flash_attn_varlen_func)


# --- ours


def _ours(p: Attention, backend: str) -> Ways:
    """The public function; a seed says which mask is dropped, so that results are known.

    In Triton kernels where no ATen kernel is faster: plain calls go to those.
    """
    form = p.form

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.attention(
            q, k, v, p.mask if form.checkered else None, form.p, form.causal,
            cu_seqlens_q=p.cu if form.packed else None,
            window=(p.window - 1, 0) if form.window else (-1, -1),
            seed=SEED if form.p else None, backend=backend,
        )  # fmt: skip

    ways = through_autograd(function, p)
    return {name: dataclasses.replace(way, truth=None) for name, way in ways.items()}


OP.add_ours(_ours)


@OP.provider("fused_remat kernel", needs="triton", ours=True)
def kernel(p: Attention) -> Ways:
    """Our Triton kernels by themselves, whatever the library would take."""
    from bench.kernels.attention_launches import Kernels
    from fused_remat.steps.attention_call import attention_key
    from fused_remat.triton.attention import why_not

    q, _, v = p.sets[0].values()
    reason = why_not(attention_key(q, v, p.call))
    if reason is not None:
        raise Absent(reason)
    return {direction: Kernels(p, direction).way() for direction in DIRECTIONS}
