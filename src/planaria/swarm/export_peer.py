"""What a peer of a swarm learned, taken elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from planaria.common.errors import UserError
from planaria.swarm.certificate import attach
from planaria.swarm.learned import learned
from planaria.swarm.live import board_of
from planaria.swarm.policy.base import Exportable
from planaria.swarm.setting import of_run


def export_peer(
    run: Path, name: str, to: Path, round: int | None = None, told: Callable[[str], None] = lambda _: None
) -> Path:
    """Write what the peer ``name`` of the swarm in ``run`` had learned as a Hugging Face model into ``to``.

    As it was after the newest round that is kept, unless ``round`` says after how many. LoRA's products are added to
    the matrices that they stand beside. Where the run has a committee and a quorum of it has signed these weights,
    their certificate is put beside them; ``told`` hears of it, or why there is none.

    :raises UserError: when there is no such run, peer or state, or the policy cannot be exported.
    """
    found = learned(run, name, round)
    if not isinstance(found.policy, Exportable):
        raise UserError(
            f"policy.kind = {found.config.policy.kind!r} cannot be exported; give its policy a method export(folder)"
        )
    found.policy.export(to)
    config = of_run(run)
    if config.receipts.committee:
        told(attach(board_of(config, run), found.round, to))
    return to
