"""Failovers folded from synthetic logs."""

from __future__ import annotations

import re

import pytest

from planaria.control.facts.decisions import RunStep
from planaria.report.run.failovers import failovers, section
from support.report.failover_facts import STARTED, commit, led, record


def step(number: int, replica: int = 0, mode: str = "train") -> RunStep:
    return RunStep.model_validate({"generation": 1, "step": number, "replica": replica, "mode": mode})


def test_phases_add_up_to_the_time_until_the_next_commit() -> None:
    (found,) = failovers(record((1.0, step(3)), (2.0, led(2)), (2.1, commit(3)), (2.2, step(4)), (2.9, commit(4))))
    assert found.parts == pytest.approx({"unnoticed": 0.3, "replace": 0.2, "order": 0.1, "commit": 0.0})
    assert found.total == pytest.approx(0.6) == pytest.approx(sum(v for v in found.parts.values() if v is not None))
    assert not found.repeated, "workers finished the step meanwhile"


def test_only_steps_that_were_in_progress_count_as_repeated() -> None:
    before = [(0.1, step(3)), (0.2, step(3, replica=1)), (0.3, commit(3, replica=1))]
    after = [(1.1, step(3)), (1.2, step(4, replica=1)), (1.3, step(3, mode="evaluate")), (1.4, commit(3))]
    (found,) = failovers(record(*before, (1.0, led(2, "silent")), *after, (1.5, step(4))))
    assert found.repeated == {(0, 3)}
    assert found.parts["commit"] == pytest.approx(0.3)


def test_a_failover_without_a_later_commit_has_no_total() -> None:
    first, second = failovers(record((1.0, led(2)), (2.0, led(3))))
    assert [first.total, second.total, second.parts["order"]] == [None, None, None]


def test_the_section_has_a_row_per_failover_and_is_left_out_without_one() -> None:
    assert not [*section(record((1.0, step(0)), (1.5, commit(0))))]
    (html,) = section(record((1.0, step(0)), (2.0, led(2, "stopped")), (2.5, commit(0)), (3.0, led(3))))
    assert "Lost controllers" in html and "was stopped" in html and "term 3" in html


def test_steps_repeated_on_another_machine_are_unknown() -> None:
    """The shared log has no order of a step that was not committed."""
    history = (1.0, step(0)), (2.0, led(2)), (2.1, step(0)), (3.0, led(3, "silent"))
    (html,) = section(record(*history))
    _, here, elsewhere = (re.findall(r"<t[dh][^>]*>([^<]*)", row) for row in html.split("<tr>")[1:])
    assert (here[2], elsewhere[2]) == ("1", "–")


def test_rows_of_one_term_differ_after_a_resumption() -> None:
    resumed = STARTED.model_copy(update={"first_step": 2})
    before = (1.0, step(0)), (1.5, commit(0)), (2.0, led(2))
    found = failovers(record(*before, (3.0, resumed), (3.5, step(2)), (4.0, commit(2)), (4.5, step(3)), (5.0, led(2))))
    assert [failover.label for failover in found] == ["step 0, term 2", "step 3, term 2"]
