"""Layers whose numbers, branches and loops follow from the sizes of a call, at sizes of all kinds.

A layer is traced once for each branch, for all sizes at which it takes the branch. Its results and
gradients are those of the stock layer at each size, also where a trace of its own is refused.
"""

from __future__ import annotations

import copy
import enum
import math
import operator
import pickle
import sys
import threading
import types

import numpy
import pytest
import torch
import torch.nn.functional as F
from altered_layers import WIDTH, Block, heads
from test_recorder import Told, graphs, normal, pair, same_step, step, steps, trace_counts
from torch import Tensor, nn

from fused_remat.execution import observe
from fused_remat.steps.replay import Replay
from fused_remat.tracing.layer import KNOWN
from fused_remat.tracing.sizes import WITHOUT_DATA, Loop, Space, choose, evaluated, moved, plain

pytestmark = pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")
SIZES = ((2, 6), (2, 7), (1, 8), (3, 9), (1, 41), (2, 70), (2, 33), (2, 12), (1, 16))
C = 4  # tokens of a chunk


@pytest.fixture(autouse=True)
def _nothing_known():
    KNOWN.clear()


# Numbers.


class Kind(enum.IntEnum):
    THREE = 3


NUMBERS = (
    "S + 1, 1 + S, S - 1, 1 - S, +S, -S, abs(-S), ~S, (-S) % 8, -(-S // 4), 100 // S, 100 % S",
    "S / 2, 3 / S, S ** 2, 2 ** (S % 5), S ** -0.5, (S / 2) ** 2, 1 - S / 2, S // 2.0, S / 2 % 1",
    "S & 6, S | 1, S ^ 1, S >> 1, S << 1, 6 & S, *divmod(S, 4), *divmod(100, S), sum([S, B, 1])",
    "round(S / 2), round(S / 3, 1), math.ceil(S / 4), math.floor(S / 4), math.trunc(S / 4)",
    "S * B + S, S * B * 6, (S - 1) * (B + 1), math.prod([S, B]), (S + 1) - S, S // S, S * True",
    "S * Kind.THREE, S * numpy.float64(0.5), S * numpy.sqrt(2.0)",
)


@pytest.mark.parametrize("texts", NUMBERS)
def test_numbers(texts):
    for numbers in ({"B": 2, "S": 33}, {"B": 1, "S": 8}):
        space = Space([{"B": 3, "S": 7}, *[{n: c[n] for n in "BS"} for c in WITHOUT_DATA[0]]])
        known = {n: space.number(tuple(c[n] for c in space.choices)) for n in "BS"}
        found = eval(f"[{texts}]", {**globals(), **known})
        pairs = zip(found, eval(f"[{texts}]", {**globals(), **space.choices[0]}), strict=True)
        assert all(plain(n) == m for n, m in pairs) and not space.conditions
        known = [n.size.of(numbers) if hasattr(n, "size") else n for n in found]
        expected = eval(f"[{texts}]", {**globals(), **numbers})
        assert known == expected


def test_comparisons_are_conditions():
    space = Space([{"B": 3, "S": 7}, {"B": 11, "S": 70001}, {"B": 5, "S": 104729}])
    B, S = (space.number(tuple(c[n] for c in space.choices)) for n in "BS")
    assert S % 2 == 1 and min(S, 64) is S and S != B
    assert operator.lt(S, math.inf) and operator.gt(S, numpy.float64(3))
    assert max(S, 64) == 64 and not S & 32 and S in (1, 7) and {S: 1}[7] == {7: 1}[S] == 1
    texts = {"((S % 2) == 1)", "(S < inf)", "(S > 3.0)", "(S > 64)", "(S != B)", "bool((S & 32))"}
    assert texts <= space.conditions.keys()
    assert all(evaluated(t, {"B": 3, "S": 7}) == is_so for t, is_so in space.conditions.items())
    for same in (copy.copy(S), copy.deepcopy([S])[0], pickle.loads(pickle.dumps(S))):
        assert type(same) is int and same == 7
    assert not space.plain
    assert (int(S / 2), float(S), [*Loop(0, S, 4)]) == (3, 7.0, [0, 4])
    assert isinstance(range(2), Loop) and not isinstance(2, Loop)
    assert space.plain == {"int((S / 2))", "float(S)"}
    assert [n.of({"S": 33}) for n in space.counts] == [9]


