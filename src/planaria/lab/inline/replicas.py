"""The replicas of an inline run: what they exchange and when, as the recipe says; and the one model they make.

A stage of a replica is a node. The exchange itself is pure (``exchange/``); here it meets runners.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from planaria.config.schema import RunConfig
from planaria.exchange.base import Counted, Offer
from planaria.exchange.message import consensus
from planaria.exchange.publisher import Publisher, vectors
from planaria.exchange.refusal import refused
from planaria.exchange.robust.equivocation import Findings, digest, findings, joined
from planaria.exchange.robust.suspicion import Suspicion, distrusted
from planaria.exchange.robust.weighing import Told
from planaria.models.state import StageState
from planaria.pipeline.routing.arrangement import Arrangement
from planaria.runtime.engine.outer_state import OuterState, Verdict
from planaria.runtime.engine.runner import NonFinite, StageRunner
from planaria.runtime.engine.samples import Batch

Heard = dict[int, dict[int, Offer]]
"""node → what it hears in a round from each replica of its group, itself among them"""
Verdicts = dict[int, Verdict]
"""node → what it thinks of the offers of a round"""


@dataclass(frozen=True)
class Round:
    """One round of all stages. Replicas meet whole: the groups are the same at every stage."""

    number: int
    groups: list[tuple[int, ...]]
    """of replicas"""
    blocking_bytes: int
    """sent by all nodes together, that somebody waited for"""
    prefetched_bytes: int
    verdicts: Verdicts = field(default_factory=dict)
    first: frozenset[int] = frozenset()
    """nodes that tell for all that have settled with them"""


@dataclass(frozen=True)
class _Pending:
    """A round under way."""

    due: int
    """commits by which it is to be settled"""
    round: Round
    honest: Mapping[int, Offer]
    """node → what it meant to say"""
    heard: Heard


class InlineReplicas:
    """The outer state of every node, and the rounds."""

    def __init__(self, config: RunConfig, arrangement: Arrangement, runners: Mapping[int, StageRunner]) -> None:
        """:raises UserError: when the recipe's exchange cannot work."""
        self.outer = {node: OuterState(config.exchange) for node in runners}
        self.sources: dict[int, Callable[[Batch, int], Batch]] = {}
        """node → what makes (batch, step) its own batch, where a fault is injected into its source"""
        self.exchange = next(iter(self.outer.values())).exchange
        self._runners, self._arrangement = runners, arrangement
        self._config, self._count, self._seed = config.exchange, config.exchange.replicas, config.seed
        self._pending: list[_Pending] = []
        self._round = 0
        self._suspicion = Suspicion()
        self._steps = 0
        """committed"""
        self._refused: dict[int, set[int]] = {}
        """replica → whose offers its nodes have refused in the step under way"""
        self._replica = {
            node: place for stage in arrangement.stages for place, node in enumerate(arrangement.nodes(stage))
        }
        for node in runners:
            self.start(node, {})

    def restart(self, rounds: int) -> None:
        """All nodes go back, or begin, where so many rounds were settled; what was under way is dropped."""
        self._round = rounds
        self._pending.clear()

    def start(self, node: int, outer: Mapping[str, Tensor]) -> None:
        """The node has its weights from elsewhere, and an ``outer`` state with them; if none, it begins one."""
        self.outer[node].begin(outer, self._runners[node].state().weights, self._round - len(self._pending))
        self.outer[node].publisher = Publisher()  # a new node is honest
        self.sources.pop(node, None)

    def learned(self, node: int, batch: Batch, step: int) -> Batch:
        """Return what the node trains on in ``step``: the ``batch``, unless a fault is injected into its source."""
        return self.sources[node](batch, step) if node in self.sources else batch

    def rebuilt(self, nodes: Sequence[int]) -> None:
        """These nodes are copies of others of their stages."""
        for stage in {self._arrangement.stage[node] for node in nodes}:
            for node in self._arrangement.nodes(stage):
                self.outer[node].anew()

    def state(self, node: int) -> StageState:
        """All of a node that outlives a step; shares memory."""
        return replace(self._runners[node].state(), outer=self.outer[node].settled.state())

    def agree(self, step: int = 0) -> Verdicts:
        """With an exchange of gradients: agree on those of every stage in ``step``, before they are clipped.

        :raises NonFinite: when too many are of no use, or are told others differently.
        """
        if self.exchange.interval != 0:
            return {}
        honest = {node: self.outer[node].offer(runner, self._replica[node]) for node, runner in self._runners.items()}
        _, heard = self._groups(honest, step)
        self._compare(heard)
        verdicts = {
            node: self.outer[node].settle(offers, self._replica[node], self._runners[node])
            for node, offers in heard.items()
        }
        self._refused = {}
        for node, verdict in verdicts.items():
            if verdict.refused:
                self._refused.setdefault(self._replica[node], set()).update(verdict.refused)
        return verdicts

    def _compare(self, heard: Heard) -> None:
        """Leave out whoever has told others different things; on a fleet the step is made again for that."""
        if not self.exchange.witnessed(self._count):
            return
        found = self._suspicion.examine(self._told(heard, range(self._count)), self.exchange)
        raised = self._suspicion.raised(found.all)
        if found.least and (wrong := raised.unbearable(self.exchange)):
            raise NonFinite(wrong)
        left_out = raised.standing(self.exchange).left_out
        for outer in self.outer.values():
            outer.left_out = left_out
        self._suspicion = raised

    def _found(self, heard: Heard, party: Sequence[int]) -> Findings:
        """Of the replicas that settle a round together: whose offers were of no use too often in rounds before, and who
        of the others has told others different things."""
        useless = self._suspicion.standing(self.exchange).useless
        others = [replica for replica in party if replica not in useless]
        if not self.exchange.witnessed(len(others)):
            return Findings(useless=useless)
        return findings(self._told(heard, others), others, distrusted(self.exchange))._replace(useless=useless)

    def _told(self, heard: Heard, replicas: Iterable[int]) -> dict[int, dict[int, str]]:
        """Replica → replica → digests of what it has heard from it, of all stages."""
        return {
            replica: joined({r: digest(offer) for r, offer in heard[node].items()} for node in self.nodes(replica))
            for replica in replicas
        }

    def commit(self) -> Verdicts:
        """The step is committed; what is to be told of it."""
        self._suspicion = self._suspicion.ended(self._steps, self._refused, self.exchange)
        self._refused, self._steps = {}, self._steps + 1
        return {node: outer.commit() for node, outer in self.outer.items()}

    def meet(self, commits: int) -> list[Round]:
        """So many steps are committed: begin a round if one is due, settle what is; the rounds that were settled."""
        every = self.exchange.interval
        if every and commits % every == 0:
            weights = {node: runner.state().weights for node, runner in self._runners.items()}
            honest = {node: self.exchange.offer(self.outer[node].settled, fast) for node, fast in weights.items()}
            round, heard = self._groups(honest, commits - 1)
            self._pending.append(_Pending(commits + self.exchange.overlap, round, honest, heard))
            for outer in self.outer.values():
                outer.publisher.sent()
        due = [pending for pending in self._pending if pending.due <= commits]
        self._pending = self._pending[len(due) :]
        return [self._settle(pending) for pending in due]

    def _groups(self, honest: Mapping[int, Offer], step: int) -> tuple[Round, Heard]:
        """What each node hears in the next round, in or after ``step``; ``honest``: what each node means to say."""
        groups = self.exchange.groups(self._round, range(self._count), self._seed)
        heard: Heard = {node: {} for node in self._runners}
        blocking = prefetched = 0
        for stage in self._arrangement.stages:
            nodes = self._arrangement.nodes(stage)
            for group in groups:
                for replica, said in self._said({other: nodes[other] for other in group}, honest, step).items():
                    for other, offer in said.items():
                        heard[nodes[other]][replica] = offer
                        blocking += _size(offer.blocking) if other != replica else 0
                        prefetched += _size(offer.prefetched) if other != replica else 0
        round = Round(self._round, groups, blocking, prefetched)
        self._round += 1
        return round, heard

    def _said(self, group: Mapping[int, int], honest: Mapping[int, Offer], step: int) -> dict[int, dict[int, Offer]]:
        """What each replica of a ``group`` (replica → node) says to each; liars know what the honest ones say."""
        settled = {replica: self.outer[node].settled for replica, node in group.items()}
        true = [replica for replica, node in group.items() if not self.outer[node].publisher.lies(step)]
        found = {}
        for replica, node in group.items():
            codec, round = self.exchange.codec(settled[replica]), settled[replica].rounds
            known = {} if replica in true else vectors({other: honest[group[other]] for other in true}, codec, round)
            others = [other for other in group if other != replica]
            publisher = self.outer[node].publisher
            found[replica] = publisher.updates(honest[node], codec, (step, round), replica, others, known)
        return found

    def _settle(self, pending: _Pending) -> Round:
        """Settle a round as replicas on a fleet would: whose offer some refuse at some stage is gone on without.

        It settles by itself, or, where replicas must stay the same, goes on as a copy of one that has settled.
        """
        verdicts, first = {}, set()
        for node, offers in pending.heard.items():
            codec, like = self.exchange.codec(self.outer[node].settled), pending.honest[node]
            others = {replica: offer for replica, offer in offers.items() if replica != self._replica[node]}
            verdicts[node] = Verdict(refused(others, like, codec))
        out = {replica for verdict in verdicts.values() for replica in verdict.refused}
        found = self._found(pending.heard, [replica for replica in range(self._count) if replica not in out])
        out |= found.left_out.keys()
        self._remember(pending.round.number, verdicts, found, out)
        for node in (node for replica in set(range(self._count)) - out for node in self.nodes(replica)):
            left_out = {replica: why for replica, why in found.left_out.items() if replica in pending.heard[node]}
            verdicts[node] = Verdict({**verdicts[node].refused, **left_out})
        weighed = {me: self._weighed(pending, me, out) for me in range(self._count)}
        for node, offers in pending.heard.items():
            me = self._replica[node]
            party = {me: pending.honest[node]} if me in out else {r: o for r, o in offers.items() if r not in out}
            if len(party) == 1:
                party = {me: pending.honest[node]}
            first |= {node} if me == min(party) else set()
            runner, outer = self._runners[node], self.outer[node]
            judged = weighed[me]
            counted = [] if judged is None or runner.stage else [judged]  # one stage tells it for all
            rule = self.exchange.facing(0, counted.append, judged)
            fast, outer.settled = rule.settle(outer.settled, runner.state().weights, party, me)
            compressed = pending.honest[node].compressed if len(party) > 1 else None
            verdicts[node] = replace(verdicts[node], counted=counted, compressed=compressed)
            runner.put(fast)
        if self.exchange.synchronised and (left := [r for r in range(self._count) if r not in out]):
            for replica in out:
                self._copy(left[0], replica)
        return replace(pending.round, verdicts=verdicts, first=frozenset(first))

    def _weighed(self, pending: _Pending, me: int, out: Collection[int]) -> Counted | None:
        """What offers count for the replica ``me`` in a round, where they are judged over all stages."""
        weighing, told = self.exchange.weighing, list[Told]()
        party = sorted(pending.heard[self.nodes(me)[0]].keys() - out)
        if weighing is None or me in out or len(party) < 2:
            return None
        for node in self.nodes(me):
            outer, offers = self.outer[node].settled, {member: pending.heard[node][member] for member in party}
            told.append(weighing.products(outer, weighing.spoken(outer, offers), me, party))
        return weighing.counted(told, party, me, pending.round.number)

    def _remember(self, round: int, verdicts: Verdicts, found: Findings, out: Collection[int]) -> None:
        """What those that go on with the round have refused in it, and is proved. Who copies another tells nothing."""
        proved, told = {*found.liars, *found.useless}, dict[int, set[int]]()
        for node, verdict in verdicts.items():
            replica = self._replica[node]
            if replica not in out or not self.exchange.synchronised:
                told.setdefault(replica, set()).update(verdict.refused, proved - {replica})
        refused = {replica: others for replica, others in told.items() if others}
        self._suspicion = self._suspicion.ended(round, refused, self.exchange)

    def _copy(self, giver: int, taker: int) -> None:
        """One replica goes on as a copy of another."""
        for given, taken in zip(self.nodes(giver), self.nodes(taker), strict=True):
            self._runners[taken].load(self._runners[given].state().trained)
            outer = self.outer[given].given(to_successor=False)
            self.outer[taken].begin(outer, self._runners[taken].state().weights, self.outer[given].settled.rounds)

    def spread(self) -> float:
        """RMS distance of the replicas' weights from their mean: √(Σ (w − w̄)² / (replicas · parameters))."""
        squares = count = 0.0
        for stage in self._arrangement.stages:
            states = [self._runners[node].state().weights for node in self._arrangement.nodes(stage)]
            for name in states[0]:
                stacked = torch.stack([state[name].double() for state in states])
                squares += float((stacked - stacked.mean(dim=0)).square().sum())
                count += stacked.numel()
        return math.sqrt(squares / count)

    @property
    def count(self) -> int:
        return self._count

    def nodes(self, replica: int) -> list[int]:
        """The nodes of one replica, in order of stage."""
        return [self._arrangement.nodes(stage)[replica] for stage in self._arrangement.stages]

    def consensus(self, nodes: Sequence[int]) -> dict[str, Tensor]:
        """The weights of one stage of the one model, of what these ``nodes`` of it train."""
        return consensus([self._runners[node].state().weights for node in nodes])


def _size(message: Tensor | None) -> int:
    return 0 if message is None else message.nbytes
