"""Checks of a run's Perfetto trace: the format's rules, and agreement with the log."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest

from planaria.control.facts import events as e
from planaria.control.log.run_record import RunRecord
from planaria.report.run.recoveries import recoveries

Event = dict[str, Any]


def checked(events: list[Event]) -> None:
    """Check the rules of the Trace Event Format for the used kinds of events."""
    processes = {x["pid"] for x in events if x["ph"] == "M" and x["name"] == "process_name"}
    threads: set[tuple[int, int]] = set()
    last: dict[tuple[int, int], float] = defaultdict(lambda: float("-inf"))
    counted: dict[tuple[int, str], float] = defaultdict(lambda: float("-inf"))
    until: dict[tuple[int, int], float] = defaultdict(lambda: float("-inf"))
    open_slices: dict[tuple[str, int], list[str]] = defaultdict(list)
    for event in events:
        place = event["pid"], event.get("tid", 0)
        assert event["pid"] in processes and isinstance(event["name"], str) and event["name"]
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "process_sort_index", "thread_sort_index")
            assert event["args"].keys() == {"sort_index" if event["name"].endswith("index") else "name"}
            threads |= {place} if event["name"] == "thread_name" else set()
            continue
        assert isinstance(event["ts"], int | float)
        if event["ph"] == "C":
            assert event["ts"] >= counted[event["pid"], event["name"]]
            assert all(isinstance(value, float) for value in event["args"].values())
            counted[event["pid"], event["name"]] = event["ts"]
            continue
        assert place in threads, "a thread is named before its first event"
        assert event["ts"] >= last[place], "times on a thread are ordered"
        last[place] = event["ts"]
        match event["ph"]:
            case "X":
                assert event["dur"] >= 0 and event["ts"] >= until[place] - 1e-6, "slices of a thread do not overlap"
                until[place] = event["ts"] + event["dur"]
            case "i":
                assert event["s"] in "gpt"
            case "b":
                open_slices[event["cat"], event["id"]].append(event["name"])
            case "e":
                assert open_slices[event["cat"], event["id"]].pop() == event["name"], "nested slices end first"
            case other:
                pytest.fail(f"{other}: not a kind that is used")
    assert not any(open_slices.values()), "every slice ends"


def named(events: list[Event], what: str) -> dict[tuple[int, int], str]:
    return {(x["pid"], x["tid"]): x["args"]["name"] for x in events if x["ph"] == "M" and x["name"] == what}


def agrees_with_log(record: RunRecord, events: list[Event]) -> None:
    """Check that every span, fault, loss, recovery and measurement of the log occurs once, at its time."""
    zero = record.starts[0][0]

    def us(t: float) -> float:
        return round(1e9 * (t - zero)) / 1000

    rows = named(events, "thread_name")
    spans = Counter(
        (work.worker, span.action, work.step, us(span.start), round(us(span.end) - us(span.start), 3))
        for _, work in record.worked
        for span in work.spans
    )
    slices = Counter(
        (rows[x["pid"], x["tid"]].split(" ")[0], x["name"], x["args"]["step"], x["ts"], round(x["dur"], 3))
        for x in events
        if x["ph"] == "X"
    )
    assert slices == spans and len(spans) > 20
    blows = [(us(t), f.worker, f.signal) for t, f in record.history if isinstance(f, e.FaultInjected)]
    blows += [(us(t), f.worker, "lost") for t, f in record.history if isinstance(f, e.WorkerLost)]
    instants = [(x["ts"], rows[x["pid"], x["tid"]], x["name"]) for x in events if x["ph"] == "i"]
    assert sorted(blows) == sorted(x for x in instants if x[1] != "decisions") and blows
    losses = [(x["ts"], x["args"]["loss"]) for x in events if x["ph"] == "C" and x["name"] == "loss"]
    assert losses == [(us(metric.t), metric.loss) for metric in record.trained]
    assert len([x for x in events if x["ph"] == "C"]) == 2 * len(losses)
    begun = {(x["id"], x["name"]): x["ts"] for x in events if x["ph"] == "b"}
    ended = {(x["id"], x["name"]): x["ts"] for x in events if x["ph"] == "e"}
    timings = recoveries(record)
    assert {number for number, _ in begun} == set(range(len(timings))) and timings
    for number, timing in enumerate(timings):
        whole = number, f"recovery: {timing.where}"
        first = timing.lost_t if timing.fault_t is None else timing.fault_t
        assert timing.finished_t is not None and (begun[whole], ended[whole]) == (us(first), us(timing.finished_t))
        for name, start, end in (
            ("decide", timing.lost_t, timing.formed_t),
            ("relink, transfer, rebuild", timing.formed_t, timing.linked_t),
            ("redo", timing.linked_t, timing.finished_t),
        ):
            assert start is not None and end is not None
            assert (begun[number, name], ended[number, name]) == (us(start), us(end))
