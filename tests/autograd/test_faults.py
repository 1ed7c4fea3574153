"""Faults in forward and backward and between them: what raises, and that the next step is right."""

import contextlib
import functools
import gc
import itertools

import pytest
import torch
from block_inputs import in_pieces
from reference import EXACT_PRESETS, pair, run, weights_of
from same_bits import assert_same_bits
from tiers import exhaustive
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fused_remat import FusedRematLayer
from fused_remat.execution.executor import check_unchanged
from fused_remat.report.allocations import measure_allocations

D, H, FF = 8, 2, 12
nothing = contextlib.nullcontext()
pytestmark = pytest.mark.usefixtures("one_thread")


class OutOfMemory(TorchDispatchMode):
    """The `at`-th operator with a result in new memory raises instead of returning it.

    Not seen, since they are no operators of torch's: small dropout masks, which numpy makes; and
    what an operator allocates within itself, as for one that fails inside.
    """

    def __init__(self, at):
        super().__init__()
        self.at, self.made = at, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {s._cdata for s in storages((*args, *kwargs.values()))}
        results = result if isinstance(result, tuple | list) else (result,)
        new = [s for s in storages(results) if s._cdata not in given]
        if new:
            self.made += map(StorageWeakRef, new)
            if len(self.made) >= self.at:
                raise torch.OutOfMemoryError("injected")
        return result


def storages(values):
    return [t.untyped_storage() for t in values if isinstance(t, torch.Tensor)]


def fail_everywhere(step):
    """Run `step()` out of memory at its first allocation, its second, ...; how many it has.

    Nothing that it allocates may be there afterwards.
    """
    made = []
    for at in itertools.count(1):
        with OutOfMemory(at) as mode:
            try:
                step()
            except torch.OutOfMemoryError:
                made += mode.made
                continue
        gc.collect()
        assert all(storage.expired() for storage in made)
        return len(mode.made)


def layer_and_step(policy, norm_first, dropout=0.3):
    """A layer, its leaves, and a forward."""
    layer = pair(D, H, FF, dropout, policy=policy, norm_first=norm_first, batch_first=True)[1]
    x = torch.randn(2, 3, D, requires_grad=True)
    mask = torch.randn(3, 3, requires_grad=True)
    leaves = [x, mask, *layer.parameters()]

    def forward():
        torch.manual_seed(0)
        return layer(x, mask).square().sum()

    return layer, leaves, forward


