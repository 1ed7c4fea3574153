"""Low-rank updates in blocks: results, what is kept and rebuilt, what is refused."""

import copy

import pytest
import torch
from accuracy import assert_bits, assert_close, check_error
from block_inputs import Block, calls, in_pieces, leaves, normal, results
from layer_kinds import KINDS, run
from peft import LoraConfig, inject_adapter_in_model
from reference import EXACT_PRESETS
from reference import causal_block as plain
from torch import nn

from fused_remat import FusedRematLayer, ops
from fused_remat.graph.fusions import MlpBackward, MlpUp
from fused_remat.graph.schedule import kept_bytes, schedule
from fused_remat.report.allocations import SavedBytes, measure_allocations
from fused_remat.steps import low_rank
from fused_remat.steps.operations import FusedRematWarning

BLOCKS = {
    "split": Block(),
    "packed": Block(split=False, gated=False, norm="layer_norm", placement="post", bias=True),
    "sandwich": Block(placement="sandwich", qk_norm=True, kv_heads=1),
}


pytestmark = pytest.mark.usefixtures("one_thread")


def options(block, **more):
    own = {"kv_heads": block.kv_heads, "placement": block.placement, "norm": block.norm}
    return {"nhead": block.nhead, "rope": block.rope(5), **own, **more}


def frozen(weights):
    return {name: w.detach() for name, w in weights.items()}


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("name", BLOCKS)
def test_as_in_plain_pytorch(name, p):
    block = BLOCKS[name]
    x, w, lora = normal(3, 5, block.d, seed=50), block.weights(), block.updates()
    named = leaves(x, w, lora)
    kw = options(block, lora=lora, lora_dropout_p=p, dropout_p=p / 3, seed=7)
    expected = results(lambda: plain(x, w, **kw), list(named.values()))
    found = {}
    for policy in EXACT_PRESETS:
        call = lambda policy=policy: ops.causal_block(x, w, policy=policy, **kw)  # noqa: E731
        with in_pieces():
            found[policy] = results(call, list(named.values()))
    for leaf, a, b in zip(["y", *named], found["full"], expected, strict=True):
        torch.testing.assert_close(a, b, msg=lambda m, leaf=leaf: f"{leaf}: {m}")
    for policy, mine in found.items():
        for leaf, a, b in zip(["y", *named], mine, found["full"], strict=True):
            assert torch.equal(a, b), (policy, leaf)


@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_block_as_in_plain_pytorch(norm_first):
    block = Block(
        d=16, kv_heads=4, split=False, gated=False, norm="layer_norm", bias=True,
        placement="pre" if norm_first else "post",
    )  # fmt: skip
    x, w, lora = normal(2, 5, block.d, seed=50), block.weights(), block.updates()
    kw = {"activation": "gelu", "eps": 1e-5, "lora": lora, "lora_dropout_p": 0.2, "seed": 7}
    own = {"is_causal": False, "placement": block.placement, "norm": block.norm}
    named = [*leaves(x, w, lora).values()]
    found = results(lambda: ops.encoder_block(x, w, 4, norm_first=norm_first, **kw), named)
    torch.testing.assert_close(found, results(lambda: plain(x, w, 4, **own, **kw), named))


