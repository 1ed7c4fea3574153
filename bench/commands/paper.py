"""A layer's training step on paper: every way's time on an H100, which nothing here has run on.

    python -m bench paper

A step runs on tensors without data, and what it would launch is written down: ATen's operators of
the stock layer, eager and under non-reentrant checkpointing, and the operators and kernels of ours
with each preset. Each takes its FLOPs over a published rate, or its bytes over that of a large
copy, whichever is longer. Our kernels take what their machine code says
(`bench.audit.machine_code`), times how far real kernels are behind theirs
(`bench.audit.calibration`), where that is longer. `torch.compile` is taken to fuse all between two
products, or products and attention, into one pass. The host is taken to be ahead of the device.
Written to the folder: paper.json.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from bench.audit import machine_code
from bench.audit.calibration import CLOCKS, loop_clocks
from bench.audit.cases import SMS
from bench.audit.command import LIMITS, blocks, dump
from bench.measure.options import Parser
from bench.pages import paper as report
from bench.pages.audit import CALIBRATION
from bench.tables import load
from fused_remat import FusedRematCausalLayer, FusedRematLayer
from fused_remat.layers.plain_causal import CausalLayer
from fused_remat.policies import EXACT_PRESETS
from fused_remat.scale.costs import HARDWARE

ARCH, TOKENS = 90, 16384
WIDTHS, LENGTHS, LAYERS = (768, 2048, 4096), (2048, 4096, 8192), ("encoder", "llama")
WAYS = ("eager", "compile", "checkpoint", *EXACT_PRESETS)
H100 = HARDWARE["h100"]
#: FLOP/s of FlashAttention-2 forward and backward: FlashAttention-3 has 625 to 648 and 501 to 561
#: on an H100, by its authors 1.5 to 2 and 1.5 to 1.75 times as many.
FLASH = 360e12, 325e12
#: Relative error of what takes time, one standard deviation by judgement; of kernels as calibrated.
ERRORS = {"products": 0.05, "flash": 0.15, "memory": 0.10}


class Op(NamedTuple):
    """An operator or kernel that was called.

    Attributes:
        name: its name.
        kind: "products", "flash", "memory" or "kernels": whose error its time has.
        seconds: estimated.
        floor: seconds of its products alone.
        read, written: storages, with the bytes of each.
    """

    name: str
    kind: str
    seconds: float
    floor: float
    read: dict[int, int]
    written: dict[int, int]


def _storages(tensors: Sequence[Any]) -> dict[int, int]:
    """Storage -> bytes that are touched of it."""
    found: dict[int, int] = {}
    for t in tensors:
        if isinstance(t, Tensor):
            storage = t.untyped_storage()
            touched = min(t.numel() * t.itemsize, storage.nbytes())
            found[storage._cdata] = min(found.get(storage._cdata, 0) + touched, storage.nbytes())
    return found


def _flash(q: Tensor, keys: int, backward: bool, causal: bool) -> float:
    """Seconds of PyTorch's flash attention over queries (B, H, S, E)."""
    flops = (10.0 if backward else 4.0) * q.numel() * keys * (0.5 if causal else 1.0)
    return flops / FLASH[backward]


def _pass(nbytes: float) -> float:
    """Seconds of a pass over memory."""
    return nbytes / H100.bandwidth.value + H100.overhead.value


@dataclass
class Kernel:
    """One of our kernels as it was compiled: what `seconds` reads of its machine code."""

    name: str
    names: tuple[str, ...]
    constants: dict[str, Any]
    warps: int
    shared: int
    registers: int = 0
    loops: list[dict[str, Any]] = field(default_factory=list)
    tail: float = 0.0

    def load(self, cubin: bytes) -> None:
        sass = dump(cubin, "-sass")
        self.registers = int(dump(cubin, "-res-usage").split("REG:")[1].split()[0])
        found = machine_code.examine("", sass, ARCH, self.warps)
        self.loops, self.tail = found["loops"] or [], found["tail"] or 0.0

    def floor(self, named: dict[str, Any]) -> float:
        """Seconds of its products as libraries compute them; of attention's backward, of dk's."""
        if not any(loop["tensor"] for loop in self.loops):
            return 0.0
        if self.name.startswith("attention"):
            q = getattr(named["q"], "base", named["q"])
            return _flash(q, named["sizes"].N, "fwd" not in self.name, named["right"] == 0)
        depth = named["D"] if "D" in named else named["K"] * (2 if "gated" in self.name else 1)
        return 2.0 * named["M"] * (named.get("F") or named["N"]) * depth / H100.products.value

    def clocks(self, grid: Sequence[int], named: dict[str, Any]) -> float:
        """Of a multiprocessor, if the machine code says; else 0."""
        tiles, iterations = math.prod(grid), 0.0
        products = any(loop["tensor"] for loop in self.loops)
        if products and self.name.startswith("attention"):
            # As long as there are no masks, of which programs may skip blocks.
            by_keys, sizes = "dkdv" in self.name, named["sizes"]
            iterations = sizes.M * sizes.GROUP if by_keys else sizes.N
            iterations /= self.constants["BLOCK_M" if by_keys else "BLOCK_N"]
        elif products:
            rows, columns = named["M"], named.get("F") or named["N"]
            depth = named["D"] if "D" in named else named["K"]
            one = [self.constants[f"BLOCK_{size}"] for size in "MNK"]
            tiles = math.ceil(rows / one[0]) * math.ceil(columns / one[1])
            iterations = depth / one[2]
        elif self.loops:
            return 0.0
        each = self.tail
        if products:
            loop = max(self.loops, key=lambda loop: loop["share"])
            warps = self.warps * blocks(self.registers, self.shared, self.warps, ARCH)
            each += iterations * loop_clocks(loop, warps)
        return math.ceil(tiles / SMS[ARCH]) * each


