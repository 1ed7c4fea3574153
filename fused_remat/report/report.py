"""`memory_report`: what each layer of a model keeps for backward, by name, and its peak memory."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fused_remat.layers import FusedLayer
from fused_remat.layers.record import STATES, Ran
from fused_remat.policies import Policy
from fused_remat.report import files
from fused_remat.report.saved import Saved
from fused_remat.report.step import Step, arguments_of, choose_layers, run_step
from fused_remat.report.units import aligned, human, reason_lines, run_name

_OTHER = "(other)"
_MODEL = "(model)"
_OFFLOAD = " offload "
_SUM_BYTES = 1024  # below this, memory outside the layers is that of summing the outputs


@dataclass(frozen=True)
class Activation:
    """The storages of one name that a layer keeps.

    Attributes:
        name: the name in a fused block's graph ("input", "qkv", "attn.lse", "seed") or in autograd
            ("AddmmBackward0.mat1"); "checkpoint" for what `torch.utils.checkpoint` holds; "saved"
            where autograd gives no name.
        shape: of the saved tensor, which may be part of its storage; None if it is in chunks.
        dtype: such as "float32".
        count: number of storages.
        is_input: whether the caller passed it to the model, and therefore holds it anyway.
        bytes: measured size of the storages.
        predicted: bytes predicted from the block's graph; None outside fused blocks.
        offloaded: whether it waits in the host's memory; then `bytes` are there.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: str
    count: int
    is_input: bool
    bytes: int
    predicted: int | None
    offloaded: bool = False


@dataclass(frozen=True)
class LayerMemory:
    """One layer, over all its calls, or "(other)": everything outside the layers.

    Attributes:
        name, kind, policy: qualified name, class name, and the policy of a fused layer.
        calls: how often it was called.
        kept_bytes: measured bytes on the device; a storage that two layers keep counts in the
            first.
        predicted_bytes: what its fused blocks keep according to their graphs; None if none ran.
        forward_peak, backward_peak: most bytes above what was allocated when the pass reached the
            layer, over all its calls. Kept bytes count in forward, gradients in backward.
        activations: what the kept and the offloaded bytes consist of.
        offloaded_bytes: measured bytes in the host's memory; they count neither as kept nor as
            predicted.
        ran: what a fused layer's last call ran as: "block"; "checkpoint" (its own forward under
            checkpointing, which keeps its arguments); "plain" (its own forward, which keeps all
            activations); None without a training call, and for other layers.
        reason: why it was not a block.
    """

    name: str
    kind: str
    policy: str | None
    calls: int
    kept_bytes: int
    predicted_bytes: int | None
    forward_peak: int
    backward_peak: int
    activations: tuple[Activation, ...]
    offloaded_bytes: int = 0
    ran: Ran | None = None
    reason: str = ""


