"""Pages in a real browser: figures are drawn, in both themes, from what the page has in it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from planaria.report import page
from planaria.report.theme import DARK, PAPER
from support.report.every_page import KINDS, body_of

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine"),
]


def dom(file: Path, *flags: str) -> str:
    """Return the page's elements after its script has run; all requests of the page are blocked."""
    rules = "--host-resolver-rules=MAP * ~NOTFOUND"
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", rules, "--virtual-time-budget=20000"]
    ran = subprocess.run(
        [*command, f"--user-data-dir={file.parent / 'profile'}", *flags, "--dump-dom", file.as_uri()],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    return ran.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_every_figure_is_drawn_with_its_mode_bar(kind: str, tmp_path: Path) -> None:
    file = page.write(tmp_path / "page.html", page.document(kind, body_of(kind, tmp_path / "of")))
    shown = dom(file)
    assert 'data-drawn="yes"' in shown
    figures = re.findall(r'class="figure[^"]*" id="([^"]+)"', shown)
    assert figures and shown.count('class="main-svg"') >= len(figures)
    for title in ("Save as PNG", "Save as SVG", "Save the numbers as CSV"):
        assert len(re.findall(f'data-title="{title}"|aria-label="{title}"', shown)) >= len(figures)


def test_a_dark_system_gets_dark_figures(tmp_path: Path) -> None:
    file = page.write(tmp_path / "page.html", page.document("x", body_of("comparison", tmp_path)))
    ground = [tuple(int(colour[place : place + 2], 16) for place in (1, 3, 5)) for colour in (PAPER, DARK[PAPER])]
    light, dark = (f"rgb({red}, {green}, {blue})" for red, green, blue in ground)
    for flags, own, other in ((), light, dark), (("--blink-settings=preferredColorScheme=0",), dark, light):
        found = re.findall(r'class="main-svg"[^>]*style="[^"]*background: ([^;]+);', dom(file, *flags))
        assert own in found and other not in found
