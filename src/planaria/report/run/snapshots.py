"""What snapshots in the others' memory took, and what they were good for: the report's section on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

from planaria.control import decisions as d
from planaria.control.logs import RunRecord
from planaria.control.started import RunStarted
from planaria.report import page
from planaria.report.run.recovery_timeline import RecoveryTiming
from planaria.report.words import counted


def section(record: RunRecord, timings: list[RecoveryTiming]) -> Iterator[str]:
    """Nothing for a run whose stages do not remember a state together."""
    if not record.starts or record.starts[-1][1].memory is None:
        return
    memory = record.starts[-1][1].memory
    rule = memory.rule
    if rule.in_step:
        how = "parities follow every update, and nobody goes back"
    else:
        how = f"one every {counted(rule.every, 'step')}, sent over {rule.slices}; whoever is lost, all go back to the "
        how += "last one"
        how += ", which is in files of the machine's memory too" if rule.outlive else ""
    blocked = [sum(s.end - s.start for s in w.spans if s.action == "copy") for _, w in record.worked]
    held_up = [seconds for seconds in blocked if seconds > 0]
    back = [timing for timing in timings if timing.outcome == "recalled"]
    again = [timing.step - timing.resumed_step for timing in back if timing.resumed_step is not None]
    rows = [
        ("snapshots retained", "–" if rule.in_step else str(_retained(record))),
        ("a worker was held up by copying and handing over, median of such steps", _ms(held_up, median)),
        ("the longest", _ms(held_up, max)),
        ("times that all went back", str(len(back))),
        ("steps repeated by that", str(sum(again))),
        ("received then", f"{sum(timing.transfer_bytes for timing in back) / 1e6:.1f} MB"),
    ]
    yield page.section(
        "Snapshots", f"Kept by {memory.by}: {how}.", page.table("snapshots", ["what", "how much"], rows, numbers_from=1)
    )


def _retained(record: RunRecord) -> int:
    """How often a snapshot became whole: told by the same rule that workers go by."""
    count, memory = 0, None
    for _, fact in record.turns:
        if isinstance(fact, RunStarted):
            memory = fact.memory
        elif memory is None:
            continue
        elif isinstance(fact, d.Form) and any(not isinstance(member.source, d.Keep) for member in fact.members):
            memory = memory.restarted()
        elif isinstance(fact, d.RunStep) and fact.mode == "train":
            memory = memory.begun(fact.step)
        elif isinstance(fact, d.Commit):
            count += memory.versions.completed(fact.step, memory.rule)
            memory = memory.committed(fact.step, ())
    return count


def _ms(seconds: list[float], of: Callable[[list[float]], float]) -> str:
    return f"{1000 * of(seconds):.1f} ms" if seconds else "–"
