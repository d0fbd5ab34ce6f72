"""Steps with gradient sums: timed by their messages, searched, bounded and kept in schedules."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.cli import main
from planaria.common.errors import UserError
from planaria.config import recipe
from planaria.models.families import stage_parameters
from planaria.pipeline.network import topology
from planaria.pipeline.plan.build import simulate_first_come
from planaria.planner.bound.step_bound import ALL, all_plans, best_of_all, step_lower_bound
from planaria.planner.guidelines import find_violations
from planaria.planner.makespan import NEVER
from planaria.planner.problem import ROLES, PlanningProblem, Solution, by_centrality, problem_of
from planaria.planner.replan import with_measured_links
from planaria.planner.schedule import read
from planaria.planner.search import SearchBudget, search, step_ns
from planaria.planner.tables import NO_SUMS
from support.planner_instances import RECIPE, problems, published, random_plan, small_problem

seeds = st.integers(0, 2**32)


def simulated(problem: PlanningProblem, plan: Solution) -> int:
    """Return the step by the object-based clock: the last passes, then messages to each stage's hub and back."""
    clock = simulate_first_come(plan.routes, problem.memory, problem.prices)
    ends = {node: max((clock.ends[n] for n in ran), default=0) for node, ran in clock.ran.items()}
    if not problem.summed:
        return max(ends.values())
    last = 0
    for stage in range(len(problem.sizes)):
        first, *others = by_centrality(problem, plan, stage)

        def carry(a: int, b: int, row: int = min(stage, 1)) -> int:
            return int(problem.sums[row, problem.site[a], problem.site[b]])

        whole = max([ends.get(first, 0), *(ends.get(n, 0) + carry(n, first) for n in others)])
        last = max([last, whole, *(whole + carry(first, n) for n in others)])
    return last


@pytest.mark.slow
@settings(max_examples=150)
@given(problems(), seeds)
def test_a_step_ends_when_all_nodes_have_their_sums(problem: PlanningProblem, seed: int) -> None:
    plan = random_plan(problem, seed)
    if (step := step_ns(problem, plan)) != NEVER:
        assert step == simulated(problem, plan)


@settings(max_examples=25)
@given(problems(least=1), seeds)
def test_a_search_reports_the_step_of_its_plan(problem: PlanningProblem, seed: int) -> None:
    found = search(problem, seed % 100, SearchBudget(moves=500))
    assert found.step_s == step_ns(problem, found.solution) / 1e9
    assert not find_violations(problem, found.solution)


def two_sites(block: int) -> PlanningProblem:
    """A data node and two workers at one site, two workers at another; two stages of two are both split or neither."""
    passes = np.ones((3, 5), np.int64)
    sums = np.zeros((2, 2, 2), np.int64)
    sums[1] = [[0, block], [block, 0]]
    return small_problem(
        [0, 0, 0, 1, 1],
        (1, 2, 2),
        np.array([[0, 10], [10, 0]]),
        jump=2,
        forward=passes,
        backward=passes,
        slots=np.ones(5, np.int64),
        role=np.array([ROLES.index("data"), *[ROLES.index("worker")] * 4]),
        sums=sums,
    )


@pytest.mark.parametrize("block", [1, 1000])
def test_slow_sums_bring_the_nodes_of_a_stage_together(block: int) -> None:
    problem = two_sites(block)
    found = search(problem, 1, SearchBudget(moves=3000))
    together = found.solution.stage[1] == found.solution.stage[2]
    assert together or block == 1
    assert round(found.step_s * 1e9) == 6
    assert step_lower_bound(problem).step_s == found.step_s
    assert step_lower_bound(problem, exact=False).step_s <= found.step_s


def test_a_node_far_from_all_others_bounds_the_step() -> None:
    """Of four workers one is remote; its gradients travel both ways in any stage."""
    problem = replace(two_sites(1000), site=np.array([0, 0, 0, 0, 1]))
    assert round(step_lower_bound(problem, exact=False).step_s * 1e9) == 2000
    assert step_lower_bound(problem).step_s == search(problem, 1, SearchBudget(moves=3000)).step_s >= 2000 / 1e9


