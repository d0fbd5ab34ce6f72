"""A run that is never left alone: workers are killed and frozen, machines come and go, all as a seed says."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.fleet_run import thaw_later
from benchmarks.linked_run import Guest
from planaria.common.errors import UserError

GUESTS = 2
"""machines that are lent at once, at most"""
THAW_S = 3.0

What = Literal["kill", "stop", "join", "leave", "vanish"]


@dataclass(frozen=True)
class Deed:
    """Something that the driver does ``at`` so many seconds after the first step."""

    at: float
    what: What


def deeds(seed: int, seconds: float, every: float) -> list[Deed]:
    """One in every interval of ``seconds``, at a random time of its middle half.

    Of six, two are kills, one a freeze, and three let a machine come or go: which, depends on how many are there.
    """
    rng = random.Random(f"elastic {seed}")
    planned, guests = [], 0
    for number in range(int(seconds / every)):
        what: What = rng.choice(("kill", "kill", "stop", "join", "join", "join"))
        if what == "join" and rng.random() < guests / GUESTS:
            what = rng.choice(("leave", "vanish"))
        guests += {"join": 1, "leave": -1, "vanish": -1}.get(what, 0)
        planned.append(Deed((number + rng.uniform(0.25, 0.75)) * every, what))
    return planned


class Driver(threading.Thread):
    """Does what was planned to a run; begins with its first step."""

    def __init__(self, folder: Path, planned: Sequence[Deed], seed: int) -> None:
        super().__init__(name="driver", daemon=True)
        self._folder, self._planned = folder, planned
        self._random = random.Random(f"elastic {seed} victims")
        self._come: list[Guest] = []
        self._gone = 0
        """those of them that have been told to go; who came first goes first"""
        self._over = threading.Event()
        self._ticks = busy_ticks()
        self._began = time.monotonic()

    def run(self) -> None:
        self._ticks, self._began = busy_ticks(), time.monotonic()
        for deed in self._planned:
            if self._over.wait(self._began + deed.at - time.monotonic()):
                return
            while not self._done(deed.what) and not self._over.wait(0.2):
                pass

    def end(self) -> float:
        """The run is over: see everybody off. The cores that were busy on average, whoever kept them so."""
        cores = (busy_ticks() - self._ticks) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - self._began)
        self._over.set()
        if self.is_alive():
            self.join()
        for guest in self._come:
            guest.end()
        return cores

    def _done(self, what: What) -> bool:
        """Do it; False when it cannot be done just now."""
        if what in ("kill", "stop"):
            return self._strike(what)
        if what == "join":
            self._come.append(Guest(self._folder, len(self._come) + 1))
            return True
        guest = self._come[self._gone]
        if not (guest.joined or guest.gone):
            return False
        self._gone += 1
        if what == "vanish":
            guest.vanish()
        else:
            guest.leave()
        return True

    def _strike(self, action: str) -> bool:
        """A blow at any worker that stands in a replica."""
        from planaria.cli.commands.chaos import strike
        from planaria.control.statefile import read_state

        try:
            held = [worker for worker in read_state(self._folder).workers if worker.node is not None]
            if not held:
                return False
            victim = self._random.choice(held)
            strike(self._folder, action, f"worker={victim.worker}")
        except UserError:
            return False  # it has just gone by itself
        if action == "stop":
            thaw_later(victim, THAW_S)
        return True


def busy_ticks() -> int:
    """Clock ticks that the machine's cores have been busy since it started, all together."""
    user, nice, system, _idle, _wait, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
    return user + nice + system + irq + softirq
