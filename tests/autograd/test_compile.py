"""torch.compile: the layer and every op, whole graphs, bit for bit, keeping what eager mode keeps.

Most run under "aot_eager": Dynamo and AOTAutograd decide what is traced and kept, and its products
are eager mode's own, so results must be equal. Two run Inductor's code as well.
"""

import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from block_inputs import results
from op_cases import CASES, bounds, key_lengths
from reference import EXACT_PRESETS
from same_bits import assert_same_bits, step
from tiers import exhaustive
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from fused_remat import FusedRematLayer, FusedRematWarning, Policy
from fused_remat.autograd import run_block
from fused_remat.graph.build import norm_graph
from fused_remat.report.allocations import SavedBytes
from fused_remat.spec import NormSpec

CAUSAL = torch.ones(6, 6, dtype=torch.bool).triu(1)
FLOAT = torch.zeros(6, 6).masked_fill(CAUSAL, -torch.inf)
PADDING = torch.zeros(3, 6, dtype=torch.bool)
PADDING[1, 4:] = True


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def make(policy="full", **kwargs):
    torch.manual_seed(0)
    options = {"dropout": 0.1, "norm_first": True, "batch_first": True, "activation": "gelu"}
    return FusedRematLayer(16, 2, 32, policy=policy, **{**options, **kwargs})


def compiled(module, backend="aot_eager", **kwargs):
    return torch.compile(module, fullgraph=True, backend=backend, **kwargs)


def src(batch=3, seq=6):
    return torch.randn(batch, seq, 16, generator=torch.Generator().manual_seed(batch))


def assert_equal(got, expected):
    """The same bits, and an output of the same strides."""
    strides = [[s for s, n in zip(y.stride(), y.shape, strict=True) if n > 1]
               for y in (got[0], expected[0])]  # fmt: skip
    assert strides[0] == strides[1]
    assert_same_bits(got, expected)


def kept_by(call, module, shape):
    with SavedBytes(exclude=module.parameters()) as saved:
        call(src(*shape).requires_grad_())
    return saved.total


def assert_as_eager(call, module, x):
    assert_equal(step(call, module, x), step(module, module, x))


@pytest.mark.composes(
    "torch.compile",
    "the layer, `fullgraph=True`, every preset, dropout, batch and sequence dynamic",
    limits="an activation function of your own, or hooks on submodules: PyTorch's own forward, "
    "with a warning, and what is kept is the compiler's choice; hooks registered after compiling "
    "are not seen, as of any module; `is_grads_batched` raises",
)
@pytest.mark.composes(
    "torch.compile",
    "what is kept: the same bytes as in eager mode, every preset",
    limits="`activation_memory_budget` below 1 is obeyed (it rebuilds more than the policy says); "
    "with dropout it raises, since PyTorch would draw again in backward",
)
@pytest.mark.parametrize(
    ("policy", "norm_first"),
    [
        *((preset, i % 2 == 0) for i, preset in enumerate(EXACT_PRESETS)),
        (Policy(save={"attn", "up"}), False),
    ],
    ids=str,
)
def test_every_preset_bit_for_bit_in_one_dynamic_graph(policy, norm_first):
    layer = make(policy, norm_first=norm_first)
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    frames = set()
    for shape in ((3, 6), (2, 700)):  # the second is two groups in eager mode
        assert_as_eager(call, layer, src(*shape))
        frames.add(counter.frame_count)
        assert kept_by(call, layer, shape) == kept_by(layer, layer, shape)
    assert len(frames) == 1  # no compilation after the first call


def training(trained):
    """A layer with the parameters frozen for which `trained(name)` is false."""
    layer = make("lean")
    for name, p in layer.named_parameters():
        p.requires_grad_(trained(name))
    return layer


def encoder(policy="lean", norm_first=True, dropout=0.1, layers=3):
    layer = make(policy, norm_first=norm_first, dropout=dropout)
    return nn.TransformerEncoder(layer, layers, nn.LayerNorm(16), enable_nested_tensor=False)


#: The module, its input, and the arguments of forward.
AS_EAGER = {
    "bool mask": (make, src, {"src_mask": CAUSAL}),
    "float mask": (make, src, {"src_mask": FLOAT}),
    "hint": (make, src, {"src_mask": CAUSAL, "is_causal": True}),
    "masks of different dtypes": (make, src, {"src_mask": FLOAT, "src_key_padding_mask": PADDING}),
    "a mask that wants a gradient": (make, src, {"src_mask": FLOAT.exp().requires_grad_()}),
    "padding": (
        lambda: make(batch_first=False), lambda: src().transpose(0, 1),
        {"src_key_padding_mask": PADDING},
    ),
    "relu": (lambda: make(activation="relu"), src, {}),
    "silu": (lambda: make(activation=F.silu), src, {}),
    "gelu_tanh": (lambda: make(activation=nn.GELU(approximate="tanh")), src, {}),
    "one sequence, no bias": (lambda: make(bias=False), lambda: src()[0], {}),
    "half precision": (lambda: make().bfloat16(), lambda: src().bfloat16(), {}),
    "frozen weights": (
        lambda: training(lambda name: not name.startswith(("linear1", "norm2.weight"))), src, {}
    ),
    "biases alone": (lambda: training(lambda name: name.endswith("bias")), src, {}),
    "nn.TransformerEncoder": (encoder, src, {}),
    "nn.TransformerEncoder, causal": (encoder, src, {"mask": CAUSAL, "is_causal": True}),
    "nn.TransformerEncoder, padding": (encoder, src, {"src_key_padding_mask": PADDING}),
}  # fmt: skip


