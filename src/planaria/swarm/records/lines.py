"""What a peer notes while it learns: typed lines of JSON, from which progress, reports and explanations are made."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from planaria.common import documents
from planaria.swarm.records.measure import Tally

PEERS = "peers"
"""the folder of a run that holds a folder for each peer"""
_BLOCK = 1 << 16
LOG, SAMPLES, POISON = "log.jsonl", "samples.jsonl", "poison.jsonl"
NEWCOMERS = "newcomers"
"""the account of all strangers together (:mod:`planaria.swarm.checks.defence`)"""
SCHEDULE = "schedule"
"""the layer of those that were turned away before any policy read them"""


class _Record(BaseModel):
    # A loss may be nan, and its line must still be one.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Started(_Record):
    kind: Literal["started"] = "started"
    time: float = Field(default_factory=time.time)
    name: str
    id: str
    """the peer's on the board"""
    attack: str
    """what it is in a drill; none if honest"""
    model: str
    parameters: int
    vocab: int
    first_round: int
    run: str = ""
    """the run's id on the board"""
    warnings: list[str] = []


class Evaluated(_Record):
    kind: Literal["evaluated"] = "evaluated"
    time: float = Field(default_factory=time.time)
    round: int
    """rounds that were learned from"""
    accuracy: Tally
    """held-out problems solved, one draw each"""
    alone: Tally | None = None
    """the same of the copy that learns alone"""
    tokens: float
    """mean length of the draws"""
    watch: dict[str, Tally] = {}
    """attack → draws that show what it teaches"""


class Layered(_Record):
    """What one layer made of one peer's completions of a round."""

    examined: int
    refused: int


class Agreed(_Record):
    """What a round's votes came to."""

    groups: int
    """problems that somebody sent something for"""
    labelled: int
    """those with a label that counts"""
    share: float
    """mean share of the votes that stood behind these; 0 without any"""
    right: Tally = Tally()
    """labels that score by the task's own measure, of those for which it has one"""


class Serving(documents.Record):
    """What a server did in one round."""

    tokens: int = 0
    """drawn, the ends among them"""
    seconds: float = 0.0
    requests: int = 0
    queue: int = 0
    """most requests that waited for their turn at once"""
    behind: int = 0
    """rounds that its weights were older than the policy's"""
    claimed: float = 0.0
    """share of its completions whose tokens' log-probabilities it told"""
    local: str = ""
    """why the policy drew in its place; empty if it did not"""
    unpushed: str = ""
    """why it did not get this round's weights; empty if it did, or had them"""

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def __str__(self) -> str:
        """In a few words, for the terminal."""
        if self.local:
            return f"none: {self.local}"
        queue = f", {self.queue} waited" if self.queue else ""
        behind = f", {self.behind} behind" if self.behind else ""
        return f"{self.speed:,.0f} tokens/s{queue}{behind}"


class RoundDone(_Record):
    kind: Literal["round"] = "round"
    time: float = Field(default_factory=time.time)
    round: int
    seconds: dict[str, float]
    """what the time went to: write, wait, read, learn"""
    reward: float
    """mean of this peer's own completions"""
    sent: dict[str, int]
    """peer → completions that arrived and were scheduled"""
    accepted: dict[str, int]
    turned: dict[str, str]
    """peer → why the first of those turned away unread was"""
    flawed: dict[str, str] = {}
    """peer → why the first reward of its completions that was not from 0 to 1 is not"""
    refused_messages: dict[str, str]
    """peer → why its message is none"""
    missing: list[str]
    certified: list[str] = []
    """members of the committee whose receipts, seen by then, say who was heard; none without a certificate"""
    layers: dict[str, dict[str, Layered]]
    off: dict[str, str]
    aside: dict[str, str]
    agreed: Agreed | None = None
    """where peers vote"""
    lessons: int
    skipped: int
    """groups that taught nothing"""
    influence: dict[str, float]
    loss: float
    grad_norm: float
    stats: dict[str, float]
    weights: str
    """fingerprint of the weights after this round"""
    serving: Serving | None = None
    """what the server did that draws for this peer; None where there is none"""

    def refusals(self) -> Iterator[tuple[str, str, int]]:
        """(layer, peer, completions refused), of the layers that were not off."""
        for layer, peers in self.layers.items():
            for peer, found in peers.items():
                if layer not in self.off and found.refused:
                    yield layer, peer, found.refused


class Finished(_Record):
    kind: Literal["finished"] = "finished"
    time: float = Field(default_factory=time.time)
    reason: str = ""
    """why it stopped before the last round; empty if it did not"""


Record = Annotated[Started | Evaluated | RoundDone | Finished, Field(discriminator="kind")]
_RECORD: TypeAdapter[Record] = TypeAdapter(Record)


class SampleRecord(_Record):
    """One completion that this peer examined: where it came from and what became of it."""

    peer: str
    round: int
    problem: int
    index: int
    reward: float
    passed: list[str]
    """layers that found nothing"""
    layer: str = ""
    """the layer that refused it; empty if none did"""
    reason: str = ""
    advantage: float | None = None
    """None: not learned from"""


class PoisonRecord(_Record):
    """An attacker's own note of what it poisoned; nobody else reads it but the drill that counts."""

    round: int
    problem: int
    index: int


class Log:
    """Appends records to one file; each appears as a whole line. What was cut off when a peer was killed goes first."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._file.truncate(_whole(path))

    def note(self, *records: BaseModel) -> None:
        if records:
            self._file.write("".join(record.model_dump_json() + "\n" for record in records).encode())

    def close(self) -> None:
        self._file.close()


def read_log(path: Path) -> list[Record]:
    """All records of a peer's log; a last line that is still being written is left out.

    A peer that was started again repeats rounds and evaluations that it had noted before: the last of each counts.
    """
    records = [_RECORD.validate_json(line) for line in _lines(path)]
    last = {_once(record, place): place for place, record in enumerate(records)}
    return [record for place, record in enumerate(records) if last[_once(record, place)] == place]


def _once(record: Record, place: int) -> tuple[str, int]:
    """What only one record of a log says."""
    return record.kind, record.round if isinstance(record, Evaluated | RoundDone) else -1 - place


def follow(path: Path) -> Callable[[], list[Record]]:
    """A function that gives the records that were added since it was called last; the file need not be there yet."""
    place = 0

    def news() -> list[Record]:
        nonlocal place
        if not path.is_file():
            return []
        with path.open("rb") as file:
            file.seek(place)
            whole, end, _ = file.read().rpartition(b"\n")
        place += len(whole) + len(end)
        return [_RECORD.validate_json(line) for line in whole.splitlines()]

    return news


def read_samples(path: Path) -> Iterator[SampleRecord]:
    """Each completion once, however often a peer that was started again examined it."""
    seen: set[tuple[str, int, int, int]] = set()
    for line in _lines(path):
        record = SampleRecord.model_validate_json(line)
        key = (record.peer, record.round, record.problem, record.index)
        if key not in seen:
            seen.add(key)
            yield record


def read_poison(path: Path) -> Iterator[PoisonRecord]:
    return (PoisonRecord.model_validate_json(line) for line in _lines(path))


def _whole(path: Path) -> int:
    """Bytes of a file up to the end of its last whole line."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - _BLOCK)
            file.seek(start)
            if (place := file.read(end - start).rfind(b"\n")) >= 0:
                return start + place + 1
            end = start
    return 0


def _lines(path: Path) -> Iterator[bytes]:
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line
