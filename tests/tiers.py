"""What `make test-all` runs and `make test` leaves out: more cases of a sweep, more examples."""

import itertools
import os
from collections.abc import Sequence
from typing import Any

import pytest

#: How many times the examples of `make test`.
MORE = int(os.environ.get("FUSED_REMAT_MORE_EXAMPLES", 1))


def exhaustive(*values: Any) -> Any:
    """Return a case of `parametrize` that another case stands for in `make test`.

    >>> exhaustive(1, "a").values
    (1, 'a')
    """
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def executed(cases: Sequence[Any], *chosen: tuple[Any, ...]) -> list[Any]:
    """Mark cases of the chosen values, which `make test` also runs on compiled kernels (`ptx`).

    >>> [len(case.marks) for case in executed(pairwise([1, 2], "a"), (2, "a"))]
    [0, 1]
    """
    mark = pytest.mark.executed
    return [
        pytest.param(
            *case.values, marks=[*case.marks, mark] if case.values in chosen else case.marks
        )
        for case in cases
    ]


def pairwise(*axes: Sequence[Any]) -> list[Any]:
    """All combinations as cases of `parametrize`; `make test` has every pair of two axes' values.

    Chosen greedily, in order: a covering array of strength 2.

    >>> cases = pairwise([1, 2, 3], "ab", "xy")
    >>> [case.values for case in cases if not case.marks]
    [(1, 'a', 'x'), (1, 'b', 'y'), (2, 'a', 'y'), (2, 'b', 'x'), (3, 'a', 'x'), (3, 'b', 'y')]
    >>> len(cases)
    12
    """
    every = list(itertools.product(*(range(len(axis)) for axis in axes)))
    pairs = {case: set(itertools.combinations(enumerate(case), 2)) for case in every}
    open_pairs, chosen = set().union(*pairs.values()), set()
    while open_pairs:
        best = max(every, key=lambda case: len(pairs[case] & open_pairs))
        chosen.add(best)
        open_pairs -= pairs[best]
    make = {True: pytest.param, False: exhaustive}
    return [
        make[case in chosen](*(axis[i] for axis, i in zip(axes, case, strict=True)))
        for case in every
    ]
