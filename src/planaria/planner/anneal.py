"""Simulated annealing over arrangement and routes: the inner loop of the search.

A move changes the routes of a few microbatches or exchanges two nodes of different stages. Every move keeps the use of
each stage (CC2), the order of a route (CC3) and the nodes' roles.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planaria.common.compiled import compile_function
from planaria.planner.makespan import NEVER, makespan
from planaria.planner.tables import CostTables, Ints, gradient_sum_times

Floats = NDArray[np.float64]
RANDOMS = 10
"""random numbers of a move; each has one purpose, by index:"""
KIND, FIRST, SECOND, POSITION, OTHER, TAKE, GIVE, SORTED, ACCEPT, FOCUS = range(RANDOMS)
NODE, STAGE, ORDER, ROUTE, ARRANGEMENT = range(5)
"""kinds of move: another node of the same stage; two microbatches exchange a stage; two neighbours on a route change
order; two microbatches exchange routes; two nodes exchange stages"""
UNTIL = np.array([0.3, 0.6, 0.7, 0.9, 1.0])
"""cumulative probabilities of the kinds"""
SPREAD = 0.3
"""weight of the mean finish over data nodes; the step time has weight 1. The mean has a slope where the step time is
flat, since most moves do not affect the data node that finishes last"""
CRITICAL = 0.5
"""share of moves that change a microbatch of the data node that finishes last"""
FLOW = 0.02
"""weight of the mean finish over microbatches"""


@compile_function
def anneal(
    tables: CostTables,
    origin: Ints,
    path: Ints,
    stage: Ints,
    random: Floats,
    temperature: Floats,
    best_origin: Ints,
    best_path: Ints,
    best_stage: Ints,
    best: int,
    positions: bool,
) -> int:
    """Try one move for each temperature (nanoseconds), with the ``random`` numbers [moves, RANDOMS].

    Change ``origin`` [count], ``path`` [count, visits] and ``stage`` [nodes] in place. Copy them to the ``best_``
    arrays whenever the simulated step takes less than ``best``. Return the least time. Without ``positions``, keep the
    arrangement.
    """
    count, nodes = path.shape[0], stage.shape[0]
    members = members_of(stage, tables.sizes)
    done = np.zeros(count, np.int64)
    last = np.zeros(nodes, np.int64)
    over = np.zeros(nodes, np.int64)
    now, _ = _objective(tables, origin, path, stage, done, last, over)
    worst = int(np.argmax(last))
    new_origin, new_path = origin.copy(), path.copy()
    new_stage = stage.copy()
    for move in range(temperature.shape[0]):
        r = random[move]
        kind = NODE
        while r[KIND] >= UNTIL[kind]:
            kind += 1
        i, j = int(r[FIRST] * count), int(r[SECOND] * count)
        if r[FOCUS] < CRITICAL:
            i = _pick_microbatch_of(origin, worst, r[FIRST])
        if kind == ARRANGEMENT and not positions:
            continue
        if kind == ARRANGEMENT:
            if not _exchange_nodes(tables, r, i, worst, stage, path, new_origin, new_path, new_stage):
                continue
        elif not _reroute(tables, kind, r, i, j, stage, members, path, new_path):
            continue
        cost, time = _objective(tables, new_origin, new_path, new_stage, done, last, over)
        if cost <= now or r[ACCEPT] < np.exp((now - cost) / temperature[move]):
            now, worst = cost, int(np.argmax(last))
            if kind == ARRANGEMENT:
                stage[:], origin[:], path[:] = new_stage, new_origin, new_path
                members = members_of(stage, tables.sizes)
            else:
                path[i], path[j] = new_path[i], new_path[j]
            if time < best:
                best = time
                best_origin[:], best_path[:], best_stage[:] = origin, path, stage
        elif kind == ARRANGEMENT:
            new_stage[:], new_origin[:], new_path[:] = stage, origin, path
        else:
            new_path[i], new_path[j] = path[i], path[j]
    return best


@compile_function
def _exchange_nodes(
    tables: CostTables,
    r: Floats,
    i: int,
    worst: int,
    stage: Ints,
    path: Ints,
    new_origin: Ints,
    new_path: Ints,
    new_stage: Ints,
) -> bool:
    """Exchange two nodes of different stages in the ``new_`` arrays; return whether their roles allow it."""
    nodes, visits = stage.shape[0], path.shape[1]
    x, y = int(r[FIRST] * nodes), int(r[SECOND] * nodes)
    if r[FOCUS] < CRITICAL:
        visit = int(r[POSITION] * (visits + 1))
        x = path[i, visit - 1] if visit else worst
    s, z = stage[x], stage[y]
    if s == z or not _may_hold(tables.role[x], z) or not _may_hold(tables.role[y], s):
        return False
    new_stage[x], new_stage[y] = z, s
    _swap_positions(new_origin, new_path, x, y)
    return True


@compile_function
def _pick_microbatch_of(origin: Ints, worst: int, random: float) -> int:
    """Return a random microbatch of the data node ``worst``, or any microbatch if nothing takes time."""
    own = np.flatnonzero(origin == worst)
    return int(own[int(random * len(own))]) if len(own) else int(random * len(origin))


@compile_function
def _objective(
    tables: CostTables, origin: Ints, path: Ints, stage: Ints, done: Ints, last: Ints, over: Ints
) -> tuple[float, int]:
    """Return the objective and the step, nanoseconds; fill ``last`` [nodes] with the finish of each data node."""
    if makespan(tables, origin, path, done, over) == NEVER:
        return float(NEVER), NEVER
    step, sums = gradient_sum_times(tables, stage, over)
    last[:] = 0
    for i in range(done.shape[0]):
        last[origin[i]] = max(last[origin[i]], done[i])
    origins = max(1, (last > 0).sum())
    slope = SPREAD * last.sum() / origins + FLOW * done.sum() / done.shape[0] + SPREAD * sums
    return float(step + slope), step


@compile_function
def members_of(stage: Ints, sizes: Ints) -> Ints:
    """Return [stages, largest size]: the nodes of each stage."""
    members = np.zeros((sizes.shape[0], sizes.max()), np.int64)
    filled = np.zeros(sizes.shape[0], np.int64)
    for n in range(stage.shape[0]):
        members[stage[n], filled[stage[n]]] = n
        filled[stage[n]] += 1
    return members


@compile_function
def _may_hold(role: int, stage: int) -> bool:
    """Return whether a node of this role (an index into ``ROLES``) may hold this stage."""
    return role == 0 or (role == 1) == (stage == 0)


@compile_function
def _swap_positions(origin: Ints, path: Ints, x: int, y: int) -> None:
    for i in range(path.shape[0]):
        if origin[i] == x:
            origin[i] = y
        elif origin[i] == y:
            origin[i] = x
        for k in range(path.shape[1]):
            if path[i, k] == x:
                path[i, k] = y
            elif path[i, k] == y:
                path[i, k] = x


@compile_function
def _reroute(
    tables: CostTables, kind: int, r: Floats, i: int, j: int, stage: Ints, members: Ints, path: Ints, new: Ints
) -> bool:
    """Change one or two microbatches in ``new``; return False, changing nothing, if the move is idle or forbidden."""
    visits = path.shape[1]
    if kind == NODE:
        k = int(r[POSITION] * visits)
        s = stage[path[i, k]]
        x = members[s, int(r[OTHER] * tables.sizes[s])]
        new[i, k] = x
        return bool(x != path[i, k])
    if kind == ORDER:
        if visits < 2:
            return False
        k = int(r[POSITION] * (visits - 1))
        new[i, k], new[i, k + 1] = path[i, k + 1], path[i, k]
        if obeys_cc3(stage, new[i], tables.swaps, tables.jump):
            return True
        new[i] = path[i]
        return False
    if i == j:
        return False
    if kind == ROUTE:
        new[i], new[j] = path[j], path[i]
        return True
    a, b = int(r[POSITION] * visits), int(r[OTHER] * visits)
    s, z = stage[path[i, a]], stage[path[j, b]]
    if s != z and (_visits(stage, path[i], z) or _visits(stage, path[j], s)):
        return False
    new[i, a] = path[j, b] if r[TAKE] < 0.5 else members[z, int((2 * r[TAKE] - 1) * tables.sizes[z])]
    new[j, b] = path[i, a] if r[GIVE] < 0.5 else members[s, int((2 * r[GIVE] - 1) * tables.sizes[s])]
    if r[SORTED] < 0.8:  # most good routes are in natural order
        _sort(stage, new[i])
        _sort(stage, new[j])
    if obeys_cc3(stage, new[i], tables.swaps, tables.jump) and obeys_cc3(stage, new[j], tables.swaps, tables.jump):
        return True
    new[i], new[j] = path[i], path[j]
    return False


@compile_function
def _visits(stage: Ints, walk: Ints, s: int) -> bool:
    return bool((stage[walk] == s).any())


@compile_function
def _sort(stage: Ints, walk: Ints) -> None:
    for a in range(1, walk.shape[0]):
        b = a
        while b > 0 and stage[walk[b - 1]] > stage[walk[b]]:
            walk[b - 1], walk[b] = walk[b], walk[b - 1]
            b -= 1


@compile_function
def obeys_cc3(stage: Ints, walk: Ints, swaps: int, jump: int) -> bool:
    """Return whether a walk obeys CC3; the compiled form of ``routing.skipping.cc3_violation``."""
    furthest = back = 0
    for k in range(walk.shape[0]):
        s = stage[walk[k]]
        if s > furthest:
            if s - furthest > jump:
                return False
            furthest = s
        elif s == furthest - 1:
            back += 1
            for q in range(k):
                if stage[walk[q]] == s:
                    return False
        else:
            return False
    return back <= swaps
