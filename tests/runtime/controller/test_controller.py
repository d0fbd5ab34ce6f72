"""The controller's loop: clocks, zombies and a full disk. The fleet is a list of notices."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections import deque
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.config.schema import RunConfig
from planaria.control.checkpoint_decisions import LAST_TRIES
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.facts.orders import ORDER, ExitWorker, Order
from planaria.control.replay import replay
from planaria.control.run_deadlines import SAVE_RETRY_S, RoundWait, RunDeadlines
from planaria.control.state.run import RunState
from planaria.exchange.coded.coded_facts import ResultsSent
from planaria.faults.trace import Fault
from planaria.runtime.checkpoint.stage_file import stage_file
from planaria.runtime.checkpoint.store import CheckpointStore
from planaria.runtime.controller import controller as module
from planaria.runtime.controller.controller import Controller
from planaria.runtime.fleet.base import Reported, WorkerEnded
from support.control.replica_steps import facts, simulate, work_until
from support.hostile_json import hostile
from support.observer import Log

CONFIG = RunConfig.model_validate(
    {"model": {"layers": 3}, "pipeline": {"stages": 3}, "train": {"steps": 2, "eval_every": 0}, "fleet": {"spares": 0}}
)
STARTED = e.RunStarted(
    name="run", seed=1, stages=3, steps=2, first_step=0, samples_per_step=1, wall_time=0.0,
    extra_edges=[(0, 1), (1, 2), (2, 3), (0, 3)],
)  # fmt: skip


class Clock:
    """Moves only when the fleet waits."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class ObedientFleet:
    """Workers that carry out orders at once; their reports wait to be polled."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.notices: deque[Reported | WorkerEnded] = deque()
        self.incarnations: dict[str, int] = {}
        self.stages: dict[str, int] = {}
        self.dismissed: list[tuple[str, int]] = []
        self.waits: list[float] = []
        self.silent: set[type[d.Fact]] = set()  # type: ignore[name-defined]

    def deliver(self, worker: str, fact: e.Fact, incarnation: int | None = None) -> None:
        number = self.incarnations[worker] if incarnation is None else incarnation
        self.notices.append(Reported(worker, number, fact.model_dump_json().encode()))

    def spawn(self, worker: str, incarnation: int, host: str = "") -> None:
        self.incarnations[worker] = incarnation
        self.deliver(worker, e.WorkerJoined(worker=worker, incarnation=incarnation, pid=1))

    def send(self, worker: str, text: bytes) -> None:
        order = ORDER.validate_json(text)
        if type(order) in self.silent:
            return
        match order:
            case d.Form():
                self.stages[worker] = next(m.stage for m in order.members if m.worker == worker)
                self._report(worker, e.Linked, order.generation, node=self.stages[worker], link_s=0.0)
            case d.RunStep():
                values = {"step": order.step, "mode": order.mode, "loss": 1.0, "grad_norm": 1.0}
                self._report(worker, e.StageReady, order.generation, **values)
            case d.Commit():
                self._report(worker, e.StageCommitted, order.generation, step=order.step)
            case d.Save():
                self._report(worker, e.StageSaved, order.generation, step=order.step, bytes=1)

    def send_to_incarnation(self, worker: str, incarnation: int, text: bytes) -> None:
        assert isinstance(ORDER.validate_json(text), ExitWorker)
        self.dismissed.append((worker, incarnation))

    def poll(self, timeout_s: float) -> list[Reported | WorkerEnded]:
        self.waits.append(timeout_s)
        if not self.notices:
            self.clock.now += timeout_s
            assert self.clock.now < 200, "the controller waits forever"
            return []
        return [self.notices.popleft()]

    def signal(self, worker: str, incarnation: int, number: signal.Signals) -> None: ...

    def close(self) -> None: ...

    def _report(self, worker: str, kind: type[e.Fact], generation: int, **what: object) -> None:
        self.deliver(worker, kind(worker=worker, stage=self.stages[worker], generation=generation, **what))  # type: ignore[call-arg]


class NoChaos:
    def on_decision(self, decision: d.Decision, state: RunState) -> list[e.FaultInjected]:
        return []

    def on_event(self, t: float, event: e.Event, state: RunState) -> list[e.FaultInjected]:
        return []

    def add(self, fault: Fault) -> None: ...

    def resume_due(self, t: float) -> None: ...

    def next_due(self) -> float | None:
        return None


class Scene:
    """A controller with its fleet and log."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.log = Clock(), Log()
        monkeypatch.setattr(module, "time", self.clock)
        self.fleet = ObedientFleet(self.clock)
        self.folder = folder
        for step, generation in product(range(3), range(1, 6)):  # files of the workers
            gathered = CheckpointStore(folder / "checkpoints").unfinished(step, generation)
            gathered.mkdir(parents=True)
            for stage in range(4):
                (gathered / f"stage-{stage:04d}.safetensors").write_bytes(b"x")

    def run(self, stop: str = "") -> d.Finish:
        self.controller = Controller(CONFIG, STARTED, self.fleet, self.folder, self.log, NoChaos())
        return self.controller.run(lambda: stop)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def broken(scene: Scene) -> None:
    scene.fleet.deliver("w1", e.EdgeBroken(worker="w1", node=1, peer=2, generation=1, detail="reset"))


