"""Every section, figure and table of every report is built through a page, under a unique name."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

from planaria.report import page, tables
from support.report import every_page, rare_pages

SOURCE = Path(page.__file__).parents[1]
REPORTS = ("report", "lab/report", "swarm/report")
NAMED = {"chart": 1, "table": 0, "log": 0}
"""function of ``planaria.report.page`` that adds a named part to a page → which argument is the name"""


class Site(NamedTuple):
    """A call in the source that adds a part to a page."""

    file: str
    line: int
    function: str


def sites() -> set[Site]:
    """Return all of them, read off the source of the reports."""
    found = set()
    for file in (file for folder in REPORTS for file in (SOURCE / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                of_page = isinstance(node.func.value, ast.Name) and node.func.value.id == "page"
                function = node.func.attr
                if (of_page and function in ("section", *NAMED)) or (function == "html" and node.args):
                    found.add(Site(str(file.relative_to(SOURCE)), node.lineno, function))
    return found


def site_of(frame: FrameType | None, function: str) -> Site:
    """Return the place of the call that ``frame`` is making."""
    assert frame is not None
    return Site(str(Path(frame.f_code.co_filename).relative_to(SOURCE)), frame.f_lineno, function)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[Site, set[tuple[str, str]]]:
    """Site → (report, name) of the parts that it added when all pages were built; sections have no name."""
    found: dict[Site, set[tuple[str, str]]] = defaultdict(set)
    report = ""

    def watched(function: str, build: Callable[..., str], place: int | None) -> Callable[..., str]:
        def watch(*given: Any, **named: Any) -> str:
            found[site_of(sys._getframe(1), function)].add((report, "" if place is None else given[place]))
            return build(*given, **named)

        return watch

    folder = tmp_path_factory.mktemp("pages")
    bodies = [(kind, every_page.body_of(kind, folder / kind)) for kind in every_page.KINDS]
    with pytest.MonkeyPatch.context() as patch:
        for function, place in {"section": None, **NAMED}.items():
            patch.setattr(page, function, watched(function, getattr(page, function), place))
        patch.setattr(tables.Table, "html", watched("html", tables.Table.html, 1))
        for kind, body in [*bodies, *rare_pages.bodies(folder / "rare")]:
            report = "run" if kind == "replicas" else kind
            page.build_parts(body)
    return found


def test_every_part_of_every_report_is_built(built: dict[Site, set[tuple[str, str]]]) -> None:
    missing = sorted(sites() - built.keys())
    assert not missing, f"no page of every_page or rare_pages has these: {missing}"


def test_two_parts_of_a_report_never_share_a_name(built: dict[Site, set[tuple[str, str]]]) -> None:
    """Not even in two pages: some run may have both parts."""
    owners: dict[tuple[str, str], set[Site]] = defaultdict(set)
    for site, parts in built.items():
        for part in parts:
            if site.function != "section" and site.file != "report/tables.py":
                owners[part].add(site)
    assert not {part: sorted(by) for part, by in owners.items() if len(by) > 1}
