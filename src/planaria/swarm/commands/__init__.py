"""The swarm's commands: swarm train, join, explain, credits, settle, verify, drill, audit and realign; serve.

This module defines their parsers. A command imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from planaria.cli.flags import Commands, add_fields, add_recipe, command, flagged
from planaria.cli.serving import add_place, address
from planaria.common.errors import UserError

if TYPE_CHECKING:
    from planaria.config.schema import Section

MODEL = "a swarm's run with --peer, a run, or a model: a folder, a GGUF file, or hf:NAME"


def add(commands: Commands) -> None:
    """Add every command of the swarm."""
    _add_swarm(commands)
    _add_join(commands)
    _add_explain(commands)
    _add_credits(commands)
    _add_verify(commands)
    _add_drill(commands)
    _add_audit(commands)
    _add_serve(commands)
    _add_realign(commands)


def _swarm_config() -> type[Section]:
    """Return the root section of a swarm's recipe."""
    from planaria.swarm.config import SwarmConfig

    return SwarmConfig


def _add_swarm(commands: Commands) -> None:
    swarm = command(
        commands,
        "swarm train",
        "train peers on each other's completions",
        _swarm,
        lasting=True,
        forks=True,
    )
    add_recipe(swarm)
    swarm.add_argument("--dry-run", action="store_true", help="print the resolved recipe and stop")
    swarm.add_argument("--quiet", action="store_true", help="no progress display")
    add_fields(swarm, _swarm_config)


def _add_join(commands: Commands) -> None:
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
    add_fields(join, _swarm_config)


def _add_explain(commands: Commands) -> None:
    explain = command(
        commands, "swarm explain", "trace the origin of a peer's training completions", _swarm_explain, lasting=True
    )
    explain.add_argument("run", type=Path)
    explain.add_argument("--peer", default="p0", help="peer whose records to read (default %(default)s)")
    explain.add_argument("--round", type=int, metavar="N", help="only this round")
    explain.add_argument("--problem", type=int, metavar="N", help="only this problem, with its completions")
    explain.add_argument("--source", metavar="PEER", help="only completions from this peer")
    explain.add_argument("--refused", action="store_true", help="only refused completions")


def _add_credits(commands: Commands) -> None:
    settle = command(
        commands,
        "swarm settle",
        "simulate credit settlement along a route with Byzantine members",
        _settle,
        lasting=True,
    )
    settle.add_argument("--hops", type=int, default=4, metavar="N", help="channels of the route (default %(default)s)")
    settle.add_argument(
        "--faulty", type=int, default=1, metavar="F", help="f: committees have 3f+1 members (default %(default)s)"
    )
    settle.add_argument("--seeds", type=int, default=50, metavar="N", help="runs of each case (default %(default)s)")

    credits = command(
        commands, "swarm credits", "count accepted completions and debts between peers", _swarm_credits, lasting=True
    )
    credits.add_argument("run", type=Path)


def _add_verify(commands: Commands) -> None:
    verify = command(commands, "swarm verify", "check the certificate beside an exported model of a swarm", _verify)
    verify.add_argument("model", type=Path)
    verify.add_argument("--board", metavar="URL", help="also check that it belongs to the run on this board")


def _add_drill(commands: Commands) -> None:
    drill = command(
        commands, "swarm drill", "attack your own swarm, with and without defences", _drill, lasting=True, forks=True
    )
    add_recipe(drill, " with a [drill] table")
    drill.add_argument("--quiet", action="store_true", help="no progress display")
    drill.add_argument(
        "--repair", action="store_true", help="repair the poisoned peer (drill.repair) by all strategies"
    )
    add_fields(drill, _swarm_config)


