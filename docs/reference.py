"""Write the generated pages: docs/settings.md from the schema, docs/commands.md from the command line's parsers."""

from __future__ import annotations

import argparse
from pathlib import Path

from planaria.cli.entry import make_parser
from planaria.cli.flags import SET, fill
from planaria.config import options, recipe

DOCS = Path(__file__).parent


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
    _, known = make_parser()
    lines = [
        "# Commands",
        "",
        "Generated from the command line. `planaria COMMAND --help-all` also lists settings, which are flags.",
        "Exit codes: 0 success, 1 stopped or failed, 2 invalid input, 3 a sample was lost or used twice.",
    ]
    for name, command in sorted(known.items()):
        fill(command)
        lines += ["", f"## planaria {name}", "", _sentence(command.description or ""), ""]
        own = [action for action in command._actions if not action.dest.startswith((SET, "help"))]
        if own:
            lines += ["| argument | meaning |", "|---|---|"]
        formatter = command._get_formatter()
        lines += [f"| `{_usage(action)}` | {_cell(formatter._expand_help(action))} |" for action in own if action.help]
        lines += [f"| `{_usage(action)}` | |" for action in own if not action.help]
    return "\n".join(lines) + "\n"


def _usage(action: argparse.Action) -> str:
    """Return an argument as a user writes it."""
    value = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
    shown = " ".join(value) if isinstance(value, tuple) else str(value)
    return " ".join(filter(None, (", ".join(action.option_strings), shown if action.nargs != 0 else "")))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""


if __name__ == "__main__":
    (DOCS / "settings.md").write_text(settings())
    (DOCS / "commands.md").write_text(commands())
