"""DistributedDataParallel, FSDP1 and FSDP2: losses and gradients of one process on the whole batch.

Each wrapper is asked the same; what only `fully_shard` does (gathering, freeing) comes after.
"""

import contextlib
import copy
import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from distributed_steps import CLOSE, encoder, loss_of, mine
from hf_models import VOCAB, S, build, reasons
from offload_mover import moving
from processes import in_two_processes
from reference import EXACT_PRESETS
from tensor_parallel_steps import whole
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from fused_remat import FusedRematLayer, FusedRematWarning, Policy, convert
from fused_remat.report.allocations import SavedBytes

STOCK = nn.TransformerEncoderLayer


def per_layer(model, **kwargs):
    for layer in model:
        fully_shard(layer, **kwargs)
    return fully_shard(model, **kwargs)


def per_linear(model, **kwargs):
    for layer in model:
        fully_shard(layer.linear1, **kwargs)
        fully_shard(layer.linear2, **kwargs)
    return per_layer(model, **kwargs)


def fsdp1(model, use_orig_params):
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={FusedRematLayer}
        ),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )
    assert [type(m.module) for m in wrapped.module] == [FusedRematLayer] * 2
    return wrapped


def layers_compiled(wrap):
    def wrapped(model):
        torch._dynamo.reset()
        for layer in model:
            layer.compile(fullgraph=True, backend="aot_eager")
        return wrap(model)

    return wrapped


def wrapper_compiled(model):
    torch._dynamo.reset()
    return torch.compile(DDP(model), backend="aot_eager")


#: How a model is wrapped.
WRAPPERS = {
    "DDP": DDP,
    "FSDP2": per_layer,
    "FSDP2, root only": fully_shard,
    "FSDP2, linears": per_linear,
    "FSDP1, original parameters": functools.partial(fsdp1, use_orig_params=True),
    "FSDP1, flat parameters": functools.partial(fsdp1, use_orig_params=False),
}
BOTH = pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])


class WithUnused(nn.Sequential):
    """Its last layer is never called."""

    def forward(self, x):
        return functools.reduce(lambda h, layer: layer(h), self[:-1], x)


def without(part):
    """An encoder with frozen parameters."""
    model = encoder()
    for name, p in model.named_parameters():
        p.requires_grad_(part not in name)
    return model


def in_segments():
    model = encoder(layers=3)
    for layer, where in zip(model, ("first", "inner", "inner"), strict=True):
        layer.policy = Policy(save={"attn"}, segment=where)
    return model


def accumulating(target="grad"):
    model = encoder()
    for layer in model:
        layer.accumulate_into = target
    for p in model.parameters():
        p.main_grad = torch.zeros_like(p)
    return model


def preset(policy):
    """An encoder with this policy, pre-norm or post-norm."""
    return functools.partial(encoder, policy, policy != "lean")


def converted(wrap):
    """A stock model converted, then wrapped: its state is as before."""

    def wrapped(stock):
        expected = {name: value.clone() for name, value in stock.state_dict().items()}
        model = wrap(convert(stock, policy="balanced"))
        state = getattr(model, "module", model).state_dict()
        assert [*state] == [*expected]
        assert all(torch.equal(whole(state[name]), value) for name, value in expected.items())
        return model

    return wrapped


