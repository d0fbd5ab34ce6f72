"""The replicas of a run, and what has to be found among them in every step."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from functools import cached_property
from operator import attrgetter

from planaria.record.replica import BUILT_OF, ReplicaState


class Replicas(Mapping[int, ReplicaState]):
    """Replicas by number, in order; immutable. One that changes costs the same however many there are.

    ``troubled``: numbers of those that are not whole (:attr:`ReplicaState.troubled`), of those that are there;
    ``gone``: of those that have left, or are yet to be founded; ``generation``: the latest of all.
    """

    def __init__(self, replicas: Mapping[int, ReplicaState]) -> None:
        self._all = dict(replicas)
        self.troubled = frozenset[int]()
        self.gone = frozenset[int]()
        self.generation = max(replica.generation for replica in self._all.values())
        for replica in self._all.values():
            self._note(replica)

    def _note(self, replica: ReplicaState) -> None:
        one, gone = {replica.number}, replica.phase == "left"
        self.gone = self.gone | one if gone else self.gone - one
        self.troubled = self.troubled | one if replica.troubled and not gone else self.troubled - one

    def having(self, replica: ReplicaState) -> Replicas:
        """The same with this replica as it now is."""
        before, after = self._all[replica.number], self.noting(replica)
        after.generation = max(self.generation, replica.generation)
        if "left" in (before.phase, replica.phase) or _built(before) != _built(replica):
            after.__dict__.pop("standing", None)
            after._note(replica)
        return after

    def noting(self, replica: ReplicaState) -> Replicas:
        """The same with this replica, of which nothing has changed that it is found by."""
        after = object.__new__(Replicas)
        after.__dict__ = self.__dict__ | {"_all": self._all | {replica.number: replica}}
        return after

    @property
    def live(self) -> Mapping[int, ReplicaState]:
        """Those that have not left."""
        return {n: replica for n, replica in self._all.items() if n not in self.gone} if self.gone else self

    @cached_property
    def standing(self) -> Mapping[str, int]:
        """Worker → the number of the replica in which it stands."""
        return {worker: number for number, replica in self._all.items() for worker in replica.holders.values()}

    def of(self, worker: str) -> ReplicaState | None:
        """The one in which a worker stands."""
        number = self.standing.get(worker)
        return None if number is None else self._all[number]

    def __getitem__(self, number: int) -> ReplicaState:
        return self._all[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def values(self) -> ValuesView[ReplicaState]:  # the inherited one looks each up
        return self._all.values()

    def items(self) -> ItemsView[int, ReplicaState]:
        return self._all.items()


_built = attrgetter(*sorted(BUILT_OF))