@pytest.mark.composes(
    "Concurrency and faults",
    "out of memory at every allocation of forward and of backward: no leak, no gradient half "
    "written, the next step the same bits",
    limits="injected at torch's operators: not inside them, nor in numpy",
)
@pytest.mark.parametrize(
    ("policy", "tokens", "norm_first"),
    [
        ("full", 2, True),
        *((policy, 512, i % 2 == 0) for i, policy in enumerate(EXACT_PRESETS)),
        *(exhaustive(policy, 512, i % 2 == 1) for i, policy in enumerate(EXACT_PRESETS)),
    ],
)
def test_out_of_memory_anywhere_leaves_no_trace(policy, tokens, norm_first):
    with in_pieces(tokens):
        _, leaves, forward = layer_and_step(policy, norm_first)
        expected = torch.autograd.grad(forward(), leaves)
        for t in leaves:
            t.grad = torch.full_like(t, 0.5)
        before = [t.grad.clone() for t in leaves]
        loss = forward()
        counts = []
        if policy == "full":  # forward runs the same program in every policy
            counts.append(fail_everywhere(lambda: forward().detach()))
        # The graph is kept, and so is what backward read of it: the last time, all is there.
        backward = functools.partial(torch.autograd.grad, loss, leaves, retain_graph=True)
        counts.append(fail_everywhere(backward))
        assert min(counts) > 15
        with OutOfMemory(counts[-1] // 2), pytest.raises(torch.OutOfMemoryError):
            loss.backward(retain_graph=True)
        assert all(torch.equal(t.grad, b) for t, b in zip(leaves, before, strict=True))
        assert_same_bits(torch.autograd.grad(loss, leaves), expected)
        assert_same_bits(torch.autograd.grad(forward(), leaves), expected)


@pytest.mark.composes(
    "Concurrency and faults",
    "`layer.policy` and `layer.backend` set between forward and backward: for the next call",
)
def test_what_counts_is_what_forward_read():
    """Policy, backend and tensors, whatever became of the module since."""
    layer, leaves, forward = layer_and_step("full", True)
    expected = torch.autograd.grad(forward(), leaves)
    loss = forward()
    layer.policy, layer.backend = "none", "eager"
    before, after = (block_of(y).execution.call for y in (loss, forward()))
    layer.linear1 = nn.Linear(D, FF)
    layer.eval()
    layer.to("meta")  # makes new parameters
    assert before.save == frozenset() and before.backend == "auto"
    assert_same_bits(torch.autograd.grad(loss, leaves), expected)
    assert {"attn", "up"} <= after.save and after.backend == "eager"


def block_of(loss):
    """The fused block's node in the graph of `loss`."""
    node = loss.grad_fn
    while node.name() != "FusedRematBlockBackward":
        node = node.next_functions[0][0]
    return node


def changed(t):
    with torch.no_grad():
        return t.add_(1.0)


#: What becomes of a tensor's data, and what is said where backward reads it again.
AGAIN = "{} again, which was torch.float32 of shape .*{},?. on cpu .*"
CHANGES = {
    "in place": (changed, "modified by an inplace operation"),
    "half": (torch.Tensor.half, AGAIN + "torch.float16 of shape .* on cpu now: do not"),
    "double": (torch.Tensor.double, AGAIN + "torch.float64 of shape .* on cpu now"),
    "fewer rows": (lambda t: t[:1], AGAIN + r"torch.float32 of shape \(1,.* on cpu now"),
    "resized": (
        lambda t: t.clone().resize_(3), AGAIN + r"torch.float32 of shape \(3,\) on cpu now"
    ),
}  # fmt: skip


@pytest.mark.composes(
    "Concurrency and faults",
    "parameters, inputs and masks moved, cast or resized before backward: RuntimeError",
)
@pytest.mark.parametrize("policy", ["full", "none"])
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre", "post"])
def test_what_backward_reads_again_must_not_have_been_moved(policy, norm_first):
    """Each tensor in turn; autograd itself sees most of these changes in what was saved not.

    What is not read again may change in place, and the gradients are right all the same.
    """
    layer, leaves, forward = layer_and_step(policy, norm_first)
    expected = torch.autograd.grad(forward(), leaves)
    named = {"input": leaves[0], "mask": leaves[1], **weights_of(layer)}
    assert {id(leaf) for leaf in leaves} == {id(leaf) for leaf in named.values()}
    reread = set()
    for (name, leaf), (how, (change, said)) in itertools.product(named.items(), CHANGES.items()):
        loss = forward()
        block, data, was = block_of(loss), leaf.data, leaf.shape[-1]
        if block.execution.rereads[block.execution.call.graph.tensors.index(name)]:
            reread.add(name)
            raises = pytest.raises(RuntimeError, match=said.format(repr(name), was))
        else:  # a change that is autograd's to check, when it adds the gradient
            raises = contextlib.suppress(RuntimeError) if how != "in place" else nothing
        try:
            if how == "in place":
                data = data.clone()
                change(leaf)
            else:
                leaf.data = change(data)
            with raises:
                found = torch.autograd.grad(loss, leaves)
                assert how != "in place" or assert_same_bits(found, expected) is None
        finally:
            leaf.data = data
    weights = {name for name in named if name.endswith("weight")}
    assert {"input", "mask", *weights} <= reread
    assert policy == "none" or {"qkv.bias", "proj.bias", "fc1.bias"} <= reread


def test_numbers_and_captured_tensors_may_be_elsewhere():
    """A zero-dimensional tensor mixes with those of another device, and is no parameter moved."""
    like = torch.ones(1)
    number, matrix = torch.ones((), device="meta"), torch.ones(2, 2, device="meta")
    dtypes = [torch.float32] * 2
    names = ["number", "activation.0"]
    check_unchanged(names, [number.shape, matrix.shape], dtypes, [number, matrix], like)
    with pytest.raises(RuntimeError, match="'matrix' again"):
        check_unchanged(["matrix"], [matrix.shape], dtypes, [matrix], like)


def interrupt(*_):
    raise KeyboardInterrupt


class InReplay:
    """A hook that acts, and so is replayed, where it calls `fn`; an activation that does the same.

    The activation is tried on one token, then called in forward: the third call is the rebuild.
    """

    def __init__(self, fn, first=1):
        self.fn, self.first, self.calls = fn, first, 0

    def __call__(self, *args):
        self.calls += 1
        if self.calls > self.first:
            self.fn()
        return torch.sin(args[-1])


#: Each interrupts backward inside of its context.
INTERRUPTS = {
    "a gradient's hook of the input": lambda layer, x: x.register_hook(interrupt),
    "unpacking": lambda layer, x: torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.clone(), interrupt
    ),
    "the activation": lambda layer, x: nothing,
    "a hook in the fallback's replay": lambda layer, x: layer.linear1.register_forward_hook(
        InReplay(interrupt)
    ),
}


@pytest.mark.composes(
    "Concurrency and faults",
    "KeyboardInterrupt and exceptions in users' hooks and functions during backward",
)
@pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")
@pytest.mark.parametrize("where", INTERRUPTS)
def test_an_interrupt_in_backward_leaves_the_layer_usable(where):
    activation, captured = InReplay(lambda: None, 2), nn.Parameter(torch.ones(()))
    captured.register_hook(lambda grad: 2 * grad)
    layer = FusedRematLayer(D, H, FF, 0.0, activation=lambda t: activation(t) * captured)
    x = torch.randn(5, 2, D, requires_grad=True)
    expected = [*run(layer, x), torch.autograd.grad(layer(x).sum(), captured)[0]]

    def failing():
        activation.calls = 0
        with INTERRUPTS[where](layer, x):
            y = layer(x)
            with pytest.raises(KeyboardInterrupt):
                y.square().sum().backward()
        layer.zero_grad()
        x.grad = None
        gc.collect()  # the exception's frames

    activation.fn = interrupt if where == "the activation" else activation.fn
    failing()
    # The last exception may live on, with what its frames hold; not more after more of them.
    one = measure_allocations(failing).net
    assert measure_allocations(lambda: [failing() for _ in range(2)] and None).net <= one
    activation.fn = lambda: None
    assert layer.why_not_fused(x) is None
    assert torch.backends.mha.get_fastpath_enabled()
    found = [*run(layer, x), torch.autograd.grad(layer(x).sum(), captured)[0]]
    assert_same_bits(found, expected)
