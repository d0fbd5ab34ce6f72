"""The second ledger on logs of a right controller, and on such logs with one error planted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from benchmarks.campaign import Fact, Ledger
from hypothesis import given
from hypothesis import strategies as st

STAGES = 3
STEPS = 6


class Story:
    """A run of one replica as its log tells it; worker n is ``wn``."""

    def __init__(self) -> None:
        self.log: list[Fact] = []
        self.step, self.saved, self._born = 0, 0, 0
        self.begin()

    def begin(self, recalled: int = -1) -> None:
        """Start, or resume from the newest checkpoint, or from a snapshot in memory of the step ``recalled``."""
        folder, first = f"step-{self.saved:08d}", max(self.saved, recalled)
        self._generation, self._first, self.step = getattr(self, "_generation", 0), self.saved, first
        self._say("run_started", samples_per_step=4, replicas=1, first_step=first, first_sample=None, steps=STEPS)
        self.log[-1] |= {"first_block": None, "blocks_ahead": [], "columns": [], "standings": {}}
        self.log[-1] |= {"recalled": recalled, "durable_step": self.saved if recalled >= 0 else None}
        self._source: Fact = {"origin": "load", "folder": folder} if self.saved else {"origin": "fresh"}
        self.log[-1]["load"] = {str(stage): folder for stage in range(STAGES)} if self.saved else {}
        self.holders = [self._worker() for _ in range(STAGES)]
        recall: Fact = {"origin": "recall", "step": recalled, "file": {"step": recalled}}
        self.form([self._source if recalled < 0 else recall] * STAGES)

    def form(self, sources: list[Fact]) -> None:
        self._generation += 1
        members = [
            {"node": n, "stage": n, "worker": worker, "source": source}
            for n, (worker, source) in enumerate(zip(self.holders, sources, strict=True))
        ]
        self._say("form", replica=0, generation=self._generation, step=self.step, members=members)
        self._all("linked")

    def train(self, dies_in_commit: int | None = None) -> None:
        self._say("run_step", replica=0, generation=self._generation, step=self.step, mode="train", block=self.step)
        self._all("stage_ready")
        self._say("commit", replica=0, generation=self._generation, step=self.step)
        self._all("stage_committed", but=dies_in_commit)
        self.step += 1
        if dies_in_commit is not None:
            self.lose(dies_in_commit)

    def lose(self, node: int) -> None:
        """A worker dies, and another rebuilds its stage."""
        self._say("worker_lost", worker=self.holders[node])
        self.holders[node] = self._worker()
        donor = (node + 1) % STAGES
        rebuild = {"origin": "rebuild", "by": "echo", "donors": [donor]}
        self.form([rebuild if n == node else {"origin": "keep"} for n in range(STAGES)])

    def roll_back(self) -> None:
        self.step = self.saved
        back = {"origin": "load", "folder": f"step-{self.saved:08d}"} if self.saved > self._first else self._source
        self.form([back] * STAGES)

    def save(self) -> None:
        self._say("save", replica=0, generation=self._generation, step=self.step)
        self._all("stage_saved")
        for fact in self.log[-STAGES:]:
            fact["bytes"] = 1
        self.saved = self.step
        self._say("seal", step=self.step, folder=f"step-{self.step:08d}", stages=[*range(STAGES)], partial=False)
        self.log[-1] |= {"standings": {}, "first_block": self.step, "blocks_ahead": []}

    def end(self) -> None:
        while self.step < STEPS:
            self.train()
        self.save()
        self._say("finish", outcome="finished")

    def _say(self, kind: str, **fields: Any) -> None:
        self.log.append({"kind": kind, **fields})

    def _worker(self) -> str:
        self._born += 1
        return f"w{self._born}"

    def _all(self, kind: str, but: int | None = None) -> None:
        for node, worker in enumerate(self.holders):
            if node != but:
                self._say(kind, worker=worker, stage=node, generation=self._generation, step=self.step)


@st.composite
def stories(draw: st.DrawFn) -> list[Fact]:
    """Deaths at any time, rollbacks and resumptions, then the end."""
    story = Story()
    for move in draw(st.lists(st.sampled_from(["train", "commit", "lose", "roll back", "save", "resume"]), max_size=9)):
        node = draw(st.integers(0, STAGES - 1))
        if move in ("train", "commit") and story.step < STEPS:
            story.train(node if move == "commit" else None)
        elif move == "lose":
            story.lose(node)
        elif move == "roll back":
            story.roll_back()
        elif move == "save" and story.step:
            story.save()
        elif move == "resume":
            story.begin()
    story.end()
    return story.log


@given(stories())
def test_a_right_history_is_right(log: list[Fact]) -> None:
    ledger = Ledger(log)
    assert ledger.problems == [] and (ledger.lost, ledger.repeated) == (0, 0)
    assert ledger.used == set(range(STEPS)) and ledger.total == STEPS


WEIGHTY = ("commit", "stage_ready", "stage_committed", "stage_saved", "save", "seal", "run_step")


@given(stories(), st.data())
def test_whatever_is_left_out_of_the_last_step_is_missed(log: list[Fact], data: st.DataObject) -> None:
    """Of its parts, the last of each kind has no successor that could stand in for it."""
    kind = data.draw(st.sampled_from(WEIGHTY))
    place = max(i for i, fact in enumerate(log) if fact["kind"] == kind)
    assert Ledger(log[:place] + log[place + 1 :]).problems


@given(stories(), st.data())
def test_a_block_in_place_of_another_is_found(log: list[Fact], data: st.DataObject) -> None:
    """One that is used twice is repeated, and one that is not used is lost."""
    changed: list[Fact] = json.loads(json.dumps(log))
    last = [fact for fact in changed if fact["kind"] == "run_step"][-1]
    last["block"] = data.draw(st.integers(0, STEPS - 2))
    ledger = Ledger(changed)
    assert (ledger.lost, ledger.repeated) == (1, 1) and ledger.problems


def remembering() -> Story:
    """A checkpoint after one step, and snapshots in memory of the steps after it."""
    story = Story()
    story.train()
    story.save()
    for _ in range(3):
        story.train()
    return story


def test_a_run_that_is_taken_up_from_memory_may_go_back_to_its_checkpoint_and_be_taken_up_again() -> None:
    story = remembering()
    story.begin(recalled=3)
    story.train()
    story.begin(recalled=3)
    story.train()
    story.roll_back()
    story.train()
    story.begin(recalled=2)
    story.end()
    assert Ledger(story.log).problems == []


def test_a_snapshot_of_steps_that_were_undone_cannot_be_taken_up() -> None:
    story = remembering()
    story.roll_back()
    story.train()
    story.begin(recalled=3)
    story.end()
    assert "taken up from memory at step 3; the history has 2 steps" in Ledger(story.log).problems


@pytest.mark.parametrize("step", [2, 4])
def test_a_worker_can_go_back_to_what_it_has_had_and_to_nothing_else(step: int) -> None:
    """One is new since step 2, so it remembers nothing from before."""
    story = remembering()
    story.lose(1)
    story.train()
    story.step = step
    story.form([{"origin": "recall", "step": step, "file": None}] * STAGES)
    story.end()
    problems = Ledger(story.log).problems
    assert problems[:1] == ([] if step == 4 else ["generation 3: node 1 has None steps, not 2"])


def test_a_rollback_that_is_not_told_of_repeats_what_it_freed() -> None:
    story = Story()
    story.train()
    story.save()
    story.train()
    story.train()
    story.roll_back()
    story.end()
    assert Ledger(story.log).problems == []
    ignored = [fact for fact in story.log if fact["kind"] != "form" or fact["generation"] != 2]
    assert Ledger(ignored).repeated == 2


def test_a_checkpoint_that_claims_more_than_its_writers_had_is_found() -> None:
    story = Story()
    story.train()
    story.save()
    story.log[-1]["first_block"] = 2
    assert Ledger(story.log).problems == ["step-00000001: names other samples than its writers had used"]


def test_a_run_taken_up_with_other_samples_than_its_checkpoint_has_is_found() -> None:
    story = Story()
    story.train()
    story.train()
    story.save()
    story.begin()
    story.log[-1 - 1 - STAGES]["first_block"] = 1
    (problem, *_) = Ledger(story.log).problems
    assert problem == "taken up at step 2 with samples that are not those of ['step-00000002']"


def test_a_state_that_never_came_cannot_be_trained() -> None:
    story = Story()
    story.train()
    story.lose(1)
    story.log.remove(next(f for f in story.log if f["kind"] == "linked" and f["worker"] == story.holders[1]))
    story.train()
    assert Ledger(story.log).problems == ["replica 0 commits step 1 without ['w4']"]


def test_donors_that_have_nothing_give_nothing() -> None:
    story = Story()
    story.train()
    story.lose(1)
    story.log[-1 - STAGES]["members"][2]["source"] = {"origin": "rebuild", "by": "echo", "donors": [0]}
    assert Ledger(story.log).problems == ["generation 2: node 1 has None steps, not 1"]
