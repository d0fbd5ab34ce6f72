"""Gradient coding: decoding, loads, simulated delays and choices, and real processes that are slow at times."""

from __future__ import annotations

import random
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from statistics import fmean, median
from typing import Any

import numpy as np
import torch

from benchmarks.fleet_run import finished, losses_by_step, sleeping, small_run
from benchmarks.harness import Claim, Flag, Measurement, Row, benchmark, ratios, start
from planaria.control.facts import decisions as d
from planaria.control.log.run_record import RunRecord
from planaria.exchange.coded.base import History, Late, Scheme, Uncoded
from planaria.exchange.coded.choose import candidate_schemes, choose, expected_seconds
from planaria.exchange.coded.coded_report import profile_of
from planaria.exchange.coded.gc import GC
from planaria.exchange.coded.schemes import SCHEMES, make_coded_schedule
from planaria.exchange.coded.simulate import FinishTimes, replay, uncoded_seconds
from planaria.faults.trace import Fault
from planaria.lab.commands.advise import best_windows


def burst_delays(
    rounds: int,
    n: int,
    seed: int,
    *,
    enter: float = 0.04,
    leave: float = 0.9,
    times: tuple[float, float] = (4.0, 6.0),
    fixed: float = 0.2,
    per_load: float | None = None,
) -> FinishTimes:
    """Return Gilbert–Elliott delays: per round a worker becomes slow with probability ``enter``, normal with ``leave``.

    A round takes ``fixed`` + ``per_load`` · L seconds (per_load = n by default), up to 5 % more, and a factor within
    ``times`` longer for a slow worker.
    """
    draw, slow, per = np.random.default_rng(seed), np.zeros(n, dtype=bool), float(n if per_load is None else per_load)
    seconds = np.empty((rounds, n))
    for now in range(rounds):
        slow = np.where(slow, draw.random(n) >= leave, draw.random(n) < enter)
        lag = np.where(slow, draw.uniform(*times, n), 1.0)
        seconds[now] = (fixed + per / n) * lag * draw.uniform(1.0, 1.05, n)
    return FinishTimes(seconds, 1 / n, per)


def best(n: int, published: bool, **kind: Any) -> dict[str, Scheme]:
    probe, found = burst_delays(80, n, 100, **kind), {}
    for name, scheme in candidate_schemes(n, published=published):
        seconds = replay(scheme, probe, 80, published=published).seconds
        found[name] = min(found.get(name, (float("inf"), scheme)), (seconds, scheme), key=lambda pair: pair[0])
    return {name: scheme for name, (_, scheme) in found.items()}


def some_scheme(kind: str, n: int, rng: random.Random) -> Scheme:
    if kind == "gc":
        return SCHEMES.make(kind, {"stragglers": rng.randint(0, n - 1)})
    burst, late = rng.randint(1, 3), rng.choice([*range(n), n, n])
    window = burst * rng.randint(1, 3) + 1 if kind == "srsgc" else burst + rng.randint(1, 2)
    return SCHEMES.make(kind, {"burst": burst, "window": window, "stragglers": late})


def pattern(scheme: Scheme, n: int, jobs: int, rng: random.Random, waited_out: bool) -> list[Late]:
    """Draw the late workers of all rounds; if ``waited_out``, only within the published patterns."""
    history: list[Late] = []
    share = rng.choice([0.1, 0.3, 0.6])
    for _ in range(jobs + scheme.delay()):
        busy = scheme.busy(n, jobs, history)
        late = [worker for worker in range(n) if busy[worker] and rng.random() < share]
        rng.shuffle(late)
        while waited_out and not scheme.conforms(n, [*history, frozenset(late)]):
            late.pop()
        history.append(frozenset(late))
    return history


def gradients(count: int) -> Any:
    """Return gradients of a small net on random batches, [count, d] in fp32."""
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.Tanh(), torch.nn.Linear(24, 4))
    found = []
    for _ in range(count):
        inputs = torch.randn(4, 16)
        loss = torch.nn.functional.cross_entropy(net(inputs), (inputs[:, :4].argmax(1) + 1) % 4)
        found.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(net.parameters()))]))
    return torch.stack(found)


# ---- processes


