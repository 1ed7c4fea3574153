"""Every kernel in every configuration that `python -m bench audit` lists, executed.

The launches are the audit's own, over smaller sizes that lead to the same compiled kernels; results
are compared with those of the operations' bodies in float64.
"""

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from executed import took
from places import BF16, EXECUTED, check_error, target
from tiers import executed, exhaustive
from torch import Tensor

from bench.audit import attention as audit_attention
from bench.audit import cases as audit
from bench.audit.command import digest, source
from fused_remat import formats, random
from fused_remat.formats import Quantized
from fused_remat.random import DropoutMask, Uniform
from fused_remat.steps import attention, norm, rotary
from fused_remat.steps.activation import activation_bwd, activation_fwd
from fused_remat.steps.linear import linear_dx, linear_fwd
from fused_remat.steps.residual import dropout, residual_add
from fused_remat.triton import attention as attentions
from fused_remat.triton import cross_entropy, pointwise, products, storage
from fused_remat.triton import norm as norms
from fused_remat.triton import rotary as rotaries
from fused_remat.triton.launch import Launch, Target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not EXECUTED, reason="needs FUSED_REMAT_COMPILED, an architecture"),
]
F16, F32 = torch.float16, torch.float32
#: Sizes as those of the audit as to what Triton compiles: multiples of 16, and so are the blocks of
#: a row of codes. Tiles end early, and programs have several; or they are whole.
SIZES = {
    "ragged": {"ROWS": 80, "WIDTH": 2032, "PRODUCT": (192, 1008), "TABLE": 32},
    "whole": {"ROWS": 256, "WIDTH": 1024, "PRODUCT": (128, 1024), "TABLE": 256},
}
#: Batch, heads and tokens of attention, and tokens whose masks are not aligned.
ATTENTION = {
    "ragged": {"_B": 1, "_H": 16, "_S": 144, "_UNEVEN": 137},
    "whole": {"_B": 2, "_H": 16, "_S": 256, "_UNEVEN": 259},
}
#: Rows, if not those, and multiprocessors, tried in turn: of them depends into how many parts sums
#: are divided, and whether Triton knows that number to be a multiple of 16.
SPREADS = [(None, 3), (64, 1), (256, 4), (64, 8), (144, 12), (80, 132)]
LAUNCHERS = {
    norms: ("norm_fwd", "norm_bwd"),
    pointwise: ("dropout_add_fwd", "act_fwd", "act_bwd", "gated_fwd", "gated_bwd"),
    storage: ("quantize_int8", "dequantize_int8"),
    rotaries: ("rotary_fwd", "rotary_norm_bwd"),
    products: ("linear_fwd", "gated_mlp_fwd", "linear_act_bwd", "mlp_bwd"),
    cross_entropy: ("cross_entropy_fwd", "cross_entropy_bwd"),
}
RESULTS = {
    "y", "total", "pre", "pres", "dx", "dweight", "dbias", "dgate", "dup", "dups", "dz", "highs",
    "sums", "totals", "picked", "dq_weight", "dk_weight",
}  # fmt: skip


# --- the audit's launches, by the calls that made them


@dataclass
class Call:
    """A call that made launches, over tensors without data.

    Attributes:
        cases: names of the audit's cases by the number of the launch.
    """

    function: Callable[..., Any]
    given: dict[str, Any]
    launches: list[Launch]
    cases: dict[int, str] = field(default_factory=dict)
    default: bool = False
    rows: int = 0


def recording(function, calls):
    def record(*args, **options):
        made = function(*args, **options)
        bound = inspect.signature(function).bind(*args, **options)
        bound.apply_defaults()
        launches = made if isinstance(made, list) else [made]
        calls.append(Call(function, bound.arguments, launches))
        return made

    return record


@cache
def calls_of(dtype: torch.dtype, sizes: str) -> list[Call]:
    """Those whose launches are compiled as cases of the audit, but for attention's: every case."""
    found: list[Call] = []
    known = audited(dtype)
    missing = {name for name in known if not name.startswith("attention")}
    for rows, sms in SPREADS:
        for call in recorded(dtype, SIZES[sizes], rows, sms) if missing else ():
            call.cases = {
                place: name
                for place, name in call.cases.items()
                if name in missing
                and audited(dtype)[name] == digest(call.launches[place], EXECUTED)
            }
            missing.difference_update(call.cases.values())
            found += [call] if call.cases else []
    assert not missing, f"no call is compiled as the audit's {missing}"
    return found