@pytest.mark.parametrize("rows", [4096, 2], ids=["whole", "in pieces"])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_float32_adapters_beside_bfloat16(p, rows, monkeypatch):
    monkeypatch.setattr(low_rank, "_ROWS", rows)
    # Of so many tokens that an error is no accident of a few roundings.
    block, low = BLOCKS["split"], torch.bfloat16
    # Two on one layer: rounded after each here, once in PyTorch's sum.
    layers = (*block.linears, "fc1")
    found = []
    for dtype, adapters in ((low, torch.float32), (torch.float64, torch.float64)):
        x = normal(2, 40, block.d, dtype=low, seed=50).detach().to(dtype).requires_grad_()
        w = {n: t.detach().to(low).to(dtype) for n, t in block.weights().items()}
        lora = block.updates(layers, dtype=torch.float32)
        lora = [(n, *(t.detach().to(adapters).requires_grad_() for t in (a, b)), s)
                for n, a, b, s in lora]  # fmt: skip
        named = leaves(x, w, lora)
        kw = options(block, lora=lora, lora_dropout_p=p, seed=7)
        kw["rope"] = tuple(t.to(low).to(dtype) for t in block.rope(40))
        dy = normal(2, 40, block.d, seed=60).detach().to(low).to(dtype)
        ways = (ops.causal_block, plain) if dtype == low else (plain,)
        # With dropout, plain draws the same masks from their definition.
        for way in ways:
            call = lambda way=way, x=x, w=w, kw=kw: way(x, w, **kw)  # noqa: E731
            found.append(results(call, list(named.values()), dy))
    check_error(*found, ["y", *named], computed=low)


def test_one_dropout_mask_an_update_and_none_in_evaluation():
    block = BLOCKS["split"]
    x, w = normal(2, 5, block.d, seed=50), frozen(block.weights())
    update = block.updates(("q",))[0]
    kw = options(block, lora_dropout_p=0.5, seed=3)
    twice = [("q", update[1], update[2], 1.0), ("q", update[1], -update[2], 1.0)]
    with_both = ops.causal_block(x, w, lora=twice, **kw)
    assert not torch.allclose(with_both, ops.causal_block(x, w, **kw))  # two masks
    kw["lora_dropout_p"] = 0.0
    torch.testing.assert_close(
        ops.causal_block(x, w, lora=twice, **kw), ops.causal_block(x, w, **kw)
    )


# What is kept and rebuilt.


def program(block, layers, policy, trained=(), p=0.0, fused=False):
    """The program of a call whose base is frozen but for `trained`; of a whole group."""
    x, w = normal(2, 5, block.d, seed=50), frozen(block.weights())
    for name in trained:
        w[name] = w[name].requires_grad_()
    lora = block.updates(layers)
    kw = options(block, lora=lora, lora_dropout_p=p)
    ((call, _),) = calls(lambda: ops.causal_block(x, w, policy=policy, **kw))
    fusions = frozenset({"linear_act silu", "linear_norm", "mlp_bwd silu"} if fused else ())
    return schedule(call.graph, call.save, frozenset(call.needs_grad), False, fusions)


def test_a_frozen_base_keeps_and_rebuilds_nothing_for_itself():
    block = BLOCKS["split"]
    plan = program(block, ("q", "v"), "fast")
    steps = [str(step) for step in plan.backward]
    # The MLP's activation and attention's own input are what weights alone would ask for.
    assert not {"compute act", "compute qkv", "compute attn"} & set(steps)
    after = steps[steps.index("backward rotated") + 1 :]
    assert after == ["compute norm1", "backward qkv", "backward norm1"]
    assert "compute act" in map(str, program(block, ("fc2",), "fast").backward)
    assert "compute norm2" not in map(str, program(block, ("q",), "none").backward)
    assert "compute norm2" in map(str, program(block, ("fc1",), "none").backward)
    trained = program(block, ("q",), "none", trained=("fc2.weight",))
    assert "compute act" in map(str, trained.backward)


@pytest.mark.parametrize(
    "layers, forward, backward",
    [(("q", "v"), True, True), (("fc2",), True, False), (("gate",), False, False)],
)
def test_what_is_fused_beside_updates(layers, forward, backward):
    """A fused step computes plain layers only, and the gradient of what they alone read."""
    steps = program(BLOCKS["split"], layers, "full", fused=True)
    assert forward == any(isinstance(s.node, MlpUp) for s in steps.forward)
    assert backward == any(isinstance(s.node, MlpBackward) for s in steps.backward)


