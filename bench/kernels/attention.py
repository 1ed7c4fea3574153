"""Scaled dot-product attention over heads: out, and the gradients of q, k and v.

Operations are those of the scores that are seen; a causal mask hides half.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.kernels.problem import DIRECTIONS, Function, Op, Problem, Size, Ways
from bench.measure.contest import Results, Rig, Way, Work
from bench.measure.registry import Absent
from fused_remat import ops
from fused_remat.spec import AttentionSpec
from fused_remat.steps.attention_call import AttentionArgs, attention_key
from fused_remat.triton import attention as triton
from fused_remat.triton.launch import Launch
from fused_remat.triton.tables import AttentionTile

WINDOW = 1024  # keys; at most half of a sequence
PADDED = 7  # keys of a sequence, where some are excluded
_PER_MILLE = (100, 20, 250, 130, 60, 300, 40, 100)  # of all tokens: lengths of packed sequences
Heads = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Form:
    """The keys that a query sees."""

    causal: bool = False  # keys up to the query's own
    window: bool = False  # of these, the last ones only
    packed: bool = False  # sequences of different lengths, side by side in a batch of 1
    bias: bool = False  # a dense float mask is added to the scores
    padded: bool = False  # the last keys of a sequence are excluded


FORMS: dict[str, Form] = {
    "causal": Form(causal=True),
    "full": Form(),
    "window": Form(causal=True, window=True),
    "packed": Form(causal=True, packed=True),
    "bias": Form(bias=True),
    "padding": Form(padded=True),
}


@dataclass(eq=False)
class Attention(Problem):
    """q, k and v (B, heads, S, E), views of a packed projection; out (B, H, S, E)."""

    #: Probabilities, their gradients and the output, which the backward reads, are rounded
    #: too, some of them equally along a row of scores.
    factor: ClassVar[float] = 2.5

    batch: int
    nhead: int
    kv_heads: int
    seq_len: int
    head_dim: int

    def __post_init__(self) -> None:
        self.form = FORMS[self.name]

    # --- operands

    @property
    def packed_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.seq_len, self.nhead + 2 * self.kv_heads, self.head_dim

    def heads(self, packed: Tensor) -> Heads:
        counts = (self.nhead, self.kv_heads, self.kv_heads)
        return packed.transpose(1, 2).split_with_sizes(counts, 1)

    def as_heads(self, rows: Tensor) -> Tensor:
        """Return (B·S, H·E) as (B, H, S, E), a view."""
        return rows.view(self.batch, self.seq_len, self.nhead, self.head_dim).transpose(1, 2)

    @property
    def rows(self) -> tuple[int, int]:
        return self.batch * self.seq_len, self.nhead * self.head_dim

    def draw(self) -> dict[str, Tensor]:
        return dict(zip("qkv", self.heads(self.rig.normal(*self.packed_shape)), strict=True))

    @functools.cached_property
    def dys(self) -> list[Tensor]:
        """Laid out as a projection's input gradient is."""
        return [self.as_heads(self.rig.normal(*self.rows)) for _ in self.sets]

    # --- what is seen

    @property
    def window(self) -> int:
        """Keys that a query sees at most."""
        return min(WINDOW, max(1, self.seq_len // 2)) if self.form.window else self.seq_len

    @functools.cached_property
    def cu(self) -> Tensor:
        lengths = torch.tensor((0, *_PER_MILLE), device=self.rig.device)
        return (lengths.cumsum(0) * self.seq_len // 1000).to(torch.int32)

    @property
    def longest(self) -> int:
        return self.seq_len * max(_PER_MILLE) // 1000 + 1

    @functools.cached_property
    def mask(self) -> Tensor | None:
        """True is seen, (S, S) or (B, 1, 1, S), or added; None where SDPA needs none."""
        if self.form.bias:
            return self.rig.normal(self.seq_len, self.seq_len)
        if self.form.padded:
            seen = torch.arange(self.seq_len, device=self.rig.device) < self.seq_len - PADDED
            return seen.expand(self.batch, 1, 1, -1)
        if not (self.form.packed or self.form.window):
            return None
        position = torch.arange(self.seq_len, device=self.rig.device)
        apart = position[:, None] - position
        if self.form.window:
            return (apart >= 0) & (apart < self.window)
        document = torch.searchsorted(self.cu[1:].long(), position, right=True)
        return (document[:, None] == document) & (apart >= 0)

    @property
    def share(self) -> float:
        """Of the scores, seen; of a plain causal mask half, its diagonal as well."""
        if self.mask is None or self.form.bias:
            return 0.5 if self.form.causal else 1.0
        return self.mask.count_nonzero().item() / self.mask.numel()

    @functools.cached_property
    def call(self) -> AttentionArgs:
        """The arguments of our kernels."""
        form = self.form
        options = {"cu_q": self.cu, "cu_k": self.cu} if form.packed else {}
        if self.mask is not None and (form.bias or form.padded):
            options = {"mask": self.mask} if form.bias else {"padding": ~self.mask[:, 0, 0]}
        window = self.window - 1 if form.window else -1, 0 if form.causal else -1
        spec = AttentionSpec(
            num_heads=self.nhead, num_kv_heads=self.kv_heads, head_dim=self.head_dim,
            scale=self.head_dim**-0.5, window=window,
        )  # fmt: skip
        return AttentionArgs(spec, self.batch, self.seq_len, self.seq_len, **options)

    # --- work and results

    def work(self, direction: str) -> Work:
        """Count two products of what is seen, or five; q, k, v and out, and their gradients."""
        batch, seq_len, heads, width = self.packed_shape
        product = 2.0 * batch * self.nhead * seq_len**2 * width * self.share
        size = float(batch * seq_len * (heads + self.nhead) * width * self.rig.dtype.itemsize)
        products, sizes = {"fwd": (2, 1), "bwd": (5, 2)}[direction]
        return Work(flops=products * product, bytes=sizes * size)

    def reference(self, *inputs: Tensor) -> Tensor:
        """Compute it by PyTorch's function with all arguments."""
        causal = self.form.causal and self.mask is None
        shared, mask = self.nhead != self.kv_heads, self.mask
        if mask is not None and self.form.bias:
            mask = mask.to(inputs[0].dtype)
        return F.scaled_dot_product_attention(*inputs, mask, 0.0, causal, enable_gqa=shared)


def of_model(rig: Rig, size: Size) -> Iterator[Problem]:
    model = size.model
    heads = model.nhead, model.kv_heads, size.seq_len, model.head_dim
    yield Attention(rig, "causal" if model.causal else "full", size.batch, *heads)


ATTENTION = Op("attention", of_model, stock=False)


# --- PyTorch's


@ATTENTION.provider("aten", baseline=True)
def aten(p: Attention) -> Function:
    """Call scaled_dot_product_attention with the kernel that PyTorch chooses."""
    return p.reference


def _sdpa(p: Attention, backend: SDPBackend) -> Function:
    """Call attention with one kernel of PyTorch's, which is absent where it refuses."""

    def attend(*heads: Tensor) -> Tensor:
        try:
            with sdpa_kernel([backend]):
                return p.reference(*heads)
        except RuntimeError as error:
            if "No available kernel" in str(error):
                raise Absent("it does not support this call") from error
            raise

    return attend


#: FlashAttention-2 as PyTorch has it; cuDNN's, which may find no plan for what PyTorch believes it
#: supports; the memory-efficient one of xFormers.
for _name in ("flash", "cudnn", "efficient"):
    _kernel = functools.partial(_sdpa, backend=getattr(SDPBackend, f"{_name.upper()}_ATTENTION"))
    ATTENTION.provider(_name, needs="cuda", optional=_name == "cudnn")(_kernel)


@ATTENTION.provider("varlen", needs="cuda", optional=True)
def varlen(p: Attention) -> Function:
    """Call torch.nn.attention.varlen: FlashAttention over packed sequences, tokens before heads."""
    if not p.form.packed:
        raise Absent("it is for packed sequences")
    from torch.nn.attention.varlen import varlen_attn

    shared = {"enable_gqa": True} if p.nhead != p.kv_heads else {}

    def attend(*heads: Tensor) -> Tensor:
        tokens = (t[0].transpose(0, 1) for t in heads)
        bounds = p.cu, p.cu, p.longest, p.longest
        return varlen_attn(*tokens, *bounds, window_size=(-1, 0), **shared).transpose(0, 1)[None]

    return attend


# --- ours


@ATTENTION.ours()
def ours(p: Attention, backend: str) -> Function:
    """Call the public function: in Triton kernels where no ATen kernel is faster."""
    form = p.form
    options = {
        "cu_seqlens_q": p.cu if form.packed else None,
        "window": (p.window - 1, 0) if form.window else (-1, -1), "backend": backend,
        "attn_mask": p.mask if form.bias or form.padded else None,
    }  # fmt: skip
    return lambda q, k, v: ops.attention(q, k, v, is_causal=form.causal, **options)


def kernels(
    p: Attention, direction: str, kernel: str = "", tile: AttentionTile | None = None
) -> Way:
    """Return our kernels of a direction, whatever the library would take; results are poisoned.

    kernel: the only one that is timed ("fwd", "dkdv", "dq"), in `tile`, which may not compile.
    """
    target, shape = p.rig.target, (p.batch, p.nhead, p.seq_len)
    choose = triton.attention_tile

    def chosen(name: str, *given: Any) -> AttentionTile:
        return tile if tile and name == kernel else choose(name, *given)

    @functools.cache
    def prepare(index: int) -> tuple[list[Launch], Results]:
        out, lse = p.rig.poisoned(*p.rows), p.rig.poisoned(*shape, dtype=torch.float32)
        operands = p.sets[index].values()
        with mock.patch.object(triton, "attention_tile", chosen):
            timed = list(triton.forward(*operands, p.call, out, lse, target))
        results = {"y": p.as_heads(out)}
        if direction == "bwd":
            for launch in timed:
                launch.run()
            dout = p.dys[index].transpose(1, 2).reshape(p.rows)  # a view
            grads = p.heads(p.rig.poisoned(*p.packed_shape))
            given = dout, *operands, out, lse, p.call, grads, target
            with mock.patch.object(triton, "attention_tile", chosen):
                timed = list(triton.backward(*given))
            results = dict(zip(("dq", "dk", "dv"), grads, strict=True))
        for launch in timed:
            if kernel and f"attention_{kernel}" not in launch.kernel.__name__:
                launch.run()
        timed = [launch for launch in timed if f"attention_{kernel}" in launch.kernel.__name__]
        names = {"dkdv": ("dk", "dv"), "dq": ("dq",)}.get(kernel, tuple(results))
        return timed, {name: results[name] for name in names}

    def run(given: tuple[list[Launch], Results]) -> Results:
        for launch in given[0]:
            launch.run()
        return given[1]

    return Way(run, optional=tile is not None, prepare=prepare)


@ATTENTION.provider("fused_remat kernel", needs="triton")
def kernel(p: Attention) -> Ways:
    q, _, v = p.sets[0].values()
    reason = triton.unsupported_reason(attention_key(q, v, p.call))
    if reason is not None:
        raise Absent(reason)
    return {direction: kernels(p, direction) for direction in DIRECTIONS}
