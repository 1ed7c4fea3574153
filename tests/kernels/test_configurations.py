"""Every kernel in every configuration that `python -m bench audit` lists, executed.

The launches are the audit's own, over smaller sizes that lead to the same compiled kernels; results
are compared with those of the operations' bodies in float64.
"""

import dataclasses
import inspect
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exact_launches import EXACT, OF_EXPERTS, RESULTS, Maker, tensors_in, wide
from executed import took
from places import BF16, EXECUTED, check_error, target
from tiers import executed, exhaustive

from bench.audit import attention as audit_attention
from bench.audit import cases as audit
from bench.audit.command import compile_ahead, digest
from fused_remat.steps import attention, norm
from fused_remat.triton import attention as attentions
from fused_remat.triton import cross_entropy
from fused_remat.triton.launch import Launch, Target

pytestmark = pytest.mark.gpu
F16, F32 = torch.float16, torch.float32
#: Sizes as those of the audit as to what Triton compiles: multiples of 16, and so are the blocks of
#: a row of codes. Tiles end early, and programs have several; or they are whole.
SIZES = {
    "ragged": {"ROWS": 80, "WIDTH": 2032, "PRODUCT": (192, 1008), "TABLE": 32},
    "whole": {"ROWS": 256, "WIDTH": 2048, "PRODUCT": (128, 1024), "TABLE": 256},
}
#: Of mixtures, of which as many pairs as there are rows: width and hidden units, and uneven ones.
_EXPERTS = {"ragged": ((64, 192), (40, 33)), "whole": ((128, 256), (104, 65))}
for _name, _widths in _EXPERTS.items():
    SIZES[_name]["MIXTURES"] = {
        kind: (SIZES[_name]["ROWS"] // top_k, *_widths["uneven" in kind], count, top_k)
        for kind, (*_, count, top_k) in audit.MIXTURES.items()
    }
#: Batch, heads and tokens of attention, and tokens whose masks are not aligned.
ATTENTION = {
    "ragged": {"_B": 1, "_H": 16, "_S": 144, "_UNEVEN": 137},
    "whole": {"_B": 2, "_H": 16, "_S": 256, "_UNEVEN": 259},
}
#: The audit's own.
AUDITED = {name: getattr(audit_attention, name) for name in ATTENTION["ragged"]}
#: Of which cases, rows if not those, and multiprocessors, tried in turn: of them depends into how
#: many parts sums are divided, and whether Triton knows that number to be a multiple of 16.
SPREADS = [
    ("norm", 16, 1), ("norm", 32, 1), ("column_sum", 128, 8), ("", None, 3), ("", 64, 1),
    ("", 256, 4), ("", 64, 8), ("", 144, 12), ("", 80, 132),
]  # fmt: skip


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


@cache
def defaults(dtype: torch.dtype) -> frozenset[str]:
    """Names of the audit's cases that ordinary tensors lead to."""
    return frozenset(
        case.name for case in audit.cases(audit.target(EXECUTED), dtype) if case.default
    )


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
    for name, rows, sms in SPREADS:
        for call in recorded(dtype, SIZES[sizes], rows, sms) if missing else ():
            call.cases = {
                place: case
                for place, case in call.cases.items()
                if case.startswith(name) and case in missing
                if digest(call.launches[place], EXECUTED) == known[case]
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
        for function in EXACT:
            module = inspect.getmodule(function)
            patch.setattr(module, function.__name__, recording(function, calls))
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


# --- calls that make no attention


def given_of(call: Call) -> SimpleNamespace:
    """Arguments with data; what is written, and not read before, is NaN."""
    stacks = call.function in OF_EXPERTS
    made, given = Maker(call.rows, stacks), SimpleNamespace(**call.given)
    for name, value in call.given.items():
        setattr(given, name, made(value))
    if call.function in (cross_entropy.cross_entropy_fwd, cross_entropy.cross_entropy_bwd):
        given.target.random_(given.weight.shape[0]).add_(given.first)
    if call.function is cross_entropy.cross_entropy_grad:
        given.target.random_(given.held.shape[1])
        given.held.uniform_(0.01, 1.0)
    if hasattr(given, "stats") and hasattr(given, "spec"):
        stats = norm.norm_fwd(given.spec, given.x.double(), None, None)[1:]
        for mine, true in zip(given.stats, stats, strict=True):
            mine.copy_(true if getattr(given, "has_stats", True) else torch.nan)
    results = OF_EXPERTS.get(call.function, RESULTS)
    read = [id(t) for n, v in vars(given).items() if n not in results for t in tensors_in(v)]
    for name in results & vars(given).keys():
        value = getattr(given, name)
        for t in tensors_in(value) if getattr(value, "fresh", True) else ():
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


def weights_of(call: Call, dtype: torch.dtype) -> int:
    """Multiply-adds of products: a row of activations with every weight once."""
    if not call.function.__module__.endswith((".products", ".cross_entropy")):
        return 0
    tensors = tensors_in(tuple(v for name, v in call.given.items() if name not in RESULTS))
    weights = [t for t in tensors if t.dim() == 2 and t.dtype == dtype and len(t) != call.rows]
    return call.rows * sum(t.numel() for t in weights)


@pytest.mark.parametrize("sizes, dtype, number", list(cases()))
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
            took(call.cases[place], str(dtype)[6:], sizes, defaults(dtype), weights_of(call, dtype))
    for found, exact in EXACT[call.function](before, given):
        if exact is None:
            assert found is None
        elif found.is_floating_point():
            check_error(found, exact, what=name)
        else:
            assert torch.equal(found, exact)


# --- attention: every launch of a forward and a backward


def kind_of(launch: Launch) -> str:
    """What is compiled, but for what Triton knows of numbers: which are 1, or multiples of 16.

    How many blocks there are is a number, too: a multiple of 16 would take hundreds of tokens.
    """
    how = launch.num_warps, launch.num_stages
    return repr((launch.kernel.__name__, sorted(launch.constants.items()), *how))


@cache
def attention_kinds(dtype: torch.dtype) -> dict[tuple[int, str], list[tuple[str, str]]]:
    """Names and kinds of the audit's launches, by width and variant: at its own sizes and GPU."""
    with pytest.MonkeyPatch.context() as patch:
        for name, size in AUDITED.items():
            patch.setattr(audit_attention, name, size)
        at, given = audit.target(EXECUTED), audit_attention.variants(dtype)
        return {
            (width, name): [
                (audit_attention.case_name(kernel, width, name, launch), kind_of(launch))
                for kernel, launch in audit_attention.launches_of(width, given[name], at, dtype)
            ]
            for width, names in audit_attention.CALLS.items()
            for name in names
        }


#: Products of as many rows and columns of a head as there are pairs that see each other.
PRODUCTS = {
    "attention_fwd": 2, "attention_dq_bwd": 3, "attention_dkdv_bwd": 4, "attention_dkdv_bwd dk": 3,
    "attention_dkdv_bwd dv": 2, "attention_mask_bwd": 2,
}  # fmt: skip


def pairs_of(call) -> int:
    """Elements of all heads of as many queries and keys as see each other; 0: lengths say."""
    if call.lengths is not None or call.cu_q is not None:
        return 0
    left, right = call.spec.window
    behind = torch.arange(call.q_len)[:, None] - torch.arange(call.kv_len)
    seen = (behind >= -right) | (right < 0)
    seen &= (behind <= left) | (left < 0)
    return int(seen.sum()) * call.batch * call.spec.num_heads * call.spec.head_dim


def run_all(launches, known, dtype, sizes, pairs):
    """Each of which is what the next of the audit is, if any are given."""
    for launch in launches:
        launch.run()
        if known == ():
            continue
        case, kind = next(known)
        assert kind_of(launch) == kind, case
        kernel = re.match(r"\w+( d[kv]\b)?", case)[0]
        took(case, str(dtype)[6:], sizes, defaults(dtype), PRODUCTS.get(kernel, 0) * pairs)


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
    defaults(dtype)  # of the audit's own sizes: computed before they are others
    # Without masks and with lengths that end within tiles, every block would be a partial one.
    for name, size in ATTENTION["whole" if variant == "full" else sizes].items():
        monkeypatch.setattr(audit_attention, name, size)
    options = audit_attention.variants(dtype)[variant]
    call = audit_attention.call_of(width, options)
    made, how = Maker(call.q_len), (dtype, sizes, pairs_of(call))
    heads, grads = (made(audit_attention._heads(call, dtype)) for _ in "xg")
    call, rows, nhead = made(call), call.batch * call.q_len, call.spec.num_heads
    dattn, out = torch.randn(2, rows, nhead * width).to(dtype)
    lse = torch.empty(call.batch, nhead, call.q_len)
    exact = dataclasses.replace(call)
    for t in (out, lse, *grads):
        t.fill_(torch.nan)
    if call.dmask is not None:
        call.dmask.zero_()
        exact.dmask = call.dmask.double()
    given = [x.double() for x in heads]
    exact_out, exact_lse = attention.attention_fwd(*given, exact)
    exact_grads = [torch.empty_like(x) for x in given]
    attention.attention_bwd(dattn.double(), *given, exact_out, exact_lse, exact, exact_grads)
    known = iter(attention_kinds(dtype)[width, variant])
    run_all(attentions.forward(*heads, call, out, lse, target()), known, *how)
    run_all(attentions.backward(dattn, *heads, out, lse, call, grads, target()), known, *how)
    assert next(known, None) is None
    for found, true in zip((out, *grads), (exact_out, *exact_grads), strict=True):
        check_error(found, true, 2.5)  # as of other launches of attention
    if call.dmask is not None:
        check_error(call.dmask, exact.dmask, 2.5, dtype=dtype)


# --- sm_86


@pytest.mark.skipif(EXECUTED != 89, reason="what runs of sm_89 stands for sm_86")
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_sm_86_has_the_instructions_of_sm_89(dtype):
    """Of every case the two PTX differ in the target's name alone."""
    for case in audit.cases(audit.target(89), dtype):
        ours, other = (
            re.sub(r"(?m)^\.target .*$", "", compile_ahead(case.launch, arch).asm["ptx"])
            for arch in (89, 86)
        )
        assert ours == other, case.name
