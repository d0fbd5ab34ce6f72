"""The file that ``planaria plan`` writes and ``planaria train`` reads: a problem, its solution, and how good that is.

JSON, versioned; ``docs/plan.md`` says what each field means. It holds all that the plan was made from, so that it
can be checked, drawn and trained on without the recipe.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from planaria.common import atomic, documents
from planaria.common.errors import UserError
from planaria.config.bounds import Natural, Positive, Seconds
from planaria.config.schema import Section
from planaria.planner.problem import LONGEST_S, ROLES, Problem, Solution, central_first
from planaria.planner.tables import NO_SUMS

MAX_BYTES = 256 << 20
Span = Annotated[float, Field(ge=0, le=LONGEST_S)]
"""seconds that still count as whole nanoseconds"""


class Machine(Section):
    """A node."""

    name: str
    site: Natural
    """index into sites"""
    slots: Annotated[int, Field(ge=1, le=1 << 40)]
    role: Literal["any", "data", "worker"]
    forward_s: tuple[Span, Span, Span]
    """of one microbatch: at the entry, at a block stage, at the return"""
    backward_s: tuple[Span, Span, Span]


class Rules(Section):
    """What was asked of every plan."""

    sizes: list[Positive]
    microbatches: Positive
    """of each data node"""
    visits: Positive
    swaps: Natural
    jump: Positive


class Search(Section):
    """How the plan was found: the same seed and moves find it again."""

    seed: Natural
    moves: Natural
    seconds: Seconds


class Bound(Section):
    step_s: Seconds
    binds: str
    terms: dict[str, Seconds] = Field(default_factory=dict)
    """what each reason for the bound comes to alone"""


class Carried(Section):
    """What one edge sends in a step, and over which path."""

    source: Natural
    target: Natural
    """nodes"""
    path: str
    size: Positive
    """bytes"""
    rate: Annotated[float, Field(gt=0)]
    """bytes per second that are its own when all edges send at once"""


class SeveralPaths(Section):
    """The choice of paths, where sites are joined by several."""

    links: dict[str, Annotated[float, Field(gt=0)]]
    """what each link carries, in bytes per second"""
    edges: list[Carried]
    largest_s: Seconds
    """of the busiest link, what it carries in a step"""
    least_s: Seconds
    """no choice of paths has less"""
    cut: list[str]
    """the links that say so"""


class Schedule(Section):
    format: Literal["planaria schedule"] = "planaria schedule"
    version: Literal[1] = 1
    sites: list[str]
    link_s: list[list[Span]]
    """[sites, sites]: one message from sending to arrival"""
    transmit_s: list[list[Span]] | None
    """[sites, sites]: how long it keeps others on its link waiting; null if messages never do"""
    nodes: list[Machine]
    rules: Rules
    stages: list[list[Natural]]
    """nodes of the ends (the data nodes) and of each block stage; the first adds up their gradients"""
    routes: list[list[Natural]]
    """nodes that each microbatch visits, from its data node back to it"""
    step_s: Seconds
    """the simulated step"""
    bound: Bound
    compared: dict[str, Seconds]
    """simulated steps of other ways, on the same nodes and as many microbatches"""
    search: Search
    sums_s: list[list[list[Span]]] | None = None
    """[2, sites, sites]: a message with all gradients of an ends node, of a block stage's; null: passes end the step"""
    paths: SeveralPaths | None = None
    """then every node is a site of its own, and link_s and transmit_s are those of the edges' paths"""

    @property
    def gap(self) -> float | None:
        """Share by which any other plan could be faster at most; None, as meaningless, if passes cost nothing."""
        if not any(any((*machine.forward_s, *machine.backward_s)) for machine in self.nodes):
            return None
        return 1 - self.bound.step_s / self.step_s if self.step_s else 0.0

    @property
    def problem(self) -> Problem:
        rows = [[m.forward_s for m in self.nodes], [m.backward_s for m in self.nodes]]
        forward, backward = (np.rint(np.array(row).T * 1e9).astype(np.int64) for row in rows)
        return Problem(
            names=tuple(machine.name for machine in self.nodes),
            sites=tuple(self.sites),
            site=np.array([machine.site for machine in self.nodes], np.int64),
            sizes=tuple(self.rules.sizes),
            microbatches=self.rules.microbatches,
            visits=self.rules.visits,
            swaps=self.rules.swaps,
            jump=self.rules.jump,
            forward=forward,
            backward=backward,
            link=np.rint(np.array(self.link_s) * 1e9).astype(np.int64),
            transmit=np.rint(np.array(self.transmit_s or np.zeros_like(self.link_s)) * 1e9).astype(np.int64),
            slots=np.array([machine.slots for machine in self.nodes], np.int64),
            role=np.array([ROLES.index(machine.role) for machine in self.nodes], np.int64),
            sums=np.rint(np.array(self.sums_s) * 1e9).astype(np.int64) if self.sums_s else NO_SUMS,
        )

    @property
    def solution(self) -> Solution:
        stage = np.zeros(len(self.nodes), np.int64)
        for s, nodes in enumerate(self.stages):
            stage[nodes] = s
        routes = np.array(self.routes, np.int64)
        return Solution(stage, routes[:, 0], routes[:, 1:-1])


