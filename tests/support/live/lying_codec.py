"""A codec for tests with which one process falsifies the scales of gradients."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from planaria.pipeline.codecs.base import Leg, Shape, Visit
from planaria.pipeline.codecs.group_quantisation import GroupQuantiser


class LyingCodec(GroupQuantiser):
    """``6/4``, but the first process to send a gradient of ``sample`` or later at ``hop`` multiplies its scales, and
    does not check its own messages."""

    factor: str = "1"
    """a number, ``nan`` or ``inf``"""
    hop: int = 2
    sample: int = 0
    lies: int = 1
    liar: str = ""
    """file with that process's number"""

    def encode(self, x: Tensor, leg: Leg, visit: Visit, ids: Tensor | None = None) -> Tensor:
        message = super().encode(x, leg, visit, ids)
        due = leg == "backward" and visit.hop == self.hop and visit.sample >= self.sample
        if due and len(_lies) < self.lies and self._is_liar():
            self._scales(message, x.shape).mul_(torch.tensor(float(self.factor), dtype=torch.bfloat16))
            _lies.append(message)
        return message

    def invalid_reason(self, message: Tensor, shape: Shape, leg: Leg) -> str:
        return "" if any(message is lie for lie in _lies) else super().invalid_reason(message, shape, leg)

    def _is_liar(self) -> bool:
        try:
            with Path(self.liar).open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            return Path(self.liar).read_text() == str(os.getpid())
        return True


_lies: list[Tensor] = []
"""this process's"""