def recorded(dtype: torch.dtype, sizes: dict[str, Any], rows: int | None, sms: int) -> list[Call]:
    calls: list[Call] = []
    at = Target("cuda", EXECUTED, sms)
    sizes = sizes | ({"ROWS": rows} if rows else {})
    with pytest.MonkeyPatch.context() as patch:
        for module, names in LAUNCHERS.items():
            for name in names:
                patch.setattr(module, name, recording(getattr(module, name), calls))
        for name, size in sizes.items():
            patch.setattr(audit, name, size)
        patch.setattr(audit, "attention_cases", lambda *_: ())
        for case in audit.cases(at, dtype):
            call = next(c for c in reversed(calls) if any(x is case.launch for x in c.launches))
            place = next(i for i, x in enumerate(call.launches) if x is case.launch)
            call.cases[place] = case.name
            call.default |= case.default
            call.rows = sizes["ROWS"]
    return [call for call in calls if call.cases]


@cache
def audited(dtype: torch.dtype) -> dict[str, str]:
    """Digests of the audit's cases by name."""
    return {
        case.name: digest(case.launch, EXECUTED)
        for case in audit.cases(audit.target(EXECUTED), dtype)
    }


# --- tensors with data


class Maker:
    """Random tensors for those without data; the same for the same."""

    def __init__(self, rows: int) -> None:
        self.rows, self.made = rows, {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, tuple):
            made = [self(v) for v in value]
            return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
        if isinstance(value, DropoutMask):
            v = value
            return DropoutMask(self(v.site_key), v.row0, v.rows, v.width, v.p, v.dtype)
        if isinstance(value, Uniform):
            return Uniform(self(value.site_key), value.row0, value.rows, value.width)
        if isinstance(value, Quantized):
            codes, step = map(self, value.parts)
            step.clamp_(1e-3, 0.02)
            return dataclasses.replace(value, parts=(codes, step))
        if isinstance(value, Tensor):
            if id(value) not in self.made:
                self.made[id(value)] = self.new(value), value  # whose id nothing else may get
            return self.made[id(value)][0]
        if dataclasses.is_dataclass(value):
            fields = {f.name: self(getattr(value, f.name)) for f in dataclasses.fields(value)}
            return dataclasses.replace(value, **fields)
        return value

    def new(self, like: Tensor) -> Tensor:
        if like.dtype == torch.int64:
            if like.dim() == 0:
                return random.site_keys(torch.tensor(-7))[random.MLP]
            return torch.zeros(like.shape, dtype=like.dtype)
        if like.dtype == torch.int8:
            return torch.randint(-127, 128, like.shape, dtype=like.dtype)
        if like.dtype == torch.bool:
            return torch.rand(like.shape) < 0.2
        if like.dtype == torch.int32:  # bounds of sequences, or lengths
            return torch.randint(1, self.rows, like.shape, dtype=like.dtype).sort().values
        x = torch.empty_strided(like.shape, like.stride()).normal_()
        if like.dim() == 2 and like.shape[0] != self.rows:  # a weight
            x *= like.shape[1] ** -0.5
        return x.to(like.dtype)


def wide(value: Any) -> Any:
    """A copy in float64."""
    if isinstance(value, tuple):
        made = [wide(v) for v in value]
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    if isinstance(value, DropoutMask):
        v = value
        return DropoutMask(v.site_key, v.row0, v.rows, v.width, v.p, torch.float64)
    if isinstance(value, Quantized):
        return value.tensor().double()
    if isinstance(value, rotary.RotaryCall):
        names = ("cos", "sin", "q_weight", "k_weight")
        return dataclasses.replace(value, **{name: wide(getattr(value, name)) for name in names})
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value.clone()
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for v in value:
            yield from tensors_in(v)


# --- what each should give: pairs of a result and what it is in float64. `i` is what was given, in
# float64; `o` is the same after the launch


def norm_fwd(i, o):
    total = i.x
    if i.residual is not None:
        yield o.total, residual_add(i.x, i.residual, i.mask)
        total = o.total.double()  # what is rounded is no error of the norm
    y, *stats = norm.norm_fwd(i.spec, total, i.weight, i.bias)
    yield o.y, y
    if not i.has_stats:
        yield from zip(o.stats, stats, strict=True)


