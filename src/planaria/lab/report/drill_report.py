"""``planaria drill``'s answer: a table on the terminal, and one HTML page that works offline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from planaria.lab.report.drill_figures import accuracy_figure, success_figure
from planaria.lab.report.drill_verdict import titled, verdict
from planaria.lab.report.repair_report import SAID, best_said, repair_table
from planaria.lab.trials.spread import seeds_shown, shown, spread
from planaria.report import page
from planaria.report.tables import Table, show
from planaria.report.words import counted
from planaria.swarm.drill import Drill, Drilled
from planaria.swarm.records.measure import Tally
from planaria.swarm.report.swarm_report import share


def show_drill(found: Drill) -> None:
    """Print what every arm came to, and what every layer did."""
    show((_arms(found), _peers(found), _layers(found)))
    if found.repairs:
        show([repair_table(found)])
        print(best_said(found))


def write_drill_report(found: Drill, file: Path) -> Path:
    """Write the report of a drill to ``file``, whole or not at all; its path. UserError when that is impossible."""
    return page.write(file, page.document(f"{found.name} drilled · planaria", body(found)))


def _arms(found: Drill) -> Table:
    kinds = [f"{titled(kind)} {what}" for kind in _rated(found) for what in ("success", "pooled, 95 %", "worst peer")]
    head = ["arm", "attackers", "accuracy", "tokens", *kinds]
    title = f"{found.name}: mean [least … most] of {seeds_shown(run.seed for run in found.arms[0].runs)}"
    return Table(title, head, [_row(found, arm) for arm in found.arms], numbers_from=2)


def _rated(found: Drill) -> list[str]:
    return [kind for kind in found.watch if kind != "dos"]


def _row(found: Drill, arm: Drilled) -> list[str]:
    last = found.last
    cells = [
        arm.name,
        ", ".join(arm.attackers) or "none",
        shown(arm.accuracy(last), ".2f"),
        shown(arm.tokens(last), ".1f"),
    ]
    for kind in _rated(found):
        success, worst = arm.success(kind, last), arm.worst(kind, last)
        cells += [
            "none eligible" if success is None else shown(success, ".2f"),
            _interval(arm.pooled(kind, last)),
            "–" if worst is None else f"{worst:.2f}",
        ]
    return cells


def _layers(found: Drill) -> Table:
    rows = []
    for arm in found.arms:
        for layer in found.layers():
            stopped, misjudged = arm.layer(layer)
            off = {
                why: n
                for run in arm.runs
                for why, n in (run.outcome.layers[layer].off.items() if layer in run.outcome.layers else ())
            }
            if stopped.eligible or misjudged.eligible or off:
                reasons = "; ".join(f"{count} × {why}" for why, count in off.items())
                rows.append([arm.name, layer, share(stopped), share(misjudged), reasons or "–"])
    head = ["arm", "layer", "poison stopped", "honest refused", "switched off"]
    return Table("layers: poison stopped, and honest completions refused", head, rows, numbers_from=2)


def _peers(found: Drill) -> Table:
    """Every honest peer's accuracy, and seed by seed its change against the control or, where there is none, against
    the first arm."""
    rows = []
    for arm in found.arms:
        control = found.arm(arm.control) if arm.control else found.arms[0]
        cells = [arm.name]
        for name in found.peers():
            mine, theirs = arm.peer_accuracy(name, found.last), control.peer_accuracy(name, found.last)
            cells.append(shown(spread(mine), ".2f"))
            paired = arm is not control and mine and len(mine) == len(theirs)
            changes = [a - b for a, b in zip(mine, theirs, strict=True)] if paired else []
            cells.append(shown(spread(changes), "+.2f"))
        rows.append(cells)
    head = ["arm", *(cell for name in found.peers() for cell in (name, f"{name}: change"))]
    return Table("every peer's accuracy, and its change against the control", head, rows)


def body(found: Drill) -> Iterator[str]:
    """The report's sections, as HTML."""
    peers = len(found.arms[0].runs[0].outcome.peers)
    rounds = found.arms[0].runs[0].outcome.rounds
    summary = (
        f"{counted(len(found.arms), 'arm')} of {counted(peers, 'peer')} and {counted(rounds, 'round')}, "
        f"{counted(len(found.arms[0].runs), 'seed')} each. All arms "
        "start from the same weights and work on the same problems; they differ in who attacks and who defends. "
        "Success is the share of honest peers' own completions of held-out problems that show what the attack teaches, "
        f"among those that could; numbers are means of the last {counted(found.last, 'evaluation')}."
    )
    yield page.heading(found.name, verdict(found), summary)
    for kind in found.watch:
        what = "mean length of honest peers' completions" if kind == "dos" else "share of eligible completions"
        yield page.section(
            f"{titled(kind)}: attack success over rounds",
            f"{what.capitalize()}; the mean over honest peers and seeds, and a band from the least seed to the most.",
            page.chart(success_figure(found, kind), f"success-{kind}"),
        )
    yield page.section(
        "Accuracy over rounds",
        "Held-out problems solved by honest peers, one draw each; mean and range over seeds.",
        page.chart(accuracy_figure(found), "accuracy"),
    )
    yield page.section(
        "Every arm",
        "Mean [least … most] over seeds. Pooled: all draws of all honest peers and seeds together with Wilson's 95 % "
        "interval. Worst peer: the honest peer that fared worst with any seed.",
        _arms(found).html("arms"),
    )
    yield page.section(
        "Every peer",
        "Each honest peer's accuracy, and its change, seed by seed, against the arm's control (the first arm where it "
        "has none). Peers that are not alike fare differently: a mean over them can hide a loss.",
        _peers(found).html("peers"),
    )
    yield page.section(
        "What each layer did",
        "At honest peers, of what others sent and what reached the layer: poisoned completions stopped, and honest "
        "peers' completions refused (false positives). An attacker's filler is in neither.",
        _layers(found).html("layers"),
    )
    if found.repairs:
        yield page.section("Repair", f"{SAID} {best_said(found)}", repair_table(found).html("repair"))
    yield page.footer("Written by planaria drill; drill.json beside this page has every number.")


def _interval(found: Tally) -> str:
    return str(found) if found.eligible else "–"
