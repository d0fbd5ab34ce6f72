"""Jobs as real processes, which may die, hang or be done already, and never outlive their parent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from planaria.trials.jobs import Job, JobSettings, run_jobs

ONE = JobSettings(workers=1)
WRITES = "import pathlib; pathlib.Path({out!r}).write_text('x')"


class Watcher:
    def __init__(self) -> None:
        self.lines, self.at_once, self.seen = list[str](), 0, list[tuple[int, int]]()

    def print_note(self, line: str) -> None:
        self.lines.append(line)

    def on_progress(self, title: str, reached: int, steps: int, running: Mapping[str, tuple[int, int]]) -> None:
        self.at_once = max(self.at_once, len(running))
        self.seen.append((reached, steps))


def job(folder: Path, name: str, program: str = "") -> Job:
    """Return a job whose process makes the file ``name``."""
    out = folder / name
    return Job(
        name=name,
        steps=10,
        log=folder / f"{name}.log",
        done=out.exists,
        reached=lambda: 0,
        pulse=lambda: (folder / f"{name}.log").stat().st_size,
        command=lambda: ["-c", program.format(out=str(out)) or WRITES.format(out=str(out))],
    )


def lost_of(jobs: list[Job], watcher: Watcher, processes: JobSettings = ONE, retries: int = 0) -> dict[str, str]:
    lost = dict[str, str]()
    run_jobs("jobs", jobs, processes, watcher, lambda job, how: lost.update({job.name: how}), retries)
    return lost


def test_finished_jobs_are_not_repeated_and_parallel_jobs_are_limited(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("kept")
    watcher = Watcher()
    jobs = [job(tmp_path, name) for name in "abcde"]
    assert lost_of(jobs, watcher, JobSettings(workers=2)) == {}
    assert (tmp_path / "a").read_text() == "kept" and all(one.done() for one in jobs)
    assert watcher.lines[0] == "1/5 jobs: kept from before"
    assert sorted(line.rpartition(" ")[2] for line in watcher.lines[1:]) == list("bcde")
    assert [line.split()[0] for line in watcher.lines] == [f"{n}/5" for n in range(1, 6)]
    assert watcher.at_once == 2 and watcher.seen[0] == (10, 50)


def test_a_death_is_reported_with_the_last_log_line_and_other_jobs_continue(tmp_path: Path) -> None:
    watcher = Watcher()
    jobs = [
        job(tmp_path, "says", "print('early'); print('disk full'); raise SystemExit(3)"),
        job(tmp_path, "killed", "import os; os.kill(os.getpid(), 9)"),
        job(tmp_path, "lies", "print('all is well')"),
        job(tmp_path, "good"),
    ]
    assert lost_of(jobs, watcher) == {
        "says": "stopped with exit code 3 (disk full)",
        "killed": "killed by SIGKILL",
        "lies": "stopped with exit code 0 (all is well)",
    }
    assert watcher.lines[-1] == "1/4 jobs: good"


def test_a_job_that_dies_is_resumed_up_to_its_retries(tmp_path: Path) -> None:
    program = (
        "import os, pathlib; out = pathlib.Path({out!r}); n = out.with_suffix('.tries'); "
        "n.write_text(n.read_text() + 'x' if n.exists() else 'x'); "
        "len(n.read_text()) > 2 and out.write_text('x') or os.abort()"
    )
    watcher = Watcher()
    assert lost_of([job(tmp_path, "a", program)], watcher, retries=2) == {}
    assert [line.partition(";")[2] for line in watcher.lines] == [" resumed", " resumed", ""]
    assert lost_of([job(tmp_path, "b", program)], watcher, retries=1).keys() == {"b"}
    assert "given up after 2 attempts" in watcher.lines[-1] and "SIGABRT" in watcher.lines[-1]


@pytest.mark.slow
def test_a_job_without_progress_is_killed_and_a_slow_one_is_not(tmp_path: Path) -> None:
    stuck = "import time; print('loading', flush=True); time.sleep(600)"
    slow = "import time\nfor n in range(12): time.sleep(0.25); print(n, flush=True)\n" + WRITES
    watcher, began = Watcher(), time.monotonic()
    jobs = [job(tmp_path, "stuck", stuck), job(tmp_path, "slow", slow)]
    patience = 2.0
    lost = lost_of(jobs, watcher, JobSettings(workers=2, patience_s=patience))
    assert lost == {"stuck": "killed after 2 s without progress (loading)"}
    assert patience < time.monotonic() - began < 60


def test_given_up_may_stop_all_jobs_and_leaves_no_process(tmp_path: Path) -> None:
    sleeper = "import os, pathlib, time; pathlib.Path({out!r} + '.pid').write_text(str(os.getpid())); time.sleep(600)"
    there = str(tmp_path / "sleeps.pid")
    fails = f"import pathlib, time\nwhile not pathlib.Path({there!r}).exists(): time.sleep(0.01)\n1/0"
    jobs = [job(tmp_path, "sleeps", sleeper), job(tmp_path, "fails", fails), job(tmp_path, "waits")]

    def given_up(lost: Job, how: str) -> None:
        raise RuntimeError(f"{lost.name}: {how}")

    with pytest.raises(RuntimeError, match=r"fails: stopped with exit code 1 \(ZeroDivisionError"):
        run_jobs("jobs", jobs, JobSettings(workers=2), Watcher(), given_up)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "sleeps.pid").read_text()), 0)
    assert not jobs[2].done()


def test_no_process_outlives_a_command_that_is_killed(tmp_path: Path) -> None:
    program = f"""
import sys; sys.path[:0] = {sys.path!r}
from pathlib import Path
from test_jobs import Watcher, job
from planaria.trials.jobs import JobSettings, run_jobs
sleeper = "import os, pathlib, time; pathlib.Path({{out!r}} + '.pid').write_text(str(os.getpid())); time.sleep(600)"
run_jobs("jobs", [job(Path({str(tmp_path)!r}), "a", sleeper)], JobSettings(), Watcher(), lambda job, how: None)
"""
    command = subprocess.Popen([sys.executable, "-c", program])
    deadline = time.monotonic() + 60
    note = tmp_path / "a.pid"
    while not (note.exists() and note.read_text()):
        assert command.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    command.kill()
    command.wait()
    pid = int(note.read_text())
    while Path(f"/proc/{pid}").exists() and "\tZ" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
