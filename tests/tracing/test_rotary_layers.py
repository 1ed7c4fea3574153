"""Rotary embeddings and norms of heads become one step, however a layer writes them."""

from __future__ import annotations

import copy

import pytest
import rotary_layers as layers
import torch
from rotary_layers import NANO, ROTATIONS, WIDTH, turns
from test_recorder import Told, graphs, normal, same_step, step, trace_counts
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fused_remat import convert
from fused_remat.execution import observe
from fused_remat.report.allocations import SavedBytes
from fused_remat.steps.attention import Attention
from fused_remat.steps.replay import Replay
from fused_remat.steps.rotary import Rotary
from fused_remat.tracing.layer import KNOWN

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
#: Layers rotate in float32 in a model of any dtype; blocks in float64 in one of float64.
TOLERANCES = dict(zip(DTYPES, (1e-6, 1e-5, 0.05), strict=True))
DECODER = "Norm Linear Rotary Attention Linear Norm Linear Linear MLPActivation Linear"
SHAPES = ((2, 20), (1, 9), (3, 4))
TABLE = ROTATIONS["(S, R/2)"]


@pytest.fixture(autouse=True)
def told():
    """Every test traces its layers itself; none of them is left."""
    KNOWN.clear()
    found = Told()
    observe.DECISIONS.append(found.observe)
    yield found
    observe.DECISIONS.remove(found.observe)
    assert not found.reasons()


class Model(nn.Module):
    """Two layers."""

    def __init__(self, layer):
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(2))

    def forward(self, x: Tensor, *args: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, *args)
        return x


def pair(layer, dtype: torch.dtype, policy: str = "full") -> tuple[nn.Module, nn.Module]:
    """Return a model and a converted copy; complex buffers stay complex."""
    torch.manual_seed(0)
    stock = Model(layer)
    for p in stock.parameters():
        p.data = (p.data + 0.1 * torch.randn(p.shape)).to(dtype)
    return stock, convert(copy.deepcopy(stock), policy=policy)


def sequence(model: nn.Module) -> str:
    """Return the steps of both layers, in which no report names a replay."""
    one, two = graphs(model)
    assert one == two
    assert not model.layers[0].last_trace.block.replayed
    return " ".join(type(node).__name__ for node in one.nodes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROTATIONS)
def test_rotations(name, dtype):
    rotate, tables = ROTATIONS[name]
    stock, model = pair(lambda: layers.Rotating(rotate), dtype)
    for b, s in SHAPES:
        same_step(stock, model, normal(b, s, WIDTH).to(dtype), *tables(b, s),
                  tolerance=TOLERANCES[dtype])  # fmt: skip
    assert sequence(model) == DECODER
    assert trace_counts(model) == [1, 0]


@pytest.mark.parametrize("policy", ["full", "balanced", "none"])
@pytest.mark.parametrize("kind", ["Positions", "NormedHeads", "Groups"])
def test_layers_of_libraries(kind, policy):
    rotate, tables = TABLE
    for dtype in DTYPES:
        stock, model = pair(lambda: getattr(layers, kind)(rotate), dtype, policy)
        for b, s in SHAPES:
            at = torch.stack([torch.arange(s) + i for i in range(b)])
            given = (at,) if kind == "Positions" else tables(b, s)
            x, slack = normal(b, s, WIDTH).to(dtype), TOLERANCES[dtype]
            same_step(stock, model, x, *given, tolerance=slack)
            if kind == "Positions":
                same_step(stock, model, x, tolerance=slack)
        rotary = "Replay Rotary" if kind == "Groups" else "Rotary"  # the replay sorts the heads
        assert sequence(model) == DECODER.replace("Rotary", rotary)


@pytest.mark.parametrize("name", ["in the layer", "two axes", "(B, S, R/2)", "positions"])
def test_no_table_is_kept_that_a_checkpoint_does_not_keep(name):
    """Statistics of two norms in each layer, of four bytes for each token, are kept as well."""
    b, s = 2, 160
    at = torch.stack([torch.arange(s) + i for i in range(b)])
    rotate, tables = ROTATIONS.get(name, ROTATIONS["rows and columns one by one"])
    layer = layers.Positions if name == "positions" else layers.Rotating
    stock, model = pair(lambda: layer(rotate), torch.float32)
    given = (at,) if name == "positions" else tables(b, s)
    x = normal(b, s, WIDTH).float().requires_grad_()

    def kept(run) -> int:
        with SavedBytes(exclude=[*stock.buffers(), *model.buffers(), *model.parameters(),
                                 *stock.parameters(), *given]) as saved:  # fmt: skip
            run()
        return saved.total

    def checkpointed() -> Tensor:
        y = x
        for each in stock.layers:
            y = checkpoint(each, y, *given, use_reentrant=False)
        return y

    model(x, *given)
    assert kept(lambda: model(x, *given)) == kept(checkpointed) + 2 * 2 * 4 * b * s


def test_a_table_is_a_view():
    _, model = pair(lambda: layers.Rotating(TABLE[0]), torch.float32)
    x, turn = normal(2, 20, WIDTH).float(), turns(20)
    model(x, turn)
    trace = model.layers[0].last_trace
    (rotary,) = [node for node in trace.graph.nodes if isinstance(node, Rotary)]
    tensors = trace.bind(model.layers[0], {}, {"x": x, "a": turn})[0]
    assert all(tensors[n].untyped_storage().data_ptr() == turn.untyped_storage().data_ptr()
               for n in (rotary.cos, rotary.sin))  # fmt: skip


