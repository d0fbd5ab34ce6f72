"""What workers tell of a round of the exchange: which offers they heard, how each counted, and what it cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, FiniteFloat

from planaria.control.started import Fact

Full = Literal["beginning", "rebuilt", "replicas"]
"""why estimates begin: the run does; a node of the stage was rebuilt; there is another number of replicas"""


class OfferHeard(Fact):
    """A worker has all that another replica has to say about its stage in this round."""

    kind: Literal["offer_heard"] = "offer_heard"
    worker: str
    node: int
    generation: int
    round: int
    replica: int
    """the other one; the worker's own, of what it says itself"""
    digest: str = ""
    """of the offer, where members tell what they hear (``exchange/equivocation.py``)"""
    products: dict[int, FiniteFloat] = Field(default_factory=dict)
    """its inner products with what the node has heard of others before, and said itself, and with itself, by replica:
    where offers are judged over all stages (``exchange/weighing.py``)"""


class OfferRefused(Fact):
    """What another replica says about a worker's stage in this round is of no use: it counts as not said.

    Replicas that exchange gradients have a round in every step, and refuse their own as they refuse others'.
    """

    kind: Literal["offer_refused"] = "offer_refused"
    worker: str
    node: int
    stage: int = -1
    """-1 in logs of an older planaria"""
    generation: int
    round: int
    replica: int
    """whose offer it was"""
    reason: str


class OffersCounted(Fact):
    """How much each replica's offer counted in what a stage made of all in this round.

    One node tells it for all nodes of its stage: they have heard the same, unless somebody told each of them something
    else.
    """

    kind: Literal["offers_counted"] = "offers_counted"
    worker: str
    node: int
    stage: int
    """0 where offers are judged over all stages: it counted as much at the others"""
    generation: int
    round: int
    counted: dict[int, float]
    """replica → its coefficient, with three digits (:func:`rounded`); those whose offers were refused have none"""
    rivals: dict[str, dict[int, float]] = Field(default_factory=dict)
    """another rule → what it would have counted of those that counted little, as many as may lie at most"""


class MessageCompressed(Fact):
    """What a node said to the others of its stage in this round was made shorter, and how much that took of it.

    One node tells it for all nodes of its stage, once the step commits, or the round is settled. Norms have three
    digits.
    """

    kind: Literal["message_compressed"] = "message_compressed"
    worker: str
    node: int
    stage: int
    generation: int
    round: int
    sent_bytes: int
    """to each of the others"""
    dense_bytes: int
    """of the same numbers in fp32"""
    norm: float
    """of the exact vector"""
    lost: float
    """‖C(v) − v‖²/‖v‖² for the vector v that the message was to carry: 1 − δ"""
    owed: float | None = None
    """norm of what is owed afterwards, with feedback that owes"""
    off: float | None = None
    """distance of the exact vector from its estimate afterwards, with feedback by estimates"""
    full: Full | None = None
    """why the message was sent as it is; None: it was not"""


class RoundMade(Fact):
    """A worker has settled a round: its stage goes on with what came of it."""

    kind: Literal["round_made"] = "round_made"
    worker: str
    node: int
    stage: int
    generation: int
    round: int
    blocking_bytes: int
    """sent by this worker, that somebody waited for"""
    prefetched_bytes: int
    apart: float
    """RMS distance of the members' fast weights, as far as heard, from their mean; corrected for how few they are"""


def rounded(coefficients: Mapping[int, float]) -> dict[int, float]:
    """To three digits, so that a line of the log stays short."""
    return {replica: three_digits(value) for replica, value in coefficients.items()}


def three_digits(value: float) -> float:
    return float(f"{value:.3g}")