@pytest.mark.parametrize(
    ("tested", "own"),
    [
        ({"S > 64": True}, {"B": 1, "S": 500}), ({"S > 400": True}, {"B": 1, "S": 500}),
        ({"S == M": True}, {"B": 2, "S": 6, "M": 6}), ({"S % 64": False}, {"B": 2, "S": 128}),
        ({"S == 500": True}, {"B": 2, "S": 500}), ({"S > 400": True}, {"S": 9}),
        ({"B == 1": True, "S < 6": True}, {"B": 1, "S": 5}),
        ({"S > M": True, "S % 16": False}, {"B": 2, "S": 32, "M": 8}),
    ],
)  # fmt: skip
def test_choices_meet_conditions(tested, own):
    one = choose(own, tested, (), ())
    if own == {"S": 9}:
        assert one is None
        return
    two = choose(own, tested, (), [one])
    found = [one, two, moved({"B": 5, "S": 11, "M": 13}, tested)]
    for sizes in found[: 2 if {"B == 1", "S == 500", "S > 400"} & tested.keys() else 3]:
        assert all(bool(evaluated(text, sizes)) == is_so for text, is_so in tested.items())


# Functions of this module, which loop over chunks.


def chunks(x: Tensor, n: int = C) -> Tensor:
    return torch.cat([x[:, i * n : (i + 1) * n].cumsum(1) for i in range(-(-x.shape[1] // n))], 1)


def any_chunks(*args, **kwargs) -> Tensor:
    return chunks(*args, **kwargs)


def several(x: Tensor) -> dict:
    return {"y": chunks(x), "same": x, "none": None, "pair": (chunks(x, 5), x.shape[1])}


def scaled(x: Tensor) -> Tensor:
    for i in range(0, x.shape[1], C):
        x[:, i : i + C] *= 1.0 + i
    return x


def dropped(x: Tensor) -> tuple[Tensor, Tensor]:
    kept = torch.cat([F.dropout(0.0 * t + 1.0, 0.3) for t in x.split(C, 1)], 1)
    return kept, 1.0 - kept


def padded(y: Tensor, pad: int) -> Tensor:
    y = F.pad(y, (0, 0, 0, pad))
    return y.view(y.shape[0], -1, C, WIDTH).cumsum(2).flatten(1, 2)[:, : y.shape[1] - pad]


def in_windows(y: Tensor) -> Tensor:
    n = math.ceil(y.shape[1] / C)
    z = F.pad(y, (0, 0, 0, n * C - y.shape[1])).view(y.shape[0] * n, C, WIDTH).cumsum(1)
    return z.view(y.shape[0], n * C, WIDTH)[:, : y.shape[1]].contiguous()


def with_token(y: Tensor, token: Tensor) -> Tensor:
    return torch.cat([token.expand(y.shape[0], 1, -1), y], 1).cumsum(1)[:, 1:]


def local(y: Tensor, n: int, end: int) -> Tensor:
    return y - F.pad(y[:, :end].cumsum(1), (0, 0, 0, max(y.shape[1] - n, 0)))


def pooled(y: Tensor) -> Tensor:
    z = F.avg_pool1d(y.transpose(1, 2), 2, 2, ceil_mode=True).repeat_interleave(2, -1)
    return z[..., : y.shape[1]].transpose(1, 2)


def halves(y: Tensor) -> Tensor:
    n = int(y.shape[1] * 0.5)
    return torch.cat([y[:, :n].cumsum(1), y[:, n:]], 1)


def either(condition: bool, y: Tensor) -> Tensor:
    return y.tanh() if condition else y.cumsum(1)


# By name: what a layer does with the result of its MLP; the number of its traces, one per branch;
# and the functions that are replayed.
LAYERS = {
    "pad": (lambda y, s: padded(y, (C - y.shape[1] % C) % C), 1),
    "if pad": (lambda y, s: padded(y, -y.shape[1] % C) if -y.shape[1] % C else padded(y, 0), 2),
    "windows": (lambda y, s: in_windows(y), 1),
    "flat": (lambda y, s: y.reshape(-1, WIDTH).tanh().view(y.shape[0], -1, WIDTH), 1),
    "flat, sizes": (lambda y, s: y.reshape(len(y) * y.shape[1], -1).tanh().view(y.shape), 1),
    "shifted": (lambda y, s: F.pad(y[:, :-1], (0, 0, 1, 0)), 1),
    "last tokens": (lambda y, s: torch.cat([y[:, :-2].cumsum(1), y[:, -2:]], 1), 1),
    "token": (lambda y, s: with_token(y, s.token), 1),
    "pooled": (lambda y, s: pooled(y), 1),
    "strided": (lambda y, s: y[:, ::2].repeat_interleave(2, 1)[:, : y.shape[1]], 1),
    "window": (lambda y, s: local(y, 8, min(8, y.shape[1])), 2),
    "window's edge": (lambda y, s: local(y, 8, min(y.shape[1], 8)), 6),  # four attempts at 8
    "long": (lambda y, s: either(y.shape[1] > 64, y), 2),
    "odd": (lambda y, s: either(y.shape[1] % 2 == 1, y), 2),
    "one": (lambda y, s: either(y.shape[0] == 1, y), 2),
    "len": (lambda y, s: either(len(y) == 1, y), 2),
    "elements": (lambda y, s: either(y.numel() > 1500, y), 2),
    "bit": (lambda y, s: either(bool(y.shape[1] & 32), y), 2),
    "log": (lambda y, s: either(math.log2(y.shape[1]) > 5, y), 2),
    "root": (lambda y, s: either(math.sqrt(y.shape[1]) > 5, y), 2),
    "integer": (lambda y, s: either(int(y.shape[1] * 0.5) > 20, y), 7),  # one per number of `int`
    "halves": (lambda y, s: halves(y), 7),
    "unlimited": (lambda y, s: either(y.shape[1] > math.inf, y), 1),
    "log scale": (lambda y, s: y * math.log(y.shape[1]), 1),
    "power scale": (lambda y, s: y * y.shape[1] ** -0.5, 1),
    "numpy scale": (lambda y, s: y * (y.shape[1] * numpy.float64(0.5)), 1),
    "loop": (lambda y, s: chunks(y), 1, "chunks"),
    "loop, named": (lambda y, s: chunks(n=5, x=y), 1, "chunks"),
    "loop, packed": (lambda y, s: any_chunks(*[y], **{"n": 5}), 1, "chunks"),
    "loops": (lambda y, s: chunks(y) + chunks(y.sin(), 5), 1, "chunks"),
    "several": (  # results, one of them an argument
        lambda y, s: several(y)["y"] * several(y)["pair"][0] + several(y)["same"], 1, "chunks"),
    "long chunks": (lambda y, s: chunks(y, 65), 1, "chunks"),
    "own loop": (lambda y, s: sum(y * i for i in range(-(-y.shape[1] // 200))), 1),
}  # fmt: skip


def layer(mix) -> type[nn.Module]:
    def set_up(self: nn.Module, index: int) -> None:
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))

    own = {"set_up": set_up, "branch": lambda self, x: mix(self.mlp(x) + 0.0 * self.token, self)}
    return type("Mixed", (Block,), {**own, "__module__": __name__})


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    mix, count, *replayed = LAYERS[name]
    stock, model = pair(layer(mix))
    for b, s in SIZES:
        same_step(stock, model, normal(b, s, WIDTH))
        assert len(graphs(model)) == 2, (b, s, model.layers[0].last_trace)
    assert trace_counts(model) == [count, 0]
    names = [each.name for each in model.layers[0].last_trace.block.replayed]
    assert names == replayed or not replayed


def test_a_loop_of_more_steps_than_any_recording():
    """Not of as many steps as in the recordings: a trace of its own, or the layer itself."""
    stock, model = pair(layer(lambda y, s: sum(y * (i + 1) for i in range(-(-y.shape[1] // 200)))))
    for s in (6, 70, 300, 450, 7):
        same_step(stock, model, normal(2, s, WIDTH))
    assert trace_counts(model)[0] > 1


@pytest.mark.parametrize("mix", [lambda y, s: scaled(y * 1.0), lambda y, s: chunks(y) * 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(mix, dtype):
    stock, model = pair(layer(mix))
    stock, model = stock.float(), model.float()
    for b, s in ((2, 6), (1, 9), (2, 70)):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32):
            x = normal(b, s, WIDTH).float()
            same_step(stock, model, x, tolerance=1e-4 if dtype == torch.float32 else 0.05)
    assert len(graphs(model)) == 2


def test_random_numbers_are_drawn_once():
    """Also those of two results of a function, which would each be a replay."""
    for f in (dropped, DROPPED):
        stock, model = pair(layer(lambda y, s, f=f: sum(f(y))))  # ones
        for s in (6, 9):
            x = normal(2, s, WIDTH)
            torch.testing.assert_close(model.layers[0](x), stock.layers[0](x))


DROPPED = dropped  # under another name, it is not replayed alone


class Cross(Block):
    """Another branch where source and target are equally long."""

    def set_up(self, index: int) -> None:
        self.k, self.v = nn.Linear(12, WIDTH), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x, v = x + self.attn(self.norm1(x)), self.v(memory)
        y = F.scaled_dot_product_attention(heads(x), heads(self.k(memory)), heads(v))
        y = y.transpose(1, 2).flatten(2)
        if x.shape[1] == memory.shape[1]:
            y = y + v
        return x + self.mlp(self.norm2(y))


def test_source_and_target_of_equal_length():
    stock, model = pair(Cross)
    for b, s, m in ((2, 6, 5), (2, 6, 6), (1, 9, 5), (3, 5, 5), (2, 7, 12), (1, 70, 70)):
        same_step(stock, model, normal(b, s, WIDTH), normal(b, m, 12))
        assert len(graphs(model)) == 2
    assert trace_counts(model) == [2, 0]


class SequenceFirst(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x).transpose(0, 1)).transpose(0, 1)
        return x + self.mlp(self.norm2(x) * (2.0 if x.shape[0] > 16 else 1.0))


class Positions(Block):
    def set_up(self, index: int) -> None:
        self.table = nn.Embedding(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.table(torch.arange(x.shape[1])))


def test_a_sequence_first_and_a_table_of_positions():
    for kind, sizes, count in (
        (SequenceFirst, ((6, 2), (9, 3), (20, 2), (33, 4)), 4),
        (Positions, ((2, 6), (1, 24), (3, 9)), 1),
    ):
        stock, model = pair(kind)
        for size in sizes:
            same_step(stock, model, normal(*size, WIDTH))
        assert len(graphs(model)) == 2
        assert trace_counts(model) == [count, 0]
    with pytest.raises(IndexError):
        model(normal(2, 25, WIDTH))


# Values that no recording has: only the comparison with the layer's own results shows them.


class Hidden(Block):
    """Reads a mask behind the back of any recorder; `change` is what it does then."""

    change = staticmethod(lambda y: 2.0 * y)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = x + self.attn(self.norm1(x))
        z = self.mlp(self.norm2(y))
        return y + (type(self).change(z) if mask.untyped_storage()[0] == 7 else z)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda y: 2.0 * y, "the block differs from the layer on a batch of shape"),
        (lambda y: 0.5 * y + 0.5 * y.detach(), "the gradient of"),
    ],
)
def test_refused_by_the_comparison(change, reason, monkeypatch):
    monkeypatch.setattr(Hidden, "change", staticmethod(change))
    stock, model = pair(Hidden)
    told = Told()
    observe.DECISIONS.append(told.observe)
    try:
        for b in (2, 1):
            same_step(stock, model, normal(b, 6, WIDTH), torch.full((b, 6), 7, dtype=torch.uint8))
    finally:
        observe.DECISIONS.remove(told.observe)
    assert told.reasons() and all(reason in text for text in told.reasons()), told.reasons()


@pytest.mark.parametrize(
    "unseen",
    [
        lambda x: x.shape[:-1].numel() > 60,
        lambda x: {20: 2.0}.get(x.shape[1], 1.0) > 1.0,
        lambda x: x.shape[1].bit_length() > 4,
        lambda x: f"{x.shape[0]}x{x.shape[1]}" == "3x20",
        lambda x: x.nbytes > 8000,
        lambda x: 0.5 * x.shape[1] > 9.0,
        lambda x: int(torch.arange(x.shape[1]).max()) > 15,
    ],
)
def test_branches_that_no_condition_shows(unseen):
    """In the first call of each sizes, the result is compared with the layer's own."""

    class Branches(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = x + self.attn(self.norm1(x))
            z = self.mlp(self.norm2(y))
            return y + (2.0 * z if unseen(x) else z)

    stock, model = pair(Branches)
    for b, s in ((2, 6), (3, 20), (2, 6), (1, 9), (4, 20)):
        same_step(stock, model, normal(b, s, WIDTH))


def test_a_tensor_is_two_arguments():
    class Two(Block):
        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            return super().forward(x) + (other.tanh() if x.shape[1] > 64 else other)

    stock, model = pair(Two)
    for b, s in ((2, 6), (1, 70), (1, 1), (3, 9)):
        x = normal(b, s, WIDTH)
        for each in (x, normal(b, s, WIDTH, seed=4)):
            same_step(stock, model, x, each)


# Functions of a module while a recording takes.


def test_threads_trace_layers_of_one_module():
    own, failed, done = dict(globals()), [], threading.Event()
    x = normal(2, 9, WIDTH)
    held, expected = chunks, chunks(x)

    def trains(first: int) -> None:
        try:
            for name in [*LAYERS][first::9]:
                stock, model = pair(layer(LAYERS[name][0]))
                for s in (5, 9, 70):
                    same_step(stock, model, normal(2, s, WIDTH))
        except BaseException as error:
            failed.append((name, error))

    def calls() -> None:
        while not done.is_set():
            if not (torch.equal(held(x), expected) and torch.equal(chunks(x), expected)):
                failed.append(("calls", None))

    threads = [threading.Thread(target=trains, args=(first,)) for first in range(2)]
    caller = threading.Thread(target=calls)
    for each in (*threads, caller):
        each.start()
    for each in threads:
        each.join()
    done.set(), caller.join()
    assert not failed
    assert globals().keys() == own.keys() and all(globals()[n] is v for n, v in own.items())


def test_a_recording_that_raises_restores_functions():
    def raises(y: Tensor, s: nn.Module) -> Tensor:
        raise RuntimeError(f"in {chunks(y).shape}")

    own = dict(globals())
    model = pair(layer(raises))[1]
    with pytest.raises(RuntimeError, match="in torch"):
        step(model, normal(2, 6, WIDTH))
    assert globals().keys() == own.keys() and all(globals()[n] is v for n, v in own.items())


SOURCE = """
import torch
from torch import nn

def scan(x):
    return torch.cat([x[:, i : i + 4].cumsum(1) * FACTOR for i in range(0, x.shape[1], 4)], 1)

class Mix(nn.Module):
    def forward(self, x):
        return scan(x)
"""


@pytest.mark.parametrize("known", [True, False, None])
def test_functions_of_one_name_in_two_modules(known, monkeypatch):
    """If they are `known`, in `sys.modules`."""
    modules = [types.ModuleType(f"sized_{i}") for i in range(2)]
    for i, module in enumerate(modules):
        exec(SOURCE, vars(module))
        module.FACTOR = 2.0 + i
        if known is not False:
            monkeypatch.setitem(sys.modules, module.__name__, module if known else None)

    class Both(Block):
        def set_up(self, index: int) -> None:
            self.one, self.two = (module.Mix() for module in modules)

        def branch(self, x: Tensor) -> Tensor:
            return self.one(self.mlp(x)) + self.two(x)

    stock, model = pair(Both)
    for b, s in SIZES[:5]:
        same_step(stock, model, normal(b, s, WIDTH))
    assert [n for n in steps(model, Replay) if ".scan" in n] == ["one.scan", "two.scan"]
    assert trace_counts(model) == [1, 0]
