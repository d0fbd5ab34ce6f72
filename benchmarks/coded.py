"""Gradient coding: what is decoded, what it costs, what it saves by simulation and with processes, and rivals.

Sums: 500 random patterns of late workers a scheme, n in 4 … 8, gradients of a small net in fp32: all decoded by their
deadline, relative error < 1e-5; beyond the patterns never a wrong sum. Loads at n = 256 as published. Bursts of delays
(Gilbert–Elliott), 200 jobs, three seeds, parameters chosen on another probe: by the published accounting M-SGC takes
< 0.8 of GC's time, SR-SGC < 1, M-SGC < 0.9 of the uncoded time; by ours, in which rounds close as soon as they may,
only the last is claimed. A window of 64 jobs takes ≤ 0.92 (n = 8) and ≤ 0.85 (16) of the uncoded time with a barrier
for each job; with one barrier a step, SPARe, and deaths are shown. Eight processes that sleep: M-SGC before GC and
uncoded, measured over predicted time 0.85 to 1.15 (--skip processes on a busy machine). The choice is within 5 % of the
best of its grid in nine of ten kinds of delays.
"""

from __future__ import annotations

import argparse
import random
import time
from statistics import fmean
from typing import Any

from benchmarks import coded_lab as lab
from benchmarks.coded_choice import choice
from benchmarks.common import Claim, Row, conclude, parser

NAME = "coded"
JOBS = 9


def sums(given: argparse.Namespace) -> list[Row]:
    """Random late workers, waited out and not: what is decoded, and how near the sum it is."""
    import torch

    from planaria.exchange.coded.simulate import decoded

    bank, rows = lab.gradients(600), []
    for kind in ("gc", "srsgc", "msgc"):
        rng, errors, found, beyond, wrong = random.Random(7), [], 0, 0, 0
        for index in range(2 * given.patterns):
            n = rng.randint(4, 8)
            scheme, waited_out = lab.some_scheme(kind, n, rng), index < given.patterns
            history = lab.pattern(scheme, n, JOBS, rng, waited_out)
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
        share = found / (given.patterns * JOBS)
        rows += [
            Row(f"sums: {kind}, jobs decoded by their deadline", [share], f"{given.patterns} patterns", Claim(1.0)),
            Row(f"sums: {kind}, worst relative error × 1e6", [1e6 * max(errors)], "0.06: fp32", Claim(high=10)),
            Row(f"sums: {kind}, wrong sums without wait-out", [wrong], f"{beyond} jobs undecodable", Claim(high=0)),
        ]
    return rows


def loads(given: argparse.Namespace) -> list[Row]:
    """Loads and decoding at the size of the publication; how much rounding errors may grow."""
    import numpy as np

    from planaria.exchange.coded.gc import GC, code, enlarges
    from planaria.exchange.coded.sgc import MSGC, SRSGC

    n, s, rows = 256, 27, []
    for what, scheme, load in (
        ("M-SGC (1, 2, 27)", MSGC(burst=1, window=2, stragglers=27), 0.007543),
        ("SR-SGC (2, 3, 23)", SRSGC(burst=2, window=3, stragglers=23), 0.050781),
        ("GC s = 15", GC(stragglers=15), 0.0625),
    ):
        rows.append(
            Row(
                f"loads: {what} × 1e3",
                [1e3 * scheme.load(n)],
                f"{1e3 * load:g}",
                Claim(1e3 * load - 1e-3, 1e3 * load + 1e-3),
            )
        )
    made, draw, took, off, grown = code(n, s), np.random.default_rng(0), [], [], []
    rows_of = np.zeros((n, n))
    for worker in range(n):
        for chunk, weight in made.row(worker):
            rows_of[worker, chunk] = weight
    for _ in range(10):
        there = sorted(draw.permutation(n)[s:].tolist())
        began = time.perf_counter()
        found = made.coefficients(there)
        took.append(time.perf_counter() - began)
        assert found is not None
        parts = np.array([found.get(worker, 0.0) for worker in there])
        off.append(float(np.abs(parts @ rows_of[there] - 1).max()))
        grown.append(float(np.abs(parts) @ np.abs(rows_of[there]).sum(axis=1)) / n)
    return [
        *rows,
        Row("loads: decoding at n = 256, s = 27, seconds", took, "published 0.290", Claim(high=0.5), judged="worst"),
        Row("loads: the same, off the sum in fp64 × 1e9", [x * 1e9 for x in off], "0", Claim(high=1.0), judged="worst"),
        Row("loads: the same, growth of errors of vectors", grown, "1: fractional repetition"),
        Row("loads: the same, growth at the worst late workers", [enlarges(n, s)], "1: fractional repetition"),
        *(
            Row(f"loads: growth at the worst s and late workers, n = {n}", [max(enlarges(n, s) for s in range(n))], "1")
            for n in range(3, 9)
        ),
    ]


