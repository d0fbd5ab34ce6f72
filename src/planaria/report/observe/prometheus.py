"""A run's metrics in Prometheus' text exposition format, version 0.0.4, for ``/metrics``.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Literal, NamedTuple, get_args

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.facts.slowness import SlownessKind
from planaria.report.observe.tally import RECOVERY_S, Durations, RunTally
from planaria.report.run.recovery_timing import Outcome

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MetricKind = Literal["gauge", "counter", "histogram"]
OUTCOMES = ("running", *get_args(d.Finish.model_fields["outcome"].annotation))
CAUSES = get_args(e.WorkerLost.model_fields["cause"].annotation)


class MetricSample(NamedTuple):
    """One line of a family: value, labels, and a suffix of the family's name."""

    value: float
    labels: Mapping[str, str] = {}
    suffix: str = ""


class MetricFamily(NamedTuple):
    """All samples of one name."""

    name: str
    kind: MetricKind
    help: str
    samples: Callable[[RunTally], Iterable[MetricSample]]


def exposition(runs: Mapping[str, RunTally]) -> str:
    """Return all families with HELP and TYPE of runs by name; samples have the label ``run``.

    Unknown values have no sample; counters start at 0.
    """
    return "".join(line + "\n" for family in FAMILIES for line in _lines(family, runs))


def _lines(family: MetricFamily, runs: Mapping[str, RunTally]) -> Iterator[str]:
    samples = ((run, sample) for run, tally in runs.items() for sample in family.samples(tally))
    labelled = (sample._replace(labels={"run": run, **sample.labels}) for run, sample in samples)
    return lines(family.name, family.kind, family.help, labelled)


def lines(name: str, kind: MetricKind, description: str, samples: Iterable[MetricSample]) -> Iterator[str]:
    """Yield the lines of one family."""
    yield f"# HELP {name} {_escape(description)}"
    yield f"# TYPE {name} {kind}"
    for sample in samples:
        labels = ",".join(f'{label}="{_escape_label(value)}"' for label, value in sample.labels.items())
        yield f"{name}{sample.suffix}{f'{{{labels}}}' if labels else ''} {_format_number(sample.value)}"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _escape_label(value: str) -> str:
    return _escape(value).replace('"', r"\"")


def _format_number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


def _sample_if_known(value: float | None) -> Iterator[MetricSample]:
    if value is not None:
        yield MetricSample(value)


def _samples_by_label(label: str, values: Mapping[str, float], always: Iterable[str] = ()) -> Iterator[MetricSample]:
    """Yield a sample per label value; ``always``: values that start at 0, so that rates are defined from the start."""
    for name in dict.fromkeys([*always, *values]):
        yield MetricSample(values.get(name, 0), {label: name})


def _info(tally: RunTally) -> Iterator[MetricSample]:
    if (started := tally.members.started) is not None:
        exchange = started.exchange.kind if started.max_replicas > 1 else "none"
        shape = {"stages": str(started.stages), "replicas": str(started.replicas)}
        yield MetricSample(1, {**shape, "recovery": started.recovery.strategy, "exchange": exchange})


def _planned_steps(tally: RunTally) -> Iterator[MetricSample]:
    return _sample_if_known(None if tally.members.started is None else tally.members.started.steps)


def _state(tally: RunTally) -> Iterator[MetricSample]:
    now = tally.outcome or ("running" if tally.members.started else "")
    return _samples_by_label("state", {now: 1} if now else {}, OUTCOMES)


def _slow_parts(tally: RunTally) -> Iterator[MetricSample]:
    for (fault, nodes), verdict in tally.verdicts.current.items():
        where, workers = "-".join(map(str, nodes)), " ".join(verdict.blamed.workers)
        yield MetricSample(verdict.times, {"class": fault, "nodes": where, "workers": workers})


