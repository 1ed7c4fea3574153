"""Blocks of two streams that attend together: both results, one of them, or none in use."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused_remat import FusedRematWarning, Policy, conversion, convert, explain, memory_report
from fused_remat.execution.prepare import chunks_of
from fused_remat.policies import PRESETS
from fused_remat.steps.attention import Attention
from fused_remat.steps.streams import Join, Take
from fused_remat.tracing.layer import TracedLayer

WIDTH, HEADS = 32, 4


class Stream(nn.Module):
    """The weights of one stream."""

    def __init__(self, norms: bool, ends: bool = True) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        if norms:
            self.norm_q, self.norm_k = (nn.RMSNorm(WIDTH // HEADS, eps=1e-6) for _ in range(2))
        if ends:
            self.norm2 = nn.LayerNorm(WIDTH, elementwise_affine=False)
            self.out = nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def heads(self, x: Tensor) -> list[Tensor]:
        parts = [layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in self.layers]
        if hasattr(self, "norm_q"):
            parts[:2] = self.norm_q(parts[0]), self.norm_k(parts[1])
        return parts

    @property
    def layers(self):
        return self.q, self.k, self.v

    def end(self, x: Tensor, attn: Tensor, chunks) -> Tensor:
        gate, shift, scale, last = chunks
        x = x + gate * self.out(attn)
        h = self.norm2(x) * (1 + scale) + shift
        return x + last * self.down(F.gelu(self.up(h)))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return x * cos + torch.stack([-b, a], -1).flatten(-2) * sin


class Joint(nn.Module):
    """Two streams, as in Flux and Stable Diffusion 3: `first`, which comes first."""

    def __init__(self, first="text", norms=True, rotary=True, ends=True) -> None:
        super().__init__()
        self.image, self.text = Stream(norms), Stream(norms, ends)
        self.first, self.rotary, self.ends = first, rotary, ends

    def forward(self, hidden_states, encoder_hidden_states, temb, rotary=None):
        streams = {
            "image": (self.image, hidden_states), "text": (self.text, encoder_hidden_states)
        }  # fmt: skip
        order = ["text", "image"] if self.first == "text" else ["image", "text"]
        heads, rest = [], {}
        for name in order:
            own, x = streams[name]
            shift, scale, *rest[name] = own.modulation(F.silu(temb)).unsqueeze(1).chunk(6, -1)
            heads.append(own.heads(own.norm1(x) * (1 + scale) + shift))
        q, k, v = (torch.cat(parts, 2) for parts in zip(*heads, strict=True))
        if self.rotary:
            q, k = rotated(q, *rotary), rotated(k, *rotary)
        attn = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        parts = dict(
            zip(order, attn.split([streams[n][1].shape[1] for n in order], 1), strict=True)
        )
        results = {
            name: own.end(x, parts[name], rest[name])
            for name, (own, x) in streams.items()
            if self.ends or name == "image"
        }
        return results.get("text"), results["image"]


class Single(nn.Module):
    """One stream of the tokens of both, as Flux's single-stream blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.modulation = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.qkv = nn.Linear(WIDTH, 7 * WIDTH)
        self.out = nn.Linear(5 * WIDTH, WIDTH)

    def forward(self, hidden_states, encoder_hidden_states, temb, rotary=None):
        x, n = torch.cat([encoder_hidden_states, hidden_states], 1), encoder_hidden_states.shape[1]
        shift, scale, gate = self.modulation(temb).unsqueeze(1).chunk(3, -1)
        h = self.qkv(self.norm(x) * (1 + scale) + shift)
        qkv, up = h.split([3 * WIDTH, 4 * WIDTH], -1)
        q, k, v = qkv.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attn = F.scaled_dot_product_attention(rotated(q, *rotary), rotated(k, *rotary), v)
        mixed = torch.cat([attn.transpose(1, 2).flatten(2), F.gelu(up, approximate="tanh")], -1)
        x = x + gate * self.out(mixed)
        return x[:, :n], x[:, n:]


class Model(nn.Module):
    def __init__(self, kind, *options, layers=2) -> None:
        super().__init__()
        self.layers = nn.ModuleList([kind(*options) for _ in range(layers)])

    def forward(self, image, text, temb, rotary):
        for layer in self.layers:
            new, image = layer(image, text, temb, rotary)
            text = text if new is None else new
        return image, text


