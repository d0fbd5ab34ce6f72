"""Report section on the weights of each replica's updates, and rejected updates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import plotly.graph_objects as go

from planaria.control.facts.events import UpdateRejected, UpdatesWeighted
from planaria.control.log.run_record import RunRecord, cached
from planaria.report import page
from planaria.report.phrases import format_count
from planaria.report.theme import BLUE, MUTED, PAPER, RED, figure, integer_x_axis

COLUMNS = 240
"""maximum columns of the heat map; more rounds share one"""
ROWS = 30
"""maximum rows of a table"""
OWN = "this run's"
MEAN = "mean"
"""names that differ from those of all rules with coefficients"""
BY_OTHERS = (
    "Rounds in which an update counted less than half of its share in a mean (at most f updates per round), with the "
    "mean coefficient that each rule would have assigned to it, from the same inner products with default options. "
    "Median and trimmed mean work per coordinate and have no coefficients; clipping depends on its own last value."
)

StageOfReplica = tuple[int, int]
"""replica, stage; -1 for all stages"""


@dataclass
class RejectionCounts:
    """Rejections of one replica's updates for one stage and reason."""

    rounds: set[int] = field(default_factory=set)
    nodes: set[int] = field(default_factory=set)
    """nodes that rejected them"""


@dataclass
class LowWeightRounds:
    """Rounds in which an update counted little, and its coefficients by rule."""

    rounds: int = 0
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """rule → sum of coefficients"""
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """rule → number of rounds"""

    def add(self, rule: str, value: float) -> None:
        self.sums[rule] += value
        self.counts[rule] += 1


@dataclass
class TrustHistory:
    """Weights and rejections of updates over a whole run."""

    width: int = 1
    """rounds per column"""
    whole: bool = False
    """whether updates are weighed over all stages of a replica"""
    shares: bool = False
    """whether the coefficients are shares of the sum, without a robust rule"""
    coefficients: dict[StageOfReplica, dict[int, list[float]]] = field(default_factory=lambda: defaultdict(dict))
    """place → column → [sum of coefficients, count]"""
    rejected: dict[tuple[int, int, str], RejectionCounts] = field(default_factory=lambda: defaultdict(RejectionCounts))
    """(replica, stage, reason)"""
    little: dict[StageOfReplica, LowWeightRounds] = field(default_factory=lambda: defaultdict(LowWeightRounds))

    def position(self, replica: int, stage: int) -> StageOfReplica:
        """Return the row of a replica's stage."""
        return replica, -1 if self.whole else stage

    def mean(self, location: StageOfReplica, column: int) -> float | None:
        total, count = self.coefficients.get(location, {}).get(column, (0.0, 0))
        return total / count if count else None


