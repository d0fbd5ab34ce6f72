"""``planaria advise RECIPE --compress``: whether and how to compress all-reduced gradients.

Time is the clock's, quality a race's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from planaria.common.documents import Record
from planaria.common.errors import UserError
from planaria.config import recipe
from planaria.config.schema import ExchangeConfig, RunConfig
from planaria.exchange.aggregate import AggregatingExchange
from planaria.exchange.compress.estimates import EControl
from planaria.exchange.compress.sparse import TopK
from planaria.exchange.registry import make_exchange
from planaria.lab.compare.advice import BREAK_EVEN_SEARCH_FACTOR, first_change, require_costs
from planaria.lab.compare.clock import arm_clock, exchanged_bytes
from planaria.lab.compare.experience import Range
from planaria.models.families import stage_parameters
from planaria.report.tables import Table, show
from planaria.trials.spread import Spread, format_seeds, format_spread

MIN_SPEEDUP = 1.01
"""minimum ratio of dense seconds to compressed seconds that counts as a gain"""


class CompressionArm(Record):
    """A race's result for one compression scheme, relative to dense gradients with the same seed."""

    name: str
    changes: dict[str, str]
    """changes of the recipe; empty for dense gradients"""
    loss: Range
    """final loss"""
    steps: Range | None
    """steps to the dense gradients' loss at the target, or None if any seed missed it"""
    missed: int
    """seeds that missed it"""


class CodingTimes(Record):
    """Measured seconds of top-k, to encode and decode once."""

    source: str
    numbers: int
    seconds: Range


class CompressionExperience(Record):
    """Measurements of compressed gradients from races and benchmarks."""

    source: str
    setting: str
    """what the race trained"""
    seeds: list[int]
    steps: int
    """steps of the race"""
    target: float
    """steps after which dense gradients have the loss that others must reach"""
    arms: list[CompressionArm]
    """dense gradients first"""
    coding: CodingTimes


@dataclass(frozen=True)
class WeighedCompression:
    """One compression scheme under a recipe's conditions."""

    arm: CompressionArm
    label: str
    """short description"""
    step_bytes: float
    """mean bytes that one replica sends per step"""
    step_s: float
    """seconds of a step, including known coding time"""
    coding_s: float | None
    """minimum coding time within ``step_s``, or None if not measured"""
    eta: float | None
    """default of EControl"""

    def seconds(self, side: str) -> float | None:
        """Return the seconds that match a dense step's progress, or None if unknown; ``side`` is mean, low or high."""
        return None if self.arm.steps is None else float(self.step_s * getattr(self.arm.steps, side))


@dataclass(frozen=True)
class CompressionAdvice:
    """All schemes, the fewest seconds per step first."""

    schemes: Sequence[WeighedCompression]
    dense: WeighedCompression
    best: WeighedCompression | None
    """the fastest scheme known to reach dense gradients' loss, or None if none is worthwhile"""
    break_even: float | None
    """the bandwidth below which one is worthwhile, or None if there is none within :data:`BREAK_EVEN_SEARCH_FACTOR`"""


def advise(config: RunConfig, experience: CompressionExperience) -> CompressionAdvice:
    """Weigh all schemes, and search the bandwidth at which compression starts to pay off."""
    schemes = [weigh_scheme(config, arm, experience.coding) for arm in experience.arms]
    known = [arm for arm in experience.arms if arm.steps is not None]
    own = config.network.bandwidth
    assert own is not None, "checked before: the recipe has a bandwidth"

    def pays(bandwidth: float) -> str:
        network = config.network.model_copy(update={"bandwidth": bandwidth})
        variant = config.model_copy(update={"network": network})
        return str(_best([weigh_scheme(variant, arm, experience.coding) for arm in known]) is not None)

    best = _best(schemes)
    far = own * BREAK_EVEN_SEARCH_FACTOR if best is not None else own / BREAK_EVEN_SEARCH_FACTOR
    break_even = first_change(pays, str(best is not None), own, far)
    return CompressionAdvice(sorted(schemes, key=lambda scheme: scheme.step_s), schemes[0], best, break_even)


