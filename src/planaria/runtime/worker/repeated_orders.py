"""Durable orders that a worker may receive twice: the controller of another machine repeats them."""

from __future__ import annotations

from typing import Any

from planaria.control import decisions as d
from planaria.control import events as e
from planaria.runtime.worker.assignment import Assignment


class RepeatedOrders:
    """The last commit and the last settled round of a worker, and its reports of them."""

    def __init__(self, here: Assignment) -> None:
        self._here = here
        self._committed = -1, -1
        """generation and step"""
        self._round: dict[str, Any] = {}
        """report of the last settled round"""

    def report_commit(self, order: d.Commit) -> None:
        """Report a commit that was carried out."""
        self._committed = order.generation, order.step
        self._here.report(e.StageCommitted, step=order.step)

    def report_round(self, **fields: Any) -> None:
        """Report a settled round by the fields of ``RoundApplied``."""
        self._round = fields
        self._here.report(e.RoundApplied, **fields)

    def is_done(self, order: d.Commit | d.Settle) -> bool:
        """Return whether this worker has carried out the order."""
        if isinstance(order, d.Commit):
            return (order.generation, order.step) == self._committed
        return self._here.is_ours(order) and order.round == self._round.get("round")

    def answer(self, order: d.Commit | d.Settle) -> None:
        """Repeat the report of an order that was carried out; do nothing for another one."""
        if not self.is_done(order):
            return
        if isinstance(order, d.Commit):
            self._here.report(e.StageCommitted, step=order.step)
        else:
            self._here.report(e.RoundApplied, **self._round)
