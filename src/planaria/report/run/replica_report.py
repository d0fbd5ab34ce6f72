"""Report section on replicas: losses, distance of weights, groups of each round, and waits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import plotly.graph_objects as go

from planaria.control.facts.decisions import Disband, Form, ReplicaRestarted
from planaria.control.log.run_record import RunRecord
from planaria.report import page, theme
from planaria.report.phrases import format_count
from planaria.report.run.exchange_options import effective_options, exchange_lines
from planaria.report.run.recoveries import recoveries
from planaria.report.run.round_history import RoundHistory, settled_rounds
from planaria.report.run.sample_ledger import sample_ledger
from planaria.report.theme import add_curve, figure, integer_x_axis, lane_axis, stroke

ROUNDS_DRAWN = 400
"""maximum rounds in the figure of waits: those with the longest"""
Points = Sequence[tuple[float, float | None]]


def replica_section(record: RunRecord) -> Iterator[str]:
    """Yield the section, if replicas trained separate steps."""
    count = max((started.replicas for _, started in record.starts), default=1)
    if count == 1:
        return
    count = max([count, *(1 + fact.replica for _, fact in record.landmarks if isinstance(fact, Form))])
    histories = settled_rounds(record)
    text = f"{format_count(count, 'replica')} with separate steps and samples. Exchange: {effective_options(record)}."
    text += "".join(f" {line[0].upper()}{line[1:]}." for line in exchange_lines(record))
    blocks = _validations(record)
    if histories:
        blocks += _rounds(histories, count)
    table = page.table("each-replica", REPLICA_COLUMNS, _rows(record, histories, count), numbers_from=2)
    yield page.section(
        "Replicas", text, *blocks, page.subheading("Each replica"), page.paragraph(COLUMNS_EXPLAINED), table
    )


def _validations(record: RunRecord) -> list[str]:
    validations = sorted({m.step: m for m in record.validated if m.val_losses}.items())  # few points
    if not validations:
        return []
    several = sorted({replica for _, validation in validations for replica in validation.val_losses})
    each = {r: [(step, validation.val_losses.get(r)) for step, validation in validations] for r in several}
    fig = draw_losses(each, [(step, validation.val_loss) for step, validation in validations], "mean over replicas")
    return [page.subheading("Validation loss of each replica, after equal numbers of steps"),
            page.chart(fig, "replicas")]  # fmt: skip


def _rounds(histories: Sequence[RoundHistory], count: int) -> list[str]:
    rounds = by_round(histories)
    charts, many = [], len(rounds) > ROUNDS_DRAWN
    if points := distance_by_round(rounds):
        charts += [
            page.subheading("Distance of replicas when they met"),
            page.paragraph(
                "RMS distance of weights from their mean before each round, estimated from the groups that met; "
                "stages count equally."
            ),
            page.chart(draw_distances(points), "spread"),
        ]
    return [
        *charts,
        page.subheading("Waits in rounds"),
        page.paragraph(
            "From a replica's last work to its new weights. Bars are means over replicas; a diamond marks the longest "
            "wait." + (f" Of {len(rounds)} rounds, the {ROUNDS_DRAWN} with the longest waits." if many else "")
        ),
        page.chart(draw_waits({number: waited(of_round) for number, of_round in rounds.items()}), "waits"),
        page.subheading("Rounds settled by each pair of replicas; on the diagonal, alone"),
        page.chart(draw_pair_counts(rounds_together(histories, count)), "rounds"),
    ]


def by_round(histories: Sequence[RoundHistory]) -> dict[int, list[RoundHistory]]:
    """Group histories by round, in order; a round repeated by a resumed run replaces the earlier one."""
    rounds: dict[int, list[RoundHistory]] = {}
    for history in histories:
        of_round = rounds.setdefault(history.round, [])
        if of_round and of_round[0].part != history.part:
            of_round.clear()
        of_round.append(history)
    return dict(sorted(rounds.items()))


def distance_by_round(rounds: dict[int, list[RoundHistory]]) -> Points:
    """Return (mean of the members' steps, RMS of ``spreads`` over all nodes) per round of several replicas."""
    points = []
    for of_round in rounds.values():
        met = [history for history in of_round if history.spreads]
        distances = [far for history in met for far in history.spreads]
        steps = [step for history in met for step in history.steps.values()]
        if distances:
            points.append((sum(steps) / len(steps), math.sqrt(sum(far * far for far in distances) / len(distances))))
    return points


def waited(histories: Sequence[RoundHistory]) -> tuple[float, float, float, int]:
    """Return one round's mean waits for others and for updates, and the longest wait with its replica; seconds."""
    for_peers = {r: seconds for history in histories for r, seconds in history.waited_for_peers_s.items()}
    for_updates = {r: seconds for history in histories for r, seconds in history.waited_for_updates_s.items()}
    longest, slowest = max((for_peers[replica] + for_updates[replica], replica) for replica in for_peers)
    return sum(for_peers.values()) / len(for_peers), sum(for_updates.values()) / len(for_peers), longest, slowest


def rounds_together(histories: Sequence[RoundHistory], count: int) -> list[list[int]]:
    """Return [replica, replica] numbers of rounds settled together; on the diagonal, alone."""
    groups = {(history.part, history.round, history.contributors) for history in histories}
    pairs = Counter(pair for *_, members in groups for pair in combinations(sorted(members), 2))
    alone = Counter(history.members[0] for history in histories if history.alone)
    return [[alone[a] if a == b else pairs[min(a, b), max(a, b)] for b in range(count)] for a in range(count)]


REPLICA_COLUMNS = ["replica", "presence", "steps", "deaths", "rounds", "drawn alone", "timed out alone", "missed",
        "for others", "for updates", "blocking", "overlapped"]  # fmt: skip
COLUMNS_EXPLAINED = (
    "Rounds settled; of these drawn alone (or after the rest of its group left), or alone since others timed out or "
    "were not received. Missed: others settled without it. Seconds waited for others to join, and for their "
    "updates. Megabytes sent while another replica waited (blocking), and during inner steps (overlapped)."
)


def _rows(record: RunRecord, histories: Sequence[RoundHistory], count: int) -> Iterator[list[str]]:
    steps = Counter(line.replica for line in sample_ledger(record))
    lost = Counter(timing.replica for timing in recoveries(record) for _ in range(timing.deaths))
    for replica in range(count):
        of_replica = [history for history in histories if replica in history.members]
        alone = [history for history in of_replica if history.alone]
        yield [
            str(replica),
            _attendance(record, replica),
            str(steps[replica]),
            str(lost[replica]),
            str(len(of_replica)),
            str(sum(len(history.drawn) == 1 for history in alone)),
            str(sum(bool(history.missing) for history in alone)),
            str(sum(replica in history.missing for history in histories)),
            f"{sum(history.waited_for_peers_s[replica] for history in of_replica):.2f}",
            f"{sum(history.waited_for_updates_s[replica] for history in of_replica):.2f}",
            f"{sum(history.blocking_bytes.get(replica, 0) for history in of_replica) / 1e6:.1f}",
            f"{sum(history.prefetched_bytes.get(replica, 0) for history in of_replica) / 1e6:.1f}",
        ]


def _attendance(record: RunRecord, replica: int) -> str:
    zero, first = record.starts[0][0], max(started.replicas for _, started in record.starts)
    stays: list[str] = []
    for t, fact in record.landmarks:
        if isinstance(fact, Disband | ReplicaRestarted) and fact.replica == replica:
            begins = "from" if replica >= first and not stays else "back at"
            stays.append(f"{'left at' if isinstance(fact, Disband) else begins} {t - zero:.1f} s")
    return ", ".join(stays) or "throughout"


def draw_losses(replicas: Mapping[int, Points], together: Points, name: str) -> go.Figure:
    """Draw validation loss over steps: a line per replica, and a thick line ``name`` for all."""
    fig = figure(320, x="step", y="validation loss, nats per token")
    line = {"color": theme.GREY, "width": 9}
    add_curve(fig, together, f"{name}, step %{{x}}: %{{y:.4f}}", name=name, mode="lines", line=line)
    for index, (replica, points) in enumerate(sorted(replicas.items())):
        style = stroke(index, len(replicas))
        add_curve(
            fig, points, f"replica {replica}, step %{{x}}: %{{y:.4f}}", name=f"replica {replica}", mode="lines+markers",
            **style,
        )  # fmt: skip
    fig.update_layout(showlegend=True)
    return integer_x_axis(fig, [step for points in (together, *replicas.values()) for step, _ in points])


def draw_distances(points: Points) -> go.Figure:
    """Draw the RMS distance of weights from their mean over steps."""
    fig = figure(260, x="step", y="RMS distance of weights")
    style = {"line": {"color": theme.GREEN, "width": 2}, "marker": {"size": 5}}
    add_curve(fig, points, "step %{x}: %{y:.3g}", mode="lines+markers", **style)
    fig.update_yaxes(rangemode="tozero")
    return integer_x_axis(fig, [step for step, _ in points])


def draw_pair_counts(table: Sequence[Sequence[int]]) -> go.Figure:
    """Draw how often each pair of replicas met; the diagonal counts rounds alone."""
    count = len(table)
    fig = figure(120 + 26 * count)
    words = [
        [f"replicas {b} and {a} met {format_count(table[a][b], 'time')}" for b in range(count)] for a in range(count)
    ]
    for replica in range(count):
        words[replica][replica] = f"replica {replica} was alone {format_count(table[replica][replica], 'time')}"
    names = [f"replica {replica}" for replica in range(count)]
    style: dict[str, Any] = {"xgap": 1, "ygap": 1, "customdata": words, "texttemplate": "%{z}", "showscale": False}
    theme.add_heatmap(fig, names, names, table, theme.CARRIED, "%{customdata}", **style)
    fig.update_xaxes(showgrid=False)
    fig.update_layout(yaxis=lane_axis(names))
    return fig


def draw_waits(rounds: Mapping[int, tuple[float, float, float, int]]) -> go.Figure:
    """Draw the waits of each round in milliseconds, from (for others, for updates, longest, its replica) in seconds.

    Shows the :data:`ROUNDS_DRAWN` rounds with the longest waits.
    """
    longest = set(sorted(rounds, key=lambda number: rounds[number][2])[-ROUNDS_DRAWN:])
    rounds = {number: times for number, times in rounds.items() if number in longest}
    fig = figure(280, x="round", y="milliseconds", barmode="stack", bargap=0.25, showlegend=True)
    numbers, times_of = list(rounds), list(rounds.values())
    for index, (name, colour) in enumerate((("for others to join", theme.ORANGE), ("for their updates", theme.VIOLET))):
        fig.add_bar(
            x=numbers,
            y=[1000 * times[index] for times in times_of],
            name=name,
            marker={"color": colour},
            hovertemplate=f"round %{{x}}, {name}: %{{y:.1f}} ms, mean<extra></extra>",
        )
    longest_waits = [(number, 1000 * times[2]) for number, times in rounds.items()]
    slowest = {"name": "longest wait", "customdata": [times[3] for times in times_of]}
    hover = "round %{x}: replica %{customdata} waited %{y:.1f} ms"
    theme.add_marks(fig, longest_waits, theme.symbol("diamond", theme.INK, 8), hover, **slowest)
    fig.update_layout(legend={"traceorder": "normal"})
    return integer_x_axis(fig, numbers, bars=True)
