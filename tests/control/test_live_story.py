"""What the live page shows of workers is what the record says of them, at every event, whatever happens to a fleet."""

from __future__ import annotations

import json
from itertools import count

import pytest
from test_membership import troubled

from planaria.config.schema import RunConfig
from planaria.control import decisions as d
from planaria.control import events as e
from planaria.control.apply import apply
from planaria.control.state import RunState
from planaria.report.live_page.frames import Frames, Json, patched
from planaria.report.live_page.limits import MOST_LOST
from planaria.report.live_page.story import Story

SEEDS = range(24)


def config() -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "run",
            "model": {"vocab": 300, "dim": 32, "layers": 4, "heads": 2, "hidden": 64, "context": 32},
            "pipeline": {"stages": 1, "microbatches": 2, "microbatch_size": 1},
            "data": {"source": "none"},
            "train": {"steps": 6},
        }
    )


def assert_shown(state: Json, run: RunState) -> None:
    """The page's workers, nodes, generations and steps are the record's."""
    shown = state["workers"]
    living = {name: worker.status for name, worker in run.workers.items() if worker.status != "dead"}
    assert {name: said["status"] for name, said in shown.items() if said["status"] != "dead"} == living
    dead = {name for name, worker in run.workers.items() if worker.status == "dead"}
    assert {name for name, said in shown.items() if said["status"] == "dead"} <= dead
    assert len(dead) > MOST_LOST or dead <= shown.keys()
    assert {name: said["node"] for name, said in shown.items() if "node" in said} == {
        worker: node for node, worker in run.holders.items()
    }
    assert {name: said.get("machine", "") for name, said in shown.items()} == {
        name: run.workers[name].host for name in shown
    }
    assert {int(n): said["worker"] for n, said in state["nodes"].items() if "worker" in said} == run.holders
    assert {int(n) for n in state["nodes"]} == {n for r in run.live.values() for n in r.arrangement.stage}
    for number, replica in run.live.items():
        assert state["replicas"][str(number)]["generation"] == replica.generation
        waiting = {n for n in replica.holders if state["nodes"][str(n)]["state"] == "waits"}
        stateless = {n for n in replica.holders if n in replica.lost or n in replica.origins}
        if replica.phase == "link":  # a reader does not know what a loss makes of reports that come after it
            assert waiting == stateless
        if replica.phase in ("run", "commit"):
            assert not waiting


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_worker_is_shown_as_the_record_has_it(seed: int) -> None:
    history = troubled(seed).history
    assert isinstance(history[0], e.RunStarted)
    run, story, frames = RunState.start(history[0]), Story(config()), Frames()
    frames.add(story.opening())
    drawn = story.opening().change
    for t, fact in zip(count(100.0, 0.5), history, strict=False):
        run, frame = apply(fact, run), story.take(t, fact)
        if frame is not None:
            frames.add(frame)
            drawn = patched(drawn, json.loads(frame.text)["set"])
        if run.over:
            break
        assert_shown(story.state, run)
    assert drawn == json.loads(json.dumps(story.state)), "what the frames lead to is what is to be seen"
    times = [frame.t for frame in frames.after(-1, len(frames))]
    assert times == sorted(times) and times[0] == 0


def test_the_histories_show_everything_that_can_be_seen_of_a_worker() -> None:
    seen, captions = set[tuple[str, ...]](), set[str]()
    for seed in SEEDS:
        story = Story(config())
        for t, fact in zip(count(0.0), troubled(seed).history, strict=False):
            story.take(t, fact)
            seen |= {(said["status"],) for said in story.state.get("workers", {}).values()}
            seen |= {("node", said["state"]) for said in story.state.get("nodes", {}).values()}
            captions |= {story.state.get("said", {}).get("tone", "calm")}
    assert seen >= {("starting",), ("spare",), ("member",), ("released",), ("dead",)}
    assert seen >= {("node", "holds"), ("node", "waits"), ("node", "empty")}
    assert captions >= {"calm", "loss", "rebirth", "rollback"}


def test_a_late_report_of_a_broken_edge_says_nothing_about_the_new_one() -> None:
    history = troubled(0).history
    story = Story(config())
    for t, fact in zip(count(0.0), history, strict=False):
        story.take(t, fact)
        if isinstance(fact, d.Form) and fact.links:
            low, high = fact.links[0].low, fact.links[0].high
            old = e.EdgeBroken(worker="w0", node=low, peer=high, generation=fact.generation - 1, detail="late")
            story.take(t, old)
            assert story.state["links"][f"{low}-{high}"]["state"] in ("open", "opening")
            return
    raise AssertionError("nobody was formed")
