"""A schedule on real processes: does a step take what the plan says, and does a run go on when nodes die?

Twelve nodes, one in each of the published cities: three data nodes, three stages of three nodes, 12 microbatches.
Passes and links cost a fiftieth of the published times: stages sleep, links delay, all else is real. The simulated step
is the plan's own, and the time in which the nodes of a stage then add up their gradients: through the most central, as
the fleet does (:func:`with_exchange`).

Then nodes are killed one after the other, and nobody takes their place: the run goes on by a new plan for those that
are left, found in a thread of the controller.

The claims: measured over simulated between 0.85 and 1.15; from the kill to the first finished microbatch of the new
plan at most 3 s; every new plan keeps all rules.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.common import RUNS, Claim, Row, conclude, milliseconds, parser, start
from benchmarks.fleet_run import VOCAB, bytes_data, require_finished, run_fleet, step_seconds
from planaria import recipe, shipped
from planaria.chaos.trace import Fault
from planaria.config import (
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
from planaria.network.costs import Prices
from planaria.network.topology import read
from planaria.observe.run.recovery_timeline import recoveries
from planaria.plan.planned import first_come
from planaria.planner.bound import certificate
from planaria.planner.guidelines import broken
from planaria.planner.parts import remaining
from planaria.planner.problem import Problem, Solution, central_first, problem_of
from planaria.planner.schedule import Bound, Search, schedule_of, write
from planaria.planner.search import Budget, search
from planaria.record.events import Replanned
from planaria.record.logs import RunRecord

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


def with_exchange(asked: Problem, solution: Solution) -> float:
    """Seconds of the plan's step, and until the nodes of every stage have the sum of their gradients.

    Each node sends its own to the most central of its stage when its last pass is over; that one sends the sum back.
    """
    clock = first_come(solution.routes, asked.memory, asked.prices)
    ends = {node: max((clock.ends[n] for n in ran), default=0) for node, ran in clock.ran.items()}
    carry, last = asked.prices.carry, 0
    for stage in range(len(asked.sizes)):
        first, *others = central_first(asked, solution.members(stage))
        whole = max([ends.get(first, 0), *(ends.get(n, 0) + carry(n, first) for n in others)])
        last = max([last, whole, *(whole + carry(first, n) for n in others)])
    return Prices.seconds(last)


def step_row(given: argparse.Namespace, what: str, skip: float) -> Row:
    asked = problem(skip)
    found = search(asked, given.seed, Budget(moves=given.moves))
    record = run_fleet(config_for(asked, found.solution, found.step_s, NAME, given.steps + SKIP_STEPS))
    require_finished(record)
    measured, simulated = step_seconds(record, SKIP_STEPS), with_exchange(asked, found.solution)
    beside: dict[str, float | int | str] = {
        "fleet": milliseconds(measured),
        "simulated": milliseconds([simulated]),
        "of it passes": milliseconds([found.step_s]),
    }
    return Row(what, [s / simulated for s in measured], "1", Claim(low=0.85, high=1.15), beside)


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
        step_row(given, "a third skipped: measured ÷ simulated", given.skip),
        step_row(given, "nothing skipped: measured ÷ simulated", 0.0),
        *kill_rows(given),
    ]
    return conclude(NAME, given, rows, ["fleet, simulated: milliseconds of a step"])


if __name__ == "__main__":
    start(main)
