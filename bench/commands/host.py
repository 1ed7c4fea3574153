"""The host's time of a layer's training step: all that a small model waits for on a GPU.

`python -m bench host --beside ../other` runs this checkout and another one, in turns. Tensors are
on "meta", where an ATen call costs its dispatch and an allocation, and Triton has a driver that
compiles kernels and launches nothing. What a step takes beyond its own ATen calls, replayed alone,
is the host time of the library, of Triton's Python and of autograd. A real driver's launcher is C.
Not as on a GPU: attention without dropout is our kernels' here, PyTorch's there; the stock layer's
dropout and RMSNorm are several ATen calls here, one each there.
Times are of the thread, in which everything runs: what else the machine does is not in them.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._meta_registrations
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

PRESETS = ("none", "fast", "balanced", "lean", "full")
WAYS = ("stock", *PRESETS)
#: Layer -> batch, tokens, width, query heads, hidden width.
SIZES = {"encoder": (2, 512, 768, 12, 3072), "llama": (2, 512, 1024, 16, 2816)}
_CACHE = Path(__file__).parents[2] / "build" / "host"
_STEPS = 10  # of a sample, of which the fastest counts: the machine's other work only adds


class _Stub:
    """A driver for Triton: it compiles for sm_90, without ptxas, and only counts launches."""

    launches = 0

    def __init__(self) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.backends.nvidia.compiler import CUDABackend

        triton.knobs.cache.dir = str(_CACHE)  # of its own: these binaries are none
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
    """Meta kernels that cost what an allocation does; most of PyTorch's are Python of 50 µs.

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
    """Forward and backward, and gradients dropped."""
    from fused_remat import FusedRematCausalLayer, FusedRematLayer
    from fused_remat.layers.causal import CausalLayer

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
    """Microseconds."""
    gc.disable()
    took = []
    for _ in range(_STEPS):
        start = time.thread_time()
        run()
        took.append(1e6 * (time.thread_time() - start))
    gc.enable()
    return min(took)


def worker() -> None:
    """Serve a line at a time: "encoder full" is answered with a sample of it."""
    from triton.runtime.driver import driver

    stub, _library = _Stub(), _cheap_meta()
    driver.set_active(stub)
    made: dict[str, tuple[Callable[[], None], _Calls, int]] = {}
    for line in sys.stdin:
        case = line.strip()
        if case not in made:
            step, calls = _step(*case.split()), _Calls()
            for _ in range(3):
                step()
            stub.launches = 0
            step()
            count = stub.launches
            with calls:
                step()
            made[case] = step, calls, count
        step, calls, count = made[case]
        found = {"step": _fastest(step), "aten": _fastest(calls.replay)}
        print(json.dumps(found | {"launches": count, "calls": len(calls.made)}), flush=True)


def _start(checkout: Path) -> Callable[[str], dict[str, float]]:
    """Start a process that runs a checkout's library, measured by this file."""
    paths = [str(checkout), os.environ.get("PYTHONPATH", "")]
    more = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | more
    code = f"import runpy; runpy.run_path({__file__!r})['worker']()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code], cwd=checkout, env=env, text=True, **pipes
    )
    assert process.stdin is not None and process.stdout is not None
    given, answers = process.stdin, process.stdout

    def ask(case: str) -> dict[str, float]:
        print(case, file=given, flush=True)
        found: dict[str, float] = json.loads(answers.readline())
        return found

    return ask


def measure(checkouts: dict[str, Path], cases: Sequence[str], rounds: int) -> dict[str, Any]:
    """Case -> checkout -> the fastest of all rounds, in which checkouts take turns."""
    from bench.measure.clock import interleave

    asks = {name: _start(path) for name, path in checkouts.items()}
    found: dict[str, Any] = {}
    for case in cases:
        steps = {name: functools.partial(ask, case) for name, ask in asks.items()}
        samples = interleave(steps, rounds, float("inf"))
        rows = {
            name: {key: min(s[key] for s in taken) for key in taken[0]}
            for name, taken in samples.items()
        }
        for row in rows.values():
            row["above"] = row["step"] - row["aten"]
        found[case] = rows
    return found


def main(arguments: Sequence[str]) -> int:
    from bench.measure.machine import ROOT, commit_of, machine
    from bench.measure.options import Parser
    from bench.pages import host

    parser = Parser("host", __doc__, "rounds", rounds=25)
    parser.add("--beside", type=Path, help="another checkout, such as a worktree of a commit")
    parser.add("--layers", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse(arguments)
    checkouts = {"this": ROOT}
    beside = None
    if options.beside is not None:
        checkouts["beside"] = options.beside.resolve()
        beside = commit_of(options.beside) or "another"
    cases = [f"{layer} {way}" for layer in options.layers for way in options.ways]
    found = measure(checkouts, cases, options.rounds)
    result = {"machine": machine("cpu"), "beside": beside, "results": found}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "host.json").write_text(json.dumps(result, indent=1) + "\n")
    print(host.table(options.out / "host.json"))
    return 0