@pytest.mark.composes("torch.compile", "`nn.TransformerEncoder` around it, with masks")
@pytest.mark.parametrize("case", AS_EAGER)
def test_one_graph_as_in_eager_mode(case):
    make_module, make_x, kwargs = AS_EAGER[case]
    module, x = make_module(), make_x()
    more = [mask for mask in kwargs.values() if getattr(mask, "requires_grad", False)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Support for mismatched")
        expected = step(module, module, x, more=more, **kwargs)
    assert_equal(step(compiled(module), module, x, more=more, **kwargs), expected)


@pytest.mark.composes("torch.compile", "Inductor, forward and backward, dropout as in eager mode")
def test_inductor():
    model = encoder("balanced", layers=1)
    call = compiled(model, "inductor", dynamic=True)
    for shape in ((3, 6), (4, 9)):
        # The same blocks; the last norm is Inductor's own code, within a hundred roundings.
        *steps, _, _ = zip(*(step(c, model, src(*shape)) for c in (call, model)), strict=True)
        assert all((g - e).norm() <= 1e-5 * e.norm() for g, e in steps)


@pytest.mark.parametrize("why", ["hooks", "function"])
def test_what_the_fused_path_cannot_serve_is_pytorchs_own_and_said(why):
    layer = make(dropout=0.0, activation=torch.sin if why == "function" else "gelu")
    if why == "hooks":
        layer.linear1.register_forward_hook(lambda module, args, out: out * 2)
    with pytest.warns(FusedRematWarning, match="compiled, runs PyTorch's own forward.*" + why):
        got = step(compiled(layer), layer, src())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FusedRematWarning)
        expected = step(layer, layer, src())
    torch.testing.assert_close(got[:-2], expected[:-2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("setting", [{"activation_memory_budget": 0.5},
                                     {"aggressive_recomputation": True}], ids=str)  # fmt: skip
def test_a_budget_under_which_dropout_would_be_drawn_again_raises(setting):
    """PyTorch draws its own dropout again there: silently wrong gradients."""
    layer = make()
    with torch._functorch.config.patch(**setting):
        with pytest.raises(Exception, match=f"{next(iter(setting))}.* drawn again"):
            compiled(layer)(src())
        with torch.no_grad():
            compiled(layer)(src())


# --- autocast


@pytest.mark.composes("torch.compile", "under autocast, as in eager mode")
@pytest.mark.parametrize(
    ("policy", "norm_first"),
    [("full", True), ("lean", False), exhaustive("fast", True), exhaustive("none", False)],
)
def test_autocast(policy, norm_first):
    """Around the compiled layer or inside what is compiled: the block has its dtypes written."""
    layer = make(policy, norm_first=norm_first)

    def inside(x):
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x)

    calls = inside, compiled(inside, dynamic=True)
    found = [step(call, layer, src()) for call in calls]
    kept = [kept_by(call, layer, (3, 6)) for call in calls]
    with torch.autocast("cpu", torch.bfloat16):
        found.append(step(compiled(layer), layer, src()))
    assert found[0][0].dtype == torch.float32 and kept[0] == kept[1]
    assert_equal(found[1], found[0])
    assert_equal(found[2], found[0])


# --- the functional ops


# test_opaque_ops.py has every operation as the compiler sees it: the custom operator.
OPS = [name for name in CASES if name != "mlp_custom"]


@pytest.mark.composes(
    "torch.compile",
    "every functional op, `fullgraph=True`",
    limits="an activation function of your own runs in eager mode: a graph break; values of "
    "lengths and bounds are checked when they are used",
)
@pytest.mark.parametrize("name", [*OPS[::3], *(exhaustive(n) for n in OPS if n not in OPS[::3])])
def test_ops(name):
    case = CASES[name]
    options = {"seed": 3} if case.dropout else {}

    def call(tensors):
        return case.op(tensors, 0.3 if case.dropout else 0.0, policy="none", **options)

    for batch, seq in ((2, 5), (3, 40)):
        tensors = case.tensors(batch, seq)
        x = next(iter(tensors.values()))
        bounds(x.shape), key_lengths(x.shape)  # made outside, and once
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")
            whole = compiled(call, dynamic=True)
            got = results(lambda: whole(tensors), list(tensors.values()))  # noqa: B023
        assert_equal(got, results(lambda: call(tensors), list(tensors.values())))  # noqa: B023


def test_a_function_as_activation_breaks_the_graph_and_is_right():
    case = CASES["mlp_custom"]
    tensors = case.tensors()
    leaves = list(tensors.values())

    def call(t):
        return case.op(t, 0.3, seed=3) * 2

    broken = torch.compile(call, backend="aot_eager")
    assert_equal(results(lambda: broken(tensors), leaves), results(lambda: call(tensors), leaves))
    torch._dynamo.reset()  # it remembers which functions it gave up
    with pytest.raises(torch._dynamo.exc.Unsupported, match="activation function of the caller's"):
        compiled(call)(tensors)


def test_ops_draw_seeds_of_their_own_in_the_graph():
    """Equal calls on equal input: a compiler that merges equal calls would drop the same."""
    case, drawn = CASES["mlp"], []
    tensors = case.tensors()

    def twice(tensors):
        return case.op(tensors, 0.5), case.op(tensors, 0.5)

    for call in (compiled(twice), twice):
        torch.manual_seed(5)
        drawn.append([*call(tensors), *call(tensors)])
    assert_equal(*drawn)
    assert not torch.equal(*drawn[0][:2]) and not torch.equal(*drawn[0][1:3])


def test_a_graph_without_a_text_says_what_to_do():
    graph = replace(norm_graph(NormSpec(kind="rms_norm", eps=1e-6)), text="")
    with pytest.raises(Exception, match="has no text: build it in a function marked"):
        compiled(lambda x: run_block(graph, "full", {"input": x}))(src())
