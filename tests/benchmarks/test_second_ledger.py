"""The second ledger on correct logs of a controller, and on such logs with one planted error."""

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
    """The log of a run of one replica; worker n is ``wn``. It begins with ``first`` steps and a checkpoint of them."""

    def __init__(self, first: int = 0) -> None:
        self.log: list[Fact] = []
        self.step, self.saved, self._started, self._generation = 0, 0, 0, 0
        self.begin()
        if first:
            self.train(first)
            self.save()

    def begin(self, recalled: int = -1) -> None:
        """Start, or resume from the newest checkpoint, or from a snapshot in memory of the step ``recalled``."""
        folder, first = f"step-{self.saved:08d}", max(self.saved, recalled)
        self._first, self.step = self.saved, first
        self._log("run_started", samples_per_step=4, replicas=1, first_step=first, first_sample=None, steps=STEPS)
        self.log[-1] |= {"first_block": None, "blocks_ahead": [], "nodes_by_replica": [], "positions": {}}
        self.log[-1] |= {"snapshot_step": recalled, "durable_step": self.saved if recalled >= 0 else None}
        self._source: Fact = {"origin": "load", "folder": folder} if self.saved else {"origin": "fresh"}
        self.log[-1]["checkpoint_of_stage"] = {str(stage): folder for stage in range(STAGES)} if self.saved else {}
        self.holders = [self._worker() for _ in range(STAGES)]
        recall: Fact = {"origin": "recall", "step": recalled, "file": {"step": recalled}}
        self.form([self._source if recalled < 0 else recall] * STAGES)

    def form(self, sources: list[Fact]) -> None:
        self._generation += 1
        members = [
            {"node": n, "stage": n, "worker": worker, "source": source}
            for n, (worker, source) in enumerate(zip(self.holders, sources, strict=True))
        ]
        self._log("form", replica=0, generation=self._generation, step=self.step, members=members)
        self._all("linked")

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.train_step()

    def train_step(self, dies_in_commit: int | None = None) -> None:
        self._log("run_step", replica=0, generation=self._generation, step=self.step, mode="train", block=self.step)
        self._all("stage_ready")
        self._log("commit", replica=0, generation=self._generation, step=self.step)
        self._all("stage_committed", but=dies_in_commit)
        self.step += 1
        if dies_in_commit is not None:
            self.lose(dies_in_commit)

    def lose(self, node: int) -> None:
        """A worker dies, and another rebuilds its stage."""
        self._log("worker_lost", worker=self.holders[node])
        self.holders[node] = self._worker()
        donor = (node + 1) % STAGES
        rebuild = {"origin": "rebuild", "by": "echo", "donors": [donor]}
        self.form([rebuild if n == node else {"origin": "keep"} for n in range(STAGES)])

    def roll_back(self) -> None:
        self.step = self.saved
        back = {"origin": "load", "folder": f"step-{self.saved:08d}"} if self.saved > self._first else self._source
        self.form([back] * STAGES)

    def save(self) -> None:
        self._log("save", replica=0, generation=self._generation, step=self.step)
        self._all("stage_saved")
        for fact in self.log[-STAGES:]:
            fact["bytes"] = 1
        self.saved = self.step
        self._log("seal", step=self.step, folder=f"step-{self.step:08d}", stages=[*range(STAGES)], partial=False)
        self.log[-1] |= {"positions": {}, "first_block": self.step, "blocks_ahead": []}

    def end(self) -> None:
        self.train(STEPS - self.step)
        self.save()
        self._log("finish", outcome="finished")

    def _log(self, kind: str, **fields: Any) -> None:
        self.log.append({"kind": kind, **fields})

    def _worker(self) -> str:
        self._started += 1
        return f"w{self._started}"

    def _all(self, kind: str, but: int | None = None) -> None:
        for node, worker in enumerate(self.holders):
            if node != but:
                self._log(kind, worker=worker, stage=node, generation=self._generation, step=self.step)


@st.composite
def stories(draw: st.DrawFn) -> list[Fact]:
    """Deaths at any time, rollbacks and resumptions, then the end."""
    story = Story()
    for move in draw(st.lists(st.sampled_from(["train", "commit", "lose", "roll back", "save", "resume"]), max_size=9)):
        node = draw(st.integers(0, STAGES - 1))
        if move in ("train", "commit") and story.step < STEPS:
            story.train_step(node if move == "commit" else None)
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
def test_a_correct_history_has_no_problems(log: list[Fact]) -> None:
    ledger = Ledger(log)
    assert ledger.problems == [] and (ledger.lost, ledger.repeated) == (0, 0)
    assert ledger.used == set(range(STEPS)) and ledger.total == STEPS


