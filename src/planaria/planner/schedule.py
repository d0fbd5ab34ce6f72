"""The schedule file, written by ``planaria plan`` and read by ``planaria train``: a problem, its solution and a bound.

Versioned JSON; ``docs/plan.md`` describes its fields. It contains everything needed to check, draw and train on the
plan without the recipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field

from planaria.common import atomic, documents
from planaria.common.errors import UserError
from planaria.config.bounds import Natural, Positive, Seconds
from planaria.config.schema import Section
from planaria.planner.problem import LONGEST_S, NO_SAVING, ROLES, PlanningProblem, Solution, by_centrality, stage_of
from planaria.planner.tables import NO_SUMS, Ints

MAX_BYTES = 256 << 20
ExactSeconds = Annotated[float, Field(ge=0, le=LONGEST_S)]
"""seconds that are exact in whole nanoseconds"""


def _nanoseconds(seconds: ArrayLike) -> Ints:
    return np.rint(np.array(seconds) * 1e9).astype(np.int64)


class ScheduleNode(Section):
    """A node."""

    name: str
    site: Natural
    """index into ``sites``"""
    slots: Annotated[int, Field(ge=1, le=1 << 40)]
    role: Literal["any", "data", "worker"]
    forward_s: tuple[ExactSeconds, ExactSeconds, ExactSeconds]
    """forward seconds of one microbatch: at the entry, at a block stage, at the return"""
    backward_s: tuple[ExactSeconds, ExactSeconds, ExactSeconds]


class PlanRules(Section):
    """The constraints on every plan."""

    sizes: list[Positive]
    microbatches: Positive
    """microbatches of each data node"""
    visits: Positive
    swaps: Natural
    jump: Positive


class SearchRecord(Section):
    """The search; the same seed and number of moves find the same plan."""

    seed: Natural
    moves: Natural
    seconds: Seconds


class ProvedBound(Section):
    step_s: Seconds
    binds: str
    terms: dict[str, Seconds] = Field(default_factory=dict)
    """seconds of each constraint alone"""


class EdgeLoad(Section):
    """Bytes that one edge sends in a step, and their path."""

    source: Natural
    target: Natural
    """nodes"""
    path: str
    size: Positive
    """bytes"""
    rate: Annotated[float, Field(gt=0)]
    """bytes per second that the edge gets when all edges send at the same time"""


class SeveralPaths(Section):
    """The choice of paths where sites are joined by several."""

    links: dict[str, Annotated[float, Field(gt=0)]]
    """capacity of each link, bytes per second"""
    edges: list[EdgeLoad]
    largest_s: Seconds
    """seconds in which the busiest link carries its bytes of a step"""
    least_s: Seconds
    """lower bound on ``largest_s`` for any choice of paths"""
    cut: list[str]
    """the links that prove the bound"""


class Schedule(Section):
    format: Literal["planaria schedule"] = "planaria schedule"
    version: Literal[1] = 1
    sites: list[str]
    link_s: list[list[ExactSeconds]]
    """[sites, sites]: one message from sending to arrival"""
    transmit_s: list[list[ExactSeconds]] | None
    """[sites, sites]: time for which a message occupies its link; null if messages never queue"""
    nodes: list[ScheduleNode]
    rules: PlanRules
    stages: list[list[Natural]]
    """nodes of the ends (the data nodes) and of each block stage; the first node sums their gradients"""
    routes: list[list[Natural]]
    """nodes that each microbatch visits, from its data node back to it"""
    step_s: Seconds
    """the simulated step"""
    bound: ProvedBound
    compared: dict[str, Seconds]
    """simulated steps of baselines on the same nodes with as many microbatches"""
    search: SearchRecord
    sums_s: list[list[list[ExactSeconds]]] | None = None
    """[2, sites, sites]: a message with all gradients of an ends node, of a block-stage node; null if not planned"""
    link_back_s: list[list[ExactSeconds]] | None = None
    """[sites, sites]: one gradient from sending to arrival; null if as long as an activation (``link_s``)"""
    paths: SeveralPaths | None = None
    """paths between sites; if given, every node is its own site, and link_s and transmit_s are those of the edges'
    paths"""

    @property
    def gap(self) -> float | None:
        """Return the share by which another plan could be faster at most, or None if passes take no time."""
        if not any(any((*machine.forward_s, *machine.backward_s)) for machine in self.nodes):
            return None
        return 1 - self.bound.step_s / self.step_s if self.step_s else 0.0

    @property
    def problem(self) -> PlanningProblem:
        return PlanningProblem(
            names=tuple(machine.name for machine in self.nodes),
            sites=tuple(self.sites),
            site=np.array([machine.site for machine in self.nodes], np.int64),
            sizes=tuple(self.rules.sizes),
            microbatches=self.rules.microbatches,
            visits=self.rules.visits,
            swaps=self.rules.swaps,
            jump=self.rules.jump,
            forward=_nanoseconds([machine.forward_s for machine in self.nodes]).T,
            backward=_nanoseconds([machine.backward_s for machine in self.nodes]).T,
            link=_nanoseconds(self.link_s),
            transmit=_nanoseconds(self.transmit_s) if self.transmit_s else np.zeros_like(self.link_s, np.int64),
            slots=np.array([machine.slots for machine in self.nodes], np.int64),
            role=np.array([ROLES.index(machine.role) for machine in self.nodes], np.int64),
            sums=_nanoseconds(self.sums_s) if self.sums_s else NO_SUMS,
            saving=_nanoseconds(self.link_s) - _nanoseconds(self.link_back_s) if self.link_back_s else NO_SAVING,
        )

    @property
    def solution(self) -> Solution:
        routes = np.array(self.routes, np.int64)
        return Solution(stage_of(self.stages, len(self.nodes)), routes[:, 0], routes[:, 1:-1])


def make_schedule(
    problem: PlanningProblem,
    solution: Solution,
    step_s: float,
    bound: ProvedBound,
    compared: dict[str, float],
    search: SearchRecord,
    paths: SeveralPaths | None = None,
) -> Schedule:
    seconds = {name: (getattr(problem, name) / 1e9).tolist() for name in ("forward", "backward", "link", "transmit")}
    return Schedule(
        sites=list(problem.sites),
        link_s=seconds["link"],
        transmit_s=seconds["transmit"] if problem.transmit.any() else None,
        nodes=[
            ScheduleNode(
                name=name,
                site=int(problem.site[n]),
                slots=int(problem.slots[n]),
                role=ROLES[problem.role[n]],  # type: ignore[arg-type]
                forward_s=tuple(row[n] for row in seconds["forward"]),
                backward_s=tuple(row[n] for row in seconds["backward"]),
            )
            for n, name in enumerate(problem.names)
        ],
        rules=PlanRules(
            sizes=list(problem.sizes),
            microbatches=problem.microbatches,
            visits=problem.visits,
            swaps=problem.swaps,
            jump=problem.jump,
        ),
        stages=[by_centrality(problem, solution, stage) for stage in range(len(problem.sizes))],
        routes=[list(route) for route in solution.routes],
        step_s=step_s,
        bound=bound,
        compared=compared,
        search=search,
        sums_s=(problem.sums / 1e9).tolist() if problem.summed else None,
        link_back_s=(problem.link_back / 1e9).tolist() if problem.saving.size else None,
        paths=paths,
    )


def write(schedule: Schedule, path: Path) -> None:
    """Write the file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    absent = {name for name in ("sums_s", "link_back_s", "paths") if getattr(schedule, name) is None}
    atomic.write_text(path, schedule.model_dump_json(indent=1, exclude=absent))


