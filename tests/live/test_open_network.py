"""Machines without a shared folder: they join by address, fetch what they need, and may be behind a router."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.run_record import RunRecord
from support.live.harness import (
    Live,
    apart,
    checked,
    commits,
    ending,
    facts,
    inline,
    live,
    losses,
    resume,
    tiny,
    validation_losses,
)
from support.netns import Host, NotAllowedError, network, output_of

pytestmark = pytest.mark.timeout(400)
PORT = 7001
LONG_S = 150.0


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    """The controller's host, one that others can call, and one behind a router."""
    try:
        with network(3, tmp_path / "capture", hidden=[2]) as hosts:
            yield hosts
    except NotAllowedError as error:
        pytest.skip(str(error))


def spread(folder: Path, home: Host, local_workers: int, **sections: Any) -> RunConfig:
    """Workers of four stages, of which ``local_workers`` are at home."""
    key = str(folder / "key")
    plain: dict[str, Any] = {
        "fleet": {
            "host": "0.0.0.0",
            "advertise": home.address,
            "port": PORT,
            "key": key,
            "local_workers": local_workers,
            "spares": 0,
        },
        "recovery": {"strategy": "checkpoint"},
        "checkpoint": {"every": 4, "keep": 100},
        "network": {"emulate": "links", "latency_s": 0.02},
        "train": {"steps": 40, "eval_every": 10, "eval_microbatches": 2},
    }
    return tiny(folder, stages=3, **{**plain, **sections})


@contextmanager
def joined(run: Live, host: Host, home: Host, folder: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """``planaria join`` by address, on a host that sees nothing of what the controller writes."""
    hidden, key = run.folder.parent.parent, run.folder.parent.parent / "key"
    folder.mkdir()
    (folder / "key").write_bytes(key.read_bytes())
    (folder / "key").chmod(0o600)
    join = [sys.executable, "-m", "planaria", "join", f"{home.address}:{PORT}", "--key-file", str(folder / "key")]
    words = [*join, "--cache", str(folder / "cache"), *more]
    script = f"mount -t tmpfs none '{hidden}' && cd '{folder}' && exec \"$@\""
    process = subprocess.Popen(
        [*host.prefix, "sh", "-c", script, "sh", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def holder_on(record: RunRecord, host: str) -> int | None:
    """Return the process id of a worker on this machine that holds a stage now; at home: not stage 0."""
    where = {fact.worker: fact.host for fact in facts(record, d.Spawn)}
    held, pids = facts(record, d.Form)[-1].members, {fact.worker: fact.pid for fact in facts(record, e.WorkerJoined)}
    return next((pids[m.worker] for m in held if where[m.worker] == host and (host or m.stage)), None)


def kill_on(run: Live, host: str) -> None:
    """Kill a worker there, and wait until the run has committed three more steps."""
    before = run.wait_until(lambda record: ending_formed(record) and holder_on(record, host) is not None, LONG_S)
    os.kill(holder_on(before, host), signal.SIGKILL)
    lost = len(facts(before, e.WorkerLost))
    run.wait_until(
        lambda record: len(facts(record, e.WorkerLost)) > lost and commits(record) > commits(before) + 3, LONG_S
    )


def ending_formed(record: RunRecord) -> bool:
    """Return whether the replica has trained since its last formation."""
    kinds = [fact for _, fact in record.history if isinstance(fact, d.Form | d.Commit)]
    return bool(kinds) and isinstance(kinds[-1], d.Commit)


def files_in(folder: Path) -> set[str]:
    """Return the names of a machine's files, without locks."""
    return {file.name for file in folder.rglob("*") if file.is_file() and file.suffix != ".lock"}


@pytest.mark.slow
def test_three_machines_share_no_folder_and_one_is_behind_a_router(tmp_path: Path, hosts: list[Host]) -> None:
    home, open_, hidden = hosts
    config = spread(tmp_path / "home", home, local_workers=2)
    with ExitStack() as ending_, live(config, home.prefix) as run:
        run.wait_until(lambda record: len(facts(record, e.WorkerJoined)) == 2, LONG_S)
        one = ending_.enter_context(joined(run, open_, home, tmp_path / "one", "--workers", "1"))
        run.wait_until(lambda record: len(facts(record, e.HostJoined)) == 1, LONG_S)
        other = ending_.enter_context(joined(run, hidden, home, tmp_path / "other", "--workers", "2"))
        run.wait_until(lambda record: commits(record) > 5, LONG_S)
        for host in ("g2", "g1", ""):
            kill_on(run, host)
        assert run.end(LONG_S) == (0, "")
        assert output_of(one)[-1] == "the run is over"
        assert any("others cannot open connections" in line for line in output_of(other))
    record = checked(run.folder)
    assert ending(record).outcome == "finished" and len(facts(record, e.WorkerLost)) >= 3
    trained, validated = inline(record)
    assert apart(losses(record), trained) == 0.0 and apart(validation_losses(record), validated) == 0.0
    logs = {f"{fact.worker}.log" for fact in facts(record, d.Spawn) if fact.host}
    data = {"train.bin", "validation.bin", "meta.json", "tokenizer.json"}
    left = files_in(tmp_path / "one") | files_in(tmp_path / "other")
    assert left == data | logs | {"key"}, "nothing of checkpoints, nothing of the run's folder"


@pytest.mark.slow
def test_a_run_without_workers_at_home(tmp_path: Path, hosts: list[Host]) -> None:
    """Both ends of an edge are behind routers; checkpoints travel over the network, and are resumed at home.

    The text is a mixture with a document mask.
    """
    home, _, hidden = hosts
    mixture = {}
    for name in ("books", "web"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{name} {i}"}}\n' for i in range(2000)))
        mixture[name] = {"source": str(tmp_path / f"{name}.jsonl"), "weight": 1}
    data = {"source": "stdlib", "mixture": mixture, "document_mask": True}
    sections = {"train": {"steps": 12, "eval_every": 0, "eval_microbatches": 2}, "data": data}
    with live(spread(tmp_path / "home", home, local_workers=0, **sections), home.prefix) as run:
        run.wait_until(lambda record: len(facts(record, e.Trouble)) == 1, LONG_S)
        with joined(run, hidden, home, tmp_path / "all") as machine:
            assert run.end(LONG_S) == (0, "")
            output_of(machine)
    record = checked(run.folder)
    assert "4 workers are missing; waiting for 600 s (fleet.join_s)" in facts(record, e.Trouble)[0].detail
    assert apart(losses(record), inline(record)[0]) == 0.0
    on_ = resume(run.folder, train__steps="16", fleet__host="127.0.0.1", fleet__local_workers="4", fleet__advertise="")
    assert ending(on_).outcome == "finished" and max(losses(on_)) == 15


def test_a_run_that_no_machine_joins_ends_with_a_message(tmp_path: Path) -> None:
    config = tiny(tmp_path, stages=1, fleet={"local_workers": 1, "join_s": 0.5})
    with live(config) as run:
        code, output = run.end(LONG_S)
    assert code == 2 and output == (
        "planaria: 2 workers are missing, and no machine has joined in time (fleet.join_s)\n"
    )
