"""What is slow, as the page tells it: where, since when, the evidence, and what is done about it."""

from __future__ import annotations

from planaria.report.live_page.frames import Json
from planaria.report.run.naming import Naming
from planaria.report.run.standing import Standing, Verdicts
from planaria.report.run.verdict_lines import line


def slow_shown(verdicts: Verdicts, naming: Naming) -> Json:
    """By class and nodes; a line of the log's own English for each."""
    return {f"{fault} {'-'.join(map(str, nodes))}": _shown(one, naming) for (fault, nodes), one in _all(verdicts)}


def _all(verdicts: Verdicts) -> list[tuple[tuple[str, tuple[int, ...]], Standing]]:
    return sorted(verdicts.standing.items(), key=lambda item: item[1].blamed.step)


def _shown(one: Standing, naming: Naming) -> Json:
    blamed = one.blamed
    what, _, evidence = line(blamed, naming).partition(": ")
    found: Json = {
        "class": blamed.fault,
        "replica": blamed.replica,
        "nodes": blamed.nodes,
        "workers": blamed.workers,
        "step": blamed.step,
        "what": what,
        "evidence": evidence,
    }
    return found | ({} if one.deed is None else {"deed": line(one.deed, naming)})
