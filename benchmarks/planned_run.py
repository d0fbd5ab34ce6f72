"""The fleet on planned schedules, with dead nodes and a slow link, and on Ray."""

from __future__ import annotations

import os
import signal
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.fleet_run import MODEL_FLAGS, Relay, finished, losses_by_step, real_stages, small_run, step_seconds
from benchmarks.harness import RUNS, Claim, Flag, Measurement, Result, Row, benchmark, milliseconds, ratios, start
from benchmarks.processes import descendants
from planaria.config import recipe, shipped
from planaria.config.schema import FleetConfig, NetworkConfig, RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.facts.events import Replanned
from planaria.control.log.run_record import RunRecord
from planaria.faults.trace import Fault
from planaria.pipeline.network.topology import read
from planaria.planner.bound.step_bound import step_lower_bound
from planaria.planner.cells import restrict_problem
from planaria.planner.guidelines import find_violations
from planaria.planner.problem import PlanningProblem, Solution, problem_of
from planaria.planner.replan import WORK
from planaria.planner.schedule import ProvedBound, SearchRecord, make_schedule, write
from planaria.planner.search import SearchBudget, improve, search, step_ns
from planaria.report.run.recoveries import recoveries

SCALE = 0.02
STAGES, DATA, MICROBATCHES = 3, 3, 12
SKIP_STEPS = 3  # steps that open edges, fill caches and are not counted
GAP = 6  # steps between two kills


def problem(skip: float) -> PlanningProblem:
    """Return the published costs and links with one node per city, at a fiftieth of the time."""
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


def config_for(planning: PlanningProblem, solution: Solution, step_s: float, name: str, steps: int) -> RunConfig:
    """A small model on this schedule, with the schedule's times of passes and messages."""
    bound = ProvedBound(**step_lower_bound(planning)._asdict())
    file = RUNS / f"{name}.schedule.json"
    write(make_schedule(planning, solution, step_s, bound, {}, SearchRecord(seed=0, moves=0, seconds=0)), file)
    return small_run(
        name,
        steps,
        STAGES,
        model={"context": 32},
        pipeline={"microbatches": MICROBATCHES},
        routing={"schedule": str(file.absolute())},
        recovery={"meanwhile": "skip"},
        fleet={"replace": False},
        network={"emulate": True},
    )


def with_sums(planning: PlanningProblem) -> PlanningProblem:
    return replace(planning, sums=np.stack([planning.link, planning.link]))


def summed_s(planning: PlanningProblem, solution: Solution) -> float:
    return step_ns(with_sums(planning), solution) / 1e9


def measured(args: Namespace, skip: float, sums: bool) -> tuple[list[float], dict[str, Any], float]:
    """Return the seconds of steps on a fleet, further columns, and the simulated step with sums."""
    planning = with_sums(problem(skip)) if sums else problem(skip)
    found = search(planning, args.seed, SearchBudget(moves=args.moves))
    record = finished(config_for(planning, found.solution, found.step_s, "planned_run", args.steps + SKIP_STEPS))
    simulated, seconds = summed_s(planning, found.solution), step_seconds(record, SKIP_STEPS)
    columns = {
        "fleet": milliseconds(seconds),
        "simulated": milliseconds([simulated]),
        "of it passes": milliseconds([step_ns(problem(skip), found.solution) / 1e9]),
    }
    return seconds, columns, simulated


def step_rows(args: Namespace) -> list[Row]:
    rows, seconds = [], []
    for what, skip, sums in (
        ("nothing skipped", 0.0, False),
        ("a third skipped", args.skip, False),
        ("a third skipped, planned with the sums", args.skip, True),
    ):
        steps, columns, simulated = measured(args, skip, sums)
        over = [s / simulated for s in steps]
        rows.append(Row(f"{what}: measured ÷ simulated", over, "1", Claim(0.85, 1.15), columns))
        seconds.append(steps)
    over = [with_sums / median(seconds[1]) for with_sums in seconds[2]]
    return [*rows, Row("planned with the sums ÷ without, measured", over, "unknown", Claim(high=1.0))]


