"""Small swarms for tests, as processes or as threads of this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from planaria.report import page
from planaria.swarm.assemble import assemble
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.config.swarm_recipe import peer_config, peer_names
from planaria.swarm.peer.peer import Peer
from planaria.swarm.records.lines import LOG, PEERS, LogRecord, RoundDone, read_log
from planaria.swarm.records.outcome import read_outcome
from planaria.swarm.report import swarm_report
from planaria.swarm.swarm_processes import LiveSwarm, board_address, own_identity

REPORTED: set[tuple[str, bool, str]] = set()
"""settings whose reports were built"""


def tiny(policy: Path, **sections: Any) -> SwarmConfig:
    """A swarm of ``policy``; ``sections`` change single fields, as a recipe would."""
    plain: dict[str, Any] = {
        "name": "tiny",
        "size": 3,
        "policy": {"kind": "pretrained", "options": {"path": str(policy)}},
        "rounds": {"count": 6, "prompts": 4, "group": 6, "timeout_s": 60.0},
        "evaluate": {"every": 0, "problems": 10},
    }
    for name, value in sections.items():
        plain[name] = {**plain.get(name, {}), **value} if isinstance(value, dict) else value
    return SwarmConfig.model_validate(plain)


def peer(config: SwarmConfig, name: str, folder: Path, late: bool = False) -> Peer:
    """A peer of this process."""
    own = peer_config(config, name)
    known = {own_identity(config, other, folder).peer for other in peer_names(config)}
    me = own_identity(config, name, folder)
    return assemble(own, name, folder, board_address(config, folder), me, late, frozenset() if late else known)


@contextmanager
def threads(*peers: Callable[[], None]) -> Iterator[None]:
    """Run all concurrently; raise the first error."""
    raised: list[BaseException] = []

    def guarded(act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:
            raised.append(error)

    running = [threading.Thread(target=guarded, args=(act,), daemon=True) for act in peers]
    for thread in running:
        thread.start()
    yield
    for thread in running:
        thread.join(100)
        assert not thread.is_alive()
    if raised:
        raise raised[0]


def together(
    config: SwarmConfig, folder: Path, who: Sequence[str] | None = None, beside: Callable[[], None] | None = None
) -> None:
    """Run the whole swarm, or these peers, every peer a thread; another runs ``beside`` them."""
    peers = [lambda name=name: peer(config, name, folder).run() for name in who or peer_names(config)]
    with threads(*peers, *([beside] if beside else [])):
        pass
    reported(config, folder)


def reported(config: SwarmConfig, folder: Path) -> None:
    """Build the run's report through the page, once in this process for each set of optional sections."""
    sections = (config.task.reward, config.defence.consensus, config.receipts.committee)
    if sections not in REPORTED:
        page.build_parts(swarm_report.body(folder, config, read_outcome(folder)))
        REPORTED.add(sections)


@contextmanager
def processes(config: SwarmConfig, folder: Path) -> Iterator[LiveSwarm]:
    """A swarm whose processes are ended on exit."""
    swarm = LiveSwarm(config, folder)
    try:
        yield swarm
    finally:
        swarm.stop()


def ended(swarm: LiveSwarm, seconds: float = 100.0) -> dict[str, int | None]:
    """Wait for all processes: their exit codes."""
    until = time.monotonic() + seconds
    for process in swarm.processes.values():
        process.join(max(0.0, until - time.monotonic()))
    return {name: process.exitcode for name, process in swarm.processes.items()}


def killed_and_restarted(swarm: LiveSwarm, after_round: int) -> None:
    """Run a swarm of two to its end; the process of p1 is killed once it has ended this round, and started again."""
    events: list[str] = []

    def on_record(name: str, record: LogRecord) -> None:
        if name == "p1" and isinstance(record, RoundDone) and record.round >= after_round and not events:
            events.append("killed")
            os.kill(swarm.processes["p1"].pid or 0, signal.SIGKILL)

    def on_death(name: str, how: str) -> None:
        events.append(f"{name} {how}")
        swarm.start(name)

    assert swarm.run(on_record, on_death) == {"p0": 0, "p1": 0}
    assert events == ["killed", "p1 killed by SIGKILL"]


@contextmanager
def openai_server(model: Path) -> Iterator[str]:
    """Serve a model folder in a separate process; yield the address."""
    script = Path(__file__).parent / "openai_server.py"
    process = subprocess.Popen([sys.executable, str(script), str(model)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def until(condition: Callable[[], bool], seconds: float = 100.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not reached"
        time.sleep(0.01)


def log(folder: Path, name: str) -> list[LogRecord]:
    return read_log(folder / PEERS / name / LOG)


def timeless(folder: Path, name: str) -> list[LogRecord]:
    """Records without what differs between equal runs."""
    fields = {"time": 0.0, "seconds": {}, "run": "", "serving": None}
    return [
        r.model_copy(update={k: v for k, v in fields.items() if k in type(r).model_fields}) for r in log(folder, name)
    ]


def rounds(folder: Path, name: str) -> dict[int, RoundDone]:
    return {record.round: record for record in log(folder, name) if isinstance(record, RoundDone)}


def weights(folder: Path, name: str) -> list[str]:
    """Fingerprints after each round."""
    return [record.weights for _, record in sorted(rounds(folder, name).items())]


def alive(pids: Sequence[int]) -> list[int]:
    """Return the running processes, without zombies."""
    found = []
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue
        if status.rpartition(")")[2].split()[0] != "Z":
            found.append(pid)
    return found
