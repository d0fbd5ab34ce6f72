"""Commands that inject faults into a run, or generate a trace of faults."""

from __future__ import annotations

import argparse
from pathlib import Path

from planaria.cli.flags import Commands, command, duration
from planaria.common.errors import UserError

SIGNALLED = {"kill": "SIGKILL (also to TARGET controller)", "stop": "SIGSTOP (also to TARGET controller)"}
"""faults sent as a signal, at once"""
INJECTED = {
    "stuck": "hang the worker's main thread",
    "slow": "slow its actions down",
    "slow_host": "slow down all workers of its machine",
    "slow_data": "delay the batches that it reads",
    "delay": "delay the frames that reach it",
    "reset": "break its connection to a neighbour",
    "cut": "disconnect it from all neighbours",
    "disk_full": "make its disk appear full",
    "disk_slow": "make its writes hang; use with --moment save",
    "flip": "flip a bit of its stage in the newest checkpoint",
    "lie": "corrupt its next update to other replicas, or all updates until a step",
}
"""faults that the worker injects into itself, at its next opportunity"""


def add(commands: Commands) -> None:
    chaos = command(commands, "run chaos", "inject a fault into a live run", _chaos, code=False)
    chaos.add_argument("run", type=Path)
    target = chaos.add_mutually_exclusive_group(required=True)
    for action, what in (*SIGNALLED.items(), *INJECTED.items()):
        flag = f"--{action.replace('_', '-')}"
        target.add_argument(
            flag, dest=action, metavar="TARGET", help=f"{what}; TARGET is stage=N, node=N or worker=NAME"
        )
    chaos.add_argument(
        "--resume-after", type=duration, metavar="S", help="time until the fault ends, such as 5 or 1min"
    )
    strength = "--slow, --slow-host: factor; --slow-data, --delay: seconds; --lie: of --attack"
    chaos.add_argument("--strength", type=float, metavar="X", help=strength)
    chaos.add_argument(
        "--peer", type=int, metavar="STAGE", help="--delay, --reset: only the edge from this stage or node"
    )
    chaos.add_argument("--attack", metavar="NAME", help="--lie: the corruption, such as sign_flip or alie")
    chaos.add_argument("--until", type=int, metavar="STEP", help="--lie: the first step with a correct update again")
    chaos.add_argument("--moment", metavar="M", help="any, forward, backward, commit, transfer, save, settle or link")

    found = command(commands, "run diagnose", "show the waiting times of a run's workers, and what is slow", _diagnose)
    found.add_argument("run", type=Path)

    trace = command(commands, "lab trace", "generate a trace of faults from a failure rate", _trace, code=False)
    trace.add_argument("file", type=Path)
    trace.add_argument("--hourly", type=float, required=True, help="probability that a stage fails within an hour")
    trace.add_argument("--step-seconds", type=duration, required=True, help="duration of one step in seconds")
    trace.add_argument("--stages", type=int, required=True)
    trace.add_argument("--steps", type=int, required=True)
    trace.add_argument("--seed", type=int, default=0)
    trace.add_argument("--exempt", type=int, nargs="*", default=[], metavar="STAGE", help="stages that never fail")
    trace.add_argument("--forbid-adjacent", action="store_true", help="never two adjacent stages in the same step")
    trace.add_argument("--ends", action="store_true", help="the ends fail at the same rate")
    trace.add_argument(
        "--together", type=float, default=0.0, metavar="P", help="probability that a failure also takes the next stage"
    )
    trace.add_argument(
        "--lost", default="stage", metavar="WHAT", help="what one fault takes: stage, adjacent, machine or region"
    )
    trace.add_argument("--machine", type=int, default=2, metavar="N", help="stages in a row that share a machine")


def _diagnose(given: argparse.Namespace) -> int:
    from planaria.cli.commands.diagnose import diagnose

    print(diagnose(given.run))
    return 0


def _chaos(given: argparse.Namespace) -> int:
    from planaria.cli.commands.chaos import ask, strike

    action = next(name for name in (*SIGNALLED, *INJECTED) if getattr(given, name) is not None)
    target = getattr(given, action)
    if action in INJECTED:
        named = {"resume_after_s": given.resume_after, "strength": given.strength, "moment": given.moment}
        named |= {"attack": given.attack, "until": given.until, "peer": given.peer}
        print(ask(given.run, target, {"signal": action} | {k: v for k, v in named.items() if v is not None}))
        return 0
    if (given.strength, given.moment, given.attack, given.until, given.peer) != (None,) * 5:
        raise UserError("--strength, --moment, --attack, --until, --peer: a signal acts at once and has no options")
    if given.resume_after is not None and action != "stop":
        raise UserError("--resume-after: requires --stop, or another fault with a duration")
    print(strike(given.run, action, target, given.resume_after))
    return 0


def _trace(given: argparse.Namespace) -> int:
    from planaria.faults.trace import burst_sizes, digest, write
    from planaria.faults.trace_generation import generate

    trace = generate(
        given.seed,
        given.hourly,
        given.step_seconds,
        given.stages,
        given.steps,
        set(given.exempt),
        given.forbid_adjacent,
        given.ends,
        given.together,
        given.lost,
        given.machine,
    )
    write(trace, given.file)
    shared = burst_sizes(trace)
    bursts = "".join(f", {count} × {size} together" for size, count in sorted(shared.items()) if size > 1)
    print(f"{given.file}: {len(trace.faults)} faults{bursts}, digest {digest(trace)[:16]}")
    return 0
