"""LoRA on experts and experts in 4 bits: steps against plain PyTorch, models against PEFT."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import weakref
from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch
import transformers
from bitsandbytes.nn.parametrize import replace_parameter_4bit
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fused_remat import conversion, convert
from fused_remat.autograd import run_block
from fused_remat.graph.build import BlockBuilder
from fused_remat.moe_spec import ExpertsSpec, RouterSpec
from fused_remat.policies import Policy
from fused_remat.report.allocations import measure_allocations
from fused_remat.spec import PackedSpec
from fused_remat.steps.linear import Linear
from fused_remat.steps.mixture import ExpertAdapter, ExpertsDown, ExpertStack, ExpertsUp
from fused_remat.steps.routing import Routing, route

EXPERTS, WIDTH, HIDDEN, RANK = 5, 32, 64, 3
ROUTER = RouterSpec(experts=EXPERTS, top_k=2, normalize=True)
PLAIN = ExpertsSpec(experts=EXPERTS, top_k=2)
KINDS = {
    "swiglu": PLAIN,
    "clamped": dataclasses.replace(
        PLAIN, activation="clamped_swish", interleaved=True, transposed=True, limit=1.5, alpha=1.7
    ),
    "relu2": dataclasses.replace(PLAIN, activation="relu2", gated=False),
    "weighs_input": dataclasses.replace(PLAIN, weighs_input=True, transposed=True),
}
SAVES = [set(), {"pre"}, {"routing", "router", "pre", "experts"}]


def graph_of(
    spec: ExpertsSpec, adapters: dict[str, int], packed: dict[str, PackedSpec], bias: bool
) -> Any:
    b = BlockBuilder()
    logits = b.add(Linear(name="router", x="input", weights=("router.weight",), biases=("",)))
    weights = b.add(
        Routing(
            name="routing", xs=(logits,), tensors=(), function="", what="router",
            needed_for=((logits,),), tokenwise=True, chosen="routing.experts", experts=EXPERTS,
            top_k=2, router=ROUTER,
        )
    )  # fmt: skip
    up, down = (
        ExpertStack(
            weight=f"{name}.weight", bias=f"{name}.bias" if bias else "", packed=packed.get(name),
            adapters=tuple(
                [
                    ExpertAdapter(a=f"{name}.{i}.A", b=f"{name}.{i}.B", scale=0.5 + i)
                    for i in range(adapters.get(name, 0))
                ]
            ),
        )
        for name in ("up", "down")
    )  # fmt: skip
    given: Any = {"chosen": "routing.experts", "spec": spec}
    weigh = weights if spec.weighs_input else ""
    pre = b.add(ExpertsUp(name="pre", x="input", weights=weigh, stack=up, **given))
    y = b.add(ExpertsDown(name="experts", pre=pre, weights=weights, stack=down, **given))
    b.sum("output", y, "input")
    return b.graph("moe")


def tensors_for(
    spec: ExpertsSpec, adapters: dict[str, int], bias: bool, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype).div_(shape[-1] ** 0.5)

    rows = HIDDEN * (2 if spec.gated else 1)
    tensors = {"input": normal(2, 9, WIDTH) * WIDTH**0.5, "router.weight": normal(EXPERTS, WIDTH)}
    for name, out, width in (("up", rows, WIDTH), ("down", WIDTH, HIDDEN)):
        shape = (width, out) if spec.transposed else (out, width)
        tensors[f"{name}.weight"] = normal(EXPERTS, *shape)
        if bias:
            tensors[f"{name}.bias"] = normal(EXPERTS, out)
        for i in range(adapters.get(name, 0)):
            tensors[f"{name}.{i}.A"] = normal(EXPERTS * RANK, width)
            tensors[f"{name}.{i}.B"] = normal(out, EXPERTS * RANK)
    return tensors


def plain(spec: ExpertsSpec, tensors: dict[str, Tensor]) -> Tensor:
    """Compute the block by PyTorch with PEFT's updated weights, every expert on every token."""

    def matrices(name: str) -> Tensor:
        w = tensors[f"{name}.weight"]
        w = w.mT if spec.transposed else w
        for i in range(9):
            if f"{name}.{i}.A" in tensors:
                a, b = tensors[f"{name}.{i}.A"], tensors[f"{name}.{i}.B"]
                a, b = a.reshape(EXPERTS, -1, a.shape[1]), b.reshape(len(b), -1, EXPERTS)
                w = w + (0.5 + i) * torch.einsum("ore,eri->eoi", b, a)
        return w

    x = tensors["input"].reshape(-1, WIDTH)
    weights, chosen = route(ROUTER, x @ tensors["router.weight"].T, None)
    y = torch.zeros_like(x)
    zero = [x.new_zeros(())] * EXPERTS
    up_bias, down_bias = (tensors.get(f"{name}.bias", zero) for name in ("up", "down"))
    for e, (up, down) in enumerate(zip(matrices("up"), matrices("down"), strict=True)):
        w, hit = ((weights * (chosen == e)).sum(-1, True), (chosen == e).any(-1, True))
        pre = (x * w if spec.weighs_input else x) @ up.T + up_bias[e]
        gate, linear = (pre[:, ::2], pre[:, 1::2]) if spec.interleaved else pre.chunk(2, 1)
        if spec.activation == "clamped_swish":
            gate = gate.clamp(max=spec.limit)
            linear = linear.clamp(-spec.limit, spec.limit) + 1
            act = gate * torch.sigmoid(gate * spec.alpha) * linear
        else:
            act = torch.nn.functional.silu(gate) * linear if spec.gated else pre.relu().square()
        out = act @ down.T + down_bias[e]
        y = y + (out * hit if spec.weighs_input else out * w)
    return tensors["input"] + y.view_as(tensors["input"])


