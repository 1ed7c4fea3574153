"""What the fused path does not support: the stock layer's forward, the same numbers, one warning.

The encoder layer's changes are rows of `changes.py`.
"""

import copy
import re
import warnings

import pytest
import torch
from accuracy import assert_bits
from layer_kinds import KINDS, D, F, run
from reference import X, make
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import register_pytree_node

from fused_remat import FusedRematWarning, conversion, convert, revert
from fused_remat.report.allocations import SavedBytes

DOUBLE = torch.float64
IGNORED = pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def set_to(name, make):
    return lambda layer: setattr(layer, name, make(layer))


def hook(name, action=lambda module, args, out: None):
    return lambda layer: layer.get_submodule(name).register_forward_hook(action)


def two_heads(layer):
    return nn.MultiheadAttention(D, 2, batch_first=True, dtype=DOUBLE)


def a_bias_for_q(layer):
    layer.q.register_parameter("bias", nn.Parameter(torch.ones(1, dtype=DOUBLE)))


#: A kind, the change, and its reason.
DECODER = "decoder, post-norm"
FALLBACKS = [
    (DECODER, hook("multihead_attn"), "multihead_attn has hooks"),
    (DECODER, set_to("norm3", lambda _: nn.RMSNorm(D, dtype=DOUBLE)),
     "norm3 is torch.nn.RMSNorm; the fused path supports torch.nn.LayerNorm"),
    (DECODER, set_to("_mha_block", lambda d: lambda *args: 2 * type(d)._mha_block(d, *args)),
     "FusedRematDecoderLayer._mha_block is overridden"),
    (DECODER, set_to("multihead_attn", two_heads),
     "multihead_attn differs from self_attn in num_heads"),
    ("llama", hook("down", lambda module, args, out: 2 * out), "down has hooks"),
    ("llama", set_to("down", lambda _: Doubled(F, D, False, dtype=DOUBLE)),
     "down is test_fallback.Doubled; the fused path supports torch.nn.Linear"),
    ("llama", set_to("norm2", lambda _: nn.LayerNorm(D, dtype=DOUBLE)),
     "norm1 is torch.nn.RMSNorm and norm2 is torch.nn.LayerNorm; the fused path supports norms "
     "of one class"),
    ("llama", a_bias_for_q, "q.bias has shape (1,), expected (24,)"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "reason"), FALLBACKS)
@pytest.mark.parametrize("policy", ["full", "none"])
def test_what_the_fused_path_cannot_serve_runs_under_checkpoint_with_one_warning(
    name, change, reason, policy
):
    kind, found = KINDS[name], []
    stock, fused = kind.pair(policy, dtype=DOUBLE)
    for layer in (stock, fused):
        change(layer)
    fused.load_state_dict(stock.state_dict())
    inputs = [t.requires_grad_() for t in kind.data()[:-1]]
    assert fused.why_not_fused(*inputs) == reason
    own = "its unfused" if kind.is_causal else "PyTorch's own"
    under = "" if policy == "none" else " under torch.utils.checkpoint"
    text = re.escape(f"{type(fused).__name__} runs {own} forward{under}: {reason}")
    torch.manual_seed(1)
    first, saved = (SavedBytes(exclude=[*fused.parameters(), *inputs]) for _ in range(2))
    hooks = first if policy == "full" else torch.enable_grad()
    with pytest.warns(FusedRematWarning, match=text) as seen, hooks:
        fused(*inputs)
    assert [w.filename for w in seen] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for layer in (fused, stock):  # one warning
            torch.manual_seed(1)
            found.append(run(layer, *kind.data()))
        with saved:
            fused(*inputs)
    assert_bits(*found)
    assert policy == "none" or first.total == saved.total == 0


def pair_with_hook(**options):
    layers = make(**options)
    for layer in layers:
        hook("linear1")(layer)
    return layers


@IGNORED
def test_the_fallback_replays_what_the_first_run_read():
    """Parameters passed by functional_call, and training flags."""
    layers = pair_with_hook()
    params = {n: (2 * p).detach().requires_grad_() for n, p in layers[1].named_parameters()}
    found = [torch.func.functional_call(layer, params, (X,)).square().sum() for layer in layers]
    assert_bits(*(torch.autograd.grad(y, list(params.values())) for y in found))
    grads = []
    for layer in pair_with_hook(dropout=0.3):
        torch.manual_seed(0)
        y = layer(X).sum()
        layer.eval()
        grads.append(torch.autograd.grad(y, list(layer.parameters())))
        assert not any(m.training for m in layer.modules())
    assert_bits(*grads)


@IGNORED
def test_the_warning_of_a_plain_call_gives_the_bytes_that_it_keeps():
    _, fused = pair_with_hook(policy="none", dropout=0.1)
    x = torch.randn(900, 2, 8, dtype=DOUBLE)
    with pytest.warns(FusedRematWarning) as shown:
        fused(x)
    with SavedBytes(exclude=fused.parameters()) as saved:
        fused(x)
    assert f"it keeps {saved.total / 2**20:.1f} MiB for" in str(shown[0].message)


def multiplied(name):
    return lambda layer, x: tensor_of(layer, x, name).detach().mul_(3.0)


