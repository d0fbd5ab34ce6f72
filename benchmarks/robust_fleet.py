"""Robust aggregation on real processes: lying replicas, silent replicas, and the speed of the rules."""

from __future__ import annotations

import gc
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.checkpoints import peak
from benchmarks.fleet_run import VOCAB, bytes_data, finished
from benchmarks.harness import Claim, Flag, Measurement, Result, Row, benchmark, interleaved, ratios, run_config, start
from planaria.config.bounds import Natural
from planaria.config.options import Options
from planaria.config.schema import ExchangeConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.exchange.aggregate import AggregatingExchange
from planaria.exchange.base import StageOuterState, Update, Weights
from planaria.exchange.monna import MoNNA
from planaria.exchange.registry import make_exchange
from planaria.exchange.robust.combining import sum_rows
from planaria.exchange.robust.products import iter_chunks
from planaria.exchange.update_attacks import ATTACKS
from planaria.faults.trace import Fault
from planaria.runtime.transport.edge import Edge
from planaria.runtime.transport.wire import Label, UpdatePart
from planaria.runtime.worker.assignment import Assignment

REPLICAS, LIAR, BEGINS, EVERY = 6, 1, 50, 10
RULE = "multikrum"
MEANS = ("own_flip", "random", "alie", "ipm")  # attacks shown with the mean
UNHEARD = "wrong_size"  # an attack that every honest replica rejects under any rule


def recipe(args: Namespace, name: str, seed: int, robust: str, stages: int = 1) -> Any:
    return run_config(
        f"robust_fleet-{name}-{seed}",
        seed=seed,
        data=bytes_data(),
        model={"vocab": VOCAB, "dim": 32, "layers": 2 * stages, "heads": 4, "hidden": 88, "context": 32},
        pipeline={"stages": stages, "microbatches": 1, "microbatch_size": 4},
        optim={"lr": 3e-3, "warmup": 10, "schedule": "constant"},
        train={"steps": args.steps, "eval_every": args.steps, "eval_microbatches": 16},
        exchange={"replicas": REPLICAS, "kind": "diloco", "robust": robust, "options": {"every": EVERY}},
        fleet={"spares": 0, "missed_heartbeats": 40},
        checkpoint={"every": 0},
    )


def is_byzantine(attack: str, nodes: Sequence[int], last: int, strength: float | None = None) -> tuple[Any, ...]:
    ends = nodes[:1] if attack == "label_flip" else nodes
    return tuple(
        Fault(step=BEGINS, stage=node, signal="corrupt_update", attack=attack, strength=strength, until=last)
        for node in ends
    )


class Ended(NamedTuple):
    """The result of a run at its honest replicas."""

    loss: float  # mean validation loss
    samples: Mapping[tuple[int, int], int]  # (replica, step) → its block


def ended(config: Any, faults: tuple[Any, ...]) -> Ended:
    """Train to the end.

    :raises AssertionError: if a worker failed or an honest replica was rejected.
    """
    record = finished(config, faults)
    facts = [fact for _, fact in record.history]
    failed = [fact for fact in facts if isinstance(fact, e.WorkerFailed)]
    refused = {fact.replica for fact in facts if isinstance(fact, e.UpdateRejected)}
    assert not failed and refused <= ({LIAR} if faults else set()), (failed, refused)
    last = {f.replica: f.loss for f in facts if isinstance(f, e.StageReady) and f.mode == "evaluate" and f.loss}
    begun = (f for f in facts if isinstance(f, d.RunStep) and f.mode == "train" and f.replica != LIAR)
    samples = {(f.replica, f.step): f.block for f in begun}
    return Ended(fmean(loss for replica, loss in last.items() if replica != LIAR), samples)


def whole_replicas(args: Namespace) -> list[Row]:
    def run(seed: int, rule: str, attack: str) -> Ended:
        faults = is_byzantine(attack, (2 * LIAR, 2 * LIAR + 1), args.steps) if attack else ()
        return ended(recipe(args, f"{rule or 'mean'}-{attack or 'honest'}", seed, rule), faults)

    honest = {rule: {seed: run(seed, rule, "") for seed in args.seeds} for rule in ("", RULE)}

    def row(name: str, runs: Mapping[int, Ended], over: str, claim: Claim | None = None) -> Row:
        losses = [run.loss / honest[over][seed].loss for seed, run in runs.items()]
        others = sum(len(run.samples.items() ^ honest[over][seed].samples.items()) for seed, run in runs.items())
        limit = f"1; {over or 'mean'}: {median(run.loss for run in honest[over].values()):.3f} nats"
        return Row(name, losses, limit, claim, {"steps on other samples": others}, judged="worst")

    def lied(rule: str, attack: str, claim: Claim | None = None) -> Row:
        runs = {seed: run(seed, rule, attack) for seed in args.seeds}
        return row(f"{rule or 'mean'}, {attack}: loss over the same without lies", runs, rule, claim)

    named = args.attacks or [*ATTACKS]
    rows = [row(f"{RULE}, none lies: loss over the mean's", honest[RULE], "")]
    rows += [lied(RULE, attack, Claim(high=1.03)) for attack in named]
    return rows + [lied("", attack) for attack in (UNHEARD, *MEANS) if attack in (UNHEARD, *named)]


