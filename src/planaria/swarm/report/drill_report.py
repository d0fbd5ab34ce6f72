"""The result of ``planaria compare``: tables on the terminal, and one HTML page with a verdict and figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import plotly.graph_objects as go

from planaria.report import page
from planaria.report.phrases import format_count, join_names
from planaria.report.spread_figures import add_band
from planaria.report.tables import Table, show
from planaria.report.theme import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    RED,
    SERIES,
    TEAL,
    VIOLET,
    figure,
    fit_share_axis,
    integer_x_axis,
    stroke,
)
from planaria.report.verdict import Verdict
from planaria.swarm.drill_arms import Drill, DrilledArm
from planaria.swarm.records.hit_tally import HitTally
from planaria.swarm.records.outcome import ALL, EvaluationPoint, RunOutcome, total
from planaria.swarm.report.repair_report import SUMMARY, best_strategies, interval, repair_table
from planaria.swarm.report.swarm_report import format_share
from planaria.trials.spread import Spread, format_seeds, format_spread, spread

LONGER = 1.1
"""DoS has an effect if completions are longer than the control's by this factor"""
COLOURS = (INK, RED, BLUE, ORANGE, GREEN, VIOLET, TEAL, *SERIES[6:])
"""colours of arms; the first ones are usually a control, an attacked and a defended arm"""
Measure = Callable[[Sequence[EvaluationPoint]], float | None]
"""evaluations of all honest peers after a round → a number, or None"""


def show_drill(drill: Drill) -> None:
    """Print the results of arms, peers and layers."""
    show((_arms(drill), _peers(drill), _layers(drill)))
    if drill.repairs:
        show([repair_table(drill)])
        print(best_strategies(drill))


def write_drill_report(drill: Drill, file: Path) -> Path:
    """Write the report of a drill atomically; return its path. UserError if it cannot be written."""
    return page.write(file, page.document(f"{drill.name} drilled · planaria", body(drill)))


def _arms(drill: Drill) -> Table:
    kinds = [
        f"{attack_title(kind)} {measure}"
        for kind in _rated_attacks(drill)
        for measure in ("success", "pooled, 95 %", "worst peer")
    ]
    head = ["arm", "attackers", "accuracy", "tokens", *kinds]
    title = f"{drill.name}: mean [least … most] of {format_seeds(run.seed for run in drill.arms[0].runs)}"
    return Table(title, head, [_row(drill, arm) for arm in drill.arms], numbers_from=2)


def _rated_attacks(drill: Drill) -> list[str]:
    return [kind for kind in drill.watch if kind != "dos"]


def _row(drill: Drill, arm: DrilledArm) -> list[str]:
    last = drill.last
    cells = [
        arm.name,
        ", ".join(arm.attackers) or "none",
        format_spread(arm.accuracy(last), ".2f"),
        format_spread(arm.tokens(last), ".1f"),
    ]
    for kind in _rated_attacks(drill):
        success, worst = arm.success(kind, last), arm.worst(kind, last)
        cells += [
            "none eligible" if success is None else format_spread(success, ".2f"),
            interval(arm.pooled_success(kind, last)),
            "–" if worst is None else f"{worst:.2f}",
        ]
    return cells


def _layers(drill: Drill) -> Table:
    rows = []
    for arm in drill.arms:
        for layer in drill.layers():
            stopped, misjudged = arm.layer(layer)
            off = {
                why: n
                for run in arm.runs
                for why, n in (run.outcome.layers[layer].off.items() if layer in run.outcome.layers else ())
            }
            if stopped.eligible or misjudged.eligible or off:
                reasons = "; ".join(f"{count} × {why}" for why, count in off.items())
                rows.append([arm.name, layer, format_share(stopped), format_share(misjudged), reasons or "–"])
    head = ["arm", "layer", "poison stopped", "honest rejected", "switched off"]
    return Table("layers: poison stopped, and honest completions rejected", head, rows, numbers_from=2)


