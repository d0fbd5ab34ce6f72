"""Parse the command line and run a command. Exit codes: 2 with a one-line message for a user's error, 1 for a stopped
run.

Commands import modules when they run, so that ``planaria --help`` waits for neither torch nor pydantic.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from planaria import __version__
from planaria.cli import completion
from planaria.cli.flags import SET, Commands, Root, take_options
from planaria.common.errors import LedgerError, RunStopped, UserError, nearest
from planaria.common.logs import command_logs
from planaria.common.signals import interrupted
from planaria.common.stdio import ensure, lasting
from planaria.config import consent, shipped

if TYPE_CHECKING:
    from planaria.config.schema import Section

CORE = (
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
MOVED = {
    "accept": "run accept",
    "chaos": "run chaos",
    "diagnose": "run diagnose",
    "replay": "run replay",
    "codes": "lab codes",
    "trace": "lab trace",
    "relay": "network relay",
    "topology": "network",
    "topology measure": "network measure",
    "topology paths": "network paths",
    "audit": "swarm audit",
    "drill": "swarm drill",
    "realign": "swarm realign",
    "verify": "swarm verify",
}
"""earlier name of a command → its name"""
WITH_RECIPE = ("experts", "swarm")
"""groups that were commands with a recipe: the command of that is ``train``"""
PLACES = ("--port", "--host", "--live-port", "--live-host")
"""other servers' flags for --at or --live-at"""
HELP = ("-h", "--help")
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
    parser, commands = _commands(arguments[0] if arguments else "")
    if completion.REQUEST in os.environ:
        completion.complete(parser)
    _require_utf8(arguments)
    if not arguments:
        parser.print_help()
        return 0
    _require_known(arguments, commands)
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


def _require_known(arguments: Sequence[str], commands: Commands) -> None:
    """:raises UserError: if there is no such command, naming the new spelling of an earlier one, or a similar one."""
    first, second = (*arguments, "")[:2]
    if first.startswith("-") or first in commands.known:
        return
    if first not in commands.groups:
        for old in (f"{first} {second}", first):
            if old in MOVED:
                raise UserError(f"{old}: is now `planaria {MOVED[old]}`")
        meant = [name for name in commands.known if name.endswith(f" {first}") or name == first.replace("-", " ")]
        similar = f"did you mean '{meant[0]}'?" if meant else nearest(first, commands.first_words)
        raise UserError(f"{first}: unknown command; {similar}")
    below = [name.partition(" ")[2] for name in commands.known if name.startswith(f"{first} ")]
    if second in (*HELP, *below):
        return
    if not second:
        raise UserError(f"{first}: give one of its commands: {', '.join(below)}; see `planaria {first} --help`")
    if first in WITH_RECIPE and (second.startswith("-") or second.endswith(".toml") or _is_recipe(second)):
        raise UserError(f"{first} {second}: is now `planaria {first} train {second}`")
    raise UserError(f"{first} {second}: unknown command; {nearest(second, below)}")


def _is_recipe(word: str) -> bool:
    return word in shipped.names() or Path(word).exists()


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


def _as_option(flag: str, root: Callable[[], type[Section]] | None) -> str:
    """Return an unknown flag as an option of its section's choice; "" if it is none."""
    from planaria.config import recipe
    from planaria.config.section import section_of

    head, _, key = flag.removeprefix("--").rpartition(".")
    fields = root().model_fields if root is not None else {}
    section = section_of(fields[head].annotation) if head in fields else None
    if section is None:
        return ""
    return recipe.as_option(key, section, f"--{head}.")


def _set_options(given: argparse.Namespace, options: Mapping[str, str]) -> None:
    """Set options as flags, if the command has the setting."""
    if not options:
        return
    from planaria.config import recipe
    from planaria.config.options import NAME

    for name, text in options.items():
        setting = name if recipe.in_table(name) else f"{name.partition(f'.{NAME}.')[0]}.{NAME}"
        if given.root is None or recipe.setting(setting, given.root()) is None:
            raise UserError(f"--{name}: unknown flag; see `{given.parser.prog} --help`")
        setattr(given, f"{SET}{name}", text)


def make_parser() -> tuple[Root, Mapping[str, argparse.ArgumentParser]]:
    """Return the parser, and the parsers of all commands by name."""
    parser, commands = _commands()
    return parser, commands.known


def _commands(first: str = "") -> tuple[Root, Commands]:
    """Return a parser and its commands: those of the core if ``first`` begins one of them, else all.

    :param first: first word of the command line.
    """
    parser = Root(prog="planaria", description="Trains language models on machines that fail, lag and lie.")
    parser.add_argument("--version", action="version", version=f"planaria {__version__}")
    commands = Commands(parser)
    for module in CORE:
        import_module(module).add(commands)
    if first not in commands.first_words or completion.REQUEST in os.environ:
        for part in PARTS:
            import_module(part).add(commands)
    return parser, commands
