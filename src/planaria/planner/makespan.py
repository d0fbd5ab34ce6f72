"""The time of a step: ``pipeline.plan.build.simulate_first_come`` compiled over arrays, for searches.

It simulates the same events to the nanosecond; ``tests/planner`` compares the two. A microbatch
waits at a node, is processed there, or travels.
"""

from __future__ import annotations

import numpy as np

from planaria.common.compiled import compile_function
from planaria.planner.tables import CostTables, Ints

NEVER = 1 << 62
"""the time of a step that deadlocks"""

_URGENT, _PATIENT = range(2)
"""the two queues of a node: backwards and losses; forwards, which need a slot"""


@compile_function
def makespan(tables: CostTables, origin: Ints, path: Ints, done: Ints, over: Ints) -> int:
    """Return the nanoseconds of all passes if microbatch ``i`` goes ``origin[i]`` → ``path[i, 0]`` → … → ``origin[i]``.

    Fill ``done`` [count] with each microbatch's finish, and ``over`` [nodes] with the end of each node's last pass.
    Return ``NEVER`` if memory deadlocks.
    """
    # One long function over plain arrays: five times as fast as smaller functions that share a state object.
    count, nodes, last = origin.shape[0], tables.slots.shape[0], path.shape[1] + 1
    begins = _queue_starts(origin, path, nodes)
    queue, since = np.empty((2, begins[nodes]), np.int64), np.empty((2, begins[nodes]), np.int64)
    heads, tails = np.zeros((2, nodes), np.int64), np.zeros((2, nodes), np.int64)
    phase, runs = np.zeros(count, np.int64), np.zeros(count, np.bool_)
    times, whose, pending = np.empty(count + 1, np.int64), np.empty(count + 1, np.int64), 0
    free, idle = tables.slots.copy(), np.ones(nodes, np.bool_)
    shared = nodes if tables.transmit.any() else 0
    taken = np.zeros((shared, shared), np.int64)
    woken, wake = np.empty(2 * count, np.int64), count
    woken[:count] = origin
    now, left = 0, count
    over[:] = 0
    for i in range(count):
        tails[_PATIENT, origin[i]] += _enqueue(queue, since, heads, tails, begins, _PATIENT, origin[i], i, 0)
    while True:
        for n in woken[:wake]:  # idle nodes take their next work
            if not idle[n]:
                continue
            line = _URGENT if heads[_URGENT, n] < tails[_URGENT, n] else _PATIENT
            if heads[line, n] == tails[line, n] or (line == _PATIENT and not free[n]):
                continue
            i = queue[line, begins[n] + heads[line, n]]
            heads[line, n] += 1
            free[n] -= line == _PATIENT
            idle[n], runs[i] = False, True
            pending = _push(times, whose, pending, now + _pass_time(tables, n, phase[i], last), i)
        if not pending:
            return now if left == 0 else NEVER
        wake, now = 0, times[0]
        while pending and times[0] == now:
            i = whose[0]
            pending = _pop(times, whose, pending)
            n = _node_of_pass(origin, path, i, phase[i])
            woken[wake] = n
            wake += 1
            if runs[i]:  # a pass ends
                idle[n], runs[i], over[n] = True, False, now
                free[n] += phase[i] > last + 1  # a backward frees its forward's slot; the loss took none
                phase[i] += 1
                if phase[i] == 2 * last + 2:
                    done[i] = now
                    left -= 1
                    continue
                m = _node_of_pass(origin, path, i, phase[i])
                if m != n:
                    start, out, into = now, tables.site[n], tables.site[m]
                    activation = phase[i] <= last
                    if shared:
                        start = max(now, taken[n, m])
                        occupied = tables.transmit[out, into] if activation else tables.transmit_back[out, into]
                        taken[n, m] = start + occupied
                    arrives = start + (tables.link[out, into] if activation else tables.link_back[out, into])
                    pending = _push(times, whose, pending, arrives, i)
                    continue
            line = _PATIENT if phase[i] < last else _URGENT
            tails[line, n] += _enqueue(queue, since, heads, tails, begins, line, n, i, now)


@compile_function
def _queue_starts(origin: Ints, path: Ints, nodes: int) -> Ints:
    """Return [nodes + 1]: start of each node's stretch of the queues."""
    begins = np.zeros(nodes + 1, np.int64)
    for i in range(origin.shape[0]):
        begins[origin[i] + 1] += 3  # loss, the loss's backward, and the last backward
        for n in path[i]:
            begins[n + 1] += 1
    return np.cumsum(begins)


@compile_function
def _node_of_pass(origin: Ints, path: Ints, i: int, phase: int) -> int:
    """Return the node of a microbatch's pass number ``phase``: forwards along the route, then backwards."""
    last = path.shape[1] + 1
    hop = phase if phase <= last else 2 * last + 1 - phase
    return origin[i] if hop == 0 or hop == last else path[i, hop - 1]  # type: ignore[no-any-return]


@compile_function
def _pass_time(tables: CostTables, n: int, phase: int, last: int) -> int:
    if phase <= last:
        return tables.forward[0 if phase == 0 else 2 if phase == last else 1, n]  # type: ignore[no-any-return]
    hop = 2 * last + 1 - phase
    return tables.backward[0 if hop == 0 else 2 if hop == last else 1, n]  # type: ignore[no-any-return]


@compile_function
def _enqueue(
    queue: Ints, since: Ints, heads: Ints, tails: Ints, begins: Ints, line: int, n: int, i: int, now: int
) -> int:
    """Queue a microbatch at node ``n`` behind earlier arrivals; at the same instant, the smaller number is first."""
    at = begins[n] + tails[line, n]
    head = begins[n] + heads[line, n]
    while at > head and since[line, at - 1] == now and queue[line, at - 1] > i:
        queue[line, at], since[line, at] = queue[line, at - 1], now
        at -= 1
    queue[line, at], since[line, at] = i, now
    return 1


@compile_function
def _push(times: Ints, whose: Ints, size: int, time: int, microbatch: int) -> int:
    at = size
    while at > 0 and times[(at - 1) >> 1] > time:
        times[at], whose[at] = times[(at - 1) >> 1], whose[(at - 1) >> 1]
        at = (at - 1) >> 1
    times[at], whose[at] = time, microbatch
    return size + 1


@compile_function
def _pop(times: Ints, whose: Ints, size: int) -> int:
    size -= 1
    time, microbatch, at = times[size], whose[size], 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and times[child + 1] < times[child]:
            child += 1
        if times[child] >= time:
            break
        times[at], whose[at] = times[child], whose[child]
        at = child
    times[at], whose[at] = time, microbatch
    return size