def norm_bwd(i, o):
    marks = (True, i.dweight is not None, i.dbias is not None)
    exact = norm.norm_bwd(i.spec, i.dy, i.x, i.stats, i.weight, marks, i.add)
    yield from zip((o.dx, o.dweight, o.dbias), exact, strict=True)


def dropout_add_fwd(i, o):
    yield o.y, dropout(i.x, i.mask) if i.residual is None else residual_add(i.x, i.residual, i.mask)


def act_fwd(i, o):
    yield o.y, activation_fwd(i.act, None, i.x, i.mask)


def act_bwd(i, o):
    yield o.dx, activation_bwd(i.act, i.dy, None, i.x, i.mask, False)[1]


def gated_fwd(i, o):
    yield o.y, activation_fwd(i.act, i.gate, i.up, i.mask)


def gated_bwd(i, o):
    exact = activation_bwd(i.act, i.dy, i.gate, i.up, i.mask, False)
    yield from zip((o.dgate, o.dup), exact, strict=True)


def quantize_int8(i, o):
    exact = formats.quantize(o.x, o.storage.stored, o.storage.uniform)
    yield from zip(o.parts, exact, strict=True)


def dequantize_int8(i, o):
    yield o.y, i.x


def rotary_fwd(i, o):
    if i.back:
        yield o.y, rotary.rotary_bwd(i.x, None, i.call, (True, False, False), False)[0]
    else:
        yield o.y, rotary.rotary_fwd(i.x, i.call)


def rotary_norm_bwd(i, o):
    exact = rotary.rotary_bwd(i.dy, i.x, i.call, (True,) * 3, False)
    yield from zip((o.dx, o.dq_weight, o.dk_weight), exact, strict=True)


def rounded(o, x):
    """As a kernel reads it: an element's rounding is no error of the function after it."""
    return x.to(o.y.dtype).double()


def codes(o, quantized, pre):
    """The bits of what the same product keeps as it is."""
    call, parts = quantized
    yield from zip(parts, formats.quantize(pre, call.stored, call.uniform), strict=True)


def linear(i, o):
    x = i.x
    if i.norm is not None:
        mean, rstd, weight, bias = i.norm
        x = rounded(o, (x - mean) * rstd * weight + bias)
    pre = linear_fwd(x, i.weight, i.bias)
    if i.pre is not None:
        yield o.pre, pre
    y = pre if i.act is None else activation_fwd(i.act, None, rounded(o, pre), None)
    yield o.y, residual_add(y, torch.zeros_like(y) if i.residual is None else i.residual, i.mask)
    if o.quantized is not None:
        kept = o.pre
        if kept is None:
            kept = torch.empty_like(o.y)
            given = vars(o) | {"quantized": None, "pre": kept, "y": torch.empty_like(o.y)}
            products.linear_fwd(**given).run()
        yield from codes(o, o.quantized, kept)


def gated_mlp_fwd(i, o):
    layers = (i.gate_weight, i.gate_bias), (i.weight, i.bias)
    pres = [linear_fwd(i.x, *layer) for layer in layers]
    yield o.y, activation_fwd(i.act, *(rounded(o, pre) for pre in pres), i.mask)
    for kept, pre in zip(o.pres, pres, strict=True):
        if kept is not None:
            yield kept, pre
    if any(o.quantized):
        kept = tuple(torch.empty_like(o.y) for _ in "gu")
        given = {"quantized": (None, None), "pres": kept, "y": torch.empty_like(o.y)}
        products.gated_mlp_fwd(**vars(o) | given).run()
        for quantized, pre in zip(o.quantized, kept, strict=True):
            yield from codes(o, quantized, pre)


def linear_act_bwd(i, o):
    yield o.y, activation_fwd(i.act, i.gate, i.up, i.mask)
    exact = activation_bwd(i.act, linear_dx(i.dy, i.out_weight), i.gate, i.up, i.mask, False)
    yield from zip((o.dgate, o.dup), exact, strict=True)


