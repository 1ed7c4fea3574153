"""The encoder block as a function: the layers' bits and results, and what does not fit it."""

import pytest
import torch
import torch.nn.functional as F
from reference import make, pair
from reference_ops import (
    CASES,
    FF,
    D,
    H,
    attention,
    compare,
    in_pieces,
    leaky,
    normal,
    results,
)  # fmt: skip
from torch import nn

from fused_remat import ops


def weights(**changes):
    named = CASES["encoder_prenorm"].tensors()
    named = {k.replace("_", "."): t for k, t in named.items() if k != "x"}
    return {k: t for k, t in {**named, **changes}.items() if t is not None}


def of_layer(layer):
    """The weights of a layer by the names of `encoder_block`."""
    attn = layer.self_attn
    named = {"qkv.weight": attn.in_proj_weight, "qkv.bias": attn.in_proj_bias}
    parts = {"proj": attn.out_proj, "fc1": layer.linear1, "fc2": layer.linear2,
             "norm1": layer.norm1, "norm2": layer.norm2}  # fmt: skip
    return named | {f"{n}.{kind}": getattr(m, kind) for n, m in parts.items()
                    for kind in ("weight", "bias")}  # fmt: skip


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("policy", ["full", "fast"])
def test_encoder_block_gives_the_layers_bits(norm_first, policy):
    """Masks mean the opposite: SDPA's True takes part, the layer's is excluded."""
    _, layer = make(policy, dropout=0.2, norm_first=norm_first, batch_first=True)
    x = normal(3, 5, D)
    takes_part = torch.rand(5, 5, generator=torch.Generator().manual_seed(0)) < 0.7
    padding = torch.tensor([[False] * 5, [True] + [False] * 4, [False] * 3 + [True] * 2])
    parts = of_layer(layer)
    torch.manual_seed(3)
    expected = results(
        lambda: layer(x, ~takes_part, src_key_padding_mask=padding), [x, *parts.values()]
    )
    torch.manual_seed(3)
    got = results(
        lambda: ops.encoder_block(
            x, parts, 2, takes_part, 0.2, key_padding_mask=padding, norm_first=norm_first,
            policy=policy,
        ),
        [x, *parts.values()],
    )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu", F.silu, torch.sin])
def test_encoder_block_gives_the_stock_layers_results(norm_first, activation):
    stock, _ = pair(D, 2, FF, 0.0, norm_first=norm_first, batch_first=True, dtype=torch.float64)
    stock.activation = getattr(F, activation) if isinstance(activation, str) else activation
    x, mask, parts = normal(3, 5, D), normal(5, 5), of_layer(stock)
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    compare(
        lambda: ops.encoder_block(x, parts, 2, mask, is_causal=True, norm_first=norm_first,
                                  activation=activation, policy="lean"),
        lambda: stock(x, mask + causal),
        [x, mask, *parts.values()],
    )  # fmt: skip


def test_encoder_block_without_biases_and_norm_weights():
    x = normal(2, 5, D)
    only = {k: t for k, t in weights().items() if k.endswith("weight") and "norm" not in k}
    renamed = {k.replace(".", "_"): t for k, t in only.items()} | dict.fromkeys(
        ("norm1_weight", "norm1_bias", "norm2_weight", "norm2_bias")
    )
    compare(
        lambda: ops.encoder_block(x, only, H, norm_first=True, activation="gelu"),
        lambda: CASES["encoder_prenorm"].plain({"x": x, **renamed}, 0.0, 0),
        [x, *only.values()],
    )


@pytest.mark.parametrize("shape", [(0, 5, D), (2, 0, D)])
def test_encoder_block_of_nothing(shape):
    x, parts = normal(*shape), weights()
    y, *grads = results(lambda: ops.encoder_block(x, parts, H, dropout_p=0.3), [x, *parts.values()])
    assert y.shape == shape and not any(g.any() for g in grads)