@benchmark("robust_fleet", seeds=[1, 2, 3], steps=120, attacks=Flag(None, "all that ship unless named", nargs="*"))
def run_robust_fleet(args: Namespace) -> Measurement:
    """Train replicas as processes with one Byzantine replica under every shipped attack; the loss must not change.

    Six replicas of two stages train a small byte LLaMA with DiLoCo rounds every tenth step. From step 50 one of them is
    Byzantine in every round. The rule is multi-Krum for one; the mean is shown for attacks that are valid messages. The
    cost of an attack is the loss over that of the same run and rule without it, as the mean of the five honest
    replicas; all runs of a seed share start, steps, rounds and samples. The rule's own cost and the sixth replica's
    contribution are shown separately.

    Claims: every run finishes, no worker fails, only the Byzantine replica is rejected; an attack costs at most
    3 % of the loss.
    """
    return whole_replicas(args)


ROBUST_SILENT_REPLICAS, BYZANTINE, ROBUST_SILENT_EVERY, PATIENCE_S = 7, 1, 10, 10.0


class Mute(MoNNA):
    """MoNNA with silent replicas."""

    mute: Natural = 0  # replicas, from number 1 on, whose workers send no offers

    def update(self, outer: StageOuterState, fast: Weights, prefetched: Tensor | None = None) -> Update:
        here = next((found.replica for found in gc.get_objects() if type(found) is Assignment), 0)
        if 0 < here <= self.mute:
            silence()
        return super().update(outer, fast, prefetched)


def silence() -> None:
    """Stop this process from sending updates."""
    if hasattr(Edge, "speak"):
        return
    speak, spoiled = Edge.send, Edge  # type: Any, Any

    def send(edge: Edge, label: Label, payload: Tensor, later: bool = False) -> None:
        if not isinstance(label, UpdatePart):
            speak(edge, label, payload, later)

    spoiled.speak, spoiled.send = speak, send


def robust_silent_recipe(name: str, seed: int, rounds: int, mute: int, pass_s: float) -> Any:
    options = {"every": ROBUST_SILENT_EVERY, "byzantine": BYZANTINE, "mute": mute}
    exchange = {"kind": "benchmarks.robust_fleet:Mute", "options": options, "patience_s": PATIENCE_S}
    return run_config(
        f"robust_silent-{name}-{seed}",
        seed=seed,
        model={"vocab": VOCAB, "dim": 32, "layers": 1, "heads": 2, "hidden": 64, "context": 16},
        pipeline={"stages": 1, "microbatches": 1, "microbatch_size": 1},
        data=bytes_data(),
        optim={"lr": 1e-3},
        train={"steps": rounds * ROBUST_SILENT_EVERY, "eval_every": 0},
        exchange={"replicas": ROBUST_SILENT_REPLICAS, **exchange},
        fleet={"spares": 0, "missed_heartbeats": 40, "replace": False},
        checkpoint={"every": 0},
        network={"emulate": True, "forward_s": [pass_s], "backward_s": [2 * pass_s]},
    )


def settled(config: Any, faults: Sequence[Any] = ()) -> tuple[dict[int, float], Sequence[tuple[float, Any]]]:
    """Return when each round was settled by the last live replica that sends, and the run's history."""
    record = finished(config, tuple(faults))
    found: dict[int, float] = {}
    for t, fact in record.history:
        if isinstance(fact, d.Settle) and set(fact.members) != {1}:
            found[fact.round] = t
    return found, record.history


def round_s(config: Any) -> float:
    """Return the mean seconds between rounds."""
    at, _ = settled(config)
    return (at[max(at)] - at[min(at)]) / (max(at) - min(at))


def after_deaths(config: Any, dead: int) -> tuple[float, list[str]]:
    """Return the seconds from the last death to the end of the next round, and the lines that name lost replicas."""
    faults = [
        Fault(step=2 * ROBUST_SILENT_EVERY + 2, stage=2 * (1 + k) + stage) for k in range(dead) for stage in (0, 1)
    ]
    at, history = settled(config, faults)
    last = max(t for t, fact in history if isinstance(fact, e.WorkerLost))
    gone = {fact.replica: fact.reason for _, fact in history if isinstance(fact, d.Disband)}
    assert gone.keys() == {1 + k for k in range(dead)} and all("\n" not in reason for reason in gone.values()), gone
    return min(t for t in at.values() if t > last) - last, [f"replica {n}: {reason}" for n, reason in gone.items()]


