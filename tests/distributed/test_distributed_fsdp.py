"""Layers under FSDP2 (`fully_shard`) and FSDP1: one process's results, no further gathers."""

import copy
import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from distributed_steps import (
    CLOSE,
    batches,
    compare,
    encoder,
    freeze,
    loss_of,
    mean_over_ranks,
    mine,
    per_layer,
    root_only,
    train,
    whole,
)
from reference import EXACT_PRESETS
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor.debug import CommDebugMode

from fused_remat import FusedRematLayer, FusedRematWarning, convert

STOCK = nn.TransformerEncoderLayer


def per_linear(model, **kwargs):
    for layer in model:
        fully_shard(layer.linear1, **kwargs)
        fully_shard(layer.linear2, **kwargs)
    return per_layer(model, **kwargs)


def as_one_process(wrap, policy="full", norm_first=True, part=None, fused=True, **kwargs):
    model = encoder(policy, norm_first)
    model = freeze(model, part) if part else model
    return compare(model, lambda m: wrap(m, **kwargs), fused)


@pytest.mark.composes("FSDP2", "fully_shard per layer, every policy, as one process")
@pytest.mark.parametrize("policy", EXACT_PRESETS)
def test_per_layer(two_processes, policy):
    two_processes.run(as_one_process, per_layer, policy, norm_first=policy != "lean")


@pytest.mark.composes("FSDP2", "reshard_after_forward True and False; the root only")
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("wrap", [per_layer, root_only])
def test_resharding(two_processes, wrap, reshard):
    two_processes.run(as_one_process, wrap, reshard_after_forward=reshard)


@pytest.mark.composes(
    "FSDP2",
    "fully_shard of a layer's linears",
    limits="right, but PyTorch's own forward (under checkpoint unless the policy is none), with a "
    "warning",
)
@pytest.mark.parametrize("policy", ["full", "none"])
def test_per_linear(two_processes, policy):
    for warned in two_processes.run(as_one_process, per_linear, policy, fused=False):
        assert len(warned) == 2 and all("FSDPLinear; the fused path" in text for text in warned)


@pytest.mark.composes("FSDP2", "frozen parameters")
@pytest.mark.parametrize("part", ["linear1", "norm", "0.self_attn"])
def test_frozen(two_processes, part):
    two_processes.run(as_one_process, per_layer, part=part)


def collectives(cls, wrap, policy="full", **kwargs):
    """Counts by name in forward, and in forward and backward; warnings of fallbacks."""
    model = wrap(encoder(policy, cls=cls), **kwargs)
    counts = []
    with warnings.catch_warnings(record=True) as caught, CommDebugMode() as mode:
        warnings.simplefilter("always", FusedRematWarning)
        loss = loss_of(model(mine(batches()[0])))
        counts.append({str(k): n for k, n in mode.get_comm_counts().items()})
        loss.backward()
        counts.append({str(k): n for k, n in mode.get_comm_counts().items()})
    return counts, [str(w.message) for w in caught if w.category is FusedRematWarning]


@pytest.mark.composes("FSDP2", "no collective but those of the stock layer without checkpointing")
@pytest.mark.parametrize("policy", ["full", "fast"])
@pytest.mark.parametrize("wrap", [per_layer, root_only, per_linear])
def test_collectives_are_the_stock_layers(two_processes, wrap, policy):
    expected, _ = two_processes.run(collectives, STOCK, wrap)[0]
    found, warned = two_processes.run(collectives, FusedRematLayer, wrap, policy)[0]
    assert bool(warned) == (wrap is per_linear), warned
    assert 0 < sum(expected[0].values()) < sum(expected[1].values())
    assert found == expected


def kept_between(policy):
    """After the first layer's forward: how many parameters it read, their bytes, bytes saved."""
    model = per_layer(encoder(policy), reshard_after_forward=True)
    gathered, saved = [], []

    def note(layer, args):
        gathered.extend(layer.parameters())
        assert all(p.untyped_storage().nbytes() > 0 for p in gathered)

    for layer in model:
        layer.register_forward_pre_hook(note)  # after FSDP2's own, which gathers

    def pack(t):
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = loss_of(model[0](mine(batches()[0])))
    before = sum(p.untyped_storage().nbytes() for p in gathered)
    kept = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in saved}
    count = len(gathered)
    loss.backward()
    return count, before, sum(kept.values())


def kept_by_one_layer(policy):
    """Bytes of saved tensors of one such layer without a wrapper, parameters not counted."""
    layer = encoder(policy)[0]
    params = {p.untyped_storage()._cdata for p in layer.parameters()}
    kept = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage._cdata not in params:
            kept[storage._cdata] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = loss_of(layer(mine(batches()[0])))
    del loss
    return sum(kept.values())


def keeps_no_weights(policy):
    count, gathered, kept = kept_between(policy)
    assert count == 12 and gathered == 0, (count, gathered)
    assert kept == kept_by_one_layer(policy)


@pytest.mark.composes("FSDP2", "what is kept between forward and backward holds no gathered weight")
@pytest.mark.parametrize("policy", ["full", "fast"])
def test_gathered_weights_are_freed(two_processes, policy):
    two_processes.run(keeps_no_weights, policy)


def mixed_precision_errors():
    """Relative L2 errors of gradients against float64: of the stock layer, and of the fused one."""
    exact = encoder(cls=STOCK)
    x = batches()[0]
    loss_of(exact(x)).backward()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    errors = []
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
    return errors


