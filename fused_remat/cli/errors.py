"""What ends a command with a message and no traceback."""

from __future__ import annotations


class CommandError(Exception):
    """The command line asks for something that cannot be; the message says what, with the value."""
