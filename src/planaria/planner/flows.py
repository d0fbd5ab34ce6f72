"""Local search over flows: the routing rule of Go With The Flow (arXiv 2509.21221).

A microbatch is a unit of flow from its data node through nodes of block stages and back. The search lowers the largest
cost of a flow, which excludes waiting, instead of the step. Moves are judged by the edges that they change, which are
all at the moving nodes, and accepted as in simulated annealing.

Details of moves, capacities, temperatures and the weight of computation are derived here; the published ones were not
available. The search runs in one process and keeps the plan with the least objective, which no node alone could know.
"""

from __future__ import annotations

import random
import time
from typing import Literal, NamedTuple

import numpy as np

from planaria.common.compiled import compile_function
from planaria.planner.anneal import Floats, members_of, obeys_cc3
from planaria.planner.initial_plans import random_routes
from planaria.planner.problem import BLOCK, ENTRY, RETURN, ROLES, PlanningProblem, Solution, stage_of
from planaria.planner.search import OnProgress, SearchBudget, SearchResult, round_lengths, step_ns
from planaria.planner.tables import Ints

EdgeRule = Literal["sum", "two_way"]
RANDOMS = 7
"""random numbers of one move"""
REQUEST_UNTIL = 0.4
"""probability of a request; see :func:`_propose`"""
CHANGE_UNTIL = 0.6
"""probability of a request or a change; all other moves redirect"""
INITIAL_TEMPERATURE = 1.0
"""temperature at the start of a round, in mean edge costs"""
FINAL_TEMPERATURE = 0.1
MOVES_PER_CLOCK_CHECK = 10_000
"""moves between two checks of the clock"""


class FlowNetwork(NamedTuple):
    """Limits and costs of nodes and edges."""

    edges: Ints
    """[3, nodes, nodes]: see :func:`edge_costs`; nanoseconds"""
    stage: Ints
    members: Ints
    """[stages, largest size]: the nodes of each stage"""
    sizes: Ints
    room: Ints
    """[nodes]: maximum number of flows through each"""
    jump: int


class Flows(NamedTuple):
    """Flows that a search changes in place."""

    origin: Ints
    path: Ints
    costs: Ints
    """[count]: nanoseconds"""
    load: Ints
    """[nodes]: flows through each"""


def edge_costs(problem: PlanningProblem, rule: EdgeRule = "two_way") -> Ints:
    """Return [3, nodes, nodes]: costs d_ij of edges from a data node, between workers, to a data node; nanoseconds.

    d_ij = (c_i + c_j)/2 + (λ_ij + λ_ji)/2 + T_ij, with c the mean of a node's forward and backward, λ the latency, and
    t_ij = size/β_ij the transfer time at bandwidth β:

    - ``sum`` (arXiv 2509.21221): T = 2·size/(β_ij + β_ji) = 2·t_ij·t_ji/(t_ij + t_ji), at the mean bandwidth;
    - ``two_way`` (derived): T = (t_ij + t_ji)/2, the mean time of an activation and its gradient. Twice a
      flow's cost is then its lone round trip less half of the passes at its data node.

    Both are equal on links with equal directions.
    """
    late = problem.latency if problem.latency.size else np.zeros_like(problem.link)
    there, back = (np.maximum(link - late, 0).astype(np.float64) for link in (problem.link, problem.link_back))
    back = back.T
    if rule == "sum":
        both = there + back
        transfer = np.rint(np.divide(2 * there * back, both, out=np.zeros_like(both), where=both > 0))
    else:
        transfer = np.rint((there + back) / 2)
    message = ((late + late.T) / 2 + transfer)[np.ix_(problem.site, problem.site)]
    own = problem.passes / 2
    rows = ((ENTRY, BLOCK), (BLOCK, BLOCK), (BLOCK, RETURN))
    edges = [(own[a][:, None] + own[b][None, :]) / 2 + message for a, b in rows]
    costs: Ints = np.rint(np.stack(edges)).astype(np.int64)
    return costs


def flow_costs(edges: Ints, solution: Solution) -> Ints:
    """Return [count]: the cost of each microbatch's flow, the sum of its edges; nanoseconds."""
    origin, path = solution.origin, solution.path
    inner = edges[BLOCK][path[:, :-1], path[:, 1:]].sum(axis=1)
    costs: Ints = edges[ENTRY][origin, path[:, 0]] + inner + edges[RETURN][path[:, -1], origin]
    return costs