def _peers(drill: Drill) -> Table:
    """Return each honest peer's accuracy and its change per seed against the control, or else against the first
    arm."""
    rows = []
    for arm in drill.arms:
        control = drill.arm(arm.control) if arm.control else drill.arms[0]
        cells = [arm.name]
        for name in drill.peers():
            own, theirs = arm.peer_accuracy(name, drill.last), control.peer_accuracy(name, drill.last)
            cells.append(format_spread(spread(own), ".2f"))
            paired = arm is not control and own and len(own) == len(theirs)
            changes = [a - b for a, b in zip(own, theirs, strict=True)] if paired else []
            cells.append(format_spread(spread(changes), "+.2f"))
        rows.append(cells)
    head = ["arm", *(cell for name in drill.peers() for cell in (name, f"{name}: change"))]
    return Table("every peer's accuracy, and its change against the control", head, rows)


def _summary(drill: Drill) -> str:
    peers = len(drill.arms[0].runs[0].outcome.peers)
    rounds = drill.arms[0].runs[0].outcome.rounds
    return (
        f"{format_count(len(drill.arms), 'arm')} of {format_count(peers, 'peer')} and {format_count(rounds, 'round')}, "
        f"{format_count(len(drill.arms[0].runs), 'seed')} each. All arms "
        "start from the same weights and work on the same problems; they differ in attackers and defences. "
        "Success is the share of honest peers' own completions of held-out problems that show the taught behaviour, "
        f"among the eligible ones; numbers are means of the last {format_count(drill.last, 'evaluation')}."
    )


def body(drill: Drill) -> Iterator[str]:
    """Yield the report's sections, as HTML."""
    yield page.heading(drill.name, verdict(drill), _summary(drill))
    for kind in drill.watch:
        measure = "mean length of honest peers' completions" if kind == "dos" else "share of eligible completions"
        yield page.section(
            f"{attack_title(kind)}: attack success over rounds",
            f"{measure.capitalize()}; mean over honest peers and seeds, and the range over seeds.",
            page.chart(success_figure(drill, kind), f"success-{kind}"),
        )
    yield page.section(
        "Accuracy over rounds",
        "Held-out problems solved by honest peers, one draw each; mean and range over seeds.",
        page.chart(accuracy_figure(drill), "accuracy"),
    )
    yield page.section(
        "All arms",
        "Mean [least … most] over seeds. Pooled: all draws of all honest peers and seeds together with Wilson's 95 % "
        "interval. Worst peer: the largest value of one honest peer with one seed.",
        _arms(drill).html("arms"),
    )
    yield page.section(
        "Every peer",
        "Each honest peer's accuracy, and its change per seed against the arm's control, or else the first arm. If "
        "peers differ, a mean over them can hide a loss.",
        _peers(drill).html("peers"),
    )
    yield page.section(
        "Layers",
        "Of other peers' completions that reached the layer at honest peers: poisoned ones stopped, and honest ones "
        "rejected (false positives). An attacker's filler counts in neither.",
        _layers(drill).html("layers"),
    )
    if drill.repairs:
        yield page.section("Repair", f"{SUMMARY} {best_strategies(drill)}", repair_table(drill).html("repair"))
    yield page.footer("Written by planaria compare; drill.json next to this page has every number.")


@dataclass(frozen=True)
class Effect:
    """Result of one attack: in its most and least affected arms, and without poison."""

    kind: str
    worst: DrilledArm
    best: DrilledArm
    control: DrilledArm | None
    """control of the least affected arm"""
    largest: float
    smallest: float
    plain: float | None
    had_effect: bool
    """whether the largest effect clearly exceeds that of its control"""
    contained: bool
    """whether the smallest effect does not clearly exceed that of its control"""

    def format_spread(self, amount: float) -> str:
        return f"{amount:.1f} tokens" if self.kind == "dos" else f"{amount:.0%}"

    @property
    def quantity(self) -> str:
        if self.kind == "dos":
            return "mean length of honest peers' completions under DoS"
        return f"of honest peers' eligible completions showed {attack_title(self.kind)}"

    def sentence(self) -> str:
        """Describe the effect."""
        of = "was the" if self.kind == "dos" else ""
        text = " ".join(filter(None, [self.format_spread(self.largest), of, self.quantity, f"in {self.worst.name}"]))
        if self.best is not self.worst:
            text += f", and {self.format_spread(self.smallest)} in {self.best.name}, the least"
        if self.control is None or self.plain is None:
            return f"{text}; there is no control to compare with."
        if not self.had_effect:
            return f"{text}: nowhere clearly more than in the control, so the attack had no effect."
        whose = f"the {self.format_spread(self.plain)} of {self.control.name}, without poison"
        return f"{text}: {'not clearly' if self.contained else 'clearly'} more than {whose}."


