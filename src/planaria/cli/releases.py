"""Commands on a model that leaves the house: audit it before it is given away, or serve it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from planaria.cli.flags import command
from planaria.cli.watching import add_place, address
from planaria.common.errors import UserError

MODEL = "a swarm's run with --peer, a run, or a model: a folder, a GGUF file, or hf:NAME"


def add(commands: Any) -> None:
    _add_audit(commands)
    _add_serve(commands)


def _add_audit(commands: Any) -> None:
    audit = command(
        commands, "audit", "one gate before a model is given away; exit code 1 when it does not pass", _audit
    )
    _add_model(audit)
    audit.add_argument("--run", type=Path, metavar="RUN", help="of a model: the swarm whose task it is measured with")
    audit.add_argument("--watch", metavar="KINDS", help="attacks to look for (default: the run's evaluate.watch)")
    what = 'JSONL of {"question", "options", "answer", "parts"}: what is not to be given away'
    audit.add_argument("--questions", type=Path, metavar="FILE", help=what)
    adversary = (
        "who reads the replies: a model, counter, or counter:CHANCE (default: counter if it can, else the model)"
    )
    audit.add_argument("--adversary", metavar="MODEL", help=adversary)
    audit.add_argument(
        "--k", type=int, metavar="N", help="parts that are asked (default: as many as all have, at most 8)"
    )
    audit.add_argument(
        "--censor", type=float, metavar="EPS", help="show what `planaria serve --censor EPS` leaves, too"
    )
    leak = "nats that parts may give away of a question (default %(default)s)"
    audit.add_argument("--most-leak", type=float, default=0.1, metavar="NATS", help=leak)
    success = "largest success of an attack (default %(default)s)"
    audit.add_argument("--most-success", type=float, default=0.02, metavar="SHARE", help=success)
    audit.add_argument("--show", action="store_true", help="write parts and replies of protected questions down, too")
    audit.add_argument("--seed", type=int, default=0)
    where = "folder of audit.html and audit.json (default: runs/audit-NAME, with the name of the model or run)"
    audit.add_argument("--to", type=Path, metavar="FOLDER", help=where)


def _add_serve(commands: Any) -> None:
    serve = command(commands, "serve", "serve a model on this machine, as an OpenAI-compatible server", _serve)
    _add_model(serve)
    serve.add_argument(
        "--model-name", metavar="NAME", help="what to call the model (default: its peer's or folder's name)"
    )
    censor = "empty replies by chance, so that each tells at most EPS nats of what --questions protects"
    serve.add_argument("--censor", type=float, metavar="EPS", help=censor)
    serve.add_argument("--questions", type=Path, metavar="FILE", help="with --censor: as for `planaria audit`")
    serve.add_argument("--ledger", type=Path, metavar="FILE", help="with --censor: what was spent, kept for good")
    budget = "with --censor: of each question, for all askers and for good (default: 8 times EPS)"
    serve.add_argument("--budget", type=float, metavar="NATS", help=budget)
    add_place(serve, "--")


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_or_model", metavar="MODEL|RUN", help=MODEL)
    parser.add_argument("--peer", metavar="NAME", help="of a swarm's run: what this peer learned")
    parser.add_argument("--round", type=int, metavar="N", help="with --peer: after N rounds (default: the newest kept)")


def _audit(given: argparse.Namespace) -> int:
    from planaria.cli.commands.audit import Given, audit
    from planaria.cli.commands.released import Named

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
    from planaria.cli.commands.released import Named
    from planaria.cli.commands.serve import Wrapper, serve

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
