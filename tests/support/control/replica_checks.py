"""Invariants of the controller's decisions for several replicas, checked against the workers' true states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.facts.events import ReplicaPosition
from planaria.control.state.replica import ReplicaState
from planaria.control.state.run import RunState
from planaria.exchange.registry import make_exchange
from planaria.exchange.robust.combining import combine
from support.control.replica_worker import Content, ReplicaWorker, vector

Ledger = dict[int, list[int]]
"""replica → the blocks it has committed, in order"""


@dataclass
class Saved:
    """A checkpoint: progress and used blocks of each replica, and the stages on disk."""

    positions: Mapping[int, ReplicaPosition]
    ledger: Ledger
    content: dict[tuple[int, int], Content] = field(default_factory=dict)
    """replica, stage → state"""


class Truth:
    """The used samples, the files on disk and the checks of every decision."""

    def __init__(self, started: e.RunStarted) -> None:
        self.started = started
        floor, beyond = started.used
        self.before = {*range(floor), *beyond}
        self.ledger: Ledger = {r: [] for r in range(started.max_replicas)}
        positions = {r: started.position_of(r) for r in range(started.replicas)}
        self.durable = Saved(positions, {r: [] for r in range(started.replicas)})
        self.sealed_over: tuple[Saved, Saved | None] = self.durable, None
        """the durable checkpoint, and the one of the same name, before the last seal"""
        self.saving: Ledger = {}
        self.parts: dict[tuple[int, int, int], dict[int, tuple[Content, int, ReplicaPosition | None]]] = {}
        """step, replica, generation → stage → written state, its step, and its standing if the worker can know it"""
        self.folders: dict[str, Saved] = {}
        self.generations: dict[int, int] = dict.fromkeys(range(started.max_replicas), started.first_generation)
        self.taken: dict[int, int] = {}
        """replica → block of the last step it was ordered to run"""
        self.ending: d.Finish | None = None
        for folder in set(started.checkpoint_of_stage.values()):
            self.folders[folder] = Saved(positions, {}, self._resumed(folder, positions))

    def _resumed(self, folder: str, positions: Mapping[int, ReplicaPosition]) -> dict[tuple[int, int], Content]:
        """Return the files of an earlier part of the run. Replicas at the same round had the same outer state."""
        return {
            (r, stage): Content((folder, r), tuple(range(positions[r].rounds)))
            for r in positions
            for stage in range(self.started.stages + 1)
        }

    def beginnings(self, source: d.Source, replica: int, stage: int) -> list[Content]:
        """Return the states that another, still untrained stage can have beside one that begins from ``source``."""
        folders = {source.folder} if isinstance(source, d.Load) else {*self.started.checkpoint_of_stage.values()}
        loaded = [self.folders[folder].content[replica, stage] for folder in folders]
        return loaded + [Content()] * (len(self.started.checkpoint_of_stage) <= self.started.stages)

    @property
    def used(self) -> set[int]:
        return self.before.union(*self.ledger.values())

    def validate(
        self, decision: d.Decision, before: RunState, after: RunState, workers: Mapping[str, ReplicaWorker]
    ) -> None:
        """Check a decision and the controller's state after it against the truth."""
        assert self.ending is None, "a decision after the end"
        match decision:
            case d.Spawn():
                assert decision.worker not in workers
            case d.Form():
                self._judge_form(decision, before, workers)
            case d.RunStep():
                self._judge_step(decision, after, workers)
            case d.Commit():
                block = self.taken[decision.replica]
                assert block not in self.used, f"block {block} is committed twice"
                assert decision.generation == after.replicas[decision.replica].generation
                self.ledger[decision.replica].append(block)
            case d.Save():
                if before.saving < 0:
                    self.saving = {}
                self.saving[decision.replica] = list(self.ledger[decision.replica])
            case d.Seal():
                self._judge_seal(decision, before)
            case d.Adopt():
                others = [r for n, r in before.live.items() if n != decision.replica and self._whole(r, workers)]
                assert others, "no replica has the state that one is to adopt"
            case d.Disband() | d.Unrecoverable():
                self._judge_end(decision, before)
            case d.Finish():
                self._judge_finish(decision, before)
        if not isinstance(decision, d.Finish) and not any(r.phase == "commit" for r in after.replicas.values()):
            assert self.used == set(range(after.allocation.used.floor)) | after.allocation.used.beyond

    def _whole(self, replica: ReplicaState, workers: Mapping[str, ReplicaWorker]) -> bool:
        """Is every stage's state with its worker or in transit to it?"""
        return replica.held.stages == replica.arrangement.stages and all(
            node in replica.origins or node not in replica.lost for node in replica.holders
        )

    def _judge_form(self, form: d.Form, before: RunState, workers: Mapping[str, ReplicaWorker]) -> None:
        replica = before.replicas[form.replica]
        assert form.generation > max(self.generations.values()), "reports of two replicas could be confused"
        self.generations[form.replica] = form.generation
        assert [m.node for m in form.members] == list(replica.arrangement.stage)
        others = {w for r in before.live.values() if r.number != form.replica for w in r.holders.values()}
        assert not others & {m.worker for m in form.members}, "a worker holds two nodes"
        assert len({m.worker for m in form.members}) == len(form.members)
        assert all(workers[m.worker].joined for m in form.members)
        if form.outcome == "rolled back":
            saved = self.durable.positions[form.replica]
            assert (form.step, form.rounds, form.inner) == (saved.step, saved.rounds, saved.inner)
            self.ledger[form.replica] = list(self.durable.ledger[form.replica])
            return
        assert form.step == replica.step
        lent: set[int] = set()
        for member in form.members:
            donors = member.source.donors if isinstance(member.source, d.Rebuild) else []
            owners = {donor: r for donor in donors for r in before.replicas.values() if donor in r.arrangement.stage}
            assert owners.keys() == {*donors}
            for donor, owner in owners.items():  # a handover to the donor completes before it sends
                handed = owner.handover_from.keys() if owner is replica else set()
                assert donor in (owner.holders.keys() - owner.lost) | handed
            lent |= {owner.number for owner in owners.values()}
        copied = all(isinstance(m.source, d.Rebuild) and m.source.by == d.PEER for m in form.members)
        assert not copied or len(lent) == 1, "a replica is copied from several"

    def _judge_step(self, order: d.RunStep, after: RunState, workers: Mapping[str, ReplicaWorker]) -> None:
        replica = after.replicas[order.replica]
        assert order.generation == replica.generation
        assert replica.held.stages == replica.arrangement.stages
        for node, worker in replica.holders.items():
            me = workers[worker]
            assert me.content is not None, "a worker runs without a state"
            assert (me.node, me.step, me.generation) == (node, order.step, order.generation)
        if order.mode == "train":
            assert order.block not in self.used, "samples are used twice"
            assert all(b != order.block for r, b in after.allocation.in_progress.items() if r != order.replica)
            self.taken[order.replica] = order.block

    def _judge_seal(self, seal: d.Seal, before: RunState) -> None:
        assert seal.partial == (len(seal.stages) <= self.started.stages)
        assert not seal.partial or any(r.unrecoverable_reason for r in before.live.values())
        positions = seal.positions if self.started.replicas > 1 else before.positions
        assert before.live.keys() <= positions.keys()
        saved = Saved(positions, {r: self.saving[r] for r in positions})
        for number, standing in positions.items():
            part = self.parts[seal.step, number, before.replicas[number].saved_generation]
            assert set(seal.stages) <= part.keys(), "a stage is sealed that no worker wrote"
            for stage in seal.stages:
                content, step, where = part[stage]
                assert step == standing.step, "what is saved is not of this step"
                known = standing.model_copy(update={"settled_at": []})  # workers do not know when they settled
                assert where in (None, known) or seal.partial, "what is saved is not of this round"
                saved.content[number, stage] = content
        used = self.before.union(*({**self.ledger, **saved.ledger}).values())
        assert used == {*range(seal.first_block), *seal.blocks_ahead}, "a checkpoint does not match its samples"
        self.sealed_over = self.durable, self.folders.get(seal.folder)
        self.folders[seal.folder] = saved
        if not seal.partial:
            self.durable = saved

    def unseal(self, seal: d.Seal) -> None:
        """Restore the state before a seal that failed."""
        self.durable, before = self.sealed_over
        self.folders.pop(seal.folder)
        if before is not None:
            self.folders[seal.folder] = before

    def _judge_end(self, decision: d.Disband | d.Unrecoverable, before: RunState) -> None:
        """A replica must not give up while another has the lost stages."""
        assert isinstance(decision, d.Disband) == (len(before.live) > 1)
        if "cannot" not in decision.reason:
            return
        replica = before.replicas[decision.replica]
        there, lost = set(replica.stateful.stages), set(replica.arrangement.stages)
        others = [set(r.stateful.stages) for n, r in before.live.items() if n != decision.replica]
        if not make_exchange(self.started.exchange).synchronised:
            assert not any(lost - there <= other for other in others), "a replica gives up beside one that could help"

    def _judge_finish(self, finish: d.Finish, before: RunState) -> None:
        self.ending = finish
        if finish.outcome == "finished":
            assert self.used >= set(range(self.started.last_block)), "samples are omitted"
        if finish.outcome in ("finished", "stopped"):
            for number, replica in before.live.items():
                assert self.durable.positions[number] == replica.position, "the end is not saved"
                assert self.durable.ledger[number] == self.ledger[number]

    def check_weighed(self, order: d.Settle, me: ReplicaWorker) -> None:
        """The weights of updates must follow from whole vectors, of which each node has only a part."""
        rule = make_exchange(self.started.exchange)
        weighing = rule.weighing
        if rule.decoupled:
            assert all([*weights] == order.contributors for weights in order.counted.values())
            assert len({*map(str, order.counted.values())}) <= 1 and not order.rivals
            return
        if weighing is None or len(order.members) < weighing.robust.min_members():
            assert not order.counted and not order.rivals
            return
        stages, members = range(self.started.stages + 1), sorted(order.members)
        whole = [torch.cat([vector(member, order.round, stage) for stage in stages]).double() for member in members]
        of, mix = weighing.robust, weighing.robust.mix
        expected = combine(of.rule, whole, mix, order.round).coefficients
        assert expected is not None and order.counted.keys() == set(members)
        assert order.counted[me.replica] == pytest.approx(dict(zip(members, expected.tolist(), strict=True)), abs=1e-9)
        if make_exchange(self.started.exchange).synchronised:
            assert all(of == order.counted[me.replica] for of in order.counted.values()), "members would diverge"

    def check_synchronised(self, run: RunState, workers: Mapping[str, ReplicaWorker]) -> None:
        """With a synchronised exchange, the same rounds give the same outer state."""
        if run.over or not make_exchange(self.started.exchange).synchronised:
            return
        outer: dict[tuple[int, int], tuple[object, ...]] = {}
        for replica in run.live.values():
            if replica.phase in ("link", "settle") or replica.broken or replica.open_round:
                continue
            for node, worker in replica.holders.items():
                content = workers[worker].content
                assert content is not None
                key = replica.rounds, replica.arrangement.stage[node]
                assert outer.setdefault(key, content.outer) == content.outer, "replicas have diverged"
