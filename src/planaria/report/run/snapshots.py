"""Report section on snapshots in other workers' memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

from planaria.control.facts import decisions as d
from planaria.control.facts.run_started import RunStarted
from planaria.control.log.run_record import RunRecord
from planaria.control.state.memory_snapshots import MemorySnapshot
from planaria.report import page
from planaria.report.phrases import format_count
from planaria.report.run.recoveries import recoveries


def section(record: RunRecord) -> Iterator[str]:
    """Yield the section, if the run kept snapshots in memory."""
    memory = MemorySnapshot.start(record.starts[-1][1].chain) if record.starts else None
    if memory is None:
        return
    schedule = memory.schedule
    if schedule.in_step:
        rule_text = "parities follow every update, without rollbacks"
    else:
        rule_text = f"one every {format_count(schedule.every, 'step')}, sent over {schedule.slices}; after a loss, "
        rule_text += "all return to the last one"
        rule_text += ", which is also in files in the machine's memory" if schedule.persist else ""
    blocked = [sum(s.end - s.start for s in w.spans if s.action == "copy") for _, w in record.worked]
    pauses = [seconds for seconds in blocked if seconds > 0]
    rollbacks = [timing for timing in recoveries(record) if timing.outcome == "recalled"]
    repeated = [timing.step - timing.resumed_step for timing in rollbacks if timing.resumed_step is not None]
    rows = [
        ("snapshots retained", "–" if schedule.in_step else str(_count_snapshots(record))),
        ("time a worker spent copying and sending, median of such steps", _format_ms(pauses, median)),
        ("maximum", _format_ms(pauses, max)),
        ("rollbacks to a snapshot", str(len(rollbacks))),
        ("steps repeated after them", str(sum(repeated))),
        ("received for them", f"{sum(timing.transfer_bytes for timing in rollbacks) / 1e6:.1f} MB"),
    ]
    yield page.section(
        "Snapshots",
        f"Kept by {memory.strategy}: {rule_text}.",
        page.table("snapshots", ["what", "value"], rows, numbers_from=1),
    )


def _count_snapshots(record: RunRecord) -> int:
    """Return the number of completed snapshots, by the workers' own rule."""
    count, memory = 0, None
    for _, fact in record.turns:
        if isinstance(fact, RunStarted):
            memory = MemorySnapshot.start(fact.chain)
        elif memory is None:
            continue
        elif isinstance(fact, d.Form) and any(not isinstance(member.source, d.Keep) for member in fact.members):
            memory = memory.restart()
        elif isinstance(fact, d.RunStep) and fact.mode == "train":
            memory = memory.begin(fact.step)
        elif isinstance(fact, d.Commit):
            count += memory.versions.completes(fact.step, memory.schedule)
            memory = memory.commit(fact.step, ())
    return count


def _format_ms(seconds: list[float], of: Callable[[list[float]], float]) -> str:
    return f"{1000 * of(seconds):.1f} ms" if seconds else "–"
