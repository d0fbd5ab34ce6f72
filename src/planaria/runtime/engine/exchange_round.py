"""A worker's part in the rounds in which replicas of its stage meet. The exchange itself is pure (``exchange/``)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from planaria.config.schema import ExchangeConfig
from planaria.exchange.base import Counted, Offer, Weights
from planaria.exchange.compress.dense import PLAIN
from planaria.exchange.refusal import flaw, refused
from planaria.exchange.robust.equivocation import digest
from planaria.runtime.engine.outer_state import OuterState, Verdict
from planaria.runtime.engine.runner import StageRunner
from planaria.runtime.transport.wire import Content


@dataclass(frozen=True)
class Made:
    """What a settled round was like, here."""

    blocking_bytes: int
    prefetched_bytes: int
    apart: float
    verdict: Verdict


class RoundMember:
    """The outer state of a node, its offer of the round under way, and what it has heard of others."""

    def __init__(self, config: ExchangeConfig) -> None:
        self.outer = OuterState(config)
        self.round = -1
        """under way, or the last one"""
        self._prefetched: Tensor | None = None
        self._own: Offer | None = None
        """the honest update"""
        self._said: dict[int, Offer] = {}
        """replica → the update that it receives; :attr:`_own` unless a fault is injected here"""
        self._witnessed = False
        """do members tell what they have heard?"""
        self._spoken: dict[int, Weights] = {}
        """replica → what its offer stands for, in the order in which they were heard, where offers are weighed"""
        self._heard: dict[int, dict[Content, Tensor]] = {}
        self._whole: set[int] = set()
        self._refused: dict[int, str] = {}
        """peer → what is wrong with its offer"""
        self._blamed: set[int] = set()
        self._checked: set[tuple[int, Content]] = set()

    def begin(self, outer: Mapping[str, Tensor], runner: StageRunner, rounds: int) -> None:
        """The node has its weights from elsewhere, and an ``outer`` state with them; if none, it begins one."""
        self.drop()
        self.outer.begin(outer, runner.state().weights, rounds)

    def drop(self) -> None:
        """Forget the round under way: nothing has come of it."""
        self._prefetched = self._own = None
        self._said = {}
        self._heard.clear()
        self._whole.clear()
        self._refused.clear()
        self._blamed.clear()
        self._checked.clear()
        self._spoken.clear()

    @property
    def rounds(self) -> int:
        """Rounds that the node has behind it."""
        return self.outer.settled.rounds

    def prefetch(self, round: int) -> Tensor | None:
        """What can be said ahead in ``round``."""
        self.drop()
        self.round = round
        self.outer.settled = replace(self.outer.settled, rounds=round)
        self._prefetched = self.outer.exchange.prefetched(self.outer.settled)
        return self._prefetched

    def offer(self, round: int, runner: StageRunner) -> Offer:
        """What this node says in ``round``."""
        if self.round != round or self._prefetched is None:
            self.prefetch(round)
        self._own = self.outer.exchange.offer(self.outer.settled, runner.state().weights, self._prefetched)
        return self._own

    def tell(self, step: int, me: int, others: Collection[int]) -> dict[int, Offer]:
        """Return the update for each of the ``others``, by replica, after ``step``."""
        assert self._own is not None
        self._witnessed = self.outer.exchange.witnessed(len(others) + 1)
        outer = self.outer
        at = step, outer.settled.rounds
        self._said = outer.publisher.updates(self._own, outer.exchange.codec(outer.settled), at, me, others)
        outer.publisher.sent()
        return self._said

    def hear(self, peer: int, content: Content, payload: Tensor) -> bool:
        """Take in a part of a peer's offer, who may be ahead of this node; not if it has said that before: others are
        told of what it said first."""
        parts = self._heard.setdefault(peer, {})
        if content in parts:
            return False
        parts[content] = payload
        return True

    def refuse(self, peer: int, why: str) -> None:
        """A peer's offer is of no use in this round, whatever comes of it."""
        self._refused.setdefault(peer, why)

    def forget(self, peer: int) -> None:
        """A peer's node begins anew: what it has said ahead is past."""
        if peer not in self._whole:
            self._heard.pop(peer, None)
            self._checked = {(node, content) for node, content in self._checked if node != peer}

    def whole(self) -> list[int]:
        """Peers whose offer has come, and is of use, since this was asked last."""
        self._check()
        if self._own is None:
            return []
        needed = {content for content, part in self._parts().items() if part is not None}
        known = self._whole | self._refused.keys()
        found = [peer for peer, parts in self._heard.items() if parts.keys() >= needed and peer not in known]
        self._whole.update(found)
        return found

    def digest_of(self, peer: int) -> str:
        """Of the whole offer of a peer, where members tell what they have heard; else empty."""
        return digest(_offer(self._heard[peer])) if self._witnessed else ""

    def own_digest(self, me: int) -> str:
        """Of what this node, of replica ``me``, says itself; empty as that."""
        return digest(self._said[me]) if self._witnessed else ""

    def products(self, me: int, replica: int, peer: int | None) -> dict[int, float]:
        """Of what another ``replica`` says, or ``me`` itself (no ``peer``), with all that was asked for before; nothing
        where each stage judges by itself. Its own comes first."""
        outer, weighing = self.outer, self.outer.exchange.weighing
        if weighing is None:
            return {}
        offer = self._counted_own(me) if peer is None else _offer(self._heard[peer])
        self._spoken |= weighing.spoken(outer.settled, {replica: offer})
        return dict(weighing.products(outer.settled, self._spoken, me, [replica])[replica])

    def _counted_own(self, me: int) -> Offer:
        """What ``me`` goes by of its own: what it says, even if that is a lie, as long as others can go by it."""
        assert self._own is not None
        said, codec = self._said.get(me, self._own), self.outer.exchange.codec(self.outer.settled)
        return self._own if refused({me: said}, self._own, codec) else said

    def refused(self) -> dict[int, str]:
        """Peers whose offer is of no use, as far as was found since this was asked last, and what is wrong with it."""
        self._check()
        if self._own is None:  # who leads the round has not begun it yet
            return {}
        found = {peer: why for peer, why in self._refused.items() if peer not in self._blamed}
        self._blamed |= found.keys()
        return found

    def pending(self, round: int) -> bool:
        """Return whether this node has sent its update of ``round`` and has not settled it yet."""
        return self._own is not None and self.round == round

    def _check(self) -> None:
        """Hold what has come against the own offer, once that is made; every part once."""
        if self._own is None:
            return
        own = self._parts()
        for peer, parts in self._heard.items():
            for content in parts.keys() - {checked for node, checked in self._checked if node == peer}:
                codec = PLAIN if content == Content.PREFETCHED else self.outer.exchange.codec(self.outer.settled)
                self._checked.add((peer, content))
                if wrong := flaw(content.name.lower(), parts[content], own[content], codec):
                    self._refused.setdefault(peer, wrong)

    def _parts(self) -> dict[Content, Tensor | None]:
        assert self._own is not None
        return {Content.PREFETCHED: self._own.prefetched, Content.BLOCKING: self._own.blocking}

    def settle(
        self, round: int, me: int, peers: Mapping[int, int], runner: StageRunner, weighed: Counted | None = None
    ) -> Made:
        """Go on with what ``round`` comes to: ``me`` and the other members, by replica; ``peers``: replica → node;
        ``weighed``: what offers count over all stages, where they are judged so.

        Who has lied goes by its lie too, as long as others can: what must be equal at all stays equal.
        """
        if self._own is None or self.round != round:
            self.offer(round, runner)
        assert self._own is not None
        heard = {replica: self._heard[node] for replica, node in peers.items()}
        offers = {replica: _offer(parts) for replica, parts in heard.items()}
        outer, counted = self.outer, [] if weighed is None or runner.stage else [weighed]  # one stage tells it for all
        rule = outer.exchange.facing(0, counted.append, weighed)
        outer.publisher.received(offers, rule.codec(outer.settled), outer.settled.rounds)
        offers[me] = self._counted_own(me) if peers else self._own
        apart = rule.apart(outer.settled, offers)
        fast, outer.settled = rule.settle(outer.settled, runner.state().weights, offers, me)
        runner.put(fast)
        blocking, prefetched = (
            0 if part is None else part.nbytes * len(peers) for part in (self._own.blocking, self._own.prefetched)
        )
        verdict = Verdict(counted=counted, compressed=self._own.compressed if peers else None)
        self.drop()
        return Made(blocking, prefetched, apart, verdict)


def _offer(parts: Mapping[Content, Tensor]) -> Offer:
    return Offer(parts.get(Content.BLOCKING), parts.get(Content.PREFETCHED))