class Recorder(TorchDispatchMode):
    """Writes down what a step calls; also a driver for Triton, of a GPU that launches nothing.

    Our attention without dropout is taken for PyTorch's, which serves it on a GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.held: list[Any] = []  # a storage that ended could be another one's name
        self.utils = self
        self._last: Kernel | None = None
        self.over = load(CALIBRATION)["over"]["H100"][0]

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", ARCH, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def get_current_device(self) -> int:
        """Kernels are cached by device: no real one's."""
        return -ARCH

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": LIMITS[ARCH][0],
            "multiprocessor_count": SMS[ARCH],
            "warpSize": 32,
        }

    def load_binary(
        self, name: str, cubin: bytes, shared: int, device: int
    ) -> tuple[int, int, int, int, int]:
        assert self._last is not None
        self._last.load(cubin)
        return 0, 1, 0, 0, 1024

    def launcher_cls(self, src: Any, metadata: Any) -> Callable[..., None]:
        names = tuple(src.fn.arg_names)
        kernel = Kernel(metadata.name, names, {}, metadata.num_warps, metadata.shared)
        self._last = kernel

        def launch(gx, gy, gz, stream, function, packed, told, enter, leave, *args):  # type: ignore[no-untyped-def]
            if not kernel.constants:
                given = dict(zip(names, args, strict=False))
                tile = given.get("tile")
                kernel.constants |= tile._asdict() if tile is not None else {"whole": True}
            self.put(kernel, (gx, gy, gz), args)

        return launch

    def put(self, kernel: Kernel, grid: Sequence[int], args: Sequence[Any]) -> None:
        flat = [getattr(x, "base", x) for x in tree_leaves(args)]
        tensors = [x for x in flat if isinstance(x, Tensor)]
        named, touched = dict(zip(kernel.names, args, strict=False)), _storages(tensors)
        self.held += tensors
        library = named.get("right") is not None and named.get("site_key_ptr") is None
        floor = 0.0 if "dq" in kernel.name else kernel.floor(named)
        if library and kernel.name.startswith("attention"):
            seconds, kind = floor + H100.overhead.value, "flash"
            if not floor:
                return
        else:
            worked = self.over * kernel.clocks(grid, named) / CLOCKS[ARCH]
            # What is read and written is an argument twice, or in place of another one.
            moved = sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in tensors)
            seconds = _pass(moved)
            kind = "kernels" if worked > seconds else "memory"
            seconds = max(worked, seconds)
        self.ops.append(Op(kernel.name, kind, seconds, floor, touched, {}))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.held += made
        read, written, name = _storages(given), _storages(made), str(func)
        if not made or func.is_view or any(word in name for word in _FREE):
            return out
        floor, kind, packet = 0.0, "memory", func.overloadpacket
        if "flash_attention" in name:
            backward, kind = "backward" in name, "flash"
            q, k = given[backward : backward + 2]
            floor = _flash(q, k.shape[2], backward, any(one is True for one in args))
        elif packet in flop_registry:
            flops = flop_registry[packet](*args, **(kwargs or {}), out_val=out)
            floor, kind = flops / H100.products.value, "products"
        seconds = _pass(sum(read.values()) + sum(written.values()))
        seconds = max(floor + H100.overhead.value, seconds)
        self.ops.append(Op(name, kind, seconds, floor, read, written))
        return out


#: Operators that run nothing on the device.
_FREE = ("detach", "alias", "empty", "_unsafe_view", "_reshape")


def _fused(ops: Sequence[Op]) -> Iterator[Op]:
    """What `torch.compile` makes of them, at best: one pass of all that is between two products."""
    last_read = {storage: i for i, op in enumerate(ops) for storage in op.read}
    start = 0
    for products, group in itertools.groupby(ops, lambda op: op.kind != "memory"):
        found = list(group)
        stop = start + len(found)
        if products:
            yield from found
        else:
            made: dict[int, int] = {}
            read: dict[int, int] = {}
            for op in found:
                read |= {s: n for s, n in op.read.items() if s not in made and s not in read}
                made |= op.written
            left = {s: n for s, n in made.items() if last_read.get(s, stop) >= stop}
            yield Op(
                "fused", "memory", _pass(sum(read.values()) + sum(left.values())), 0.0, read, left
            )
        start = stop


