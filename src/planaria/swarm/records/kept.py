"""Saved states of a peer: for a restart, and for taking what it learned out of the run.

::

    state-000010/                   after ten rounds; whole, or not there
        peer/, shadow/              weights and moments (:func:`save_state`)
        memory.json                 the run, and the memory of the defence
    best/state-000010/              the best state so far, if a brake is set

The file of a learner is a stage's (:mod:`planaria.runtime.checkpoint.stage_file`): safetensors with the trained
parameters, AdamW's moments, the generator and the round. Parameters that are not trained come from the policy's source.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import Field
from torch import nn

from planaria.common import documents
from planaria.common.documents import Record
from planaria.common.errors import UserError
from planaria.models.optimizers.adamw import KEYS
from planaria.models.state import StageState
from planaria.runtime.checkpoint.stage_file import read_stage, write_stage
from planaria.swarm.checks.defence import Memory
from planaria.swarm.learning.learner import Learner
from planaria.swarm.policy.base import Policy

BEST = "best"
PEER, SHADOW = "peer", "shadow"
"""the learners"""
_MEMORY = "memory.json"
_STATE = re.compile(r"state-(\d{6,})")


class _Kept(Record):
    run: str
    round: int
    defence: Memory
    digests: dict[str, str] = Field(default_factory=dict)
    """learner → SHA-256 of its file; empty where an older planaria wrote it"""
    tokenizer: str = ""
    """the policy's, by its fingerprint; empty where an older planaria wrote it"""


def keep(
    folder: Path,
    run: str,
    round: int,
    learners: Mapping[str, Learner],
    memory: Memory,
    most: int = 1,
    trusted: int = 0,
) -> None:
    """Write down what a peer is after ``round`` rounds of ``run``.

    Of what it was before, ``most`` - 1 states stay, and the one after ``trusted`` rounds.

    :raises OSError: when the disk is full or the folder cannot be written; what was there stays.
    """
    whole = folder / f"state-{round:06d}"
    unfinished = folder / f"{whole.name}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    digests = {
        name: save_state(unfinished / name, learner.policy.module, learner.optimizer, torch.Generator(), round)
        for name, learner in learners.items()
    }
    with (unfinished / _MEMORY).open("w") as file:
        tokenizer = learners[PEER].policy.tokenizer_fingerprint
        kept = _Kept(run=run, round=round, defence=memory, digests=digests, tokenizer=tokenizer)
        file.write(documents.sealed(kept))
        file.flush()
        os.fsync(file.fileno())
    shutil.rmtree(whole, ignore_errors=True)
    unfinished.replace(whole)
    others = [(number, place) for number, place in _states(folder) if number != trusted]
    for number, place in others[:-most]:
        if number != round:
            shutil.rmtree(place)


def recall(folder: Path, run: str, learners: Mapping[str, Learner]) -> tuple[int, Memory] | None:
    """Become what was kept last of ``run``: the round to go on with, and what the defence remembered.

    None if nothing was kept, or of another run.

    :raises UserError: when it is damaged, or of another policy.
    """
    states = _states(folder)
    if not states:
        return None
    _, place = states[-1]
    try:
        kept = documents.unsealed(place / _MEMORY, _Kept)
        if kept.run != run:
            return None
        for name, learner in learners.items():
            known = kept.digests.get(name, "")
            load_state(place / name, learner.policy.module, learner.optimizer, torch.Generator(), kept.round, known)
    except (UserError, OSError) as error:
        why = str(error).splitlines()[0]
        raise UserError(f"{place}: cannot be gone on from ({why}); remove it to learn from the first round") from None
    return kept.round, kept.defence


def take_back(folder: Path, apart: Path) -> str:
    """Put the state in ``apart`` in the place of all those in ``folder``; what is kept now, in a clause."""
    (number, place), *_ = _states(apart)
    whole = folder / place.name
    if not whole.exists():
        place.replace(whole)
    for other, newer in _states(folder):
        if other != number:
            shutil.rmtree(newer)
    shutil.rmtree(apart)
    return f"what it was after round {number} is kept"


