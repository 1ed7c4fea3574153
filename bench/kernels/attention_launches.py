"""Our attention kernels by themselves, whatever the library would route a call to."""

from __future__ import annotations

import functools

import torch

from bench.kernels.attention_problem import Attention
from bench.measure.contest import SETS, Results, Way
from fused_remat.triton import attention
from fused_remat.triton.launch import Launch
from fused_remat.triton.tables import AttentionTile

#: Of all launches, or of a kernel that is timed alone.
_RESULTS = {"fwd": ("y",), "bwd": ("dq", "dk", "dv"), "dkdv": ("dk", "dv"), "dq": ("dq",)}


class Kernels:
    """Results of a problem in a direction, poisoned, and the launches that fill them."""

    def __init__(self, problem: Attention, direction: str) -> None:
        assert problem.rig.target is not None, "there is nothing to launch kernels on"
        self.problem, self.direction = problem, direction
        self.target, rig = problem.rig.target, problem.rig
        lse = (problem.batch, problem.nhead, problem.seq_len)
        sets = 1 if direction == "fwd" else SETS  # what a backward reads is of its own set
        self.outs = [rig.poisoned(*problem.rows) for _ in range(sets)]
        self.lses = [rig.poisoned(*lse, dtype=torch.float32) for _ in range(sets)]
        self.results: Results = {"y": problem.as_heads(self.outs[0])}
        if direction == "bwd":
            self.grads = problem.heads(rig.poisoned(*problem.packed_shape))
            self.results = dict(zip(_RESULTS["bwd"], self.grads, strict=True))

    def forward(self, index: int, tile: AttentionTile | None = None) -> list[Launch]:
        heads, saved = self.problem.sets[index].values(), index % len(self.outs)
        given = *heads, self.problem.call, self.outs[saved], self.lses[saved]
        return list(attention.forward(*given, self.target, tile))

    def launches(self, index: int, tile: AttentionTile | None = None) -> list[Launch]:
        """All of the direction; of a backward, on what `forward` has to fill first."""
        if self.direction == "fwd":
            return self.forward(index, tile)
        problem = self.problem
        dout = problem.dys[index].transpose(1, 2).reshape(problem.rows)  # a view
        given = dout, *problem.sets[index].values(), self.outs[index], self.lses[index]
        tiles = None if tile is None else (tile, tile)
        return list(attention.backward(*given, problem.call, self.grads, self.target, tiles))

    def way(
        self, tile: AttentionTile | None = None, kernel: str = "", optional: bool = False
    ) -> Way:
        """All launches, or with a tile those of one kernel; `optional`: it may not compile."""
        results = {name: self.results[name] for name in _RESULTS[kernel or self.direction]}

        @functools.cache
        def execution(index: int) -> list[Launch]:
            for launch in self.forward(index) if self.direction == "bwd" else ():
                launch.run()
            mine = []
            for launch in self.launches(index, tile):
                if launch.kernel.fn.__name__.startswith(f"attention_{kernel}"):
                    mine.append(launch)
                else:
                    launch.run()
            assert mine, f"no launch is of attention_{kernel}: nothing would be timed"
            return mine

        def run(launches: list[Launch]) -> Results:
            for launch in launches:
                launch.run()
            return results

        return Way(run, optional=optional, prepare=execution)
