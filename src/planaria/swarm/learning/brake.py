"""The brake: agreement can drift from truth and look the same, so where some labels are known they say when to stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Looked:
    """One evaluation: held-out accuracy after so many rounds."""

    round: int
    accuracy: float


def best(looks: Sequence[Looked]) -> Looked:
    """The first of the highest."""
    return max(looks, key=lambda look: look.accuracy)


def fallen(looks: Sequence[Looked], most: float) -> str:
    """Why to stop after the last of some evaluations, in a clause; empty if its accuracy lies at most ``most`` below
    the best, or ``most`` is 0."""
    if not looks or not most or best(looks).accuracy - looks[-1].accuracy <= most:
        return ""
    high, now = best(looks), looks[-1]
    return (
        f"held-out accuracy fell from {high.accuracy:.3f} after round {high.round} to {now.accuracy:.3f} after round "
        f"{now.round}, by more than task.brake = {most:g}"
    )
