"""The HTML report of a run (``planaria report``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from pydantic import BaseModel

from planaria.config.model_config import GROUP
from planaria.config.schema import RunConfig
from planaria.control.facts.events import RunStarted
from planaria.control.log.reader import read_run
from planaria.control.log.run_record import RunRecord
from planaria.exchange.compress import compression_report
from planaria.exchange.robust import robust_report
from planaria.report import page
from planaria.report.phrases import format_count, format_value, format_wall_time
from planaria.report.run import diagnosis, failovers, snapshots, stage_peaks
from planaria.report.run.checkpoint_times import saves
from planaria.report.run.event_lines import timed_lines
from planaria.report.run.figures import (
    MAX_RECOVERIES,
    bytes_figure,
    holdings_figure,
    loss_figure,
    recovery_figure,
    recovery_name,
    speed_figure,
)
from planaria.report.run.gantt import death_figure, idle_fraction, ordinary_step, step_figure
from planaria.report.run.naming import naming_of
from planaria.report.run.recoveries import recoveries
from planaria.report.run.recovery_timing import RecoveryTiming
from planaria.report.run.replica_report import replica_section
from planaria.report.run.sample_ledger import sample_ledger
from planaria.report.run.stage_holders import holdings, machine_section
from planaria.report.run.summary import RunFacts, facts_of, verdict

MAX_DEATHS = 4


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the report of the run in ``folder`` to ``out`` (default: ``folder/report.html``) and return its path.

    :raises UserError: if the folder is not a run's, its log is broken, or ``out`` cannot be written.
    """
    return write_page(read_run(folder), out or folder / "report.html")


def write_page(record: RunRecord, out: Path) -> Path:
    """Write the report of a run.

    :raises UserError: if ``out`` cannot be written.
    """
    return page.write(out, page.document(f"{record.config.name} · planaria", body(record)))


def body(record: RunRecord) -> Iterator[str]:
    """Yield the report's sections as HTML."""
    facts = facts_of(record, wall_time(record))
    yield page.heading(record.config.name, verdict(facts), _summary(record))
    yield page.paragraph(_origin(record))
    yield page.cards(_cards(record, facts))
    for section in SECTIONS:
        yield from section(record)
    yield page.footer(f"Written by planaria report from {record.folder.name}.")


def _loss_and_speed(record: RunRecord) -> Iterator[str]:
    if any(True for _ in record.trained):
        means = " Both are means over the replicas." if naming_of(record).several else ""
        yield page.section(
            "Loss",
            f"Mean cross-entropy of each step, and of the validation set.{means} A cross marks a step with a fault.",
            page.chart(loss_figure(record.metrics, timed_lines(record)), "loss"),
        )
        yield page.section(
            "Speed",
            "Tokens per second since the previous step, recoveries included.",
            page.chart(speed_figure(record.metrics), "speed"),
        )


def _coding(record: RunRecord) -> Iterator[str]:
    if record.config.exchange.coded:
        from planaria.exchange.coded import coded_report  # imports torch

        yield from coded_report.section(record)


def _summary(record: RunRecord) -> str:
    config = record.config
    model, pipe = config.model, config.pipeline
    if model.family == GROUP:
        options = model.options
        return (
            f"a model of its members with {options['numbers']:,} trained numbers; blocks of "
            f"{format_count(pipe.microbatch_size, 'sample')}, each counted as one token; exchange by "
            f"{config.exchange.kind}; seed {config.seed}."
        )
    nodes = next((len(started.stage_of) for _, started in record.starts if started.arrangement), 0)
    order = f"{pipe.order}, {config.routing.kind} routing"
    if config.routing.schedule is not None:
        order = f"on a schedule over {nodes} nodes"
    elif config.exchange.replicas > 1:
        order += f"; {config.exchange.replicas} replicas with {config.exchange.kind}"
    model_name = "LLaMA" if model.family == "llama" else f"a model of the family {model.family}"
    return (
        f"{model_name} with {format_count(model.layers, 'layer')} of width {model.dim}, cut into "
        f"{format_count(pipe.stages, 'block stage')} and the ends; "
        f"{format_count(pipe.microbatches, 'microbatch', 'microbatches')} of {pipe.microbatch_size} × "
        f"{model.context} tokens a step, {order}; "
        f"recovery by {config.recovery.strategy}; engine {config.engine}; seed {config.seed}."
    )


