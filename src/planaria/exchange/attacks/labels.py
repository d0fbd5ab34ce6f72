"""An attack on what is learned: honest computing, on labels that are turned round."""

from __future__ import annotations

from torch import Tensor

from planaria.exchange.attacks.base import Attack, Scene
from planaria.exchange.compress.base import Compressor


class LabelFlip(Attack):
    """y ← V − 1 − y for every target y of a vocabulary of V (arXiv 2012.10333 and others). The message is what follows
    from these; it is for the ends alone, which have the targets."""

    def labels(self, targets: Tensor, vocab: int) -> Tensor:
        return vocab - 1 - targets

    def message(self, scene: Scene, honest: Tensor, codec: Compressor) -> Tensor:
        return honest
