"""What a peer keeps of itself on its way, and when it goes back to that: when it is started again, when it has fallen
too far behind its best, and when a late certificate says that others were heard than it learned from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from planaria.common.errors import RunStopped
from planaria.swarm.board.quorum import Quorum
from planaria.swarm.checks.defence import Defence
from planaria.swarm.config import RoundsConfig, SwarmConfig
from planaria.swarm.learning.brake import Looked, best, fallen
from planaria.swarm.learning.learner import Learner
from planaria.swarm.records.before import Before
from planaria.swarm.records.kept import BEST, keep, recall, take_back
from planaria.swarm.records.lines import LOG, Evaluated, read_log


class Keeping:
    """The states of a peer's learners and of its defence: on disk, in ``folder``, and in memory."""

    def __init__(
        self,
        config: SwarmConfig,
        name: str,
        folder: Path,
        meeting: Quorum,
        learners: Mapping[str, Learner],
        defence: Defence,
    ) -> None:
        self._config, self._name, self._folder = config, name, folder
        self._meeting, self._learners, self._defence = meeting, learners, defence
        self._looks: list[Looked] = []
        self._before: Before | None = None

    def resume(self, first: int) -> int:
        """Become what was kept last. The round to begin with: ``first`` if nothing was."""
        start, found = first, recall(self._folder, self._meeting.run, self._learners)
        if found is not None:
            start, memory = found
            self._defence.recall(memory)
        told = [r for r in read_log(self._folder / LOG) if isinstance(r, Evaluated) and r.round <= start]
        self._looks = [Looked(r.round, r.accuracy.rate or 0.0) for r in told]
        return start

    def looked(self, after: int, accuracy: float) -> None:
        """Held-out accuracy after ``after`` rounds."""
        self._looks.append(Looked(after, accuracy))

    def save(self, after: int) -> bool:
        """Save what the peer is after ``after`` rounds, if that is due. Whether it was."""
        rounds = self._config.rounds
        if due := saves(rounds, after):
            memory = self._defence.memory()
            keep(self._folder, self._meeting.run, after, self._learners, memory, rounds.kept, rounds.trusted)
        return due

    def brake(self, after: int) -> None:
        """Keep the peer's state after ``after`` rounds if it is the best so far; end it if it has fallen behind that.

        :raises RunStopped: when it has; its best state then is the only one kept.
        """
        brake = self._config.task.brake
        if not brake or not self._looks or self._looks[-1].round != after:
            return
        apart = self._folder / BEST
        if best(self._looks).round == after:
            apart.mkdir(exist_ok=True)
            keep(apart, self._meeting.run, after, self._learners, self._defence.memory())
        if why := fallen(self._looks, brake):
            self._meeting.leave(after)
            told = take_back(self._folder, apart)
            raise RunStopped(f"{self._name}: {why}; {told}")

    def remember(self, number: int) -> None:
        """Before the peer learns from round ``number``: where it would go back to, as long as rounds are unsettled."""
        if self._meeting.unsettled and self._before is None:
            self._before = Before(number, self._learners, self._defence.memory())

    def unless_overruled(self, number: int) -> int:
        """The round to go on with: an earlier one, with what the peer was before it, where a late certificate says
        that others were heard than it learned from."""
        back = self._meeting.overruled(number)
        if back is not None and self._before is not None:
            self._before.restore(self._learners)
            self._defence.recall(self._before.memory)
        if not self._meeting.unsettled:
            self._before = None
        return number if back is None else back


def saves(rounds: RoundsConfig, done: int) -> bool:
    """Whether a peer saves what it is after ``done`` rounds, 1 or more."""
    if done == rounds.trusted:
        return True
    return bool(rounds.keep) and (done % rounds.keep == 0 or done == rounds.count)
