"""Frames down to an operation and to a Triton launch, Python calls of a step, compiled kernels.

`TRITON_INTERPRET=1 python frames.py` prints them as JSON.

A depth is the number of frames from the library's outermost one (the layer's `forward`; in
backward, what autograd calls) to a row of the operation table, or to the frame that launches, both
counted. Frames of PyTorch and Triton are left out, and those of comprehensions, which Python has
only up to 3.11.

No kernel runs: a launch is noted where Triton takes it, `InterpretedFunction.run`, and its key is
that by which Triton's `JITFunction` looks for a compiled kernel, for an sm_90. Tiles are those that
the library takes when interpreted.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from drawn_layers import PRESETS
from torch import Tensor, nn

from fused_remat import FusedRematCausalLayer, convert
from fused_remat.steps.operations import OPERATIONS

BATCH, WIDTH, HEADS = 2, 64, 4
#: Of the long sequences a block is computed in tiles.
SHORT, LONG = 16, 600
#: Batch and sequence of a life: Triton has other code for 1 and for what 16 divides. Sequences of
#: 300 are computed one by one, those of 600 in tiles; the last batch is a smaller one.
SIZES = ((4, 64), (4, 17), (4, 16), (4, 1), (1, 1), (4, 300), (2, 600), (3, 64))
_COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>")

#: A layer, and the arguments of a call by x (B, S, D).
Case = tuple[nn.Module, Callable[[Tensor], dict[str, Any]]]


def encoder(dropout: float) -> Case:
    """PyTorch's layer, norms first."""
    options = {"batch_first": True, "norm_first": True}
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout, **options)
    return layer, lambda x: {"src": x}


def llama() -> Case:
    """Llama's layer of transformers, with shared key heads."""
    from transformers.models.llama import modeling_llama

    config = modeling_llama.LlamaConfig(
        hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2, attn_implementation="sdpa",
    )  # fmt: skip
    rotary = modeling_llama.LlamaRotaryEmbedding(config)

    def given(x: Tensor) -> dict[str, Any]:
        tables = rotary(x, torch.arange(x.shape[1]).expand(x.shape[:2]))
        return {"hidden_states": x, "position_embeddings": tables}

    return modeling_llama.LlamaDecoderLayer(config, 0), given


def causal() -> Case:
    """The library's own layer, with most that one may have."""
    layer = FusedRematCausalLayer(
        WIDTH, HEADS, 2 * WIDTH, 0.1, "gelu", kv_heads=2, norm="layer_norm", gated=False, bias=True,
        qk_norm=True, window=20, softcap=30.0, placement="sandwich",
    )  # fmt: skip

    def given(x: Tensor) -> dict[str, Any]:
        batch, seq, _ = x.shape
        mask = torch.randn(batch, 1, seq, seq).to(x.dtype).requires_grad_()
        rope = torch.randn(2, seq, WIDTH // HEADS // 2).unbind()
        return {"x": x, "rope": rope, "attn_mask": mask, "key_lengths": torch.full((batch,), seq)}

    return layer, given


CASES: dict[str, Callable[[], Case]] = {
    "FusedRematLayer": functools.partial(encoder, 0.0), "Llama": llama,
    "FusedRematLayer, dropout": functools.partial(encoder, 0.1), "FusedRematCausalLayer": causal,
}  # fmt: skip


def make(
    name: str, dtype: torch.dtype, policy: str, backend: str
) -> tuple[Any, Callable[[int, int], dict[str, Any]]]:
    """A fused layer, and its arguments by batch and sequence."""
    layer, given = CASES[name]()
    layer = layer if hasattr(layer, "policy") else convert(nn.Sequential(layer))[0]
    layer.policy, layer.backend = policy, backend
    return layer.to(dtype), lambda batch, seq: given(
        torch.randn(batch, seq, WIDTH).to(dtype).requires_grad_()
    )


def depth(frame: FrameType | None) -> int:
    """Frames from the library's outermost one to `frame`; 0 if there is none."""
    count = found = 0
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("torch", "triton") and frame.f_code.co_name not in _COMPREHENSIONS:
            count += 1
        if package == "fused_remat":
            found = count
        frame = frame.f_back
    return found


def on_launch(note: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> None:
    """From now on no kernel runs, but `note` gets it, its arguments and its options."""
    from triton.runtime.interpreter import InterpretedFunction

    InterpretedFunction.run = lambda self, *args, grid, warmup, **kw: note(self, args, kw)


def passes(name: str, seq: int) -> dict[str, dict[str, int]]:
    """Of each pass of a training step the Python calls, and the largest depth of an operation and,
    in a step on the triton backend, of a launch.
    """
    layer, inputs = make(name, torch.float32, "balanced", "eager")
    given, dy = inputs(BATCH, seq), torch.randn(BATCH, seq, WIDTH)
    forward, backward = (dict.fromkeys(("operation", "launch", "calls"), 0) for _ in range(2))
    operations = {run.__code__ for run in OPERATIONS}
    now = forward

    def reached(what: str, frame: FrameType) -> None:
        now[what] = max(now[what], depth(frame))

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code in operations:
            reached("operation", frame)
        now["calls"] += event == "call" and frame.f_code.co_name not in _COMPREHENSIONS

    def step(hook: Callable[[FrameType, str, Any], None] | None = None) -> None:
        nonlocal now
        sys.setprofile(hook)
        y = layer(**given)
        now = backward
        y.backward(dy)
        sys.setprofile(None)
        now = forward

    for _ in range(2):  # what is done once
        step()
    gc.disable()
    step(note)
    gc.enable()
    on_launch(lambda *_: reached("launch", sys._getframe(2)))
    layer.backend = "triton"
    step()
    return {"forward": forward, "backward": backward}


@functools.cache
def _binder(kernel: Any) -> Callable[..., Any]:
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    jit, backend = JITFunction(kernel.fn, **kernel.kwargs), CUDABackend(GPUTarget("cuda", 90, 32))
    return create_function_from_signature(jit.signature, jit.params, backend)


def compiles(name: str) -> dict[str, int]:
    """How many different keys each kernel is launched with over a layer's life, in 16 bits.

    Of every size two training steps whose gradients add up, and an evaluation without gradients.
    Then a step under every preset.
    """
    keys: dict[str, set[str]] = {}

    def note(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        _, specialization, rest = _binder(kernel)(*args, **options)
        keys.setdefault(kernel.__name__, set()).add(f"{specialization} {rest}")

    on_launch(note)
    layer, inputs = make(name, torch.float16, "full", "triton")  # no bfloat16 when interpreted
    for size in SIZES:
        given = inputs(*size)
        for _ in range(2):
            layer.train()(**given).sum().backward()
        with torch.no_grad():
            layer.eval()(**given)
        layer.zero_grad()
    for layer.policy in PRESETS:
        layer.train()(**inputs(*SIZES[0])).sum().backward()
    return {kernel: len(found) for kernel, found in sorted(keys.items())}


if __name__ == "__main__":
    depths = {f"{name}, S = {seq}": passes(name, seq) for name in CASES for seq in (SHORT, LONG)}
    print(json.dumps({"frames": depths, "compiles": {name: compiles(name) for name in CASES}}))
