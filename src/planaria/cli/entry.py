"""Parse the command line and run a command. Exit codes: 2 with a one-line message for a user's error, 1 for a stopped
run.

Commands import modules when they run, so that ``planaria --help`` does not wait for torch.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import NoReturn

from planaria import __version__
from planaria.cli import completion
from planaria.cli.flags import SET, Parser, take_options
from planaria.common.errors import LedgerError, RunStopped, UserError, nearest
from planaria.common.logs import command_logs
from planaria.common.outlet import ensure, lasting
from planaria.common.signals import interrupted
from planaria.config import consent, recipe
from planaria.config.options import NAME
from planaria.config.schema import Section
from planaria.config.section import section_of

GROUPS = (
    "planaria.cli.training",
    "planaria.cli.watching",
    "planaria.cli.models",
    "planaria.cli.checkpoints",
    "planaria.cli.codes",
    "planaria.cli.faults",
    "planaria.cli.networks",
    "planaria.cli.recipes",
    "planaria.cli.completion",
)
"""modules whose ``add`` adds the core's commands"""
PARTS = ("planaria.lab.commands", "planaria.swarm.commands")
"""packages with further commands; loaded only for these, and for lists of all commands"""
PLACES = ("--port", "--host", "--live-port", "--live-host")
"""other servers' flags for --at or --live-at"""
LONGEST = 2000
"""maximum characters of an error message"""
NO_THREAD = "can't start new thread"
"""Python's message for a RuntimeError without a class"""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of ``planaria``."""
    ensure()
    with interrupted():
        code = _code(sys.argv[1:] if arguments is None else list(arguments), may_fork=arguments is None)
    sys.exit(code)


def _code(arguments: list[str], may_fork: bool) -> int:
    """Run a command and report its failure; returns the exit code."""
    try:
        return run(arguments, may_fork)
    except UserError as error:
        print(f"planaria: {one_line(str(error))}", file=sys.stderr)
        return 2
    except LedgerError as error:
        print(f"planaria: {one_line(str(error))}", file=sys.stderr)
        return 3
    except RunStopped as stopped:
        print(f"planaria: {stopped}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("planaria: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 141
    except (MemoryError, RuntimeError) as error:
        if not (isinstance(error, MemoryError) or NO_THREAD in str(error)):
            raise
        what = "memory" if isinstance(error, MemoryError) else "memory or processes for another thread"
        print(
            f"planaria: not enough {what}; choose a smaller model, free some, or raise the limit (`ulimit -a`)",
            file=sys.stderr,
        )
        return 2
    except OSError as error:
        place = str(error.filename or "the operating system")
        print(f"planaria: {one_line(f'{place}: {error.strerror or error}; fix that, and try again')}", file=sys.stderr)
        return 2


def one_line(message: str) -> str:
    """Return a message as one line of printable text, shortened in the middle if it is too long."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
    return shown if len(shown) <= LONGEST else f"{shown[: LONGEST // 2]} … {shown[-LONGEST // 2 :]}"


def run(arguments: list[str], may_fork: bool = False) -> int:
    """Parse and run one command; returns the exit code.

    :param may_fork: the command may fork its workers from this process.
    """
    parser, known = make_parser(arguments[0] if arguments else "")
    if completion.REQUEST in os.environ:
        completion.complete(parser, known)
    _require_utf8(arguments)
    if not arguments:
        parser.print_help()
        return 0
    if " ".join(arguments[:2]) in known:
        arguments = [" ".join(arguments[:2]), *arguments[2:]]
    if not arguments[0].startswith("-") and arguments[0] not in known:
        raise UserError(f"{arguments[0]}: unknown command; {nearest(arguments[0], known)}")
    arguments, options = take_options(arguments)
    given, rest = parser.parse_known_args(arguments)
    _set_options(given, options)
    if rest:
        raise UserError(f"{rest[0]}: {_unknown(rest[0], given)}")
    _require_utf8_places()
    if given.forks and may_fork and "torch" not in sys.modules:
        from planaria.runtime.fleet import spawner

        spawner.expect_fork()
    outlet = lasting() if given.lasting else nullcontext()
    with command_logs(given.log_level, given.log_json), consent.allowing(given.allow_code), outlet:
        code: int = given.action(given)
    return code


