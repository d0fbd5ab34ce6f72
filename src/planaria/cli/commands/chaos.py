"""The command that injects faults: run chaos."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from typer import Option

from planaria.cli.flags import Run, TabledCommand, command, flag
from planaria.common.errors import UserError
from planaria.config.durations import seconds

SIGNALLED = {
    "kill": "SIGKILL (also to TARGET controller, standby or supervisor)",
    "stop": "SIGSTOP (also to TARGET controller, standby or supervisor)",
}
"""faults sent as a signal, immediately"""
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
    "corrupt_update": "corrupt its next update to other replicas, or all updates until a step",
}
"""faults that the worker injects into itself, at its next opportunity"""
STRENGTH = "--slow, --slow-host: factor; --slow-data, --delay: seconds; --corrupt-update: of --attack"
MOMENTS = "any, forward, backward, commit, transfer, save, settle or link"


class Faults(TabledCommand):
    """A command with a flag for each fault."""

    def table(self) -> Mapping[str, Any]:
        target = "TARGET is stage=N, node=N or worker=NAME"
        return {
            fault: Option(f"--{fault.replace('_', '-')}", metavar="TARGET", help=f"{text}; {target}")
            for fault, text in (SIGNALLED | INJECTED).items()
        }


@command("run chaos", cls=Faults, code=False)
def _chaos(
    run: Run,
    *,
    resume_after: Annotated[
        float | None, flag("S", "time until the fault ends, such as 5 or 1min", parser=seconds)
    ] = None,
    strength: Annotated[float | None, flag("X", STRENGTH)] = None,
    peer: Annotated[int | None, flag("STAGE", "--delay, --reset: only the edge from this stage or node")] = None,
    attack: Annotated[str | None, flag("NAME", "--corrupt-update: the corruption, such as sign_flip or alie")] = None,
    until: Annotated[int | None, flag("STEP", "--corrupt-update: the first step with a correct update again")] = None,
    moment: Annotated[str | None, flag("M", MOMENTS)] = None,
    faults: dict[str, str],
) -> int:
    """Inject a fault into a live run."""
    from planaria.cli.fault_injection import request_fault, send_signal

    if len(faults) != 1:
        flags = " and ".join(f"--{fault.replace('_', '-')}" for fault in faults) or "run chaos"
        raise UserError(f"{flags}: use one fault, such as --kill stage=1; see `planaria run chaos --help`")
    ((action, target),) = faults.items()
    given = {"strength": strength, "moment": moment, "attack": attack, "until": until, "peer": peer}
    options = {name: value for name, value in given.items() if value is not None}
    if action in INJECTED:
        timed = {} if resume_after is None else {"resume_after_s": resume_after}
        print(request_fault(run, target, {"signal": action} | timed | options))
        return 0
    if options:
        raise UserError("--strength, --moment, --attack, --until, --peer: a signal acts immediately and has no options")
    if resume_after is not None and action != "stop":
        raise UserError("--resume-after: requires --stop, or another fault with a duration")
    print(send_signal(run, action, target, resume_after))
    return 0
