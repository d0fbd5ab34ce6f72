"""Edges over three relays, one of which is killed again and again while a fleet trains.

A killed relay is started again at its port, so that there are three when the next dies. Measured from SIGKILL until the
step that was under way begins again, which includes the half second that the controller waits for news of a dead
worker. The claims: at most 1 s in every case; no edge moves that was not over the dead relay; no step is lost but the
one under way.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common import RUNS, Claim, Row, conclude, parser, start
from benchmarks.fleet_run import Relay, add_model_flags, real_stages, require_finished, run_fleet
from planaria.config.fleet_config import RelayConfig
from planaria.config.schema import FleetConfig
from planaria.control import decisions as d

if TYPE_CHECKING:
    from planaria.control.logs import RunRecord
    from planaria.control.protocols import Observer

NAME = "relays"
RELAYS = ("a", "b", "c")
FIRST = 4
"""step in which the first is killed"""


class Carriers:
    """The relays as processes, by name."""

    def __init__(self, key: Path) -> None:
        self._key = key
        self._process = {name: self._start(0) for name in RELAYS}
        self.at = {name: self._printed(process) for name, process in self._process.items()}

    def __enter__(self) -> Carriers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._process.values():
            process.kill()
            process.wait()

    def kill(self, name: str) -> None:
        """It dies; another will listen where it did."""
        self._process[name].kill()
        self._process[name].wait()
        self._process[name] = self._start(int(self.at[name].rpartition(":")[2]))

    def _start(self, port: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "planaria", "relay", "--key-file", str(self._key), "--port", str(port)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def _printed(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().split()[1]


class Killer(Relay):
    """Observes for another, and kills the relay with the most edges when a step begins, every ``gap`` steps."""

    def __init__(self, inner: Observer, carriers: Carriers, gap: int, deaths: int) -> None:
        super().__init__(inner)
        self._carriers, self._left = carriers, list(range(FIRST, FIRST + gap * deaths, gap))
        self._over: list[str] = []
        self.killed: list[str] = []

    def on_decision(self, t: float, decision: d.Decision) -> None:
        super().on_decision(t, decision)
        if isinstance(decision, d.Form):
            self._over = [link.over for link in decision.links]
        elif isinstance(decision, d.RunStep) and self._left and decision.step == self._left[0]:
            del self._left[0]
            self.killed.append(max(RELAYS, key=self._over.count))
            self._carriers.kill(self.killed[-1])


def moved(record: RunRecord, killed: list[str]) -> tuple[list[float], int, int]:
    """Seconds until training went on, death by death; edges that moved and were not over the relay that was killed, or
    stayed and were; steps lost beyond that under way."""
    seconds, wrong, lost = [], 0, 0
    form: d.Form | None = None
    order: tuple[float, d.RunStep] | None = None
    broke: float | None = None
    names = iter(killed)
    for t, fact in record.history:
        if isinstance(fact, d.RunStep):
            if broke is not None:
                seconds.append(t - broke)
                broke = None
            order = t, fact
        elif isinstance(fact, d.Form):
            if form is not None and order is not None:
                broke = order[0]
                dead, before = next(names, ""), {(k.low, k.high): k for k in form.links}
                wrong += sum((before[k.low, k.high].over == dead) != (before[k.low, k.high] != k) for k in fact.links)
                lost += order[1].step - fact.step
            form = fact
    return seconds, wrong, lost


def main() -> int:
    flags = parser(NAME, __doc__)
    add_model_flags(flags)
    flags.add_argument("--deaths", type=int, default=9)
    flags.add_argument("--gap", type=int, default=20, help="steps between two deaths")
    given = flags.parse_args()
    return conclude(NAME, given, rows_of(given))


def rows_of(given: argparse.Namespace) -> list[Row]:
    RUNS.mkdir(parents=True, exist_ok=True)
    key = RUNS / f"relays-{os.getpid()}-{secrets.token_hex(4)}.key"
    with ExitStack() as open_:
        open_.callback(lambda: key.unlink(missing_ok=True))
        carriers = open_.enter_context(Carriers(key))
        relays = {name: RelayConfig(at=at) for name, at in carriers.at.items()}
        plain = real_stages(given, NAME, FIRST + given.gap * (given.deaths + 1), spares=0, save_every=0)
        config = plain.model_copy(update={"fleet": FleetConfig(spares=0, key=str(key), relays=relays)})
        killers: list[Killer] = []

        def around(inner: Observer, _: Path) -> Killer:
            killers.append(Killer(inner, carriers, given.gap, given.deaths))
            return killers[0]

        record = run_fleet(config, around=around)
    require_finished(record)
    seconds, wrong, lost = moved(record, killers[0].killed)
    what, limit = "relay killed, until training goes on, s", "0.5 s for news of a dead worker"
    return [
        Row(what, seconds, limit, Claim(high=1.0), judged="worst"),
        Row("deaths seen", [len(seconds)], str(given.deaths), Claim(low=given.deaths)),
        Row("edges of others that moved, or of it that stayed", [wrong], "0", Claim(high=0)),
        Row("steps lost beyond those under way", [lost], "0", Claim(high=0)),
    ]


if __name__ == "__main__":
    start(main)
