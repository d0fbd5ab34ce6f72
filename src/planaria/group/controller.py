"""The controller of a group, in a separate process, so that it outlives the member that started it.

It reads its configuration and key from standard input, answers with one line of JSON once members can join, and ends
with the group.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from planaria.common.address import Reach
from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.faults.injector import TraceInjector
from planaria.faults.trace import Trace
from planaria.report.observe.progress import NoProgress
from planaria.report.observe.run_observer import RunObserver
from planaria.report.run.report import write_report
from planaria.runtime.controller.controller import Controller
from planaria.runtime.engine.stopping import stop_requested
from planaria.runtime.fleet.cooperative import CooperativeFleet, InProcessWorker
from planaria.runtime.fleet.joinable_fleet import JoinableFleet, RunInvitation
from planaria.runtime.preparation import run_folders
from planaria.runtime.preparation.run_start import START, run_started
from planaria.runtime.resolved_run import ResolvedRun
from planaria.runtime.worker.setup import CHECKPOINTS, SETUP, Setup

LOG = "controller.log"
"""errors of the controller, in the group's folder"""


def lead(config: RunConfig, key: bytes, awaited: str, answer: Any) -> None:
    """Lead a group until its samples are used or its last member has left.

    :param awaited: name of the process that joins first, whose weights all start from.
    :param answer: where to write the first line.

    :raises UserError: if the folder or the port cannot be used.
    """
    resolved, folder = ResolvedRun(config), run_folders.create(config)
    started = run_started(resolved, START).model_copy(update={"saves": False, "start_from_first_worker": True})
    reach = Reach(advertise=config.fleet.advertise)
    folder_id, place = secrets.token_hex(16), folder.absolute()
    setup = Setup(config, place, place, config.fleet.host, key, 0, reach, part=started.part, folder_id=folder_id)
    plain = SETUP.dump_json(replace(setup, reach=Reach())).decode()
    invitation = RunInvitation(plain, 1, folder_id, {}, awaited=awaited)
    watch = RunObserver(folder, config.samples, NoProgress())
    with run_folders.lock_for_training(folder), stop_requested(None) as requested:
        try:
            fleet = JoinableFleet(
                lambda _: CooperativeFleet(_no_worker), config.fleet, config.fleet.host, key, invitation, folder
            )
        except UserError:
            run_folders.remove(folder)
            raise
        with closing(fleet):
            with contextlib.suppress(OSError):  # the host may have died
                print(json.dumps({"address": fleet.address, "folder": str(folder.absolute())}), file=answer, flush=True)
                answer.close()
            _redirect(sys.stderr.fileno(), folder / LOG)
            injector = TraceInjector(Trace(faults=()), fleet, folder / CHECKPOINTS, 0)
            try:
                Controller(config, started, fleet, folder, watch, injector).run(requested)
            finally:
                watch.close()
    write_report(folder)


def _no_worker(slot: InProcessWorker) -> None:
    raise AssertionError("all workers of a group are its members")


def _redirect(handle: int, file: Path) -> None:
    """Write to ``file`` what the process writes to ``handle``, which its parent waits for."""
    with file.open("a") as opened:
        os.dup2(opened.fileno(), handle)


def main() -> int:
    """Lead the group that standard input describes; return the exit code."""
    request = json.loads(sys.stdin.readline())
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout.flush()
    _redirect(sys.stdout.fileno(), Path(os.devnull))
    try:
        lead(RunConfig.model_validate_json(request["config"]), bytes.fromhex(request["key"]), request["host"], answer)
    except UserError as error:
        if not answer.closed:
            print(json.dumps({"error": str(error)}), file=answer, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
