"""``planaria advise``: which recovery strategy suits a recipe, and how sure that is."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from rich.console import Console
from rich.table import Table

from planaria import recipe
from planaria.compare.advice import Advice, BreakEven
from planaria.compare.advice import advise as weigh_all
from planaria.compare.experience import Experience
from planaria.compare.predict import is_known, ways
from planaria.config import RunConfig
from planaria.engine.prepare import check
from planaria.errors import UserError


def experience() -> Experience:
    """What the races cost that this planaria was released with."""
    return Experience.model_validate_json((files("planaria.compare") / "experience.json").read_bytes())


def advise(path: Path, flags: Mapping[str, str]) -> int:
    """Print the ways of coping with the failures that a recipe's [network] describes, best first; the exit code."""
    config = recipe.load(path, flags, "train")
    check(config)
    _require_prices(config, path)
    known = experience()
    advice = weigh_all(config, known)
    _show(config, advice)
    for line in _conclusions(config, advice, known):
        print(line)
    return 0


def _require_prices(config: RunConfig, path: Path) -> None:
    network = config.network
    missing = [
        f"network.{name}"
        for name in ("forward_s", "backward_s", "bandwidth", "store_bandwidth")
        if not getattr(network, name)
    ]
    if missing:
        raise UserError(f"{path}: {', '.join(missing)}: advice needs to know; give each in [network] or as a flag")
    if not network.hourly:
        raise UserError(f"{path}: network.hourly = 0: without failures nothing need be kept; give a rate above 0")


def _show(config: RunConfig, advice: Advice) -> None:
    rate = f"{config.network.hourly:.3g} an hour and worker"
    table = Table(title=f"{config.name}: {config.train.steps} steps, failures at {rate}", title_justify="left")
    for column in (
        "way",
        "recovery.strategy",
        "routing",
        "hours",
        "from … to",
        "checkpoint every",
        "MB a step",
        "memory",
    ):
        table.add_column(column, justify="left" if column in ("way", "recovery.strategy", "routing") else "right")
    for way in advice.ways:
        hours = way.prediction.hours
        spread = "calculated" if way.prediction.certain else f"{hours.low:.1f} … {hours.high:.1f}"
        interval = "–" if way.prediction.interval is None else f"{way.prediction.interval} steps"
        table.add_row(
            way.prediction.name,
            way.chain,
            way.routing,
            f"{hours.mean:.1f}",
            spread,
            interval,
            f"{way.step_bytes / 1e6:.1f}",
            f"{100 * way.memory:.0f} %",
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _conclusions(config: RunConfig, advice: Advice, known: Experience) -> list[str]:
    best = advice.ways[0]
    command = f"--recovery.strategy {best.chain.replace(' ', '')!s} --routing.kind {best.routing}"
    lines = [f"advice        {best.prediction.name}: {best.prediction.hours.mean:.1f} hours ({command})"]
    if advice.rivals:
        lines.append(f"how sure      not very: {', '.join(advice.rivals)} may be as good, within what races spread")
    else:
        lines.append("how sure      its worst case is better than every other way's best")
    lines += [f"break-even    {_told(config, point)}" for point in advice.break_evens]
    if unknown := [name for name, way in ways(config).items() if not is_known(way, known)]:
        lines.append(f"not weighed   {', '.join(unknown)}: nobody has raced it yet")
    lines.append(
        f"experience    {'; '.join(known.sources)}; hours count training to the recipe's last step at equal loss"
    )
    return lines


def _told(config: RunConfig, point: BreakEven) -> str:
    own = getattr(config.network, point.what.partition(".")[2])
    side = "above" if point.value > own else "below"
    return f"{point.what} {side} {point.value:.3g} (now {own:.3g}): {point.other}"