def test_what_the_update_reads_is_gone_when_backward_is_through_with_it():
    plan = program(BLOCKS["split"], (), "full", p=0.1)
    freed = {name: str(step) for step in plan.backward for name in step.free}
    rebuilt = {step.node.name for step in plan.backward if step.kind == "compute"}
    for i, layer in enumerate(BLOCKS["split"].linears):
        owner = {"q": "qkv", "k": "qkv", "v": "qkv", "fc1": "up"}.get(layer, layer)
        assert freed[f"dropout.lora.{i}"] == f"backward {owner}"
        # What a rebuild has computed serves backward; what is not rebuilt, backward computes.
        assert freed.get(f"lora.{i}") == (f"backward {owner}" if owner in rebuilt else None)
    in_forward = {name: str(step) for step in plan.forward for name in step.free}
    assert in_forward["lora.0"] == "compute qkv"


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("policy", EXACT_PRESETS)
def test_kept_bytes_are_predicted_and_no_more_than_in_full_training(policy, p):
    block = Block(d=48, head_dim=12, hidden=96)
    x = normal(2, 40, block.d, seed=50, dtype=torch.float32)
    w, lora = frozen(block.weights(torch.float32)), block.updates(("q", "v"), dtype=torch.float32)
    kw = options(block, policy=policy, lora_dropout_p=p)
    kw["rope"] = block.rope(40, torch.float32)

    def step():
        return ops.causal_block(x, w, lora=lora, **kw)

    ((call, shapes),) = calls(step)
    predicted = sum(kept_bytes(call.graph, call.save, call.needs_grad, shapes, 4).values())
    own = [*w.values(), *kw["rope"], *(t for u in lora for t in u[1:3])]
    with SavedBytes(exclude=own) as saved:
        step()
    assert saved.total == predicted
    assert measure_allocations(step).net == predicted  # less x, which was there, plus the output
    trained = {name: t.requires_grad_() for name, t in w.items()}
    ((full, shapes),) = calls(lambda: ops.causal_block(x, trained, **kw))
    assert predicted <= sum(
        kept_bytes(full.graph, full.save, full.needs_grad, shapes, 4).values()
    ) + 8 * (p > 0)


def test_no_gradient_buffer_for_a_frozen_base():
    block = Block(d=64, head_dim=16, hidden=2048)
    w, lora = block.weights(torch.float32), block.updates(("q",), dtype=torch.float32)
    x = normal(1, 4, block.d, seed=50, dtype=torch.float32)
    kw = options(block)
    kw["rope"] = block.rope(4, torch.float32)

    def peak(weights):
        step = lambda: ops.causal_block(x, weights, lora=lora, **kw).sum().backward()  # noqa: E731
        step()  # makes what is made once
        for t in (x, *weights.values(), *(t for u in lora for t in u[1:3])):
            t.grad = None
        return measure_allocations(step).peak

    # Of few tokens, the weights' gradients are nearly all that a step allocates.
    weights = sum(t.nbytes for t in w.values())
    assert peak(w) > weights > 10 * peak(frozen(w))


# What is refused.


def test_what_does_not_fit_is_refused():
    block = BLOCKS["split"]
    x, w = normal(2, 5, block.d), block.weights()
    a, b = torch.zeros(3, block.d).double(), torch.zeros(16, 3).double()
    mixed = "A of q is torch.float32 and B is torch.float64"
    cases = [
        ([("qkv", a, b, 1.0)], ValueError, "no layer 'qkv' to update; valid: q, k, v, proj"),
        (
            [("q", a[:, :4], b, 1.0)],
            ValueError,
            r"A of q has shape \(3, 4\), expected \(rank, 12\)",
        ),
        ([("q", a, b[:, :2], 1.0)], ValueError, r"B of q has shape \(16, 2\), expected \(16, 3\)"),
        ([("q", a.half(), b, 1.0)], RuntimeError, "A of q is torch.float16"),
        (
            [("q", a.float(), b, 1.0)],
            RuntimeError,
            mixed,
        ),
        ([("q", a, None, 1.0)], TypeError, "B of q must be a Tensor, got NoneType"),
        ([("q", a, b)], TypeError, r"lora takes \(layer, A, B, scale\)"),
    ]
    for lora, error, message in cases:
        with pytest.raises(error, match=message):
            ops.causal_block(x, w, **options(block, lora=lora))
    with pytest.raises(ValueError, match="lora_dropout_p must be between 0 and 1, got 2"):
        ops.causal_block(x, w, **options(block, lora_dropout_p=2.0))


