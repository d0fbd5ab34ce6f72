"""The fleet on Ray beside the local one: same recipe, same seed, one run.

Both fleets train the same steps in turn: their losses must be equal, and a step on Ray must not take longer than 1.15
of a local one, with stages that compute and with stages so small that little but the control is left. Then workers,
actors and nodes of a Ray cluster are struck: SIGKILL to a worker and to an actor (noticed in 2 s), to all of a node
(3 s), SIGSTOP to all of a node (6 s). The cluster's nodes are processes of this machine.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common import Claim, Row, conclude, milliseconds, parser, start
from benchmarks.fleet_run import Relay, add_model_flags, real_stages, require_finished, run_fleet, step_seconds
from planaria.config.schema import FleetConfig, NetworkConfig, RunConfig
from planaria.control import decisions as d
from planaria.control import events as e

if TYPE_CHECKING:
    from planaria.control.logs import RunRecord
    from planaria.control.protocols import Observer

NAME = "ray_fleet"
SETTINGS = {
    "worker_niceness": 0,
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
"""docs/ray.md says what they are for"""
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
    config = real_stages(size, f"{NAME}-{'small' if small else 'steps'}", given.steps, spares=1, save_every=0)
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
    plain = real_stages(size, f"{NAME}-{kind.replace(' ', '-')}", 40, spares=1, save_every=3)
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


def main() -> int:
    flags = parser(NAME, __doc__)
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
    return conclude(NAME, given, rows, ["ray and local: milliseconds of all steps; ratio: of the medians of two runs"])


if __name__ == "__main__":
    start(main)
