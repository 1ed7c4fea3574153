"""Arguments that do not fit: what raises, and that the message names the argument and its value."""

import pytest
import torch
from block_inputs import Block
from op_cases import CASES, ENCODER
from torch import nn

from fused_remat import Policy, ops

# A list is the shape of a tensor of zeros. Names with a dot are in the mapping `weights`.
MLP = {
    "x": [2, 8], "fc1_weight": [4, 8], "fc1_bias": None, "fc2_weight": [8, 4], "fc2_bias": None,
}  # fmt: skip
ATTENTION = {"query": [2, 4, 5, 8], "key": [2, 2, 7, 8], "value": [2, 2, 7, 6]}
PACKED = {"query": [1, 4, 5, 4], "key": [1, 2, 5, 4], "value": [1, 2, 5, 4]}
BLOCK = {
    "x": [2, 5, 8], "norm_weight": [8], "norm_bias": [8], "qkv_weight": [24, 8], "qkv_bias": [24],
    "proj_weight": [8, 8], "proj_bias": [8], "nhead": 2,
}  # fmt: skip
VALID = {
    "layer_norm": {"x": [2, 8]},
    "rms_norm": {"x": [2, 8]},
    "dropout_add": {"x": [2, 8], "residual": [2, 8], "p": 0.1},
    "mlp": MLP,
    "gated_mlp": {"x": [2, 8], "gate_weight": [4, 8], "up_weight": [4, 8], "down_weight": [8, 4]},
    "mlp_block": {**MLP, "norm_weight": None, "norm_bias": None},
    "attention": ATTENTION,
    "attention of 1": PACKED,
    "attention of 2": {name: [2, *shape[1:]] for name, shape in PACKED.items()},
    "attention_block": BLOCK,
    "attention_block of 1": BLOCK | {"x": [1, 5, 8]},
    "rotary": {"qkv": [2, 7, 48], "cos": [7, 3], "sin": [7, 3], "nhead": 4, "kv_heads": 2},
    "encoder_block": {"x": [2, 5, 8], "nhead": 4, **{n: [*s] for n, s in ENCODER.items()}},
    "causal_block": {
        "x": [2, 5, 12], "nhead": 4, "kv_heads": 2,
        **{n: [*t.shape] for n, t in Block().weights().items()},
    },
    "linear_cross_entropy": {
        "hidden": [3, 7, 12], "weight": [53, 12], "bias": [53],
        "target": torch.zeros(3, 7, dtype=torch.int64),
    },
}  # fmt: skip


def call(valid, **changes):
    """Call the op on valid arguments with some changes."""
    given, weights = {}, {}
    for name, value in (VALID[valid] | changes).items():
        is_shape = isinstance(value, list) and all(type(n) is int for n in value)
        tensor = torch.zeros(value) if is_shape else value
        (weights if "." in name else given)[name] = tensor
    if weights and "weights" not in given:
        given["weights"] = {name: t for name, t in weights.items() if t is not None}
    return getattr(ops, valid.split(" ")[0])(**given)


@pytest.mark.parametrize("valid", VALID)
def test_the_arguments_that_are_changed_below_are_valid(valid):
    assert isinstance(call(valid), torch.Tensor)


