"""A schedule file preserves what was written, and invalid files are reported by file and field."""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.config import recipe
from planaria.pipeline.network.costs import message_bytes
from planaria.pipeline.network.topology import read as read_topology
from planaria.planner.guidelines import find_violations
from planaria.planner.problem import NO_LATENCY, PlanningProblem, Solution, problem_of
from planaria.planner.schedule import ProvedBound, Schedule, SearchRecord, make_schedule, read, write
from support.planner_instances import CA, RECIPE, problems, published, published_plan, random_plan

Tree = dict[str, Any]
TOPOLOGY = str(recipe.load(RECIPE, {}).network.topology)


def schedule(problem: PlanningProblem, solution: Solution) -> Schedule:
    bound, how = ProvedBound(step_s=15.8, binds="critical path"), SearchRecord(seed=7, moves=1000, seconds=0.5)
    return make_schedule(problem, solution, 32.9, bound, {"full": 82.8}, how)


def assert_same(a: PlanningProblem | Solution, b: PlanningProblem | Solution) -> None:
    names = a._fields if isinstance(a, Solution) else [field.name for field in fields(a)]
    for name in names:
        one, other = getattr(a, name), getattr(b, name)
        assert np.array_equal(one, other), name
        assert getattr(one, "dtype", None) == getattr(other, "dtype", None), name


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Return a valid schedule as JSON."""
    write(schedule(published(), published_plan(CA)), tmp_path / "good.json")
    parsed: Tree = json.loads((tmp_path / "good.json").read_text())
    return parsed


def error_of(tree: Tree, folder: Path) -> str:
    path = folder / "bad.json"
    path.write_text(json.dumps(tree))
    with pytest.raises(UserError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)
    return str(error.value).removeprefix(f"{path}: ")


@pytest.mark.slow
@settings(max_examples=100)
@given(problems(), st.integers(0, 2**32))
def test_a_schedule_is_read_as_it_was_written(problem: PlanningProblem, seed: int) -> None:
    solution = random_plan(problem, seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.json"
        write(schedule(problem, solution), path)
        found = read(path)
    assert_same(found.problem, problem)
    assert_same(found.solution, solution)
    assert found == schedule(problem, solution)


@pytest.mark.parametrize(("wire", "shorter"), [("8/4", True), ("4/8", False), ("bf16", None)])
def test_gradients_take_the_time_of_their_own_size(tmp_path: Path, wire: str, shorter: bool | None) -> None:
    config = recipe.load(RECIPE, {"pipeline.wire": wire})
    sizes = message_bytes(config.model, config.pipeline)
    topology = replace(read_topology(RECIPE.parent / TOPOLOGY), queueing=True)
    problem = replace(problem_of(config, topology), visits=3)
    a, b = problem.sites[:2]
    for kind, size in (("forward", sizes.forward), ("backward", sizes.backward)):
        at = [problem.site.tolist().index(site) for site in (0, 1)]
        assert problem.prices.carry(*at, kind) == round(topology.carry_s(a, b, size) * 1e9)
        assert problem.prices.transmit(*at, kind) == round(topology.transmit_s(a, b, size) * 1e9)
    assert bool(problem.saving.size) == (shorter is not None)
    if shorter is not None:
        assert (problem.link_back < problem.link).all() == shorter
    write(schedule(problem, published_plan(CA)), tmp_path / "schedule.json")
    assert_same(read(tmp_path / "schedule.json").problem, replace(problem, latency=NO_LATENCY))
    assert ("link_back_s" in json.loads((tmp_path / "schedule.json").read_text())) == (shorter is not None)


def test_the_published_instance_keeps_every_nanosecond(tmp_path: Path) -> None:
    """Only latencies, which are part of the links' times, are not kept."""
    problem = replace(published(), latency=NO_LATENCY)
    write(schedule(problem, published_plan(CA)), tmp_path / "new folder" / "schedule.json")
    found = read(tmp_path / "new folder" / "schedule.json")
    assert_same(found.problem, problem)
    assert_same(found.solution, published_plan(CA))
    assert (found.step_s, found.compared, found.search.seed, found.bound.binds) == (
        32.9, {"full": 82.8}, 7, "critical path",
    )  # fmt: skip