def _origin(record: RunRecord) -> str:
    """Return date, machine and command of the run's start, and the date of its last resumption."""
    started = [fact for _, fact in record.starts]
    if not started:
        return "Not started."
    begun, latest = started[0], started[-1]
    dates = f"Started {_date(begun.wall_time)}"
    if latest is not begun:
        dates += f", last resumed {_date(latest.wall_time)}"
    provenance = latest.provenance
    return (
        f"{dates}."
        if provenance is None
        else f"{dates} with {provenance.version} on {provenance.machine}: {provenance.command}"
    )


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def wall_time(record: RunRecord) -> float:
    """Return the run's seconds, without the pauses between resumptions."""
    total = 0.0
    begin = None
    last = 0.0
    for t, fact in record.landmarks:
        if isinstance(fact, RunStarted):
            total += 0.0 if begin is None else last - begin
            begin = t
        last = t
    return total if begin is None else total + last - begin


def _cards(record: RunRecord, facts: RunFacts) -> Iterator[tuple[str, str, str]]:
    last, validation, times = facts.last, facts.last.validation, saves(record)
    yield "steps", f"{facts.steps}", f"of {facts.planned}"
    yield "training loss", *(("–", "none reported") if last.loss is None else (f"{last.loss:.4f}", "last step"))
    yield (
        "validation loss",
        f"{validation.val_loss:.4f}" if validation else "–",
        f"after step {validation.step}" if validation else "none measured",
    )
    tokens = facts.steps * record.config.samples * record.config.model.context
    yield (
        "tokens/s",
        f"{tokens / facts.wall_s:,.0f}" if facts.wall_s else "–",
        f"whole run; median step {last.tokens_per_s:,.0f}" if last.tokens_per_s else "whole run",
    )
    yield "wall time", format_wall_time(facts.wall_s), "without pauses between resumptions"
    yield from _fault_cards(facts)
    if sums := facts.exchange if facts.exchange.rounds else None:
        sent = f"{(sums.blocking_bytes + sums.prefetched_bytes) / 1e6:.1f} MB sent"
        yield (
            "rounds of exchange",
            f"{sums.rounds}",
            f"{sent}; {sums.alone} of {format_count(sums.attended, 'time')} alone; "
            f"{sums.waited_for_peers_s + sums.waited_for_updates_s:.1f} s waited",
        )
    if times.paused_s:
        background = f"; files written during training for {times.background_s:.2f} s" if times.background_s else ""
        yield "checkpoints", f"{times.sealed}", f"training paused for {times.paused_s:.2f} s{background}"
    if ledger := sample_ledger(record):
        samples = sum(line.samples for line in ledger)
        yield "samples", f"{samples:,}", facts.problems[0] if facts.problems else "each used exactly once"


def _fault_cards(facts: RunFacts) -> Iterator[tuple[str, str, str]]:
    faults, gaps = facts.faults, facts.leaderless_s
    yield (
        "deaths",
        f"{faults.deaths}",
        f"{format_count(faults.injected, 'fault')} injected; {format_count(faults.spares_lost, 'spare')} lost"
        + (f"; {format_count(faults.excluded, 'worker')} excluded" if faults.excluded else ""),
    )
    if gaps:
        yield "lost controllers", f"{len(gaps)}", f"replaced after {median(gaps):.2f} s (median)"
    counts = ", ".join(f"{count} {name}" for name, count in faults.outcomes.items())
    yield "median recovery", f"{median(facts.recovery_s):.2f} s" if facts.recovery_s else "–", counts or "none needed"


def _pipeline(record: RunRecord) -> Iterator[str]:
    works, naming = ordinary_step(record), naming_of(record)
    if works:
        whose = f" of replica {naming.replica(works[0].node)}" if naming.several else ""
        yield page.section(
            "An ordinary step",
            f"Step {works[0].step}{whose}, of median duration among those of which the log keeps every action. Numbers "
            "are microbatches. "
            f"The workers together waited {idle_fraction(works):.0%} of it.",
            page.chart(step_figure(works), "step"),
        )


