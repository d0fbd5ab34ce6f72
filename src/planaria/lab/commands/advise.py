"""``planaria advise``: the recovery strategy that suits a recipe, and its uncertainty.

With ``--delays RUN``: the gradient code that suits replicas with the delays of that run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from planaria.common.errors import UserError
from planaria.config import recipe
from planaria.config.schema import RunConfig
from planaria.control.log.reader import read_run
from planaria.exchange.coded.choose import SchemeChoice, choose
from planaria.exchange.coded.coded_report import MIN_ROUNDS, profile_of
from planaria.exchange.coded.coding import make_coding
from planaria.exchange.coded.simulate import FinishTimes
from planaria.lab.commands.advise_compress import advise_compress
from planaria.lab.commands.advise_machines import advise_machines
from planaria.lab.commands.advise_wire import advise_wire
from planaria.lab.compare.advice import BreakEven, StrategyAdvice, require_costs, unknown_strategies
from planaria.lab.compare.advice import advise as weigh_all
from planaria.lab.compare.experience import Experience
from planaria.report.phrases import format_count
from planaria.report.tables import Table, show
from planaria.runtime.preparation.config_checks import check

UNITS = {"hours": 1.0, "minutes": 60.0, "seconds": 3600.0}
"""units of a prediction → number per hour"""
CLOSE = 1.01
"""ratio to the best below which predictions are practically equal"""


def experience() -> Experience:
    """Return the costs measured in the comparisons that ship with planaria."""
    return Experience.model_validate_json((files("planaria.lab.compare") / "experience.json").read_bytes())


def advise(
    path: Path, flags: Mapping[str, str], delays: Path | None = None, compress: bool = False, wire: bool = False
) -> int:
    """Print the strategies for the failures of a recipe's [network], fastest first; return the exit code.

    :param delays: print gradient codes for replicas with the delays of the run in this folder
    :param compress: print compression schemes for gradients on the machines of [network]
    :param wire: print codecs between stages on the links of [network]
    """
    modes = [name for name, on in (("--compress", compress), ("--delays", delays), ("--wire", wire)) if on]
    if len(modes) > 1:
        raise UserError(f"{' and '.join(modes)}: are separate questions; pass one of them")
    config = recipe.load(path, flags, "train")
    # Machines of a topology are chosen before they are here.
    check(config.model_copy(update={"engine": "simulate"}) if wire and config.network.topology else config)
    if delays is not None:
        return advise_coded(config, delays)
    if compress:
        return advise_compress(config, path)
    if wire:
        if config.routing.schedule:
            raise UserError(f"{path}: routing.schedule: --wire compares its own routes and codecs; remove it")
        return advise_machines(config, path, flags) if config.network.topology else advise_wire(config, path, flags)
    _require_costs(config, path)
    known = experience()
    advice = weigh_all(config, known)
    unit = _largest_unit(advice.candidates[0].prediction.hours.mean)
    _show(config, advice, unit)
    for line in _conclusions(config, advice, known, unit):
        print(line)
    return 0


def _require_costs(config: RunConfig, path: Path) -> None:
    network = config.network
    require_costs(network, path, "forward_s", "backward_s", "bandwidth", "store_bandwidth")
    if not network.hourly_failure_probability:
        raise UserError(
            f"{path}: network.hourly_failure_probability = 0 means no failures, so no advice; set a rate above 0"
        )


def _largest_unit(hours: float) -> str:
    return next((unit for unit, each in UNITS.items() if hours * each >= 2.0), "seconds")


def _format_in_unit(unit: str, *hours: float) -> str:
    """Format with four significant digits and no exponent."""
    amounts = [each * UNITS[unit] for each in hours]
    return " … ".join(f"{amount:.0f}" if amount >= 1000 else f"{amount:#.4g}" for amount in amounts)


def _show(config: RunConfig, advice: StrategyAdvice, unit: str) -> None:
    rate = f"{config.network.hourly_failure_probability:.3g} an hour and worker"
    head = ["strategy", "recovery.strategy", "routing", unit, "range", "checkpoint every", "MB a step", "memory"]
    rows = []
    for strategy in advice.candidates:
        hours = strategy.prediction.hours
        spread = "calculated" if strategy.prediction.certain else _format_in_unit(unit, hours.low, hours.high)
        interval = "–" if strategy.prediction.interval is None else format_count(strategy.prediction.interval, "step")
        costs = [spread, interval, f"{strategy.step_bytes / 1e6:.1f}", f"{100 * strategy.memory:.0f} %"]
        rows.append(
            [strategy.prediction.name, strategy.chain, strategy.routing, _format_in_unit(unit, hours.mean), *costs]
        )
    title = f"{config.name}: {format_count(config.train.steps, 'step')}, failures at {rate}"
    show([Table(title, head, rows, numbers_from=3)])


def _conclusions(config: RunConfig, advice: StrategyAdvice, known: Experience, unit: str) -> list[str]:
    best = advice.candidates[0]
    command = f"--recovery.strategy {best.chain.replace(' ', '')!s} --routing.kind {best.routing}"
    if best.background != config.checkpoint.background:
        command += f" --checkpoint.background {str(best.background).lower()}"
    hours, unknown = _format_in_unit(unit, best.prediction.hours.mean), unknown_strategies(config, known)
    lines = [f"advice        {best.prediction.name}: {hours} {unit} ({command})"]
    if advice.rivals:
        lines.append(
            f"confidence    low: {', '.join(advice.rivals)} may be equally good, within the spread of the comparisons"
        )
    else:
        of = "every other known strategy" if unknown else "every other strategy"
        lines.append(f"confidence    its worst case is better than the best case of {of}")
    within = CLOSE * best.prediction.hours.mean
    if close := [
        candidate.prediction.name for candidate in advice.candidates[1:] if candidate.prediction.hours.mean <= within
    ]:
        lines.append(f"equivalent    {'; '.join(close)}: within {CLOSE - 1:.0%} of it")
    lines += [f"break-even    {_break_even(config, point)}" for point in advice.break_evens]
    for name, strategy in unknown.items():
        same_cost = f"; at the same cost {_format_in_unit(unit, strategy.hours.mean)} {unit}" if strategy.hours else ""
        lines.append(f"unknown       {name}: {strategy.why}{same_cost}")
    lines.append(
        f"based on      {'; '.join(known.observed)}; {unit} count training to the recipe's last step at equal loss"
    )
    return lines


def _break_even(config: RunConfig, point: BreakEven) -> str:
    own = getattr(config.network, point.setting.partition(".")[2])
    side = "above" if point.value > own else "below"
    return f"{point.setting} {side} {point.value:.3g} (now {own:.3g}): {point.other}"


WIDTHS = (1, 2, 4, 8, 16, 32, 64)
"""candidate numbers of jobs per step"""


class BestWindow(NamedTuple):
    """The best scheme for steps of ``jobs`` jobs."""

    jobs: int
    chosen: SchemeChoice
    step_s: float


def advise_coded(config: RunConfig, folder: Path) -> int:
    """Print step times with the delays of the run in ``folder``, and the best code; return the exit code.

    :raises UserError: if that run has too few rounds, or not the recipe's number of replicas.
    """
    profile, jobs = _read_delays(config, folder)
    windows = best_windows(config, profile, jobs)
    plain = next(w for w in windows if w.jobs == 1).chosen
    none_s = next(candidate.seconds for candidate in plain.candidates if candidate.name == "none")
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
    for line in _coded_conclusions(windows, none_s, plain):
        print(line)
    return 0


def _read_delays(config: RunConfig, folder: Path) -> tuple[FinishTimes, int]:
    """Return a run's delays and the jobs of its steps."""
    record = read_run(folder)
    coding, profile = make_coding(record.config.exchange), profile_of(record)
    if coding is None or profile is None:
        raise UserError(
            f"{folder} has fewer than {MIN_ROUNDS} rounds in which all replicas had equal work; train with "
            f"exchange.coded = 'none' for {MIN_ROUNDS} steps or more, and use that run's folder"
        )
    if profile.workers != config.exchange.replicas:
        raise UserError(
            f"{folder} has {profile.workers} replicas, and the recipe exchange.replicas = {config.exchange.replicas}; "
            "use a run with that number of replicas"
        )
    return profile, coding.jobs


