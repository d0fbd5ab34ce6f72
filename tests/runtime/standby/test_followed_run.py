"""A standby that follows a run's log while it grows: the same state as from the whole log, from its last lines only."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import planaria
from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.failover import FailoverFold
from planaria.control.log import reader
from planaria.control.log.reader import read_run
from planaria.control.log.run_record import RunRecord, Timed
from planaria.control.log.writer import RunLog
from planaria.report.observe.progress import NoProgress
from planaria.runtime.preparation import run_folders
from planaria.runtime.standby.followed_run import FollowedRun


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """A run of two replicas that meet, validate and save."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text").write_text("one two three four five six seven eight nine ten\n" * 200)
    config = RunConfig.model_validate(
        {
            "name": "run",
            "out": str(folder),
            "engine": "inline",
            "model": {"vocab": 300, "dim": 16, "layers": 2, "hidden": 32, "heads": 2, "context": 16},
            "data": {"source": str(folder / "text"), "tokenizer": "bytes", "cache": str(folder / "cache")},
            "pipeline": {"stages": 2, "microbatches": 2, "microbatch_size": 1},
            "exchange": {"kind": "diloco", "replicas": 2, "options": {"every": 3}},
            "train": {"steps": 12, "eval_every": 4},
            "checkpoint": {"every": 5},
        }
    )
    run = planaria.train(config, progress=False)
    return read_run(run.folder)


def write(log: RunLog, line: Timed, notice: int) -> None:
    t, fact = line
    if d.is_decision(fact):
        log.decision(t, fact)
    else:
        log.event(t, fact, notice)


@pytest.mark.parametrize("seed", range(6))
def test_any_prefix_read_in_any_parts_gives_the_same_state(trained: RunRecord, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    history = list(trained.history)
    run_folders.write_config(tmp_path, trained.config)
    followed, fold = FollowedRun(tmp_path, trained.config, NoProgress(), measure=True), FailoverFold()
    log, last_notice = RunLog(tmp_path, full=rng.choice([2000, 20_000, 1 << 20])), 0
    for number, line in enumerate(history[: rng.randint(1, len(history))]):
        last_notice = number if isinstance(line[1], e.WorkerJoined) else last_notice
        write(log, line, last_notice if isinstance(line[1], e.WorkerJoined) else 0)
        fold.take(*line)
        if rng.random() < 0.1:
            followed.advance()
    log.close()
    found, expected = followed.lost("exited", 5.0), fold.state(last_notice)
    assert (found.repeat, found.unfinished, found.notice, found.silent_since) == (
        expected.repeat, expected.unfinished, last_notice, expected.silent_since,
    )  # fmt: skip
    assert found.state.replicas.items() == expected.state.replicas.items() and found.noticed == 5.0
    measured = read_run(tmp_path).metrics
    assert [m.step for m in measured] == [m.step for m in trained.metrics][: len(measured)]


def test_a_failover_reads_the_last_lines_only(
    trained: RunRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = list(trained.history)
    run_folders.write_config(tmp_path, trained.config)
    log = RunLog(tmp_path)
    for line in history[:-3]:
        write(log, line, 0)
    followed = FollowedRun(tmp_path, trained.config, NoProgress())
    followed.advance()
    for line in history[-3:]:
        write(log, line, 0)
    log.close()
    parsed, parse = list[object](), reader._parse_history
    monkeypatch.setattr(reader, "_parse_history", lambda line: parsed.append(line) or parse(line))
    assert isinstance(followed.lost("exited", 0.0).finish, d.Finish)
    assert len(parsed) == 3


def test_a_run_that_never_started_is_refused(trained: RunRecord, tmp_path: Path) -> None:
    run_folders.write_config(tmp_path, trained.config)
    with pytest.raises(UserError, match="lost before the run started; start it again"):
        FollowedRun(tmp_path, trained.config, NoProgress()).lost("exited", 0.0)