def test_dropout():
    stock, full = pair(lambda: layers.Dropping(TABLE[0]), torch.float32)
    x, turn = normal(2, 20, WIDTH).float(), turns(20)
    step(full, x, turn)
    expected = step(full, x, turn, seed=7)
    for policy in ("fast", "none"):
        model = convert(copy.deepcopy(stock), policy=policy)
        step(model, x, turn)
        found = step(model, x, turn, seed=7)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not torch.equal(step(full, x, turn, seed=8)["the result"], expected["the result"])
    stock.eval(), full.eval()
    same_step(stock, full, x, turn, tolerance=1e-5)
    assert "Rotary" in sequence(full)


def test_tables_of_queries_and_keys_that_are_equal_at_first():
    stock, model = pair(lambda: layers.TwoTables(TABLE[0]), torch.float64)
    x, turn = normal(2, 20, WIDTH), turns(20)
    for other in (turn, turn.clone(), turn.flip(0)):
        same_step(stock, model, x, turn, other, tolerance=1e-6)


def test_a_rotation_that_is_learned():
    stock, model = pair(lambda: layers.Learned(TABLE[0]), torch.float64)
    for b, s in SHAPES:
        found = same_step(stock, model, normal(b, s, WIDTH), tolerance=1e-6)
        assert found["d layers.0.speeds"].abs().sum() > 0
    assert "Rotary" not in sequence(model)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_latent_attention(dtype):
    """Two replays rotate: one makes keys of two activations, one of which all heads share."""
    stock, model = pair(lambda: layers.Latent(TABLE[0]), dtype)
    for b, s in SHAPES:
        same_step(stock, model, normal(b, s, WIDTH).to(dtype), turns(s, 4),
                  tolerance=TOLERANCES[dtype])  # fmt: skip
    graph = graphs(model)[0]
    (attention,) = [node for node in graph.nodes if isinstance(node, Attention)]
    by_name = {node.name: node for node in graph.nodes}
    kinds = [type(by_name[name]) for name in (attention.q, attention.k, attention.v)]
    assert kinds == [Replay] * 3 and not model.layers[0].last_trace.block.replayed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", NANO)
def test_variants_of_nanogpt(kind, dtype):
    stock, model = pair(kind, dtype)
    own = kind in (layers.Nano, layers.SoftCapped)
    for b, s in SHAPES:
        x, other = (normal(b, s, WIDTH, seed=i).to(dtype) for i in range(2))
        given = () if own else (other.requires_grad_(),)
        # Sums over all elements, as factors' gradients are, cancel in bfloat16.
        same_step(stock, model, x, *given, tolerance=2 * TOLERANCES[dtype])
    expected = "Norm Linear Rotary Attention Linear Norm Linear MLPActivation Linear"
    if kind in (layers.Skip, layers.Mixed):
        expected = f"Replay {expected}"
    if issubclass(kind, layers.ValueEmbedding):
        expected = expected.replace("Rotary", "Rotary Linear Replay")
    if kind is layers.Unrotated:
        expected = expected.replace("Rotary Linear", "Replay Replay")
    if kind is layers.GatedValueEmbedding:
        expected = expected.replace("Rotary", "Rotary Replay Linear Linear Replay")
    assert sequence(model) == expected
    (attention,) = [node for node in graphs(model)[0].nodes if isinstance(node, Attention)]
    assert attention.spec.softcap == pytest.approx(15.0 if kind is layers.SoftCapped else 0.0)


@pytest.mark.parametrize("name", ["llama3", "deepseek_v3"])
def test_layers_of_torchtitan(name):
    """With PyTorch's attention in place of its own, which needs masks, and without experts."""
    library = pytest.importorskip(f"torchtitan.models.{name}")
    attention = pytest.importorskip("torchtitan.models.common.attention")
    more = {} if name == "llama3" else {"moe_comm_backend": "standard"}
    configs = getattr(library, "llama3_configs" if name == "llama3" else "deepseekv3_configs")
    config = configs["debugmodel"](attn_backend="varlen", **more)
    config.layers = config.layers[:1]
    config.layers[0].attention.inner_attention = attention.ScaledDotProductAttention.Config()
    torch.manual_seed(0)
    stock = config.build()
    stock.init_states()
    model = convert(copy.deepcopy(stock))
    for b, s in SHAPES:
        tokens = torch.randint(config.vocab_size, (b, s))
        places = torch.stack([torch.arange(s) + i for i in range(b)])
        for at in (None, places)[:b]:  # those of one sequence are squeezed
            for each in (stock, model):
                each.zero_grad()
                y = each(tokens, positions=at)
                (y * normal(*y.shape, seed=2)).sum().backward()
            for mine, theirs in zip(model.parameters(), stock.parameters(), strict=True):
                assert (mine.grad - theirs.grad).norm() <= 1e-5 * theirs.grad.norm()
    trace = model.layers["0"].last_trace
    assert not trace.block.replayed
    assert any(isinstance(node, Rotary) for node in trace.graph.nodes) == (name == "llama3")
