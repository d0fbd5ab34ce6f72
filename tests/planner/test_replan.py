"""Plans for the remaining nodes: valid, over those nodes only, and derived from the old plan."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planaria.planner.cells import restrict_problem
from planaria.planner.guidelines import find_violations
from planaria.planner.initial_plans import greedy_plan, random_routes
from planaria.planner.makespan import NEVER
from planaria.planner.problem import PlanningProblem, Solution
from planaria.planner.replan import replan, with_measured_links
from planaria.planner.search import step_ns
from support.planner_instances import CA, problems, published, published_plan


def numbered_anew(solution: Solution, nodes: list[int]) -> Solution:
    new = np.vectorize({node: place for place, node in enumerate(nodes)}.__getitem__, otypes=[np.int64])
    return Solution(solution.stage[nodes], new(solution.origin), new(solution.path))


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(problems(), st.integers(0, 99), st.data())
def test_a_new_plan_obeys_the_rules_that_the_old_plan_obeyed(
    problem: PlanningProblem, seed: int, data: st.DataObject
) -> None:
    rng = random.Random(seed)
    old = greedy_plan(problem, rng)
    stages = [old.members(stage) for stage in range(len(problem.sizes))]
    if data.draw(st.booleans()):
        disorderly = random_routes(problem, stages, rng, problem.swaps)
        old = old if find_violations(problem, disorderly) else disorderly
    one_of_each = {rng.choice(members) for members in stages}
    others = sorted(set(range(problem.nodes)) - one_of_each)
    assume(others)
    lost = data.draw(st.sets(st.sampled_from(others), min_size=1))
    nodes = [n for n in range(problem.nodes) if n not in lost]
    found, step_s, _ = replan(problem, old, nodes, seed)
    left, new = restrict_problem(problem, old, nodes), numbered_anew(found, nodes)
    assert find_violations(left, new) == []
    assert step_ns(left, new) / 1e9 == step_s


def test_the_published_plan_without_some_of_its_nodes() -> None:
    problem, old = published(), published_plan(CA)
    whole = step_ns(problem, old) / 1e9
    for lost in ([15], [0], [14, 9], [3, 13]):
        nodes = [n for n in range(20) if n not in lost]
        found, step_s, _ = replan(problem, old, nodes, 0)
        left, new = restrict_problem(problem, old, nodes), numbered_anew(found, nodes)
        assert find_violations(left, new) == []
        assert left.count == 30, "no microbatch is lost with a data node"
        assert whole * 0.8 < step_s < whole * 2.5


def test_a_slow_link_is_avoided() -> None:
    """The busiest link between two block stages takes a second longer."""
    problem, old = published(), published_plan(CA)
    nodes = list(range(problem.nodes))
    hops = Counter(hop for path in old.path.tolist() for hop in pairwise(path))
    (source, target), _ = hops.most_common(1)[0]
    slower = with_measured_links(
        problem, {(source, target): float(problem.link[problem.site[source], problem.site[target]]) / 1e9 + 1}
    )

    found, step_s, before_s = replan(slower, old, nodes, 0)

    assert find_violations(slower, found) == []
    assert before_s == step_ns(slower, old) / 1e9
    assert step_s < before_s, "the search kept the old routes"
    assert with_measured_links(problem, {(source, source): 9.0}).link.tolist() == problem.link.tolist(), "within a site"


def test_the_same_nodes_and_seed_give_the_same_plan() -> None:
    problem, old = published(), published_plan(CA)
    nodes = list(range(1, 20))
    one, other = (replan(problem, old, nodes, 7) for _ in range(2))
    assert one[1] == other[1] and all((a == b).all() for a, b in zip(one[0], other[0], strict=True))


def test_routes_that_would_deadlock_are_put_in_order() -> None:
    """With one slot per node, microbatches that cross may wait for one another indefinitely."""
    problem, old = published(), published_plan(CA)
    tight = replace(problem, slots=np.ones(20, np.int64))
    nodes = [n for n in range(20) if n != 15]
    found, step_s, _ = replan(tight, old, nodes, 0)
    assert step_ns(restrict_problem(tight, old, nodes), numbered_anew(found, nodes)) != NEVER and step_s > 0