def effect(drill: Drill, kind: str) -> Effect | None:
    """Return an attack's effect, or None if no attacked arm has eligible completions."""
    attacked = {
        arm.name: (arm, n) for arm in drill.arms if arm.attackers and (n := _amount(drill, arm, kind)) is not None
    }
    if not attacked:
        return None
    worst, largest = max(attacked.values(), key=lambda pair: pair[1])
    best, smallest = min(attacked.values(), key=lambda pair: pair[1])
    control = _control(drill, best)
    plain = None if control is None else _amount(drill, control, kind)
    return Effect(
        kind, worst, best, control, largest, smallest, plain,
        had_effect=_is_above(drill, kind, worst, _control(drill, worst)),
        contained=not _is_above(drill, kind, best, control),
    )  # fmt: skip


def _control(drill: Drill, arm: DrilledArm) -> DrilledArm | None:
    """Return an arm's control: the one it names, or else the first arm without attackers, if any."""
    return drill.arm(arm.control) if arm.control else next((one for one in drill.arms if not one.attackers), None)


def _amount(drill: Drill, arm: DrilledArm, kind: str) -> float | None:
    """Return the success, 0 to 1; for DoS the tokens per completion."""
    if kind == "dos":
        tokens = arm.tokens(drill.last)
        return None if tokens is None else tokens.mean
    return arm.pooled_success(kind, drill.last).rate


def _is_above(drill: Drill, kind: str, arm: DrilledArm, control: DrilledArm | None) -> bool:
    """Return whether an attack's effect in an arm is clearly larger than in its control.

    A share is larger if its 95 % interval lies above the control's, or above 0 without a control. A length is larger if
    it exceeds LONGER times the control's, or if there is no control.
    """
    if kind == "dos":
        own, plain = _amount(drill, arm, kind), None if control is None else _amount(drill, control, kind)
        return own is not None and (plain is None or own > LONGER * plain)
    theirs = HitTally() if control is None else control.pooled_success(kind, drill.last)
    return arm.pooled_success(kind, drill.last).interval[0] > (theirs.interval[1] if theirs.eligible else 0.0)


def verdict(drill: Drill) -> Verdict:
    """Good: for each attack that had an effect, some arm kept it at its control's level.

    Undecided if there was no attack, or none had an effect.
    """
    effects = [one for kind in drill.watch if (one := effect(drill, kind)) is not None]
    if not effects:
        return _verdict_without_effects(drill)
    through = [attack_title(one.kind) for one in effects if not one.contained]
    first = effects[0]
    numbers = [(first.format_spread(first.largest), f"{first.quantity} in {first.worst.name}, at worst")]
    if first.best is not first.worst:
        numbers.append((first.format_spread(first.smallest), f"in {first.best.name}, at best"))
    had_effect = any(one.had_effect for one in effects)
    badge = f"{join_names(through)} got through in every arm" if through else "every attack was stopped in some arm"
    good = not through if had_effect else None
    return Verdict(
        good,
        badge if had_effect else "no attack had an effect",
        " ".join(one.sentence() for one in effects),
        numbers,
        _cost_sentence(drill, first),
    )


