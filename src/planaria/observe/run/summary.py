"""A run in a few lines of text: how well the model learnt, what went wrong, and how long each recovery took."""

from __future__ import annotations

from collections.abc import Iterator

from planaria.observe.run.measured import measured
from planaria.observe.run.recoveries import RecoveryTiming, recoveries
from planaria.observe.run.round_history import gatherings, told, totals
from planaria.record.logs import RunRecord

_PARTS = ("notice", "decide", "relink", "transfer", "rebuild", "redo")


def summary(record: RunRecord) -> Iterator[str]:
    """Final losses (of several replicas, means), what their exchange came to, then a line for every fault."""
    last = measured(record)
    if last.loss is not None:
        validated = last.validation and f" (validation {last.validation.val_loss:.4f})"
        yield f"final loss    {last.loss:.4f}{validated or ''}"
    held = gatherings(record)
    for place, line in enumerate(told(totals(held)) if held else ()):
        yield f"{'' if place else 'exchange':<14}{line}"
    timings = recoveries(record)
    if not timings:
        yield "faults        none"
    for timing in timings:
        yield f"fault         {_told(timing)}"
        if timing.total is not None:
            yield f"              {_split(timing)}"


def _told(timing: RecoveryTiming) -> str:
    what = f"step {timing.step}: {timing.where} lost, {timing.outcome}" if timing.nodes else f"step {timing.step}"
    if timing.total is None:
        return what
    return f"{what} {timing.total:.2f} s after the {'fault' if timing.fault_t else 'notice'}"


def _split(timing: RecoveryTiming) -> str:
    """Where the time went; members relink and rebuild side by side, so the parts may come to more than the whole."""
    parts = [(name, getattr(timing, name)) for name in _PARTS]
    return ", ".join(f"{name} {1000 * seconds:.0f} ms" for name, seconds in parts if seconds is not None)