def _recoveries(record: RunRecord) -> Iterator[str]:
    timings = recoveries(record)
    if not timings:
        return
    names = [recovery_name(number, timing) for number, timing in enumerate(timings, 1)]
    charts = [
        page.subheading(name) + page.chart(death_figure(record, timing), f"recovery{number}")
        for number, (name, timing) in enumerate(zip(names, timings, strict=True))
        if number < MAX_DEATHS
    ]
    yield page.section(
        "Around each loss",
        "Time zero is the fault, or its detection if the fault was not logged. Hatched work was dropped: it was not "
        "committed, and the same samples were used again."
        + (f" The first {MAX_DEATHS} of {len(timings)} are drawn." if len(timings) > MAX_DEATHS else ""),
        *charts,
    )
    head = ["recovery", "lost", "cause", "successor", "outcome", "steps redone", "received",
            "notice", "decide", "relink", "transfer", "rebuild", "redo", "total"]  # fmt: skip
    rows = [_row(name, timing) for name, timing in zip(names, timings, strict=True)]
    yield page.section(
        "Where recovery time went",
        "Notice: fault to its detection. Decide: to the new formation. Relink, transfer, rebuild: the slowest "
        "member's. Redo: from the last link to the first completed microbatch. Members work in parallel, so the "
        "parts need not add up to the total (diamond). Times in milliseconds."
        + (f" The {MAX_RECOVERIES} longest of {len(timings)} are drawn." if len(timings) > MAX_RECOVERIES else ""),
        page.chart(recovery_figure(timings), "recoveries"),
        page.table("recovery-times", head, rows, numbers_from=5),
    )


def _what_happened(record: RunRecord) -> Iterator[str]:
    if recoveries(record) or failovers.failovers(record):
        zero = _start_t(record)
        lines = [(f"{t - zero:.2f} s", str(line)) for t, line in timed_lines(record)]
        yield page.section("What happened", "Seconds since the start of the run.", page.log("story", lines))


def _row(name: str, timing: RecoveryTiming) -> list[str]:
    redone = None if timing.resumed_step is None else max(timing.step - timing.resumed_step, 0)
    return [
        name,
        ", ".join(timing.workers) or "an edge",
        ", ".join(dict.fromkeys(timing.causes)) or "connection",
        ", ".join(timing.new_workers.values()) or "–",
        timing.outcome,
        "–" if redone is None else str(redone),
        f"{timing.transfer_bytes / 1e6:.1f} MB",
        *("–" if seconds is None else f"{1000 * seconds:.1f}" for seconds in (*timing.parts.values(), timing.total)),
    ]


def _holders_and_bytes(record: RunRecord) -> Iterator[str]:
    stays = holdings(record)
    if stays:
        yield page.section(
            "Stage holders",
            "A change of colour is a change of holder.",
            page.chart(holdings_figure(stays, recoveries(record), _start_t(record)), "holders"),
        )
    sent = bytes_figure(record)
    if sent is not None:
        yield page.section(
            "Bytes on each edge",
            "Payload of activations, gradients and copies between stages, as the senders counted it."
            + (" Messages between replicas are not included." if naming_of(record).several else ""),
            page.chart(sent, "bytes"),
        )


def _checkpoints(record: RunRecord) -> Iterator[str]:
    recuts = [(started.first_step, started.recut) for _, started in record.starts if started.recut is not None]
    if recuts:
        rows = [[str(step), cut.checkpoint, str(cut.was), str(cut.now), "; ".join(cut.notes)] for step, cut in recuts]
        yield page.section(
            "Checkpoints",
            "Resumptions whose stages or replicas differ from the checkpoint's.",
            page.table("reshaped", ["step", "checkpoint", "from", "to", "state"], rows, 5),
        )


def _configuration(record: RunRecord) -> Iterator[str]:
    yield page.section(
        "Configuration",
        "The resolved recipe; values that differ from the defaults are blue.",
        page.settings(_settings(record)),
    )


SECTIONS: tuple[Callable[[RunRecord], Iterator[str]], ...] = (
    _loss_and_speed,
    replica_section,
    _coding,
    robust_report.section,
    compression_report.section,
    diagnosis.section,
    machine_section,
    _pipeline,
    _recoveries,
    failovers.section,
    _what_happened,
    snapshots.section,
    _holders_and_bytes,
    stage_peaks.section,
    _checkpoints,
    _configuration,
)
"""sections in the order of the page; one that does not apply to a run yields nothing"""


def _start_t(record: RunRecord) -> float:
    return record.starts[0][0] if record.starts else record.landmarks[0][0]


def _settings(record: RunRecord) -> Iterator[tuple[str, list[tuple[str, str, bool]]]]:
    """Yield the configuration's sections: (key, value, differs from the default)."""
    config, default = record.config, RunConfig()
    plain = [name for name in RunConfig.model_fields if not isinstance(getattr(config, name), BaseModel)]
    yield "run", [(k, format_value(getattr(config, k)), getattr(config, k) != getattr(default, k)) for k in plain]
    for name in RunConfig.model_fields:
        chosen, default_value = getattr(config, name), getattr(default, name)
        if isinstance(chosen, BaseModel):
            yield name, [(k, format_value(v), v != getattr(default_value, k)) for k, v in chosen]
