"""Codes on a fleet of real processes whose replicas are slow now and then: what steps take, and what was predicted.

Stages sleep what the recipe says. Time is cut into pieces; in one of ten a replica takes five times as long, so every
arm meets the same process however it cuts its work. In each regime (short pieces, pieces of a whole step) a probe
without a code, of a seed of its own, is measured first. From it come the predictions of all arms and the advice.

Claims: (1) steps take 0.85 to 1.15 of what the probe predicts; (2) what is advised takes at most 1.05 of uncoded steps;
(3) gradients are those of uncoded steps: with real computing, a replica's node slowed by a trace in one step of ten,
losses of 50 steps are within 1e-5 of each other.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

from benchmarks.common import RUNS, Claim, Row, conclude, parser, start

NAME = "coded_fleet"
REPLICAS, JOBS = 4, 8
MSGC = {"scheme": "msgc", "burst": 1, "window": 2, "stragglers": 1, "jobs": JOBS}
ARMS: dict[str, Any] = {"uncoded": "", "gc, s = 1": {"scheme": "gc", "stragglers": 1}, "msgc (1, 2, 1), 8 jobs": MSGC}


def recipe(name: str, seed: int, coded: Any, steps: int, microbatches: int, network: dict[str, Any]) -> Any:
    from benchmarks.fleet_run import VOCAB
    from planaria.config.schema import RunConfig

    return RunConfig.model_validate(
        {
            "name": f"{NAME}-{name}-{seed}",
            "out": str(RUNS),
            "seed": seed,
            "model": {"vocab": VOCAB, "dim": 32, "layers": 1, "heads": 2, "hidden": 64, "context": 16},
            "pipeline": {"stages": 1, "microbatches": microbatches, "microbatch_size": 1},
            "train": {"steps": steps, "eval_every": 0},
            "exchange": {"replicas": REPLICAS, "coded": coded},
            "fleet": {"spares": 0, "missed": 40},
            "checkpoint": {"every": 0},
            "network": network,
        }
    )


def step_seconds(config: Any, faults: Any = ()) -> tuple[float, Any]:
    """The mean step of a run, from the order to work to its commit, the first one left out; and the run's record."""
    from benchmarks.fleet_run import bytes_data, require_finished, run_fleet
    from planaria.control import decisions as d

    record = run_fleet(config.model_copy(update={"data": bytes_data()}), tuple(faults))
    require_finished(record)
    ordered: dict[int, float] = {}
    taken: dict[int, float] = {}
    for t, fact in record.history:
        if isinstance(fact, d.RunStep):
            ordered[fact.step] = t
        elif isinstance(fact, d.Commit):
            taken[fact.step] = t - ordered[fact.step]
    return statistics.fmean(seconds for step, seconds in taken.items() if step), record


def predictions(record: Any) -> tuple[dict[str, float], Any, float]:
    """Seconds of a step of every arm, by the probe in ``record``; the scheme advised, and seconds of its steps."""
    from planaria.cli.commands.advise_coded import windows_of
    from planaria.exchange.coded import coded_of
    from planaria.exchange.coded.choose import timed
    from planaria.exchange.coded.simulate import unhurried
    from planaria.report.run.straggling import profile_of

    profile = profile_of(record)
    assert profile is not None
    whole = profile.cut(JOBS, 1)
    found = {"uncoded": statistics.fmean(unhurried(whole, 1, len(whole.seconds)))}
    for arm, said in ARMS.items():
        if said:
            coded = coded_of(said, REPLICAS)
            cut = profile.cut(JOBS, coded.jobs)
            found[arm] = coded.jobs * timed(coded.scheme, cut, coded.slow, coded.jobs)[0]
    best = windows_of(record.config, profile, JOBS)[0]
    return found, best, best.step_s


def regime(name: str, lasts_s: float, given: Any) -> list[Row]:
    """All arms with slowness that lasts so long, and what is advised."""
    network = {
        "emulate": True,
        "forward_s": [given.pass_ms / 1e3],
        "backward_s": [2 * given.pass_ms / 1e3],
        "straggle": 0.1,
        "straggle_times": 5.0,
        "straggle_s": lasts_s,
    }
    took: dict[str, list[float]] = {}
    said: dict[str, list[float]] = {}
    advised = []
    for seed in given.seeds:
        probe = {"scheme": "none", "jobs": JOBS}
        _, record = step_seconds(recipe(f"{name}-probe", 100 + seed, probe, given.steps, given.microbatches, network))
        told, best, best_s = predictions(record)
        arms = dict(ARMS)
        if best.chosen.best.name != "none":
            arms["advised"] = {
                "scheme": best.chosen.best.name, **best.chosen.best.scheme.model_dump(), "jobs": best.jobs
            }  # fmt: skip
            told["advised"] = best_s
        advised.append(str(best.chosen.best).partition(":")[0])
        for arm, coded in arms.items():
            key = "".join(c for c in arm if c.isalnum())
            seconds, _ = step_seconds(recipe(f"{name}-{key}", seed, coded, given.steps, given.microbatches, network))
            took.setdefault(arm, []).append(seconds)
            said.setdefault(arm, []).append(told[arm])
    rows = []
    for arm in took:
        over = [a / b for a, b in zip(took[arm], said[arm], strict=True)]
        rows.append(
            Row(f"{name}: {arm}, step over prediction", over, f"{statistics.median(took[arm]):.3f} s a step",
                Claim(0.85, 1.15))
        )  # fmt: skip
    for arm in took:
        if arm != "uncoded" and len(took[arm]) == len(took["uncoded"]):
            over = [a / b for a, b in zip(took[arm], took["uncoded"], strict=True)]
            rows.append(
                Row(f"{name}: {arm}, step over uncoded", over, "", Claim(high=1.05) if arm == "advised" else None)
            )
    rows[0] = replace(rows[0], beside={"ratio": f"advised: {', '.join(advised)}"})
    return rows


def quality(given: Any) -> list[Row]:
    """Losses with real computing; the ends of replica 1 are slowed in one step of ten."""
    from planaria.faults.trace import Fault

    slow = [Fault(step=step, stage=2, signal="slow", strength=5.0, resume_after_s=2.0) for step in range(5, 50, 10)]
    found: dict[str, dict[int, float]] = {}
    for arm, coded in ARMS.items():
        key = "".join(c for c in arm if c.isalnum())
        _, record = step_seconds(recipe(f"real-{key}", 1, coded, 50, given.microbatches, {}), slow)
        found[arm] = {metric.step: metric.loss for metric in record.trained}
    plain = found.pop("uncoded")
    return [
        Row(f"{arm}: losses apart from uncoded ones, in 1e-5", [
            max(abs(losses[step] / plain[step] - 1) for step in plain) / 1e-5
        ], "50 steps", Claim(high=1), judged="worst")
        for arm, losses in found.items()
    ]  # fmt: skip


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--steps", type=int, default=60)
    flags.add_argument("--microbatches", type=int, default=24, help="of a replica in a step")
    flags.add_argument("--pass-ms", type=float, default=4.0, help="of a forward at each of the two stages")
    given = flags.parse_args()
    rows = [*quality(given), *regime("short", 0.1, given), *regime("long", 0.4, given)]
    return conclude(NAME, given, rows)


if __name__ == "__main__":
    start(main)