def bursts(given: argparse.Namespace) -> list[Row]:
    """Bursts of delays by both accountings, and SPARe on the same."""
    from planaria.exchange.coded.base import Dropping
    from planaria.exchange.coded.simulate import replay
    from planaria.exchange.coded.spare import best_stack, stacked

    rows = list[Row]()
    costs: dict[str, dict[str, Any]] = {"compute-bound": {}, "fixed cost": {"fixed": 1.0, "per_load": 2.0}}
    for cost, n in [("compute-bound", n) for n in given.sizes] + [("fixed cost", max(given.sizes))]:
        for published in (True, False):
            arms, claimed = lab.best(n, published, **costs[cost]), cost == "compute-bound"
            delays = [lab.bursts(200, n, seed, **costs[cost]) for seed in given.seeds]
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
                ratios = [a / b for a, b in zip(took[over], took[under], strict=True)]
                claim = Claim(high=most) if most and claimed and (published or of_ours) else None
                what = f"bursts: {cost}, n = {n}, {over} / {under}"
                rows.append(Row(what, ratios, way, claim, {"scheme": str(arms[over])}, judged="worst"))
            if not published:
                rivals = {
                    "SPARe": [stacked(profile, 200, best_stack(n)).seconds for profile in delays],
                    "the slowest dropped, biased": [replay(Dropping(), profile, 200).seconds for profile in delays],
                }
                for rival, seconds in rivals.items():
                    ratios = [a / b for a, b in zip(seconds, took["none"], strict=True)]
                    rows.append(Row(f"bursts: {cost}, n = {n}, {rival} / none", ratios, way))
    return rows


