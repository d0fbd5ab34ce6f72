"""Report section on completions drawn with earlier weights: their age, their ratios, and the learner's idle share."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import plotly.graph_objects as go

from planaria.report import page
from planaria.report.theme import escape_label, figure, integer_x_axis, stroke
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.records.lines import RoundDone

HEAD = ["peer", "completions by staleness", "dropped", "ESS, minimum", "ratio p99, maximum", "masked", "idle share"]
Value = Callable[[RoundDone], float | None]


def staleness_section(
    config: SwarmConfig, logs: Mapping[str, Sequence[RoundDone]], names: Mapping[str, str]
) -> Iterator[str]:
    """Yield the section, as HTML; nothing without ``rounds.ahead``.

    :param names: peer id → name
    """
    if not config.rounds.ahead:
        return
    curves: dict[str, Value] = {
        "effective sample size": lambda done: done.stats.get("ess"),
        "ratio, 99th percentile": lambda done: done.stats.get("ratio_p99"),
        "masked share": masked_share,
    }
    yield page.section(
        "Staleness",
        f"Completions of each round were drawn with weights at most rounds.ahead = {config.rounds.ahead} rounds old; "
        "older ones were dropped. The ratio is π_θ/π_gen of a token, the effective sample size (ESS) that of these "
        "ratios as a share of tokens. Masked: tokens that the loss masks, clips or caps. Idle: share of a round in "
        "which the peer waits for its completions or for others.",
        page.table("staleness", HEAD, [_row(name, log, names) for name, log in logs.items()], numbers_from=1),
        *(page.chart(_curve(logs, y, value), f"staleness {index}") for index, (y, value) in enumerate(curves.items())),
    )


def masked_share(done: RoundDone) -> float | None:
    """Return the share of tokens without their full weight, or None if nothing was learned."""
    parts = [done.stats[key] for key in ("clipped", "capped") if key in done.stats]
    return sum(parts) if parts else None


def idle_share(log: Sequence[RoundDone]) -> float:
    """Return the share of all rounds' time in which a peer obtains completions, its own (write) or others' (wait)."""
    idle = sum(done.seconds.get(phase, 0.0) for done in log for phase in ("write", "wait"))
    return idle / (sum(sum(done.seconds.values()) for done in log) or 1.0)


def _row(name: str, log: Sequence[RoundDone], names: Mapping[str, str]) -> list[str]:
    ages, dropped = Counter[int](), Counter[str]()
    for done in log:
        ages.update(done.staleness)
        dropped.update(done.stale)
    ess, p99 = ([d.stats[key] for d in log if key in d.stats] for key in ("ess", "ratio_p99"))
    shares = [share for done in log if (share := masked_share(done)) is not None]
    return [
        name,
        ", ".join(f"{age}: {count:,}" for age, count in sorted(ages.items())) or "–",
        ", ".join(f"{names.get(peer, peer[:8])}: {count:,}" for peer, count in sorted(dropped.items())) or "0",
        f"{min(ess):.3f}" if ess else "–",
        f"{max(p99):.2f}" if p99 else "–",
        f"{statistics.fmean(shares):.1%}" if shares else "–",
        f"{idle_share(log):.1%}",
    ]


def _curve(logs: Mapping[str, Sequence[RoundDone]], y: str, value: Value) -> go.Figure:
    fig = figure(280, x="round", y=y, hovermode="x unified", showlegend=True)
    for index, (name, log) in enumerate(logs.items()):
        points = [(done.round, found) for done in log if (found := value(done)) is not None]
        fig.add_scatter(
            x=[number for number, _ in points], y=[found for _, found in points], name=escape_label(name),
            mode="lines+markers", hovertemplate="%{y:.3f}", **stroke(index, len(logs)),
        )  # fmt: skip
    return integer_x_axis(fig, [done.round for log in logs.values() for done in log])