@dataclass(frozen=True)
class MemoryReport:
    """The result of `memory_report`; prints as a table.

    Attributes:
        model: class name of the model.
        layers: in the model's order; "(other)" comes last if something is outside the layers.
        peak_bytes: most bytes during forward and backward above what was allocated before
            (parameters, buffers, inputs); new gradients of parameters and inputs count.
        advice: on the layers' policies, or "".
    """

    model: str
    layers: tuple[LayerMemory, ...]
    peak_bytes: int
    advice: str = ""

    @property
    def kept_bytes(self) -> int:
        """Bytes kept between forward and backward, by all layers and outside them."""
        return sum(layer.kept_bytes for layer in self.layers)

    @property
    def predicted_bytes(self) -> int | None:
        """Bytes that all fused blocks keep according to their graphs; None if none ran."""
        known = [p for p in (layer.predicted_bytes for layer in self.layers) if p is not None]
        return sum(known) if known else None

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that wait for backward in the host's memory, over all layers."""
        return sum(layer.offloaded_bytes for layer in self.layers)

    def table(self, activations: bool = True) -> str:
        """Return the report as text; consecutive equal layers share one row.

        Args:
            activations: whether to list what each layer keeps below its row. Layers that keep the
                same are listed once.
        """
        predicts = self.predicted_bytes is not None
        rows = [["", "kept", *["predicted"] * predicts, "forward peak", "backward peak"]]
        shown: set[LayerMemory] = set()
        without = functools.partial(dataclasses.replace, name="", forward_peak=0, backward_peak=0)
        for kept, equal in itertools.groupby(self.layers, key=without):
            group = list(equal)
            peaks = [max(g.forward_peak for g in group), max(g.backward_peak for g in group)]
            cells = self._cells(kept.kept_bytes, kept.predicted_bytes)
            rows.append([_title(group), *cells, *map(human, peaks)])
            for a in kept.activations if activations and kept not in shown else ():
                rows.append([_describe(a), *self._cells(a.bytes, a.predicted), "", ""])
            shown.add(kept)
        cells = self._cells(self.kept_bytes, self.predicted_bytes)
        rows.append(["total", *cells, "", ""])
        lines = [self.model, *aligned(rows)]
        peak = f"{human(self.peak_bytes)} above parameters and inputs, gradients included"
        lines.append(f"peak of the step: {peak}")
        if self.offloaded_bytes:
            lines.append(f"offloaded to host: {human(self.offloaded_bytes)}, not counted as kept")
        elif any(_OFFLOAD in (layer.policy or "") for layer in self.layers):
            lines.append("offloaded to host: nothing; on the CPU nothing moves")
        lines += reason_lines([(r.name, STATES[r.ran], r.reason) for r in self.layers])
        if activations and any(a.is_input for layer in self.layers for a in layer.activations):
            lines.append("* passed to the model by the caller")
        lines += filter(None, [self.advice])
        return "\n".join(lines)

    def _cells(self, kept: int, predicted: int | None) -> list[str]:
        if self.predicted_bytes is None:
            return [human(kept)]
        return [human(kept), "–" if predicted is None else human(predicted)]

    __str__ = table

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the report as JSON, written to `path` if there is one; `from_json` reads it.

        >>> import torch
        >>> report = memory_report(nn.Linear(4, 4), torch.randn(2, 4))
        >>> MemoryReport.from_json(report.to_json()) == report
        True
        """
        totals = ("kept_bytes", "predicted_bytes", "offloaded_bytes")
        return files.to_json(self, path, **{name: getattr(self, name) for name in totals})

    @classmethod
    def from_json(cls, text: str) -> MemoryReport:
        """Return the report that `to_json` wrote. Raises: ValueError for any other text."""
        return files.from_json(cls, text)

    def plot(self, path: str | Path) -> None:
        """Draw one bar per layer, stacked by activation, to `path` (.png, .svg or .pdf).

        No window opens, and matplotlib's settings stay as they are.

        Raises: ImportError without matplotlib (`pip install "fused-remat[bench]"`).
        """
        from fused_remat.report.plot import plot_report

        bars = [
            (" ".join(filter(None, (layer.name, layer.policy))), layer.activations)
            for layer in self.layers
        ]
        parts = [(label, [(a.name, a.bytes) for a in kept]) for label, kept in bars]
        plot_report(f"{self.model}: {human(self.kept_bytes)} kept", parts, path)


def memory_report(
    model: nn.Module,
    *inputs: Any,
    layers: Iterable[str] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    **kwargs: Any,
) -> MemoryReport:
    """Run one forward and backward of a model and report what each layer keeps in between.

    Works on any model, fused or not. Backward starts from the sum of all floating-point tensors in
    the output and computes the gradients of the parameters and inputs that require one; without
    any, nothing is kept. Random state, train/eval modes, buffers, hooks and every `.grad` are
    restored, also if the model raises. Optimizers that step in backward do not run; the model's
    own hooks do.

    Args:
        model, inputs, kwargs: the model, in the mode to measure, and its arguments, which may be
            one dict of keyword arguments.
        layers: names of submodules or shell patterns (`"layers.*"`); of nested matches, the
            outermost. By default all transformer layers (this package's and `torch.nn`'s); without
            any, the members of `nn.ModuleList` and `nn.Sequential`; else the children.
        loss: function of the model's output that replaces the sum; what it keeps counts.

    Units: bytes. Kept bytes are the storages that autograd saves, each once; parameters and buffers
        do not count, nor do sparse tensors; inputs and masks do (a fused block predicts 0 for its
        masks). Peaks come from torch's profiler on the CPU, which must not be running already, and
        from the allocator of the first CUDA device, whose peak statistics are reset.
    Raises: TypeError if the output has no floating-point tensor; ValueError if a pattern matches
        nothing or a module inside a fused or compiled layer, if one was compiled in place
        (`module.compile()`), or if parameters are lazy;
        NotImplementedError on a device that is neither CPU nor CUDA; PyTorch's RuntimeError for
        reentrant checkpoints.
    Source: after `jax.ad_checkpoint.print_saved_residuals`.

    >>> import torch
    >>> from fused_remat import convert
    >>> stock = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    >>> model = nn.TransformerEncoder(stock, num_layers=2, enable_nested_tensor=False)
    >>> x = torch.randn(2, 128, 64)
    >>> before = memory_report(model, x).kept_bytes
    >>> report = memory_report(convert(model, policy="lean"), x)
    >>> print(report.table())  # doctest: +ELLIPSIS
    TransformerEncoder
    ...
    >>> report.kept_bytes == report.predicted_bytes < before / 5
    True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"memory_report takes a torch.nn.Module, got {type(model).__name__}")
    if any(nn.parameter.is_lazy(t) for t in (*model.parameters(), *model.buffers())):
        raise ValueError(
            "the model has lazy parameters, whose sizes are unknown; call the model once before "
            "memory_report"
        )
    inputs, kwargs = arguments_of(model, inputs, kwargs)
    chosen = choose_layers(model, layers)
    step = run_step(model, list(chosen.values()), inputs, kwargs, loss)
    reports = [_layer(i, n or _MODEL, m, step) for i, (n, m) in enumerate(chosen.items())]
    other = _layer(-1, _OTHER, None, step)
    if other.kept_bytes or max(other.forward_peak, other.backward_peak) > _SUM_BYTES:
        reports.append(other)
    return MemoryReport(type(model).__name__, tuple(reports), step.peak, step.advice)


