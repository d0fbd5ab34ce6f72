"""Advice on the machines of households, compared with fleets of sleeping stages over their emulated links."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations, product
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from benchmarks.fleet_run import finished, sleeping, small_run, step_seconds
from benchmarks.harness import RUNS, Claim, Flag, Measurement, Row, benchmark, start
from planaria.config.recipe import with_flags
from planaria.config.schema import RunConfig
from planaria.lab.commands.machine_strategies import weigh_machines
from planaria.lab.commands.placed_strategy import Strategy
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
SETTINGS = list(product((256, 1024), (10, 50, 200), (10, 80)))
"""width, Mbit/s each way, milliseconds from one home to another"""
FAR = 1.05
"""ratio of an advised step to the fastest above which the advice is wrong"""


def topology_of(machines: Sequence[tuple[float, float, float, float]]) -> Topology:
    nodes = tuple(Node(f"home {n}", f"home {n}", speed, memory=1, role="any") for n, (speed, *_) in enumerate(machines))
    links = {
        (f"home {a}", f"home {b}"): (
            (machines[a][3] + machines[b][3]) / 1e3,
            min(machines[a][1], machines[b][2]) * MBIT,
        )
        for a, b in permutations(range(len(machines)), 2)
    }
    return Topology(nodes, links | {(node.site, node.site): (0.0, 1000 * MBIT) for node in nodes})


def base(name: str, steps: int, width: int = 128, wire: str = "fp32", **sections: Any) -> RunConfig:
    return small_run(
        name,
        steps,
        1,
        model={"vocab": 260, "dim": width, "layers": 6, "heads": 4, "hidden": 64, "context": 128},
        pipeline={"microbatches": 8, "microbatch_size": 4, "wire": wire},
        network=sleeping(0.06),
        **sections,
    )


def measured_s(strategy: Strategy, topology: Topology, name: str, steps: int) -> float:
    """Return the median step of a fleet that trains a pipeline on its machines."""
    return median(step_seconds(finished(emulated_run(strategy, topology, name, steps)), SKIP))


def emulated_run(strategy: Strategy, topology: Topology, name: str, steps: int) -> RunConfig:
    """Return a run whose stages sleep, over emulated links; advice leaves emulation out.

    Schedules have links of their own for each pair of machines. Machines may hold all microbatches: under a schedule's
    rule (first come, first served), which differs from 1F1B, the simulated step is then within 5 % of the advised one.
    """
    config, machines = _equal_stages(strategy.config, strategy.machines)
    stages = len(machines)
    own = Topology(tuple(replace(one, memory=config.pipeline.microbatches) for one in machines), topology.links)
    routes = np.tile(np.arange(1, stages), (config.pipeline.microbatches, 1))
    plan = Solution(np.arange(stages), np.zeros(len(routes), np.int64), routes)
    record, bound = SearchRecord(seed=0, moves=0, seconds=0), ProvedBound(step_s=0, binds="none")
    file = RUNS / f"{name}.schedule.json"
    write(make_schedule(problem_of(config, own), plan, strategy.step_s, bound, {}, record), file)
    routing = config.routing.model_copy(update={"schedule": str(file.absolute())})
    train = config.train.model_copy(update={"steps": steps + SKIP})
    pipeline = config.pipeline.model_copy(update={"in_flight": None})  # a schedule's nodes admit microbatches
    network = config.network.model_copy(update={"emulate": True})
    return config.model_copy(update={"routing": routing, "train": train, "pipeline": pipeline, "network": network})


def _equal_stages(config: RunConfig, machines: Sequence[Node]) -> tuple[RunConfig, Sequence[Node]]:
    """Return stages of one size, as schedules need, on machines whose speeds make up for it: stages only sleep."""
    sizes = config.pipeline.layers
    if sizes is None or isinstance(sizes, str):
        return config, machines
    mean, network, layers = sum(sizes) / len(sizes), {}, config.model.ends_layers + len(sizes)
    for name in ("forward_s", "backward_s"):
        ends, *blocks = getattr(config.network, name)
        network[f"network.{name}"] = [ends, *[sum(blocks) / len(blocks)] * len(blocks)]
    speeds = [1.0, *(mean / size for size in sizes)]
    machines = [replace(one, speed=one.speed * factor) for one, factor in zip(machines, speeds, strict=True)]
    return with_flags(config, {"pipeline.layers": None, "model.layers": layers, **network}), machines


class Judged(NamedTuple):
    """Advice beside measurements; replicas are not measured, and a machine alone sends nothing and is calculated."""

    advised: list[Strategy]
    """best first"""
    seconds: dict[str, float]
    """measured steps by strategy"""

    @property
    def won(self) -> str:
        return min(self.seconds, key=self.seconds.__getitem__)

    @property
    def ratio(self) -> float:
        """Return the advised strategy's measured step over the fastest one."""
        return self.seconds[self.advised[0].name] / self.seconds[self.won]

    @property
    def columns(self) -> dict[str, str]:
        found = {"advised": self.advised[0].name, "won": self.won}
        steps = {one.name: f"{one.step_s:.3f} / {self.seconds[one.name]:.3f}" for one in self.advised if one.sends}
        return found | steps

    @property
    def off(self) -> list[float]:
        """Return the error of each pipeline's predicted step, %."""
        return [abs(100 * (one.step_s / self.seconds[one.name] - 1)) for one in self.advised if one.sends]


