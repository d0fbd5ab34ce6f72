"""Saved states of a peer, for restarts and for exporting its weights.

::

    state-000010/                   after ten rounds; complete, or absent
        peer/, shadow/              weights and moments (:func:`save_state`)
        memory.json                 the run, and the memory of the defence
    best/state-000010/              the best state so far, if task.max_accuracy_drop is set

A learner's file is a stage file (:mod:`planaria.runtime.checkpoint.stage_file`): safetensors with the trained
parameters, AdamW's moments, the generator and the round. Frozen parameters come from the policy's source.
"""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from planaria.common import atomic, documents
from planaria.common.documents import Record
from planaria.common.errors import UserError
from planaria.models.optimizers.adamw import KEYS
from planaria.models.state import StageState
from planaria.runtime.checkpoint.stage_file import read_stage, write_stage
from planaria.swarm.checks.defence import DefenceState
from planaria.swarm.learning.learner import Learner
from planaria.swarm.learning.weight_versions import Weights, copy_weights, trained_parameters
from planaria.swarm.policy.base import Policy

BEST = "best"
PEER, SHADOW = "peer", "shadow"
"""the learners"""
_MEMORY = "memory.json"
_STATE = re.compile(r"state-(\d{6,})")


class _SavedPeer(Record):
    run: str
    round: int
    defence: DefenceState
    digests: dict[str, str] = Field(default_factory=dict)
    """learner → SHA-256 of its file; empty in states of older versions"""
    tokenizer: str = ""
    """fingerprint of the policy's tokenizer; empty in states of older versions"""


def save_peer(
    folder: Path,
    run: str,
    round_number: int,
    learners: Mapping[str, Learner],
    memory: DefenceState,
    keep: int = 1,
    trusted: int = 0,
) -> None:
    """Save a peer's state after ``round_number`` rounds of ``run``.

    Keep ``keep`` - 1 earlier states, and the one after ``trusted`` rounds.

    :raises OSError: if the disk is full or the folder is not writable; earlier states stay.
    """
    whole = folder / f"state-{round_number:06d}"
    unfinished = folder / f"{whole.name}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    digests = {
        name: save_state(
            unfinished / name,
            learner.policy.module,
            learner.optimizer,
            round_number,
            learner.versions.earlier_weights(round_number),
        )
        for name, learner in learners.items()
    }
    tokenizer = learners[PEER].policy.tokenizer_fingerprint
    saved = _SavedPeer(run=run, round=round_number, defence=memory, digests=digests, tokenizer=tokenizer)
    atomic.write_durable(unfinished / _MEMORY, documents.seal(saved).encode())
    shutil.rmtree(whole, ignore_errors=True)
    unfinished.replace(whole)
    others = [(number, path) for number, path in _states(folder) if number != trusted]
    for number, path in others[:-keep]:
        if number != round_number:
            shutil.rmtree(path)


def restore_peer(folder: Path, run: str, learners: Mapping[str, Learner]) -> tuple[int, DefenceState] | None:
    """Restore the last saved state of ``run``; return the next round and the memory of the defence.

    Return None if there is no state, or it belongs to another run.

    :raises UserError: if the state is damaged or of another policy.
    """
    states = _states(folder)
    if not states:
        return None
    _, path = states[-1]
    try:
        saved = documents.read_sealed(path / _MEMORY, _SavedPeer)
        if saved.run != run:
            return None
        for name, learner in learners.items():
            digest = saved.digests.get(name, "")
            older = load_state(path / name, learner.policy.module, learner.optimizer, saved.round, digest)
            learner.versions.restore(older)
    except (UserError, OSError) as error:
        why = str(error).splitlines()[0]
        raise UserError(f"{path} cannot be resumed ({why}); remove it to restart from the first round") from None
    return saved.round, saved.defence


def restore_best(folder: Path, best_folder: Path) -> str:
    """Replace all states in ``folder`` by the one in ``best_folder``; describe it in a clause."""
    (number, path), *_ = _states(best_folder)
    whole = folder / path.name
    if not whole.exists():
        path.replace(whole)
    for other, newer in _states(folder):
        if other != number:
            shutil.rmtree(newer)
    shutil.rmtree(best_folder)
    return f"its state after round {number} is kept"


def saved_rounds(folder: Path) -> list[int]:
    """Return the rounds of the saved states in a peer's folder, in order."""
    return [number for number, _ in _states(folder)]


