"""``planaria advise RECIPE --delays RUN``: which code suits replicas that are as late as those of a run were."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.control.logs import read_run
from planaria.exchange.coded.choose import Chosen, choose
from planaria.exchange.coded.coding import coding_of
from planaria.exchange.coded.simulate import Profile
from planaria.report.run.straggling import LEAST_ROUNDS, profile_of
from planaria.report.tables import Table, show

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
"""jobs of a step that are looked at"""


class Window(NamedTuple):
    """The best scheme for steps of so many jobs."""

    jobs: int
    chosen: Chosen
    step_s: float


def advise_coded(config: RunConfig, folder: Path) -> int:
    """Print what steps would take with the delays of the run in ``folder``, and what is best; the exit code.

    :raises UserError: when that run tells too little, or of another number of replicas.
    """
    profile, jobs = _measured(config, folder)
    windows = windows_of(config, profile, jobs)
    plain = next(w for w in windows if w.jobs == 1).chosen
    none_s = next(offer.seconds for offer in plain.offers if offer.name == "none")
    head = [
        "scheme",
        "jobs a step",
        "ms a step",
        "of uncoded",
        "load",
        "gradients sent a step",
        "microbatches, at least",
    ]
    rows = [["none", "1", f"{1e3 * none_s:.1f}", "1.00", f"{1 / profile.workers:.3f}", "1", str(profile.workers)]]
    for window in windows:
        best = window.chosen.best
        if best.name != "none":
            rows.append([
                str(best).partition(":")[0], str(window.jobs), f"{1e3 * window.step_s:.1f}",
                f"{window.step_s / none_s:.2f}", f"{best.load:.3f}", str(best.vectors * window.jobs),
                str(best.microbatches * window.jobs),
            ])  # fmt: skip
    show([Table(f"{config.name}: delays of {folder}, {len(profile.seconds)} rounds", head, rows, numbers_from=1)])
    for line in _conclusions(windows, none_s, plain):
        print(line)
    return 0


def _measured(config: RunConfig, folder: Path) -> tuple[Profile, int]:
    """A run's delays, and the jobs that its steps had."""
    record = read_run(folder)
    coding, profile = coding_of(record.config.exchange), profile_of(record)
    if coding is None or profile is None:
        raise UserError(
            f"{folder}: tells of fewer than {LEAST_ROUNDS} rounds in which every replica had as much to do; train with "
            f"exchange.coded = 'none' for {LEAST_ROUNDS} steps or more, and give that run's folder"
        )
    if profile.workers != config.exchange.replicas:
        raise UserError(
            f"{folder}: has {profile.workers} replicas, and the recipe exchange.replicas = {config.exchange.replicas}; "
            "measure as many as will train"
        )
    return profile, coding.jobs


def windows_of(config: RunConfig, profile: Profile, jobs: int) -> list[Window]:
    """The best scheme for each number of jobs into which the recipe's steps can be cut, the quickest first.

    ``profile`` is of steps of so many ``jobs``. With another number a job's data are more or fewer, and so is what it
    takes: rounds are put together, or taken for parts of one.
    """
    microbatches, found = config.pipeline.microbatches * profile.workers, []
    for width in WIDTHS:
        if microbatches % (width * profile.workers) == 0:
            cut = profile.cut(jobs, width)
            chosen = choose(cut, window=width, microbatches=microbatches // width)
            found.append(Window(width, chosen, width * chosen.best.seconds))
    return sorted(found, key=lambda window: (window.step_s, window.jobs))


def _conclusions(windows: list[Window], none_s: float, plain: Chosen) -> Iterator[str]:
    best = windows[0]
    if plain.always_slow:
        yield f"always slow   {plain.why}"
    if best.chosen.best.name == "none":
        yield "advice        none: no code saves more than what such a measurement can tell"
        return
    options = ", ".join(f"{name} = {value}" for name, value in best.chosen.best.scheme.model_dump().items())
    said = f'{{ scheme = "{best.chosen.best.name}", {options}, jobs = {best.jobs} }}'
    yield f"advice        exchange.coded = {said}: {best.step_s / none_s:.2f} of what uncoded steps take"
    sends = best.chosen.best.vectors * best.jobs
    yield f"its price     every replica sends {sends} gradients a step in place of 1, and keeps as many of each other"
