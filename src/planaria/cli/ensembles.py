"""Commands for ensembles of experts: experts, experts add, experts remove."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from planaria.cli.flags import add_fields, add_recipe, command, flagged
from planaria.config import RunConfig


def add(commands: Any) -> None:
    experts = command(
        commands,
        "experts",
        "train one expert per domain and combine them into one model; also: add, remove",
        _experts,
    )
    add_recipe(experts, " with an [experts] table")
    experts.add_argument("--dry-run", action="store_true", help="print the resolved recipe and stop")
    experts.add_argument("--quiet", action="store_true", help="no progress display")
    add_fields(experts, RunConfig)

    adding = command(commands, "experts add", "add an expert to an ensemble", _add)
    adding.add_argument("run", type=Path)
    adding.add_argument("model", type=Path, help="a run or an exported model with the ensemble's tokenizer")
    adding.add_argument("--as", dest="called", metavar="NAME", help="its name (default: its folder's name)")
    adding.add_argument("--domain", default="", help="its domain, for reports")

    removing = command(commands, "experts remove", "remove an expert from an ensemble", _remove)
    removing.add_argument("run", type=Path)
    removing.add_argument("name", help="its name in experts.json")


def _experts(given: argparse.Namespace) -> int:
    from planaria.commands.experts import start

    return start(given.recipe, flagged(given), given.dry_run, given.quiet)


def _add(given: argparse.Namespace) -> int:
    from planaria.commands.ensemble import add_expert

    return add_expert(given.run, given.model, given.called or given.model.resolve().name, given.domain)


def _remove(given: argparse.Namespace) -> int:
    from planaria.commands.ensemble import remove_expert

    return remove_expert(given.run, given.name)
