"""Which route is ours: contests of kernels with fused ends against the same in two steps.

An MLP's hidden half, its end, its backward. "aten" is the same in PyTorch's own operators, "bare"
its products alone: what a kernel that fuses the rest for nothing would take. "split" is torch's
product and our kernel for the rest: where it wins, a table's route changes
(`fused_remat.triton.tables`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.measure.contest import (
    SETS,
    Contest,
    Entry,
    P,
    Results,
    Rig,
    Way,
    Work,
    from_mask,
    multiplier,
)
from fused_remat.spec import NormSpec
from fused_remat.steps.linear import linear_dx, linear_fwd
from fused_remat.steps.norm import norm_fwd
from fused_remat.triton import norm as norms
from fused_remat.triton import pointwise, products
from fused_remat.triton.launch import Launch

_aten = torch.ops.aten
TOKENS = 8192
WIDTHS = (2048, 1024, 4096)
EPS = 1e-5
BASELINES = ("aten", "bare")


def doubled(*tensors: Tensor) -> tuple[Tensor, ...]:
    """In float64."""
    return tuple(t.double() for t in tensors)


class Mlp:
    """An MLP's operands: x and dy (T, D) in sets, weights as `nn.Linear` holds them, F = 4·D."""

    def __init__(self, rig: Rig, tokens: int, d: int, f: int) -> None:
        self.rig, self.tokens, self.d, self.f = rig, tokens, d, f
        self.xs = [rig.normal(tokens, d) for _ in range(SETS)]
        self.dys = [rig.normal(tokens, d) for _ in range(SETS)]
        self.gate = rig.normal(f, d, scale=d**-0.5), rig.normal(f)
        self.up = rig.normal(f, d, scale=d**-0.5), rig.normal(f)
        self.down = rig.normal(d, f, scale=f**-0.5), rig.normal(d)
        self.flops = 2.0 * tokens * d * f  # of one product

    def hidden(self) -> Tensor:
        """A poisoned matrix (T, F)."""
        return self.rig.poisoned(self.tokens, self.f)

    def pre(self, index: int, layer: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """The pre-activation, by cuBLAS."""
        weight, bias = layer or self.up
        return torch.addmm(bias, self.xs[index], weight.t())

    def exact_pre(self, layer: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """The first set's, in float64."""
        return linear_fwd(*doubled(self.xs[0], *(layer or self.up)))

    def exact_dact(self) -> Tensor:
        """The gradient of the activation, likewise."""
        return linear_dx(*doubled(self.dys[0], self.down[0]))


def per_set(launch: Callable[[int], Launch], results: Results) -> Way:
    """A launch that is built once for each input set."""
    launches = [launch(index) for index in range(SETS)]

    def run(index: int) -> Results:
        launches[index].run()
        return results

    return Way(run)


def linear_act(m: Mlp, dropped: bool) -> Contest:
    """dropout(gelu(x @ upᵀ + b))."""
    keep = m.rig.keep(m.tokens, m.f) if dropped else None
    fused, split = m.hidden(), m.hidden()

    def aten(index: int) -> Results:
        act = F.gelu(m.pre(index))
        if not dropped:
            return {"y": act}
        return dict(zip(("y", "mask"), torch.native_dropout(act, P, True), strict=True))

    def in_two(index: int) -> Results:
        pointwise.act_fwd(m.pre(index), "gelu", keep, split).run()
        return {"y": split}

    def exact(scale: Tensor | None) -> Results:
        act = F.gelu(m.exact_pre())
        return {"y": act if scale is None else act * scale, "product": product_of(m.xs[0], m.up[0])}

    def kernel(index: int) -> Launch:
        given = m.xs[index], *m.up, None, keep, "gelu", None, fused
        return products.linear_fwd(*given, m.rig.target)

    own = (lambda found: exact(from_mask(found["mask"]))) if dropped else None
    ways = {
        "aten": Way(aten, own),
        "bare": Way(lambda index: {"product": torch.mm(m.xs[index], m.up[0].t())}),
        "kernel": per_set(kernel, {"y": fused}),
        "split": Way(in_two),
    }
    truth = lambda: exact(None if keep is None else multiplier(keep))  # noqa: E731
    return Contest(ways, truth, Work(flops=m.flops), BASELINES)


def product_of(x: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(x.double(), weight.double().t())


def linear_end(m: Mlp) -> Contest:
    """residual + dropout(h @ downᵀ + b), h (T, F)."""
    rig, (weight, bias) = m.rig, m.down
    hs = [rig.normal(m.tokens, m.f) for _ in range(SETS)]
    residual, keep = rig.normal(m.tokens, m.d), rig.keep(m.tokens, m.d)
    fused, split = rig.poisoned(m.tokens, m.d), rig.poisoned(m.tokens, m.d)

    def aten(index: int) -> Results:
        dropped, mask = torch.native_dropout(torch.addmm(bias, hs[index], weight.t()), P, True)
        return {"y": residual + dropped, "mask": mask}

    def in_two(index: int) -> Results:
        product = torch.addmm(bias, hs[index], weight.t())
        pointwise.dropout_add_fwd(product, residual, keep, split).run()
        return {"y": split}

    def exact(scale: Tensor) -> Results:
        product = product_of(hs[0], weight)
        return {"y": residual.double() + (product + bias.double()) * scale, "product": product}

    def kernel(index: int) -> Launch:
        given = hs[index], weight, bias, residual, keep, None, None, fused
        return products.linear_fwd(*given, rig.target)

    ways = {
        "aten": Way(aten, lambda found: exact(from_mask(found["mask"]))),
        "bare": Way(lambda index: {"product": torch.mm(hs[index], weight.t())}),
        "kernel": per_set(kernel, {"y": fused}),
        "split": Way(in_two),
    }
    truth = lambda: exact(multiplier(keep))  # noqa: E731
    return Contest(ways, truth, Work(flops=m.flops), BASELINES)


def linear_normed(m: Mlp) -> Contest:
    """layer_norm(x) @ upᵀ + b, the norm rebuilt from its statistics."""
    rig, (weight, bias) = m.rig, m.up
    affine = rig.normal(m.d, shift=1.0), rig.normal(m.d)
    spec = NormSpec(eps=EPS)
    stats = [tuple(s.float() for s in norm_fwd(spec, x.double(), None, None)[1:]) for x in m.xs]
    fused, normed = m.hidden(), rig.poisoned(m.tokens, m.d)

    def aten(index: int) -> Results:
        made = torch.native_layer_norm(m.xs[index], [m.d], *affine, EPS)[0]
        return {"y": torch.addmm(bias, made, weight.t())}

    def in_two(index: int) -> Results:
        given = spec, m.xs[index], None, None, *affine, None, normed, stats[index], True
        norms.norm_fwd(*given).run()
        return {"y": torch.addmm(bias, normed, weight.t())}

    def truth() -> Results:
        made = F.layer_norm(m.xs[0].double(), [m.d], *doubled(*affine), EPS)
        return {"y": torch.addmm(bias.double(), made, weight.double().t())}

    def kernel(index: int) -> Launch:
        given = m.xs[index], weight, bias, None, None, None, None, fused
        return products.linear_fwd(*given, rig.target, (*stats[index], *affine))

    ways = {"aten": Way(aten), "kernel": per_set(kernel, {"y": fused}), "split": Way(in_two)}
    return Contest(ways, truth, Work(flops=m.flops), ("aten",))


def gated_mlp_fwd(m: Mlp) -> Contest:
    """silu(x @ gateᵀ + bg) * (x @ upᵀ + b)."""
    fused, split = m.hidden(), m.hidden()

    def in_two(index: int) -> Results:
        gate, up = m.pre(index, m.gate), m.pre(index)
        pointwise.gated_fwd(gate, up, "silu", None, split).run()
        return {"y": split}

    def bare(index: int) -> Results:
        x = m.xs[index]
        return {"gate": torch.mm(x, m.gate[0].t()), "product": torch.mm(x, m.up[0].t())}

    def truth() -> Results:
        gate, up = m.exact_pre(m.gate), m.exact_pre()
        products = {"gate": gate - m.gate[1].double(), "product": up - m.up[1].double()}
        return {"y": F.silu(gate) * up, **products}

    def kernel(index: int) -> Launch:
        given = m.xs[index], *m.gate, *m.up, None, "silu", fused
        return products.gated_mlp_fwd(*given, m.rig.target)

    ways = {
        "aten": Way(lambda index: {"y": F.silu(m.pre(index, m.gate)) * m.pre(index)}),
        "bare": Way(bare),
        "kernel": per_set(kernel, {"y": fused}),
        "split": Way(in_two),
    }
    return Contest(ways, truth, Work(flops=2 * m.flops), BASELINES)


def gelu_gradients(dact: Tensor, pre: Tensor) -> Results:
    return {"act": F.gelu(pre), "dup": _aten.gelu_backward(dact, pre)}


def gated_gradients(dact: Tensor, gate: Tensor, up: Tensor) -> Results:
    act = F.silu(gate)
    dgate = _aten.silu_backward(dact * up, gate)
    return {"act": act * up, "dgate": dgate, "dup": dact * act}


#: Whether it is gated -> activation, results of a backward, and what they are.
ENDS: dict[bool, tuple[str, tuple[str, ...], Callable[..., Results]]] = {
    False: ("gelu", ("act", "dup"), gelu_gradients),
    True: ("silu", ("act", "dgate", "dup"), gated_gradients),
}


def mlp_bwd(m: Mlp, gated: bool) -> Contest:
    """Rebuild what goes into the activation, dy @ down, the activation and its gradients."""
    down, target = m.down[0], m.rig.target
    layers = {"gate": m.gate, "product": m.up} if gated else {"product": m.up}
    act, names, gradients = ENDS[gated]
    made = [{name: m.hidden() for name in names} for _ in range(3)]

    def pre(index: int) -> list[Tensor]:
        return [m.pre(index, layer) for layer in layers.values()]

    def bare(index: int) -> Results:
        products = {n: torch.mm(m.xs[index], layer[0].t()) for n, layer in layers.items()}
        return products | {"dact": torch.mm(m.dys[index], down)}

    def in_two(index: int) -> Results:
        given, dact = pre(index), torch.mm(m.dys[index], down)
        y, *dups = made[2].values()
        if gated:
            pointwise.gated_fwd(*given, act, None, y).run()
            pointwise.gated_bwd(dact, *given, act, None, *dups).run()
        else:
            pointwise.act_bwd(dact, *given, act, None, *dups, y).run()
        return made[2]

    def truth() -> Results:
        exact, dact = {n: m.exact_pre(layer) for n, layer in layers.items()}, m.exact_dact()
        products = {n: exact[n] - layer[1].double() for n, layer in layers.items()}
        return {**gradients(dact, *exact.values()), **products, "dact": dact}

    def one_kernel(index: int) -> Launch:
        given = m.xs[index], tuple(layers.values()), m.dys[index], down, None, act
        y, *dups = made[0].values()
        return products.mlp_bwd(*given, y, tuple(dups), target)

    def after_products(index: int) -> Results:
        gate, up = pre(index) if gated else (None, *pre(index))
        out = {"dgate": None, **made[1]}
        given = m.dys[index], down, gate, up, None, act, out["act"], out["dgate"], out["dup"]
        products.linear_act_bwd(*given, target).run()
        return made[1]

    def aten(index: int) -> Results:
        return gradients(torch.mm(m.dys[index], down), *pre(index))

    ways = {
        "aten": Way(aten),
        "bare": Way(bare),
        "gated_mlp_bwd" if gated else "mlp_bwd": per_set(one_kernel, made[0]),
        "linear_act_bwd": Way(after_products),
        "split": Way(in_two),
    }
    return Contest(ways, truth, Work(flops=(1 + len(layers)) * m.flops), BASELINES)


#: In the order in which they are measured, the most telling first.
FORMS: dict[str, Callable[[Mlp], Contest]] = {
    "mlp_bwd gelu": lambda m: mlp_bwd(m, False),
    "gated_mlp_bwd silu": lambda m: mlp_bwd(m, True),
    "linear + gelu": lambda m: linear_act(m, False),
    "gated_mlp_fwd silu": gated_mlp_fwd,
    "linear + dropout + residual": linear_end,
    "linear + gelu + dropout": lambda m: linear_act(m, True),
    "layer_norm + linear": linear_normed,
}


def sizes_of(rig: Rig, width: int) -> dict[str, int]:
    """Tokens, width and hidden width of an MLP."""
    if rig.dry:
        return {"tokens": 32, "width": 64, "hidden": 96}
    return {"tokens": TOKENS, "width": width, "hidden": 4 * width}


def mlp_at(rig: Rig, width: int) -> Mlp:
    """Its operands."""
    return Mlp(rig, *sizes_of(rig, width).values())


def route_entries(rig: Rig) -> Iterator[Entry]:
    """Every form at every width."""
    for width in WIDTHS[:1] if rig.dry else WIDTHS:
        for name, form in FORMS.items():
            case = {"name": name, **sizes_of(rig, width)}
            yield case, lambda rig, form=form, width=width: form(mlp_at(rig, width))
