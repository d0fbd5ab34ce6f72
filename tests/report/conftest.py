from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.report.browser import Tab, browser


@pytest.fixture(scope="module")
def open_tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def tab(open_tab: Tab) -> Tab:
    """An empty page of a browser."""
    open_tab.leave()
    return open_tab
