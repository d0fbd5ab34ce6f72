"""Commands for peers that do not trust each other: swarm, its join, explain, credits and settle, verify, drill."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from planaria.cli.flags import add_fields, add_recipe, command, flagged
from planaria.swarm.config import SwarmConfig


def add(commands: Any) -> None:
    swarm = command(
        commands,
        "swarm",
        "train peers on each other's completions; also: join, explain, credits",
        _swarm,
        lasting=True,
        forks=True,
    )
    add_recipe(swarm)
    swarm.add_argument("--dry-run", action="store_true", help="print the resolved recipe and stop")
    swarm.add_argument("--quiet", action="store_true", help="no progress display")
    add_fields(swarm, SwarmConfig)
    _add_join(commands)
    _add_explain(commands)
    _add_credits(commands)

    verify = command(commands, "verify", "check the certificate beside an exported model of a swarm", _verify)
    verify.add_argument("model", type=Path)
    verify.add_argument("--board", metavar="URL", help="also that it is of the run that was founded here")

    drill = command(
        commands, "drill", "attack your own swarm, with and without defences", _drill, lasting=True, forks=True
    )
    add_recipe(drill, " with a [drill] table")
    drill.add_argument("--quiet", action="store_true", help="no progress display")
    drill.add_argument("--repair", action="store_true", help="repair what was poisoned (drill.repair), in every way")
    add_fields(drill, SwarmConfig)


def _add_join(commands: Any) -> None:
    join = command(commands, "swarm join", "join a swarm as one peer", _swarm_join, lasting=True, forks=True)
    add_recipe(join, "; the rules on the board take precedence", needed=False)
    join.add_argument(
        "--model", metavar="PATH", help="a pretrained policy: sets --policy.kind and --policy.options.path"
    )
    join.add_argument("--task", metavar="NAME", help="the same as --task.name")
    join.add_argument(
        "--as", dest="called", metavar="NAME", default="me", help="this peer's name (default %(default)s)"
    )
    join.add_argument("--quiet", action="store_true", help="no progress display")
    add_fields(join, SwarmConfig)


def _add_explain(commands: Any) -> None:
    explain = command(
        commands, "swarm explain", "trace the origin of a peer's training completions", _swarm_explain, lasting=True
    )
    explain.add_argument("run", type=Path)
    explain.add_argument("--peer", default="p0", help="peer whose records to read (default %(default)s)")
    explain.add_argument("--round", type=int, metavar="N", help="only this round")
    explain.add_argument("--problem", type=int, metavar="N", help="only this problem, with its completions")
    explain.add_argument("--source", metavar="PEER", help="only completions from this peer")
    explain.add_argument("--refused", action="store_true", help="only refused completions")


def _add_credits(commands: Any) -> None:
    settle = command(
        commands, "swarm settle", "simulate credits that are settled along a route, with liars", _settle, lasting=True
    )
    settle.add_argument("--hops", type=int, default=4, metavar="N", help="channels of the route (default %(default)s)")
    settle.add_argument(
        "--faulty", type=int, default=1, metavar="F", help="f: committees have 3f+1 members (default %(default)s)"
    )
    settle.add_argument("--seeds", type=int, default=50, metavar="N", help="runs of each case (default %(default)s)")

    credits = command(
        commands, "swarm credits", "whose completions were accepted, and who owes whom", _swarm_credits, lasting=True
    )
    credits.add_argument("run", type=Path)


def _swarm(given: argparse.Namespace) -> int:
    from planaria.cli.commands.swarm import start

    return start(given.recipe, flagged(given), given.dry_run, given.quiet)


def _swarm_join(given: argparse.Namespace) -> int:
    from planaria.cli.commands.swarm_join import take_part

    kind = None if given.model is None else "pretrained"
    short = {"policy.kind": kind, "policy.options.path": given.model, "task.name": given.task}
    flags = flagged(given) | {name: text for name, text in short.items() if text is not None}
    return take_part(given.recipe, flags, given.called, given.quiet)


def _swarm_explain(given: argparse.Namespace) -> int:
    from planaria.cli.commands.swarm_explain import Wanted, explain

    explain(given.run, given.peer, Wanted(given.round, given.problem, given.source, given.refused))
    return 0


def _settle(given: argparse.Namespace) -> int:
    from planaria.cli.commands.settle import settle

    return settle(given.hops, given.faulty, given.seeds)


def _swarm_credits(given: argparse.Namespace) -> int:
    from planaria.cli.commands.swarm_credits import tell

    tell(given.run)
    return 0


def _verify(given: argparse.Namespace) -> int:
    from planaria.swarm.certificate import verify

    print(*verify(given.model, given.board), sep="\n")
    return 0


def _drill(given: argparse.Namespace) -> int:
    from planaria.cli.commands.drill import drill

    return drill(given.recipe, flagged(given), given.quiet, given.repair)
