"""Numbers that follow from the sizes of a call: their formulas, and conditions on them.

A layer is recorded at one choice of sizes. Its own Python code gets the sizes of tensors as
integers that know their formula (`Number`): arithmetic gives others, and a comparison is noted as a
condition of the recording. What PyTorch's functions do with sizes is seen on tensors without data
("meta") of other sizes, at which the formulas of a result's sizes are found.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Sizes = Mapping[str, int]
#: Name of the number of tokens of both streams, one after the other.
JOINT = "S+M"
#: Names of numbers of tokens in a sequence.
LENGTHS = ("S", "M", JOINT)


@dataclass(frozen=True)
class Size:
    """A number that follows from the sizes of a call.

    It is factor * product of `names` + offset, or else the `formula` of the sizes, in Python.
    """

    factor: int
    names: tuple[str, ...]
    offset: int = 0
    formula: str = ""

    def of(self, sizes: Sizes) -> Any:
        """Return the number at a choice of sizes."""
        if self.formula:
            return evaluated(self.formula, sizes)
        return self.factor * math.prod([sizes[name] for name in self.names]) + self.offset

    @property
    def text(self) -> str:
        """The number as a formula in Python."""
        product = "*".join([str(self.factor)] * (self.factor != 1) + [*self.names])
        return self.formula or (f"({product} + {self.offset})" if self.offset else product)


def size_of(name: int | str, sizes: Sizes) -> int:
    """Return a number, or the size of that name (`LENGTHS`)."""
    if name == JOINT:
        return sizes["S"] + sizes["M"]
    return sizes[name] if isinstance(name, str) else name


@functools.lru_cache(4096)
def is_joint(size: int | Size) -> bool:
    """Return whether a number is that of the tokens of both streams."""
    if not isinstance(size, Size):
        return False
    with contextlib.suppress(ArithmeticError):
        return all(size.of(sizes) == size_of(JOINT, sizes) for sizes in WITHOUT_DATA[0])
    return False


def evaluated(formula: str, sizes: Sizes) -> Any:
    """Return the value of a formula at a choice of sizes."""
    return eval(_compiled(formula), {"math": math, "inf": math.inf, "nan": math.nan}, dict(sizes))


@functools.lru_cache(4096)
def _compiled(formula: str) -> Any:
    return compile(formula, "<size>", "eval")


@dataclass(eq=False)
class Space:
    """Choices of the sizes of a call: that of a recording first, then those of its meta tensors."""

    choices: Sequence[Sizes]
    #: By its values at these choices, the formula of each number that was met; None for no formula.
    known: dict[tuple[Any, ...], Size | None] = field(default_factory=dict)
    #: The conditions on sizes that the layer's code tested, with their outcomes.
    conditions: dict[str, bool] = field(default_factory=dict)
    lost: str = ""  # an operation that does not run without data, at other sizes
    #: Formulas of numbers that the code uses as plain ones, so that branches on them are not seen.
    plain: set[str] = field(default_factory=set)
    counts: list[Size] = field(default_factory=list)  # of the iterations of its loops

    def __post_init__(self) -> None:
        for name in self.choices[0]:
            self.size(tuple([sizes[name] for sizes in self.choices]))

    def size(self, at: tuple[Any, ...]) -> Any:
        """Return the number with these values at the choices: itself, a `Size`, or None."""
        if at.count(at[0]) == len(at):
            return at[0]
        if at not in self.known:
            self.known[at] = product(self.choices, at) or self._combined(at)
        return self.known[at]

    def formula(self, text: str) -> Size:
        """Return the number of a formula."""
        return Size(1, tuple([name for name in self.choices[0] if name in text]), 0, text)

    def _combined(self, at: tuple[int, ...]) -> Size | None:
        """Return a sum, difference, product, quotient or minimum of known numbers, or None."""
        known = [(a, size.text) for a, size in self.known.items() if size is not None]
        for a, x in known:
            numbers = {abs(n - m) for n, m in zip(at, a, strict=True)}
            numbers |= {max(n, m) // min(n, m) for n, m in zip(at, a, strict=True) if n and m}
            others = [*known, *[((n,) * len(at), str(n)) for n in sorted({*numbers, *at} - {0})]]
            for (name, run), (b, y) in itertools.product(_COMBINED.items(), others):
                with contextlib.suppress(ArithmeticError):
                    if all(run(p, q) == n for p, q, n in zip(a, b, at, strict=True)):
                        return self.formula(name.format(x, y))
        return None

    def number(self, at: tuple[Any, ...], size: Any = None) -> Any:
        """Return a number for Python code, which knows its formula, `size`, if it has one."""
        size = self.size(at) if size is None else size
        if not isinstance(size, Size):
            return at[0]
        self.known.setdefault(at, size)
        return (Number if isinstance(at[0], int) else Real)._of(self, at, size)

    def test(self, text: str, outcome: bool) -> bool:
        """Note a condition, and return its outcome."""
        self.conditions[text] = outcome
        return outcome


_COMBINED: dict[str, Callable[[int, int], int]] = {
    "({} + {})": operator.add, "({} - {})": operator.sub, "({} * {})": operator.mul,
    "({} // {})": operator.floordiv, "min({}, {})": min,
}  # fmt: skip


def product(choices: Sequence[Sizes], at: Sequence[int]) -> Size | None:
    """Return a factor times sizes, or a size and an offset, with these values at the choices."""
    names = [*choices[0]] if all(isinstance(n, int) for n in at) else []
    for count in range(1, len(names) + 1):
        for chosen in itertools.combinations(names, count):
            products = [math.prod([sizes[name] for name in chosen]) for sizes in choices]
            factor = at[0] // products[0]
            if factor and all(factor * p == n for p, n in zip(products, at, strict=True)):
                return Size(factor, chosen)
    for name in names:
        offset = at[0] - choices[0][name]
        if all(sizes[name] + offset == n for sizes, n in zip(choices, at, strict=True)):
            return Size(1, (name,), offset)
    return None


class _Known:
    """A number in a layer's Python code that follows from the sizes of a call."""

    space: Space
    at: tuple[Any, ...]  # its values at the choices of the space
    size: Size

    @classmethod
    def _of(cls, space: Space, at: tuple[Any, ...], size: Size) -> Any:
        new: Any = cls.__new__(cls, at[0])  # type: ignore[call-arg]
        new.space, new.at, new.size = space, at, size
        return new

    def _with(self, run: Callable[..., Any], text: str, *others: Any) -> Any:
        if not all(isinstance(n, (int, float)) for n in others):
            return NotImplemented
        # NumPy's and an enumeration's numbers have names of their own in formulas; a cache may hold
        # numbers of an earlier recording.
        is_own = [getattr(n, "space", None) is self.space for n in others]
        others = tuple(
            [n if own else _simplest(plain(n)) for n, own in zip(others, is_own, strict=True)]
        )
        ats = [getattr(n, "at", (n,) * len(self.at)) for n in others]
        now = run(self.at[0], *[at[0] for at in ats])
        try:
            values = tuple([run(*numbers) for numbers in zip(self.at, *ats, strict=True)])
        except ArithmeticError:
            return now
        texts = [n.size.text if isinstance(n, _Known) else repr(n) for n in (self, *others)]
        formula = text.format(*texts)
        if isinstance(now, bool):
            # A size that no formula was found for looks like the number that it is.
            same = bool(others) and (
                texts[0] == texts[1] or (bool(self.space.lost) and others[0] == self.at[0])
            )
            return now if same else self.space.test(formula, now)
        return self.space.number(values, self._simple(run, *others) or self.space.formula(formula))

    def _simple(self, run: Any, other: Any = None, *_: Any) -> Size | None:
        """Return a product of sizes, or the sum of a size and a number, as no formula; or None."""
        one, two = self.size, other.size if isinstance(other, _Known) else other
        if one.formula or one.offset:
            return None
        if isinstance(two, Size) and run is operator.mul and not (two.formula or two.offset):
            names = sorted((*one.names, *two.names), key=[*self.space.choices[0]].index)
            return Size(one.factor * two.factor, tuple(names))
        if type(two) is int and run is operator.mul:
            return Size(one.factor * two, one.names)
        if type(two) is int and run in (operator.add, operator.sub):
            return Size(1, one.names, run(0, two)) if one == Size(1, one.names[:1]) else None
        return None

    def __hash__(self) -> int:
        return hash(self.at[0])

    def __pos__(self) -> Any:
        return self

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __int__(self) -> int:
        self.space.plain.add(f"int({self.size.text})")
        return int(self.at[0])

    def __float__(self) -> float:
        self.space.plain.add(f"float({self.size.text})")
        return float(self.at[0])

    def __reduce__(self) -> Any:  # of copies, too
        return type(self.at[0]), (self.at[0],)


