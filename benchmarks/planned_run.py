"""The fleet on planned schedules, with dead nodes and a slow link, and on Ray."""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.common import RUNS, Cell, Claim, Row, conclude, milliseconds, parser, start
from benchmarks.fleet_run import (
    VOCAB,
    Relay,
    add_model_flags,
    bytes_data,
    real_stages,
    require_finished,
    run_fleet,
    step_seconds,
)
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
from planaria.control import decisions as d
from planaria.control import events as e
from planaria.control.events import Replanned
from planaria.control.run_record import RunRecord
from planaria.faults.trace import Fault
from planaria.pipeline.network.topology import read
from planaria.planner.bound import certificate
from planaria.planner.cells import remaining
from planaria.planner.guidelines import broken
from planaria.planner.problem import Problem, Solution, problem_of
from planaria.planner.schedule import Bound, Search, schedule_of, write
from planaria.planner.search import Budget, search, step_ns
from planaria.report.run.recovery_timeline import recoveries

if TYPE_CHECKING:
    from planaria.control.protocols import Observer
    from planaria.control.run_record import RunRecord


PLANNED_RUN_NAME = "planned_run"
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
    record = run_fleet(config_for(asked, found.solution, found.step_s, PLANNED_RUN_NAME, given.steps + SKIP_STEPS))
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
    record = run_fleet(config_for(asked, found.solution, found.step_s, f"{PLANNED_RUN_NAME}-kills", steps), faults)
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


def run_planned_run() -> int:
    """A schedule on real processes: does a step take what the plan says, and does a run go on when nodes die?

    Twelve nodes, one in each of the published cities: three data nodes, three stages of three nodes, 12 microbatches.
    Passes and links cost a fiftieth of the published times: stages sleep, links delay, all else is real. The simulated
    step is the plan's own, and the time in which the nodes of a stage then add up their gradients: through the most
    central, as the fleet does (``planner/sums.py``). A plan that is made for these sums too is held against the one
    that is not.

    Then nodes are killed one after the other, and nobody takes their place: the run goes on by a new plan for those
    that are left, found in a thread of the controller.

    The claims: measured over simulated between 0.85 and 1.15; a plan made with the sums is no slower; from the kill to
    the first finished microbatch of the new plan at most 3 s; every new plan keeps all rules.
    """
    flags = parser(PLANNED_RUN_NAME, run_planned_run.__doc__)
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
    return conclude(PLANNED_RUN_NAME, given, rows, ["fleet, simulated: milliseconds of a step"])


REROUTE_NAME = "reroute"
SETTLED = 8
"""steps after the onset in which the link is found and gone around"""


