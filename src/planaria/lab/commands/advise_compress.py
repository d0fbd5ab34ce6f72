"""``planaria advise RECIPE --compress``: whether and how to compress all-reduced gradients."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.lab.compare.advice import BREAK_EVEN_SEARCH_FACTOR, require_costs
from planaria.lab.compare.compression_advice import (
    MIN_SPEEDUP,
    CompressionAdvice,
    CompressionExperience,
    WeighedCompression,
    advise,
)
from planaria.lab.compare.experience import Range
from planaria.report.tables import Table, show
from planaria.trials.spread import Spread, format_seeds, format_spread

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
