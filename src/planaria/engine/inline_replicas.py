"""The replicas of an inline run: what they exchange and when, as the recipe says; and the one model they make.

A stage of a replica is a node. The exchange itself is pure (``exchange/``); here it meets runners.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from planaria.config import RunConfig
from planaria.engine.outer_state import OuterState
from planaria.engine.runner import StageRunner
from planaria.exchange.base import Offer
from planaria.exchange.consensus import consensus
from planaria.model.state import StageState
from planaria.routing.arrangement import Arrangement

Heard = dict[int, dict[int, Offer]]
"""node → the offers of its group, by node"""


@dataclass(frozen=True)
class Round:
    """One round of all stages. Replicas meet whole: the groups are the same at every stage."""

    number: int
    groups: list[tuple[int, ...]]
    """of replicas"""
    blocking_bytes: int
    """sent by all nodes together, that somebody waited for"""
    prefetched_bytes: int


class InlineReplicas:
    """The outer state of every node, and the rounds."""

    def __init__(self, config: RunConfig, arrangement: Arrangement, runners: Mapping[int, StageRunner]) -> None:
        """:raises UserError: when the recipe's exchange cannot work."""
        self.outer = {node: OuterState(config.exchange) for node in runners}
        self.exchange = next(iter(self.outer.values())).exchange
        self._runners, self._arrangement = runners, arrangement
        self._count, self._seed = config.exchange.replicas, config.seed
        self._pending: list[tuple[int, Round, Heard]] = []
        """(commits by which it is to be settled, round, what was heard)"""
        self._round = 0
        for node in runners:
            self.start(node, {})

    def restart(self, rounds: int) -> None:
        """All nodes go back, or begin, where so many rounds were settled; what was under way is dropped."""
        self._round = rounds
        self._pending.clear()

    def start(self, node: int, outer: Mapping[str, Tensor]) -> None:
        """The node has its weights from elsewhere, and an ``outer`` state with them; if none, it begins one."""
        self.outer[node].begin(outer, self._runners[node].state().weights, self._round - len(self._pending))

    def rebuilt(self, nodes: Sequence[int]) -> None:
        """These nodes are copies of others of their stages."""
        for stage in {self._arrangement.stage[node] for node in nodes}:
            for node in self._arrangement.nodes(stage):
                self.outer[node].anew()

    def state(self, node: int) -> StageState:
        """All of a node that outlives a step; shares memory."""
        return replace(self._runners[node].state(), outer=self.outer[node].settled.state())

    def agree(self) -> None:
        """With an exchange of gradients: agree on those of every stage, before they are clipped."""
        if self.exchange.interval != 0:
            return
        _, heard = self._groups({node: self.outer[node].offer(runner) for node, runner in self._runners.items()})
        for node, offers in heard.items():
            self.outer[node].settle(offers, node, self._runners[node])

    def commit(self) -> None:
        """The step is committed."""
        for outer in self.outer.values():
            outer.commit()

    def meet(self, commits: int) -> list[Round]:
        """So many steps are committed: begin a round if one is due, settle what is; the rounds that were settled."""
        every = self.exchange.interval
        if every and commits % every == 0:
            weights = {node: runner.state().weights for node, runner in self._runners.items()}
            said = {node: self.exchange.offer(self.outer[node].settled, fast) for node, fast in weights.items()}
            self._pending.append((commits + self.exchange.overlap, *self._groups(said)))
        due = [pending for pending in self._pending if pending[0] <= commits]
        self._pending = self._pending[len(due) :]
        for _, _, heard in due:
            self._settle(heard)
        return [round for _, round, _ in due]

    def _groups(self, said: Mapping[int, Offer]) -> tuple[Round, Heard]:
        """Who hears what each node has ``said`` in the next round."""
        groups = self.exchange.groups(self._round, range(self._count), self._seed)
        heard: Heard = {}
        blocking = prefetched = 0
        for stage in self._arrangement.stages:
            nodes = self._arrangement.nodes(stage)
            for group in groups:
                members = [nodes[replica] for replica in group]
                heard |= {node: {other: said[other] for other in members} for node in members}
                blocking += (len(members) - 1) * sum(_size(said[node].blocking) for node in members)
                prefetched += (len(members) - 1) * sum(_size(said[node].prefetched) for node in members)
        round = Round(self._round, groups, blocking, prefetched)
        self._round += 1
        return round, heard

    def _settle(self, heard: Heard) -> None:
        for node, offers in heard.items():
            runner, outer = self._runners[node], self.outer[node]
            fast, outer.settled = self.exchange.settle(outer.settled, runner.state().weights, offers, node)
            runner.put(fast)

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