@contextlib.contextmanager
def _as_on_cuda() -> Iterator[None]:
    """The stock layer's attention, dropout and norms are those of a GPU."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, dropout_p: float = 0.0,
                  is_causal: bool = False, **_: Any) -> Tensor:  # fmt: skip
        return flash(q, k, v, dropout_p, is_causal)[0]

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return torch.native_dropout(x, p, True)[0] if training and p else x

    def rms_norm(x: Tensor, shape: Any, weight: Any = None, eps: Any = None) -> Tensor:
        # On meta tensors the operator of RMSNorm is not one: a pass each way, as LayerNorm's.
        return torch.native_layer_norm(x, list(shape), weight, None, eps or 1e-6)[0]

    given = {"scaled_dot_product_attention": attention, "dropout": dropout, "rms_norm": rms_norm}
    with mock.patch.multiple(F, **given):
        yield


@functools.cache
def _recorder() -> Recorder:
    """One: Triton keeps the launchers of what it compiled."""
    return Recorder()


def step_of(layer: str, width: int, tokens: int, way: str) -> list[Op]:
    """What a way's step calls, of `TOKENS` tokens in sequences of so many."""
    how: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16}
    stock = way not in EXACT_PRESETS
    head = 64 if width < 1024 else 128
    heads, rope = width // head, tuple[Any, ...]()
    module: Any
    if layer == "encoder":
        module = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True, **how
        )
        if not stock:
            module = FusedRematLayer.from_layer(module, way, "triton")
    else:
        given = {"kv_heads": heads // 4, **how}
        table = tuple(torch.empty(2, tokens, head // 2, device="meta").unbind())
        hidden = 7 * width // 2
        if stock:
            module, rope = CausalLayer(width, heads, hidden, **given), table
        else:
            given |= {"policy": way, "backend": "triton"}
            module, rope = FusedRematCausalLayer(width, heads, hidden, **given), (table,)
    x = torch.empty(TOKENS // tokens, tokens, width, **how).requires_grad_()
    dy, wanted = torch.empty_like(x), [x, *module.parameters()]
    recorder, was = _recorder(), driver._active
    driver.set_active(recorder)
    try:
        with _as_on_cuda(), recorder:
            if way == "checkpoint":
                y = checkpoint(module, x, *rope, use_reentrant=False)
            else:
                y = module(x, *rope)
            torch.autograd.grad(y, wanted, dy)
    finally:
        driver._active = was
    ops, recorder.ops, recorder.held = recorder.ops, [], []
    return list(_fused(ops)) if way == "compile" else ops


def summed(ops: Sequence[Op]) -> dict[str, Any]:
    """Of a way: microseconds of a step, also by kind; launches; of products alone; if our attention
    took as long as PyTorch's; and what takes most beyond its products."""
    kinds = dict.fromkeys((*ERRORS, "kernels"), 0.0)
    above: dict[str, float] = {}
    for op in ops:
        kinds[op.kind] += 1e6 * op.seconds
        above[op.name] = above.get(op.name, 0.0) + 1e6 * (op.seconds - op.floor)
    attention = sum(us for name, us in above.items() if name.startswith("attention"))
    most = sorted(above, key=lambda name: -above[name])[:5]
    return {
        "us": round(sum(kinds.values()), 1),
        "kinds_us": {kind: round(us, 1) for kind, us in kinds.items()},
        "launches": len(ops),
        "floor_us": round(1e6 * sum(op.floor for op in ops), 1),
        "flash_us": round(sum(kinds.values()) - attention, 1),
        "above_us": {name: round(above[name], 1) for name in most},
    }


def main(arguments: Sequence[str]) -> int:
    """Estimate all points; print and write the result."""
    parser = Parser("paper", __doc__, "out")
    parser.add("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add("--widths", nargs="+", type=int, default=list(WIDTHS))
    parser.add("--lengths", nargs="+", type=int, default=list(LENGTHS))
    args = parser.parse(arguments)
    errors = ERRORS | {"kernels": load(CALIBRATION)["over"]["H100"][1]}
    rows = []
    for layer, width, tokens in itertools.product(args.layers, args.widths, args.lengths):
        ways = {way: summed(step_of(layer, width, tokens, way)) for way in WAYS}
        rows.append({"layer": layer, "width": width, "seq": tokens, "ways": ways})
        print(report.line(rows[-1], errors), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    head = json.dumps({"tokens": TOKENS, "errors": errors, "results": []}).removesuffix("]}")
    text = ",\n".join(map(json.dumps, rows))
    (args.out / "paper.json").write_text(f"{head}\n{text}\n]}}\n")
    return 0
