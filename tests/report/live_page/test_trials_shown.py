"""Live pages of comparisons and swarms, while they run and afterwards."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from planaria.common.errors import UserError
from planaria.report.live_page.frames import Json, StateChange, apply_patch
from planaria.report.live_page.page_source import PageSource, source_of
from planaria.swarm.records.lines import LOG, PEERS, Log
from planaria.swarm.records.outcome import read_outcome
from support.report.live_server import served
from support.report.trial_folders import (
    EVERY,
    STEPS,
    comparison_in,
    losses,
    round_of,
    swarm_in,
    write_numbers,
    write_race,
)


def shown(source: PageSource) -> list[StateChange]:
    return [frame for frame in source.read(10_000) if frame is not None]


def played(source: PageSource) -> Json:
    """Frames lead to the state, and come in order."""
    frames = [source.initial_frame(), *shown(source)]
    seen: Json = {}
    for frame in frames:
        seen = apply_patch(seen, frame.change)
    assert seen == source.state
    assert [f.number for f in frames] == sorted({f.number for f in frames})
    assert [f.t for f in frames] == sorted(f.t for f in frames)
    return seen


def test_a_comparison_is_played_back_in_the_order_in_which_its_races_ended(tmp_path: Path) -> None:
    source = source_of(comparison_in(tmp_path / "mine-compare"))
    lines = [frame.line for frame in shown(source) if frame.line]
    assert [line["text"].partition(",")[0] for line in lines[:3]] == ["free", "echo", "redraw"]
    assert "echo reached the target first, after 3 hours" in lines[3]["text"], "the fault-free arm had no fault"
    state = played(source_of(tmp_path / "mine-compare"))
    assert state["over"] == "finished" and state["run"]["arms"] == ["free", "echo", "redraw"]
    echo = state["races"]["echo 1"]
    assert (echo["is"], echo["tick"], echo["hours"], echo["failures"]) == ("done", STEPS, 3.0, 1)
    assert state["races"]["redraw 1"]["missed"] and "hours" not in state["races"]["redraw 1"]


def test_a_race_in_progress_has_steps_and_losses_and_ends_like_its_result(tmp_path: Path) -> None:
    write_race(tmp_path, "free", 1, 1000.0)
    job = {"race": {"arm": "echo: best", "config": {"train": {"steps": STEPS}}}}
    (tmp_path / "echo--best.1.job").write_text(json.dumps(job))
    source = source_of(tmp_path)
    shown(source)
    assert source.state["races"]["echo--best 1"] | {"curve": {}} == {
        "arm": "echo: best", "seed": 1, "is": "at work", "tick": 0, "curve": {}, "steps": STEPS,
    }  # fmt: skip
    by_tick = {point.tick: point.loss for point in losses(1.0)}
    lines = [f"{n} {by_tick.get(n, '')}\n" for n in range(1, STEPS + 1)]
    ticks = tmp_path / "echo--best.1.ticks"
    ticks.write_text("".join(lines[: 3 * EVERY + 2]) + "18 3.")
    shown(source)
    half = source.state["races"]["echo--best 1"]
    assert half["tick"] == 3 * EVERY + 2 and [*half["curve"]] == ["15"], "a loss is the mean of the last three"
    ticks.write_text("".join(lines))
    os.utime(ticks, (2000.0, 2000.0))
    shown(source)
    going = source.state["races"]["echo--best 1"]
    write_race(tmp_path, "echo--best", 1, 3000.0)
    ticks.unlink()
    shown(source)
    done = source.state["races"]["echo--best 1"]
    assert done["is"] == "done" and done["curve"] == going["curve"] and done["steps"] == STEPS
    write_numbers(tmp_path, 4000.0)
    assert [frame.line for frame in shown(source)][-1] and not shown(source), "nothing new is nothing to be seen"


def test_a_damaged_result_is_named(tmp_path: Path) -> None:
    write_race(tmp_path, "free", 1, 1000.0)
    file = tmp_path / "free.1.json"
    file.write_text(file.read_text().replace("4.5", "4.6"))
    with pytest.raises(UserError, match=r"free\.1\.json has changed since it was written"):
        shown(source_of(tmp_path))


def test_a_swarms_page_agrees_with_its_report(tmp_path: Path) -> None:
    state, outcome = played(source_of(swarm_in(tmp_path))), read_outcome(tmp_path)
    assert state["over"] == "finished" and [*state["peers"]] == [peer.name for peer in outcome.peers]
    for peer in outcome.peers:
        seen = state["peers"][peer.name]
        rates = [peer.points[0].accuracy.rate, peer.points[-1].accuracy.rate]
        assert (seen["is"], seen["round"], seen["attack"]) == ("finished", outcome.rounds, peer.attack)
        assert [seen["accuracies"]["0"], seen["accuracy"]] == rates
    anna = state["peers"]["anna"]
    assert anna["rejected"] == {"bert": 9} and anna["rewards"] == {"0": 0.5, "1": 0.6, "2": 0.7}
    assert anna["aside"] == {"bert": "all of its last 6 were rejected"} and state["peers"]["bert"]["rejected"] == {}
    lines = [frame.line["text"] for frame in shown(source_of(tmp_path)) if frame.line]
    assert sum("sets aside bert" in text for text in lines) == 1, "once, and not in every round"


def test_a_growing_swarm_is_followed_and_later_peers_are_shown(tmp_path: Path) -> None:
    swarm_in(tmp_path)
    source = source_of(tmp_path)
    shown(source)
    log = Log(tmp_path / PEERS / "carl" / LOG)
    log.append(round_of(7, 1010.0, 2))
    assert [frame.t for frame in shown(source)] == [10.0]
    assert source.state["peers"]["carl"]["round"] == 8 and source.state["over"] == ""
    with (tmp_path / PEERS / "carl" / LOG).open("a") as file:
        file.write("nonsense\n")
    with pytest.raises(UserError, match=r"carl.log\.jsonl cannot be read"):
        shown(source)


def test_comparisons_and_swarms_are_served_beside_runs_and_accept_no_faults(tmp_path: Path) -> None:
    folders = [comparison_in(tmp_path / "mine-compare"), swarm_in(tmp_path / "swarm")]
    with served(folders, inject_fault=lambda *given: "done") as client:
        for number, part in ((0, "races"), (1, "peers")):
            seen: Json = {}
            for frame in client.frames(number):
                seen = apply_patch(seen, frame["set"])
            assert part in seen and seen["over"] == "finished"
        assert client.inject("w1", 1, "kill").status == 409
        assert client.request("/metrics").status == 200
        assert client.request("/ready").status == 503, "they are over"