def another(name, make):
    """Cast or resized through `.data`, which has no version."""
    return lambda layer, x: setattr(t := tensor_of(layer, x, name), "data", make(t.data))


def tensor_of(layer, x, name):
    return x if name == "x" else layer.get_parameter(name)


@IGNORED
@pytest.mark.parametrize(
    "change, message",
    [
        *((multiplied(name), "inplace") for name in ("linear2.weight", "norm1.bias", "x")),
        (another("norm1.weight", torch.Tensor.float), r"'norm1\.weight' again"),
        (another("norm1.weight", lambda p: p[:1].clone()), r"'norm1\.weight' again"),
        (another("x", torch.Tensor.float), "'src' again"),
    ],
)
def test_the_fallback_raises_when_a_parameter_or_the_input_changed(change, message):
    _, fused = pair_with_hook()
    x = X.clone()
    y = fused(x).sum()
    change(fused, x)
    with pytest.raises(RuntimeError, match=message):
        y.backward()


Held = type("Held", (list,), {})  # an entry in pytree without keys, as of many libraries
register_pytree_node(Held, lambda held: ([*held], None), lambda tensors, _: Held(tensors))


class ThatFillsAList(nn.Module):
    def __init__(self, counts):
        super().__init__()
        self.counts = counts
        self.register_buffer("calls", torch.zeros(()))
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, losses, scales, same, held):
        if self.counts:
            self.calls += 1
        hidden = torch.relu(self.up(self.norm(x))) * scales[0]
        losses.append(hidden.square().mean() + (losses[-1] if losses else 0))
        return x + self.down(hidden * same[-1]) + held[0]  # a replay ends at `down`


@IGNORED
@pytest.mark.parametrize("counts", [False, True])
def test_the_callers_list_is_filled_once_and_tensors_in_tuples_do_not_change(counts):
    model = convert(nn.ModuleList([ThatFillsAList(counts).double() for _ in range(2)]))
    grads = []
    for layers in (model, revert(copy.deepcopy(model))):
        for layer in layers:
            layer.up.register_forward_hook(lambda *_: None)  # not traced
        losses, scales = [], (torch.ones((), dtype=DOUBLE),)
        given = losses, scales, losses, Held([torch.ones(8)])  # one list under two names
        y = layers[1](layers[0](X, *given), *given).sum()
        y.add(10 * sum(losses)).backward(retain_graph=not counts)
        assert len(losses) == 2
        grads.append(layers[0].up.weight.grad)
        if layers is model and not counts:
            scales[0].mul_(2)
            with pytest.raises(RuntimeError, match="inplace"):
                y.backward()
    assert_bits(*grads)


def test_patched_classes_and_function_modes_are_noticed(monkeypatch):
    class Doubled(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            return out * 2 if func is torch.nn.functional.linear else out

    stock, fused = make()
    with Doubled(), pytest.warns(FusedRematWarning, match="Doubled"):
        got = fused(X)
    with Doubled():
        assert torch.equal(got, stock(X))
    original = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: original(self, x) * 2)
    with pytest.warns(FusedRematWarning, match="forward was replaced"):
        got = fused(X)
    assert torch.equal(got, stock(X))


@pytest.mark.parametrize(
    ("src", "reason"),
    [
        ("text", "src is str; the fused path supports torch.Tensor"),
        (X.long(), "src is torch.int64; the fused path supports floating-point dtypes"),
        (X[..., :6], "self_attn has embed_dim, kdim and vdim (8, 8, 8), expected 6"),
        (
            X.float(),
            "src is torch.float32 on cpu but self_attn.in_proj_weight is torch.float64 on cpu",
        ),
    ],
)
def test_reasons_name_the_input(src, reason):
    assert make()[1].why_not_fused(src) == reason


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def computed(self, x, scale):
        return x + scale * self.down(torch.relu(self.up(self.norm(x))))


FORWARDS = {
    "positional": lambda self, x, scale, /: self.computed(x, scale),
    "args": lambda self, x, *scales: self.computed(x, *scales),
    "keywords": lambda self, x=None, scale=None, y=None: self.computed(y, scale),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", FORWARDS)
def test_arguments_without_names_are_checkpointed(name, compiled):
    kind = type("Scaled", (Scaled,), {"forward": FORWARDS[name]})
    stock = nn.ModuleList([kind().double()])
    model = convert(copy.deepcopy(stock))
    x, scale = (torch.randn(n, 8, dtype=DOUBLE, requires_grad=True) for n in (3, 1))
    args, kwargs = ((), {"scale": scale, "y": x}) if name == "keywords" else ((x, scale), {})
    run = torch.compile(model[0], backend="eager") if compiled else model[0]
    with pytest.warns(FusedRematWarning, match="under torch.utils.checkpoint: the call passes arg"):
        y = run(*args, **kwargs)
    inputs = (x, scale, *model.parameters())
    got = torch.autograd.grad(y.square().sum(), inputs)
    y = stock[0](*args, **kwargs)
    assert_bits(got, torch.autograd.grad(y.square().sum(), (x, scale, *stock.parameters())))
    assert conversion(model)[0].state == "checkpointed"
