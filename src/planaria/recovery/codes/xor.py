"""One parity, the XOR of all: any one loss is brought back."""

from __future__ import annotations

import numpy as np

from planaria.common.errors import UserError
from planaria.recovery.codes.base import Code, Family, refuse_sizes


class Xor(Family):
    """RAID-5's parity, for ``tolerate = 1``."""

    def code(self, members: int, tolerate: int) -> Code:
        refuse_sizes(members, tolerate)
        if tolerate != 1:
            raise UserError(f"code = 'xor': survives one loss, not {tolerate}; use 'reed_solomon'")
        return Code(np.ones((1, members - 1), np.uint8))
