"""Write the generated pages: docs/settings.md from the schema, docs/commands.md from the commands' signatures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from planaria.cli.entry import every_command
from planaria.cli.flags import CommandGroup, TabledCommand
from planaria.cli.settings import Settings
from planaria.config import options, recipe
from planaria.config.model_config import GROUP
from planaria.config.registry import Registry
from planaria.config.section import meaning
from planaria.exchange.coded.schemes import SCHEMES
from planaria.exchange.compress.compression import COMPRESSORS, FEEDBACKS
from planaria.exchange.registry import EXCHANGES
from planaria.exchange.robust.rules import RULES
from planaria.models.families import FAMILIES
from planaria.models.optimizers import OPTIMIZERS
from planaria.pipeline.codecs import CODECS
from planaria.pipeline.routing import ROUTINGS
from planaria.recovery import RECOVERIES
from planaria.report.observe.trackers import TRACKERS

DOCS = Path(__file__).parents[1] / "docs"
REGISTRIES: tuple[Registry[Any], ...] = (
    FAMILIES,
    CODECS,
    ROUTINGS,
    OPTIMIZERS,
    RECOVERIES,
    EXCHANGES,
    COMPRESSORS,
    FEEDBACKS,
    RULES,
    SCHEMES,
    TRACKERS,
)
"""registries of a run's choices, in the order of the sections that choose them"""


def settings() -> str:
    """Return the page of all settings of a run, one table per section."""
    fields, meanings = dict(recipe.fields()), dict(recipe.meanings())
    lines = [
        "# Settings",
        "",
        "Every setting of a recipe and its flag (`--SECTION.NAME`), generated from `config/schema.py` and the classes",
        "that a recipe can choose. Recipes of swarms: `planaria swarm train --help`.",
    ]
    section = None
    for name, field in fields.items():
        if (head := name.rpartition(".")[0]) != section:
            lines += _choices(section)
            section = head
            lines += ["", f"## {section or 'Run'}", "", "| setting | default | meaning |", "|---|---|---|"]
        usual = "" if field.is_required() else field.get_default(call_default_factory=True)
        shown = "" if usual in (None, "", {}, []) or name.endswith(options.NAME) else _value(usual)
        lines.append(f"| `{name}` | {shown} | {_cell(meanings[name])} |")
    return "\n".join([*lines, *_choices(section)]) + "\n"


def _choices(section: str | None) -> Iterator[str]:
    """Yield the tables of options for all choices of a section."""
    for registry in REGISTRIES:
        if registry.setting.partition(".")[0] == section:
            yield from _options(registry)


def _options(registry: Registry[Any]) -> list[str]:
    """Return the heading and table of a registry's options; choices with equal options share a row."""
    hidden = (GROUP, *registry.for_comparison)
    choices = {name: chosen for name, chosen in registry.shipped.items() if name not in hidden}
    rows: dict[tuple[str, str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, chosen in choices.items():
        for option, field in chosen.model_fields.items():
            row = option, _type(field.annotation), _cell(meaning(chosen, option))
            default = "required" if field.is_required() else _value(field.get_default(call_default_factory=True))
            rows[row][default].append(name)
    if not rows:
        return []
    location = registry.location or f"{registry.setting.rpartition('.')[0]}.{options.NAME}"
    without = [f"`{name}`" for name, chosen in choices.items() if not chosen.model_fields]
    lines = ["", f"### Options of `{registry.setting}`", "", f"Set them in `[{location}]`."]
    lines[-1] += f" Without options: {', '.join(without)}." if without else ""
    lines += ["", "| option | choices: default | type | meaning |", "|---|---|---|---|"]
    for (option, kind, text), defaults in sorted(rows.items(), key=lambda row: row[0][0]):
        chosen_by = "; ".join(f"{_names(names, choices)}: {default}" for default, names in defaults.items())
        lines.append(f"| `{option}` | {chosen_by} | {kind} | {text} |")
    return lines


def _names(names: list[str], choices: dict[str, Any]) -> str:
    """Return the names of choices; "all" if these are all choices that have options."""
    with_options = [name for name, chosen in choices.items() if chosen.model_fields]
    return "all" if names == with_options and len(names) > 1 else ", ".join(f"`{name}`" for name in names)


def _type(annotation: Any) -> str:
    """Return a field's type in words, such as "int" or "`4`, `8`"."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(parts[0])
    if origin is Literal:
        return ", ".join(map(_value, parts))
    if origin in (Union, UnionType):
        return " or ".join(map(_type, parts))
    if origin is list:
        return f"list of {_type(parts[0])}"
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _value(value: object) -> str:
    """Return a value as in a recipe."""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`" if value not in (None, "") else "empty"


def commands() -> str:
    """Return the page of all commands with their arguments, without flags that are settings."""
    lines = [
        "# Commands",
        "",
        "Generated from the command line. `planaria COMMAND --help-all` also lists settings, which are flags.",
        "Exit codes: 0 success, 1 stopped before its end or a check not passed, "
        "2 invalid input or a failed run, 3 a sample was lost or used twice.",
    ]
    root = every_command()
    for word, found in sorted(root.commands.items()):
        for name, command in sorted(getattr(found, "commands", {"": found}).items()):
            lines += _command(f"planaria {word} {name}".rstrip(), command, root)
    return "\n".join(lines) + "\n"


def _command(name: str, command: TabledCommand, root: CommandGroup) -> list[str]:
    """Return a command's section of the page."""
    context = root.make_context(name, [])
    context.command = command
    params = command.get_params(context)
    settings = command.keys if isinstance(command, Settings) else {}
    rows = [command.row(param, context) for param in params if param.name not in settings and param.name != "help"]
    shown = [f"| `{_cell(row[0])}` | {_cell(row[1])} |".replace("|  |", "| |") for row in rows if row is not None]
    table = ["| argument | meaning |", "|---|---|", *shown]
    return ["", f"## {name}", "", str(command.help), "", *(table if shown else [])]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("``", "`")


if __name__ == "__main__":
    (DOCS / "settings.md").write_text(settings())
    (DOCS / "commands.md").write_text(commands())
