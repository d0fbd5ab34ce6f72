"""Reference engine: all stages in this process, without controller and workers, in one fixed topological order.

The arms of ``planaria compare`` run on it, step by step. Tests compare the losses of both other engines (``engine =
"inline"`` and ``"fleet"``) with its own, bit by bit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from torch import Tensor

from planaria.common.memory_pool import keep_freed_memory
from planaria.config.schema import RunConfig
from planaria.control.facts.decisions import PEER
from planaria.control.state.memory_snapshots import MemorySnapshot
from planaria.control.state.replica import after_commit
from planaria.data.stream import Stream
from planaria.exchange.coded.coded_worker import coded_steps
from planaria.lab.reference.replicas import ReferenceReplicas, StageRounds
from planaria.lab.reference.rounds import ReferenceRounds, run_plan
from planaria.models.packing import pack, unpack
from planaria.models.state import StageState
from planaria.pipeline.plan.actions import Action, StepPlan
from planaria.pipeline.routing.arrangement import Arrangement
from planaria.recovery.base import Moment
from planaria.recovery.chain import ChainPlan, staleness_by_stage
from planaria.runtime.preparation.config_checks import require_device, require_sound
from planaria.runtime.resolved_run import ResolvedRun
from planaria.runtime.worker.gradient_sums import sum_shares
from planaria.runtime.worker.plan_execution import nodes_sharing_parameters
from planaria.runtime.worker.recovery_copies import StageCopies, rebuild_inputs
from planaria.runtime.worker.runner import StageRunner
from planaria.runtime.worker.step_samples import StepData, StepInputs, batches, learned_targets, lengths, masks


@dataclass(frozen=True)
class StepResult:
    """A committed step and its mean loss in nats."""

    step: int
    loss: float
    rounds: list[StageRounds] = field(default_factory=list)
    """rounds of the replicas' exchange settled after this step"""


