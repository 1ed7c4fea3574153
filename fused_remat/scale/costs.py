"""What devices and links do in a second, each number with where it is from.

A number is "measured" only if it was measured on the machine that it is said of, by us: by
`calibrate` here and now, or in a committed results file. All others are assumed, and say so.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat.execution.prepare import BlockCall
from fused_remat.graph.build import block_graph, linear_cross_entropy_graph
from fused_remat.graph.graph import Graph
from fused_remat.layers.causal import read_call
from fused_remat.layers.eligibility import Reason
from fused_remat.layers.plain_causal import CausalLayer
from fused_remat.planner.calibration import Example, calibrate
from fused_remat.scale.layout import Layout, layer_module, parameters_of, tables_of
from fused_remat.scale.shapes import Model
from fused_remat.spec import ParallelSpec
from fused_remat.steps.cross_entropy import LinearCrossEntropy


@dataclass(frozen=True)
class Figure:
    """A number, where it is from, and whether it was measured on the machine that it is said of."""

    value: float
    source: str
    measured: bool = False

    def __str__(self) -> str:
        kind = "measured" if self.measured else "assumed, not measured"
        return f"{kind}: {self.source}"


def _that_of_products(products: Figure) -> Figure:
    """The same number for what was not measured."""
    return Figure(products.value, f"that of products ({products.source})")


@dataclass(frozen=True)
class Costs:
    """What a device of a mesh does in a second.

    Attributes:
        name: of the hardware.
        peak: FLOP/s that the maker states for 16-bit products; what MFU is of.
        products: FLOP/s of large products.
        attention_forward, attention_backward: FLOP/s of its kernels, of the scores that are seen.
        bandwidth: bytes of memory read and written per second.
        link: bytes per second that a device sends to those of its node.
        network: the same to other nodes.
        host: bytes per second to the host's memory, each way.
        overhead: seconds that a step takes at least.
        node: devices of a node.
        memory: bytes of a device.
    """

    name: str
    peak: Figure
    products: Figure
    attention_forward: Figure
    attention_backward: Figure
    bandwidth: Figure
    link: Figure
    network: Figure
    host: Figure
    overhead: Figure
    node: int
    memory: Figure

    def with_figures(self, given: Mapping[str, Figure]) -> Costs:
        """With these in place of its own; products that change set attention's rates, too."""
        known = dict(given)
        if "products" in known:
            for name in ("attention_forward", "attention_backward"):
                known.setdefault(name, _that_of_products(known["products"]))
        changes: dict[str, Any] = known
        return dataclasses.replace(self, **changes)

    @property
    def figures(self) -> dict[str, Figure]:
        """All of them by name."""
        found = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return {name: value for name, value in found if isinstance(value, Figure)}


def _stated(what: str) -> str:
    return f"{what}, as its maker states"


_PRODUCTS = Figure(780e12, "8192³ bf16 products on an H200, reported 770 to 798 TFLOP/s")
_FORWARD = Figure(644e12, "cuDNN 9.19, causal, heads of 128, 8192 tokens, as reported of an H200")
_BACKWARD = Figure(541e12, "cuDNN 9.19, causal, heads of 128, 8192 tokens, as reported of an H200")
_PEAK = Figure(989.5e12, _stated("dense bf16"))
_H200 = Costs(
    "h200", _PEAK, _PRODUCTS, _FORWARD, _BACKWARD,
    Figure(4.3e12, "a copy on an H200, as reported"),
    Figure(450e9, _stated("NVLink 4, one direction")),
    Figure(50e9, _stated("400 Gb/s a device")),
    Figure(55e9, "PCIe 5 x16, 64 GB/s stated, less a seventh"),
    Figure(2e-6, "a kernel's launch and tail"),
    8,
    Figure(141e9, _stated("memory")),
)  # fmt: skip
#: By name. What is reported of an H200 stands for an H100's products, which has the same cores.
HARDWARE: dict[str, Costs] = {
    "h200": _H200,
    "h100": dataclasses.replace(
        _H200,
        name="h100",
        bandwidth=Figure(3.0e12, "3.35 TB/s stated, at the H200's share of what is stated"),
        memory=Figure(80 * 2**30, _stated("memory")),
    ),
}


