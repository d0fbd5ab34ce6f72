"""Saved states that a peer returns to: after a restart, a loss of accuracy, or a contradicting certificate."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

from planaria.common.errors import RunStopped
from planaria.swarm.board.peer_board import PeerBoard
from planaria.swarm.checks.defence import Defence, DefenceState
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.learning.learner import Learner
from planaria.swarm.learning.weight_versions import cloned_weights, copy_weights
from planaria.swarm.records.lines import LOG, Evaluated, read_log
from planaria.swarm.records.saved_state import BEST, restore_best, restore_peer, save_peer


class PeerRecovery:
    """Saved states of a peer's learners and defence: on disk, in ``folder``, and in memory."""

    def __init__(
        self,
        config: SwarmConfig,
        name: str,
        folder: Path,
        board: PeerBoard,
        learners: Mapping[str, Learner],
        defence: Defence,
    ) -> None:
        self._config = config
        self._name = name
        self._folder = folder
        self._board = board
        self._learners = learners
        self._defence = defence
        self._accuracies: dict[int, float] = {}
        """rounds learned from → held-out accuracy"""
        self._before: StateBefore | None = None

    def resume(self, first: int) -> int:
        """Restore the last saved state; return the round to begin with: ``first`` if there is none."""
        start, result = first, restore_peer(self._folder, self._board.run, self._learners)
        if result is not None:
            start, memory = result
            self._defence.load_state(memory)
        evaluated = [r for r in read_log(self._folder / LOG) if isinstance(r, Evaluated) and r.round <= start]
        self._accuracies = {r.round: r.accuracy.rate or 0.0 for r in evaluated}
        return start

    def record_accuracy(self, after: int, accuracy: float) -> None:
        self._accuracies[after] = accuracy

    def save(self, after: int) -> bool:
        """Save the state after ``after`` rounds if that is due; return whether it was."""
        rounds = self._config.rounds
        if due := after == rounds.trusted or bool(rounds.keep and (after % rounds.keep == 0 or after == rounds.count)):
            memory = self._defence.state()
            save_peer(self._folder, self._board.run, after, self._learners, memory, rounds.kept, rounds.trusted)
        return due

    def stop_on_accuracy_drop(self, after: int) -> None:
        """Keep the state after ``after`` rounds if it is the best so far; stop if accuracy fell too far below the best.

        :raises RunStopped: if it fell; only the best state is kept.
        """
        limit = self._config.task.max_accuracy_drop
        if not limit or after not in self._accuracies:
            return
        best_folder = self._folder / BEST
        if best_round(self._accuracies) == after:
            best_folder.mkdir(exist_ok=True)
            save_peer(best_folder, self._board.run, after, self._learners, self._defence.state())
        if why := accuracy_drop(self._accuracies, after, limit):
            self._board.leave(after)
            summary = restore_best(self._folder, best_folder)
            raise RunStopped(f"{self._name}: {why}; {summary}")

    def remember_state(self) -> None:
        """Keep the present state in memory, to return to, while a certificate is pending."""
        if self._board.may_be_overruled and self._before is None:
            self._before = StateBefore(self._learners, self._defence.state())

    def roll_back_if_overruled(self, round_number: int) -> int:
        """Return the next round: ``round_number``, or an earlier one if a certificate contradicts what the peer learned
        from; the state of the earlier round is then restored."""
        back = self._board.overruled_round(round_number)
        if back is not None and self._before is not None:
            self._before.restore(self._learners)
            self._defence.load_state(self._before.memory)
        if not self._board.may_be_overruled:
            self._before = None
        return round_number if back is None else back


class StateBefore:
    """A peer's state before a round, in memory, to return to if a certificate lists other messages.

    Holds trained weights and their earlier versions, optimizer moments and the defence's memory.
    """

    def __init__(self, learners: Mapping[str, Learner], memory: DefenceState) -> None:
        self.memory = memory
        self._held = {
            name: (
                cloned_weights(learner.policy.module),
                copy.deepcopy(learner.optimizer.state_dict()),
                learner.versions.held,
            )
            for name, learner in learners.items()
        }

    def restore(self, learners: Mapping[str, Learner]) -> None:
        for name, learner in learners.items():
            weights, moments, learner.versions.held = self._held[name]
            copy_weights(learner.policy.module, weights)
            learner.optimizer.load_state_dict(copy.deepcopy(moments))


def best_round(accuracies: Mapping[int, float]) -> int:
    return max(accuracies, key=lambda after: accuracies[after])


def accuracy_drop(accuracies: Mapping[int, float], after: int, limit: float) -> str:
    """Return why the run stops ``after`` a round, in a clause, or an empty string if its accuracy is at most ``limit``
    below the best.

    Agreement can drift from truth unnoticed; held-out problems with known labels show it.
    """
    best = best_round(accuracies)
    if accuracies[best] - accuracies[after] <= limit:
        return ""
    return (
        f"held-out accuracy fell from {accuracies[best]:.3f} after round {best} to {accuracies[after]:.3f} after round "
        f"{after}, by more than task.max_accuracy_drop = {limit:g}"
    )