def network_of(problem: PlanningProblem, edges: Ints, solution: Solution, load: Ints) -> FlowNetwork:
    """Return the costs and limits for moves. A node has room for as many flows as it has slots, and at least its load.

    If its stage has more visits than slots, it has room for ⌈visits · its share of the stage's slots⌉.
    """
    stage, sizes = solution.stage, np.array(problem.sizes, np.int64)
    visits = np.bincount(stage[solution.path].ravel(), minlength=len(sizes))
    slots = np.bincount(stage, weights=problem.slots, minlength=len(sizes)).astype(np.int64)
    room = np.maximum(problem.slots, -(-visits[stage] * problem.slots // slots[stage]))
    return FlowNetwork(edges, stage, members_of(stage, sizes), sizes, np.maximum(room, load), problem.jump)


def search_flows(
    problem: PlanningProblem,
    seed: int,
    budget: SearchBudget,
    on_progress: OnProgress = lambda _: None,
    rule: EdgeRule = "two_way",
) -> SearchResult:
    """Return the plan found within ``budget`` whose most expensive flow costs least; call ``on_progress`` regularly.

    A move prices at most one change. Every round starts from new random flows over stages that nodes joined one by one.
    Steps may grow, since they are not the objective.
    """
    edges, spent, lengths = edge_costs(problem, rule), 0, enumerate(round_lengths())
    _start_round(problem, edges, 0, 0, 1).run(1)  # compile before the budget starts
    began = time.monotonic()
    now = best = _start_round(problem, edges, seed, *next(lengths), budget.moves)
    while True:
        seconds = time.monotonic() - began
        moves = 0 if seconds >= budget.seconds else int(min(MOVES_PER_CLOCK_CHECK, len(now.left), budget.moves - spent))
        now.run(moves)
        spent, best = spent + moves, now if now.least < best.least else best
        progress = SearchResult(best.best.copy(), step_ns(problem, best.best) / 1e9, spent, time.monotonic() - began)
        on_progress(progress)
        if not moves:
            return progress
        if not len(now.left):
            now = _start_round(problem, edges, seed, *next(lengths), budget.moves - spent)


class FlowRound:
    """State of one round of ``length`` moves."""

    def __init__(
        self, problem: PlanningProblem, edges: Ints, start: Solution, rng: np.random.Generator, length: int
    ) -> None:
        costs, load = flow_costs(edges, start), np.bincount(start.path.ravel(), minlength=problem.nodes)
        self.now, self.best, self.rng = Flows(start.origin, start.path.copy(), costs, load), start.copy(), rng
        self.least, self.net = int(costs.max()), network_of(problem, edges, start, load)
        cooling = (FINAL_TEMPERATURE / INITIAL_TEMPERATURE) ** (np.arange(length) / max(1, length))
        self.left = costs.mean() / (problem.visits + 1) * INITIAL_TEMPERATURE * cooling
        """temperatures of the moves left"""

    def run(self, moves: int) -> None:
        """Make ``moves`` moves."""
        chance, heat = self.rng.random((moves, RANDOMS)), self.left[:moves]
        self.least = int(flow_moves(self.net, self.now, chance, heat, self.best.path, self.least))
        self.left = self.left[moves:]


def _start_round(
    problem: PlanningProblem, edges: Ints, seed: int, number: int, length: int, max_moves: float = float("inf")
) -> FlowRound:
    """Return round ``number`` of a search, of at most ``max_moves`` moves, before its first move."""
    start = _flows_over_joined_stages(problem, edges, random.Random(f"{seed} {number}"))
    return FlowRound(problem, edges, start, np.random.default_rng([seed, number]), int(min(length, max_moves)))


def _flows_over_joined_stages(problem: PlanningProblem, edges: Ints, rng: random.Random) -> Solution:
    """Return random flows over stages that nodes joined in random order.

    A node joins the stage that lacks the largest share of its nodes; among equals, the stage with the least mean cost
    of the node's edges.
    """
    role = [ROLES[index] for index in problem.role.tolist()]
    order = rng.sample(range(problem.nodes), problem.nodes)
    data_nodes = sorted((n for n in order if role[n] != "worker"), key=lambda n: role[n] != "data")[: problem.sizes[0]]
    stages: list[list[int]] = [data_nodes, *([] for _ in problem.sizes[1:])]
    for node in (n for n in order if n not in data_nodes):
        open_to = [s for s, size in enumerate(problem.sizes) if s and len(stages[s]) < size]
        preference = {
            s: (len(stages[s]) / problem.sizes[s], _mean_edge_cost(edges, stages, node, s), rng.random())
            for s in open_to
        }
        stages[min(open_to, key=preference.__getitem__)].append(node)
    return random_flows(problem, stages, rng)


def _mean_edge_cost(edges: Ints, stages: list[list[int]], node: int, s: int) -> float:
    """Return the mean cost of edges between a node at stage ``s`` and the known nodes before and after; 0 if none."""
    after = (s + 1) % len(stages)
    into = edges[ENTRY if s == 1 else BLOCK][stages[s - 1], node]
    out = edges[BLOCK if after else RETURN][node, stages[after]]
    return float(np.concatenate([into, out]).mean()) if len(into) + len(out) else 0.0


def random_flows(problem: PlanningProblem, stages: list[list[int]], rng: random.Random) -> Solution:
    """Return random flows in natural order, each node used in proportion to its slots."""
    plan = random_routes(problem, stages, rng, 0)
    stage, path, slots = stage_of(stages, problem.nodes), plan.path.copy(), problem.slots.tolist()
    load = [0] * problem.nodes
    for index in np.ndindex(path.shape):
        nodes = stages[stage[path[index]]]
        path[index] = node = min(nodes, key=lambda n: ((load[n] + 1) / slots[n], rng.random()))
        load[node] += 1
    return plan._replace(path=path)


@compile_function
def flow_moves(net: FlowNetwork, now: Flows, draws: Floats, temperature: Floats, best_path: Ints, best: int) -> int:
    """Try one move for each temperature (nanoseconds), with the ``draws`` numbers [moves, RANDOMS].

    The penalty of a move is the cost of the changed edges of its more expensive flow, after the move minus before.
    Change ``now`` in place. Copy its path to ``best_path`` if the largest flow cost is less than ``best``; return that.
    """
    origin, path, costs, load = now
    new = path.copy()
    for move in range(temperature.shape[0]):
        r = draws[move]
        i, j = _propose(net, now, r, new)
        if i < 0:
            continue
        before_i, after_i = _changed_costs(net.edges, origin[i], path[i], new[i])
        before_j, after_j = _changed_costs(net.edges, origin[j], path[j], new[j]) if j != i else (0, 0)
        worse = max(after_i, after_j) - max(before_i, before_j)
        if worse > 0 and r[6] >= np.exp(-worse / temperature[move]):
            new[i], new[j] = path[i], path[j]
            continue
        costs[i] += after_i - before_i
        costs[j] += after_j - before_j
        for f in (i, j):
            for k in range(path.shape[1]):
                load[path[f, k]] -= 1
                load[new[f, k]] += 1
            path[f] = new[f]
        if costs.max() < best:
            best = costs.max()
            best_path[:] = path
    return best


@compile_function
def _propose(net: FlowNetwork, now: Flows, r: Floats, new: Ints) -> tuple[int, int]:
    """Change one or two flows in ``new``; return them, or -1 if the move is idle or forbidden.

    - *request*: a node with room takes over a flow of another node of its stage;
    - *change*: two nodes of a stage exchange the successors of their flows of one data node, with all that follows;
    - *redirect*: two flows exchange a node.
    """
    origin, path, _, load = now
    count, visits = path.shape
    i, j, k = int(r[1] * count), int(r[2] * count), int(r[3] * visits)
    s = net.stage[path[i, k]]
    if r[0] < REQUEST_UNTIL:
        x = net.members[s, int(r[4] * net.sizes[s])]
        if x == path[i, k] or load[x] >= net.room[x]:
            return -1, -1
        new[i, k] = x
        return i, i
    if r[0] < CHANGE_UNTIL:
        own = np.flatnonzero(origin == origin[i])
        j = own[int(r[2] * len(own))]
        if i == j or k == visits - 1 or net.stage[path[j, k]] != s:
            return -1, -1
        new[i, k + 1 :], new[j, k + 1 :] = path[j, k + 1 :], path[i, k + 1 :]
        return i, j
    m = int(r[4] * visits) if r[5] < 0.5 else _visit_of(net.stage, path[j], s)
    if i == j or m < 0 or path[i, k] == path[j, m]:
        return -1, -1
    new[i, k], new[j, m] = path[j, m], path[i, k]
    if obeys_cc3(net.stage, new[i], 0, net.jump) and obeys_cc3(net.stage, new[j], 0, net.jump):
        return i, j
    new[i, k], new[j, m] = path[i, k], path[j, m]
    return -1, -1


@compile_function
def _visit_of(stage: Ints, walk: Ints, s: int) -> int:
    """Return the index at which a walk visits stage ``s``; -1 if it does not."""
    visits = np.flatnonzero(stage[walk] == s)
    return int(visits[0]) if len(visits) else -1


@compile_function
def _changed_costs(edges: Ints, origin: int, old: Ints, new: Ints) -> tuple[int, int]:
    """Return the costs of the edges that differ between two walks of a flow, before and after."""
    before = after = 0
    last = old.shape[0]
    for hop in range(last + 1):
        kind = ENTRY if hop == 0 else RETURN if hop == last else BLOCK
        a, b = (origin if hop == 0 else old[hop - 1]), (origin if hop == last else old[hop])
        x, y = (origin if hop == 0 else new[hop - 1]), (origin if hop == last else new[hop])
        if a != x or b != y:
            before += edges[kind, a, b]
            after += edges[kind, x, y]
    return before, after
