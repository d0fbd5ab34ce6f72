"""The outcome of a run, read from its peers' records: accuracy, attack success, and the work of each layer."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from planaria.common.documents import Record
from planaria.swarm.records.hit_tally import HitTally
from planaria.swarm.records.lines import (
    LOG,
    PEERS,
    POISON,
    SAMPLES,
    SCHEDULE,
    Evaluated,
    Finished,
    PeerStarted,
    RoundDone,
    SampleRecord,
    read_log,
    read_poison,
    read_samples,
)

ALL = "all layers"
"""name of the counts over all layers together"""


class EvaluationPoint(Record):
    """One evaluation of one peer."""

    round: int
    accuracy: HitTally
    alone: HitTally | None
    tokens: float
    watch: dict[str, HitTally]


class PeerOutcome(Record):
    name: str
    id: str
    attack: str
    model: str
    points: list[EvaluationPoint]
    finished: bool
    weights: str
    """fingerprint of the final weights"""

    @property
    def honest(self) -> bool:
        return self.attack == "none"

    def last(self, count: int) -> EvaluationPoint:
        """Return the last ``count`` evaluations together; an empty one without evaluations.

        The evaluation before the first round counts only where it is the only one.
        """
        points = [point for point in self.points if point.round > 0][-count:] or self.points[-1:]
        if not points:
            return EvaluationPoint(round=0, accuracy=HitTally(), alone=None, tokens=math.nan, watch={})
        alone = [point.alone for point in points if point.alone is not None]
        return EvaluationPoint(
            round=points[-1].round,
            accuracy=total([point.accuracy for point in points]),
            alone=total(alone) if alone else None,
            tokens=sum(point.tokens for point in points) / len(points),
            watch={kind: total([point.watch[kind] for point in points]) for kind in points[-1].watch},
        )


class LayerOutcome(Record):
    """One layer's decisions at all honest peers on the other peers' completions."""

    stopped: HitTally = HitTally()
    """rejected, of the poisoned completions that reached it"""
    misjudged: HitTally = HitTally()
    """rejected, of honest peers' completions that reached it"""
    off: dict[str, int] = Field(default_factory=dict)
    """reason why it was off → number of rounds"""


class RunOutcome(Record):
    """One run."""

    peers: list[PeerOutcome]
    layers: dict[str, LayerOutcome]
    rounds: int
    seconds: float

    @property
    def honest(self) -> list[PeerOutcome]:
        return [peer for peer in self.peers if peer.honest]

    def _last(self, last: int) -> list[EvaluationPoint]:
        return [peer.last(last) for peer in self.honest if peer.points]

    def accuracy(self, last: int) -> float:
        """Mean of the honest peers' last evaluations; nan without any."""
        return _mean([point.accuracy.rate or 0.0 for point in self._last(last)])

    def success(self, kind: str, last: int) -> HitTally:
        """Success of an attack at all honest peers together, over their last evaluations."""
        return total([point.watch.get(kind, HitTally()) for point in self._last(last)])

    def worst(self, kind: str, last: int) -> float | None:
        """Highest success of the attack at one honest peer."""
        rates = [point.watch[kind].rate for point in self._last(last) if kind in point.watch]
        return max((rate for rate in rates if rate is not None), default=None)

    def tokens(self, last: int) -> float:
        """Mean length of the honest peers' completions; nan without any."""
        return _mean([point.tokens for point in self._last(last)])


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def total(tallies: Sequence[HitTally]) -> HitTally:
    return sum(tallies, HitTally())


def read_outcome(folder: Path) -> RunOutcome:
    """Read the outcome so far of the run in ``folder``; peers that never started are omitted."""
    read = {path.parent: read_log(path) for path in sorted((folder / PEERS).glob(f"*/{LOG}"))}
    logs = {path: log for path, log in read.items() if any(isinstance(r, PeerStarted) for r in log)}
    paths = list(logs)
    peers = [_peer(log) for log in logs.values()]
    rounds = [{r.round for r in log if isinstance(r, RoundDone)} for log in logs.values()]
    times = [record.time for log in logs.values() for record in log]
    honest = {path: peer for path, peer in zip(paths, peers, strict=True) if peer.honest}
    poison = {
        (peer.id, entry.round, entry.problem, entry.index)
        for path, peer in zip(paths, peers, strict=True)
        if not peer.honest
        for entry in read_poison(path / POISON)
    }
    attackers = {peer.id for peer in peers if not peer.honest}
    return RunOutcome(
        peers=peers,
        layers=_layers(honest, logs, poison, attackers),
        rounds=max(map(len, rounds), default=0),
        seconds=max(times) - min(times) if times else 0.0,
    )