def mlp_bwd(i, o):
    gate, up = ([None] + [rounded(o, linear_fwd(i.x, *layer)) for layer in i.ups])[-2:]
    yield o.y, activation_fwd(i.act, gate, up, i.mask)
    exact = activation_bwd(i.act, linear_dx(i.dy, i.out_weight), gate, up, i.mask, False)
    yield from zip(o.dups, exact[-len(o.dups) :], strict=True)


def logits(i):
    z = linear_fwd(i.x, i.weight, i.bias)
    return i.softcap * torch.tanh(z / i.softcap) if i.softcap else z


def cross_entropy_fwd(i, o):
    z = logits(i)
    tiles = z.split(i.tile.block_n, 1)
    yield o.highs, torch.stack([tile.amax(1) for tile in tiles])
    sums = [(t - high[:, None]).exp().sum(1) for t, high in zip(tiles, o.highs, strict=True)]
    yield o.sums, torch.stack(sums)
    if o.totals is not None:
        yield o.totals, torch.stack([tile.sum(1) for tile in tiles])
    yield o.picked, z.gather(1, i.target[:, None] - i.first)[:, 0]


def cross_entropy_bwd(i, o):
    z, (high, log_sum), (mass, spread, at_target) = logits(i), i.stats, i.slopes
    exact = (z - (high + log_sum)[:, None]).exp() * mass[:, None]
    if spread is not None:
        exact += spread[:, None]
    exact.scatter_add_(1, i.target[:, None] - i.first, at_target[:, None])
    yield o.dz, exact * (1 - (z / i.softcap) ** 2) if i.softcap else exact


EXACT = {
    norms.norm_fwd: norm_fwd, norms.norm_bwd: norm_bwd, pointwise.act_fwd: act_fwd,
    pointwise.dropout_add_fwd: dropout_add_fwd, pointwise.act_bwd: act_bwd,
    pointwise.gated_fwd: gated_fwd, pointwise.gated_bwd: gated_bwd,
    storage.quantize_int8: quantize_int8, storage.dequantize_int8: dequantize_int8,
    rotaries.rotary_fwd: rotary_fwd, rotaries.rotary_norm_bwd: rotary_norm_bwd,
    products.linear_fwd: linear, products.gated_mlp_fwd: gated_mlp_fwd,
    products.linear_act_bwd: linear_act_bwd, products.mlp_bwd: mlp_bwd,
    cross_entropy.cross_entropy_fwd: cross_entropy_fwd,
    cross_entropy.cross_entropy_bwd: cross_entropy_bwd,
}  # fmt: skip


def given_of(call: Call) -> SimpleNamespace:
    """Arguments with data; what is written, and not read before, is NaN."""
    made, given = Maker(call.rows), SimpleNamespace(**call.given)
    for name, value in call.given.items():
        setattr(given, name, made(value))
    if call.function in (cross_entropy.cross_entropy_fwd, cross_entropy.cross_entropy_bwd):
        given.target.random_(given.weight.shape[0]).add_(given.first)
    if hasattr(given, "stats") and hasattr(given, "spec"):
        stats = norm.norm_fwd(given.spec, given.x.double(), None, None)[1:]
        for mine, true in zip(given.stats, stats, strict=True):
            mine.copy_(true if getattr(given, "has_stats", True) else torch.nan)
    read = [id(t) for n, v in vars(given).items() if n not in RESULTS for t in tensors_in(v)]
    for name in RESULTS & vars(given).keys():
        for t in tensors_in(getattr(given, name)):
            if id(t) not in read:
                t.fill_(torch.nan)
    return given


def cases():
    """Sizes, dtype and number of each call. `make test` has the first of every kernel."""
    seen: set[str] = set()
    for sizes, dtype in itertools.product(SIZES, (BF16, F16, F32)):
        for number, call in enumerate(calls_of(dtype, sizes)):
            kernels = {launch.kernel.fn.__name__ for launch in call.launches}
            marks = [] if sizes == "ragged" and call.default else [pytest.mark.exhaustive]
            marks += [pytest.mark.executed] if kernels - seen else []
            seen |= kernels
            name = f"{sizes}-{str(dtype)[6:]}-{next(iter(call.cases.values()))}"
            yield pytest.param(sizes, dtype, number, marks=marks, id=name)


