"""Pages in a real browser: figures are drawn, in both themes, from what the page has in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from planaria.report import page
from planaria.report.theme import DARK, PAPER
from support.report.browser import Tab, found
from support.report.every_page import KINDS, body_of

pytestmark = [pytest.mark.slow, pytest.mark.skipif(found() is None, reason="no Chromium or Chrome here")]


def open_page(tab: Tab, kind: str, folder: Path, dark: bool = False) -> None:
    """Open a page and wait until its script has run; a request to another place is an error of the page."""
    file = page.write(folder / "page.html", page.document(kind, body_of(kind, folder / "of")))
    tab.do("Network.enable")
    tab.do("Network.setBlockedURLs", urls=["http://*", "https://*"])
    tab.open(file.as_uri(), dark=dark)
    tab.until("document.querySelector('[data-drawn=yes]')")


@pytest.mark.parametrize("kind", KINDS)
def test_every_figure_is_drawn_with_its_mode_bar(tab: Tab, kind: str, tmp_path: Path) -> None:
    open_page(tab, kind, tmp_path)
    figures = tab.run("[...document.querySelectorAll('.figure')].map(figure => figure.outerHTML)")
    assert figures
    for figure in figures:
        assert 'class="main-svg"' in figure
        for title in ("Save as PNG", "Save as SVG", "Save the numbers as CSV"):
            assert f'data-title="{title}"' in figure or f'aria-label="{title}"' in figure
    assert not tab.trouble, tab.trouble


@pytest.mark.parametrize(("dark", "colour"), [(False, PAPER), (True, DARK[PAPER])])
def test_a_dark_system_gets_dark_figures(tab: Tab, tmp_path: Path, dark: bool, colour: str) -> None:
    open_page(tab, "comparison", tmp_path, dark)
    grounds = tab.run("[...document.querySelectorAll('.figure .main-svg')].map(svg => svg.style.background)")
    channels = ", ".join(str(int(colour[place : place + 2], 16)) for place in (1, 3, 5))
    assert {ground for ground in grounds if ground.startswith("rgb(")} == {f"rgb({channels})"}
