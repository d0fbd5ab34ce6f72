"""Report section on snapshots in other workers' memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

from planaria.control.facts import decisions as d
from planaria.control.facts.run_started import RunStarted
from planaria.control.log.run_record import RunRecord
from planaria.control.state.memory_snapshots import MemorySnapshot
from planaria.report import page
from planaria.report.phrases import counted
from planaria.report.run.recovery_timeline import recoveries


def section(record: RunRecord) -> Iterator[str]:
    """Yield the section, if the run kept snapshots in memory."""
    memory = MemorySnapshot.start(record.starts[-1][1].chain) if record.starts else None
    if memory is None:
        return
    rule = memory.rule
    if rule.in_step:
        how = "parities follow every update, without rollbacks"
    else:
        how = f"one every {counted(rule.every, 'step')}, sent over {rule.slices}; after a loss, all go back to "
        how += "the last one"
        how += ", which is also in files in the machine's memory" if rule.persist else ""
    blocked = [sum(s.end - s.start for s in w.spans if s.action == "copy") for _, w in record.worked]
    held_up = [seconds for seconds in blocked if seconds > 0]
    back = [timing for timing in recoveries(record) if timing.outcome == "recalled"]
    again = [timing.step - timing.resumed_step for timing in back if timing.resumed_step is not None]
    rows = [
        ("snapshots retained", "–" if rule.in_step else str(_retained(record))),
        ("time a worker spent copying and sending, median of such steps", _ms(held_up, median)),
        ("maximum", _ms(held_up, max)),
        ("rollbacks to a snapshot", str(len(back))),
        ("steps repeated after them", str(sum(again))),
        ("received for them", f"{sum(timing.transfer_bytes for timing in back) / 1e6:.1f} MB"),
    ]
    yield page.section(
        "Snapshots", f"Kept by {memory.by}: {how}.", page.table("snapshots", ["what", "how much"], rows, numbers_from=1)
    )


def _retained(record: RunRecord) -> int:
    """Return the number of completed snapshots, by the workers' own rule."""
    count, memory = 0, None
    for _, fact in record.turns:
        if isinstance(fact, RunStarted):
            memory = MemorySnapshot.start(fact.chain)
        elif memory is None:
            continue
        elif isinstance(fact, d.Form) and any(not isinstance(member.source, d.Keep) for member in fact.members):
            memory = memory.restarted()
        elif isinstance(fact, d.RunStep) and fact.mode == "train":
            memory = memory.begun(fact.step)
        elif isinstance(fact, d.Commit):
            count += memory.versions.completes(fact.step, memory.rule)
            memory = memory.committed(fact.step, ())
    return count


def _ms(seconds: list[float], of: Callable[[list[float]], float]) -> str:
    return f"{1000 * of(seconds):.1f} ms" if seconds else "–"
