"""What gradients lose where kept activations are packed: `python -m bench formats`.

For every layer of `SHAPES`, of real models' widths, without and with a few of the input's channels
many times as large as the others, as trained models have them: the relative error of each gradient
against the same layer in float64, in bf16, of the policy "none" (everything kept as it is) and of
policies with packed names. The JSON has every gradient's; docs/tables/formats.md the largest ratio
to that of "none". Errors do not depend on what else the machine does.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.measure.machine import machine
from bench.measure.options import Parser, positive
from bench.measure.results import ResultsFile
from fused_remat import FusedRematCausalLayer, FusedRematLayer, Policy
from fused_remat.execution.observe import OBSERVERS, BlockRun
from fused_remat.formats import split_name
from fused_remat.layers.fused_layer import FusedLayer

TOKENS = 192
#: Channels of the input that are larger than the others, and how many times.
OUTLIERS, SCALES = 6, (1, 30)

#: name -> a layer of that model's widths and options, with random weights.
SHAPES: dict[str, Callable[[], FusedLayer]] = {
    "gpt2": lambda: FusedRematLayer(768, 12, 3072, 0.0, "gelu", norm_first=True, batch_first=True),
    "bert": lambda: FusedRematLayer(768, 12, 3072, 0.0, "gelu", batch_first=True),
    "transformer": lambda: FusedRematLayer(512, 8, 2048, 0.0, "relu", batch_first=True),
    "smollm": lambda: FusedRematCausalLayer(576, 9, 1536, kv_heads=3),
    "qwen3": lambda: FusedRematCausalLayer(512, 8, 1536, kv_heads=4, head_dim=64, qk_norm=True),
    "gemma2": lambda: FusedRematCausalLayer(
        512, 8, 2048, kv_heads=4, activation="gelu_tanh", placement="sandwich", softcap=50.0
    ),
    "opt": lambda: FusedRematCausalLayer(
        768, 12, 3072, gated=False, activation="relu", norm="layer_norm", bias=True
    ),
}
#: What `SHAPES` are, in words.
KINDS = {
    "gpt2": "pre-norm, GELU",
    "bert": "post-norm, GELU",
    "transformer": "post-norm, ReLU",
    "smollm": "gated, shared key heads",
    "qwen3": "gated, norms of heads",
    "gemma2": "gated, norms around, soft-cap",
    "opt": "causal, ReLU, biases",
}


def outlying_input(layer: FusedLayer, scale: float, seed: int) -> Tensor:
    """Tokens with `OUTLIERS` channels `scale` times as large; normed where the layer before norms.

    Shapes: returns (1, TOKENS, D) float32.
    """
    generator = torch.Generator().manual_seed(seed)
    weight = layer.norm1.weight
    assert isinstance(weight, Tensor)
    width = weight.shape[0]
    x = torch.randn(1, TOKENS, width, generator=generator)
    x[..., torch.randperm(width, generator=generator)[:OUTLIERS]] *= scale
    post_norm = isinstance(layer, FusedRematLayer) and not layer.norm_first
    return F.layer_norm(x, (width,)) if post_norm else x


def output(layer: nn.Module, x: Tensor) -> Tensor:
    """Of a layer of a language model, with rotary embedding where the heads are shared."""
    made: Tensor
    if isinstance(layer, FusedRematCausalLayer) and layer.kv_heads != layer.nhead:
        half = layer.head_dim // 2
        angles = torch.outer(torch.arange(TOKENS), 10000 ** -(torch.arange(half) / half))
        tables = angles.to(torch.promote_types(x.dtype, torch.float32))
        made = layer(x, (tables.cos(), tables.sin()))
    else:
        made = layer(x)
    return made


def gradients(layer: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = output(layer, x)
    found: tuple[Tensor, ...] = torch.autograd.grad(y, [x, *layer.parameters()], dy)
    return list(found)


def names_kept(layer: FusedLayer, policy: str) -> frozenset[str]:
    """What a call of the layer keeps at a preset, as `Policy.save` has it."""
    seen: list[BlockRun] = []
    layer.policy = policy
    OBSERVERS.append(seen.append)
    try:
        output(layer, outlying_input(layer, 1, 0).to(layer.norm1.weight.dtype).requires_grad_())
    finally:
        OBSERVERS.remove(seen.append)
    return seen[0].call.save


def names_of(layer: nn.Module) -> list[str]:
    return ["x", *(name for name, _ in layer.named_parameters())]


def relative(found: Iterable[Tensor], truth: list[Tensor], names: Iterable[str]) -> Tensor:
    """Of each gradient, |found - truth| / |truth|; what is all but zero, by the largest |truth|.

    A bias of keys has no gradient: its terms, one a token, cancel, since softmax does not see a
    shift. Its error is relative to the norm of these terms, which is that of the weight's gradient
    over the norm of an input's row; and it is taken together with the weight's error.
    """
    exact = dict(zip(names, truth, strict=True))
    pairs = zip(exact.items(), found, strict=True)
    errors = {name: (got.double() - t).norm().item() for (name, t), got in pairs}
    norms = {name: t.norm().item() for name, t in exact.items()}
    largest = max(norms.values())
    for name, norm in norms.items():
        if norm < 1e-9 * largest and name.endswith("bias"):
            weight = name.removesuffix("bias") + "weight"  # which comes before it
            terms = norms[weight] / exact[weight].shape[1] ** 0.5
            errors[name] = math.hypot(errors[name] / terms, errors[weight])
        else:
            errors[name] /= norm if norm > 1e-3 * largest else largest
    return torch.tensor(list(errors.values()))


def errors(
    layer: FusedLayer, policies: Iterable[str | Policy], scale: float, seeds: Iterable[int]
) -> list[Tensor]:
    """For each policy, the relative errors of every gradient of a bf16 `layer`, root mean square
    over `seeds`.

    Shapes: a list of (1 + number of parameters,) float32.
    """
    exact = copy.deepcopy(layer).double()
    exact.policy = "full"
    policies, found = list(policies), []
    for seed in seeds:
        x = outlying_input(layer, scale, seed).bfloat16()
        other = torch.Generator().manual_seed(1000 + seed)  # dy like x has all but no gradient
        dy = torch.randn(x.shape, generator=other).bfloat16()
        truth = gradients(exact, x.double(), dy.double())
        for policy in policies:
            layer.policy = policy
            found.append(relative(gradients(layer, x, dy), truth, names_of(layer)))
    by_seed = torch.stack(found).unflatten(0, (-1, len(policies)))
    return list(by_seed.square().mean(0).sqrt())


# --- the command


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