def long(given: argparse.Namespace) -> list[Row]:
    """Delays of the same share of rounds, that last ever longer: 1.1, 3.3 and 10 rounds in the mean."""
    from planaria.exchange.coded.base import Uncoded
    from planaria.exchange.coded.gc import GC
    from planaria.exchange.coded.simulate import replay, unhurried
    from planaria.exchange.coded.spare import best_stack, stacked

    rows, n, jobs = [], 8, 512
    for leave in (0.9, 0.3, 0.1):
        kind: dict[str, Any] = {"enter": leave * 0.04 / 0.9, "leave": leave}
        delays, msgc = [lab.bursts(jobs, n, seed, **kind) for seed in given.seeds], lab.best(n, False, **kind)["msgc"]
        none = [replay(Uncoded(), profile, jobs).seconds for profile in delays]
        arms = {
            "M-SGC": [replay(msgc, profile, jobs).seconds for profile in delays],
            "GC s = 1": [replay(GC(), profile, jobs).seconds for profile in delays],
            "SPARe": [stacked(profile, jobs, best_stack(n)).seconds for profile in delays],
            "uncoded, one barrier for 16": [sum(unhurried(profile, 16, jobs // 16)) for profile in delays],
        }
        for name, seconds in arms.items():
            ratios = [a / b for a, b in zip(seconds, none, strict=True)]
            rows.append(Row(f"long: {1 / leave:.1f} rounds, {name}", ratios, "uncoded, a barrier a job"))
    return rows


def windows(given: argparse.Namespace) -> list[Row]:
    """One model, a step cut into a window of jobs."""
    from planaria.exchange.coded.base import Uncoded
    from planaria.exchange.coded.simulate import unhurried, windows
    from planaria.exchange.coded.spare import best_stack, stacked

    rows, most = [], {8: 0.92, 16: 0.85}
    for n in (8, 16):
        published, ours = (lab.best(n, way)["msgc"] for way in (True, False))
        for jobs in (8, 16, 64):
            count = max(1, 512 // jobs)
            delays = [lab.bursts(1200, n, seed) for seed in given.seeds]
            none = [sum(windows(Uncoded(), profile, jobs, count)) for profile in delays]
            arms = {
                "M-SGC, published": [
                    sum(windows(published, profile, jobs, count, published=True)) for profile in delays
                ],
                "M-SGC": [sum(windows(ours, profile, jobs, count)) for profile in delays],
                "SPARe": [stacked(profile, jobs * count, best_stack(n)).seconds for profile in delays],
                "uncoded, one barrier": [sum(unhurried(profile, jobs, count)) for profile in delays],
            }
            for name, seconds in arms.items():
                claim = Claim(high=most[n]) if jobs == 64 and name.startswith("M-SGC") else None
                ratios = [a / b for a, b in zip(seconds, none, strict=True)]
                beside = {"scheme": str(published if "published" in name else ours)} if "M-SGC" in name else {}
                what = f"windows: n = {n}, {jobs} jobs, {name}"
                rows.append(Row(what, ratios, "uncoded, a barrier a job", claim, beside, judged="worst"))
            rows += lab.effective(published, n, jobs)
    return rows


def deaths(given: argparse.Namespace) -> list[Row]:
    """Workers that die for good, at several prices of forming a new group; the estimate of how many SPARe bears."""
    from planaria.exchange.coded.base import Uncoded
    from planaria.exchange.coded.gc import GC
    from planaria.exchange.coded.sgc import MSGC
    from planaria.exchange.coded.spare import best_stack, endured, holders, stacked

    n, rows = 16, []
    for restart_s in (0.0, 10.0, 60.0):
        took: dict[str, list[float]] = {"uncoded": [], "GC": [], "M-SGC": [], "SPARe": []}
        for seed in given.seeds:
            profile, rng = lab.bursts(400, n, seed), random.Random(seed)
            died = {at: [worker] for at, worker in zip((50, 100, 150), rng.sample(range(n), 3), strict=True)}
            arms = {
                "uncoded": lambda m: Uncoded(),
                "GC": lambda m: GC(stragglers=1),
                "M-SGC": lambda m: MSGC(burst=1, window=2, stragglers=m),
            }
            for name, made in arms.items():
                took[name].append(lab.with_deaths(made, profile, 200, died, restart_s))
            took["SPARe"].append(stacked(profile, 200, best_stack(n), deaths=died, restart_s=restart_s).seconds)
        for name in ("GC", "M-SGC", "SPARe"):
            ratios = [a / b for a, b in zip(took[name], took["uncoded"], strict=True)]
            rows.append(Row(f"deaths: three of 16, a new group {restart_s:g} s, {name}", ratios, "of uncoded"))
    for size, stack in ((200, 3), (200, 9), (600, 8)):
        rng, found, held = random.Random(1), [], [holders(size, stack, shard) for shard in range(size)]
        for _ in range(given.orders):
            died_at = {worker: at for at, worker in enumerate(rng.sample(range(size), size), 1)}
            found.append(min(max(died_at[worker] for worker in own) for own in held))
        ratio = fmean(found) / endured(size, stack)
        rows.append(Row(f"deaths: SPARe, N = {size}, r = {stack}, endured / estimate", [ratio], "arXiv 2603.00357"))
    return rows


def processes(given: argparse.Namespace) -> list[Row]:
    """Workers that sleep their load: measured over predicted time."""
    from planaria.exchange.coded.base import Uncoded
    from planaria.exchange.coded.gc import GC
    from planaria.exchange.coded.sgc import MSGC
    from planaria.exchange.coded.simulate import replay

    n, jobs = 8, 20
    arms = {"uncoded": Uncoded(), "GC": GC(), "M-SGC": MSGC(burst=1, window=2, stragglers=n)}
    took: dict[str, list[float]] = {name: [] for name in arms}
    off: dict[str, list[float]] = {name: [] for name in arms}
    for seed in given.seeds:
        profile = lab.bursts(jobs + 5, n, seed, times=(5.0, 5.0))
        for name, scheme in arms.items():
            slept = lab.sleep_jobs(scheme, profile, jobs, given.scale)
            assert slept.decoded == jobs, f"{name}: {slept.decoded}"
            took[name].append(slept.seconds)
            off[name].append(slept.seconds / (given.scale * replay(scheme, profile, jobs).seconds))
    rows = [
        Row(f"processes: {name}, measured / predicted", ratios, "1", Claim(0.85, 1.15)) for name, ratios in off.items()
    ]
    for other in ("uncoded", "GC"):
        ratios = [a / b for a, b in zip(took["M-SGC"], took[other], strict=True)]
        rows.append(Row(f"processes: M-SGC / {other}", ratios, "eight that sleep, 20 jobs", Claim(high=1.0)))
    return rows


PARTS = {part.__name__: part for part in (sums, loads, bursts, long, windows, deaths, processes, choice)}


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--patterns", type=int, default=500, help="of late workers, for each scheme")
    flags.add_argument("--sizes", type=int, nargs="+", default=[8, 16, 32])
    flags.add_argument("--orders", type=int, default=400, help="of deaths, drawn")
    flags.add_argument("--scale", type=float, default=0.1, help="seconds that a process sleeps for one of the profile")
    flags.add_argument("--skip", nargs="*", default=[], choices=PARTS)
    given = flags.parse_args()
    import torch

    torch.set_num_threads(1)
    rows: list[Row] = []
    for name, part in PARTS.items():
        if name not in given.skip:
            rows += part(given)
    return conclude(NAME, given, rows)


if __name__ == "__main__":
    raise SystemExit(main())
