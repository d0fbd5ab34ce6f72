"""What a peer of a swarm learned, taken elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from planaria.api.certificate import attach
from planaria.errors import UserError, nearest
from planaria.swarm.assemble import policy_of, task_of
from planaria.swarm.live import board_of
from planaria.swarm.policy.base import Exportable
from planaria.swarm.records.kept import restore, rounds_kept
from planaria.swarm.records.lines import PEERS
from planaria.swarm.setting import of_peer, of_run


def export_peer(
    run: Path, name: str, to: Path, round: int | None = None, told: Callable[[str], None] = lambda _: None
) -> Path:
    """Write what the peer ``name`` of the swarm in ``run`` had learned as a Hugging Face model into ``to``.

    As it was after the newest round that is kept, unless ``round`` says after how many. LoRA's products are added to
    the matrices that they stand beside. Where the run has a committee and a quorum of it has signed these weights,
    their certificate is put beside them; ``told`` hears of it, or why there is none.

    :raises UserError: when there is no such run, peer or state, or the policy cannot be exported.
    """
    config, peers = of_run(run), sorted(path.name for path in (run / PEERS).iterdir() if path.is_dir())
    if name not in peers:
        raise UserError(f"--peer {name}: {run} has no such peer; {nearest(name, peers)}")
    rounds = rounds_kept(run / PEERS / name)
    if not rounds:
        raise UserError(f"{run}: {name} has kept nothing; wait for it, or run the swarm with rounds.keep above 0")
    if round is not None and round not in rounds:
        known = ", ".join(map(str, rounds))
        raise UserError(f"--round {round}: {name} is kept after {known}; take one of these (rounds.keep, rounds.kept)")
    own = of_peer(config, name)
    here = own.policy.model_copy(update={"device": "cpu", "precision": "fp32"})  # whatever machine it learned on
    own = own.model_copy(update={"policy": here})
    policy = policy_of(own, task_of(own))
    if not isinstance(policy, Exportable):
        raise UserError(
            f"policy.kind = {own.policy.kind!r} cannot be exported; give its policy a method export(folder)"
        )
    number = rounds[-1] if round is None else round
    restore(run / PEERS / name, number, policy)
    policy.export(to)
    if config.receipts.committee:
        told(attach(board_of(config, run), number, to))
    return to
