"""Boards for tests, on a fake clock and stores of every kind."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planaria.swarm.board import board as board_module
from planaria.swarm.board import envelope
from planaria.swarm.board.attendance import RoundTerms
from planaria.swarm.board.board import Board
from planaria.swarm.board.identity import PeerIdentity
from planaria.swarm.board.message import Rollouts
from planaria.swarm.board.message_limits import LIMITS
from support.swarm.swarm_messages import hello, rollouts

RULES: Any = {"task": "sums", "group": 12, "loss": {"clip": 0.2}}


class Clock:
    """A fake clock that only sleeping advances; ``on`` is called after every sleep."""

    def __init__(self, on: Callable[[float], None] = lambda _: None) -> None:
        self.now, self.naps, self.on = 0.0, [], on

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.naps.append(seconds)
        self.now += seconds
        self.on(self.now)


def lower_limits(monkeypatch: pytest.MonkeyPatch, message_bytes: int = Rollouts.max_bytes, **limits: int) -> None:
    monkeypatch.setattr(Rollouts, "max_bytes", message_bytes)
    for module in (board_module, envelope):
        monkeypatch.setattr(module, "LIMITS", replace(LIMITS, **limits))


def place(kind: str, folder: Path) -> str:
    """Return an unused place."""
    return str(folder / "board") if kind == "folder" else f"{kind}://{uuid.uuid4().hex}/board"


def member(
    url: str, who: PeerIdentity | None = None, clock: Clock | None = None, **options: Any
) -> tuple[Board, PeerIdentity]:
    """Return a board and identity that founded or joined the run there."""
    who, clock = who or PeerIdentity.generate(), clock or Clock()
    opened = Board(url, who, clock=clock, sleep=clock.sleep, **options)
    opened.join(hello(who, opened.create_run(RULES).run))
    return opened, who


def read(board: Board, peer: str, number: int) -> Rollouts | None:
    """Return a peer's valid message of a round, or None."""
    return board.gather(number, [peer]).found.get(peer)


def exchange(boards: list[tuple[Board, PeerIdentity]], rounds: int) -> None:
    """Let all publish ``rounds`` rounds, each of which all receive completely."""
    run, everyone = boards[0][0].rules.run, {who.peer for _, who in boards}
    for number in range(rounds):
        for board, who in boards:
            board.publish(rollouts(who, run, number))
        for board, _ in boards:
            closed = board.wait(number, everyone, RoundTerms(quorum=len(boards), timeout_s=5, patience_s=9))
            assert closed.found == {who.peer: rollouts(who, run, number) for _, who in boards}