REQUIRED = ("commit", "stage_ready", "stage_committed", "stage_saved", "save", "seal", "run_step")


@given(stories(), st.data())
def test_a_fact_missing_from_the_last_step_is_found(log: list[Fact], data: st.DataObject) -> None:
    """No later fact of the same kind can replace the last one."""
    kind = data.draw(st.sampled_from(REQUIRED))
    place = max(i for i, fact in enumerate(log) if fact["kind"] == kind)
    assert Ledger(log[:place] + log[place + 1 :]).problems


@given(stories(), st.data())
def test_a_block_in_place_of_another_is_found(log: list[Fact], data: st.DataObject) -> None:
    """A block that is used twice is repeated, and an unused block is lost."""
    changed: list[Fact] = json.loads(json.dumps(log))
    last = [fact for fact in changed if fact["kind"] == "run_step"][-1]
    last["block"] = data.draw(st.integers(0, STEPS - 2))
    ledger = Ledger(changed)
    assert (ledger.lost, ledger.repeated) == (1, 1) and ledger.problems


def snapshot_nodes() -> Story:
    """Return a checkpoint after one step, and snapshots in memory of the three steps after it."""
    story = Story(first=1)
    story.train(3)
    return story


def test_a_run_resumed_from_memory_may_roll_back_and_resume_again() -> None:
    story = snapshot_nodes()
    story.begin(recalled=3)
    story.train()
    story.begin(recalled=3)
    story.train()
    story.roll_back()
    story.train()
    story.begin(recalled=2)
    story.end()
    assert Ledger(story.log).problems == []


def test_a_snapshot_of_undone_steps_cannot_be_resumed() -> None:
    story = snapshot_nodes()
    story.roll_back()
    story.train()
    story.begin(recalled=3)
    story.end()
    assert "taken up from memory at step 3; the history has 2 steps" in Ledger(story.log).problems


@pytest.mark.parametrize("step", [2, 4])
def test_a_worker_can_only_return_to_a_state_it_has_had(step: int) -> None:
    """One worker is new at step 4, so it has no earlier snapshot."""
    story = snapshot_nodes()
    story.lose(1)
    story.train()
    story.step = step
    story.form([{"origin": "recall", "step": step, "file": None}] * STAGES)
    story.end()
    problems = Ledger(story.log).problems
    assert problems[:1] == ([] if step == 4 else ["generation 3: node 1 has None steps, not 2"])


def test_an_unlogged_rollback_repeats_its_samples() -> None:
    story = Story(first=1)
    story.train(2)
    story.roll_back()
    story.end()
    assert Ledger(story.log).problems == []
    ignored = [fact for fact in story.log if fact["kind"] != "form" or fact["generation"] != 2]
    assert Ledger(ignored).repeated == 2


def test_a_checkpoint_with_more_samples_than_its_writers_is_found() -> None:
    story = Story(first=1)
    story.log[-1]["first_block"] = 2
    assert Ledger(story.log).problems == ["step-00000001: names other samples than its writers had used"]


def test_a_run_resumed_with_other_samples_than_its_checkpoint_is_found() -> None:
    story = Story(first=2)
    story.begin()
    story.log[-1 - 1 - STAGES]["first_block"] = 1
    (problem, *_) = Ledger(story.log).problems
    assert problem == "taken up at step 2 with samples that are not those of ['step-00000002']"


def test_a_state_that_never_arrived_cannot_be_trained() -> None:
    story = Story()
    story.train()
    story.lose(1)
    story.log.remove(next(f for f in story.log if f["kind"] == "linked" and f["worker"] == story.holders[1]))
    story.train()
    assert Ledger(story.log).problems == ["replica 0 commits step 1 without ['w4']"]


def test_a_donor_without_the_stage_cannot_rebuild_it() -> None:
    story = Story()
    story.train()
    story.lose(1)
    story.log[-1 - STAGES]["members"][2]["source"] = {"origin": "rebuild", "by": "echo", "donors": [0]}
    assert Ledger(story.log).problems == ["generation 2: node 1 has None steps, not 1"]