def _add_audit(commands: Commands) -> None:
    audit = command(
        commands, "swarm audit", "check a model before its release; exit code 1 if it does not pass", _audit
    )
    _add_model(audit)
    audit.add_argument("--run", type=Path, metavar="RUN", help="for a model: the swarm whose task measures it")
    audit.add_argument("--watch", metavar="KINDS", help="attacks to look for (default: the run's evaluate.watch)")
    what = 'JSONL of {"question", "options", "answer", "parts"}: protected answers'
    audit.add_argument("--questions", type=Path, metavar="FILE", help=what)
    adversary = (
        "reader of the replies: a model, counter, or counter:CHANCE (default: counter if possible, else the model)"
    )
    audit.add_argument("--adversary", metavar="MODEL", help=adversary)
    audit.add_argument("--k", type=int, metavar="N", help="number of parts to ask (default: the least, at most 8)")
    audit.add_argument(
        "--censor", type=float, metavar="EPS", help="also show the leakage behind `planaria serve --censor`"
    )
    leak = "maximum leakage of a question, nats (default %(default)s)"
    audit.add_argument("--most-leak", type=float, default=0.1, metavar="NATS", help=leak)
    success = "maximum success of an attack (default %(default)s)"
    audit.add_argument("--most-success", type=float, default=0.02, metavar="SHARE", help=success)
    audit.add_argument("--show", action="store_true", help="also record parts and replies of protected questions")
    audit.add_argument("--seed", type=int, default=0)
    where = "folder of audit.html and audit.json (default: runs/audit-NAME, with the name of the model or run)"
    audit.add_argument("--to", type=Path, metavar="FOLDER", help=where)


def _add_serve(commands: Commands) -> None:
    serve = command(commands, "serve", "serve a model on this machine, as an OpenAI-compatible server", _serve)
    _add_model(serve)
    serve.add_argument(
        "--model-name", metavar="NAME", help="served name of the model (default: its peer's or folder's)"
    )
    censor = "empty replies at random, so that each leaks at most EPS nats about --questions"
    serve.add_argument("--censor", type=float, metavar="EPS", help=censor)
    serve.add_argument("--questions", type=Path, metavar="FILE", help="with --censor: as for `planaria swarm audit`")
    serve.add_argument("--ledger", type=Path, metavar="FILE", help="with --censor: file of the spent budget")
    budget = "with --censor: total per question, for all users (default: 8 times EPS)"
    serve.add_argument("--budget", type=float, metavar="NATS", help=budget)
    add_place(serve, "--")


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_or_model", metavar="MODEL|RUN", help=MODEL)
    _add_peer(parser)


def _add_peer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peer", metavar="NAME", help="for a swarm's run: the peer whose model to use")
    parser.add_argument(
        "--round", type=int, metavar="N", help="with --peer: after N rounds (default: the newest saved)"
    )


def _add_realign(commands: Commands) -> None:
    what = "repair a model that learned unwanted behaviour, or apply a published repair"
    realign = command(commands, "swarm realign", what, _realign)
    realign.add_argument("run", help="a swarm's run with --peer, or a model: a folder, or hf:NAME")
    realign.add_argument("--to", type=Path, required=True, metavar="FOLDER")
    ways = "fine-tune, mask, return to the parent, or interpolate (default tune; mask for fused models)"
    realign.add_argument("--by", choices=("tune", "mask", "back", "mix"), help=ways)
    _add_peer(realign)
    realign.add_argument("--safe", metavar="MODEL", help="the parent (default: from the run or fused.json)")
    realign.add_argument("--watch", metavar="KINDS", help="for a run: attacks to remove (default: evaluate.watch)")
    realign.add_argument("--trusted", type=Path, metavar="FILE", help='JSONL of {"prompt", "text"} to learn from')
    pairs = 'JSONL of {"prompt", "chosen", "rejected"}: learn the first, measure whether the second is likelier'
    realign.add_argument("--pairs", type=Path, metavar="FILE", help=pairs)
    benign = 'JSONL of {"text"} to leave unchanged, or a folder of such; one file per domain for fused experts'
    realign.add_argument("--benign", type=Path, metavar="PATH", help=benign)
    realign.add_argument("--mask", type=Path, metavar="FILE", help="apply this mask.safetensors; no training")
    most = "maximum success of a repaired model; above it the exit code is 1 (default %(default)s)"
    realign.add_argument("--most-success", type=float, default=0.02, metavar="SHARE", help=most)
    realign.add_argument("--steps", type=int, default=200, help="updates (default %(default)s)")
    realign.add_argument("--seed", type=int, default=0)
    realign.add_argument("--rivals", action="store_true", help="also try all other strategies and show them")


