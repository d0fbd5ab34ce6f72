"""Starting processes does not block; they outlive the server that forked them, and leave nothing behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from planaria.common.signals import STOPS
from planaria.config.schema import FleetConfig
from planaria.runtime.fleet import spawner as module
from planaria.runtime.fleet.base import Notice, Reported, WorkerEnded
from planaria.runtime.fleet.local import LocalFleet
from planaria.runtime.fleet.process import adopt_orphans
from planaria.runtime.fleet.spawner import spawner
from support.live import idle_worker
from support.waiting import until

AT_ONCE_S = 1.0
"""allows for a busy machine"""


class Scene:
    """A fleet of workers that do nothing."""

    def __init__(self) -> None:
        self.fleet = LocalFleet(idle_worker.main, [], FleetConfig(heartbeat_s=10.0))
        self.notices: list[Notice] = []

    def spawn(self, worker: str) -> int:
        """Start a worker; return its process id once it has reported."""
        began = time.monotonic()
        self.fleet.spawn(worker, 1)
        assert time.monotonic() - began < AT_ONCE_S
        self.until(lambda: Reported(worker, 1, b"here") in self.notices)
        return next(pid for pid in children() if named(pid) == f"planaria {worker}.1")

    def until(self, condition: Callable[[], object], seconds: float = 60.0) -> None:
        until(condition, seconds, lambda: self.notices.extend(self.fleet.poll(0.05)), self.notices)

    def ended(self) -> list[WorkerEnded]:
        return [notice for notice in self.notices if isinstance(notice, WorkerEnded)]


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.fleet.close(patience_s=0.0)


def status(pid: int | str) -> list[str]:
    """Name, state and parent of a process; empty when it is over."""
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(") ")
    except OSError:
        return []
    return [name, *rest.split()[:2]]


def named(pid: int) -> str:
    return "".join(status(pid)[:1])


def children(parent: int | None = None, state: str = "") -> set[int]:
    """Of this process, or another; in this state if one is given."""
    whose, found = str(parent or os.getpid()), set()
    for process in Path("/proc").glob("[0-9]*"):
        if (shown := status(process.name)) and shown[2] == whose and shown[1].startswith(state):
            found.add(int(process.name))
    return found


def server() -> int:
    """The fork server of this process, the newest if an old one is on its way out."""
    return max(pid for pid in children() if named(pid) == "planaria forks" and status(pid)[1] != "Z")


def alive(pid: int) -> bool:
    return status(pid)[1:2] not in ([], ["Z"])


@pytest.mark.slow
def test_two_hundred_starts_and_kills_leave_nothing_behind(scene: Scene) -> None:
    scene.spawn("w0")
    gc.collect()  # what tests before this one have left may go meanwhile
    held = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    for number in range(1, 201, 2):
        for worker in (f"w{number}", f"w{number + 1}"):
            scene.fleet.spawn(worker, 1)
            scene.fleet.signal(worker, 1, signal.SIGKILL)  # perhaps before it has started
        scene.until(lambda count=number + 1: len(scene.ended()) == count)
    scene.until(lambda: not children(state="Z"))
    descriptors, threads = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    assert descriptors <= held[0] and threads <= held[1]
    assert not [pid for pid in children() if named(pid).startswith("planaria w") and named(pid) != "planaria w0.1"]


@pytest.mark.parametrize(
    ("number", "middle"),
    [(signal.SIGKILL, False), pytest.param(signal.SIGSTOP, False, marks=pytest.mark.slow), (signal.SIGSTOP, True)],
)
def test_a_dead_or_stuck_server_is_replaced_without_loss(scene: Scene, number: signal.Signals, middle: bool) -> None:
    older, old = scene.spawn("w1"), server()
    scene.until(lambda: children(old, "S"))  # one forked only now would be spared, and start w2
    for pid in children(old) if middle else [old, *children(old)]:
        os.kill(pid, number)
    younger = scene.spawn("w2")
    assert middle or server() != old
    assert {older, younger} <= children() and alive(older), "it outlives its server"
    scene.until(lambda: middle or not alive(old))
    assert not scene.ended()


def test_workers_outlive_the_threads_that_start_them(scene: Scene) -> None:
    thread = threading.Thread(target=scene.fleet.spawn, args=("w0", 1))
    thread.start()
    thread.join()
    pid = scene.spawn("w1")
    for _ in range(3):
        thread = threading.Thread(target=time.sleep, args=(0.0,))
        thread.start()
        thread.join()
    scene.notices += scene.fleet.poll(0.2)
    assert alive(pid) and not scene.ended()


def test_only_the_controller_handles_a_terminals_signals(scene: Scene) -> None:
    for pid in (scene.spawn("w0"), server()):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = dict(line.split(":\t") for line in lines if ":\t" in line)
        assert all(int(fields["SigIgn"], 16) >> (number - 1) & 1 for number in STOPS)
        assert int(fields["SigBlk"], 16) == 0


def test_a_failed_start_is_reported_as_an_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_own", [])
    monkeypatch.setattr(module, "_PROGRAM", "import sys; sys.exit('no room here')")
    scene = Scene()
    try:
        scene.fleet.spawn("w0", 1)
        scene.until(lambda: bool(scene.ended()))
    finally:
        scene.fleet.close(patience_s=0.0)
    (ended,) = scene.ended()
    assert ended.cause == "exit" and ended.detail.startswith("could not be started: "), ended


@pytest.mark.slow
def test_a_cancelled_start_does_not_happen(tmp_path: Path) -> None:
    spawner().spawn("first", partial(sys.exit, 0)).join(60.0)
    for pid in [server(), *children(server())]:
        os.kill(pid, signal.SIGSTOP)  # further starts have to wait
    started = tmp_path / "start_ticks"
    unwanted = spawner().spawn("unwanted", partial(Path.touch, started))
    unwanted.signal(signal.SIGKILL)
    assert unwanted.join(60.0) and not started.exists()
    ends = spawner().spawn("ends", partial(sys.exit, 3))
    assert (ends.wait_until_started(60.0), ends.join(60.0), ends.exitcode) == (ends.pid, 3, 3)
    ends.signal(signal.SIGKILL)  # its id may be another's by now


def test_slow_imports_fail_all_waiting_starts_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six starts do not wait for six times three attempts; a killed one is not waited for."""
    (tmp_path / "slow_to_import.py").write_text("import time; time.sleep(600)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(module, "_own", [])
    began = time.monotonic()
    waiting = [spawner().spawn(f"w{n}", partial(sys.exit, 0), ["slow_to_import"], start_s=0.5) for n in range(6)]
    why = r"not imported what workers need within 0\.5 s .*raise fleet\.start_timeout_s"
    for child in waiting[1:]:
        with pytest.raises(OSError, match=why):
            child.wait_until_started(60.0)
    patient = spawner().spawn("w7", partial(sys.exit, 0), ["slow_to_import"], start_s=600.0)
    patient.kill(600.0)  # returns immediately: it has not started
    assert time.monotonic() - began < 18 * 0.5, "as long as three attempts for each would take"


FORKING = """
    import os, signal, sys, threading, time
    from functools import partial
    from pathlib import Path
    from types import SimpleNamespace
    from planaria.runtime.fleet import spawner

    if "program" not in sys.argv:
        spawner.expect_fork()
    sys.modules["torch"] = SimpleNamespace(_C=SimpleNamespace(_cuda_isInBadFork=lambda: "cuda" in sys.argv))
    held = os.open("/dev/zero", os.O_RDONLY)
    if "threads" in sys.argv:
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    spawner.fork_server(["json"])
    for _ in range(2):
        child = spawner.spawner().spawn("child", partial(os.system, "readlink /proc/$PPID/fd/* | grep /dev/"))
        assert child.join(60.0) == 0
        server = spawner.spawner()._server._process.pid
        print(Path(f"/proc/{server}/cmdline").read_bytes() == Path("/proc/self/cmdline").read_bytes(), flush=True)
        os.kill(server, signal.SIGKILL)
    left = set(os.environ) & set(spawner._NO_CUDA)
    assert not left, left
"""


@pytest.mark.parametrize(("of", "forked"), [("command", True), ("threads", False), ("program", False), ("cuda", False)])
def test_a_command_forks_its_server_where_that_is_safe(of: str, forked: bool) -> None:
    """A command's imports are not repeated; a server that dies is replaced by a new interpreter."""
    command = [sys.executable, "-c", textwrap.dedent(FORKING), of]
    done = subprocess.run(command, input="", capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["/dev/null", str(forked), "/dev/null", "False"]


BREAKING = """
    import sys
    from functools import partial
    from types import SimpleNamespace
    from planaria.common import logs
    from planaria.runtime.fleet import spawner

    logs.configure("warning")
    spawner.expect_fork()
    sys.modules["torch"] = SimpleNamespace(_C=SimpleNamespace(_cuda_isInBadFork=lambda: False))
    spawner.fork_server(["breaks"])
    child = spawner.spawner().spawn("child", partial(sys.exit, 0), ["breaks"])
    try:
        child.wait_until_started(60.0)
        print(child.join(60.0))
    except OSError as error:
        print(error)
"""


@pytest.mark.parametrize("often", ["once", "always"])
def test_a_server_that_cannot_import_a_module_sends_the_reason(often: str, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    first = f"from pathlib import Path\nif not Path({str(seen)!r}).exists():\n    Path({str(seen)!r}).touch()\n"
    raised = "raise RuntimeError('no licence')\n"
    (tmp_path / "breaks.py").write_text(f"{first}    {raised}" if often == "once" else raised)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    command, environ = [sys.executable, "-c", textwrap.dedent(BREAKING)], os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, input="", capture_output=True, text=True, timeout=100, env=environ)
    why = "the fork server exited while it imported what workers need (breaks: RuntimeError: no licence)"
    if often == "once":
        line = f" WARNING planaria.runtime.fleet.spawner: {why}; another one was started\n"
        assert done.stdout == "0\n" and done.stderr.endswith(line) and done.stderr.count("\n") == 1
    else:
        assert (done.stdout, done.stderr) == (f"child could not be started: {why}\n", "")


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are not adopted")
def test_a_process_reaps_its_server_when_it_ends() -> None:
    with adopt_orphans():  # else the kernel gives what it leaves to another process
        command = [sys.executable, "-c", textwrap.dedent(BREAKING).replace("breaks", "json")]
        before = children()
        done = subprocess.run(command, input="", capture_output=True, text=True, timeout=100)
        left = children() - before
    assert (done.stdout, done.stderr, left) == ("0\n", "", set())


@pytest.mark.slow
def test_a_dead_process_leaves_no_frozen_workers_or_server(tmp_path: Path) -> None:
    script = """
        import os, signal, sys, time
        from support.live import idle_worker
        from planaria.config.schema import FleetConfig
        from planaria.runtime.fleet.base import Reported
        from planaria.runtime.fleet.local import LocalFleet

        fleet = LocalFleet(idle_worker.main, [], FleetConfig(heartbeat_s=10.0))
        for worker in ("w0", "w1"):
            fleet.spawn(worker, 1)
        received = []
        while len(received) < 2:
            received += [n for n in fleet.poll(1.0) if isinstance(n, Reported)]
        print("ready", flush=True)
        time.sleep(600)
    """
    path = os.pathsep.join(filter(None, sys.path))
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE
    )
    try:
        assert parent.stdout is not None and parent.stdout.readline() == b"ready\n"
        family = children(parent.pid)
        family |= {pid for child in family for pid in children(child)}
        assert sorted(named(pid) for pid in family) == [*2 * ["planaria forks"], "planaria w0.1", "planaria w1.1"]
        for pid in family:
            if named(pid) != "planaria w0.1":
                os.kill(pid, signal.SIGSTOP)
    finally:
        parent.kill()
        parent.communicate()
    until(lambda: not any(map(alive, family)), 10.0, shown=family)
