"""The process of a group's controller, which outlives the member that started it.

The program reads its configuration and key from standard input, answers with one line of JSON once members can join,
and ends with the group. It forks the controller and waits: if that is killed, crashes or stops, another one continues
from the group's log, and the members return to it with their state. In a group with a shared log, where another machine
may lead by then, this one stands by.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.control.facts.events import ControllerEnd
from planaria.control.failover import MAX_FAILED_CONTROLLERS
from planaria.control.log.shared_log import LeadershipLost
from planaria.group.lead import GroupLead, report
from planaria.runtime.fleet.joining import RUN_ADDRESS_FILE
from planaria.runtime.fleet.process import activity
from planaria.runtime.preparation import run_folders

LOG = "controller.log"
"""errors of the controller, in the group's folder"""
_LOOK_S = 0.05
"""seconds between two checks of the controller"""
_MIN_UPTIME_S = 5.0
"""a controller that ends earlier counts as failed"""
_ENDED, _CRASHED, _REFUSED = 0, 1, 2
"""exit codes of a controller"""
_FINAL = (_ENDED, _REFUSED, -signal.SIGTERM, -signal.SIGINT)
"""exit codes after which no other controller starts"""


def keep_led(config: RunConfig, key: bytes, awaited: str, answer: Any) -> int:
    """Keep a group led by a controller until it ends; return the exit code of the last one.

    :param awaited: name of the process that joins first, whose weights all start from.
    :param answer: where to write the first line.
    :raises UserError: if the folder cannot be created.
    """
    folder = run_folders.create(config)
    lead = GroupLead(config, folder, key, awaited)

    def opened(address: str) -> None:
        with contextlib.suppress(OSError):  # the host may have died
            print(json.dumps({"address": address, "folder": str(folder.absolute())}), file=answer, flush=True)
            answer.close()
        _redirect(sys.stderr.fileno(), folder / LOG)

    def refuse(error: Exception) -> None:
        if answer.closed:
            report(error)
        else:
            run_folders.remove(folder)
            _answer_error(answer, error)

    started, failures = time.monotonic(), 0
    pid = _fork(partial(lead.begin, opened), refuse)
    answer.close()
    while (code := (ending := _wait(pid, config.fleet.lease_s)).code) not in _FINAL:
        failures = failures + 1 if time.monotonic() - started < _MIN_UPTIME_S else 0
        started = time.monotonic()
        could_join = (folder / RUN_ADDRESS_FILE).exists() or run_folders.log_size(folder) > 0
        if failures > MAX_FAILED_CONTROLLERS or not could_join:
            break
        _redirect(sys.stderr.fileno(), folder / LOG)
        pid = _fork(partial(lead.resume, ending.cause), refuse)
    return code


def _fork(entry: Callable[[], None], refuse: Callable[[Exception], object]) -> int:
    """Run ``entry`` in a new process, and return its id."""
    if pid := os.fork():
        return pid
    code = _CRASHED
    try:
        entry()
        code = _ENDED
    except (UserError, LeadershipLost) as error:
        refuse(error)
        code = _REFUSED
    except Exception as error:
        report(f"{type(error).__name__}: {error}")
    finally:
        os._exit(code)


class _Ending(NamedTuple):
    """The end of a controller."""

    code: int
    """exit code, or the negative number of a signal"""
    cause: ControllerEnd


def _wait(pid: int, stopped_s: float) -> _Ending:
    """Return how a controller ended, once it has. Kill it after it was stopped for ``stopped_s``."""
    stopped_since: float | None = None
    cause: ControllerEnd = "exited"
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return _Ending(os.waitstatus_to_exitcode(status), cause)
        if activity(pid) != "stopped":
            stopped_since = None
        elif stopped_since is None:
            stopped_since = time.monotonic()
        elif time.monotonic() - stopped_since > stopped_s:
            os.kill(pid, signal.SIGKILL)
            cause = "stopped"
        time.sleep(_LOOK_S)


def _redirect(handle: int, file: Path) -> None:
    """Write to ``file`` what the process writes to ``handle``, which its parent waits for."""
    with file.open("a") as opened:
        os.dup2(opened.fileno(), handle)


def _answer_error(answer: Any, error: Exception) -> None:
    with contextlib.suppress(OSError):
        print(json.dumps({"error": str(error)}), file=answer, flush=True)


def main() -> int:
    """Lead the group that standard input describes; return the exit code."""
    request = json.loads(sys.stdin.readline())
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout.flush()
    _redirect(sys.stdout.fileno(), Path(os.devnull))
    config, key = RunConfig.model_validate_json(request["config"]), bytes.fromhex(request["key"])
    try:
        return keep_led(config, key, request["host"], answer)
    except UserError as error:
        _answer_error(answer, error)
        return _REFUSED


if __name__ == "__main__":
    sys.exit(main())