def judge(config: RunConfig, topology: Topology, steps: int) -> Judged:
    advised = [one for one in weigh_machines(config, topology) if "replicas" not in one.name]
    seconds = [measured_s(one, topology, config.name, steps) if one.sends else one.step_s for one in advised]
    return Judged(advised, dict(zip((one.name for one in advised), seconds, strict=True)))


@benchmark("households", steps=Flag(4, "of each fleet, warm-up apart"))
def run_households(args: Namespace) -> Measurement:
    """Compare the advice for six made-up households with fleets whose stages sleep, over emulated links.

    Claims: the fastest option is named in ≥ 5 of 6, and predicted hours of each pipeline are within 15 %.
    """
    rows, named = [], 0
    for number, (household, machines) in enumerate(HOUSEHOLDS.items()):
        judged = judge(base(f"household-{number}", SKIP), topology_of(machines), args.steps)
        named += judged.ratio <= CLOSE
        what = f"{household}: error of hours, %"
        rows.append(Row(what, judged.off, "0", Claim(high=15), judged.columns, judged="worst"))
    rows.append(Row("households whose fastest option is named", [float(named)], "6", Claim(low=5)))
    return rows


@benchmark("advice_settings", steps=Flag(3, "of each fleet, warm-up apart"))
def run_settings(args: Namespace) -> Measurement:
    """Compare the advice for three equal homes with fleets, for 2 widths, 3 bandwidths and 2 latencies.

    Options are one machine alone, and pipelines with bf16, 8/8 and 6/4. Claims: the fastest is named in ≥ 10 of
    12 settings, and the advised one is never more than 5 % slower.
    """
    rows, named = [], 0
    for number, (width, mbit, milliseconds) in enumerate(SETTINGS):
        topology = topology_of([(1.0, mbit, mbit, milliseconds / 2)] * 3)
        judged = judge(base(f"setting-{number}", SKIP, width, "bf16"), topology, args.steps)
        named += judged.ratio <= CLOSE
        what = f"width {width}, {mbit} Mbit/s, {milliseconds} ms: advised / fastest step"
        rows.append(Row(what, [judged.ratio], "1", Claim(high=FAR), judged.columns))
    rows.append(Row("settings whose fastest option is named", [float(named)], "12", Claim(low=10)))
    return rows


if __name__ == "__main__":
    start(households=run_households, settings=run_settings)
