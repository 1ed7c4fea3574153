"""Rotary position embedding and head norms: alone and in the attention block, and in place."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from reference import RUNGS
from reference_ops import attention, calls, check_error, compare, in_pieces, normal, results
from torch import Tensor

from fused_remat import Policy, explain, ops
from fused_remat.autograd import run_block
from fused_remat.blocks.frame import TRACERS
from fused_remat.blocks.pointwise import Add
from fused_remat.blocks.program import Graph, kept_bytes, programs
from fused_remat.blocks.rotary import Rotary
from fused_remat.blocks.sketch import Sketch, linear_params
from fused_remat.memory import SavedBytes, measure_allocations

BATCH, SEQ, WIDTH = 3, 7, 8
# Whole; groups of two sequences; a sequence at a time, the op in tiles that begin within one.
TOKENS = [512, 16, 4]


@dataclass(frozen=True)
class Heads:
    """What is rotated: heads, their width, R of it, and how."""

    nhead: int
    kv_heads: int
    width: int
    rotated: int
    interleaved: bool = False
    batched: bool = False
    norm: bool = False

    @property
    def packed(self) -> int:
        return (self.nhead + 2 * self.kv_heads) * self.width

    def tables(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor] | None:
        """cos and sin of angles that no two places, pairs or sequences share."""
        if not self.rotated:
            return None
        lead = (BATCH, SEQ) if self.batched else (SEQ,)
        angle = normal(*lead, self.rotated // 2, seed=7, scale=3.0).detach()
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def weights(self, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        names = ("q_norm_weight", "k_norm_weight") if self.norm else ()
        return {n: normal(self.width, seed=i, dtype=dtype) for i, n in enumerate(names)}


HEADS = {
    "half": Heads(4, 2, 6, 6),
    "interleaved": Heads(4, 4, 6, 6, interleaved=True),
    "partial": Heads(3, 1, 8, 4, batched=True),
    "interleaved partial": Heads(4, 2, 7, 2, interleaved=True, batched=True),
    "norm half": Heads(4, 2, 6, 6, norm=True),
    "norm interleaved": Heads(2, 2, 4, 4, interleaved=True, batched=True, norm=True),
    "norm partial": Heads(4, 1, 5, 2, norm=True),
    "norm alone": Heads(4, 2, 6, 0, norm=True),
}


@pytest.fixture(params=HEADS)
def heads(request):
    return HEADS[request.param]


def rotate_plain(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (B, S, heads, E) in plain PyTorch, cos and sin (S, R/2) or (B, S, R/2)."""
    cos, sin = cos.unsqueeze(-2).to(x.dtype), sin.unsqueeze(-2).to(x.dtype)
    r = 2 * cos.shape[-1]
    if interleaved:
        x1, x2 = x[..., :r].unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).flatten(-2)
    else:
        x1, x2 = x[..., :r].chunk(2, -1)
        turned = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)
    return torch.cat((turned, x[..., r:]), -1)


def plain(qkv: Tensor, heads: Heads, tables, weights) -> Tensor:
    """`ops.rotary` in plain PyTorch."""
    packed = qkv.unflatten(-1, (-1, heads.width))
    q, k, v = packed.split((heads.nhead, heads.kv_heads, heads.kv_heads), -2)
    if weights:
        q = F.rms_norm(q, (heads.width,), weights["q_norm_weight"], 1e-6)
        k = F.rms_norm(k, (heads.width,), weights["k_norm_weight"], 1e-6)
    if tables is not None:
        q, k = (rotate_plain(x, *tables, heads.interleaved) for x in (q, k))
    return torch.cat((q, k, v), -2).flatten(-2)


def op(qkv: Tensor, heads: Heads, tables, weights, **options) -> Tensor:
    return ops.rotary(
        qkv, *(tables or (None, None)), heads.nhead, heads.kv_heads, heads.interleaved, **weights,
        **options,
    )  # fmt: skip


