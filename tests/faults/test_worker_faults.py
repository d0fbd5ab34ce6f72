"""Batches and faults of reading them: microbatches in order, late data, slow machines and corrupted updates."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.control.facts import events as e
from planaria.control.facts.orders import InjectFault
from planaria.control.state.roster import Roster, WorkerState
from planaria.control.state.run import RunState
from planaria.data.stream import BatchReader
from planaria.exchange.base import Update
from planaria.exchange.compress.dense import UNCOMPRESSED
from planaria.exchange.update_publisher import UpdatePublisher
from planaria.faults.trace import Fault, Trace, write
from planaria.faults.worker_faults import WorkerFaults
from planaria.runtime.preparation.config_checks import read_faults
from planaria.runtime.preparation.unused_settings import without_effect
from planaria.runtime.resolved_run import ResolvedRun
from planaria.runtime.worker.step_samples import ReadTimer, batches
from support.injected_faults import HOLDERS, chaos, run, state
from support.tiny_engine import Recipe, config_in, train_stream

LATE_S = 0.02


def fault_order(signal: str, **more: Any) -> InjectFault:
    fields = {"number": 0, "moment": "any", "offset": 0.0, "seconds": None, "strength": None}
    return InjectFault(**{"signal": signal, **fields, **more})


def faults(reported: list[str] | None = None) -> WorkerFaults:
    """Return the faults of a worker; edges and updates are unaffected."""
    applied = [] if reported is None else reported
    nowhere = SimpleNamespace(by_peer={}, round_edges={})
    return WorkerFaults(RunConfig(), nowhere, nowhere, lambda signal, _: applied.append(signal))


def test_microbatches_are_consecutive_samples_of_the_stream(config: Recipe) -> None:
    recipe = config()
    stream = train_stream(recipe)
    batch = batches(stream, first_sample=40, size=3)
    for microbatch in (2, 0, 1):  # in any order
        tokens, targets = batch(microbatch)
        assert tokens.shape == targets.shape == (3, recipe.model.context)
        for row in range(3):
            sample = stream.sample(40 + 3 * microbatch + row)
            assert torch.equal(tokens[row], sample[:-1])
            assert torch.equal(targets[row], sample[1:])


def test_reading_is_timed_by_step() -> None:
    reading, tokens = ReadTimer(), (torch.zeros(1), torch.ones(1))

    def slow(microbatch: int) -> tuple[Tensor, Tensor]:
        time.sleep(LATE_S)
        return tokens

    batch = reading.timed(slow)
    assert batch(0) is tokens and reading.pop_seconds() >= LATE_S and reading.pop_seconds() == 0.0
    batch(1)
    assert reading.step_s >= 2 * LATE_S and reading.pop_seconds() >= LATE_S
    reading.timed(lambda microbatch: tokens)(0)
    assert reading.step_s < LATE_S, "a step begins at nothing"


def test_slow_data_begin_with_their_step_and_end_in_time() -> None:
    reported: list[str] = []
    injector, read = faults(reported), list[int]()

    def batch(microbatch: int) -> tuple[Tensor, Tensor]:
        read.append(microbatch)
        return torch.zeros(1), torch.ones(1)

    def seconds(source: BatchReader, microbatch: int) -> float:
        began = time.monotonic()
        source(microbatch)
        return time.monotonic() - began

    injector.add(fault_order("slow_data", seconds=0.5, strength=LATE_S))
    assert seconds(injector.wrap_batches(batch, 0), 0) < LATE_S and not reported, "the step has not begun"
    injector.start_step([])
    source = injector.wrap_batches(batch, 0)
    assert reported == ["slow_data"] and seconds(source, 0) >= LATE_S and seconds(source, 1) >= LATE_S
    assert seconds(source, 0) < LATE_S, "it is there already"
    time.sleep(0.5)
    assert seconds(injector.wrap_batches(batch, None), 0) < LATE_S and read == [0, 0, 1, 0, 0]


def test_a_slow_machine_slows_its_workers() -> None:
    injector = faults()
    injector.add(fault_order("slow_host", strength=1.5, moment="commit"))
    assert not injector.delay_if_slow(0.001)
    injector.set_activity("commit", -1, -1)
    assert injector.delay_if_slow(0.001)


def test_a_later_attack_replaces_the_one_before() -> None:
    outer = SimpleNamespace(publisher=UpdatePublisher())
    injector = WorkerFaults(RunConfig(), outer, outer, lambda *_: None)
    injector.add(fault_order("corrupt_update", attack="zero", until=9))
    injector.add(fault_order("corrupt_update", attack="own_flip", strength=2.0, until=6, number=1))
    injector.start_step([])
    honest = Update(torch.tensor([1.0, -2.0, 0.5]))
    output = outer.publisher.updates(honest, UNCOMPRESSED, (3, 3), 1, (0,))
    assert torch.equal(output[0].blocking, torch.tensor([-2.0, 4.0, -1.0]))


def on_machines(**hosts: str) -> RunState:
    """Put some workers on machines that have joined; a spare and a starting worker are on g1, too."""
    known = {w: WorkerState(3, "member", host=hosts.get(w, "")) for w in HOLDERS.values()}
    known |= {"s1": WorkerState(1, "spare", host="g1"), "s2": WorkerState(1, "starting", host="g1")}
    return replace(state(), roster=Roster(MappingProxyType(known)))


def test_a_slow_machine_affects_all_its_workers_also_later_ones() -> None:
    injector, fleet = chaos(Fault(step=2, stage=3, signal="slow_host", strength=4.0, resume_after_s=60.0))
    there = on_machines(w3="g1", w4="g1")
    injector.on_decision(run(1), there)
    assert not fleet.sent_orders
    injector.on_decision(run(2), there)
    assert [(worker, fault_order.signal, fault_order.strength) for worker, fault_order in fleet.sent_orders] == [
        (worker, "slow_host", 4.0) for worker in ("w3", "w4", "s1")
    ]
    fleet.numbers()
    for worker, reported in (("s2", [("s2", 0)]), ("w1", [])):
        injector.on_event(0.0, e.WorkerJoined(worker=worker, incarnation=1, pid=1, at=""), there)
        assert all((b.seconds or 0) <= 60.0 for _, b in fleet.sent_orders)
        assert fleet.numbers() == reported
    injected = e.FaultInjected(worker="w4", node=4, signal="slow_host", step=2, moment="any", number=0)
    assert injector.on_event(0.0, injected, there) == []
    injector.on_decision(run(3), there)
    assert not fleet.sent_orders, "it is injected once"


def test_a_machine_that_has_recovered_slows_no_new_worker() -> None:
    injector, fleet = chaos(Fault(step=0, stage=3, signal="slow_host", resume_after_s=0.01))
    there = on_machines(w3="g1")
    injector.on_decision(run(0), there)
    fleet.numbers()
    time.sleep(0.02)
    injector.on_event(0.0, e.WorkerJoined(worker="s2", incarnation=1, pid=1, at=""), there)
    assert not fleet.sent_orders


def config_with_fault(folder: Path, fault: Fault, **sections: Any) -> RunConfig:
    """Return a recipe with a trace of this fault."""
    write(Trace(faults=(fault,)), folder / "trace.json")
    return config_in(folder, chaos={"trace": str(folder / "trace.json")}, **sections)


def test_slow_data_are_refused_where_no_data_are_read(tmp_path: Path) -> None:
    assert read_faults(ResolvedRun(config_with_fault(tmp_path, Fault(step=0, stage=0, signal="slow_data")))).faults
    block = Fault(step=0, stage=2, signal="slow_data")
    with pytest.raises(UserError, match=r"'slow_data' at 2, which reads no batches; use one of these nodes: 0$"):
        read_faults(ResolvedRun(config_with_fault(tmp_path, block)))
    config = config_with_fault(tmp_path, block, data={"document_mask": True})
    assert read_faults(ResolvedRun(config)).faults, "every stage reads batches for its mask"


@pytest.mark.parametrize(
    ("fields", "output"),
    [
        ({"moment": "backward"}, "begins with its step; remove moment and offset"),
        ({"offset": 0.5}, "begins with its step; remove moment and offset"),
        ({"peer": 1}, "has no peer"),
        ({"strength": 0}, "greater than 0"),
    ],
)
def test_fields_that_do_not_apply_to_a_fault_are_refused(fields: dict[str, Any], output: str) -> None:
    with pytest.raises(ValueError, match=output):
        Fault(step=0, stage=0, signal="slow_data", **fields)


def test_one_process_reports_that_it_has_no_machines(tmp_path: Path) -> None:
    config = config_in(tmp_path).model_copy(update={"engine": "inline"})
    faults = (Fault(step=1, stage=0, signal="slow_data"), Fault(step=1, stage=2, signal="slow_host"))
    output = list(without_effect(ResolvedRun(config), Trace(faults=faults)))
    assert any(line.startswith("faults left out: 1 slow_data, 1 slow_host; they need workers") for line in output)
