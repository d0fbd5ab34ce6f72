"""The updates that a node sends to each member of its group."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from planaria.exchange.base import Update
from planaria.exchange.compress.base import Compressor


class UpdatePublisher:
    """An honest node: every member receives the same update. ``faults/byzantine.py`` derives from it."""

    def is_byzantine(self, step: int) -> bool:
        """Return whether updates made in or after this step may differ from the honest one."""
        return False

    def updates(
        self,
        honest: Update,
        codec: Compressor,
        position: tuple[int, int],
        me: int,
        others: Collection[int],
        known: Mapping[int, Tensor] | None = None,
    ) -> dict[int, Update]:
        """Return the update that replica ``me`` sends to each of the ``others``, and the one it uses itself.

        :param position: step and round.
        :param known: updates of the honest members in this round, as :func:`vectors` returns them.
        """
        return dict.fromkeys((*others, me), honest)

    def sent(self) -> None:
        """Called when the updates of a step or round have been sent."""

    def received(self, others: Mapping[int, Update], codec: Compressor, round: int) -> None:
        """Called with the valid updates of the other members of a round."""


def vectors(updates: Mapping[int, Update], codec: Compressor, round: int) -> dict[int, Tensor]:
    """Return the decoded updates, fp32 [d], by member; members without a blocking part are omitted."""
    messages = {member: update.blocking for member, update in updates.items() if update.blocking is not None}
    return {member: codec.decode(message, codec.count(message), round) for member, message in messages.items()}