def test_a_schedule_replaces_the_previous_file_and_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    path.write_text("an older one")
    write(schedule(published(), published_plan(CA)), path)
    assert [found.name for found in tmp_path.iterdir()] == ["schedule.json"]
    assert read(path).routes[0] == [0, 14, 6, 12, 0]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.json: schedule not found; create it with `planaria plan"):
        read(tmp_path / "nowhere.json")


@pytest.mark.parametrize("content", [b"", b"format = 'planaria schedule'", b'{"format": ', b"\xff\xfe", b"[]"])
def test_a_file_that_is_no_json_object(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(UserError, match=r"bad\.json: [^\n]+$"):
        read(tmp_path / "bad.json")


MISSING = object()
SEGMENT_BYTES = [[0.0] * 12] * 11


@pytest.mark.parametrize(
    ("place", "value", "error"),
    [
        ("format", "a shopping list", "format: .*"),
        ("version", 2, "version: .*"),
        ("sights", [], "sights: .*"),
        ("step_s", -1.0, "step_s: .*"),
        ("step_s", "32.9", "step_s: .*"),
        ("sites", 12, "sites: .*"),
        *((name, MISSING, f"{name}: .*") for name in ("nodes", "routes", "rules", "stages", "sites")),
        *((name, MISSING, f"{name}: .*") for name in ("link_s", "transmit_s")),
        ("rules.jump", MISSING, r"rules\.jump: .*"),
        ("rules.jumps", 4, r"rules\.jumps: .*"),
        ("nodes.3.slots", 0, r"nodes\.3\.slots: .*"),
        ("nodes.4.role", "manager", r"nodes\.4\.role: .*"),
        ("nodes.5.site", 12, r"nodes\.5\.site = 12: there are 12 sites"),
        ("stages.2.1", 20, r"stages\.2: node 20: there are 20 nodes"),
        ("routes.4.2", 99, r"routes\.4: node 99: there are 20 nodes"),
        ("routes.4.2", -1, r"routes\.4\.2: .*"),
        ("routes.7", [0, 14, 6, 0], r"routes\.7 has 4 nodes; 3 visits need 5"),
        ("routes.7", [0, 14, 6, 12, 5, 0], r"routes\.7 has 6 nodes; 3 visits need 5"),
        ("routes.7", [], r"routes\.7 has 0 nodes; 3 visits need 5"),
        ("link_s", SEGMENT_BYTES, "link_s is not a table of 12 × 12 sites"),
        ("link_s", [*SEGMENT_BYTES, SEGMENT_BYTES[0][:-1]], "link_s is not a table of 12 × 12 sites"),
        ("transmit_s", SEGMENT_BYTES, "transmit_s is not a table of 12 × 12 sites"),
        ("transmit_s", [*SEGMENT_BYTES, SEGMENT_BYTES[0][:-1]], "transmit_s is not a table of 12 × 12 sites"),
    ],
)
def test_an_invalid_field_is_named(tree: Tree, tmp_path: Path, place: str, value: object, error: str) -> None:
    *parents, last = (int(key) if key.isdigit() else key for key in place.split("."))
    holder: Any = tree
    for key in parents:
        holder = holder[key]
    holder[last] = value
    if value is MISSING:
        del holder[last]
    assert re.fullmatch(error, error_of(tree, tmp_path))


@pytest.mark.parametrize(
    "change",
    [
        {"routes": []},
        {"routes": [[0, 14, 6, 12, 0]] * 31},
        {"routes": [[o, *ways[0], 11 if o == 0 else o] for _ in range(6) for o, ways in CA.items()]},
        {"stages": []},
        {"stages": [[0, 3, 4, 10, 11]]},
        {"stages": [[0, 3, 4, 10, 11], [14, 15], [1, 6, 9, 8], [12, 13, 16], [5, 7, 18], [2, 17, 19]]},
        {"stages": [[0, 3, 4, 10, 11], [8, 14, 15], [1, 6, 9], [12, 13, 16], [5, 7, 18], [2, 17], [19]]},
        {"nodes": []},
        {"sites": []},
        {"rules": {"sizes": [], "microbatches": 6, "visits": 3, "swaps": 2, "jump": 4}},
        {"rules": {"sizes": [5, 3, 3, 3, 3], "microbatches": 6, "visits": 3, "swaps": 2, "jump": 4}},
        {"rules": {"sizes": [5, 3, 3, 3, 3, 3, 3], "microbatches": 6, "visits": 3, "swaps": 2, "jump": 4}},
    ],
)
def test_inconsistent_parts_are_rejected(tree: Tree, tmp_path: Path, change: Tree) -> None:
    """Either on reading or by the guidelines, never by a crash."""
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(tree | change))
    try:
        found = read(path)
    except UserError as error:
        assert str(error).startswith(f"{path}: ")
    else:
        assert find_violations(found.problem, found.solution)
