"""Choose the scheme that saves time for workers that lag as in a probe; "none" if none does.

The probe is about 60 uncoded rounds. A scheme's time is the replay of all of them with the scheme's loads (arXiv
2211.13802, appendix). Ours: the grid, and the ranking by mean time plus its standard error, because a probe is too
short to measure rare long delays, which affect schemes to different degrees. Which chunks are neighbours is arbitrary
if workers are alike, so a short probe is replayed with its workers in several orders.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from planaria.exchange.coded.base import Scheme, Uncoded
from planaria.exchange.coded.gc import GC
from planaria.exchange.coded.sgc import MSGC, SRSGC
from planaria.exchange.coded.simulate import FinishTimes, replay, uncoded_seconds, windows

WORTH = 0.02
"""minimum share of the uncoded time that a code must save: less is below a probe's precision"""

ALIKE = 1.25
"""workers whose median times differ by a smaller factor count as the same kind of machine"""
MAX_ORDERS = 4
"""maximum number of replays of a probe, each with another order of workers"""
SUFFICIENT_ROUNDS = 320
"""replayed rounds, over all orders, that suffice"""


@dataclass(frozen=True)
class SchemeCandidate:
    """Time and cost of one scheme."""

    name: str
    scheme: Scheme
    seconds: float
    """seconds per job"""
    error: float
    """standard error of ``seconds``, as if rounds were independent and orders of workers were not"""
    load: float
    """each worker's share of a job's data"""
    vectors: int
    """gradients that a worker sends for a job"""
    microbatches: int
    """minimum number of microbatches of a job, over all workers"""

    def __str__(self) -> str:
        options = ", ".join(f"{name} = {value}" for name, value in self.scheme.model_dump().items())
        return f"{self.name}{f' ({options})' if options else ''}: {self.seconds:.4g} s a job"


@dataclass(frozen=True)
class SchemeChoice:
    """The best scheme, and all candidates."""

    best: SchemeCandidate
    candidates: tuple[SchemeCandidate, ...]
    """schemes in order of time plus error, best first"""
    why: str
    """one sentence"""
    always_slow: tuple[int, ...] = ()
    """workers that are slow in most rounds, which coding does not help"""


def candidate_schemes(n: int, max_delay: int = 3, published: bool = False) -> Iterator[tuple[str, Scheme]]:
    """Yield the candidate schemes for n workers by name, with a delay of at most ``max_delay`` rounds.

    SR-SGC with equal B and s differ only in the patterns that ``published`` rules tolerate.
    """
    counts = range(1, n + 1) if n <= 8 else sorted({round(float(x)) for x in np.geomspace(1, n, 12)})
    spans = [(b, w) for b in range(1, max_delay + 1) for w in range(b + 1, max_delay + b + 2)]
    repeated = set[tuple[int, int]]()
    yield "none", Uncoded()
    for late in counts:
        candidates: list[tuple[str, Scheme]] = [("gc", GC(stragglers=late))]
        for burst, window in spans:
            options = {"burst": burst, "window": window, "stragglers": late}
            candidates += [("srsgc", SRSGC(**options)), ("msgc", MSGC(**options))]
        for name, scheme in candidates:
            if scheme.why_unsupported(n) or scheme.delay() > max_delay:
                continue
            if isinstance(scheme, SRSGC) and not published:
                if (scheme.burst, scheme.spare()) in repeated:
                    continue
                repeated.add((scheme.burst, scheme.spare()))
            yield name, scheme


def always_slow_workers(profile: FinishTimes, slow: float) -> tuple[int, ...]:
    """Return workers whose median finish time is more than ``slow`` times the median worker's."""
    medians = np.median(profile.seconds, axis=0)
    return tuple(int(worker) for worker in np.flatnonzero(medians > slow * np.median(medians)))