# Layers of torch.nn, with the real PEFT.


def adapted(layer, targets=("linear1", "linear2"), **config):
    config = {"r": 2, "init_lora_weights": False, "target_modules": list(targets), **config}
    return inject_adapter_in_model(LoraConfig(**config), layer)


def grads(layer, *inputs):
    """Output and gradients of all that wants one."""
    needs_grad = [*inputs, *(p for p in layer.parameters() if p.requires_grad)]
    return results(lambda: layer(*inputs), needs_grad)


@pytest.mark.composes(
    "PEFT", "LoRA on `linear1` and `linear2`", "on `self_attn`, DoRA: ordinary rebuild"
)
@pytest.mark.parametrize("norm_first", [False, True])
def test_peft_on_the_encoder_layer(norm_first, recwarn):
    stock = adapted(nn.TransformerEncoderLayer(8, 2, 16, 0.0, norm_first=norm_first).double())
    fused = FusedRematLayer.from_layer(stock, policy="lean")
    x = normal(5, 2, 8)
    for _ in range(2):
        assert fused.why_not_fused(x) is None
        torch.testing.assert_close(grads(fused, x), grads(stock, x))
        stock.linear1.set_adapter([])  # one of the two is off
    stock.eval()
    with torch.no_grad():  # the stock layer's kernel would ignore the adapters
        torch.testing.assert_close(fused(x), stock.train()(x))
    assert not [w for w in recwarn if w.category is FusedRematWarning]


@pytest.mark.composes("Hugging Face", "PEFT's LoRA on `FusedRematCausalLayer`, also compiled")
@pytest.mark.parametrize(
    ("name", "targets", "count"),
    [("decoder, post-norm", ["linear1", "linear2"], 4), ("llama", ["q", "v", "up", "down"], 8)],
)
def test_peft_on_the_other_layers(name, targets, count):
    kind = KINDS[name]
    stock, fused = (adapted(m, targets, r=3, lora_alpha=6) for m in kind.pair(dtype=torch.float64))
    fused.load_state_dict(stock.state_dict())
    *inputs, dy = kind.data()
    given = kind.given("tables")
    assert fused.why_not_fused(*inputs, **given) is None
    assert sum(p.requires_grad for p in fused.parameters()) == count
    assert_close(run(fused, *inputs, dy, **given), run(stock, *inputs, dy, **given))


@pytest.mark.parametrize(
    "targets, config, reason",
    [
        (["self_attn"], {}, "self_attn is peft.tuners.lora.layer.MultiheadAttention;"),
        (["linear1"], {"use_dora": True}, "adapter 'default' of linear1 is .*DoraLinearVariant"),
        (["linear2"], {"lora_bias": True}, "the adapter 'default' of linear2 has a bias"),
    ],
)
def test_other_adapters_run_under_ordinary_rebuild(targets, config, reason):
    stock = adapted(nn.TransformerEncoderLayer(8, 2, 16, 0.0).double(), targets, **config)
    fused, x = FusedRematLayer.from_layer(copy.deepcopy(stock)), normal(5, 2, 8)
    with pytest.warns(FusedRematWarning, match=reason):
        found = grads(fused, x)
    torch.testing.assert_close(found, grads(stock, x))