CU, ONE, TRUE = torch.tensor([0, 3, 5]), torch.ones(7, 3), torch.ones(5, 7, dtype=torch.bool)
A, B = torch.ones(3, 12), torch.ones(16, 3)
HOOKED = nn.ReLU()
HOOKED.register_forward_hook(lambda *_: None)
FIRST = {"dropout_add": "x", "attention": "query", "rotary": "qkv", "causal_block": "x", "mlp": "x"}
# What is called; the changes; parts of the message; the error, where it is no ValueError.
REFUSED = [
    *((op, {name: ["0"]}, f"{name} must be a Tensor, got list", TypeError)
      for op, name in FIRST.items()),
    *((op, {name: value}, part, error)
      for op in ("layer_norm", *FIRST) for name, value, part, error in [
        ("policy", "lavish", "unknown policy 'lavish'; valid presets: full, lean", ValueError),
        ("policy", Policy(save={"nothing"}), "unknown activation 'nothing'", ValueError),
        ("policy", None, "policy", TypeError),
        ("backend", "abacus", "unknown backend 'abacus'; valid: auto, eager", ValueError),
    ]),
    *(("mlp", {"seed": seed}, "seed must", TypeError) for seed in (0.5, True, "0")),
    *(("mlp", {"seed": seed}, "seed must")
      for seed in (2**63, torch.tensor(0.5), torch.tensor([1]), torch.tensor(1, device="meta"))),
    # --- norms, the sum with a residual, MLPs
    ("layer_norm", {"weight": [7]}, "weight | (7,) | (8,) | (2, 8)"),
    ("layer_norm", {"x": []}, "()"),
    ("dropout_add", {"residual": [8]}, "residual | (8,) | (2, 8)"),
    ("mlp", {"fc1_weight": [4, 7]}, "fc1_weight | (4, 7) | (2, 8)"),
    ("mlp", {"fc1_bias": [8]}, "fc1_bias | (8,) | (4,) | (4, 8)"),
    ("mlp", {"fc2_weight": [8, 5]}, "fc2_weight | (8, 5) | (4, 8)"),
    ("mlp", {"fc1_weight": None}, "fc1_weight | missing | (F, 8)"),
    ("mlp", {"activation": 3}, "activation must be a name or a function, got 3", TypeError),
    ("mlp", {"activation": HOOKED}, "has hooks"),
    ("gated_mlp", {"activation": torch.sin}, "unknown activation | and their functions"),
    ("gated_mlp", {"gate_weight": [5, 8]}, "gate_weight | (5, 8) | (4, 8)"),
    ("mlp_block", {"gate_bias": [4]}, "gate_bias | needs | gate_weight"),
    ("mlp_block", {"norm": "batch"}, "'layer_norm' | 'rms_norm' | 'batch'"),
    # --- attention and its block
    ("attention", {"query": [4, 5, 8]}, "query | (4, 5, 8) | (B, heads, S, E)"),
    ("attention", {"key": [2, 2, 7, 6]}, "key | (2, 2, 7, 6) | (2, 4, 5, 8)"),
    ("attention", {"value": [2, 2, 5, 6]}, "value | (2, 2, 5, 6) | (2, 2, 7, 8)"),
    ("attention", {"key": [2, 3, 7, 8], "value": [2, 3, 7, 6]},
     "4 and 3 | (2, 4, 5, 8) | (2, 3, 7, 8)"),
    ("attention", {"attn_mask": TRUE.T}, "attn_mask | (7, 5) | (2, 4, 5, 7)"),
    ("attention", {"key_padding_mask": TRUE}, "key_padding_mask | (5, 7) | (2, 7)"),
    ("attention", {"window": (-2, 0)}, "window | (-2, 0)"),
    ("attention", {"softcap": -1.0}, "softcap must be positive | -1.0"),
    ("attention", {"attn_mask": [[1]]}, "must", TypeError),
    ("attention", {"window": (1.0, 1)}, "must | ints", TypeError),
    *(("attention", {name: mask}, name, RuntimeError)
      for name, mask in [("attn_mask", TRUE), ("key_padding_mask", TRUE[:2])]
      for mask in (mask.long(), mask.byte(), mask.half(), mask.to("meta"))),
    ("attention", {"softcaps": 1.0}, "unexpected keyword argument 'softcaps'", TypeError),
    ("attention_block", {"x": [5, 8]}, "x has shape (5, 8) | (B, S, D)"),
    ("attention_block", {"qkv_weight": [24, 7]}, "qkv_weight | (24, 7) | (2, 5, 8)"),
    ("attention_block", {"qkv_weight": [25, 8]},
     "qkv_weight | (25, 8) | multiples of 6 | (2, 5, 8)"),
    ("attention_block", {"residual_dropout_p": 2.0}, "residual_dropout_p | 2.0"),
    ("attention_block", {"qkv_weight": None}, "qkv_weight and proj_weight", TypeError),
    # --- lengths and bounds of sequences
    ("attention of 1", {"key_lengths": CU}, "key_lengths | (3,) | (1,)"),
    ("attention of 2", {"key_lengths": torch.tensor([2, 6])}, "key_lengths[1] is 6 | 0 to 5"),
    *(("attention of 1", {"key_lengths": CU[:1], bounds: CU},
       "key_lengths | cu_seqlens_q | not both") for bounds in ("cu_seqlens_q", "cu_seqlens_k")),
    ("attention of 1", {"cu_seqlens_k": CU}, "cu_seqlens_k needs cu_seqlens_q"),
    ("attention of 2", {"cu_seqlens_q": CU}, "cu_seqlens_q | batch of 1 | batch of 2"),
    ("attention of 1", {"key": [1, 2, 7, 4], "value": [1, 2, 7, 4], "cu_seqlens_q": CU},
     "cu_seqlens_k is missing | 5 queries and 7 keys"),
    ("attention of 1", {"cu_seqlens_q": CU[None]}, "cu_seqlens_q | (1, 3) | (N + 1,)"),
    ("attention of 1", {"cu_seqlens_q": CU, "cu_seqlens_k": CU[:2]}, "cu_seqlens_q | (3,) | (2,)"),
    ("attention of 1", {"cu_seqlens_q": CU + 1}, "cu_seqlens_q[2] is 6 | 0 to 5"),
    ("attention of 1", {"cu_seqlens_q": CU.flip(0)}, "cu_seqlens_q[1] is 3 | less than 5"),
    ("attention of 1",
     {"key": [1, 2, 4, 4], "value": [1, 2, 4, 4], "cu_seqlens_q": CU, "cu_seqlens_k": CU},
     "cu_seqlens_k[2] is 5 | 0 to 4"),
    *(("attention of 1", {"cu_seqlens_q": CU, name: cu}, f"{name} is | torch. | expected",
       RuntimeError)
      for name in ("cu_seqlens_q", "cu_seqlens_k")
      for cu in (CU.double(), CU.byte(), CU.to("meta"))),
    ("attention of 1", {"key_lengths": CU[:1].double()}, "key_lengths is torch.float64",
     RuntimeError),
    ("attention_block of 1", {"cu_seqlens": CU, "key_lengths": CU[:1]},
     "key_lengths | cu_seqlens | not both"),
    # --- rotation
    ("rotary", {"qkv": [7, 48]}, "qkv | (7, 48) | (B, S, 8·E)"),
    ("rotary", {"qkv": [2, 7, 50]}, "qkv | (2, 7, 50) | 4 query | 2 key"),
    ("rotary", {"nhead": 2.0}, "2.0", TypeError),
    ("rotary", {"cos": [7, 4]}, "cos | (7, 4) | (7, R/2) | at most 6"),
    ("rotary", {"cos": [6, 3]}, "cos | (6, 3) | (2, 7, R/2)"),
    ("rotary", {"sin": [7, 2]}, "sin | (7, 2) | (7, 3)"),
    ("rotary", {"q_norm_weight": [6]}, "go together"),
    ("rotary", {"q_norm_weight": [6], "k_norm_weight": [5]}, "k_norm_weight | (5,)"),
    ("rotary", {"cos": None, "sin": None}, "nothing"),
    ("rotary", {"sin": None}, "NoneType", TypeError),
    ("rotary", {"cos": ONE.double()}, "cos | float64 | float32", RuntimeError),
    ("rotary", {"sin": ONE.clone().requires_grad_()}, "sin requires a gradient", RuntimeError),
    ("rotary", {"qkv": torch.zeros(2, 7, 48).bfloat16(), "sin": ONE.bfloat16()},
     "sin is torch.bfloat16 on cpu, expected torch.float32 on cpu, as cos", RuntimeError),
    *(("attention_block", {"rope": rope}, "rope takes two Tensors", TypeError)
      for rope in (ONE, (ONE,), (ONE, ONE, ONE), 10000.0)),
    # --- whole blocks
    ("encoder_block", {"x": [5, 8]}, "(5, 8)"),
    ("encoder_block", {"qkv.weight": [8, 8]}, "(8, 8) | (24, 8)"),
    ("encoder_block", {"fc3.weight": [8, 8]}, "unknown weights ['fc3.weight'] | fc1.bias"),
    ("encoder_block", {"fc1.weight": None}, "fc1.weight is missing | (F, 8)"),
    ("encoder_block", {"nhead": 3}, "x's width must be a multiple of nhead, got 8 and 3"),
    ("causal_block", {"qkv.weight": [32, 12]}, "either qkv.weight, or q.weight"),
    ("causal_block", {"q.weight": [15, 12]}, "(15, 12) | 4 heads"),
    ("causal_block", {"k.weight": [16, 12]}, "k.weight | (16, 12) | (8, 12)"),
    ("causal_block", {"v.weight": None}, "v.weight is missing | (8, 12)"),
    ("causal_block", {"norm2.weight": torch.ones(12).double()}, "norm2.weight | float64",
     RuntimeError),
    ("causal_block", {"weights": [A]}, "weights must map names to tensors, got list", TypeError),
    ("causal_block", {"placement": "both"}, "'pre' or 'post' or 'sandwich', got 'both'"),
    ("causal_block", {"activation": "sigmoid"}, "unknown activation 'sigmoid'; valid: relu"),
    ("causal_block", {"activation": torch.sin}, "unknown activation | and their functions"),
    ("causal_block", {"attention_dropout_p": -1}, "attention_dropout_p | got -1"),
    ("causal_block", {"lora": [("q", A, B)]}, "lora takes (layer, A, B, scale)", TypeError),
    ("causal_block", {"lora": [("w", A, B, 1.0)]}, "no layer 'w' to update; valid: q, k, v"),
    ("causal_block", {"lora": [("k", A, B, 1.0)]}, "B of k has shape (16, 3), expected (8, 3)"),
    *(("causal_block", {"lora": [("q", a, b, 1.0)]}, part, RuntimeError) for a, b, part in [
        (A.half(), B.half(), "torch.float16 | float32"),
        (A, B.half(), "B of q is torch.float16 on cpu, expected torch.float32"),
    ]),
    ("causal_block", {"lora": [("q", A, None, 1.0)]}, "B of q must be a Tensor, got None",
     TypeError),
    # --- the loss
    *(("linear_cross_entropy", *row) for row in [
        ({"target": torch.full((3, 7), 53)}, "Target 53 is out of bounds", IndexError),
        ({"target": torch.zeros(3, 7).int()}, "torch.int32", RuntimeError),
        ({"target": torch.zeros(21).long()}, "(21,), expected (3, 7)"),
        ({"weight": [53, 11]}, "weight has shape (53, 11)"),
        ({"weight": [0, 12]}, "one row per class"),
        ({"weight": torch.zeros(53, 12).double()}, "torch.float64", RuntimeError),
        ({"bias": [52]}, "bias has shape (52,)"),
        ({"label_smoothing": 1.5}, "Got: 1.5", RuntimeError),
        ({"reduction": "avg"}, "'avg' is not a valid value"),
        ({"z_loss": -1.0}, "z_loss must be 0 or positive"),
        ({"softcap": float("inf")}, "softcap must be | got inf"),
        ({"logit_scale": 0.0}, "logit_scale must be positive | got 0.0"),
        ({"chunk": 0}, "chunk must be a positive number"),
    ]),
]  # fmt: skip


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: f"{row[0]}: {row[2]}")
def test_arguments_that_do_not_fit_raise_and_are_named(row):
    valid, changes, parts, *error = row
    with pytest.raises(error[0] if error else ValueError) as raised:
        call(valid, **changes)
    assert all(part in str(raised.value) for part in parts.split(" | ")), raised.value


# --- what every op refuses

RANDOM = [name for name, case in CASES.items() if case.dropout]


@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")])
@pytest.mark.parametrize("name", RANDOM)
def test_probabilities_outside_0_1_raise(name, p):
    with pytest.raises(ValueError, match=r"p must be between 0 and 1"):
        CASES[name].op(CASES[name].tensors(), p)


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_mixed_dtypes_and_devices_raise(case):
    for name, t in case.tensors().items():
        for other in (t.detach().to(torch.bfloat16), t.detach().to("meta"), t.detach().long()):
            if name != "slope":  # captured, not given
                with pytest.raises(RuntimeError, match=r"torch\.(float64|int64|bfloat16)"):
                    case.op({**case.tensors(), name: other}, 0.0)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_functorch_transforms_raise_and_say_so(transform):
    x, w = torch.randn(3, 8), torch.randn(16, 8)
    with pytest.raises(RuntimeError, match=r"inside torch\.func transforms"):
        transform(lambda w: ops.mlp(x, w, None, w.t(), None).sum())(w)


def test_tables_that_want_a_gradient_serve_where_there_is_none():
    with torch.no_grad():
        call("rotary", cos=ONE.clone().requires_grad_())