def gradients(y: Tensor, tensors: dict[str, Tensor], trained: list[str]) -> list[Tensor]:
    dy = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
    return [*torch.autograd.grad(y, [tensors[name] for name in trained], dy)]


def check(
    spec: ExpertsSpec, adapters: dict[str, int], frozen: str, save: set[str], bias: bool = False
) -> None:
    """Compare a block and plain PyTorch; `frozen`: endings of the names of frozen tensors."""
    tensors = tensors_for(spec, adapters, bias)
    trained = [name for name in tensors if not name.endswith(tuple(frozen.split()))]
    for name in trained:
        tensors[name].requires_grad_()
    y = run_block(graph_of(spec, adapters, {}, bias), Policy(save=save), tensors)
    z = plain(spec, tensors)
    torch.testing.assert_close(y, z, rtol=1e-10, atol=1e-10)
    pairs = zip(gradients(y, tensors, trained), gradients(z, tensors, trained), strict=True)
    for name, (found, expected) in zip(trained, pairs, strict=True):
        torch.testing.assert_close(
            found, expected, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_gradients_of_adapters_are_those_of_plain_pytorch(kind: str) -> None:
    bias, both = kind == "clamped", {"up": 1, "down": 1}
    for save in SAVES:
        check(KINDS[kind], both, "weight bias", save, bias)
        check(KINDS[kind], {"up": 2, "down": 1}, "input weight bias .B", save, bias)
        check(KINDS[kind], {"down": 2}, "weight bias .A", save, bias)
        check(KINDS[kind], both, "none", save, bias)


class Products(TorchDispatchMode):
    """The shapes of the results of all matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm"):
            self.shapes.append(tuple(result.shape))
        return result


def test_nothing_is_computed_for_frozen_stacks() -> None:
    adapters = {"up": 1, "down": 1}
    tensors = tensors_for(PLAIN, adapters, False)
    trained = [name for name in tensors if name.endswith((".A", ".B"))]
    for name in trained:
        tensors[name].requires_grad_()
    for save in SAVES:
        y = run_block(graph_of(PLAIN, adapters, {}, False), Policy(save=save), tensors)
        with Products() as products:
            gradients(y, tensors, trained)
        # Per expert: dA and dB of both stacks and what each reads (8), the gradient of the
        # activation with its update (3), and the pre-activations (3) unless they are kept. No
        # gradient of a matrix, and none of the block's input, which nothing needs.
        sizes = [set(shape) for shape in products.shapes]
        assert not any(size <= {WIDTH, HIDDEN, 2 * HIDDEN} for size in sizes)
        router = int("router" not in save)
        assert len(sizes) == EXPERTS * (11 if "pre" in save else 14) + router


def packed_stack(
    w: Tensor, quant_type: str, nested: bool, blocksize: int = 32
) -> tuple[PackedSpec, tuple[Tensor, ...]]:
    data, state = bnb.quantize_4bit(
        w, blocksize=blocksize, compress_statistics=nested, quant_type=quant_type
    )
    tensors, parts, outer = [data, state.absmax], ["absmax"], 0
    if nested:
        tensors += [state.state2.code, state.state2.absmax, state.offset]
        parts += ["nested_code", "nested_absmax", "offset"]
        outer = state.state2.blocksize
    spec = PackedSpec(
        kind="bnb_4bit", shape=tuple(w.shape), dtype=w.dtype, parts=tuple(parts),
        options=(blocksize, quant_type, outer),
    )  # fmt: skip
    return spec, tuple(tensors)


@pytest.mark.parametrize("kind", ["clamped", "swiglu"])
@pytest.mark.parametrize(("quant_type", "nested"), [("fp4", False), ("nf4", False), ("nf4", True)])
def test_stacks_in_4_bits(quant_type: str, nested: bool, kind: str) -> None:
    spec, adapters = KINDS[kind], {"up": 1, "down": 1}
    tensors = tensors_for(spec, adapters, False, torch.float32)
    packed, plain_tensors = dict[str, PackedSpec](), {**tensors}
    for name in ("up", "down"):
        w = tensors.pop(f"{name}.weight").contiguous()
        packed[name], own = packed_stack(w, quant_type, nested)
        tensors.update(zip(packed[name].names(f"{name}.weight"), own, strict=True))
        data, state = bnb.quantize_4bit(
            w, blocksize=32, compress_statistics=nested, quant_type=quant_type
        )
        plain_tensors[f"{name}.weight"] = bnb.dequantize_4bit(data, state)
    trained = [name for name in tensors if name.endswith((".A", ".B", "input", "router.weight"))]
    for name in trained:
        tensors[name].requires_grad_()
    z = plain(spec, plain_tensors)
    expected = gradients(z, tensors, trained)
    for save in SAVES:
        y = run_block(graph_of(spec, adapters, packed, False), Policy(save=save), tensors)
        torch.testing.assert_close(y, z, rtol=1e-4, atol=1e-5)  # rounding of float32
        for a, b in zip(gradients(y, tensors, trained), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


class Matrices(TorchDispatchMode):
    """The largest number of dequantized elements that are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.most = self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name == "bitsandbytes::dequantize_4bit":
            size = result.numel()
            self.alive, self.calls = self.alive + size, self.calls + 1
            self.most = max(self.most, self.alive)
            weakref.finalize(result.untyped_storage(), self._freed, size)
        return result

    def _freed(self, size: int) -> None:
        self.alive -= size


def test_one_expert_at_a_time_is_dequantized() -> None:
    tensors = tensors_for(PLAIN, {"up": 1, "down": 1}, False, torch.float32)
    packed = dict[str, PackedSpec]()
    for name in ("up", "down"):
        packed[name], own = packed_stack(tensors.pop(f"{name}.weight"), "nf4", True)
        tensors.update(zip(packed[name].names(f"{name}.weight"), own, strict=True))
    tensors["input"].requires_grad_()
    gc.collect()
    with Matrices() as matrices:
        graph = graph_of(PLAIN, {"up": 1, "down": 1}, packed, False)
        gradients(run_block(graph, "full", tensors), tensors, ["input"])
    assert matrices.calls == 5 * EXPERTS  # up and down, up again, and both in backward
    assert matrices.most == 2 * HIDDEN * WIDTH


# Models of transformers with PEFT's adapters.

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2, "use_cache": False,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": (
        "Qwen3Moe", {"num_experts": 6, "moe_intermediate_size": 64, "intermediate_size": 64}
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 6, "intermediate_size": 64}),
    "gpt_oss": ("GptOss", {"num_local_experts": 6, "intermediate_size": 64, "pad_token_id": 0}),
}  # fmt: skip
STACKS = ("gate_up_proj", "down_proj")
TARGETS = [f"mlp.experts.{name}" for name in STACKS]


