"""Schedules for tiny runs: ten nodes at three sites, two of them data nodes, two nodes for each of four stages."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from planaria.config.schema import RunConfig
from planaria.pipeline.network.topology import read
from planaria.planner.bound.step_bound import step_lower_bound
from planaria.planner.initial_plans import greedy_plan, random_routes
from planaria.planner.problem import problem_of
from planaria.planner.schedule import ProvedBound, SearchRecord, make_schedule, write
from planaria.planner.search import step_ns

TOPOLOGY = """
matrix = { latency_ms = "latency.csv", bandwidth_mbit = "bandwidth.csv" }
[[nodes]]
site = "A"
count = 4
[[nodes]]
site = "B"
count = 3
[[nodes]]
site = "C"
count = 3
"""
ONE_EACH = """
matrix = { latency_ms = "latency.csv", bandwidth_mbit = "bandwidth.csv" }
[[nodes]]
site = "A"
count = 2
role = "worker"
[[nodes]]
site = "B"
count = 2
role = "worker"
[[nodes]]
site = "C"
role = "data"
"""
"""five nodes, of which the last is the data node"""
LATENCY = "site,A,B,C\nA,,30,50\nB,,,40\nC,,,\n"
BANDWIDTH = "site,A,B,C\nA,,200,100\nB,,,100\nC,,,\n"


def shape(skip: float) -> dict[str, dict[str, Any]]:
    """Return the sections of a recipe that determine a schedule."""
    return {
        "pipeline": {"stages": 4, "microbatches": 6, "microbatch_size": 2},
        "routing": {"skip": skip, "data_nodes": 2, "swaps": 1},
        "network": {"forward_s": [0.001, 0.004, 0.004, 0.004, 0.004], "backward_s": [0.0, 0.006, 0.006, 0.006, 0.006]},
    }


def on_schedule(config: RunConfig, folder: Path, disorderly: bool = True, topology: str = TOPOLOGY) -> RunConfig:
    """Put the run on a valid, not optimised schedule in ``folder``; ``disorderly``: some routes swap stages."""
    for name, text in (("topology.toml", topology), ("latency.csv", LATENCY), ("bandwidth.csv", BANDWIDTH)):
        (folder / name).write_text(text)
    problem = problem_of(config, read(folder / "topology.toml", config.network.link_time_scale))
    solution = greedy_plan(problem, random.Random(3))
    if disorderly:
        stages = [solution.members(stage) for stage in range(len(problem.sizes))]
        solution = random_routes(problem, stages, random.Random(4), swaps=1)
    bound = ProvedBound(**step_lower_bound(problem)._asdict())
    made = SearchRecord(seed=3, moves=0, seconds=0.0)
    write(make_schedule(problem, solution, step_ns(problem, solution) / 1e9, bound, {}, made), folder / "schedule.json")
    routing = config.routing.model_copy(update={"schedule": str(folder / "schedule.json")})
    return config.model_copy(update={"routing": routing})
