"""Holders as processes: the log survives the loss of one of three; unauthenticated and emptied holders do not vote."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from planaria.common.errors import UserError
from planaria.common.object_store import StoreUnreachable
from planaria.control.log.quorum import Answer, Ballot, Vote, parse_quorum_location
from planaria.control.log.shared_log import Batch, Deposed, Lease, LogAppender, SharedLog
from planaria.runtime.fleet.joining import read_key
from planaria.runtime.shared_log.client import open_quorum_store
from planaria.runtime.shared_log.holder import HolderFolder
from planaria.runtime.shared_log.messages import greeting_of, receive_answer
from planaria.runtime.transport.listener import connect
from support.live import keyless_client
from support.live.holders import LOG, Holders, written_key
from support.processes import planaria

PATIENCE_S = 10.0
BRIEF_S = 2.0
MAX = 1 << 20


@pytest.fixture
def holders(tmp_path: Path) -> Iterator[Holders]:
    with ExitStack() as running:
        yield Holders(tmp_path, written_key(tmp_path / "key"), running).start_all()


def log_of(holders: Holders, seconds: float = PATIENCE_S) -> SharedLog:
    return SharedLog(open_quorum_store(holders.location, read_key(holders.key), seconds, "join"))


def append(appender: LogAppender, *lines: str) -> None:
    for line in lines:
        appender.add(line)
    appender.flush()


def lines_of(log: SharedLog) -> list[str]:
    return [line for batch in log.since(1) for line in batch.lines]


def test_the_log_survives_the_loss_of_one_holder_and_stops_without_a_majority(
    holders: Holders, caplog: pytest.LogCaptureFixture
) -> None:
    log = log_of(holders, BRIEF_S)
    leader = LogAppender(log)
    log.put_file("config.json", b"{}")
    assert leader.stand()
    append(leader, "a", "b")
    holders.kill(0)
    append(leader, "c")
    log.renew(Lease(term=1, leader=leader.leader, count=1))
    assert lines_of(log_of(holders)) == ["a", "b", "c"]
    holders.kill(1)
    began = time.monotonic()
    with pytest.raises(StoreUnreachable) as caught:
        append(leader, "d")
    assert time.monotonic() - began < 2 * BRIEF_S
    refused = ", ".join(f"{at} (Connection refused)" for at in holders.at[:2])
    assert f"1 of 3 holders answer; not {refused}" in str(caught.value) and str(caught.value).startswith(
        f"{holders.location}: writing failed"
    )
    warned = [record.message.rpartition(" (")[2] for record in caplog.records]
    assert warned == [f"{n} of 3 holders answer; the log needs 2)" for n in (2, 1)]
    holders.start(0)
    leader.flush()
    assert lines_of(log_of(holders)) == ["a", "b", "c", "d"], "the returned holder lacked c"
    assert log.file("config.json") == b"{}" and log.lease() is not None
    assert LogAppender(log_of(holders), 2, leader.next_number).stand()
    with pytest.raises(Deposed):
        append(leader, "e")


def test_a_stopped_holder_delays_nobody_and_two_stop_the_log_until_one_continues(holders: Holders) -> None:
    log = log_of(holders, BRIEF_S)
    leader = LogAppender(log)
    assert leader.stand()
    holders.stop(2)
    began = time.monotonic()
    for number in range(10):
        append(leader, f"line {number}")
        log.renew(Lease(term=1, leader=leader.leader, count=number))
    assert lines_of(log_of(holders)) == [f"line {number}" for number in range(10)]
    assert time.monotonic() - began < PATIENCE_S / 2
    holders.stop(1)
    began = time.monotonic()
    with pytest.raises(StoreUnreachable, match=rf"1 of 3 holders answer; not {holders.at[1]} \(no answer in 2 s\)"):
        append(leader, "line 10")
    assert time.monotonic() - began < 2 * BRIEF_S
    for number in (1, 2):
        holders.processes[number].send_signal(signal.SIGCONT)
    leader.flush()
    assert lines_of(log_of(holders))[-1] == "line 10"


def test_an_emptied_holder_does_not_vote_again(holders: Holders) -> None:
    leader = LogAppender(log_of(holders))
    assert leader.stand()
    holders.kill(2)
    append(leader, "known to holders 0 and 1")
    holders.kill(1)
    shutil.rmtree(holders.directory(1))
    for number in (1, 2):
        holders.start(number)
    holders.kill(0)
    with pytest.raises(UserError, match=r"1 of 3 holders answer; not .*Connection refused.*it does not vote") as caught:
        log_of(holders, BRIEF_S)
    assert holders.at[2] not in str(caught.value).partition("; ")[0].partition("answer, not")[2]
    holders.start(0)
    assert lines_of(log_of(holders)) == ["known to holders 0 and 1"]
    assert not any((holders.objects(1) / "log").iterdir())


def test_a_damaged_object_silences_its_holder_only(holders: Holders) -> None:
    leader = LogAppender(log_of(holders))
    assert leader.stand()
    append(leader, "a")
    for number in range(3):
        file = holders.objects(number) / LOG(2)
        if file.exists():
            break
    file.write_bytes(file.read_bytes()[:-2] + b"?\n")
    assert lines_of(log_of(holders)) == ["a"]


def test_strangers_learn_and_change_nothing(holders: Holders) -> None:
    store = open_quorum_store(holders.location, read_key(holders.key), PATIENCE_S, "join")
    assert store.write(LOG(1), b"first")
    for attempt in keyless_client.CONNECTIONS:
        assert keyless_client.bytes_received(attempt, holders.at[0]) == 0
    with socket.create_connection(_address(holders.at[1])) as idle:  # sends nothing
        idle.setblocking(False)
        assert store.write(LOG(2), b"second") and store.read(LOG(2), MAX) == b"second"


def _address(at: str) -> tuple[str, int]:
    host, _, port = at.rpartition(":")
    return host, int(port)


HEADERS = (
    b"[]",
    b"x" * 0x2001,
    b'{"kind": "other"}',
    b'{"kind": "read", "name": "../../key"}',
    b'{"kind": "accept", "name": "files/../../x", "ballot": [1, "00000000000000000000000000000000"]}',
    b'{"kind": "promise", "name": "lease.json", "ballot": [-1, ""]}',
    b'{"kind": "promise", "name": "lease.json", "ballot": [99999999999999999999999, ""]}',
    b'{"kind": "enrol", "roster": {"a": "b"}}',
)
MALFORMED = (
    b"\xff" * 200,
    b"\0\0\0\x02\xff\xff\xff\xff{}",
    *(len(h).to_bytes(4, "big") + bytes(4) + h for h in HEADERS),
)


def test_malformed_messages_of_a_member_end_its_connection_only(holders: Holders) -> None:
    key, greeting = read_key(holders.key), greeting_of(parse_quorum_location(holders.location, ""))
    for message in MALFORMED:
        with closing(connect(holders.at[0], key, greeting, PATIENCE_S)) as tls:
            assert receive_answer(tls, time.monotonic() + PATIENCE_S).ok
            tls.sendall(message)
            with pytest.raises(OSError) as caught:
                receive_answer(tls, time.monotonic() + PATIENCE_S)
            assert not isinstance(caught.value, TimeoutError)
    assert log_of(holders).append(1, Batch(1, "0" * 32, ("a",)))
    assert [path.name for path in holders.directory(0).iterdir()] == ["holders"]


def test_a_holder_keeps_its_votes_on_disk(tmp_path: Path) -> None:
    with closing(HolderFolder(tmp_path / "h")) as folder:
        holder, low, high = folder.member.id, Ballot(2, "a" * 32), Ballot(3, "b" * 32)
        assert folder.answer(Vote(kind="promise", name=LOG(1), ballot=high, holder=holder)).ok
        with pytest.raises(UserError, match="another holder uses it"):
            HolderFolder(tmp_path / "h")
    with closing(HolderFolder(tmp_path / "h")) as folder:
        assert folder.member.id == holder
        refused = folder.answer(Vote(kind="accept", name=LOG(1), ballot=low, holder=holder, value=b"x"))
        assert refused == Answer(promised=high) and not refused.ok
        assert folder.answer(Vote(kind="accept", name=LOG(1), ballot=high, holder=holder, value=b"a\nb")).ok
    with closing(HolderFolder(tmp_path / "h")) as folder:
        read = folder.answer(Vote(kind="read", name=LOG(1), holder=holder))
        assert (read.accepted, read.value) == (high, b"a\nb")
    (tmp_path / "h" / "holder.json").write_text("{")
    with pytest.raises(UserError, match=r"holder\.json: .*the holder must not vote without it"):
        HolderFolder(tmp_path / "h")


def test_a_full_disk_counts_as_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(HolderFolder(tmp_path / "h")) as folder:

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("planaria.common.atomic.write_durable", full)
        answer = folder.answer(Vote(kind="promise", name=LOG(1), ballot=Ballot(2, "a" * 32), holder=folder.member.id))
        assert "No space left" in answer.error and not answer.ok


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["{url}/run", "--hold", "127.0.0.1:1", "--key-file", "{key}"], "--hold 127.0.0.1:1: the holders are"),
        (["{url}", "--hold", "{at}", "--key-file", "{key}"], "name the run, as in quorum://"),
        (["quorum://a:1,b:2/run", "--hold", "a:1", "--key-file", "{key}"], "2 holders; use 3"),
        (["{url}/run", "--hold", "{at}"], "pass --key-file, the run's fleet.key"),
        (["{url}/run", "--hold", "{at}", "--workers", "2"], "--workers 2 has no effect with --hold"),
        (["{url}/run", "--hold", "{at}", "--standby"], "--standby has no effect with --hold"),
        (
            ["{url}/run", "--key-file", "{key}"],
            "to hold the log here, add --hold HOST:PORT",
        ),
        (["{url}/run", "--hold", "{at}", "--key-file", "{key}"], "cannot listen there (Address already in use)"),
    ],
)
def test_a_holder_that_cannot_serve_is_refused(tmp_path: Path, words: list[str], line: str) -> None:
    key = written_key(tmp_path / "key")
    with ExitStack() as running, socket.create_server(("127.0.0.1", 0)) as taken:
        holders = Holders(tmp_path, key, running)
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        url = f"quorum://{at},{holders.at[1]},{holders.at[2]}"
        done = planaria("join", *[word.format(url=url, at=at, key=key) for word in words], cwd=tmp_path)
    assert done.returncode == 2 and line in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_holders_of_another_key_or_run_are_named(holders: Holders, tmp_path: Path) -> None:
    other = read_key(written_key(tmp_path / "other"))
    began = time.monotonic()
    with pytest.raises(UserError, match="its holders have another key"):
        open_quorum_store(holders.location, other, 30.0, "fleet.shared_log")
    with pytest.raises(UserError, match="it holds the run 'run' with the holders"):
        open_quorum_store(f"{holders.url}/another", read_key(holders.key), 30.0, "fleet.shared_log")
    assert time.monotonic() - began < 20.0, "waiting would not help"


def test_a_first_start_without_all_holders_names_the_missing_one(tmp_path: Path) -> None:
    with ExitStack() as running:
        holders = Holders(tmp_path, written_key(tmp_path / "key"), running)
        for number in (0, 1):
            holders.start(number)
        line = (
            rf"2 of 3 holders answer; not {holders.at[2]} \(Connection refused\); start the others with `planaria join"
        )
        with pytest.raises(UserError, match=line):
            log_of(holders, 1.0)
        holders.start(2)
        assert log_of(holders).append(1, Batch(1, "0" * 32, ()))
        holders.processes[2].terminate()
        assert holders.processes[2].wait(20.0) == 0
        assert log_of(holders).read(1) is not None, "a later start needs a majority"


def test_a_holder_imports_no_torch() -> None:
    code = (
        "import sys, planaria.cli.commands.join, planaria.runtime.shared_log.holder; print(json.dumps([*sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", f"import json; {code}"], capture_output=True, text=True, check=True)
    loaded = json.loads(done.stdout)
    assert "planaria.control.log.quorum" in loaded and "torch" not in loaded
