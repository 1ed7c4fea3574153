"""Record the baseline from the code: `python tests/house/baseline/record.py`; half a minute.

`--bits` records the bits of this CPU alone, under the settings of now. What has changed is in
`git diff tests/house/baseline`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import drawn_layers
import frames
import torch

HERE = Path(__file__).parent
#: What the bits are recorded under.
SETTINGS: tuple[dict[str, str], ...] = (
    {}, {"ATEN_CPU_CAPABILITY": "avx2"}, {"ATEN_CPU_CAPABILITY": "default"}
)  # fmt: skip


def recorded(name: str) -> dict[str, Any]:
    """What is recorded in a file; nothing where there is none."""
    path = HERE / name
    return json.loads(path.read_text()) if path.exists() else {}


def write(name: str, rows: Mapping[str, Any]) -> None:
    """Write a JSON object with a line for each item."""
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(row)}" for key, row in rows.items())
    (HERE / name).write_text(f"{{\n{lines}\n}}\n")


def bits_file() -> str:
    """Where the bits of this CPU are, under the settings of now."""
    return f"bits/{drawn_layers.cpu()}.json"


def versions() -> dict[str, str]:
    """What calls and compilations depend on besides the library."""
    installed = {d.name: d.version for d in metadata.distributions()}
    packages = {name: installed.get(name, "") for name in ("torch", "transformers", "triton")}
    return {"python": "{}.{}".format(*sys.version_info), **packages}


def interpreted() -> dict[str, Any]:
    """What `frames.py` finds, in a process of its own: Triton decides at import to interpret."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "frames.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def microseconds(rounds: int = 500) -> dict[str, dict[str, int]]:
    """The median time of a training step, by layer and policy, measured in turns."""
    steps = {}
    for name in ("FusedRematLayer", "Llama"):
        for policy in ("stock", "none", "full"):
            options = {} if policy == "stock" else {"policy": policy}
            layer, inputs = frames.make(name, fuse=policy != "stock", **options)
            steps[name, policy] = layer, inputs(frames.BATCH, frames.SEQ)
    dy = torch.randn(frames.BATCH, frames.SEQ, frames.WIDTH)
    times: dict[tuple[str, str], list[float]] = {which: [] for which in steps}
    for _ in range(rounds):
        for which, (layer, given) in steps.items():
            start = time.perf_counter()
            layer(**given).backward(dy)
            layer.zero_grad()
            times[which].append(1e6 * (time.perf_counter() - start))
    found: dict[str, dict[str, int]] = {name: {} for name, _ in steps}
    for (name, policy), taken in times.items():
        found[name][policy] = round(statistics.median(taken))
    return found


def main() -> None:
    """Record everything, or the bits of this CPU."""
    torch.set_num_threads(1)
    (HERE / "bits").mkdir(exist_ok=True)
    if "--bits" in sys.argv:
        drawn = {seed: row["drawn"] for seed, row in recorded("layers.json").items()}
        write(bits_file(), {s: drawn_layers.bits(row, int(s)) for s, row in drawn.items()})
        return
    drawn = {str(seed): drawn_layers.draw(seed) for seed in range(drawn_layers.COUNT)}
    kept = drawn_layers.kept(drawn)
    write("layers.json", {s: {"drawn": row, "kept": kept[s]} for s, row in drawn.items()})
    for setting in SETTINGS:
        command = [sys.executable, __file__, "--bits"]
        subprocess.run(command, env=os.environ | setting, check=True)
    found = interpreted()
    write("frames.json", {"versions": versions(), **found["frames"]})
    write("compiles.json", found["compiles"])
    before, now = recorded("host.json"), microseconds()
    size = [frames.BATCH, frames.SEQ, frames.WIDTH, frames.HEADS]
    write("host.json", {"machine": drawn_layers.cpu(), "size": size, "microseconds": now})
    print(f"before, on {before.get('machine')}: {before.get('microseconds')}\nnow: {now}")


if __name__ == "__main__":
    main()
