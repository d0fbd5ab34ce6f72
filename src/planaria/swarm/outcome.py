"""What came of a run, read off its peers' records: accuracy, what attacks achieved, whom each layer stopped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from planaria.swarm.measure import Tally
from planaria.swarm.records import (
    LOG,
    PEERS,
    POISON,
    SAMPLES,
    Evaluated,
    Finished,
    RoundDone,
    Started,
    read_log,
    read_poison,
    read_samples,
)

ALL = "all layers"
"""the name under which the layers together are counted"""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Point(_Record):
    """One evaluation of one peer."""

    round: int
    accuracy: Tally
    alone: Tally | None
    tokens: float
    watch: dict[str, Tally]


class PeerOutcome(_Record):
    name: str
    id: str
    attack: str
    model: str
    points: list[Point]
    finished: bool
    weights: str
    """fingerprint of the weights at the end"""

    @property
    def honest(self) -> bool:
        return self.attack == "none"

    def last(self, count: int) -> Point:
        """The last ``count`` evaluations together."""
        points = self.points[-count:]
        alone = [point.alone for point in points if point.alone is not None]
        return Point(
            round=points[-1].round,
            accuracy=total([point.accuracy for point in points]),
            alone=total(alone) if alone else None,
            tokens=sum(point.tokens for point in points) / len(points),
            watch={kind: total([point.watch[kind] for point in points]) for kind in points[-1].watch},
        )


class LayerOutcome(_Record):
    """One layer's work at all honest peers together, on what other peers sent."""

    stopped: Tally = Tally()
    """poisoned completions that it refused, of those that reached it"""
    misjudged: Tally = Tally()
    """honest peers' completions that it refused, of those that reached it"""
    off: dict[str, int] = {}
    """why it was switched off → in how many rounds"""


class Outcome(_Record):
    """One run."""

    peers: list[PeerOutcome]
    layers: dict[str, LayerOutcome]
    rounds: int
    seconds: float

    @property
    def honest(self) -> list[PeerOutcome]:
        return [peer for peer in self.peers if peer.honest]

    def accuracy(self, last: int) -> float:
        """Mean over honest peers of their last evaluations."""
        return sum(p.last(last).accuracy.rate or 0.0 for p in self.honest) / len(self.honest)

    def success(self, kind: str, last: int) -> Tally:
        """An attack's success with all honest peers together, over their last evaluations."""
        return total([p.last(last).watch[kind] for p in self.honest])

    def worst(self, kind: str, last: int) -> float | None:
        """Its success with the honest peer that fared worst."""
        rates = [rate for p in self.honest if (rate := p.last(last).watch[kind].rate) is not None]
        return max(rates, default=None)

    def tokens(self, last: int) -> float:
        """Mean length of honest peers' completions."""
        return sum(p.last(last).tokens for p in self.honest) / len(self.honest)


def total(tallies: Sequence[Tally]) -> Tally:
    return sum(tallies, Tally())


def read_outcome(folder: Path) -> Outcome:
    """The outcome of the run in ``folder``, as far as it has come: of the peers that were evaluated at least once."""
    found = {path: read_log(path / LOG) for path in sorted((folder / PEERS).iterdir())}
    logs = {path: log for path, log in found.items() if any(isinstance(record, Evaluated) for record in log)}
    places = list(logs)
    peers = [_peer(log) for log in logs.values()]
    rounds = [[r for r in log if isinstance(r, RoundDone)] for log in logs.values()]
    times = [record.time for log in logs.values() for record in log]
    honest = {path: peer for path, peer in zip(places, peers, strict=True) if peer.honest}
    poison = {
        (peer.id, entry.round, entry.problem, entry.index)
        for path, peer in zip(places, peers, strict=True)
        if not peer.honest
        for entry in read_poison(path / POISON)
    }
    attackers = {peer.id for peer in peers if not peer.honest}
    return Outcome(
        peers=peers,
        layers=_layers(honest, logs, poison, attackers),
        rounds=max(map(len, rounds), default=0),
        seconds=max(times) - min(times) if times else 0.0,
    )


def _peer(log: Sequence[object]) -> PeerOutcome:
    started = next(r for r in log if isinstance(r, Started))
    done = [r for r in log if isinstance(r, RoundDone)]
    return PeerOutcome(
        name=started.name,
        id=started.id,
        attack=started.attack,
        model=started.model,
        points=[
            Point(round=r.round, accuracy=r.accuracy, alone=r.alone, tokens=r.tokens, watch=r.watch)
            for r in log
            if isinstance(r, Evaluated)
        ],
        finished=any(isinstance(r, Finished) and not r.reason for r in log),
        weights=done[-1].weights if done else "",
    )


def _layers(
    honest: Mapping[Path, PeerOutcome],
    logs: Mapping[Path, Sequence[object]],
    poison: set[tuple[str, int, int, int]],
    attackers: set[str],
) -> dict[str, LayerOutcome]:
    stopped: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    misjudged: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for path, peer in honest.items():
        for line in read_samples(path / SAMPLES):
            if line.peer == peer.id:
                continue
            is_poison = (line.peer, line.round, line.problem, line.index) in poison
            if line.peer in attackers and not is_poison:
                continue  # an attacker's filler is neither poison nor an honest peer's work
            counts = stopped if is_poison else misjudged
            for layer in (*line.passed, *([line.layer] if line.layer else [])):
                counts[layer][0] += layer == line.layer
                counts[layer][1] += 1
            counts[ALL][0] += bool(line.layer)
            counts[ALL][1] += 1
    off: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for path in honest:
        for record in logs[path]:
            for layer, reason in record.off.items() if isinstance(record, RoundDone) else ():
                off[layer][reason.partition(":")[2].strip() or reason] += 1
    names = dict.fromkeys([*stopped, *misjudged, *off])
    return {
        name: LayerOutcome(stopped=_tally(stopped[name]), misjudged=_tally(misjudged[name]), off=dict(off[name]))
        for name in names
    }


def _tally(counts: Sequence[int]) -> Tally:
    return Tally(hits=counts[0], eligible=counts[1])
