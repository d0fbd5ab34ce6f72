"""A worker's part in exchange rounds between replicas of its stage. The exchange itself is pure (``exchange/``)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from planaria.config.schema import ExchangeConfig
from planaria.exchange.base import Update, UpdateWeights, Weights
from planaria.exchange.compress.dense import UNCOMPRESSED
from planaria.exchange.robust.equivocation import digest
from planaria.exchange.update_validation import invalid_part_reason, invalid_updates
from planaria.runtime.transport.wire import FrameContent
from planaria.runtime.worker.outer_state import OuterState, UpdateReport
from planaria.runtime.worker.runner import StageRunner


@dataclass(frozen=True)
class SettledRound:
    """Sizes and outcome of a settled round at one node."""

    blocking_bytes: int
    """sent after the inner steps, while the other members wait"""
    prefetched_bytes: int
    """sent during inner steps: prefetched parts and, if the exchange has an overlap, whole updates"""
    spread: float
    report: UpdateReport


class RoundMember:
    """The outer state of a node, its update of the current round, and the updates it has received."""

    def __init__(self, config: ExchangeConfig) -> None:
        self.outer = OuterState(config)
        self.round = -1
        """current or last round"""
        self._prefetched: Tensor | None = None
        self._own: Update | None = None
        """the honest update"""
        self._receivers = 0
        """number of replicas to which it was sent"""
        self._sent: dict[int, Update] = {}
        """replica → the update that it receives; :attr:`_own` unless a fault is injected here"""
        self._report_digests = False
        """whether members report the digests of received updates"""
        self._weighed: dict[int, Weights] = {}
        """replica → its update in the order of arrival, if updates are weighed"""
        self._received: dict[int, dict[FrameContent, Tensor]] = {}
        self._whole: set[int] = set()
        self._rejected: dict[int, str] = {}
        """peer → why its update is invalid"""
        self._reported_rejections: set[int] = set()
        self._checked: set[tuple[int, FrameContent]] = set()

    def begin(self, outer: Mapping[str, Tensor], runner: StageRunner, rounds: int) -> None:
        """Start with new weights, and with the ``outer`` state that came with them, or a fresh one if it is empty."""
        self.drop()
        self.outer.begin(outer, runner.state().weights, rounds)

    def catch_up(self, outer: Mapping[str, Tensor], runner: StageRunner, rounds: int) -> None:
        """Take over the rounds missed by this replica from the ``outer`` state of one that has settled ``rounds``."""
        self.drop()
        runner.set_weights(self.outer.catch_up(outer, runner.state().weights, rounds))

    def drop(self) -> None:
        """Discard the current round."""
        self._prefetched = self._own = None
        self._receivers, self._sent = 0, {}
        self._received.clear()
        self._whole.clear()
        self._rejected.clear()
        self._reported_rejections.clear()
        self._checked.clear()
        self._weighed.clear()

    @property
    def rounds(self) -> int:
        """The number of settled rounds."""
        return self.outer.settled.rounds

    def prefetch(self, round: int) -> Tensor | None:
        """Start ``round``, and return the part of its update that can be sent early."""
        self.drop()
        self.round = round
        self.outer.settled = replace(self.outer.settled, rounds=round)
        self._prefetched = self.outer.exchange.prefetched(self.outer.settled)
        return self._prefetched

    def update(self, round: int, runner: StageRunner) -> Update:
        """Return this node's update of ``round``."""
        if self.round != round or self._prefetched is None:
            self.prefetch(round)
        self._own = self.outer.exchange.update(self.outer.settled, runner.state().weights, self._prefetched)
        return self._own

    def updates_for(self, step: int, me: int, others: Collection[int]) -> dict[int, Update]:
        """Return the update for each of the ``others``, by replica, after ``step``."""
        assert self._own is not None
        self._receivers = len(others)
        self._report_digests = self.outer.exchange.detects_equivocation(len(others) + 1)
        outer = self.outer
        at = step, outer.settled.rounds
        self._sent = outer.publisher.updates(self._own, outer.exchange.codec(outer.settled), at, me, others)
        outer.publisher.sent()
        return self._sent

    def receive(self, peer: int, content: FrameContent, payload: Tensor) -> bool:
        """Store a part of a peer's update, which may be ahead of this node; False if the part was received before."""
        parts = self._received.setdefault(peer, {})
        if content in parts:
            return False
        parts[content] = payload
        return True

    def reject(self, peer: int, why: str) -> None:
        """Mark a peer's update of this round as invalid."""
        self._rejected.setdefault(peer, why)

    def forget(self, peer: int) -> None:
        """Discard the early parts of a peer whose node was replaced."""
        if peer not in self._whole:
            self._received.pop(peer, None)
            self._checked = {(node, content) for node, content in self._checked if node != peer}

    def newly_complete_peers(self) -> list[int]:
        """Return the peers whose complete, valid update arrived since the last call."""
        self._check()
        if self._own is None:
            return []
        needed = {content for content, part in self._parts().items() if part is not None}
        done = self._whole | self._rejected.keys()
        complete = [peer for peer, parts in self._received.items() if parts.keys() >= needed and peer not in done]
        self._whole.update(complete)
        return complete

    def digest_of(self, peer: int) -> str:
        """Return the digest of a peer's complete update, or an empty string unless members report digests."""
        return digest(_update_of_parts(self._received[peer])) if self._report_digests else ""

    def own_digest(self, me: int) -> str:
        """Return the digest of the update of this node, of replica ``me``, or an empty string unless members report
        digests.
        """
        return digest(self._sent[me]) if self._report_digests else ""

    def products(self, me: int, replica: int, peer: int | None) -> dict[int, float]:
        """Return the inner products of a replica's update with all earlier ones; call it for ``me`` (no ``peer``)
        first.

        The result is empty if each stage weights updates on its own.
        """
        outer, weighing = self.outer, self.outer.exchange.weighing
        if weighing is None:
            return {}
        update = self._accepted_own_update(me) if peer is None else _update_of_parts(self._received[peer])
        self._weighed |= weighing.decoded_values(outer.settled, {replica: update})
        return dict(weighing.products(outer.settled, self._weighed, me, [replica])[replica])

    def _accepted_own_update(self, me: int) -> Update:
        """Return the update of ``me`` that counts: the one it sent, even if corrupted, unless others reject it."""
        assert self._own is not None
        sent, codec = self._sent.get(me, self._own), self.outer.exchange.codec(self.outer.settled)
        return self._own if invalid_updates({me: sent}, self._own, codec) else sent

    def newly_rejected_peers(self) -> dict[int, str]:
        """Return the peers whose update was found invalid since the last call, with the reason."""
        self._check()
        if self._own is None:  # the round has not started here
            return {}
        rejected = {peer: why for peer, why in self._rejected.items() if peer not in self._reported_rejections}
        self._reported_rejections |= rejected.keys()
        return rejected

    def pending(self, round: int) -> bool:
        """Return whether this node has sent its update of ``round`` and has not settled it yet."""
        return self._own is not None and self.round == round

    def _check(self) -> None:
        """Check each received part once against this node's own update."""
        if self._own is None:
            return
        expected = self._parts()
        for peer, parts in self._received.items():
            for content in parts.keys() - {checked for node, checked in self._checked if node == peer}:
                codec = (
                    UNCOMPRESSED
                    if content == FrameContent.PREFETCHED
                    else self.outer.exchange.codec(self.outer.settled)
                )
                self._checked.add((peer, content))
                if reason := invalid_part_reason(content.name.lower(), parts[content], expected[content], codec):
                    self._rejected.setdefault(peer, reason)

    def _parts(self) -> dict[FrameContent, Tensor | None]:
        assert self._own is not None
        return {FrameContent.PREFETCHED: self._own.prefetched, FrameContent.BLOCKING: self._own.blocking}

    def settle(
        self,
        round: int,
        me: int,
        peers: Mapping[int, int],
        runner: StageRunner,
        weighed: UpdateWeights | None = None,
        contributes: bool = True,
    ) -> SettledRound:
        """Apply the result of ``round``.

        A Byzantine node also counts its own corrupted update if others accept it, so that all compute the same result.
        :param me: this replica
        :param peers: replica → node of the others whose updates are combined
        :param weighed: weights of the updates over all stages, if they are weighted over all stages
        :param contributes: whether this replica's own update is combined too
        """
        if self._own is None or self.round != round:
            self.update(round, runner)
        assert self._own is not None
        received = {replica: self._received[node] for replica, node in peers.items()}
        updates = {replica: _update_of_parts(parts) for replica, parts in received.items()}
        outer, weights = self.outer, [] if weighed is None or runner.stage else [weighed]  # one stage reports it
        rule = outer.exchange.after_rejecting(0, weights.append, weighed)
        outer.publisher.received(updates, rule.codec(outer.settled), outer.settled.rounds)
        if contributes:
            updates[me] = self._accepted_own_update(me) if peers else self._own
        spread = rule.spread(outer.settled, updates)
        fast, outer.settled = rule.settle(outer.settled, runner.state().weights, updates, me)
        runner.set_weights(fast)
        blocking, prefetched = (
            0 if part is None else part.nbytes * self._receivers for part in (self._own.blocking, self._own.prefetched)
        )
        if outer.exchange.overlap:
            blocking, prefetched = 0, blocking + prefetched
        report = UpdateReport(weights=weights, compressed=self._own.compressed if self._receivers else None)
        self.drop()
        return SettledRound(blocking, prefetched, spread, report)


def _update_of_parts(parts: Mapping[FrameContent, Tensor]) -> Update:
    return Update(parts.get(FrameContent.BLOCKING), parts.get(FrameContent.PREFETCHED))
