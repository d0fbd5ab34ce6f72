"""The controller of a group is killed, stopped or crashes: another one continues, and no member loses its state."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.processes import free_port
from torch import nn
from torch.utils.data import DataLoader

import planaria
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.group.lead import GroupLead
from planaria.group.member_state import MemberState
from planaria.group.settings import ExchangeSettings, GroupSettings, SharedData, as_arguments, group_config
from planaria.report.run.sample_ledger import require_exactly_once
from planaria.runtime.controller.controller import Controller
from planaria.runtime.fleet.joined_machine import RunMembership
from planaria.runtime.fleet.joining import RunAddress
from planaria.runtime.preparation import run_folders
from planaria.runtime.transport.secure import new_key
from support.group_members import Members, Spec
from support.live.harness import ending, facts
from support.waiting import until

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    started = Members(tmp_path)
    yield started
    started.close()


def controller(folder: Path) -> int:
    """Return the process that leads the group; 0 while none does."""
    text = (folder / "lock").read_text().strip()
    return int(text) if text.isdigit() else 0


def lose(folder: Path, number: signal.Signals) -> None:
    """Send a signal to the controller, and wait for the next one."""
    lost = controller(folder)
    os.kill(lost, number)
    until(lambda: controller(folder) not in (0, lost), 20.0)


@pytest.mark.parametrize(
    ("number", "exchange"),
    [
        (signal.SIGKILL, {"exchange": "noloco", "every": 3}),
        (signal.SIGSTOP, {"exchange": "diloco", "every": 3}),
        (signal.SIGKILL, {"exchange": "allreduce"}),
    ],
    ids=["noloco", "diloco, stopped", "allreduce"],
)
def test_members_return_to_the_next_controller_with_their_state(
    members: Members, number: signal.Signals, exchange: dict[str, Any]
) -> None:
    count = 3
    spec = {"exchange": exchange, "epochs": 4, "pause_s": 0.05}
    members.start(Spec(seed=1, hosting={"members": count}, **spec))
    folder = members.folder / "runs" / "group"
    until(lambda: (folder / "address.json").exists(), 90.0)
    address = (folder / "address.json").read_text().split('"at":"')[1].split('"')[0]
    for seed in range(2, count + 1):
        members.start(Spec(seed=seed, address=address, **spec))
    for reached in (5, 12):
        until(lambda reached=reached: min(len(members.used(n)) for n in range(count)) >= reached, 120.0)
        lose(folder, number)
    members.wait()
    assert [members.error(number) for number in range(count)] == [""] * count
    record = members.run.record
    require_exactly_once(record)
    cause = "stopped" if number == signal.SIGSTOP else "exited"
    assert [(started.term, started.cause) for started in facts(record, e.LeaderStarted)] == [(2, cause), (3, cause)]
    assert not facts(record, e.WorkerLost) and len(facts(record, e.HostJoined)) == count
    used = sorted(sample for n in range(count) for batch in members.used(n) for sample in batch)
    assert len(used) >= 4 * 240 and set(used) == set(range(240))


def test_another_machine_leads_the_group_after_the_loss_of_the_hosts(members: Members) -> None:
    ports = [free_port(), free_port()]
    standby_at = [f"127.0.0.1:{port}" for port in ports]
    log = members.folder / "shared"
    hosting = {"members": 3, "port": ports[0], "shared_log": str(log), "standby_at": standby_at}
    members.start(Spec(seed=1, hosting=hosting, epochs=4, pause_s=0.05))
    folder = members.folder / "runs" / "group"
    until(lambda: (folder / "address.json").exists(), 90.0)
    (there := members.folder / "there").mkdir()
    command = ["join", f"{log}/group", "--standby", "--at", standby_at[1], "--key-file", str(members.key)]
    standby = subprocess.Popen(
        [sys.executable, "-m", "planaria", *command], cwd=there, stdout=subprocess.PIPE, text=True
    )
    try:
        assert standby.stdout is not None and "ready to lead" in standby.stdout.readline()
        for seed in (2, 3):
            members.start(Spec(seed=seed, address=standby_at[0], epochs=4, pause_s=0.05))
        until(lambda: min(len(members.used(number)) for number in range(3)) >= 3, 120.0)
        os.killpg(os.getpgid(controller(folder)), signal.SIGKILL)
        members.wait()
        assert standby.wait(60.0) == 0
    finally:
        standby.kill()
    assert [members.error(number) for number in range(3)] == [""] * 3
    record = planaria.load(there / "runs" / "group").record
    require_exactly_once(record)
    assert [started.term for started in facts(record, e.LeaderStarted)] == [2] and not facts(record, e.WorkerLost)
    assert (there / "runs" / "group" / "report.html").exists()


def test_the_hosts_machine_leads_again_if_no_other_does(members: Members) -> None:
    at = f"127.0.0.1:{free_port()}"
    log = {"shared_log": str(members.folder / "shared"), "standby_at": [at], "port": int(at.rpartition(":")[2])}
    spec: dict[str, Any] = {"epochs": 4, "pause_s": 0.05}
    members.host(Spec(seed=1, hosting=log, **spec))
    members.start(Spec(seed=2, address=at, **spec))
    folder = members.folder / "runs" / "group"
    for reached in (5, 15):
        until(lambda reached=reached: len(members.used(0)) >= reached, 120.0)
        lose(folder, signal.SIGKILL)
    members.wait()
    assert members.error(0) == members.error(1) == ""
    record = members.run.record
    require_exactly_once(record)
    assert [started.term for started in facts(record, e.LeaderStarted)] == [2, 3] and not facts(record, e.WorkerLost)


@pytest.mark.slow
def test_a_machine_that_was_replaced_stands_by_again_even_if_that_process_is_killed(members: Members) -> None:
    ports = [free_port(), free_port()]
    standby_at = [f"127.0.0.1:{port}" for port in ports]
    log = members.folder / "shared"
    spec: dict[str, Any] = {"epochs": 16, "pause_s": 0.1}
    members.host(Spec(seed=1, hosting={"port": ports[0], "shared_log": str(log), "standby_at": standby_at}, **spec))
    folder, there = members.folder / "runs" / "group", members.folder / "there"
    there.mkdir()
    command = ["join", f"{log}/group", "--standby", "--at", standby_at[1], "--key-file", str(members.key)]
    standby = subprocess.Popen(
        [sys.executable, "-m", "planaria", *command], cwd=there, stdout=subprocess.PIPE, text=True
    )
    try:
        assert standby.stdout is not None and "ready to lead" in standby.stdout.readline()
        members.start(Spec(seed=2, address=standby_at[0], **spec))
        until(lambda: len(members.used(1)) >= 3, 90.0)
        here = os.getpgid(controller(folder))
        os.killpg(here, signal.SIGSTOP)
        until(lambda: "leader_started" in (there / "runs/group/events.jsonl").read_text(), 20.0)
        os.killpg(here, signal.SIGCONT)
        until(lambda: "standing by again" in (folder / "controller.log").read_text(), 20.0)
        lose(folder, signal.SIGKILL)
        time.sleep(2.0)  # it reads the log
        standby.kill()
        members.wait()
    finally:
        standby.kill()
    assert members.error(0) == members.error(1) == ""
    record = members.run.record
    require_exactly_once(record)
    assert [started.term for started in facts(record, e.LeaderStarted)] == [2, 3] and not facts(record, e.WorkerLost)


class Crashes(Controller):
    """A controller that ends by an error in its code."""

    def run(self, stop_requested: Callable[[], str]) -> d.Finish:
        raise RuntimeError("a defect")


def test_members_of_a_controller_that_crashes_are_not_told_that_the_group_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next controller needs the address, and the members must look for it."""
    monkeypatch.setattr("planaria.group.lead.Controller", Crashes)
    model = nn.Linear(2, 1)
    owned = MemberState(model, torch.optim.SGD(model.parameters(), lr=0.1), {})
    settings = GroupSettings(name="crash", out=str(tmp_path))
    config = group_config(settings, ExchangeSettings(), SharedData(8), owned)
    folder, key = run_folders.create(config), new_key()
    members = list[RunMembership]()

    def join(address: str) -> None:
        members.append(RunMembership(RunAddress(at=address, key=key.hex()), 1))

    with pytest.raises(RuntimeError, match="a defect"):
        GroupLead(config, folder, key).begin(join)
    assert (folder / "address.json").exists()
    assert members[0].serve_until_end(None, 10.0, str, str).how == "lost"  # type: ignore[arg-type]