def test_a_run_ends_with_its_checkpoint_and_state_file(scene: Scene) -> None:
    assert scene.run() == d.Finish(outcome="finished")
    assert [f.step for f in scene.log.all(d.Commit)] == [0, 1]  # type: ignore[attr-defined]
    assert (scene.folder / "checkpoints" / "step-00000002" / "manifest.json").is_file()
    assert '"phase": "over"' in (scene.folder / "state.json").read_text()
    assert max(scene.fleet.waits) <= CONFIG.fleet.heartbeat_s


def test_the_checkpoint_folder_exists_before_workers_are_asked_to_save(scene: Scene) -> None:
    """Machines without access to the folder can send their stages only if it exists."""
    store, original = CheckpointStore(scene.folder / "checkpoints"), scene.fleet.send
    shutil.rmtree(store.folder)

    def send(worker: str, text: bytes) -> None:
        if isinstance(order := ORDER.validate_json(text), d.Save):
            file = stage_file(store.unfinished(order.step, order.generation), scene.fleet.stages[worker])
            file.write_bytes(b"x")
        original(worker, text)

    scene.fleet.send = send  # type: ignore[method-assign]
    assert scene.run() == d.Finish(outcome="finished")
    assert [f.name for f in store.folder.iterdir()] == ["step-00000002"]


def test_a_stop_request_is_logged_once_and_ends_the_run(scene: Scene) -> None:
    assert scene.run(stop="SIGINT") == d.Finish(outcome="stopped", reason="SIGINT")
    assert len(scene.log.all(e.StopRequested)) == 1


def test_a_stop_ends_in_time_if_no_step_completes(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "underlying_error", lambda _, why, __: f"{sorted(why)}: Network is unreachable")
    original = scene.fleet.send

    def send(worker: str, text: bytes) -> None:
        order = ORDER.validate_json(text)
        if isinstance(order, d.RunStep) and order.step == 1:
            scene.fleet.deliver(worker, e.Heartbeat(trouble="Network is unreachable"))
        else:
            original(worker, text)

    scene.fleet.send = send  # type: ignore[method-assign]
    controller = scene.controller = Controller(CONFIG, STARTED, scene.fleet, scene.folder, scene.log, NoChaos())
    finish = controller.run(lambda: "SIGTERM" if controller.state.replicas[0].step == 1 else "")
    step = "step 1 was dropped: no result from stages 0, 1, 2, 3"
    why = f"{step} (['w0', 'w1', 'w2', 'w3']: Network is unreachable)"
    assert finish == d.Finish(outcome="stopped", reason="SIGTERM", detail=why)
    assert CONFIG.fleet.stop_s <= scene.clock.now - 100.0 < CONFIG.fleet.stop_s + 2 * CONFIG.fleet.heartbeat_s
    assert (scene.folder / "checkpoints" / "step-00000001" / "manifest.json").is_file()
    assert replay(scene.log.facts).problems == []


def test_workers_that_do_not_start_are_reported_and_do_not_delay_a_stop(scene: Scene) -> None:
    scene.fleet.spawn = lambda worker, incarnation, host="": None  # type: ignore[assignment,method-assign]
    controller = scene.controller = Controller(CONFIG, STARTED, scene.fleet, scene.folder, scene.log, NoChaos())
    finish = controller.run(lambda: "SIGTERM" if scene.clock.now > 145 else "")
    assert finish == d.Finish(outcome="stopped", reason="SIGTERM") and scene.clock.now < 146
    first, _ = scene.log.all(e.WorkersStarting)
    limit_s = CONFIG.fleet.start_timeout_s
    assert first == e.WorkersStarting(workers=["w0", "w1", "w2", "w3"], ready=0, waited_s=10.0, limit_s=limit_s)


def test_a_broken_edge_without_a_death_is_replaced_after_its_grace(scene: Scene) -> None:
    scene.fleet.silent = {d.RunStep}
    original = scene.fleet.send

    def send(worker: str, text: bytes) -> None:
        order = ORDER.validate_json(text)
        if isinstance(order, d.RunStep) and order.generation == 1 and scene.fleet.stages[worker] == 1:
            broken(scene)
        if isinstance(order, d.Form) and order.generation == 2:
            scene.fleet.silent = set()
        original(worker, text)

    scene.fleet.send = send  # type: ignore[method-assign]
    assert scene.run() == d.Finish(outcome="finished")
    assert len(scene.log.all(e.GraceExpired)) == 1
    assert [f.outcome for f in scene.log.all(d.Form)] == ["started", "relinked"]  # type: ignore[attr-defined]


