"""Probes a run's relays from a thread and reports when one stops or resumes answering."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from queue import Empty, SimpleQueue
from typing import NamedTuple

from planaria.control.facts import events as e

_EVERY_S = 2.0
"""seconds between two rounds of probes"""
_FAILURES = 3
"""failed probes in a row after which a relay counts as silent: a busy machine may miss one"""


class ProbeResult(NamedTuple):
    """The result of one probe."""

    relay: str
    began: float
    error: str
    """error; empty if it answered"""


class RelayWatch:
    """The relays of one run."""

    def __init__(self, relays: Mapping[str, str], probe: Callable[[str], str]) -> None:
        """:param relays: name → HOST:PORT.
        :param probe: returns why an address does not answer, or an empty string.
        """
        self._relays, self._probe = relays, probe
        self._results: SimpleQueue[ProbeResult] = SimpleQueue()
        self._failures: dict[str, int] = {}
        self._silent_since: dict[str, float] = {}

    def start(self) -> None:
        """Probe until this process ends."""
        threading.Thread(target=self._work, name="relay watch", daemon=True).start()

    def changes(self, now: float, silent: Collection[str]) -> Iterator[e.RelaySilent | e.RelayAnswers]:
        """Yield changes since the run's knowledge, in which the relays in ``silent`` do not answer."""
        self._silent_since = {relay: self._silent_since.get(relay, now) for relay in silent}
        while True:
            try:
                probe = self._results.get_nowait()
            except Empty:
                return
            if (event := self.state_change(probe)) is not None:
                yield event

    def state_change(self, probe: ProbeResult) -> e.RelaySilent | e.RelayAnswers | None:
        """Return the change that a probe and the earlier ones show."""
        relay, since = probe.relay, self._silent_since.get(probe.relay)
        if not probe.error:
            self._failures[relay] = 0
            if since is None or probe.began < since:  # a worker found it silent during this probe
                return None
            del self._silent_since[relay]
            return e.RelayAnswers(relay=relay)
        self._failures[relay] = self._failures.get(relay, 0) + 1
        if self._failures[relay] < _FAILURES or since is not None:
            return None
        self._silent_since[relay] = probe.began
        return e.RelaySilent(relay=relay, detail=f"{self._relays[relay]}: {probe.error}")

    def _work(self) -> None:
        while True:
            for relay, at in self._relays.items():
                began = time.monotonic()
                self._results.put(ProbeResult(relay, began, self._probe(at)))
            time.sleep(_EVERY_S)