# Pinning asks for an accelerator; on a CPU mesh it is FSDP2's bookkeeping that is tested.
HOST = CPUOffloadPolicy(pin_memory=False)
#: The model, and how it is wrapped.
CASES = {
    **{
        f"{name}, {how}": (make, WRAPPERS[name])
        for name in ("DDP", "FSDP2")
        for how, make in (
            *((policy, preset(policy)) for policy in EXACT_PRESETS),
            *((part, functools.partial(without, part)) for part in ("linear1", "norm", "0.self")),
        )
    },
    "DDP, static graph": (encoder, functools.partial(DDP, static_graph=True)),
    "DDP, unused layer": (
        lambda: WithUnused(*encoder(layers=3)), functools.partial(DDP, find_unused_parameters=True)
    ),
    "DDP, views": (encoder, functools.partial(DDP, gradient_as_bucket_view=True)),
    "DDP, layers compiled": (preset("lean"), layers_compiled(DDP)),
    "DDP, compiled": (functools.partial(encoder, "lean"), wrapper_compiled),
    "DDP, segments": (in_segments, DDP),
    "DDP, converted": (functools.partial(encoder, cls=STOCK), converted(DDP)),
    **{
        f"FSDP2, {wrap.__name__}, {reshard}": (
            encoder, functools.partial(wrap, reshard_after_forward=reshard)
        )
        for wrap in (per_layer, fully_shard) for reshard in (True, False)
    },
    "FSDP2, CPU offload": (encoder, functools.partial(per_layer, offload_policy=HOST)),
    "FSDP2, layers compiled": (preset("fast"), layers_compiled(per_layer)),
    "FSDP2, converted": (functools.partial(encoder, cls=STOCK), converted(per_layer)),
    "FSDP2, linears, full": (preset("full"), per_linear),
    "FSDP2, linears, none": (preset("none"), per_linear),
    "FSDP2, segments": (in_segments, per_layer),
    "FSDP2, segments, root only": (in_segments, fully_shard),
    **{name: (encoder, wrap) for name, wrap in WRAPPERS.items() if "FSDP1" in name},
}  # fmt: skip
#: What two layers say that leave the fused path, or keep their input.
SAID = {"linears": "FSDPLinear; the fused path", "segments": "FSDP manages its parameters"}


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 5, 8, generator=generator, dtype=torch.float64) for _ in range(3)]


def train(model, steps):
    """Losses of SGD steps, and the gradients of the last one, gathered."""
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for x in steps:
        sgd.zero_grad()
        loss = loss_of(model(x))
        loss.backward()
        losses.append(loss.detach())
        sgd.step()
    return torch.stack(losses), [whole(p.grad) for p in model.parameters()]


def as_one_process(case):
    """Train on halves of batches, and in one process on batches; the warnings of fallbacks."""
    make, wrap = CASES[case]
    model = make()
    alone = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FusedRematWarning)
        losses, grads = train(wrap(model), [mine(x) for x in batches()])
    dist.all_reduce(losses)
    expected_losses, expected = train(alone, batches())
    torch.testing.assert_close(losses / dist.get_world_size(), expected_losses, **CLOSE)
    if "FSDP1" not in case:  # whose parameters are not the model's
        torch.testing.assert_close(grads, expected, **CLOSE)
    return [str(w.message) for w in caught if w.category is FusedRematWarning]


@pytest.mark.composes("DDP", "losses and gradients of one process on the whole batch, every policy")
@pytest.mark.composes("DDP", "static_graph=True")
@pytest.mark.composes("DDP", "find_unused_parameters=True, with a layer that is not called")
@pytest.mark.composes("DDP", "gradient_as_bucket_view=True")
@pytest.mark.composes("DDP", "frozen parameters")
@pytest.mark.composes("DDP", "torch.compile of each layer, or of the wrapped model")
@pytest.mark.composes("DDP", "segments: layers of which only the first keeps its input")
@pytest.mark.composes("DDP", "convert(model) before wrapping; state_dict as before")
@pytest.mark.composes("FSDP2", "fully_shard per layer, every policy, as one process")
@pytest.mark.composes("FSDP2", "reshard_after_forward True and False; the root only")
@pytest.mark.composes("FSDP2", "frozen parameters")
@pytest.mark.composes(
    "FSDP2", "CPUOffloadPolicy", limits="on a CPU mesh, where nothing is moved; pin_memory=False"
)
@pytest.mark.composes("FSDP2", "torch.compile of each layer, fully_shard per layer")
@pytest.mark.composes("FSDP2", "convert(model) before wrapping; state_dict as before")
@pytest.mark.composes(
    "FSDP2",
    "fully_shard of a layer's linears",
    limits="right, but PyTorch's own forward (under checkpoint unless the policy is none), with a "
    "warning",
)
@pytest.mark.composes(
    "FSDP2",
    "segments",
    limits="each layer keeps its input, with a warning: FSDP frees parameters that a segment needs",
)
@pytest.mark.composes("FSDP1", "use_orig_params True and False, wrapped by the layer's class")
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_one_process(two_processes, case):
    said = [text for name, text in SAID.items() if name in case and "FSDP2" in case]
    for texts in two_processes.run(as_one_process, case):
        assert len(texts) == 2 * len(said) and all(said[0] in text for text in texts)


