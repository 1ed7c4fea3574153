"""What planted bugs (`mutants.txt`) have shown that no other test saw."""

import copy
import warnings

import torch
from reference_ops import in_pieces
from torch import nn

from fused_remat import FusedRematLayer, FusedRematWarning, convert, ops
from fused_remat.graph.build import BlockBuilder, block_graph
from fused_remat.graph.fusions import MlpBackward
from fused_remat.graph.graph import Graph
from fused_remat.graph.quantized import in_formats
from fused_remat.graph.schedule import schedule
from fused_remat.report.allocations import measure_allocations
from fused_remat.spec import nn_layer_spec
from fused_remat.steps import linear
from fused_remat.steps.activation import MLPActivation
from fused_remat.steps.chunk import Chunks


def test_groups_are_of_the_longest_activation():
    """Of a decoder's memory, say: four sequences of 8 tokens and of 32, 64 at a time."""
    assert Chunks.of(4, 8, 64).group == 4
    assert Chunks.of(4, 8, 64, 32).group == 2


def test_weight_gradients_of_pieces_are_summed_in_float32(monkeypatch):
    monkeypatch.setattr(linear, "widens", lambda x: False)  # as a CPU with products in bfloat16
    x, up = torch.ones(512, 1, dtype=torch.bfloat16), torch.ones(1, 1, dtype=torch.bfloat16)
    down = up.clone().requires_grad_()
    with in_pieces(1):
        ops.mlp(x, up, None, down, None, "relu").sum().backward()
    assert down.grad.item() == 512  # in bfloat16 256 + 1 is 256


def built(before_act: bool) -> Graph:
    """output = one + two(act), act = gelu(up), and one a layer of up, made before, or of act."""
    b = BlockBuilder()
    b.linear("up", "input", "up")
    if before_act:
        b.linear("one", "up", "one")
    b.add(MLPActivation(name="act", up="up", act="gelu"))
    if not before_act:
        b.linear("one", "act", "one")
    b.linear("two", "act", "two")
    b.sum("output", "one", "two")
    return b.graph("odd")


def test_an_activation_whose_gradient_two_layers_give():
    """The weights are frozen, so that neither reads it in backward."""
    fusions = frozenset({"mlp_bwd gelu"})
    plan = schedule(built(False), frozenset(), frozenset({"input"}), False, fusions)
    assert not any(isinstance(step.node, MlpBackward) for step in plan.backward)


def test_a_product_that_is_read_before_its_activation():
    fusions = frozenset({"linear_act gelu"})
    plan = schedule(built(True), frozenset(), frozenset({"input"}), False, fusions)
    made = {"input"}
    for step in plan.forward:
        assert set(step.node.reads) <= made
        made.update(step.node.makes)


def test_without_grad_mode_no_policy_holds_more():
    layer, x = FusedRematLayer(16, 2, 64, batch_first=True), torch.randn(4, 8, 16)
    peaks = []
    for layer.policy in ("full", "none"):
        with torch.no_grad():
            peaks.append(measure_allocations(lambda: layer(x)).peak)
    assert peaks[0] == peaks[1]


def test_activations_are_rounded_at_sites_of_their_own():
    graph = block_graph(nn_layer_spec(True, 2, 4, "gelu"))
    packed = in_formats(graph, {"qkv:int8_stochastic", "up:int8_stochastic"})
    assert len({node.site for node in packed.nodes if node.quantizes}) == 2


def test_a_layer_without_biases_is_fused():
    layer = FusedRematLayer(8, 2, 12, bias=False)
    assert layer.why_not_fused(torch.zeros(3, 2, 8, requires_grad=True)) is None


def test_from_layer_makes_a_module_of_its_own():
    stock = nn.TransformerEncoderLayer(8, 2, 12)
    fused = FusedRematLayer.from_layer(stock)
    fused.norm1 = nn.Identity()
    fused.register_forward_hook(lambda *_: None)
    assert type(stock.norm1) is nn.LayerNorm and not stock._forward_hooks


def test_sequences_have_their_own_positions():
    from hf_models import IDS, build

    stock = build("llama")
    fused = convert(copy.deepcopy(stock))
    tokens = IDS["input_ids"].shape[1]
    # Of any distance: without a mask transformers would take a gap for the next packed sequence.
    places = torch.arange(tokens) * torch.tensor([[1], [4]])
    given = {**IDS, "attention_mask": torch.ones_like(IDS["input_ids"]), "position_ids": places}
    with warnings.catch_warnings():
        warnings.simplefilter("error", FusedRematWarning)
        found = fused(**given).logits
    # transformers' RMSNorm is float32 in a float64 model
    torch.testing.assert_close(found, stock(**given).logits, rtol=1e-6, atol=1e-6)
