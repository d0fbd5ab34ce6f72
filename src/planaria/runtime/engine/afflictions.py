"""How faults of a trace that strike a worker's edges and offers are brought about."""

from __future__ import annotations

import math
from collections.abc import Callable

from planaria.control.decisions import Blow
from planaria.runtime.engine.liar import Liar, lie_of
from planaria.runtime.engine.links import Links

_HOLD_S = 0.1
"""unless a fault says otherwise: how long each frame is held up"""


def afflictions(links: Links, liar: Liar, seed: int) -> dict[str, Callable[[Blow], None]]:
    """By the kind of fault (``chaos.trace.Fault``); ``seed`` is the run's."""

    def cut(blow: Blow) -> None:
        links.port.shut(blow.seconds or math.inf)
        links.reset(everywhere=True)

    def delay(blow: Blow) -> None:
        links.delay(_HOLD_S if blow.strength is None else blow.strength, blow.seconds or math.inf, blow.peer)

    return {
        "reset": lambda blow: links.reset(everywhere=False, peer=blow.peer),
        "cut": cut,
        "delay": delay,
        "lie": lambda blow: liar.begin(lie_of(blow.attack, blow.strength, blow.until, seed, blow.number)),
    }