def kill_rows(args: Namespace) -> list[Row]:
    """Kill one node of each block stage and one data node, without replacement."""
    planning = problem(args.skip)
    found = search(planning, args.seed, SearchBudget(moves=args.moves))
    victims = [found.solution.members(stage)[0] for stage in (1, 0, 2, 3)][: args.kills]
    steps = SKIP_STEPS + GAP * (len(victims) + 1)
    faults = tuple(
        Fault(step=SKIP_STEPS + GAP * (k + 1), stage=node, moment="any", offset=0.5) for k, node in enumerate(victims)
    )
    record = finished(config_for(planning, found.solution, found.step_s, "planned_run-kills", steps), faults)
    timings = recoveries(record)
    plans = [fact for _, fact in record.history if isinstance(fact, Replanned)]
    totals = [t.total for t in timings if t.total is not None]
    invalid = sum(1 for plan in plans if broken_rules(planning, found.solution, plan))
    missing = len(victims) - len(totals)
    columns = {
        "plan found in": milliseconds([plan.seconds for plan in plans]),
        "steps by the plans": ", ".join(f"{1e3 * plan.step_s:.0f} ms" for plan in plans),
    }
    return [
        Row("node killed: seconds until training continues", totals, "none known", Claim(high=3.0), columns, "worst"),
        Row("new plans that break a rule, or never came", [invalid + missing], "0", Claim(high=0.0)),
    ]


def broken_rules(planning: PlanningProblem, solution: Solution, plan: Replanned) -> Sequence[object]:
    kept = sorted(plan.nodes)
    new = {node: place for place, node in enumerate(kept)}
    routes = np.array([[new[node] for node in route] for route in plan.routes])
    return find_violations(
        restrict_problem(planning, solution, kept), Solution(solution.stage[kept], routes[:, 0], routes[:, 1:-1])
    )


@benchmark(
    "planned_run",
    seed=0,
    skip=0.33,
    moves=Flag(200_000, "of each search"),
    steps=Flag(20, "measured steps of each schedule"),
    kills=4,
)
def run_planned_run(args: Namespace) -> Measurement:
    """Run planned schedules on real processes: steps over the plan's, and runs whose nodes die.

    Twelve nodes, one per published city: three data nodes, three stages of three nodes, 12 microbatches. Stages sleep
    and links delay a fiftieth of the published times; all else is real. The simulated step includes the gradient sums,
    through a stage's most central node as in the fleet. A plan made with these sums is compared with one made without.
    Then nodes are killed one after another without replacement; the controller plans anew for the others.

    Claims: measured over simulated 0.85 to 1.15; a plan made with the sums is no slower; from a kill to the next
    microbatch at most 3 s; every new plan keeps all rules.
    """
    Path(RUNS).mkdir(parents=True, exist_ok=True)
    return Result([*step_rows(args), *kill_rows(args)], ["fleet, simulated: milliseconds of a step"])


SETTLED = 8  # steps after the onset in which the link is found and gone around


