"""Measure the host's time of a layer's training step: all that a small model waits for on a GPU.

    python -m bench host --layers llama --ways stock full
    python -m bench host --layers llama --ways full --guards ViT

Tensors are on "meta", where an ATen call costs its dispatch and an allocation, and Triton has a
driver that compiles kernels and launches nothing. A step runs as programs of its passes, and in
turns with that without programs. What a step takes beyond its ATen calls (those of its steps),
replayed alone, is the host time of the library, of Triton's Python and of autograd. A real driver's
launcher is C. Unlike on a GPU, attention without dropout runs in our kernels, and the stock layer's
dropout and RMSNorm are several ATen calls each. Times are those of the thread: other work of the
machine does not count.

Guards are what a call of a traced layer tests before its block runs: whether the layer and the
arguments are those of which a trace is known. They are measured in small models on the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch._meta_registrations
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bench.measure.machine import ROOT, machine
from bench.measure.options import Parser, progress
from bench.pages import host
from fused_remat import FusedRematCausalLayer, FusedRematLayer
from fused_remat.execution.prepare import chunks_of
from fused_remat.execution.program import FEW, Programs
from fused_remat.layers.causal import CausalLayer
from fused_remat.planner.measure import LiveBytes
from fused_remat.tracing.call import Trace
from fused_remat.tracing.layer import TracedLayer, traced_class
from fused_remat.triton.launch import INTERPRETED

WAYS = ("stock", "none", "fast", "balanced", "lean", "full")
#: Layer -> batch, tokens, width, query heads, hidden width.
SIZES = {"encoder": (2, 512, 768, 12, 3072), "llama": (2, 512, 1024, 16, 2816)}
_STEPS = 10  # of a sample, of which the fastest counts: the machine's other work only adds


class _Stub:
    """A driver for Triton: it compiles for sm_90, without ptxas, and only counts launches."""

    launches = 0

    def __init__(self) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.backends.nvidia.compiler import CUDABackend

        triton.knobs.cache.dir = str(ROOT / "build" / "host")  # its own: no real binaries
        CUDABackend.make_cubin = lambda self, src, metadata, opt, capability: b"none"
        target = GPUTarget("cuda", 90, 32)
        properties = {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}
        self.utils = self
        self.get_current_target = lambda: target
        self.get_active_torch_device = lambda: torch.device("meta")
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0
        self.get_device_properties = lambda device: properties
        self.load_binary = lambda *args: (0, 1, 0, 0, 1024)

    def launcher_cls(self, src: Any, metadata: Any) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            self.launches += 1

        return launch


def _cheap_meta() -> torch.library.Library:
    """Register meta kernels as cheap as an allocation; most of PyTorch's are Python of 50 µs.

    Structured operators have C++ ones below them. Attention of the stock layer is PyTorch's flash.
    """
    torch._meta_registrations._meta_lib_dont_use_me_use_register_meta._destroy()
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    F.scaled_dot_product_attention = lambda q, k, v, mask=None, p=0.0, is_causal=False, **_: flash(
        q, k, v, p, is_causal
    )[0]
    like, library = torch.empty_like, torch.library.Library("aten", "IMPL", "Meta")

    def norm(x: Tensor, shape: Any, *_: Any) -> tuple[Tensor, ...]:
        stat = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        return like(x), stat, stat

    def norm_bwd(
        dy: Tensor, x: Tensor, shape: Any, mean: Any, rstd: Any, w: Tensor, *_: Any
    ) -> Any:
        return like(x), like(w), like(w)

    def attention(q: Tensor, *_: Any, **__: Any) -> tuple[Any, ...]:
        batch, heads, tokens, _ = q.shape
        lse, seed = q.new_empty((batch, heads, tokens), dtype=torch.float32), q.new_empty(2)
        return like(q), lse, None, None, tokens, tokens, seed, seed, seed

    kernels: dict[str, Callable[..., Any]] = {
        "native_layer_norm": norm,
        "native_layer_norm_backward": norm_bwd,
        "__rshift__.Scalar": lambda x, n: like(x),
        "_scaled_dot_product_flash_attention": attention,
        "_scaled_dot_product_flash_attention_backward": lambda dy, q, k, v, *_, **__: (
            like(q), like(k), like(v),
        ),
    }  # fmt: skip
    for name, kernel in kernels.items():
        library.impl(name, kernel)
    return library


class _Calls(TorchDispatchMode):
    """Records the ATen calls of what runs within."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs in self.made:
                func(*args, **kwargs)


