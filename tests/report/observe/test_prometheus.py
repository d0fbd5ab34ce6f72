"""/metrics follows the format and agrees with the run's record; the dashboard queries no other names."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.reader import read_run
from planaria.control.log.run_record import RunRecord, StepMetric
from planaria.report.observe import prometheus
from planaria.report.observe.tally import RECOVERY_S, RunTally
from planaria.report.run.recoveries import recoveries
from support.report import synthetic_replicas as r
from support.report.synthetic_run import Synthesis, fold_tally, tally_of

DASHBOARD = json.loads((Path(__file__).parents[3] / "deploy" / "grafana.json").read_text())
NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
SAMPLE = re.compile(rf"({NAME})(?:\{{(.*)\}})? (NaN|[+-]Inf|-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)")
LABEL = re.compile(rf'({NAME})="((?:[^"\\\n]|\\["\\n])*)"(?:,(?=.)|$)')

SUFFIXES = {"histogram": ("_bucket", "_sum", "_count")}
NAMES = {family.name + suffix for family in prometheus.FAMILIES for suffix in SUFFIXES.get(family.kind, ("",))}

Labels = frozenset[tuple[str, str]]


def parsed(text: str) -> dict[str, dict[Labels, float]]:
    """Sample name → labels → value; fails if a line violates the format."""
    assert text.endswith("\n")
    kinds: dict[str, str] = {}
    found: dict[str, dict[Labels, float]] = {}
    family = ""
    lines = text.removesuffix("\n").split("\n")
    for before, line in zip(["", *lines], lines, strict=False):
        if line.startswith("# HELP "):
            family = line.split(" ")[2]
            assert family not in kinds, "the lines of a family stand together"
            assert re.fullmatch(r"(?:[^\\]|\\[\\n])*", line)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name == family and before.startswith(f"# HELP {name} ") and kind in ("gauge", "counter", "histogram")
            kinds[name] = kind
        else:
            match = SAMPLE.fullmatch(line)
            assert match, line
            name, labels, value = match[1], match[2] or "", match[3]
            pairs = LABEL.findall(labels)
            assert LABEL.sub("", labels) == "" and len({key for key, _ in pairs}) == len(pairs), line
            suffixes = ("_bucket", "_sum", "_count") if kinds[family] == "histogram" else ("",)
            assert name in {family + suffix for suffix in suffixes}, line
            where = frozenset((key, unescaped(text)) for key, text in pairs)
            assert where not in found.setdefault(name, {}), "no sample stands there twice"
            found[name][where] = float(value)
    return found


def unescaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda match: {"n": "\n"}.get(match[1], match[1]), text)


def of(found: dict[str, dict[Labels, float]], name: str, run: str = "mine", **labels: str) -> float:
    return found[name][frozenset({"run": run, **labels}.items())]


def samples_of(tally: RunTally, run: str = "mine") -> dict[str, dict[Labels, float]]:
    return parsed(prometheus.exposition({run: tally}))


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return read_run(Synthesis(tmp_path_factory.mktemp("run")).write())


def test_metrics_agree_with_the_record(record: RunRecord) -> None:
    found = samples_of(tally_of(record))
    last = list(record.trained)[-1]
    assert of(found, "planaria_loss") == last.loss and of(found, "planaria_tokens_per_second") == last.tokens_per_s
    assert of(found, "planaria_validation_loss") == list(record.validated)[-1].val_loss
    assert of(found, "planaria_steps_committed") == of(found, "planaria_steps_planned") == 40
    assert (
        of(found, "planaria_run_state", state="finished") == 1 and of(found, "planaria_run_state", state="running") == 0
    )
    assert of(found, "planaria_generation", replica="0") == 3
    timings = recoveries(record)
    assert of(found, "planaria_recoveries_total", outcome="recovered") == len(timings) == 2
    assert of(found, "planaria_recovery_seconds_count") == 2
    assert of(found, "planaria_recovery_seconds_sum") == pytest.approx(sum(t.total or 0 for t in timings), rel=1e-12)
    for bound in RECOVERY_S:
        under = sum((timing.total or 0) <= bound for timing in timings)
        assert of(found, "planaria_recovery_seconds_bucket", le=repr(bound)) == under
    assert of(found, "planaria_recovery_seconds_bucket", le="+Inf") == 2
    assert of(found, "planaria_workers_lost_total", cause="connection") == 2
    assert of(found, "planaria_workers", state="member") == 0, "after the end"
    live = tally_of(replace(record, history=[turn for turn in record.history if not isinstance(turn[1], d.Finish)]))
    assert of(samples_of(live), "planaria_workers", state="member") == 5
    sent = sum(n for _, work in record.worked for n in work.sent_bytes.values())
    assert of(found, "planaria_sent_bytes_total", between="stages") == sent > 0
    start, info = record.starts[0], dict(next(iter(found["planaria_run_info"])))
    assert info["run"] == "mine" and info["stages"] == "4"
    commit = [t for t, fact in record.history if isinstance(fact, d.Commit)][-1]
    assert of(found, "planaria_last_commit_timestamp_seconds") == pytest.approx(start[1].wall_time + commit - start[0])


def test_a_recovery_is_reported_once_its_first_microbatch_completed(record: RunRecord) -> None:
    assert fold_tally(record)[1] == recoveries(record)


def test_counters_are_zero_and_gauges_absent_before_a_run_begins() -> None:
    found = samples_of(RunTally())
    assert "planaria_loss" not in found and "planaria_run_info" not in found
    assert set(found["planaria_workers_lost_total"].values()) == {0}
    assert of(found, "planaria_recovery_seconds_count") == 0


def test_several_runs_have_separate_samples(record: RunRecord) -> None:
    found = parsed(prometheus.exposition({"one": tally_of(record), "two": RunTally()}))
    assert (
        of(found, "planaria_steps_committed", run="one") == 40 and of(found, "planaria_steps_committed", run="two") == 0
    )
    assert len(found["planaria_loss"]) == 1


def test_replicas_have_generations_and_rounds_of_their_own() -> None:
    tally = RunTally()
    facts = [
        r.started(2), d.Spawn(worker="a", incarnation=1), d.Spawn(worker="b", incarnation=1), *r.joined("acde"),
        r.form(0, "ac"), r.form(1, "de", generation=4), d.Settle(round=0, members=[0, 1], generations=[1, 4]),
        e.RoundApplied(
            worker="a", node=0, stage=0, generation=1, round=0, blocking_bytes=5, prefetched_bytes=7, spread=0
        ),
    ]  # fmt: skip
    for t, fact in enumerate(facts):
        tally.apply(float(t), fact)
    tally.apply_work_report(
        e.WorkReport(worker="a", node=0, stage=0, generation=1, step=0, spans=[], sent_bytes={1: 100, 2: 10})
    )
    found = samples_of(tally)
    assert len(found["planaria_generation"]) == 2
    assert [of(found, "planaria_generation", replica=replica) for replica in "01"] == [1, 4]
    assert of(found, "planaria_rounds_total") == 1
    assert of(found, "planaria_sent_bytes_total", between="replicas") == 22
    assert of(found, "planaria_sent_bytes_total", between="stages") == 100
    assert of(found, "planaria_workers", state="starting") == 1 and of(found, "planaria_workers", state="member") == 4
    assert dict(next(iter(found["planaria_run_info"])))["replicas"] == "2"


@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=30), st.floats())
def test_any_name_and_any_number_come_back(name: str, loss: float) -> None:
    tally = RunTally()
    tally.apply_metric(StepMetric(t=0.0, step=0, loss=loss, tokens_per_s=1.0, grad_norm={}))
    back = of(samples_of(tally, name), "planaria_loss", run=name)
    assert back == loss or (math.isnan(back) and math.isnan(loss))


def test_prometheus_own_parser_reads_it(record: RunRecord) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    text = prometheus.exposition({"mine": tally_of(record), "other": RunTally()})
    read = {s.name: s for family in parser.text_string_to_metric_families(text) for s in family.samples}
    assert read.keys() == parsed(text).keys() <= NAMES


def expressions() -> list[str]:
    targets = [target for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    return [target["expr"] for target in targets]


def test_the_dashboard_uses_every_metric_and_no_unknown_one() -> None:
    variables = [v["query"]["query"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
    queried = {name for text in [*expressions(), *variables] for name in re.findall(r"planaria_\w+", text)}
    assert queried and queried <= NAMES
    assert all(any(name.startswith(family.name) for name in queried) for family in prometheus.FAMILIES)


def test_the_dashboard_uses_existing_labels(record: RunRecord) -> None:
    found = samples_of(tally_of(record))
    known = {key for samples in found.values() for labels in samples for key, _ in labels}
    for text in expressions():
        assert text.count("(") == text.count(")") and text.count("{") == text.count("}")
        used = set(re.findall(r"(\w+)=~?\"", text))
        used |= {name for group in re.findall(r"by \(([^)]*)\)", text) for name in re.split(r", *", group)}
        assert used <= known, text


def test_the_dashboard_is_valid_for_grafana() -> None:
    assert DASHBOARD["uid"] == "planaria" and DASHBOARD["schemaVersion"] >= 36
    cells: set[tuple[int, int]] = set()
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)
    for panel in DASHBOARD["panels"]:
        own = area(panel["gridPos"])
        assert panel["title"] and not own & cells and all(0 <= x < 24 for x, _ in own)
        cells |= own
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        letters = [target["refId"] for target in panel["targets"]]
        assert letters and len(set(letters)) == len(letters)
    kinds = {variable["name"]: variable["type"] for variable in DASHBOARD["templating"]["list"]}
    assert kinds == {"datasource": "datasource", "run": "query"}


def area(place: dict[str, Any]) -> set[tuple[int, int]]:
    columns, rows = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
    return {(x, y) for x in columns for y in rows}
