"""Figures and tables as CSV: every number, readable names, and nothing that a spreadsheet would run."""

from __future__ import annotations

import csv
from io import StringIO

import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.report.sheets import as_csv, rows_of
from planaria.report.spread_figures import add_band, error_bars
from planaria.report.theme import figure, stroke
from planaria.trials.spread import Spread

CELLS = st.text(st.characters(codec="utf-8", exclude_characters="\r\0")) | st.integers() | st.floats(allow_nan=False)


@given(st.lists(st.lists(CELLS, min_size=2, max_size=2), min_size=1))
def test_csv_is_read_back_and_has_no_formulas(rows: list[list[str | int | float]]) -> None:
    again = list(csv.reader(StringIO(as_csv(rows), newline="")))
    for row, read in zip(rows, again, strict=True):
        for cell, text in zip(row, read, strict=True):
            assert text in (str(cell), f"'{cell}") or float(text) == cell
            if isinstance(cell, str) and cell[:1] in ("=", "@"):
                assert text == f"'{cell}"


@pytest.mark.parametrize(("cell", "written"), [("+1.5", "+1.5"), ("-0.02 [-0.05 … +0.01]", "-0.02 [-0.05 … +0.01]")])
def test_signed_numbers_stay_numbers(cell: str, written: str) -> None:
    assert as_csv([[cell]]) == f"{written}\n"


@pytest.mark.parametrize("cell", ["=1+1", "@SUM(A1)", "+cmd|x", "-2+cmd|' /C calc'!A0"])
def test_formulas_are_text(cell: str) -> None:
    assert next(csv.reader(StringIO(as_csv([[cell]])))) == [f"'{cell}"]


def test_lines_and_their_bands() -> None:
    fig = figure(300, x="hours", y="loss")
    add_band(fig, "a <b>", stroke(0), [1, 2], [Spread(5, 4, 6), Spread(3, 2, 4)])
    assert rows_of(fig) == [
        ["series", "hours", "loss", "least", "most"], ["a <b>", 1, 5, 4, 6], ["a <b>", 2, 3, 2, 4],
    ]  # fmt: skip


def test_bars_export_whiskers_base_and_note() -> None:
    fig = figure(300, x="hours", bargap=0.2)
    bars = error_bars([Spread(5, 4, 7)])
    fig.add_bar(x=[5], y=["arm"], orientation="h", error_x=bars, base=[1], customdata=["one<br>two &amp; <b>more</b>"])
    head, row = rows_of(fig)
    assert head == ["series", "hours", "row", "begins at", "least", "most", "note"]
    assert row == ["", 5, "arm", 1, 4, 7, "one; two & more"]


def test_cells_of_heat_maps_by_the_names_of_rows_and_columns() -> None:
    fig = figure(300, x="to", y="from")
    fig.add_heatmap(x=["0", "1"], y=["0"], z=[[None, 2.5]])
    fig.update_xaxes(tickvals=["0", "1"], ticktext=["here &lt;x&gt;", "there"])
    assert rows_of(fig) == [["series", "to", "from", "value"], ["", "there", "0", 2.5]]


def test_decoration_is_no_data() -> None:
    fig = go.Figure()
    fig.add_scatter(x=[1], y=[2], hoverinfo="skip")
    fig.add_contour(z=[[1, 2], [3, 4]])
    assert rows_of(fig) == [["series", "column", "row"]]


def test_positions_on_an_axis_are_not_exported_as_numbers() -> None:
    fig = figure(300, x="%", y="steps")
    fig.add_scatter(x=[-1.0], y=[2], meta={"x": [0.1]})
    assert rows_of(fig)[1] == ["", 0.1, 2]
