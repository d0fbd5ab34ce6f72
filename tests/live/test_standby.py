"""Runs whose controller is lost: workers keep their stages, and a standby continues without losing a step."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planaria.config import recipe
from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.reader import read_run
from planaria.control.log.run_record import RunRecord
from planaria.runtime.fleet.supervised_fleet import has_supervisor
from planaria.runtime.preparation import run_folders
from support.live.harness import (
    Live,
    assert_no_orphans,
    checked,
    ending,
    facts,
    folder_of,
    live,
    losses,
    newest,
    pids,
    steps,
    tiny,
    train,
)
from support.live.killed_controller import Moment, lead
from support.processes import planaria
from support.waiting import until

FOREVER = 10_000


def survivable(folder: Path, standby: str = "manual", **sections: Any) -> RunConfig:
    """Return a run whose workers outlive the controller."""
    own = {"standby": standby, "orphan_s": 30.0, **sections.pop("fleet", {})}
    return tiny(folder, fleet=own, **sections)


def undisturbed(config: RunConfig, folder: Path) -> RunRecord:
    """Train the same run under one controller."""
    plain = config.fleet.model_dump(exclude_unset=True, exclude={"standby", "orphan_s", "lease_s"})
    fleet = type(config.fleet).model_validate(plain)
    return train(config.model_copy(update={"fleet": fleet, "out": str(folder / "undisturbed")}))


def led_by_many(config: RunConfig, lives: list[int], moment: Moment) -> RunRecord:
    """Train under controllers that are killed after ``lives`` log lines, and a last one that is not."""
    file, log = Path(config.out).parent / "run.toml", Path(config.out).parent / "terminal.txt"
    file.write_text(recipe.dump(config))
    words = ["train", str(file), "--quiet"]
    for lines in [*lives, 0]:
        code = lead(words, lines, moment, log)
        assert code == (-signal.SIGKILL if lines else 0), log.read_text()
        words = ["join", str(folder_of(config)), "--standby"]
    assert_no_orphans(folder_of(config))
    assert not has_supervisor(folder_of(config))
    return checked(folder_of(config))


@pytest.mark.parametrize("moment", ["before", "after"])
def test_no_step_is_lost_wherever_controllers_die(tmp_path: Path, moment: Moment) -> None:
    """The kills walk through the phases: lives differ, and each begins where the last one ended."""
    config = survivable(tmp_path, steps=12, checkpoint={"every": 3}, train={"steps": 12, "eval_every": 4})
    record = led_by_many(config, [25, 4, 7, 5, 11, 6, 13, 8], moment)
    terms = [started.term for started in facts(record, e.LeaderStarted)]
    assert terms == list(range(2, 2 + len(terms))) and len(terms) == 8
    assert len(facts(record, e.RunStarted)) == 1
    assert not facts(record, e.WorkerLost), "workers do not notice"
    assert losses(record) == losses(undisturbed(config, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_lives(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    replicas = {"exchange": {"replicas": 2, "kind": "noloco", "options": {"every": 3}}} if seed % 2 else {}
    config = survivable(tmp_path, steps=16, checkpoint={"every": rng.randint(2, 5)}, **replicas)
    lives = [rng.randint(30, 60), *(rng.randint(2, 25) for _ in range(10))]
    record = led_by_many(config, lives, rng.choice(["before", "after"]))
    assert ending(record).outcome == "finished"
    if not replicas:
        assert losses(record) == losses(undisturbed(config, tmp_path))


def kill_with_a_worker(run: Live, standby: int) -> None:
    os.kill(pids(read_run(run.folder))["w2"], signal.SIGKILL)
    os.kill(run.process.pid, signal.SIGKILL)


def kill_with_the_standby(run: Live, standby: int) -> None:
    os.kill(standby, signal.SIGKILL)
    os.kill(run.process.pid, signal.SIGKILL)


def kill_one_after_the_other(run: Live, standby: int) -> None:
    for part, pid in (("standby", standby), ("controller", run.process.pid)):
        answer = planaria("run", "chaos", run.folder, "--kill", part)
        assert answer.stdout == f"SIGKILL to the {part} (pid {pid})\n", answer
        until_ready(run.folder, other_than=standby)


def stop(run: Live, standby: int) -> None:
    os.kill(run.process.pid, signal.SIGSTOP)


@pytest.mark.parametrize(
    ("lose", "lost"),
    [(kill_with_a_worker, ["w2"]), (kill_with_the_standby, []), (kill_one_after_the_other, []), (stop, [])],
)
def test_a_standby_replaces_a_lost_controller(
    tmp_path: Path, lose: Callable[[Live, int], None], lost: list[str]
) -> None:
    """The supervisor starts another standby if the first one is lost; a stopped controller is killed."""
    config = survivable(tmp_path, "auto", steps=80, recovery={"strategy": "redundant"}, fleet={"lease_s": 0.5})
    with live(config) as run:
        run.wait_until(lambda record: steps(record) >= 6)
        lose(run, until_ready(run.folder))
        assert run.process.wait(30.0) == -signal.SIGKILL
        record = until_over(run.folder)
    (led,) = facts(record, e.LeaderStarted)
    assert led.term == 2 and led.lost_s < 10.0
    assert led.cause == ("stopped" if lose is stop else "exited") and (lose is not stop or led.silent_s >= 0.5)
    assert lose is not kill_with_the_standby or led.lost_s > 0.1, "the start of the other standby counts"
    assert [fact.worker for fact in facts(record, e.WorkerLost)] == lost
    assert_no_orphans(run.folder)
    assert losses(checked(run.folder)) == losses(undisturbed(config, tmp_path))


def test_faults_reach_the_supervisor_and_an_absent_standby_is_an_error(tmp_path: Path) -> None:
    with live(survivable(tmp_path, steps=FOREVER)) as run:
        run.wait_until(lambda record: steps(record) >= 2)
        answer = planaria("run", "chaos", run.folder, "--kill", "standby")
        assert answer.returncode == 2 and "no standby waits on this machine" in answer.stderr
        answer = planaria("run", "chaos", run.folder, "--kill", "supervisor")
        assert answer.stdout.startswith("SIGKILL to the supervisor (pid "), answer
        assert run.process.wait(30.0) not in (0, None)
    assert not has_supervisor(run.folder)
    assert_no_orphans(run.folder)


def test_a_standby_that_leads_and_is_stopped_ends_in_one_line(tmp_path: Path) -> None:
    with live(survivable(tmp_path, "auto", steps=FOREVER)) as run:
        run.wait_until(lambda record: steps(record) >= 4)
        until_ready(run.folder)
        os.kill(run.process.pid, signal.SIGKILL)
        until(lambda: facts(read_run(run.folder), e.LeaderStarted), 60.0, shown="no controller")
        os.kill(int((run.folder / run_folders.LOCK).read_text()), signal.SIGTERM)
        record = until_over(run.folder)
        _, errors = run.end()
    assert ending(record).outcome == "stopped" and errors == "planaria: stopped by SIGTERM\n"
    late = planaria("join", run.folder, "--standby")
    ended = f"the run has ended (SIGTERM); resume it with: planaria train --resume {run.folder}\n"
    assert late.returncode == 0 and late.stdout == ended, late
    assert not (run.folder / run_folders.LOCK).read_text(), "it names no process that has ended"


def test_resuming_adopts_workers_that_still_wait(tmp_path: Path) -> None:
    config = survivable(tmp_path, steps=40, checkpoint={"every": 100})
    with live(config) as run:
        record = run.wait_until(lambda record: steps(record) >= 6)
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait(10.0)
        refused = planaria("train", "--resume", run.folder, "--train.steps", "50")
        assert refused.returncode == 2 and "its workers still wait" in refused.stderr
        output = planaria("train", "--resume", run.folder, "--quiet")
        assert output.returncode == 0, output
    assert planaria("join", run.folder, "--standby").stdout == "the run is finished\n"
    record = checked(run.folder)
    assert len(facts(record, e.RunStarted)) == 1 and len(facts(record, e.WorkerJoined)) == 6
    assert losses(record) == losses(undisturbed(config, tmp_path))


def test_workers_without_a_controller_end_after_orphan_s_and_the_run_resumes_from_disk(tmp_path: Path) -> None:
    config = survivable(tmp_path, steps=40, checkpoint={"every": 4}, fleet={"orphan_s": 1.0, "lease_s": 0.5})
    with live(config) as run:
        run.wait_until(lambda record: steps(record) >= 6)
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait(10.0)
        assert_no_orphans(run.folder)
        assert not has_supervisor(run.folder)
        late = planaria("join", run.folder, "--standby")
        assert late.returncode == 2 and "no workers are left" in late.stderr
        assert newest(run.folder).step >= 4
        output = planaria("train", "--resume", run.folder, "--quiet")
        assert output.returncode == 0, output
    record = checked(run.folder)
    assert len(facts(record, e.RunStarted)) == 2
    assert losses(record) == losses(undisturbed(config, tmp_path))


def test_a_killed_supervisor_ends_the_run_in_one_line_and_it_resumes_from_disk(tmp_path: Path) -> None:
    config = survivable(tmp_path, steps=60, checkpoint={"every": 4})
    with live(config) as run:
        record = run.wait_until(lambda record: steps(record) >= 6)
        stat = Path(f"/proc/{pids(record)['w0']}/stat").read_text()
        os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)  # the parent of the workers
        code, errors = run.end()
    assert code == 1 and "the supervisor of the workers has exited" in errors and errors.count("\n") == 1, errors
    output = planaria("train", "--resume", run.folder, "--quiet")
    assert output.returncode == 0, output
    assert losses(checked(run.folder)) == losses(undisturbed(config, tmp_path))


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--engine", "inline"], "the workers of engine = 'inline' end with its process"),
        (["--fleet.kind", "ray"], "the actors of fleet.kind = 'ray' end with their driver"),
        (["--fleet.orphan_s", "0.5"], "fleet.orphan_s = 0.5: use more than fleet.lease_s = 1"),
    ],
)
def test_runs_whose_workers_cannot_outlive_the_controller_are_refused(
    tmp_path: Path, flags: list[str], error: str
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(recipe.dump(tiny(tmp_path)))
    output = planaria("train", file, "--standby", "auto", *flags)
    assert output.returncode == 2 and error in output.stderr, output
    assert not (tmp_path / "runs").exists()


def test_a_run_without_standby_has_nothing_to_take_over(tmp_path: Path) -> None:
    record = train(tiny(tmp_path, steps=2))
    output = planaria("join", folder_of(record.config), "--standby")
    assert output.returncode == 2 and "start it with --standby auto or manual" in output.stderr
    assert '"notice"' not in (folder_of(record.config) / "events.jsonl").read_text()


@pytest.mark.parametrize("flags", [["--workers", "2"], ["--patience", "5"], ["--no-inbound"], ["--cache", "somewhere"]])
def test_flags_of_workers_are_refused_for_a_standby(tmp_path: Path, flags: list[str]) -> None:
    output = planaria("join", tmp_path, "--standby", *flags)
    assert output.returncode == 2 and f"planaria: {flags[0]}" in output.stderr
    assert "has no effect with --standby" in output.stderr


def until_ready(folder: Path, other_than: int | None = None) -> int:
    """Wait until a standby waits for the lock; return its process id."""

    def others() -> list[int]:
        return [pid for pid in run_folders.waiting_standbys(folder) if pid != other_than]

    until(others, 30.0, shown="no standby waits for the lock")
    return others()[0]


def until_over(folder: Path) -> RunRecord:
    """Wait until the run has finished, and its standby with it."""
    until(lambda: facts(read_run(folder), d.Finish) and not run_folders.is_held(folder), 60.0, shown="not over")
    return checked(folder)
