"""Arguments of one kind that many public calls take, refused in the same words everywhere.

Knows of no group, no model and no tensor: whoever calls says what the argument is named.
"""

from __future__ import annotations

from .errors import ArgumentTypeError


def check_flags(**flags: object) -> None:
    """Refuse what says neither yes nor no: the text "no", say, which counts as true. None counts as no, as elsewhere."""
    for name, given in flags.items():
        # NumPy's are known by their name: it is not imported for them.
        is_bool = isinstance(given, bool) or type(given).__name__ in ("bool", "bool_")
        if not (given is None or is_bool or (isinstance(given, int) and given in (0, 1))):
            raise ArgumentTypeError(f"{name} must be True or False, got {given!r:.80}.")