@pytest.mark.composes("DDP", "gradient accumulation with no_sync()")
@pytest.mark.composes("FSDP2", "gradient accumulation with set_requires_gradient_sync(False)")
@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2", "main_grad reduced by hand"])
@in_two_processes
def test_gradient_accumulation(wrapper):
    by_hand = wrapper not in WRAPPERS
    model, alone = accumulating("main_grad") if by_hand else encoder(), encoder()
    wrapped = model if by_hand else WRAPPERS[wrapper](model)
    for i, x in enumerate(batches()):
        last, alone_in_rank = i == len(batches()) - 1, contextlib.nullcontext()
        if wrapper == "FSDP2":
            wrapped.set_requires_gradient_sync(last)
        elif wrapper == "DDP" and not last:
            alone_in_rank = wrapped.no_sync()
        with alone_in_rank:
            loss_of(wrapped(mine(x))).backward()
        loss_of(alone(x)).backward()
    for p in model.parameters() if by_hand else ():
        dist.all_reduce(p.main_grad)
        p.grad = p.main_grad / dist.get_world_size()
    found, expected = ([whole(p.grad) for p in m.parameters()] for m in (model, alone))
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.composes("FSDP2", "a Hugging Face model, `fully_shard` per layer")
@pytest.mark.composes("DDP", "a Hugging Face model")
@BOTH
@in_two_processes
def test_hugging_face(wrapper):
    model = convert(build("llama"), policy="lean")
    ids = torch.randint(3, VOCAB, (4, S), generator=torch.Generator().manual_seed(1))
    other = copy.deepcopy(model)
    assert type(other.model.layers[0]).__name__.endswith("LlamaDecoderLayer")
    for layer in other.model.layers if wrapper == "FSDP2" else ():
        fully_shard(layer)
    wrapped = DDP(other) if wrapper == "DDP" else fully_shard(other)
    with reasons() as why:
        wrapped(input_ids=mine(ids)).logits.square().mean().backward()
    assert not why
    model(input_ids=ids).logits.square().mean().backward()
    found, expected = (
        {name: whole(p.grad) for name, p in m.named_parameters()} for m in (other, model)
    )
    # Sums over tokens in another order; transformers' RMSNorm after the last layer is float32.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.composes("FSDP2", "offload: what a layer keeps moves as without it")
@pytest.mark.composes("DDP", "offload")
@BOTH
@in_two_processes
def test_offload(wrapper):
    found = []
    for offloaded in ((), ("qkv", "input")):
        policy = Policy(save={"attn", "qkv"}, offload=offloaded)
        model = WRAPPERS[wrapper](encoder(policy, layers=3))
        with moving() as mover:
            losses, grads = train(model, [mine(batch) for batch in batches()])
        assert bool(mover.backs()) == bool(offloaded)
        found.append([losses, *grads])
    assert all(map(torch.equal, *found))


@pytest.mark.composes(
    "FSDP2", "accumulate_into", limits="refused with RuntimeError; so under FSDP1"
)
@pytest.mark.composes(
    "DDP",
    "accumulate_into",
    limits="RuntimeError under the wrapper; main_grad reduced by hand works",
)
@pytest.mark.parametrize("wrapper", [name for name in WRAPPERS if name != "FSDP2, linears"])
@in_two_processes
def test_accumulation_is_refused(wrapper):
    wrapped, x = WRAPPERS[wrapper](accumulating()), mine(batches()[0])
    by_ddp = wrapper == "DDP"
    with pytest.raises(RuntimeError, match="DistributedDataParallel" if by_ddp else "FSDP manages"):
        wrapped(x)
    if by_ddp:
        with torch.no_grad():
            wrapped(x)
        model = accumulating("main_grad")
        inner = model.forward
        model.forward = functools.partial(checkpoint, inner, use_reentrant=True)
        wrapped = DDP(model, static_graph=True)
        loss = loss_of(wrapped(x.requires_grad_()))
        with pytest.raises(RuntimeError, match="called by DistributedDataParallel"):
            loss.backward()


