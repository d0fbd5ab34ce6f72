"""Credits between two parties, and what is locked of them. Immutable; their sum never changes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planaria.common.errors import UserError


@dataclass(frozen=True)
class Channel:
    """What the committee of a channel agrees about. Orders are taken one by one, by their numbers."""

    name: str
    ends: tuple[str, str]
    has: tuple[int, int]
    """free credits of each end"""
    locked: int = 0
    """of the order under way"""
    payer: str = ""
    """who pays it, while any are locked"""
    next: int = 0
    """number of the order under way, or of the next one"""

    def __post_init__(self) -> None:
        if any(type(credit) is not int or credit < 0 for credit in self.has):
            raise UserError(f"channel {self.name}: credits {self.has}; give whole numbers from 0 on")
        if self.ends[0] == self.ends[1]:
            raise UserError(f"channel {self.name}: both ends are {self.ends[0]}; name two parties")

    @property
    def total(self) -> int:
        """All credits in it."""
        return sum(self.has) + self.locked

    def joins(self, payer: str, payee: str) -> bool:
        return {payer, payee} == {*self.ends} and payer != payee

    def can_lock(self, payer: str, amount: int) -> bool:
        """Does the agreed state suffice? The vote follows from this alone."""
        return not self.locked and self.has[self.ends.index(payer)] >= amount

    def lock(self, payer: str, amount: int) -> Channel:
        """:raises ValueError: when there are not so many."""
        if amount <= 0 or not self.can_lock(payer, amount):
            raise ValueError(f"channel {self.name}: {payer} cannot lock {amount}")
        return replace(self._given(payer, -amount), locked=amount, payer=payer)

    def settle(self, paid: bool) -> Channel:
        """The order under way is over: what is locked goes to the other end, or back."""
        over = replace(self, locked=0, payer="", next=self.next + 1)
        if not self.locked:
            return over
        other = self.ends[1 - self.ends.index(self.payer)]
        return over._given(other if paid else self.payer, self.locked)

    def _given(self, end: str, amount: int) -> Channel:
        first = end == self.ends[0]
        return replace(self, has=(self.has[0] + amount * first, self.has[1] + amount * (not first)))
