"""Swarms as processes: reproducibility, failing stores, clean-up, and certificates among live peers."""

from __future__ import annotations

import json
import multiprocessing as mp
import shutil
from pathlib import Path
from typing import Any

import pytest

from planaria import cli
from planaria.common.digests import FILE
from planaria.common.errors import UserError
from planaria.common.object_store import Retry
from planaria.runtime.preparation import run_folders
from planaria.swarm import swarm_processes
from planaria.swarm.assemble import assemble
from planaria.swarm.board import peer_board as meeting
from planaria.swarm.board.board import Board
from planaria.swarm.board.identity import PeerIdentity
from planaria.swarm.board.receipts import Agreement, Committee, list_text, parse_message_list
from planaria.swarm.certificate import CERTIFICATE, NotCertified, verify_certificate
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.records.lines import PEERS, SAMPLES, Evaluated, Finished, PeerStarted
from planaria.swarm.swarm_processes import LiveSwarm, own_identity
from planaria.swarm.tasks.sums import Sums
from support.swarm import stores  # noqa: F401 (registers file systems)
from support.swarm.swarms import (
    alive,
    ended,
    killed_and_restarted,
    log,
    peer,
    processes,
    rounds,
    timeless,
    tiny,
    together,
    until,
    weights,
)


def test_equal_swarms_are_bitwise_equal(tmp_path: Path, pupil: Path) -> None:
    config = tiny(pupil, rounds={"count": 4}, evaluate={"every": 2}, peers={"p2": {"attack": {"kind": "text"}}})
    for folder in ("one", "other"):
        together(config, tmp_path / folder)
    assert len({*weights(tmp_path / "one", "p0")}) > 1
    for name in ("p0", "p1", "p2"):
        assert timeless(tmp_path / "one", name) == timeless(tmp_path / "other", name)
        first, second = (tmp_path / folder / PEERS / name / SAMPLES for folder in ("one", "other"))
        assert first.read_text() == second.read_text()


def test_three_peers_finish_on_a_store_that_fails_every_tenth_call(
    tmp_path: Path, pupil: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "POLL_FAR_S", 0.05)
    monkeypatch.setitem(Board.__init__.__kwdefaults__, "retry", Retry(tries=20, first_s=0.01))
    config = tiny(pupil, board="flaky://board/run", rounds={"count": 4})
    together(config, tmp_path)
    assert weights(tmp_path, "p0") == weights(tmp_path, "p1") == weights(tmp_path, "p2")
    assert all(not record.missing for record in rounds(tmp_path, "p0").values())


@pytest.mark.slow
def test_a_dead_peer_can_be_restarted_by_the_callback(tmp_path: Path, pupil: Path) -> None:
    config = tiny(pupil, size=2, rounds={"count": 30, "keep": 5}, evaluate={"problems": 2})
    swarm = LiveSwarm(config, tmp_path)
    killed_and_restarted(swarm, after_round=2)
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
    peer = mp.get_context("spawn").Process(
        target=swarm_processes._run_peer, args=(config.model_dump_json(), "p0", tmp_path)
    )
    peer.start()
    peer.join(60)
    assert peer.exitcode == 2
    output = [line for line in capfd.readouterr().err.splitlines() if line.strip()]
    assert len(output) == 1 and output[0].startswith(f"planaria: p0: {tmp_path}"), output


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
    from planaria.swarm.config.swarm_config import SwarmConfig

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
        who = PeerIdentity.generate()
        late = assemble(config, "late", tmp_path, str(tmp_path / "board"), who, late=True)
        assert 2 <= late.first < 12
        late.run()

    (tmp_path / PEERS / "p0").mkdir(parents=True)
    together(config, tmp_path, beside=join)
    assert sorted(rounds(tmp_path, "late"))[-1] == 11 and 0 not in rounds(tmp_path, "late")
    assert all(record.training_completions or record.skipped for record in rounds(tmp_path, "late").values())
    assert weights(tmp_path, "p0") == weights(tmp_path, "p1") == weights(tmp_path, "p2")


