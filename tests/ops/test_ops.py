"""The functional ops: what all of them promise, op by op."""

import pytest
import torch
from accuracy import check_error
from reference import EXACT_PRESETS
from reference_ops import CASES, calls, compare, in_pieces, normal, results
from tiers import exhaustive
from torch import nn

from fused_remat import Policy, ops
from fused_remat.graph.schedule import kept_bytes
from fused_remat.report.allocations import SavedBytes, measure_allocations

RANDOM = [name for name, case in CASES.items() if case.dropout]
# What backward reads again at "full"; dropout_add reads nothing but its seed.
READ_AGAIN = ("x", "query", "key", "value", "mask", "slope")


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def leaves(tensors):
    return list(tensors.values())


def policies(op, tensors, p):
    """The five presets, and each name that the op's graph can keep alone."""
    ((call, _),) = calls(lambda: op(tensors, p))
    return (*EXACT_PRESETS, *(Policy(save={name}) for name in call.graph.names))


@pytest.mark.parametrize(
    "p, tokens", [(0.3, 4), (0.0, 512), exhaustive(0.3, 512), exhaustive(0.0, 4)]
)
def test_outputs_and_gradients_are_plain_pytorchs(case, p, tokens):
    tensors = case.tensors(batch=3, seq=37)
    with in_pieces(tokens):
        compare(
            lambda: case.op(tensors, p, seed=7) if case.dropout else case.op(tensors, p),
            lambda: case.plain(tensors, p, 7),
            leaves(tensors),
        )


@pytest.mark.parametrize(
    "p, dtype",
    [
        (0.0, torch.float32),
        (0.3, torch.bfloat16),
        exhaustive(0.3, torch.float32),
        exhaustive(0.0, torch.bfloat16),
    ],
)
def test_errors_are_no_larger_than_pytorchs(case, dtype, p):
    tensors = case.tensors(batch=3, seq=37, dtype=dtype)
    exact = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
    seed = {"seed": 7} if case.dropout else {}
    dy = normal(*case.plain(tensors, p, 7).shape, seed=99).detach().to(dtype)
    with in_pieces(64):
        ours = results(lambda: case.op(tensors, p, **seed), leaves(tensors), dy)
    peer = results(lambda: case.plain(tensors, p, 7), leaves(tensors), dy)
    truth = results(lambda: case.plain(exact, p, 7), leaves(exact), dy.double())
    check_error(ours, peer, truth, ["output", *tensors])


@pytest.mark.parametrize(
    "p, policy", [(0.3, "full"), (0.0, "none"), exhaustive(0.0, "full"), exhaustive(0.3, "none")]
)
def test_gradcheck(case, policy, p):
    tensors = case.tensors(batch=1)
    options = {"policy": policy} | ({"seed": 7} if case.dropout else {})

    def fn(*values):
        return case.op(dict(zip(tensors, values, strict=True)), p, **options)

    assert torch.autograd.gradcheck(fn, leaves(tensors), fast_mode=True)


@pytest.mark.parametrize(
    "tokens, dtype",
    [
        (4, torch.float32),
        (512, torch.bfloat16),
        exhaustive(512, torch.float32),
        exhaustive(4, torch.bfloat16),
    ],
)
def test_gradients_are_the_same_bits_in_every_policy(case, dtype, tokens):
    tensors = case.tensors(batch=3, seq=21, dtype=dtype)
    seed = {"seed": 7} if case.dropout else {}
    # What is kept alone is cut, and put together again, where there are pieces.
    chosen = policies(case.op, tensors, 0.3) if tokens == 4 else EXACT_PRESETS
    with in_pieces(tokens):
        first, *others = (
            results(lambda: case.op(tensors, 0.3, policy=policy, **seed), leaves(tensors))  # noqa: B023
            for policy in chosen
        )
    assert len(others) >= 4 and all(t.isfinite().all() for t in first)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    "p, dtype",
    [
        (0.3, torch.bfloat16),
        (0.0, torch.float64),
        exhaustive(0.0, torch.bfloat16),
        exhaustive(0.3, torch.float64),
    ],
)
def test_kept_bytes_are_the_graphs_prediction(case, dtype, p):
    tensors = case.tensors(dtype=dtype)
    for policy in policies(case.op, tensors, p):

        def run(policy=policy):
            return case.op(tensors, p, policy=policy)

        ((call, shapes),) = calls(run)
        kept = kept_bytes(call.graph, call.save, call.needs_grad, shapes, dtype.itemsize)
        with SavedBytes(exclude=case.own(tensors)) as saved:
            run()
        assert saved.total == sum(kept.values())


@pytest.mark.parametrize("policy", ["full", "none"])
def test_nothing_else_stays_allocated(case, policy):
    tensors = case.tensors(dtype=torch.float32)

    def run():
        return case.op(tensors, 0.3, policy=policy)

    ((call, shapes),) = calls(run)
    kept = kept_bytes(call.graph, call.save, call.needs_grad, shapes, 4)
    new = sum(n for name, n in kept.items() if name not in call.graph.inputs)
    assert measure_allocations(run).net == new + (0 if "output" in kept else run().nbytes)


