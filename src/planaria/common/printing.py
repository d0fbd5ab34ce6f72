"""Text from other programs and machines, made safe for terminals and logs."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return ``text`` with a space for each control character, which could move a terminal's cursor."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def printable_line(text: str) -> str:
    """Return ``text`` as one line: control characters and runs of white space become one space."""
    return " ".join(printable(text).split())


def escape(text: str) -> str:
    r"""Return ``text`` with control characters as escapes, such as ``\x1b``."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
