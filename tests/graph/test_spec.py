"""Blocks that no layer has, from their description: what they compute, keep and are called."""

import itertools
import pickle
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from block_inputs import compare, normal
from reference import EXACT_PRESETS, plain_block
from tiers import pairwise

from fused_remat import Policy, policies, random
from fused_remat.autograd import function
from fused_remat.graph.build import BlockBuilder, attention_graph, block_graph
from fused_remat.graph.text import block, graph_of
from fused_remat.layer_specs import nn_layer_spec, transformer_spec
from fused_remat.policies import kept_names
from fused_remat.spec import (
    USER_FUNCTION,
    AttentionSpec,
    BlockSpec,
    BranchSpec,
    LoraSpec,
    MLPSpec,
    NormSpec,
    ParallelSpec,
)

B, S, D, H, HIDDEN = 2, 5, 8, 2, 12
ATTENTION = AttentionSpec(
    num_heads=H, num_kv_heads=H, head_dim=D // H, scale=(D // H) ** -0.5, window=(-1, 0)
)
MLP = MLPSpec(activation="gelu")
GATED = MLPSpec(activation="silu", gated=True)
PLACE = ParallelSpec(group="group", size=2, rank=1, sequence=True)
UPDATE = (LoraSpec(layer="k", scale=1.0),)
NORM, RMS = NormSpec(), NormSpec(kind="rms_norm")


def parallel(second_norm, mlp=MLP, dropout=0.0):
    """Attention and an MLP side by side: of one norm (GPT-J), or of two (GPT-NeoX)."""
    attention = BranchSpec(op=ATTENTION, norm=NORM, dropout=dropout)
    beside = BranchSpec(op=mlp, norm=second_norm, dropout=dropout, parallel=True)
    return BlockSpec(kind="beside", branches=(attention, beside))


def mlp_first():
    """x + mlp(norm(x)), then attention, without a norm of its own."""
    branches = (BranchSpec(op=GATED, norm=RMS), BranchSpec(op=ATTENTION))
    return BlockSpec(kind="mlp_first", branches=branches)


SPECS = {
    "one norm": parallel(None),
    "one norm, gated": parallel(None, GATED),
    "two norms": parallel(RMS),
    "mlp first": mlp_first(),
    "one norm, dropout": parallel(None, MLPSpec(activation="gelu", dropout=0.2), dropout=0.3),
}


def weights_of(spec):
    shapes = {n: (D,) for n in spec.norms} | spec.linear_shapes(D, HIDDEN)
    named = {f"{name}.weight": shape for name, shape in shapes.items()}
    named |= {f"{name}.bias": shape[:1] for name, shape in shapes.items()}
    return {name: normal(*shape, seed=i) for i, (name, shape) in enumerate(named.items())}


@pytest.mark.parametrize(
    ("name", "policy"),
    pairwise(list(SPECS), ["full", "lean", "balanced", "fast", "none", "up", "act", "norm1"]),
)
def test_a_block_computes_its_description_in_every_policy(name, policy):
    spec = SPECS[name]
    leaves = {"input": normal(B, S, D), **weights_of(spec)}
    graph, given = block_graph(spec), leaves | {"seed": torch.tensor(3)}
    policy = policy if policy in EXACT_PRESETS else Policy(save={policy})
    compare(
        lambda: function.run_block(graph, policy, given),
        lambda: plain_block(spec, given),
        list(leaves.values()),
    )


def test_an_output_gradient_that_a_residual_passes_on_is_never_written_to():
    leaves = {"input": normal(B, S, D), **weights_of(SPECS["mlp first"])}
    y = function.run_block(block_graph(SPECS["mlp first"]), "full", leaves)
    dy = torch.ones_like(y)
    torch.autograd.grad(y, list(leaves.values()), dy)
    assert torch.equal(dy, torch.ones_like(dy))


def test_presets_know_a_new_block_by_the_roles_of_its_activations():
    graph = block_graph(SPECS["one norm, gated"])
    assert graph.roles == {
        "heads": ("qkv",), "attention": ("attn",), "stream": ("mid",), "hidden": ("gate", "up"),
        "last normed": (),
    }  # fmt: skip
    kept = [kept_names(preset, graph) for preset in ("lean", "balanced", "fast", "none")]
    assert kept[0] == {"attn"} and tuple(policies.EXACT_PRESETS) == EXACT_PRESETS
    assert all(fewer < more for fewer, more in itertools.pairwise(kept))
    with pytest.raises(ValueError, match=r"'fast8' .*8 bits"):
        kept_names("fast8", graph)


def test_ranks_gather_what_parallel_branches_read_once():
    for branches in (SPECS["one norm"].branches, SPECS["one norm"].branches[::-1]):
        spec = BlockSpec(kind="beside", branches=branches).on_rank(PLACE)
        gathered = [
            n.name for n in block_graph(spec).nodes if n.name.endswith((".all", ".ordered"))
        ]
        assert len(gathered) == (1 if branches[1].parallel else 2)


