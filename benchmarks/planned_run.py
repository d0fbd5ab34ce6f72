"""A schedule on real processes: does a step take what the plan says, and does a run go on when nodes die?

Twelve nodes, one in each of the published cities: three data nodes, three stages of three nodes, 12 microbatches.
Passes and links cost a fiftieth of the published times: stages sleep, links delay, all else is real. The simulated step
is the plan's own, and the time in which the nodes of a stage then add up their gradients: through the most central, as
the fleet does (``planner/tables.py``). A plan that is made for these sums too is held against the one that is not.

Then nodes are killed one after the other, and nobody takes their place: the run goes on by a new plan for those that
are left, found in a thread of the controller.

The claims: measured over simulated between 0.85 and 1.15; a plan made with the sums is no slower; from the kill to the
first finished microbatch of the new plan at most 3 s; every new plan keeps all rules.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.common import RUNS, Cell, Claim, Row, conclude, milliseconds, parser, start
from benchmarks.fleet_run import VOCAB, bytes_data, require_finished, run_fleet, step_seconds
from planaria.config import recipe, shipped
from planaria.config.schema import (
    CheckpointConfig,
    FleetConfig,
    ModelConfig,
    NetworkConfig,
    PipelineConfig,
    RecoveryConfig,
    RoutingConfig,
    RunConfig,
    TrainConfig,
)
from planaria.control.events import Replanned
from planaria.control.logs import RunRecord
from planaria.faults.trace import Fault
from planaria.pipeline.network.topology import read
from planaria.planner.bound import certificate
from planaria.planner.cells import remaining
from planaria.planner.guidelines import broken
from planaria.planner.problem import Problem, Solution, problem_of
from planaria.planner.schedule import Bound, Search, schedule_of, write
from planaria.planner.search import Budget, search, step_ns
from planaria.report.run.recovery_timeline import recoveries

NAME = "planned_run"
SCALE = 0.02
STAGES, DATA, MICROBATCHES = 3, 3, 12
SKIP_STEPS = 3
"""steps that open edges, fill caches and are not counted"""
GAP = 6
"""steps between two kills"""


def problem(skip: float) -> Problem:
    """The published costs and links, of one node in each city, a fiftieth of the time."""
    flags = {
        "pipeline.stages": f"{STAGES}", "pipeline.microbatches": f"{MICROBATCHES}", "model.layers": f"{STAGES}",
        "network.forward_s": "[0.11, 0.44, 0.44, 0.44]", "network.backward_s": "[0.0, 0.66, 0.66, 0.66]",
        "routing.data_nodes": f"{DATA}", "routing.skip": f"{skip}",
    }  # fmt: skip
    config = recipe.load(shipped.find("twelve_cities"), flags)
    network = config.network
    shorter = {
        "forward_s": [SCALE * s for s in network.forward_s],
        "backward_s": [SCALE * s for s in network.backward_s],
        "entry_forward_s": SCALE * network.entry_forward_s,
        "entry_backward_s": SCALE * network.entry_backward_s,
    }
    config = config.model_copy(update={"network": network.model_copy(update=shorter)})
    topology = read(shipped.FOLDER / "topologies" / "twelve_cities.toml", SCALE)
    one_each = type(topology)(topology.nodes[:12], topology.links, topology.overhead_s, topology.queueing, SCALE)
    return problem_of(config, one_each)


def config_for(asked: Problem, solution: Solution, step_s: float, name: str, steps: int) -> RunConfig:
    """A small model on this schedule; each pass and message takes what the schedule says."""
    bound = Bound(**certificate(asked)._asdict())
    file = RUNS / f"{name}.schedule.json"
    write(schedule_of(asked, solution, step_s, bound, {}, Search(seed=0, moves=0, seconds=0)), file)
    return RunConfig(
        name=name,
        out=str(RUNS),
        model=ModelConfig(vocab=VOCAB, dim=32, layers=STAGES, heads=2, hidden=64, context=32),
        pipeline=PipelineConfig(stages=STAGES, microbatches=MICROBATCHES, microbatch_size=1),
        routing=RoutingConfig(schedule=str(file.absolute())),
        data=bytes_data(),
        train=TrainConfig(steps=steps, eval_every=0),
        recovery=RecoveryConfig(meanwhile="skip"),
        fleet=FleetConfig(spares=0, replace=False),
        checkpoint=CheckpointConfig(every=0),
        network=NetworkConfig(emulate=True),
    )


def with_sums(asked: Problem) -> Problem:
    """The same, gradients summed at the end: a link delays all messages alike."""
    return replace(asked, sums=np.stack([asked.link, asked.link]))


def summed_s(asked: Problem, solution: Solution) -> float:
    """Seconds of a plan's step with its sums."""
    return step_ns(with_sums(asked), solution) / 1e9


