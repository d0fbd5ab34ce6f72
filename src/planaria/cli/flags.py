"""Building blocks of the parsers: a command, and every field of a recipe as a flag."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any, NoReturn, get_args

from planaria.common import logs
from planaria.common.errors import UserError
from planaria.config import consent, options, recipe
from planaria.config.durations import seconds
from planaria.config.schema import Section
from planaria.config.shipped import find

WIDTH = 118
"""columns of help texts of commands with settings"""
SET = "set "
"""prefix of a field's flag among the parsed arguments"""


COMMON = {
    *("name", "engine", "seed", "model.vocab", "model.dim", "model.layers", "model.context", "pipeline.stages"),
    *("pipeline.microbatches", "data.source", "optim.lr", "train.steps", "train.start", "train.device"),
    *("recovery.strategy", "exchange.replicas", "exchange.kind", "checkpoint.every"),
    *("size", "board", "task.name", "policy.kind", "rounds.count", "loss.kind", "defence.checks", "attack.kind"),
}
"""settings that ``--help`` shows; ``--help-all`` shows all"""
ADVANCED = {"--live-at", "--live-name", "--live-token-file", "--live-chaos"}
"""flags that only ``--help-all`` shows"""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line and whose help fits a screen."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see `{self.prog} --help`")

    def format_help(self) -> str:
        if self.get_default("root") is None:
            return super().format_help()
        explain(self, every=False)
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        own = [action for action in self._actions if not action.dest.startswith(SET)]
        common = [action for action in self._actions if action.dest.removeprefix(SET) in COMMON]
        for title, actions in (("arguments", own), ("common settings", common)):
            formatter.start_section(title)
            formatter.add_arguments([action for action in actions if not ADVANCED & {*action.option_strings}])
            formatter.end_section()
        return formatter.format_help()


class HelpAll(argparse.Action):
    """Print the help with every setting, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        explain(parser, every=True)
        print(argparse.ArgumentParser.format_help(parser), end="")
        sys.exit(0)


def command(
    commands: Any,
    name: str,
    what: str,
    action: Any,
    code: bool = True,
    lasting: bool = False,
    forks: bool = False,
) -> argparse.ArgumentParser:
    """Add a command that calls ``action`` with the parsed arguments; ``action`` returns the exit code.

    :param name: one word, or two, such as ``checkpoint show``.
    :param code: the command reads recipes or runs, which may name classes of modules to import.
    :param lasting: the command continues when its output is closed, and has the flags of :func:`add_logs`.
    :param forks: the command forks its workers from its own process.
    """
    parser: argparse.ArgumentParser = commands.add_parser(name, help=what, description=what, allow_abbrev=False)
    parser.set_defaults(action=action, parser=parser, root=None, allow_code=False, lasting=lasting, forks=forks)
    parser.set_defaults(log_level=None, log_json=False)
    if code:
        parser.add_argument(
            consent.FLAG,
            action="store_true",
            help="import the modules of classes that the recipe or run names as module:Class; this runs their code",
        )
    if lasting:
        add_logs(parser)
    return parser


def add_logs(parser: argparse.ArgumentParser) -> None:
    """Add the flags of logs."""
    levels = f"{', '.join(logs.LEVELS[:-1])} or {logs.LEVELS[-1]} (default: warning here, info in workers' files)"
    parser.add_argument("--log-level", choices=logs.LEVELS, metavar="LEVEL", help=levels)
    parser.add_argument("--log-json", action="store_true", help="write logs as JSON lines")


def add_recipe(parser: argparse.ArgumentParser, what: str = "", needed: bool = True) -> None:
    """Add the recipe argument, parsed to a path; ``what`` completes its help text."""
    text = f"a TOML file{what}, or a name from `planaria recipes`"
    parser.add_argument("recipe", type=find, nargs=None if needed else "?", help=text)


def add_fields(parser: argparse.ArgumentParser, root: type[Section]) -> None:
    """Add every field of a recipe with this root section as a flag."""
    parser.set_defaults(root=root)
    parser.formatter_class = partial(argparse.HelpFormatter, max_help_position=34, width=WIDTH)
    parser.add_argument(
        "--help-all", action=HelpAll, nargs=0, help="show every setting of a recipe, which are flags too"
    )
    words = [str(action.metavar or action.dest.upper()) for action in parser._actions if not action.option_strings]
    parser.usage = f"{parser.prog} [{' '.join(words)}] [OPTIONS] [--SECTION.SETTING VALUE ...]"
    groups: dict[str, Any] = {}
    for name, field in recipe.fields(root):
        if name.endswith(f".{options.NAME}"):
            continue  # see take_options
        section = name.rpartition(".")[0] or "run"
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        choices = [a for a in get_args(field.annotation) if isinstance(a, str)]
        metavar = "|".join(choices) if choices else name.rpartition(".")[2].upper()
        groups[section].add_argument(
            f"--{name}", dest=f"{SET}{name}", default=argparse.SUPPRESS, metavar=metavar, help=" "
        )


def explain(parser: argparse.ArgumentParser, every: bool) -> None:
    """Set the help text of each setting's flag from the docstrings in the source.

    :param every: in full; otherwise its first phrase.
    """
    if (root := parser.get_default("root")) is None:
        return
    fields, meanings = dict(recipe.fields(root)), dict(recipe.meanings(root))
    for action in parser._actions:
        if action.dest.startswith(SET):
            name = action.dest.removeprefix(SET)
            usual = None if fields[name].is_required() else fields[name].get_default(call_default_factory=True)
            default = f" (default {usual})" if usual not in (None, "", [], {}) else ""
            meaning = meanings[name] if every else meanings[name].partition(";")[0]
            action.help = f"{meaning}{default}".replace("%", "%%")


def take_options(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """Split a command line into the rest and the options of choices (``--recovery.options.bits 4``) and entries of
    tables (``--data.mixture.books.weight 2``), by dotted name.

    Only the choices or the recipe know these, so no parser lists them.
    :raises UserError: if an option has no value.
    """
    rest, found = [], {}
    left = iter(words)
    for word in left:
        name, given, value = word.partition("=")
        free = f".{options.NAME}." in name or recipe.in_table(name.removeprefix("--"))
        if not (name.startswith("--") and free):
            rest.append(word)
        elif (text := value if given else next(left, None)) is None:
            raise UserError(f"{name}: has no value; write {name} VALUE")
        else:
            found[name.removeprefix("--")] = text
    return rest, found


def duration(text: str) -> float:
    """Parse a flag that is a duration, in seconds."""
    try:
        return seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def flagged(given: argparse.Namespace) -> dict[str, str]:
    """Field → text, for every field given as a flag."""
    return {name.removeprefix(SET): text for name, text in vars(given).items() if name.startswith(SET)}
