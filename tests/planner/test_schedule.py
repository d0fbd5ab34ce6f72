"""A schedule file gives back what was written, and says what is wrong with one that was not."""

from __future__ import annotations

import json
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instances import CA, problems, published, published_plan, random_plan

from planaria.common.errors import UserError
from planaria.planner.guidelines import broken
from planaria.planner.problem import Problem, Solution
from planaria.planner.schedule import Bound, Schedule, Search, read, schedule_of, write

Tree = dict[str, Any]


def schedule(problem: Problem, solution: Solution) -> Schedule:
    bound, how = Bound(step_s=15.8, binds="critical path"), Search(seed=7, moves=1000, seconds=0.5)
    return schedule_of(problem, solution, 32.9, bound, {"full": 82.8}, how)


def assert_same(a: Problem | Solution, b: Problem | Solution) -> None:
    names = a._fields if isinstance(a, Solution) else [field.name for field in fields(a)]
    for name in names:
        one, other = getattr(a, name), getattr(b, name)
        assert np.array_equal(one, other), name
        assert getattr(one, "dtype", None) == getattr(other, "dtype", None), name


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """A good schedule, as JSON."""
    write(schedule(published(), published_plan(CA)), tmp_path / "good.json")
    parsed: Tree = json.loads((tmp_path / "good.json").read_text())
    return parsed


def complaint_of(tree: Tree, folder: Path) -> str:
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
def test_what_is_read_is_what_was_written(problem: Problem, seed: int) -> None:
    solution = random_plan(problem, seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.json"
        write(schedule(problem, solution), path)
        found = read(path)
    assert_same(found.problem, problem)
    assert_same(found.solution, solution)
    assert found == schedule(problem, solution)


def test_the_published_instance_keeps_every_nanosecond(tmp_path: Path) -> None:
    problem = published()
    write(schedule(problem, published_plan(CA)), tmp_path / "new folder" / "schedule.json")
    found = read(tmp_path / "new folder" / "schedule.json")
    assert_same(found.problem, problem)
    assert_same(found.solution, published_plan(CA))
    assert (found.step_s, found.compared, found.search.seed, found.bound.binds) == (
        32.9, {"full": 82.8}, 7, "critical path",
    )  # fmt: skip


def test_a_schedule_replaces_the_one_before_and_leaves_nothing_else_behind(tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    path.write_text("an older one")
    write(schedule(published(), published_plan(CA)), path)
    assert [found.name for found in tmp_path.iterdir()] == ["schedule.json"]
    assert read(path).routes[0] == [0, 14, 6, 12, 0]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.json: there is no such schedule; `planaria plan"):
        read(tmp_path / "nowhere.json")


@pytest.mark.parametrize("content", [b"", b"format = 'planaria schedule'", b'{"format": ', b"\xff\xfe", b"[]"])
def test_a_file_that_is_no_json_object(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(UserError, match=r"bad\.json: [^\n]+$"):
        read(tmp_path / "bad.json")


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("format", "a shopping list", "format: "),
        ("version", 2, "version: "),
        ("sights", [], "sights: "),
        ("step_s", -1.0, "step_s: "),
        ("step_s", "32.9", "step_s: "),
        ("sites", 12, "sites: "),
    ],
)
def test_a_field_that_is_wrong_or_unknown(tree: Tree, tmp_path: Path, key: str, value: object, complaint: str) -> None:
    assert complaint_of(tree | {key: value}, tmp_path).startswith(complaint)


@pytest.mark.parametrize("key", ["nodes", "routes", "rules", "stages", "link_s", "transmit_s", "sites"])
def test_a_field_that_is_missing(tree: Tree, tmp_path: Path, key: str) -> None:
    del tree[key]
    assert complaint_of(tree, tmp_path).startswith(f"{key}: ")


def test_a_field_of_a_node_or_a_rule(tree: Tree, tmp_path: Path) -> None:
    tree["rules"]["jumps"] = tree["rules"].pop("jump")
    assert complaint_of(tree, tmp_path).startswith("rules.jump")
    tree["rules"]["jump"] = tree["rules"].pop("jumps")
    tree["nodes"][3]["slots"] = 0
    assert complaint_of(tree, tmp_path).startswith("nodes.3.slots: ")
    tree["nodes"][3]["slots"] = 3
    tree["nodes"][4]["role"] = "manager"
    assert complaint_of(tree, tmp_path).startswith("nodes.4.role: ")


def test_a_site_or_a_node_that_is_not_there(tree: Tree, tmp_path: Path) -> None:
    tree["nodes"][5]["site"] = 12
    assert complaint_of(tree, tmp_path) == "nodes.5.site = 12: there are 12 sites"
    tree["nodes"][5]["site"] = 5
    tree["stages"][2][1] = 20
    assert complaint_of(tree, tmp_path) == "stages.2: node 20: there are 20 nodes"
    tree["stages"][2][1] = 6
    tree["routes"][4][2] = 99
    assert complaint_of(tree, tmp_path) == "routes.4: node 99: there are 20 nodes"
    tree["routes"][4][2] = -1
    assert complaint_of(tree, tmp_path).startswith("routes.4.2: ")


def test_a_route_of_the_wrong_length(tree: Tree, tmp_path: Path) -> None:
    for route in ([0, 14, 6, 0], [0, 14, 6, 12, 5, 0], []):
        tree["routes"][7] = route
        assert complaint_of(tree, tmp_path) == f"routes.7: has {len(route)} nodes; 3 visits take 5"


@pytest.mark.parametrize("name", ["link_s", "transmit_s"])
def test_a_table_of_the_wrong_size(tree: Tree, tmp_path: Path, name: str) -> None:
    for table in (tree["link_s"][:-1], [*tree["link_s"][:-1], tree["link_s"][-1][:-1]]):
        assert complaint_of(tree | {name: table}, tmp_path) == f"{name}: is not a table of 12 × 12 sites"


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
def test_parts_that_do_not_fit_together_are_refused(tree: Tree, tmp_path: Path, change: Tree) -> None:
    """As the file is read, or else by the guidelines; never by a crash, and never passed over."""
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(tree | change))
    try:
        found = read(path)
    except UserError as error:
        assert str(error).startswith(f"{path}: ")
    else:
        assert broken(found.problem, found.solution)
