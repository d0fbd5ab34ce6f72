"""A run's numbers in Prometheus' text format (version 0.0.4), of the same state that the page shows. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from planaria.observe.live_page.frames import Json

STATUSES = ("starting", "spare", "member", "released", "dead")
Sample = tuple[Json, float]


def exposition(runs: Sequence[tuple[str, Json, float]], watchers: int) -> str:
    """All metrics of these runs: name, state and seconds since the log was written to."""
    lines = ["# HELP planaria_watchers Streams that are open.", "# TYPE planaria_watchers gauge"]
    lines.append(f"planaria_watchers {watchers}")
    told = [(name, list(_metrics(state, age))) for name, state, age in runs]
    for position, (metric, what, kind, _) in enumerate(told[0][1]):
        lines += [f"# HELP {metric} {what}", f"# TYPE {metric} {kind}"]
        for name, metrics in told:
            for labels, value in metrics[position][3]:
                lines.append(f"{metric}{{{_labels({'run': name} | labels)}}} {_number(value)}")
    return "\n".join(lines) + "\n"


Values = list[tuple[dict[str, str], float]]


def _metrics(state: Json, age: float) -> Iterator[tuple[str, str, str, Values]]:
    loss, validation = state.get("loss", {}), state.get("validation", {})
    workers = Counter(worker["status"] for worker in state.get("workers", {}).values())
    recoveries = state.get("recoveries", {})
    yield "planaria_step", "Steps of the run that are committed.", "gauge", [({}, state.get("step", 0))]
    yield "planaria_steps", "Steps that the run is to have.", "gauge", [({}, state["run"]["steps"])]
    yield "planaria_loss", "Training loss, nats per token.", "gauge", _one(loss.get("value"))
    yield "planaria_validation_loss", "Validation loss, nats per token.", "gauge", _one(validation.get("value"))
    yield "planaria_tokens_per_second", "Since the step before.", "gauge", _one(loss.get("tokens_per_s"))
    counted: Values = [({"status": status}, float(workers[status])) for status in STATUSES]
    yield "planaria_workers", "Workers by what they are.", "gauge", counted
    yield (
        "planaria_workers_lost_total",
        "Workers lost in this part of the run.",
        "counter",
        [({}, state.get("lost", 0))],
    )
    generations: Values = [({"replica": n}, r["generation"]) for n, r in state.get("replicas", {}).items()]
    yield "planaria_generation", "Times that the replica was formed.", "gauge", generations
    took: Values = [({"replica": n}, r["total"]) for n, r in recoveries.items() if "total" in r]
    yield "planaria_last_recovery_seconds", "From the fault to the next microbatch.", "gauge", took
    yield "planaria_over", "1 when the run is over.", "gauge", [({}, float(bool(state.get("over"))))]
    yield "planaria_log_age_seconds", "Since the run's log was written to.", "gauge", [({}, age)]


def _one(value: float | str | None) -> Values:
    return [] if value is None else [({}, float(value))]


def _labels(labels: dict[str, str]) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    text = {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}.get(str(float(value)))
    return text or repr(float(value))
