"""Tiny runs on a schedule: ten nodes at three sites, two of them data nodes, two nodes for each of four stages."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from harness import tiny

from planaria.config import RunConfig
from planaria.network.topology import read
from planaria.planner.bound import certificate
from planaria.planner.problem import problem_of
from planaria.planner.schedule import Bound, Search, schedule_of, write
from planaria.planner.search import step_ns
from planaria.planner.start import greedy, random_routes

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
LATENCY = "site,A,B,C\nA,,30,50\nB,,,40\nC,,,\n"
BANDWIDTH = "site,A,B,C\nA,,200,100\nB,,,100\nC,,,\n"


def scheduled(folder: Path, steps: int = 8, skip: float = 0.5, disorderly: bool = True, **sections: Any) -> RunConfig:
    """A run on a schedule that is valid, not good; ``disorderly``: routes swap stages."""
    shape: dict[str, Any] = {
        "pipeline": {"stages": 4, "microbatches": 6, "microbatch_size": 2},
        "routing": {"skip": skip, "data_nodes": 2, "swaps": 1},
        "network": {"forward_s": [0.001, 0.004, 0.004, 0.004, 0.004], "backward_s": [0.0, 0.006, 0.006, 0.006, 0.006]},
    }
    for name, fields in sections.items():
        shape[name] = {**shape.get(name, {}), **fields}
    config = tiny(folder, stages=4, steps=steps, **shape)
    for name, text in (("topology.toml", TOPOLOGY), ("latency.csv", LATENCY), ("bandwidth.csv", BANDWIDTH)):
        (folder / name).write_text(text)
    problem = problem_of(config, read(folder / "topology.toml", config.network.scale))
    solution = greedy(problem, random.Random(3))
    if disorderly:
        stages = [solution.members(stage) for stage in range(len(problem.sizes))]
        solution = random_routes(problem, stages, random.Random(4), swaps=1)
    bound = Bound(**certificate(problem)._asdict())
    made = Search(seed=3, moves=0, seconds=0.0)
    schedule = schedule_of(problem, solution, step_ns(problem, solution) / 1e9, bound, {}, made)
    write(schedule, folder / "schedule.json")
    return config.model_copy(
        update={"routing": config.routing.model_copy(update={"schedule": str(folder / "schedule.json")})}
    )
