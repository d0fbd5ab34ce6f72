"""Why a step takes so long, as prices: what a second of a slot, and of a node, is worth. Pure.

Let every second of a slot and of a node's time have a price, and every visit one. A microbatch pays at least what the
cheapest way from its origin costs, even alone in the network. All of them together cannot pay for more than there is.
So the step lasts until enough is there, whatever the routes, the arrangement and the order of work: weak duality, of
the linear programme that ``relaxed`` solves. The prices need not be the best ones for that.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planaria.planner.limits import Elsewhere, Floats, Side, elsewhere, filled, sides, too_long
from planaria.planner.problem import BLOCK, ENTRY, Problem
from planaria.planner.tables import Ints
from planaria.planner.ways import Bools, Ways


class Prices(NamedTuple):
    """Not negative; [kinds] unless said."""

    origin: Floats
    """of a second of a slot at a data node"""
    slot: Floats
    """of a second of a slot at a worker"""
    work: Floats
    """of a second of a worker's time"""
    visit: Floats
    """of a visit to a worker"""
    long: Floats
    """[kinds, microbatches]: of a long way, by how many of a data node's microbatches may be as long"""
    away: Floats
    """[sets]: what a visit outside of each set of ``elsewhere`` is worth"""


class Room(NamedTuple):
    """What there is, if ``data`` nodes of each kind are data nodes; each [kinds], of all nodes of a kind together."""

    data: Ints
    workers: Ints
    held: Ints
    """slots of data nodes that are ever taken"""
    slots: Ints
    """of workers"""
    origin: Floats
    """by how many slot seconds less than ``held`` · step there is at data nodes"""
    work: Floats
    """by how many seconds less than workers · step there is of workers' time"""
    visits: Ints
    """that workers can have at most: a stage's share"""
    sides: tuple[Side, Side]
    """the step's beginning and its end, when slots of workers cannot all be taken"""
    elsewhere: Elsewhere
    too_long: Ints
    """[kinds, microbatches]: from which length on at most 0, 1, 2 and so on of a data node's microbatches go a way"""
    possible: Bools
    """[kinds, ways]: ways that a microbatch may take from each origin"""


def room(problem: Problem, ways: Ways, data: Ints, least: float, most: float = np.inf) -> Room:
    """What there is in a step of ``least`` seconds or more, and less than ``most``.

    A node does one thing at a time: its k-th slot is first taken when k - 1 forwards have been made, and last freed
    k - 1 backwards before the end.
    """
    first, size = ways.kinds.first, ways.kinds.size
    both, workers = sides(problem, ways, data, least), size - data
    held = np.minimum(problem.slots[first], problem.microbatches + (problem.more > 0))
    turn = (problem.forward + problem.backward)[ENTRY, first] / 1e9
    free: Bools = np.asarray((ways.uses <= workers).all(axis=1))
    limits = too_long(problem, ways, free, data, most)
    ramp = [sum(min(k * each, least) for k in range(have)) for each, have in zip(turn, held.tolist(), strict=True)]
    return Room(
        data=data,
        workers=workers,
        held=data * held,
        slots=workers * problem.slots[first],
        origin=data * np.array(ramp),
        work=workers * (both[0].reach + both[1].reach),
        visits=workers * -(-problem.count * problem.visits // (len(problem.sizes) - 1)),
        sides=both,
        elsewhere=elsewhere(problem, ways, workers),
        too_long=limits,
        possible=free & (ways.length < limits[:, :1]),
    )


def cost(problem: Problem, ways: Ways, there_is: Room, prices: Prices) -> Floats:
    """[kinds with data nodes, ways]: what a microbatch pays, less what it gets for visits elsewhere; ∞ where it may not
    go."""
    origins = np.flatnonzero(there_is.data)
    work = (problem.forward + problem.backward)[BLOCK, ways.kinds.first] / 1e9
    slots = (ways.holds[origins] * prices.slot[ways.visits]).sum(axis=2)
    paid = (prices.origin[origins, None] * ways.length[origins] + slots) / 1e9
    paid += ways.uses @ (prices.work * work + prices.visit) - prices.away @ there_is.elsewhere.counts
    for k in range(1, problem.microbatches):
        paid += prices.long[origins, k, None] * (ways.length[origins] >= there_is.too_long[origins, k, None])
    return np.where(there_is.possible[origins], paid, np.inf)


def least_s(problem: Problem, ways: Ways, there_is: Room, prices: Prices) -> float:
    """No step of which ``there_is`` so much is shorter; seconds. 0 if the prices say nothing.

    step · Σ prices · capacity per second ≥ Σ over microbatches of the cheapest way + Σ prices · what is missing
    - Σ prices · visits that workers and long ways that data nodes can have + Σ prices · visits that must be elsewhere.
    """
    origins = np.flatnonzero(there_is.data)
    if not there_is.possible[origins].any(axis=1).all():
        return float("inf")
    worth = float(prices.origin @ there_is.held + prices.slot @ there_is.slots + prices.work @ there_is.workers)
    if worth <= 0:
        return 0.0
    pays = cost(problem, ways, there_is, prices).min(axis=1)
    paid = problem.microbatches * float(pays @ there_is.data[origins]) - float(prices.visit @ there_is.visits)
    paid += float(prices.away @ there_is.elsewhere.needed)
    paid -= float(there_is.data @ prices.long @ np.arange(problem.microbatches))
    missing = float(prices.origin @ there_is.origin + prices.work @ there_is.work)
    missing += sum(filled(side, prices.slot, there_is.workers, there_is.data) for side in there_is.sides)
    return (paid + missing) / worth
