"""Workers' reports on a round of the exchange: received updates, their weights, and costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, FiniteFloat

from planaria.control.facts.run_started import Fact

Full = Literal["beginning", "rebuilt", "replicas"]
"""why estimates are initialised: start of the run; a rebuilt node of the stage; another number of replicas"""


class UpdateReceived(Fact):
    """A worker has received all of another replica's update for its stage in this round."""

    kind: Literal["update_received"] = "update_received"
    worker: str
    node: int
    generation: int
    round: int
    replica: int
    """the sender; the worker's own for the update it sends"""
    digest: str = ""
    """digest of the update, if members compare them (``exchange/robust/equivocation.py``)"""
    products: dict[int, FiniteFloat] = Field(default_factory=dict)
    """inner products of the update with earlier ones at this node, its own and itself, by replica; if updates are
    weighted over all stages (``exchange/robust/weighing.py``)"""


class UpdateRejected(Fact):
    """Another replica's update for a worker's stage is invalid: it counts as missing.

    Replicas that exchange gradients have a round in every step and may also reject their own.
    """

    kind: Literal["update_rejected"] = "update_rejected"
    worker: str
    node: int
    stage: int = -1
    """-1 in logs of older versions"""
    generation: int
    round: int
    replica: int
    """the sender"""
    reason: str


class RoundReport(Fact):
    """Base of reports on a round at a node."""

    kind: str
    worker: str
    node: int
    stage: int
    generation: int
    round: int


class UpdatesWeighted(RoundReport):
    """The weight of each replica's update in a stage's result of this round.

    One node reports for all nodes of its stage, which received the same unless a member equivocated. Stage 0 reports if
    updates are weighted over all stages.
    """

    kind: Literal["updates_weighted"] = "updates_weighted"
    counted: dict[int, float]
    """replica → its coefficient, with three digits (:func:`rounded`); without rejected updates"""
    rivals: dict[str, dict[int, float]] = Field(default_factory=dict)
    """another rule → its coefficients for updates with small weights, at most as many as may be Byzantine"""


class MessageCompressed(RoundReport):
    """Effect of compression on a node's message to the others of its stage in this round.

    One node reports for all nodes of its stage when the step commits or the round is settled. Norms have three digits.
    """

    kind: Literal["message_compressed"] = "message_compressed"
    sent_bytes: int
    """bytes sent to each other node"""
    dense_bytes: int
    """bytes of the same numbers in fp32"""
    norm: float
    """norm of the exact vector"""
    relative_error: float
    """‖C(v) − v‖²/‖v‖² for the encoded vector v: 1 − δ"""
    residual: float | None = None
    """norm of the residual afterwards, with feedback that keeps one"""
    estimate_error: float | None = None
    """distance of the exact vector from its estimate afterwards, with feedback by estimates"""
    full: Full | None = None
    """why the message was sent uncompressed, or None if it was compressed"""


class RoundApplied(RoundReport):
    """A worker has settled a round: its stage continues with the result."""

    kind: Literal["round_applied"] = "round_applied"
    blocking_bytes: int
    """sent by this worker after its inner steps, while others wait"""
    prefetched_bytes: int
    """sent by it during inner steps; logs of older versions count updates of an exchange with an overlap as blocking"""
    spread: float
    """RMS distance of the members' received fast weights from their mean, with n − 1 in the denominator; 0 if updates
    do not determine it"""


def rounded(coefficients: Mapping[int, float]) -> dict[int, float]:
    """Return coefficients with three digits, to keep log lines short."""
    return {replica: three_digits(coefficient) for replica, coefficient in coefficients.items()}


def three_digits(value: float) -> float:
    return float(f"{value:.3g}")
