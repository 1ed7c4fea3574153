"""What gradients lose where kept activations are packed: `python -m bench formats`.

For every shape in `bench.formats.errors`, without and with outlier channels: the relative error of
each gradient against float64, in bf16, of the policy "none" and of policies with packed names. The
JSON has every gradient's; docs/tables/formats.md the largest ratio to that of "none". Errors do not
depend on what else the machine does.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from bench.formats.errors import OUTLIERS, SCALES, SHAPES, TOKENS, errors, names_kept, names_of
from bench.measure.machine import machine
from bench.measure.results import ResultsFile, folder_of
from fused_remat import Policy
from fused_remat.formats import split_name
from fused_remat.layers.fused_layer import FusedLayer

#: Formats of the heads and the MLP's pre-activations, all else of "none" as it is.
FORMATS = ("int8", "int8_stochastic", "fp8_e4m3")
SEEDS = 4


def policies_of(layer: FusedLayer) -> dict[str, str | Policy]:
    """By the name of a column: the lossy presets, and "fast8" in other formats."""
    found: dict[str, str | Policy] = {"none": "none", "fast8": "fast8", "balanced8": "balanced8"}
    for stored in FORMATS[1:]:
        names = [split_name(name) for name in names_kept(layer, "fast8")]
        save = {name: "native" if old == "native" else stored for name, old in names}
        found[f"fast8 in {stored}"] = Policy(save=save)
    return found


def main(arguments: list[str]) -> int:
    """Measure every shape; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m bench formats", description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"draws (default: {SEEDS})")
    parser.add_argument("--out", type=Path, default=folder_of(False) / "formats-cpu.json")
    options = parser.parse_args(arguments)
    config: dict[str, Any] = {
        "tokens": TOKENS, "outliers": OUTLIERS, "seeds": options.seeds, "dtype": "bfloat16"
    }  # fmt: skip
    results = ResultsFile(options.out, machine("cpu"), config)
    for name in options.shapes:
        for scale in SCALES:
            torch.manual_seed(0)
            layer = SHAPES[name]().bfloat16()
            policies = policies_of(layer)
            found = errors(layer, policies.values(), scale, range(options.seeds))
            ways = dict(zip(policies, (e.tolist() for e in found), strict=True))
            row = {"case": {"shape": name, "scale": scale}, "gradients": names_of(layer)}
            results.put({**row, "ways": ways})
            pairs = [*zip(policies, found, strict=True)][1:]
            ratios = [f"{way} {(error / found[0]).max():.2f}" for way, error in pairs]
            print(f"{name}, outliers x{scale}: {', '.join(ratios)}")
    return 0
