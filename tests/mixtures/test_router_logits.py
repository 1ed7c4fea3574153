"""Router logits that a model records, from layers that run as blocks; and the losses of them."""

import copy

import pytest
import torch

from fused_remat import conversion, convert
from fused_remat.execution.observe import OBSERVERS

transformers = pytest.importorskip("transformers")

DECODER = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64,
    "pad_token_id": 0, "use_cache": False, "num_experts_per_tok": 2,
}  # fmt: skip
DEEPSEEK = {
    "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 0, "kv_lora_rank": 8,
    "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 24,
}  # fmt: skip
LLAMA4 = {
    "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 48, "head_dim": 8,
    "interleave_moe_layer_step": 1,
}  # fmt: skip
MODELS = {
    "Mixtral": {"num_local_experts": 4},
    "GptOss": {"num_local_experts": 4, "head_dim": 8, "sliding_window": 4},
    "DeepseekV3": DEEPSEEK,  # its router is replayed
    "Ernie4_5_Moe": {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 0,
        "moe_layer_interval": 1, "moe_layer_end_index": 1,
    },
    "Laguna": {  # its correction is a parameter, which gets no gradient if it is not frozen
        "num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
        "head_dim": 8, "mlp_layer_types": ["sparse"] * 2, "layer_types": ["full_attention"] * 2,
        "num_attention_heads_per_layer": [4] * 2,
    },
    "Llama4": LLAMA4,  # the second result of its router
}  # fmt: skip
IDS = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))


def built(name):
    torch.manual_seed(0)
    config = "Llama4TextConfig" if name == "Llama4" else f"{name}Config"
    made = getattr(transformers, config)(**{**DECODER, **MODELS[name]})
    return getattr(transformers, f"{name}ForCausalLM")(made).train().requires_grad_()


def step(model):
    """Return losses and router logits of a training step, and the gradients by name."""
    model.zero_grad()
    out = model(input_ids=IDS, labels=IDS, output_router_logits=True)
    more = sum(logits.float().logsumexp(-1).square().mean() for logits in out.router_logits)
    (out.loss + more).backward()
    losses = [out.loss, *([] if out.get("aux_loss") is None else [out.aux_loss])]
    return losses, out.router_logits, {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.filterwarnings("error::fused_remat.FusedRematWarning")
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_logits_losses_and_gradients_are_the_model_s_own(name, checkpointed):
    stock, found = built(name), []
    model = copy.deepcopy(stock)
    if checkpointed:
        model.gradient_checkpointing_enable()
    convert(model, loss=checkpointed)
    expected, observe = step(stock), found.append
    step(model)
    OBSERVERS.append(observe)
    try:
        losses, logits, grads = step(model)
    finally:
        OBSERVERS.remove(observe)
    blocks = [run.call.graph for run in found if "Layer" in run.call.graph.kind]
    assert len(blocks) == 2 and all(len(graph.side_outputs) == 1 for graph in blocks)
    # Sums in float32, in another order.
    near = {"rtol": 2e-6, "atol": 2e-6}
    torch.testing.assert_close(losses, expected[0], **near)
    torch.testing.assert_close([*logits], [*expected[1]], **near)
    largest = max(grad.norm() for grad in expected[2].values() if grad is not None)
    for key, grad in expected[2].items():
        if grad is None:
            assert grads[key] is None, key
        else:
            assert (grads[key] - grad).norm() <= 5e-6 * (grad.norm() + 1e-2 * largest), key


def test_a_sum_within_a_branch_is_no_residual_stream_under_autocast():
    """Llama 4 adds its shared experts' result to that of the others, in bfloat16."""
    stock = built("Llama4")
    model = convert(copy.deepcopy(stock))
    exact = step(stock)
    with torch.autocast("cpu", torch.bfloat16):
        expected, got = step(stock), step(model)
    assert all(kind.state == "converted" for kind in conversion(model))
    for name, grad in exact[2].items():
        error, own = (float((grads[2][name] - grad).norm()) for grads in (got, expected))
        assert error <= 1.5 * own + 1e-2 * float(grad.norm()), name
