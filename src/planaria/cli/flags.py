"""Building blocks of the parsers: a command, and every field of a recipe as a flag.

Functions import the schema when they need it, so that ``planaria --help`` does not wait for pydantic.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, get_args

from planaria.common import logs
from planaria.common.errors import UserError
from planaria.config import consent
from planaria.config.durations import seconds
from planaria.config.shipped import find

if TYPE_CHECKING:
    from planaria.config.schema import Section

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


SECTIONS = {
    "training": ("train", "join", "plan", "compare", "advise"),
    "runs and models": ("watch", "report", "generate", "eval", "export", "serve"),
    "recipes and shell": ("recipes", "init", "completion"),
    "groups of commands": ("run", "checkpoint", "experts", "swarm", "network", "lab"),
}
"""title → first words of commands, in the order of ``planaria --help``"""
GROUPS = {
    "run": "inspect or disturb a run",
    "checkpoint": "inspect, convert and exchange checkpoints",
    "experts": "ensembles of domain experts",
    "swarm": "peers that do not trust each other",
    "network": "links between machines",
    "lab": "offline generators of codes and fault traces",
}
"""first word of a command of two words → description of its group"""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line and whose help fits a screen."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see `{self.prog} --help`")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        fill(self)
        return super().parse_known_args(args, namespace)

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


class Root(Parser):
    """The parser of ``planaria``, whose help lists commands in sections."""

    def format_help(self) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        (below,) = (action for action in self._actions if isinstance(action, argparse._SubParsersAction))
        entries = {entry.dest: entry for entry in below._choices_actions}
        for title, names in SECTIONS.items():
            formatter.start_section(title)
            formatter.add_arguments([entries[name] for name in names if name in entries])
            formatter.end_section()
        formatter.start_section("options")
        formatter.add_arguments([action for action in self._actions if action is not below])
        formatter.end_section()
        formatter.add_text("`planaria COMMAND --help` shows a command's arguments, or a group's commands.")
        return formatter.format_help()


class Commands:
    """The commands of ``planaria``: single words, and groups of commands of two words."""

    def __init__(self, parser: Root) -> None:
        self._top = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
        self._groups: dict[str, Any] = {}
        self._known: dict[str, Parser] = {}

    @property
    def known(self) -> Mapping[str, Parser]:
        """Return the parsers of all commands by name, such as ``train`` or ``run replay``."""
        return self._known

    @property
    def first_words(self) -> frozenset[str]:
        """Return the first words of all commands."""
        return frozenset(name.partition(" ")[0] for name in self._known)

    def add(self, name: str, what: str) -> Parser:
        """Add the parser of a command, and of its group if it is the group's first."""
        group, _, last = name.rpartition(" ")
        below = self._group(group) if group else self._top
        parser: Parser = below.add_parser(last, help=what, description=what, allow_abbrev=False)
        self._known[name] = parser
        if group:
            (entry,) = (entry for entry in self._top._choices_actions if entry.dest == group)
            entry.help = f"{GROUPS[group]}: {', '.join(below.choices)}"
        return parser

    @property
    def groups(self) -> Mapping[str, Parser]:
        """Return the parsers of all groups by name."""
        return {name: self._top.choices[name] for name in self._groups}

    def _group(self, name: str) -> Any:
        if name not in self._groups:
            what = GROUPS[name]
            parser = self._top.add_parser(name, help=what, description=what, allow_abbrev=False)
            self._groups[name] = parser.add_subparsers(dest="below", required=True, metavar="COMMAND")
        return self._groups[name]


class HelpAll(argparse.Action):
    """Print the help with every setting, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        explain(parser, every=True)
        print(argparse.ArgumentParser.format_help(parser), end="")
        sys.exit(0)


def command(
    commands: Commands,
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
    parser = commands.add(name, what)
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


def run_config() -> type[Section]:
    """Return the root section of a run's recipe."""
    from planaria.config.schema import RunConfig

    return RunConfig


def add_fields(parser: argparse.ArgumentParser, root: Callable[[], type[Section]] = run_config) -> None:
    """Make every field of a recipe a flag; :func:`fill` adds the flags.

    :param root: imports and returns the recipe's root section.
    """
    parser.set_defaults(root=root)
    parser.formatter_class = partial(argparse.HelpFormatter, max_help_position=34, width=WIDTH)
    parser.add_argument(
        "--help-all", action=HelpAll, nargs=0, help="show every setting of a recipe, which are flags too"
    )
    words = [str(action.metavar or action.dest.upper()) for action in parser._actions if not action.option_strings]
    parser.usage = f"{parser.prog} [{' '.join(words)}] [OPTIONS] [--SECTION.SETTING VALUE ...]"


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a command's settings, if that has not been done; only the command that is parsed needs them."""
    root = parser.get_default("root")
    if root is None or parser.get_default("filled"):
        return
    from planaria.config import options, recipe

    parser.set_defaults(filled=True)
    groups: dict[str, Any] = {}
    for name, field in recipe.fields(root()):
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
    from planaria.config import recipe

    fill(parser)
    fields, meanings = dict(recipe.fields(root())), dict(recipe.meanings(root()))
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
        if not (name.startswith("--") and "." in name and _is_option(name.removeprefix("--"))):
            rest.append(word)
        elif (text := value if given else next(left, None)) is None:
            raise UserError(f"{name}: has no value; write {name} VALUE")
        else:
            found[name.removeprefix("--")] = text
    return rest, found


def _is_option(name: str) -> bool:
    from planaria.config import options, recipe

    return f".{options.NAME}." in name or recipe.in_table(name)


def duration(text: str) -> float:
    """Parse a flag that is a duration, in seconds."""
    try:
        return seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def flagged(given: argparse.Namespace) -> dict[str, str]:
    """Field → text, for every field given as a flag."""
    return {name.removeprefix(SET): text for name, text in vars(given).items() if name.startswith(SET)}
