"""Verdict of a swarm's run: benefit of collaboration, losses to attackers, and agreement of votes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from planaria.report import page
from planaria.report.phrases import format_count, join_names
from planaria.report.theme import escape_label, figure, fit_share_axis, integer_x_axis, stroke
from planaria.report.verdict import Verdict
from planaria.swarm.config.swarm_config import CONSENSUS, SwarmConfig
from planaria.swarm.records.hit_tally import HitTally
from planaria.swarm.records.lines import RoundDone, VoteSummary
from planaria.swarm.records.outcome import ALL, LayerOutcome, PeerOutcome, RunOutcome


def verdict(outcome: RunOutcome, last: int) -> Verdict:
    """Good: all peers finished, and no honest peer is worse off than alone, or than at the start.

    A peer is better or worse off if Wilson's 95 % intervals of its last evaluations do not overlap.
    """
    honest = [peer for peer in outcome.honest if peer.points]
    stopped = [peer.name for peer in outcome.peers if not peer.finished]
    shadowed = [peer for peer in honest if peer.last(last).alone is not None]
    signs = [_compare(peer, last) for peer in (shadowed or honest)]
    worse = signs.count(-1)
    good = False if stopped or worse else None if not signs or not any(signs) else True
    return Verdict(
        good,
        _badge(stopped, signs),
        _summary(outcome, last, signs, shadowed),
        _numbers(outcome, honest, shadowed, last),
        _cost_sentence(outcome, stopped),
    )


def _compare(peer: PeerOutcome, last: int) -> int:
    """1: better off, −1: worse off, 0: undecided."""
    now = peer.last(last)
    own, theirs = now.accuracy.interval, (now.alone or peer.points[0].accuracy).interval
    return (own[0] > theirs[1]) - (own[1] < theirs[0])


def _badge(stopped: Sequence[str], signs: Sequence[int]) -> str:
    if stopped:
        return f"{format_count(len(stopped), 'peer')} did not finish"
    if -1 in signs:
        return f"{signs.count(-1)} of {format_count(len(signs), 'peer')} worse off"
    return f"{signs.count(1)} of {format_count(len(signs), 'peer')} better off" if any(signs) else "no clear difference"


def _summary(outcome: RunOutcome, last: int, signs: Sequence[int], shadowed: Sequence[PeerOutcome]) -> str:
    attackers = sum(not peer.honest for peer in outcome.peers)
    among = f", including {format_count(attackers, 'attacker')}," if attackers else ""
    text = f"{format_count(len(outcome.peers), 'peer')}{among} learned for {format_count(outcome.rounds, 'round')}."
    if not signs:
        return f"{text} No honest peer has been evaluated yet."
    than = "than alone" if shadowed else "than at the start"
    peers = format_count(len(signs), "honest peer")
    better, worse = signs.count(1), signs.count(-1)
    text += f" {better} of {peers} solved significantly more problems {than}, {worse or 'none'} significantly fewer."
    text += _decline_sentence(outcome, last)
    return text if shadowed else f"{text} No copy learned alone (shadow = true), so the cause of the change is unknown."


def _decline_sentence(outcome: RunOutcome, last: int) -> str:
    """Return a sentence if the honest peers solve fewer problems than at the start."""
    starts = [peer.points[0].accuracy.rate or 0.0 for peer in outcome.honest if peer.points]
    before, now = sum(starts) / len(starts), outcome.accuracy(last)
    return f" Accuracy fell: {before:.2f} at the start, {now:.2f} at the end." if now < before else ""


def _numbers(
    outcome: RunOutcome, honest: Sequence[PeerOutcome], shadowed: Sequence[PeerOutcome], last: int
) -> list[tuple[str, str]]:
    if not honest:
        return []
    gains = []
    for peer in shadowed or honest:
        now = peer.last(last)
        before = (now.alone or peer.points[0].accuracy).rate
        if now.accuracy.rate is not None and before is not None:
            gains.append(now.accuracy.rate - before)
    numbers = [(f"{outcome.accuracy(last):.2f}", "of held-out problems solved, honest peers' mean")]
    if gains:
        over = "learning alone" if shadowed else "the start"
        between = f"; {min(gains):+z.2f} to {max(gains):+z.2f}" if len(gains) > 1 else ""
        numbers.insert(0, (f"{sum(gains) / len(gains):+z.2f}", f"of problems solved, over {over}{between}"))
    return numbers


def _cost_sentence(outcome: RunOutcome, stopped: Sequence[str]) -> str:
    parts = [f"{join_names(list(stopped))} did not finish"] if stopped else []
    result = outcome.layers.get(ALL, LayerOutcome())
    let, rejected = result.stopped.eligible - result.stopped.hits, result.misjudged
    if result.stopped.eligible:
        parts.append(f"{let:,} of {format_count(result.stopped.eligible, 'poisoned completion')} were accepted")
    if rejected.hits:
        parts.append(
            f"{rejected.hits:,} of {format_count(rejected.eligible, 'completion')} of honest peers were rejected"
        )
    rounds = {
        layer: sum(layer_outcome.off.values()) for layer, layer_outcome in outcome.layers.items() if layer_outcome.off
    }
    if rounds:
        whole = format_count(outcome.rounds * len(outcome.honest), "round")
        off = join_names([f"{layer} in {count:,}" for layer, count in rounds.items()])
        parts.append(f"layers switched themselves off, of {whole} over all honest peers: {off}")
    nothing = "Nothing was lost: no poison is known, and no honest work was rejected."
    return f"Lost: {'; '.join(parts)}." if parts else nothing


VOTES = ["peer", "groups", "with a label", "votes behind it", "labels right"]


def agreement_section(config: SwarmConfig, logs: Mapping[str, Sequence[RoundDone]]) -> Iterator[str]:
    """Yield the section, as HTML; nothing without votes."""
    votes = {name: results for name, log in logs.items() if (results := [r for r in log if r.agreed is not None])}
    if not votes:
        return
    used = (
        "The reward is the majority's behaviour; groups without a label taught nothing."
        if config.task.reward == CONSENSUS
        else "Completions that passed their tests but differ from the majority of those were rejected."
    )
    rows = [_votes(name, [r.agreed for r in log if r.agreed is not None]) for name, log in votes.items()]
    yield page.section(
        "Agreement",
        f"{used} Every peer has one vote per group, split evenly over its completions. {break_point(config)} Labels "
        "are compared with the task's own score where it has one, for this table only. Agreement does not test truth: "
        "it is the behaviour of the majority.",
        page.table("votes", VOTES, rows, numbers_from=1),
        page.chart(curves_figure(340, "share", _agreement_curves(votes)), "agreement"),
    )


def break_point(config: SwarmConfig) -> str:
    """State how many colluding peers decide, and how many need an honest mistake for that."""
    size, share = config.size, config.task.agreement
    deciding = next((n for n in range(1, size + 1) if n / size > share), size)
    text = f"Of {format_count(size, 'peer')}, {deciding} colluding peers decide"
    if deciding == 1:
        return f"{text}."
    return f"{text}; {deciding - 1} do if an honest peer makes the same mistake."


Curve = tuple[str, Sequence[int], Sequence[float | None], Mapping[str, Any]]
"""name, rounds, values and style"""


def curves_figure(height: int, y: str, curves: Iterable[Curve], shares: bool = True) -> go.Figure:
    """Plot curves over rounds, with labels that list all curves at one round; omit those without a value."""
    fig = figure(height, x="round", y=y, hovermode="x unified", showlegend=True)
    rounds, every = list[int](), list[float | None]()
    for name, x, values, style in curves:
        rounds += x
        every += values
        if any(value is not None for value in values):
            label, hover = escape_label(name), "%{y:.3f}"
            fig.add_scatter(x=x, y=values, name=label, mode="lines+markers", hovertemplate=hover, **style)
    return integer_x_axis(fit_share_axis(fig, every) if shares else fig, rounds)


def _votes(name: str, votes: Sequence[VoteSummary]) -> list[str]:
    groups, labelled = sum(vote.groups for vote in votes), sum(vote.labelled for vote in votes)
    right = sum((vote.right for vote in votes), HitTally())
    share = sum(vote.share * vote.labelled for vote in votes) / max(1, labelled)
    shown = f"{right.rate:.1%} of {right.eligible}" if right.rate is not None else "not known"
    return [name, str(groups), f"{labelled / max(1, groups):.1%}", f"{share:.2f}" if labelled else "–", shown]


def _agreement_curves(logs: Mapping[str, Sequence[RoundDone]]) -> Iterator[Curve]:
    """Yield each peer's share of groups with a label and, dotted, its share of right labels."""
    for index, (name, log) in enumerate(logs.items()):
        votes = {record.round: record.agreed for record in log if record.agreed is not None}
        style = stroke(index, len(logs))
        dotted = style | {"line": style["line"] | {"dash": "dot", "width": 1.5}}
        labelled = [vote.labelled / max(1, vote.groups) for vote in votes.values()]
        yield f"{name}: labelled", list(votes), labelled, style
        yield f"{name}: right", list(votes), [vote.right.rate for vote in votes.values()], dotted