def rounds_kept(folder: Path) -> list[int]:
    """After how many rounds the states in a peer's folder were saved, in order."""
    return [number for number, _ in _states(folder)]


def restore(folder: Path, round: int, policy: Policy) -> None:
    """Give ``policy`` the weights that a peer had after ``round`` rounds.

    :raises UserError: when that state is damaged, or of another policy or tokenizer.
    """
    place = folder / f"state-{round:06d}"
    try:
        kept = documents.unsealed(place / _MEMORY, _Kept)
        load_weights(place / PEER, policy.module, round, kept.digests.get(PEER, ""))
    except (UserError, OSError) as error:
        raise UserError(f"{place}: cannot be read ({str(error).splitlines()[0]}); take another round") from None
    if kept.tokenizer not in ("", policy.tokenizer_fingerprint):
        raise UserError(f"{place}: the policy had another tokenizer; bring back the files that it began with")


def _states(folder: Path) -> list[tuple[int, Path]]:
    """(rounds, place) of every whole state, the newest last."""
    found = ((_STATE.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in found if match)


STAGE = 0
"""the number that a policy's file carries"""


class Progress(NamedTuple):
    """How far a peer had come."""

    round: int
    updates: int
    """of the optimizer; every trained parameter has had as many"""


def save_state(
    folder: Path, module: nn.Module, optimizer: torch.optim.AdamW, generator: torch.Generator, round: int
) -> str:
    """Write all of it durably into ``folder``, over what was there; the file's SHA-256.

    :raises OSError: when the disk is full or the folder cannot be written; what was there stays.
    """
    weights = _trained(module)
    held = {name: optimizer.state[parameter] for name, parameter in weights.items() if parameter in optimizer.state}
    state = StageState(
        weights={name: parameter.detach() for name, parameter in weights.items()},
        moments={name: {key: known[key] for key in KEYS} for name, known in held.items()},
        clocks={name: int(known["step"]) for name, known in held.items()},
        generators={"cpu": generator.get_state()},
        outer={"round": torch.tensor(round)},
    )
    return write_stage(folder, STAGE, round, state).sha256


def load_state(
    folder: Path,
    module: nn.Module,
    optimizer: torch.optim.AdamW,
    generator: torch.Generator,
    round: int,
    sha256: str = "",
) -> Progress:
    """Restore what :func:`save_state` wrote after ``round`` rounds, with this digest if one is known.

    :raises UserError: when the file is missing or damaged, or of another round or policy; nothing is changed then.
    """
    state, weights = _fitting(folder, module, round, sha256), _trained(module)
    _take(state, weights)
    optimizer.state.clear()
    for name, tensors in state.moments.items():
        parameter = weights[name]
        step = torch.tensor(float(state.clocks[name]), device=parameter.device)
        optimizer.state[parameter] = {"step": step, **{key: tensors[key].to(parameter.device) for key in KEYS}}
    generator.set_state(state.generators["cpu"])
    return Progress(int(state.outer["round"]), max(state.clocks.values(), default=0))


def load_weights(folder: Path, module: nn.Module, round: int, sha256: str = "") -> None:
    """Restore only the weights of what :func:`save_state` wrote; raises as :func:`load_state` does."""
    _take(_fitting(folder, module, round, sha256), _trained(module))


def _fitting(folder: Path, module: nn.Module, round: int, sha256: str) -> StageState:
    """What was saved in a folder, if it is what ``module`` trains."""
    state, weights = read_stage(folder, STAGE, round, sha256), _trained(module)
    for name in weights.keys() | state.weights.keys():
        ours = list(weights[name].shape) if name in weights else None
        found = list(state.weights[name].shape) if name in state.weights else None
        if ours != found:
            raise UserError(f"{folder}: {name} is {found} there, {ours} here; resume with the policy that was saved")
    if "cpu" not in state.generators or "round" not in state.outer:
        raise UserError(f"{folder}: holds a stage, not a policy; give a folder that a peer saved")
    return state


@torch.no_grad()
def _take(state: StageState, weights: dict[str, nn.Parameter]) -> None:
    for name, parameter in weights.items():
        parameter.copy_(state.weights[name])


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