# --- what fully_shard gathers, and frees


def collectives(cls, wrapper, policy="full"):
    """Counts by name in forward, and in forward and backward; warnings of fallbacks."""
    model, counts = WRAPPERS[wrapper](encoder(policy, cls=cls)), []
    with warnings.catch_warnings(record=True) as caught, CommDebugMode() as mode:
        warnings.simplefilter("always", FusedRematWarning)
        loss = loss_of(model(mine(batches()[0])))
        for run in (lambda: None, loss.backward):
            run()
            counts.append({str(k): n for k, n in mode.get_comm_counts().items()})
    return counts, [str(w.message) for w in caught if w.category is FusedRematWarning]


@pytest.mark.composes("FSDP2", "no collective but those of the stock layer without checkpointing")
@pytest.mark.parametrize("policy", ["full", "fast"])
@pytest.mark.parametrize("wrapper", [name for name in WRAPPERS if "FSDP2" in name])
def test_collectives_are_the_stock_layers(two_processes, wrapper, policy):
    expected, _ = two_processes.run(collectives, STOCK, wrapper)[0]
    found, warned = two_processes.run(collectives, FusedRematLayer, wrapper, policy)[0]
    assert bool(warned) == (wrapper == "FSDP2, linears"), warned
    assert 0 < sum(expected[0].values()) < sum(expected[1].values())
    assert found == expected


@pytest.mark.composes("FSDP2", "what is kept between forward and backward holds no gathered weight")
@pytest.mark.parametrize("policy", ["full", "fast"])
@in_two_processes
def test_gathered_weights_are_freed(policy):
    """After the first layer's forward: the parameters that it read hold nothing; bytes saved."""
    model, gathered = per_layer(encoder(policy), reshard_after_forward=True), []

    def note(layer, args):
        gathered.extend(layer.parameters())
        assert all(p.untyped_storage().nbytes() > 0 for p in gathered)

    model[0].register_forward_pre_hook(note)  # after FSDP2's own, which gathers
    alone, kept = encoder(policy)[0], []
    for layer in (model[0], alone):
        x = mine(batches()[0])
        with SavedBytes() as saved:  # weights too, at the size that they had
            y = layer(x)
        kept.append(saved.total)
        assert len(gathered) == 12
        assert sum(p.untyped_storage().nbytes() for p in gathered) == 0
        loss_of(y).backward()
    assert kept[0] == kept[1]


@pytest.mark.composes("FSDP2", "MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)")
@in_two_processes
def test_mixed_precision():
    """Relative L2 errors of gradients against float64: of the stock layer, and of the fused one."""
    exact, x, errors = encoder(cls=STOCK), batches()[0], []
    loss_of(exact(x)).backward()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for cls in (STOCK, FusedRematLayer):
        model = per_layer(encoder(cls=cls, dtype=torch.float32), mp_policy=policy)
        with warnings.catch_warnings():
            warnings.simplefilter("error", category=UserWarning)
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
            y = model(mine(x).float())
        assert y.dtype == torch.bfloat16
        loss_of(y).backward()
        grads = [whole(p.grad) for p in model.parameters()]
        assert {g.dtype for g in grads} == {torch.float32}
        pairs = zip(grads, exact.parameters(), strict=True)
        errors.append([float((g - p.grad).norm() / p.grad.norm()) for g, p in pairs])
    for a, b in zip(*errors, strict=True):
        # The rule of all tests in low precision; the floor is four units of bfloat16.
        assert b <= 1.5 * a + 4 * 2.0**-8, errors