def arms(args: Namespace, seed: int) -> dict[str, float]:
    """Return the seconds of a step by arm, measured and simulated."""
    from planaria.planner.replan import with_measured_links

    planning = problem(args.skip)
    found = search(planning, seed, SearchBudget(moves=args.moves))
    block = [hop for path in found.solution.path.tolist() for hop in pairwise(path)]
    (source, target), _ = Counter(hop for hop in block if planning.site[hop[0]] != planning.site[hop[1]]).most_common(
        1
    )[0]
    usual = float(planning.link[planning.site[source], planning.site[target]]) / 1e9
    slower = with_measured_links(planning, {(source, target): args.times * usual})
    true = search(slower, seed, SearchBudget(moves=args.moves))
    step_times = {"simulated, old plan": summed_s(slower, found.solution)}
    step_times["simulated, plan for the slow link"] = summed_s(slower, true.solution)
    routes = improve(slower, found.solution, seed, 16 * WORK // slower.work)
    step_times["simulated, best routes"] = summed_s(slower, routes.solution)
    more = (source, target, (args.times - 1) * usual)
    for diagnose in ("report", "act"):
        step_times[diagnose] = step_s(args, planning, found, diagnose, more)
    hops = {frozenset(hop) for path in true.solution.path.tolist() for hop in pairwise(path)}
    step_times["made for it"] = step_s(
        args, planning, true, "report", more if frozenset((source, target)) in hops else None
    )
    return step_times


def step_s(args: Namespace, planning: Any, found: Any, diagnose: str, slow: tuple[int, int, float] | None) -> float:
    """Return the median step of a run after its link became slow; ``slow`` None: the plan does not use the link."""
    steps = args.onset + SETTLED + args.steps
    config = config_for(planning, found.solution, found.step_s, f"reroute-{diagnose}", steps)
    fleet = config.fleet.model_copy(update={"diagnose": diagnose})
    faults = []
    if slow:
        source, target, more_s = slow
        faults.append(Fault(step=args.onset, stage=target, peer=source, signal="delay", strength=more_s))
    record = finished(config.model_copy(update={"fleet": fleet}), tuple(faults))
    return median(step_seconds(record, args.onset + SETTLED))


@benchmark(
    "reroute",
    times=Flag(20.0, "as late as usual"),
    onset=14,
    steps=Flag(24, "that count"),
    skip=1 / 3,
    moves=20_000,
    seeds=3,
)
def run_reroute(args: Namespace) -> Measurement:
    """Measure the gain of rerouting around a link that becomes slow during a run.

    Nodes and times as in ``planned_run``, three seeds of the search. From a step on, the link with most activations
    between block stages is slower by --times. One arm reports it, one reroutes, and one follows from the start a plan
    made for the slow link. Claims: rerouted steps take at most 1.10 of the latter's; reporting only takes at least 1.15
    times as long as rerouting. A plan made beforehand may place stages elsewhere, which a run cannot; the best routes
    over fixed stages, by a search of 16 times the run's own, are shown.
    """
    found = [arms(args, seed) for seed in range(1, args.seeds + 1)]
    plan, routes = "simulated, plan for the slow link", "simulated, best routes"
    return [
        Row("act over a plan made for it", [f["act"] / f["made for it"] for f in found], "1", Claim(high=1.10)),
        Row("act over the best routes' simulation", [f["act"] / f[routes] for f in found], "1", Claim(high=1.10)),
        Row("simulated: best routes over a plan made for it", [f[routes] / f[plan] for f in found], "1"),
        Row("tell over act", [f["report"] / f["act"] for f in found], "", Claim(low=1.15)),
        Row("a plan made for it over its simulation", [f["made for it"] / f[plan] for f in found], "1"),
        Row("simulated: old plan over that", [f["simulated, old plan"] / f[plan] for f in found], ""),
    ]


SETTINGS = {
    "worker_niceness": 0,
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
"""see docs/operate.md"""
STORE = {"object_store_memory": 80 << 20}
WARM_UP, STRUCK_STEP = 4, 6
PACE = NetworkConfig(emulate=True, forward_s=[0.004], backward_s=[0.008])
"""long enough runs for the faults on any machine"""
LIMITS = {"worker killed": 2.0, "actor killed": 2.0, "node killed": 3.0, "node frozen": 6.0}
"""upper bounds of the detection time, in seconds"""


@contextmanager
def cluster(room: int) -> Iterator[Any]:
    """A Ray cluster of one node with room for this many workers."""
    try:
        from ray.cluster_utils import Cluster
    except ImportError as error:
        from planaria.common.errors import UserError

        raise UserError(f"Ray cannot be imported ({error}); install it with `pip install 'planaria[ray]'`") from None
    head = {"num_cpus": room, "include_dashboard": False, "_system_config": SETTINGS, **STORE}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield made
    finally:
        made.shutdown()


def on(fleet: str, address: str, config: RunConfig) -> RunConfig:
    section = config.fleet.model_copy(update={"kind": fleet, "address": address})
    return config.model_copy(update={"name": f"{config.name}-{fleet}", "fleet": section})


def side_by_side(args: Namespace, address: str, small: bool) -> tuple[list[Row], list[float]]:
    """Measure both fleets in turn; return rows and the largest relative differences of losses."""
    size = Namespace(**(vars(args) | ({"dim": 32, "context": 16} if small else {})))
    config = real_stages(size, f"ray_fleet-{'small' if small else 'steps'}", args.steps, spares=1, save_every=0)
    seconds: dict[str, list[list[float]]] = {"local": [], "ray": []}
    apart: list[float] = []
    for repeat in range(args.repeats):
        losses: dict[str, dict[int, float]] = {}
        for fleet in ("local", "ray") if repeat % 2 == 0 else ("ray", "local"):
            record = finished(on(fleet, address, config))
            seconds[fleet].append(step_seconds(record, WARM_UP))
            losses[fleet] = losses_by_step(record)
        ray, local = losses["ray"], losses["local"]
        same = ray.keys() == local.keys()
        apart.append(max(abs(ray[step] - local[step]) / abs(local[step]) for step in local) if same else 1)
    over = ratios([median(run) for run in seconds["ray"]], [median(run) for run in seconds["local"]])
    columns = {fleet: milliseconds([s for run in runs for s in run]) for fleet, runs in seconds.items()}
    what = "a step of small stages" if small else "a step"
    return [Row(f"{what}, ray / local", over, "1: the same workers and edges", Claim(high=1.15), columns)], apart


class Striker(Relay):
    """Calls ``strike`` once, at :data:`STRUCK_STEP`."""

    def __init__(self, strike: Callable[[], None]) -> None:
        self._strike = strike
        self.struck_t: float | None = None

    def on_decision(self, t: float, decision: d.Decision) -> None:
        super().on_decision(t, decision)
        if self.struck_t is None and isinstance(decision, d.RunStep) and decision.step == STRUCK_STEP:
            self.struck_t = time.monotonic()
            self._strike()


def called(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()


def blow(kind: str, raylet: int) -> Callable[[], None]:
    """Return the function that hits a node with one worker."""

    def strike() -> None:
        everyone = descendants(raylet)
        actor = next(pid for pid in everyone if "_DrainAware" in called(pid))
        match kind:
            case "worker killed":
                os.kill(descendants(actor)[-1], signal.SIGKILL)
            case "actor killed":
                os.kill(actor, signal.SIGKILL)
            case "node killed":
                os.kill(raylet, signal.SIGKILL)
            case "node frozen":
                for pid in everyone:
                    os.kill(pid, signal.SIGSTOP)

    return strike


def incident(args: Namespace, made: Any, kind: str) -> tuple[float, float | None]:
    """Hit a separate node with one worker; return the seconds to detection and to the next microbatch."""
    node = made.add_node(num_cpus=1, **STORE)
    raylet = node.all_processes["raylet"][0].process.pid
    size = Namespace(**(vars(args) | {"dim": 32, "context": 16}))
    plain = real_stages(size, f"ray_fleet-{kind.replace(' ', '-')}", 40, spares=1, save_every=3)
    config = on("ray", made.address, plain.model_copy(update={"network": PACE}))
    striker = Striker(blow(kind, raylet))
    everyone: Sequence[int] = []
    try:
        record = finished(config, around=striker.attach)
        everyone = descendants(raylet) if kind == "node frozen" else []
        return times(record, striker.struck_t, [r.finished_t for r in recoveries(record)])
    finally:
        for pid in everyone:
            os.kill(pid, signal.SIGCONT)
        made.remove_node(node, allow_graceful=False)


def times(record: RunRecord, struck_t: float | None, ends: Sequence[float | None]) -> tuple[float, float | None]:
    """Return the seconds from the fault to its detection and to the first recovery's end (None for a spare)."""
    lost_t = next(t for t, fact in record.history if isinstance(fact, e.WorkerLost))
    assert struck_t is not None
    return lost_t - struck_t, ends[0] - struck_t if ends and ends[0] is not None else None


@benchmark(
    "ray_fleet",
    steps=Flag(60, "of each run"),
    repeats=Flag(5, "runs of each fleet and size"),
    incidents=Flag(5, "of each kind"),
    **MODEL_FLAGS,
)
def run_ray_fleet(args: Namespace) -> Measurement:
    """Compare the fleet on Ray with the local one: same recipe, same seed.

    Both fleets train the same steps in turn: equal losses; a step on Ray takes at most 1.15 of a local one, with stages
    that compute and with tiny ones. Then faults hit a Ray cluster, whose nodes are processes of this machine: SIGKILL
    of a worker and of an actor (detected in 2 s), of a node (3 s), SIGSTOP of a node (6 s).
    """
    with cluster(room=args.stages + 2) as made:
        rows, apart = side_by_side(args, made.address, small=False)
        small_rows, small_apart = side_by_side(args, made.address, small=True)
        rows += small_rows
        rows.append(Row("losses, largest difference", apart + small_apart, "0", Claim(high=1e-5), judged="worst"))
        silence = FleetConfig().heartbeat_s * (
            FleetConfig().missed_heartbeats - 1
        )  # the last heartbeat may precede the fault by one interval
        for kind, limit in LIMITS.items():
            found = [incident(args, made, kind) for _ in range(args.incidents)]
            least = f"≥ {silence:g} s of silence" if kind == "node frozen" else ""
            totals = [total for _, total in found if total is not None]
            columns = {"next microbatch": f"{median(totals):.2f} s of {len(totals)}" if totals else "–"}
            noticed = [seconds for seconds, _ in found]
            rows.append(Row(f"{kind}: noticed after, s", noticed, least, Claim(high=limit), columns, judged="worst"))
    return Result(rows, ["ray and local: milliseconds of all steps; ratio: of the medians of two runs"])


if __name__ == "__main__":
    start(planned_run=run_planned_run, reroute=run_reroute, ray_fleet=run_ray_fleet)