class ReferenceEngine:
    """A replica, or several, in one process. ``step`` is the number of committed steps.

    State is kept by node; if every stage has one node, that is the stage's number.
    """

    def __init__(self, config: RunConfig, train: Stream, validation: Stream | None = None) -> None:
        """Start from the weights of the seed; ``train`` and ``validation`` are streams (``planaria.streams(config)``).

        From then on the process keeps the memory that it frees (``planaria.common.memory_pool.keep_freed_memory``).

        :raises UserError: when settings of the recipe are inconsistent.
        """
        self.resolved, self.config = ResolvedRun(config, together=True), config
        self.step = 0
        self.sample_offset = 0
        """offset of all training samples' numbers, if earlier steps took more or fewer"""
        require_sound(self.resolved)
        require_device(config)
        keep_freed_memory()
        self.stage = self.resolved.arrangement.stage
        self.runners = {node: StageRunner(config, stage) for node, stage in self.stage.items()}
        self.copies = {node: self._empty_copies(node) for node in self.stage}
        self.copy_bytes = 0
        """bytes of all messages that maintain copies, so far"""
        self.moved_bytes = 0
        """bytes sent by donors to lost nodes, so far"""
        self.skipped: set[int] = set()
        """nodes excluded from training until they are rebuilt"""
        self.detour: Sequence[Sequence[int]] = ()
        """routes for the remaining nodes, instead of the schedule's"""
        several = config.exchange.replicas > 1
        self.replicas = ReferenceReplicas(config, self.resolved.arrangement, self.runners) if several else None
        coded = coded_steps(self.resolved)
        self.rounds = None if coded is None else ReferenceRounds(coded, self.runners)
        """rounds of coded steps"""
        self._ages = dict.fromkeys(self.runners, 0)
        self._caught_up: frozenset[int] = frozenset()
        self._train, self._validation = train, validation
        self._chain = self.resolved.recovery
        retaining = self._chain.retaining
        self._memory = None if retaining is None else MemorySnapshot(*retaining)

    @property
    def active_nodes(self) -> Arrangement:
        """The nodes that train."""
        return self.resolved.arrangement.of(self.stage.keys() - self.skipped)

    def train_step(self) -> StepResult:
        """Run and commit one step."""
        plan = self.resolved.training(self.step, self.skipped, self.detour)
        active = self.active_nodes
        if self._memory is not None:
            self._memory = self._memory.begin(self.step)
        self._deliver("before")
        sample = self.sample_offset + self.step * self.config.samples
        if self.rounds is not None:
            self._run_rounds(self.rounds, self._train, sample)
        else:
            self._run_plan(plan, self._train, sample, train=True)
            self._agree(active)
        for node in active.stage:  # before the first `finish`, which synchronises with the device
            self.runners[node].clip()
        for node in active.stage:
            self.runners[node].finish()
        loss = self._loss(active)
        self._deliver("after")
        for node in active.stage:
            self.runners[node].commit(self.step)
            self.copies[node].commit(self.step)
        if self.replicas is not None:
            self.replicas.commit()
        self._age_copies()
        if self._memory is not None:
            self._memory = self._memory.commit(self.step, active.stage)
        rounds = [] if self.replicas is None else self.replicas.exchange_round(self.step + 1)
        committed = StepResult(self.step, loss, rounds)
        self.step += 1
        return committed

    def evaluate(self) -> float:
        """Return the mean validation loss over the recipe's validation microbatches and all replicas, in nats."""
        if self.replicas is None:
            return self._evaluate(self.active_nodes)
        return fmean(self.evaluate_replicas())

    def evaluate_replicas(self) -> list[float]:
        """Return the validation loss of each replica."""
        assert self.replicas is not None
        everywhere = self.resolved.arrangement
        return [self._evaluate(everywhere.of(self.replicas.nodes(r))) for r in range(self.replicas.count)]

    def _evaluate(self, active: Arrangement) -> float:
        assert self._validation is not None, "the engine was made without a validation stream"
        plan = self.resolved.validation(self.stage.keys() - active.stage.keys())
        self._run_plan(plan, self._validation, 0, train=False)
        return self._loss(active)

    def _loss(self, active: Arrangement) -> float:
        """Return the mean over data nodes: those of one replica share a loss, several replicas have their own."""
        losses = [loss for node in active.nodes(0) if (loss := self.runners[node].loss) is not None]
        return fmean(losses)

    def lose(self, nodes: Sequence[int], durable: int = -1) -> ChainPlan:
        """Lose the state of ``nodes`` and all copies there; rebuild them as the recipe's strategies specify.

        Return the plan for stages without a surviving node; others are copied from one. A rollback to memory resets all
        nodes and ``step``. The survivors are unchanged if the rollback is to disk, or nothing can be done. A checkpoint
        of a step (``durable``) newer than the memory is preferred. Nodes with damaged memory count as lost.
        """
        everywhere = self.resolved.arrangement
        nodes = [*nodes, *(n for n, copies in self.copies.items() if n not in nodes and not copies.intact())]
        alive = everywhere.of(self.stage.keys() - set(nodes) - self.skipped)
        lost, with_snapshot = frozenset(self.stage[node] for node in nodes) - set(alive.stages), None
        if self._memory is not None:
            self._memory = self._memory.without(nodes)
            with_snapshot = [s for s in everywhere.stages if everywhere.nodes(s)[0] in self._memory.nodes]
        plan = self._chain.plan(lost, staleness_by_stage(everywhere, alive, self._ages), with_snapshot)
        if plan.rollback == "memory" and self._memory is not None:
            if self._memory.step < durable:
                return replace(plan, rebuilt={}, rollback="disk")
            self._recall(self._memory, everywhere.of(self._memory.nodes))
            nodes = [node for node in self.stage if node not in self._memory.nodes]
            alive = everywhere.of(self._memory.nodes)
        if not plan.reason and plan.rollback != "disk":
            self._rebuild(nodes, plan, alive)
        return plan

    def _recall(self, memory: MemorySnapshot, active: Arrangement) -> None:
        for node in active.stage:
            self.runners[node].load(self.copies[node].export_snapshot().state)
        self.step = memory.step

    def _rebuild(self, nodes: Sequence[int], plan: ChainPlan, alive: Arrangement) -> None:
        """Give lost ``nodes`` a state, and restore their copies where possible."""
        rebuilt: dict[int, StageState] = {}
        by_strategy: dict[int, tuple[str, dict[int, StageState]]] = {}
        for node in nodes:
            stage = self.stage[node]
            by, stages = plan.rebuilt.get(stage, (PEER, (stage,)))
            donated = {donor: self._donated_state(by, stage, alive.nodes(donor)[0]) for donor in stages}
            if by == PEER:
                rebuilt[node] = donated[stage]
                if self.replicas is not None:
                    rebuilt[node].outer = self.replicas.outer[alive.nodes(stage)[0]].state_for_transfer(
                        to_successor=False
                    )
            else:
                inputs = rebuild_inputs(self.config, stage, self.step)
                if self._chain.control_strategy:
                    inputs = replace(inputs, before=self.runners[node].state())
                rebuilt[node] = self._chain.strategies[by].rebuild(stage, donated, inputs)
                by_strategy[node] = by, donated
        self.load_states(rebuilt)
        if self.replicas is not None:
            self.replicas.rebuilt([node for node in rebuilt if node not in by_strategy])
        for node, (by, donated) in by_strategy.items():
            self.copies[node].restore_copies(by, self.runners[node].state(), donated, self.step)
        if self._memory is not None:
            restored = [node for node, (by, _) in by_strategy.items() if by == self._memory.strategy]
            self._memory = replace(self._memory, nodes=self._memory.nodes.union(restored))

    def _donated_state(self, by: str, stage: int, donor: int) -> StageState:
        """Return the state that the node ``donor`` sends to a lost ``stage``, as received there."""
        own = self.runners[donor].state()
        if by == PEER:
            donated = own.trained
        else:
            donated = self._chain.strategies[by].donate(stage, own, self.copies[donor].kept(by, stage))
        flat = pack(donated)
        self.moved_bytes += flat.nbytes
        return unpack(flat)

    def load_states(self, states: Mapping[int, StageState]) -> None:
        """Load these states; the nodes' copies of other nodes start empty."""
        if self.replicas is not None and states.keys() == self.runners.keys():
            rounds = max(int(state.outer["rounds"]) if state.outer else 0 for state in states.values())
            self.replicas.restart(self.step if self.replicas.exchange.exchanges_gradients else rounds)
        for node, state in states.items():
            self.runners[node].load(state)
            self.copies[node] = self._empty_copies(node)
            self._ages[node] = 0
            if self.replicas is not None:
                self.replicas.start(node, state.outer)
        if self._memory is not None and states:
            self._memory = self._memory.form(states, ()).restart()
        self.skip(self.skipped - set(states), set(states))

    def skip(self, nodes: Collection[int], rebuilt: Collection[int] = ()) -> None:
        """Train without ``nodes`` until :meth:`load_states` restores them."""
        self.skipped = set(nodes)
        for copies in self.copies.values():
            copies.formed(set(rebuilt), self.skipped)

    def _age_copies(self) -> None:
        """Age all copies by one commit, by the rule of the run's record."""
        pairs = [pair for slot in self._chain.slots_on_nodes(self.resolved.arrangement) for pair in slot.copy.pairs]
        staleness, self._caught_up = after_commit(self._ages, self._caught_up, self.skipped, pairs)
        self._ages = dict(staleness)

    def _empty_copies(self, node: int) -> StageCopies:
        return StageCopies(self.resolved, node, self.resolved.arrangement, StageRunner)

    def _deliver(self, moment: Moment) -> None:
        """Deliver the messages of this moment of the step."""
        for node, copies in self.copies.items():
            if node in self.skipped:
                continue
            send = copies.messages_before_step if moment == "before" else copies.messages_after_gradient
            for host, message_id, message in send(self.step, self.runners[node]):
                self.copy_bytes += message.nbytes
                self.copies[host].take(self.step, message_id, message)

    def _agree(self, active: Arrangement) -> None:
        """Sum each stage's gradients over its nodes as workers do; several replicas use their exchange."""
        if self.replicas is not None:
            self.replicas.agree(self.step)
            return
        for nodes in dict.fromkeys(nodes_sharing_parameters(active, self.config.model, node) for node in active.stage):
            if len(nodes) > 1:
                total = sum_shares(self.runners[node].gradient_sums() for node in nodes)
                for node in nodes:
                    self.runners[node].load_gradient_sums(total)

    def _run_plan(self, plan: StepPlan, stream: Stream, first_sample: int, train: bool) -> None:
        samples = self._data(stream, first_sample, len(plan.routes))
        assert samples.batch is not None
        own = len(plan.routes) // (self.resolved.replicas_per_plan if train else 1)
        for node, runner in self.runners.items():
            batch, targets = samples.batch, samples.target_counts
            if train and self.replicas is not None:
                batch = self.replicas.read(node, batch, self.step)
            if train and targets is not None:
                targets = targets.at(node, plan, self.resolved.arrangement, self.resolved.lockstep)
            step = StepInputs(
                None if self.stage[node] else batch,
                train,
                own,
                samples.masks,
                target_counts=targets,
                lengths=samples.lengths,
                first_sample=first_sample,
            )
            runner.begin(step)
            self.copies[node].begin(samples)

        def observe(action: Action, out: Tensor) -> None:
            if train:
                self.copies[action.node].observe_forward(action, out)

        run_plan(plan, self.runners, observe)

    def _run_rounds(self, rounds: ReferenceRounds, stream: Stream, first_sample: int) -> None:
        samples = self._data(stream, first_sample, rounds.microbatches)
        for copies in self.copies.values():
            copies.begin(samples)
        rounds.run(self.step, lambda stage: samples._replace(batch=None) if stage else samples)

    def _data(self, stream: Stream, first_sample: int, microbatches: int) -> StepData:
        size = self.config.pipeline.microbatch_size
        batch = batches(stream, first_sample, size)
        document_masks = masks(self.config.data, stream, batch, first_sample, size)
        counts, ends = learned_targets(stream, first_sample, size, microbatches), lengths(stream, first_sample, size)
        return StepData(batch, document_masks, counts, ends, first_sample)
