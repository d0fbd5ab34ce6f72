"""Robust aggregation on real processes: lying replicas, silent replicas, and the speed of the rules."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.checkpoints import peak
from benchmarks.common import RUNS, Claim, Row, conclude, interleaved, parser, start
from planaria.config.bounds import Natural
from planaria.exchange.monna import MoNNA

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from planaria.exchange.base import Offer, Outer, Weights


ROBUST_FLEET_NAME = "robust_fleet"
REPLICAS, LIAR, BEGINS, EVERY = 6, 1, 50, 10
RULE = "multikrum"
MEANS = ("own_flip", "random", "alie", "ipm")
"""attacks that are shown with the mean"""
UNHEARD = "wrong_size"
"""an attack that every honest replica refuses, whatever the rule"""


def recipe(given: argparse.Namespace, name: str, seed: int, robust: str, stages: int = 1) -> Any:
    from benchmarks.fleet_run import VOCAB, bytes_data
    from planaria.config.schema import RunConfig

    return RunConfig.model_validate(
        {
            "name": f"{ROBUST_FLEET_NAME}-{name}-{seed}",
            "out": str(RUNS),
            "seed": seed,
            "data": bytes_data(),
            "model": {"vocab": VOCAB, "dim": 32, "layers": 2 * stages, "heads": 4, "hidden": 88, "context": 32},
            "pipeline": {"stages": stages, "microbatches": 1, "microbatch_size": 4},
            "optim": {"lr": 3e-3, "warmup": 10, "schedule": "constant"},
            "train": {"steps": given.steps, "eval_every": given.steps, "eval_microbatches": 16},
            "exchange": {"replicas": REPLICAS, "kind": "diloco", "robust": robust, "options": {"every": EVERY}},
            "fleet": {"spares": 0, "missed": 40},
            "checkpoint": {"every": 0},
        }
    )


def lies(attack: str, nodes: Sequence[int], last: int, strength: float | None = None) -> tuple[Any, ...]:
    from planaria.faults.trace import Fault

    ends = nodes[:1] if attack == "label_flip" else nodes
    return tuple(
        Fault(step=BEGINS, stage=node, signal="lie", attack=attack, strength=strength, until=last) for node in ends
    )


class Ended(NamedTuple):
    """What a run came to, at the replicas that never lie."""

    loss: float
    """of validation, their mean"""
    samples: Mapping[tuple[int, int], int]
    """(replica, step) → its block"""


def ended(config: Any, faults: tuple[Any, ...]) -> Ended:
    """The run, to its end.

    :raises AssertionError: when a worker has failed, or another than the liar was refused.
    """
    from benchmarks.fleet_run import require_finished, run_fleet
    from planaria.control import decisions as d
    from planaria.control import events as e

    record = run_fleet(config, faults)
    require_finished(record)
    facts = [fact for _, fact in record.history]
    failed = [fact for fact in facts if isinstance(fact, e.WorkerFailed)]
    refused = {fact.replica for fact in facts if isinstance(fact, e.OfferRefused)}
    assert not failed and refused <= ({LIAR} if faults else set()), (failed, refused)
    last = {f.replica: f.loss for f in facts if isinstance(f, e.StageReady) and f.mode == "evaluate" and f.loss}
    begun = (f for f in facts if isinstance(f, d.RunStep) and f.mode == "train" and f.replica != LIAR)
    samples = {(f.replica, f.step): f.block for f in begun}
    return Ended(fmean(loss for replica, loss in last.items() if replica != LIAR), samples)


def whole_replicas(given: argparse.Namespace) -> list[Row]:
    from planaria.exchange.attacks import ATTACKS

    def run(seed: int, rule: str, attack: str) -> Ended:
        faults = lies(attack, (2 * LIAR, 2 * LIAR + 1), given.steps) if attack else ()
        return ended(recipe(given, f"{rule or 'mean'}-{attack or 'honest'}", seed, rule), faults)

    honest = {rule: {seed: run(seed, rule, "") for seed in given.seeds} for rule in ("", RULE)}

    def row(name: str, runs: Mapping[int, Ended], over: str, claim: Claim | None = None) -> Row:
        ratios = [run.loss / honest[over][seed].loss for seed, run in runs.items()]
        others = sum(len(run.samples.items() ^ honest[over][seed].samples.items()) for seed, run in runs.items())
        limit = f"1; {over or 'mean'}: {median(run.loss for run in honest[over].values()):.3f} nats"
        return Row(name, ratios, limit, claim, {"steps on other samples": others}, judged="worst")

    def lied(rule: str, attack: str, claim: Claim | None = None) -> Row:
        runs = {seed: run(seed, rule, attack) for seed in given.seeds}
        return row(f"{rule or 'mean'}, {attack}: loss over the same without lies", runs, rule, claim)

    named = given.attacks or [*ATTACKS]
    rows = [row(f"{RULE}, none lies: loss over the mean's", honest[RULE], "")]
    rows += [lied(RULE, attack, Claim(high=1.03)) for attack in named]
    return rows + [lied("", attack) for attack in (UNHEARD, *MEANS) if attack in (UNHEARD, *named)]


def run_robust_fleet() -> int:
    """Train replicas as processes with one Byzantine replica of each kind; the loss must not change.

    Six replicas of two stages train a small LLaMA of bytes and agree by DiLoCo every tenth step. From step 50 on one of
    them lies in every round, in each of the ways that ship. The rule is multi-Krum with one liar; the mean is shown for
    the attacks that are sound messages.

    What a lie costs is the loss over that of the same run, by the same rule, in which nobody lies. Multi-Krum goes by
    five of six either way: five honest ones, or the five that do not lie (by four where an offer is refused). All runs
    of a seed have the same beginning, steps and rounds, and the same samples at each honest replica (steps on others
    are counted). The loss is the mean of the five that never lie. What the rule itself costs is told apart from that:
    its run without lies over the mean's. So is what the sixth contributes: by the mean, the run in which it says
    nothing of use.

    Claims: every run ends by itself, no worker fails, only the liar is refused; a lie costs at most 3 % of the loss.
    """
    flags = parser(ROBUST_FLEET_NAME, run_robust_fleet.__doc__)
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--steps", type=int, default=120)
    flags.add_argument("--attacks", nargs="*", help="all that ship unless named")
    given = flags.parse_args()
    return conclude(ROBUST_FLEET_NAME, given, whole_replicas(given))


ROBUST_SILENT_NAME = "robust_silent"
ROBUST_SILENT_REPLICAS, LIARS, ROBUST_SILENT_EVERY, PATIENCE_S = 7, 1, 10, 10.0


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


def robust_silent_recipe(name: str, seed: int, rounds: int, mute: int, pass_s: float) -> Any:
    from benchmarks.fleet_run import VOCAB, bytes_data
    from planaria.config.schema import RunConfig

    options = {"every": ROBUST_SILENT_EVERY, "liars": LIARS, "mute": mute}
    return RunConfig.model_validate(
        {
            "name": f"{ROBUST_SILENT_NAME}-{name}-{seed}",
            "out": str(RUNS),
            "seed": seed,
            "model": {"vocab": VOCAB, "dim": 32, "layers": 1, "heads": 2, "hidden": 64, "context": 16},
            "pipeline": {"stages": 1, "microbatches": 1, "microbatch_size": 1},
            "data": bytes_data(),
            "optim": {"lr": 1e-3},
            "train": {"steps": rounds * ROBUST_SILENT_EVERY, "eval_every": 0},
            "exchange": {
                "replicas": ROBUST_SILENT_REPLICAS, "kind": "benchmarks.robust_fleet:Mute",
                "options": options, "patience_s": PATIENCE_S
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

    faults = [
        Fault(step=2 * ROBUST_SILENT_EVERY + 2, stage=2 * (1 + k) + stage) for k in range(dead) for stage in (0, 1)
    ]
    at, history = settled(config, faults)
    last = max(t for t, fact in history if isinstance(fact, e.WorkerLost))
    gone = {fact.replica: fact.reason for _, fact in history if isinstance(fact, d.Disband)}
    assert gone.keys() == {1 + k for k in range(dead)} and all("\n" not in reason for reason in gone.values()), gone
    return min(t for t in at.values() if t > last) - last, [f"replica {n}: {reason}" for n, reason in gone.items()]


def run_robust_silent() -> int:
    """Replicas that say nothing, or are gone, among those that agree by MoNNA: how long the others wait for them.

    Seven replicas as fourteen processes, whose stages sleep what the recipe says, meet every tenth step; one may lie (f
    = 1). In one arm all speak; in the other one says nothing in any round, and takes part otherwise. Then all workers
    of f of them are killed in the middle, and of f + 1, without replacement.

    Claims: a round takes at most 1.1 times as long beside f silent replicas as without; after f or f + 1 deaths the
    next round is settled within exchange.patience_s, and a line names each replica that is gone. Every run ends by
    itself.
    """
    flags = parser(ROBUST_SILENT_NAME, run_robust_silent.__doc__)
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--rounds", type=int, default=8)
    flags.add_argument("--pass-ms", type=float, default=20.0, help="of a forward at each of the two stages")
    given = flags.parse_args()
    pass_s, rows, notes = given.pass_ms / 1e3, list[Row](), list[str]()
    ratios, usual = list[float](), list[float]()
    for seed in given.seeds:
        usual.append(round_s(robust_silent_recipe("speak", seed, given.rounds, 0, pass_s)))
        ratios.append(round_s(robust_silent_recipe("mute", seed, given.rounds, LIARS, pass_s)) / usual[-1])
    limit = f"1; {fmean(usual):.2f} s a round, of which steps {ROBUST_SILENT_EVERY * 6 * pass_s:.2f} s"
    rows.append(Row("round beside a silent replica / without", ratios, limit, Claim(high=1.1), judged="worst"))
    for dead in (LIARS, LIARS + 1):
        took = []
        for seed in given.seeds:
            seconds, lines = after_deaths(robust_silent_recipe(f"dead{dead}", seed, given.rounds, 0, pass_s), dead)
            took.append(seconds)
        notes += lines
        what = f"{dead} of {ROBUST_SILENT_REPLICAS} replicas killed: seconds to the end of the next round"
        rows.append(Row(what, took, f"{PATIENCE_S:g} s", Claim(high=PATIENCE_S), judged="worst"))
    return conclude(ROBUST_SILENT_NAME, given, rows, notes)


ROBUST_SPEED_NAME = "robust_speed"
PIECES = 10
RULES: Mapping[str, tuple[dict[str, Any], float | None]] = {
    "median": ({"rule": "median"}, 2.0),
    "trimmed mean": ({"rule": "trimmed_mean"}, 2.0),
    "Krum": ({"rule": "krum"}, 1.3),
    "multi-Krum": ({"rule": "multikrum"}, 1.3),
    "geometric median": ({"rule": "geometric_median", "rounds": 8}, 1.3),
    "Flag": ({"rule": "flag"}, 1.3),
    "bucketing, geometric median": ({"rule": "geometric_median", "rounds": 8, "mix": "bucketing"}, 1.3),
    "NNM, median": ({"rule": "median", "mix": "nnm"}, None),
}
"""exchange.robust, and how often as long as the mean it may take"""


def sides(given: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """By name, what each makes of the same values."""
    import torch

    from planaria.config.options import Options
    from planaria.config.schema import ExchangeConfig
    from planaria.exchange.aggregate import Averaging
    from planaria.exchange.base import Outer
    from planaria.exchange.kinds import exchange
    from planaria.exchange.robust.combining import weighted

    draw, size = torch.Generator().manual_seed(1), given.values // PIECES
    said = {
        member: {f"w{piece}": torch.randn(size, generator=draw) for piece in range(PIECES)}
        for member in range(given.replicas)
    }

    def side(robust: dict[str, Any] | None) -> Callable[[], object]:
        named = Options({**robust, "liars": given.liars}) if robust else ""
        made = exchange(ExchangeConfig(replicas=given.replicas, robust=named))
        assert isinstance(made, Averaging)
        return lambda: made.joined(Outer(), said)

    def read() -> None:
        from planaria.exchange.robust.products import chunks

        for _, rows in chunks([list(weights.values()) for weights in said.values()]):
            weighted(rows, [1.0] * len(rows))

    return {"mean": side(None), "read once": read, **{name: side(robust) for name, (robust, _) in RULES.items()}}


def seconds(side: Callable[[], object]) -> float:
    """Processor time, all threads of this process together."""
    begin = time.process_time()
    side()
    return time.process_time() - begin


def run_robust_speed() -> int:
    """What robust rules cost beside the mean: sixteen replicas, ten million values each, of whom three may lie.

    Both sides of a ratio are measured in the same run, in turns: the processor time of this process with one thread,
    and its peak of memory above the values that are given. The mean is the one that replicas go by. Median and trimmed
    mean take at most 2 times as long (with numba; torch, which does the same without it, takes longer), rules that go
    by inner products at most 1.3 times; none makes a copy of all vectors. A rule of the second kind has to read all
    vectors twice; what that takes by itself is shown beside it.
    """
    flags = parser(ROBUST_SPEED_NAME, run_robust_speed.__doc__)
    flags.add_argument("--values", type=int, default=10_000_000, help="of one replica")
    flags.add_argument("--replicas", type=int, default=16)
    flags.add_argument("--liars", type=int, default=3)
    flags.add_argument("--repeats", type=int, default=7)
    given = flags.parse_args()
    import torch

    torch.set_num_threads(1)
    all_sides = sides(given)
    used: dict[str, float] = {}
    for name, side in all_sides.items():
        found: list[float] = []
        side()  # what is compiled is compiled, or read, now
        with peak(found):
            side()
        used[name] = found[0] / (4 * given.values)
    took = interleaved([lambda side=side: seconds(side) for side in all_sides.values()], given.repeats)  # type: ignore[misc]
    by_name = dict(zip(all_sides, took, strict=True))
    rows = []
    for name in [*RULES, "read once"]:
        ratios = [own / mean for own, mean in zip(by_name[name], by_name["mean"], strict=True)]
        most = RULES[name][1] if name in RULES else None
        beside = {"seconds": round(median(by_name[name]), 3), "peak, values": round(used[name], 2)}
        twice = 2 * median(by_name["read once"]) / median(by_name["mean"])
        limit = f"reading twice: {twice:.2f}" if most == 1.3 else "1"
        rows.append(Row(f"{name}: time over the mean's", ratios, limit, Claim(high=most) if most else None, beside))
    notes = [f"mean: {median(by_name['mean']):.3f} s, peak {used['mean']:.2f} of one replica's values"]
    return conclude(ROBUST_SPEED_NAME, given, rows, notes)


if __name__ == "__main__":
    start(fleet=run_robust_fleet, silent=run_robust_silent, speed=run_robust_speed)