def measured(given: argparse.Namespace, skip: float, sums: bool) -> tuple[list[float], dict[str, Cell], float]:
    """Seconds of steps on a fleet; what is told beside them; and the simulated step, sums included."""
    asked = with_sums(problem(skip)) if sums else problem(skip)
    found = search(asked, given.seed, Budget(moves=given.moves))
    record = run_fleet(config_for(asked, found.solution, found.step_s, NAME, given.steps + SKIP_STEPS))
    require_finished(record)
    simulated, seconds = summed_s(asked, found.solution), step_seconds(record, SKIP_STEPS)
    beside: dict[str, Cell] = {
        "fleet": milliseconds(seconds),
        "simulated": milliseconds([simulated]),
        "of it passes": milliseconds([step_ns(problem(skip), found.solution) / 1e9]),
    }
    return seconds, beside, simulated


def step_rows(given: argparse.Namespace) -> list[Row]:
    rows, seconds = [], []
    for what, skip, sums in (
        ("nothing skipped", 0.0, False),
        ("a third skipped", given.skip, False),
        ("a third skipped, planned with the sums", given.skip, True),
    ):
        steps, beside, simulated = measured(given, skip, sums)
        ratios = [s / simulated for s in steps]
        rows.append(Row(f"{what}: measured ÷ simulated", ratios, "1", Claim(0.85, 1.15), beside))
        seconds.append(steps)
    ratios = [with_them / median(seconds[1]) for with_them in seconds[2]]
    return [*rows, Row("planned with the sums ÷ without, measured", ratios, "unknown", Claim(high=1.0))]


def kill_rows(given: argparse.Namespace) -> list[Row]:
    """One node of each block stage, and one data node, gone for good."""
    asked = problem(given.skip)
    found = search(asked, given.seed, Budget(moves=given.moves))
    victims = [found.solution.members(stage)[0] for stage in (1, 0, 2, 3)][: given.kills]
    steps = SKIP_STEPS + GAP * (len(victims) + 1)
    faults = tuple(
        Fault(step=SKIP_STEPS + GAP * (k + 1), stage=node, moment="any", offset=0.5) for k, node in enumerate(victims)
    )
    record = run_fleet(config_for(asked, found.solution, found.step_s, f"{NAME}-kills", steps), faults)
    require_finished(record)
    timings, plans = recoveries(record), replanned(record)
    totals = [t.total for t in timings if t.total is not None]
    invalid = sum(1 for plan in plans if broken_rules(asked, found.solution, plan))
    missing = len(victims) - len(totals)
    beside: dict[str, float | int | str] = {
        "plan found in": milliseconds([plan.seconds for plan in plans]),
        "steps by the plans": ", ".join(f"{1e3 * plan.step_s:.0f} ms" for plan in plans),
    }
    return [
        Row("node killed: seconds to go on", totals, "none known", Claim(high=3.0), beside, "worst"),
        Row("new plans that break a rule, or never came", [invalid + missing], "0", Claim(high=0.0)),
    ]


def replanned(record: RunRecord) -> list[Replanned]:
    return [fact for _, fact in record.history if isinstance(fact, Replanned)]


def broken_rules(asked: Problem, solution: Solution, plan: Replanned) -> Sequence[object]:
    kept = sorted(plan.nodes)
    new = {node: place for place, node in enumerate(kept)}
    routes = np.array([[new[node] for node in route] for route in plan.routes])
    return broken(remaining(asked, solution, kept), Solution(solution.stage[kept], routes[:, 0], routes[:, 1:-1]))


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--skip", type=float, default=0.33)
    flags.add_argument("--moves", type=int, default=200_000, help="of each search")
    flags.add_argument("--steps", type=int, default=20, help="measured steps of each schedule")
    flags.add_argument("--kills", type=int, default=4)
    given = flags.parse_args()
    Path(RUNS).mkdir(parents=True, exist_ok=True)
    rows = [
        *step_rows(given),
        *kill_rows(given),
    ]
    return conclude(NAME, given, rows, ["fleet, simulated: milliseconds of a step"])


if __name__ == "__main__":
    start(main)