def schedule_of(
    problem: Problem,
    solution: Solution,
    step_s: float,
    bound: Bound,
    compared: dict[str, float],
    search: Search,
    paths: SeveralPaths | None = None,
) -> Schedule:
    seconds = {name: (getattr(problem, name) / 1e9).tolist() for name in ("forward", "backward", "link", "transmit")}
    return Schedule(
        sites=list(problem.sites),
        link_s=seconds["link"],
        transmit_s=seconds["transmit"] if problem.transmit.any() else None,
        nodes=[
            Machine(
                name=name,
                site=int(problem.site[n]),
                slots=int(problem.slots[n]),
                role=ROLES[problem.role[n]],  # type: ignore[arg-type]
                forward_s=tuple(row[n] for row in seconds["forward"]),
                backward_s=tuple(row[n] for row in seconds["backward"]),
            )
            for n, name in enumerate(problem.names)
        ],
        rules=Rules(
            sizes=list(problem.sizes),
            microbatches=problem.microbatches,
            visits=problem.visits,
            swaps=problem.swaps,
            jump=problem.jump,
        ),
        stages=[central_first(problem, solution, stage) for stage in range(len(problem.sizes))],
        routes=[list(route) for route in solution.routes],
        step_s=step_s,
        bound=bound,
        compared=compared,
        search=search,
        sums_s=(problem.sums / 1e9).tolist() if problem.summed else None,
        paths=paths,
    )


def write(schedule: Schedule, path: Path) -> None:
    """Write the file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    absent = {name for name in ("sums_s", "paths") if getattr(schedule, name) is None}
    atomic.write_text(path, schedule.model_dump_json(indent=1, exclude=absent))


def read(path: Path) -> Schedule:
    """The schedule in the file ``path``, its numbers in range; ``planner.guidelines`` says whether it is a good one.

    :raises UserError: naming file and field.
    """
    if not path.is_file():
        raise UserError(f"{path}: there is no such schedule; `planaria plan RECIPE --skip 0.33` writes one")
    found = documents.model(path, Schedule, MAX_BYTES, "make it anew with `planaria plan`")
    if wrong := _out_of_range(found):
        raise UserError(f"{path}: {wrong}")
    return found


def _out_of_range(found: Schedule) -> str:
    """What refers to something that is not there; empty if nothing does."""
    nodes, sites = range(len(found.nodes)), len(found.sites)
    tables = {"link_s": found.link_s, "transmit_s": found.transmit_s or found.link_s}
    if found.sums_s is not None:
        if len(found.sums_s) != 2:
            return f"sums_s: has {len(found.sums_s)} tables, not one for the ends and one for block stages"
        tables |= {f"sums_s.{n}": table for n, table in enumerate(found.sums_s)}
    for name, table in tables.items():
        if len(table) != sites or any(len(row) != sites for row in table):
            return f"{name}: is not a table of {sites} × {sites} sites"
    for n, machine in enumerate(found.nodes):
        if machine.site >= sites:
            return f"nodes.{n}.site = {machine.site}: there are {sites} sites"
    for s, members in enumerate(found.stages):
        for node in members:
            if node not in nodes:
                return f"stages.{s}: node {node}: there are {len(nodes)} nodes"
    for i, edge in enumerate(found.paths.edges if found.paths else ()):
        if edge.source not in nodes or edge.target not in nodes:
            return f"paths.edges.{i}: {edge.source} → {edge.target}: there are {len(nodes)} nodes"
    listed = sorted(node for members in found.stages for node in members)
    if listed != list(nodes):
        return f"stages: every one of the {len(nodes)} nodes must be in exactly one stage"
    if not found.stages or len(found.stages) != len(found.rules.sizes):
        return f"stages: there are {len(found.stages)}, and rules.sizes has {len(found.rules.sizes)}"
    for s, (members, size) in enumerate(zip(found.stages, found.rules.sizes, strict=True)):
        if len(members) != size:
            return f"stages.{s}: has {len(members)} nodes, and rules.sizes.{s} = {size}"
    if len(found.routes) != found.rules.sizes[0] * found.rules.microbatches:
        return (
            f"routes: there are {len(found.routes)}; {found.rules.sizes[0]} data nodes with "
            f"{found.rules.microbatches} microbatches each take one for each"
        )
    for i, route in enumerate(found.routes):
        if len(route) != found.rules.visits + 2:
            return f"routes.{i}: has {len(route)} nodes; {found.rules.visits} visits take {found.rules.visits + 2}"
        for node in route:
            if node not in nodes:
                return f"routes.{i}: node {node}: there are {len(nodes)} nodes"
        if route[0] != route[-1]:
            return f"routes.{i}: starts at node {route[0]} and ends at node {route[-1]}; it must end where it starts"
    return ""
