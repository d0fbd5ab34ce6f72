"""Relays of edges between workers that cannot connect: which relay forwards which edge. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from planaria.control.state.replica import ReplicaState
from planaria.pipeline.network.multipath import Path, PathNetwork
from planaria.pipeline.routing.arrangement import Pair
from planaria.planner.paths import SiteFlow, plan_paths, replan_paths

_EDGE_ENDS = ("one end", "the other")


def assign_relays(
    replica: ReplicaState,
    pairs: Collection[Pair],
    kept: Collection[Pair],
    routes: Sequence[Sequence[int]],
    silent: Collection[str] = (),
) -> dict[Pair, str]:
    """Return the relay of each of ``pairs``; those in ``kept`` keep theirs. The result is empty if the
    run has no relays.

    A ``silent`` or avoided relay is left out while there is another.
    """
    relays = replica.started.relays
    if not relays:
        return {}
    avoided = next(
        (a for a in (replica.avoided_relays | {*silent}, frozenset(silent)) if not a >= relays.keys()), frozenset()
    )
    network, flows = relay_paths(relays, avoided), edge_flows(pairs, routes)
    paths = {path.id: path for path in network.paths[_EDGE_ENDS]}
    before = [paths.get(replica.relay_of_edge.get(pair, "")) if pair in kept else None for pair in flows]
    sizes = list(flows.values())
    chosen = replan_paths(sizes, network, before, ()) if any(before) else plan_paths(sizes, network)
    return {pair: path.id for pair, path in zip(flows, chosen, strict=True)}


def relay_paths(relays: Mapping[str, float], avoided: Collection[str] = ()) -> PathNetwork:
    """Return the paths over relays with their bytes per second; none over ``avoided`` ones."""
    paths = tuple(Path(name, *_EDGE_ENDS, (name,)) for name in relays)
    return PathNetwork({_EDGE_ENDS: paths}, {name: 0.0 if name in avoided else rate for name, rate in relays.items()})


def edge_flows(pairs: Collection[Pair], routes: Sequence[Sequence[int]], size: int = 1) -> dict[Pair, SiteFlow]:
    """Return edge → flow, in order of edges: ``size`` for each crossing of a microbatch.

    An edge on no route transfers copies of states occasionally, and counts as one crossing.
    """
    crossings = Counter((min(hop), max(hop)) for route in routes for hop in pairwise(route))
    return {pair: SiteFlow(*_EDGE_ENDS, size * max(1, crossings[pair])) for pair in sorted(pairs)}
