"""``planaria report --waits``: waiting times, slow workers and links of a run, and the responses to them."""

from __future__ import annotations

from pathlib import Path

from planaria.common.errors import UserError
from planaria.control.facts import decisions as d
from planaria.control.log.reader import read_run
from planaria.report.run.diagnosis import Diagnosis, diagnosis_of
from planaria.report.run.naming import Naming, naming_of
from planaria.report.run.slowness_lines import slow_part_sentence, slowness_line
from planaria.runtime.preparation import run_folders


def diagnose(folder: Path) -> str:
    """Return the diagnosis of a run as text; UserError if the folder is not a run, or has no measurements."""
    record = read_run(folder)
    if record.config.engine == "inline":
        raise UserError(
            f"{folder}: its workers shared one process, so there are no timings of individual workers to diagnose"
        )
    diagnosed, naming = diagnosis_of(record), naming_of(record)
    if not diagnosed.now:
        if record.config.fleet.diagnose == "off":
            raise UserError(
                f"{folder}: no step has been measured (fleet.diagnose = 'off'); train with 'report' or 'act'"
            )
        raise UserError(
            f"{folder}: no step has been measured; workers report every second step (runs of older versions: never)"
        )
    live = "live" if run_folders.is_held(folder) else "not live"
    last = max(gauge.last.step for gauge in diagnosed.now.values())
    lines = [f"{folder}, step {last} ({live})", "", *_workers(diagnosed, naming), "", *_transits(diagnosed, naming), ""]
    responses = []
    for _, fact in record.landmarks:
        if isinstance(fact, d.SlowPartFound | d.HandOverSlowStage | d.Reroute | d.Cleared):
            responses.append(f"step {fact.step}  {slowness_line(fact, naming)}")
    slow = [slow_part_sentence(blamed, naming) for blamed in diagnosed.current]
    lines += ["Slow at present:", *(f"  {text}" for text in slow)] if slow else ["Nothing is slow at present."]
    return "\n".join(lines + (["", "Detected and done:", *(f"  {text}" for text in responses)] if responses else []))


def _workers(diagnosis: Diagnosis, naming: Naming) -> list[str]:
    """Return each worker's computing and waiting time, and the peer it waits for most."""
    lines = [f"{'':24}{'worker':8}{'passes':>12}{'at first':>12}{'computing':>12}{'waiting':>10}  mostly for"]
    for node, gauge in sorted(diagnosis.now.items()):
        last = gauge.last
        waits = max(last.waited, key=lambda peer: last.waited[peer], default=None)
        mostly = "" if waits is None else naming.name([waits])
        busy, waited = last.busy_s * last.steps / last.seconds, sum(last.waited.values()) / last.seconds
        lines.append(
            f"{naming.row(node):24}{gauge.worker:8}{1e3 * gauge.pass_s:9.1f} ms{1e3 * gauge.past_s:9.1f} ms"
            f"{busy:12.0%}{waited:10.0%}  {mostly}"
        )
    return lines


def _transits(diagnosis: Diagnosis, naming: Naming) -> list[str]:
    """Return the transit times of activations, by pair."""
    pairs = sorted((peer, node) for node, gauge in diagnosis.now.items() for peer in gauge.last.flows)
    lines = ["Activations, 25th and 95th percentile of their transit time:"]
    for source, target in pairs:
        flow = diagnosis.now[target].last.flows[source]
        low, high = 1e3 * flow.low_s, 1e3 * flow.high_s
        lines.append(f"  {naming.transit(source, target):24}{low:9.2f} ms{high:9.2f} ms  ({flow.frames} frames)")
    return lines
