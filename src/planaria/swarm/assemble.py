"""A peer put together from its configuration: task, policy, judge, identity, board."""

from __future__ import annotations

from collections.abc import Callable, Set
from pathlib import Path

from planaria.errors import UserError, nearest
from planaria.swarm.board.board import Board
from planaria.swarm.board.identity import Identity
from planaria.swarm.board.message import Hello
from planaria.swarm.board.quorum import Quorum
from planaria.swarm.checks.judge import Judge, NoisyJudge, StepsJudge
from planaria.swarm.checks.judge_model import ModelWriter
from planaria.swarm.checks.prompted_judge import PromptedJudge
from planaria.swarm.config import SwarmConfig
from planaria.swarm.peer import Peer, describe
from planaria.swarm.policy.base import Policy
from planaria.swarm.policy.policies import LlamaPolicy, open_policy
from planaria.swarm.policy.school import graduate
from planaria.swarm.records.lines import LOG, PEERS, Started, read_log
from planaria.swarm.setting import rules
from planaria.tasks.base import Task
from planaria.tasks.registry import open_task

Told = Callable[[str], None]
JUDGES = ("none", "steps", "noisy:RATE", "model:PATH")


def policy_of(config: SwarmConfig, task: Task, told: Told | None = None) -> Policy:
    """The policy that a peer starts with; UserError when there is none to be had."""
    if config.policy.path:
        return open_policy(config.policy.path, config.policy.lora, seed=config.seed)
    return LlamaPolicy(*graduate(task, config.school, config.policy, on_progress=told))


def task_of(config: SwarmConfig) -> Task:
    return open_task(config.task.name, config.task.style)


def judge_of(config: SwarmConfig, task: Task) -> Judge | None:
    """Who reads what scores; UserError when nobody of that name can."""
    defence = config.defence
    kind, _, rest = defence.judge.partition(":")
    if defence.judge == "none":
        return None
    if defence.judge == "steps":
        return StepsJudge(task)
    if kind == "noisy":
        return NoisyJudge(StepsJudge(task), _rate(defence.judge, rest), config.seed)
    if kind == "model" and rest:
        writer = ModelWriter(rest, defence.judge_tokens)
        return PromptedJudge(writer, config.seed, defence.judge_critique)
    if kind == "model":
        raise UserError(f"defence.judge = {defence.judge!r} names no model; write model:PATH or model:hf:NAME")
    raise UserError(f"defence.judge = {defence.judge!r} is not known; {nearest(kind, JUDGES)}")


def _rate(judge: str, rate: str) -> float:
    try:
        share = float(rate)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UserError(f"defence.judge = {judge!r}: write noisy:RATE with a rate from 0 to 1, as in noisy:0.25")
    return share


def assemble(
    config: SwarmConfig,
    name: str,
    folder: Path,
    board: str,
    identity: Identity,
    late: bool = False,
    known: Set[str] = frozenset(),
    told: Told | None = None,
) -> Peer:
    """The peer ``name``, which notes what it does in ``folder`` and joins the run on ``board``.

    ``known``: ids of peers that the run is sure to have. ``late``: begin with the round that the others are at, rather
    than follow them from the first.
    """
    task = task_of(config)
    place = Board.open(board, identity, known=known)
    place.found(rules(config, task))  # before anything that takes time: who is at the wrong place learns it now
    policy = policy_of(config, task, told)
    meeting = Quorum(place, identity.peer, config.rounds, config.size, near="://" not in board)
    hello = Hello(
        run=meeting.run,
        peer=identity.peer,
        key=identity.public.hex(),
        name=name,
        tokenizer=policy.tokenizer_fingerprint,
        model=describe(policy),
        joined=max(0, meeting.newest()) if late else 0,
    )
    own = folder / PEERS / name
    _check_records(own, meeting.run)
    first = meeting.arrive(hello, known)
    return Peer(config, name, own, meeting, task, policy, judge_of(config, task), first)


def _check_records(own: Path, run: str) -> None:
    """One log tells of one run."""
    if any(isinstance(record, Started) and record.run != run for record in read_log(own / LOG)):
        raise UserError(f"{own}: holds this peer's records of another run; give another --name, or remove it")