def tiny(seed: int) -> PlanningProblem:
    problem, rng = two_sites(0), np.random.default_rng(seed)
    passes = rng.integers(1, 9, (2, 3, 5))
    roles = np.array([ROLES.index("worker"), *[ROLES.index("any")] * 4])
    return replace(
        problem, sizes=(1 + seed % 2, 2 - seed % 2, 2), microbatches=2 - seed % 2, forward=passes[0],
        backward=passes[1], link=rng.integers(0, 20, (2, 2)), slots=rng.integers(1, 3, 5), role=roles,
        sums=rng.integers(0, 30, (2, 2, 2)) if seed % 3 else NO_SUMS,
    )  # fmt: skip


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(seeds)
def test_all_plans_of_a_tiny_problem_are_tried(seed: int) -> None:
    """Each obeys all rules and occurs once, random plans are among them, and none beats the other bounds."""
    problem = tiny(seed)
    tried = list(all_plans(problem))
    keys = {(*plan.stage.tolist(), *plan.origin.tolist(), *plan.path.ravel().tolist()) for plan in tried}
    assert len(keys) == len(tried)
    assert not any(rule.rule != "TC1" for plan in tried for rule in find_violations(problem, plan))
    drawn = random_plan(problem, seed)
    assert (*drawn.stage.tolist(), *drawn.origin.tolist(), *drawn.path.ravel().tolist()) in keys
    best = best_of_all(problem)
    assert best == min(step_ns(problem, plan) for plan in tried)
    assert step_lower_bound(problem).step_s == best / 1e9
    assert step_lower_bound(problem, exact=False).step_s <= best / 1e9


def test_large_problems_are_not_tried_exhaustively() -> None:
    assert best_of_all(published()) is None


def planned(scale: float = 1.0) -> PlanningProblem:
    config = recipe.load(RECIPE, {"model.layers": "5", "routing.wait_for_gradient_sums": "true"})
    assert config.network.topology
    return problem_of(config, topology.read(RECIPE.parent / config.network.topology, scale))


def test_sum_messages_have_the_size_of_a_node_s_gradients() -> None:
    config = recipe.load(RECIPE, {"model.layers": "5"})
    sites = topology.read(RECIPE.parent / "topologies" / "twelve_cities.toml")
    problem = planned()
    for stage in (0, 1):
        size = 4 * stage_parameters(config.model, 5, stage)
        one, other = problem.sites[0], problem.sites[5]
        assert problem.sums[stage, 0, 5] == round(sites.carry_s(one, other, size) * 1e9)
    assert not replace(problem, sums=NO_SUMS).summed


def test_gradients_that_take_too_long_are_rejected() -> None:
    with pytest.raises(
        UserError, match=r"routing.wait_for_gradient_sums: \S.* bytes, take .* raise the link's bandwidth"
    ):
        planned(1e5)


