"""Live view of a comparison: every arm with every seed, its progress, its losses, and its hours at the end.

It reads the comparison's files (``lab/compare/race_job.py``): a result for each finished race, a line per tick for
running ones, and all numbers at the end. Each counts from its modification time, so a finished comparison is replayed
in the order in which its races ended.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from planaria.common import documents
from planaria.common.errors import UserError
from planaria.lab.compare.race import ArmCourse, ValidationPoint
from planaria.lab.compare.race_results import ComparisonResults, smoothed_losses
from planaria.report.live_page.frames import Json, StateChange
from planaria.report.live_page.page_source import FolderSource
from planaria.trials.arms import file_name
from planaria.trials.result_cache import read_result

NUMBERS = "comparison.json"
RACE = re.compile(r"(?P<arm>[^.]+)\.(?P<seed>\d+)\.(?P<kind>json|job|ticks)")
MAX_RACES = 400
"""maximum number of races to show; the report has all"""


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(file for file in folder.iterdir() if file.is_file())
    except OSError:
        return []


class ComparisonSource(FolderSource):
    """A comparison's folder."""

    @staticmethod
    def fits(folder: Path) -> bool:
        """Return whether ``folder`` holds a comparison."""
        return (folder / NUMBERS).exists() or any(RACE.fullmatch(file.name) for file in _files(folder))

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "comparison", folder.name.removesuffix("-compare"))
        self._read_times: dict[Path, float] = {}
        """file → modification time when last read"""
        self._races: dict[str, Json] = {}

    def _files(self) -> list[Path]:
        return _files(self._folder)

    def read(self, limit: int) -> Iterator[StateChange | None]:
        """Yield a frame for each new or changed file, in order of modification."""
        for when, file in self._changed_files()[:limit]:
            self._read_times[file] = when
            self.began = True
            if file.name == NUMBERS:
                yield self._finish(when, file)
            elif (match := RACE.fullmatch(file.name)) is not None:
                yield self._update_race(when, file, **match.groupdict())

    def _changed_files(self) -> list[tuple[float, Path]]:
        changed = []
        for file in self._files():
            try:
                when = file.stat().st_mtime
            except OSError:  # removed meanwhile
                continue
            wanted = file.name == NUMBERS or RACE.fullmatch(file.name) is not None
            if wanted and self._read_times.get(file) != when:
                changed.append((when, file))
        return sorted(changed)

    def _update_race(self, when: float, file: Path, arm: str, seed: str, kind: str) -> StateChange | None:
        name = f"{arm} {seed}"
        if name not in self._races and len(self._races) >= MAX_RACES:
            return None
        before = self._races.get(name, {"arm": arm, "seed": int(seed), "is": "waiting", "tick": 0, "curve": {}})
        event = None
        if kind == "json":
            course = read_result(file, ArmCourse)
            after = {**before, **_course_state(course)}
            result = f"stopped: {course.stopped}" if course.stopped else f"{course.ticks} steps are done"
            event = course.ticks, "loss" if course.stopped else "recovery", f"{arm}, seed {seed}: {result}"
        elif before["is"] in ("done", "stopped") and not self._is_raced_again(file, arm, seed):
            return None
        elif kind == "ticks":
            after = {**before, "is": "at work", **_progress_state(file)}
        else:
            after = {**before, "is": "at work"} | _request_state(file)
        self._races = {**self._races, name: after}
        return self._update(when, {"races": self._races, "over": ""}, event)

    def _is_raced_again(self, file: Path, arm: str, seed: str) -> bool:
        """Return whether a race with a result is being raced again, which invalidates the result."""
        result_file = self._folder / f"{arm}.{seed}.json"
        return self._read_times.get(file, 0.0) > self._read_times.get(result_file, 0.0)

    def _finish(self, when: float, file: Path) -> StateChange | None:
        comparison = documents.parse_model(
            ComparisonResults, documents.read_bytes(file).decode(), file, "run the comparison again"
        )
        races = dict(self._races)
        for arm in comparison.arms:
            for run in arm.runs:
                key = f"{file_name(arm.name)} {run.seed}"
                if key in races:
                    hours_taken = run.hours if comparison.priced else None
                    hours = {"hours": hours_taken, "hours_ratio": run.hours_ratio, "failures": run.failures}
                    known = {name: amount for name, amount in hours.items() if amount is not None}
                    races[key] = {**races[key], "arm": arm.name, "missed": run.hours is None, **known}
        self._races = races
        about_run = {
            **self.state["run"],
            "name": comparison.name,
            "steps": comparison.steps,
            "stages": comparison.stages,
        }
        about_run |= {"arms": [arm.name for arm in comparison.ranked()], "clock": comparison.clock}
        best = _winner_sentence(comparison)
        event = comparison.steps, "note", f"All {len(races)} races are over." + (f" {best}" if best else "")
        return self._update(when, {"races": races, "run": about_run, "over": "finished"}, event)


def _course_state(course: ArmCourse) -> Json:
    state = {"is": "done", "tick": course.ticks, **_curve_state(course.points), "loss_events": len(course.loss_events)}
    return state | ({"is": "stopped", "why": course.stopped} if course.stopped else {})


def _curve_state(points: Sequence[ValidationPoint]) -> Json:
    losses = {str(int(tick)): round(loss, 5) for tick, loss in smoothed_losses(points)}
    return {"curve": losses} | ({"loss": list(losses.values())[-1]} if losses else {})


def _progress_state(file: Path) -> Json:
    """Return a race's progress and losses; empty if its file was just removed."""
    points, tick = [], 0
    try:
        lines = documents.read_bytes(file).decode().rpartition("\n")[0].splitlines()
        for words in map(str.split, lines):
            tick = int(words[0])
            if len(words) > 1:
                points.append(ValidationPoint(tick=tick, step=tick, loss=float(words[1])))
    except (UserError, ValueError, IndexError):
        return {}
    return {"tick": tick, **_curve_state(points)}


def _request_state(file: Path) -> Json:
    """Return the arm's name and steps from a race's request."""
    try:
        race = json.loads(documents.read_bytes(file))["race"]
        return {"arm": str(race["arm"]), "steps": int(race["config"]["train"]["steps"])}
    except (UserError, ValueError, KeyError, TypeError):  # removed meanwhile
        return {}


def _winner_sentence(results: ComparisonResults) -> str:
    """Name the arm, controls aside, that reached the target first, by hours or by steps if unpriced."""
    winner = results.winner()
    spread = None if winner is None else winner.spread("hours" if results.priced else "ticks")
    if winner is None or spread is None:
        return ""
    shown = f"{spread.mean:.3g} hours" if results.priced else f"{spread.mean:,.0f} steps"
    arms = "all arms" if results.without_failures else "the arms with failures"
    return f"Of {arms}, {winner.name} reached the target first, after {shown} on average."