@pytest.mark.parametrize(
    "p, dtype",
    [
        (0.3, torch.float32),
        (0.0, torch.float64),
        exhaustive(0.0, torch.float32),
        exhaustive(0.3, torch.float64),
    ],
)
def test_full_keeps_inputs_and_statistics_only(case, dtype, p):
    tensors = case.tensors(batch=3, seq=7, dtype=dtype)
    with SavedBytes(exclude=case.own(tensors)) as saved:
        case.op(tensors, p, policy="full")
    elements, statistics = case.full
    seed = 8 if p and case.dropout else 0
    assert saved.total == 21 * (elements + statistics) * dtype.itemsize + seed


@pytest.mark.parametrize("name", RANDOM)
def test_a_seed_makes_a_call_repeatable(name):
    case = CASES[name]
    tensors = case.tensors()
    state = torch.get_rng_state()
    runs = [results(lambda: case.op(tensors, 0.5, seed=seed), leaves(tensors))  # noqa: B023
            for seed in (3, torch.tensor(3), 4, -(2**63))]  # fmt: skip
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[1], strict=True))
    assert not torch.equal(runs[0][0], runs[2][0]) and not torch.equal(runs[2][0], runs[3][0])


@pytest.mark.parametrize("name", RANDOM)
def test_without_a_seed_the_generator_advances_once_a_call(name):
    case = CASES[name]
    tensors = case.tensors()

    def states(p):
        torch.manual_seed(5)
        before = torch.get_rng_state()
        y = case.op(tensors, p)
        after = torch.get_rng_state()
        torch.autograd.grad(y.sum(), leaves(tensors))
        assert torch.equal(torch.get_rng_state(), after)
        return y, before, after

    drawn, _, after = states(0.5)
    torch.manual_seed(5)
    seed = torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(torch.get_rng_state(), after)
    assert torch.equal(drawn, case.op(tensors, 0.5, seed=seed))
    assert not torch.equal(drawn, case.op(tensors, 0.5))
    _, before, after = states(0.0)
    assert torch.equal(before, after)


@pytest.mark.parametrize("name", RANDOM)
def test_everything_is_dropped_at_one(name):
    case = CASES[name]
    tensors = case.tensors()
    compare(
        lambda: case.op(tensors, 1.0, seed=7), lambda: case.plain(tensors, 1.0, 7), leaves(tensors)
    )


def test_double_backward_raises(case):
    tensors = case.tensors()
    y = case.op(tensors, 0.3)
    grads = torch.autograd.grad(y.sum(), leaves(tensors), create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        sum(g.square().sum() for g in grads).backward()


def test_changing_what_backward_reads_raises(case):
    """What is not read again may change, and the gradients are right all the same."""
    tensors = case.tensors()
    seed = {"seed": 7} if case.dropout else {}
    expected = results(lambda: case.op(tensors, 0.3, **seed), leaves(tensors))
    raised = set()
    for name in tensors:
        fresh = case.tensors()
        y = case.op(fresh, 0.3, **seed)
        with torch.no_grad():
            fresh[name].add_(1.0)
        try:
            got = results(lambda: y, leaves(fresh))  # noqa: B023
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            raised.add(name)
            continue
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), name
    must = {n for n in tensors if n in READ_AGAIN or n.endswith("weight")}
    assert raised >= (must if case is not CASES["dropout_add"] else set())


@pytest.mark.parametrize(
    "policy, tokens", [("full", 4), ("none", 512), exhaustive("full", 512), exhaustive("none", 4)]
)
def test_backward_twice_gives_the_same_and_changes_no_operand(case, policy, tokens):
    tensors = case.tensors(batch=3)
    before = {name: t.detach().clone() for name, t in tensors.items()}
    with in_pieces(tokens):
        y = case.op(tensors, 0.3, policy=policy)
        out, dy = y.detach().clone(), torch.randn_like(y)
        given = dy.clone()
        first = torch.autograd.grad(y, leaves(tensors), given, retain_graph=True)
        second = torch.autograd.grad(y, leaves(tensors), given)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(y, out) and torch.equal(given, dy)
    assert all(torch.equal(t, before[name]) for name, t in tensors.items())
    with pytest.raises(RuntimeError, match="second time"):
        y.backward(dy)


def test_a_batch_of_gradients_at_once(case):
    tensors = case.tensors()
    y = case.op(tensors, 0.3)
    dys = torch.randn(3, *y.shape, dtype=y.dtype)
    batched = torch.autograd.grad(y, leaves(tensors), dys, is_grads_batched=True, retain_graph=True)
    for i, dy in enumerate(dys):
        single = torch.autograd.grad(y, leaves(tensors), dy, retain_graph=True)
        assert all(torch.equal(a[i], b) for a, b in zip(batched, single, strict=True))


