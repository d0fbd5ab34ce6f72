"""Own ground truth: is this an answer to a problem of this round, within what one peer may send?

The problem, its answer and the reward are made anew from the problem's number; what a sender thinks of its reward is
not even in the message. The limits bound by design how much of a round one peer can be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """What may be sent in one round."""

    problems: Collection[int] | None
    """the round's; None where each peer chooses its own"""
    training: int
    """problems below this number are for training"""
    groups: int
    """most problems of one peer"""
    completions: int
    """most completions of one problem by one peer"""


def unscheduled(sent: Iterable[tuple[str, int]], schedule: Schedule) -> Mapping[int, str]:
    """Place of a completion among ``sent``, pairs of peer and problem → why it is none of this round's."""
    counts: Counter[tuple[str, int]] = Counter()
    chosen: dict[str, set[int]] = {}
    refused = {}
    for place, (peer, problem) in enumerate(sent):
        own = chosen.setdefault(peer, set())
        if problem >= schedule.training or (schedule.problems is not None and problem not in schedule.problems):
            refused[place] = f"problem {problem} is none of this round's"
        elif problem not in own and len(own) == schedule.groups:
            refused[place] = f"more than {schedule.groups} problems"
        elif counts[peer, problem] == schedule.completions:
            refused[place] = f"more than {schedule.completions} completions of one problem"
        else:
            own.add(problem)
            counts[peer, problem] += 1
    return refused
