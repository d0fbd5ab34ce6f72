"""Facts of a run with compressed messages."""

from __future__ import annotations

from planaria.control.facts import events as e
from planaria.control.facts.update_reports import Full


def sent(round: int, stage: int, full: Full | None = None, node: int = -1, **norms: float) -> e.MessageCompressed:
    return e.MessageCompressed(
        worker="w", node=stage if node < 0 else node, stage=stage, generation=1, round=round, full=full,
        sent_bytes=4000 if full else 200, dense_bytes=4000,
        **{"norm": 5.0, "relative_error": 0.0 if full else 0.75, **norms},
    )  # fmt: skip


FACTS = (
    sent(0, 0, "beginning", estimate_error=0.0), sent(0, 1, "beginning", estimate_error=0.0),
    sent(1, 0, residual=3.0, estimate_error=4.0), sent(1, 1, residual=4.0, estimate_error=3.0),
    sent(2, 0, residual=9.0), sent(2, 1, relative_error=0.25, residual=9.0),
    sent(2, 0, "rebuilt", residual=3.0, estimate_error=0.0),
    sent(2, 1, relative_error=0.25, residual=4.0, estimate_error=12.0),
)  # fmt: skip
"""of which the third step was done again, because a node of stage 0 died"""
