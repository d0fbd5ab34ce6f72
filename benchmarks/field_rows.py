"""The table of ``benchmarks.field``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.common import Claim, Row
from benchmarks.field_arms import OURS, PIPELINE, THEIRS
from benchmarks.field_ledger import apart, loss_at, lost, next_steps, rate, standing, to_target
from benchmarks.field_runs import Ran

SOONER, NONE, EXACT = Claim(high=0.2), Claim(0, 0), Claim(high=1e-6)
AT = 0.8
"""the target is the loss at this share of the updates that the slowest arm made"""


@dataclass(frozen=True)
class Pair:
    """An arm with one seed."""

    free: Ran
    struck: Ran

    @property
    def nexts(self) -> list[float]:
        return next_steps(self.struck.updates, self.struck.kills)


ByArm = Mapping[str, Sequence[Pair]]
"""arm → seed by seed"""


def paces(runs: Iterable[Ran], batch: int) -> list[float]:
    """Useful updates a second."""
    return [rate(one.updates, one.begin, one.end, batch) for one in runs]


def rows_of(given: argparse.Namespace, found: ByArm) -> list[Row]:
    free = {arm: paces((pair.free for pair in pairs), given.batch) for arm, pairs in found.items()}
    return [
        *next_rows(found, free),
        *goodput_rows(given.batch, found, free),
        *sample_rows(given.batch, found),
        *same_rows(found),
        *target_rows(found),
        *price_rows(found, free),
    ]


def next_rows(found: ByArm, free: Mapping[str, Sequence[float]]) -> list[Row]:
    rows = []
    for arm, pairs in found.items():
        nexts = [seconds for pair in pairs for seconds in pair.nexts]
        step = 1 / median(free[arm])
        rows.append(Row(f"s from a kill to the next step: {arm}", nexts, f"≥ a step: {step:.2f}"))
    for ours in [arm for arm in OURS if arm in found]:
        for theirs in [arm for arm in found if arm not in OURS]:
            pairs_ = zip(found[ours], found[theirs], strict=True)
            ratios = [median(a.nexts) / median(b.nexts) for a, b in pairs_]
            claim = SOONER if theirs in THEIRS else None
            rows.append(Row(f"  {ours} over {theirs}, medians", ratios, "equal: 1", claim))
    return rows


def goodput_rows(batch: int, found: ByArm, free: Mapping[str, Sequence[float]]) -> list[Row]:
    rows = []
    struck = {arm: paces((pair.struck for pair in pairs), batch) for arm, pairs in found.items()}
    against = PIPELINE if PIPELINE in found else next(iter(found))
    for arm in found:
        own = [a / b for a, b in zip(struck[arm], free[arm], strict=True)]
        rows.append(Row(f"useful steps a second over the same without kills: {arm}", own, "no time lost: 1"))
    for arm in found:
        ratios = [a / b for a, b in zip(struck[arm], free[against], strict=True)]
        rows.append(Row(f"  over {against} without kills: {arm}", ratios, "unknown"))
    return rows


def sample_rows(batch: int, found: ByArm) -> list[Row]:
    rows = []
    for arm, pairs in found.items():
        runs = [(*standing(pair.struck.updates), len(pair.struck.kills)) for pair in pairs]
        gone = [float(lost(stand)) for stand, _, _ in runs]
        beside = {
            "kills": sum(kills for _, _, kills in runs),
            "samples": sum(stand[-1].upto for stand, _, _ in runs),
            "computed again": sum(update.used for _, undone, _ in runs for update in undone),
            "smaller steps": sum(update.used < batch for stand, _, _ in runs for update in stand),
        }
        rows.append(Row(f"samples lost: {arm}", gone, "0", NONE if arm in OURS else None, beside, "worst"))
        if arm in OURS:
            problems = [len(pair.struck.problems) + len(pair.free.problems) for pair in pairs]
            rows.append(Row(f"  what its ledger has to say: {arm}", problems, "0", NONE, judged="worst"))
    return rows


def target_rows(found: ByArm) -> list[Row]:
    """Updates carried out, and seconds, until the loss that the first arm has at an update that all came to."""
    reached: dict[str, list[tuple[int, float]]] = {arm: [] for arm in found}
    for runs in zip(*found.values(), strict=True):
        least = min(pair.struck.updates[-1].step for pair in runs)
        target = loss_at(runs[0].struck.updates, round(AT * least))
        for arm, pair in zip(found, runs, strict=True):
            at = None if target is None else to_target(pair.struck.updates, pair.struck.begin, target)
            reached[arm] += [at] if at is not None else []
    return [
        Row(f"{what} to the same loss: {arm}", [at[place] for at in ends], f"{len(ends)} runs came to it")
        for place, what in enumerate(("steps", "seconds"))
        for arm, ends in reached.items()
    ]


def same_rows(found: ByArm) -> list[Row]:
    """How far the losses of a run that is struck are from those of the same run that is not."""
    rows = []
    for arm, pairs in found.items():
        gaps = [apart(pair.free.updates, pair.struck.updates) for pair in pairs]
        claim = EXACT if arm in OURS else None
        what = f"nats from the same run without kills: {arm}"
        rows.append(Row(what, gaps, "0: nothing lost", claim, {}, "worst"))
    return rows


def price_rows(found: ByArm, free: Mapping[str, Sequence[float]]) -> list[Row]:
    """What each system costs when nothing fails."""
    kinds = [
        ("steps a second without kills", free),
        ("GB of memory, all processes", {a: [median(p.free.memory) / 1e9 for p in ps] for a, ps in found.items()}),
        (
            "processor seconds of a step",
            {
                arm: [p.free.cpu / (p.free.end - p.free.begin) / pace for p, pace in zip(pairs, free[arm], strict=True)]
                for arm, pairs in found.items()
            },
        ),
        ("s from the command to the first step", {a: [p.free.started for p in ps] for a, ps in found.items()}),
    ]
    return [Row(f"{what}: {arm}", values, "unknown") for what, each in kinds for arm, values in each.items()]
