"""Writes the folder of a run that never was, in the shape of a real one: a pipeline on a clock, with deaths."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field
from pathlib import Path

from planaria.config.schema import PipelineConfig, RunConfig, TrainConfig
from planaria.control.facts.decisions import Commit, Finish, Form, Keep, Member, MemberLink, Rebuild, RunStep
from planaria.control.facts.events import (
    EdgeBroken,
    FaultInjected,
    Linked,
    RunStarted,
    Span,
    StageCommitted,
    StageReady,
    WorkerJoined,
    WorkerLost,
    WorkReport,
)
from planaria.control.log.run_record import RunRecord, StepMetric, ValidationMetric
from planaria.control.log.segments import SEGMENT_BYTES
from planaria.control.log.writer import RunLog
from planaria.pipeline.plan.actions import Key, StepPlan
from planaria.pipeline.plan.build import build_plan
from planaria.report.observe.tally import RunTally
from planaria.report.run.recovery_timing import RecoveryTiming

STAGES, MICROBATCHES, STEPS = 4, 8, 40
ACTIVATION = 4 * 128 * 128 * 4  # bytes: samples x tokens x dim x fp32
NOTICE, DECIDE, LINK, TRANSFER, REBUILD = 0.041, 0.002, 0.055, 0.062, 0.018


def schedule(plan: StepPlan, rng: random.Random, start: float) -> dict[int, list[Span]]:
    """Every action as soon as its inputs are there, first in preference first."""
    todo = {stage: list(actions) for stage, actions in plan.actions.items()}
    free = dict.fromkeys(todo, start)
    done: dict[Key, float] = {}
    spans: dict[int, list[Span]] = {stage: [] for stage in todo}
    while any(todo.values()):
        options = []
        for stage, actions in todo.items():
            for place, action in enumerate(actions):
                needs = [key for key in (action.input_key, *action.after) if key is not None]
                if all(key in done for key in needs):
                    options.append((max([free[stage], *(done[key] for key in needs)]), place, stage))
        begin, place, stage = min(options)
        action = todo[stage].pop(place)
        cost = (0.004 if action.kind == "forward" else 0.008) * (0.6 if stage == 0 else 1) * rng.uniform(0.9, 1.25)
        done[action.key] = free[stage] = begin + cost
        spans[stage].append(
            Span(action=action.kind, microbatch=action.microbatch, hop=action.hop, start=begin, end=begin + cost)
        )
    return spans


@dataclass
class Synthesis:
    """Writes one run. ``deaths``: step → stage killed in it; ``rollbacks``: those steps → step rolled back to."""

    folder: Path
    deaths: dict[int, int] = field(default_factory=lambda: {12: 2, 27: 3})
    rollbacks: dict[int, int] = field(default_factory=dict)
    faults_known: bool = True
    steps: int = STEPS
    name: str = "synthetic"
    full: int = SEGMENT_BYTES

    def __post_init__(self) -> None:
        self.rng = random.Random(5)
        self.config = RunConfig(
            name=self.name,
            pipeline=PipelineConfig(stages=STAGES, microbatches=MICROBATCHES),
            train=TrainConfig(steps=self.steps, eval_every=10),
        )
        self.plan = build_plan(self.config.pipeline, [(*range(STAGES + 1), 0)] * MICROBATCHES)
        self.log = RunLog(self.folder, full=self.full)
        self.t = 1000.0
        self.holders = {stage: f"w{stage}" for stage in range(STAGES + 1)}
        self.start_ticks = STAGES + 1
        self.generation = 0

    def write(self) -> Path:
        (self.folder / "config.json").write_text(self.config.model_dump_json())
        samples = self.config.pipeline.samples
        self.log.event(
            self.t,
            RunStarted(name=self.name, seed=1, stages=STAGES, steps=self.steps, first_step=0,
                       samples_per_step=samples, wall_time=1.7e9),
        )  # fmt: skip
        for number in range(STAGES + 2):
            self._tick(0.01)
            self.log.event(self.t, WorkerJoined(worker=f"w{number}", incarnation=0, pid=4000 + number))
        self.start_ticks = STAGES + 2
        self._form(0, "started")
        step, deaths = 0, dict(self.deaths)
        while step < self.steps:
            if step in deaths:
                step = self._die(step, deaths.pop(step))
            else:
                self._step(step)
                step += 1
        self.log.decision(self.t, Finish(outcome="finished"))
        self.log.close()
        return self.folder

    def _tick(self, seconds: float) -> float:
        self.t += seconds
        return self.t

    def _form(self, step: int, outcome: str, rebuilt: int | None = None) -> None:
        self.generation += 1
        members = [
            Member(
                node=s,
                stage=s,
                worker=w,
                source=Rebuild(by="checkfree", donors=[s - 1, s + 1]) if s == rebuilt else Keep(),
            )
            for s, w in self.holders.items()
        ]
        links = [MemberLink(low=s, high=s + 1, id=f"{s}.{self.generation}") for s in range(STAGES)]
        form = Form(generation=self.generation, step=step, outcome=outcome, members=members, links=links)
        self.log.decision(self._tick(DECIDE), form)
        linked = []
        for stage, worker in self.holders.items():
            transfer, rebuild = (TRANSFER, REBUILD) if stage == rebuilt else (0.0, 0.0)
            event = Linked(worker=worker, node=stage, stage=stage, generation=self.generation, link_s=LINK,
                           transfer_s=transfer, transfer_bytes=9_000_000 if stage == rebuilt else 0,
                           rebuild_s=rebuild)  # fmt: skip
            linked.append((self.t + 0.001 * stage + LINK + transfer + rebuild, event))
        for t, event in sorted(linked, key=lambda entry: entry[0]):
            self.t = t
            self.log.event(t, event)

    def _report(self, step: int, spans: dict[int, list[Span]], dropped: bool, without: int | None = None) -> None:
        for stage, own in spans.items():
            sent: dict[int, int] = {}
            for span in own:
                ahead = span.action == "forward"
                if span.hop not in (-1, STAGES + 1 if ahead else 0):
                    target = (stage + 1 if ahead else stage - 1) % (STAGES + 1)
                    sent[target] = sent.get(target, 0) + ACTIVATION
            if stage != without:
                work = WorkReport(worker=self.holders[stage], node=stage, stage=stage, generation=self.generation,
                              step=step, dropped=dropped, spans=own, sent_bytes=sent)  # fmt: skip
                self.log.worked(self.t, work)

    def _step(self, step: int) -> None:
        self.log.decision(self.t, RunStep(generation=self.generation, step=step))
        start = self.t
        spans = schedule(self.plan, self.rng, start)
        self.t = max(own[-1].end for own in spans.values())
        for stage, own in spans.items():
            loss = self._loss(step) if stage == 0 else None
            self.log.event(self.t, StageReady(worker=self.holders[stage], stage=stage, generation=self.generation,
                                              step=step, loss=loss, grad_norm=0.4))  # fmt: skip
            own.append(Span(action="optimizer", start=self.t + 0.001, end=self.t + 0.005))
        self.log.decision(self.t, Commit(generation=self.generation, step=step, progress=step))
        self._tick(0.006)
        for stage, worker in self.holders.items():
            self.log.event(self.t, StageCommitted(worker=worker, stage=stage, generation=self.generation, step=step))
        self._report(step, spans, dropped=False)
        speed = self.config.pipeline.samples * 128 / (self.t - start)
        made = StepMetric(t=self.t, step=step, loss=self._loss(step), tokens_per_s=speed, grad_norm={0: 0.4})
        self.log.metric(made)
        if (step + 1) % 10 == 0:
            self.log.metric(ValidationMetric(t=self.t, step=step, val_loss=self._loss(step) + 0.12))

    def _loss(self, step: int) -> float:
        after = sum(0.25 * math.exp(-(step - d) / 4) for d in self.deaths if step >= d)
        return 3.1 + 4.4 * math.exp(-step / 14) + after + self.rng.uniform(-0.05, 0.05)

    def _die(self, step: int, stage: int) -> int:
        self.log.decision(self.t, RunStep(generation=self.generation, step=step))
        spans = schedule(self.plan, self.rng, self.t)
        end = max(own[-1].end for own in spans.values())
        kill = self._tick(0.55 * (end - self.t))
        victim = self.holders[stage]
        if self.faults_known:
            fault = FaultInjected(worker=victim, node=stage, signal="SIGKILL", step=step, moment="during a forward")
            with (self.folder / "chaos.jsonl").open("a") as file:
                file.write(json.dumps({"t": kill, "event": fault.model_dump()}) + "\n")
        lost = self._tick(NOTICE)
        neighbour = EdgeBroken(worker=self.holders[stage - 1], node=stage - 1, peer=stage,
                               generation=self.generation, detail="reset")  # fmt: skip
        self.log.event(lost - 0.001, neighbour)
        self.log.event(lost, WorkerLost(worker=victim, incarnation=0, cause="connection", detail="reset by peer"))
        cut = {s: [x for x in own if x.end < lost] for s, own in spans.items()}
        self._report(step, cut, dropped=True, without=stage)
        self.holders[stage] = f"w{self.start_ticks - 1}"
        self.log.event(lost, WorkerJoined(worker=f"w{self.start_ticks}", incarnation=0, pid=4000 + self.start_ticks))
        self.start_ticks += 1
        back = self.rollbacks.get(step, step)
        self._form(back, "rolled back" if step in self.rollbacks else "recovered", stage)
        return back


def tally_of(record: RunRecord) -> RunTally:
    """Return the totals of a complete record."""
    return fold_tally(record)[0]


def fold_tally(record: RunRecord) -> tuple[RunTally, list[RecoveryTiming]]:
    """Return the totals of a record and the recoveries reported on the way; work reports follow the facts of a time."""
    tally, recoveries = RunTally(), []
    facts = [*((t, 0, fact) for t, fact in record.history), *((t, 1, work) for t, work in record.worked)]
    for t, _, fact in sorted(facts, key=lambda item: item[:2]):
        recoveries += tally.apply_work_report(fact) if isinstance(fact, WorkReport) else tally.apply(t, fact)
    for metric in record.metrics:
        tally.apply_metric(metric)
    return tally, recoveries