def block_tensors(heads: Heads, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Leaves of an attention block, in the order of its arguments."""
    shapes = {
        "x": (BATCH, SEQ, WIDTH), "norm_weight": (WIDTH,), "norm_bias": (WIDTH,),
        "qkv_weight": (heads.packed, WIDTH), "qkv_bias": (heads.packed,),
        "proj_weight": (WIDTH, heads.nhead * heads.width), "proj_bias": (WIDTH,),
    }  # fmt: skip
    made = {n: normal(*s, seed=i, dtype=dtype) for i, (n, s) in enumerate(shapes.items())}
    return made | heads.weights(dtype)


def block(t: dict[str, Tensor], heads: Heads, tables=None, **options) -> Tensor:
    options = {"kv_heads": heads.kv_heads, "is_causal": True} | options
    if tables is None:
        tables = heads.tables(t["x"].dtype)
    return ops.attention_block(
        **t, nhead=heads.nhead, rope=tables, rope_interleaved=heads.interleaved, **options
    )


def block_plain(t: dict[str, Tensor], heads: Heads, tables=None) -> Tensor:
    normed = F.layer_norm(t["x"], (WIDTH,), t["norm_weight"], t["norm_bias"])
    packed = F.linear(normed, t["qkv_weight"], t["qkv_bias"])
    weights = {n: w for n, w in t.items() if n in ("q_norm_weight", "k_norm_weight")}
    tables = heads.tables(t["x"].dtype) if tables is None else tables
    packed = plain(packed, heads, tables, weights).unflatten(-1, (-1, heads.width))
    split = (heads.nhead, heads.kv_heads, heads.kv_heads)
    attn = attention(*packed.transpose(1, 2).split(split, 1), is_causal=True)
    return t["x"] + F.linear(attn.transpose(1, 2).flatten(2), t["proj_weight"], t["proj_bias"])


# --- values and gradients


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("layout", ["contiguous", "strided", "expanded"])
def test_rotary_is_plain_pytorchs(heads, tokens, layout):
    base, tables, weights = normal(BATCH, SEQ, heads.packed), heads.tables(), heads.weights()

    def x():
        if layout == "strided":
            return torch.stack((base, base), -1)[..., 0]
        return base[:1].expand_as(base) if layout == "expanded" else base

    with in_pieces(tokens):
        compare(
            lambda: op(x(), heads, tables, weights),
            lambda: plain(x(), heads, tables, weights),
            [base, *weights.values()],
        )


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("policy", ["full", "none"])
def test_the_attention_block_is_plain_pytorchs(heads, tokens, policy):
    t = block_tensors(heads)
    with in_pieces(tokens):
        compare(
            lambda: block(t, heads, policy=policy), lambda: block_plain(t, heads), [*t.values()]
        )


@pytest.mark.parametrize("policy", ["full", "none"])
def test_gradcheck(heads, policy):
    t = block_tensors(heads)

    def fn(*values):
        return block(dict(zip(t, values, strict=True)), heads, policy=policy)

    assert torch.autograd.gradcheck(fn, [*t.values()], fast_mode=True)
    x, weights = normal(BATCH, SEQ, heads.packed), heads.weights()

    def alone(x, *values):
        given = dict(zip(weights, values, strict=True))
        return op(x, heads, heads.tables(), given, policy=policy)

    assert torch.autograd.gradcheck(alone, [x, *weights.values()], fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("table", [torch.float32, None])
def test_errors_are_no_larger_than_pytorchs(heads, dtype, table):
    x, weights = normal(BATCH, SEQ, heads.packed, dtype=dtype), heads.weights(dtype)
    tables = heads.tables(table or dtype)
    given = x, *weights.values()
    dy = normal(*x.shape, seed=99).detach().to(dtype)

    def run(fn, to):
        x, *values = (t.detach().to(to).requires_grad_() for t in given)
        named = dict(zip(weights, values, strict=True))
        wide = None if tables is None else tuple(t.to(torch.promote_types(t.dtype, to))
                                                 for t in tables)  # fmt: skip
        return results(lambda: fn(x, heads, wide, named), [x, *values], dy.to(to))

    exact, peer = run(plain, torch.float64), run(plain, dtype)
    check_error(run(op, dtype), peer, exact, ["output", "qkv", *weights])


def test_float32_tables_beside_16_bits_are_not_rounded():
    """An angle whose sine bfloat16 cannot tell from that of another one, on numbers that it has."""
    heads, x = HEADS["half"], torch.zeros(1, SEQ, HEADS["half"].packed, dtype=torch.bfloat16)
    x[..., :3] = 256.0
    sin = torch.full((SEQ, 3), 2.0**-2 + 2.0**-11)  # 256 * sin = 64.125: bfloat16 says 64
    cos = torch.full((SEQ, 3), 0.5 + 2.0**-9)  # 128.5
    y = op(x, heads, (cos, sin), {})
    x1, x2 = 128.0, 64.0  # 128.5 rounds to even
    assert (y[..., :3] == x1).all() and (y[..., 3:6] == x2).all()
    x[..., 3:6] = 256.0
    y = op(x, heads, (cos, sin), {})
    # 128.5 + 64.125 = 192.625, rounded once to 193 (steps of 1); rounded tables give 192.
    assert (y[..., 3:6] == 193.0).all()


@pytest.mark.parametrize("tokens", [512, 16])
def test_weight_gradients_of_16_bits_are_summed_in_float32(tokens):
    """2000 sequences of one sign: sums in bfloat16 would stop at 256 terms."""
    heads = Heads(1, 1, 4, 0, norm=True)
    x = normal(2000, SEQ, heads.packed, dtype=torch.bfloat16).detach().abs() + 1
    weights, dy = heads.weights(torch.bfloat16), torch.ones_like(x)
    with in_pieces(tokens):
        ours = results(lambda: op(x, heads, None, weights), [*weights.values()], dy)
    wide = {n: w.detach().double().requires_grad_() for n, w in weights.items()}
    exact = results(lambda: plain(x.double(), heads, None, wide), [*wide.values()], dy.double())
    for a, b in zip(ours[1:], exact[1:], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2**-8, atol=0)  # one rounding


def test_one_wanted_gradient_at_a_time(heads):
    t = block_tensors(heads)
    every = results(lambda: block(t, heads), [*t.values()])
    for name, expected in zip(t, every[1:], strict=True):
        alone = {n: v.detach().requires_grad_(n == name) for n, v in t.items()}
        for policy in ("full", "none"):
            _, got = results(lambda: block(alone, heads, policy=policy), [alone[name]])  # noqa: B023
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("shape", [(0, SEQ), (BATCH, 0)])
def test_no_batch_and_no_tokens(shape):
    heads = HEADS["norm half"]
    x, weights = normal(*shape, heads.packed), heads.weights()
    angle = torch.zeros(shape[1], 3, dtype=torch.float64)
    y, *grads = results(lambda: op(x, heads, (angle, angle), weights), [x, *weights.values()])
    assert y.shape == x.shape and not any(g.any() for g in grads)


def test_one_sequences_tables_serve_the_whole_batch():
    heads, x = HEADS["half"], normal(BATCH, SEQ, HEADS["half"].packed)
    cos, sin = heads.tables()
    expected = op(x, heads, (cos, sin), {})
    assert torch.equal(op(x, heads, (cos[None], sin[None]), {}), expected)
    whole = cos.expand(BATCH, -1, -1), sin.expand(BATCH, -1, -1)
    with in_pieces(4):
        assert torch.equal(op(x, heads, whole, {}), expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_the_distance_alone(interleaved):
    """What it is for: places moved by any number, the same attention."""
    heads = Heads(4, 2, 6, 6, interleaved)
    t = block_tensors(heads)
    rate = torch.tensor([1.0, 0.3, 0.05], dtype=torch.float64)
    at = [torch.arange(start, start + SEQ)[:, None] * rate for start in (0, 11)]
    first, later = (block(t, heads, (a.cos(), a.sin())) for a in at)
    torch.testing.assert_close(first, later)
    assert not torch.allclose(first, block(t, heads, (2 * at[0].cos(), at[0].sin())))


def test_agreement_with_transformers():
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    heads = Heads(4, 2, 6, 6)
    x, (cos, sin) = normal(BATCH, SEQ, heads.packed), heads.tables()
    q, k, v = x.unflatten(-1, (-1, 6)).transpose(1, 2).split((4, 2, 2), 1)
    twice = (torch.cat((t, t), -1)[None] for t in (cos, sin))
    q, k = modeling.apply_rotary_pos_emb(q, k, *twice)
    expected = torch.cat((q, k, v), 1).transpose(1, 2).flatten(2)
    torch.testing.assert_close(op(x, heads, (cos, sin), {}), expected)


# --- policies and memory


def policies(heads):
    names = ("norm", "qkv", "rotated", "attn")
    return (*RUNGS, *(Policy(save={n}) for n in names), Policy(save={"qkv", "rotated"}))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_the_same_bits_in_every_policy(heads, tokens, dtype):
    t = block_tensors(heads, dtype)
    with in_pieces(tokens):
        first, *others = (
            results(lambda: block(t, heads, policy=policy), [*t.values()])  # noqa: B023
            for policy in policies(heads)
        )
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("tokens", [512, 4])
def test_backward_twice_gives_the_same_and_changes_no_operand(heads, tokens):
    """What is kept and what is given is never written over, whatever the policy keeps."""
    t, tables = block_tensors(heads), heads.tables()
    given = [*t.values(), *(tables or ())]
    before = [v.detach().clone() for v in given]
    for policy in policies(heads):
        with in_pieces(tokens):
            y = block(t, heads, tables, policy=policy)
            out, dy = y.detach().clone(), torch.randn_like(y)
            first = torch.autograd.grad(y, [*t.values()], dy.clone(), retain_graph=True)
            second = torch.autograd.grad(y, [*t.values()], dy)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert torch.equal(y, out)
        assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


def test_rotary_alone_changes_neither_its_input_nor_its_gradient(heads):
    x, weights, tables = normal(BATCH, SEQ, heads.packed), heads.weights(), heads.tables()
    before, dy = x.detach().clone(), normal(BATCH, SEQ, heads.packed, seed=3).detach()
    given = dy.clone()
    with torch.no_grad():
        op(x, heads, tables, weights)
    y = op(x, heads, tables, weights)
    first = torch.autograd.grad(y, [x, *weights.values()], given, retain_graph=True)
    second = torch.autograd.grad(y, [x, *weights.values()], given)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(x, before) and torch.equal(given, dy)


# Policy -> whether forward and whether the rebuild in backward (None: there is none) write over
# the projection: not where it is kept, nor where its own backward still asks for it.
IN_PLACE = {
    "half": {"full": (True, True), "lean": (True, True), "fast": (True, None),
             "qkv": (False, False), "rotated": (True, None)},
    "norm half": {"full": (True, False), "lean": (True, False), "fast": (False, False),
                  "qkv": (False, False), "rotated": (True, None)},
}  # fmt: skip


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("tiled", [False, True])
def test_where_it_works_in_place(name, tiled):
    heads = HEADS[name]
    t = block_tensors(heads)
    for policy, expected in IN_PLACE[name].items():
        chosen = policy if policy in RUNGS else Policy(save={policy})
        ((call, _),) = calls(lambda: block(t, heads, policy=chosen))  # noqa: B023
        plan = programs(call.graph, call.save, call.wants, tiled)
        found = []
        for steps in (plan.forward, plan.backward):
            made = [s.node for s in steps if s.kind == "compute" and isinstance(s.node, Rotary)]
            found.append(made[0].in_place if made else None)
        assert tuple(found) == expected, policy


@pytest.mark.parametrize("policy", ["full", "fast"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_is_the_projections_memory(name, policy):
    at = {}

    def trace(step, frame):
        for held in ("qkv", "rotated"):
            if held in frame.values:
                at[held] = frame.values[held].data_ptr()

    TRACERS.append(trace)
    try:
        y = block(block_tensors(HEADS[name]), HEADS[name], policy=policy)
    finally:
        TRACERS.remove(trace)
    assert y.requires_grad
    assert (at["qkv"] == at["rotated"]) == IN_PLACE[name][policy][0]


def test_what_is_read_again_is_not_written_over():
    """output = rotated + qkv: the projection outlives the rotation."""
    sketch = Sketch()
    sketch.linear("qkv", "input", "qkv")
    sketch.nodes += [
        Rotary(name="rotated", x="qkv", nhead=4, kv_heads=2, cos="cos", sin="sin"),
        Add(name="output", x="rotated", residual="qkv"),
    ]
    graph = Graph("test", tuple(sketch.nodes), (*linear_params("qkv"), "cos", "sin"))
    heads = HEADS["half"]
    x, weight, tables = normal(2, SEQ, WIDTH), normal(heads.packed, WIDTH), heads.tables()
    named = {"input": x, "qkv.weight": weight, "cos": tables[0], "sin": tables[1]}

    def expected():
        return plain(F.linear(x, weight), heads, tables, {}) + F.linear(x, weight)

    for tokens in (512, 4):
        with in_pieces(tokens):
            compare(lambda: run_block(graph, frozenset(), named), expected, [x, weight])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_kept_bytes_are_the_prediction_and_the_table(heads, dtype):
    t, tables = block_tensors(heads, dtype), heads.tables(dtype)
    item, stat, tokens = dtype.itemsize, max(dtype.itemsize, 4), BATCH * SEQ
    attn = heads.nhead * (heads.width * item + stat)  # and its logsumexp
    base = WIDTH * item + 2 * stat
    table = {"full": base, "lean": base + attn, "balanced": base + attn}
    table |= dict.fromkeys(("fast", "none"), base + attn + heads.packed * item)
    own = [v for n, v in t.items() if n != "x"] + list(tables or ())
    for policy in policies(heads):

        def run(policy=policy):
            return block(t, heads, tables, policy=policy)

        ((call, shapes),) = calls(run)
        kept = kept_bytes(call.graph, call.save, call.wants, shapes, item)
        with SavedBytes(exclude=own) as saved:
            run()
        assert saved.total == sum(kept.values())
        if policy in table:
            assert saved.total == tokens * table[policy]


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("policy", ["full", "fast"])
def test_nothing_else_stays_allocated(name, policy):
    t, tables = block_tensors(HEADS[name]), HEADS[name].tables()

    def run():
        return block(t, HEADS[name], tables, policy=policy)

    ((call, shapes),) = calls(run)
    kept = kept_bytes(call.graph, call.save, call.wants, shapes, 8)
    new = sum(n for name, n in kept.items() if name != "input")
    assert measure_allocations(run).net == new + t["x"].nbytes  # and the output


@pytest.mark.parametrize("policy", RUNGS)
def test_rotary_alone_keeps_its_input_only_for_norms(heads, policy):
    x, weights, tables = normal(BATCH, SEQ, heads.packed), heads.weights(), heads.tables()
    with SavedBytes(exclude=[*weights.values(), *(tables or ())]) as saved:
        op(x, heads, tables, weights, policy=policy)
    assert saved.total == (x.nbytes if heads.norm else 0)


def test_frozen_projections_keep_and_rebuild_no_more_than_heads_need():
    """With x alone wanted, "fast" rebuilds nothing: rotating back reads tables only."""
    heads = HEADS["half"]
    t = {n: v.detach().requires_grad_(n == "x") for n, v in block_tensors(heads).items()}
    ((call, _),) = calls(lambda: block(t, heads, policy="fast"))
    plan = programs(call.graph, call.save, call.wants, False)
    assert not any(step.kind == "compute" for step in plan.backward)


def test_explain_names_the_step():
    heads = HEADS["half"]
    t = block_tensors(heads)

    class Model(torch.nn.Module):
        def forward(self, x):
            return block({**t, "x": x}, heads)

    text = str(explain(Model(), t["x"]))
    assert "rotary_attention_block" in text
    assert "rotated" in text and "pointwise, eager, in place" in text
    assert "backward rotated" in text


# --- errors


@pytest.mark.parametrize("name", ["cos", "sin", "q_norm_weight"])
def test_changing_what_backward_reads_raises(name):
    heads = HEADS["norm half"]
    x, weights, tables = normal(BATCH, SEQ, heads.packed), heads.weights(), heads.tables()
    y = op(x, heads, tables, weights)
    changed = {"cos": tables[0], "sin": tables[1], **weights}[name]
    with torch.no_grad():
        changed.add_(1.0)
    with pytest.raises(RuntimeError, match="inplace"):
        y.sum().backward()


def call(cos=(SEQ, 3), sin=None, qkv=(2, SEQ, 48), nhead=4, kv_heads=2, **weights):
    sizes = {n: torch.zeros(s) if isinstance(s, tuple) else s for n, s in weights.items()}
    cos = torch.zeros(cos) if isinstance(cos, tuple) else cos
    sin = torch.zeros_like(cos) if sin is None else sin
    return lambda: ops.rotary(torch.zeros(qkv), cos, sin, nhead, kv_heads, **sizes)


ONE, ZERO = torch.ones(SEQ, 3), torch.zeros(SEQ, 3)


@pytest.mark.parametrize(
    ("attempt", "error", "parts"),
    [
        (call(qkv=(SEQ, 48)), ValueError, ["qkv", "(7, 48)", "(B, S, 8·E)"]),
        (call(qkv=(2, SEQ, 50)), ValueError, ["qkv", "(2, 7, 50)", "4 query", "2 key"]),
        (call(nhead=3), ValueError, ["3 and 2"]),
        (call(nhead=2.0), TypeError, ["2.0"]),
        (call(cos=(SEQ, 4)), ValueError, ["cos", "(7, 4)", "(7, R/2)", "at most 6"]),
        (call(cos=(SEQ, 0)), ValueError, ["cos", "(7, 0)"]),
        (call(cos=(SEQ - 1, 3)), ValueError, ["cos", "(6, 3)", "(2, 7, R/2)"]),
        (call(cos=(3, SEQ, 3)), ValueError, ["cos", "(3, 7, 3)"]),
        (call(cos=(2, SEQ, 4, 3)), ValueError, ["cos", "(2, 7, 4, 3)"]),
        (call(cos=()), ValueError, ["cos", "()"]),
        (call(sin=torch.zeros(SEQ, 2)), ValueError, ["sin", "(7, 2)", "(7, 3)"]),
        (call(sin=torch.zeros(2, SEQ, 3)), ValueError, ["sin", "(2, 7, 3)", "(7, 3)"]),
        (call(q_norm_weight=(6,)), ValueError, ["go together"]),
        (call(q_norm_weight=(6,), k_norm_weight=(5,)), ValueError, ["k_norm_weight", "(5,)"]),
        (lambda: ops.rotary(torch.zeros(2, SEQ, 48), None, None, 4, 2), ValueError, ["nothing"]),
        (lambda: ops.rotary(torch.zeros(2, SEQ, 48), ONE, None, 4, 2), TypeError, ["NoneType"]),
        (call(cos=ONE.double()), RuntimeError, ["cos", "float64", "float32"]),
        (call(cos=ONE.half()), RuntimeError, ["cos", "float16"]),
        (call(cos=ONE.to("meta")), RuntimeError, ["cos", "meta", "cpu"]),
        (call(sin=ZERO.clone().requires_grad_()), RuntimeError, ["sin requires a gradient"]),
        (call(q_norm_weight=torch.ones(6).double(), k_norm_weight=(6,)), RuntimeError,
         ["q_norm_weight", "float64"]),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_raise_and_are_named(attempt, error, parts):
    with pytest.raises(error) as raised:
        attempt()
    assert all(part in str(raised.value) for part in parts), raised.value


@pytest.mark.parametrize("rope", [ONE, (ONE,), (ONE, None), (ONE, ONE, ONE), 10000.0])
def test_rope_takes_two_tensors(rope):
    t = {n: v.detach().float() for n, v in block_tensors(HEADS["half"]).items()}
    with pytest.raises(TypeError, match=r"rope takes two Tensors, \(cos, sin\)"):
        block(t, HEADS["half"], rope)


def test_tables_of_two_dtypes_raise():
    x = torch.zeros(2, SEQ, 48, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"sin is torch\.bfloat16, cos torch\.float32"):
        ops.rotary(x, ONE, ZERO.bfloat16(), 4, 2)


def test_tables_that_want_a_gradient_serve_where_there_is_none():
    with torch.no_grad():
        ops.rotary(torch.zeros(2, SEQ, 48), ONE.clone().requires_grad_(), ZERO, 4, 2)