def _layer(index: int, name: str, module: nn.Module | None, step: Step) -> LayerMemory:
    predicted, calls = step.predicted.get(index), 0 if module is None else step.calls[index]
    saved = [s for s in step.saved if s.layer == index]
    moved = {s.name for s in saved if s.offloaded}
    here = {name: n for name, n in (predicted or {}).items() if name not in moved}
    ran, reason = (None, "") if module is None else step.ran[index]
    return LayerMemory(
        name=name,
        kind="" if module is None else type(module).__name__,
        policy=_policy(module.policy) if isinstance(module, FusedLayer) else None,
        calls=calls,
        kept_bytes=sum(s.nbytes for s in saved if not s.offloaded),
        predicted_bytes=None if predicted is None else sum(here.values()),
        forward_peak=step.peaks.get(("forward", index), 0),
        backward_peak=step.peaks.get(("backward", index), 0),
        activations=tuple(_activations(saved, predicted or {}, max(calls, 1))),
        offloaded_bytes=sum(s.nbytes for s in saved if s.offloaded),
        ran=ran,
        reason=reason,
    )


def _activations(saved: list[Saved], predicted: dict[str, int], calls: int) -> Iterator[Activation]:
    """Yield the storages of a fused block merged by name; others by name, shape and dtype."""
    groups: dict[tuple[Any, ...], list[Saved]] = {}
    for s in saved:
        key = (s.name,) if s.fused else (s.name, s.shape, s.dtype, s.is_input)
        groups.setdefault(key, []).append(s)
    for key, group in groups.items():
        first, fused = group[0], len(key) == 1
        whole = not fused or (len(group) <= calls and len({s.shape for s in group}) == 1)
        yield Activation(
            name=first.name,
            shape=first.shape if whole else None,
            dtype=str(first.dtype).removeprefix("torch."),
            count=len(group),
            is_input=first.is_input,
            bytes=sum(s.nbytes for s in group),
            predicted=predicted.get(first.name, 0) if fused else None,
            offloaded=first.offloaded,
        )
    measured = {s.name for s in saved if s.fused}
    for name, nbytes in predicted.items():
        if name not in measured:  # the storage counts in an earlier layer
            yield Activation(name, None, "", 0, False, 0, nbytes)


def _policy(policy: str | Policy) -> str:
    if isinstance(policy, str):
        return policy
    segment = "" if policy.segment is None else f" {policy.segment} of segment"
    moved = f"{_OFFLOAD}{{{', '.join(sorted(policy.offload))}}}" if policy.offload else ""
    return f"{{{', '.join(sorted(policy.save))}}}{segment}{moved}"


def _title(group: list[LayerMemory]) -> str:
    layer = group[0]
    called = f"called {layer.calls}×" if layer.calls != 1 and layer.kind else ""
    name = run_name([layer.name for layer in group])
    how = STATES[layer.ran] if layer.reason else layer.policy
    return " ".join(filter(None, (name, layer.kind, how, called)))


def _describe(a: Activation) -> str:
    if not a.count:
        return f"  {a.name} (counted above)"
    shape = "×".join(map(str, a.shape)) or "scalar" if a.shape is not None else "in chunks"
    many = f", {a.count} of them" if a.count > 1 and a.shape is not None else ""
    where = " on the host" * a.offloaded
    return f"  {a.name} {shape} {a.dtype}{many}{where}{' *' * a.is_input}"
