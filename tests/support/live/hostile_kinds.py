"""An exchange in which the workers of one replica send frames that are no valid update."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from planaria.exchange.base import StageOuterState, Update, Weights
from planaria.exchange.monna import MoNNA
from planaria.runtime.transport.edge import Edge
from planaria.runtime.transport.wire import HEADER_BYTES, Label, State, TensorHeader, UpdatePart, pack
from planaria.runtime.worker.assignment import Assignment

BYZANTINE = 1
"""the replica"""
Frame = tuple[Label, Tensor] | bytes


def _huge(label: UpdatePart, payload: Tensor) -> Iterator[Frame]:
    yield pack(TensorHeader(label, torch.float32, (1 << 28,)))


FRAMES: dict[str, Callable[[UpdatePart, Tensor], Iterator[Frame]]] = {
    "nothing": lambda label, payload: iter(()),
    "nan": lambda label, payload: iter([(label, torch.full_like(payload, torch.nan))]),
    "longer": lambda label, payload: iter([(label, torch.cat([payload, payload[:1]]))]),
    "type": lambda label, payload: iter([(label, payload.to(torch.float16))]),
    "round": lambda label, payload: iter([(label._replace(round=label.round + 1), payload)]),
    "kind": lambda label, payload: iter([(State(1), payload)]),
    "huge": _huge,
    "noise": lambda label, payload: iter([random.Random(label.round).randbytes(4 * HEADER_BYTES)]),
}


class Wire(MoNNA):
    """MoNNA, where the Byzantine replica sends the frames that ``frames`` names; "all": others in each round."""

    frames: str

    def update(self, outer: StageOuterState, fast: Weights, prefetched: Tensor | None = None) -> Update:
        if any(type(found) is Assignment and found.replica == BYZANTINE for found in gc.get_objects()):
            _spoil(self.frames)
        return super().update(outer, fast, prefetched)


def _spoil(name: str) -> None:
    """Make this process send other frames in rounds."""
    if hasattr(Edge, "honest"):
        return
    honest = Edge.send

    def send(edge: Edge, label: Label, payload: Tensor, later: bool = False) -> None:
        if not isinstance(label, UpdatePart):
            honest(edge, label, payload, later)
            return
        kinds = [*FRAMES]
        for frame in FRAMES[kinds[label.round % len(kinds)] if name == "all" else name](label, payload):
            if isinstance(frame, bytes):
                with edge._sending:
                    edge._unsent.append((memoryview(frame), memoryview(b"")))
                    edge._push()
            else:
                honest(edge, *frame)

    patched: Any = Edge
    patched.honest, patched.send = honest, send
