"""The two sides of a copy: what sends of a stage, and what keeps it at its host. Engines know these protocols alone."""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from planaria.models.state import Shapes, StageState

Moment = Literal["before", "after"]
"""of a step's computation: a message of ``before`` is made from committed state, one of ``after`` from the gradient"""


class Sender(Protocol):
    """Lives beside a stage that is copied. Both sides act in steps: nothing counts until the step is committed."""

    @property
    def nbytes(self) -> int:
        """Memory that it holds between steps."""
        ...

    def restart(self) -> None:
        """The stage or its host has a new holder: nothing that was sent so far may be built upon."""
        ...

    def before(self, step: int, state: StageState) -> Tensor | None:
        """What to send at the beginning of ``step``."""
        ...

    def updates_first(self, step: int) -> bool:
        """Must the update of ``step`` be applied, revocably, before :meth:`after` is asked?"""
        ...

    def after(self, step: int, state: StageState, gradients: StageState) -> Tensor | None:
        """What to send once the clipped ``gradients`` of ``step`` (as weights, with their norms) are whole."""
        ...

    def commit(self, step: int) -> None:
        """``step`` is committed: what was sent counts."""
        ...

    def drop(self) -> None:
        """The step is dropped: what was sent never was."""
        ...


class Holder(Protocol):
    """Lives at the host. Takes exactly what the senders' rules make them send."""

    @property
    def nbytes(self) -> int:
        """Memory that it holds between steps."""
        ...

    def restart(self) -> None:
        """As for the senders; what is held stays until something newer is whole."""
        ...

    def expects(self, step: int) -> tuple[Moment, ...]:
        """The messages of ``step`` from each source."""
        ...

    def take(self, step: int, source: int, moment: Moment, message: Tensor) -> None:
        """One of them, from the stage ``source``.

        :raises ValueError: when it is not what the sender's rules make.
        """
        ...

    def passes(self, microbatch: int, x: Tensor) -> None:
        """The host has just computed ``x``, which it sends to a copied stage."""
        ...

    def commit(self, step: int) -> None: ...

    def drop(self) -> None: ...

    def state(self) -> StageState:
        """What the host can give of what it keeps; shares memory."""
        ...


@runtime_checkable
class RestoredHolder(Holder, Protocol):
    """The holder of a strategy with a :class:`Retention`, which brings back what was kept, too
    (:meth:`Recovery.restored`)."""

    @property
    def retained(self) -> int:
        """The step of which :meth:`state` is; -1: none yet."""
        ...

    def intact(self) -> bool:
        """Is what :meth:`state` is to give what it was when it was kept?"""
        ...

    def load(self, state: StageState, step: int) -> None:
        """Keep what :meth:`state` is to give, as of ``step``."""
        ...


def numel(shapes: Shapes) -> int:
    """Numbers in tensors of these shapes."""
    return sum(shape.numel() for shape in shapes.values())


class Original(Protocol):
    """What a keeper may know of the stage that it copies."""

    @property
    def shapes(self) -> Shapes:
        """Its parameters by local name."""
        ...

    def twin(self) -> Twin:
        """A second runner of it; whatever its state is, it is about to be loaded."""
        ...


class Twin(Protocol):
    """A second runner of a stage: its weights and optimizer, at another worker."""

    @property
    def nbytes(self) -> int: ...

    def load(self, state: StageState) -> None: ...

    def state(self) -> StageState: ...

    def shadow(self, microbatch: int, x: Tensor) -> None:
        """Compute the stage's forward of ``x`` and keep what its backward would need, until :meth:`drop`."""
        ...

    def apply(self, step: int, gradients: StageState) -> None:
        """Update with these gradients (as weights, with their norms) as the stage itself does in ``step``."""
        ...

    def drop(self) -> None: ...
