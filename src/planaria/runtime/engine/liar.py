"""A node that lies to the other replicas, because a trace has it do so: what it knows, and what it tells whom."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from planaria.common.errors import UserError
from planaria.config.schema import ExchangeConfig, RunConfig
from planaria.exchange import exchange
from planaria.exchange.attacks import attack_of
from planaria.exchange.attacks.base import Attack, Scene
from planaria.exchange.base import Offer
from planaria.exchange.compress.base import Compressor
from planaria.exchange.robust import robust_of
from planaria.faults.trace import Fault
from planaria.runtime.engine.batches import Batch


@dataclass(frozen=True)
class Lie:
    """A fault of a trace, for whom it befalls."""

    attack: Attack
    until: int | None
    """first step in which it is honest again; None: one offer is a lie"""
    draw: str
    """what is drawn for it goes by this"""


def lie_of(attack: str | None, strength: float | None, until: int | None, seed: int, number: int) -> Lie:
    """The lie that a fault names, by its ``number`` in the trace of a run with this ``seed``."""
    return Lie(attack_of(attack, strength), until, f"{seed} {number}")


def require_listeners(config: RunConfig, faults: Iterable[Fault], where: str) -> None:
    """:raises UserError: when one of the faults, from ``where``, is a lie that this run has nobody to hear."""
    stages = config.pipeline.stages + 1
    for fault in faults:
        if fault.signal != "lie":
            continue
        at = f"{where}: a fault 'lie' at stage {fault.stage}, step {fault.step}"
        if why := _unheard(config):
            raise UserError(
                f"{at}: {why}, so that nobody hears it; leave the fault out, or take several replicas that agree, such "
                "as exchange.kind = 'allreduce'"
            )
        if fault.attack == "label_flip" and fault.stage % stages:
            raise UserError(
                f"{at}: only the ends have labels; name a node of stage 0: {fault.stage - fault.stage % stages}, say"
            )


def _unheard(config: RunConfig) -> str:
    """Why nobody hears what replicas say to each other; empty if somebody does."""
    if config.exchange.replicas == 1 and config.exchange.most is None:
        return "there is one replica"
    if exchange(config.exchange).interval is None:
        return f"exchange.kind = {config.exchange.kind!r} has replicas say nothing"
    if config.exchange.coded:
        return "with exchange.coded replicas say what the code has them say"
    return ""


class Liar:
    """What a node says where it may lie. It is asked in every step or round; while there is no lie it keeps nothing."""

    def __init__(self, config: ExchangeConfig) -> None:
        self._config = config
        self._begin(None)

    def _begin(self, lie: Lie | None) -> None:
        self._lie, self._lied = lie, False
        self._past: dict[int, Tensor] = {}
        """round → own vector of then, as many as the attack remembers"""
        self._heard: dict[int, Tensor] = {}
        """what others said in the round before"""
        self._first: dict[int, Tensor] = {}

    def begin(self, lie: Lie) -> None:
        """From the next offer on."""
        self._begin(lie)

    def lying(self, step: int) -> Lie | None:
        """The lie that an offer made in, or after, this step is."""
        if self._lie is not None and self._lie.until is not None and step >= self._lie.until:
            self._begin(None)
        return self._lie

    def told(self) -> None:
        """An offer has been made: a lie that was for one is over."""
        if self._lie is not None and self._lie.until is None and self._lied:
            self._begin(None)

    def hear(self, others: Mapping[int, Offer], codec: Compressor, round: int) -> None:
        """What others said in this round, if it is sound: it is known in the next."""
        if self._lie is not None and self._lie.attack.listens:
            self._heard = vectors(others, codec, round)

    def learned(self, batch: Batch, step: int, vocab: int) -> Batch:
        """What the ends of this node train on in ``step``: the ``batch``, or what the lie makes of its targets."""

        def poisoned(microbatch: int) -> tuple[Tensor, Tensor]:
            tokens, targets = batch(microbatch)
            lie = self.lying(step)
            return tokens, targets if lie is None else lie.attack.labels(targets, vocab)

        return poisoned

    def say(
        self,
        honest: Offer,
        codec: Compressor,
        at: tuple[int, int],
        me: int,
        others: Collection[int],
        known: Mapping[int, Tensor] | None = None,
    ) -> dict[int, Offer]:
        """What ``me`` says to each of these ``others``, and to itself; ``honest`` where it is.

        ``at``: step and round. ``known``: what honest members say in this round (vectors, as :func:`vectors` makes
        them); unless given, the liar goes by its own and by what it has heard in the round before.
        """
        step, round = at
        lie = self.lying(step)
        if lie is None or honest.blocking is None:
            return dict.fromkeys((*others, me), honest)
        self._lied = True
        own = vectors({me: honest}, codec, round)[me]
        seen = known or {me: own, **self._heard}
        self._first = self._first or {**seen}
        self._past = dict(sorted({**self._past, round: own}.items())[-lie.attack.remembers - 1 :])
        scene = Scene(
            own=own,
            known=seen,
            members=len(others) + 1,
            liars=self._expected,
            round=round,
            generator=_generator(lie, me, round),
            past=[vector for earlier, vector in self._past.items() if earlier < round],
            first=self._first,
        )
        if not lie.attack.equivocates:
            return dict.fromkeys((*others, me), self._spoken(lie, scene, honest, codec))
        return {
            peer: self._spoken(lie, replace(scene, generator=_generator(lie, me, round, peer)), honest, codec)
            for peer in (*others, me)
        }

    def _spoken(self, lie: Lie, scene: Scene, honest: Offer, codec: Compressor) -> Offer:
        assert honest.blocking is not None
        return replace(honest, blocking=lie.attack.message(scene, honest.blocking, codec))

    @property
    def _expected(self) -> int:
        """Liars that the others expect: one, where they expect none."""
        config = self._config
        return robust_of(config.robust, config.replicas).rule.liars if config.robust else 1


def vectors(offers: Mapping[int, Offer], codec: Compressor, round: int) -> dict[int, Tensor]:
    """What sound messages stand for: fp32 [d] by member."""
    said = {member: offer.blocking for member, offer in offers.items() if offer.blocking is not None}
    return {member: codec.decode(message, codec.count(message), round) for member, message in said.items()}


def _generator(lie: Lie, me: int, round: int, peer: int = -1) -> torch.Generator:
    drawn = hashlib.sha256(f"planaria lie {lie.draw} {me} {round} {peer}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(drawn[:8], "little") >> 1)
