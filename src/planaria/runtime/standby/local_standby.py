"""A standby: a process that replaces a run's controller when that is lost, and keeps its living workers.

Only one process leads a run: it holds the lock of the run's folder, which the kernel frees when the process ends. A
standby waits for the lock, reads the log to its end, and continues from there. A controller that is stopped for
``fleet.lease_s`` is killed first, so that it cannot wake up and give orders.
"""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from planaria.common.errors import UserError
from planaria.control.facts.events import ControllerEnd
from planaria.control.failover import FailoverState
from planaria.runtime.api.execution import Callbacks, RunExecution, StandbyTakeover, conclude, display_of, mirror_of
from planaria.runtime.api.run import MODEL, Run
from planaria.runtime.fleet.process import activity
from planaria.runtime.fleet.supervised_fleet import SupervisedFleet, has_supervisor
from planaria.runtime.preparation import run_folders
from planaria.runtime.preparation.prepare import PreparedRun, prepare
from planaria.runtime.preparation.resumption import require_same_data
from planaria.runtime.preparation.run_start import START
from planaria.runtime.standby.followed_run import FollowedRun

_POLL_S = 0.1
"""seconds between two checks of the controller"""


def main(folder: Path, progress: bool = True) -> int:
    """Run a standby as a separate process; return 0. It ignores a terminal's stop signals; the controller handles them.

    :raises UserError: as :func:`stand_by`.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    stand_by(folder, Callbacks(progress, print, None, None, bar=False))
    return 0


def stand_by(folder: Path, callbacks: Callbacks) -> Run | None:
    """Wait until the run's controller is lost, then lead the run to its end; None if it ends otherwise.

    :raises UserError: if the run has no living workers to lead, or was started without a standby.
    """
    config = run_folders.config_of(folder, *run_folders.RUN_FILES)
    if config.fleet.standby == "off":
        raise UserError(f"{folder}: its workers end with its controller; start it with --standby auto or manual")
    samples = START.total_samples(config)
    prepared = prepare(config, None, begins=False, samples=samples)
    require_same_data(folder, prepared)
    run = FollowedRun(folder, config, display_of(callbacks))
    run.advance()
    if run_folders.is_held(folder) or has_supervisor(folder):
        callbacks.notify(f"standby       ready to lead {folder} (pid {os.getpid()})")
    with _lock_when_free(folder, config.fleet.lease_s, run.advance) as (cause, noticed):
        failover = run.lost(cause, noticed)
        if failover.finish is not None:
            return _conclude_ended_run(folder, prepared, failover, callbacks)
        if not has_supervisor(folder):
            raise UserError(f"{folder}: no workers are left; `planaria train --resume {folder}`")
        callbacks.notify(f"standby       leads {folder}; to save and stop the run: kill {os.getpid()}")
        takeover = StandbyTakeover(failover, run)
        return RunExecution(prepared, folder, START, mirror_of(config, folder), callbacks, takeover).execute()


def _conclude_ended_run(
    folder: Path, prepared: PreparedRun, failover: FailoverState, callbacks: Callbacks
) -> Run | None:
    """Complete a run whose controller was lost after the last step: end its workers, write report and model."""
    if has_supervisor(folder):
        with suppress(UserError):  # it may end at this moment
            SupervisedFleet(folder, failover.state.term + 1, failover.notice).close()
    finish = failover.finish
    if finish is None or finish.outcome != "finished":
        why = "" if finish is None else f" ({finish.reason or finish.outcome})"
        callbacks.notify(f"the run has ended{why}; resume it with: planaria train --resume {folder}")
        return None
    if (folder / MODEL).exists():
        callbacks.notify("the run is finished")
        return None
    conclude(prepared.config, folder, callbacks.notify)
    return Run(folder)


@contextmanager
def _lock_when_free(
    folder: Path, lease_s: float, meanwhile: Callable[[], None]
) -> Iterator[tuple[ControllerEnd, float]]:
    """Wait for the run's lock; yield how its last holder ended, and when that was noticed (0: before the wait).

    :param meanwhile: called repeatedly
    """
    with (folder / run_folders.LOCK).open("a+") as file:
        taken = threading.Event()
        threading.Thread(target=_acquire_lock, args=(file, taken), name="lock", daemon=True).start()
        cause: ControllerEnd = "exited"
        stopped_since: float | None = None
        waited = False
        while not taken.wait(_POLL_S):
            waited = True
            meanwhile()
            now = time.monotonic()
            if activity(pid := _holder(file)) != "stopped":
                stopped_since = None
            elif stopped_since is None:
                stopped_since = now
            elif now - stopped_since >= lease_s:
                cause, stopped_since = "stopped", None
                _kill(pid, file)
        noticed = time.monotonic() if waited else 0.0
        with run_folders.signed_lock(file):
            yield cause, noticed


def _acquire_lock(file: IO[str], taken: threading.Event) -> None:
    with suppress(OSError, ValueError):  # closed meanwhile
        fcntl.flock(file, fcntl.LOCK_EX)
        taken.set()


def _holder(file: IO[str]) -> int | None:
    """Return the process that holds the lock; None if it has not written its id yet."""
    file.seek(0)
    text = file.read(32).strip()
    return int(text) if text.isdigit() and int(text) != os.getpid() else None


def _kill(pid: int | None, file: IO[str]) -> None:
    """Kill the process that holds the lock, unless another one holds it by now."""
    if pid is None:
        return
    with suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            if _holder(file) == pid:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)
