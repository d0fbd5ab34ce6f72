"""A worker's part in the rounds in which replicas of its stage meet. The exchange itself is pure (``exchange/``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from planaria.config import ExchangeConfig
from planaria.engine.runner import StageRunner
from planaria.exchange import exchange
from planaria.exchange.base import Offer, Outer
from planaria.transport.wire import Content


@dataclass(frozen=True)
class Made:
    """What a settled round was like, here."""

    late_bytes: int
    early_bytes: int
    apart: float


class Circle:
    """The outer state of a node, its offer of the round under way, and what it has heard of others."""

    def __init__(self, config: ExchangeConfig) -> None:
        self.exchange = exchange(config)
        self.round = -1
        """under way, or the last one"""
        self._outer = Outer()
        self._own: Offer | None = None
        self._heard: dict[int, dict[Content, Tensor]] = {}

    def begin(self, outer: Mapping[str, Tensor], runner: StageRunner, rounds: int) -> None:
        """The node has its weights from elsewhere, and an ``outer`` state with them; if none, it begins one."""
        self.drop()
        if outer:
            self._outer = Outer.load({**outer, "rounds": torch.tensor(rounds)})
        else:
            self._outer = replace(self.exchange.start(runner.state().weights), rounds=rounds)

    def drop(self) -> None:
        """Forget the round under way: nothing has come of it."""
        self._own = None
        self._heard.clear()

    @property
    def outer(self) -> dict[str, Tensor]:
        """The outer state, as a checkpoint has it; shares memory."""
        return self._outer.state()

    def lent(self) -> dict[str, Tensor]:
        """The outer state that a copy of this node begins with: all but what rounding owes its others."""
        state = replace(self._outer, residual={}).state()
        return {name: tensor for name, tensor in state.items() if name != "rounds"}

    def offer(self, round: int, runner: StageRunner) -> dict[Content, Tensor]:
        """What this node says in ``round``."""
        self.drop()
        self.round = round
        self._outer = replace(self._outer, rounds=round)
        self._own = self.exchange.offer(self._outer, runner.state().weights)
        parts = {Content.EARLY: self._own.early, Content.LATE: self._own.late}
        return {content: part for content, part in parts.items() if part is not None}

    def hear(self, peer: int, content: Content, payload: Tensor) -> bool:
        """Take in a part of a peer's offer; is it whole now?

        :raises ValueError: when it is not like the own one.
        """
        assert self._own is not None, "edges are opened by those who have made their offer"
        own = {Content.EARLY: self._own.early, Content.LATE: self._own.late}
        like = own.get(content)
        if like is None or (like.shape, like.dtype) != (payload.shape, payload.dtype):
            expected = "nothing" if like is None else f"{like.dtype} {list(like.shape)}"
            raise ValueError(f"its {content.name} part is {payload.dtype} {list(payload.shape)}; expected {expected}")
        self._heard.setdefault(peer, {})[content] = payload
        return self._heard[peer].keys() == {part for part, tensor in own.items() if tensor is not None}

    def settle(self, round: int, me: int, peers: Mapping[int, int], runner: StageRunner) -> Made:
        """Go on with what ``round`` comes to: ``me`` and the other members, by replica; ``peers``: replica → node."""
        if self._own is None or self.round != round:
            self.offer(round, runner)
        assert self._own is not None
        heard = {replica: self._heard[node] for replica, node in peers.items()}
        offers = {r: Offer(parts.get(Content.LATE), parts.get(Content.EARLY)) for r, parts in heard.items()}
        offers[me] = self._own
        apart = self.exchange.apart(offers)
        fast, self._outer = self.exchange.settle(self._outer, runner.state().weights, offers, me)
        runner.put(fast)
        late, early = (0 if part is None else part.nbytes * len(peers) for part in (self._own.late, self._own.early))
        self.drop()
        return Made(late, early, apart)
