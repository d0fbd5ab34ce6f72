"""A simulated fleet of one replica: workers obey one message at a time, under the real apply and decide.

The workers know what real ones know: how many updates their state has seen, and through which steps they have kept
copies of which other stages. Every decision is checked against that instead of the controller's own records.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from itertools import pairwise

from planaria.control.checkpoint_decisions import LAST_TRIES, save_awaiting_retry
from planaria.control.decide import MAX_ATTEMPTS
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.facts.measurements import PassDurations
from planaria.control.facts.orders import ExitWorker
from planaria.control.state.replica import ReplicaState
from planaria.control.state.rollback import first_origin
from planaria.control.state.roster import MAX_FAILED_STARTS
from planaria.control.state.run import RunState
from planaria.recovery import make_chain
from planaria.recovery.chain import ChainPlan
from planaria.recovery.snapshot_schedule import SnapshotSchedule
from support.control.fleet_worker import FleetWorker, Gift, is_whole
from support.control.simulation import DISK, Simulation


class SimulatedFleet(Simulation):
    """Reports what a fleet would report, and checks everything the controller decides."""

    most_decisions = 30

    def __init__(self, started: e.RunStarted) -> None:
        self.stage_of = started.stage_of
        retaining = make_chain(started.recovery, started.stages).retaining
        self.by, rule = retaining or ("", SnapshotSchedule(0))
        self.every, self.slices = rule.every, rule.slices
        self.replans: list[d.Replan] = []
        self.machines: dict[str, tuple[int, float]] = {}
        """worker → memory and seconds per layer that it reports when it joins"""
        self.alive: dict[str, FleetWorker] = {}
        self.gifts: set[Gift] = set()
        self.staleness: dict[int, int] = {}
        self.next_step = started.first_step
        self.around = started.routes
        """routes of microbatches when all nodes are present"""
        self.measured = 0
        """step of the last measurements"""
        self.saving: d.Save | None = None
        """the last order to save, unless a rollback abandoned that state"""
        self.files: dict[tuple[int, int], set[int]] = defaultdict(set)
        """generation and step of a save → stages written for it"""
        self.cannot: d.Unrecoverable | None = None
        self.ending: d.Finish | None = None
        super().__init__(started)

    @property
    def state(self) -> ReplicaState:
        """The only replica."""
        (replica,) = self.run.replicas.values()
        return replica

    # ---- events

    def pending(self) -> list[str]:
        """Return the workers that have something to do, and the names of threads that write."""
        busy = [w for w, p in self.alive.items() if not p.joined or p.orders]
        return busy + [w + DISK for w, p in self.alive.items() if p.writing]

    def work(self, worker: str) -> None:
        """Let ``worker`` carry out its next order and report."""
        me = self.alive[worker.removesuffix(DISK)]
        if worker.endswith(DISK):  # its worker may have moved to another node
            assert me.writing is not None
            save, me.writing = me.writing, None
            self._write(me, save, me.copied)
            return
        if not me.joined:
            me.joined = True
            memory, layer_s = self.machines.get(worker, (0, 0.0))
            joined = e.WorkerJoined(worker=worker, incarnation=me.incarnation, pid=1, memory=memory, layer_s=layer_s)
            self.happened(joined)
            return
        match me.orders.popleft():
            case ExitWorker():
                assert not me.writing, "a worker leaves while it writes a file"
                self.lose(worker)
            case d.Form() as form:
                self._take_place(me, form)
            case d.RunStep() as run if run.generation == me.generation:
                assert me.updates == run.step
                if run.mode == "train":
                    me.begin(run.step, self.every)
                loss, norm = (1.0 if me.stage == 0 else None), (1.0 if run.mode == "train" else None)
                self.report(me, e.StageReady, step=run.step, mode=run.mode, loss=loss, grad_norm=norm)
            case d.Commit() as commit if commit.generation == me.generation:
                assert me.updates == commit.step
                me.updates = commit.step + 1
                me.commit(commit.step, self.every, self.slices)
                for other in me.others:
                    me.kept[other].add(commit.step)
                self.report(me, e.StageCommitted, step=commit.step)
            case d.Save() as save:
                assert me.updates == save.step, "a stage without the state of this step is being saved"
                assert not me.writing, "two files at a time"
                me.dedupes = me.node in save.compared and not save.whole
                if save.background:
                    me.writing, me.copied = save, me.stage
                    self.report(me, e.StageCopied, step=save.step)
                else:
                    self._write(me, save, me.stage)

    def _write(self, me: FleetWorker, save: d.Save, stage: int) -> None:
        of = {"step": save.step, "generation": save.generation, "stage": stage}
        if me.dedupes:  # needs no disk
            self.report(me, e.StageSaved, **of, bytes=0, weights="as all")
            return
        if self.is_full():
            self.report(me, e.SaveFailed, **of, detail="disk full")
            return
        self.files[save.generation, save.step].add(stage)
        self.report(me, e.StageSaved, **of, bytes=1)

    def lose(self, worker: str) -> None:
        """Kill ``worker`` with its state and its pending reports."""
        lost = self.alive.pop(worker)
        self.happened(e.WorkerLost(worker=worker, incarnation=lost.incarnation, cause="connection", detail="killed"))

    def lose_node(self, node: int) -> None:
        """Kill the worker at ``node``, if there is one."""
        worker = self.state.holders.get(node)
        if worker in self.alive:
            self.lose(worker)

    def break_edge(self, pair: tuple[int, int], **values: object) -> None:
        """Let the worker at the first node report a broken edge to the second."""
        if worker := self.state.holders.get(pair[0]):
            self.report(self.alive[worker], e.EdgeBroken, **{"peer": pair[1], "detail": "reset"} | values)

    def find_plan(self) -> None:
        """Let the planner answer its oldest request."""
        nodes = self.replans.pop(0).nodes
        self.happened(e.Replanned(nodes=nodes, routes=detours(self.started, nodes), step_s=1.0, seconds=0.1))

    def measure(self, slow: Mapping[int, float], times: int = 3) -> None:
        """Report measurements ``times`` times: passes of one second, of ``slow[node]`` seconds at slow nodes."""
        for _ in range(times):
            self.measured += 2
            for node, worker in sorted(self.state.holders.items()):
                took = PassDurations(count=1, median_s=slow.get(node, 1.0))
                values = {"step": self.measured, "steps": 2, "seconds": 200.0, "waited": {}, "flows": {}}
                if worker in self.alive and self.state.holders.get(node) == worker and not self.run.over:
                    self.report(self.alive[worker], e.WorkerMeasurements, **values, passes={"forward": took})

    def expire_grace(self) -> None:
        self.happened(e.GraceExpired(generation=self.state.generation))

    def behave(self, most: int = 5000) -> None:
        """Run until no worker has anything left to do."""
        for _ in range(most):
            if self.pending():
                self.work(self.pending()[0])
            elif self.replans:
                self.find_plan()
            elif save_awaiting_retry(self.run) is not None:
                self.retry_save()
            elif self.state.broken_edges and not self.run.over:
                self.expire_grace()
            else:
                return
        raise AssertionError(f"still busy after {most} things: {self.run}")

    # ---- workers

    def _take_place(self, me: FleetWorker, form: d.Form) -> None:
        mine = next(m for m in form.members if m.worker == me.name)
        if isinstance(mine.source, d.Keep):
            assert (me.node, me.updates) == (mine.node, form.step), "a worker keeps the state of another step"
        elif isinstance(mine.source, d.Recall):
            if mine.source.file is not None:
                assert mine.source.file == self.started.recalled_from, "the order names a file that does not exist"
                assert mine.node in self.started.snapshot_nodes, "the order is for a node without a file"
                me.node, me.retains = mine.node, mine.source.file.step
            assert (me.node, me.retains) == (mine.node, mine.source.step), "a worker lacks the snapshot it is to load"
            assert mine.source.step == form.step
        else:
            me.kept.clear()
            me.retains = -1
        if any(not isinstance(m.source, d.Keep) for m in form.members):
            me.pending, me.anew = -1, True
        me.node, me.stage, me.generation, me.updates = mine.node, mine.stage, form.generation, form.step
        me.others = {m.stage for m in form.members} - {mine.stage}
        if isinstance(mine.source, d.Rebuild):
            me.updates = None
            me.wants = {(form.generation, mine.node, donor) for donor in mine.source.donors}
        if isinstance(mine.source, d.Handover):
            me.updates, me.wants = None, {(form.generation, mine.node, d.PREDECESSOR)}
        me.owes = [m for m in form.members if isinstance(m.source, d.Rebuild) and me.node in m.source.donors]
        assert not me.owes or not isinstance(mine.source, d.Rebuild), "a donor without a state"
        if me.updates is not None:
            self._give(me)
            self.report(me, e.Linked, link_s=0.0)
        self.gifts_arrive(form)

    def gifts_arrive(self, form: d.Form) -> None:
        """Let each worker that has everything it waited for in this generation continue, perhaps as a donor."""
        for _ in form.members:
            for name, other in list(self.alive.items()):
                if (other.generation, other.updates) == (form.generation, None) and other.wants <= self.gifts:
                    other.updates = form.step
                    source = next(m.source for m in form.members if m.worker == name)
                    if isinstance(source, d.Rebuild) and source.by == self.by:
                        other.retains = form.step
                    self._give(other)
                    self.report(other, e.Linked, link_s=0.0)

    def _give(self, me: FleetWorker) -> None:
        """Send states to workers that rebuild their stages; a donor must have them."""
        for member in me.owes:
            if isinstance(member.source, d.Rebuild):
                steps, by = me.kept[member.stage], member.source.by
                whole = me.stage == member.stage if by == d.PEER else True
                if by == self.by:
                    whole = me.retains == me.updates
                assert whole and is_whole(self.started.recovery, by, member.stage, steps), (
                    f"node {me.node} has nothing whole of stage {member.stage}"
                )
                self.gifts.add((me.generation, member.node, me.node))

    def carry_out(self, decision: d.Decision) -> None:
        """Deliver orders to workers, or start one."""
        match decision:
            case d.Spawn():
                self.alive[decision.worker] = FleetWorker(decision.worker, decision.incarnation, decision.host)
            case d.Form() | d.RunStep() | d.Commit() | d.Save():
                for worker in self.run.replicas[decision.replica].waiting:
                    self.alive[worker].orders.append(decision)
            case d.ExcludeMember():
                for worker in decision.workers:
                    self.alive[worker].orders = deque([ExitWorker()])
                    self.alive[worker].writing = None
            case d.Replan():
                self.replans.append(decision)
            case d.Seal() if self.is_full():
                self.report_seal_failed(decision)
                assert self.run.durable == self.before.durable, "a checkpoint that was not sealed counts as durable"
            case d.Discard():
                writing = [p for p in self.alive.values() if any(isinstance(order, d.Save) for order in p.orders)]
                assert not any(p.generation == self.state.generation for p in writing), (
                    "files are removed while a worker writes"
                )
                assert not any(p.writing for p in self.alive.values()), "files are removed while a worker writes"
            case d.Finish():
                self.alive.clear()
                self.replans.clear()

    # ---- checks

    def validate(self, decision: d.Decision, run: RunState) -> None:
        assert self.ending is None, "a decision after the end"
        (before,) = run.replicas.values()
        match decision:
            case d.Spawn():
                assert decision.worker not in self.alive
                old = self.before.workers.get(decision.worker)
                assert decision.incarnation == (1 if old is None else old.incarnation + 1)
            case d.Form():
                self._judge_form(decision, before)
            case d.RunStep():
                assert (decision.generation, decision.step) == (self.state.generation, self.next_step)
                self._judge_holders(decision.mode)
            case d.Commit():
                self.staleness = {node: age + 1 for node, age in self.staleness.items()}
                assert decision.generation == self.state.generation
                assert decision.step == self.next_step, "a step is committed twice, or omitted"
                assert self._reported_ready(decision) == set(self.state.holders.values())
                self.next_step += 1
            case d.Save():
                self.saving = decision
                assert decision.step == self.next_step
                last = self.cannot is not None or bool(self.run.stopping) or self.next_step == self.started.steps
                assert decision.background == (self.started.save_in_background and not last)
            case d.Seal():
                self._judge_seal(decision)
            case d.HandOverSlowStage():
                assert decision.worker == before.holders[decision.node]
                relieved = [f.worker for f in self.history if isinstance(f, d.HandOverSlowStage)]
                assert relieved.count(decision.worker) == 1, "a worker is relieved twice"
            case d.Reroute():
                plans = [f for f in self.history if isinstance(f, e.Replanned) and set(f.nodes) == set(self.stage_of)]
                self.around = plans[-1].routes
            case d.Unrecoverable():
                assert self.cannot is None
                self._judge_cannot(decision, before)
                self.cannot = decision
            case d.Finish():
                assert (decision.outcome == "cannot") == (self.cannot is not None and decision.outcome != "failed")
                assert decision.outcome != "finished" or self.next_step == self.started.steps
                assert not any(p.writing for p in self.alive.values()), "the run ends while a worker writes a file"
                if decision.outcome == "failed" and "last save" in decision.reason:
                    failed = [f for f in self.history if isinstance(f, e.SaveFailed) and f.step == self.next_step]
                    assert len(failed) >= LAST_TRIES, "given up too early"
                self.ending = decision

    def _judge_form(self, form: d.Form, before: ReplicaState) -> None:
        assert self.cannot is None
        assert form.generation > before.generation, "generations must grow"
        nodes, workers = [m.node for m in form.members], [m.worker for m in form.members]
        assert all(m.stage == self.stage_of[m.node] for m in form.members)
        whole = nodes == list(self.stage_of)
        assert (form.outcome == "skipping") == (not whole) or form.outcome == "handed over"
        if not whole:
            assert self.started.recovery.meanwhile == "skip"
            assert nodes == sorted(set(nodes))
            assert self.started.arrangement or (nodes[0] == 0 and len(nodes) > 1)
            assert before.holders.keys() <= set(nodes), "a node that has a worker is left out"
        if self.started.arrangement:
            assert {m.stage for m in form.members} == set(self.stage_of.values()), "a schedule leaves out no stage"
            assert form.routes == (self.around if whole else detours(self.started, nodes))
        assert len(set(workers)) == len(workers), "two nodes for one worker"
        assert all(self.alive[w].joined for w in workers)
        plan = self._answer(before)
        assert not plan.reason, "the controller continues although no strategy can recover"
        saved = self.before.durable.positions[0].step
        recalled = plan.rollback == "memory" and before.memory is not None and before.memory.step >= saved
        assert (form.outcome == "recalled") == recalled, (form, plan, before)
        assert (form.outcome == "rolled back") == (plan.rollback is not None and not recalled), (form, plan, before)
        if recalled:
            self._judge_recall(form, before, plan)
        elif plan.rollback:
            self._judge_rollback(form, before)
        else:
            sources = {m.node: m.source for m in form.members if isinstance(m.source, d.Rebuild)}
            begins = {self.stage_of[n]: source for n, source in before.origins.items() if n in before.holders}
            lost = before.lost - before.handover_from.keys()
            for member in (m for m in form.members if m.node in lost and m.node not in sources):
                assert member.source == begins[member.stage], (
                    "a lost node starts from another state than the other nodes of its stage"
                )
            for node, source in sources.items():
                stage = self.stage_of[node]
                how = plan.rebuilt.get(stage, (d.PEER, (stage,)))
                assert (source.by, tuple(self.stage_of[donor] for donor in source.donors)) == how
                assert set(source.donors) <= set(nodes) - lost, "a donor that is lost or absent"
        self.staleness |= {m.node: 0 for m in form.members if not isinstance(m.source, d.Keep)}
        assert form.step == self.next_step
        assert {(link.low, link.high) for link in form.links} == self._edges(set(nodes))
        for link in form.links:  # a new holder opens new edges
            if before.links.get((link.low, link.high)) == link.id:
                assert {link.low, link.high} <= before.holders.keys()

    def _judge_recall(self, form: d.Form, before: ReplicaState, plan: ChainPlan) -> None:
        """All go back to the same snapshot; workers without their part get it from others."""
        assert before.memory is not None
        for member in form.members:
            donors = plan.rebuilt.get(member.stage)
            if donors is not None:
                assert isinstance(member.source, d.Rebuild) and member.source.by == donors[0]
            elif member.node == self._listed[member.stage][0]:
                assert isinstance(member.source, d.Recall)
                assert (member.source.by, member.source.step) == (self.by, before.memory.step)
            else:
                assert member.source == d.Rebuild(by=d.PEER, donors=[self._listed[member.stage][0]])
        self.next_step = before.memory.step

    @property
    def _listed(self) -> list[list[int]]:
        """Nodes by stage."""
        return self.started.arrangement or [[node] for node in self.stage_of]

    def _judge_rollback(self, form: d.Form, before: ReplicaState) -> None:
        """All go back to the newest complete checkpoint, or to the start of the run."""
        self.saving = None
        sources = {m.node: m.source for m in form.members}
        durable = self.before.durable
        if not durable.folder:
            assert sources == {node: first_origin(self.started, stage) for node, stage in self.stage_of.items()}
        else:
            assert set(sources.values()) == {d.Load(folder=durable.folder)}
        begun = self.started.first_step if self.started.durable_step is None else self.started.durable_step
        self.next_step = begun if durable.step < 0 else durable.step

    def _answer(self, before: ReplicaState) -> ChainPlan:
        """Return the strategies' plan for the lost stages by what the controller knows.

        If it assumes too much, a donor lacks its state; only skipped stages allow it to assume too little.
        """
        skipped = any(isinstance(fact, d.Form) and fact.outcome == "skipping" for fact in self.history)
        assert skipped or before.staleness == self.staleness
        chain, remember = make_chain(self.started.recovery, self.started.stages), None
        if before.memory is not None:
            for node in before.memory.nodes - before.origins.keys():
                assert self.alive[before.holders[node]].retains == before.memory.step, "not all remember the same step"
            remember = {self.stage_of[n] for n in before.memory.nodes if n == self._listed[self.stage_of[n]][0]}
        return chain.plan(self._gone(before), before.staleness, remember)

    def _gone(self, before: ReplicaState) -> frozenset[int]:
        """Return the stages whose state no worker has."""
        alive = {self.stage_of[node] for node in before.holders.keys() - before.lost}
        return frozenset(self.stage_of[node] for node in before.lost - before.handover_from.keys()) - alive

    def _judge_cannot(self, cannot: d.Unrecoverable, before: ReplicaState) -> None:
        """No strategy applies, or the limit of attempts is reached."""
        if self.before.overdue:
            assert set(cannot.lost) == set(self.stage_of.values()) - set(before.stateful.stages) != set()
            return
        if self.before.relays_given_up:
            assert cannot.reason.startswith("no relay has answered") and self.before.cut_off
            return
        if before.attempts >= MAX_ATTEMPTS or (self.before.failed_starts >= MAX_FAILED_STARTS and before.vacant):
            return
        if not self.started.replace and before.vacant and not self._answer(before).reason:
            assert "fleet.replace = false" in cannot.reason
            return
        assert cannot.lost == sorted(self._gone(before))
        assert (why := self._answer(before).reason) and cannot.reason.startswith(why)

    def _edges(self, present: set[int]) -> set[tuple[int, int]]:
        """Return the edges of routes around absent nodes, validations, first nodes of stages and hosts of copies."""
        walks = [[node for node in route if node in present] for route in self.around]
        if self.started.arrangement and present != self.stage_of.keys():
            walks = detours(self.started, sorted(present))
        held = dict(enumerate(self._listed))
        first = {stage: next(n for n in held[stage] if n in present) for stage in held if present & {*held[stage]}}
        spine = [first[stage] for stage in sorted(first)]
        walks += [[*spine, spine[0]], *([first[self.stage_of[node]], node] for node in present)]
        pairs = [*self.started.extra_edges, *(pair for walk in walks for pair in pairwise(walk))]
        return {(min(p), max(p)) for p in pairs if set(p) <= present and p[0] != p[1]}

    def _judge_holders(self, mode: str) -> None:
        """Every node (in training: every node that is not skipped) has one living worker with this step's state."""
        holders = self.state.holders
        absent = self.state.skipped if mode == "train" or self.started.arrangement else set()
        assert holders.keys() == self.stage_of.keys() - absent
        assert len(set(holders.values())) == len(holders)
        for node, worker in holders.items():
            assert (self.alive[worker].node, self.alive[worker].updates) == (node, self.next_step)

    def _reported_ready(self, commit: d.Commit) -> set[str]:
        """Return the workers that reported the step ready in the commit's generation since the last order to run."""
        trained = commit.generation, commit.step, "train"
        workers: set[str] = set()
        for fact in self.history:
            if isinstance(fact, d.RunStep):
                workers.clear()
            elif isinstance(fact, e.StageReady) and (fact.generation, fact.step, fact.mode) == trained:
                workers.add(fact.worker)
        return workers

    def _judge_seal(self, seal: d.Seal) -> None:
        assert self.saving is not None and seal.step == self.saving.step, "an abandoned checkpoint is sealed"
        assert seal.step == self.next_step or self.saving.background
        written = self.files[self.saving.generation, self.saving.step]
        assert set(seal.stages) <= written, "a stage is sealed that no worker wrote"
        assert not any(p.writing for p in self.alive.values()), "files are removed while a worker writes"
        whole = seal.stages == list(range(self.started.stages + 1))
        assert seal.partial == (not whole)
        assert whole or self.cannot is not None


def detours(started: e.RunStarted, nodes: list[int]) -> list[list[int]]:
    """Return routes over the remaining nodes: the first of its stage replaces an absent node."""
    stage = started.stage_of
    first = {stage[node]: node for node in reversed(nodes)}
    return [[node if node in nodes else first[stage[node]] for node in route] for route in started.routes]
