"""The state of a stage that outlives a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


class StageShapes(dict[str, torch.Size]):
    """Shapes of a stage's parameters by local name, and the names of the tensors that its optimizer keeps for each."""

    def __init__(self, shapes: Mapping[str, torch.Size], state: Sequence[str]) -> None:
        super().__init__(shapes)
        self.state = tuple(state)


@dataclass
class StageState:
    """A stage's weights and optimizer state, by local parameter name.

    ``moments`` maps a parameter to its optimizer's tensors by name (``models.optimizers.Optimizer.keys``), and
    ``clocks`` to their number of updates. Both are empty before the first update and have the same names. ``lr_scale``
    multiplies the stage's learning rate; parameters in ``scales``, from stages of another cut, have their own. The
    norms (L2, before and after clipping) are those of the last committed gradient, or None before the first.
    ``generators`` are the states of the worker's random generators by kind of device. ``outer`` is the replicas' state
    between rounds (``exchange.base.StageOuterState``). ``extra`` is what a member of a group keeps beside its
    weights: its optimizer, buffers and counters (``group/member_state.py``).
    """

    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    clocks: dict[str, int] = field(default_factory=dict)
    lr_scale: float = 1.0
    grad_norm: float | None = None
    clipped_norm: float | None = None
    generators: dict[str, Tensor] = field(default_factory=dict)
    outer: dict[str, Tensor] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Tensor] = field(default_factory=dict)

    def part(self, wanted: Callable[[str], bool], moments: bool) -> StageState:
        """Return the ``wanted`` parameters only, with or without moments; shares memory, omits generators and outer
        state."""
        weights = {name: tensor for name, tensor in self.weights.items() if wanted(name)}
        kept = {name: tensors for name, tensors in self.moments.items() if moments and wanted(name)}
        clocks = {name: self.clocks[name] for name in kept}
        scales = {name: scale for name, scale in self.scales.items() if wanted(name)}
        norms = self.grad_norm, self.clipped_norm
        return StageState(weights, kept, clocks, self.lr_scale, *norms, scales=scales, extra=self.extra)

    @property
    def trained(self) -> StageState:
        """The training state of the stage itself: :meth:`part` with every parameter, moments included."""
        return self.part(lambda name: True, moments=True)

    @property
    def nbytes(self) -> int:
        """Bytes of weights and moments."""
        moments = [tensor for tensors in self.moments.values() for tensor in tensors.values()]
        return sum(tensor.nbytes for tensor in (*self.weights.values(), *moments))