def _best(schemes: Sequence[WeighedCompression]) -> WeighedCompression | None:
    """Return the scheme that reaches dense gradients' loss (``schemes[0]``) fastest, or None if none saves time."""
    dense = schemes[0].step_s
    known = {scheme.arm.name: seconds for scheme in schemes[1:] if (seconds := scheme.seconds("mean")) is not None}
    fastest = min(known, key=known.__getitem__, default=None)
    if fastest is None or known[fastest] * MIN_SPEEDUP >= dense:
        return None
    return next(scheme for scheme in schemes if scheme.arm.name == fastest)


def weigh_scheme(config: RunConfig, arm: CompressionArm, coding: CodingTimes) -> WeighedCompression:
    """Weigh one scheme on the machines of a recipe; the recipe's own compression settings are ignored."""
    plain = ExchangeConfig(replicas=config.exchange.replicas)
    changed = recipe.with_flags(config.model_copy(update={"exchange": plain}), arm.changes, "the race")
    exchange, stages = make_exchange(changed.exchange), range(config.pipeline.stages + 1)
    largest = max(stage_parameters(config.model, config.pipeline.stages, stage) for stage in stages)
    label, coding_s, eta = arm.name, None, None
    if isinstance(exchange, AggregatingExchange) and not exchange.compression.exact:
        label = arm.changes.get("exchange.compress", arm.name)
        if isinstance(exchange.compression.compressor, TopK):
            coding_s = coding.seconds.mean / coding.numbers * largest / max(1, exchange.interval or 0)
        if isinstance(exchange.compression.feedback, EControl) and exchange.compression.compressor.guaranteed:
            eta = exchange.compression.compressor.delta(largest) / 2
    elif exchange.has_rounds:
        label = f"{changed.exchange.kind}, every {exchange.interval}"
    sent = exchanged_bytes(changed) / config.exchange.replicas
    return WeighedCompression(arm, label, sent, arm_clock(changed).step_s + (coding_s or 0.0), coding_s, eta)


IF_SIMILAR = "if your run resembles the race's: replicas, model, optimizer, steps"
COLUMNS = ["how", "MB a step", "s a step", "of dense", "coding, ms", "loss at the end, of dense", "steps, of dense"]


def shipped_experience() -> CompressionExperience:
    """Return the measurements that ship with planaria."""
    return CompressionExperience.model_validate_json((files("planaria.lab.compare") / "compression.json").read_bytes())


def advise_compress(config: RunConfig, path: Path) -> int:
    """Print step times with each compression scheme, and whether it pays off; return the exit code.

    :raises UserError: if the recipe has no gradients to compress, or lacks costs.
    """
    _require_gradients(config, path)
    experience = shipped_experience()
    advice = advise(config, experience)
    rows = [_row(scheme, advice.dense, experience) for scheme in advice.schemes]
    title = f"{config.name}: {config.exchange.replicas} replicas, {config.network.bandwidth:.3g} bytes/s"
    show([Table(title, COLUMNS, rows, numbers_from=1)])
    for line in _conclusions(config, advice, experience):
        print(line)
    return 0


def _require_gradients(config: RunConfig, path: Path) -> None:
    exchange, network = config.exchange, config.network
    if exchange.kind != "allreduce" or exchange.replicas == 1:
        raise UserError(
            f"{path}: exchange.kind = {exchange.kind!r}, exchange.replicas = {exchange.replicas}: --compress is for "
            "gradients that replicas average in every step; set exchange.kind = 'allreduce' and exchange.replicas >= 2"
        )
    for name in ("robust", "coded"):
        if setting := getattr(exchange, name):
            raise UserError(f"{path}: exchange.{name} = {setting!r} was not raced with compression; remove it")
    require_costs(network, path, "forward_s", "backward_s", "bandwidth")


def _row(scheme: WeighedCompression, dense: WeighedCompression, experience: CompressionExperience) -> list[str]:
    missed = f"missed by {scheme.arm.missed} of {len(experience.seeds)}"
    steps = missed if scheme.arm.steps is None else _format_range(scheme.arm.steps)
    coding = "–" if scheme.coding_s is None else f"{1e3 * scheme.coding_s:.3g}"
    size, seconds, share = (
        f"{scheme.step_bytes / 1e6:.3g}",
        f"{scheme.step_s:.4g}",
        f"{scheme.step_s / dense.step_s:.3f}",
    )
    return [scheme.label, size, seconds, share, coding, _format_range(scheme.arm.loss), steps]


