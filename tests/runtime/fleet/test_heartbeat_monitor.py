"""The rules of the class ``HeartbeatMonitor`` without processes: silent workers are found, others never."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.runtime.fleet.heartbeats import HeartbeatMonitor
from planaria.runtime.fleet.process import Activity, activity
from support.waiting import until

BEAT_S, MISSED = 0.25, 4
FLOOR_S = BEAT_S * MISSED
LOOK_S = 0.1

Gaps = st.lists(st.floats(0.01, 2.4 * BEAT_S), min_size=1, max_size=8)
"""between a living worker's beats, over and over"""
Absences = st.dictionaries(st.integers(0, 300), st.floats(0.3, 100.0), max_size=6)
"""look → seconds that the observer is away before it"""


class Scene:
    """An observer, its clock, and workers with given gaps between heartbeats."""

    def __init__(self, workers: dict[str, list[float]]) -> None:
        self.now = 1000.0
        self.silence: HeartbeatMonitor[str] = HeartbeatMonitor(BEAT_S, MISSED, lambda: self.now)
        self._gaps, self._beats = workers, dict.fromkeys(workers, 0)
        self._next = {worker: self.now + gaps[0] for worker, gaps in workers.items()}
        for worker in workers:
            self.silence.receive(worker)

    def look(self, doing: Activity = "unknown", away_s: float = 0.0, frozen: bool = False) -> list[str]:
        """Advance to the next look, take heartbeats and judge. ``frozen``: workers stand still while it is away."""
        self.now += away_s
        if frozen:
            self._next = {worker: at + away_s for worker, at in self._next.items()}
        self.now += LOOK_S
        self.silence.look(LOOK_S)
        for worker, gaps in self._gaps.items():
            while self._next[worker] <= self.now:
                self.silence.receive(worker)
                self._beats[worker] += 1
                self._next[worker] += gaps[self._beats[worker] % len(gaps)]
        return [worker for worker, _ in self.silence.silent_too_long(lambda _: doing)]

    def until(self, found: list[str], doing: Activity = "unknown") -> float:
        """Return the seconds until these alone are found."""
        began = self.now
        while self.look(doing) != found:
            assert self.now - began < 1000
        return self.now - began

    def stop(self, worker: str) -> None:
        """End a worker's heartbeats."""
        self._next[worker] = float("inf")


@given(st.dictionaries(st.sampled_from("abcdef"), Gaps, min_size=1), Absences, st.booleans())
def test_no_beating_worker_is_found_however_long_the_observer_is_away(
    workers: dict[str, list[float]], absences: dict[int, float], frozen: bool
) -> None:
    """A controller that is stopped, and a machine that sleeps: then the workers' beats are as late as the look."""
    scene = Scene(workers)
    for number in range(300):
        assert scene.look(away_s=absences.get(number, 0.0), frozen=frozen) == []


@given(Gaps, Gaps, st.floats(0.0, 100.0))
def test_a_worker_that_stops_is_found_soon_and_alone(one: list[float], other: list[float], away_s: float) -> None:
    scene = Scene({"stops": one, "beats": other})
    for _ in range(100):
        scene.look()
    scene.stop("stops")
    scene.look(away_s=away_s)
    shown = max(one + other) + 1.5 * BEAT_S  # a beat is noticed at the next check, up to that late
    assert scene.until(["stops"]) <= max(FLOOR_S, 4 * shown) + 2 * LOOK_S, "late heartbeats extend the limit, no more"


def test_an_observer_that_always_looks_late_finds_it_too() -> None:
    scene = Scene({"stops": [BEAT_S], "beats": [BEAT_S]})
    scene.stop("stops")
    found = [scene.look(away_s=2 * FLOOR_S) for _ in range(20)]
    assert found[0] == [] and found[-1] == ["stops"]


def test_late_heartbeats_extend_the_limit_except_for_stopped_processes() -> None:
    late, regular = [0.9, 0.2], [BEAT_S]
    for doing, least, most in (("unknown", 3.6, 4.1), ("asleep", 3.6, 4.1), ("stopped", 0.7, 1.3), ("busy", 29, 31)):
        scene = Scene({"late": late, "stops": regular})
        for _ in range(100):
            assert scene.look() == []
        scene.stop("stops")
        assert least <= scene.until(["stops"], doing) <= most, doing


def test_late_beats_are_forgotten_after_a_while() -> None:
    scene = Scene({"late": [0.9, *[BEAT_S] * 400], "stops": [BEAT_S]})
    for _ in range(800):
        assert scene.look() == []
    scene.stop("stops")
    assert scene.until(["stops"]) <= FLOOR_S + 4 * LOOK_S


def test_the_first_heartbeat_may_take_longer_and_a_removed_worker_is_not_found() -> None:
    scene = Scene({"beats": [BEAT_S]})
    scene.silence.expect("starts")
    assert 119 <= scene.until(["starts"], "busy") <= 121
    scene.silence.forget("starts")
    assert scene.look() == []


@pytest.mark.parametrize(
    ("program", "number", "doing"),
    [
        ("time.sleep(60)", None, "asleep"),
        ("while True: pass", None, "busy"),
        ("while True: pass", signal.SIGSTOP, "stopped"),
        ("while True: pass", signal.SIGKILL, "unknown"),
    ],
)
def test_the_activity_of_a_process_is_known(program: str, number: signal.Signals | None, doing: Activity) -> None:
    code = (
        f"import threading, time; threading.Thread(target=time.sleep, args=(60,)).start(); print(flush=True)\n{program}"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        if number is not None:
            os.kill(process.pid, number)
        until(lambda: activity(process.pid) == doing)
    finally:
        process.kill()
        process.communicate()
    assert activity(None) == activity(process.pid) == "unknown"
