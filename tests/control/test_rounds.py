"""When replicas meet, with whom, and what becomes of a round in which somebody is missing."""

from __future__ import annotations

import pytest
from herd_steps import herd, said, work_until

from planaria import decisions as d

STREAMING = {"kind": "streaming_diloco", "every": 3, "fragments": 1, "delay": 2}


@pytest.mark.parametrize("stop", [False, True])
def test_a_round_whose_settling_no_step_will_reach_is_settled_at_the_end(stop: bool) -> None:
    made = herd(2, exchange=STREAMING, steps=9 if stop else 3)
    work_until(made, lambda run: all(r.meeting for r in run.replicas.values()))
    if stop:
        made.stop()
    made.behave()
    assert made.truth.ending is not None
    assert [settle.members for settle in said(made, d.Settle)] == [[0, 1]]