def test_the_grace_of_an_older_generation_does_not_delay_a_newer_one(scene: Scene) -> None:
    """An edge breaks, its end dies, the new edge breaks at once: each has a separate grace."""
    original = scene.fleet.send
    scene.fleet.silent = {d.RunStep}

    def send(worker: str, text: bytes) -> None:
        order = ORDER.validate_json(text)
        if isinstance(order, d.RunStep) and order.generation < 3 and scene.fleet.stages[worker] == 1:
            edge = e.EdgeBroken(worker=worker, node=1, peer=2, generation=order.generation, detail="reset")
            scene.fleet.deliver(worker, edge)
            if order.generation == 1:
                peer = next(w for w, stage in scene.fleet.stages.items() if stage == 2)
                scene.fleet.notices.append(WorkerEnded(peer, 1, "connection", "closed"))
        if isinstance(order, d.Form) and order.generation == 3:
            scene.fleet.silent = set()
        original(worker, text)

    scene.fleet.send = send  # type: ignore[method-assign]
    assert scene.run() == d.Finish(outcome="finished")
    assert [f.generation for f in scene.log.all(e.GraceExpired)] == [2]  # type: ignore[attr-defined]
    assert [f.outcome for f in scene.log.all(d.Form)] == ["started", "recovered", "relinked"]  # type: ignore[attr-defined]


def test_reports_of_dead_workers_are_ignored_and_answered_with_leave(scene: Scene) -> None:
    original = scene.fleet.send

    def send(worker: str, text: bytes) -> None:
        order = ORDER.validate_json(text)
        if isinstance(order, d.Form) and order.generation == 1 and worker == "w1":
            scene.fleet.notices.append(WorkerEnded("w1", 1, "heartbeat", "silent for 1 s"))
            for _ in range(2):  # it wakes up and reports
                scene.fleet.deliver(
                    "w1", e.Linked(worker="w1", node=1, stage=1, generation=1, link_s=0.0), incarnation=1
                )
            return
        original(worker, text)

    scene.fleet.send = send  # type: ignore[method-assign]
    assert scene.run() == d.Finish(outcome="finished")
    assert scene.log.all(e.ZombieIgnored) == [e.ZombieIgnored(worker="w1", incarnation=1, report="linked")]
    assert scene.fleet.dismissed == [("w1", 1)] * 2
    assert [f.incarnation for f in scene.log.all(e.WorkerLost)] == [1]  # type: ignore[attr-defined]


ABOUT = {"worker": "w1", "node": 1, "stage": 1, "generation": 1}
REPORTS = [
    e.Linked(**ABOUT, link_s=0.1, transfer_s=0.1, transfer_bytes=1, rebuild_s=0.1),
    e.EdgeBroken(worker="w1", node=1, generation=1, peer=2, detail="reset", waited_s=1.0, wait_began_s=1.0),
    e.StageReady(worker="w1", stage=1, generation=1, step=0, loss=1.0, grad_norm=1.0, received={0: "x"}),
    ResultsSent(**ABOUT, step=0, round=0),
    e.StageCommitted(worker="w1", stage=1, generation=1, step=0),
    e.StageCopied(worker="w1", stage=1, generation=1, step=2, seconds=0.1),
    e.StageSaved(**ABOUT, step=2, bytes=1, seconds=0.1, file="stage-0001.safetensors", sha256="x", weights="y"),
    e.SaveFailed(worker="w1", stage=1, generation=1, step=2, detail="x"),
    e.UpdateReceived(worker="w1", node=1, generation=1, round=0, replica=0, digest="x", products={0: 1.0}),
    e.UpdateRejected(**ABOUT, round=0, replica=0, reason="x"),
    e.UpdatesWeighted(**ABOUT, round=0, counted={0: 1.0}, rivals={"median": {0: 1.0}}),
    e.MessageCompressed(**ABOUT, round=0, sent_bytes=1, dense_bytes=2, norm=1.0, relative_error=0.5, residual=0.1),
    e.RoundApplied(**ABOUT, round=0, blocking_bytes=1, prefetched_bytes=1, spread=0.1),
    e.FaultInjected(worker="w1", node=1, signal="x", step=0, moment="any"),
    e.WorkerJoined(worker="w1", incarnation=1, pid=1, memory=1, layer_s=0.1),
    e.WorkerMeasurements(**ABOUT, step=1, steps=2, seconds=1.0, passes={}, waited={2: 0.1}, flows={}, read_s=0.1),
    e.WorkReport(**ABOUT, step=0, spans=[e.Span(action="copy", start=0.1, end=0.2)], sent_bytes={2: 2}, peak_bytes=3),
    e.Heartbeat(doing="save", step=1, microbatch=1, action_s=1.0, cpu_s=0.1, checkpoint_being_written=2, writing_s=0.1),
]


