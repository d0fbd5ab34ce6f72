"""How the parameters of a stage are updated: the base of every optimizer, and groups of learning rates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

from torch import nn

from planaria.config.registry import Choice
from planaria.config.schema import OptimConfig

NONE: Mapping[nn.Parameter, float] = MappingProxyType({})


class Built(Protocol):
    """An optimizer of one stage, as those of ``torch.optim`` are.

    ``state`` maps each parameter that has been updated to its tensors by name: those of :attr:`Optimizer.keys`, and
    ``step``, the number of its updates, as a tensor of one float.
    """

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    @property
    def state(self) -> Any: ...

    def step(self) -> Any: ...


class Optimizer(Choice, ABC):
    """An optimizer that a recipe names. It is a file of this package, or ``module:Class`` of your own.

    Its state is moved between workers, saved, re-cut, averaged and rebuilt by name, without code of its own there.
    """

    keys: ClassVar[tuple[str, ...]]
    """names of a parameter's state tensors, each fp32 of the parameter's shape; lower case, digits and ``_``"""
    elementwise: ClassVar[bool] = True
    """each number is updated by its own gradient alone, so that parameters may share an array (``model.share``)"""

    unused: ClassVar[tuple[str, ...]] = ()
    """fields of ``optim`` that have no effect"""

    @abstractmethod
    def build(
        self,
        named: Mapping[str, nn.Parameter],
        stage: int,
        config: OptimConfig,
        scales: Mapping[nn.Parameter, float] = NONE,
    ) -> Built:
        """Return a fresh optimizer for a stage's parameters by local name. Make its groups with :func:`groups`; their
        learning rate is set before every update."""

    def decays(self, config: OptimConfig) -> dict[str, float]:
        """Return β by key, for tensors that are exponential means from zero and are divided by 1 − β^t when they are
        used. Recovery averages those of neighbours by their own t; all others are averaged as they are."""
        return {}


def groups(parameters: Iterable[nn.Parameter], scales: Mapping[nn.Parameter, float] = NONE) -> list[dict[str, Any]]:
    """Return parameter groups by their factor of the learning rate, ``scale``; None for the stage's own, first."""
    by_scale: dict[float | None, list[nn.Parameter]] = {None: []}
    for parameter in parameters:
        by_scale.setdefault(scales.get(parameter), []).append(parameter)
    return [{"params": group, "scale": scale} for scale, group in by_scale.items()]