def reordered_profiles(profile: FinishTimes) -> list[FinishTimes]:
    """Return the profile, and for few rounds and similar workers, the profile with other orders of workers."""
    medians = np.median(profile.seconds, axis=0)
    alike = float(medians.max()) < ALIKE * float(medians.min())
    more = min(MAX_ORDERS, SUFFICIENT_ROUNDS // len(profile.seconds)) - 1 if alike else 0
    draw = np.random.default_rng(0)
    orders = (draw.permutation(profile.workers) for _ in range(more))
    return [profile, *(replace(profile, seconds=profile.seconds[:, order]) for order in orders)]


def expected_seconds(scheme: Scheme, profile: FinishTimes, slow: float = 2.0, window: int = 0) -> tuple[float, float]:
    """Return seconds per job under the profile's delays, and their standard error, in one sequence or steps of
    ``window`` jobs.

    Without a code and in steps, workers wait for each other only at the end of a step.
    """
    rounds = len(profile.seconds)
    count = max(1, rounds // window) if window else rounds
    if not window:
        sequence: Sequence[float] = replay(scheme, profile, rounds, slow=slow).rounds
    elif type(scheme) is Uncoded:
        sequence = uncoded_seconds(profile, window, count)
    else:
        sequence = windows(scheme, profile, window, count, slow=slow)
    jobs = count * max(1, window)
    return sum(sequence) / jobs, float(np.std(sequence)) * len(sequence) ** 0.5 / jobs


def choose(
    profile: FinishTimes,
    *,
    slow: float = 2.0,
    window: int = 0,
    max_delay: int = 3,
    microbatches: int | None = None,
) -> SchemeChoice:
    """Return the scheme with the least time plus error on the probe.

    :param window: jobs in a step, if each step is a separate window; 0: one endless sequence of jobs.
    :param microbatches: of a job, over all workers; schemes whose chunks do not divide them are excluded.
    """
    n, ordered = profile.workers, reordered_profiles(profile)
    candidates = [
        _candidate(name, scheme, ordered, slow, window)
        for name, scheme in candidate_schemes(n, max_delay)
        if microbatches is None or microbatches % scheme.chunks(n) == 0 or name == "none"
    ]
    ranked = tuple(sorted(candidates, key=lambda candidate: (candidate.seconds + candidate.error, candidate.load)))
    none = next(candidate for candidate in ranked if candidate.name == "none")
    best = ranked[0] if ranked[0].seconds < (1 - WORTH) * none.seconds else none
    if always := always_slow_workers(profile, slow):
        return _no_case(profile, ranked, none, best, always, slow, window)
    if best is none:
        return SchemeChoice(
            none, ranked, f"no code saves more than {WORTH:.0%} of the uncoded {none.seconds:.4g} s a job"
        )
    return SchemeChoice(best, ranked, f"{best} saves {1 - best.seconds / none.seconds:.0%} of the uncoded time")


def _candidate(name: str, scheme: Scheme, ordered: Sequence[FinishTimes], slow: float, window: int) -> SchemeCandidate:
    n, times = ordered[0].workers, [expected_seconds(scheme, each, slow, window) for each in ordered]
    seconds, error = fmean(mean for mean, _ in times), fmean(error for _, error in times)
    return SchemeCandidate(name, scheme, seconds, error, scheme.load(n), scheme.vectors(), scheme.chunks(n))


def _no_case(
    profile: FinishTimes,
    ranked: tuple[SchemeCandidate, ...],
    none: SchemeCandidate,
    best: SchemeCandidate,
    always: tuple[int, ...],
    slow: float,
    window: int,
) -> SchemeChoice:
    """Return the result with machines that are always slow: exclude them, unless a code is faster with them."""
    job_s, _ = expected_seconds(Uncoded(), profile.without(always), slow, window)
    slow_workers = ", ".join(map(str, always))
    why = f"replicas {slow_workers} are slow in most rounds, so coding does not pay: {job_s:.4g} s a job without them"
    chosen = none if job_s <= best.seconds else best
    return SchemeChoice(chosen, ranked, f"{why}; best with them, {best}", always)