def test_dropout_without_a_residual():
    one = BlockSpec(kind="one", branches=(BranchSpec(op=MLP, dropout=0.3),), residual=False)
    for spec in (one, one.on_rank(PLACE), replace(one, loras=(LoraSpec(layer="fc2", scale=1.0),))):
        last = block_graph(spec).nodes[-1]
        assert last.name == "output" and last.mask == "dropout2"


@block
def side_by_side(residual):
    b = BlockBuilder()
    mask = b.dropout("mask", random.RESIDUAL1, 0.5, "input")
    b.linear("output", "input", "a", "b", sizes=(3, 5), residual=residual, mask=mask)
    return b.graph("side_by_side")


@pytest.mark.parametrize("residual", ["input", ""])
def test_dropout_and_the_residual_of_several_layers(residual):
    x, weights = normal(B, S, D), [normal(3, D, seed=1), normal(5, D, seed=2)]
    named = {"input": x, "a.weight": weights[0], "b.weight": weights[1], "seed": torch.tensor(3)}
    made = function.run_block(side_by_side(residual), "lean", named) - (x if residual else 0.0)
    kept = made != 0.0
    assert 0.2 < kept.double().mean() < 0.8
    torch.testing.assert_close(made[kept], 2.0 * F.linear(x, torch.cat(weights))[kept])


ONE, ENCODER = BranchSpec(op=MLP), nn_layer_spec(True, 2, 4, "gelu", loras=UPDATE)
CROSS = replace(ATTENTION, keys="memory", window=(-1, -1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(ATTENTION, align="middle"), "align must be 'start' or 'end'"),
        (lambda: replace(ATTENTION, align="start", window=(1, 0)), "align='start'"),
        (lambda: replace(ATTENTION, masks=("foo",)), "masks must be 'mask' or 'padding'"),
        (lambda: replace(ATTENTION, num_kv_heads=3), "num_kv_heads must divide num_heads"),
        (lambda: replace(ATTENTION, head_norm=NORM), "head_norm must be 'rms_norm'"),
        (lambda: MLPSpec(activation=USER_FUNCTION, gated=True), "needs the name of an activation"),
        (lambda: BranchSpec(op=MLP, placement="mid"), "placement must be 'pre' or 'post' or 'sand"),
        (lambda: BranchSpec(op=MLP, placement="sandwich"), "placement 'sandwich' needs a norm"),
        (lambda: replace(ONE, norm=NORM, placement="post", parallel=True), "parallel branch must"),
        (lambda: BlockSpec(kind="none", branches=()), "at least one branch"),
        (lambda: BlockSpec(kind="x", branches=(BranchSpec(op=CROSS),)), "keys must name an input"),
        (lambda: replace(parallel(None), residual=False), "one branch, with placement 'pre'"),
        (lambda: ENCODER.on_rank(PLACE), "cannot be divided"),
        (lambda: nn_layer_spec(True, 3, 4, "gelu").on_rank(PLACE),
         "3 key heads cannot be divided among 2 ranks"),
        (lambda: block_graph(BlockSpec(kind="two", branches=(ONE,) * 2)),
         "two steps of a block make 'up'"),
        (lambda: block_graph(ENCODER),
         "no layer 'k' for a low-rank update; valid: qkv, proj, fc1, fc2"),
    ],
)  # fmt: skip
def test_descriptions_that_make_no_block(make, message):
    with pytest.raises(ValueError, match=message):
        make()


LLAMA = {
    "activation": "silu", "rotary": True, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4,
    "scale": 0.5,
}  # fmt: skip
DESCRIBED = [
    *SPECS.values(),
    nn_layer_spec(True, 2, 4, "gelu", (1e-5,) * 3, projection="split"),
    nn_layer_spec(False, 2, 4, "relu", (1e-5,) * 3, 0.1, memory_masks=("padding",)),
    *(
        transformer_spec(
            "rms_norm", 1e-6, placement=placement, qk_norm_eps=eps, window=(3, 0),
            masks=("lengths",), loras=(LoraSpec(layer="fc2", scale=2.0, dtype=torch.float32),),
            gated=eps is None, **LLAMA,
        )
        for placement in ("pre", "post", "sandwich") for eps in (None, 1e-6)
    ),
]  # fmt: skip


@pytest.mark.parametrize("spec", DESCRIBED)
def test_specs_pickled_and_graphs_as_text(spec):
    graph, again = block_graph(spec), pickle.loads(pickle.dumps(spec))
    assert set(spec.weights) <= set(graph.params)
    assert graph_of(graph.text) is graph and graph.digest == graph_of(graph.text).digest
    assert again == spec and "_hash" not in vars(again) and block_graph(again) is graph


def test_keys_that_no_query_sees_have_no_gradient():
    graph = attention_graph(replace(ATTENTION, align="start"))
    q, k, v = (torch.randn(1, H, n, 4).requires_grad_() for n in (5, 7, 7))
    y = function.run_block(graph, "full", {"input": q, "key": k, "value": v})
    for grad in torch.autograd.grad(y.sum(), [k, v]):
        assert torch.equal(grad[:, :, 5:], torch.zeros(1, H, 2, 4))
    expected = F.scaled_dot_product_attention(q, k[:, :, :5], v[:, :, :5], is_causal=True)
    torch.testing.assert_close(y, expected.transpose(1, 2).flatten(2))