def _peer(log: Sequence[object]) -> PeerOutcome:
    started = next(r for r in log if isinstance(r, PeerStarted))
    done = [r for r in log if isinstance(r, RoundDone)]
    return PeerOutcome(
        name=started.name,
        id=started.id,
        attack=started.attack,
        model=started.model,
        points=[EvaluationPoint.model_validate(r, from_attributes=True) for r in log if isinstance(r, Evaluated)],
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
            is_poison = line.name in poison
            # An attacker's filler is neither poison nor an honest peer's work.
            if line.peer == peer.id or (line.peer in attackers and not is_poison):
                continue
            counts = stopped if is_poison else misjudged
            # Every completion not rejected by the schedule passed it; records do not list that.
            for layer in dict.fromkeys((SCHEDULE, *line.passed, *([line.layer] if line.layer else []))):
                counts[layer][0] += layer == line.layer
                counts[layer][1] += 1
            counts[ALL][0] += bool(line.layer)
            counts[ALL][1] += 1
    off: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for path in honest:
        for record in logs[path]:
            for layer, reason in record.off.items() if isinstance(record, RoundDone) else ():
                off[layer][reason.partition(": ")[2] or reason] += 1
    names = dict.fromkeys([*stopped, *misjudged, *off])
    if not stopped[SCHEDULE][0] + misjudged[SCHEDULE][0]:
        names.pop(SCHEDULE, None)
    return {
        name: LayerOutcome(
            stopped=HitTally(hits=stopped[name][0], eligible=stopped[name][1]),
            misjudged=HitTally(hits=misjudged[name][0], eligible=misjudged[name][1]),
            off=dict(off[name]),
        )
        for name in names
    }


@dataclass(frozen=True)
class Account:
    """Completions of one peer that the other peers accepted."""

    certified: int
    """accepted, in rounds with a certificate"""
    other: int
    """accepted, in rounds without one"""
    part: float
    """share of Σ|Â| that others learned from it, certified rounds only"""


def _accepted(samples: Mapping[str, Iterable[SampleRecord]]) -> Iterator[tuple[str, SampleRecord]]:
    """Yield (reader, record) of each completion that another peer accepted."""
    return (
        (reader, line) for reader, lines in samples.items() for line in lines if line.peer != reader and not line.layer
    )


def accounts(samples: Mapping[str, Iterable[SampleRecord]], certified: Set[int]) -> dict[str, Account]:
    """Return the account of each sender; a reader's own completions do not count.

    A certificate lists the messages of a round. The acceptance of a completion is its reader's claim.

    :param samples: reader → its records
    """
    good: Counter[str] = Counter()
    other: Counter[str] = Counter()
    weight: dict[str, float] = {}
    for _, line in _accepted(samples):
        (good if line.round in certified else other)[line.peer] += 1
        if line.round in certified:
            weight[line.peer] = weight.get(line.peer, 0.0) + abs(line.advantage or 0.0)
    total = sum(weight.values())
    return {
        peer: Account(good[peer], other[peer], weight.get(peer, 0.0) / total if total else 0.0)
        for peer in sorted({*good, *other})
    }


def debts(samples: Mapping[str, Iterable[SampleRecord]], certified: Set[int], price: int) -> dict[tuple[str, str], int]:
    """(debtor, creditor) → net credits, at ``price`` per accepted completion."""
    pending: Counter[tuple[str, str]] = Counter()
    for reader, line in _accepted(samples):
        if line.round in certified:
            pending[reader, line.peer] += price
    net = {(a, b): credits - pending[b, a] for (a, b), credits in pending.items()}
    return {pair: credits for pair, credits in sorted(net.items()) if credits > 0}
