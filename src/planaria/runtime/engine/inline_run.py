"""A whole run on the ``inline`` engine: the fleet's events, checkpoints and faults, without its processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from planaria.common.atomic import refused
from planaria.config.schema import RunConfig
from planaria.control import decisions as d
from planaria.control import events as e
from planaria.control.protocols import Observer
from planaria.control.saving import LAST_TRIES, folder_name, unequal
from planaria.control.waits import AGAIN_S
from planaria.faults.byzantine import lie_of
from planaria.faults.inline import Lies, Losses, corrupt
from planaria.faults.trace import BEFORE_COMMIT, Fault, before_commit
from planaria.models.state import StageState
from planaria.pipeline.routing.arrangement import Arrangement
from planaria.runtime.checkpoint.loading import stage_for
from planaria.runtime.checkpoint.stage_file import write_stage
from planaria.runtime.checkpoint.store import CheckpointStore, Manifest, stage_name
from planaria.runtime.engine.gauge import peaks
from planaria.runtime.engine.inline import InlineEngine
from planaria.runtime.engine.inline_replicas import Round, Verdicts
from planaria.runtime.engine.origin import START, Origin, run_started
from planaria.runtime.engine.prepare import Prepared, streams
from planaria.runtime.engine.runner import NonFinite, StageRunner
from planaria.runtime.engine.stopping import stop_asked

WORKER = "inline"


def train(
    prepared: Prepared, folder: Path, observer: Observer, origin: Origin = START, stop: Callable[[], bool] | None = None
) -> d.Finish:
    """Train in this process; how it ended.

    A fault that kills, stops or sticks a worker takes its node's state away: between two steps, because a step that
    loses a stage before its commit begins again. One that lies does so as on a fleet, but knows what all others say.
    Others have nothing to befall here. When a state cannot be rebuilt,
    the survivors are saved and the run ends. When ``stop``, which is asked between steps, says so, the run stops as
    after a signal.
    """
    config = prepared.config
    with _one_thread():
        engine = InlineEngine(prepared.run, *streams(config, prepared.dataset))
        if engine.rounds is not None:
            engine.rounds.slowed(prepared.trace)
        run = _InlineRun(config, folder, engine, observer, origin)
        observer.on_event(time.monotonic(), run_started(engine.resolved, origin))
        engine.step, engine.sample_offset = origin.step, origin.sample_offset(config)
        run.begin([node for node, stage in engine.stage.items() if stage in origin.load])
        rounds = engine.replicas is not None and bool(engine.replicas.exchange.interval)
        lies = Lies(prepared.trace, origin.next_fault, (*BEFORE_COMMIT, "commit") if rounds else BEFORE_COMMIT)
        agreed = engine.replicas is not None and engine.replicas.exchange.interval == 0 and engine.rounds is None
        losses = Losses(prepared.trace, origin.next_fault, before_commit(agreed))
        ending = _lead(run, losses, lies, stop)
        run.tell(ending)
        run.tell_peaks()
    return ending


@contextmanager
def _one_thread() -> Iterator[None]:
    """Two OpenMP threads beside one busy neighbour are many times slower than one. The caller's number comes back."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _lead(run: _InlineRun, losses: Losses, lies: Lies, stop: Callable[[], bool] | None) -> d.Finish:
    """Step by step to the end."""
    try:
        with stop_asked(stop) as asked:
            while run.engine.step < run.config.train.steps:
                while nodes := losses.next(run.engine.step, committed=False):
                    if reason := run.strike(nodes):
                        return d.Finish(outcome="cannot", reason=reason)
                if reason := asked() or run.observer.trouble:
                    break
                step = run.engine.step
                run.train(lies)
                run.lie(lies.next(step, committed=True))
                while nodes := losses.next(step, committed=True):
                    if reason := run.strike(nodes):
                        return d.Finish(outcome="cannot", reason=reason)
                if run.engine.step > step:  # not rolled back
                    run.conclude()
            if unsaved := run.save_at_last(list(run.engine.runners)):
                return d.Finish(outcome="failed", reason=unsaved)
            if run.engine.step < run.config.train.steps:
                return d.Finish(outcome="stopped", reason=reason)
            return d.Finish(outcome="finished")
    except NonFinite as error:
        return d.Finish(outcome="failed", reason=str(error))


