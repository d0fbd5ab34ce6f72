"""The optimizer of a member: it hands each gradient to the group, which applies the update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from planaria.common.errors import UserError


class GroupOptimizer(Optimizer):
    """The owner's optimizer with another ``step``. Schedulers and gradient scalers accept it like the original."""

    def __init__(self, original: Optimizer, step: Callable[[], None], mid_block: Callable[[], bool]) -> None:
        """Keep ``original``; the base class is not initialised.

        :param mid_block: returns whether the block has more batches.
        """
        self.original = original
        self._step = step
        self._mid_block = mid_block

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.original.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.original.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.original.defaults

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Hand the gradient to the group and return once the group has applied the update, or dropped the step.

        The call has no effect within a block (``shard(accumulate=...)``), as in ``accelerate``.

        :param closure: computes the gradient; called once, and its result is returned.
        :raises RunStopped: if this process is no longer a member.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._mid_block():
            self._step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradient, unless further batches of the block add to it."""
        if not self._mid_block():
            self.original.zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the original, such as its hooks."""
        return getattr(self.__dict__["original"], name)

    def state_dict(self) -> dict[str, Any]:
        return self.original.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.original.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise UserError(
            "optimizer.add_param_group: members agree on the parameters when they join; add them before wrap"
        )

    def __repr__(self) -> str:
        return f"GroupOptimizer({self.original!r})"
