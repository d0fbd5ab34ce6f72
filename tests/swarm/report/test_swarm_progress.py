"""A swarm's lines on the terminal."""

from __future__ import annotations

import io

import pytest

from planaria.swarm.records.lines import Serving
from planaria.swarm.report.progress import SwarmProgress
from support.command_line import Terminal
from support.swarm.peer_records import round_done, started


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_a_warning_of_all_peers_is_given_once_also_beside_a_table(stream: type[io.StringIO]) -> None:
    out = stream()
    with SwarmProgress(3, quiet=False, stream=out) as progress:
        for name in ("p0", "p1", "p0"):
            warnings = ["no listener", "alone"] if name == "p0" else ["no listener"]
            progress.update(name, started(name, warnings=warnings))
    assert out.getvalue().count("warning: no listener") == out.getvalue().count("warning: alone") == 1


def test_the_activity_of_a_server_is_shown() -> None:
    out = Terminal()
    serving = Serving(tokens=1200, seconds=0.5, requests=12, queue=4, behind=1)
    with SwarmProgress(3, quiet=False, stream=out) as progress:
        progress.update("p0", round_done(0, serving=serving))
        progress.update("p1", round_done(0))
    assert str(serving) == "2,400 tokens/s, 4 waited, 1 behind"
    assert "server" in out.getvalue() and "2,400" in out.getvalue()
    assert str(Serving(local="it is asleep")) == "none: it is asleep"
