"""An exact copy of parameters at another worker, renewed every k steps as part of the step.

The sender applies the step's update before the step is committed, revocably, and sends the result. So the copy counts
in the same instant as the update itself: with k = 1 it equals the stage's last committed state whenever that dies.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from planaria.models.packing import pack, unpack
from planaria.models.state import StageState
from planaria.recovery.base import Moment


def due(step: int, every: int, restarted: bool) -> bool:
    """Is the copy renewed in ``step``? In the first one of a new pair, and then in every ``every``-th of the run."""
    return restarted or (step + 1) % every == 0


class MirrorSender:
    """Sends the ``wanted`` parameters after each due update, with their moments or without."""

    nbytes = 0

    def __init__(self, wanted: Callable[[str], bool], every: int, moments: bool) -> None:
        self._wanted, self._every, self._moments = wanted, every, moments
        self._restarted = True

    def restart(self) -> None:
        self._restarted = True

    def before(self, step: int, state: StageState) -> Tensor | None:
        return None

    def updates_first(self, step: int) -> bool:
        return due(step, self._every, self._restarted)

    def after(self, step: int, state: StageState, gradients: StageState) -> Tensor | None:
        return pack(state.part(self._wanted, self._moments)) if self.updates_first(step) else None

    def commit(self, step: int) -> None:
        self._restarted = False

    def drop(self) -> None:
        """Nothing to take back: the next try sends again."""


class MirrorHolder:
    """Holds the newest committed copy, and the one of the step under way."""

    def __init__(self, every: int) -> None:
        self._every, self._restarted = every, True
        self._held: StageState | None = None
        self._pending: StageState | None = None

    @property
    def nbytes(self) -> int:
        return self._held.nbytes if self._held else 0

    def restart(self) -> None:
        self._restarted = True

    def expects(self, step: int) -> tuple[Moment, ...]:
        return ("after",) if due(step, self._every, self._restarted) else ()

    def take(self, step: int, source: int, moment: Moment, message: Tensor) -> None:
        self._pending = unpack(message)

    def passes(self, microbatch: int, x: Tensor) -> None:
        """Activations are nothing to a mirror."""

    def commit(self, step: int) -> None:
        self._held, self._pending, self._restarted = self._pending or self._held, None, False

    def drop(self) -> None:
        self._pending = None

    def state(self) -> StageState:
        assert self._held is not None, "asked for a copy before the first commit"
        return self._held
