"""Scaled dot-product attention over heads: out, and the gradients of q, k and v."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.kernels.attention_problem import Attention
from bench.kernels.problem import DIRECTIONS, Function, Op, Problem, Size, Ways
from bench.measure.contest import SETS, Results, Rig, Way
from bench.measure.registry import Absent
from fused_remat import ops
from fused_remat.steps.attention_call import attention_key
from fused_remat.triton import attention as triton
from fused_remat.triton.launch import Launch
from fused_remat.triton.tables import AttentionTile


def of_model(rig: Rig, size: Size) -> Iterator[Problem]:
    model = size.model
    heads = model.nhead, model.kv_heads, size.seq_len, model.head_dim
    yield Attention(rig, "causal" if model.causal else "full", size.batch, *heads)


ATTENTION = Op("attention", of_model, stock=False)


# --- PyTorch's


@ATTENTION.provider("aten", baseline=True)
def aten(p: Attention) -> Function:
    """scaled_dot_product_attention with the kernel that PyTorch chooses."""
    return p.reference


def _sdpa(p: Attention, backend: SDPBackend) -> Function:
    """Call attention with one kernel of PyTorch's, which is absent where it refuses."""

    def attend(*heads: Tensor) -> Tensor:
        try:
            with sdpa_kernel([backend]):
                return p.reference(*heads)
        except RuntimeError as error:
            if "No available kernel" in str(error):
                raise Absent("it does not serve this call") from error
            raise

    return attend


#: FlashAttention-2 as PyTorch has it; cuDNN's, which may find no plan for what PyTorch believes it
#: serves; the memory-efficient one of xFormers.
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
    }  # fmt: skip
    return lambda q, k, v: ops.attention(q, k, v, None, 0.0, form.causal, **options)


#: Of all launches, or of a kernel that is timed alone.
_RESULTS = {"fwd": ("y",), "bwd": ("dq", "dk", "dv"), "dkdv": ("dk", "dv"), "dq": ("dq",)}


class Kernels:
    """Our kernels of a direction, whatever the library would take; results are poisoned."""

    def __init__(self, problem: Attention, direction: str) -> None:
        rig, lse = problem.rig, (problem.batch, problem.nhead, problem.seq_len)
        self.problem, self.direction = problem, direction
        self.saved = [
            (rig.poisoned(*problem.rows), rig.poisoned(*lse, dtype=torch.float32))
            for _ in range(SETS)
        ]
        self.grads = problem.heads(rig.poisoned(*problem.packed_shape))

    def forward(self, index: int, tile: AttentionTile | None = None) -> list[Launch]:
        given = *self.problem.sets[index].values(), self.problem.call, *self.saved[index]
        return list(triton.forward(*given, self.problem.rig.target, tile))

    def launches(self, index: int, tile: AttentionTile | None = None) -> list[Launch]:
        """All of the direction; of a backward, on what `forward` has to fill first."""
        if self.direction == "fwd":
            return self.forward(index, tile)
        p, tiles = self.problem, None if tile is None else (tile, tile)
        dout = p.dys[index].transpose(1, 2).reshape(p.rows)  # a view
        given = dout, *p.sets[index].values(), *self.saved[index], p.call, self.grads
        return list(triton.backward(*given, p.rig.target, tiles))

    def way(
        self, tile: AttentionTile | None = None, kernel: str = "", optional: bool = False
    ) -> Way:
        """All launches, or with a tile those of one kernel; `optional`: it may not compile."""

        @functools.cache
        def execution(index: int) -> tuple[list[Launch], Results]:
            for launch in self.forward(index) if self.direction == "bwd" else ():
                launch.run()
            mine = []
            for launch in self.launches(index, tile):
                if launch.kernel.fn.__name__.startswith(f"attention_{kernel}"):
                    mine.append(launch)
                else:
                    launch.run()
            assert mine, f"no launch is of attention_{kernel}: nothing would be timed"
            made = dict(zip(_RESULTS["bwd"], self.grads, strict=True))
            made["y"] = self.problem.as_heads(self.saved[index][0])
            return mine, {name: made[name] for name in _RESULTS[kernel or self.direction]}

        def run(given: tuple[list[Launch], Results]) -> Results:
            for launch in given[0]:
                launch.run()
            return given[1]

        return Way(run, optional=optional, prepare=execution)


@ATTENTION.provider("fused_remat kernel", needs="triton", ours=True)
def kernel(p: Attention) -> Ways:
    q, _, v = p.sets[0].values()
    reason = triton.unsupported_reason(attention_key(q, v, p.call))
    if reason is not None:
        raise Absent(reason)
    return {direction: Kernels(p, direction).way() for direction in DIRECTIONS}