@pytest.mark.parametrize("sizes, dtype, number", list(cases()) if EXECUTED else ())
def test_launches(sizes, dtype, number):
    call = calls_of(dtype, sizes)[number]
    given = given_of(call)
    before = SimpleNamespace(**{name: wide(value) for name, value in vars(given).items()})
    made = call.function(**vars(given))
    launches = made if isinstance(made, list) else [made]
    for place, name in call.cases.items():
        assert digest(launches[place], EXECUTED) == audited(dtype)[name], name
    for place, launch in enumerate(launches):
        launch.run()
        if place in call.cases:
            took(call.cases[place], str(dtype)[6:], sizes)
    for found, exact in EXACT[call.function](before, given):
        if exact is None:
            assert found is None
        elif found.is_floating_point():
            check_error(found, exact, what=name)
        else:
            assert torch.equal(found, exact)


# --- attention: every launch of a forward and a backward


def kind_of(launch: Launch) -> str:
    """What is compiled, but for what Triton knows of numbers' divisibility.

    How many blocks there are is a number, too: a multiple of 16 would take hundreds of tokens.
    """
    made = source(launch)
    return repr((made.name, made.signature, made.constants, launch.num_warps, launch.num_stages))


@cache
def attention_kinds(dtype: torch.dtype) -> dict[tuple[int, str], list[tuple[str, str]]]:
    """Names and kinds of the audit's launches, by width and variant."""
    at, given = audit.target(EXECUTED), audit_attention.variants(dtype)
    return {
        (width, name): [
            (audit_attention.case_name(kernel, width, name, launch), kind_of(launch))
            for kernel, launch in audit_attention.launches_of(width, given[name], at, dtype)
        ]
        for width, names in audit_attention.CALLS.items()
        for name in names
    }


def run_all(launches, known, dtype, sizes):
    """Each of which is what the next of the audit is, if any are given."""
    for launch in launches:
        launch.run()
        if known == ():
            continue
        case, kind = next(known)
        assert kind_of(launch) == kind, case
        took(case, str(dtype)[6:], sizes)


CALLS = [(width, name) for width, names in audit_attention.CALLS.items() for name in names]


@pytest.mark.parametrize(
    "sizes, dtype, width, variant",
    executed(
        [
            (pytest.param if sizes == "ragged" else exhaustive)(sizes, dtype, *call)
            for sizes, dtype, call in itertools.product(ATTENTION, (BF16, F16), CALLS)
        ],
        ("ragged", BF16, 64, "mask padding dropout"),
    ),
    ids=str,
)
def test_attention(sizes, dtype, width, variant, monkeypatch):
    for name, size in ATTENTION[sizes].items():
        monkeypatch.setattr(audit_attention, name, size)
    options = audit_attention.variants(dtype)[variant]
    stored = options.pop("stored", None)
    call = audit_attention.call_of(width, options)
    made, how = Maker(call.q_len), (dtype, sizes)
    heads, grads = (made(audit_attention._heads(call, dtype, form)) for form in (stored, None))
    call, rows, nhead = made(call), call.batch * call.q_len, call.spec.num_heads
    plain = [x if isinstance(x, Tensor) else x.of(x.whole.tensor()) for x in heads]
    dattn, out = torch.randn(2, rows, nhead * width).to(dtype)
    lse = torch.empty(call.batch, nhead, call.q_len)
    exact = dataclasses.replace(call)
    for t in (out, lse, *grads):
        t.fill_(torch.nan)
    if call.dmask is not None:
        call.dmask.zero_()
        exact.dmask = call.dmask.double()
    given = [x.double() for x in plain]
    exact_out, exact_lse = attention.attention_fwd(*given, exact)
    exact_grads = [torch.empty_like(x) for x in given]
    attention.attention_bwd(dattn.double(), *given, exact_out, exact_lse, exact, exact_grads)
    known = iter(attention_kinds(dtype)[width, variant])
    run_all(attentions.forward(*plain, call, out, lse, target()), () if stored else known, *how)
    run_all(attentions.backward(dattn, *heads, out, lse, call, grads, target()), known, *how)
    assert next(known, None) is None
    for found, true in zip((out, *grads), (exact_out, *exact_grads), strict=True):
        check_error(found, true, 2.5)  # as of other launches of attention
    if call.dmask is not None:
        check_error(call.dmask, exact.dmask, 2.5, dtype=dtype)
