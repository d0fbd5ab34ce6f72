"""A peer's records: typed lines of JSON, the source of progress, reports and explanations."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, TypeAdapter

from planaria.common.documents import Record, former_names
from planaria.swarm.records.hit_tally import HitTally

PEERS = "peers"
"""folder of a run that contains one folder per peer"""
LOG, SAMPLES, POISON = "log.jsonl", "samples.jsonl", "poison.jsonl"
UNKNOWN_PEERS = "newcomers"
"""common account of all unknown peers (:mod:`planaria.swarm.checks.defence`)"""
SCHEDULE = "schedule"
"""layer of completions rejected before any policy read them"""
STALE = "staleness"
"""layer of completions drawn with weights that are too old"""


class PeerStarted(Record):
    kind: Literal["started"] = "started"
    time: float = Field(default_factory=time.time)
    name: str
    id: str
    """peer id on the board"""
    attack: str
    """attack of the peer in a drill; none if honest"""
    model: str
    parameters: int
    vocab: int
    first_round: int
    run: str = ""
    """the run's id on the board"""
    warnings: list[str] = Field(default_factory=list)


class Evaluated(Record):
    kind: Literal["evaluated"] = "evaluated"
    time: float = Field(default_factory=time.time)
    round: int
    """rounds learned from"""
    accuracy: HitTally
    """held-out problems solved, one draw each"""
    alone: HitTally | None = None
    """the same for the copy that learns alone"""
    tokens: float
    """mean length of the draws"""
    watch: dict[str, HitTally] = Field(default_factory=dict)
    """attack → draws that show what it teaches"""


class LayerCounts(Record):
    """One layer's counts on one peer's completions of a round."""

    _former = former_names(rejected="refused")

    examined: int
    rejected: int


class VoteSummary(Record):
    """Result of a round's votes."""

    groups: int
    """problems with at least one completion"""
    labelled: int
    """problems with a valid label"""
    share: float
    """mean share of the votes for these labels; 0 without any"""
    right: HitTally = HitTally()
    """labels that the task's own measure confirms, of those it can measure"""


class Serving(Record):
    """A server's work in one round."""

    tokens: int = 0
    """drawn tokens, including end tokens"""
    seconds: float = 0.0
    requests: int = 0
    queue: int = 0
    """maximum number of queued requests"""
    behind: int = 0
    """staleness of its weights (rounds)"""
    claimed: float = 0.0
    """share of completions with log-probabilities from the server"""
    local: str = ""
    """reason why the policy drew instead; empty if it did not"""
    unpushed: str = ""
    """reason why the server lacks this round's weights; empty if it has them"""

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def __str__(self) -> str:
        """Short text for the terminal."""
        if self.local:
            return f"none: {self.local}"
        queue = f", {self.queue} waited" if self.queue else ""
        behind = f", {self.behind} behind" if self.behind else ""
        return f"{self.speed:,.0f} tokens/s{queue}{behind}"


class RoundDone(Record):
    _former = former_names(
        rejected_unread="turned",
        rejected_messages="refused_messages",
        quarantined="aside",
        training_completions="training_groups",
    )
    _oldest = former_names(training_completions="lessons")
    kind: Literal["round"] = "round"
    time: float = Field(default_factory=time.time)
    round: int
    seconds: dict[str, float]
    """phase (write, wait, read, learn) → seconds"""
    reward: float
    """mean reward of this peer's own completions"""
    sent: dict[str, int]
    """peer → scheduled completions received"""
    accepted: dict[str, int]
    staleness: dict[int, int] = Field(default_factory=dict)
    """rounds.ahead: age in rounds of the weights that drew them → completions received"""
    stale: dict[str, int] = Field(default_factory=dict)
    """peer → completions dropped because these weights were older than rounds.ahead"""
    rejected_unread: dict[str, str]
    """peer → why its first completion was rejected before it was read"""
    flawed: dict[str, str] = Field(default_factory=dict)
    """peer → description of its first reward outside 0..1"""
    rejected_messages: dict[str, str]
    """peer → reason why its completions, hello or goodbye are invalid"""
    missing: list[str]
    certified: list[str] = Field(default_factory=list)
    """committee members whose receipts of the round's message list were seen; empty without a certificate"""
    layers: dict[str, dict[str, LayerCounts]]
    off: dict[str, str]
    quarantined: dict[str, str]
    agreed: VoteSummary | None = None
    """result of the votes, if peers vote"""
    training_completions: int
    """completions with an advantage, from which the peer learned"""
    skipped: int
    """groups without a learning signal"""
    influence: dict[str, float]
    loss: float
    grad_norm: float
    stats: dict[str, float]
    weights: str
    """fingerprint of the weights after this round"""
    serving: Serving | None = None
    """work of the server that draws for this peer, or None without a server"""

    def rejections(self) -> Iterator[tuple[str, str, int]]:
        """(layer, peer, completions rejected), for layers that were on."""
        for layer, peers in self.layers.items():
            for peer, value in peers.items():
                if layer not in self.off and value.rejected:
                    yield layer, peer, value.rejected


