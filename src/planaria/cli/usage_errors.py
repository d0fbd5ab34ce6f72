"""Errors for unknown commands and flags, with the renamed or the nearest valid ones."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from planaria.cli.flags import CommandGroup, UnexpectedArgument
from planaria.cli.settings import Settings
from planaria.common.errors import UserError, suggestion
from planaria.config import shipped

RENAMED_COMMANDS = {
    "accept": "run check FOLDER --accept",
    "audit": "swarm audit",
    "chaos": "run chaos",
    "checkpoint export": "export RUN --to FOLDER --format FORMAT",
    "checkpoint import": "checkpoint convert FOLDER --from FORMAT --recipe RECIPE",
    "checkpoint verify": "checkpoint show RUN --verify",
    "codes": "python -m planaria.lab.commands.codes",
    "completion": "--show-completion",
    "diagnose": "report RUN --waits",
    "drill": "compare RECIPE",
    "experts add": "experts edit RUN --add MODEL",
    "experts fuse": "experts edit RUN --merge sum --to FOLDER",
    "experts merge": "experts edit RUN --merge HOW --to FOLDER",
    "experts remove": "experts edit RUN --remove NAME",
    "experts weigh": "eval --experts RUN --worst",
    "init": "recipes NAME --to FILE",
    "lab codes": "python -m planaria.lab.commands.codes",
    "lab trace": "python -m planaria.lab.commands.trace",
    "network paths": "plan RECIPE --update",
    "realign": "swarm realign",
    "relay": "network relay",
    "replay": "run check",
    "run accept": "run check FOLDER --accept",
    "run diagnose": "report RUN --waits",
    "run replay": "run check",
    "standby": "join RUN --standby",
    "swarm credits": "swarm show RUN --credits",
    "swarm drill": "compare RECIPE",
    "swarm explain": "swarm show",
    "swarm settle": "python -m planaria.swarm.commands.settlement",
    "swarm verify": "swarm show MODEL --certificate",
    "topology measure": "network measure",
    "topology paths": "plan RECIPE --update",
    "topology": "network",
    "trace": "python -m planaria.lab.commands.trace",
    "verify": "swarm show MODEL --certificate",
}
"""earlier spelling of a command → its spelling: a command of planaria, or a program that Python runs"""
RENAMED_FLAGS = {
    ("experts merge", "--add"): "experts edit MODEL --add EXPERT --to FOLDER",
    ("experts merge", "--remove"): "experts edit MODEL --remove NAME --to FOLDER",
    ("run chaos", "--lie"): "run chaos RUN --corrupt-update TARGET",
    ("report", "--perfetto="): "report RUN --perfetto --to FILE",
    ("compare", "--together"): "compare RECIPE --adjacent-probability P",
    ("compare", "--lost"): "compare RECIPE --failure-domain DOMAIN",
    ("swarm audit", "--most-leak"): "swarm audit MODEL --max-leak NATS",
    ("swarm audit", "--most-success"): "swarm audit MODEL --max-success SHARE",
    ("swarm realign", "--most-success"): "swarm realign MODEL --max-success SHARE",
    ("swarm show", "--refused"): "swarm show RUN --rejected",
    ("swarm drill", "--settlement"): "python -m planaria.swarm.commands.settlement",
}
"""command and the beginning of a former flag → its present spelling"""
MISSING_FLAG = {"--prompt": "--prompt", "--perfetto": "--perfetto --to", "--exempt": "--exempt"}
"""flag of a command → the flag that an unexpected argument probably lacks"""
WITH_RECIPE = ("experts", "swarm")
"""groups that were commands with a recipe; their command is now ``train``"""
ADDRESS_FLAGS = ("--port", "--host", "--live-port", "--live-host")
"""flags of other servers, instead of which planaria has --at and --live-at"""
HELP = ("-h", "--help")


def require_known(words: Sequence[str], root: CommandGroup) -> None:
    """Raise UserError unless ``words`` begin with a command; suggest the renamed or a similar one."""
    first, second = (*words, "", "")[:2]
    for (name, flag), new in RENAMED_FLAGS.items():
        if f"{first} {second} ".startswith(f"{name} ") and any(word.startswith(flag) for word in words):
            raise _renamed_error(f"{name} {flag}", new)
    for old in (f"{first} {second}", first):
        if old in RENAMED_COMMANDS:
            raise _renamed_error(old, RENAMED_COMMANDS[old])
    if not first or first.startswith("-"):
        return
    if first not in root.commands:
        leaves = {
            f"{group} {leaf}" for group, command in root.commands.items() for leaf in getattr(command, "commands", ())
        }
        meant = sorted(leaf for leaf in leaves if leaf.endswith(f" {first}") or leaf == first.replace("-", " "))
        similar = f"did you mean {meant[0]!r}?" if meant else suggestion(first, root.commands)
        raise UserError(f"{first}: unknown command; {similar}")
    group = root.commands[first]
    if isinstance(group, CommandGroup) and second not in (*HELP, *group.commands):
        _raise_unknown_command(first, second, group)


def _renamed_error(old: str, new: str) -> UserError:
    return UserError(f"{old} is now `{new if new.startswith('python ') else f'planaria {new}'}`")


def _raise_unknown_command(first: str, second: str, group: CommandGroup) -> None:
    """Raise UserError, since the group ``first`` has no command ``second``."""
    if not second:
        below = ", ".join(sorted(group.commands))
        raise UserError(f"{first}: use one of its commands: {below}; see `planaria {first} --help`")
    if first in WITH_RECIPE and (second.startswith("-") or second.endswith(".toml") or _is_recipe(second)):
        raise UserError(f"{first} {second} is now `planaria {first} train {second}`")
    raise UserError(f"{first} {second}: unknown command; {suggestion(second, group.commands)}")


def _is_recipe(word: str) -> bool:
    return word in shipped.names() or Path(word).exists()


def describe_usage_error(error: typer.TyperException) -> str:
    """Describe in one line an argument or flag that a command does not accept, and suggest another."""
    ctx: Any = getattr(error, "ctx", None)
    if ctx is None:
        name, text = getattr(error, "option_name", ""), error.format_message().removesuffix(".")
        return f"{name}: requires a value" if name and text.endswith("requires an argument") else text
    see = f"see `{ctx.command_path} --help`"
    flags = [flag for param in ctx.command.get_params(ctx) for flag in param.opts if flag.startswith("-")]
    if isinstance(error, UnexpectedArgument):
        return f"{error}: unexpected argument{_as_flag(str(error), flags, ctx)}; {see}"
    if hasattr(error, "possibilities"):
        name = str(getattr(error, "option_name", ""))
        return f"{name}: unknown flag; {_near_flag(name, flags, ctx) or see}"
    text = " ".join(error.format_message().split()).removesuffix(".")
    return f"{text.replace('Value error, ', '')}; {see}"


def _as_flag(word: str, flags: Sequence[str], ctx: Any) -> str:
    """Return advice to write an unexpected argument as a flag, or an empty string if no flag fits."""
    name, _, value = word.partition("=")
    placeholder = value or "VALUE"
    if meant := [flag for flag in flags if flag.removeprefix("--") == name or flag.rpartition(".")[2] == name]:
        return f"; use {' or '.join(f'{flag} {placeholder}' for flag in meant[:3])}"
    if isinstance(ctx.command, Settings):
        return "; settings are flags, such as --train.steps 200" if "--train.steps" in flags else ""
    return next((f"; use {MISSING_FLAG[flag]} {shlex.quote(word)}" for flag in flags if flag in MISSING_FLAG), "")


def _near_flag(name: str, flags: Sequence[str], ctx: Any) -> str:
    if name in ADDRESS_FLAGS and (at := f"{name.rpartition('-')[0]}-at" if "live" in name else "--at") in flags:
        return f"use {at} HOST:PORT, such as {at} 127.0.0.1:8080"
    close = suggestion(name, flags)
    return _as_option(name, ctx) or (close if name.startswith("--") and close.startswith("did") else "")


def _as_option(flag: str, ctx: Any) -> str:
    """Return advice to write an unknown flag as an option of its section's choice, or an empty string if it is not an
    option.
    """
    if not isinstance(ctx.command, Settings):
        return ""
    from planaria.config.section import as_option, present_name, section_of

    head, _, key = flag.removeprefix("--").rpartition(".")
    fields = {name: field for root in ctx.command.roots() for name, field in root.model_fields.items()}
    section = section_of(fields[head].annotation) if head in fields else None
    if section is not None and (name := present_name(section, key)) != key:
        return f"use --{head}.{name}"
    return "" if section is None else as_option(key, section, f"--{head}.")
