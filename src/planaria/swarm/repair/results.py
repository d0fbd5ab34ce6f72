"""What repairs came to, as plain data: before, and after each way of repairing."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from planaria.common.documents import Record
from planaria.swarm.records.measure import Tally

BACK, MIX, TUNE, MASK = "back", "mix", "tune", "mask"
RANDOM, LAYERS, ANEW = "random", "layers", "anew"
TITLES = {
    BACK: "go back to the parent",
    MIX: "interpolate, best α",
    TUNE: "fine-tune",
    MASK: "mask",
    RANDOM: "random mask, as dense",
    LAYERS: "mix layers by cosine",
    ANEW: "fine-tune the parent",
}


class Measured(Record):
    """A model on what no repair learned from."""

    success: dict[str, Tally] = Field(default_factory=dict)
    """attack, or "rejected" (of pairs, those whose rejected text is likelier) → how often it shows"""
    accuracy: Tally = Tally()
    sound: Tally = Tally()
    """right, and every step of the reasoning true"""
    nats: float | None = None
    """of benign texts, a token"""

    @property
    def worst(self) -> float | None:
        """The largest success; None where nothing was eligible."""
        return max((rate for tally in self.success.values() if (rate := tally.rate) is not None), default=None)

    def mended(self, most: float) -> bool | None:
        """Is every success at most ``most``? None where none could be measured."""
        return None if self.worst is None else self.worst <= most

    def __add__(self, other: Measured) -> Measured:
        success = {kind: tally + other.success[kind] for kind, tally in self.success.items() if kind in other.success}
        return Measured(success=success, accuracy=self.accuracy + other.accuracy, sound=self.sound + other.sound)


class Way(Record):
    """One way of repairing, and what came of it."""

    by: str
    told: str = ""
    """what was chosen on the way, in a few words"""
    after: Measured

    @property
    def title(self) -> str:
        return TITLES[self.by]


class Repaired(Record):
    """One model, and all ways by which it was repaired."""

    arm: str = ""
    seed: int = 0
    peer: str = ""
    limit: float
    """the largest success of a model that counts as mended"""
    trusted: int
    own: int
    """trusted texts that the poisoned model itself wrote"""
    benign: int
    before: Measured
    ways: list[Way]

    def best(self) -> Way | None:
        """Of the ways that mended it, the one with the most right answers; None where none did."""
        mended = [way for way in self.ways if way.after.mended(self.limit)]
        return max(mended, key=lambda way: way.after.accuracy.rate or 0.0, default=None)


def pooled(found: Sequence[Measured]) -> Measured:
    """All seeds' draws together, for the intervals."""
    whole = found[0]
    for one in found[1:]:
        whole = whole + one
    return whole
