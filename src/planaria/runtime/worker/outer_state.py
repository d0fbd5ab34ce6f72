"""A node's outer state: the last settled one, and the current step's pending changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from planaria.common.tensors import all_finite
from planaria.config.schema import ExchangeConfig
from planaria.control.facts import events as e
from planaria.control.facts.update_reports import Full, rounded, three_digits
from planaria.exchange.base import CompressionEffect, StageOuterState, TooManyByzantine, Update, UpdateWeights, Weights
from planaria.exchange.registry import make_exchange
from planaria.exchange.robust.equivocation import digest
from planaria.exchange.update_publisher import UpdatePublisher
from planaria.exchange.update_validation import validate
from planaria.runtime.worker.runner import NonFinite, StageRunner


@dataclass(frozen=True)
class UpdateReport:
    """A node's judgement of received updates, and statistics of the one it sent."""

    rejected: Mapping[int, str] = field(default_factory=dict)
    """replica with an invalid update → reason"""
    weights: Sequence[UpdateWeights] = ()
    """weights of the updates in the result, if the rule has any"""
    compressed: CompressionEffect | None = None
    """statistics of this node's compressed update, once committed"""
    full: Full | None = None
    """why it was sent uncompressed, or None if it was compressed"""

    def facts(self, first: bool) -> Iterator[tuple[type[e.Fact], dict[str, Any]]]:
        """Yield events and their fields; the ``first`` node of a stage reports weights and compression for all."""
        for replica, reason in self.rejected.items():
            yield e.UpdateRejected, {"replica": replica, "reason": reason}
        for weights in self.weights if first else ():
            rivals = {rule: rounded(rival) for rule, rival in weights.rivals().items()}
            yield e.UpdatesWeighted, {"counted": rounded(weights.coefficients), "rivals": rivals}
        if first and (effect := self.compressed) is not None:
            norms = {
                "norm": effect.norm,
                "relative_error": effect.relative_error,
                "residual": effect.residual,
                "estimate_error": effect.estimate_error,
            }
            digits = {name: three_digits(norm) for name, norm in norms.items() if norm is not None}
            sizes = {"sent_bytes": effect.sent_bytes, "dense_bytes": effect.dense_bytes}
            yield e.MessageCompressed, {**sizes, **digits, "full": self.full if effect.full else None}


class OuterState:
    """The outer state of one node during gradient exchanges; changes are pending until the step commits."""

    def __init__(self, config: ExchangeConfig) -> None:
        self.exchange = make_exchange(config)
        self._alone = not config.has_several_replicas
        self.settled = StageOuterState()
        """state after the last commit or round"""
        self.publisher = UpdatePublisher()
        """replaced by an injected fault"""
        self.left_out: Mapping[int, str] = {}
        """replica → why its update is ignored by all in the current step"""
        self.received: Mapping[int, str] = {}
        """replica → digest of its update in that step (``exchange/robust/equivocation.py``)"""
        self._pending: StageOuterState | None = None
        self._revocable_from: StageOuterState | None = None
        """restored if the step is dropped"""
        self._honest = Update()
        self._reset_reason: Full = "beginning"
        """reason for the last or next reset of estimates"""

    def begin(self, state: Mapping[str, Tensor], weights: Weights, rounds: int) -> None:
        """Start with new ``weights`` after ``rounds`` settled rounds; an empty outer ``state`` is initialised."""
        self.drop()
        self._revocable_from = None
        self._reset_reason = "replicas" if state else "beginning"
        if state:
            self.settled = StageOuterState.load({**state, "rounds": torch.tensor(rounds)}, self.exchange.parts)
        else:
            self.settled = replace(StageOuterState() if self._alone else self.exchange.start(weights), rounds=rounds)

    def catch_up(self, state: Mapping[str, Tensor], fast: Weights, rounds: int) -> Weights:
        """Take over another replica's outer ``state`` after ``rounds``; return the fast weights of this one."""
        latest = StageOuterState.load({**state, "rounds": torch.tensor(rounds)}, self.exchange.parts)
        fast, self.settled = self.exchange.catch_up(self.settled, fast, latest)
        return fast

    def update(self, runner: StageRunner, me: int = 0) -> Update:
        """Return the update of replica ``me`` from the step's unclipped gradient.

        :raises NonFinite: if a number in it is not finite, which rounding could hide.
        """
        runner.rescale_for_skips()
        update = self.exchange.for_sender(me).update(self.settled, runner.grads)
        lossy = update.blocking is not None and update.blocking.dtype != torch.float32
        if lossy and not all(all_finite(gradient) for gradient in runner.grads.values()):
            raise NonFinite(f"the gradient of stage {runner.stage} is not finite; lower optim.lr")
        self._honest = update
        return update

    def settle(self, updates: Mapping[int, Update], me: int, runner: StageRunner) -> UpdateReport:
        """Replace the gradient by the exchange's result for ``updates`` (replica → update, including ``me``).

        Invalid updates are excluded, up to the number that the exchange tolerates.
        :raises NonFinite: if there are more; it names their replicas.
        """
        weights: list[UpdateWeights] = []
        try:
            rule, sound, rejected = validate(
                self.exchange, self.settled, updates, self._honest, weights.append, self.left_out
            )
            grads, self._pending = rule.settle(self.settled, runner.grads, sound, me)
        except TooManyByzantine as error:
            fix = "lower optim.lr" if "finite" in str(error) else "check that replica"
            fix += "" if self.exchange.tolerated else "; exchange.robust has rules that tolerate it"
            raise NonFinite(f"the gradients of stage {runner.stage} cannot be combined: {error}; {fix}") from None
        runner.set_gradients(grads)
        others = {replica: update for replica, update in sound.items() if replica != me}
        self.publisher.received(others, self.exchange.codec(self.settled), self.settled.rounds)
        witnessed = self.exchange.detects_equivocation(len(updates))
        self.received = {replica: digest(update) for replica, update in updates.items()} if witnessed else {}
        return UpdateReport(rejected, weights)

    def after_member_change(self) -> None:
        """Reset estimates after another node of the stage was rebuilt without its own."""
        self.settled = self.exchange.after_member_change(self.settled)
        if self.settled.rounds:
            self._reset_reason = "rebuilt"

    def hold(self) -> None:
        """Make later changes of :attr:`settled` revocable until the step commits."""
        self._revocable_from = self.settled

    def commit(self) -> UpdateReport:
        """Commit the step; return what to report about it."""
        self._revocable_from = None
        if self._pending is None:
            return UpdateReport()
        self.settled, self._pending = self._pending, None
        self.publisher.sent()
        return UpdateReport(compressed=self._honest.compressed, full=self._reset_reason)

    def drop(self) -> None:
        """Discard the current step."""
        self._pending = None
        if self._revocable_from is not None:
            self.settled, self._revocable_from = self._revocable_from, None

    def state_for_transfer(self, to_successor: bool) -> dict[str, Tensor]:
        """Return the outer state for a successor of this node, or the shared part of it for a copy."""
        outer = self.settled if to_successor else self.settled.for_copy(self.exchange.parts)
        return {name: tensor for name, tensor in outer.state().items() if name != "rounds"}
