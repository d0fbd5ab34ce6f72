"""A plan's step as a Gantt chart for the terminal."""

from __future__ import annotations

from planaria.pipeline.plan.bound import Bound
from planaria.pipeline.plan.simulated import Simulated, Timed

IDLE = "."
FILL = {"forward": "-", "backward": "="}


def draw(simulated: Simulated, bound: Bound, width: int = 100, unit: str = "s") -> str:
    """One row of ``width`` characters per stage, and a legend with step time, lower bound and bubble fraction.

    A forward of microbatch 3 looks like ``F3---``, a backward like ``B3===``; what is too short for its name shows
    the letter alone, and what takes no time is left out.
    """
    margin = len(f"stage {max(simulated.ran)} |")
    columns = max(1, width - margin)
    rows = [
        f"stage {stage}".ljust(margin - 1) + "|" + _row(spans, simulated.step_s, columns)
        for stage, spans in sorted(simulated.spans.items())
    ]
    legend = (
        f"step {simulated.step_s:.4g} {unit}, bound {bound.step_s:.4g} {unit} ({bound.binds}), "
        f"bubble {simulated.bubble:.1%}; F forward, B backward, {IDLE} idle"
    )
    return "\n".join([*rows, legend])


def _row(spans: list[Timed], step_s: float, columns: int) -> str:
    cells = [IDLE] * columns
    for key, start, end in spans:
        if step_s and end > start:
            first, last = round(start / step_s * columns), round(end / step_s * columns)
            name = f"{key.kind[0].upper()}{key.microbatch}"
            fitting = name if len(name) <= last - first else name[: min(1, last - first)]
            cells[first:last] = fitting.ljust(last - first, FILL[key.kind])
    return "".join(cells)
