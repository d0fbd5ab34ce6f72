"""Commands that strike a run, or plan when to."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from planaria.cli.flags import command
from planaria.errors import UserError


def add(commands: Any) -> None:
    chaos = command(commands, "chaos", "strike a worker of a live run", _chaos)
    chaos.add_argument("run", type=Path)
    blow = chaos.add_mutually_exclusive_group(required=True)
    for action, what in (("kill", "SIGKILL"), ("stop", "SIGSTOP")):
        blow.add_argument(f"--{action}", metavar="TARGET", help=f"{what} to stage=N, worker=NAME or controller")
    chaos.add_argument("--resume-after", type=float, metavar="S", help="with --stop: SIGCONT after so many seconds")

    trace = command(commands, "trace", "draw a trace of faults from a failure rate", _trace)
    trace.add_argument("file", type=Path)
    trace.add_argument("--hourly", type=float, required=True, help="probability that a stage fails within an hour")
    trace.add_argument("--step-seconds", type=float, required=True, help="seconds of one step")
    trace.add_argument("--stages", type=int, required=True)
    trace.add_argument("--steps", type=int, required=True)
    trace.add_argument("--seed", type=int, default=0)
    trace.add_argument("--exempt", type=int, nargs="*", default=[], metavar="STAGE", help="stages that never fail")
    trace.add_argument("--forbid-adjacent", action="store_true", help="never two neighbours in the same step")


def _chaos(given: argparse.Namespace) -> int:
    from planaria.commands.chaos import SIGNALS, strike

    action = next(name for name in SIGNALS if getattr(given, name) is not None)
    if given.resume_after is not None and action != "stop":
        raise UserError("--resume-after: goes with --stop; what is killed stays dead")
    print(strike(given.run, action, getattr(given, action), given.resume_after))
    return 0


def _trace(given: argparse.Namespace) -> int:
    from planaria.chaos.trace import digest, generate, write

    exempt = set(given.exempt)
    trace = generate(
        given.seed, given.hourly, given.step_seconds, given.stages, given.steps, exempt, given.forbid_adjacent
    )
    write(trace, given.file)
    print(f"{given.file}: {len(trace.faults)} faults, digest {digest(trace)[:16]}")
    return 0
