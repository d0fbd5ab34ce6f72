"""A node's outer state, wherever it runs: what was settled last, and what a step under way would make of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from planaria.config import ExchangeConfig
from planaria.engine.runner import NonFinite, StageRunner
from planaria.exchange import exchange
from planaria.exchange.base import Offer, Outer, TooManyLiars, Weights


class OuterState:
    """The outer state of one node, and its part in an exchange of gradients: what that makes of it is pending until the
    step commits, so that a step that is dropped leaves no trace."""

    def __init__(self, config: ExchangeConfig) -> None:
        self.exchange, self._alone = exchange(config), config.replicas == 1
        self.settled = Outer()
        """after the last commit, or the last round"""
        self._pending: Outer | None = None

    def begin(self, state: Mapping[str, Tensor], weights: Weights, rounds: int) -> None:
        """The node has its ``weights`` from elsewhere, and an outer ``state`` with them; if none, it begins one.

        So many ``rounds`` are settled.
        """
        self.drop()
        if state:
            self.settled = Outer.load({**state, "rounds": torch.tensor(rounds)}, self.exchange.parts)
        else:
            self.settled = replace(Outer() if self._alone else self.exchange.start(weights), rounds=rounds)

    def offer(self, runner: StageRunner) -> Offer:
        """What the node says of the step's gradient, before that is clipped.

        :raises NonFinite: when a number of it is not finite, which rounding might conceal.
        """
        runner.weigh()
        offer = self.exchange.offer(self.settled, runner.grads)
        lossy = offer.blocking is not None and offer.blocking.dtype != torch.float32
        if lossy and not all(torch.isfinite(gradient).all() for gradient in runner.grads.values()):
            raise NonFinite(f"the gradient of stage {runner.stage} is not finite; lower optim.lr")
        return offer

    def settle(self, offers: Mapping[int, Offer], me: int, runner: StageRunner) -> None:
        """The gradient that the ``offers`` (by node, that of ``me`` among them) come to takes the place of the own.

        :raises NonFinite: when too many of them are not finite for anything to be made of all.
        """
        try:
            grads, self._pending = self.exchange.settle(self.settled, runner.grads, offers, me)
        except TooManyLiars as error:
            raise NonFinite(f"the gradients of stage {runner.stage} come to nothing: {error}") from None
        runner.take(grads)

    def anew(self) -> None:
        """Another node of the stage has been rebuilt, and lacks what was its own: the others do not go by it either."""
        self.settled = self.exchange.anew(self.settled)

    def commit(self) -> None:
        """The step is committed."""
        if self._pending is not None:
            self.settled, self._pending = self._pending, None

    def drop(self) -> None:
        """The step under way is dropped."""
        self._pending = None

    def given(self, to_successor: bool) -> dict[str, Tensor]:
        """What whoever stands here from now on begins with, or a copy of this node: what is shared."""
        outer = self.settled if to_successor else self.settled.copied(self.exchange.parts)
        return {name: tensor for name, tensor in outer.state().items() if name != "rounds"}
