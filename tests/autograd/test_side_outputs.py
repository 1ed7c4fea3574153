"""Side outputs of a block: right gradients in every kind of pass, and memory that is kept once."""

import contextlib
import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo import compiled_autograd
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from fused_remat import FusedRematWarning, Policy, check_replay
from fused_remat.autograd import accumulate, deliver, run_block
from fused_remat.execution import executor, prepare
from fused_remat.execution.prepare import BlockConfig, chunks_of
from fused_remat.graph.build import BlockBuilder
from fused_remat.graph.graph import Graph
from fused_remat.policies import PRESETS, kept_names
from fused_remat.spec import AttentionSpec, NormSpec

B, S, D, H, E = 3, 6, 8, 2, 5
SIDES = ("qkv", "logits")  # with tiles, one is a group's and one a tile's


def graph_of(sides=SIDES):
    b = BlockBuilder()
    spec = AttentionSpec(num_heads=H, num_kv_heads=H, head_dim=D // H, scale=0.5, window=(-1, 0))
    b.leave("mid", b.attention(spec, "input"), "proj", residual="input")
    b.linear("logits", b.norm("norm", "mid", NormSpec(kind="rms_norm")), "router")
    b.linear("output", b.linear("hidden", "logits", "fc1"), "fc2", residual="mid")
    return replace(b.graph("routed"), side_outputs=sides)


GRAPH = graph_of()
SHAPES = {
    "qkv.weight": (3 * D, D), "proj.weight": (D, D), "norm.weight": (D,), "fc1.weight": (7, E),
    "router.weight": (E, D), "router.bias": (E,), "fc2.weight": (D, 7),
}  # fmt: skip


def given(dtype=torch.float64, batch=B):
    generator = torch.Generator().manual_seed(0)
    shapes = {"input": (batch, S, D), **SHAPES}
    drawn = {name: torch.randn(s, generator=generator, dtype=dtype) for name, s in shapes.items()}
    return {name: t.requires_grad_() for name, t in drawn.items()}


def plain(t):
    """Compute the output and the side outputs by PyTorch's functions."""
    qkv = F.linear(t["input"], t["qkv.weight"])
    q, k, v = qkv.unflatten(-1, (3, H, D // H)).permute(2, 0, 3, 1, 4)
    attn = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5)
    mid = t["input"] + F.linear(attn.transpose(1, 2).flatten(2), t["proj.weight"])
    norm = F.rms_norm(mid, (D,), t["norm.weight"], 1e-5)
    logits = F.linear(norm, t["router.weight"], t["router.bias"])
    y = mid + F.linear(F.linear(logits, t["fc1.weight"]), t["fc2.weight"])
    return y, qkv, logits


LOSSES = {
    "all": lambda y, qkv, logits: (y * y).sum() + qkv.sin().sum() + logits.logsumexp(-1).sum(),
    "the output": lambda y, qkv, logits: (y * y).sum(),
    "logits": lambda y, qkv, logits: logits.square().sum(),
    "qkv and the output": lambda y, qkv, logits: (y.sum() * qkv.sum()).sin(),
}


def check(run, loss, t=None, names=None, exact=False):
    """Compare the gradients of `names`, by default of all, with those of plain PyTorch."""
    t = t or given()
    wanted = [t[name] for name in names or t]
    expected = torch.autograd.grad(loss(*plain(t)), wanted, allow_unused=True)
    got = torch.autograd.grad(loss(*run(t)), wanted, allow_unused=True)
    for name, mine, other in zip(names or t, got, expected, strict=True):
        torch.testing.assert_close(
            torch.zeros_like(t[name]) if mine is None else mine,
            torch.zeros_like(t[name]) if other is None else other,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.fixture(params=["delivered", "together"])
def deliveries(request, monkeypatch):
    """Small weights count as large ones, so that their gradients are delivered; or not."""
    monkeypatch.setattr(prepare, "_DELIVERED", 0 if request.param == "delivered" else 1 << 18)
    prepare._prepare.cache_clear()
    yield request.param
    prepare._prepare.cache_clear()


#: One group; groups of one sequence without tiles; one sequence a group in tiles of two tokens.
CHUNKS = {"one": None, "groups": S, "tiles": 2}


def chunked(chunks):
    return chunks_of(CHUNKS[chunks]) if CHUNKS[chunks] else contextlib.nullcontext()


@pytest.mark.parametrize("loss", list(LOSSES))
@pytest.mark.parametrize("chunks", list(CHUNKS))
@pytest.mark.parametrize("policy", [*PRESETS, Policy(save={"logits"})])
def test_outputs_and_gradients_are_plain_pytorch_s(policy, chunks, loss, deliveries):
    def run(t):
        with chunked(chunks):
            return run_block(GRAPH, policy, t)

    t = given()
    for mine, other in zip(run(t), plain(t), strict=True):
        assert mine.requires_grad and mine.is_contiguous()
        torch.testing.assert_close(mine, other)
    with torch.no_grad():
        for mine, other in zip(run(t), plain(t), strict=True):
            assert not mine.requires_grad
            torch.testing.assert_close(mine, other)
    check(run, LOSSES[loss])


@pytest.mark.parametrize("names", [("input",), ("router.weight",), ("fc2.weight", "norm.weight")])
@pytest.mark.parametrize("loss", ["all", "logits"])
def test_some_gradients(names, loss, deliveries):
    check(lambda t: run_block(GRAPH, "full", t), LOSSES[loss], names=names)


def test_frozen_weights_and_a_frozen_input():
    for frozen in (("input",), ("router.weight", "router.bias"), ("input", "qkv.weight")):
        t = given()
        for name in frozen:
            t[name].requires_grad_(False)
        names = [name for name in t if name not in frozen]
        check(lambda t: run_block(GRAPH, "full", t), LOSSES["all"], t, names)


def test_passes_add_up(deliveries):
    """Several passes over one graph, of several losses and in another order; then freed."""
    t, total = given(), LOSSES["all"]
    results = run_block(GRAPH, "lean", t)
    parts = [LOSSES[name](*results) for name in ("logits", "the output", "qkv and the output")]
    for part in parts[:-1]:
        part.backward(retain_graph=True)
    parts[-1].backward()
    found = {name: leaf.grad for name, leaf in t.items()}
    others = plain(t)
    expected = sum(LOSSES[name](*others) for name in list(LOSSES)[1:])
    for grad, other in zip(found.values(), torch.autograd.grad(expected, [*t.values()])):  # noqa: B905
        torch.testing.assert_close(grad, other)
    with pytest.raises(RuntimeError, match="second time"):
        total(*results).backward()


def test_passes_of_two_threads(deliveries):
    """Each pass has its own gradients of side outputs, also where they alternate."""
    t, both = given(), threading.Barrier(2)
    y, _, logits = run_block(GRAPH, "full", t)
    found, expected = {}, {}
    for scale in (1.0, 3.0):
        expected[scale] = torch.autograd.grad(scale * plain(t)[2].sum(), t["router.weight"])[0]

    def meet(grads):
        both.wait(10)

    y.grad_fn.next_functions[0][0].register_prehook(meet)  # after both have noted theirs

    def run(scale):
        loss = 0.0 * y.sum() + scale * logits.sum()
        found[scale] = torch.autograd.grad(loss, t["router.weight"], retain_graph=True)[0]

    threads = [threading.Thread(target=run, args=(scale,)) for scale in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for scale, grad in expected.items():
        torch.testing.assert_close(found[scale], grad)
    node = deliver.block_of(y.grad_fn.next_functions[0][0])
    assert not node.side  # gradients do not outlive their passes


@pytest.mark.parametrize("reentrant", [True, False])
def test_inside_of_a_checkpoint(reentrant, deliveries):
    def run(t):
        names, values = list(t), list(t.values())
        again = lambda *values: run_block(GRAPH, "full", dict(zip(names, values, strict=True)))  # noqa: E731
        if not reentrant:
            return checkpoint(again, *values, use_reentrant=False)
        for leaf in values:
            leaf.grad = None
        return checkpoint(again, *values, use_reentrant=True)

    t = given()
    LOSSES["all"](*run(t)).backward()
    expected = torch.autograd.grad(LOSSES["all"](*plain(t)), [*t.values()])
    for leaf, other in zip(t.values(), expected, strict=True):
        torch.testing.assert_close(leaf.grad, other)


def test_sequences_first():
    t = given()
    first = {**t, "input": t["input"].transpose(0, 1).contiguous()}

    def run(chunks):
        with chunked(chunks):
            return [y.transpose(0, 1) for y in run_block(GRAPH, "full", first, seq_first=True)]

    for chunks in CHUNKS:
        results = run(chunks)
        for mine, other in zip(results, plain(t), strict=True):
            torch.testing.assert_close(mine, other)
        got = torch.autograd.grad(LOSSES["all"](*results), [*t.values()])
        expected = torch.autograd.grad(LOSSES["all"](*plain(t)), [*t.values()])
        for mine, other in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, other)


def test_buffers_of_gradients():
    t, expected = given(), given()
    for name, leaf in t.items():
        if name != "input":
            leaf.main_grad = torch.ones_like(leaf)
    into = accumulate.Accumulation("main_grad", frozenset(SHAPES))
    LOSSES["all"](*run_block(GRAPH, "full", t, accumulation=into)).backward()
    LOSSES["all"](*plain(expected)).backward()
    for name in SHAPES:
        torch.testing.assert_close(t[name].main_grad - 1, expected[name].grad)


def test_the_replay_check():
    def run(t):
        with check_replay():
            return run_block(GRAPH, "lean", t)

    check(run, LOSSES["all"])


def test_kept_in_segments_with_a_warning():
    """A block with side outputs keeps its input, and so does the next one."""

    def run(t):
        y, *_ = run_block(GRAPH, Policy(frozenset(), "first"), t)
        return run_block(GRAPH, Policy(frozenset(), "inner"), {**t, "input": y})

    def twice(t):
        return plain({**t, "input": plain(t)[0]})

    t = given()
    with pytest.warns(FusedRematWarning, match="keeps its input"):
        got = torch.autograd.grad(LOSSES["all"](*run(t)), [*t.values()])
    expected = torch.autograd.grad(LOSSES["all"](*twice(t)), [*t.values()])
    for mine, other in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("chunks", list(CHUNKS))
@pytest.mark.parametrize("policy", list(PRESETS))
def test_what_is_kept_is_predicted_and_held_once(policy, chunks):
    """Parts that groups and tiles compute are views of what the caller gets."""
    t, held = given(), {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        held[StorageWeakRef(storage)] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), chunked(chunks):
        _, *sides = run_block(GRAPH, policy, t)
    for leaf in [leaf for name, leaf in t.items() if name != "input"]:
        held.pop(StorageWeakRef(leaf.untyped_storage()), None)
    call = BlockConfig(GRAPH, kept_names(policy, GRAPH), frozenset(t), "auto")
    predicted = call.kept_bytes([t.get(name) for name in GRAPH.tensors])
    assert sum(held.values()) == sum(predicted.values())
    assert predicted["logits"] == B * S * E * 8
    for side in sides:
        assert StorageWeakRef(side.untyped_storage()) in held


def test_a_change_in_place_raises():
    t = given()
    y, _, logits = run_block(GRAPH, "none", t)
    y += 1.0
    y.sum().backward(retain_graph=True)
    with torch.no_grad():
        logits.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_double_backward_raises():
    t = given()
    y, _, logits = run_block(GRAPH, "full", t)
    loss = y.square().sum() + logits.square().sum()
    (grad,) = torch.autograd.grad(loss, t["input"], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        grad.sum().backward()


def test_batched_gradients_raise_for_side_outputs_alone():
    t = given()
    y, _, logits = run_block(GRAPH, "full", t)
    batched = {"is_grads_batched": True, "retain_graph": True}
    (got,) = torch.autograd.grad(y, t["input"], torch.stack([y, 2 * y]).detach(), **batched)
    torch.testing.assert_close(2 * got[0], got[1])
    for outputs in ([logits], [y, logits]):
        with pytest.raises(RuntimeError, match="is_grads_batched=True does not support gradients"):
            grads = [torch.stack([t, t]).detach() for t in outputs]
            torch.autograd.grad(outputs, t["input"], grads, **batched)


def test_compiled_autograd_raises():
    y, _, logits = run_block(GRAPH, "full", given())
    raises = pytest.raises(RuntimeError, match="compiled autograd does not support gradients")
    with raises, compiled_autograd._enable(torch.compile(backend="eager")):
        (y.sum() + logits.sum()).backward()


def test_compiled_forward_breaks_the_graph():
    torch._dynamo.reset()

    def run(t):
        return torch.compile(lambda t: run_block(GRAPH, "full", t), backend="eager")(t)

    check(run, LOSSES["all"])


def test_an_empty_batch():
    t = given(batch=0)
    y, qkv, logits = run_block(GRAPH, "full", t)
    assert (y.shape, qkv.shape, logits.shape) == ((0, S, D), (0, S, 3 * D), (0, S, E))
    (y.sum() + logits.sum()).backward()
    assert t["router.weight"].grad.eq(0).all() and t["input"].grad.shape == (0, S, D)


def test_a_failing_backward_raises_rather_than_omitting_a_gradient(monkeypatch):
    t = given()
    loss = LOSSES["all"](*run_block(GRAPH, "full", t))
    monkeypatch.setattr(executor, "_backward_chunks", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()


def test_a_side_output_is_read_inside_of_the_block():
    with pytest.raises(ValueError, match="side output 'lost' of 'routed'"):
        graph_of(("lost",))
    with pytest.raises(ValueError, match="'output'"):
        graph_of(("output",))
    assert Graph("routed", GRAPH.nodes, GRAPH.params).digest != GRAPH.digest
