"""Leading a group: as its first controller, after the loss of one, or on another machine that stands by."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from planaria.common.address import Reach
from planaria.common.errors import RunStopped
from planaria.config.model_config import GROUP
from planaria.config.names import WorkerId
from planaria.config.schema import RunConfig
from planaria.control.facts.events import ControllerEnd
from planaria.control.facts.run_started import RunStarted
from planaria.control.failover import FailoverState
from planaria.control.log.reader import identity
from planaria.control.log.shared_log import BEGIN, LeadershipLost
from planaria.faults.injector import TraceInjector
from planaria.faults.trace import Trace
from planaria.report.observe.progress import NoProgress
from planaria.report.observe.run_observer import RunObserver
from planaria.report.run.report import write_report
from planaria.runtime.api.execution import Callbacks, StandbyTakeover
from planaria.runtime.api.run import Run
from planaria.runtime.controller.controller import Controller
from planaria.runtime.engine.run_fleet import first_machine, return_s, returning_workers
from planaria.runtime.engine.stopping import stop_requested
from planaria.runtime.fleet.cooperative import CooperativeFleet, InProcessWorker
from planaria.runtime.fleet.joinable_fleet import JoinableFleet, RunInvitation
from planaria.runtime.fleet.joining import read_key, read_run_address
from planaria.runtime.preparation import run_folders
from planaria.runtime.preparation.run_start import START, run_started
from planaria.runtime.resolved_run import ResolvedRun
from planaria.runtime.shared_log.leadership import lead_run
from planaria.runtime.standby.followed_run import FollowedRun
from planaria.runtime.standby.remote_standby import Candidate, stand_by_again
from planaria.runtime.worker.setup import CHECKPOINTS, SETUP, Setup

_DISMISS_S = 2.0
"""seconds in which the members of a group that is over learn that from another controller"""
Opened = Callable[[str], object]
"""called with HOST:PORT once members can join"""


def report(line: object) -> None:
    """Print to standard error, which is the controller's log once members can join."""
    print(line, file=sys.stderr, flush=True)


