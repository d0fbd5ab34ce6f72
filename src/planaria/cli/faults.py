"""Commands that strike a run, or plan when to."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from planaria.cli.flags import command
from planaria.errors import UserError

SIGNALLED = {"kill": "SIGKILL (also to TARGET controller)", "stop": "SIGSTOP (also to TARGET controller)"}
"""what a signal from here brings about at once"""
ASKED = {
    "stuck": "hang the worker's main thread",
    "slow": "make its actions take longer",
    "delay": "hold up what reaches it",
    "reset": "break its connection to a neighbour",
    "cut": "cut it off from its neighbours",
    "disk_full": "let no file of it grow",
    "disk_slow": "hang its writing; give --moment save",
    "flip": "turn a bit of its stage in the newest checkpoint",
    "lie": "spoil its next offer to other replicas",
}
"""what the worker is told to suffer, at its next moment"""


def add(commands: Any) -> None:
    chaos = command(commands, "chaos", "strike a worker of a live run", _chaos)
    chaos.add_argument("run", type=Path)
    blow = chaos.add_mutually_exclusive_group(required=True)
    for action, what in (*SIGNALLED.items(), *ASKED.items()):
        flag = f"--{action.replace('_', '-')}"
        blow.add_argument(flag, dest=action, metavar="TARGET", help=f"{what}; TARGET is stage=N, node=N or worker=NAME")
    chaos.add_argument("--resume-after", type=float, metavar="S", help="what lasts is over after so many seconds")
    chaos.add_argument("--strength", type=float, metavar="X", help="--slow: so many times; --delay: so many seconds")
    chaos.add_argument("--moment", metavar="M", help="any, forward, backward, commit, transfer, save, settle or link")

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
    from planaria.commands.chaos import ask, strike

    action = next(name for name in (*SIGNALLED, *ASKED) if getattr(given, name) is not None)
    target = getattr(given, action)
    if action in ASKED:
        named = {"resume_after_s": given.resume_after, "strength": given.strength, "moment": given.moment}
        print(ask(given.run, target, {"signal": action} | {k: v for k, v in named.items() if v is not None}))
        return 0
    if given.strength is not None or given.moment is not None:
        raise UserError("--strength, --moment: a signal strikes at once, and has no strength")
    if given.resume_after is not None and action != "stop":
        raise UserError("--resume-after: goes with --stop, or another fault that lasts; what is killed stays dead")
    print(strike(given.run, action, target, given.resume_after))
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
