"""A Byzantine node: its corrupted updates to other replicas, and its corrupted labels."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from planaria.config.schema import ExchangeConfig
from planaria.data.stream import BatchReader
from planaria.exchange.base import Update
from planaria.exchange.compress.base import Compressor
from planaria.exchange.robust.rules import make_robust_aggregator
from planaria.exchange.update_attacks import AttackView, UpdateAttack, make_attack
from planaria.exchange.update_publisher import UpdatePublisher, vectors


@dataclass(frozen=True)
class Misbehaviour:
    """An attack of a trace, as its node executes it."""

    attack: UpdateAttack
    until: int | None
    """first honest step, or None if only one update is corrupted"""
    draw: str
    """seed of the attack's random numbers"""


def make_misbehaviour(
    attack: str | None, strength: float | None, until: int | None, seed: int, number: int
) -> Misbehaviour:
    """Return the attack of a fault, by its ``number`` in the trace of a run with this ``seed``."""
    return Misbehaviour(make_attack(attack, strength), until, f"{seed} {number}")


class Byzantine(UpdatePublisher):
    """A node that executes a :class:`Misbehaviour`, from its next update to the end of the attack."""

    def __init__(self, config: ExchangeConfig, misbehaviour: Misbehaviour) -> None:
        self._config = config
        self._misbehaviour: Misbehaviour | None = misbehaviour
        self._misbehaved = False
        self._past: dict[int, Tensor] = {}
        """round → own vector, as many as the attack remembers"""
        self._received: dict[int, Tensor] = {}
        """updates of others in the previous round"""
        self._first: dict[int, Tensor] = {}

    def is_byzantine(self, step: int) -> bool:
        return self._current_attack(step) is not None

    def _current_attack(self, step: int) -> Misbehaviour | None:
        if self._misbehaviour is not None and self._misbehaviour.until is not None and step >= self._misbehaviour.until:
            self._misbehaviour = None
        return self._misbehaviour

    def sent(self) -> None:
        """End an attack that is for one update."""
        if self._misbehaviour is not None and self._misbehaviour.until is None and self._misbehaved:
            self._misbehaviour = None

    def received(self, others: Mapping[int, Update], codec: Compressor, number: int) -> None:
        """Keep the updates of others for attacks that use them in the next round."""
        if self._misbehaviour is not None and self._misbehaviour.attack.listens:
            self._received = vectors(others, codec, number)

    def poison_batch(self, batch: BatchReader, step: int, vocab: int) -> BatchReader:
        """Return this node's batch source for ``step``, with the labels that the attack chooses."""

        def read(microbatch: int) -> tuple[Tensor, Tensor]:
            tokens, targets = batch(microbatch)
            misbehaviour = self._current_attack(step)
            if misbehaviour is None:
                return tokens, targets
            return tokens, torch.where(targets < 0, targets, misbehaviour.attack.labels(targets.clamp(min=0), vocab))

        return read

    def updates(
        self,
        honest: Update,
        codec: Compressor,
        position: tuple[int, int],
        me: int,
        others: Collection[int],
        known: Mapping[int, Tensor] | None = None,
    ) -> dict[int, Update]:
        """Return corrupted updates, as :meth:`UpdatePublisher.updates`.

        By default the attack knows the node's own update and those of the last round.
        """
        step, number = position
        misbehaviour = self._current_attack(step)
        if misbehaviour is None or honest.blocking is None:
            return super().updates(honest, codec, position, me, others)
        self._misbehaved = True
        own = vectors({me: honest}, codec, number)[me]
        seen = known or {me: own, **self._received}
        self._first = self._first or {**seen}
        self._past = dict(sorted({**self._past, number: own}.items())[-misbehaviour.attack.remembers - 1 :])
        scene = AttackView(
            own=own,
            known=seen,
            members=len(others) + 1,
            byzantine=self._expected,
            round=number,
            generator=_generator(misbehaviour, me, number),
            past=[vector for earlier, vector in self._past.items() if earlier < number],
            first=self._first,
        )
        if not misbehaviour.attack.equivocates:
            return dict.fromkeys((*others, me), _corrupt(misbehaviour, scene, honest, codec))
        drawn = {peer: _generator(misbehaviour, me, number, peer) for peer in (*others, me)}
        return {
            peer: _corrupt(misbehaviour, replace(scene, generator=generator), honest, codec)
            for peer, generator in drawn.items()
        }

    @property
    def _expected(self) -> int:
        """Byzantine replicas that the others expect; 1 if they expect none."""
        config = self._config
        return make_robust_aggregator(config.robust, config.replicas).rule.byzantine if config.robust else 1


def _corrupt(misbehaviour: Misbehaviour, scene: AttackView, honest: Update, codec: Compressor) -> Update:
    assert honest.blocking is not None
    return replace(honest, blocking=misbehaviour.attack.message(scene, honest.blocking, codec))


def _generator(misbehaviour: Misbehaviour, me: int, number: int, peer: int = -1) -> torch.Generator:
    # the text of older versions, so that traces are reproduced
    drawn = hashlib.sha256(f"planaria lie {misbehaviour.draw} {me} {number} {peer}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(drawn[:8], "little") >> 1)
