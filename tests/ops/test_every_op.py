"""What every operation promises: PyTorch's results, equal bits in every policy, kept bytes."""

import pytest
import torch
from block_inputs import LAYOUTS, calls, compare, in_pieces, normal, results, same_bits
from op_cases import CASES, LOSS, ROTARY, ROTARY_BLOCKS, D
from reference import EXACT_PRESETS
from tiers import exhaustive, pairwise

from fused_remat import Policy
from fused_remat.graph.schedule import kept_bytes
from fused_remat.report.allocations import SavedBytes, measure_allocations

EVERY = CASES | {"loss": LOSS} | ROTARY | ROTARY_BLOCKS
RANDOM = [name for name, case in CASES.items() if case.dropout]
MIXED = ("attention", "causal", "encoder", "qk_norm_attention")  # tokens with tokens
TOKENWISE = [*(name for name in CASES if not name.startswith(MIXED)), "loss"]
# What backward reads again at "full"; dropout_add reads nothing but its seed.
READ_AGAIN = ("x", "query", "key", "value", "mask", "slope")


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture(params=EVERY)
def any_case(request):
    return EVERY[request.param]


def leaves(tensors):
    return list(tensors.values())


def either(first, second):
    """Two pairs of values, each value once; `make test-all` has the other two combinations."""
    (a, b), (c, d) = first, second
    return [(a, b), (c, d), exhaustive(a, d), exhaustive(c, b)]


def policies(op, tensors, p):
    """The five presets, each name that the op's graph can keep alone, and all of them."""
    ((call, _),) = calls(lambda: op(tensors, p))
    names = call.graph.names
    return (*EXACT_PRESETS, *(Policy(save={name}) for name in names), Policy(save=set(names)))


def check(case, tensors, p, tokens=512, lay=lambda tensors: tensors):
    """Output and every gradient are plain PyTorch's, of tensors that `lay` has laid out."""
    with in_pieces(tokens):
        compare(
            lambda: case.op(lay(tensors), p, **case.seed()),
            lambda: case.plain(lay(tensors), p, 7),
            [t for t in tensors.values() if t is not None],
        )


def laid(layout, names):
    return lambda tensors: tensors | {name: LAYOUTS[layout](tensors[name]) for name in names}


# --- results and gradients


@pytest.mark.parametrize("p, tokens", [*either((0.3, 4), (0.0, 512)), (0.3, 80), (1.0, 512)])
def test_outputs_and_gradients_are_plain_pytorchs(any_case, p, tokens):
    """Whole, in groups of two sequences, in tiles that begin within one; all dropped at 1."""
    check(any_case, any_case.tensors(batch=3, seq=37), p, tokens)


@pytest.mark.parametrize("p, policy", either((0.3, "full"), (0.0, "none")))
def test_gradcheck(any_case, policy, p):
    tensors = any_case.tensors(batch=1)

    def fn(*values):
        named = dict(zip(tensors, values, strict=True))
        return any_case.op(named, p, policy=policy, **any_case.seed())

    assert torch.autograd.gradcheck(fn, leaves(tensors), fast_mode=True)


@pytest.mark.parametrize("tokens, dtype", either((4, torch.float32), (512, torch.bfloat16)))
def test_gradients_are_the_same_bits_in_every_policy(any_case, dtype, tokens):
    tensors = any_case.tensors(batch=3, seq=21, dtype=dtype)
    # What is kept alone is cut, and put together again, where there are pieces.
    chosen = policies(any_case.op, tensors, 0.3) if tokens == 4 else EXACT_PRESETS
    found = []
    with in_pieces(tokens):
        for policy in chosen:
            call = lambda: any_case.op(tensors, 0.3, policy=policy, **any_case.seed())  # noqa: B023, E731
            found.append(results(call, leaves(tensors)))
    assert len(found) >= 5 and all(t.isfinite().all() for t in found[0])
    assert all(same_bits(found[0], other) for other in found[1:])


@pytest.mark.parametrize("policy, tokens", [*either(("full", 4), ("none", 512)), ("fast", 4)])
def test_backward_twice_gives_the_same_and_changes_no_operand(any_case, policy, tokens):
    tensors = any_case.tensors(batch=3)
    given = [*tensors.values(), *any_case.own(tensors)]
    before = [t.detach().clone() for t in given]
    several = any_case in ROTARY_BLOCKS.values()
    for kept in policies(any_case.op, tensors, 0.3) if several else (policy,):
        with in_pieces(tokens):
            with torch.no_grad():
                any_case.op(tensors, 0.3, policy=kept)
            y = any_case.op(tensors, 0.3, policy=kept)
            out, dy = y.detach().clone(), torch.randn_like(y)
            same_dy = dy.clone()
            first = torch.autograd.grad(y, leaves(tensors), dy, retain_graph=True)
            second = torch.autograd.grad(y, leaves(tensors), dy)
        assert same_bits(first, second) and same_bits([out, same_dy, *before], [y, dy, *given])
        with pytest.raises(RuntimeError, match="second time"):
            y.backward(dy)


