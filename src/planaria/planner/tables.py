"""A problem's numbers in plain arrays, as compiled functions take them; ``problem.Problem`` says what each means."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
NO_SUMS: Ints = np.zeros((0, 0, 0), np.int64)
"""of a problem whose step is over with its passes"""


class Tables(NamedTuple):
    """See ``problem.Problem``."""

    sizes: Ints
    site: Ints
    forward: Ints
    backward: Ints
    link: Ints
    transmit: Ints
    slots: Ints
    role: Ints
    sums: Ints
    swaps: int
    jump: int