def _require_utf8(words: Sequence[str]) -> None:
    """Raise UserError for a flag or argument that is not UTF-8, since recipes and logs cannot contain it."""
    flag = ""
    for number, word in enumerate(words, start=1):
        if word.startswith("--"):
            flag = word.partition("=")[0]
        if not _is_utf8(word):
            name = flag if flag and _is_utf8(flag) else f"argument {number}"
            value = word.partition("=")[2] if word.startswith("--") and "=" in word else word
            raise UserError(f"{name}: {value!a} is not UTF-8; rename the file or folder, or write other text")
        if not word.startswith("--"):
            flag = ""


def _require_utf8_places() -> None:
    """Raise UserError if the working directory was removed, or its path or a user folder's is not UTF-8."""
    try:
        places = {"the working directory": os.getcwd()}  # noqa: PTH109 (a Path has no other error)
    except FileNotFoundError:
        raise UserError("the working directory was removed; change to another one") from None
    places |= {f"${name}": os.environ.get(name, "") for name in ("HOME", "XDG_CACHE_HOME", "TMPDIR")}
    for name, path in places.items():
        if not _is_utf8(path):
            raise UserError(f"{name}: {path!a} is not UTF-8; rename the folder, or use another one")


def _is_utf8(text: str) -> bool:
    """Return whether the bytes of a text from the operating system are UTF-8; other bytes are lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _unknown(word: str, given: argparse.Namespace) -> str:
    """Describe a word that the command does not accept, and suggest another."""
    known: Collection[str] = given.parser._option_string_actions
    see = f"see `{given.parser.prog} --help`"
    name, _, value = word.partition("=")
    shown = value or "VALUE"
    if not word.startswith("-"):
        meant = [flag for flag in known if flag.removeprefix("--") == name or flag.rpartition(".")[2] == name]
        if given.root is None and "--prompt" in known:
            return f"unexpected argument; write --prompt {shlex.quote(word)}"
        if meant:
            return f"unexpected argument; write {' or '.join(f'{flag} {shown}' for flag in meant[:3])}"
        example = "; settings are flags, such as --train.steps 200" if "--train.steps" in known else ""
        return f"unexpected argument{example}; {see}"
    if name in PLACES and (at := f"{name.rpartition('-')[0]}-at" if "live" in name else "--at") in known:
        return f"unknown flag; write {at} HOST:PORT, such as {at} 127.0.0.1:8080"
    close = nearest(name, known) if name.startswith("--") else see
    return f"unknown flag; {_as_option(name, given.root) or (close if close.startswith('did') else see)}"


def _as_option(flag: str, root: type[Section] | None) -> str:
    """Return an unknown flag as an option of its section's choice; "" if it is none."""
    head, _, key = flag.removeprefix("--").rpartition(".")
    section = section_of(root.model_fields[head].annotation) if root and head in root.model_fields else None
    if section is None:
        return ""
    return recipe.as_option(key, section, f"--{head}.")


def _set_options(given: argparse.Namespace, options: Mapping[str, str]) -> None:
    """Set options as flags, if the command has the setting."""
    for name, text in options.items():
        setting = name if recipe.in_table(name) else f"{name.partition(f'.{NAME}.')[0]}.{NAME}"
        if given.root is None or recipe.setting(setting, given.root) is None:
            raise UserError(f"--{name}: unknown flag; see `planaria {given.command} --help`")
        setattr(given, f"{SET}{name}", text)


def make_parser(first: str = "") -> tuple[argparse.ArgumentParser, Collection[str]]:
    """Return a parser and the names of its commands: those of the core if ``first`` is one of them, else all.

    :param first: first word of the command line.
    """
    parser = Parser(prog="planaria", description="Trains language models on machines that fail, lag and lie.")
    parser.add_argument("--version", action="version", version=f"planaria {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for group in GROUPS:
        import_module(group).add(commands)
    if first not in {name.partition(" ")[0] for name in commands.choices} or completion.REQUEST in os.environ:
        for part in PARTS:
            import_module(part).add(commands)
    return parser, commands.choices
