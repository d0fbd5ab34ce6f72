"""Tasks by name."""

from __future__ import annotations

from collections.abc import Callable

from planaria.errors import UserError, nearest
from planaria.swarm.tasks.base import Task
from planaria.swarm.tasks.sums import Sums


def open_task(name: str, style: str | None = None) -> Task:
    """The task of a name: 'sums' or 'sums:DIGITS'.

    ``style`` says how its solutions are written (None: the task's own way): 'columns' or 'words' for sums.

    :raises UserError: for an unknown name or style, and whatever else keeps the task from being opened.
    """
    kind, colon, rest = name.partition(":")
    if kind not in _KINDS:
        raise UserError(f"task {name!r} is not known; {nearest(kind, _KINDS)}")
    if colon and not rest:
        raise UserError(f"task {name!r} ends in a colon; write 'sums' or 'sums:3', and so with the others")
    return _KINDS[kind](rest, style)


def _sums(digits: str, style: str | None) -> Task:
    if digits and not (digits.isascii() and digits.isdigit() and len(digits) < 4):
        raise UserError(f"task 'sums:{digits}': {digits!r} is no number of digits; write 'sums:3' for three")
    return Sums(int(digits or 2), style or "columns")


_KINDS: dict[str, Callable[[str, str | None], Task]] = {"sums": _sums}