def sleeper(pipe: Connection) -> None:
    """Sleep for each order's duration and confirm; a new order interrupts the sleep, None ends the process."""
    order: tuple[int, float] | None = pipe.recv()
    while order is not None:
        number, seconds = order
        if pipe.poll(seconds):
            order = pipe.recv()
            continue
        pipe.send(number)
        order = pipe.recv()


def sleep_jobs(scheme: Scheme, profile: FinishTimes, jobs: int, scale: float, slow: float = 2.0) -> tuple[float, int]:
    """Run the jobs with one process per worker that sleeps ``scale`` times the profile's seconds; return seconds and
    decoded jobs."""
    n, context = profile.workers, get_context("spawn")
    pairs = [context.Pipe() for _ in range(n)]
    workers = [context.Process(target=sleeper, args=(theirs,), daemon=True) for _, theirs in pairs]
    for worker in workers:
        worker.start()
    pipes = [ours for ours, _ in pairs]
    try:
        for pipe in pipes:  # wait until all run
            pipe.send((-1, 0.0))
        for pipe in pipes:
            pipe.recv()
        return _rounds(scheme, profile, jobs, scale, slow, pipes)
    finally:
        for pipe in pipes:
            pipe.send(None)
        for worker in workers:
            worker.join(10)


def _rounds(
    scheme: Scheme, profile: FinishTimes, jobs: int, scale: float, slow: float, pipes: list[Connection]
) -> tuple[float, int]:
    n, history, decoded = profile.workers, list[Any](), 0
    each, patience = scheme.load(n) / scheme.slots(), slow if scheme.delay() else 1.0
    began = time.monotonic()
    for now in range(jobs + scheme.delay()):
        counts = scheme.busy(n, jobs, history)
        busy = {worker for worker in range(n) if counts[worker]}
        seconds, start = profile.finish_times(now, each * np.array(counts)), time.monotonic()
        for worker in busy:
            pipes[worker].send((now, scale * float(seconds[worker])))
        history.append(_awaited(scheme, jobs, history, pipes, busy, now, start, patience))
        if 0 <= (job := now - scheme.delay()) < jobs:
            decoded += scheme.decode(n, history, job) is not None
    return time.monotonic() - began, decoded


def _awaited(
    scheme: Scheme,
    jobs: int,
    history: list[Late],
    pipes: list[Connection],
    busy: set[int],
    now: int,
    start: float,
    patience: float,
) -> Late:
    """Return the late workers of a round: wait for all, or until the deadline if the scheme tolerates the rest."""
    missing, deadline = set(busy), float("inf")
    while missing:
        left = max(0.0, deadline - time.monotonic())
        if not left and scheme.tolerates_losses(len(pipes), jobs, [*history, frozenset(missing)]):
            break
        of = {pipes[worker]: worker for worker in missing}
        for pipe in wait(list(of), timeout=None if deadline == float("inf") or not left else left):
            assert isinstance(pipe, Connection)
            if pipe.recv() == now:
                missing.discard(of[pipe])
                deadline = min(deadline, start + patience * (time.monotonic() - start))
    return frozenset(missing)


N = 8
PROBE, LATER = 80, 200  # rounds
Lag = Callable[[Any, int], Any]  # random generator, rounds → slowdown factors [rounds, N]


def storms(draw: Any, rounds: int) -> Any:
    """At times, for two rounds on average, each worker is slow with probability 1/2."""
    lag, storm = np.ones((rounds, N)), False
    for now in range(rounds):
        storm = draw.random() >= 0.5 if storm else draw.random() < 0.05
        lag[now] = np.where(storm & (draw.random(N) < 0.5), draw.uniform(4, 6, N), 1.0)
    return lag


def drifting(draw: Any, rounds: int) -> Any:
    """One worker slows by 2 % of its initial time per round and resets after 60 rounds."""
    lag = np.ones((rounds, N))
    lag[:, 3] += 0.02 * ((np.arange(rounds) + draw.integers(60)) % 60)
    return lag


def periodic(draw: Any, rounds: int) -> Any:
    """Each worker takes three times as long in every tenth round, at different rounds."""
    return np.where((np.arange(rounds)[:, None] + draw.permutation(10)[:N]) % 10 == 0, 3.0, 1.0)


