"""The planner's search against every choice there is, on chains of a few calls."""

import contextlib
import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import MORE

from fused_remat.planner import BudgetError, solve
from fused_remat.planner.chain import (
    Chain,
    Choice,
    LayerOptions,
    Moment,
    Option,
    kept,
    peak,
    seconds,
    timeline,
)
from fused_remat.planner.solve import METHODS, choose, frontier, least_peak, optimal

FEW = settings(max_examples=50 * MORE)
SEEDS = st.integers(0, 2**32)
SAVES = [("key",), ("gate", "key")]


def random_chain(seed):
    """Small numbers, so that there are ties; every sum of seconds is exact."""
    draw = random.Random(seed)
    n = draw.randint(1, 5)
    names = [f"layers.{i}" for i in range(n)]
    if n > 2 and draw.random() < 0.4:
        names[draw.randrange(1, n)] = names[0]
    more = 2 if n < 5 else 1  # options than the base
    saves = {name: [(), *draw.sample(SAVES, draw.randint(1, more))] for name in names}
    calls = tuple(random_call(draw, name, saves[name], i) for i, name in enumerate(names))
    resting = {"parameters": draw.randint(0, 20), "gradients": draw.randint(0, 5)}
    moments = tuple(random_moments(draw, calls))
    return Chain(calls, moments, resting, 100.0, update=draw.choice([0, 0, 30]))


def offloading(chain, seed):
    """Each of a call's options may also move some of what it keeps."""
    moved, slower = seed % 4 + 1, seed % 2 / 8

    def away(o):
        changes = {"kept": o.kept - moved, "moved": moved, "seconds": o.seconds + slower}
        return replace(o, offload=("input",), **changes)

    calls = [replace(c, options=(*c.options, *map(away, c.options))) for c in chain.calls]
    return replace(chain, calls=tuple(calls))


def random_call(draw, name, saves, i):
    base = draw.randint(2, 6)
    options = []
    for save in saves:
        kept = base + (draw.randint(0, 6) if options else 0)
        forward, backward, eighths = (draw.randint(0, 8) for _ in range(3))
        options.append(Option(save, kept, forward, backward, eighths / 8))
    forward, linked = draw.randint(0, 8) / 8, draw.random() < 0.85
    return LayerOptions(
        name, "block", tuple(options), forward, draw.randint(0, base), linked and i > 0
    )


def random_moments(draw, calls):
    """Forward, then backward; gradients accumulate, and something is between the calls at times."""
    level = draw.randint(0, 5)

    def outside(backward, alive):
        if draw.random() < 0.5:
            yield Moment(-1, backward, level, level + draw.randint(0, 12), alive)

    for i, call in enumerate(calls):
        yield from outside(False, i)
        yield Moment(i, False, level, level + call.base.forward + draw.randint(0, 2), i)
        level += call.base.kept
    yield from outside(False, len(calls))
    for i, call in reversed(list(enumerate(calls))):
        yield from outside(True, i + 1)
        top = level + call.base.backward
        yield Moment(i, True, level, top, i + 1)
        if draw.random() < 0.3:
            yield Moment(i, True, level + 1, top + draw.randint(0, 2), i + 1)
        level += draw.randint(0, 4) - call.base.kept
    yield from outside(True, 0)


def valid(chain, choice):
    """Return whether a choice is valid, by another definition than the planner's search."""
    chosen = [call.options[o] for call, o in zip(chain.calls, choice.options, strict=True)]
    names = [call.layer for call in chain.calls]
    inside = [i for segment in choice.segments for i in range(*segment)]
    return (
        len(set(zip(names, choice.options, strict=True))) == len(set(names))
        and len(inside) == len(set(inside))
        and all(names.count(names[i]) == 1 and not chosen[i].offload for i in inside)
        and all(
            last - first >= 2
            and all(chain.calls[i].linked for i in range(first + 1, last))
            and len({option.save for option in chosen[first : last - 1]}) == 1
            and choice.options[last - 1] == 0
            for first, last in choice.segments
        )
    )


def segmentations(n, first=0):
    """All disjoint runs of two calls or more, in order."""
    yield ()
    for a, b in itertools.combinations(range(first, n + 1), 2):
        if b - a >= 2:
            yield from (((a, b), *more) for more in segmentations(n, b))


def brute_force(chain):
    """Every choice, with its seconds and its peak."""
    options = itertools.product(*(range(len(call.options)) for call in chain.calls))
    pairs = itertools.product(options, list(segmentations(len(chain.calls))))
    choices = (Choice(*pair) for pair in pairs)
    return [(seconds(chain, c), peak(chain, c), c) for c in choices if valid(chain, c)]


def measured(chain, choice):
    return choice and (seconds(chain, choice), peak(chain, choice))


