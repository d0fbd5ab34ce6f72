"""A fault injector and the state of its run."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.facts.orders import InjectFault
from planaria.control.state.replica import ReplicaState, WorkerSet
from planaria.control.state.roster import Roster, WorkerState
from planaria.control.state.run import Replicas, RunState
from planaria.faults.injector import TraceInjector
from planaria.faults.trace import Fault, Trace

STARTED = e.RunStarted(name="run", seed=1, stages=4, steps=9, first_step=0, samples_per_step=1, wall_time=0.0)

HOLDERS = {stage: f"w{stage}" for stage in range(5)}


def state(holders: dict[int, str] = HOLDERS) -> RunState:
    """A run whose holders are carrying out an order."""
    replica = replace(
        ReplicaState.start(STARTED), holders=MappingProxyType(holders), waiting=WorkerSet(holders.values())
    )
    return replace(
        RunState.start(STARTED),
        replicas=Replicas({0: replica}),
        roster=Roster(MappingProxyType({w: WorkerState(3, "member") for w in HOLDERS.values()})),
    )


class Fleet:
    """Records its messages and signals."""

    def __init__(self) -> None:
        self.sent_orders: list[tuple[str, InjectFault]] = []
        self.signals: list[tuple[str, int, signal.Signals]] = []

    def send(self, worker: str, text: bytes) -> None:
        self.sent_orders.append((worker, InjectFault.model_validate_json(text)))

    def signal(self, worker: str, incarnation: int, number: signal.Signals) -> None:
        self.signals.append((worker, incarnation, number))

    def numbers(self) -> list[tuple[str, int]]:
        """Return (worker, fault number) of the messages since the last call."""
        reported, self.sent_orders = [(worker, fault_order.number) for worker, fault_order in self.sent_orders], []
        return reported


def chaos(*faults: Fault, first_step: int = 0, folder: Path = Path("nowhere")) -> tuple[TraceInjector, Fleet]:
    fleet = Fleet()
    return TraceInjector(Trace(faults=faults), fleet, folder, first_step), fleet


def run(step: int, **more: Any) -> d.RunStep:
    return d.RunStep(generation=1, step=step, **more)
