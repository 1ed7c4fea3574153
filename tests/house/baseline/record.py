"""Record the baseline from the code: `python tests/house/baseline/record.py`; half a minute.

`--bits` records the bits of this CPU alone, under the settings of now. What has changed is in
`git diff tests/house/baseline`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import drawn_layers
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


def main() -> None:
    """Record everything, or the bits of this CPU."""
    torch.set_num_threads(1)
    (HERE / "bits").mkdir(exist_ok=True)
    drawn = {seed: row["drawn"] for seed, row in recorded("layers.json").items()}
    if "--bits" in sys.argv:
        write(bits_file(), {s: drawn_layers.bits(row, int(s)) for s, row in drawn.items()})
        return
    kept = drawn_layers.kept(drawn)
    write("layers.json", {s: {"drawn": row, "kept": kept[s]} for s, row in drawn.items()})
    for setting in SETTINGS:
        command = [sys.executable, __file__, "--bits"]
        subprocess.run(command, env=os.environ | setting, check=True)
    found = interpreted()
    write("frames.json", {"versions": versions(), **found["frames"]})
    write("compiles.json", found["compiles"])


if __name__ == "__main__":
    main()
