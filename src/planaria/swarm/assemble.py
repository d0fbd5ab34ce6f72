"""Construct a peer from its configuration: task, policy, checks, identity and board."""

from __future__ import annotations

from collections.abc import Callable, Set
from pathlib import Path

import torch

from planaria.common.errors import UserError
from planaria.config.registry import Choice, custom_choices
from planaria.swarm.attacks import ATTACKS, HONEST
from planaria.swarm.board.board import Board
from planaria.swarm.board.identity import PeerIdentity
from planaria.swarm.board.message import Hello
from planaria.swarm.board.peer_board import PeerBoard
from planaria.swarm.board.receipts import Committee
from planaria.swarm.checks import CHECKS, check_names, make_layers
from planaria.swarm.checks.consensus import check_rewards
from planaria.swarm.completions.remote_sampling import RemoteSampler
from planaria.swarm.config.policy_config import PolicyConfig
from planaria.swarm.config.swarm_config import ALL_PEERS, SwarmConfig
from planaria.swarm.config.swarm_recipe import run_rules
from planaria.swarm.peer.peer import Peer, describe
from planaria.swarm.policy import POLICIES
from planaria.swarm.policy.base import Policy
from planaria.swarm.policy.prompts import PromptFormat, prompt_layout
from planaria.swarm.records.lines import LOG, PEERS, PeerStarted, read_log
from planaria.swarm.tasks import TASKS, open_task
from planaria.swarm.tasks.base import Task

OnProgress = Callable[[str], None]
SERVED = "served"
"""folder of the weights for a peer's server"""
PROMPT_SETTINGS = ("chat", "instruction", "examples")
"""prompt settings"""


def make_policy(config: SwarmConfig, task: Task, on_progress: OnProgress | None = None) -> Policy:
    """Return a peer's initial policy with the recipe's prompt settings; UserError if it is unavailable."""
    source = POLICIES.make(config.policy.kind, config.policy.options)
    policy = place_policy(source.open(config, task, on_progress), config.policy)
    if isinstance(policy, PromptFormat):
        policy.layout = prompt_layout(policy.template, policy.tokenizer, config.policy, task)
    elif stated := [name for name in PROMPT_SETTINGS if getattr(config.policy, name) != getattr(PolicyConfig(), name)]:
        raise UserError(f"policy.{stated[0]}: {type(policy).__name__} formats its own prompts; remove the setting")
    return policy


def make_task(config: SwarmConfig) -> Task:
    """Return the task of a swarm. UserError as in :func:`planaria.swarm.tasks.open_task`, or for invalid rewards."""
    task = open_task(config.task.name, config.task.options)
    check_rewards(config, task)
    return task


def selected_custom_classes(config: SwarmConfig) -> list[type[Choice]]:
    """Return the custom classes that a peer's configuration selects; their code is not part of the recipe."""
    chosen: list[type[Choice]] = [TASKS.find(config.task.name), POLICIES.find(config.policy.kind)]
    attacks = {config.attack.kind, *config.evaluate.watch} - {HONEST}
    chosen += [*map(CHECKS.find, check_names(config.defence)), *map(ATTACKS.find, attacks)]
    return custom_choices(chosen)


def assemble(
    config: SwarmConfig,
    name: str,
    folder: Path,
    board: str,
    identity: PeerIdentity,
    late: bool = False,
    known: Set[str] = frozenset(),
    on_progress: OnProgress | None = None,
) -> Peer:
    """Construct the peer ``name``, which records in ``folder`` and joins the run on ``board``.

    :param late: begin with the current round instead of the first
    :param known: ids of the run's own peers
    """
    config = _with_members(config, known)
    task = make_task(config)
    checks = make_layers(config)
    mirror = Board(board, identity, known=known)
    mirror.create_run(run_rules(config, task))  # first, to report a wrong address before slow work
    policy = make_policy(config, task, on_progress)
    committee = Committee.from_rules(mirror.rules.rules)
    is_local = "://" not in board
    peer_board = PeerBoard(mirror, identity.peer, config.rounds, config.size, is_local, committee=committee)
    hello = Hello(
        run=peer_board.run,
        peer=identity.peer,
        key=identity.public.hex(),
        name=name,
        tokenizer=policy.tokenizer_fingerprint,
        model=describe(policy),
        joined=max(0, peer_board.newest()) if late else 0,
    )
    records = folder / PEERS / name
    _check_records(records, peer_board.run)
    drawing = policy.clone() if config.draws_during_learning else policy
    server = RemoteSampler(config, drawing, records / SERVED, name) if config.policy.server else None
    first = peer_board.join_and_wait(hello, known)
    return Peer(config, name, records, peer_board, task, policy, checks, first, known, server)


def _with_members(config: SwarmConfig, known: Set[str]) -> SwarmConfig:
    """Replace the committee 'all' by the peers' ids, as in the run's rules."""
    if config.receipts.committee != ALL_PEERS:
        return config
    if not known:
        raise UserError("receipts.committee = 'all' means the peers of one machine; list the members' ids")
    resolved = config.receipts.model_copy(update={"committee": ",".join(sorted(known))})
    return config.model_copy(update={"receipts": resolved})


def _check_records(records: Path, run: str) -> None:
    """Check that the log belongs to this run."""
    if any(isinstance(record, PeerStarted) and record.run != run for record in read_log(records / LOG)):
        raise UserError(f"{records} holds this peer's records of another run; use another --name, or remove the folder")


FP32_BYTES = 4
"""bytes per logit"""


def select_device(config: PolicyConfig) -> torch.device:
    """Return the configured device.

    :raises UserError: if it is missing, or too slow in the configured precision.
    """
    cuda = config.device != "cpu" and torch.cuda.is_available()
    if config.device == "cuda" and not cuda:
        raise UserError("policy.device = 'cuda': PyTorch finds no CUDA device on this machine; use 'auto' or 'cpu'")
    if config.precision == "bf16" and not cuda:
        raise UserError(
            "policy.precision = 'bf16' needs a CUDA device (policy.device): on CPUs it is many times slower"
        )
    return torch.device("cuda" if cuda else "cpu")


def place_policy(policy: Policy, config: PolicyConfig) -> Policy:
    """Move ``policy`` to its device and set its memory and precision.

    :raises UserError: as :func:`select_device` does, or if a custom policy supports no other precision.
    """
    policy.module.to(select_device(config))
    if isinstance(policy, PromptFormat):
        policy.max_logits, policy.bf16 = (config.logits_mb << 20) // FP32_BYTES, config.precision == "bf16"
    elif config.precision != "fp32":
        raise UserError(
            f"policy.precision = {config.precision!r}: {type(policy).__name__} sets its own precision; remove it"
        )
    return policy