def read(path: Path) -> Schedule:
    """Read a schedule and check its references; ``planner.guidelines`` checks the plan.

    :raises UserError: with the file and the field, if one is invalid.
    """
    if not path.is_file():
        raise UserError(f"{path}: schedule not found; create it with `planaria plan RECIPE --skip 0.33`")
    schedule = documents.read_model(path, Schedule, MAX_BYTES, "recreate it with `planaria plan`")
    if wrong := next(chain(_invalid_tables(schedule), _invalid_stages(schedule), _invalid_routes(schedule)), ""):
        raise UserError(f"{path}: {wrong}")
    return schedule


def _invalid_tables(schedule: Schedule) -> Iterator[str]:
    sites = len(schedule.sites)
    tables = {"link_s": schedule.link_s, "transmit_s": schedule.transmit_s or schedule.link_s}
    if schedule.link_back_s is not None:
        tables["link_back_s"] = schedule.link_back_s
    if schedule.sums_s is not None:
        if len(schedule.sums_s) != 2:
            yield f"sums_s has {len(schedule.sums_s)} tables, not one for the ends and one for block stages"
        tables |= {f"sums_s.{n}": table for n, table in enumerate(schedule.sums_s)}
    for name, table in tables.items():
        if len(table) != sites or any(len(row) != sites for row in table):
            yield f"{name} is not a table of {sites} × {sites} sites"
    for n, machine in enumerate(schedule.nodes):
        if machine.site >= sites:
            yield f"nodes.{n}.site = {machine.site}: there are {sites} sites"


def _invalid_stages(schedule: Schedule) -> Iterator[str]:
    nodes, sizes = len(schedule.nodes), schedule.rules.sizes
    for s, members in enumerate(schedule.stages):
        for node in members:
            if node >= nodes:
                yield f"stages.{s}: node {node}: there are {nodes} nodes"
    for i, edge in enumerate(schedule.paths.edges if schedule.paths else ()):
        if max(edge.source, edge.target) >= nodes:
            yield f"paths.edges.{i}: {edge.source} → {edge.target}: there are {nodes} nodes"
    if sorted(chain(*schedule.stages)) != list(range(nodes)):
        yield f"stages: every one of the {nodes} nodes must be in exactly one stage"
    if not schedule.stages or len(schedule.stages) != len(sizes):
        yield f"stages: there are {len(schedule.stages)}, and rules.sizes has {len(sizes)}"
    for s, (members, size) in enumerate(zip(schedule.stages, sizes, strict=True)):
        if len(members) != size:
            yield f"stages.{s} has {len(members)} nodes, and rules.sizes.{s} = {size}"


def _invalid_routes(schedule: Schedule) -> Iterator[str]:
    nodes, rules = len(schedule.nodes), schedule.rules
    if len(schedule.routes) != rules.sizes[0] * rules.microbatches:
        yield (
            f"routes: there are {len(schedule.routes)}; {rules.sizes[0]} data nodes with {rules.microbatches} "
            "microbatches each need one per microbatch"
        )
    for i, route in enumerate(schedule.routes):
        if len(route) != rules.visits + 2:
            yield f"routes.{i} has {len(route)} nodes; {rules.visits} visits need {rules.visits + 2}"
        for node in route:
            if node >= nodes:
                yield f"routes.{i}: node {node}: there are {nodes} nodes"
        if route[0] != route[-1]:
            yield f"routes.{i}: starts at node {route[0]} and ends at node {route[-1]}; it must end where it starts"
