"""Write the generated pages: docs/settings.md from the schema, docs/commands.md from the commands' signatures."""

from __future__ import annotations

from pathlib import Path

from planaria.cli.entry import every_command
from planaria.cli.flags import CommandGroup, TabledCommand
from planaria.cli.settings import Settings
from planaria.config import options, recipe

DOCS = Path(__file__).parents[1] / "docs"


def settings() -> str:
    """Return the page of all settings of a run, one table per section."""
    fields, meanings = dict(recipe.fields()), dict(recipe.meanings())
    lines = [
        "# Settings",
        "",
        "Every setting of a recipe and its flag (`--SECTION.NAME`), generated from `config/schema.py`. Options of a",
        f"chosen class are set in `[SECTION.{options.NAME}]`. Recipes of swarms: `planaria swarm train --help`.",
    ]
    section = None
    for name, field in fields.items():
        if (head := name.rpartition(".")[0]) != section:
            section = head
            lines += ["", f"## {section or 'Run'}", "", "| setting | default | meaning |", "|---|---|---|"]
        usual = "" if field.is_required() else field.get_default(call_default_factory=True)
        shown = "" if usual in (None, "", {}, []) or name.endswith(options.NAME) else f"`{usual}`"
        lines.append(f"| `{name}` | {shown} | {_cell(meanings[name])} |")
    return "\n".join(lines) + "\n"


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
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    (DOCS / "settings.md").write_text(settings())
    (DOCS / "commands.md").write_text(commands())
