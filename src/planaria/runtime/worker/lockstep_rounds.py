"""Exchange rounds of replicas that train in lockstep because their microbatches cross replicas (``routing.mixed``).

A round is part of the training step after which it starts or settles. Its result becomes permanent when that step
commits, and is discarded with the step. In all other runs the controller starts rounds (``PeerMessages.run_round``).
"""

from __future__ import annotations

from collections.abc import Mapping

from planaria.exchange.base import Exchange
from planaria.runtime.resolved_run import ResolvedRun
from planaria.runtime.transport.wire import FrameContent
from planaria.runtime.worker.exchange_round import SettledRound
from planaria.runtime.worker.peer_messages import PeerMessages
from planaria.runtime.worker.runner import NonFinite, StageRunner

_PARTS = FrameContent.PREFETCHED, FrameContent.BLOCKING
"""parts of an update, in sending order"""


def rounds_by(exchange: Exchange, commits: int) -> int:
    """Return the number of rounds settled after ``commits`` committed steps."""
    return max(0, commits - exchange.overlap) // exchange.interval if exchange.interval else 0


class LockstepRounds:
    """One worker's side of these rounds."""

    def __init__(self, resolved: ResolvedRun) -> None:
        self._exchange, self._seed = resolved.exchange, resolved.config.seed
        self._replicas = range(resolved.config.exchange.replicas)
        self._settled: tuple[int, SettledRound] | None = None
        """number and result of the round that the current step settles"""

    def run(self, messages: PeerMessages, runner: StageRunner) -> None:
        """After a step's passes, start and settle the rounds that belong to it.

        Applies the step's update revocably first, since a round exchanges the updated weights.

        :raises Superseded: if the controller cancels the step.
        :raises NonFinite: if a replica sends an invalid update.
        """
        commits, before = messages.assignment.step + 1, rounds_by(self._exchange, messages.assignment.step)
        every, settles = self._exchange.interval, rounds_by(self._exchange, commits) > before
        begins = bool(every) and commits % (every or 1) == 0
        self._settled = None
        if not begins and not settles:
            return
        runner.prepare(messages.assignment.step)
        if begins:
            self._publish_update(messages, runner, commits // (every or 1) - 1)
        if settles and messages.round_member.pending(before):  # a new generation drops pending rounds
            messages.round_member.outer.hold()
            peers = {
                replica: node
                for replica, node in self._group(messages, before).items()
                if node != messages.assignment.node
            }
            self._settled = before, messages.round_member.settle(before, messages.assignment.number, peers, runner)

    def take_settled(self) -> tuple[int, SettledRound] | None:
        """Return and clear the round that the committed step settled."""
        settled, self._settled = self._settled, None
        return settled

    def _publish_update(self, messages: PeerMessages, runner: StageRunner, round: int) -> None:
        """Exchange updates with the other replicas of the group; NonFinite if a replica sends an invalid update."""
        me = messages.assignment.number
        member = messages.round_member
        group = self._group(messages, round)
        update = member.update(round, runner)
        updates = member.updates_for(messages.assignment.step, me, [replica for replica in group if replica != me])
        nodes = [node for node in group.values() if node != messages.assignment.node]
        for part, content in enumerate(_PARTS):
            tensor = update.prefetched if content == FrameContent.PREFETCHED else update.blocking
            if tensor is None:
                continue
            for replica, node in group.items():
                if node != messages.assignment.node:
                    sent = tensor if content == FrameContent.PREFETCHED else updates[replica].blocking
                    assert sent is not None
                    messages.send_share(node, sent, part)
            for node, received in zip(nodes, messages.take_shares(nodes, None, part), strict=True):
                member.receive(node, content, received)
        for node, why in member.newly_rejected_peers().items():
            raise NonFinite(f"round {round}: the update of {messages.assignment.name_of(node)} {why}; lower optim.lr")

    def _group(self, messages: PeerMessages, round: int) -> Mapping[int, int]:
        """Return the live members of this worker's group in ``round``, replica → node of this stage."""
        nodes = messages.assignment.present.peers(messages.assignment.node)
        stage_nodes = messages.nodes_of_stage
        groups = self._exchange.groups(round, self._replicas, self._seed)
        members = next(group for group in groups if messages.assignment.number in group)
        return {replica: stage_nodes[replica] for replica in members if stage_nodes[replica] in nodes}