class Number(_Known, int):
    """An integer, such as a size of a tensor."""


class Real(_Known, float):
    """A float, such as a quotient of sizes."""


def _simplest(number: Any) -> Any:
    return float(number) if isinstance(number, float) else int(number)


def plain(number: Any) -> Any:
    """Return a number without its formula, or anything else as it is."""
    return number.at[0] if isinstance(number, _Known) else number


_BINARY = {
    "add": "+", "sub": "-", "mul": "*", "floordiv": "//", "truediv": "/", "mod": "%", "pow": "**",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
    "and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>",
}  # fmt: skip
_UNARY: dict[str, Callable[..., Any]] = {
    "abs": abs, "round": round, "bool": bool, "ceil": math.ceil, "floor": math.floor,
    "trunc": math.trunc,
}  # fmt: skip


def _define(name: str, run: Callable[..., Any], text: str) -> None:
    def method(self: Any, *others: Any) -> Any:
        return self._with(run, text.replace("...", ", {}" * len(others)), *others)

    for kind in (Number, Real):
        setattr(kind, f"__{name}__", method)


def _swapped(run: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return run if run in (operator.add, operator.mul) else lambda a, b: run(b, a)


for _name, _symbol in _BINARY.items():
    _run = getattr(operator, f"__{_name}__")
    _define(_name, _run, f"({{}} {_symbol} {{}})")
    if hasattr(int, f"__r{_name}__"):
        _define(f"r{_name}", _swapped(_run), f"({{1}} {_symbol} {{0}})")
for _name, _run in _UNARY.items():
    _where = "math." if _run.__module__ == "math" else ""
    _define(_name, _run, f"{_where}{_name}({{}}...)")
_define("neg", operator.neg, "(-{})")
_define("invert", operator.invert, "(~{})")


def traced(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of numbers, by its name in formulas, that knows the formulas of results."""

    def call(*args: Any, **kwargs: Any) -> Any:
        known = next((n for n in args if isinstance(n, _Known)), None)
        if known is None or kwargs:
            return run(*args, **kwargs)
        numbers = ", ".join([f"{{{i}}}" for i in range(1, len(args) + 1)])
        text = f"{name}({numbers}){')' * name.count('(')}"
        result = known._with(lambda _, *rest: run(*rest), text, *args)
        return run(*map(plain, args)) if result is NotImplemented else result

    return call


class _Ranges(type):
    def __call__(cls, *args: Any) -> range:
        count = _steps(*args)
        if isinstance(count, _Known):
            count.space.counts.append(count.size)
        return range(*map(plain, args))

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, range)


class Loop(metaclass=_Ranges):
    """Stands in for `range`, and notes the number of its steps."""


_steps = traced("len(range", lambda *args: len(range(*args)))
#: Python's `math`, whose functions know the formulas of numbers.
MATH = types.SimpleNamespace(
    **{n: traced(f"math.{n}", f) if callable(f) else f for n, f in vars(math).items()}
)


#: Small choices, of different remainders by small numbers, and large ones without data.
_SMALL = (
    {"B": 3, "S": 7, "M": 5}, {"B": 4, "S": 10, "M": 12}, {"B": 2, "S": 13, "M": 6},
    {"B": 1, "S": 6, "M": 9},
)  # fmt: skip
#: Choices at which formulas are found; the second ones for layers of limited length.
WITHOUT_DATA = (
    ({"B": 13, "S": 521, "M": 409}, {"B": 11, "S": 1021, "M": 769}),
    ({"B": 5, "S": 11, "M": 13}, {"B": 4, "S": 16, "M": 8}),
)
#: Longest sequence of a small choice, other than the call's own.
_LONGEST = 160


def moved(sizes: Sizes, conditions: Mapping[str, bool]) -> Sizes:
    """Return the nearest sizes that meet the conditions, or the same ones if none do."""
    lengths = range(sizes["S"], sizes["S"] + _LONGEST)
    near = [{**sizes, "S": n, "M": m} for n in lengths for m in (sizes["M"], n)]
    return next((each for each in near if meets(each, conditions)), sizes)


def meets(sizes: Sizes, conditions: Mapping[str, bool]) -> bool:
    """Return whether all conditions have the same outcomes at a choice of sizes."""
    return all(evaluated(text, sizes) == outcome for text, outcome in conditions.items())


def choose(
    own: Sizes, conditions: Mapping[str, bool], formulas: Collection[Size], earlier: Sequence[Sizes]
) -> Sizes | None:
    """Return a small choice of the sizes of a call, `own`, that meets the conditions; or None.

    Sizes and formulas have other values than at the `earlier` choices, as far as possible.
    """
    numbers = [*[Size(1, (name,)) for name in own], *formulas]
    seen = [{n.of(sizes) for sizes in earlier} for n in numbers]
    best, most = None, -1
    for sizes in _candidates(own):
        if meets(sizes, conditions):
            score = sum(n.of(sizes) not in values for n, values in zip(numbers, seen, strict=True))
            best, most = (sizes, score) if score > most else (best, most)
            if most == len(numbers):
                break
    return best


def _candidates(own: Sizes) -> Iterator[Sizes]:
    for sizes in _SMALL:
        yield {name: sizes[name] for name in own}
    lengths = [*range(5, _LONGEST), own.get("S", 0)] if "S" in own else [0]
    for length in lengths:
        for memory in (5, 12, length, own["M"]) if "M" in own else (0,):
            for batch in (2, 3, 1):
                sizes = {"B": batch, "S": length, "M": memory}
                yield {name: sizes[name] for name in own}
