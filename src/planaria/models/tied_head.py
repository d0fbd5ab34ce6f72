"""A head that is tied to the embedding table, with a separate gradient.

The gradients of both roles are accumulated separately, the head's in an unregistered alias of the table's storage.
Otherwise the sum would depend on how the embedding and head backwards of different microbatches interleave, because
floating-point addition is not associative.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

from torch import Tensor, nn


class TiedHead(nn.Module, ABC):
    """Base class of ends stages."""

    head_alias: Tensor | None = None
    """the head of a tied table, or None if the head has its own weights"""

    @property
    @abstractmethod
    def table(self) -> Tensor:
        """Weights of the embedding."""

    @abstractmethod
    def _tie(self) -> None:
        """Create the alias if the head is tied."""

    def keep_tied(self) -> None:
        """Tie now, and after weights were loaded."""
        self._tie()
        self.register_load_state_dict_post_hook(TiedHead._on_load)  # type: ignore[no-untyped-call]

    def alias(self) -> Tensor:
        """Return an alias of the table; detached, not ``.data``, so that autograd notices in-place changes of it."""
        return self.table.detach().requires_grad_(self.table.requires_grad)

    def fold_gradients(self) -> None:
        """Add the head's gradient to the table's and clear it. The call has no effect if the head is untied or
        has no gradient."""
        if self.head_alias is None or self.head_alias.grad is None:
            return
        table = self.table
        table.grad = self.head_alias.grad if table.grad is None else table.grad.add_(self.head_alias.grad)
        self.head_alias.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, including those not yet folded (an optimizer's ``zero_grad`` does not see them)."""
        super().zero_grad(set_to_none)
        if self.head_alias is not None:
            self.head_alias.grad = None

    def _tie_again(self, change: Callable[[Tensor], Tensor] = lambda gradient: gradient) -> None:
        """Tie after the table may have got other storage; a gradient not yet folded is kept, with ``change``."""
        gradient = None if self.head_alias is None else self.head_alias.grad
        self._tie()
        if gradient is not None and self.head_alias is not None:
            self.head_alias.grad = change(gradient)

    def _on_load(self, _keys: object) -> None:
        self._tie_again()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._tie_again(fn)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._tie_again()
