"""Position biases with gradients, and attention in windows: T5's and Swin's layers as blocks."""

import copy
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from models import build, main_output
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fused_remat import FusedRematWarning, conversion, convert, explain, revert, set_policy
from fused_remat.convert import fused_layers
from fused_remat.execution.prepare import chunks_of
from fused_remat.layers.converted import Stage
from fused_remat.steps.attention import Attention
from fused_remat.steps.replay import Reorder, Replay
from fused_remat.tracing.layer import KNOWN
from fused_remat.tracing.program import layout_of_heads
from fused_remat.tracing.sizes import Size

transformers = pytest.importorskip("transformers")
PRESETS = ("full", "lean", "balanced", "fast", "none")
TABLES = {"t5": "relative_attention_bias", "swin": "relative_position_bias_table"}
_SHIFTED = {
    "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4],
    "window_size": 4, "drop_path_rate": 0.0, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def made(name):
    if name == "swin":  # the one of `models` has windows of the entire image in its last stage
        config = transformers.SwinConfig(**_SHIFTED)
        torch.manual_seed(0)
        model = transformers.SwinModel(config).train()
        batch = {"pixel_values": torch.randn(8, 3, 32, 32)}
    else:
        model, batch = build(name)
    is_float = {k for k, t in batch.items() if torch.is_tensor(t) and t.is_floating_point()}
    wide = {k: t.double() if k in is_float else t for k, t in batch.items()}
    return model.double(), wide


def step(model, batch):
    model.zero_grad()
    torch.manual_seed(1)
    y = main_output(model(**batch))
    (y * torch.linspace(-1.0, 1.0, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
    return y.detach(), {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


def steps(model):
    return [node for m in fused_layers(model).values() for node in m.last_trace.graph.nodes]


@pytest.fixture(autouse=True)
def no_layer_falls_back():
    with warnings.catch_warnings():
        warnings.simplefilter("error", FusedRematWarning)
        yield


@pytest.mark.parametrize("name", TABLES)
def test_gradients_of_a_table_are_exact_and_presets_have_equal_bits(name):
    stock, batch = made(name)
    y, grads = step(stock, batch)
    assert any(TABLES[name] in key for key in grads)
    found = {}
    for preset in PRESETS:
        model = convert(copy.deepcopy(stock), policy=preset)
        step(model, batch)
        found[preset] = step(model, batch)
    # T5's code computes norms and softmax in float32.
    slack = 2e-6 if name == "t5" else 1e-9
    assert (found["full"][0] - y).norm() <= slack * y.norm()
    assert found["full"][1].keys() == grads.keys()
    # Layer norms' statistics and the bias of keys, which softmax ignores, are sums near zero.
    least = slack * max(g.norm() for g in grads.values())
    for key, grad in grads.items():
        assert (found["full"][1][key] - grad).norm() <= slack * grad.norm() + least, key
    for preset in PRESETS[1:]:
        assert torch.equal(found[preset][0], found["full"][0]), preset
        assert all(torch.equal(g, found["full"][1][k]) for k, g in found[preset][1].items()), preset


def test_attention_of_swin_is_a_step_in_windows():
    model, batch = made("swin")
    convert(model)
    step(model, batch)
    step(model, batch)
    assert {kind.state for kind in conversion(model)} == {"converted"}
    nodes = steps(model)
    # Images of 8 x 8 and of 4 x 4 patches, in windows of 4 x 4.
    attention = [node for node in nodes if isinstance(node, Attention)]
    assert [node.windows for node in attention] == [4, 4, 1, 1]
    assert all(node.mask for node in attention)
    moves = [type(node) for node in nodes if isinstance(node, Replay)]
    assert moves == [Reorder] * 4, "a partition and its inverse in each of two layers"


class Mixed(nn.Module):
    """An MLP on tokens that `move` reorders, and adds in their new places."""

    def __init__(self, move):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.move = move

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.move(self.norm(x)))))


def _shifted(x):
    grid = torch.roll(x.view(len(x), 4, -1, 16), (1, -2), (1, 2))
    return grid.transpose(1, 2).reshape(x.shape)


@pytest.mark.parametrize(
    "move, kind",
    [(_shifted, Reorder), (lambda x: x.flip(1), Reorder), (lambda x: _shifted(x.flip(2)), Replay),
     (lambda x: torch.cat([x[:, 1:], x[:, 1:2]], 1), Replay),
     (lambda x: x.float().roll(1, 1).to(x.dtype), Replay)],
    ids=["shifted", "flipped", "columns too", "a token again", "rounded"],
)  # fmt: skip
def test_tokens_in_another_order(move, kind):
    torch.manual_seed(0)
    stock = nn.Sequential(Mixed(move), Mixed(move)).double()
    model, inputs = convert(copy.deepcopy(stock)), [torch.randn(3, n, 16) for n in (24, 24, 32)]
    for x in inputs:
        ours, theirs = ([x.double().requires_grad_()] for _ in range(2))
        with chunks_of(24):  # a sequence at a time
            for one, given in ((model, ours), (stock, theirs)):
                one.zero_grad()
                y = one(*given)
                y.square().sum().backward()
                given += [y, *[p.grad for p in one.parameters()]]
        for mine, other in zip(
            (ours[0].grad, *ours[1:]), (theirs[0].grad, *theirs[1:]), strict=True
        ):
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)
    assert {each.state for each in conversion(model)} == {"converted"}
    assert [type(node) for node in steps(model) if isinstance(node, Replay)] == [kind] * 2