def restore_weights(folder: Path, round_number: int, policy: Policy) -> None:
    """Load the weights of a peer after ``round_number`` rounds into ``policy``.

    :raises UserError: if the state is damaged, or of another policy or tokenizer.
    """
    path = folder / f"state-{round_number:06d}"
    try:
        saved = documents.read_sealed(path / _MEMORY, _SavedPeer)
        load_weights(path / PEER, policy.module, round_number, saved.digests.get(PEER, ""))
    except (UserError, OSError) as error:
        raise UserError(f"{path} cannot be read ({str(error).splitlines()[0]}); use another round") from None
    if saved.tokenizer not in ("", policy.tokenizer_fingerprint):
        raise UserError(f"{path}: the policy had another tokenizer; restore the tokenizer files of its start")


def _states(folder: Path) -> list[tuple[int, Path]]:
    """(round, folder) of each complete state, newest last."""
    results = ((_STATE.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in results if match)


STAGE = 0
"""stage number in a policy's file"""
_FORMER = {"lora_down": "lora_A.default.weight", "lora_up": "lora_B.default.weight"}
"""former names of adapters → present ones"""


NO_VERSIONS: Mapping[int, Weights] = {}
_VERSION = re.compile(r"version (\d+) (.*)")


def save_state(
    folder: Path,
    module: nn.Module,
    optimizer: torch.optim.AdamW,
    round_number: int,
    older: Mapping[int, Weights] = NO_VERSIONS,
) -> str:
    """Write weights and moments durably into ``folder``; return the file's SHA-256.

    :param older: earlier versions of the weights, for ``rounds.ahead``
    :raises OSError: if the disk is full or the folder is not writable; the previous content stays.
    """
    weights = trained_parameters(module)
    versions = {f"version {number} {name}": t for number, held in older.items() for name, t in held.items()}
    optimizer_states = {
        name: optimizer.state[parameter] for name, parameter in weights.items() if parameter in optimizer.state
    }
    state = StageState(
        weights={name: parameter.detach() for name, parameter in weights.items()},
        moments={name: {key: values[key] for key in KEYS} for name, values in optimizer_states.items()},
        clocks={name: int(values["step"]) for name, values in optimizer_states.items()},
        generators={"cpu": torch.Generator().get_state()},  # part of the format; a peer derives its draws
        outer={"round": torch.tensor(round_number)} | versions,
    )
    return write_stage(folder, STAGE, round_number, state).sha256


def load_state(
    folder: Path, module: nn.Module, optimizer: torch.optim.AdamW, round_number: int, sha256: str = ""
) -> dict[int, Weights]:
    """Restore what :func:`save_state` wrote after ``round_number`` rounds, and check the digest if one is given.

    Return the earlier versions of the weights.

    :raises UserError: if the file is missing, damaged, or of another round or policy; nothing is changed then.
    """
    state, weights = _read_matching(folder, module, round_number, sha256), trained_parameters(module)
    copy_weights(module, state.weights)
    optimizer.state.clear()
    for name, tensors in state.moments.items():
        parameter = weights[name]
        step = torch.tensor(float(state.clocks[name]), device=parameter.device)
        optimizer.state[parameter] = {"step": step, **{key: tensors[key].to(parameter.device) for key in KEYS}}
    older: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for key, tensor in state.outer.items():
        if match := _VERSION.fullmatch(key):
            older[int(match[1])][match[2]] = tensor
    return dict(older)


def load_weights(folder: Path, module: nn.Module, round_number: int, sha256: str = "") -> None:
    """Restore only the weights; raises as :func:`load_state` does."""
    copy_weights(module, _read_matching(folder, module, round_number, sha256).weights)


def _read_matching(folder: Path, module: nn.Module, round_number: int, sha256: str) -> StageState:
    """Read a saved state; UserError if its parameters are not those that ``module`` trains."""
    state, weights = _rename_adapters(read_stage(folder, STAGE, round_number, sha256)), trained_parameters(module)
    for name in weights.keys() | state.weights.keys():
        ours = list(weights[name].shape) if name in weights else None
        result = list(state.weights[name].shape) if name in state.weights else None
        if ours != result:
            raise UserError(f"{folder}: {name} is {result} there, {ours} here; resume with the policy that was saved")
    if "cpu" not in state.generators or "round" not in state.outer:
        raise UserError(f"{folder} holds a stage, not a policy; use a folder that a peer saved")
    return state


def _rename_adapters(state: StageState) -> StageState:
    """Return a state with the present names of adapters."""
    present = {name: re.sub("lora_(down|up)$", lambda found: _FORMER[found[0]], name) for name in state.weights}
    parts: tuple[dict[str, Any], ...] = (state.weights, state.moments, state.clocks)
    weights, moments, clocks = ({present[name]: one for name, one in part.items()} for part in parts)
    return replace(state, weights=weights, moments=moments, clocks=clocks)
