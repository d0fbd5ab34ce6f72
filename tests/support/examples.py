"""The number of examples of a property test."""

from __future__ import annotations

import os


def examples(count: int) -> int:
    """``count``, or ten times as many in ``make hunt``."""
    return 10 * count if os.environ.get("PLANARIA_EXAMPLES") == "hunt" else count