def test_dropout_in_windows_is_drawn_by_sequence():
    model, batch = made("swin")
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.3
    convert(model)
    step(model, batch)
    first = step(model, batch)
    set_policy(model, "*", "fast")
    second = step(model, batch)
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(g, first[1][k]) for k, g in second[1].items())


@pytest.mark.parametrize("policy", ["full", "balanced"])
def test_a_stage_keeps_one_input_as_with_its_own_checkpointing(policy):
    model, batch = made("swin")
    stages = [m for m in model.modules() if type(m).__name__ == "SwinStage"]
    convert(model, policy=policy)
    for _ in range(2):  # in the first one layers change, and run plainly
        step(model, batch)
    kept = []

    def pack(t):
        kept.append(t.shape)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model.encoder.layers[1](torch.randn(8, 16, 32).double().requires_grad_(), (4, 4))
    assert (kept.count((8, 16, 32)) == 1) == (policy == "full")
    assert all(isinstance(stage, Stage) for stage in stages)
    revert(model)
    assert not any(isinstance(stage, Stage) for stage in stages)


def test_a_stage_repeats_its_forward_once():
    """Layers keep products in a stage that runs again, instead of computing them a third time."""
    model, batch = made("swin")
    convert(model)
    found = []
    for policy, run in (("full", step), ("fast", step), ("fast", main_output_of)):
        set_policy(model, "*", policy)
        for _ in range(2):
            run(model, batch)
        with FlopCounterMode(display=False) as counter:
            run(model, batch)
        found.append(counter.get_total_flops())
    repeated, once, forward = found
    assert repeated <= once + forward


def main_output_of(model, batch):
    with torch.no_grad():
        return main_output(model(**batch))


class Counted(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return self.inner(x)


def test_a_stage_with_a_layer_that_changes_does_not_run_again():
    model, batch = made("swin")
    block = model.encoder.layers[1].blocks[0]
    block.layernorm_after = counted = Counted(block.layernorm_after)
    convert(model)
    with pytest.warns(FusedRematWarning, match="its forward changes layernorm_after.count"):
        for i in range(4):
            step(model, batch)
            assert counted.count == i + 1


def test_threads_share_a_stage():
    model, batch = made("swin")
    convert(model)
    for _ in range(3):
        _, expected = step(model, batch)
    given, parameters = batch["pixel_values"], [*model.parameters()]
    names = [name for name, _ in model.named_parameters()]

    def grads(_):
        y = main_output(model(pixel_values=given))
        weights = torch.linspace(-1.0, 1.0, y.numel(), dtype=y.dtype).view(y.shape)
        found = torch.autograd.grad((y * weights).sum(), parameters, allow_unused=True)
        return {n: g for n, g in zip(names, found, strict=True) if g is not None}

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(2) as pool:
            results = [*pool.map(grads, range(6))]
    finally:
        sys.setswitchinterval(interval)
    for found in results:
        assert all(grad.allclose(found[name]) for name, grad in expected.items())
    assert {layer.policy for layer in fused_layers(model).values()} == {"full"}


def test_images_of_many_sizes():
    """When a layer is traced no more, a stage repeats what each of its layers ran as."""
    KNOWN.clear()  # traces of other tests may apply
    stock, _ = made("swin")
    model = convert(copy.deepcopy(stock))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FusedRematWarning)  # of layers that are traced no more
        for width in (32, 32, 40, 48, 56, 64, 72, 80):
            batch = {"pixel_values": torch.randn(2, 3, 32, width).double()}
            (y, grads), (expected, others) = step(model, batch), step(stock, batch)
            torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)
            assert all(grads[key].allclose(grad, atol=1e-7) for key, grad in others.items())
    assert "checkpointed" in {kind.state for kind in conversion(model)}


