"""What a layer's step calls, compiles and keeps, as JSON: `make baseline` records it.

Rows of names and numbers: the depth of frames and the Python calls of a step, how often kernels are
compiled, bytes kept for backward by name.

A depth is the number of frames from the library's outermost one (the layer's `forward`; in
backward, what autograd calls) to a row of the operation table, or to the frame that launches, both
counted. Frames of PyTorch and Triton do not count, and those of comprehensions, which Python has
only up to 3.11.

No kernel runs: a launch is noted where Triton takes it, `InterpretedFunction.run`, and its key is
that by which Triton's `JITFunction` looks for a compiled kernel, for an sm_90. Tiles are those that
the library takes when interpreted: TRITON_INTERPRET=1.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from importlib.metadata import version
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat import FusedRematCausalLayer, convert, memory_report
from fused_remat.execution.program import FEW
from fused_remat.policies import EXACT_PRESETS
from fused_remat.steps.operations import OPERATIONS

BATCH, WIDTH, HEADS = 2, 64, 4
#: Of the long sequences a block is computed in tiles.
SHORT, LONG = 16, 600
#: Batch and sequence of a life: Triton has other code for 1 and for what 16 divides. Sequences of
#: 300 are computed one by one, those of 600 in tiles; the last batch is a smaller one.
SIZES = ((4, 64), (4, 17), (4, 16), (4, 1), (1, 1), (4, 300), (2, 600), (3, 64))
_COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>")

#: A layer, and the arguments of a call after x (B, S, D).
Case = tuple[nn.Module, Callable[[Tensor], dict[str, Any]]]


def encoder(dropout: float) -> Case:
    options = {"batch_first": True, "norm_first": True}
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout, **options)
    return layer, lambda x: {}


def decoder() -> Case:
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True)
    return layer, lambda x: {"memory": torch.randn_like(x).requires_grad_()}


def llama() -> Case:
    """Llama's layer of transformers, with shared key heads."""
    from transformers.models.llama import modeling_llama

    config = modeling_llama.LlamaConfig(
        hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2, attn_implementation="sdpa",
    )  # fmt: skip
    rotary = modeling_llama.LlamaRotaryEmbedding(config)

    def given(x: Tensor) -> dict[str, Any]:
        return {"position_embeddings": rotary(x, torch.arange(x.shape[1]).expand(x.shape[:2]))}

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
        return {"rope": rope, "attn_mask": mask, "key_lengths": torch.full((batch,), seq)}

    return layer, given


CASES: dict[str, Callable[[], Case]] = {
    "FusedRematLayer": functools.partial(encoder, 0.0), "Llama": llama,
    "FusedRematLayer, dropout": functools.partial(encoder, 0.1), "FusedRematCausalLayer": causal,
    "FusedRematDecoderLayer": decoder,
}  # fmt: skip


def make(
    name: str, dtype: torch.dtype, policy: str, backend: str
) -> tuple[Any, Callable[[int, int], tuple[Tensor, dict[str, Any]]]]:
    """A fused layer; its input and other arguments by batch and sequence."""
    layer, given = CASES[name]()
    layer = layer if hasattr(layer, "policy") else convert(nn.Sequential(layer))[0]
    layer.policy, layer.backend = policy, backend

    def arguments(batch: int, seq: int) -> tuple[Tensor, dict[str, Any]]:
        x = torch.randn(batch, seq, WIDTH).to(dtype).requires_grad_()
        return x, given(x)

    return layer.to(dtype), arguments


def kept(name: str, policy: str) -> dict[str, int]:
    """Bytes kept for backward, by name."""
    layer, arguments = make(name, torch.float32, policy, "eager")
    x, given = arguments(BATCH, SHORT)
    (row, *_) = memory_report(layer, x, **given).layers
    return {a.name: a.bytes for a in row.activations}


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


def calls(name: str, seq: int) -> dict[str, int]:
    """Of each pass of a training step the Python calls, and the largest depth of an operation and,
    in a step on the triton backend, of a launch.
    """
    layer, arguments = make(name, torch.float32, "balanced", "eager")
    (x, given), dy = arguments(BATCH, seq), torch.randn(BATCH, seq, WIDTH)
    found, which = Counter(), "forward"
    operations = {run.__code__ for run in OPERATIONS}

    def reached(what: str, frame: FrameType) -> None:
        found[f"{which} {what}"] = max(found[f"{which} {what}"], depth(frame))

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code in operations:
            reached("operation", frame)
        found[f"{which} calls"] += event == "call" and frame.f_code.co_name not in _COMPREHENSIONS

    def step(hook: Callable[[FrameType, str, Any], None] | None = None) -> None:
        nonlocal which
        sys.setprofile(hook)
        y = layer(x, **given)
        which = "backward"
        y.backward(dy)
        sys.setprofile(None)
        which = "forward"

    for _ in range(FEW + 2):  # what is done once, and what programs are written from
        step()
    gc.disable()
    step(note)
    gc.enable()
    on_launch(lambda *_: reached("launch", sys._getframe(2)))
    layer.backend = "triton"
    step()
    return found


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
    keys: dict[str, set[str]] = defaultdict(set)

    def note(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        _, specialization, rest = _binder(kernel)(*args, **options)
        keys[kernel.__name__].add(f"{specialization} {rest}")

    on_launch(note)
    layer, arguments = make(name, torch.float16, "full", "triton")  # no bfloat16 when interpreted
    for size in SIZES:
        x, given = arguments(*size)
        for _ in range(2):
            layer.train()(x, **given).sum().backward()
        with torch.no_grad():
            layer.eval()(x, **given)
        layer.zero_grad()
    x, given = arguments(*SIZES[0])
    for layer.policy in EXACT_PRESETS:
        layer.train()(x, **given).sum().backward()
    return {kernel: len(found) for kernel, found in sorted(keys.items())}


def versions() -> dict[str, str]:
    """What calls and compilations depend on apart from the library."""
    packages = {name: version(name) for name in ("torch", "transformers", "triton")}
    return {"python": "{}.{}".format(*sys.version_info), **packages}


def rows() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "versions", versions()
    for name in CASES:
        for policy in EXACT_PRESETS:
            yield f"kept: {name}, {policy}", kept(name, policy)
        for seq in (SHORT, LONG):
            yield f"calls: {name}, S = {seq}", calls(name, seq)
        yield f"compiles: {name}", compiles(name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("{", ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows()), "}")
