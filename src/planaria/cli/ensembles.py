"""Commands for ensembles of experts: experts, experts add, remove, weigh, fuse."""

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
        "train one expert per domain and combine them into one model; also: add, remove, weigh, fuse",
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

    fusing = command(commands, "experts fuse", "put an ensemble's experts together as one model", _fuse)
    fusing.add_argument("run", type=Path)
    fusing.add_argument("--to", type=Path, required=True, metavar="FOLDER")
    ways = "weighted sum of what each learned, TIES, or DARE (default %(default)s)"
    fusing.add_argument("--by", choices=("sum", "ties", "dare"), default="sum", help=ways)
    fusing.add_argument("--lambda", dest="scale", type=float, metavar="L", help="weight of each (default .3, ties .4)")
    fusing.add_argument("--safe", metavar="MODEL", help="the parent that all branched off, where the run does not say")
    fusing.add_argument("--seed", type=int, default=0, help="dare: of what is dropped")

    _add_weigh(commands)


def _add_weigh(commands: Any) -> None:
    """Weights by what they are for."""
    weighing = command(commands, "experts weigh", "find the best weights for an ensemble's worst domain", _weigh)
    weighing.add_argument("run", type=Path)
    told = "weights for the domain it does worst on, with a certificate and prices of domains; changes nothing"
    weighing.add_argument("--worst", action="store_true", required=True, help=told)
    weighing.add_argument("--tokens", type=int, metavar="T", help="of each text, from its beginning (default: prefix)")
    weighing.add_argument("--floor", type=float, help="least weight of an expert (default .01)")
    weighing.add_argument("--tolerance", type=float, help="residual to reach (default .001)")


def _experts(given: argparse.Namespace) -> int:
    from planaria.commands.experts import start

    return start(given.recipe, flagged(given), given.dry_run, given.quiet)


def _add(given: argparse.Namespace) -> int:
    from planaria.commands.ensemble import add_expert

    return add_expert(given.run, given.model, given.called or given.model.resolve().name, given.domain)


def _remove(given: argparse.Namespace) -> int:
    from planaria.commands.ensemble import remove_expert

    return remove_expert(given.run, given.name)


def _weigh(given: argparse.Namespace) -> int:
    from planaria.commands.weigh import weigh_worst

    return weigh_worst(given.run, given.tokens, given.floor, given.tolerance)


def _fuse(given: argparse.Namespace) -> int:
    from planaria.commands.fuse import fuse

    return fuse(given.run, given.to, given.by, given.scale, given.safe, given.seed)