def _step(layer: str, way: str) -> Callable[[], None]:
    """Return a step that drops its gradients."""
    batch, tokens, width, heads, hidden = SIZES[layer]
    how: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16}
    module: nn.Module
    if layer == "encoder":
        encoder = functools.partial(nn.TransformerEncoderLayer, norm_first=True, activation="gelu")
        module = encoder(width, heads, hidden, 0.1, batch_first=True, **how)
        if way != "stock":
            module = FusedRematLayer.from_layer(module, way, "triton")
        rope: tuple[Any, ...] = ()
    else:
        given: dict[str, Any] = {"kv_heads": heads // 4, **how}
        rope = (torch.empty(2, 1, tokens, width // heads // 2, device="meta").unbind(),)
        if way == "stock":
            module = CausalLayer(width, heads, hidden, **given)
        else:
            given |= {"policy": way, "backend": "triton"}
            module = FusedRematCausalLayer(width, heads, hidden, **given)
    x = torch.empty(batch, tokens, width, **how).requires_grad_()
    dy = torch.empty(batch, tokens, width, **how)
    wanted = [x, *module.parameters()]

    def step() -> None:
        module(x, *rope).backward(dy)
        for tensor in wanted:
            tensor.grad = None

    return step


def _fastest(run: Callable[[], None]) -> float:
    """Return the least microseconds of a sample's steps."""
    gc.disable()
    took = []
    for _ in range(_STEPS):
        start = time.thread_time()
        run()
        took.append(1e6 * (time.thread_time() - start))
    gc.enable()
    return min(took)


_TEXT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_IMAGE = {"image_size": 32, "patch_size": 4, "num_channels": 1}
#: Models whose layers have guards: the task of the class, its layers' names, and its configuration.
TRACED: dict[str, tuple[str, tuple[str, ...], Mapping[str, Any]]] = {
    "Llama": ("ForCausalLM", ("LlamaDecoderLayer",), _TEXT),
    "Bert": ("ForMaskedLM", ("BertLayer",), _TEXT),
    "ViT": ("ForImageClassification", ("ViTLayer",), {**_TEXT, **_IMAGE}),
    "T5": ("ForConditionalGeneration", ("T5Block",), {
        "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
        "decoder_start_token_id": 0,
    }),
    "Mixtral": ("ForCausalLM", ("MixtralDecoderLayer",), _TEXT),
    "Swin": ("ForImageClassification", ("SwinLayer",), {
        "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, **_IMAGE,
    }),
}  # fmt: skip


def guards(name: str, rounds: int) -> dict[str, float]:
    """Return the microseconds from the beginning of a traced layer's call to its trace's `bind`.

    Raises: RuntimeError if a layer is not traced.
    """
    import transformers

    task, kinds, values = TRACED[name]
    config = getattr(transformers, f"{name}Config")(**values)
    model = getattr(transformers, f"{name}{task}")(config).train()
    layers: list[Any] = [m for m in model.modules() if type(m).__name__ in kinds]
    for layer in layers:
        layer.__class__ = traced_class(type(layer))
    ids = torch.randint(3, 64, (4, 16), generator=torch.Generator().manual_seed(0))
    batch: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    batch["attention_mask"][1, 12:] = 0
    if "image_size" in values:
        batch = {"pixel_values": torch.randn(4, 1, 32, 32)}
    elif name == "T5":
        batch["labels"] = ids
    began, took = 0.0, list[float]()
    block, bind = TracedLayer._block, Trace.bind

    def timed_block(layer: TracedLayer, **arguments: Any) -> Any:
        nonlocal began
        began = time.thread_time()
        return block(layer, **arguments)

    def timed_bind(trace: Trace, layer: nn.Module, *arguments: Any, **more: Any) -> Any:
        took.append(1e6 * (time.thread_time() - began))
        return bind(trace, layer, *arguments, **more)

    patched = mock.patch.multiple
    with patched(TracedLayer, _block=timed_block), patched(Trace, bind=timed_bind):
        for _ in range(3):  # in which the layers are traced
            model(**batch)
        took.clear()
        gc.disable()
        for _ in range(rounds):
            model(**batch)
        gc.enable()
    if len(took) != rounds * len(layers):
        raise RuntimeError(f"{len(took)} of {rounds * len(layers)} calls of {kinds} ran as blocks")
    return {"median": statistics.median(took), "least": min(took), "calls": len(took)}


def measure(stub: _Stub, layer: str, way: str, rounds: int) -> dict[str, float]:
    """Return the microseconds of a step, without programs too, and of its ATen calls.

    Each is the least of all rounds, in which they take turns.
    """
    step, calls = _step(layer, way), _Calls()
    for _ in range(FEW + 3):  # until programs run
        step()
    stub.launches = 0
    step()
    launches = stub.launches
    with calls:
        step()
    without = mock.patch.object(Programs, "find", lambda *_: None)

    def steps() -> float:
        with without:
            return _fastest(step)

    samples = [(_fastest(step), steps(), _fastest(calls.replay)) for _ in range(rounds)]
    least, by_steps, aten = map(min, zip(*samples, strict=True))
    counts = {"launches": launches, "calls": len(calls.made)}
    return {"step": least, "steps": by_steps, "aten": aten, **counts, "above": least - aten}


def chunk_counts(stub: _Stub) -> dict[str, dict[str, int]]:
    """Return counts of a step of a layer as narrow as SmolLM-135M's, by the size of its chunks.

    Launches are those of our kernels and of ATen; bytes are the most that the step holds at once.
    """
    batch, tokens, width, heads, hidden = 247, 2048, 576, 9, 1536
    how: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16}
    layer = FusedRematCausalLayer(width, heads, hidden, kv_heads=3, backend="triton", **how)
    rope = torch.empty(2, 1, tokens, width // heads // 2, device="meta").unbind()
    x = torch.empty(batch, tokens, width, **how).requires_grad_()
    dy, wanted, found = torch.empty_like(x), [x, *layer.parameters()], {}

    def step() -> int:
        y = layer(x, rope)
        y.backward(dy)
        for tensor in wanted:
            tensor.grad = None
        return int(y.grad_fn.execution.chunks.count)

    for name, limit in (("16,384 tokens", 16_384), ("2²⁷ elements", 0)):
        calls, live = _Calls(), LiveBytes()
        with chunks_of(limit) if limit else contextlib.nullcontext():
            with live:
                count = step()
            stub.launches = 0
            with calls:
                step()
        aten = [func for func, _, _ in calls.made if not (func.is_view or "empty" in func.name())]
        launches = stub.launches + len(aten)
        found[name] = {"chunks": count, "launches": launches, "bytes": live.most}
    return found


def main(arguments: Sequence[str]) -> int:
    """Measure each layer in each way, write host.json and print its tables."""
    from triton.runtime.driver import driver

    parser = Parser("host", __doc__, "rounds", rounds=25)
    parser.add("--layers", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add("--guards", nargs="*", choices=TRACED, default=list(TRACED))
    options = parser.parse(arguments)
    if INTERPRETED:
        parser.error("unset TRITON_INTERPRET: the interpreter's time is no host time")
    torch.set_num_threads(1)
    of_guards = {name: guards(name, options.rounds) for name in options.guards}
    stub, _library = _Stub(), _cheap_meta()  # from here on PyTorch's attention computes nothing
    driver.set_active(stub)
    cases = list(itertools.product(options.layers, options.ways))
    found = {
        f"{layer} {way}": measure(stub, layer, way, options.rounds)
        for layer, way in progress(cases, len(cases), "case")
    }
    result = {"machine": machine("cpu"), "results": found, "guards": of_guards}
    result["chunks"] = chunk_counts(stub)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "host.json").write_text(json.dumps(result, indent=1) + "\n")
    print(host.table(options.out / "host.json"))
    return 0
