"""Replicas that say nothing, or are gone, among those that agree by MoNNA: how long the others wait for them.

Seven replicas as fourteen processes, whose stages sleep what the recipe says, meet every tenth step; one may lie
(f = 1). In one arm all speak; in the other one says nothing in any round, and takes part otherwise. Then all workers of
f of them are killed in the middle, and of f + 1, without replacement.

Claims: a round takes at most 1.1 times as long beside f silent replicas as without; after f or f + 1 deaths the next
round is settled within exchange.patience_s, and a line names each replica that is gone. Every run ends by itself.
"""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any

from benchmarks.common import RUNS, Claim, Row, conclude, parser, start
from planaria.config.bounds import Natural
from planaria.exchange.monna import MoNNA

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from planaria.exchange.base import Offer, Outer, Weights

NAME = "robust_silent"
REPLICAS, LIARS, EVERY, PATIENCE_S = 7, 1, 10, 10.0


class Mute(MoNNA):
    """MoNNA, some of whose replicas say nothing."""

    mute: Natural = 0
    """replicas, from number 1 on, whose workers send no offers"""

    def offer(self, outer: Outer, fast: Weights, prefetched: Tensor | None = None) -> Offer:
        import gc

        from planaria.runtime.engine.position import Position

        here = next((found.replica for found in gc.get_objects() if type(found) is Position), 0)
        if 0 < here <= self.mute:
            silence()
        return super().offer(outer, fast, prefetched)


def silence() -> None:
    """From now on this process sends no offers."""
    from planaria.runtime.transport.edge import Edge
    from planaria.runtime.transport.wire import Label, OfferPart

    if hasattr(Edge, "speak"):
        return
    speak, spoiled = Edge.send, Edge  # type: Any, Any

    def send(edge: Edge, label: Label, payload: Tensor, later: bool = False) -> None:
        if not isinstance(label, OfferPart):
            speak(edge, label, payload, later)

    spoiled.speak, spoiled.send = speak, send


def recipe(name: str, seed: int, rounds: int, mute: int, pass_s: float) -> Any:
    from benchmarks.fleet_run import VOCAB, bytes_data
    from planaria.config.schema import RunConfig

    options = {"every": EVERY, "liars": LIARS, "mute": mute}
    return RunConfig.model_validate(
        {
            "name": f"{NAME}-{name}-{seed}",
            "out": str(RUNS),
            "seed": seed,
            "model": {"vocab": VOCAB, "dim": 32, "layers": 1, "heads": 2, "hidden": 64, "context": 16},
            "pipeline": {"stages": 1, "microbatches": 1, "microbatch_size": 1},
            "data": bytes_data(),
            "optim": {"lr": 1e-3},
            "train": {"steps": rounds * EVERY, "eval_every": 0},
            "exchange": {
                "replicas": REPLICAS, "kind": f"benchmarks.{NAME}:Mute", "options": options, "patience_s": PATIENCE_S
            },
            "fleet": {"spares": 0, "missed": 40, "replace": False},
            "checkpoint": {"every": 0},
            "network": {"emulate": True, "forward_s": [pass_s], "backward_s": [2 * pass_s]},
        }
    )  # fmt: skip


def settled(config: Any, faults: Sequence[Any] = ()) -> tuple[dict[int, float], Sequence[tuple[float, Any]]]:
    """(round → when the last of the replicas that speak and live had settled it; the run's history), by its clock."""
    from benchmarks.fleet_run import require_finished, run_fleet
    from planaria.control import decisions as d

    record = run_fleet(config, tuple(faults))
    require_finished(record)
    found: dict[int, float] = {}
    for t, fact in record.history:
        if isinstance(fact, d.Settle) and set(fact.members) != {1}:
            found[fact.round] = t
    return found, record.history


def round_s(config: Any) -> float:
    """Seconds from one round to the next, from the first to the last."""
    at, _ = settled(config)
    return (at[max(at)] - at[min(at)]) / (max(at) - min(at))


def after_deaths(config: Any, dead: int) -> tuple[float, list[str]]:
    """Seconds from the last of the deaths to the end of the next round, and the lines that name who is gone."""
    from planaria.control import decisions as d
    from planaria.control import events as e
    from planaria.faults.trace import Fault

    faults = [Fault(step=2 * EVERY + 2, stage=2 * (1 + k) + stage) for k in range(dead) for stage in (0, 1)]
    at, history = settled(config, faults)
    last = max(t for t, fact in history if isinstance(fact, e.WorkerLost))
    gone = {fact.replica: fact.reason for _, fact in history if isinstance(fact, d.Disband)}
    assert gone.keys() == {1 + k for k in range(dead)} and all("\n" not in reason for reason in gone.values()), gone
    return min(t for t in at.values() if t > last) - last, [f"replica {n}: {reason}" for n, reason in gone.items()]


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--rounds", type=int, default=8)
    flags.add_argument("--pass-ms", type=float, default=20.0, help="of a forward at each of the two stages")
    given = flags.parse_args()
    pass_s, rows, notes = given.pass_ms / 1e3, list[Row](), list[str]()
    ratios, usual = list[float](), list[float]()
    for seed in given.seeds:
        usual.append(round_s(recipe("speak", seed, given.rounds, 0, pass_s)))
        ratios.append(round_s(recipe("mute", seed, given.rounds, LIARS, pass_s)) / usual[-1])
    limit = f"1; {fmean(usual):.2f} s a round, of which steps {EVERY * 6 * pass_s:.2f} s"
    rows.append(Row("round beside a silent replica / without", ratios, limit, Claim(high=1.1), judged="worst"))
    for dead in (LIARS, LIARS + 1):
        took = []
        for seed in given.seeds:
            seconds, lines = after_deaths(recipe(f"dead{dead}", seed, given.rounds, 0, pass_s), dead)
            took.append(seconds)
        notes += lines
        what = f"{dead} of {REPLICAS} replicas killed: seconds to the end of the next round"
        rows.append(Row(what, took, f"{PATIENCE_S:g} s", Claim(high=PATIENCE_S), judged="worst"))
    return conclude(NAME, given, rows, notes)


if __name__ == "__main__":
    start(main)
