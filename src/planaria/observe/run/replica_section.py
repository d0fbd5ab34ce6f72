"""The report on replicas: what each learned, how far apart they are, who met whom, and what that took.

Here those that one process trained; for those of a fleet see ``observe/run/round_section.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import combinations

import plotly.graph_objects as go

from planaria.observe import page
from planaria.observe.run.replica_figures import curves, heat, spread
from planaria.observe.run.round_section import fleet_section
from planaria.record.events import ReplicasEvaluated, RoundSettled
from planaria.record.logs import RunRecord


def replica_section(record: RunRecord) -> Iterator[str]:
    """Nothing where a run had one replica."""
    yield from fleet_section(record)
    looks = [fact for _, fact in record.landmarks if isinstance(fact, ReplicasEvaluated)]
    rounds = [fact for _, fact in record.landmarks if isinstance(fact, RoundSettled)]
    if not looks:
        return
    blocking, prefetched = (
        sum(getattr(fact, part) for fact in rounds) / 1e6 for part in ("blocking_bytes", "prefetched_bytes")
    )
    text = f"{len(looks[0].losses)} replicas. Validation loss of each, and of the mean of their weights: the one model."
    if rounds:
        text += (
            f" {len(rounds)} rounds of exchange; all together sent {blocking:.1f} MB that somebody waited for and "
            f"{prefetched:.1f} MB ahead."
        )
    charts = [page.chart(losses_figure(looks), "replicas"), page.chart(spread_figure(looks, rounds), "spread")]
    if rounds:
        charts.append(page.chart(meetings_figure(rounds, len(looks[0].losses)), "meetings"))
    yield page.section("Replicas", text, *charts)


def losses_figure(looks: list[ReplicasEvaluated]) -> go.Figure:
    """Validation loss in nats over steps: a thin line for each replica, a thick one for the one model."""
    count = max(len(look.losses) for look in looks)
    each = {r: [(look.step, look.losses[r] if r < len(look.losses) else None) for look in looks] for r in range(count)}
    return curves(each, [(look.step, look.consensus) for look in looks], "the one model")


def spread_figure(looks: list[ReplicasEvaluated], rounds: list[RoundSettled]) -> go.Figure:
    """RMS distance of weights from their mean over steps; after each round, where there were any."""
    return spread(sorted((fact.step, fact.spread) for fact in (rounds or looks)))


def meetings_figure(rounds: list[RoundSettled], count: int) -> go.Figure:
    """How often each replica met each other."""
    met = Counter(pair for fact in rounds for group in fact.groups for pair in combinations(sorted(group), 2))
    return heat([[met[min(a, b), max(a, b)] if a != b else None for b in range(count)] for a in range(count)])
