"""How faults of a trace that strike a worker's edges and offers are brought about."""

from __future__ import annotations

import math
from collections.abc import Callable

from planaria.engine.exchange_round import RoundMember
from planaria.engine.links import Links
from planaria.record.decisions import Blow

_HOLD_S = 0.1
"""unless a fault says otherwise: how long each frame is held up"""


def afflictions(links: Links, circle: RoundMember) -> dict[str, Callable[[Blow], None]]:
    """By the kind of fault (``chaos.trace.Fault``)."""

    def cut(blow: Blow) -> None:
        links.port.shut(blow.seconds or math.inf)
        links.reset(everywhere=True)

    def delay(blow: Blow) -> None:
        links.delay(_HOLD_S if blow.strength is None else blow.strength, blow.seconds or math.inf)

    return {
        "reset": lambda blow: links.reset(everywhere=False),
        "cut": cut,
        "delay": delay,
        "lie": lambda blow: circle.lie(),
    }
