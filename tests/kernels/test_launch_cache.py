"""Frozen launches: the same results as described ones, whatever about the arguments changes."""

import gc
import weakref

import pytest
import torch
import triton
from places import DEVICE, EXECUTED, INTERPRETED, ON_GPU, misaligned, normal
from ptx.driver import installed

from fused_remat import random
from fused_remat.random import DropoutMask
from fused_remat.spec import AttentionSpec, NormSpec, RotarySpec
from fused_remat.steps.norm import norm_bwd, norm_fwd
from fused_remat.steps.residual import residual_add
from fused_remat.steps.rotary import RotaryTables, rotary_fwd
from fused_remat.triton import launch, norm, pointwise
from fused_remat.triton import rotary as rotary_triton

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled"),
    pytest.mark.usefixtures("launches"),
]
KEY = random.site_keys(torch.tensor(7, device=DEVICE))[0]
SPEC, OTHER = NormSpec(), NormSpec(eps=1.0)
HEADS = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=16, scale=1.0, rotary=RotarySpec())


def mask(row0=0, p=0.5):
    return DropoutMask(KEY, row0, 3, 48, p, torch.float32)


def wide(rows, columns):
    return normal(torch.float32, rows, 3 * columns)[:, :columns]


def add(x, y, keep, out=None):
    return pointwise.residual_add_triton, residual_add, (x, y, keep, out)


def forward(spec, x, weight, bias):
    return norm.norm_fwd_triton, norm_fwd, (spec, x, weight, bias)


def backward(dy, x, weight, marks, plus=None):
    stats = tuple(norm_fwd(SPEC, x, None, None)[1:])
    return norm.norm_bwd_triton, norm_bwd, (SPEC, dy, x, stats, weight, marks, plus)


def rotary(cos, sin):
    call = RotaryTables(HEADS, cos, sin, None, None, 3, 3)  # of the second sequence
    return rotary_triton.rotary_fwd_triton, rotary_fwd, (normal(torch.float32, 3, 64), call)


def calls():
    """Calls of which each differs from an earlier one in something that a kernel depends on."""
    x, y, vector = normal(torch.float32, 3, 48), normal(torch.float32, 3, 48), torch.randn(48)
    vector = vector.to(DEVICE)
    every = (True, True, True)
    tables = normal(torch.float32, 2, 2, 3, 8)
    return {
        "x twice": add(x, x, None),
        "plain": add(x, y, None),
        "dropout": add(x, y, mask()),
        "another row": add(x, y, mask(row0=1)),
        "a row beyond 32 bits": add(x, y, mask(row0=2**40)),
        "one row": add(x[:1], y[:1], mask().of_rows(0, 1)),
        "an odd width": add(x[:, :47].contiguous(), y[:, :47].contiguous(), None),
        "a misaligned x": add(misaligned(x), y, None),
        "an x off by an element": add(normal(torch.float32, 145)[1:].view(3, 48), y, None),
        "rows apart": add(wide(3, 48), y, None),
        "expanded": add(x[:1].expand(3, 48), y, None),
        "another dtype": add(x.half(), y, None),
        "transposed, so copied": add(x.t().contiguous().t(), y, None),
        "norm": forward(SPEC, x, vector, vector.clone()),
        "norm, other eps": forward(OTHER, x, vector, vector.clone()),
        "norm, no bias": forward(SPEC, x, vector, None),
        "norm, no weight": forward(SPEC, x, None, vector),
        "norm, an offset": forward(NormSpec(offset=1.0), x, vector, None),
        "norm, a strided weight": forward(SPEC, x, torch.randn(96, device=DEVICE)[::2], None),
        "all gradients": backward(y, x, vector, every),
        "all gradients, added": backward(y, x, vector, every, x),
        "dx": backward(y, x, vector, (True, False, False)),
        "dweight": backward(y, x, vector, (False, True, False)),
        "tables of one storage": rotary(*tables),
        "tables of two": rotary(tables[0], tables[1].clone()),
    }


def check(call):
    run, body, args = call
    for got, expected in zip(tensors(run(*args)), tensors(body(*args)), strict=True):
        # Two orders of summation, some in float16; another call's arguments give other numbers.
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)


def tensors(result):
    return [t for t in (result if isinstance(result, tuple) else (result,)) if t is not None]


def test_each_change_of_the_arguments_is_told_apart():
    """Every call is frozen before any runs again, and runs again on other values and addresses."""
    for _ in range(2):
        for name, call in calls().items():
            try:
                check(call)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error
    copied = [plan for plan in launch.PLANS.values() if plan.go is None]
    assert len(copied) == 3, "a transposed matrix, a strided weight, tables of one storage"


def test_a_frozen_launch_is_neither_described_nor_bound(described):
    check(calls()["all gradients"])
    check(calls()["all gradients"])
    assert not described
    (plan,) = launch.PLANS.values()
    assert plan.go is not None


def test_hooks_see_every_launch(described):
    seen, chain = [], triton.knobs.runtime.launch_enter_hook
    check(calls()["plain"])
    chain.add(seen.append)
    try:
        check(calls()["plain"])
    finally:
        chain.remove(seen.append)
    assert described == ["dropout_add_fwd_kernel"]
    check(calls()["plain"])
    assert len(described) == 1


def test_a_version_whose_launcher_is_not_known_is_used_as_documented(monkeypatch, described):
    monkeypatch.setattr(launch, "_KNOWN", False)
    check(calls()["plain"])
    check(calls()["all gradients"])
    assert described == ["dropout_add_fwd_kernel", "norm_bwd_kernel"]


def test_plans_hold_no_tensor_and_keep_their_specs():
    spec = NormSpec(eps=0.5)
    run, _, args = forward(spec, normal(torch.float32, 3, 48), None, None)
    made = [*run(*args), args[1]]
    there = [weakref.ref(t) for t in made]
    name = id(spec)
    del made, args, spec
    gc.collect()
    assert all(ref() is None for ref in there)
    (plan,) = launch.PLANS.values()
    assert [id(held) for held in plan.held] == [name], "or another spec could have its identity"


@pytest.mark.skipif(ON_GPU or EXECUTED > 0, reason="installs drivers")
def test_another_device_has_its_own_plans(launches):
    call = calls()["plain"]
    check(call)
    with installed(80):
        check(call)
    check(call)
    assert len(launch.PLANS) == 2


def test_plans_are_bounded(monkeypatch):
    monkeypatch.setattr(launch, "_MOST", 2)
    for name in ("plain", "dropout", "another row"):
        check(calls()[name])
    assert len(launch.PLANS) <= 2


def test_what_returns_is_frozen(described, monkeypatch):
    monkeypatch.setattr(launch, "AT_ONCE", False)
    x = normal(torch.float32, 3, 48)
    results = [pointwise.residual_add_triton(x, x, None) for _ in range(4)]
    assert described == ["dropout_add_fwd_kernel"], "the first time; later it is frozen"
    assert all(torch.equal(y, x + x) for y in results) and all(launch.PLANS.values())
    pointwise.residual_add_triton(x[:2], x[:2], None)
    assert [plan is None for plan in launch.PLANS.values()] == [False, True]
