"""What reading a foreign folder comes down to, whatever its format, and optimizer steps wherever they are kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from planaria.common.errors import UserError
from planaria.runtime.checkpoint.foreign.pieces import Marks, Sizes
from planaria.runtime.checkpoint.recut import MOMENTS

WEIGHTS = "weights"
KINDS = (WEIGHTS, *MOMENTS)
Fit = Callable[[Sizes, Marks, str], None]
"""(shape, marks, file) of a tensor, before its numbers are read; UserError when it is not the one that is wanted"""


class Foreign(Protocol):
    """A folder of another program, of which only names, sizes and steps have been read."""

    kinds: Mapping[str, frozenset[str]]
    """parameter → those of :data:`KINDS` that are there"""
    clocks: Mapping[str, int]
    """parameter → updates that its moments have seen"""
    step: int | None
    """of the run, where the folder says it"""
    samples: int | None
    """that trained it, likewise"""
    left: tuple[str, ...]
    """what is in the folder, but not in a checkpoint of planaria"""

    def read(self, name: str, kind: str, fit: Fit) -> Tensor:
        """A whole tensor, on the CPU; UserError when it is missing or damaged."""


def require_moments(place: Path, kinds: Mapping[str, frozenset[str]], clocks: Mapping[str, int]) -> bool:
    """Are there moments? Of all parameters or of none, both and with a step, or they would begin anew unasked.

    :raises UserError: naming the first parameter that lacks something.
    """
    some = any(held & set(MOMENTS) for held in kinds.values())
    for name, held in sorted(kinds.items()):
        if WEIGHTS not in held:
            raise UserError(f"{place}: the weights of {name} are missing, though it has {min(held)}; bring them back")
        if some and (lacking := [kind for kind in MOMENTS if kind not in held]):
            raise UserError(f"{place}: {lacking[0]} of {name} is missing, though others have theirs; bring it back")
        if some and name not in clocks:
            raise UserError(
                f"{place}: no step of {name}, neither in its state nor in a group of parameters; bring it back"
            )
    return some


def clock(value: Any, place: str) -> int:
    """A number of updates, which optimizers keep as a number or as a tensor of one; UserError when it is neither."""
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta else value
    if type(number) not in (int, float) or not math.isfinite(number) or number < 0 or number != int(number):
        raise UserError(f"{place}: a step that is no number of updates; bring it back")
    return int(number)


def step_tensor(updates: int) -> Tensor:
    """A step as torch's AdamW keeps it, a number in fp32; in fp64 where it would not be exact."""
    single = torch.tensor(float(updates), dtype=torch.float32)
    return single if single.item() == updates else torch.tensor(float(updates), dtype=torch.float64)


def uncovered(error: BaseException) -> BaseException:
    """The error of the disk that torch's writer of archives covers with one of its own; else the error itself."""
    return error.__context__ if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError) else error


def clocks_by_group(groups: Iterable[tuple[Any, int]], names: Iterable[str], place: str) -> dict[str, int]:
    """Steps that optimizers keep for groups of parameters: (the group's parameters, its step) → parameter → step.

    :raises UserError: when steps differ and groups do not name their parameters.
    """
    given, known = list(groups), set(names)
    if len({step for _, step in given}) == 1:
        return dict.fromkeys(known, given[0][1])
    found: dict[str, int] = {}
    for parameters, step in given:
        if not isinstance(parameters, list | tuple) or not known.issuperset(map(str, parameters)):
            raise UserError(f"{place}: groups with unequal steps do not say whose they are; give steps by parameter")
        found |= dict.fromkeys(map(str, parameters), step)
    return found
