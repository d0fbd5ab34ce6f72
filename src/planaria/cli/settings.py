"""Commands on recipes: every field of a recipe is a flag.

Functions import the schema when they need it, so that ``planaria --help`` does not wait for pydantic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, get_args

import typer

from planaria.cli.flags import SHOW_ALL, TABLE_VALUES, TabledCommand
from planaria.common.errors import UserError

if TYPE_CHECKING:
    from planaria.config.schema import Section

WIDTH = 120
"""columns of help texts"""
COMMON = {
    *("name", "engine", "seed", "model.vocab", "model.dim", "model.layers", "model.context", "pipeline.stages"),
    *("pipeline.microbatches", "data.source", "optim.lr", "train.steps", "train.start", "train.device"),
    *("recovery.strategy", "exchange.replicas", "exchange.kind", "checkpoint.every"),
    *("size", "board", "task.name", "policy.kind", "rounds.count", "loss.kind", "defence.checks", "attack.kind"),
}
"""settings that ``--help`` shows; ``--help-all`` shows all"""


class Settings(TabledCommand):
    """A command with every field of a recipe as a flag; a subclass names the recipe's root sections."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.options_metavar = "[OPTIONS] [--SECTION.SETTING VALUE ...]"
        self.context_settings = {"terminal_width": WIDTH}

    def roots(self) -> tuple[type[Section], ...]:
        """Import and return the root section of each kind of recipe; sections of the same name are equal."""
        from planaria.config.schema import RunConfig

        return (RunConfig,)

    def table(self) -> Mapping[str, Any]:
        options: dict[str, Any] = {}
        for root in self.roots():
            options |= {name: option for name, option in _setting_options(root) if name not in options}
        every = "show every setting of a recipe, which are flags too"
        return options | {"help_all": typer.Option("--help-all", is_eager=True, callback=_help_all, help=every)}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args, options = (args, {}) if ctx.resilient_parsing else split_options(args)
        rest = super().parse_args(ctx, args)
        for name in options:
            self._require_choice(name, ctx)
        ctx.meta[TABLE_VALUES].pop("help_all", None)
        ctx.meta[TABLE_VALUES] |= options
        return rest

    def _require_choice(self, name: str, ctx: Any) -> None:
        from planaria.config import recipe
        from planaria.config.options import NAME

        setting = name if recipe.in_table(name) else f"{name.partition(f'.{NAME}.')[0]}.{NAME}"
        if all(recipe.find_setting(setting, root) is None for root in self.roots()):
            raise UserError(f"--{name}: unknown flag; see `{ctx.command_path} --help`")

    def section(self, param: Any, ctx: Any) -> str | None:
        name = self.keys.get(param.name)
        if SHOW_ALL in ctx.meta or name in (None, "help_all"):
            return super().section(param, ctx)
        return "Common settings" if name in COMMON else None

    def row(self, param: Any, ctx: Any) -> tuple[str, str] | None:
        row = super().row(param, ctx)
        if row is None or SHOW_ALL in ctx.meta or param.name not in self.keys:
            return row
        return row[0], _first_phrase(row[1])


def _setting_options(root: type[Section]) -> Iterator[tuple[str, Any]]:
    """Yield the name and the option of each setting below a root section."""
    from planaria.config import options, recipe

    meanings = dict(recipe.meanings(root))
    for name, field in recipe.fields(root):
        if name.endswith(f".{options.NAME}"):
            continue  # see split_options
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        default_text = f" (default {default})" if default not in (None, "", [], {}) else ""
        choices = [value for value in get_args(field.annotation) if isinstance(value, str)]
        option = typer.Option(
            f"--{name}",
            metavar="|".join(choices) or name.rpartition(".")[2].upper(),
            help=f"{meanings[name]}{default_text}",
            autocompletion=_completion(choices),
            rich_help_panel=name.rpartition(".")[0] or "run",
        )
        yield name, option


def _completion(values: list[str]) -> Callable[[], list[str]]:
    return lambda: values


def _help_all(ctx: typer.Context, value: bool) -> None:
    """Print the help with every flag, and end the command."""
    if value and not ctx.resilient_parsing:
        ctx.meta[SHOW_ALL] = True
        print(ctx.get_help())
        raise typer.Exit


def _first_phrase(text: str) -> str:
    """Return a setting's help text without what follows the first semicolon, but with its default."""
    phrase, more, rest = text.partition(";")
    start = rest.rfind(" (default ")
    return phrase + (rest[start:] if more and start >= 0 else "")


def split_options(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """Split a command line into the rest and the options of choices (``--recovery.options.bits 4``) and entries of
    tables (``--data.mixture.books.weight 2``), by dotted name.

    Only the choices or the recipe know these, so no command lists them.
    :raises UserError: if an option has no value.
    """
    rest, given = [], {}
    left = iter(words)
    for word in left:
        name, equals, value = word.partition("=")
        if not (name.startswith("--") and "." in name and _is_option(name.removeprefix("--"))):
            rest.append(word)
        elif (text := value if equals else next(left, None)) is None:
            raise UserError(f"{name} has no value; use {name} VALUE")
        else:
            given[name.removeprefix("--")] = text
    return rest, given


def _is_option(name: str) -> bool:
    from planaria.config import options, recipe

    return f".{options.NAME}." in name or recipe.in_table(name)