@benchmark("robust_silent", seeds=[1, 2, 3], rounds=8, pass_ms=Flag(20.0, "of a forward at each of the two stages"))
def run_robust_silent(args: Namespace) -> Measurement:
    """Measure how long MoNNA's replicas wait for silent or lost ones.

    Seven replicas as fourteen processes with sleeping stages exchange every tenth step, f = 1. In one arm all send; in
    the other one replica sends no updates. Then all workers of f, and of f + 1, replicas are killed without
    replacement. Claims: a round with f silent replicas takes at most 1.1 times as long; after the deaths the next
    round is settled within exchange.patience_s and a line names each lost replica; every run ends by itself.
    """
    pass_s, rows, notes = args.pass_ms / 1e3, list[Row](), list[str]()
    muted, usual = list[float](), list[float]()
    for seed in args.seeds:
        usual.append(round_s(robust_silent_recipe("speak", seed, args.rounds, 0, pass_s)))
        muted.append(round_s(robust_silent_recipe("mute", seed, args.rounds, BYZANTINE, pass_s)))
    limit = f"1; {fmean(usual):.2f} s a round, of which steps {ROBUST_SILENT_EVERY * 6 * pass_s:.2f} s"
    rows.append(
        Row("round with a silent replica / without", ratios(muted, usual), limit, Claim(high=1.1), judged="worst")
    )
    for dead in (BYZANTINE, BYZANTINE + 1):
        took = []
        for seed in args.seeds:
            seconds, lines = after_deaths(robust_silent_recipe(f"dead{dead}", seed, args.rounds, 0, pass_s), dead)
            took.append(seconds)
        notes += lines
        what = f"{dead} of {ROBUST_SILENT_REPLICAS} replicas killed: seconds to the end of the next round"
        rows.append(Row(what, took, f"{PATIENCE_S:g} s", Claim(high=PATIENCE_S), judged="worst"))
    return Result(rows, notes)


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
"""exchange.robust, and the limit of its time over the mean's"""


def sides(args: Namespace) -> dict[str, Callable[[], object]]:
    """Return each rule's computation on the same values."""
    draw, size = torch.Generator().manual_seed(1), args.values // PIECES
    updates = {
        member: {f"w{piece}": torch.randn(size, generator=draw) for piece in range(PIECES)}
        for member in range(args.replicas)
    }

    def side(robust: dict[str, Any] | None) -> Callable[[], object]:
        named = Options({**robust, "byzantine": args.byzantine}) if robust else ""
        made = make_exchange(ExchangeConfig(replicas=args.replicas, robust=named))
        assert isinstance(made, AggregatingExchange)
        return lambda: made.aggregate_with_rule(StageOuterState(), updates)

    def read() -> None:
        for _, rows in iter_chunks([list(weights.values()) for weights in updates.values()]):
            sum_rows(rows, [1.0] * len(rows))

    return {"mean": side(None), "read once": read, **{name: side(robust) for name, (robust, _) in RULES.items()}}


def seconds(side: Callable[[], object]) -> float:
    """Return the processor time of a side, all threads."""
    begin = time.process_time()
    side()
    return time.process_time() - begin


@benchmark("robust_speed", values=Flag(10_000_000, "of one replica"), replicas=16, byzantine=3, repeats=7)
def run_robust_speed(args: Namespace) -> Measurement:
    """Measure the time and memory of robust rules over the mean: sixteen replicas of ten million values, f = 3.

    Both sides of a ratio are measured in turns in one process with one thread. Claims: median and trimmed mean take at
    most 2 times as long (with numba), rules by inner products at most 1.3 times. The latter must read all vectors
    twice; the time of that is shown. Memory is the peak above the given values.
    """
    torch.set_num_threads(1)
    all_sides = sides(args)
    used: dict[str, float] = {}
    for name, side in all_sides.items():
        found: list[float] = []
        side()  # compile, or load compiled code
        with peak(found):
            side()
        used[name] = found[0] / (4 * args.values)
    took = interleaved([lambda side=side: seconds(side) for side in all_sides.values()], args.repeats)  # type: ignore[misc]
    by_name = dict(zip(all_sides, took, strict=True))
    rows = []
    for name in [*RULES, "read once"]:
        over = ratios(by_name[name], by_name["mean"])
        most = RULES[name][1] if name in RULES else None
        columns = {"seconds": round(median(by_name[name]), 3), "peak, values": round(used[name], 2)}
        twice = 2 * median(by_name["read once"]) / median(by_name["mean"])
        limit = f"reading twice: {twice:.2f}" if most == 1.3 else "1"
        rows.append(Row(f"{name}: time over the mean's", over, limit, Claim(high=most) if most else None, columns))
    notes = [f"mean: {median(by_name['mean']):.3f} s, peak {used['mean']:.2f} of one replica's values"]
    return Result(rows, notes)


if __name__ == "__main__":
    start(fleet=run_robust_fleet, silent=run_robust_silent, speed=run_robust_speed)
