"""The step on paper: what is written down of a step, what it is priced at, what is said of it."""

import json

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from triton.runtime.driver import driver

from bench.commands import paper
from bench.commands.paper import H100, Kernel, Op
from bench.pages import paper as report


def test_products_of_a_stock_step_are_those_of_its_sizes():
    """12·D² a token, three times; attention's two products and five. A replay repeats forward's
    products, all of them: dropout is last, and saves its mask."""
    before = getattr(driver, "_active", None)
    eager, replayed = (paper.step_of("encoder", 128, 512, way) for way in ("eager", "checkpoint"))
    assert getattr(driver, "_active", None) is before
    width, tokens = 128, paper.TOKENS
    products = {way: sum(op.floor for op in ops if op.kind == "products")
                for way, ops in (("eager", eager), ("checkpoint", replayed))}  # fmt: skip
    one = 2 * tokens * width**2 / H100.products.value
    assert products["eager"] == pytest.approx(36 * one)
    assert products["checkpoint"] == pytest.approx((36 + 12) * one)
    flash = [op.floor for op in eager if op.kind == "flash"]
    work = 4 * tokens * 512 * width
    assert flash == pytest.approx([work / paper.FLASH[0], 2.5 * work / paper.FLASH[1]])
    assert sum("native_dropout" in op.name for op in eager) == 6
    assert all(op.seconds >= op.floor for op in eager)


def test_compile_fuses_all_between_two_products():
    product = Op("mm", "products", 1.0, 1.0, {1: 100}, {2: 100})
    passes = [
        Op("gelu", "memory", 1.0, 0.0, {2: 100}, {3: 100}),
        Op("dropout", "memory", 1.0, 0.0, {3: 100}, {4: 100, 5: 50}),
    ]
    last = Op("mm", "products", 1.0, 1.0, {4: 100, 2: 100}, {6: 100})
    fused = list(paper._fused([product, *passes, last]))
    assert [op.name for op in fused] == ["mm", "fused", "mm"]
    # 3 is read within alone; 5 is never read, and so it is a result.
    assert fused[1].read == {2: 100} and fused[1].written == {4: 100, 5: 50}


def test_clocks_of_our_kernels():
    units = dict.fromkeys(("issue", "special", "integer", "multiply", "shared"), 10)
    loop = {"tensor": 1000, **units, "share": 1.0}
    tile = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64}
    kernel = Kernel("linear_fwd_kernel", (), tile, 8, 160_000, 200, [loop], 500.0)
    sizes = {"M": 128 * 133, "N": 256, "K": 640}
    assert kernel.clocks((132,), sizes) == 2 * (10 * 1010 + 500), "133 tiles are two waves"
    assert kernel.floor(sizes) == 2 * 128 * 133 * 256 * 640 / H100.products.value
    plain = Kernel("act_fwd_kernel", (), {}, 8, 0, 40, [], 300.0)
    assert plain.clocks((1320,), {}) == 10 * 300 and plain.floor({}) == 0


def test_an_error_common_to_both_ways_is_none_of_their_ratio():
    errors = {"products": 0.1, "memory": 0.2}
    eager = {"us": 200, "kinds_us": {"products": 100, "memory": 100}}
    assert report.ratio(eager, eager, errors) == (1.0, 0.0)
    ours = {"us": 100, "kinds_us": {"products": 100, "memory": 0}}
    value, error = report.ratio(ours, eager, errors)
    assert value == 0.5
    assert error == pytest.approx(((110 / 210 - 0.5) ** 2 + (100 / 220 - 0.5) ** 2) ** 0.5)


def row(full):
    way = {"kinds_us": {"memory": 0.0}, "floor_us": 60.0, "flash_us": 70.0}
    way |= {"above_us": {"act_bwd": 9.0}, "us": 100.0}
    ways = dict.fromkeys(("eager", "compile", "checkpoint", "none"), way)
    ways["full"] = way | {"us": full}
    return {"layer": "encoder", "width": 8, "seq": 4096, "ways": ways}


def test_targets_that_are_missed_are_marked(tmp_path):
    data = {"errors": {}, "tokens": 1, "results": [row(79.0), row(110.0)]}
    (tmp_path / "paper.json").write_text(json.dumps(data))
    said = report.targets(tmp_path / "paper.json")
    assert "| 0.79 | 0.79 | 0.70, 0.70, 0.70 | 0.60, 0.60 |" in said
    assert "| **1.10** | **1.10** | 0.70" in said
    assert "no hardware has confirmed" in report.ratios(tmp_path / "paper.json")