def of_this_machine(dtype: torch.dtype, base: Costs, device: str = "cpu") -> Costs:
    """`base` with the ceilings that `calibrate` measures here, now: run it with nothing beside it.

    Links are not measured: a machine's own memory stands for them.
    """
    found = calibrate(device)
    source = f"calibrate({device!r}) on this machine"
    products = Figure(found.rate(dtype), f"{source}, a large product in {dtype}", True)
    other = _that_of_products(products)
    copy = Figure(found.bandwidth, f"{source}, a large copy", True)
    links = Figure(found.bandwidth / 2, "links are processes of one machine, half of its copy rate")
    return dataclasses.replace(
        base, name=f"this machine ({device})", peak=other, products=products,
        attention_forward=other, attention_backward=other, bandwidth=copy, link=links,
        network=links, host=links, overhead=Figure(found.overhead, source, True),
    )  # fmt: skip


#: Of a costs file: key -> field of `Costs`, and what its unit is in a second.
FILE_KEYS: dict[str, tuple[str, float]] = {
    "peak_tflops": ("peak", 1e12),
    "products_tflops": ("products", 1e12),
    "attention_forward_tflops": ("attention_forward", 1e12),
    "attention_backward_tflops": ("attention_backward", 1e12),
    "bandwidth_GBps": ("bandwidth", 1e9),
    "link_GBps": ("link", 1e9),
    "network_GBps": ("network", 1e9),
    "host_GBps": ("host", 1e9),
    "overhead_us": ("overhead", 1e-6),
}


def of_file(path: Path, base: Costs) -> Costs:
    """`base` with the numbers of a file: of `bench kernels` (its ceilings), or our own keys.

    Our own: {"name": "...", "source": "...", "measured": true, "products_tflops": 700, ...}, with
    `FILE_KEYS`, of which any may be left out.

    Raises: ValueError, OSError for a file that has neither.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds no object")
    if "results" in data:
        return _of_ceilings(path, data, base)
    source = f"{path.name}: {data.get('source', 'no source is given')}"
    unknown = sorted(set(data) - set(FILE_KEYS) - {"name", "source", "measured"})
    if unknown or not set(data) & set(FILE_KEYS):
        raise ValueError(f"{path} has {unknown or 'no costs'}; valid: {', '.join(FILE_KEYS)}")
    given = {}
    for key, (name, unit) in FILE_KEYS.items():
        if key in data:
            value = data[key]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
                raise ValueError(f"{path}: {key} must be a positive number, got {value!r}")
            given[name] = Figure(value * unit, source, data.get("measured") is True)
    name = str(data.get("name", path.stem))
    return dataclasses.replace(base, name=name).with_figures(given)


def _of_ceilings(path: Path, data: dict[str, Any], base: Costs) -> Costs:
    """From the rows of `bench kernels` that are ceilings."""
    units = {"GB/s": ("bandwidth", 1e9), "TFLOP/s": ("products", 1e12)}
    given = {}
    for row in data["results"]:
        unit = row.get("unit", row.get("case", {}).get("unit"))
        if unit in units and "ways" in row:
            source = f"{path.name}, in {row.get('config', {}).get('dtype', 'no known dtype')}"
            name, scale = units[unit]
            given[name] = Figure(row["ways"]["torch"][unit] * scale, source, True)
    if not given:
        raise ValueError(f"{path} has no ceilings: python -m bench kernels measures them")
    machine = data.get("machine", {})
    shown = str(machine.get("gpu") or machine.get("cpu") or path.stem)
    if "products" in given:
        given["peak"] = _that_of_products(given["products"])  # nothing else is known
    return dataclasses.replace(base, name=shown).with_figures(given)


#: The blocks' names of a layer's linear layers, where they differ.
_NAMES = {"up": "fc1", "down": "fc2"}


@functools.lru_cache(maxsize=256)
def example_of(model: Model, layout: Layout, batch: int, seq: int, dtype: torch.dtype) -> Example:
    """A rank's call of a layer: local heads, local shards, the tokens that it has of the stream.

    The graph is the layer's own (`FusedRematCausalLayer`), divided as `parallelize_module` does.

    Raises: ValueError if the layer does not take the fused path.

    >>> from fused_remat.scale.shapes import LARGE
    >>> from fused_remat.scale.layout import Mesh
    >>> layout = Layout(Mesh(1, 8))
    >>> example = example_of(LARGE["llama3-70b"], layout, 1, 8192, torch.bfloat16)
    >>> tuple(example.shapes["input"]), tuple(example.shapes["q.weight"])
    ((1, 1024, 8192), (1024, 8192))
    """
    whole = torch.empty(batch, seq, model.d_model, device="meta", dtype=dtype)
    tables = tables_of(model, seq, dtype)
    call = read_call(layer_module(model, seq, dtype), whole, *tables)
    if isinstance(call, Reason):
        raise ValueError(f"a layer of {model.name} is not fused: {call.text}")
    spec, tensors = call.spec, dict(call.tensors)
    tensor = layout.mesh.tensor
    if tensor > 1:
        place = ParallelSpec(group="on paper", size=tensor, rank=0, sequence=layout.sequence)
        spec = spec.on_rank(place)
        tensors["input"] = whole[:, : seq // layout.stream].contiguous()
        tensors |= _shards(model, layout, seq, dtype)
    graph = block_graph(spec)
    given = tuple(tensors.get(name) for name in graph.tensors)
    named = zip(graph.tensors, given, strict=True)
    given_too = ("cos", "sin")
    needs_grad = frozenset(name for name, t in named if t is not None and name not in given_too)
    return Example(BlockCall(graph, frozenset(), needs_grad, "eager"), given, {})


def _shards(model: Model, layout: Layout, seq: int, dtype: torch.dtype) -> dict[str, Tensor]:
    shards = {}
    for p in parameters_of(model, seq).layer:
        module, _, kind = p.name.rpartition(".")
        name = f"{_NAMES.get(module, module)}.{kind}"
        shards[name] = torch.empty(p.gathered(layout), device="meta", dtype=dtype)
    return shards


def loss_graph() -> Graph:
    """Of `ops.cross_entropy`."""
    node = LinearCrossEntropy(
        name="output", x="input", weight="head.weight", bias="head.bias", target="target"
    )
    return linear_cross_entropy_graph(node)


class _Tokens(torch.autograd.Function):
    """x with other tokens: what gathering them, or summing and dividing them, makes. Saves none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: int) -> Tensor:
        ctx.tokens = x.shape[1]
        return x.new_empty(x.shape[0], tokens, x.shape[2])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy.new_empty(dy.shape[0], ctx.tokens, dy.shape[2]), None


