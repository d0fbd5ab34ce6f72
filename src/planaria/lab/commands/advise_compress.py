"""``planaria advise RECIPE --compress``: whether and how to compress all-reduced gradients."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.lab.compare.advice import require_costs
from planaria.lab.compare.compression_advice import (
    CLOSE,
    SPAN,
    CompressionAdvice,
    CompressionExperience,
    WeighedCompression,
    advise,
)
from planaria.lab.compare.experience import Range
from planaria.lab.trials.spread import Spread, seeds_shown, shown
from planaria.report.tables import Table, show

LIKE = "if your run resembles the race's: replicas, model, optimizer, steps"
HEAD = ["how", "MB a step", "s a step", "of dense", "coding, ms", "loss at the end, of dense", "steps, of dense"]


def lessons() -> CompressionExperience:
    """Return the measurements that ship with planaria."""
    return CompressionExperience.model_validate_json((files("planaria.lab.compare") / "compression.json").read_bytes())


def advise_compress(config: RunConfig, path: Path) -> int:
    """Print step times with each compression scheme, and whether it pays off; return the exit code.

    :raises UserError: when the recipe has no gradients to compress, or lacks prices.
    """
    _require(config, path)
    known = lessons()
    advice = advise(config, known)
    rows = [_row(choice, advice.dense, known) for choice in advice.choices]
    title = f"{config.name}: {config.exchange.replicas} replicas, {config.network.bandwidth:.3g} bytes/s"
    show([Table(title, HEAD, rows, numbers_from=1)])
    for line in _conclusions(config, advice, known):
        print(line)
    return 0


def _require(config: RunConfig, path: Path) -> None:
    exchange, network = config.exchange, config.network
    if exchange.kind != "allreduce" or exchange.replicas == 1:
        raise UserError(
            f"{path}: exchange.kind = {exchange.kind!r}, exchange.replicas = {exchange.replicas}: --compress is for "
            "gradients that replicas agree on in every step; give 'allreduce', and 2 replicas or more"
        )
    for name in ("robust", "coded"):
        if setting := getattr(exchange, name):
            raise UserError(f"{path}: exchange.{name} = {setting!r} was not raced with fewer bytes; leave it out")
    require_costs(network, path, "forward_s", "backward_s", "bandwidth")


def _row(choice: WeighedCompression, dense: WeighedCompression, known: CompressionExperience) -> list[str]:
    missed = f"missed by {choice.arm.missed} of {len(known.seeds)}"
    steps = missed if choice.arm.steps is None else _shown(choice.arm.steps)
    coding = "–" if choice.coding_s is None else f"{1e3 * choice.coding_s:.3g}"
    size, seconds, share = (
        f"{choice.step_bytes / 1e6:.3g}",
        f"{choice.step_s:.4g}",
        f"{choice.step_s / dense.step_s:.3f}",
    )
    return [choice.how, size, seconds, share, coding, _shown(choice.arm.loss), steps]


def _shown(of: Range) -> str:
    return shown(Spread(of.mean, of.low, of.high))


def _conclusions(config: RunConfig, advice: CompressionAdvice, known: CompressionExperience) -> Iterator[str]:
    yield from _advised(advice)
    yield f"break-even    {_break_even(config, advice)}"
    yield from _quicker(advice, known)
    if etas := [f"{choice.eta:.3g} ({choice.how})" for choice in advice.choices if choice.eta is not None]:
        yield f"eta           econtrol takes delta / 2: {', '.join(etas)}"
    yield (
        "step size     EF21-W's larger one is for SGD with known smoothness (arXiv 2402.10774); with optim.kind = "
        f"{config.optim.kind!r} nothing is proved"
    )
    yield f"how sure      {_sure(advice)}"
    coding = known.coding
    yield (
        f"coding        top-k's once a step, no less: {coding.seconds.mean:.3g} s for {coding.numbers:,} numbers "
        f"({coding.source}); others' was not measured, and does not count"
    )
    yield f"experience    {known.source}, {seeds_shown(known.seeds)}: {known.setting}; [ … ] is their range"


def _advised(advice: CompressionAdvice) -> Iterator[str]:
    best, dense = advice.best, advice.dense
    if best is None:
        yield f"advice        none: nothing that reaches dense gradients' loss saves more than {CLOSE - 1:.0%}"
        return
    command = " ".join(f"--{name} {setting}" for name, setting in best.arm.changes.items())
    yield f"advice        {best.how}: {best.step_s:.4g} s a step, {best.step_s / dense.step_s:.3f} of dense ({command})"
    assert best.arm.steps is not None, "only measured arms are advised"
    yield (
        f"its price     {_shown(best.arm.loss)} of the dense loss at the end, {_shown(best.arm.steps)} of the steps to "
        "an equal one; in memory, each replica's residual: one more gradient"
    )


def _break_even(config: RunConfig, advice: CompressionAdvice) -> str:
    now = f"network.bandwidth (now {config.network.bandwidth:.3g})"
    if advice.break_even is not None:
        return (
            f"compressing pays where network.bandwidth is below {advice.break_even:.3g} {now.partition(' ')[2]}, or "
            "lower: the time of coding in few bits is not known"
        )
    if advice.best is not None:
        return f"none up to {SPAN:g} times {now}: compressing pays there too"
    return f"none down to 1/{SPAN:g} of {now}: compressing does not pay there either"


def _quicker(advice: CompressionAdvice, known: CompressionExperience) -> Iterator[str]:
    """Name the scheme with the lowest loss among those with quicker steps than the advised one."""
    limit = (advice.best or advice.dense).step_s
    quicker = [choice for choice in advice.choices if choice.step_s * CLOSE < limit and choice.arm.steps is None]
    if quicker:
        least = min(quicker, key=lambda choice: choice.arm.loss.mean)
        yield (
            f"quicker       {least.how}: {least.step_s:.4g} s a step, at {_shown(least.arm.loss)} of the dense loss; "
            f"{least.arm.missed} of {len(known.seeds)} seeds did not reach in {known.steps} steps what dense gradients "
            f"had after {known.target:.0f}"
        )


def _sure(advice: CompressionAdvice) -> str:
    if advice.best is None:
        return f"of the clock's seconds; of losses, {LIKE}"
    worst = advice.best.seconds("high")
    if worst is not None and worst < advice.dense.step_s:
        return f"its worst seed is ahead of dense gradients too, {LIKE}"
    return "not very: with its worst seed dense gradients are as quick"
