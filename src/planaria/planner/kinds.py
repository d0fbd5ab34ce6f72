"""Nodes that a plan cannot tell apart, as one kind: what there is to choose among is then much less."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planaria.planner.problem import Problem
from planaria.planner.tables import Ints


class Kinds(NamedTuple):
    """Nodes at one site with the same times, slots and role."""

    first: Ints
    """[kinds]: a node of each kind"""
    of: Ints
    """[nodes]: each node's kind"""
    size: Ints
    """[kinds]: nodes of each kind"""


def kinds_of(problem: Problem) -> Kinds:
    """The kinds of a problem's nodes, at most as many as nodes."""
    columns = np.vstack([problem.site, problem.slots, problem.role, problem.forward, problem.backward])
    _, first, of, count = np.unique(columns, axis=1, return_index=True, return_inverse=True, return_counts=True)
    return Kinds(first, of.reshape(-1), count)