def test_an_adapter_around_an_adapter_is_not_passed_over():
    stock, inner = (
        adapted(nn.TransformerEncoderLayer(8, 2, 16, 0.0).double(), ["linear1"]) for _ in range(2)
    )
    stock.linear1.base_layer = inner.linear1
    fused = FusedRematLayer.from_layer(stock)
    assert fused.why_not_fused(normal(5, 2, 8)) == "linear1.base_layer has adapters itself"


def test_an_adapter_of_out_proj_does_not_act():
    # PyTorch reads out_proj's weight and does not call it; PEFT says so in its own docs.
    layer = adapted(nn.TransformerEncoderLayer(8, 2, 16, 0.0).double(), ["out_proj"])
    fused = FusedRematLayer.from_layer(layer)
    x = normal(5, 2, 8)
    assert fused.why_not_fused(x) is None
    torch.testing.assert_close(fused(x), layer(x))
    fused(x).sum().backward()
    assert layer.self_attn.out_proj.lora_A["default"].weight.grad is None


@pytest.mark.parametrize("low", [None, torch.bfloat16])
def test_dtypes_of_adapters_on_a_layer(low):
    """float32 adapters beside 16 bits, and under autocast: as exact as PEFT's own."""
    # GELU: at ReLU's kink a rounding decides between two gradients.
    given = torch.float32 if low else torch.bfloat16
    torch.manual_seed(0)
    stock = adapted(nn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu", norm_first=True).to(given))
    for name, p in stock.named_parameters():
        p.data = p.data.to(torch.float32 if "lora" in name else given)
    fused = FusedRematLayer.from_layer(stock)
    exact = copy.deepcopy(stock).double()
    x = normal(60, 2, 16, dtype=given)
    with torch.autocast("cpu", torch.bfloat16, enabled=low is not None):
        assert fused.why_not_fused(x) is None
        found = [grads(layer, x) for layer in (fused, stock)]
    truth = grads(exact, x.detach().double().requires_grad_())
    names = ["y", "x", *(n for n, p in stock.named_parameters() if p.requires_grad)]
    check_error(*found, truth, names, computed=torch.bfloat16)


def test_pieces_of_an_update_are_summed_in_float32(monkeypatch):
    """Under autocast a product of the stream in 16 bits, converted so many tokens at a time."""
    # As on a GPU: without, products are float32 here.
    monkeypatch.setattr("fused_remat.steps.linear._cpu_has_native", lambda dtype: True)
    torch.manual_seed(0)
    # A of 128 numbers: that errors of two orders of sums differ is no accident of a few.
    stock = adapted(nn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu"), ["linear1"], r=8)
    fused, x = FusedRematLayer.from_layer(stock), normal(200, 2, 16, dtype=torch.float32)
    exact = copy.deepcopy(stock).double()
    truth = grads(exact, x.detach().double().requires_grad_())[2]
    errors = []
    for rows in (4096, 8):
        monkeypatch.setattr(low_rank, "_ROWS", rows)
        with torch.autocast("cpu", torch.bfloat16):
            found = grads(fused, x)[2]  # of A
        errors.append((found.double() - truth).norm())
    # Of a dozen seeds at most 1.06; of 50 sums in 16 bits, which round 50 times, 1.5 to 2.5.
    assert errors[1] <= 1.2 * errors[0]


@pytest.mark.parametrize("name", ["encoder, post-norm", "llama"])
def test_a_compiled_layer_has_the_same_bits(name):
    torch._dynamo.reset()
    kind, found = KINDS[name], []
    targets = ["q", "v", "up", "down"] if kind.is_causal else ["linear1", "linear2"]
    layer = adapted(kind.pair()[1], targets, lora_dropout=0.2)
    for way in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        x = kind.data(torch.float32)[0].requires_grad_()
        torch.manual_seed(0)
        y = way(x, **kind.given("tables", torch.float32))
        params = [p for p in layer.parameters() if p.requires_grad]
        found.append([y, *torch.autograd.grad(y.square().sum(), [x, *params])])
    assert_bits(*found)