class _With(nn.Module):
    """A module whose output has other tokens."""

    def __init__(self, module: nn.Module, tokens: int) -> None:
        super().__init__()
        self.module, self.tokens = module, tokens

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Tokens.apply(self.module(x), self.tokens)
        return y


@functools.lru_cache(maxsize=256)
def kept_by_eager(model: Model, layout: Layout, seq: int, dtype: torch.dtype) -> int:
    """Bytes that autograd saves of a rank's plain layer, its input included, of one sequence.

    Each storage counts once; more sequences keep as many times that. Divided as PyTorch's tensor
    parallel does it: what linear layers read is gathered, and saved so. An RMSNorm keeps its input
    and a statistic, as its kernel for GPUs does (on CPUs it is made of parts that keep more):
    `nn.LayerNorm`, of two statistics, stands for it.

    >>> from fused_remat.scale.shapes import LARGE
    >>> from fused_remat.scale.layout import Mesh
    >>> whole = kept_by_eager(LARGE["llama3-70b"], Layout(Mesh(1, 1)), 8192, torch.bfloat16)
    >>> whole / 8192 / 8192  # bytes a token and width
    40.53...
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import

    tensor = layout.mesh.tensor
    with FakeTensorMode():
        layer = CausalLayer(
            model.d_model, model.nhead // tensor, model.d_ff // tensor, 0.0, model.activation,
            kv_heads=model.kv_heads // tensor, head_dim=model.head_dim, norm=model.norm,
            gated=model.gated, bias=model.bias, qkv_bias=model.qkv_bias, qk_norm=model.qk_norm,
            dtype=dtype,
        )  # fmt: skip
        for name, norm in list(layer.named_children()):
            if isinstance(norm, nn.RMSNorm):
                wide = list(norm.normalized_shape)
                setattr(layer, name, nn.LayerNorm(wide, bias=False, dtype=dtype))
        mine = seq // layout.stream
        if tensor > 1:
            parts: Any = layer
            parts.norm1, parts.norm2 = _With(parts.norm1, seq), _With(parts.norm2, seq)
            parts.proj, parts.down = _With(parts.proj, mine), _With(parts.down, mine)
        x = torch.empty(1, mine, model.d_model, dtype=dtype, requires_grad=True)
        half = model.head_dim // 2
        tables = [torch.empty(seq, half) for _ in range(2)] if model.rope else []
        theirs = {t.untyped_storage()._cdata for t in (*layer.parameters(), *tables)}
        found: dict[int, Tensor] = {}

        def pack(t: Tensor) -> Tensor:
            if t.untyped_storage()._cdata not in theirs:
                found[t.untyped_storage()._cdata] = t
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = layer(x, *tables)
        del out
        return sum(t.untyped_storage().nbytes() for t in found.values())