def test_sam2():
    """Blocks in windows and over the entire image; the layer that pools queries is checkpointed."""
    hiera = transformers.Sam2HieraDetConfig(
        hidden_size=16, num_attention_heads=1, image_size=[64, 64], num_query_pool_stages=1,
        blocks_per_stage=[1, 3], embed_dim_per_stage=[16, 32], window_size_per_stage=[4, 4],
        num_attention_heads_per_stage=[1, 2], global_attention_blocks=[3],
        window_positional_embedding_background_size=[4, 4],
    )  # fmt: skip
    config = transformers.Sam2VisionConfig(
        backbone_config=hiera.to_dict(), backbone_channel_list=[32, 16], fpn_hidden_size=16,
        backbone_feature_sizes=[[16, 16], [8, 8]], fpn_top_down_levels=[0], num_feature_levels=2,
    )  # fmt: skip
    torch.manual_seed(0)
    stock = transformers.Sam2VisionModel(config).train().double()
    model, batch = convert(copy.deepcopy(stock)), {"pixel_values": torch.randn(4, 3, 64, 64)}
    batch = {name: t.double() for name, t in batch.items()}
    y, expected = step(stock, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FusedRematWarning)
        found, grads = step(model, batch)
    torch.testing.assert_close(found, y, rtol=1e-10, atol=1e-10)
    assert all(grads[key].allclose(grad, atol=1e-9) for key, grad in expected.items())
    kinds = {kind.state: kind.count for kind in conversion(model)}
    assert kinds == {"converted": 3, "checkpointed": 1}
    assert not any(kind.pieces for kind in conversion(model))  # which are replayed


def test_a_layer_that_ran_plainly_does_so_in_the_replay_of_a_checkpoint():
    """The first forward of a Swin changes the sizes of windows that exceed its images."""
    stock, batch = build("swin")
    expected = step(copy.deepcopy(stock), batch)
    stock.gradient_checkpointing_enable()
    model = convert(stock)
    for _ in range(2):
        y, grads = step(model, batch)
        torch.testing.assert_close(y, expected[0], rtol=1e-4, atol=1e-5)
        for key, grad in expected[1].items():
            assert (grads[key] - grad).norm() <= 1e-4 * grad.norm() + 1e-5, key


def test_forward_of_a_bias_with_a_gradient_runs_in_atens_kernel():
    model, batch = build("t5")
    text = str(explain(convert(model), **batch))
    assert "backward in blocks of query rows: a mask requires a gradient" in text


class ScaledHeads(nn.Module):
    """Attention whose scores have a learned scale for each head, as in Swin v2."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.tensor([0.5, 0.5]).view(2, 1, 1))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        probs = (q @ k.transpose(-2, -1) * self.scale).softmax(-1)
        return x + self.out((probs @ v).transpose(1, 2).flatten(2))


def test_a_learned_scale_of_scores_is_no_constant():
    layer = ScaledHeads().double()
    model = convert(nn.Sequential(layer))
    x = torch.randn(2, 6, 16).double()
    model(x).sum().backward()
    assert [kind.state for kind in conversion(model)] == ["converted"]
    assert layer.scale.grad is not None and bool(layer.scale.grad.any())


def test_layouts_of_windows():
    batch, many = Size(1, ("B",)), Size(6, ("B",))
    assert layout_of_heads((batch, 2, 24, 8), -2, 24).tokens == (0, 2)
    assert layout_of_heads((many, 2, 4, 8), -2, 24).tokens == (0, 1, 3)
    assert layout_of_heads((many, 2, 8, 4), -1, 24).tokens == (0, 1, 4)
    assert layout_of_heads((batch, 2, 6, 4, 8), -2, 24).tokens == (0, 2, 3)
    assert layout_of_heads((many, 2, 8, 4), -2, 24) is None
    assert layout_of_heads((batch, 24, 8), -2, 24) is None


def test_a_stage_in_two_forwards_before_a_backward_and_in_a_replica():
    model, batch = made("swin")
    stock, fused = copy.deepcopy(model), convert(model)
    for _ in range(3):
        losses = []
        for one in (stock, fused):
            one.zero_grad()
            ys = [main_output(one(pixel_values=batch["pixel_values"] * s)) for s in (1.0, 0.5)]
            (ys[0].square().sum() + ys[1].sum()).backward()
            losses.append(one.embeddings.patch_embeddings.projection.weight.grad)
        assert torch.allclose(*losses)
    replica = fused.encoder.layers[0]._replicate_for_data_parallel()
    for name in ("blocks", "downsample"):
        setattr(replica, name, None)
    assert type(replica).forward.__get__(replica).__self__ is replica
    copied = copy.deepcopy(fused)
    assert torch.equal(main_output(copied(**batch)), main_output(fused(**batch)))
