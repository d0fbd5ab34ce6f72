"""Whom the replicas of a run trusted: what each one's offers counted over its rounds, and which were refused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import plotly.graph_objects as go

from planaria.control.events import OfferRefused, OffersCounted
from planaria.control.logs import RunRecord
from planaria.report import page
from planaria.report.theme import BLUE, MUTED, PAPER, RED, figure, whole
from planaria.report.words import counted

COLUMNS = 240
"""of the heat map; more rounds share one"""
ROWS = 30
"""of a table"""
OWN, MEAN = "this run's", "mean"
"""rules of which none of those that go by coefficients has the name"""
BY_OTHERS = (
    "Rounds in which an offer counted less than half of its share in a mean, of as many offers of a round as may lie. "
    "What each rule would have counted of it then, averaged over these rounds: by the same inner products, with its "
    "options as they ship. Median and trimmed mean look at each number by itself, and have no coefficients; clipping "
    "goes on from its own last value, which only a run by that rule has."
)

Place = tuple[int, int]
"""replica, stage; of all stages, -1"""


@dataclass
class Refusals:
    """What was refused of one replica at one stage for one reason."""

    rounds: set[int] = field(default_factory=set)
    nodes: set[int] = field(default_factory=set)
    """that refused it"""


@dataclass
class Little:
    """Rounds in which an offer counted little, and what by which rule."""

    rounds: int = 0
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """of coefficients, by rule"""
    told: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """in so many of these rounds"""

    def add(self, rule: str, value: float) -> None:
        self.sums[rule] += value
        self.told[rule] += 1


@dataclass
class Trust:
    """Of a whole run."""

    width: int = 1
    """rounds that share a column"""
    whole: bool = False
    """are offers judged over all stages of a replica?"""
    counted: dict[Place, dict[int, list[float]]] = field(default_factory=lambda: defaultdict(dict))
    """whose → column → [sum of coefficients, how many]"""
    refused: dict[tuple[int, int, str], Refusals] = field(default_factory=lambda: defaultdict(Refusals))
    """(replica, stage, reason)"""
    little: dict[Place, Little] = field(default_factory=lambda: defaultdict(Little))

    def place(self, replica: int, stage: int) -> Place:
        """The row in which that stands."""
        return replica, -1 if self.whole else stage

    def mean(self, place: Place, column: int) -> float | None:
        total, count = self.counted.get(place, {}).get(column, (0.0, 0))
        return total / count if count else None


def trust_of(record: RunRecord) -> Trust:
    """What the log tells; a round that was done again counts again."""
    return record.once(_trust)


def _trust(record: RunRecord) -> Trust:
    last = max((fact.round for _, fact in record.history if isinstance(fact, OffersCounted | OfferRefused)), default=0)
    robust = record.config.exchange.robust
    whole = isinstance(robust, Mapping) and robust.get("scope") == "replica"
    found = Trust(width=1 + last // COLUMNS, whole=whole)
    for _, fact in record.history:
        if isinstance(fact, OffersCounted):
            for replica, value in fact.counted.items():
                cell = found.counted[found.place(replica, fact.stage)].setdefault(fact.round // found.width, [0.0, 0])
                cell[0] += value
                cell[1] += 1
            _compare(fact, found)
        elif isinstance(fact, OfferRefused):
            refusals = found.refused[fact.replica, fact.stage, fact.reason]
            refusals.rounds.add(fact.round)
            refusals.nodes.add(fact.node)
    return found


def _compare(fact: OffersCounted, trust: Trust) -> None:
    """Take in what other rules would have counted in a round."""
    suspects = {replica for of in fact.rivals.values() for replica in of}
    for replica in suspects:
        found = trust.little[trust.place(replica, fact.stage)]
        found.rounds += 1
        found.add(OWN, fact.counted[replica])
        found.add(MEAN, 1 / len(fact.counted))
        for rule, of in fact.rivals.items():
            found.add(rule, of[replica])


def section(record: RunRecord) -> Iterator[str]:
    """Nothing for a run whose replicas had nobody to distrust, and refused nothing."""
    if record.config.exchange.replicas == 1:
        return
    trust = trust_of(record)
    if not trust.counted and not trust.refused:
        return
    text, parts = "What the offers of each replica counted, and what was refused.", []
    if trust.counted:
        over = "over all stages" if trust.whole else "stage by stage"
        text = (
            f"How much the offers of each replica counted in what the others made of all (exchange.robust = "
            f"{record.config.exchange.robust!r}), {over}, as the first replica's nodes saw it. Blank: nothing. "
            "Red: refused. " + (f"A column is the mean of {trust.width} rounds." if trust.width > 1 else "")
        )
        parts.append(page.chart(trust_figure(trust), "trust"))
    if trust.little:
        parts += [
            page.subheading("By other rules"),
            page.note(BY_OTHERS),
            page.table("by-other-rules", *_by_others(trust), numbers_from=2),
        ]
    if trust.refused:
        head = ["replica", "stage", "what was wrong", "rounds", "first", "last", "refused by"]
        rows = sorted(_rows(trust), key=lambda row: (-int(row[3]), row))
        more = f" The {ROWS} most frequent of {len(rows)}." if len(rows) > ROWS else ""
        parts += [page.subheading("Refused"), page.note(f"Offers that were of no use.{more}")]
        parts.append(page.table("refused", head, rows[:ROWS], numbers_from=3))
    yield page.section("Trust", text.strip(), *parts)


def _by_others(trust: Trust) -> tuple[list[str], list[list[str]]]:
    """Heads and rows: for each stage of each replica, or for a whole one, what its offers would have counted, those
    that counted little most often first."""
    rules = [OWN, MEAN, *sorted({rule for little in trust.little.values() for rule in little.sums} - {OWN, MEAN})]
    rows = []
    for (replica, stage), little in sorted(trust.little.items(), key=lambda pair: (-pair[1].rounds, pair[0]))[:ROWS]:
        means = (f"{little.sums[rule] / little.told[rule]:.3f}" if rule in little.sums else "–" for rule in rules)
        rows.append([str(replica), str(stage) if stage >= 0 else "all", str(little.rounds), *means])
    return ["replica", "stage", "rounds", *rules], rows


def _rows(trust: Trust) -> Iterator[list[str]]:
    for (replica, stage, reason), found in trust.refused.items():
        place = str(stage) if stage >= 0 else "–"
        rounds, nodes = found.rounds, len(found.nodes)
        who = f"{counted(nodes, 'node')}"
        yield [str(replica), place, reason, str(len(rounds)), str(min(rounds)), str(max(rounds)), who]


def trust_figure(trust: Trust) -> go.Figure:
    """Coefficients as a heat map: a row for each stage of each replica, or for each replica that is judged as a whole;
    a column for each round, or for several."""
    refused: dict[Place, set[int]] = defaultdict(set)
    for (replica, stage, _), found in trust.refused.items():
        refused[trust.place(replica, stage)] |= {round // trust.width for round in found.rounds}
    places = sorted({*trust.counted, *refused})
    columns = sorted({column for of in (*trust.counted.values(), *refused.values()) for column in of})
    names = [f"replica {replica}" + (f" · stage {stage}" if stage >= 0 else "") for replica, stage in places]
    rounds = [column * trust.width for column in columns]
    means = [[trust.mean(place, column) for column in columns] for place in places]
    fig = figure(110 + 22 * len(places), x="round")
    fig.add_heatmap(
        x=rounds,
        y=names,
        z=means,
        zmin=0,
        colorscale=[[0, PAPER], [1, BLUE]],
        colorbar={
            "title": {"text": "coefficient", "font": {"size": 12, "color": MUTED}},
            "tickfont": {"size": 12, "color": MUTED},
            "thickness": 12,
            "outlinewidth": 0,
        },
        xgap=1 if len(columns) <= 80 else 0,
        ygap=2,
        hovertemplate="%{y}, round %{x}: %{z:.3g}<extra></extra>",
    )
    fig.add_heatmap(
        x=rounds,
        y=names,
        z=[[1 if column in refused[place] else None for column in columns] for place in places],
        zmin=0,
        zmax=1,
        colorscale=[[0, RED], [1, RED]],
        showscale=False,
        xgap=1 if len(columns) <= 80 else 0,
        ygap=2,
        hovertemplate="%{y}, round %{x}: refused<extra></extra>",
    )
    fig.update_yaxes(autorange="reversed", showgrid=False)
    fig.update_xaxes(showgrid=False)
    return whole(fig, rounds, bars=True) if trust.width == 1 else fig
