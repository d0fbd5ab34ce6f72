"""A node's outer state, wherever it runs: what was settled last, and what a step under way would make of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from planaria.config.schema import ExchangeConfig
from planaria.control import events as e
from planaria.control.offers import Full, rounded, three_digits
from planaria.exchange.base import Compressed, Counted, Offer, Outer, TooManyLiars, Weights
from planaria.exchange.kinds import exchange
from planaria.exchange.publisher import Publisher
from planaria.exchange.refusal import judge
from planaria.exchange.robust.equivocation import digest
from planaria.runtime.engine.runner import NonFinite, StageRunner


@dataclass(frozen=True)
class Verdict:
    """What a node thinks of the others' offers, and of its own."""

    refused: Mapping[int, str] = field(default_factory=dict)
    """replica whose offer is of no use → what is wrong with it"""
    counted: Sequence[Counted] = ()
    """what offers counted in what was made of all, where the rule goes by coefficients"""
    compressed: Compressed | None = None
    """what compression made of its own offer, once that is settled for good"""
    full: Full | None = None
    """why that went in full, if it did"""

    def told(self, first: bool) -> Iterator[tuple[type[e.Fact], dict[str, Any]]]:
        """Events that tell of it, without where and when; one node of each stage (``first``) tells what all counted,
        and what its own message was like."""
        for replica, reason in self.refused.items():
            yield e.OfferRefused, {"replica": replica, "reason": reason}
        for counted in self.counted if first else ():
            rivals = {rule: rounded(of) for rule, of in counted.rivals().items()}
            yield e.OffersCounted, {"counted": rounded(counted.coefficients), "rivals": rivals}
        if first and (made := self.compressed) is not None:
            norms = {"norm": made.norm, "lost": made.lost, "owed": made.owed, "off": made.off}
            digits = {name: three_digits(value) for name, value in norms.items() if value is not None}
            sizes = {"sent_bytes": made.sent_bytes, "dense_bytes": made.dense_bytes}
            yield e.MessageCompressed, {**sizes, **digits, "full": self.full if made.full else None}


class OuterState:
    """The outer state of one node, and its part in an exchange of gradients: what that makes of it is pending until the
    step commits, so that a step that is dropped leaves no trace."""

    def __init__(self, config: ExchangeConfig) -> None:
        self.exchange, self._alone = exchange(config), config.replicas == 1
        self.settled = Outer()
        """after the last commit, or the last round"""
        self.publisher = Publisher()
        """replaced by an injected fault"""
        self.left_out: Mapping[int, str] = {}
        """replicas whose offers are of no use to anybody in the step under way, and why"""
        self.heard: Mapping[int, str] = {}
        """replica → digest of its update in that step (``exchange/robust/equivocation.py``)"""
        self._pending: Outer | None = None
        self._held: Outer | None = None
        """restored if the step is dropped"""
        self._honest = Offer()
        self._anew: Full = "beginning"
        """why estimates began last, or will"""

    def begin(self, state: Mapping[str, Tensor], weights: Weights, rounds: int) -> None:
        """The node has its ``weights`` from elsewhere, and an outer ``state`` with them; if none, it begins one.

        So many ``rounds`` are settled.
        """
        self.drop()
        self._held = None
        self._anew = "replicas" if state else "beginning"
        if state:
            self.settled = Outer.load({**state, "rounds": torch.tensor(rounds)}, self.exchange.parts)
        else:
            self.settled = replace(Outer() if self._alone else self.exchange.start(weights), rounds=rounds)

    def offer(self, runner: StageRunner, me: int = 0) -> Offer:
        """The message of replica ``me`` about the step's gradient, before that is clipped.

        :raises NonFinite: when a number of it is not finite, which rounding might conceal.
        """
        runner.weigh()
        offer = self.exchange.speaking(me).offer(self.settled, runner.grads)
        lossy = offer.blocking is not None and offer.blocking.dtype != torch.float32
        if lossy and not all(torch.isfinite(gradient).all() for gradient in runner.grads.values()):
            raise NonFinite(f"the gradient of stage {runner.stage} is not finite; lower optim.lr")
        self._honest = offer
        return offer

    def settle(self, offers: Mapping[int, Offer], me: int, runner: StageRunner) -> Verdict:
        """The gradient that the ``offers`` (by replica, that of ``me`` among them) come to takes the place of the own.

        Offers that are of no use are left out, as many as the exchange bears.

        :raises NonFinite: when there are more, naming whose they are.
        """
        counted: list[Counted] = []
        try:
            rule, sound, refused = judge(
                self.exchange, self.settled, offers, self._honest, counted.append, self.left_out
            )
            grads, self._pending = rule.settle(self.settled, runner.grads, sound, me)
        except TooManyLiars as error:
            mend = "lower optim.lr" if "finite" in str(error) else "look after that replica"
            mend += "" if self.exchange.borne else "; exchange.robust names rules that go on without it"
            raise NonFinite(f"the gradients of stage {runner.stage} come to nothing: {error}; {mend}") from None
        runner.take(grads)
        others = {replica: offer for replica, offer in sound.items() if replica != me}
        self.publisher.received(others, self.exchange.codec(self.settled), self.settled.rounds)
        witnessed = self.exchange.witnessed(len(offers))
        self.heard = {replica: digest(offer) for replica, offer in offers.items()} if witnessed else {}
        return Verdict(refused, counted)

    def anew(self) -> None:
        """Another node of the stage has been rebuilt, and lacks what was its own: the others do not go by it either."""
        self.settled = self.exchange.anew(self.settled)
        if self.settled.rounds:
            self._anew = "rebuilt"

    def hold(self) -> None:
        """Make further changes of :attr:`settled` revocable until the step commits."""
        self._held = self.settled

    def commit(self) -> Verdict:
        """The step is committed; what is to be told of it, now that it holds."""
        self._held = None
        if self._pending is None:
            return Verdict()
        self.settled, self._pending = self._pending, None
        self.publisher.sent()
        return Verdict(compressed=self._honest.compressed, full=self._anew)

    def drop(self) -> None:
        """The step under way is dropped."""
        self._pending = None
        if self._held is not None:
            self.settled, self._held = self._held, None

    def given(self, to_successor: bool) -> dict[str, Tensor]:
        """What whoever stands here from now on begins with, or a copy of this node: what is shared."""
        outer = self.settled if to_successor else self.settled.copied(self.exchange.parts)
        return {name: tensor for name, tensor in outer.state().items() if name != "rounds"}