class GroupLead:
    """The lead of a group by this process."""

    def __init__(self, config: RunConfig, folder: Path, key: bytes, awaited: str = "") -> None:
        """:param awaited: name of the process that joins first, whose weights all start from"""
        self._config, self._folder, self._key, self._awaited = config, folder, key, awaited

    def begin(self, opened: Opened) -> None:
        """Lead the group from its start; if another machine takes over, stand by.

        :raises UserError: if the port or the shared log cannot be used.
        """
        with run_folders.lock_for_training(self._folder):
            try:
                self._begin(opened)
            except LeadershipLost as lost:
                self._stand_by(lost)

    def resume(self, cause: ControllerEnd) -> None:
        """Lead the group after the loss of a controller on this machine; with a shared log, stand by, and lead if no
        other machine does.

        :raises UserError: if the port cannot be used, or too many controllers were lost within one step.
        """
        with run_folders.lock_for_training(self._folder):
            if self._config.fleet.shared_log is None:
                self._resume(cause)
            else:
                self._stand_by(LeadershipLost("its controller was lost", BEGIN))

    def _stand_by(self, lost: LeadershipLost) -> None:
        stand_by_again(lost, self._config, self._folder, Callbacks(False, report, None, None), GroupCandidate)

    def _begin(self, opened: Opened) -> None:
        resolved = ResolvedRun(self._config)
        own = {"saves": False, "start_from_first_worker": True, "reserve_blocks": resolved.replicas_per_plan == 1}
        started = run_started(resolved, START).model_copy(update=own)
        with lead_run(self._config, self._folder, run_folders.SHARED_FILES, None) as leadership:
            watch = RunObserver(self._folder, self._config.samples, NoProgress(), shared=leadership)
            self._lead(started, watch, opened)

    def _resume(self, cause: ControllerEnd) -> None:
        """Lead the group at the address of the lost controller."""
        followed = FollowedRun(self._folder, self._config, NoProgress())
        followed.advance()
        port = int(read_run_address(self._folder).at.rpartition(":")[2])
        self._config = self._config.model_copy(update={"fleet": self._config.fleet.model_copy(update={"port": port})})
        if not followed.begun:
            self._begin(lambda address: None)
            return
        failover = replace(followed.lost(cause, time.monotonic()), unsupervised=True)
        if failover.finish is None:
            self.take_over(StandbyTakeover(failover, followed))
        else:
            self._dismiss_members(failover)
            write_report(self._folder)

    def take_over(self, takeover: StandbyTakeover) -> None:
        """Lead the group whose log was followed, and whose lock the caller holds, after the loss of its controller.

        :raises LeadershipLost: if another machine leads the group.
        """
        failover, account, offset_s = takeover.failover, takeover.run.account, takeover.clock_offset_s
        watch = RunObserver(
            self._folder, self._config.samples, NoProgress(),
            shared=takeover.leadership, clock_offset_s=offset_s, state=account,
        )  # fmt: skip
        watch.resume()
        self._lead(failover.state.started, watch, lambda address: None, failover)

    def _lead(
        self, started: RunStarted, watch: RunObserver, opened: Opened, failover: FailoverState | None = None
    ) -> None:
        """Lead until the samples are used or the last member has left; then write the report."""
        config, folder = self._config, self._folder
        with stop_requested(None) as requested, closing(self._open(started, failover)) as fleet:
            opened(fleet.address)
            watch.when_lost(fleet.abandon)
            injector = TraceInjector(Trace(faults=()), fleet, folder / CHECKPOINTS, 0)
            try:
                Controller(config, started, fleet, folder, watch, injector, failover=failover).run(requested)
            except BaseException as error:  # another controller leads, now or soon
                fleet.abandon(keep_address=not isinstance(error, RunStopped))
                raise
            finally:
                watch.close()
        write_report(folder)

    def _dismiss_members(self, failover: FailoverState) -> None:
        """Tell the members of a group that is over, since its controller was lost before it could."""
        with closing(self._open(failover.state.started, failover)) as fleet:
            fleet.announce_end()
            time.sleep(_DISMISS_S)

    def _open(self, started: RunStarted, failover: FailoverState | None) -> JoinableFleet:
        """Return the group's fleet: its members, also those that return from a former controller."""
        config, place, folder_id = self._config, self._folder.absolute(), identity(self._folder)
        fleet, reach = config.fleet, Reach(advertise=config.fleet.advertise)
        setup = Setup(
            config, place, place, fleet.host, self._key, 0, reach, part=started.part, folder_id=folder_id
        )  # fmt: skip
        plain = SETUP.dump_json(replace(setup, reach=Reach())).decode()
        returning: Mapping[str, list[WorkerId]] = {}
        awaited = self._awaited
        if failover is not None and failover.state.machines:
            returning, awaited = returning_workers(failover.state), ""
        invitation = RunInvitation(
            plain, 1, folder_id, {}, first_machine(failover), awaited, returning, return_s(fleet)
        )  # fmt: skip
        return JoinableFleet(_no_local_workers, fleet, fleet.host, self._key, invitation, self._folder)


def _no_local_workers(relay: str) -> CooperativeFleet:
    return CooperativeFleet(_no_worker)


def _no_worker(slot: InProcessWorker) -> None:
    raise AssertionError("all workers of a group are its members")


class GroupCandidate(Candidate):
    """A machine that may lead a group."""

    def _prepare(self) -> None:
        """Do nothing: members have model and data."""

    def _execute(self, takeover: StandbyTakeover) -> Run:
        GroupLead(self._config, self._folder, read_key(self._key)).take_over(takeover)
        return Run(self._folder)


CANDIDATES: Mapping[str, type[Candidate]] = {GROUP: GroupCandidate}
"""``model.family`` → candidate that leads such a run"""