def planaria(*words: str) -> int | str | None:
    """Return the exit code of a command."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    return ended.value.code


@pytest.mark.slow
def test_a_schedule_keeps_the_times_of_its_sums(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "s.json"
    command = ["plan", str(RECIPE), "--budget", "30moves", "--quiet", "--to", str(file), "--model.layers", "5"]
    assert planaria(*command, "--routing.wait_for_gradient_sums", "true") == 0
    schedule = read(file)
    assert schedule.sums_s is not None
    assert step_ns(schedule.problem, schedule.solution) == round(schedule.step_s * 1e9)
    alone = replace(schedule.problem, sums=NO_SUMS)
    assert step_ns(alone, schedule.solution) < step_ns(schedule.problem, schedule.solution)
    assert "gradient sums" in file.with_suffix(".html").read_text()
    assert planaria(*command) == 0
    assert "sums_s" not in json.loads(file.read_text())
    capsys.readouterr()
    # Training needs no sums; a recipe that requires them rejects routes planned without them.
    assert (
        planaria(
            "train",
            str(RECIPE),
            "--routing.schedule",
            str(file),
            "--routing.wait_for_gradient_sums",
            "true",
            "--dry-run",
        )
        == 2
    )
    assert "was planned without gradient sums" in capsys.readouterr().err
    tree = json.loads(file.read_text()) | {"sums_s": [schedule.link_s]}
    file.write_text(json.dumps(tree))
    with pytest.raises(UserError, match="sums_s has 1 tables"):
        read(file)


def test_sums_without_a_topology_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert planaria("plan", "demo", "--routing.wait_for_gradient_sums", "true") == 2
    assert "network.topology is not set" in capsys.readouterr().err


LINKS = """
link = [
    { id = "a", sites = ["A", "B"], latency_ms = 20, bandwidth_mbit = 1 },
    { id = "b", sites = ["A", "B"], latency_ms = 100, bandwidth_mbit = 1 },
]
nodes = [{ site = "A", speed = 2, memory = 2 }, { site = "A", speed = 3, memory = 1 }, { site = "B", memory = 1 }]
"""
PATHS = """
[pipeline]
stages = 1
microbatches = 4
microbatch_size = 2
[routing]
data_nodes = 2
sums = true
[network]
topology = "links.toml"
forward_s = [0.0, 0.5]
backward_s = [0.0, 0.3]
entry_forward_s = 0.3
"""


@pytest.mark.slow
def test_plans_on_several_paths_are_not_bounded_by_trying_all(tmp_path: Path) -> None:
    """A longer message can shorten a first-come step, so steps on unshared links do not bound it."""
    (tmp_path / "links.toml").write_text(LINKS)
    (tmp_path / "r.toml").write_text(PATHS)
    to = tmp_path / "s.json"
    assert planaria("plan", str(tmp_path / "r.toml"), "--budget", "2000moves", "--quiet", "--to", str(to)) == 0
    schedule = read(to)
    assert 0 < schedule.bound.step_s <= schedule.step_s
    assert schedule.bound.binds != ALL
    tree = json.loads(to.read_text())
    to.write_text(json.dumps(tree | {"stages": [[0, 1, 2], []]}))
    with pytest.raises(UserError, match=r"stages\.0 has 3 nodes, and rules\.sizes\.0 = 2"):
        read(to)


def test_many_microbatches_are_not_tried_in_all_orders() -> None:
    assert best_of_all(replace(two_nodes(), microbatches=5000)) is None
    assert best_of_all(two_nodes()) == step_ns(two_nodes(), Solution(*map(np.array, ([0, 1], [0, 0], [[1], [1]]))))


def two_nodes() -> PlanningProblem:
    """A worker and a data node, in either order; nothing takes time."""
    none = np.zeros((3, 2), np.int64)
    return replace(
        two_sites(0), names=("a", "b"), site=np.array([0, 1]), sizes=(1, 1), microbatches=2, forward=none,
        backward=none, link=np.zeros((2, 2), np.int64), slots=np.ones(2, np.int64), role=np.array([0, 2]),
        sums=NO_SUMS,
    )  # fmt: skip


def test_a_network_in_which_nothing_takes_time_is_searched() -> None:
    idle = replace(two_nodes(), role=np.array([ROLES.index("worker"), ROLES.index("any")]))
    assert search(idle, 1, SearchBudget(moves=500)).step_s == 0


def test_slower_links_also_slow_gradients() -> None:
    slower = with_measured_links(two_sites(1000), {(1, 3): 30e-9})
    assert slower.link[0, 1] == 30
    assert slower.sums[1].tolist() == [[0, 3000], [1000, 0]]


def test_a_bound_without_time_is_lower_and_still_valid() -> None:
    assert best_of_all(two_nodes(), until=0.0) is None
    few = tiny(5)
    whole, cut = step_lower_bound(few), step_lower_bound(few, seconds=0.0)
    assert whole.binds == ALL and 0 < cut.step_s <= whole.step_s
    assert step_lower_bound(published(), seconds=0.0).step_s <= step_lower_bound(published(), examinations=9).step_s
