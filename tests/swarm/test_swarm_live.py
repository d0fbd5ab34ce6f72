"""Swarms as processes: reproducibility, failing stores, and clean-up."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
from pathlib import Path

import pytest
import stores  # noqa: F401 (registers file systems)
from swarms import alive, ended, log, peer, processes, rounds, threads, tiny, together, until, weights

from planaria.common.object_store import Retry
from planaria.swarm import swarm_processes
from planaria.swarm.assemble import assemble
from planaria.swarm.board import quorum as meeting
from planaria.swarm.board.board import Board
from planaria.swarm.board.identity import PeerIdentity
from planaria.swarm.records.lines import PEERS, SAMPLES, Evaluated, Finished, Record, RoundDone
from planaria.swarm.swarm_processes import LiveSwarm


def test_equal_swarms_are_bitwise_equal(tmp_path: Path, pupil: Path) -> None:
    config = tiny(pupil, rounds={"count": 4}, evaluate={"every": 2}, peers={"p2": {"attack": {"kind": "text"}}})
    for folder in ("one", "other"):
        together(config, tmp_path / folder)
    assert len({*weights(tmp_path / "one", "p0")}) > 1

    def timeless(folder: str, name: str) -> list[Record]:
        same = {"time": 0.0, "seconds": {}, "run": ""}
        return [
            r.model_copy(update={k: v for k, v in same.items() if k in type(r).model_fields})
            for r in log(tmp_path / folder, name)
        ]

    for name in ("p0", "p1", "p2"):
        assert timeless("one", name) == timeless("other", name)
        first, second = (tmp_path / folder / PEERS / name / SAMPLES for folder in ("one", "other"))
        assert first.read_text() == second.read_text()


def test_three_peers_finish_on_a_store_that_fails_every_tenth_call(
    tmp_path: Path, pupil: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "POLL_FAR_S", 0.05)
    monkeypatch.setitem(Board.open.__func__.__kwdefaults__, "retry", Retry(tries=20, first_s=0.01))  # type: ignore[attr-defined]
    config = tiny(pupil, board="flaky://board/run", rounds={"count": 4})
    together(config, tmp_path)
    assert weights(tmp_path, "p0") == weights(tmp_path, "p1") == weights(tmp_path, "p2")
    assert all(not record.missing for record in rounds(tmp_path, "p0").values())


@pytest.mark.slow
def test_a_dead_peer_can_be_restarted_by_the_callback(tmp_path: Path, pupil: Path) -> None:
    config = tiny(pupil, size=2, rounds={"count": 30, "keep": 5}, evaluate={"problems": 2})
    swarm, deaths = LiveSwarm(config, tmp_path), []

    def told(name: str, record: Record) -> None:
        if name == "p1" and isinstance(record, RoundDone) and record.round >= 2 and not deaths:
            deaths.append("")
            os.kill(swarm.processes["p1"].pid or 0, signal.SIGKILL)

    def died(name: str, how: str) -> None:
        deaths.append(f"{name} {how}")
        swarm.start(name)

    assert swarm.run(told, died) == {"p0": 0, "p1": 0}
    assert deaths == ["", "p1 killed by SIGKILL"]
    assert weights(tmp_path, "p0") == weights(tmp_path, "p1") and len(weights(tmp_path, "p0")) == 30
    assert all(process.exitcode == 0 for process in swarm.processes.values())


def test_a_failed_peer_has_a_log_entry_and_an_exit_code(tmp_path: Path, pupil: Path) -> None:
    config = tiny(pupil, size=1, rounds={"count": 2})
    (tmp_path / "board").write_text("no folder")
    with processes(config, tmp_path) as swarm:
        swarm.start("p0")
        assert ended(swarm) == {"p0": 2}
    (last,) = log(tmp_path, "p0")
    assert isinstance(last, Finished) and "board" in last.reason


@pytest.mark.slow
def test_an_unwritable_file_gives_a_one_line_error(
    tmp_path: Path, pupil: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = tiny(pupil, size=1, rounds={"count": 2})
    (tmp_path / PEERS / "p0").mkdir(parents=True)
    (tmp_path / PEERS / "p0" / SAMPLES).symlink_to("/dev/full")
    # Spawned, so that it speaks where this test listens: a fork server speaks where it was started.
    peer = mp.get_context("spawn").Process(target=swarm_processes._be, args=(config.model_dump_json(), "p0", tmp_path))
    peer.start()
    peer.join(60)
    assert peer.exitcode == 2
    said = [line for line in capfd.readouterr().err.splitlines() if line.strip()]
    assert len(said) == 1 and said[0].startswith(f"planaria: p0: {tmp_path}"), said


@pytest.mark.slow
def test_peers_die_with_their_swarm_even_if_it_is_killed(tmp_path: Path, pupil: Path) -> None:
    config = tiny(pupil, size=2, rounds={"count": 9999}, evaluate={"problems": 2})
    parent = mp.get_context("spawn").Process(target=_run, args=(config.model_dump_json(), tmp_path))
    parent.start()
    try:
        until(lambda: len(rounds(tmp_path, "p0")) >= 1 and len(rounds(tmp_path, "p1")) >= 1)
        peers = _writers(tmp_path)
        assert len(peers) == 2
    finally:
        parent.kill()
        parent.join()
    until(lambda: not alive(peers), 20)


def _run(config_json: str, folder: Path) -> None:
    from planaria.swarm.config import SwarmConfig

    LiveSwarm(SwarmConfig.model_validate_json(config_json), folder).run(lambda *_: None, lambda *_: None)


def _writers(folder: Path) -> list[int]:
    """Processes that hold a peer's log open."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if link.readlink().is_relative_to(folder / PEERS):
                found.add(int(link.parts[2]))
        except OSError:
            continue
    return sorted(found)


def test_a_late_peer_joins_at_the_newest_round(tmp_path: Path, pupil: Path) -> None:
    config = tiny(pupil, rounds={"count": 12, "group": 6})

    def join() -> None:
        until(lambda: len(rounds(tmp_path, "p0")) >= 3)
        who = PeerIdentity.fresh()
        late = assemble(config, "late", tmp_path, str(tmp_path / "board"), who, late=True)
        assert 2 <= late.first < 12
        late.run()

    (tmp_path / PEERS / "p0").mkdir(parents=True)
    with threads(join, *[lambda name=name: peer(config, name, tmp_path).run() for name in ("p0", "p1", "p2")]):
        pass
    assert sorted(rounds(tmp_path, "late"))[-1] == 11 and 0 not in rounds(tmp_path, "late")
    assert all(record.training_groups or record.skipped for record in rounds(tmp_path, "late").values())
    assert weights(tmp_path, "p0") == weights(tmp_path, "p1") == weights(tmp_path, "p2")


def test_evaluations_follow_the_configured_interval(tmp_path: Path, pupil: Path) -> None:
    config = tiny(pupil, size=1, rounds={"count": 3}, evaluate={"every": 2})
    together(config, tmp_path)
    assert [record.round for record in log(tmp_path, "p0") if isinstance(record, Evaluated)] == [0, 2, 3]
