"""What a call executes: counts of the kernels that it launches, and of what it leaves to ATen."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.measure.contest import Results, Way
from tests.ptx.driver import Driver, Launched

#: Operations that launch nothing, besides views.
_FREE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias",
    "_local_scalar_dense", "_unsafe_view", "lift_fresh", "resize_", "set_",
}  # fmt: skip
#: Operations that overwrite their first argument unread.
_OVERWRITE = {"copy_", "fill_", "zero_"}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}


def _bytes(tensors: list[Tensor]) -> int:
    """Of different places: what is expanded, or given twice, counts once."""
    places = {(t.data_ptr(), t.shape): t for t in tensors}.values()
    total = 0
    for t in places:
        held = [size for size, stride in zip(t.shape, t.stride(), strict=True) if stride]
        elements = 1
        for size in held:
            elements *= size
        total += elements * t.itemsize
    return total


class Aten(TorchDispatchMode):
    """ATen's operations: how many, and the bytes and multiply-adds that each takes at least.

    On a GPU each is a kernel, or a library's, that reads its inputs and writes its results once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.names: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        results = [t for t in tree_leaves(made) if isinstance(t, Tensor)]
        if name in _FREE or func.is_view or not results:
            return made
        named = {key: t for key, t in kwargs.items() if key not in ("out", "grad_input")}
        given = [t for t in tree_leaves((args, named)) if isinstance(t, Tensor)]
        read = given[name in _OVERWRITE :]
        self.found["calls"] += 1
        self.names[name] += 1
        self.found["bytes"] += _bytes(read) + _bytes(results)
        if name in _PRODUCTS:
            a, b = given[:2] if "add" not in name else given[1:3]
            self.found["mma"] += a.numel() * b.shape[-1]
        return made


def counts_of(launch: Launched) -> Counter[str]:
    """A launch's counts; of its instructions, the sum."""
    return launch.outcome.counts + Counter({"warp instructions": launch.outcome.opcodes.total()})


@dataclasses.dataclass
class Tally:
    """Ways of a contest whose calls are counted, by name."""

    driver: Driver
    rows: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def of(self, name: str, way: Way) -> Way:
        """The same way; its last call is in `rows`."""

        def run(given: Any) -> Results:
            self.driver.launches.clear()
            with Aten() as aten:
                found = way.run(given)
            if name.startswith("fused_remat"):
                for launch in self.driver.launches:
                    launch.outcome.check()
            self.rows[name] = {
                "aten": dict(aten.found),
                "operations": dict(aten.names),
                **self._launched(),
            }
            return found

        return dataclasses.replace(way, run=run)

    def _launched(self) -> dict[str, Any]:
        """The sums over launches, and each."""
        total: Counter[str] = Counter()
        launches = []
        for launch in self.driver.launches:
            counts = counts_of(launch)
            total.update(counts)
            launches.append({"kernel": launch.kernel, "grid": launch.grid, "counts": counts})
        return {"counts": dict(total), "launches": launches}
