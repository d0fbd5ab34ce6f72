"""Base class of optimizers, and groups of learning rates."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

from torch import nn

from planaria.config.registry import Choice
from planaria.config.schema import OptimConfig

Parameters = Mapping[str, nn.Parameter]
"""a stage's parameters by local name"""
Scales = Mapping[nn.Parameter, float]
"""learning-rate factors of parameters that do not have the stage's own"""
NONE: Scales = MappingProxyType({})
LAYER = re.compile(r"(?:.*\.)?layers\.\d+(?=\.)")
"""prefix of the names of a decoder layer's parameters"""


class StageOptimizer(Protocol):
    """An optimizer of one stage, like those of ``torch.optim``.

    ``state`` maps each updated parameter to its tensors by name: those of :attr:`Optimizer.keys`, and ``step``, the
    number of its updates, as a tensor of one float.
    """

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    @property
    def state(self) -> Any: ...

    def step(self) -> Any: ...


class Optimizer(Choice, ABC):
    """An optimizer that a recipe names: a file of this package, or ``module:Class`` of your own.

    Its state is moved, saved, re-cut, averaged and rebuilt by name, without code of the optimizer's.
    """

    keys: ClassVar[tuple[str, ...]]
    """names of a parameter's state tensors, each fp32 of the parameter's shape; lower case, digits and ``_``"""
    elementwise: ClassVar[bool] = True
    """whether each number depends on its own gradient only, so that parameters may share an array (``model.share``)"""

    unused: ClassVar[tuple[str, ...]] = ()
    """fields of ``optim`` without effect"""

    @abstractmethod
    def build(self, named: Parameters, stage: int, config: OptimConfig, scales: Scales = NONE) -> StageOptimizer:
        """Return a fresh optimizer for a stage's parameters.

        Make its groups with :func:`groups`; their learning rate is set before every update.
        """

    def decays(self, config: OptimConfig) -> dict[str, float]:
        """Return β by key, for tensors that are exponential means from zero and are divided by 1 − β^t when used.

        Recovery averages those of neighbours by their own t; all others are averaged as they are.
        """
        return {}


def groups(parameters: Iterable[nn.Parameter], scales: Scales = NONE) -> list[dict[str, Any]]:
    """Return parameter groups by learning-rate factor ``scale``; the first has the stage's own factor, None."""
    by_scale: dict[float | None, list[nn.Parameter]] = {None: []}
    for parameter in parameters:
        by_scale.setdefault(scales.get(parameter), []).append(parameter)
    return [{"params": group, "scale": scale} for scale, group in by_scale.items()]
