"""The error that a user can mend."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake of the user: its message is one sentence with the key or file, the value and the
    fix.

    Commands print that sentence without a traceback and end with status 1.
    """
