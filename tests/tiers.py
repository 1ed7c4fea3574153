"""The cases of a test that `make test-all` runs, and `make test` leaves out."""

from typing import Any

import pytest


def exhaustive(*values: Any) -> Any:
    """A case of `parametrize`: one more of a sweep, whose promise another case holds too.

    >>> exhaustive(1, "a").values
    (1, 'a')
    """
    return pytest.param(*values, marks=pytest.mark.exhaustive)