def budgets(every):
    """One that nothing fits, all between where something changes, and one that all fits."""
    peaks = sorted({most for _, most, _ in every})
    step = max(1, len(peaks) // 12)
    return [peaks[0] - 1, *peaks[::step], peaks[-1], None]


@FEW
@given(SEEDS)
def test_optimal_is_the_best_of_all_choices(seed):
    """No method is better, nor over its budget."""
    chain = random_chain(seed)
    every = brute_force(chain)
    for budget in budgets(every):
        fitting = [(time, most) for time, most, _ in every if budget is None or most <= budget]
        best = min(fitting, default=None)
        assert measured(chain, optimal(chain, budget)) == best
        for method in METHODS.values():
            choice = method(chain, budget)
            if choice is not None:
                assert valid(chain, choice) and choice == method(chain, budget)
                assert budget is None or peak(chain, choice) <= budget
                assert seconds(chain, choice) >= best[0]


@FEW
@given(SEEDS)
def test_frontier_goes_from_the_least_peak_of_all_choices_to_the_fastest(seed):
    chain = random_chain(seed)
    every = brute_force(chain)
    found = [measured(chain, choice) for choice in frontier(chain)]
    assert valid(chain, least_peak(chain))
    most, fastest = min((most, time) for time, most, _ in every)
    assert found[0] == measured(chain, least_peak(chain)) == (fastest, most)
    assert found[-1] == min((time, most) for time, most, _ in every)
    for (slow, small), (fast, large) in itertools.pairwise(found):
        assert fast < slow and large > small


# In that of seed 30 the calls of a segment have different saves.
@pytest.mark.parametrize("seed", [*range(12), 30])
def test_the_choice_with_offload_is_the_best_of_all(seed):
    chain = offloading(random_chain(seed), seed)
    every = brute_force(chain)
    for budget in budgets(every):
        fitting = [(time, most) for time, most, _ in every if budget is None or most <= budget]
        if fitting:
            found = choose(chain, budget, "optimal", {})
            assert seconds(chain, found) == min(fitting)[0]
            assert budget is None or peak(chain, found) <= budget
        else:
            with pytest.raises(BudgetError) as error:
                choose(chain, budget, "optimal", {})
            assert error.value.least == peak(chain, frontier(chain)[0]) == budget + 1
    fastest = peak(chain, choose(chain, None, "optimal", {}))
    for method, budget in itertools.product(METHODS, (fastest, None)):
        with contextlib.suppress(BudgetError):
            found = choose(chain, budget, method, {})
            assert budget is None or peak(chain, found) <= budget
            assert len(found.options) == len(chain.calls)


def equal_layers(n, kept=(2, 4, 7), rebuild=(2.0, 1.0, 0.25), forward=4.0):
    """Layers whose gradients are freed at once; every name that is kept saves time."""
    names = [(f"name{o}",) if o else () for o in range(len(kept))]
    options = tuple(
        Option(save, k, 1, 3, s) for save, k, s in zip(names, kept, rebuild, strict=True)
    )
    calls = tuple(
        LayerOptions(f"layers.{i}", "block", options, forward, 2, i > 0) for i in range(n)
    )
    up = [Moment(i, False, i * kept[0], i * kept[0] + 1, i) for i in range(n)]
    down = [Moment(i, True, (i + 1) * kept[0], (i + 1) * kept[0] + 3, i + 1) for i in range(n)]
    return Chain(calls, (*up, *reversed(down)), {"parameters": 10}, 100.0)


def rows(chain, choice):
    return [(e.call, e.what, e.level, e.peak) for e in timeline(chain, choice)]


def three_calls():
    """Outside moments: before backward, and between its calls; one byte of gradient for each."""
    options = Option((), 10, 5, 12, 1.0), Option(("key",), 16, 7, 8, 0.25)
    calls = tuple(LayerOptions(f"layers.{i}", "block", options, 2.0, 4, i > 0) for i in range(3))
    moments = (
        *(Moment(i, False, 10 * i, 10 * i + 5, i) for i in range(3)),
        Moment(-1, False, 30, 33, 3),
        Moment(2, True, 31, 43, 3),
        Moment(-1, True, 22, 23, 2),
        Moment(1, True, 22, 34, 2),
        Moment(-1, True, 13, 14, 1),
        Moment(0, True, 13, 25, 1),
        Moment(-1, True, 4, 4, 0),
    )
    return Chain(calls, moments, {"parameters": 60, "gradients": 40}, 20.0, update=7)


def test_timeline_of_an_option():
    chain, choice = three_calls(), Choice((0, 1, 0))
    assert kept(chain, choice) == (10, 16, 10)
    assert seconds(chain, choice) == 20 - 0.75
    # Call 1 takes 2 more in forward, keeps 6 more until its backward is over, takes 4 less there.
    assert rows(chain, choice) == [
        (0, "forward", 100, 105),
        (1, "forward", 110, 117),
        (2, "forward", 126, 131),
        (-1, "forward", 136, 139),
        (2, "backward", 137, 149),
        (-1, "backward", 128, 129),
        (1, "backward", 128, 136),
        (-1, "backward", 113, 114),
        (0, "backward", 113, 125),
        (-1, "backward", 104, 104),
        (-1, "update", 100, 107),
    ]


def test_timeline_of_a_segment():
    chain, choice = three_calls(), Choice((1, 1, 0), ((0, 3),))
    assert kept(chain, choice) == (10, 6, 6)  # all but the first drop their inputs of 4
    assert seconds(chain, choice) == 20 + 2 * (2 - 0.75)  # two more forwards, two shorter rebuilds
    assert rows(chain, choice) == [
        (0, "forward", 100, 105),
        (1, "forward", 110, 115),
        (2, "forward", 116, 121),  # one input less
        (-1, "forward", 122, 125),  # two inputs less
        (0, "replay", 123, 130),
        (1, "replay", 133, 140),  # 6 of call 0, and the input of call 1
        (2, "backward", 143, 155),  # the same of call 1: both inputs are back, and 12 bytes
        (-1, "backward", 134, 135),
        (1, "backward", 134, 142),  # with its name it takes 4 less
        (-1, "backward", 119, 120),  # call 0 still has its 6 bytes
        (0, "backward", 119, 127),
        (-1, "backward", 104, 104),
        (-1, "update", 100, 107),
    ]
    assert peak(chain, choice) == 155


def test_timeline_of_what_is_offloaded():
    """It is in transit; nothing is yet when the first call starts."""
    chain = offloading(three_calls(), 1)
    moved, away = chain.calls[0].options[-1].moved, Choice((2, 2, 2))
    assert kept(chain, away) == (10 - moved,) * 3
    assert {event.aside for event in timeline(chain, away)} == {2 * moved}
    assert next(timeline(chain, away)).peak == 105 + 2 * moved


@pytest.mark.parametrize(
    ("method", "layers", "budget", "expected"),
    [
        # Most seconds a byte first. Base: 10 + 8 + 3 bytes. A first name saves 1 s for 2 bytes, a
        # second 0.75 s for 3.
        ("greedy", 4, 21, (0, 0, 0, 0)),
        ("greedy", 4, 23, (1, 0, 0, 0)),
        ("greedy", 4, 29, (1, 1, 1, 1)),
        ("greedy", 4, 32, (2, 1, 1, 1)),
        # The shortest segments that fit. Pairs keep 2 + 0 + 2 + 0, with the input of the last 6,
        # and 3 in its backward.
        ("greedy", 4, 20, Choice((1, 0, 0, 0), ((0, 2), (2, 4)))),
        ("greedy", 4, 18, None),
        # Every k-th at its base: 10 + 10 + 3 bytes; the fastest option keeps 5 more.
        ("uniform", 5, 48, (2, 2, 2, 2, 2)),
        ("uniform", 5, 43, (0, 2, 2, 2, 2)),
        ("uniform", 5, 38, (0, 2, 2, 2, 0)),
        ("uniform", 5, 33, (0, 2, 0, 2, 0)),
        ("uniform", 5, 32, (0, 0, 0, 0, 0)),
        ("uniform", 5, 22, None),
        ("sqrt", 4, 10, None),
        ("sqrt", 4, None, Choice((2, 0, 2, 0), ((0, 2), (2, 4)))),
        ("sqrt", 7, None, Choice((2, 2, 0, 2, 2, 0, 0), ((0, 3), (3, 6)))),
    ],
)
def test_a_method_chooses_by_its_rule(method, layers, budget, expected):
    found = METHODS[method](equal_layers(layers), budget)
    assert found == (Choice(expected) if isinstance(expected, tuple) else expected)


def called_twice(*layers):
    """Return a chain whose layers, by these names, may be called more than once."""
    chain = equal_layers(len(layers))
    calls = map(lambda call, name: replace(call, layer=name), chain.calls, layers)
    return replace(chain, calls=tuple(calls))


def test_too_many_shared_layers_have_one_save(monkeypatch):
    chain = called_twice("a", "b", "a", "b")
    assert optimal(chain, 25) == Choice((0, 1, 0, 1))
    monkeypatch.setattr(solve, "MOST_SHARED", 8)
    assert optimal(chain, 25) == Choice((0, 0, 0, 0))
    assert optimal(chain, 29) == Choice((1, 1, 1, 1))