@pytest.mark.parametrize("policy", ["full", "fast"])
def test_a_batch_of_gradients_at_once(any_case, policy):
    tensors = any_case.tensors()
    y = any_case.op(tensors, 0.3, policy=policy)
    dys = torch.randn(3, *y.shape, dtype=y.dtype)
    batched = torch.autograd.grad(y, leaves(tensors), dys, is_grads_batched=True, retain_graph=True)
    for i, dy in enumerate(dys):
        single = torch.autograd.grad(y, leaves(tensors), dy, retain_graph=True)
        assert same_bits([grads[i] for grads in batched], single)


def test_weights_that_may_be_none(any_case):
    """Without any bias, with one of them alone, and without the weights of norms."""
    tensors = any_case.tensors()
    optional = [name for name in tensors if name.endswith("bias")]
    norms = [name for name in tensors if name.startswith("norm") or name in ("weight", "bias")]
    for kept in ((), norms, *((name,) for name in optional)):
        gone = {*optional, *norms} - {*kept}
        if gone:
            check(any_case, tensors | dict.fromkeys(gone), 0.3)


# --- shapes and layouts


LEADS = [(), (1,), (7,), (3, 5), (2, 3, 5), (0,), (3, 0), (0, 5), (2, 0, 3)]


@pytest.mark.parametrize("layout, tokens", pairwise(list(LAYOUTS), [512, 16, 4]))
def test_inputs_of_any_layout(any_case, layout, tokens):
    tensors = any_case.tensors(batch=3)
    names = [name for name in tensors if name in (*READ_AGAIN, "residual") and name != "slope"]
    check(any_case, tensors, 0.3, tokens, laid(layout, names))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TOKENWISE)
def test_tokens_in_any_dimensions(name, layout):
    """The tokens are rows of the dropout mask in order; no tokens give a gradient of 0."""
    case, made = EVERY[name], EVERY[name].tensors()
    streams = [name for name in ("x", "residual") if name in made]
    for tokens, leads in ((4, LEADS), (512, [(), (2, 3, 5), (0, 5)])):  # whole, any is a matrix
        for lead in leads:
            tensors = made | {name: normal(*lead, D, seed=i) for i, name in enumerate(streams)}
            check(case, tensors, 0.3, tokens, laid(layout, streams))


# --- memory


@pytest.mark.parametrize("p, dtype", either((0.3, torch.bfloat16), (0.0, torch.float64)))
def test_kept_bytes_are_the_graphs_prediction(any_case, dtype, p):
    """What is saved, and what stays allocated."""
    tensors = any_case.tensors(dtype=dtype)
    for policy in policies(any_case.op, tensors, p):

        def run(policy=policy):
            return any_case.op(tensors, p, policy=policy)

        ((call, shapes),) = calls(run)
        dtypes = dict.fromkeys(call.graph.inputs, dtype)
        kept = kept_bytes(call.graph, call.save, call.needs_grad, shapes, dtypes)
        with SavedBytes(exclude=any_case.own(tensors)) as saved:
            output = run()
        assert saved.total == sum(kept.values())
        new = sum(n for name, n in kept.items() if name not in call.graph.inputs)
        new += 0 if "output" in kept else output.nbytes
        assert measure_allocations(run).net == new


# --- seeds


@pytest.mark.parametrize("name", RANDOM)
def test_a_seed_makes_a_call_repeatable(name):
    case, tensors = CASES[name], CASES[name].tensors()
    state, changed = torch.get_rng_state(), torch.tensor(3)
    seeds = (3, changed, 4, -(2**63))
    runs = [results(lambda: case.op(tensors, 0.5, seed=s), leaves(tensors)) for s in seeds]  # noqa: B023
    assert torch.equal(torch.get_rng_state(), state)
    assert same_bits(runs[0], runs[1])
    assert not torch.equal(runs[0][0], runs[2][0]) and not torch.equal(runs[2][0], runs[3][0])
    y = case.op(tensors, 0.5, seed=changed)
    changed.add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        y.sum().backward()


# --- autograd and autocast


def test_double_backward_raises(any_case):
    tensors = any_case.tensors()
    y = any_case.op(tensors, 0.3)
    grads = torch.autograd.grad(y.sum(), leaves(tensors), create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        sum(g.square().sum() for g in grads).backward()


def test_changing_what_backward_reads_raises(any_case):
    """What is not read again may change, and the gradients are right all the same."""
    tensors = any_case.tensors()
    expected = results(lambda: any_case.op(tensors, 0.3, **any_case.seed()), leaves(tensors))
    raised = set()
    for name in tensors:
        fresh = any_case.tensors()
        y = any_case.op(fresh, 0.3, **any_case.seed())
        with torch.no_grad():
            fresh[name].add_(1.0)
        try:
            got = results(lambda: y, leaves(fresh))  # noqa: B023
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            raised.add(name)
            continue
        assert same_bits(got, expected), name
    reads_x = any_case.full[0] > 0
    must = {n for n in tensors if (n in READ_AGAIN and reads_x) or n.endswith("weight")}
    assert raised >= must


def test_autocast_changes_nothing(case):
    tensors = case.tensors(dtype=torch.float32)
    options = {"policy": "full", **case.seed()}
    plain = results(lambda: case.op(tensors, 0.3, **options), leaves(tensors))
    with torch.autocast("cpu", torch.bfloat16):
        inside = results(lambda: case.op(tensors, 0.3, **options), leaves(tensors))
    assert same_bits(plain, inside)