def inputs(batch=2, image=24, text=10, dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()

    angles = torch.rand(text + image, WIDTH // HEADS // 2, generator=generator, dtype=dtype)
    table = angles.repeat_interleave(2, -1)
    tensors = random(batch, image, WIDTH), random(batch, text, WIDTH), random(batch, WIDTH)
    return *tensors, (table.cos(), table.sin())


def grads_of(model, given, uses=(True, True)):
    """Return the results, and all gradients of those of them that are in use."""
    leaves = [t for t in given if isinstance(t, Tensor)]
    for t in (*leaves, *model.parameters()):
        t.grad = None
    outs = model(*given)
    generator = torch.Generator().manual_seed(1)
    dys = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for y in outs]
    pairs = [(y, dy) for y, dy, use in zip(outs, dys, uses, strict=True) if use]
    torch.autograd.backward(*zip(*pairs, strict=True))
    named = {**dict(enumerate(leaves)), **dict(model.named_parameters())}
    return [y.detach() for y in outs], {n: t.grad for n, t in named.items() if t.requires_grad}


def assert_equal(found, expected, slack=1e-10):
    for y, stock in zip(found[0], expected[0], strict=True):
        assert (y - stock).norm() <= slack * stock.norm()
    for name, stock in expected[1].items():
        assert (found[1][name] is None) == (stock is None), name
        if stock is not None:
            assert (found[1][name] - stock).norm() <= slack * (stock.norm() + 1e-2), name


def converted(model, policy="full"):
    model = convert(copy.deepcopy(model), policy=policy)
    assert all(isinstance(layer, TracedLayer) for layer in model.layers)
    return model


KINDS = {
    "text first": (Joint, "text"),
    "image first": (Joint, "image"),
    "no norms": (Joint, "text", False),
    "no rotation": (Joint, "image", True, False),
    "neither": (Joint, "image", False, False),
    "text ends": (Joint, "text", True, True, False),
    "single": (Single,),
}


@pytest.fixture(params=KINDS)
def model(request):
    torch.manual_seed(0)
    return Model(*KINDS[request.param]).double()


@pytest.mark.parametrize("uses", [(True, True), (True, False), (False, True)], ids=str)
def test_gradients_are_stocks_where_one_result_or_both_are_used(model, uses):
    given, fused = inputs(), converted(model)
    expected = grads_of(model, given, uses)
    assert_equal(grads_of(fused, given, uses), expected)
    assert_equal(grads_of(fused, given, uses), expected)
    (kind, *others) = conversion(fused)
    assert not others and kind.state == "converted" and not kind.pieces, conversion(fused)


def test_projections_are_packed_and_joined_once(model):
    fused = converted(model)
    fused(*inputs())
    nodes = fused.layers[0].last_trace.graph.nodes
    joins = [node for node in nodes if isinstance(node, Join)]
    assert len(joins) == 1 and sum(isinstance(node, Take) for node in nodes) <= 2


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("tokens", [10, 24, 1000])
def test_groups_and_tiles(batch, tokens):
    torch.manual_seed(0)
    model, given = Model(Joint).double(), inputs(batch)
    with chunks_of(tokens):
        assert_equal(grads_of(converted(model), given), grads_of(model, given))


def test_presets_have_equal_bits_and_names_in_both_streams():
    torch.manual_seed(0)
    model, given = Model(Joint).float(), inputs(dtype=torch.float32)
    _, expected = grads_of(converted(model), given)
    for policy in (*PRESETS, Policy(save={"image.mid", "text.mid"})):
        fused = converted(model, policy)
        for _ in range(12):  # as steps, and as programs
            _, found = grads_of(fused, given)
            assert all(found[name].equal(grad) for name, grad in expected.items()), policy
        if policy == "balanced":
            kept = fused.layers[0]
            graph = kept.last_trace.graph
            assert {"image.mid", "text.mid", "image.attn", "attn"} & {*graph.names}
            assert {"image.mid", "text.mid"} <= {*graph.roles["stream"]}


def test_predicted_bytes_are_measured():
    torch.manual_seed(0)
    given = inputs(dtype=torch.float32)
    for policy in PRESETS:
        fused = converted(Model(Joint).float(), policy)
        fused(*given)
        report = memory_report(fused, *given)
        layers = [layer for layer in report.layers if layer.ran == "block"]
        assert len(layers) == 2
        for layer, traced in zip(layers, fused.layers, strict=True):
            graph = traced.last_trace.graph
            names = {*graph.inputs, *graph.producer}  # not the tables and the condition
            kept = {a.name: a.bytes for a in layer.activations if a.name in names}
            assert {"input", "memory"} <= kept.keys()
            assert sum(kept.values()) == layer.predicted_bytes, (policy, kept)


def test_a_frozen_stream_and_gradients_of_some_inputs():
    torch.manual_seed(0)
    model, given = Model(Joint).double(), inputs()
    for layer in model.layers:
        layer.text.requires_grad_(False)
    fused = converted(model)
    assert_equal(grads_of(fused, given), grads_of(model, given))
    for wrt in (given[:1], given[1:2], given[2:3], given[:3]):
        (image, text), stock = fused(*given), model(*given)
        found = torch.autograd.grad(image.sum() + text.square().sum(), wrt)
        expected = torch.autograd.grad(stock[0].sum() + stock[1].square().sum(), wrt)
        assert all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("uses", [(True, True), (True, False), (False, True)], ids=str)
def test_an_exception_in_backward_does_not_end_the_run(monkeypatch, uses):
    torch.manual_seed(0)
    model, given = Model(Joint).double(), inputs()
    expected = grads_of(model, given, uses)
    fused = converted(model)
    grads_of(fused, given, uses)
    monkeypatch.setenv("FUSED_REMAT_STRICT", "0")

    def fails(*_):
        raise ValueError("planted")

    monkeypatch.setattr(Attention, "backward", fails)
    with pytest.warns(FusedRematWarning, match="planted"):
        assert_equal(grads_of(fused, given, uses), expected)
    assert_equal(grads_of(fused, given, uses), expected)
    assert {kind.state for kind in conversion(fused)} == {"checkpointed"}


def test_a_graph_is_used_twice_and_a_program_is_shown():
    torch.manual_seed(0)
    model, given = Model(Joint).double(), inputs()
    fused = converted(model)
    image, text = fused(*given)
    (image.sum() + text.sum()).backward(retain_graph=True)
    first = given[0].grad.clone()
    (image.sum() + text.sum()).backward()
    assert torch.allclose(given[0].grad, 2 * first)
    text = str(explain(fused, *given, code=True))
    assert "def backward(" in text and "d_text_mid_2" in text


@pytest.mark.parametrize("kind", [Joint, Single])
def test_autocast(kind):
    torch.manual_seed(0)
    model, given = Model(kind).float(), inputs(dtype=torch.float32)
    image, text, temb, tables = given
    wide = [t.detach().double().requires_grad_() for t in (image, text, temb)]
    wide = *wide, tuple(table.double() for table in tables)
    exact = grads_of(copy.deepcopy(model).double(), wide)[1]
    fused = converted(model)

    def distance(one):
        with torch.autocast("cpu", torch.bfloat16):
            outs, grads = grads_of(one, given)
        assert all(y.dtype == torch.float32 for y in outs)
        far = [float((grads[n].double() - g).norm() / g.norm()) for n, g in exact.items()]
        return sum(far) / len(far)

    assert distance(fused) <= 1.2 * distance(model) < 0.1


class Scaled(nn.Module):
    """A layer that reads an object without attributes, of which another layer has its own."""

    def __init__(self, mark) -> None:
        super().__init__()
        self.norm, self.mark = nn.LayerNorm(WIDTH), mark
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        scale = 2.0 if self.mark is WANTED else 1.0
        return x + scale * self.down(F.gelu(self.up(self.norm(x))))


class Mark:
    def __deepcopy__(self, memo):
        return self


WANTED = Mark()


def test_objects_that_code_tells_apart_do_not_share_a_trace():
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(WANTED), Scaled(Mark())).double()
    x = torch.randn(2, 12, WIDTH, dtype=torch.float64)
    assert torch.allclose(convert(copy.deepcopy(model))(x), model(x))


def test_a_forward_of_another_layer_is_no_removed_hook():
    torch.manual_seed(0)
    model = nn.Sequential(*[Scaled(WANTED) for _ in range(2)]).double()
    x = torch.randn(2, 12, WIDTH, dtype=torch.float64)
    fused = convert(copy.deepcopy(model))
    for one in (model, fused):
        one[1].forward = one[0].forward
    assert torch.allclose(fused(x), model(x))