def two_classes(draw: Any, rounds: int) -> Any:
    """Half of the workers always take 1.6 times as long."""
    return np.ones((rounds, N)) * np.where(np.arange(N) < N // 2, 1.6, 1.0)


def heavy_tails(draw: Any, rounds: int) -> Any:
    """Pareto-distributed delays with exponent 1.2: finite mean, infinite variance."""
    return 1 + 0.2 * draw.pareto(1.2, (rounds, N))


def one_slow(draw: Any, rounds: int) -> Any:
    """One worker always takes three times as long."""
    return np.ones((rounds, N)) + 2.0 * (np.arange(N) == 3)


LAGS: dict[str, Lag] = {
    "one always slow": one_slow,
    "heavy-tailed": heavy_tails,
    "storms": storms,
    "drifting": drifting,
    "periodic": periodic,
    "two classes": two_classes,
}


def profiles(rounds: int, seed: int) -> dict[str, FinishTimes]:
    """Return a profile of each kind of delays."""
    even = burst_delays(rounds, N, seed, enter=0.0)
    found = {
        "none": even,
        "rare": burst_delays(rounds, N, seed, enter=0.005),
        "bursty": burst_delays(rounds, N, seed, enter=0.02, leave=0.3),
        "fixed cost": burst_delays(rounds, N, seed, fixed=1.0, per_load=2.0),
    }
    for kind, lag in LAGS.items():
        found[kind] = FinishTimes(even.seconds * lag(np.random.default_rng(seed), rounds), even.load, even.slope)
    return found


def choice(args: Namespace) -> list[Row]:
    """Choose on a probe and judge on later rounds."""
    rows, near, none, slow_only = [], [], [], []
    for seed in args.seeds:
        later, found, excess = profiles(LATER, seed + 100), {}, {}
        for kind, probe in profiles(PROBE, seed).items():
            found[kind] = choose(probe)
            least = min(expected_seconds(scheme, later[kind])[0] for _, scheme in candidate_schemes(N))
            slow = found[kind].always_slow if found[kind].best.name == "none" else ()  # these are excluded
            excess[kind] = expected_seconds(found[kind].best.scheme, later[kind].without(slow))[0] / least
            rows.append(Row(f"choice: {kind}, probe {seed}", [excess[kind]], f"{found[kind].best}"))
        near.append(sum(ratio <= 1.05 for ratio in excess.values()))
        none.append(found["none"].best.name == "none")
        slow_only.append([kind for kind, verdict in found.items() if verdict.always_slow] == ["one always slow"])
    return [
        *rows,
        Row(f"choice: within 5 % of the best of its grid, of {len(excess)}", near, f"{len(excess)}", Claim(low=9)),
        Row("choice: none where nothing pays", none, "1", Claim(low=1), judged="least"),
        Row("choice: coding does not pay only if one is always slow", slow_only, "1", Claim(low=1), judged="least"),
    ]


Gradient = Callable[[int, int], Any]
"""of a job's chunk: a tensor, array or number"""


def decoded(scheme: Scheme, n: int, jobs: int, history: History, gradient: Gradient) -> list[Any]:
    """Return the gradient sum of each job whose deadline is in ``history``; None if undecodable.

    A late worker's additions of the round are dropped; those of earlier rounds remain.
    """
    kept: dict[tuple[int, int, int], Any] = {}
    sent: dict[tuple[int, int, int, int], Any] = {}
    for now, late in enumerate(history):
        for worker, tasks in enumerate(scheme.tasks(n, jobs, history[:now])):
            for task in tasks if worker not in late else ():
                vector = (task.job, worker, task.vector)
                added = [weight * gradient(task.job, chunk) for chunk, weight in scheme.parts(n, worker, task)]
                kept[vector] = sum(added[1:], added[0]) + kept.get(vector, 0)
                if task.sent:
                    sent[*vector, now] = kept.pop(vector)
    result = []
    for job in range(min(jobs, len(history) - scheme.delay())):
        shares = scheme.decode(n, history[: job + scheme.delay() + 1], job)
        parts = [s.coefficient * sent[job, s.worker, s.vector, s.round] for s in shares or ()]
        result.append(sum(parts[1:], parts[0]) if shares is not None else None)
    return result


JOBS = 9


def sums(args: Namespace) -> list[Row]:
    """Random late workers, with and without wait-out: decoded jobs and their errors."""
    bank, rows = gradients(600), []
    for kind in ("gc", "srsgc", "msgc"):
        rng, errors, found, beyond, wrong = random.Random(7), [], 0, 0, 0
        for index in range(2 * args.patterns):
            n = rng.randint(4, 8)
            scheme, waited_out = some_scheme(kind, n, rng), index < args.patterns
            history = pattern(scheme, n, JOBS, rng, waited_out)
            whole = range(scheme.chunks(n))
            place = lambda job, chunk: (job * 97 + chunk) % len(bank)  # noqa: E731
            values = decoded(scheme, n, JOBS, history, lambda job, chunk: bank[place(job, chunk)])  # noqa: B023
            for job, value in enumerate(values):
                if value is None:
                    beyond += not waited_out
                    continue
                exact = torch.stack([bank[place(job, chunk)] for chunk in whole]).double().sum(0)
                error = float((value.double() - exact).norm() / exact.norm())
                if waited_out:
                    found += 1
                    errors.append(error)
                wrong += error > 1e-5
        share = found / (args.patterns * JOBS)
        rows += [
            Row(f"sums: {kind}, jobs decoded by their deadline", [share], f"{args.patterns} patterns", Claim(1.0)),
            Row(f"sums: {kind}, worst relative error × 1e6", [1e6 * max(errors)], "0.06: fp32", Claim(high=10)),
            Row(f"sums: {kind}, wrong sums without wait-out", [wrong], f"{beyond} jobs undecodable", Claim(high=0)),
        ]
    return rows


def bursts(args: Namespace) -> list[Row]:
    """Bursts of delays under both accountings."""
    rows = list[Row]()
    costs: dict[str, dict[str, Any]] = {"compute-bound": {}, "fixed cost": {"fixed": 1.0, "per_load": 2.0}}
    for cost, n in [("compute-bound", n) for n in args.sizes] + [("fixed cost", max(args.sizes))]:
        for published in (True, False):
            arms, claimed = best(n, published, **costs[cost]), cost == "compute-bound"
            delays = [burst_delays(200, n, seed, **costs[cost]) for seed in args.seeds]
            took = {
                name: [replay(scheme, profile, 200, published=published).seconds for profile in delays]
                for name, scheme in arms.items()
            }
            way = "published accounting" if published else "ours"
            for over, under, most, of_ours in (
                ("msgc", "gc", 0.8, False),
                ("srsgc", "gc", 1.0, False),
                ("msgc", "none", 0.9, True),
                ("gc", "none", None, False),
            ):
                claim = Claim(high=most) if most and claimed and (published or of_ours) else None
                what = f"bursts: {cost}, n = {n}, {over} / {under}"
                columns = {"scheme": str(arms[over])}
                rows.append(Row(what, ratios(took[over], took[under]), way, claim, columns, judged="worst"))
    return rows


def windows(args: Namespace) -> list[Row]:
    """One model with steps cut into windows of jobs."""
    from planaria.exchange.coded.simulate import windows

    rows, most = [], {8: 0.92, 16: 0.85}
    for n in (8, 16):
        published, ours = (best(n, way)["msgc"] for way in (True, False))
        for jobs in (8, 16, 64):
            count = max(1, 512 // jobs)
            delays = [burst_delays(1200, n, seed) for seed in args.seeds]
            none = [sum(windows(Uncoded(), profile, jobs, count)) for profile in delays]
            arms = {
                "M-SGC, published": [
                    sum(windows(published, profile, jobs, count, published=True)) for profile in delays
                ],
                "M-SGC": [sum(windows(ours, profile, jobs, count)) for profile in delays],
                "uncoded, one barrier": [sum(uncoded_seconds(profile, jobs, count)) for profile in delays],
            }
            for name, seconds in arms.items():
                claim = Claim(high=most[n]) if jobs == 64 and name.startswith("M-SGC") else None
                columns = {"scheme": str(published if "published" in name else ours)} if "M-SGC" in name else {}
                what = f"windows: n = {n}, {jobs} jobs, {name}"
                limit = "uncoded, a barrier a job"
                rows.append(Row(what, ratios(seconds, none), limit, claim, columns, judged="worst"))
    return rows


def processes(args: Namespace) -> list[Row]:
    """Sleeping workers: measured over predicted time."""
    from planaria.exchange.coded.sgc import MSGC

    n, jobs = 8, 20
    arms = {"uncoded": Uncoded(), "GC": GC(), "M-SGC": MSGC(burst=1, window=2, stragglers=n)}
    took: dict[str, list[float]] = {name: [] for name in arms}
    off: dict[str, list[float]] = {name: [] for name in arms}
    for seed in args.seeds:
        profile = burst_delays(jobs + 5, n, seed, times=(5.0, 5.0))
        for name, scheme in arms.items():
            seconds, decoded = sleep_jobs(scheme, profile, jobs, args.scale)
            assert decoded == jobs, f"{name}: {decoded}"
            took[name].append(seconds)
            off[name].append(seconds / (args.scale * replay(scheme, profile, jobs).seconds))
    rows = [Row(f"processes: {name}, measured / predicted", over, "1", Claim(0.85, 1.15)) for name, over in off.items()]
    for other in ("uncoded", "GC"):
        over = ratios(took["M-SGC"], took[other])
        rows.append(Row(f"processes: M-SGC / {other}", over, "eight that sleep, 20 jobs", Claim(high=1.0)))
    return rows


@benchmark(
    "coded",
    seeds=[1, 2, 3],
    patterns=Flag(500, "of late workers, for each scheme"),
    sizes=[8, 16, 32],
    scale=Flag(0.1, "seconds that a process sleeps for one of the profile"),
)
def run_coded(args: Namespace) -> Measurement:
    """Measure gradient coding: decoding, cost, and time saved in simulation and by processes.

    Sums: 500 random patterns of late workers per scheme, 4 to 8 workers, gradients in fp32: all decoded by their
    deadline, relative error < 1e-5; never a wrong sum beyond the patterns. Bursts of delays (Gilbert-Elliott), 200
    jobs, parameters chosen on another probe: by the published accounting M-SGC takes < 0.8 of GC's time, SR-SGC < 1;
    M-SGC < 0.9 of the uncoded time, also by ours, whose rounds close early. Windows of 64 jobs take <= 0.92 (n = 8) and
    <= 0.85 (16) of uncoded ones with a barrier per job; one barrier per step is shown. Eight sleeping processes: M-SGC
    before GC and uncoded, 0.85 to 1.15 of the prediction. The choice is within 5 % of the best of its grid in nine of
    ten kinds of delays.
    """
    torch.set_num_threads(1)
    return [row for part in (sums, bursts, windows, processes, choice) for row in part(args)]


# ---- a fleet

REPLICAS, FLEET_JOBS = 4, 8
MSGC = {"scheme": "msgc", "burst": 1, "window": 2, "stragglers": 1, "jobs": FLEET_JOBS}
ARMS: dict[str, Any] = {"uncoded": "", "gc, s = 1": {"scheme": "gc", "stragglers": 1}, "msgc (1, 2, 1), 8 jobs": MSGC}


def step_seconds(
    args: Namespace,
    name: str,
    seed: int,
    coded: Any,
    steps: int,
    network: dict[str, Any],
    faults: Sequence[Fault] = (),
) -> tuple[float, RunRecord]:
    """Train on the fleet; return the mean step (order to commit, without the first) and the run's record."""
    config = small_run(
        f"coded_fleet-{name}-{seed}",
        steps,
        seed=seed,
        pipeline={"microbatches": args.microbatches},
        exchange={"replicas": REPLICAS, "coded": coded},
        fleet={"missed_heartbeats": 40},
        network=network,
    )
    record = finished(config, tuple(faults))
    ordered: dict[int, float] = {}
    taken: dict[int, float] = {}
    for t, fact in record.history:
        if isinstance(fact, d.RunStep):
            ordered[fact.step] = t
        elif isinstance(fact, d.Commit):
            taken[fact.step] = t - ordered[fact.step]
    return fmean(seconds for step, seconds in taken.items() if step), record


def predictions(record: RunRecord) -> tuple[dict[str, float], Any]:
    """Predict the seconds of a step of every arm from the probe in ``record``; return them and the advised windows."""
    profile = profile_of(record)
    assert profile is not None
    whole = profile.cut(FLEET_JOBS, 1)
    found = {"uncoded": fmean(uncoded_seconds(whole, 1, len(whole.seconds)))}
    for arm, options in ARMS.items():
        if options:
            coded = make_coded_schedule(options, REPLICAS)
            cut = profile.cut(FLEET_JOBS, coded.jobs)
            found[arm] = coded.jobs * expected_seconds(coded.scheme, cut, coded.slow, coded.jobs)[0]
    return found, best_windows(record.config, profile, FLEET_JOBS)[0]


def key_of(arm: str) -> str:
    return "".join(c for c in arm if c.isalnum())


def regime(name: str, lasts_s: float, args: Namespace) -> list[Row]:
    """Measure all arms and the advised scheme with slowness of this duration."""
    straggling = {"straggle_probability": 0.1, "straggle_factor": 5.0, "straggle_s": lasts_s}
    network = sleeping(args.pass_ms / 1e3, **straggling)
    took: dict[str, list[float]] = {}
    predicted: dict[str, list[float]] = {}
    advised = []
    for seed in args.seeds:
        probe = {"scheme": "none", "jobs": FLEET_JOBS}
        _, record = step_seconds(args, f"{name}-probe", 100 + seed, probe, args.steps, network)
        seconds, windows = predictions(record)
        arms, best = dict(ARMS), windows.chosen.best
        if best.name != "none":
            arms["advised"] = {"scheme": best.name, **best.scheme.model_dump(), "jobs": windows.jobs}
            seconds["advised"] = windows.step_s
        advised.append(str(best).partition(":")[0])
        for arm, coded in arms.items():
            step_s, _ = step_seconds(args, f"{name}-{key_of(arm)}", seed, coded, args.steps, network)
            took.setdefault(arm, []).append(step_s)
            predicted.setdefault(arm, []).append(seconds[arm])
    rows = []
    for arm in took:
        limit = f"{median(took[arm]):.3f} s a step"
        over = ratios(took[arm], predicted[arm])
        rows.append(Row(f"{name}: {arm}, step over prediction", over, limit, Claim(0.85, 1.15)))
    for arm in took:
        if arm != "uncoded" and len(took[arm]) == len(took["uncoded"]):
            claim = Claim(high=1.05) if arm == "advised" else None
            rows.append(Row(f"{name}: {arm}, step over uncoded", ratios(took[arm], took["uncoded"]), "", claim))
    rows[0] = replace(rows[0], columns={"ratio": f"advised: {', '.join(advised)}"})
    return rows


def quality(args: Namespace) -> list[Row]:
    """Compare losses with real computing; the ends of replica 1 are slowed in one step of ten."""
    slow = [Fault(step=step, stage=2, signal="slow", strength=5.0, resume_after_s=2.0) for step in range(5, 50, 10)]
    found: dict[str, dict[int, float]] = {}
    for arm, coded in ARMS.items():
        _, record = step_seconds(args, f"real-{key_of(arm)}", 1, coded, 50, {}, slow)
        found[arm] = losses_by_step(record)
    plain = found.pop("uncoded")
    rows = []
    for arm, losses in found.items():
        apart = max(abs(losses[step] / plain[step] - 1) for step in plain) / 1e-5
        what = f"{arm}: losses apart from uncoded ones, in 1e-5"
        rows.append(Row(what, [apart], "50 steps", Claim(high=1), judged="worst"))
    return rows


@benchmark(
    "coded_fleet",
    seeds=[1, 2, 3],
    steps=60,
    microbatches=Flag(24, "of a replica in a step"),
    pass_ms=Flag(4.0, "of a forward at each of the two stages"),
)
def run_fleet(args: Namespace) -> Measurement:
    """Measure steps of gradient codes on a fleet whose replicas are slow at times, against a probe's predictions.

    Stages sleep. In one of ten periods a replica takes five times as long; all arms meet the same delays. In each
    regime (short periods, periods of a whole step) a probe without a code, with its own seed, is measured first and
    gives the predictions of all arms and the advised scheme.

    Claims: steps take 0.85 to 1.15 of the prediction; the advised scheme takes at most 1.05 of uncoded steps; with real
    computing and one replica slowed in one step of ten, the losses of 50 steps are within 1e-5 of uncoded ones.
    """
    return [*quality(args), *regime("short", 0.1, args), *regime("long", 0.4, args)]


if __name__ == "__main__":
    start(coded=run_coded, fleet=run_fleet)