def arms(given: argparse.Namespace, seed: int) -> dict[str, float]:
    """Seconds of a step, measured and simulated."""
    from planaria.planner.replan import WORK, measured
    from planaria.planner.search import Budget, improve, search

    asked = problem(given.skip)
    found = search(asked, seed, Budget(moves=given.moves))
    block = [hop for path in found.solution.path.tolist() for hop in pairwise(path)]
    (source, target), _ = Counter(hop for hop in block if asked.site[hop[0]] != asked.site[hop[1]]).most_common(1)[0]
    usual = float(asked.link[asked.site[source], asked.site[target]]) / 1e9
    slower = measured(asked, {(source, target): given.times * usual})
    true = search(slower, seed, Budget(moves=given.moves))
    told = {"simulated, old plan": summed_s(slower, found.solution)}
    told["simulated, plan for the slow link"] = summed_s(slower, true.solution)
    routes = improve(slower, found.solution, seed, 16 * WORK // slower.work)
    told["simulated, best routes"] = summed_s(slower, routes.solution)
    more = (source, target, (given.times - 1) * usual)
    for diagnose in ("tell", "act"):
        told[diagnose] = step_s(given, asked, found, diagnose, more)
    hops = {frozenset(hop) for path in true.solution.path.tolist() for hop in pairwise(path)}
    told["made for it"] = step_s(given, asked, true, "tell", more if frozenset((source, target)) in hops else None)
    return told


def step_s(
    given: argparse.Namespace, asked: Any, found: Any, diagnose: str, slow: tuple[int, int, float] | None
) -> float:
    """The median step of a run once the link has been slow for a while; None: the plan does not use it."""
    from benchmarks.fleet_run import require_finished, run_fleet, step_seconds
    from planaria.faults.trace import Fault

    config = config_for(
        asked, found.solution, found.step_s, f"{REROUTE_NAME}-{diagnose}", given.onset + SETTLED + given.steps
    )
    fleet = config.fleet.model_copy(update={"diagnose": diagnose})
    faults = []
    if slow:
        source, target, more_s = slow
        faults.append(Fault(step=given.onset, stage=target, peer=source, signal="delay", strength=more_s))
    record = run_fleet(config.model_copy(update={"fleet": fleet}), tuple(faults))
    require_finished(record)
    return median(step_seconds(record, given.onset + SETTLED))


def run_reroute() -> int:
    """A link becomes slow in mid-run: what does it gain to plan anew around it?

    Twelve nodes on real processes, as in ``planned_run``: one in each of the published cities, passes and links a
    fiftieth of the published times, three seeds of the search. From a step on, the link that carries most activations
    between two block stages delivers each of them so many times later. One arm is told of it, one goes around it, and
    one follows from the start a plan that was made for the slow link. The claims: steps of who goes around are at most
    1.10 of those of who had that plan, and those of who does not take at least 1.15 times as long. A plan that is made
    beforehand may place stages elsewhere, which nobody does in mid-run. Beside it stand the best routes over nodes that
    keep their stages, by a search sixteen times as long as the run's own.
    """
    flags = parser(REROUTE_NAME, run_reroute.__doc__)
    flags.add_argument("--times", type=float, default=20.0, help="as late as usual")
    flags.add_argument("--onset", type=int, default=14)
    flags.add_argument("--steps", type=int, default=24, help="that count")
    flags.add_argument("--skip", type=float, default=1 / 3)
    flags.add_argument("--moves", type=int, default=20_000)
    flags.add_argument("--seeds", type=int, default=3)
    given = flags.parse_args()
    found = [arms(given, seed) for seed in range(1, given.seeds + 1)]
    plan, routes = "simulated, plan for the slow link", "simulated, best routes"
    rows = [
        Row("act over a plan made for it", [f["act"] / f["made for it"] for f in found], "1", Claim(high=1.10)),
        Row("act over the best routes' simulation", [f["act"] / f[routes] for f in found], "1", Claim(high=1.10)),
        Row("simulated: best routes over a plan made for it", [f[routes] / f[plan] for f in found], "1"),
        Row("tell over act", [f["tell"] / f["act"] for f in found], "", Claim(low=1.15)),
        Row("a plan made for it over its simulation", [f["made for it"] / f[plan] for f in found], "1"),
        Row("simulated: old plan over that", [f["simulated, old plan"] / f[plan] for f in found], ""),
    ]
    return conclude(REROUTE_NAME, given, rows)


RAY_FLEET_NAME = "ray_fleet"
SETTINGS = {
    "worker_niceness": 0,
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
"""docs/clusters.md says what they are for"""
STORE = {"object_store_memory": 80 << 20}
WARM_UP, STRUCK_STEP = 4, 6
PACE = NetworkConfig(emulate=True, forward_s=[0.004], backward_s=[0.008])
"""for runs that are struck: they last long enough however fast the machine is"""
LIMITS = {"worker killed": 2.0, "actor killed": 2.0, "node killed": 3.0, "node frozen": 6.0}
"""claims on the time to notice, in seconds"""


@contextmanager
def cluster(room: int) -> Iterator[Any]:
    """A Ray cluster with one node that has room for so many workers."""
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
    """The same run on another fleet."""
    section = config.fleet.model_copy(update={"kind": fleet, "address": address})
    return config.model_copy(update={"name": f"{config.name}-{fleet}", "fleet": section})


def side_by_side(given: argparse.Namespace, address: str, small: bool) -> tuple[list[Row], list[float]]:
    """Steps of both fleets, run by run in turn, and how far apart their losses are."""
    size = argparse.Namespace(**(vars(given) | ({"dim": 32, "context": 16} if small else {})))
    config = real_stages(size, f"{RAY_FLEET_NAME}-{'small' if small else 'steps'}", given.steps, spares=1, save_every=0)
    seconds: dict[str, list[list[float]]] = {"local": [], "ray": []}
    apart: list[float] = []
    for repeat in range(given.repeats):
        losses: dict[str, dict[int, float]] = {}
        for fleet in ("local", "ray") if repeat % 2 == 0 else ("ray", "local"):
            record = run_fleet(on(fleet, address, config))
            require_finished(record)
            seconds[fleet].append(step_seconds(record, WARM_UP))
            losses[fleet] = {m.step: m.loss for m in record.trained}
        ray, local = losses["ray"], losses["local"]
        apart.append(
            max(abs(ray[step] - local[step]) / abs(local[step]) for step in local) if ray.keys() == local.keys() else 1
        )
    ratios = [
        statistics.median(ray) / statistics.median(local)
        for ray, local in zip(seconds["ray"], seconds["local"], strict=True)
    ]
    beside = {fleet: milliseconds([s for run in runs for s in run]) for fleet, runs in seconds.items()}
    what = "a step of small stages" if small else "a step"
    return [Row(f"{what}, ray / local", ratios, "1: the same workers and edges", Claim(high=1.15), beside)], apart


# ---- striking


class Striker(Relay):
    """Observes for another, and strikes once, at a step."""

    def __init__(self, inner: Observer, strike: Callable[[], None]) -> None:
        super().__init__(inner)
        self._strike = strike
        self.struck_t: float | None = None

    def on_decision(self, t: float, decision: d.Decision) -> None:
        super().on_decision(t, decision)
        if self.struck_t is None and isinstance(decision, d.RunStep) and decision.step == STRUCK_STEP:
            self.struck_t = time.monotonic()
            self._strike()


def families() -> dict[int, int]:
    """Process → its parent."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            found[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
        except OSError:  # ended meanwhile
            continue
    return found


def offspring(ancestor: int) -> list[int]:
    """A process and all that come from it, parents first."""
    parents, found = families(), [ancestor]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


def called(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()


def blow(kind: str, raylet: int) -> Callable[[], None]:
    """What strikes a node with one worker."""

    def strike() -> None:
        everyone = offspring(raylet)
        actor = next(pid for pid in everyone if "_DrainAware" in called(pid))
        match kind:
            case "worker killed":
                os.kill(offspring(actor)[-1], signal.SIGKILL)
            case "actor killed":
                os.kill(actor, signal.SIGKILL)
            case "node killed":
                os.kill(raylet, signal.SIGKILL)
            case "node frozen":
                for pid in everyone:
                    os.kill(pid, signal.SIGSTOP)

    return strike


def incident(given: argparse.Namespace, made: Any, kind: str) -> tuple[float, float | None]:
    """Strike a node of its own with one worker: seconds to the notice, and to the end of the next microbatch."""
    from planaria.report.run.recovery_timeline import recoveries

    node = made.add_node(num_cpus=1, **STORE)
    raylet = node.all_processes["raylet"][0].process.pid
    size = argparse.Namespace(**(vars(given) | {"dim": 32, "context": 16}))
    plain = real_stages(size, f"{RAY_FLEET_NAME}-{kind.replace(' ', '-')}", 40, spares=1, save_every=3)
    config = on("ray", made.address, plain.model_copy(update={"network": PACE}))
    strikers: list[Striker] = []

    def around(watch: Observer, _: Path) -> Observer:
        strikers.append(Striker(watch, blow(kind, raylet)))
        return strikers[0]

    everyone: Sequence[int] = []
    try:
        record = run_fleet(config, around=around)
        require_finished(record)
        everyone = offspring(raylet) if kind == "node frozen" else []
        return times(record, strikers[0].struck_t, [r.finished_t for r in recoveries(record)])
    finally:
        for pid in everyone:
            os.kill(pid, signal.SIGCONT)
        made.remove_node(node, allow_graceful=False)


def times(record: RunRecord, struck_t: float | None, ends: Sequence[float | None]) -> tuple[float, float | None]:
    """From the blow to the first notice, and to the end of the first recovery: none if it has hit the spare."""
    lost_t = next(t for t, fact in record.history if isinstance(fact, e.WorkerLost))
    assert struck_t is not None
    return lost_t - struck_t, ends[0] - struck_t if ends and ends[0] is not None else None


def run_ray_fleet() -> int:
    """The fleet on Ray beside the local one: same recipe, same seed, one run.

    Both fleets train the same steps in turn: their losses must be equal, and a step on Ray must not take longer than
    1.15 of a local one, with stages that compute and with stages so small that little but the control is left. Then
    workers, actors and nodes of a Ray cluster are struck: SIGKILL to a worker and to an actor (noticed in 2 s), to all
    of a node (3 s), SIGSTOP to all of a node (6 s). The cluster's nodes are processes of this machine.
    """
    flags = parser(RAY_FLEET_NAME, run_ray_fleet.__doc__)
    flags.add_argument("--steps", type=int, default=60, help="of each run")
    flags.add_argument("--repeats", type=int, default=5, help="runs of each fleet and size")
    flags.add_argument("--incidents", type=int, default=5, help="of each kind")
    add_model_flags(flags)
    given = flags.parse_args()
    with cluster(room=given.stages + 2) as made:
        rows, apart = side_by_side(given, made.address, small=False)
        small_rows, small_apart = side_by_side(given, made.address, small=True)
        rows += small_rows
        rows.append(Row("losses, largest difference", apart + small_apart, "0", Claim(high=1e-5), judged="worst"))
        silence = FleetConfig().heartbeat_s * (FleetConfig().missed - 1)  # the last beat was up to one before the blow
        for kind, limit in LIMITS.items():
            found = [incident(given, made, kind) for _ in range(given.incidents)]
            least = f"≥ {silence:g} s of silence" if kind == "node frozen" else ""
            totals = [total for _, total in found if total is not None]
            whole = f"{statistics.median(totals):.2f} s of {len(totals)}" if totals else "–"
            rows.append(
                Row(
                    f"{kind}: noticed after, s", [noticed for noticed, _ in found], least, Claim(high=limit),
                    {"next microbatch": whole}, judged="worst",
                )
            )  # fmt: skip
    return conclude(
        RAY_FLEET_NAME, given, rows, ["ray and local: milliseconds of all steps; ratio: of the medians of two runs"]
    )


if __name__ == "__main__":
    start(planned_run=run_planned_run, reroute=run_reroute, ray_fleet=run_ray_fleet)