@pytest.mark.slow
@settings(max_examples=60)
@given(raw=hostile(*(report.model_dump(mode="json") for report in REPORTS)), once=st.sampled_from([d.Form, d.RunStep]))
def test_a_report_beyond_range_costs_its_worker_at_most(raw: bytes, once: type[Order]) -> None:
    """The worker counts as dead or the report is accepted; in any case the run ends."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        scene = Scene(Path(folder), patch)
        original, repeated = scene.fleet.send, list[bytes]()

        def send(worker: str, text: bytes) -> None:
            if not repeated and worker == "w1" and isinstance(ORDER.validate_json(text), once):
                repeated.append(raw)
                scene.fleet.notices.append(Reported(worker, 1, raw))
            original(worker, text)

        scene.fleet.send = send  # type: ignore[method-assign]
        ending = scene.run()
        assert repeated and ending.outcome in ("finished", "failed", "cannot")
        assert not replay(scene.log.facts).problems


def test_heartbeats_and_spans_do_not_change_the_run(scene: Scene) -> None:
    original = scene.fleet.send

    def send(worker: str, text: bytes) -> None:
        stage = scene.fleet.stages.get(worker, 0)
        scene.fleet.deliver(worker, e.Heartbeat())
        scene.fleet.deliver(
            worker, e.WorkReport(worker=worker, node=stage, stage=stage, generation=1, step=0, spans=[], sent_bytes={})
        )
        original(worker, text)

    scene.fleet.send = send  # type: ignore[method-assign]
    assert scene.run() == d.Finish(outcome="finished")
    assert scene.log.worked
    assert not scene.log.all(e.Heartbeat)
    assert not scene.log.all(e.WorkReport)


def test_a_full_disk_ends_the_run_with_a_reason(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.CheckpointStore, "seal", full)
    begun = scene.clock.now
    ending = scene.run()
    assert ending.outcome == "failed"
    assert "step-00000002" in ending.reason and "No space left on device" in ending.reason
    assert len(scene.log.all(e.SaveFailed)) == LAST_TRIES
    assert scene.clock.now - begun >= (LAST_TRIES - 1) * SAVE_RETRY_S, "the disk may be freed meanwhile"
    assert not replay(scene.log.facts).problems
    assert not [path for path in (scene.folder / "checkpoints").iterdir() if "00000002" in path.name]


def test_a_wait_that_follows_a_timeout_has_its_own_timeout(scene: Scene) -> None:
    """Two waits time out at once. The first makes both replicas meet; from then on they wait for updates."""
    simulation = simulate(3, "diloco", steps=6)
    work_until(simulation, lambda run: len(simulation.impatient()) == 2, without=[2])
    controller = Controller(CONFIG, simulation.started, scene.fleet, scene.folder, scene.log, NoChaos())
    controller.state = simulation.run
    now = scene.clock.now
    controller._run_deadlines.round_waits = {number: RoundWait((number, 0, False), now, now) for number in (0, 1)}
    controller._report_expired_waits(now)
    until = now + CONFIG.exchange.patience_s
    assert controller._run_deadlines.round_waits == {
        number: RoundWait((number, 0, True), now, until) for number in (0, 1)
    }
    assert len(scene.log.all(e.RoundWaitExpired)) == 1


def test_a_replica_with_enough_updates_waits_for_the_rest_as_long_again(scene: Scene) -> None:
    """Of four replicas one may be Byzantine and is silent: two other updates suffice."""
    for kind, hurries in (("monna", True), ("diloco", False)):
        simulation, waits = simulate(4, kind, steps=6), RunDeadlines(CONFIG)
        work_until(simulation, lambda run: all(r.open_round and r.phase == "idle" for r in run.live.values()))
        while simulation.pending():
            simulation.work(simulation.pending()[0])
        silent = simulation.run.replicas[3].number
        waits.update(100.0, simulation.run.changed())
        while loud := [n for n, (_, source, _) in enumerate(simulation.mail) if source != silent]:
            simulation.deliver(loud[0])
        waits.update(101.5, simulation.run.changed())
        assert waits.round_waits[0].until == (103.0 if hurries else 100.0 + CONFIG.exchange.patience_s)
        waits.update(102.0, simulation.run.changed())
        assert waits.round_waits[0].until == (103.0 if hurries else 100.0 + CONFIG.exchange.patience_s), (
            "it never grows"
        )
        if hurries:
            simulation.happened(next(waits.expired(103.0, lambda run=simulation.run: run)))
            assert facts(simulation, d.Settle)[0].members == [0, 1, 2]
