"""What a swarm says on the terminal."""

from __future__ import annotations

import io

import pytest

from planaria.observe.live.swarm_progress import SwarmProgress
from planaria.swarm.records.lines import Started


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_a_warning_of_all_peers_is_given_once_also_beside_a_table(stream: type[io.StringIO]) -> None:
    out = stream()
    with SwarmProgress(3, quiet=False, stream=out) as progress:
        for name in ("p0", "p1", "p0"):
            warnings = ["nobody reads", "alone"] if name == "p0" else ["nobody reads"]
            progress.told(
                name,
                Started(
                    name=name,
                    id=name,
                    attack="none",
                    model="m",
                    parameters=1,
                    vocab=2,
                    first_round=0,
                    warnings=warnings,
                ),
            )
    assert out.getvalue().count("warning: nobody reads") == out.getvalue().count("warning: alone") == 1


def test_quiet_is_quiet() -> None:
    out = io.StringIO()
    with SwarmProgress(3, quiet=True, stream=out) as progress:
        progress.told(
            "p0",
            Started(name="p0", id="0", attack="none", model="m", parameters=1, vocab=2, first_round=0, warnings=["x"]),
        )
    assert out.getvalue() == ""
