"""Faults that a worker brings upon itself, at the very action that a trace names.

A signal from outside arrives at no exact place. A worker that is told beforehand strikes itself there: the SIGKILL is
as real, and the same trace meets the same action in every run.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Sequence

from planaria.control.decisions import Blow
from planaria.pipeline.plan.actions import Action

SIGNALS = {"kill": "SIGKILL", "stop": "SIGSTOP"}
"""what the log calls a fault, unless it is its own name"""
_PLACES = {
    "commit": ("commit",),
    "transfer": ("give", "take"),
    "save": ("write",),
    "settle": ("settle",),
    "link": ("link",),
}
"""moment of a fault → what the main thread is doing then; others fall on actions of the step's plan"""
_OF_THE_FILE = ("kill", "stop", "disk_slow", "disk_full")
"""faults that strike a save when its file is begun, by whatever thread"""
_TIMES = 5.0
"""unless a fault says otherwise: how many times as long a slow worker's actions take"""
_LATE_S = 0.1
"""unless a fault says otherwise: how much later a batch comes"""
_WITH_THE_STEP = ("lie", "slow_data")
"""faults of all of a step, which begin with it"""
_FULL_BYTES = 4096
"""the largest file that can be written on a full disk"""

Target = tuple[str, int, int]
"""kind of action, microbatch, hop"""


class Blows:
    """What is to befall this worker. ``add`` is called by the thread that listens, ``meet`` by one that writes too, all
    else by the main thread."""

    def __init__(self, told: Callable[[Blow], None]) -> None:
        """``told`` is called before each strike."""
        self.effects: dict[str, Callable[[Blow], None]] = {}
        """how to bring about what the worker's edges and offers suffer"""
        self._told = told
        self._waiting: list[Blow] = []
        self._targets: dict[int, Target] = {}
        self._slow, self._times, self._full = 0.0, 1.0, 0.0
        self._late_s, self._late_until = 0.0, 0.0
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def add(self, blow: Blow) -> None:
        """It strikes at the next place that is its moment."""
        self._waiting.append(blow)

    def aim(self, actions: Sequence[Action]) -> None:
        """These are this worker's actions in the step that begins: choose one for each fault that is meant for one.
        What is about all of a step begins with it."""
        for blow in [b for b in self._waiting if b.signal in _WITH_THE_STEP and b.moment not in _PLACES]:
            self._suffer(blow)
        for blow in self._waiting:
            of_kind = [a for a in actions if blow.moment in ("any", a.kind)] or list(actions)
            if blow.moment not in _PLACES and of_kind:
                chosen = of_kind[int(blow.offset * len(of_kind))]
                self._targets[blow.number] = (chosen.kind, chosen.microbatch, chosen.hop)

    def lag(self, busy_s: float) -> bool:
        """What the main thread has done for ``busy_s`` seconds takes longer, if it is to be slow. Was it?"""
        if not self._slow:
            return False
        now = time.monotonic()
        time.sleep(max(0.0, min((self._times - 1) * busy_s, self._slow - now)))
        self._slow = self._slow if now < self._slow else 0.0
        return True

    @property
    def late_s(self) -> float:
        """How much later a batch is to come now."""
        return self._late_s if time.monotonic() < self._late_until else 0.0

    def at(self, doing: str, microbatch: int, hop: int) -> None:
        """The main thread begins to do this."""
        if not (self._waiting or self._full):
            return
        if self._full and time.monotonic() > self._full:
            resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)
            self._full = 0.0
        self.meet(doing, microbatch, hop)

    def meet(self, doing: str, microbatch: int = -1, hop: int = -1) -> None:
        """This begins, here or in a thread that writes while training goes on: suffer what is meant for it."""
        for blow in [b for b in self._waiting if self._meets(b, doing, microbatch, hop)]:
            self._suffer(blow)

    def _suffer(self, blow: Blow) -> None:
        self._waiting.remove(blow)
        self._told(blow)
        self._strike(blow)

    def _meets(self, blow: Blow, doing: str, microbatch: int, hop: int) -> bool:
        if doing == "copy":  # what is to befall a save, but not its file, befalls it here
            return blow.moment == "save" and blow.signal not in _OF_THE_FILE
        if blow.moment in _PLACES:
            return doing in _PLACES[blow.moment]
        return self._targets.get(blow.number) == (doing, microbatch, hop)

    def _strike(self, blow: Blow) -> None:
        match blow.signal:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "stuck" | "disk_slow":
                until = time.monotonic() + (blow.seconds or float("inf"))
                while (left := until - time.monotonic()) > 0:
                    time.sleep(min(left, 3600.0))
            case "slow" | "slow_host":
                self._times, self._slow = blow.strength or _TIMES, time.monotonic() + (blow.seconds or float("inf"))
            case "slow_data":
                self._late_s = _LATE_S if blow.strength is None else blow.strength
                self._late_until = time.monotonic() + (blow.seconds or float("inf"))
            case "disk_full":
                self._full = time.monotonic() + (blow.seconds or float("inf"))
                resource.setrlimit(resource.RLIMIT_FSIZE, (_FULL_BYTES, self._limits[1]))
            case _:
                self.effects[blow.signal](blow)