def _swarm(given: argparse.Namespace) -> int:
    from planaria.swarm.commands.swarm import start

    return start(given.recipe, flagged(given), given.dry_run, given.quiet)


def _swarm_join(given: argparse.Namespace) -> int:
    from planaria.swarm.commands.swarm import take_part

    kind = None if given.model is None else "pretrained"
    short = {"policy.kind": kind, "policy.options.path": given.model, "task.name": given.task}
    flags = flagged(given) | {name: text for name, text in short.items() if text is not None}
    return take_part(given.recipe, flags, given.called, given.quiet)


def _swarm_explain(given: argparse.Namespace) -> int:
    from planaria.swarm.commands.swarm import Wanted, explain

    explain(given.run, given.peer, Wanted(given.round, given.problem, given.source, given.refused))
    return 0


def _settle(given: argparse.Namespace) -> int:
    from planaria.swarm.commands.credits import settle

    return settle(given.hops, given.faulty, given.seeds)


def _swarm_credits(given: argparse.Namespace) -> int:
    from planaria.swarm.commands.credits import show_credits

    show_credits(given.run)
    return 0


def _verify(given: argparse.Namespace) -> int:
    from planaria.swarm.certificate import verify

    print(*verify(given.model, given.board), sep="\n")
    return 0


def _drill(given: argparse.Namespace) -> int:
    from planaria.swarm.commands.drill import drill

    return drill(given.recipe, flagged(given), given.quiet, given.repair)


def _audit(given: argparse.Namespace) -> int:
    from planaria.swarm.commands.audit import Given, audit
    from planaria.swarm.commands.serve import Named

    watch = tuple(filter(None, (kind.strip() for kind in (given.watch or "").split(","))))
    asked = Given(
        Named(given.run_or_model, given.peer, given.round),
        given.run,
        watch,
        given.questions,
        given.adversary,
        given.k,
        given.censor,
        given.most_leak,
        given.most_success,
        given.show,
        given.seed,
    )
    return audit(asked, given.to or Path("runs", f"audit-{Path(given.run_or_model).resolve().name}"))


def _serve(given: argparse.Namespace) -> int:
    from planaria.swarm.commands.serve import Named, Wrapper, serve

    wrapper = None
    if given.censor is not None:
        if given.questions is None or given.ledger is None:
            raise UserError(f"--censor {given.censor:g}: needs --questions FILE and --ledger FILE")
        wrapper = Wrapper(given.censor, given.questions, given.ledger, given.budget)
    else:
        for flag in ("questions", "ledger", "budget"):
            if getattr(given, flag) is not None:
                raise UserError(f"--{flag} {getattr(given, flag)}: goes with --censor EPS")
    named = Named(given.run_or_model, given.peer, given.round)
    return serve(named, given.model_name, wrapper, address(given.at, given.name, "--at"), given.token_file)


def _realign(given: argparse.Namespace) -> int:
    from planaria.swarm.commands import realign
    from planaria.swarm.commands.realign import Given
    from planaria.swarm.repair.training import Plan

    watch = tuple(filter(None, (kind.strip() for kind in (given.watch or "").split(","))))
    found = Given(given.run, given.peer, given.round, given.safe, given.trusted, given.pairs, given.benign, watch)
    if given.mask is not None:
        asked = {name: getattr(given, name) for name in ("by", "watch", "trusted", "pairs", "benign")}
        if extra := next((name for name, value in asked.items() if value is not None), None):
            raise UserError(f"--mask {given.mask}: is applied unchanged; leave out --{extra}")
        return realign.apply(found, given.mask, given.to)
    if given.steps < 1 or not 0 <= given.most_success < 1:
        raise UserError("--steps is 1 or more, --most-success 0 or more and below 1")
    plan = Plan(seed=given.seed, steps=given.steps)
    return realign.realign(found, realign.Wanted(given.by, given.most_success, plan, given.rivals), given.to)
