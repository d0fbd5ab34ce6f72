"""Recompute steps, hours and traffic of a comparison from its saved JSON, independently of planaria."""

from __future__ import annotations

from statistics import fmean
from typing import Any

Json = dict[str, Any]
GROUP, SCALE, FP32 = 128, 2, 4
"""numbers that share a scale in a coded message, bytes of a scale, bytes of a number"""


def losses(course: Json) -> list[tuple[int, float]]:
    """Return (tick, mean of the last three validations)."""
    points = [(point["tick"], point["loss"]) for point in course["points"]]
    return [(points[n][0], fmean(loss for _, loss in points[n - 2 : n + 1])) for n in range(2, len(points))]


def reached(course: Json, target: float) -> float | None:
    """Return the ticks until the loss reaches the target, interpolated between two validations."""
    known = losses(course)
    for place, (tick, loss) in enumerate(known):
        if loss <= target:
            if not place or known[place - 1][1] <= loss:
                return float(tick)
            before, higher = known[place - 1]
            return before + (tick - before) * (higher - target) / (higher - loss)
    return None


def hours(arm: Json, course: Json, ticks: float) -> float:
    """Return the hours of steps, checkpoints, and losses (repeated work, a replacement, state) before the target."""
    inputs = arm["inputs"]
    total = ticks * arm["step_s"] + arm["save_s"] * len([tick for tick in course["saved"] if tick <= ticks])
    for loss in course["loss_events"]:
        if loss["tick"] < ticks:
            moved = inputs["scale"] * loss["moved_bytes"] / (inputs["bandwidth"] or float("inf"))
            state = inputs["load_s"] if loss["rolled_back"] else moved
            total += inputs["repeated_steps"] * arm["step_s"] + inputs["replacement_s"] + state
    return float(total / 3600)


def traffic(arm: Json) -> float:
    """Return the bytes per step of copies over those of activations and their gradients."""
    inputs, changes = arm["inputs"], arm["changes"]
    sample = inputs["context"] * inputs["dim"] * inputs["wire_bytes"] * inputs["microbatch_size"]
    passed = inputs["replicas"] * 2 * (inputs["stages"] + 1) * inputs["microbatches"] * sample
    chain = [name.strip() for name in changes.get("recovery.strategy", "checkfree").split(",")] if arm["faults"] else []
    sent = 0.0
    if "echo" in chain:
        bits, every = (
            int(changes.get(f"recovery.options.{name}", usual)) for name, usual in (("bits", 8), ("every", 4))
        )
        groups = [-(-count // GROUP) for count in inputs["parameters"]]
        sent += sum(groups) * (SCALE + GROUP * bits // 8) / every
    if "redundant" in chain:
        sent += FP32 * sum(inputs["parameters"])
    if "checkfree_plus" in chain:  # embedding, norm and head, each at the stage that it feeds
        sent += FP32 * inputs["parameters"][0]
    state = 3 * FP32 * sum(inputs["parameters"])  # weights and both moments
    if "snapshot" in chain:
        sent += state * int(changes.get("recovery.options.tolerate", 1))
    if "whole_copies" in chain:
        sent += state / int(changes["recovery.options.every"])
    if inputs["replicas"] > 1:  # gradients in a ring, of all replicas
        sent += 2 * (inputs["replicas"] - 1) * FP32 * sum(inputs["parameters"])
    return sent / passed


def formatted(values: list[float | None], form: str) -> str:
    """Format values as the table does."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return "–"
    mean, least, most = (format(number, form) for number in (fmean(known), min(known), max(known)))
    return mean if least == most else f"{mean} [{least} … {most}]"


def over(one: list[float | None], other: list[float | None]) -> list[float | None]:
    return [None if a is None or not b else a / b for a, b in zip(one, other, strict=True)]


def table_cells(found: Json) -> dict[str, dict[str, str]]:
    """Return arm → column of the table → cell."""
    free, cells, first = found["arms"][0], {}, dict[str, list[float | None]]()
    known = [[loss for t, loss in losses(c) if t <= found["target_at"] * c["ticks"]] for c in free["courses"]]
    for arm in found["arms"]:
        pairs = [(course, reached(course, past[-1])) for course, past in zip(arm["courses"], known, strict=True)]
        ticks, took = [t for _, t in pairs], [None if t is None else hours(arm, course, t) for course, t in pairs]
        first = first or {"ticks": ticks, "took": took}
        cells[arm["name"]] = {
            "steps to target": formatted(ticks, ".0f"),
            "× fault-free": formatted(over(ticks, first["ticks"]), ".3f"),
            "hours to target": formatted(took, ".1f"),
            "× hours": formatted(over(took, first["took"]), ".3f"),
            "traffic": f"{100 * traffic(arm):.3g} %",
        }
    return cells