@cached
def trust_of(record: RunRecord) -> TrustHistory:
    """Return the trust in a log; repeated rounds count again."""
    last = max(
        (fact.round for _, fact in record.history if isinstance(fact, UpdatesWeighted | UpdateRejected)), default=0
    )
    robust = record.config.exchange.robust
    shares = not robust
    whole = isinstance(robust, Mapping) and robust.get("scope") == "replica"
    history = TrustHistory(width=1 + last // COLUMNS, whole=whole, shares=shares)
    for _, fact in record.history:
        if isinstance(fact, UpdatesWeighted):
            total = sum(fact.counted.values()) if shares else 1.0
            for replica, coefficient in fact.counted.items():
                cell = history.coefficients[history.position(replica, fact.stage)].setdefault(
                    fact.round // history.width, [0.0, 0]
                )
                cell[0] += coefficient / total if total else 0.0
                cell[1] += 1
            _compare(fact, history)
        elif isinstance(fact, UpdateRejected):
            rejections = history.rejected[fact.replica, fact.stage, fact.reason]
            rejections.rounds.add(fact.round)
            rejections.nodes.add(fact.node)
    return history


def _compare(fact: UpdatesWeighted, trust: TrustHistory) -> None:
    """Add the coefficients that other rules would have assigned in a round."""
    suspects = {replica for of in fact.rivals.values() for replica in of}
    for replica in suspects:
        low_weights = trust.little[trust.position(replica, fact.stage)]
        low_weights.rounds += 1
        low_weights.add(OWN, fact.counted[replica])
        low_weights.add(MEAN, 1 / len(fact.counted))
        for rule, of in fact.rivals.items():
            low_weights.add(rule, of[replica])


def section(record: RunRecord) -> Iterator[str]:
    """Yield the section, if updates were weighed or rejected."""
    if record.config.exchange.replicas == 1:
        return
    trust = trust_of(record)
    if not trust.coefficients and not trust.rejected:
        return
    exchange = record.config.exchange
    text, parts = "Updates that replicas rejected.", []
    if trust.coefficients:
        weight, by = "Weight", f"exchange.robust = {exchange.robust!r}"
        if trust.shares:
            weight, by = "Share", f"exchange.kind = {exchange.kind!r}; its weight over the sum of weights"
        over = "over all stages" if trust.whole else "stage by stage"
        text = (
            f"{weight} of each replica's update in the aggregate ({by}), {over}, at the first replica's nodes. Blank: "
            "none. Red: rejected. " + (f"A column is the mean of {trust.width} rounds." if trust.width > 1 else "")
        )
        parts.append(page.chart(trust_figure(trust), "trust"))
    if trust.little:
        parts += [
            page.subheading("By other rules"),
            page.paragraph(BY_OTHERS),
            page.table("by-other-rules", *_rival_table(trust), numbers_from=2),
        ]
    if trust.rejected:
        head = ["replica", "stage", "reason", "rounds", "first", "last", "rejected by"]
        rows = sorted(_rows(trust), key=lambda row: (-int(row[3]), row))
        more = f" The {ROWS} most frequent of {len(rows)}." if len(rows) > ROWS else ""
        parts += [page.subheading("Rejected"), page.paragraph(f"Invalid updates.{more}")]
        parts.append(page.table("rejected", head, rows[:ROWS], numbers_from=3))
    title = "Shares of updates" if trust.shares and not trust.rejected else "Trust"
    yield page.section(title, text.strip(), *parts)


def _rival_table(trust: TrustHistory) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of mean coefficients by rule, the most frequently discounted updates first."""
    rules = [OWN, MEAN, *sorted({rule for little in trust.little.values() for rule in little.sums} - {OWN, MEAN})]
    rows = []
    for (replica, stage), little in sorted(trust.little.items(), key=lambda pair: (-pair[1].rounds, pair[0]))[:ROWS]:
        means = (f"{little.sums[rule] / little.counts[rule]:.3f}" if rule in little.sums else "–" for rule in rules)
        rows.append([str(replica), str(stage) if stage >= 0 else "all", str(little.rounds), *means])
    return ["replica", "stage", "rounds", *rules], rows


def _rows(trust: TrustHistory) -> Iterator[list[str]]:
    for (replica, stage, reason), rejections in trust.rejected.items():
        location = str(stage) if stage >= 0 else "–"
        rounds, nodes = rejections.rounds, len(rejections.nodes)
        rejected_by = f"{format_count(nodes, 'node')}"
        yield [str(replica), location, reason, str(len(rounds)), str(min(rounds)), str(max(rounds)), rejected_by]


def trust_figure(trust: TrustHistory) -> go.Figure:
    """Draw coefficients as a heat map: rows are stages of replicas (or whole replicas), columns are rounds."""
    rejected: dict[StageOfReplica, set[int]] = defaultdict(set)
    for (replica, stage, _), rejections in trust.rejected.items():
        rejected[trust.position(replica, stage)] |= {round // trust.width for round in rejections.rounds}
    positions = sorted({*trust.coefficients, *rejected})
    columns = sorted({column for of in (*trust.coefficients.values(), *rejected.values()) for column in of})
    names = [f"replica {replica}" + (f" · stage {stage}" if stage >= 0 else "") for replica, stage in positions]
    rounds = [column * trust.width for column in columns]
    means = [[trust.mean(index, column) for column in columns] for index in positions]
    fig = figure(110 + 22 * len(positions), x="round")
    cells = {"x": rounds, "y": names, "zmin": 0, "xgap": 1 if len(columns) <= 80 else 0, "ygap": 2}
    fig.add_heatmap(
        z=means,
        colorscale=[[0, PAPER], [1, BLUE]],
        colorbar={
            "title": {"text": "share" if trust.shares else "coefficient", "font": {"size": 12, "color": MUTED}},
            "tickfont": {"size": 12, "color": MUTED},
            "thickness": 12,
            "outlinewidth": 0,
        },
        **cells,
        hovertemplate="%{y}, round %{x}: %{z:.3g}<extra></extra>",
    )
    fig.add_heatmap(
        z=[[1 if column in rejected[index] else None for column in columns] for index in positions],
        zmax=1,
        colorscale=[[0, RED], [1, RED]],
        showscale=False,
        **cells,
        hovertemplate="%{y}, round %{x}: rejected<extra></extra>",
    )
    fig.update_yaxes(autorange="reversed", showgrid=False)
    fig.update_xaxes(showgrid=False)
    return integer_x_axis(fig, rounds, bars=True) if trust.width == 1 else fig