class _InlineRun:
    """Tells the observer of an inline run what a fleet would have told."""

    def __init__(
        self, config: RunConfig, folder: Path, engine: InlineEngine, observer: Observer, origin: Origin
    ) -> None:
        self.config, self.engine, self.observer, self.origin = config, engine, observer, origin
        self.store = CheckpointStore(folder / "checkpoints")

    def begin(self, nodes: Iterable[int]) -> None:
        """Give ``nodes`` the state that the run starts from."""
        states = {}
        for node in nodes:
            stage = self.engine.stage[node]
            if stage in self.origin.load:
                states[node] = self._read(self.store.folder / self.origin.load[stage], node)
            else:
                states[node] = StageRunner(self.config, stage).state()
        self.engine.become(states)

    def _read(self, folder: Path, node: int) -> StageState:
        """A node's own state if the checkpoint is of as many replicas, otherwise its stage of the one model."""
        stage = self.engine.stage[node]
        replica = self.engine.resolved.arrangement.nodes(stage).index(node)
        return stage_for(folder, self.config, stage, replica)

    def tell(self, decision: d.Decision) -> None:
        self.observer.on_decision(time.monotonic(), decision)

    def tell_peaks(self) -> None:
        """How much memory all stages took together."""
        of_all = {"worker": WORKER, "node": -1, "stage": -1, "generation": 0, "step": self.engine.step}
        told = e.Worked.model_validate(of_all | {"spans": [], "sent_bytes": {}} | peaks()._asdict())
        self.observer.on_worked(time.monotonic(), told)

    def lie(self, begun: Iterable[tuple[int, Fault]]) -> None:
        """These nodes lie from now on."""
        for number, fault in begun:
            lie = lie_of(fault.attack, fault.strength, fault.until, self.config.seed, number)
            corrupt(self.engine, fault.stage, lie)
            told = e.FaultInjected(
                worker=WORKER, node=fault.stage, signal="lie", step=self.engine.step, moment=fault.moment, number=number
            )
            self.observer.on_event(time.monotonic(), told)

    def strike(self, nodes: list[int]) -> str:
        """Lose the state of nodes and rebuild it; if that cannot be, save the survivors and say why."""
        step = self.engine.step
        for node in nodes:
            fault = e.FaultInjected(worker=WORKER, node=node, signal="state lost", step=step, moment="between steps")
            self.observer.on_event(time.monotonic(), fault)
        if step == self.origin.step:  # nothing is committed yet: the state can be had again
            self.begin(nodes)
            return ""
        saved = self.store.newest(whole_only=True)
        plan = self.engine.lose(nodes, self.origin.step if saved is None else saved.step)
        if plan.rollback == "disk":
            self._roll_back()
        elif plan.rollback == "memory":
            self.tell(d.Form(generation=0, step=self.engine.step, outcome="recalled", members=[], links=[]))
        if plan.reason and (unsaved := self.save_at_last([n for n in self.engine.runners if n not in nodes])):
            return f"{plan.reason}; what is left could not be saved: {unsaved}"
        return plan.reason

    def _roll_back(self) -> None:
        """All stages go back to the last checkpoint of this run, or to where it began."""
        saved = self.store.newest(whole_only=True)
        if saved is None or saved.step < self.origin.step:
            self.engine.step = self.origin.step
            self.begin(self.engine.runners)
        else:
            self.engine.step = saved.step
            self.engine.become({node: self._read(saved.folder, node) for node in self.engine.stage})
        self.tell(d.Form(generation=0, step=self.engine.step, outcome="rolled back", members=[], links=[]))

    def train(self, lies: Lies) -> None:
        """Train one step, after a validation if one is due; with the lies that begin in it."""
        every, step = self.config.train.eval_every, self.engine.step
        if every and step % every == 0:
            self._evaluate()
        self.tell(d.RunStep(generation=0, step=step))
        self.lie(lies.next(step, committed=False))
        result = self.engine.train_step()
        first = frozenset(self.engine.there.nodes(stage)[0] for stage in self.engine.there.stages)
        self._judged(step, result.verdicts, first)
        for round in result.rounds:
            self._judged(round.number, round.verdicts, round.first)
            self._settled(round)
        for stage, norm in result.grad_norms.items():
            self._ready("train", stage, step, result.loss if stage == 0 else None, norm)
        self.tell(d.Commit(generation=0, step=step, progress=step))
        self._judged(step, result.committed, first)

    def conclude(self) -> None:
        """What a step ends with: the last validation, and a checkpoint when one is due."""
        every = self.config.train.eval_every
        done = self.engine.step == self.config.train.steps
        if done and every:
            self._evaluate()
        interval = self.config.checkpoint.every
        assert interval != "best", "needs the fleet's own saves"
        if not done and interval and self.engine.step % interval == 0:
            self.save(list(self.engine.runners))

    def _evaluate(self) -> None:
        step, replicas = self.engine.step, self.engine.replicas
        self.tell(d.RunStep(generation=0, step=step, mode="evaluate"))
        if replicas is None:
            self._ready("evaluate", 0, step, self.engine.evaluate())
            return
        losses, consensus = self.engine.evaluate_replicas(), self.engine.evaluate_consensus()
        told = e.ReplicasEvaluated(step=step, losses=losses, consensus=consensus, spread=replicas.spread())
        self.observer.on_event(time.monotonic(), told)
        self._ready("evaluate", 0, step, consensus)

    def _judged(self, round: int, verdicts: Verdicts, first: frozenset[int]) -> None:
        """What was refused in this round, by whom; what each offer counted and what became of messages, told by the
        ``first`` nodes."""
        for node, verdict in sorted(verdicts.items()):
            stage = self.engine.stage[node]
            at = {"worker": WORKER, "node": node, "stage": stage, "generation": 0, "round": round}
            for kind, said in verdict.told(first=node in first):
                self.observer.on_event(time.monotonic(), e.EVENT.validate_python(kind(**at, **said)))

    def _settled(self, round: Round) -> None:
        assert self.engine.replicas is not None
        told = e.RoundSettled(
            step=self.engine.step,
            number=round.number,
            groups=[list(group) for group in round.groups],
            blocking_bytes=round.blocking_bytes,
            prefetched_bytes=round.prefetched_bytes,
            spread=self.engine.replicas.spread(),
        )
        self.observer.on_event(time.monotonic(), told)

    def _ready(self, mode: e.Mode, stage: int, step: int, loss: float | None, norm: float | None = None) -> None:
        ready = e.StageReady(worker=WORKER, stage=stage, generation=0, step=step, mode=mode, loss=loss, grad_norm=norm)
        self.observer.on_event(time.monotonic(), ready)

    def save_at_last(self, nodes: list[int]) -> str:
        """Save these nodes at the end of the run, and try that several times; why it cannot be, empty if it can."""
        for again in range(LAST_TRIES):
            if again:
                time.sleep(AGAIN_S)
            failure = self.save(nodes)
            if not failure:
                return ""
        newest = self.store.newest(whole_only=True)
        left = "there is no checkpoint" if newest is None else f"the newest checkpoint is {newest.folder.name}"
        return f"the last save failed {LAST_TRIES} times: {failure}; {left}"

    def save(self, nodes: list[int]) -> str:
        """Write what these nodes hold as the checkpoint of the present step; why that could not be, empty if it could.

        The run goes on without it.
        """
        step = self.engine.step
        try:
            self._save(nodes)
        except OSError as error:
            self.store.discard_unfinished(step)
            detail = str(error) if error.errno is None else refused(self.store.folder / folder_name(step), error)
            failed = e.SaveFailed(worker=WORKER, stage=-1, generation=0, step=step, detail=detail)
            self.observer.on_event(time.monotonic(), failed)
            return detail
        return ""

    def _save(self, nodes: list[int]) -> None:
        """:raises OSError: when a file cannot be written."""
        step, count = self.engine.step, self.config.pipeline.stages
        there = self.engine.resolved.arrangement.of(nodes)
        stages, replicas, several = list(there.stages), self.engine.replicas, self.config.exchange.replicas
        digests: dict[str, str] = {}
        weights: dict[int, dict[int, str]] = {}
        for replica in range(several):
            folder = self.store.part(step, several, replica, 0)
            for node in [n for n in self._of_replica(replica, there) if n in there.stage]:
                state = self.engine.runners[node].state() if replicas is None else replicas.state(node)
                stage = self.engine.stage[node]
                written = write_stage(folder, stage, step, state)
                digests[stage_name(stage, replica, several)] = written.sha256
                weights.setdefault(stage, {})[replica] = written.weights
        partial = len(stages) <= count
        every = self.engine.replicas.exchange.interval if self.engine.replicas else None
        standing = e.Standing(step=step, rounds=step // every if every else 0, inner=step % every if every else 0)
        manifest = Manifest(
            step=step,
            stages=stages,
            pipeline_stages=count,
            samples=self.engine.sample_offset + step * self.config.samples,
            replicas=several,
            standings=dict.fromkeys(range(several), standing) if several > 1 else {},
            digests=digests,
            model=self.config.model,
            exchange=self.config.exchange,
        )
        self.store.seal(folder_name(step, partial), manifest, self.config.checkpoint.keep)
        differ = unequal(weights) if replicas is not None and replicas.exchange.equal else []
        folder_of = folder_name(step, partial)
        self.tell(d.Seal(step=step, folder=folder_of, stages=stages, partial=partial, unequal=differ))

    def _of_replica(self, replica: int, there: Arrangement) -> list[int]:
        """The nodes that are saved in a replica's name; without replicas, the first of every stage."""
        if self.engine.replicas is not None:
            return self.engine.replicas.nodes(replica)
        return [there.nodes(stage)[0] for stage in there.stages]