@pytest.mark.composes("FSDP2", "MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)")
def test_mixed_precision(two_processes):
    stock, fused = two_processes.run(mixed_precision_errors)[0]
    for a, b in zip(stock, fused, strict=True):
        # The rule of all tests in low precision; the floor is four units of bfloat16.
        assert b <= 1.5 * a + 4 * 2.0**-8, (stock, fused)


@pytest.mark.composes(
    "FSDP2", "CPUOffloadPolicy", limits="on a CPU mesh, where nothing is moved; pin_memory=False"
)
def test_cpu_offload(two_processes):
    # Pinning asks for an accelerator; on a CPU mesh it is FSDP2's bookkeeping that is tested.
    two_processes.run(as_one_process, per_layer, offload_policy=CPUOffloadPolicy(pin_memory=False))


def accumulates():
    model = per_layer(encoder())
    for i, x in enumerate(batches()):
        model.set_requires_gradient_sync(i == len(batches()) - 1)
        loss_of(model(mine(x))).backward()
    alone = encoder()
    for x in batches():
        loss_of(alone(x)).backward()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(p.grad), q.grad, **CLOSE)


@pytest.mark.composes("FSDP2", "gradient accumulation with set_requires_gradient_sync(False)")
def test_gradient_accumulation(two_processes):
    two_processes.run(accumulates)


def reproduces():
    results = []
    for _ in range(2):
        model = per_layer(encoder("lean", dropout=0.2))
        torch.manual_seed(dist.get_rank())
        results.append(train(model, [mine(x) for x in batches()]))
    (losses, grads), (again, grads_again) = results
    assert losses == again
    for a, b in zip(grads, grads_again, strict=True):
        assert torch.equal(a, b)


@pytest.mark.composes("FSDP2", "dropout, reproducible from each rank's seed")
def test_dropout(two_processes):
    two_processes.run(reproduces)


def converted():
    stock = encoder(cls=STOCK)
    expected = stock.state_dict()
    losses, _ = train(copy.deepcopy(stock), batches())
    wrapped = per_layer(convert(stock, policy="balanced"))
    state = wrapped.state_dict()
    assert [*state] == [*expected]
    for name, value in state.items():
        assert torch.equal(whole(value), expected[name]), name
    found, _ = train(wrapped, [mine(x) for x in batches()])
    torch.testing.assert_close(mean_over_ranks(found), torch.stack(losses), **CLOSE)


@pytest.mark.composes("FSDP2", "convert(model) before wrapping; state_dict as before")
def test_convert(two_processes):
    two_processes.run(converted)


def fsdp1_of(model, use_orig_params):
    policy = functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={FusedRematLayer}
    )
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=policy,
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )


def fsdp1(use_orig_params):
    model = encoder()
    alone = copy.deepcopy(model)
    wrapped = fsdp1_of(model, use_orig_params)
    assert [type(m.module) for m in wrapped.module] == [FusedRematLayer] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error", FusedRematWarning)
        losses, _ = train(wrapped, [mine(x) for x in batches()])
    expected, _ = train(alone, batches())
    torch.testing.assert_close(mean_over_ranks(losses), torch.stack(expected), **CLOSE)


@pytest.mark.composes("FSDP1", "use_orig_params True and False, wrapped by the layer's class")
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_fsdp1(two_processes, use_orig_params):
    two_processes.run(fsdp1, use_orig_params)


def refuses_to_accumulate(wrap, *args):
    model = encoder()
    for layer in model:
        layer.accumulate_into = "grad"
    wrapped = wrap(model, *args)
    with pytest.raises(RuntimeError, match="FSDP manages the layer's parameters"):
        wrapped(mine(batches()[0]))


@pytest.mark.composes(
    "FSDP2", "accumulate_into", limits="refused with RuntimeError; so under FSDP1"
)
@pytest.mark.parametrize(
    "wrap",
    [(per_layer,), (root_only,), (fsdp1_of, True), (fsdp1_of, False)],
    ids=["per layer", "root only", "FSDP1, original parameters", "FSDP1, flat parameters"],
)
def test_accumulation_is_refused(two_processes, wrap):
    two_processes.run(refuses_to_accumulate, *wrap)


def evaluates(wrap):
    model = encoder(norm_first=False)
    expected = copy.deepcopy(model)
    wrap(model)
    mask = torch.rand(5, 5, dtype=torch.float64) - 0.5
    for mode in (True, False):
        for masks in ((), (mask,)):
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("error", FusedRematWarning)
                found = model.train(mode)[0](batches()[0], *masks)
                wanted = expected.train(mode)[0](batches()[0], *masks)
            torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.composes("FSDP2", "evaluation without gradients, masked and not")
@pytest.mark.parametrize("wrap", [per_layer, per_linear])
def test_evaluation(two_processes, wrap):
    two_processes.run(evaluates, wrap)


def fails_in_one():
    if dist.get_rank() == 1:
        raise ArithmeticError("of rank 1")


def test_a_failure_shows_the_ranks_traceback(two_processes):
    """The last test: the two have to be started again after it."""
    with pytest.raises(
        AssertionError, match=r"rank 1: Traceback[^$]*in fails_in_one[^$]*of rank 1"
    ):
        two_processes.run(fails_in_one)


def compiled_layers(model):
    torch._dynamo.reset()
    for layer in model:
        layer.compile(fullgraph=True, backend="aot_eager")
    return per_layer(model)


@pytest.mark.composes("FSDP2", "torch.compile of each layer, fully_shard per layer")
def test_compiled(two_processes):
    two_processes.run(as_one_process, compiled_layers, "fast")