def _cost_sentence(drill: Drill, first: Effect) -> str:
    """Describe the cost in the best arm: accuracy against the control, and honest completions rejected."""
    parts = []
    best = first.best
    control = first.control
    own, theirs = best.accuracy(drill.last), None if control is None else control.accuracy(drill.last)
    if control is not None and own is not None and theirs is not None:
        change = own.mean - theirs.mean
        parts.append(f"honest peers' accuracy in {best.name} is {own.mean:.2f}, {change:+z.2f} against {control.name}")
    rejected = best.layer(ALL)[1]
    if rejected.hits:
        parts.append(
            f"{format_count(rejected.hits, 'completion')} of honest peers ({rejected.rate or 0:.1%}) rejected in "
            f"{best.name}"
        )
    return f"Lost: {'; '.join(parts)}." if parts else "The cost of the defence is unknown: there is no control."


def _verdict_without_effects(drill: Drill) -> Verdict:
    """Compare the arms by accuracy alone."""
    attacked = any(arm.attackers for arm in drill.arms)
    why = "No completion was eligible to show the attack" if attacked else "No arm has attackers"
    accuracies = [(spread, arm.name) for arm in drill.arms if (spread := arm.accuracy(drill.last)) is not None]
    if not accuracies:
        return Verdict(None, "nothing measured", f"{why}, and no peer was evaluated.", [], "Losses are unknown.")
    best, name = max(accuracies, key=lambda pair: pair[0].mean)
    smallest, worst = min(accuracies, key=lambda pair: pair[0].mean)
    text = f"{why}, so {format_count(len(drill.arms), 'arm')} differ by accuracy alone: {name} reached {best.mean:.2f}"
    text += f", {worst} {smallest.mean:.2f}." if worst != name else "."
    numbers = [(f"{best.mean:.2f}", f"honest peers' accuracy in {name}, at best")]
    if worst != name:
        numbers.append((f"{smallest.mean:.2f}", f"in {worst}, at worst"))
    return Verdict(None, "no attack to judge", text, numbers, "Nothing was lost to an attack.")


def attack_title(kind: str) -> str:
    """Return an attack's name for tables and sentences; of a custom attack, its class."""
    own = kind.rpartition(":")[2]
    return own if own != kind else {"dos": "DoS"}.get(kind, kind.upper())


def success_figure(drill: Drill, kind: str) -> go.Figure:
    """Plot an attack's success over rounds, one line per arm; for DoS the completions' length."""
    if kind == "dos":
        return _lines(drill, "tokens per completion", lambda points: sum(p.tokens for p in points) / len(points))
    return _lines(drill, "attack success", lambda points: total([p.watch[kind] for p in points]).rate)


def accuracy_figure(drill: Drill) -> go.Figure:
    """Plot held-out accuracy over rounds, one line per arm."""
    return _lines(drill, "accuracy", lambda points: total([p.accuracy for p in points]).rate)


def _lines(drill: Drill, y: str, measure: Measure) -> go.Figure:
    fig = figure(420, x="round", y=y, hovermode="x unified")
    for index, arm in enumerate(drill.arms):
        curves = [_curve(run.outcome, measure) for run in arm.runs]
        rounds = sorted(set.intersection(*(set(curve) for curve in curves)))
        spreads = [Spread.of([curve[number] for curve in curves]) for number in rounds]
        colour = {"color": COLOURS[index % len(COLOURS)]}
        style = {key: value | colour for key, value in stroke(index, len(drill.arms)).items()}
        add_band(fig, arm.name, style, rounds, spreads, "lines+markers")
    lines = [trace for trace in fig.data if trace.fill is None]
    if "token" not in y:
        fit_share_axis(fig, [one for trace in fig.data for one in trace.y])
    return integer_x_axis(fig, [number for trace in lines for number in trace.x])


def _curve(outcome: RunOutcome, measure: Measure) -> dict[int, float]:
    points = [point for peer in outcome.honest for point in peer.points]
    values = {n: measure([p for p in points if p.round == n]) for n in sorted({point.round for point in points})}
    return {number: value for number, value in values.items() if value is not None}
