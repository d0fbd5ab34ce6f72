"""Every kind of page has a verdict, a bounded size, one file, whole numbers, correct plurals and CSV."""

from __future__ import annotations

import csv
import gzip
import json
import re
from base64 import b64decode
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from plotly.offline import get_plotlyjs_version

from planaria.control.log.reader import read_run
from planaria.report import page
from planaria.report.run import report, schedule_page
from planaria.report.run.schedule_figures import step_of
from planaria.report.theme import DARK, ON_BRIGHT, ON_DEEP
from support.report.every_page import KINDS, body_of, planned, swarmed
from support.report.synthetic_run import Synthesis

LARGEST = 1_500_000
"""bytes of a page"""


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def text(kind: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return page.document(f"{kind} · planaria", body_of(kind, tmp_path_factory.mktemp(kind)))


@pytest.fixture(scope="module")
def drawn(kind: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, go.Figure]:
    return page.figures(body_of(kind, tmp_path_factory.mktemp(kind)))


def packed_figures(text: str) -> Any:
    (coded,) = re.findall(r'<script type="text/plain" id="packed-figures">(.*?)</script>', text)
    return json.loads(gzip.decompress(b64decode(coded)))


def words(text: str) -> str:
    """All that a reader of the page sees."""
    own = re.sub(r"<(script|style)[^>]*>.*?</\1>", "", text, flags=re.DOTALL)
    return unescape(re.sub(r"<[^>]+>", " ", own))


@pytest.mark.slow_after(1)
def test_a_page_is_small_and_needs_nothing_else(text: str) -> None:
    assert len(text.encode()) < LARGEST
    own = re.sub(r"<script[^>]*>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"<(script|link|img|iframe)[^>]*(src|href)=|@import|url\(", own)
    (plotly,) = re.findall(r'<script type="text/plain" id="packed-plotly">(.*?)</script>', text)
    begins = gzip.decompress(b64decode(plotly))[:200].decode()
    (version,) = re.findall(r"plotly.js \(cartesian - minified\) v(\d+)", begins)
    assert version == get_plotlyjs_version().partition(".")[0], "what makes figures and what draws them fit together"


def test_the_verdict_comes_first_with_numbers_and_losses(text: str) -> None:
    main = text.index("<main>")
    assert 0 < text.index('id="verdict"') - main < 700, "before all that could push it off the first screen"
    (summary,) = re.findall(r'<p class="summary">.*?</i>(.*?)</p>', text)
    (lost,) = re.findall(r'<p class="cost">(.*?)</p>', text)
    numbers = re.findall(r"<div><b>(.*?)</b><span>(.*?)</span></div>", text)
    assert len(summary) > 20 and summary.endswith(".") and lost.endswith(".")
    assert 1 <= len(numbers) <= 2 and all(re.search(r"\d", number) and what for number, what in numbers)


def test_counted_nouns_have_the_right_number(text: str) -> None:
    reported = words(text)
    assert not re.findall(
        r"(?<![\w.,:…–-] )(?<![\d.,])\b1 (?:honest |block |data )?(\w+s)\b(?<!is)(?<!was)(?<!ms)", reported
    )
    nouns = "seed|arm|peer|round|step|worker|node|replica|stage|domain|failure|time|completion|microbatch|recovery"
    assert not re.findall(rf"\b(?:[02-9]|[1-9]\d+) (?:{nouns})\b(?! ·)", reported)


@pytest.mark.slow
def test_axes_of_steps_are_whole_and_shares_at_most_one(drawn: dict[str, go.Figure]) -> None:
    counted = 0
    for name, fig in drawn.items():
        axis, bars = fig.layout.xaxis, any(trace.type in ("bar", "heatmap") for trace in fig.data)
        if axis.title.text in ("step", "round", "steps of the probe"):
            counted += 1
            low, high = axis.range
            assert low >= (-0.5 if bars else -0.02 * (high - low)), name
            assert axis.dtick == 1 or high - low > 10, name
            assert axis.tick0 == 0 or axis.dtick is None
        if str(fig.layout.yaxis.tickformat).endswith("%"):
            assert -0.05 <= fig.layout.yaxis.range[0] < fig.layout.yaxis.range[1] <= 1.05, name
    assert counted or {"compared", "parts"} & drawn.keys(), "a schedule and an audit have no steps or rounds"


def test_every_axis_has_a_title_and_curves_differ_in_more_than_colour(drawn: dict[str, go.Figure]) -> None:
    for name, fig in drawn.items():
        for axis in (fig.layout.xaxis, fig.layout.yaxis):
            named = axis.type == "category" or any(
                isinstance(value, str)
                for trace in fig.data
                for value in (trace.x if axis is fig.layout.xaxis else trace.y)
            )
            assert axis.title.text or named, name
        lines = [trace for trace in fig.data if trace.type == "scatter" and trace.line.color and trace.fill is None]
        styles = [(trace.line.dash or "solid", trace.mode, trace.marker.symbol, trace.line.width) for trace in lines]
        assert len(set(styles)) == len(styles), f"{name}: {styles}"


def test_colours_of_figures_have_dark_counterparts(drawn: dict[str, go.Figure]) -> None:
    """A colour that is near white or near black has another one on the dark ground."""
    for name, fig in drawn.items():
        for colour in set(re.findall(r"#[0-9a-f]{6}\b", fig.to_json())):
            channels = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
            if max(channels) < 0x60 or min(channels) > 0xC0:
                assert colour in DARK or colour in (ON_DEEP, ON_BRIGHT), (name, colour)
        assert not re.search(r'"(white|black)"', fig.to_json()), name


@pytest.mark.slow
def test_all_numbers_are_available_in_the_page_and_as_files(kind: str, text: str, tmp_path: Path) -> None:
    inside = packed_figures(text)
    assert set(re.findall(r'class="figure" id="([^"]+)"', text)) == set(inside["drawn"]) <= set(inside["sheets"])
    assert set(re.findall(r'data-sheet="([^"]+)"', text)) <= set(inside["sheets"])
    files = page.write_sheets(tmp_path / "csv", body_of(kind, tmp_path / "of"))
    assert {file.stem for file in files} == set(inside["sheets"])
    for file in files:
        head, *rows = csv.reader(file.open())
        assert len(set(head)) == len(head) and (rows or file.stem not in inside["drawn"]), file.name
        assert all(len(row) == len(head) for row in rows), file.name


@pytest.mark.parametrize("steps", [150, pytest.param(1500, marks=pytest.mark.slow)])
def test_a_long_run_has_a_small_page_too(steps: int, tmp_path: Path) -> None:
    deaths = {step: 1 + step % 4 for step in range(3, steps, 3)}
    record = read_run(Synthesis(tmp_path, deaths=deaths, steps=steps).write())
    text = page.document("long", report.body(record))
    assert len(text.encode()) < LARGEST
    assert (f"The first {page.MAX_ROWS} of {len(deaths)} rows" in text) == (len(deaths) > page.MAX_ROWS)


@pytest.mark.slow
def test_a_large_schedule_and_a_long_swarm_have_small_pages_too(tmp_path: Path) -> None:
    plan = planned(microbatches=60, sizes=(4, 12, 12, 12))
    pages = [page.document("plan", schedule_page.body(plan, step_of(plan)))]
    config, outcome = swarmed(tmp_path, rounds=900)
    from planaria.swarm.report import swarm_report

    pages.append(page.document("swarm", swarm_report.body(tmp_path, config, outcome)))
    assert all(len(text.encode()) < LARGEST for text in pages)


def test_a_page_states_what_it_leaves_out(tmp_path: Path) -> None:
    def body() -> Iterator[str]:
        yield page.table("rows", ["n"], [[str(n)] for n in range(page.MAX_ROWS + 7)], 0)
        yield page.log("lines", [(f"{n} s", f"line {n}") for n in range(page.MAX_ROWS + 9)])

    text = page.document("x", body())
    assert f"The first {page.MAX_ROWS} of {page.MAX_ROWS + 7} rows" in text and f"<td>{page.MAX_ROWS}</td>" not in text
    assert "line 0<" in text and f"line {page.MAX_ROWS + 8}<" in text and "9 more" in text
    assert 'id="packed-plotly"' not in text, "nothing is drawn"
    assert len((page.write_sheets(tmp_path, body())[0]).read_text().splitlines()) == page.MAX_ROWS + 8


def test_two_parts_with_one_name_are_an_error() -> None:
    with pytest.raises(ValueError, match="have the name twin"):
        page.document("x", (page.table("twin", ["n"], [["1"]], 0) for _ in range(2)))


@pytest.mark.slow
def test_a_page_draws_fewer_points_than_the_files_have() -> None:
    fig = go.Figure()
    fig.add_scatter(x=list(range(50_000)), y=[float(n == 31_234) for n in range(50_000)], text=["t"] * 50_000)
    few = page.thin_curves(fig)
    assert len(few.data[0].x) == len(few.data[0].y) == len(few.data[0].text) < 5000
    assert 31_234 in few.data[0].x and len(fig.data[0].x) == 50_000
    assert page.thin_curves(few) is few