@pytest.mark.parametrize("tokens", [512, 4])
def test_encoder_block_gives_an_activation_whole_tensors(tokens):
    """A function may mix tokens here: it sees (B, S, F), and is not cut in pieces."""
    x, slope, parts = normal(3, 5, D), normal(FF, seed=9), weights()

    def act(t):
        assert t.shape in ((3, 5, FF), (1, 2, FF))  # the second to try it on
        return leaky(slope)(t - t.mean(1, keepdim=True)).transpose(1, 2).sin().transpose(1, 2)

    def plain():
        tensors = {k.replace(".", "_"): t for k, t in parts.items()}
        mid = x + F.linear(
            _merged(F.layer_norm(x, (D,), parts["norm1.weight"], parts["norm1.bias"]), tensors),
            parts["proj.weight"], parts["proj.bias"],
        )  # fmt: skip
        h = F.layer_norm(mid, (D,), parts["norm2.weight"], parts["norm2.bias"])
        up = act(F.linear(h, parts["fc1.weight"], parts["fc1.bias"]))
        return mid + F.linear(up, parts["fc2.weight"], parts["fc2.bias"])

    with in_pieces(tokens):
        compare(
            lambda: ops.encoder_block(x, parts, H, norm_first=True, activation=act),
            plain,
            [x, slope, *parts.values()],
        )


def _merged(x, tensors):
    packed = F.linear(x, tensors["qkv_weight"], tensors["qkv_bias"])
    q, k, v = packed.unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
    return attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("x", "changes", "shapes"),
    [
        ((5, D), {}, ["(5, 8)"]),
        ((2, 5, 6), {}, ["(24, 8)", "(2, 5, 6)"]),
        ((2, 5, D), {"qkv.weight": (8, D)}, ["(8, 8)", "(24, 8)"]),
        ((2, 5, D), {"qkv.bias": (8,)}, ["(8,)", "(24,)"]),
        ((2, 5, D), {"proj.weight": (D, 7)}, ["(8, 7)", "(8, 8)"]),
        ((2, 5, D), {"fc1.weight": (FF, 7)}, ["(12, 7)", "(12, 8)"]),
        ((2, 5, D), {"fc2.weight": (D, 11)}, ["(8, 11)", "(8, 12)"]),
        ((2, 5, D), {"norm1.weight": (7,)}, ["(7,)", "(8,)"]),
        ((2, 5, D), {"norm2.bias": (1,)}, ["(1,)", "(8,)"]),
        ((2, 5, D), {"fc3.weight": (D, D)}, ["unknown weights ['fc3.weight']", "fc1.bias"]),
        ((2, 5, D), {"fc1.weight": None}, ["fc1.weight is missing", "(F, 8)"]),
        ((2, 5, D), {"proj.weight": None}, ["proj.weight is missing", "(8, 8)"]),
    ],
)
def test_weights_that_do_not_fit_an_encoder_block_raise(x, changes, shapes):
    changed = {k: None if s is None else normal(*s) for k, s in changes.items()}
    with pytest.raises(ValueError) as error:
        ops.encoder_block(normal(*x), weights(**changed), H if x[-1] == D else 2)
    assert all(shape in str(error.value) for shape in shapes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nhead": 3}, "nhead must divide x's width, got 3 and 8"),
        ({"nhead": 0}, "nhead must divide"),
        ({"activation": "sigmoid"}, "unknown activation 'sigmoid'; valid: relu, gelu"),
        ({"activation": F.dropout}, "draws random numbers"),
        ({"activation": lambda t: t[..., :1]}, "changes the shape or dtype"),
        ({"attn_mask": torch.ones(4, 5).bool()}, r"\(4, 5\), expected .* \(2, 4, 5, 5\)"),
        ({"key_padding_mask": torch.ones(5, 2).bool()}, r"\(5, 2\), expected \(2, 5\)"),
    ],
)
def test_options_that_an_encoder_block_does_not_know_raise(options, message):
    with pytest.raises(ValueError, match=message):
        ops.encoder_block(normal(2, 5, D), weights(), **({"nhead": H} | options))