class Finished(Record):
    kind: Literal["finished"] = "finished"
    time: float = Field(default_factory=time.time)
    reason: str = ""
    """reason of an early stop; empty otherwise"""


LogRecord = Annotated[PeerStarted | Evaluated | RoundDone | Finished, Field(discriminator="kind")]
_RECORD: TypeAdapter[LogRecord] = TypeAdapter(LogRecord)


class SampleRecord(Record):
    """One completion that this peer examined: its origin and its fate."""

    peer: str
    round: int
    problem: int
    index: int
    reward: float
    passed: list[str]
    """layers that accepted it"""
    layer: str = ""
    """layer that rejected it; empty if none did"""
    reason: str = ""
    advantage: float | None = None
    """None if not learned from"""

    @property
    def name(self) -> tuple[str, int, int, int]:
        return self.peer, self.round, self.problem, self.index


class PoisonRecord(Record):
    """A poisoned completion, as recorded by the attacker; read only by a drill's report."""

    round: int
    problem: int
    index: int


class Log:
    """Appends records to a file, one whole line each; a partial last line of a killed peer is removed first."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._file.truncate(_complete_bytes(path))

    def append(self, *records: BaseModel) -> None:
        if records:
            self._file.write("".join(record.model_dump_json() + "\n" for record in records).encode())


def read_log(path: Path) -> list[LogRecord]:
    """Read all complete records of a peer's log.

    A restarted peer repeats rounds and evaluations; only the last record of each is returned.
    """
    latest: dict[tuple[str, int], LogRecord] = {}
    for index, line in enumerate(_lines(path)):
        record = _RECORD.validate_json(line)
        key = record.kind, record.round if isinstance(record, Evaluated | RoundDone) else index
        latest.pop(key, None)  # the last one takes its own place
        latest[key] = record
    return list(latest.values())


def follow(path: Path) -> Callable[[], list[LogRecord]]:
    """Return a function that reads the records added since its last call; the file need not exist."""
    offset = 0

    def read_new() -> list[LogRecord]:
        nonlocal offset
        if not path.is_file():
            return []
        with path.open("rb") as file:
            file.seek(offset)
            whole, end, _ = file.read().rpartition(b"\n")
        offset += len(whole) + len(end)
        return [_RECORD.validate_json(line) for line in whole.splitlines()]

    return read_new


def read_samples(path: Path) -> Iterator[SampleRecord]:
    """Yield each completion once, even if a restarted peer examined it again."""
    seen: set[tuple[str, int, int, int]] = set()
    for line in _lines(path):
        record = SampleRecord.model_validate_json(line)
        if record.name not in seen:
            seen.add(record.name)
            yield record


def read_poison(path: Path) -> Iterator[PoisonRecord]:
    return (PoisonRecord.model_validate_json(line) for line in _lines(path))


def _complete_bytes(path: Path) -> int:
    """Return the length in bytes of the complete lines of a file."""
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return 0  # an empty file cannot be mapped
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.rfind(b"\n") + 1


def _lines(path: Path) -> Iterator[bytes]:
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line
