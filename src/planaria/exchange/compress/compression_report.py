"""Report section on compression: contraction, bytes, error feedback, and uncompressed rounds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median

import plotly.graph_objects as go

from planaria.control.facts.events import MessageCompressed
from planaria.control.log.run_record import RunRecord, cached
from planaria.report import page
from planaria.report.phrases import format_count
from planaria.report.theme import BLUE, GREY, ORANGE, RED, add_curve, figure, integer_x_axis, stroke, symbol

ROWS = 30
"""maximum rows of the table of rounds sent in full"""
WHY = {
    "beginning": "estimates start with the run",
    "rebuilt": "a node of the stage was rebuilt without its estimate",
    "replicas": "the number of replicas changed",
}
HEAD = [
    "stage", "{}s", "δ, median", "minimum", "maximum", "δ guaranteed",
    "of dense bytes, a {}", "whole run", "sent in full",
]  # fmt: skip


@dataclass
class MessageTotals:
    """One message per stage and round, from the lowest node that reported it; repeated rounds count once."""

    reported: dict[int, dict[int, MessageCompressed]] = field(default_factory=lambda: defaultdict(dict))
    """stage → round → message"""

    def lossy_messages(self, stage: int) -> list[MessageCompressed]:
        """Return the compressed messages of a stage, in order of round."""
        return [fact for _, fact in sorted(self.reported[stage].items()) if fact.full is None]

    @property
    def full(self) -> dict[tuple[int, str], list[int]]:
        """(round, reason) → stages sent in full, in order of round."""
        stages: dict[tuple[int, str], list[int]] = defaultdict(list)
        for stage, facts in sorted(self.reported.items()):
            for round, fact in facts.items():
                if fact.full is not None:
                    stages[round, fact.full].append(stage)
        return dict(sorted(stages.items()))

    @property
    def share(self) -> float:
        """Bytes sent, divided by those of the same numbers in fp32."""
        return share(fact for facts in self.reported.values() for fact in facts.values())


def share(facts: Iterable[MessageCompressed]) -> float:
    """Return bytes sent divided by dense bytes of these messages."""
    sizes = [(fact.sent_bytes, fact.dense_bytes) for fact in facts]
    return sum(sent for sent, _ in sizes) / sum(dense for _, dense in sizes)


@cached
def messages_of(record: RunRecord) -> MessageTotals:
    """Return the messages of the log; empty for one replica."""
    totals = MessageTotals()
    if record.config.exchange.replicas == 1:
        return totals
    for _, fact in record.history:
        if isinstance(fact, MessageCompressed):
            reported = totals.reported[fact.stage].get(fact.round)
            if reported is None or fact.node <= reported.node:
                totals.reported[fact.stage][fact.round] = fact
    return totals


def section(record: RunRecord) -> Iterator[str]:
    """Yield the section, if the run compressed messages."""
    messages = messages_of(record)
    if not messages.reported:
        return
    when, chosen = _x_axis(record), record.config.exchange.compress
    how = f"exchange.compress = {chosen!r}" if chosen else "exchange.options.bits"
    parts = [
        page.table("messages", [head.format(when) for head in HEAD], list(_rows(record, messages)), numbers_from=1)
    ]
    if any(messages.lossy_messages(stage) for stage in messages.reported):
        parts += [page.subheading("Contraction"), page.chart(contraction_figure(messages, when), "contraction")]
    parts += [page.subheading("Norms"), page.chart(norms_figure(messages, when), "compression")]
    parts.append(page.paragraph("Over all stages, after each message. A cross: some stage was sent in full."))
    if full := messages.full:
        rows = [[str(round), ", ".join(map(str, stages)), WHY[why]] for (round, why), stages in full.items()]
        more = f" The first {ROWS} of {len(rows)}." if len(rows) > ROWS else ""
        parts += [
            page.subheading("Sent in full"),
            page.paragraph(f"They initialise the estimates.{more}"),
        ]
        parts.append(page.table("sent-in-full", [when, "stages", "why"], rows[:ROWS], 3))
    yield page.section(
        "Compression",
        f"Compression error ({how}), measured by the first replica's nodes in their own messages. Contraction: "
        "δ = 1 − ‖C(v) − v‖²/‖v‖², where v is the uncompressed message.",
        *parts,
    )


def summary_lines(record: RunRecord) -> Iterator[str]:
    """Yield a summary line with bytes, contraction and rounds sent in full."""
    messages = messages_of(record)
    if not messages.reported:
        return
    line = f"compression   {messages.share:.1%} of dense bytes"
    if deltas := [1.0 - fact.relative_error for stage in messages.reported for fact in messages.lossy_messages(stage)]:
        line += f"; delta {median(deltas):.3g}, median over stages and {_x_axis(record)}s"
    if full := messages.full:
        rounds = {round for round, _ in full}
        whys = "; ".join(WHY[why] for why in dict.fromkeys(why for _, why in full))
        line += f"; {format_count(len(rounds), _x_axis(record))} in full: {whys}"
    yield line


def _x_axis(record: RunRecord) -> str:
    return "step" if record.config.exchange.kind == "allreduce" else "round"


def _rows(record: RunRecord, messages: MessageTotals) -> Iterator[list[str]]:
    for stage, facts in sorted(messages.reported.items()):
        shortened = messages.lossy_messages(stage)
        deltas = [1.0 - fact.relative_error for fact in shortened]
        each = [f"{of(deltas):.4f}" if shortened else "–" for of in (median, min, max)]
        steady = f"{share(shortened):.2%}" if shortened else "–"
        guaranteed = _guaranteed_delta(record, shortened[0].dense_bytes // 4) if shortened else "–"
        whole = f"{share(facts.values()):.2%}"
        yield [str(stage), str(len(facts)), *each, guaranteed, steady, whole, str(len(facts) - len(shortened))]


def _guaranteed_delta(record: RunRecord, count: int) -> str:
    """Return the δ that the compressor guarantees for ``count`` numbers, or "none"."""
    from planaria.exchange.aggregate import AggregatingExchange
    from planaria.exchange.registry import make_exchange  # compressors import torch

    rule = make_exchange(record.config.exchange)
    assert isinstance(rule, AggregatingExchange), "only averaging compresses"
    compressor = rule.compression.compressor
    return f"{compressor.delta(count):.4f}" if compressor.guaranteed else "none"


def contraction_figure(messages: MessageTotals, when: str) -> go.Figure:
    """Draw the measured δ, one line per stage."""
    fig = figure(260, x=when, y="contraction δ")
    for number, stage in enumerate(sorted(messages.reported)):
        points = [(float(fact.round), 1.0 - fact.relative_error) for fact in messages.lossy_messages(stage)]
        style = {"mode": "lines", "name": f"stage {stage}", "line": stroke(number, len(messages.reported))["line"]}
        add_curve(fig, points, f"stage {stage}, {when} %{{x}}: %{{y:.4f}}", **style)
    fig.update_yaxes(rangemode="tozero")
    fig.update_layout(showlegend=True)
    return integer_x_axis(fig, [fact.round for stage in messages.reported for fact in messages.lossy_messages(stage)])


def norms_figure(messages: MessageTotals, when: str) -> go.Figure:
    """Draw L2 norms over all stages: ‖g‖, accumulated error ‖e‖ and estimate error ‖g − h‖."""
    fig = figure(280, x=when, y="L2 norm")
    norms = _norms_by_round(messages)
    for name, label, colour, dash in (
        ("norm", "‖g‖", GREY, "solid"),
        ("residual", "residual, ‖e‖", ORANGE, "dash"),
        ("estimate_error", "error of the estimate, ‖g − h‖", BLUE, "dot"),
    ):
        if norms[name]:
            points = [(float(round), value) for round, value in sorted(norms[name].items())]
            style = {"mode": "lines", "name": label, "line": {"color": colour, "dash": dash}}
            add_curve(fig, points, f"{label}, {when} %{{x}}: %{{y:.3g}}", **style)
    if rounds := sorted({round for round, _ in messages.full}):
        fig.add_scatter(
            x=rounds, y=[norms["norm"][round] for round in rounds], mode="markers", name="sent in full",
            marker=symbol("x", RED, 8), hovertemplate=f"sent in full, {when} %{{x}}<extra></extra>",
        )  # fmt: skip
    fig.update_yaxes(rangemode="tozero")
    fig.update_layout(showlegend=True)
    return integer_x_axis(fig, [round for norm in norms.values() for round in norm])


def _norms_by_round(messages: MessageTotals) -> dict[str, dict[int, float]]:
    """ "norm", "residual" or "estimate_error" → round → its L2 norm over the stages."""
    norms: dict[str, dict[int, float]] = {"norm": {}, "residual": {}, "estimate_error": {}}
    for facts in messages.reported.values():
        for round, fact in facts.items():
            reported = {"norm": fact.norm, "residual": fact.residual, "estimate_error": fact.estimate_error}
            for name, norm in reported.items():
                if norm is not None:
                    norms[name][round] = math.hypot(norms[name].get(round, 0.0), norm)
    return norms
