"""Random stage states, a toy stage, and helpers for tests of strategies."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor

from planaria.models.optimizers.adamw import KEYS
from planaria.models.state import StageShapes, StageState
from planaria.recovery.base import DamagedReplica, Holder, RebuildInputs, Sender

SHAPES = StageShapes({"b": torch.Size([5, 3]), "a": torch.Size([7])}, KEYS)


def nothing_drawn() -> Mapping[str, Tensor]:
    raise AssertionError("this strategy draws no weights")


INPUTS = RebuildInputs(nothing_drawn, decays=dict(zip(KEYS, (0.9, 0.999), strict=True)))


def weights(seed: int, shapes: Mapping[str, torch.Size] = SHAPES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def state(seed: int, updates: int = 3, shapes: Mapping[str, torch.Size] = SHAPES) -> StageState:
    """Return a stage after ``updates`` updates of each parameter; without moments if 0."""
    first, second = weights(seed + 1000, shapes), weights(seed + 2000, shapes)
    moments = (
        {name: {"exp_avg": first[name], "exp_avg_sq": second[name].square()} for name in shapes} if updates else {}
    )
    norms = (seed + 0.5, 0.25 * seed) if updates else (None, None)
    return StageState(weights(seed, shapes), moments, dict.fromkeys(moments, updates), 1.1, *norms)


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def assert_same_state(
    found: StageState, expected: StageState, but: Collection[str] = ("generators", "outer", "scales")
) -> None:
    """Compare all fields ``but`` these bit for bit."""
    for field in fields(StageState):
        if field.name not in but:
            assert _bits(getattr(found, field.name)) == _bits(getattr(expected, field.name)), field.name


def _bits(value: Any) -> Any:
    """Return a value with each tensor as type, shape and bytes."""
    if isinstance(value, Mapping):
        return {name: _bits(part) for name, part in value.items()}
    if not isinstance(value, Tensor):
        return value
    raw = value.contiguous().as_strided((value.numel(),), (1,)).view(torch.uint8)
    return value.dtype, tuple(value.shape), raw.numpy().tobytes()


def replica(stages: int, age: int = 100, **young: int) -> DamagedReplica:
    """Return a replica whose stages have this age, except for the ``young`` ones (``s3=0``)."""
    staleness = dict.fromkeys(range(stages + 1), age)
    return DamagedReplica(stages, staleness | {int(name[1:]): given for name, given in young.items()})


def losses(stages: int) -> list[frozenset[int]]:
    """Return every set of stages."""
    everything = range(stages + 1)
    return [frozenset(lost) for lost in chain(*(combinations(everything, n) for n in range(stages + 2)))]


class ToyStage:
    """A stage with a simple update that records its forward passes. Its twin is another ToyStage."""

    def __init__(self, seed: int, shapes: Mapping[str, torch.Size] = SHAPES) -> None:
        self.shapes = shapes
        self.now = state(seed, shapes=shapes)
        self.shadowed: list[int] = []
        self.dropped = 0

    device = "cpu"

    def twin(self) -> ToyStage:
        return ToyStage(0, self.shapes)

    @property
    def nbytes(self) -> int:
        return self.now.nbytes

    def load(self, state: StageState) -> None:
        weights = {name: tensor.clone() for name, tensor in state.weights.items()}
        moments = {n: {key: t.clone() for key, t in pair.items()} for n, pair in state.moments.items()}
        self.now = replace(state, weights=weights, moments=moments, clocks=dict(state.clocks))

    def state(self) -> StageState:
        return self.now

    def forward_copy(self, microbatch: int, x: Tensor) -> None:
        self.shadowed.append(microbatch)

    def apply(self, step: int, gradients: StageState) -> None:
        for name, grad in gradients.weights.items():
            first, second = self.now.moments[name].values()
            first.lerp_(grad, 0.1)
            second.lerp_(grad * grad, 0.001)
            self.now.weights[name] -= 0.01 * self.now.lr_scale / (step + 1) * first / (second.sqrt() + 1e-8)
            self.now.clocks[name] += 1
        self.now.grad_norm, self.now.clipped_norm = gradients.grad_norm, gradients.clipped_norm

    def drop(self) -> None:
        self.dropped += 1
        self.shadowed.clear()


def agree(sides: Sequence[Sender | Holder], step: int, committed: bool = True) -> None:
    """Commit or drop a step at senders and holders."""
    for side in sides:
        if committed:
            side.commit(step)
        else:
            side.drop()
