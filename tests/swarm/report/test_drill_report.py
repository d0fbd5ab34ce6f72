"""The drill's report."""

from __future__ import annotations

from pathlib import Path

import pytest

from planaria.swarm.drill_arms import Drill, DrilledArm, DrillRun
from planaria.swarm.records.hit_tally import HitTally
from planaria.swarm.records.outcome import EvaluationPoint, PeerOutcome, RunOutcome
from planaria.swarm.report.drill_report import _peers, effect, write_drill_report


def peer(name: str, solved: int, attack: str = "none") -> PeerOutcome:
    point = EvaluationPoint(
        round=5, accuracy=HitTally(hits=solved, eligible=100), alone=None, tokens=18.0, watch={"text": HitTally()}
    )
    return PeerOutcome(name=name, id=name, attack=attack, model="", points=[point], finished=True, weights="")


def arm(name: str, control: str, *seeds: list[PeerOutcome]) -> DrilledArm:
    runs = [
        DrillRun(seed=seed, outcome=RunOutcome(peers=peers, layers={}, rounds=5, seconds=1.0))
        for seed, peers in enumerate(seeds)
    ]
    attackers = [one.name for one in seeds[0] if not one.honest]
    return DrilledArm(name=name, control=control, attackers=attackers, runs=runs)


FOUND = Drill(
    name="unlike",
    last=1,
    watch=["text"],
    arms=[
        arm("alone", "", [peer("p0", 80), peer("p1", 40)], [peer("p0", 70), peer("p1", 30)]),
        arm("together", "", [peer("p0", 75), peer("p1", 60)], [peer("p0", 71), peer("p1", 50)]),
        arm("attacked", "together", [peer("p0", 70), peer("p1", 0, "text")], [peer("p0", 70), peer("p1", 0, "text")]),
    ],
)


def test_peer_table_shows_changes_per_seed_without_attackers() -> None:
    assert _peers(FOUND).head == ["arm", "p0", "p0: change", "p1", "p1: change"]
    assert _peers(FOUND).rows == [
        ["alone", "0.75 [0.70 … 0.80]", "–", "0.35 [0.30 … 0.40]", "–"],
        ["together", "0.73 [0.71 … 0.75]", "-0.02 [-0.05 … +0.01]", "0.55 [0.50 … 0.60]", "+0.20"],
        ["attacked", "0.70", "-0.03 [-0.05 … -0.01]", "–", "–"],
    ]


@pytest.mark.parametrize(("kind", "named"), [("text", "TEXT"), ("dos", "DoS"), ("style", "STYLE"), ("mine:Odd", "Odd")])
def test_every_watched_attack_has_a_title(kind: str, named: str, tmp_path: Path) -> None:
    points = [
        EvaluationPoint(
            round=5, accuracy=HitTally(), alone=None, tokens=18.0, watch={kind: HitTally(hits=1, eligible=2)}
        )
    ]
    victim = peer("p0", 80).model_copy(update={"points": points})
    found = FOUND.model_copy(update={"watch": [kind], "arms": [arm("attacked", "", [victim])]})
    assert named in write_drill_report(found, tmp_path / "report.html").read_text()


def shown(name: str, control: str, hits: int, *, attacked: bool) -> DrilledArm:
    """An arm whose only honest peer shows "text" in ``hits`` of 100 draws."""
    honest = peer("p0", 50)
    point = honest.points[0].model_copy(update={"watch": {"text": HitTally(hits=hits, eligible=100)}})
    victim = honest.model_copy(update={"points": [point]})
    return arm(name, control, [victim, peer("p1", 0, "text")] if attacked else [victim])


def test_each_attacked_arm_is_compared_with_its_own_control() -> None:
    arms = [
        shown("plain", "", 60, attacked=False),
        shown("other", "", 0, attacked=False),
        shown("attacked", "plain", 62, attacked=True),
        shown("defended", "other", 1, attacked=True),
    ]
    one = effect(FOUND.model_copy(update={"arms": arms}), "text")
    assert one is not None and (one.worst.name, one.best.name, one.control) == ("attacked", "defended", arms[1])
    assert not one.had_effect and one.contained, "62 of 100 are not clearly more than the 60 of its control"
