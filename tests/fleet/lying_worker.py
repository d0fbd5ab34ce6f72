"""A worker of which one replica's tell others what is of no use, for two rounds."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import NoReturn

import torch
from torch import Tensor

from planaria.engine import worker
from planaria.engine.post import Post
from planaria.engine.setup import Setup
from planaria.transport.edge import Edge
from planaria.transport.wire import Content, Part

LIAR = 1
_entry = worker.main


def main(setup: Setup, connection: Connection, name: str, incarnation: int) -> NoReturn:
    """Be a worker like any other, but for what is said in rounds 0 and 1."""
    truth = Post._say

    def lie(self: Post, edge: Edge, content: Part, part: Tensor | None) -> None:
        if self.here.replica == LIAR and content is Content.BLOCKING and part is not None and self.circle.round < 2:
            part = part[:-1].contiguous() if self.circle.round else torch.full_like(part, torch.nan)
        truth(self, edge, content, part)

    Post._say = lie  # type: ignore[method-assign]
    _entry(setup, connection, name, incarnation)
