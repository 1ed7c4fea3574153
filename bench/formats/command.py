"""What gradients lose where kept activations are packed: `python -m bench formats`.

For every shape in `bench.formats.errors`, without and with outlier channels: the relative error of
each gradient against float64, in bf16, of the policy "none" and of policies with packed names. The
JSON has every gradient's; docs/tables/formats.md the largest ratio to that of "none". Errors do not
depend on what else the machine does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bench.formats.errors import OUTLIERS, SCALES, SHAPES, TOKENS, errors, names_kept, names_of
from bench.measure.machine import machine
from bench.measure.options import Parser, positive
from bench.measure.results import ResultsFile
from fused_remat import Policy
from fused_remat.formats import split_name
from fused_remat.layers.fused_layer import FusedLayer

#: Of the heads and the MLP's pre-activations, all else of "none" as it is; "fast8" has int8.
FORMATS = ("int8_stochastic", "fp8_e4m3")


def policies_of(layer: FusedLayer) -> dict[str, str | Policy]:
    """By the name of a column: the lossy presets, and "fast8" in other formats."""
    names = [split_name(name) for name in names_kept(layer, "fast8")]
    others = {
        f"fast8 in {stored}": Policy({n: old if old == "native" else stored for n, old in names})
        for stored in FORMATS
    }
    return {name: name for name in ("none", "fast8", "balanced8")} | others


def main(arguments: Sequence[str]) -> int:
    parser = Parser("formats", __doc__, "out")
    parser.several("shapes", choices=SHAPES, default=list(SHAPES))
    parser.add("--seeds", type=positive, default=4, help="draws (default: 4)")
    args = parser.parse(arguments)
    config = {"tokens": TOKENS, "outliers": OUTLIERS, "seeds": args.seeds, "dtype": "bfloat16"}
    results = ResultsFile(args.out / "formats-cpu.json", machine("cpu"), config)
    for name in args.shapes:
        for scale in SCALES:
            torch.manual_seed(0)
            layer = SHAPES[name]().bfloat16()
            policies = policies_of(layer)
            found = errors(layer, policies.values(), scale, range(args.seeds))
            ways = dict(zip(policies, found, strict=True))
            results.put(
                {
                    "case": {"shape": name, "scale": scale},
                    "gradients": names_of(layer),
                    "ways": {way: error.tolist() for way, error in ways.items()},
                }
            )
            exact = ways.pop("none")
            ratios = [f"{way} {(error / exact).max():.2f}" for way, error in ways.items()]
            print(f"{name}, outliers x{scale}: {', '.join(ratios)}")
    return 0