def model_of(name: str) -> Any:
    kind, sizes = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **sizes)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def adapted(model: Any, **options: Any) -> Any:
    given = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj", "o_proj"]}
    config = LoraConfig(**{**given, "target_parameters": TARGETS, **options})
    model = get_peft_model(model, config)
    with torch.no_grad():
        for n, p in model.named_parameters():
            if "lora_B" in n:
                p.normal_(0.0, 0.05)
    return model.train()


def batch(length: int = 12) -> dict[str, Tensor]:
    ids = torch.randint(64, (2, length), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids}


def train(model: Any, steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses, and the gradients of the last step."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer, losses = torch.optim.SGD([*trained.values()], lr=0.1), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**batch()).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert all(p.grad is not None for p in trained.values())
    return losses, {n: p.grad for n, p in trained.items() if p.grad is not None}


def check_steps(stock: Any, model: Any, steps: int = 3) -> None:
    """Train both, and compare losses and all gradients within the rounding of float32."""
    (losses, expected), (found_losses, found) = train(stock, steps), train(model, steps)
    assert "checkpointed" not in str(conversion(model)) and "replayed" not in str(conversion(model))
    assert found_losses == pytest.approx(losses, rel=1e-5)
    for name, grad in expected.items():
        error = (found[name] - grad).norm() / grad.norm()
        assert error < 1e-4, f"{name}: {error}"


@pytest.mark.parametrize("name", sorted(MODELS))
def test_models_with_adapters_train_as_stock(name: str) -> None:
    stock = adapted(model_of(name), use_rslora=True)
    check_steps(stock, convert(copy.deepcopy(stock)))


def test_adapters_on_the_router_and_switched_adapters() -> None:
    stock = adapted(model_of("qwen3_moe"), target_parameters=[*TARGETS, "mlp.gate.weight"])
    check_steps(stock, convert(copy.deepcopy(stock)), 1)
    stock = adapted(model_of("qwen3_moe"))
    stock.add_adapter("other", stock.peft_config["default"])
    for p in [p for n, p in stock.named_parameters() if ".other." in n and "lora_B" in n]:
        torch.nn.init.normal_(p, 0.0, 0.05)
    model = convert(copy.deepcopy(stock))
    for active in ("default", "other", ["default", "other"]):
        for each in (stock, model):
            each.base_model.set_adapter(active)
            each.base_model.requires_grad_(True)
            for n, p in each.named_parameters():
                p.requires_grad_("lora_" in n and any(f".{a}." in n for a in listed(active)))
        check_steps(stock, model, 1)


def listed(active: Any) -> list[str]:
    return [active] if isinstance(active, str) else active


def test_disabled_and_merged_adapters() -> None:
    stock = adapted(model_of("mixtral"))
    model, given = convert(copy.deepcopy(stock)), batch()
    for each in (stock, model):
        each.model.get_input_embeddings().weight.requires_grad_()
    check_steps(stock, model, 1)

    def gradient(each: Any) -> tuple[float, Tensor]:
        weight = each.model.get_input_embeddings().weight
        loss = each(**given).loss
        return loss.item(), torch.autograd.grad(loss, weight)[0]

    with stock.disable_adapter(), model.disable_adapter():
        off, found_off = gradient(stock), gradient(model)
    on = gradient(model)
    for each in (stock, model):
        each.merge_adapter()
    merged, found_merged = gradient(stock), gradient(model)
    for each in (stock, model):
        each.unmerge_adapter()
    for a, b in ((found_off, off), (found_merged, merged), (found_merged, on)):
        assert a[0] == pytest.approx(b[0], rel=1e-5)
        torch.testing.assert_close(a[1], b[1], rtol=1e-3, atol=1e-6)
    assert off[0] != pytest.approx(merged[0], rel=1e-5)
    check_steps(stock, model, 1)
    losses = [each.merge_and_unload()(**given).loss.item() for each in (stock, model)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_training_resumes(tmp_path: Any) -> None:
    model = convert(adapted(model_of("gpt_oss")))
    train(model, 1)
    model.save_pretrained(tmp_path)
    losses, grads = train(model, 1)
    again = PeftModel.from_pretrained(model_of("gpt_oss"), tmp_path, is_trainable=True)
    found_losses, found = train(convert(again.train()), 1)
    assert found_losses == pytest.approx(losses, rel=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-7)


def quantized(model: Any) -> Any:
    """Quantize the stacks of a model to NF4, in PEFT's wrappers or without them."""
    for module in [m for m in model.modules() if type(m).__name__.endswith("Experts")]:
        for name in STACKS:
            replace_parameter_4bit(module, name, compress_statistics=True, quant_type="nf4")
    return model


def test_quantized_experts_train_as_stock() -> None:
    stock = quantized(adapted(model_of("qwen3_moe"), target_parameters=None))
    check_steps(stock, convert(copy.deepcopy(stock)))


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe"])
def test_adapters_of_quantized_experts(name: str) -> None:
    """Compare with plain weights of the same values: PEFT 0.21 itself fails in its second call."""
    stock = adapted(model_of(name))
    model = quantized(copy.deepcopy(stock))
    experts = [
        [m for m in each.modules() if type(m).__name__.endswith("Experts")]
        for each in (stock, model)
    ]
    for plain_module, module in zip(*experts, strict=True):
        for parameter in STACKS:
            getattr(plain_module, parameter).data.copy_(getattr(module, parameter))
    check_steps(stock, convert(model))


def test_nothing_is_kept_for_adapters() -> None:
    """Kept: as many bytes as without adapters. At the peak, fewer than own checkpointing."""
    plain_model = model_of("qwen3_moe")
    stock = adapted(copy.deepcopy(plain_model))
    each = {
        "plain": convert(plain_model.requires_grad_(False).train()),
        "fused": convert(copy.deepcopy(stock)),
        "packed": convert(quantized(copy.deepcopy(stock))),
        "stock": stock,
    }
    plain_model.get_input_embeddings().weight.requires_grad_()
    stock.gradient_checkpointing_enable({"use_reentrant": False})
    given, kept, peaks = batch(64), {}, {}
    for name, model in each.items():
        model.enable_input_require_grads()
        for _ in range(2):
            model(**given).loss.backward()
        held: list[Any] = []
        run = functools.partial(model, **given)
        kept[name] = measure_allocations(lambda run=run, held=held: held.append(run()), "cpu").net
        held.clear()
        step = measure_allocations(lambda run=run: run().loss.backward(), "cpu")
        peaks[name] = step.peak
    assert kept["fused"] <= kept["plain"]
    assert kept["packed"] <= kept["plain"]
    assert peaks["fused"] <= peaks["stock"]
    assert peaks["packed"] <= peaks["stock"]
