"""Orders to workers: some decisions, and what follows from a decision for one worker."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, TypeAdapter

from planaria.control.facts.decisions import Commit, Disband, Form, LeaveOut, RunStep, Save
from planaria.control.facts.rounds import BeginRound, OpenPrefetchLinks, Settle
from planaria.control.facts.run_started import Fact
from planaria.exchange.coded.coded_facts import CloseRound


class Donate(Fact):
    """Send a copy of this stage to a node of another replica that lost it, or to a successor."""

    kind: Literal["donate"] = "donate"
    donor: int
    to: int
    stage: int
    link: str
    at: str = ""
    """address to connect to"""
    only_outer: bool = False
    """whether the outer state is enough, since the receiver keeps its weights"""


class InjectFault(Fact):
    """Inject a fault of a trace at the next matching action (:class:`planaria.faults.trace.Fault`)."""

    kind: Literal["inject_fault"] = "inject_fault"
    number: int
    """index of the fault in its trace"""
    signal: str
    moment: str
    offset: float
    seconds: float | None
    strength: float | None
    attack: str | None = None
    until: int | None = None
    peer: int | None = None


class ExitWorker(Fact):
    """Exit (sent to workers at the end, and to those that wake up after they were declared dead)."""

    kind: Literal["exit_worker"] = "exit_worker"
    interrupts: ClassVar[bool] = True


Order = Annotated[
    Form
    | RunStep
    | LeaveOut
    | CloseRound
    | Commit
    | OpenPrefetchLinks
    | BeginRound
    | Settle
    | Donate
    | Disband
    | Save
    | InjectFault
    | ExitWorker,
    Field(discriminator="kind"),
]
ORDER: TypeAdapter[Order] = TypeAdapter(Order)
