"""Advice on the machines of households, compared with fleets of sleeping stages over their emulated links."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from itertools import permutations
from statistics import median
from typing import Any

import numpy as np

from benchmarks.fleet_run import finished, sleeping, small_run, step_seconds
from benchmarks.harness import RUNS, Claim, Flag, Measurement, Row, benchmark, start
from planaria.config.schema import RunConfig
from planaria.lab.commands.advise_machines import Strategy, weigh_machines
from planaria.pipeline.network.costs import MBIT
from planaria.pipeline.network.topology import Node, Topology
from planaria.planner.problem import Solution, problem_of
from planaria.planner.schedule import ProvedBound, SearchRecord, make_schedule, write

HOUSEHOLDS = {
    "two equal, fibre": [(1.0, 200, 200, 5), (1.0, 200, 200, 5)],
    "two equal, cable": [(1.0, 20, 100, 15), (1.0, 20, 100, 15)],
    "two cards, two laptops": [(1.0, 40, 200, 10), (0.5, 40, 200, 10), (0.3, 20, 100, 15), (0.3, 20, 100, 15)],
    "one fast, three slow": [(1.0, 50, 100, 10), (0.2, 50, 100, 10), (0.2, 50, 100, 10), (0.2, 50, 100, 10)],
    "four equal, fibre": [(1.0, 100, 100, 10)] * 4,
    "three equal, DSL": [(1.0, 2, 16, 25)] * 3,
}
"""machines: speed, upload and download in Mbit/s, milliseconds to others' half way"""
SKIP = 2
"""steps of each fleet that warm it up"""
CLOSE = 1.01
"""ratio of steps that are practically equal"""
SLOTS = 64
"""microbatches that a machine can hold: more than are ever in flight"""


def topology_of(machines: Sequence[tuple[float, float, float, float]]) -> Topology:
    nodes = tuple(Node(f"home {n}", f"home {n}", speed, SLOTS, "any") for n, (speed, *_) in enumerate(machines))
    links = {
        (f"home {a}", f"home {b}"): (
            (machines[a][3] + machines[b][3]) / 1e3,
            min(machines[a][1], machines[b][2]) * MBIT,
        )
        for a, b in permutations(range(len(machines)), 2)
    }
    return Topology(nodes, links | {(node.site, node.site): (0.0, 1000 * MBIT) for node in nodes})


def base(name: str, steps: int, **sections: Any) -> RunConfig:
    return small_run(
        name,
        steps,
        1,
        model={"vocab": 260, "dim": 128, "layers": 6, "heads": 4, "hidden": 64, "context": 128},
        pipeline={"microbatches": 8, "microbatch_size": 4},
        network=sleeping(0.06),
        **sections,
    )


def measured_s(strategy: Strategy, topology: Topology, name: str, steps: int) -> float:
    """Return the median step of a fleet that trains a pipeline on its machines."""
    config, stages = strategy.config, len(strategy.machines)
    own = Topology(strategy.machines, topology.links)
    routes = np.tile(np.arange(1, stages), (config.pipeline.microbatches, 1))
    plan = Solution(np.arange(stages), np.zeros(len(routes), np.int64), routes)
    record, bound = SearchRecord(seed=0, moves=0, seconds=0), ProvedBound(step_s=0, binds="none")
    file = RUNS / f"{name}.schedule.json"
    write(make_schedule(problem_of(config, own), plan, strategy.step_s, bound, {}, record), file)
    routing = config.routing.model_copy(update={"schedule": str(file.absolute())})
    train = config.train.model_copy(update={"steps": steps + SKIP})
    return median(step_seconds(finished(config.model_copy(update={"routing": routing, "train": train})), SKIP))


@benchmark("households", steps=Flag(4, "of each fleet, warm-up apart"))
def run_households(args: Namespace) -> Measurement:
    """Compare the advice for six made-up households with fleets whose stages sleep, over emulated links.

    Pipelines are measured; a machine alone sends nothing and is calculated. Replicas are not measured. Claims: the
    fastest option is named in ≥ 5 of 6, and predicted hours of each pipeline are within 15 %.
    """
    rows, named = [], 0
    for number, (household, machines) in enumerate(HOUSEHOLDS.items()):
        topology, name = topology_of(machines), f"household-{number}"
        advised = [one for one in weigh_machines(base(name, SKIP), topology) if "replicas" not in one.name]
        seconds = {
            one.name: measured_s(one, topology, name, args.steps) if one.sends else one.step_s for one in advised
        }
        won = min(seconds, key=seconds.__getitem__)
        named += seconds[advised[0].name] <= CLOSE * seconds[won]
        off = [abs(100 * (one.step_s / seconds[one.name] - 1)) for one in advised if one.sends]
        columns = {"advised": advised[0].name, "won": won}
        columns |= {one.name: f"{one.step_s:.3f} / {seconds[one.name]:.3f}" for one in advised if one.sends}
        rows.append(Row(f"{household}: error of hours, %", off, "0", Claim(high=15), columns, judged="worst"))
    rows.append(Row("households whose fastest option is named", [float(named)], "6", Claim(low=5)))
    return rows


if __name__ == "__main__":
    start(run_households)