def test_evaluations_follow_the_configured_interval(tmp_path: Path, pupil: Path) -> None:
    config = tiny(pupil, size=1, rounds={"count": 3}, evaluate={"every": 2})
    together(config, tmp_path)
    assert [record.round for record in log(tmp_path, "p0") if isinstance(record, Evaluated)] == [0, 2, 3]


FOUR = {"size": 4, "receipts": {"committee": "all", "price": 2}}


def four(policy: Path, **sections: Any) -> SwarmConfig:
    turns = {"count": 4, "prompts": 4, "group": 8, "keep": 2, "kept": 9} | sections.pop("rounds", {})
    return tiny(policy, rounds=turns, **(FOUR | sections))


def agreement(folder: Path) -> Agreement:
    board = Board(str(folder / "board"))
    return Agreement(board, "", Committee.from_rules(board.rules.rules), 0.0)


@pytest.fixture(scope="module")
def done(pupil: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certified")
    config = four(pupil)
    run_folders.write_config(folder, config)
    together(config, folder)
    return folder


@pytest.fixture
def model(done: Path, tmp_path: Path) -> Path:
    assert cli.run(["export", str(done), "--peer", "p1", "--to", str(tmp_path / "model")]) == 0
    return tmp_path / "model"


@pytest.mark.slow
def test_rounds_rewards_and_weights_are_certified(done: Path) -> None:
    found = agreement(done)
    for number in range(4):
        assert len(parse_message_list(found.certified_text("round", number) or "")) == 4
        assert json.loads(found.certified_text("rewards", number) or "{}")["rewards"]
    for number in (2, 4):
        assert found.certified_text("weights", number) == "" and len(found.signers("weights", number)) == 4
    assert all(len(record.certified) >= 3 for record in rounds(done, "p0").values())
    assert weights(done, "p0") == weights(done, "p3") and len({*weights(done, "p0")}) > 1


def test_an_exported_model_is_verified_offline(model: Path, done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = verify_certificate(model, str(done / "board"))
    assert lines[0].startswith("4 of 4 named peers signed these weights after 4 rounds; at most 1")
    assert cli.run(["swarm", "show", str(model), "--certificate"]) == 0
    assert "4 of 4 named peers" in capsys.readouterr().out


def flipped(file: Path, at: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)


def test_one_changed_bit_is_detected(model: Path) -> None:
    whole = (model / CERTIFICATE).read_text()
    found = json.loads(whole)
    receipt = found["receipts"][1]
    at = receipt.index('"signature":"') + 13
    changed = receipt[:at] + ("0" if receipt[at] != "0" else "1") + receipt[at + 1 :]
    (model / CERTIFICATE).write_text(json.dumps(found | {"receipts": [found["receipts"][0], changed]}))
    with pytest.raises(NotCertified, match=r"certificate\.json: receipt 1 is forged"):
        verify_certificate(model)
    assert "sums" in found["rules"]
    (model / CERTIFICATE).write_text(json.dumps(found | {"rules": found["rules"].replace("sums", "sumt")}))
    with pytest.raises(NotCertified, match="the rules are forged"):
        verify_certificate(model)
    (model / CERTIFICATE).write_text(whole)
    (model / FILE).unlink()  # who changes the weights can change the list of digests too
    safetensors = model / "model.safetensors"
    flipped(safetensors, safetensors.stat().st_size - 2)
    with pytest.raises(NotCertified):
        verify_certificate(model)
    assert cli.run(["run", "check", str(model), "--accept"]) == 0
    with pytest.raises(NotCertified, match="its weights are not the signed ones"):
        verify_certificate(model)


def test_a_certificate_of_another_run_is_refused(model: Path, pupil: Path, tmp_path: Path) -> None:
    together(tiny(pupil, size=1, rounds={"count": 1}), tmp_path / "other")
    with pytest.raises(NotCertified, match="the certificate belongs to"):
        verify_certificate(model, str(tmp_path / "other" / "board"))
    (model / CERTIFICATE).unlink()
    with pytest.raises(UserError, match="not found; `planaria export"):
        verify_certificate(model)


def test_credits_count_certified_rounds(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["swarm", "show", str(done), "--credits"]) == 0
    output = capsys.readouterr().out
    assert "4 of 4 rounds are certified" in output and "residual, at 2 for each" in output
    assert cli.run(["report", str(done)]) == 0
    assert "Receipts" in (done / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_peer_contradicted_by_a_certificate_rolls_back(tmp_path: Path, pupil: Path, ahead: int) -> None:
    """Peer p3 misses p0's message in round 1 and sees no certificate of it until a round later."""
    config = four(pupil, rounds={"count": 6, "ahead": ahead})
    back: list[int] = []

    def odd() -> None:
        lone = peer(config, "p3", tmp_path)
        board, gather = lone.board, lone.board.gather
        missed = own_identity(config, "p0", tmp_path).peer
        overruled = board.overruled_round

        def part(number: int, closed: bool) -> Any:
            found = gather(number, closed)
            if number != 1 or back:
                return found
            less = found.restrict_to(found.found.keys() - {missed}, {})
            board._uncertified[1] = list_text(board._message_list(1, less))
            board._past = (1, board._selector)
            return less

        def noted(number: int) -> int | None:
            if (found := overruled(number)) is not None:
                back.append(found)
            return found

        board.gather, board.overruled_round = part, noted  # type: ignore[method-assign]
        lone.run()

    together(config, tmp_path, ("p0", "p1", "p2"), odd)
    assert back == [1]
    assert weights(tmp_path, "p3") == weights(tmp_path, "p0") and len({*weights(tmp_path, "p0")}) > 1


@pytest.mark.slow
@pytest.mark.parametrize("committee", ["all", pytest.param("", marks=pytest.mark.slow)])
def test_a_returning_peer_adopts_certified_rewards(
    tmp_path: Path, pupil: Path, monkeypatch: pytest.MonkeyPatch, committee: str
) -> None:
    config = four(pupil, rounds={"count": 6, "keep": 0}, receipts={"committee": committee, "price": 0})
    together(config, tmp_path)
    before = weights(tmp_path, "p2")
    shutil.rmtree(tmp_path / PEERS / "p2")
    scored: list[int] = []
    score = Sums.score

    def counted(self: Sums, problem: Any, text: str) -> float:
        scored.append(problem.number)
        return score(self, problem, text)

    again = peer(config, "p2", tmp_path)
    monkeypatch.setattr(again, "_evaluate", lambda _: None)
    monkeypatch.setattr(Sums, "score", counted)
    again.run()
    assert weights(tmp_path, "p2") == before
    assert len(scored) == 0 if committee else len(scored) > 100


@pytest.mark.parametrize(
    ("receipts", "why"),
    [
        ({"committee": ["ab"]}, "receipts.committee: 'ab' is not a peer's id; use 32 hexadecimal digits"),
        ({"committee": "a" * 32 + "," + "a" * 32}, "occurs twice"),
        ({"price": 3}, "set receipts.committee"),
        ({"committee": "all", "price": -1}, "price"),
        ({"committee": "all", "price": 1.5}, "price"),
    ],
)
def test_invalid_committees_are_refused(receipts: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        SwarmConfig.model_validate({"receipts": receipts})
    with pytest.raises(ValueError, match="learn alone"):
        SwarmConfig.model_validate({"receipts": {"committee": "all"}, "rounds": {"gather": False}})


def test_small_committees_warn_and_all_means_local_peers(tmp_path: Path, pupil: Path) -> None:
    config = tiny(pupil, size=1, rounds={"count": 1}, receipts={"committee": "all"})
    together(config, tmp_path)
    (started,) = (record for record in log(tmp_path, "p0") if isinstance(record, PeerStarted))
    assert any("tolerates no Byzantine member" in warning for warning in started.warnings)
    with pytest.raises(UserError, match="list the members' ids"):
        peer(config, "p0", tmp_path / "late", late=True)
