"""What a model's fused blocks run in each step, what they keep, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat.autograd import OBSERVERS, Invocation
from fused_remat.blocks.frame import TRACERS, Frame, Run
from fused_remat.blocks.program import Step
from fused_remat.layers import FusedRematLayer


@dataclass
class BlockExplanation:
    """One call of a fused block, or of a layer that did not take the fused path.

    Attributes:
        name: the layer's qualified name, or "(op)" for a functional op outside any layer.
        title: what it is, and in which pieces it runs.
        kept: names kept for backward.
        forward: (name, routine) of every step of the first piece.
        backward: every step: "compute x" rebuilds x, "backward x" undoes it.
        reason: why the fused path did not run, or "".
    """

    name: str
    title: str = ""
    kept: tuple[str, ...] = ()
    forward: list[tuple[str, str]] = field(default_factory=list)
    backward: tuple[str, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.title}"]
        if self.reason:
            return f"{lines[0]}\n  not fused: {self.reason}"
        lines.append(f"  keeps: {', '.join(self.kept) or 'nothing'}")
        width = max((len(name) for name, _ in self.forward), default=0)
        lines.append("  forward:")
        lines += [
            f"    {name:<{width}}  {'kept  ' if name in self.kept else '      '}{routine}"
            for name, routine in self.forward
        ]
        if self.backward:
            shown = [step.replace("compute ", "rebuild ") for step in self.backward]
            lines.append("  backward: " + ", ".join(shown))
        return "\n".join(lines)


class Explanation(list[BlockExplanation]):
    """All calls, in order; prints as text."""

    def __str__(self) -> str:
        return "\n".join(str(block) for block in self)

    __repr__ = __str__


class _Recorder:
    """Collects what TRACERS and OBSERVERS say while a model runs."""

    def __init__(self) -> None:
        self.found = Explanation()
        self.names: list[str] = ["(op)"]
        self._run: Run | None = None
        self._first: Frame | None = None

    def enter(self, layer: FusedRematLayer, name: str, args: Any, kwargs: Any) -> None:
        self.names.append(name)
        reason = layer.why_not_fused(*args, **kwargs)
        if reason is not None:
            title = f"{type(layer).__name__}, PyTorch's own forward"
            self.found.append(BlockExplanation(name, title, reason=reason))

    def leave(self, *_: Any) -> None:
        self.names.pop()

    def trace(self, step: object, frame: Frame) -> None:
        assert isinstance(step, Step)
        if step.node is None or step.kind != "compute":
            return
        if frame.run is not self._run:
            self._run, self._first = frame.run, frame
            chunks = frame.run.chunks
            pieces = f"{-(-chunks.batch // chunks.group)} × {chunks.group} sequences"
            tiles = f", then tiles of {chunks.tile} tokens" if chunks.tiled else ""
            title = f"backend {frame.backend.name}, {pieces}{tiles}"
            self.found.append(BlockExplanation(self.names[-1], title))
        elif not self._in_first_piece(frame):
            return
        self.found[-1].forward.append((step.node.name, step.node.route(frame)))

    def _in_first_piece(self, frame: Frame) -> bool:
        return frame is self._first or (frame.parent is self._first and frame.lo == 0)

    def observe(
        self, invocation: Invocation, tensors: Sequence[Tensor | None], out: Tensor
    ) -> None:
        plan, block = invocation.prepared.plan, self.found[-1]
        block.title = f"{invocation.prepared.kind}, {block.title}"
        block.kept = plan.kept_inputs + plan.kept + (("output",) if plan.keeps_output else ())
        steps: list[str] = []
        for step in plan.backward:
            steps += map(str, plan.tile_backward) if step.kind == "tiles" else [str(step)]
        block.backward = tuple(steps)


def explain(model: nn.Module, *inputs: Any, **kwargs: Any) -> Explanation:
    """Run `model(*inputs, **kwargs)` once and say what each fused block in it does, and why.

    For every call: what is kept, which routine runs each step of the forward and why a faster one
    cannot, and what backward rebuilds; for a `FusedRematLayer` off the fused path, the reason.
    Torch's random state is put back. Print the result.

    Raises: whatever the model raises.

    >>> layer = FusedRematLayer(64, 4, 256, 0.0, batch_first=True, norm_first=True, policy="lean")
    >>> print(explain(layer, torch.randn(2, 16, 64)))  # doctest: +NORMALIZE_WHITESPACE
    FusedRematLayer: encoder_prenorm, backend eager, 1 × 2 sequences
      keeps: input, norm1.mean, norm1.rstd, attn, attn.lse, norm2.mean, norm2.rstd
      forward:
        norm1         ATen's native_layer_norm
        qkv           ATen's addmm
        attn    kept  ATen's flash kernel for CPUs
        mid           ATen's addmm
        norm2         ATen's native_layer_norm
        up            ATen's addmm
        act           pointwise, eager
        output        ATen's addmm
      backward: rebuild mid, rebuild norm2, rebuild up, rebuild act, backward output, ...
    """
    recorder = _Recorder()
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, FusedRematLayer):

            def enter(
                m: Any, args: Any, kw: Any, name: str = name or type(module).__name__
            ) -> None:
                recorder.enter(m, name, args, kw)

            handles += [
                module.register_forward_pre_hook(enter, with_kwargs=True),
                module.register_forward_hook(recorder.leave, always_call=True),
            ]
    TRACERS.append(recorder.trace)
    OBSERVERS.append(recorder.observe)
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            model(*inputs, **kwargs)
    finally:
        TRACERS.remove(recorder.trace)
        OBSERVERS.remove(recorder.observe)
        for handle in handles:
            handle.remove()
    return recorder.found
