"""Boards for tests: a clock that only sleeping moves, and places of every kind."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from words import hello

from planaria.swarm.board.board import Board
from planaria.swarm.board.identity import Identity

RULES: Any = {"task": "sums", "group": 12, "loss": {"clip": 0.2}}


class Clock:
    """Seconds since it was made; ``on`` is called after every sleep."""

    def __init__(self, on: Callable[[float], None] = lambda _: None) -> None:
        self.now, self.naps, self.on = 0.0, [], on

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.naps.append(seconds)
        self.now += seconds
        self.on(self.now)


def place(kind: str, folder: Path) -> str:
    """Somewhere nobody has been."""
    return str(folder / "board") if kind == "folder" else f"{kind}://{uuid.uuid4().hex}/board"


def member(url: str, who: Identity | None = None, clock: Clock | None = None, **options: Any) -> tuple[Board, Identity]:
    """Someone who has founded or joined the run there."""
    who, clock = who or Identity.fresh(), clock or Clock()
    board = Board.open(url, who, clock=clock, sleep=clock.sleep, **options)
    board.join(hello(who, board.found(RULES).run))
    return board, who