def _histogram(durations: Durations) -> Iterator[MetricSample]:
    cumulative = list(accumulate(durations.counts))
    for bound, count in zip((*RECOVERY_S, math.inf), cumulative, strict=True):
        yield MetricSample(count, {"le": _format_number(bound)}, "_bucket")
    yield MetricSample(durations.total, suffix="_sum")
    yield MetricSample(cumulative[-1], suffix="_count")


FAMILIES = (
    MetricFamily("planaria_run_info", "gauge", "Configuration of the run; always 1.", _info),
    MetricFamily("planaria_run_state", "gauge", "1 for the current state of the run.", _state),
    MetricFamily("planaria_steps_committed", "gauge", "Committed steps; decreases after a rollback.",
           lambda tally: [MetricSample(tally.steps)]),
    MetricFamily("planaria_steps_planned", "gauge", "Total steps of the run.", _planned_steps),
    MetricFamily("planaria_last_commit_timestamp_seconds", "gauge", "Unix time of the last commit.",
           lambda tally: _sample_if_known(tally.committed_at)),
    MetricFamily("planaria_loss", "gauge", "Training loss of the last step, nats per token; the mean over replicas.",
           lambda tally: _sample_if_known(tally.loss)),
    MetricFamily("planaria_validation_loss", "gauge", "Loss of the newest validation, nats per token.",
           lambda tally: _sample_if_known(tally.validation_loss)),
    MetricFamily("planaria_tokens_per_second", "gauge", "Tokens per second since the previous step, with recoveries.",
           lambda tally: _sample_if_known(tally.tokens_per_s)),
    MetricFamily("planaria_workers", "gauge", "Living workers by state; a member holds a stage.",
           lambda tally: _samples_by_label("state", tally.workers)),
    MetricFamily("planaria_workers_lost_total", "counter", "Lost workers by cause.",
           lambda tally: _samples_by_label("cause", tally.lost, CAUSES)),
    MetricFamily("planaria_generation", "gauge", "Generation of each replica, incremented by each formation.",
           lambda tally: [MetricSample(n, {"replica": str(replica)}) for replica, n in tally.generations.items()]),
    MetricFamily("planaria_recoveries_total", "counter", "Completed recoveries by outcome.",
           lambda tally: _samples_by_label("outcome", tally.recoveries, get_args(Outcome))),
    MetricFamily("planaria_recovery_seconds", "histogram", "From fault or detection to the first completed microbatch.",
           lambda tally: _histogram(tally.recovery_s)),
    MetricFamily("planaria_controller_term", "gauge", "Term of the controller that leads; the first one's is 1.",
           lambda tally: [MetricSample(tally.term)]),
    MetricFamily("planaria_controllers_lost_total", "counter", "Controllers that were lost and replaced, by cause.",
           lambda tally: _samples_by_label("cause", tally.lost_controllers, get_args(e.ControllerEnd))),
    MetricFamily("planaria_rounds_total", "counter", "Rounds of the exchange settled by groups of replicas.",
           lambda tally: [MetricSample(tally.rounds)]),
    MetricFamily("planaria_sent_bytes_total", "counter", "Payload sent between stages, and between replicas.",
           lambda tally: _samples_by_label("between", tally.sent)),
    MetricFamily("planaria_slow_times", "gauge", "Slowdown by verdict, against peers or its start; 0: unknown.",
           _slow_parts),
    MetricFamily("planaria_verdicts_total", "counter", "Verdicts of the diagnosis, by class.",
           lambda tally: _samples_by_label("class", tally.verdicts.blamed, get_args(SlownessKind))),
    MetricFamily("planaria_slowness_actions_total", "counter", "Actions against slow workers and links.",
           lambda tally: _samples_by_label("action", tally.verdicts.actions, ("hand_over_slow_stage", "reroute"))),
    MetricFamily("planaria_checkpoint_step", "gauge", "Step of the newest checkpoint.",
           lambda tally: _sample_if_known(tally.checkpoint)),
)  # fmt: skip
"""names follow Prometheus' conventions: units in full, counters end with _total"""