@pytest.mark.parametrize("name", RANDOM)
def test_changing_the_seed_raises(name):
    seed = torch.tensor(3)
    y = CASES[name].op(CASES[name].tensors(), 0.3, seed=seed)
    seed.add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        y.sum().backward()


def test_autocast_changes_nothing(case):
    tensors = case.tensors(dtype=torch.float32)
    options = {"policy": "full"} | ({"seed": 7} if case.dropout else {})
    plain = results(lambda: case.op(tensors, 0.3, **options), leaves(tensors))
    with torch.autocast("cpu", torch.bfloat16):
        inside = results(lambda: case.op(tensors, 0.3, **options), leaves(tensors))
    assert all(torch.equal(a, b) for a, b in zip(plain, inside, strict=True))


def test_nothing_is_kept_without_gradients(case):
    tensors = case.tensors()
    with SavedBytes() as saved, torch.no_grad():
        assert not case.op(tensors, 0.3, policy="none").requires_grad
    assert saved.total == 0


def test_one_wanted_gradient_at_a_time(case):
    tensors = case.tensors()
    seed = {"seed": 7} if case.dropout else {}
    every = results(lambda: case.op(tensors, 0.3, **seed), leaves(tensors))
    for name, expected in zip(tensors, every[1:], strict=True):
        alone = {n: t.detach().requires_grad_(n == name) for n, t in tensors.items()}
        _, got = results(lambda: case.op(alone, 0.3, **seed), [alone[name]])  # noqa: B023
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"policy": "lavish"}, ValueError, "unknown policy 'lavish'; valid presets: full, lean"),
        ({"policy": Policy(save={"nothing"})}, ValueError, "unknown activation 'nothing'"),
        ({"policy": None}, TypeError, "policy"),
        ({"backend": "abacus"}, ValueError, "unknown backend 'abacus'; valid: auto, eager"),
    ],
)
def test_unknown_policies_and_backends_raise(case, options, error, message):
    with pytest.raises(error, match=message):
        case.op(case.tensors(), 0.0, **options)


@pytest.mark.parametrize(
    ("seed", "error"),
    [
        (0.5, TypeError), (True, TypeError), ("0", TypeError), (2**63, ValueError),
        (torch.tensor(0.5), ValueError), (torch.tensor([1]), ValueError),
        (torch.tensor(1, device="meta"), ValueError),
    ],
)  # fmt: skip
def test_bad_seeds_raise(seed, error):
    for name in RANDOM:
        with pytest.raises(error, match="seed must"):
            CASES[name].op(CASES[name].tensors(), 0.1, seed=seed)


@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")])
@pytest.mark.parametrize("name", RANDOM)
def test_probabilities_outside_0_1_raise(name, p):
    with pytest.raises(ValueError, match=r"p must be between 0 and 1"):
        CASES[name].op(CASES[name].tensors(), p)


def test_mixed_dtypes_and_devices_raise(case):
    given = {
        name: t for name, t in case.tensors().items() if name != "slope"
    }  # captured, not given
    for name, t in given.items():
        for other in (t.detach().to(torch.bfloat16), t.detach().to("meta"), t.detach().long()):
            with pytest.raises(RuntimeError, match=r"torch\.(float64|int64|bfloat16)"):
                case.op({**case.tensors(), name: other}, 0.0)
    with pytest.raises(TypeError, match="Tensor"):
        case.op({**case.tensors(), next(iter(case.shapes)): [1.0]}, 0.0)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_functorch_transforms_raise_and_say_so(transform):
    x, w = torch.randn(3, 8), torch.randn(16, 8)
    with pytest.raises(RuntimeError, match=r"inside torch\.func transforms"):
        transform(lambda w: ops.mlp(x, w, None, w.t(), None).sum())(w)


def test_missing_projections_raise():
    x = torch.randn(2, 3, 8)
    with pytest.raises(TypeError, match="qkv_weight and proj_weight"):
        ops.attention_block(x, None, None, None, None, torch.randn(8, 8), None, nhead=2)


@pytest.mark.parametrize(
    "call",
    [
        lambda q: ops.attention(q, q, q, [[1]]),
        lambda q: ops.attention(q, q, q, window=2),
        lambda q: ops.attention(q, q, q, window=(1.0, 1)),
        lambda q: ops.encoder_block(q[0], None, 2),
        lambda q: ops.attention_block(
            q[0], None, None, torch.randn(9, 3), None, torch.randn(3, 3), None, 3.0
        ),
    ],
)
def test_arguments_of_another_type_raise_type_error(call):
    with pytest.raises(TypeError, match=r"must|takes|ints"):
        call(torch.randn(2, 4, 5, 3))


def test_a_modules_hooks_and_buffers_are_refused():
    x, w = torch.randn(3, 8), torch.randn(16, 8)
    hooked = nn.ReLU()
    hooked.register_forward_hook(lambda *_: None)
    for activation, reason in ((hooked, "has hooks"), (nn.BatchNorm1d(16), "has buffers")):
        with pytest.raises(ValueError, match=reason):
            ops.mlp(x, w, None, w.t(), None, activation)