def best_windows(config: RunConfig, profile: FinishTimes, jobs: int) -> list[BestWindow]:
    """Return the best scheme for each number of jobs that divides the recipe's steps, the fastest first.

    ``profile`` is of steps of ``jobs`` jobs. For other numbers, rounds are combined or divided, since the data of a job
    and its time change.
    """
    microbatches, windows = config.pipeline.microbatches * profile.workers, []
    for width in WIDTHS:
        if microbatches % (width * profile.workers) == 0:
            cut = profile.cut(jobs, width)
            chosen = choose(cut, window=width, microbatches=microbatches // width)
            windows.append(BestWindow(width, chosen, width * chosen.best.seconds))
    return sorted(windows, key=lambda window: (window.step_s, window.jobs))


def _coded_conclusions(windows: list[BestWindow], none_s: float, plain: SchemeChoice) -> Iterator[str]:
    best = windows[0]
    if plain.always_slow:
        yield f"always slow   {plain.why}"
    if best.chosen.best.name == "none":
        yield "advice        none: no code saves more than the measurement's uncertainty"
        return
    options = ", ".join(f"{name} = {option}" for name, option in best.chosen.best.scheme.model_dump().items())
    scheme = f'{{ scheme = "{best.chosen.best.name}", {options}, jobs = {best.jobs} }}'
    yield f"advice        exchange.coded = {scheme}: {best.step_s / none_s:.2f} of the time of uncoded steps"
    sends = best.chosen.best.vectors * best.jobs
    yield f"its cost      each replica sends {sends} gradients per step, not 1, and keeps {sends} of each other one"
