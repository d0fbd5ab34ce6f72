"""The examples of groups: a host, a member that joins it, and one that is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.processes import free_port

EXAMPLES = Path(__file__).parents[2] / "examples"


def started(script: str, folder: Path, *words: str) -> subprocess.Popen[str]:
    environment = os.environ | {"HOME": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, script, *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "name",
    ["group", "group_trainer", "group_accelerate", pytest.param("group_lightning", marks=pytest.mark.slow)],
)
def test_a_host_and_a_member_train_while_another_is_killed(name: str, tmp_path: Path) -> None:
    if name == "group_lightning":
        pytest.importorskip("lightning")
    port, script = free_port(), tmp_path / f"{name}.py"
    text = (EXAMPLES / f"{name}.py").read_text()
    text, count = re.subn(r"planaria\.host\(29400(, members=2)?\)", f"planaria.host({port}, members=3)", text)
    assert count == 1
    script.write_text(text.replace("epochs: int = 40", "epochs: int = 4"))
    (tmp_path / ".planaria").mkdir()
    host = started(str(script), tmp_path)
    address = tmp_path / "runs" / "group" / "address.json"
    while not address.exists():
        assert host.poll() is None, host.communicate()[0]
    others = [started(str(script), tmp_path, f"127.0.0.1:{port}") for _ in range(2)]
    log = tmp_path / "runs" / "group" / "events.jsonl"
    while f'"pid":{others[1].pid},' not in log.read_text() or '"commit"' not in log.read_text():
        assert others[1].poll() is None, others[1].communicate()[0]
    others[1].send_signal(signal.SIGKILL)
    outputs = [process.communicate(timeout=200)[0] for process in (host, *others)]
    assert [host.returncode, others[0].returncode] == [0, 0], outputs
    for text in outputs[:2]:
        assert float(re.findall(r"steps and \d+ rounds here, .*loss ([0-9.]+)", text)[0]) < 1.5
    assert '"worker_lost"' in log.read_text()
