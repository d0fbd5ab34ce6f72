"""Workers that have still to report: a set from which one is taken at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set


class Waiting(Set[str]):
    """An immutable set. One worker less costs a bit for each that there was, however many have reported."""

    __slots__ = ("_missing", "_places")

    def __init__(self, workers: Iterable[str] = ()) -> None:
        self._places: Mapping[str, int] = {worker: place for place, worker in enumerate(dict.fromkeys(workers))}
        self._missing = (1 << len(self._places)) - 1

    def without(self, worker: str) -> Waiting:
        """The same less ``worker``."""
        place = self._places.get(worker)
        if place is None or not self._missing >> place & 1:
            return self
        less = object.__new__(Waiting)
        less._places, less._missing = self._places, self._missing ^ 1 << place
        return less

    def __contains__(self, worker: object) -> bool:
        place = self._places.get(worker)  # type: ignore[call-overload]
        return place is not None and bool(self._missing >> place & 1)

    def __bool__(self) -> bool:
        return bool(self._missing)

    def __len__(self) -> int:
        return self._missing.bit_count()

    def __iter__(self) -> Iterator[str]:
        return (worker for worker, place in self._places.items() if self._missing >> place & 1)

    def __hash__(self) -> int:
        return self._hash()

    def __repr__(self) -> str:
        return f"Waiting({list(self)})"


NOBODY = Waiting()