def test_leaving_prints_nothing_about_a_lost_controller(tmp_path: Path) -> None:
    lines = list[str]()
    model = nn.Linear(2, 1)
    group = planaria.host(key=tmp_path / "key", out=tmp_path, notify=lines.append)
    optimizer = group.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for step, inputs in enumerate(group.shard(DataLoader(torch.randn(64, 2), 2))):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            break
    group.leave()
    time.sleep(2.0)
    assert len(lines) == 1 and lines[0].startswith("group at 127.0.0.1:")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"members": 0}, "host: members = 0: use 1 or more"),
        ({"members": 5, "max_members": 2}, "host: max_members = 2 is less than members = 5"),
        ({"address": "0.0.0.0"}, "host: address = '0.0.0.0': set advertise"),
        ({"standby_at": "127.0.0.1:7001"}, "host: standby_at needs shared_log"),
        ({"shared_log": "/log", "standby_at": ["10.0.0.2:1"], "port": 1}, "list this machine too, as '127.0.0.1:1'"),
        ({"key": "/etc/hostname"}, "/etc/hostname holds no key"),
    ],
)
def test_invalid_arguments_are_refused_by_name(tmp_path: Path, arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(planaria.UserError, match=complaint):
        planaria.host(**{"key": tmp_path / "key", **arguments})


def test_errors_of_a_groups_configuration_name_the_arguments() -> None:
    refused = "fleet.shared_log = 'x': machines that lead need fleet.port; exchange.patience_s, fleet.host, --name"
    named = "shared_log = 'x': machines that lead need port; patience_s, address, name"
    assert as_arguments(refused) == named


def test_a_member_that_dies_with_the_controller_is_replaced_by_one_that_joins(members: Members) -> None:
    address = members.host(Spec(seed=1, epochs=4, pause_s=0.05))
    folder = members.folder / "runs" / "group"
    dying = members.start(Spec(seed=2, address=address, epochs=4, pause_s=0.05, dies_after=8))
    until(lambda: len(members.used(dying)) >= 8, 90.0)
    lose(folder, signal.SIGKILL)
    joined = members.start(Spec(seed=3, address=address, epochs=4, pause_s=0.05))
    members.wait()
    assert members.error(0) == members.error(joined) == ""
    require_exactly_once(members.run.record)
    assert members.facts(joined)["steps"] > 0


def test_a_controller_that_is_asked_to_stop_is_not_replaced(members: Members) -> None:
    members.host(Spec(seed=1, epochs=40, pause_s=0.05))
    folder = members.folder / "runs" / "group"
    until(lambda: len(members.used(0)) >= 5, 90.0)
    os.kill(controller(folder), signal.SIGTERM)
    members.wait()
    assert members.error(0) == "" and members.facts(0)["steps"] < 40 * 40
    record = members.run.record
    time.sleep(1.0)
    assert ending(record).reason == "SIGTERM" and not facts(record, e.LeaderStarted) and not controller(folder)
