"""Open a peer's trained policy, or export it as a Hugging Face model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from planaria.common.errors import UserError, suggestion
from planaria.swarm.assemble import make_policy, make_task
from planaria.swarm.certificate import attach_certificate
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.config.swarm_recipe import peer_config, run_config
from planaria.swarm.policy.base import Exportable, Policy
from planaria.swarm.records.lines import PEERS
from planaria.swarm.records.saved_state import restore_weights, saved_rounds
from planaria.swarm.swarm_processes import board_address
from planaria.swarm.tasks.base import Task


@dataclass(frozen=True)
class ModelArguments:
    """The model arguments of a command."""

    model: str
    """a run, or a model: a folder, a GGUF file, or hf:NAME"""
    peer: str | None = None
    round: int | None = None

    @property
    def is_swarm(self) -> bool:
        return (Path(self.model) / PEERS).is_dir()

    def required_peer(self) -> str | None:
        """Return the peer of a swarm's run, or None for other models.

        :raises UserError: for a swarm's run without a peer, or another model with a peer or round.
        """
        if self.is_swarm and self.peer is None:
            raise UserError(f"{self.model}: a swarm's run has a model for each peer; pass one, such as --peer p0")
        if not self.is_swarm and (self.peer, self.round) != (None, None):
            raise UserError(f"{self.model} is not a swarm's run; remove --peer and --round")
        return self.peer


@dataclass(frozen=True)
class TrainedState:
    """A peer's state after some rounds, on the CPU in fp32."""

    config: SwarmConfig
    """the peer's own configuration"""
    task: Task
    policy: Policy
    round: int


def trained_state(run: Path, name: str, round_number: int | None = None) -> TrainedState:
    """Return a peer's state after a round, by default the newest saved one; UserError if it does not exist."""
    config, peers = run_config(run), sorted(path.name for path in (run / PEERS).iterdir() if path.is_dir())
    if name not in peers:
        raise UserError(f"--peer {name}: {run} has no such peer; {suggestion(name, peers)}")
    return learned_state(peer_config(config, name), run, name, round_number)


def learned_state(config: SwarmConfig, run: Path, name: str, round_number: int | None = None) -> TrainedState:
    """Return the same for a peer whose configuration is known."""
    rounds = saved_rounds(run / PEERS / name)
    if not rounds:
        raise UserError(f"{run}: {name} has no saved state; wait for one, or run the swarm with rounds.keep above 0")
    if round_number is not None and round_number not in rounds:
        saved = ", ".join(map(str, rounds))
        raise UserError(
            f"--round {round_number}: {name} was saved after {saved}; use one of these (rounds.keep, rounds.kept)"
        )
    result, task = rounds[-1] if round_number is None else round_number, make_task(config)
    policy = initial_policy(config, task)
    restore_weights(run / PEERS / name, result, policy)
    return TrainedState(config, task, policy, result)


def trusted_state(config: SwarmConfig, run: Path, name: str) -> TrainedState:
    """Return a peer's state before it was poisoned: after ``rounds.trusted``, or its initial one."""
    if config.rounds.trusted:
        return learned_state(config, run, name, config.rounds.trusted)
    task = make_task(config)
    return TrainedState(config, task, initial_policy(config, task), 0)


def initial_policy(config: SwarmConfig, task: Task) -> Policy:
    on_cpu = config.policy.model_copy(update={"device": "cpu", "precision": "fp32"})
    return make_policy(config.model_copy(update={"policy": on_cpu}), task)


def export_peer(
    run: Path, name: str, to: Path, round_number: int | None = None, report: Callable[[str], None] = lambda _: None
) -> Path:
    """Export the policy of peer ``name`` of the swarm in ``run`` as a Hugging Face model into ``to``.

    It uses the newest saved round unless ``round_number`` is given; LoRA is merged. If the run has a committee, the
    certificate of these weights is added if a quorum signed them; ``report`` receives a line about it.

    :raises UserError: if there is no such run, peer or state, or the policy cannot be exported.
    """
    result = trained_state(run, name, round_number)
    if not isinstance(result.policy, Exportable):
        raise UserError(
            f"policy.kind = {result.config.policy.kind!r} cannot be exported; add a method export(folder) to its policy"
        )
    result.policy.export(to)
    config = run_config(run)
    if config.receipts.committee:
        report(attach_certificate(board_address(config, run), result.round, to))
    return to
