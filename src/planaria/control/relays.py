"""Which edge of a replica goes over which relay. Pure.

Every relay joins every two workers, so it is a path of one link; an edge's size is how often microbatches cross it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from planaria.pipeline.network.multipath import Path, Ways
from planaria.pipeline.routing.arrangement import Pair
from planaria.planner.paths import Flow, plan, shifted
from planaria.record.replica import ReplicaState

_ENDS = ("one end", "the other")


def over_relays(
    replica: ReplicaState,
    pairs: Collection[Pair],
    kept: Collection[Pair],
    routes: Sequence[Sequence[int]],
    silent: Collection[str] = (),
) -> dict[Pair, str]:
    """Return the relay of each of ``pairs``; those in ``kept`` stay where they are. Empty if the run has no relays.

    A relay that is ``silent`` or shunned is avoided as long as there is another.
    """
    relays = replica.settings.relays
    if not relays:
        return {}
    avoided = next((a for a in (replica.shunned | {*silent}, frozenset(silent)) if not a >= relays.keys()), frozenset())
    ways, flows = relay_ways(relays, avoided), edge_flows(pairs, routes)
    paths = {path.id: path for path in ways.paths[_ENDS]}
    before = [paths.get(replica.over.get(pair, "")) if pair in kept else None for pair in flows]
    sizes = list(flows.values())
    chosen = shifted(sizes, ways, before, ()) if any(before) else plan(sizes, ways)
    return {pair: path.id for pair, path in zip(flows, chosen, strict=True)}


def relay_ways(relays: Mapping[str, float], shunned: Collection[str] = ()) -> Ways:
    """The paths over relays that carry so many bytes per second; those that are ``shunned`` carry none."""
    paths = tuple(Path(name, *_ENDS, (name,)) for name in relays)
    return Ways({_ENDS: paths}, {name: 0.0 if name in shunned else rate for name, rate in relays.items()})


def edge_flows(pairs: Collection[Pair], routes: Sequence[Sequence[int]], size: int = 1) -> dict[Pair, Flow]:
    """Edge → what it carries, ``size`` for every time that a microbatch crosses it; in order of the edges.

    One on no route carries copies of a state now and then, and counts as if it were crossed once.
    """
    crossings = Counter((min(hop), max(hop)) for route in routes for hop in pairwise(route))
    return {pair: Flow(*_ENDS, size * max(1, crossings[pair])) for pair in sorted(pairs)}
