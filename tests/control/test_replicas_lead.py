"""Several replicas under one controller, one story after the other."""

from __future__ import annotations

from herd_steps import at, finished, herd, said, work_until

from planaria import decisions as d


def test_no_two_replicas_have_a_generation_in_common() -> None:
    """A worker that moves from one to the other may still have reports of the first under way."""
    made = herd(3)
    assert finished(made)
    generations = [form.generation for form in said(made, d.Form)]
    assert generations == sorted(set(generations)) and len(generations) == 3
