"""Parse the command line and run a command.

Exit codes: 1 for a stopped run, 2 with a one-line message for a user's error or a failed run, 3 for samples lost or
used twice, 130 and 141 for an interrupt and a closed pipe.

Commands import modules when they run, so that ``planaria --help`` imports neither torch nor pydantic.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from importlib import import_module
from pkgutil import iter_modules
from typing import Annotated, NoReturn

import typer
from typer.main import get_command

from planaria import __version__
from planaria.cli.flags import CommandGroup, Invocation, TabledCommand, app
from planaria.cli.flags import program as program_command
from planaria.cli.usage_errors import describe_usage_error, require_known
from planaria.common.errors import UserError, exit_code
from planaria.common.logs import command_logs
from planaria.common.signals import interrupt_on_stop
from planaria.common.stdio import open_standard_streams, tolerate_closed_output
from planaria.config import consent

CORE = "planaria.cli.commands"
"""package whose modules register the core's commands"""
PARTS = ("planaria.lab.commands.command_line", "planaria.swarm.commands.command_line")
"""modules that register further commands; loaded only for these, and for lists of all commands"""
COMPLETE = "_PLANARIA_COMPLETE"
"""environment variable that the shell sets to request completions"""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of ``planaria``."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    _exit_with(partial(run, words, arguments is None))


def program(function: Callable[..., int], module: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of ``python -m module``: parse ``arguments`` for ``function`` as for a command of planaria."""
    words = sys.argv[1:] if arguments is None else list(arguments)

    def call() -> int:
        _require_utf8(words)
        return _invoke(program_command(function), f"python -m {module}", words)

    _exit_with(call)


def _exit_with(call: Callable[[], int]) -> NoReturn:
    """Run a command, and exit with its code."""
    open_standard_streams()
    with interrupt_on_stop() as arrived:
        try:
            code = exit_code(call)
        except Exception as error:
            if not arrived.is_set():
                raise
            # libraries replace an interrupt of their imports by their own errors
            code = exit_code(partial(_raise_interrupt, error))
    sys.exit(code)


def _raise_interrupt(error: Exception) -> NoReturn:
    raise KeyboardInterrupt from error


def run(arguments: list[str], may_fork: bool = False) -> int:
    """Parse and run one command; return the exit code.

    :param may_fork: the command may fork its workers from this process.
    """
    if COMPLETE in os.environ:
        every_command().main(prog_name="planaria")  # answers the shell, and ends the process
    _require_utf8(arguments)
    root = _root(with_parts=False)
    if not arguments or arguments[0] not in root.commands:
        root = every_command()
    require_known(arguments, root)
    return _invoke(root, "planaria", arguments or ["--help"], may_fork)


def _invoke(command: TabledCommand | CommandGroup, name: str, arguments: list[str], may_fork: bool = False) -> int:
    """Parse the arguments of a command, and run it; return the exit code."""
    try:
        with command.make_context(name, arguments, obj=partial(_prepare_process, may_fork)) as context:
            code: int = command.invoke(context)
    except typer.Exit as ended:
        return ended.exit_code
    except typer.TyperException as error:
        raise UserError(describe_usage_error(error)) from None
    return code


@contextmanager
def _prepare_process(may_fork: bool, invocation: Invocation) -> Iterator[None]:
    """Prepare this process for a command, and clean up after it."""
    _require_utf8_paths()
    if invocation.forks and may_fork and "torch" not in sys.modules:
        from planaria.runtime.fleet import spawner

        spawner.expect_fork()
    outlet = tolerate_closed_output() if invocation.lasting else nullcontext()
    with command_logs(invocation.log_level, invocation.log_json), consent.permit_code(invocation.allow_code), outlet:
        yield


def every_command() -> CommandGroup:
    """Return the group of all commands."""
    return _root(with_parts=True)


@cache
def _root(with_parts: bool) -> CommandGroup:
    core = [f"{CORE}.{module.name}" for module in iter_modules(import_module(CORE).__path__)]
    for module in (*core, *(PARTS if with_parts else ())):
        import_module(module)
    root = get_command(app)
    assert isinstance(root, CommandGroup)
    return root


def _version(value: bool) -> None:
    if value:
        print(f"planaria {__version__}")
        raise typer.Exit


@app.callback()
def _planaria(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="show the version and exit")
    ] = False,
) -> None: ...


def _require_utf8(words: Sequence[str]) -> None:
    """Raise UserError for a flag or argument that is not UTF-8, since recipes and logs cannot contain it."""
    flag = ""
    for number, word in enumerate(words, start=1):
        if word.startswith("--"):
            flag = word.partition("=")[0]
        if not _is_utf8(word):
            name = flag if flag and _is_utf8(flag) else f"argument {number}"
            text = word.partition("=")[2] if word.startswith("--") and "=" in word else word
            raise UserError(f"{name}: {text!a} is not UTF-8; rename the file or folder, or use different text")
        if not word.startswith("--"):
            flag = ""


def _require_utf8_paths() -> None:
    """Raise UserError if the working directory was removed, or its path or a user folder's is not UTF-8."""
    try:
        paths = {"the working directory": os.getcwd()}  # noqa: PTH109 (a Path has no other error)
    except FileNotFoundError:
        raise UserError("the working directory was removed; change to another folder") from None
    paths |= {f"${name}": os.environ.get(name, "") for name in ("HOME", "XDG_CACHE_HOME", "TMPDIR")}
    for name, path in paths.items():
        if not _is_utf8(path):
            raise UserError(f"{name}: {path!a} is not UTF-8; rename the folder, or use another one")


def _is_utf8(text: str) -> bool:
    """Return whether the bytes of a text from the operating system are UTF-8; other bytes are lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
