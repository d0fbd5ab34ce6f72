"""Replicas of the reference engine: their exchange as the recipe specifies, and their consensus model.

Each stage of a replica is a node. The exchange itself is pure (``exchange/``); this module applies it to runners.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from planaria.config.schema import RunConfig
from planaria.data.stream import BatchReader
from planaria.exchange.base import Update, UpdateWeights
from planaria.exchange.robust.equivocation import Exclusions, digest, find_equivocations, join_digests
from planaria.exchange.robust.suspicion import Suspicion, byzantine_bound
from planaria.exchange.robust.weighing import Products
from planaria.exchange.update_publisher import UpdatePublisher, vectors
from planaria.exchange.update_validation import invalid_updates
from planaria.models.state import StageState
from planaria.pipeline.routing.arrangement import Arrangement
from planaria.runtime.worker.outer_state import OuterState, UpdateReport
from planaria.runtime.worker.runner import NonFinite, StageRunner

Received = dict[int, dict[int, Update]]
"""node → the update received in a round from each replica of its group, itself included"""
Verdicts = dict[int, UpdateReport]
"""node → its verdict on the updates of a round"""


@dataclass(frozen=True)
class StageRounds:
    """One round of all stages; the groups are the same at every stage."""

    number: int
    groups: list[tuple[int, ...]]
    """groups of replicas"""
    blocking_bytes: int
    """bytes sent by all nodes that some node waited for"""
    prefetched_bytes: int
    verdicts: Verdicts = field(default_factory=dict)
    first: frozenset[int] = frozenset()
    """nodes that report for all that settled with them"""


@dataclass(frozen=True)
class _Pending:
    """A round in progress."""

    due: int
    """commits by which it must be settled"""
    round: StageRounds
    honest: Mapping[int, Update]
    """node → its correct update"""
    received: Received


class ReferenceReplicas:
    """The outer state of every node, and the rounds of the exchange."""

    def __init__(self, config: RunConfig, arrangement: Arrangement, runners: Mapping[int, StageRunner]) -> None:
        """:raises UserError: when the recipe's exchange is invalid."""
        self.outer = {node: OuterState(config.exchange) for node in runners}
        self.sources: dict[int, Callable[[BatchReader, int], BatchReader]] = {}
        """node → function of (batch, step) that returns its own batch, if a fault is injected into its source"""
        self.exchange = next(iter(self.outer.values())).exchange
        self._runners, self._arrangement = runners, arrangement
        self.count = config.exchange.replicas
        self._seed = config.seed
        self._pending: list[_Pending] = []
        self._round = 0
        self._suspicion = Suspicion()
        self._steps = 0
        """committed steps"""
        self._rejected: dict[int, set[int]] = {}
        """replica → replicas whose updates its nodes rejected in the current step"""
        self._replica = {
            node: index for stage in arrangement.stages for index, node in enumerate(arrangement.nodes(stage))
        }
        for node in runners:
            self.start(node, {})

    def restart(self, rounds: int) -> None:
        """Restart all nodes after ``rounds`` settled rounds; drop rounds in progress."""
        self._round = rounds
        self._pending.clear()

    def start(self, node: int, outer: Mapping[str, Tensor]) -> None:
        """Start a node whose weights were loaded, with the ``outer`` state that came with them, if any."""
        self.outer[node].begin(outer, self._runners[node].state().weights, self._round - len(self._pending))
        self.outer[node].publisher = UpdatePublisher()  # a rebuilt node is not Byzantine
        self.sources.pop(node, None)

    def read(self, node: int, batch: BatchReader, step: int) -> BatchReader:
        """Return the node's training batch of ``step``: ``batch``, unless a fault is injected into its source."""
        return self.sources[node](batch, step) if node in self.sources else batch

    def rebuilt(self, nodes: Sequence[int]) -> None:
        """Record that these nodes are copies of other nodes of their stages."""
        for stage in {self._arrangement.stage[node] for node in nodes}:
            for node in self._arrangement.nodes(stage):
                self.outer[node].after_member_change()

    def state(self, node: int) -> StageState:
        """Return a node's state that outlives a step; it shares memory."""
        return replace(self._runners[node].state(), outer=self.outer[node].settled.state())

    def agree(self, step: int = 0) -> None:
        """Exchange the gradients of ``step`` before they are clipped, if the recipe exchanges gradients.

        :raises NonFinite: when too many updates are invalid or contradictory.
        """
        if not self.exchange.exchanges_gradients:
            return
        honest = {node: self.outer[node].update(runner, self._replica[node]) for node, runner in self._runners.items()}
        _, received = self._exchange(honest, step)
        self._exclude_byzantine(received)
        self._rejected = {}
        for node, updates in received.items():
            verdict = self.outer[node].settle(updates, self._replica[node], self._runners[node])
            if verdict.rejected:
                self._rejected.setdefault(self._replica[node], set()).update(verdict.rejected)

    def _exclude_byzantine(self, received: Received) -> None:
        """Exclude replicas that sent different updates to others; a fleet repeats the step in that case."""
        if not self.exchange.detects_equivocation(self.count):
            return
        suspects = self._suspicion.examine(self._digests(received, range(self.count)), self.exchange)
        raised = self._suspicion.with_findings(suspects.all)
        if suspects.min_byzantine and (reason := raised.why_impossible(self.exchange)):
            raise NonFinite(reason)
        left_out = raised.exclusions(self.exchange).left_out
        for outer in self.outer.values():
            outer.left_out = left_out
        self._suspicion = raised

    def _findings(self, received: Received, party: Sequence[int]) -> Exclusions:
        """Return the replicas of a ``party`` with too many invalid updates before, or contradictory ones now."""
        invalid = self._suspicion.exclusions(self.exchange).invalid
        others = [replica for replica in party if replica not in invalid]
        if not self.exchange.detects_equivocation(len(others)):
            return Exclusions(invalid=invalid)
        return find_equivocations(self._digests(received, others), others, byzantine_bound(self.exchange))._replace(
            invalid=invalid
        )

    def _digests(self, received: Received, replicas: Iterable[int]) -> dict[int, dict[int, str]]:
        """Return receiver → sender → digest of the updates of all stages."""
        return {
            replica: join_digests(
                {r: digest(update) for r, update in received[node].items()} for node in self.nodes(replica)
            )
            for replica in replicas
        }

    def commit(self) -> None:
        self._suspicion = self._suspicion.end_round(self._steps, self._rejected, self.exchange)
        self._rejected, self._steps = {}, self._steps + 1
        for outer in self.outer.values():
            outer.commit()

    def exchange_round(self, commits: int) -> list[StageRounds]:
        """After ``commits`` steps, begin a round if one is due and settle those due; return the settled rounds."""
        every = self.exchange.interval
        if every and commits % every == 0:
            weights = {node: runner.state().weights for node, runner in self._runners.items()}
            honest = {node: self.exchange.update(self.outer[node].settled, fast) for node, fast in weights.items()}
            stage_rounds, received = self._exchange(honest, commits - 1)
            self._pending.append(_Pending(commits + self.exchange.overlap, stage_rounds, honest, received))
            for outer in self.outer.values():
                outer.publisher.sent()
        due = [pending for pending in self._pending if pending.due <= commits]
        self._pending = self._pending[len(due) :]
        return [self._settle(pending) for pending in due]

    def _exchange(self, honest: Mapping[int, Update], step: int) -> tuple[StageRounds, Received]:
        """Return the next round, in or after ``step``, and what each node receives; ``honest``: the correct updates."""
        groups = self.exchange.groups(self._round, range(self.count), self._seed)
        received: Received = {node: {} for node in self._runners}
        blocking = prefetched = 0
        for stage in self._arrangement.stages:
            nodes = self._arrangement.nodes(stage)
            for group in groups:
                sent_by = self._sent_updates({replica: nodes[replica] for replica in group}, honest, step)
                for sender, sent in sent_by.items():
                    for receiver, update in sent.items():
                        received[nodes[receiver]][sender] = update
                        blocking += _size(update.blocking) if receiver != sender else 0
                        prefetched += _size(update.prefetched) if receiver != sender else 0
        stage_rounds = StageRounds(self._round, groups, blocking, prefetched)
        self._round += 1
        return stage_rounds, received

    def _sent_updates(
        self, group: Mapping[int, int], honest: Mapping[int, Update], step: int
    ) -> dict[int, dict[int, Update]]:
        """Return sender → receiver → update in a ``group`` (replica → node); Byzantine senders know correct updates."""
        settled = {replica: self.outer[node].settled for replica, node in group.items()}
        true = [replica for replica, node in group.items() if not self.outer[node].publisher.is_byzantine(step)]
        sent = {}
        for replica, node in group.items():
            codec, number = self.exchange.codec(settled[replica]), settled[replica].rounds
            known = {} if replica in true else vectors({r: honest[group[r]] for r in true}, codec, number)
            others = [receiver for receiver in group if receiver != replica]
            publisher = self.outer[node].publisher
            sent[replica] = publisher.updates(honest[node], codec, (step, number), replica, others, known)
        return sent

    def _settle(self, pending: _Pending) -> StageRounds:
        """Settle a round as a fleet does: updates that any node at any stage rejects are omitted.

        A rejected replica settles alone or, if replicas must stay equal, copies one that has settled.
        """
        verdicts, first = {}, set()
        for node, updates in pending.received.items():
            codec, like = self.exchange.codec(self.outer[node].settled), pending.honest[node]
            others = {replica: update for replica, update in updates.items() if replica != self._replica[node]}
            verdicts[node] = UpdateReport(invalid_updates(others, like, codec))
        rejected = {replica for verdict in verdicts.values() for replica in verdict.rejected}
        exclusions = self._findings(pending.received, [r for r in range(self.count) if r not in rejected])
        rejected |= exclusions.left_out.keys()
        self._record_suspicions(pending.round.number, verdicts, exclusions, rejected)
        for node in (node for replica in set(range(self.count)) - rejected for node in self.nodes(replica)):
            left_out = {r: why for r, why in exclusions.left_out.items() if r in pending.received[node]}
            verdicts[node] = UpdateReport({**verdicts[node].rejected, **left_out})
        update_weights = {me: self._weigh_updates(pending, me, rejected) for me in range(self.count)}
        for node, updates in pending.received.items():
            me = self._replica[node]
            party = {replica: update for replica, update in updates.items() if replica not in rejected}
            if me in rejected or len(party) == 1:
                party = {me: pending.honest[node]}
            first |= {node} if me == min(party) else set()
            runner, outer = self._runners[node], self.outer[node]
            own = update_weights[me]
            weights = [] if own is None or runner.stage else [own]  # one stage reports for all
            rule = self.exchange.after_rejecting(0, weights.append, own)
            fast, outer.settled = rule.settle(outer.settled, runner.state().weights, party, me)
            compressed = pending.honest[node].compressed if len(party) > 1 else None
            verdicts[node] = replace(verdicts[node], weights=weights, compressed=compressed)
            runner.set_weights(fast)
        if self.exchange.synchronised and (left := [r for r in range(self.count) if r not in rejected]):
            for replica in rejected:
                self._copy(left[0], replica)
        return replace(pending.round, verdicts=verdicts, first=frozenset(first))

    def _weigh_updates(self, pending: _Pending, me: int, rejected: Collection[int]) -> UpdateWeights | None:
        """Return which updates count for the replica ``me`` in a round, if they are judged over all stages."""
        weighing, products = self.exchange.weighing, list[Products]()
        party = sorted(pending.received[self.nodes(me)[0]].keys() - rejected)
        if weighing is None or me in rejected or len(party) < 2:
            return None
        for node in self.nodes(me):
            outer, updates = self.outer[node].settled, {member: pending.received[node][member] for member in party}
            products.append(weighing.products(outer, weighing.decoded_values(outer, updates), me, party))
        return weighing.update_weights(products, party, me, pending.round.number)

    def _record_suspicions(
        self, number: int, verdicts: Verdicts, exclusions: Exclusions, rejected: Collection[int]
    ) -> None:
        """Record rejected updates and proven faults; a replica that copies another one reports nothing."""
        proved, reports = {*exclusions.byzantine, *exclusions.invalid}, dict[int, set[int]]()
        for node, verdict in verdicts.items():
            replica = self._replica[node]
            if replica not in rejected or not self.exchange.synchronised:
                reports.setdefault(replica, set()).update(verdict.rejected, proved - {replica})
        rejected = {replica: others for replica, others in reports.items() if others}
        self._suspicion = self._suspicion.end_round(number, rejected, self.exchange)

    def _copy(self, source_replica: int, target_replica: int) -> None:
        for source, target in zip(self.nodes(source_replica), self.nodes(target_replica), strict=True):
            self._runners[target].load(self._runners[source].state().trained)
            outer = self.outer[source].state_for_transfer(to_successor=False)
            self.outer[target].begin(outer, self._runners[target].state().weights, self.outer[source].settled.rounds)

    def spread(self) -> float:
        """Return the RMS distance of replicas' weights from their mean: √(Σ (w − w̄)² / (replicas · parameters))."""
        squares = count = 0.0
        for stage in self._arrangement.stages:
            states = [self._runners[node].state().weights for node in self._arrangement.nodes(stage)]
            for name in states[0]:
                stacked = torch.stack([state[name].double() for state in states])
                squares += float((stacked - stacked.mean(dim=0)).square().sum())
                count += stacked.numel()
        return math.sqrt(squares / count)

    def nodes(self, replica: int) -> list[int]:
        """Return the nodes of one replica, in order of stage."""
        return [self._arrangement.nodes(stage)[replica] for stage in self._arrangement.stages]


def _size(message: Tensor | None) -> int:
    return 0 if message is None else message.nbytes
