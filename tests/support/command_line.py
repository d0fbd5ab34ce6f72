"""Run commands of planaria in this process, and a terminal in memory."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest

from planaria.cli import main
from planaria.cli.entry import every_command, program
from planaria.cli.flags import CommandGroup, TabledCommand


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def exit_code(*words: object) -> int:
    """Run a command of planaria, or with a function as first word its program; return the exit code."""
    first, *rest = words
    with pytest.raises(SystemExit) as ended:
        if callable(first):
            program(first, first.__module__, [str(word) for word in rest])
        main([str(word) for word in words])
    assert ended.value.code is None or isinstance(ended.value.code, int)
    return ended.value.code or 0


def refused(capture: pytest.CaptureFixture[str], *words: object, silent: bool = False) -> str:
    """Run a command that must fail with exit code 2 and one line on stderr; return the line.

    ``silent``: nothing may be on stdout either.
    """
    code = exit_code(*words)
    out, err = capture.readouterr()
    assert code == 2 and err.startswith("planaria: ") and err.count("\n") == 1 and err.endswith("\n"), err
    assert not (silent and out), out
    return err


def commands(group: CommandGroup | None = None, prefix: str = "") -> Iterator[tuple[str, TabledCommand]]:
    """Yield the name and the command of every command, such as ``run chaos``."""
    for name, found in (group or every_command()).commands.items():
        if isinstance(found, CommandGroup):
            yield from commands(found, f"{name} ")
        else:
            assert isinstance(found, TabledCommand)
            yield f"{prefix}{name}", found


def parsed(words: list[str]) -> Any:
    """Parse a command line without running it; return the context of its command."""
    command: Any = every_command()
    context = command.make_context("planaria", [])
    while isinstance(command, CommandGroup):
        name, command, words = command.resolve_command(context, words)
        context = command.make_context(name, words, parent=context)
    return context
