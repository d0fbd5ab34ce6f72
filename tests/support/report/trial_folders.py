"""Folders of a comparison and of a swarm, written as their own records without training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from planaria.lab.compare.race import ArmCourse, LossEvent, ValidationPoint
from planaria.lab.compare.race_results import ArmScore
from planaria.swarm.records.hit_tally import HitTally
from planaria.swarm.records.lines import LOG, PEERS, Evaluated, Finished, LayerCounts, Log, RoundDone
from planaria.trials.result_cache import CachedResult, identity
from support.report.plain_arms import arm_run, arm_score, results
from support.swarm.peer_records import round_done, started

STEPS, EVERY = 40, 5
IDS = {"anna": "a" * 32, "bert": "b" * 32}


def losses(slower: float, upto: int = STEPS) -> list[ValidationPoint]:
    return [ValidationPoint(tick=n, step=n, loss=5.0 - n / (10.0 * slower)) for n in range(EVERY, upto + 1, EVERY)]


def write_race(folder: Path, arm: str, seed: int, when: float, slower: float = 1.0, stopped: str = "") -> None:
    """The result of a race that was over ``when`` (seconds since 1970)."""
    met = [LossEvent(tick=9, stages=[2], outcome="2: echo", moved_bytes=1, rolled_back=False, steps_lost=0)]
    course = ArmCourse(points=losses(slower), loss_events=met, ticks=STEPS, saved=[], stopped=stopped)
    file = folder / f"{arm}.{seed}.json"
    CachedResult(file, ArmCourse, identity({"arm": arm})).write(course)
    os.utime(file, (when, when))


def write_numbers(folder: Path, when: float) -> None:
    """The results of all races."""

    def arm(name: str, hours: float | None) -> ArmScore:
        return arm_score(name, arm_run(hours, (hours or 0.0) / 2.0, 30.0), faults=name != "free", step_s=1.0)

    found = results(arm("free", 2.0), arm("echo", 3.0), arm("redraw", None), name="mine", steps=STEPS)
    (folder / "comparison.json").write_text(found.model_dump_json())
    os.utime(folder / "comparison.json", (when, when))


def comparison_in(folder: Path) -> Path:
    """Three finished races and their results."""
    folder.mkdir(parents=True)
    for n, (name, slower) in enumerate((("free", 1.0), ("echo", 1.2), ("redraw", 3.0))):
        write_race(folder, name, 1, 1000.0 + 10 * n, slower)
    write_numbers(folder, 1040.0)
    return folder


def round_of(number: int, when: float, refused: int = 0, aside: str = "") -> RoundDone:
    layers = {"truth": {IDS["bert"]: LayerCounts(examined=8, rejected=refused)}}
    quarantined = {IDS["bert"]: aside} if aside else {}
    changes: dict[str, Any] = {"reward": 0.5 + number / 10, "training_completions": 4, "loss": 0.1, "grad_norm": 1.0}
    return round_done(number, time=when, layers=layers, quarantined=quarantined, **changes)


def swarm_in(folder: Path) -> Path:
    """Two peers with three rounds; one is Byzantine, and the other quarantines it."""
    for name, attack in (("anna", "none"), ("bert", "text")):
        log = Log(folder / PEERS / name / LOG)
        log.append(
            started(name, IDS[name], attack, time=1000.0, vocab=9),
            Evaluated(time=1001.0, round=0, accuracy=HitTally(hits=1, eligible=4), tokens=3.0),
        )  # fmt: skip
        for n in range(3):
            honest = name == "anna"
            log.append(round_of(n, 1002.0 + n, 3 * honest, "all of its last 6 were rejected" if honest and n else ""))
        log.append(
            Evaluated(time=1006.0, round=3, accuracy=HitTally(hits=3, eligible=4), tokens=3.0), Finished(time=1007.0)
        )
    return folder
