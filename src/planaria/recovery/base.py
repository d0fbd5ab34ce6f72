"""What every recovery strategy answers: who helps to rebuild what was lost, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Unrecoverable:
    """The strategy has no way to bring ``stages`` back; ``reason`` is a sentence for the user."""

    stages: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Donor:
    """What a surviving stage sends to the worker that rebuilds a lost one.

    ``weights`` are the stage's parameters by local name. ``grad_norm`` is the L2 norm of the stage's last committed
    gradient before clipping and ``clipped_norm`` the norm after it; both None when the stage has committed no step
    since it was (re)born.
    """

    weights: Mapping[str, Tensor]
    grad_norm: float | None
    clipped_norm: float | None


class Recovery(Protocol):
    """A recovery strategy: pure decisions and pure tensor arithmetic; it never touches a process or a socket."""

    @property
    def lr_scale(self) -> float:
        """Factor on a rebuilt stage's starting learning rate, applied once however often the stage is rebuilt."""
        ...

    def donors(self, lost: frozenset[int], stages: int) -> dict[int, tuple[int, ...]] | Unrecoverable:
        """Lost stage → the surviving stages it is rebuilt from, for block stages 1..``stages`` and the ends (0)."""
        ...

    def rebuild(self, stage: int, donors: Mapping[int, Donor]) -> dict[str, Tensor]:
        """The lost stage's new weights from what its donors sent."""
        ...
