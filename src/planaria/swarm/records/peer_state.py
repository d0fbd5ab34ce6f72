"""What a peer needs to go on after it was stopped: what it trains, AdamW's moments, its generator and its round.

The file is a stage's (:mod:`planaria.runtime.checkpoint.stage_file`), as if the policy were one: safetensors, and
either whole or as it was before. Parameters that are not trained are not in it; they come from where the policy came
from.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from planaria.common.errors import UserError
from planaria.models.state import StageState
from planaria.runtime.checkpoint.stage_file import read_stage, write_stage

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
        moments={name: (known["exp_avg"], known["exp_avg_sq"]) for name, known in held.items()},
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
    for name, (first, second) in state.moments.items():
        parameter = weights[name]
        optimizer.state[parameter] = {
            "step": torch.tensor(float(state.clocks[name]), device=parameter.device),
            "exp_avg": first.to(parameter.device),
            "exp_avg_sq": second.to(parameter.device),
        }
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
