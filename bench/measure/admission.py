"""Who takes part: what is absent says why, and no speed is reported of what is wrong."""

from __future__ import annotations


class Absent(Exception):
    """A provider that cannot serve here; the message says why."""


class WrongResultError(Exception):
    """A result that is not right."""


def described(error: Exception) -> str:
    """An exception in a line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:600]}"


def refusal(error: Exception, optional: bool = False) -> dict[str, str]:
    """What a row says of whoever raised it: {"absent": why} or {"error": what is wrong}.

    optional: it may not serve here, which is no failure; its results have to be right.
    """
    if isinstance(error, Absent):
        return {"absent": str(error)}
    absent = optional and not isinstance(error, WrongResultError)
    return {"absent" if absent else "error": described(error)}