def _format_range(of: Range) -> str:
    return format_spread(Spread(of.mean, of.low, of.high))


def _conclusions(config: RunConfig, advice: CompressionAdvice, experience: CompressionExperience) -> Iterator[str]:
    yield from _advice_lines(advice)
    yield f"break-even    {_break_even(config, advice)}"
    yield from _faster_scheme_lines(advice, experience)
    if etas := [f"{scheme.eta:.3g} ({scheme.label})" for scheme in advice.schemes if scheme.eta is not None]:
        yield f"eta           econtrol takes delta / 2: {', '.join(etas)}"
    yield (
        "step size     EF21-W's larger one is for SGD with known smoothness (arXiv 2402.10774); with optim.kind = "
        f"{config.optim.kind!r} nothing is proved"
    )
    yield f"confidence    {_confidence(advice)}"
    coding = experience.coding
    yield (
        f"coding        top-k, once a step: {coding.seconds.mean:.3g} s for {coding.numbers:,} numbers "
        f"({coding.source}); other compressors were not measured and cost nothing here"
    )
    seeds = format_seeds(experience.seeds)
    yield f"based on      {experience.source}, {seeds}: {experience.setting}; [ … ] is their range"


def _advice_lines(advice: CompressionAdvice) -> Iterator[str]:
    best, dense = advice.best, advice.dense
    if best is None:
        yield f"advice        none: nothing that reaches dense gradients' loss saves more than {MIN_SPEEDUP - 1:.0%}"
        return
    command = " ".join(f"--{name} {setting}" for name, setting in best.arm.changes.items())
    share = best.step_s / dense.step_s
    yield f"advice        {best.label}: {best.step_s:.4g} s a step, {share:.3f} of dense ({command})"
    assert best.arm.steps is not None, "only measured arms are advised"
    yield (
        f"its cost      {_format_range(best.arm.loss)} of the dense loss at the end, {_format_range(best.arm.steps)} "
        "of the steps to an equal one; in memory, each replica's residual: one more gradient"
    )


def _break_even(config: RunConfig, advice: CompressionAdvice) -> str:
    now = f"network.bandwidth (now {config.network.bandwidth:.3g})"
    if advice.break_even is not None:
        return (
            f"compression pays if network.bandwidth is below {advice.break_even:.3g} {now.partition(' ')[2]}, or "
            "lower: the time that encoding takes is not known"
        )
    if advice.best is not None:
        return f"none up to {BREAK_EVEN_SEARCH_FACTOR:g} times {now}: compression also pays there"
    return f"none down to 1/{BREAK_EVEN_SEARCH_FACTOR:g} of {now}: compression does not pay there either"


def _faster_scheme_lines(advice: CompressionAdvice, experience: CompressionExperience) -> Iterator[str]:
    """Yield a line on the scheme with the lowest loss among those with faster steps than the advised one."""
    limit = (advice.best or advice.dense).step_s
    quicker = [scheme for scheme in advice.schemes if scheme.step_s * MIN_SPEEDUP < limit and scheme.arm.steps is None]
    if quicker:
        least = min(quicker, key=lambda scheme: scheme.arm.loss.mean)
        yield (
            f"faster        {least.label}: {least.step_s:.4g} s a step, at {_format_range(least.arm.loss)} of the "
            f"dense loss; in {experience.steps} steps, {least.arm.missed} of {len(experience.seeds)} seeds did not "
            f"reach the loss that dense gradients had after {experience.target:.0f}"
        )


def _confidence(advice: CompressionAdvice) -> str:
    if advice.best is None:
        return f"high for the clock's seconds; for losses, {IF_SIMILAR}"
    worst = advice.best.seconds("high")
    if worst is not None and worst < advice.dense.step_s:
        return f"its worst seed is ahead of dense gradients too, {IF_SIMILAR}"
    return "low: with its worst seed, dense gradients are as fast"
