"""The verdict on one run of the campaign, from what it left: its log, read by two ledgers, and its files."""

from __future__ import annotations

import gzip
import json
import shutil
from collections import Counter
from pathlib import Path

from benchmarks.campaign_plan import Plain
from benchmarks.campaign_runs import Run
from benchmarks.second_ledger import Fact, Ledger


def judge(run: Run, outcome: str, seconds: float) -> Plain:
    """All that is known of a run that is over, as JSON will have it. What it leaves must be in order."""
    seen, folder = run.seen, run.folder
    log = facts(folder) if (folder / "events.jsonl").exists() else []
    ledger = Ledger(log)
    struck = Counter(f"{f['signal']} {f['moment']}" for f in log if f["kind"] == "fault_injected")
    flipped = any(f["kind"] == "fault_injected" and f["signal"] == "flip" for f in log)
    seen.wrong += [*(f"second ledger: {problem}" for problem in ledger.problems), *leftovers(run, outcome, flipped)]
    seen.wrong += [f"ledger or replay: {problem}" for problem in first_opinion(folder)]
    if outcome == "finished" and len(ledger.used) < ledger.total:
        seen.wrong.append(f"finished with {len(ledger.used)} of {ledger.total} blocks")
    if not seen.wrong:  # what nobody needs to look at
        for heavy in ("checkpoints", "tensorboard", "model"):
            shutil.rmtree(folder / heavy, ignore_errors=True)
        (folder / "report.html").unlink(missing_ok=True)
    return {
        "number": run.plan["number"],
        "species": run.plan["species"],
        "outcome": outcome,
        "seconds": round(seconds, 1),
        "parts": seen.parts,
        "faults": dict(sorted(struck.items())),
        "outside": dict(sorted(seen.outside.items())),
        "from_memory": sum(f["kind"] == "run_started" and f.get("recalled", -1) >= 0 for f in log),
        "formed": dict(Counter(f["outcome"] for f in log if f["kind"] == "form")),
        "deaths": dict(Counter(f["cause"] for f in log if f["kind"] == "worker_lost")),
        "refusals": seen.refusals,
        "blocks": len(ledger.used),
        "lost": ledger.lost,
        "repeated": ledger.repeated,
        "orphans": seen.orphans,
        "slowest_end_s": round(seen.slowest_end_s, 2),
        "wrong": seen.wrong,
    }


def first_opinion(folder: Path) -> list[str]:
    """What planaria's own ledger and replay find wrong with the log."""
    from planaria.common.errors import UserError
    from planaria.control.logs import read_run
    from planaria.control.replay import replay
    from planaria.report.run.ledger import prove_exactly_once

    try:
        record = read_run(folder)
        return [*prove_exactly_once(record), *replay(fact for _, fact in record.history).problems]
    except (UserError, ValueError) as error:
        return [str(error)]


def leftovers(run: Run, outcome: str, flipped: bool) -> list[str]:
    """What a run that is over must not leave: tracebacks, doors, halves of files, checkpoints that cannot be read."""
    from planaria.common.errors import UserError
    from planaria.runtime.checkpoint.loading import load_model
    from planaria.runtime.checkpoint.memory import MemoryFolder
    from planaria.runtime.checkpoint.store import CheckpointStore

    folder = run.folder
    logs = [log for log in folder.glob("workers/*.log") if "Traceback" in log.read_text(errors="replace")]
    found = [f"{log.name}: {log.read_text(errors='replace')[-800:]}" for log in logs]
    if outcome != "finished" or run.seen.killed_last:  # nobody was left to tidy up
        return found
    if (memory := MemoryFolder(folder).folder).exists():
        found.append(f"{memory}: snapshots are left in memory")
    halves = [p for p in folder.rglob("*") if p.name.startswith(".") or "unfinished" in p.name or p.name == "door.json"]
    found += [f"{path.relative_to(folder)} is left" for path in halves]
    saved = CheckpointStore(folder / "checkpoints").list()
    for one in saved:
        try:
            weights = load_model(one).global_state() if one.whole else {}
            found += [f"{one.folder.name}: {n} is not finite" for n, w in weights.items() if not w.isfinite().all()]
        except UserError as error:  # a bit that was turned is noticed
            found += [] if flipped else [str(error)]
    return [*found, *([] if saved and saved[-1].whole else ["no whole checkpoint of the end"])]


def facts(folder: Path) -> list[Fact]:
    """The log of a run, resumed or not: its segments first; the last line may have been torn off.

    A segment that is there twice is being compressed: the plain one is whole.
    """
    parts = {p.name.removesuffix(".gz"): p for p in sorted(folder.glob("segments/events-*.jsonl*"), reverse=True)}
    raw = b"".join(
        gzip.decompress(part.read_bytes()) if part.suffix == ".gz" else part.read_bytes()
        for _, part in sorted(parts.items())
    )
    lines = map(json.loads, (raw + (folder / "events.jsonl").read_bytes()).split(b"\n")[:-1])
    return [line.get("event") or line["decision"] for line in lines]
