"""A run's numbers in Prometheus' text exposition format, version 0.0.4: what ``/metrics`` answers. Pure.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Literal, NamedTuple, get_args

from planaria.control import decisions as d
from planaria.control import events as e
from planaria.control.verdicts import Fault
from planaria.report.live.tally import RECOVERY_S, Durations, Tally
from planaria.report.run.recovery_timing import Outcome

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Kind = Literal["gauge", "counter", "histogram"]
OUTCOMES = ("running", *get_args(d.Finish.model_fields["outcome"].annotation))
CAUSES = get_args(e.WorkerLost.model_fields["cause"].annotation)


class Sample(NamedTuple):
    """A line: the family's name with a suffix, labels, value."""

    value: float
    labels: Mapping[str, str] = {}
    suffix: str = ""


class Family(NamedTuple):
    """All samples of one name."""

    name: str
    kind: Kind
    help: str
    samples: Callable[[Tally], Iterable[Sample]]


def exposition(runs: Mapping[str, Tally]) -> str:
    """All families, each with HELP and TYPE, of runs by name; their samples have the label ``run``.

    What is not known yet has no sample; what can be counted begins at 0.
    """
    return "".join(line + "\n" for family in FAMILIES for line in _lines(family, runs))


def names() -> frozenset[str]:
    """Everything that a query may ask for: histograms by their parts."""
    parts = ("_bucket", "_sum", "_count")
    return frozenset(f.name + part for f in FAMILIES for part in (parts if f.kind == "histogram" else ("",)))


def _lines(family: Family, runs: Mapping[str, Tally]) -> Iterator[str]:
    samples = ((run, sample) for run, tally in runs.items() for sample in family.samples(tally))
    labelled = (sample._replace(labels={"run": run, **sample.labels}) for run, sample in samples)
    return lines(family.name, family.kind, family.help, labelled)


def lines(name: str, kind: Kind, help: str, samples: Iterable[Sample]) -> Iterator[str]:
    """The lines of one family, without their ends."""
    yield f"# HELP {name} {_escaped(help)}"
    yield f"# TYPE {name} {kind}"
    for sample in samples:
        labels = ",".join(f'{label}="{_label(value)}"' for label, value in sample.labels.items())
        yield f"{name}{sample.suffix}{f'{{{labels}}}' if labels else ''} {_number(sample.value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _label(value: str) -> str:
    return _escaped(value).replace('"', r"\"")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


def _known(value: float | None) -> Iterator[Sample]:
    if value is not None:
        yield Sample(value)


def _by(label: str, values: Mapping[str, float], always: Iterable[str] = ()) -> Iterator[Sample]:
    """A sample for each; ``always``: those that are there before the first, so that rates have a beginning."""
    for name in dict.fromkeys([*always, *values]):
        yield Sample(values.get(name, 0), {label: name})


def _info(tally: Tally) -> Iterator[Sample]:
    if (started := tally.members.started) is not None:
        exchange = started.exchange.kind if started.replicas > 1 else "none"
        shape = {"stages": str(started.stages), "replicas": str(started.replicas)}
        yield Sample(1, {**shape, "recovery": started.recovery.strategy, "exchange": exchange})


def _planned(tally: Tally) -> Iterator[Sample]:
    return _known(None if tally.members.started is None else tally.members.started.steps)


def _state(tally: Tally) -> Iterator[Sample]:
    now = tally.outcome or ("running" if tally.members.started else "")
    return _by("state", {now: 1} if now else {}, OUTCOMES)


def _slow(tally: Tally) -> Iterator[Sample]:
    for (fault, nodes), one in tally.verdicts.standing.items():
        where, who = "-".join(map(str, nodes)), " ".join(one.blamed.workers)
        yield Sample(one.times, {"class": fault, "nodes": where, "workers": who})


def _histogram(durations: Durations) -> Iterator[Sample]:
    upto = list(accumulate(durations.counts))
    for bound, count in zip((*RECOVERY_S, math.inf), upto, strict=True):
        yield Sample(count, {"le": _number(bound)}, "_bucket")
    yield Sample(durations.total, suffix="_sum")
    yield Sample(upto[-1], suffix="_count")


FAMILIES = (
    Family("planaria_run_info", "gauge", "What the run is; always 1.", _info),
    Family("planaria_run_state", "gauge", "1 for the state that the run is in.", _state),
    Family("planaria_steps_committed", "gauge", "Committed steps; a rollback takes some back.",
           lambda tally: [Sample(tally.steps)]),
    Family("planaria_steps_planned", "gauge", "Steps that the run is to have.", _planned),
    Family("planaria_last_commit_timestamp_seconds", "gauge", "When the last step was committed, Unix time.",
           lambda tally: _known(tally.committed_at)),
    Family("planaria_loss", "gauge", "Training loss of the last step, nats per token; of several replicas, their mean.",
           lambda tally: _known(tally.loss)),
    Family("planaria_validation_loss", "gauge", "Loss of the newest validation, nats per token.",
           lambda tally: _known(tally.validation_loss)),
    Family("planaria_tokens_per_second", "gauge", "Tokens per second since the step before, recoveries included.",
           lambda tally: _known(tally.tokens_per_s)),
    Family("planaria_workers", "gauge", "Living workers by state; a member holds a stage.",
           lambda tally: _by("state", tally.workers)),
    Family("planaria_workers_lost_total", "counter", "Workers that were lost, by cause.",
           lambda tally: _by("cause", tally.lost, CAUSES)),
    Family("planaria_generation", "gauge", "Generation of each replica: how often it was formed.",
           lambda tally: [Sample(n, {"replica": str(replica)}) for replica, n in tally.generations.items()]),
    Family("planaria_recoveries_total", "counter", "Recoveries that are over, by what became of them.",
           lambda tally: _by("outcome", tally.recoveries, get_args(Outcome))),
    Family("planaria_recovery_seconds", "histogram", "From the fault, or its notice, to the first microbatch through.",
           lambda tally: _histogram(tally.recovery_s)),
    Family("planaria_rounds_total", "counter", "How often a group of replicas has settled a round of their exchange.",
           lambda tally: [Sample(tally.rounds)]),
    Family("planaria_sent_bytes_total", "counter", "Payload sent between stages of one replica, and between replicas.",
           lambda tally: _by("between", tally.sent)),
    Family("planaria_slow_times", "gauge", "Of what is slow now: times as long as elsewhere, or at first; 0: unknown.",
           _slow),
    Family("planaria_verdicts_total", "counter", "Verdicts of the diagnosis, by class.",
           lambda tally: _by("class", tally.verdicts.blamed, get_args(Fault))),
    Family("planaria_deeds_total", "counter", "What was done about slow workers and links.",
           lambda tally: _by("deed", tally.verdicts.deeds, ("relieve", "reroute"))),
    Family("planaria_checkpoint_step", "gauge", "Step of the newest checkpoint.",
           lambda tally: _known(tally.checkpoint)),
)  # fmt: skip
"""names end as Prometheus asks: units in full, counters in _total"""
