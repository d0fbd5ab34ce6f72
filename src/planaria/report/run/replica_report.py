"""The report on replicas, with its figures: losses, distance of weights, the groups of each round, and waits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import plotly.graph_objects as go

from planaria.control.decisions import Disband, Form, Found
from planaria.control.logs import RunRecord
from planaria.report import page
from planaria.report.run.ledger import sample_ledger
from planaria.report.run.recovery_timeline import recoveries
from planaria.report.run.round_history import RoundHistory, gatherings, told, totals
from planaria.report.theme import (
    CARRIED,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PAPER,
    VIOLET,
    add_curve,
    figure,
    lanes,
    stroke,
    symbol,
    whole,
)
from planaria.report.words import counted

ROUNDS_DRAWN = 400
"""rounds in the figure of waits, those with the longest"""
Points = Sequence[tuple[float, float | None]]


def replica_section(record: RunRecord) -> Iterator[str]:
    """Nothing where a run had one replica, or several that made all steps together."""
    count = max((started.replicas for _, started in record.starts), default=1)
    if count == 1:
        return
    count = max([count, *(1 + fact.replica for _, fact in record.landmarks if isinstance(fact, Form))])
    held = gatherings(record)
    text = f"{counted(count, 'replica')}, each of its own steps and samples."
    parts = _validations(record)
    if held:
        text += f" Their exchange ({record.config.exchange.kind}): {'; '.join(told(totals(held)))}."
        parts += _rounds(held, count)
    table = page.table("each-replica", HEAD, _rows(record, held, count), numbers_from=2)
    yield page.section("Replicas", text, *parts, page.subheading("Each replica"), page.note(KEY), table)


def _validations(record: RunRecord) -> list[str]:
    looks = sorted({m.step: m for m in record.validated if m.val_losses}.items())  # few
    if not looks:
        return []
    several = sorted({replica for _, look in looks for replica in look.val_losses})
    each = {r: [(step, look.val_losses.get(r)) for step, look in looks] for r in several}
    fig = curves(each, [(step, look.val_loss) for step, look in looks], "mean over replicas")
    return [page.subheading("Validation loss of each replica, after the same number of its own steps"),
            page.chart(fig, "replicas")]  # fmt: skip


def _rounds(held: Sequence[RoundHistory], count: int) -> list[str]:
    rounds = by_round(held)
    charts, many = [], len(rounds) > ROUNDS_DRAWN
    if points := spreads(rounds):
        charts += [
            page.subheading("How far replicas were apart when they met"),
            page.note(
                "RMS distance of weights from their mean, before they settled; estimated from the groups that met, all "
                "stages alike."
            ),
            page.chart(spread(points), "spread"),
        ]
    return [
        *charts,
        page.subheading("What a round was waited for"),
        page.note(
            "From a replica's last work to its new weights. Bars are means over replicas, a diamond is the one that "
            "waited longest."
            + (f" Of {len(rounds)} rounds, the {ROUNDS_DRAWN} with the longest waits." if many else "")
        ),
        page.chart(waits({round: waited(own) for round, own in rounds.items()}), "waits"),
        page.subheading("Who settled rounds with whom; on the diagonal, how often by itself"),
        page.chart(heat(met(held, count), alone=True), "meetings"),
    ]


def by_round(held: Sequence[RoundHistory]) -> dict[int, list[RoundHistory]]:
    """Gatherings of each round, in order; if a resumed run came to a round once more, those of then."""
    found: dict[int, list[RoundHistory]] = {}
    for history in held:
        own = found.setdefault(history.round, [])
        if own and own[0].part != history.part:
            own.clear()
        own.append(history)
    return dict(sorted(found.items()))


def spreads(rounds: dict[int, list[RoundHistory]]) -> Points:
    """(mean of the members' own steps, RMS of ``apart`` over the nodes of all groups) of each round of several."""
    points = []
    for own in rounds.values():
        met = [history for history in own if history.apart]
        apart = [far for history in met for far in history.apart]
        steps = [step for history in met for step in history.steps.values()]
        if apart:
            points.append((sum(steps) / len(steps), math.sqrt(sum(far * far for far in apart) / len(apart))))
    return points


def waited(held: Sequence[RoundHistory]) -> tuple[float, float, float, int]:
    """Of one round, in seconds: means over replicas, for others and for offers; the longest wait, and whose it was."""
    others = {r: seconds for history in held for r, seconds in history.for_others.items()}
    offers = {r: seconds for history in held for r, seconds in history.for_offers.items()}
    longest, who = max((others[replica] + offers[replica], replica) for replica in others)
    return sum(others.values()) / len(others), sum(offers.values()) / len(others), longest, who


def met(held: Sequence[RoundHistory], count: int) -> list[list[int]]:
    """How often each replica settled a round with each other; on the diagonal, by itself."""
    pairs = Counter(pair for history in held for pair in combinations(sorted(history.members), 2))
    alone = Counter(history.members[0] for history in held if history.alone)
    return [[alone[a] if a == b else pairs[min(a, b), max(a, b)] for b in range(count)] for a in range(count)]


HEAD = ["replica", "presence", "steps", "deaths", "rounds", "by draw", "deserted", "came late", "for others",
        "for offers", "late", "ahead"]  # fmt: skip
KEY = (
    "Rounds that it settled; of these alone by the draw, or because the rest of its group had left; deserted: alone "
    "because others did not come or were not heard. Came late, or was not heard: others settled without it. Seconds "
    "waited for others to come, and for their offers. Megabytes sent late, which somebody waited for, and ahead."
)


def _rows(record: RunRecord, held: Sequence[RoundHistory], count: int) -> Iterator[list[str]]:
    steps = Counter(line.replica for line in sample_ledger(record))
    lost = Counter(timing.replica for timing in recoveries(record) for _ in range(timing.deaths))
    for replica in range(count):
        own = [history for history in held if replica in history.members]
        alone = [history for history in own if history.alone]
        yield [
            str(replica),
            _attendance(record, replica),
            str(steps[replica]),
            str(lost[replica]),
            str(len(own)),
            str(sum(len(history.drawn) == 1 for history in alone)),
            str(sum(bool(history.missing) for history in alone)),
            str(sum(replica in history.missing for history in held)),
            f"{sum(history.for_others[replica] for history in own):.2f}",
            f"{sum(history.for_offers[replica] for history in own):.2f}",
            f"{sum(history.blocking_bytes.get(replica, 0) for history in own) / 1e6:.1f}",
            f"{sum(history.prefetched_bytes.get(replica, 0) for history in own) / 1e6:.1f}",
        ]


def _attendance(record: RunRecord, replica: int) -> str:
    zero, first = record.starts[0][0], max(started.replicas for _, started in record.starts)
    told: list[str] = []
    for t, fact in record.landmarks:
        if isinstance(fact, Disband | Found) and fact.replica == replica:
            begins = "from" if replica >= first and not told else "back at"
            told.append(f"{'left at' if isinstance(fact, Disband) else begins} {t - zero:.1f} s")
    return ", ".join(told) or "throughout"


def curves(replicas: Mapping[int, Points], together: Points, name: str) -> go.Figure:
    """Validation loss in nats over steps: a line for each replica, a thick one beneath, of this ``name``, for all."""
    fig = figure(320, x="step", y="validation loss, nats per token")
    line = {"color": GREY, "width": 9}
    add_curve(fig, together, f"{name}, step %{{x}}: %{{y:.4f}}", name=name, mode="lines", line=line)
    for place, (replica, points) in enumerate(sorted(replicas.items())):
        style = stroke(place, len(replicas))
        add_curve(
            fig, points, f"replica {replica}, step %{{x}}: %{{y:.4f}}", name=f"replica {replica}", mode="lines+markers",
            **style,
        )  # fmt: skip
    fig.update_layout(showlegend=True)
    return whole(fig, [step for points in (together, *replicas.values()) for step, _ in points])


def spread(points: Points) -> go.Figure:
    """RMS distance of weights from their mean over steps."""
    fig = figure(260, x="step", y="RMS distance of weights")
    style = {"line": {"color": GREEN, "width": 2}, "marker": {"size": 5}}
    add_curve(fig, points, "step %{x}: %{y:.3g}", mode="lines+markers", **style)
    fig.update_yaxes(rangemode="tozero")
    return whole(fig, [step for step, _ in points])


def heat(table: Sequence[Sequence[int | None]], alone: bool = False) -> go.Figure:
    """How often each replica met each other, and itself, if that counts how often it was ``alone``."""
    count = len(table)
    fig = figure(120 + 26 * count)
    words = [
        [f"replicas {b} and {a} met {counted(table[a][b] or 0, 'time')}" for b in range(count)] for a in range(count)
    ]
    for replica in range(count) if alone else ():
        words[replica][replica] = f"replica {replica} was alone {counted(table[replica][replica] or 0, 'time')}"
    names = [f"replica {replica}" for replica in range(count)]
    fig.add_heatmap(
        x=names,
        y=names,
        z=table,
        colorscale=[[0, PAPER], [1, CARRIED]],
        xgap=1,
        ygap=1,
        zmin=0,
        customdata=words,
        hovertemplate="%{customdata}<extra></extra>",
        text=[["" if cell is None else str(cell) for cell in row] for row in table],
        texttemplate="%{text}",
        showscale=False,
    )
    fig.update_xaxes(showgrid=False)
    fig.update_layout(yaxis=lanes(names))
    return fig


def waits(rounds: Mapping[int, tuple[float, float, float, int]]) -> go.Figure:
    """Milliseconds that a round was waited for: (for others, for offers, longest of a replica, which), in seconds.

    Of more rounds than a screen can show, those in which a replica waited longest.
    """
    longest = set(sorted(rounds, key=lambda number: rounds[number][2])[-ROUNDS_DRAWN:])
    rounds = {number: parts for number, parts in rounds.items() if number in longest}
    fig = figure(280, x="round", y="milliseconds", barmode="stack", bargap=0.25, showlegend=True)
    numbers, told = list(rounds), list(rounds.values())
    for place, (name, colour) in enumerate((("for others to come", ORANGE), ("for what they said", VIOLET))):
        fig.add_bar(
            x=numbers,
            y=[1000 * parts[place] for parts in told],
            name=name,
            marker={"color": colour},
            hovertemplate=f"round %{{x}}, {name}: %{{y:.1f}} ms, mean<extra></extra>",
        )
    fig.add_scatter(
        x=numbers,
        y=[1000 * parts[2] for parts in told],
        name="who waited longest",
        mode="markers",
        marker=symbol("diamond", INK, 8),
        customdata=[parts[3] for parts in told],
        hovertemplate="round %{x}: replica %{customdata} waited %{y:.1f} ms<extra></extra>",
    )
    fig.update_layout(legend={"traceorder": "normal"})
    return whole(fig, numbers, bars=True)
