"""Inject a fault into a live run, by a signal or a request to a worker, for ``run chaos`` and the live page."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from planaria.common.errors import UserError
from planaria.config.model_config import GROUP
from planaria.config.schema import RunConfig
from planaria.control.facts.events import FaultInjected
from planaria.control.log.state_file import LiveWorker, read_state, start_ticks
from planaria.faults.checks import require_edges, require_readers, require_receivers
from planaria.faults.trace import Fault
from planaria.runtime.fleet.control_connections import call
from planaria.runtime.fleet.joining import InjectFaultRequest, read_run_address
from planaria.runtime.fleet.supervised_fleet import supervisor_pid
from planaria.runtime.preparation import run_folders
from planaria.runtime.resolved_run import ResolvedRun
from planaria.runtime.transport.listener import MACHINE
from planaria.runtime.transport.secure import StrangerError

_PATIENCE_S = 10.0
PROCESSES = ("controller", "standby", "supervisor")
"""processes of a run that hold no stage"""
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def send_signal(folder: Path, action: str, target: str, resume_after_s: float | None = None) -> str:
    """Send ``action``'s signal to ``target``; return a description.

    :param target: 'stage=2', 'node=2', 'worker=w3', or one of :data:`PROCESSES`
    :param resume_after_s: seconds after which to send SIGCONT, even if another worker then holds the stage
    :raises UserError: if the run is not live, or has no such target.
    """
    _require_live(folder, target)
    if target in PROCESSES:
        pid = _process(folder, target)
        ticks = start_ticks(pid)
        _send(pid, SIGNALS[action], folder)
        _resume_after(resume_after_s, pid, ticks, folder)
        return f"{SIGNALS[action].name} to the {target} (pid {pid})"
    state = read_state(folder)
    worker = _find(state.workers, target, folder)
    if worker.start_ticks != start_ticks(worker.pid):
        raise UserError(f"{folder}: {worker.worker} (pid {worker.pid}) has already exited; the run may be over")
    t = time.monotonic()
    _send(worker.pid, SIGNALS[action], folder)
    node = -1 if worker.node is None else worker.node
    fault = FaultInjected(
        worker=worker.worker, node=node, signal=SIGNALS[action].name, step=state.step, moment="another terminal"
    )
    with (folder / "chaos.jsonl").open("a") as file:
        file.write(f'{{"t": {t!r}, "event": {fault.model_dump_json()}}}\n')
    _resume_after(resume_after_s, worker.pid, worker.start_ticks, folder)
    holds = "a spare" if worker.stage is None else f"stage {worker.stage}"
    return f"{SIGNALS[action].name} to {worker.worker} (pid {worker.pid}, {holds})"


def _resume_after(seconds: float | None, pid: int, ticks: int | None, folder: Path) -> None:
    """Send SIGCONT after these seconds, unless another process has the id by then."""
    if seconds is not None:
        time.sleep(seconds)
        if ticks == start_ticks(pid):
            _send(pid, signal.SIGCONT, folder)


def request_fault(folder: Path, target: str, fields: Mapping[str, Any]) -> str:
    """Ask the worker at ``target`` to inject a fault that is not a signal; return a description.

    :param target: 'stage=2', 'node=2' or 'worker=w3'
    :param fields: the fields of the fault (``faults.trace.Fault``) except its step and stage
    :raises UserError: if the run is not live, has no such target, or the fault is invalid.
    """
    if target in PROCESSES:
        raise UserError(f"--{fields['signal'].replace('_', '-')} {target}: the {target} can only be killed or stopped")
    config = _require_live(folder, target)
    worker = _find(read_state(folder).workers, target, folder)
    if worker.node is None:
        raise UserError(f"{folder}: {target} is a spare; only workers with a stage support '{fields['signal']}'")
    try:
        fault = Fault(step=0, stage=worker.node, **fields)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise UserError(f"planaria run chaos: {problem['msg'].removeprefix('Value error, ')}") from None
    require_receivers(config, [fault], "planaria run chaos")
    resolved = ResolvedRun(config)
    require_edges(resolved, [fault], "planaria run chaos")
    require_readers(resolved, [fault], "planaria run chaos")
    run_address = read_run_address(folder)
    try:
        line = call(run_address.at, bytes.fromhex(run_address.key), "the owner", MACHINE, _PATIENCE_S)
        line.send_bytes(InjectFaultRequest(fault=fault).model_dump_json().encode())
        if not line.poll(_PATIENCE_S):
            raise TimeoutError("no answer")
    except (OSError, EOFError, StrangerError) as error:
        raise UserError(f"{folder}: the run's controller does not answer at {run_address.at} ({error})") from None
    line.close()
    return f"{fault.signal} for {worker.worker} (stage {worker.stage}), at its next {fault.moment}"


def _require_live(folder: Path, target: str) -> RunConfig:
    """Return the configuration of a live run; UserError if it is not live, or its workers share one process."""
    config = run_folders.config_of(folder)
    if not run_folders.is_held(folder):
        raise UserError(f"{folder}: the run is not being trained")
    if config.engine == "inline" and target not in PROCESSES:
        raise UserError(f"{folder}: its workers share one process, so a signal would end the run; set chaos.trace")
    return config


def _process(folder: Path, target: str) -> int:
    """Return the process id of a controller, standby or supervisor on this machine; UserError if there is none."""
    if target != "controller" and run_folders.config_of(folder).model.family == GROUP:
        raise UserError(f"{folder}: a group has no {target} that commands can reach; use controller, or worker=w1")
    if target == "controller":
        return read_state(folder).controller
    if target == "supervisor":
        return supervisor_pid(folder)
    if waiting := run_folders.waiting_standbys(folder):
        return waiting[0]
    raise UserError(f"{folder}: no standby waits on this machine; see fleet.standby")


def require_incarnation(folder: Path, worker: str, incarnation: int) -> None:
    """Raise UserError unless this incarnation of the worker is alive."""
    matching = [w for w in read_state(folder).workers if (w.worker, w.incarnation) == (worker, incarnation)]
    if not matching:
        raise UserError(f"{folder}: {worker} (incarnation {incarnation}) has already exited")


def _find(workers: list[LiveWorker], target: str, folder: Path) -> LiveWorker:
    kind, _, wanted = target.partition("=")
    if kind not in ("stage", "node", "worker") or not wanted:
        raise UserError(f"{target!r}: not a target; use stage=2, node=2, worker=w3, controller, standby or supervisor")
    for worker in workers:
        if wanted == str(getattr(worker, kind)):
            return worker
    descriptions = [f"{w.worker} ({'spare' if w.stage is None else f'stage {w.stage}'})" for w in workers]
    raise UserError(f"{folder}: no worker is {target}; there are: {', '.join(descriptions)}")


def _send(pid: int, signum: signal.Signals, folder: Path) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        raise UserError(f"{folder}: pid {pid} has ended; the run is not live") from None
