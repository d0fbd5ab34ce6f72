"""Tasks by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from planaria.errors import UserError, nearest
from planaria.tasks.answers import form_named
from planaria.tasks.base import Task
from planaria.tasks.gym import Gym
from planaria.tasks.jsonl import open_file, open_hub
from planaria.tasks.programs import Programs
from planaria.tasks.snippets import Snippets
from planaria.tasks.sums import Sums


def open_task(name: str, style: str | None = None) -> Task:
    """The task of a name: 'sums', 'sums:DIGITS', 'gym:NAME', 'gsm8k', 'gsm8k:PATH', 'jsonl:PATH', 'programs:PATH',
    'snippets' or 'snippets:LIBRARY'.

    ``style`` says how its solutions are written (None: the task's own way): 'columns' or 'words' for sums, 'tags' or
    'brackets' for gym and questions; programs and snippets have no styles.

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


def _gym(kind: str, style: str | None) -> Task:
    if not kind:
        raise UserError("task 'gym' names no kind of problem; write 'gym:NAME', for instance 'gym:chain_sum'")
    return Gym(kind, form_named(style or "tags"))


def _gsm8k(path: str, style: str | None) -> Task:
    form = form_named(style or "tags")
    return open_file(f"gsm8k:{path}", Path(path), form) if path else open_hub(form)


def _jsonl(path: str, style: str | None) -> Task:
    if not path:
        raise UserError("task 'jsonl' names no file; write 'jsonl:PATH'")
    return open_file(f"jsonl:{path}", Path(path), form_named(style or "tags"))


def _programs(path: str, style: str | None) -> Task:
    if not path:
        raise UserError("task 'programs' names no file; write 'programs:PATH'")
    _refuse_style("programs", style)
    return Programs(Path(path))


def _snippets(library: str, style: str | None) -> Task:
    _refuse_style("snippets", style)
    return Snippets(library)


def _refuse_style(kind: str, style: str | None) -> None:
    if style is not None:
        raise UserError(f"task style {style!r} is not known to {kind}, which have none; leave it out")


_KINDS: dict[str, Callable[[str, str | None], Task]] = {
    "sums": _sums,
    "gym": _gym,
    "gsm8k": _gsm8k,
    "jsonl": _jsonl,
    "programs": _programs,
    "snippets": _snippets,
}
