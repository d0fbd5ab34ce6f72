"""Starting workers on machines that come and go, on a fake cluster."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

import planaria
from planaria.common.errors import UserError
from planaria.runtime.fleet.base import Leaving
from planaria.runtime.fleet.bundles import Bundle
from planaria.runtime.fleet.devices import DeviceNeeds
from planaria.runtime.fleet.placement import Placement
from planaria.runtime.fleet.process_pool import NodeFacts
from planaria.runtime.fleet.remote import HostReportQueue, Lost, Spawned
from support.waiting import until


class Dead(Exception):
    """A process pool does not answer."""


class Pool:
    """A pool, alive or dead, that records starts and signals."""

    def __init__(self, node: str) -> None:
        self.node, self.alive = node, True
        self.watch: Future[int] = Future()
        self.signals: list[tuple[str, int, int]] = []
        self.started: list[tuple[Any, ...]] = []


class FakeCluster:
    """A cluster under the test's control. A node that hangs does not answer."""

    errors: tuple[type[Exception], ...] = (Dead,)

    def __init__(self, *nodes: str | None) -> None:
        self.groups: dict[int, dict[int, str | None]] = {0: dict(enumerate(nodes))}
        self.room: list[str] = []
        """nodes of the next groups, once they are there"""
        self.pools: list[Pool] = []
        self.dead: set[str] = set()
        self.hangs: set[str] = set()
        self.old: set[str] = set()
        self.full: set[str] = set()
        """nodes that have no room for the run's files"""
        self.reserved: dict[tuple[Bundle, str], Future[str]] = {}
        """the devices of bundles, where the test has some"""

    def reserve(self, bundles: int) -> int:
        number = max(self.groups) + 1
        self.groups[number] = dict.fromkeys(range(bundles))
        return number

    def where(self) -> dict[int, dict[int, str | None]]:
        for nodes in self.groups.values():
            for bundle, node in nodes.items():
                if node is None and self.room:
                    nodes[bundle] = self.room.pop(0)
        return {number: dict(nodes) for number, nodes in self.groups.items()}

    def release_slot(self, group: int) -> None:
        del self.groups[group]

    def device(self, bundle: Bundle, node: str) -> Future[str] | None:
        return self.reserved.get((bundle, node))

    def open(self, node: str) -> Pool:
        self.pools.append(Pool(node))
        return self.pools[-1]

    def ask(self, pool: Pool, method: str, *arguments: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        if pool.node in self.hangs:
            return answer
        if not pool.alive or pool.node in self.dead:
            answer.set_exception(Dead("The actor is dead"))
        elif method == "until_drained":
            return pool.watch
        elif method == "facts":
            version = "0.0.1" if pool.node in self.old else planaria.__version__
            answer.set_result(NodeFacts(version))
        elif method == "fetch_files":
            answer.set_result("no room" if pool.node in self.full else "")
        else:
            if method == "signal":
                pool.signals.append(arguments)
            if method == "start":
                pool.started.append(arguments)
            answer.set_result(None)
        return answer

    def kill(self, pool: Pool) -> None:
        pool.alive = False

    def display_name(self, node: str) -> str:
        return f"the node {node}"

    def lose(self, node: str) -> None:
        """Let a node die; all calls to it fail."""
        self.dead.add(node)
        for pool_ in self.pools:
            if pool_.node == node and not pool_.watch.done():
                pool_.watch.set_exception(Dead("The actor died because its node has died"))


class Scene:
    def __init__(self, machines: FakeCluster) -> None:
        self.machines, self.queue = machines, HostReportQueue()
        self.places = Placement(machines, self.queue)
        self.notices: list[Any] = []

    def until(self, condition: Callable[[list[Any]], object]) -> list[Any]:
        def take() -> None:
            time.sleep(0.005)
            self.notices += self.queue.take()

        until(lambda: condition(self.notices), 20.0, take, self.notices)
        return self.notices

    def until_lost(self, count: int) -> list[Lost]:
        """Wait until ``count`` workers were reported as lost; return the reports."""
        received = self.until(lambda received: sum(isinstance(news, Lost) for news in received) == count)
        return [news for news in received if isinstance(news, Lost)]

    def until_started(self, *workers: tuple[str, int]) -> None:
        self.until(lambda received: {Spawned(*worker) for worker in workers} <= {*received})

    def settle(self) -> None:
        """Wait until the placement has run all its jobs, those that follow from them, and some looks."""
        for _ in range(5):
            done = threading.Event()
            for job in (self.places._look, done.set):
                self.places._jobs.put(job)
            assert done.wait(20.0)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planaria.runtime.fleet.placement.LOOK_S", 0.02)


@pytest.fixture
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    """Three bundles: two on node a, one on node b."""
    scene = Scene(FakeCluster("a", "b", "a"))
    scene.places.prepare(1.0)
    yield scene
    scene.machines.hangs.clear()
    scene.places.close()
    scene.queue.close()


def start(scene: Scene, *workers: str) -> None:
    for worker in workers:
        scene.places.start(worker, 1)
    scene.until_started(*((worker, 1) for worker in workers))


def test_an_invalid_node_is_refused_before_a_worker_starts() -> None:
    machines = FakeCluster("a", "b")
    machines.old.add("b")
    with pytest.raises(UserError, match=r"the node b has planaria 0\.0\.1"):
        Scene(machines).places.prepare(1.0)
    machines.hangs.add("a")
    with pytest.raises(UserError, match="the node a cannot start workers"):
        Scene(machines).places.prepare(0.01)
    machines = FakeCluster("a", "b")
    machines.full.add("b")
    with pytest.raises(UserError, match=r"Ray node the node b: no room"):
        Scene(machines).places.prepare(1.0)


def test_a_start_waits_until_the_node_of_a_dead_worker_has_answered(scene: Scene) -> None:
    start(scene, "w0", "w1", "w2")
    scene.machines.hangs.add("b")
    scene.places.release_slot("w1", 1)
    scene.places.start("w1", 2)
    scene.settle()
    assert Spawned("w1", 2) not in scene.queue.take(), "the node may be lost"
    scene.machines.groups[0][1] = "c"  # it is lost, and the bundle is moved
    scene.until_started(("w1", 2))
    assert [pool_.node for pool_ in scene.machines.pools] == ["a", "b", "c"]


def test_a_start_on_a_dying_node_is_repeated_elsewhere(scene: Scene) -> None:
    start(scene, "w0")
    scene.machines.dead.add("b")  # not yet detected
    scene.places.start("w1", 1)
    scene.settle()
    scene.machines.groups[0][1] = "c"
    scene.until_started(("w1", 1))
    assert not scene.until_lost(0)


def test_a_dead_node_loses_its_workers_at_once(scene: Scene) -> None:
    start(scene, "w0", "w1", "w2")
    scene.machines.lose("a")
    lost = scene.until_lost(2)
    assert {news.worker for news in lost} == {"w0", "w2"}
    assert all("the node a: The actor died" in news.detail for news in lost)


def test_a_failed_call_is_no_death_while_the_pool_answers(scene: Scene) -> None:
    start(scene, "w0", "w1", "w2")
    first, scene.machines.pools[0].watch = scene.machines.pools[0].watch, Future()
    first.set_exception(Dead("The actor is unavailable"))
    scene.settle()
    assert not scene.queue.take()
    scene.machines.lose("a")
    scene.until_lost(2)


def test_workers_leave_a_draining_node_and_successors_start_elsewhere(scene: Scene) -> None:
    start(scene, "w0", "w1", "w2")
    scene.machines.pools[0].watch.set_result(int((time.time() + 60) * 1000))
    leaving = scene.until(lambda received: sum(isinstance(news, Leaving) for news in received) == 2)[3:]
    assert [(news.worker, news.incarnation) for news in leaving] == [("w0", 1), ("w2", 1)]
    assert all("the node a is draining, gone in " in news.detail for news in leaving)
    scene.places.start("w3", 1)
    scene.settle()
    assert not scene.queue.take(), "there is no room elsewhere"
    scene.machines.room = ["c"]
    scene.until_started(("w3", 1))
    assert scene.machines.pools[-1].node == "c"
    assert not scene.machines.pools[0].signals, "they work until the cluster releases them"


@pytest.mark.parametrize(
    ("lacks", "complaint"), [("old", "the node late has planaria 0.0.1"), ("full", "late: no room")]
)
def test_an_invalid_node_that_joins_late_is_not_used(scene: Scene, lacks: str, complaint: str) -> None:
    start(scene, "w0", "w1", "w2")
    getattr(scene.machines, lacks).add("late")
    scene.machines.room = ["late"]
    scene.places.start("w3", 1)
    (lost,) = scene.until_lost(1)
    assert complaint in lost.detail
    scene.places.release_slot("w3", 1)
    scene.places.start("w3", 2)
    scene.machines.room = ["fit"]
    scene.until_started(("w3", 2))
    assert scene.machines.pools[-1].node == "fit"


def test_a_start_that_has_waited_too_long_is_given_up(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planaria.runtime.fleet.placement._WAIT_S", 0.1)
    start(scene, "w0", "w1", "w2")
    scene.places.start("w3", 1)
    assert scene.until_lost(1)[0] == Lost("w3", 1, "the cluster had no room for it within 0.1 s")


def test_extra_bundles_are_returned(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planaria.runtime.fleet.placement._IDLE_S", 0.05)
    start(scene, "w0", "w1", "w2")
    scene.machines.room = ["c"]
    start(scene, "w3")
    assert len(scene.machines.groups) == 2
    scene.places.release_slot("w3", 1)
    until(lambda: len(scene.machines.groups) == 1)
    assert list(scene.machines.groups) == [0]


def test_a_worker_starts_on_the_device_that_was_reserved_with_its_bundle(scene: Scene) -> None:
    scene.machines.reserved[Bundle(0, 0), "a"] = given = Future()
    scene.places.start("w0", 1)
    scene.settle()
    pool_ = next(pool_ for pool_ in scene.machines.pools if pool_.node == "a")
    assert not pool_.started, "the device is not known yet"
    given.set_result("GPU-7")
    scene.until_started(("w0", 1))
    assert pool_.started == [("w0", 1, "GPU-7")]


def test_a_node_that_dies_before_its_device_is_known_costs_no_worker(scene: Scene) -> None:
    scene.machines.reserved[Bundle(0, 0), "a"] = given = Future()
    scene.places.start("w0", 1)
    scene.settle()
    scene.machines.lose("a")
    given.set_exception(Dead("the task's node has died"))
    scene.until_started(("w0", 1))
    assert [pool_.started for pool_ in scene.machines.pools if pool_.node == "b"] == [[("w0", 1)]]


def test_a_start_given_up_before_its_device_is_known_does_not_happen(scene: Scene) -> None:
    scene.machines.reserved[Bundle(0, 0), "a"] = given = Future()
    scene.places.start("w0", 1)
    scene.settle()
    scene.places.release_slot("w0", 1)
    scene.settle()
    given.set_result("GPU-7")
    scene.settle()
    assert not any(pool_.started for pool_ in scene.machines.pools)


def test_a_node_without_the_needed_devices_is_refused_by_name() -> None:
    queue = HostReportQueue()
    places = Placement(FakeCluster("a"), queue, DeviceNeeds((1,)))
    with pytest.raises(UserError, match=r"Ray node the node a has no CUDA device"):
        places.prepare(1.0)
    queue.close()
