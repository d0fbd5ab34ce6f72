"""Why a step takes so long, as prices: what a second of a slot, and of a node, is worth. Pure.

Let every second of a slot and of a node's time have a price, and every visit one. A microbatch pays at least what the
cheapest way from its origin costs, even alone in the network. All of them together cannot pay for more than there is.
So the step lasts until enough is there, whatever the routes, the arrangement and the order of work: weak duality, of
the linear programme that ``relaxed`` solves. The prices need not be the best ones for that.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planaria.planner.problem import BLOCK, ENTRY, Problem
from planaria.planner.tables import Ints
from planaria.planner.ways import Ways

Floats = NDArray[np.float64]


class Prices(NamedTuple):
    """Each [kinds] and not negative."""

    origin: Floats
    """of a second of a slot at a data node"""
    slot: Floats
    """of a second of a slot at a worker"""
    work: Floats
    """of a second of a worker's time"""
    visit: Floats
    """of a visit to a worker"""


class Room(NamedTuple):
    """What there is, if ``data`` of each kind are data nodes; each [kinds], seconds, all nodes of a kind together."""

    data: Ints
    workers: Ints
    origin: Floats
    """by how much less than slots · step there is at data nodes"""
    slot: Floats
    """by how much less than slots · step there is at workers"""
    work: Floats
    """by how much less than the step there is of workers' time"""
    visit: Floats
    """visits that workers can have at most: a stage's share"""


def room(problem: Problem, ways: Ways, data: Ints, least_s: float) -> Room:
    """What there is in a step that cannot take less than ``least_s``.

    A node does one thing at a time: its k-th slot is first taken when k - 1 forwards have been made, and last freed
    k - 1 backwards before the end. Before the first of these lies the shortest way to it, after the last the way back.
    """
    first, size = ways.kinds.first, ways.kinds.size
    passes = {"forward": problem.forward[:, first] / 1e9, "backward": problem.backward[:, first] / 1e9}
    there = _reach(problem, ways, data, passes["forward"], back=False)
    home = _reach(problem, ways, data, passes["backward"], back=True)
    lead = np.minimum(there + home, least_s)
    workers, slots = size - data, problem.slots[first]

    def ramp(row: int, most: Ints, lead: Floats) -> Floats:
        each = passes["forward"][row] + passes["backward"][row]
        return np.array(
            [
                sum(min(before + k * turn, least_s) for k in range(have))
                for before, turn, have in zip(lead.tolist(), each.tolist(), most.tolist(), strict=True)
            ]
        )

    return Room(
        data=data,
        workers=workers,
        origin=data * ramp(ENTRY, np.minimum(slots, problem.microbatches), np.zeros(len(size))),
        slot=workers * ramp(BLOCK, slots, lead),
        work=workers * lead,
        visit=workers * -(-problem.count * problem.visits // (len(problem.sizes) - 1)),
    )


def _reach(problem: Problem, ways: Ways, data: Ints, passes: Floats, back: bool) -> Floats:
    """[kinds]: how soon the first microbatch can be at a worker of each kind; ``back``, how soon its gradients home."""
    sites = problem.site[ways.kinds.first]
    link = problem.link[np.ix_(sites, sites)] / 1e9
    link = link.T if back else link
    alone = (ways.kinds.size < 2) & np.eye(len(data), dtype=bool)  # a node sends nothing to itself
    link = np.where(alone, np.inf, link)
    soon: Floats = np.where((data > 0)[:, None], passes[ENTRY][:, None] + link, np.inf).min(axis=0)
    for _ in range(problem.visits - 1):
        soon = np.minimum(soon, ((soon + passes[BLOCK])[:, None] + link).min(axis=0))
    return soon


def cost(problem: Problem, ways: Ways, prices: Prices) -> Floats:
    """[kinds, ways]: what a microbatch of each origin pays on each way."""
    work = (problem.forward + problem.backward)[BLOCK, ways.kinds.first] / 1e9
    slots = (ways.holds * prices.slot[ways.visits]).sum(axis=2)
    return (prices.origin[:, None] * ways.length + slots) / 1e9 + ways.uses @ (prices.work * work + prices.visit)


def least_s(problem: Problem, ways: Ways, there_is: Room, prices: Prices) -> float:
    """No step is shorter, if these are the data nodes; seconds. 0 if the prices say nothing.

    step · Σ prices · capacity per second ≥ Σ over microbatches of the cheapest way + Σ prices · what is missing.
    """
    possible = (ways.uses <= there_is.workers).all(axis=1)
    slots = problem.slots[ways.kinds.first]
    # An origin has no more microbatches on their way than it has at all.
    held = np.minimum(slots, problem.microbatches)
    worth = (there_is.data * held * prices.origin + there_is.workers * (slots * prices.slot + prices.work)).sum()
    if not possible.any() or worth <= 0:
        return 0.0
    lets_in = there_is.data > 0
    pays = cost(problem, ways, prices)[np.ix_(lets_in, possible)].min(axis=1)
    paid = problem.microbatches * (pays @ there_is.data[lets_in])
    missing = prices.origin @ there_is.origin + prices.slot @ there_is.slot + prices.work @ there_is.work
    return float((paid + missing - prices.visit @ there_is.visit) / worth)
