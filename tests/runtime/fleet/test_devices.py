"""Each worker gets its own device while there are enough; a device must hold its stages."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from planaria.common.errors import UserError
from planaria.config.names import WorkerId
from planaria.runtime.fleet.devices import (
    Device,
    DeviceNeeds,
    Inventory,
    device_of,
    require_devices,
    why_insufficient,
)

GB = 10**9


def gpus(*gigabytes: int) -> tuple[Device, ...]:
    return tuple(Device(f"GPU-{number}", size * GB) for number, size in enumerate(gigabytes))


def assigned_devices(workers: int, devices: tuple[Device, ...]) -> dict[WorkerId, str]:
    """Return the devices of ``workers`` workers that started one after the other."""
    homes: dict[WorkerId, str] = {}
    for number in range(workers):
        homes[f"w{number}", 1] = device_of(f"w{number}", devices, homes)
    return homes


def test_workers_get_a_device_each_the_largest_first() -> None:
    assert list(assigned_devices(8, gpus(*[80] * 8)).values()) == [f"GPU-{number}" for number in range(8)]
    assert list(assigned_devices(3, gpus(24, 80, 24)).values()) == ["GPU-1", "GPU-0", "GPU-2"]


def test_a_restarted_worker_gets_a_free_device_else_that_of_its_dead_process() -> None:
    """The kernel may take a moment to end a process; sharing a living worker's device would be permanent."""
    homes = assigned_devices(8, gpus(*[80] * 8))
    free = homes.pop(("w5", 1))
    assert device_of("w5", gpus(*[80] * 8), homes) == free
    assert device_of("w1", gpus(80, 80, 80), assigned_devices(2, gpus(80, 80, 80))) == "GPU-2", "w1 may be frozen"
    homes = assigned_devices(3, gpus(80, 80, 80))
    assert device_of("w1", gpus(80, 80, 80), homes) == homes["w1", 1]


class Machine(RuleBasedStateMachine):
    """One machine: workers start, die, freeze and are started again, in any order. No more at once than ``most``."""

    @initialize(sizes=st.lists(st.sampled_from([8, 24, 80]), min_size=1, max_size=8), more=st.integers(0, 3))
    def begin(self, sizes: list[int], more: int) -> None:
        self.devices = gpus(*sizes)
        self.most = len(sizes) + more
        self.processes: dict[WorkerId, str] = {}
        self.newest: dict[str, int] = {}
        self.dead: set[str] = set()
        self.crowded = False
        """have there ever been more workers than devices?"""

    def living(self) -> dict[str, str]:
        """Worker → device."""
        return {w: self.processes[w, n] for w, n in self.newest.items() if w not in self.dead}

    def start(self, worker: str) -> None:
        homes = dict(self.processes)
        device = device_of(worker, self.devices, homes)
        load = Counter({d.name: 0 for d in self.devices})
        newest = {name: home for (name, _), home in sorted(homes.items())}
        load.update(home for name, home in newest.items() if name != worker)
        assert load[device] == min(load.values())
        assert device == device_of(worker, self.devices, dict(reversed(homes.items()))), "the order does not matter"
        self.newest[worker] = self.newest.get(worker, 0) + 1
        self.processes[worker, self.newest[worker]] = device
        self.dead.discard(worker)
        self.crowded |= len({name for name, _ in self.processes}) > len(self.devices)

    @precondition(lambda self: len(self.newest) < self.most)
    @rule()
    def a_worker_starts(self) -> None:
        self.start(f"w{len(self.newest)}")

    @precondition(lambda self: self.living())
    @rule(data=st.data(), lingers=st.booleans())
    def one_dies(self, data: st.DataObject, lingers: bool) -> None:
        """Its process may still exist (frozen, or slow to end), but does not count."""
        worker = data.draw(st.sampled_from(sorted(self.living())))
        self.dead.add(worker)
        if not lingers:
            del self.processes[worker, self.newest[worker]]

    @precondition(lambda self: self.dead)
    @rule(data=st.data())
    def one_is_started_again(self, data: st.DataObject) -> None:
        self.start(data.draw(st.sampled_from(sorted(self.dead))))

    @precondition(lambda self: self.processes)
    @rule()
    def what_lingered_ends(self) -> None:
        living = {(worker, self.newest[worker]) for worker in self.living()}
        self.processes = {name: home for name, home in self.processes.items() if name in living}

    @precondition(lambda self: hasattr(self, "devices"))
    @invariant()
    def no_two_share_a_device_while_there_are_enough(self) -> None:
        if not self.crowded:
            assert max(Counter(self.living().values()).values(), default=0) <= 1


TestMachine = Machine.TestCase


def test_a_device_must_hold_the_largest_stages_that_may_share_it() -> None:
    wants = DeviceNeeds((30 * GB, 10 * GB, 10 * GB))
    assert why_insufficient(wants, Inventory(gpus(32)), 1) == ""
    assert "40.0 GB" in why_insufficient(wants, Inventory(gpus(32)), 2) and "2 workers" in why_insufficient(
        wants, Inventory(gpus(32)), 2
    )
    assert why_insufficient(wants, Inventory(gpus(32, 32)), 2) == ""
    assert "on device GPU-1" in why_insufficient(wants, Inventory(gpus(32, 24)), 2), "it may become the largest stage's"
    assert why_insufficient(wants, Inventory(gpus(32, 24)), 1) == ""
    assert why_insufficient(DeviceNeeds(), Inventory(lacks="of course"), 9) == ""


def test_missing_devices_are_reported_in_one_line_with_machine_and_fix() -> None:
    with pytest.raises(UserError, match=r"^train.device = 'cuda': node n1 has no CUDA device \(none\): use another$"):
        require_devices("node n1", DeviceNeeds((1,)), Inventory(lacks="none"), 1, "use another")
    with pytest.raises(UserError, match=r"node n1 has 8.0 GB .*: use another; more pipeline.stages make each smaller"):
        require_devices("node n1", DeviceNeeds((9 * GB,)), Inventory(gpus(8)), 1, "use another")
