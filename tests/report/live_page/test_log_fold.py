"""The live page's state of workers equals the controller's after every event of random histories."""

from __future__ import annotations

import json
from itertools import count

import pytest

from planaria.config.schema import RunConfig
from planaria.control.apply import apply
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.state.run import RunState
from planaria.report.live_page.frames import Frames, Json, StateChange, apply_patch
from planaria.report.live_page.limits import MAX_LOST
from planaria.report.live_page.log_fold import LogFold
from support.control.random_histories import troubled

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
    """Compare the page's workers, nodes and generations with the controller's state."""
    shown = state["workers"]
    living = {name: worker.status for name, worker in run.workers.items() if worker.status != "dead"}
    assert {name: info["status"] for name, info in shown.items() if info["status"] != "dead"} == living
    dead = {name for name, worker in run.workers.items() if worker.status == "dead"}
    assert {name for name, info in shown.items() if info["status"] == "dead"} <= dead
    assert len(dead) > MAX_LOST or dead <= shown.keys()
    assert {name: info["node"] for name, info in shown.items() if "node" in info} == {
        worker: node for node, worker in run.holders.items()
    }
    assert {name: info.get("machine", "") for name, info in shown.items()} == {
        name: run.workers[name].host for name in shown
    }
    assert {int(n): info["worker"] for n, info in state["nodes"].items() if "worker" in info} == run.holders
    assert {int(n) for n in state["nodes"]} == {n for r in run.live.values() for n in r.arrangement.stage}
    for number, replica in run.live.items():
        assert state["replicas"][str(number)]["generation"] == replica.generation
        waiting = {n for n in replica.holders if state["nodes"][str(n)]["state"] == "waits"}
        stateless = {n for n in replica.holders if n in replica.lost or n in replica.origins}
        if replica.phase == "link":  # the log does not show how a loss affects later reports
            assert waiting == stateless
        if replica.phase in ("run", "commit"):
            assert not waiting


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_page_shows_the_controllers_state(seed: int) -> None:
    history = troubled(seed).history
    assert isinstance(history[0], e.RunStarted)
    run, story, frames = RunState.start(history[0]), LogFold(config()), Frames()
    frames.add(StateChange(0, 0.0, story.state, routine=False))
    drawn = story.state
    for t, fact in zip(count(100.0, 0.5), history, strict=False):
        run, frame = apply(fact, run), story.apply(t, fact)
        if frame is not None:
            frames.add(frame)
            drawn = apply_patch(drawn, json.loads(frame.text)["set"])
        if run.over:
            break
        assert_shown(story.state, run)
    assert drawn == json.loads(json.dumps(story.state)), "the frames lead to another state"
    times = [frame.t for frame in frames.after(-1, len(frames))]
    assert times == sorted(times) and times[0] == 0


def test_the_histories_cover_all_states_of_workers() -> None:
    seen, captions = set[tuple[str, ...]](), set[str]()
    for seed in SEEDS:
        story = LogFold(config())
        for t, fact in zip(count(0.0), troubled(seed).history, strict=False):
            story.apply(t, fact)
            seen |= {(info["status"],) for info in story.state.get("workers", {}).values()}
            seen |= {("node", info["state"]) for info in story.state.get("nodes", {}).values()}
            captions |= {story.state.get("caption", {}).get("tone", "calm")}
    assert seen >= {("starting",), ("spare",), ("member",), ("released",), ("dead",)}
    assert seen >= {("node", "holds"), ("node", "waits"), ("node", "empty")}
    assert captions >= {"calm", "loss", "recovery", "rollback"}


def test_a_late_report_of_a_broken_edge_does_not_affect_the_new_one() -> None:
    history = troubled(0).history
    story = LogFold(config())
    for t, fact in zip(count(0.0), history, strict=False):
        story.apply(t, fact)
        if isinstance(fact, d.Form) and fact.links:
            low, high = fact.links[0].low, fact.links[0].high
            old = e.EdgeBroken(worker="w0", node=low, peer=high, generation=fact.generation - 1, detail="late")
            story.apply(t, old)
            assert story.state["links"][f"{low}-{high}"]["state"] in ("open", "opening")
            return
    raise AssertionError("no replica was formed")
