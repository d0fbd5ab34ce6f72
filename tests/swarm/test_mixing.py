"""Draws of own and other peers' groups: pools, seeds, equivalences with whole swarms, and recomputed rewards."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from planaria.common.errors import UserError
from planaria.config import shipped
from planaria.swarm.commands.swarm import prepare, unused_reasons
from planaria.swarm.config.rounds_config import RoundsConfig
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.config.swarm_recipe import load, peer_names
from planaria.swarm.learning.advantages import GroupName, group_of, mix_groups, round_advantages
from planaria.swarm.learning.learner import UpdateResult
from planaria.swarm.peer.completion_intake import CompletionScore
from planaria.swarm.peer.peer import Peer
from planaria.swarm.peer.rollout import Rollout
from planaria.swarm.records.lines import PEERS, SAMPLES, SampleRecord
from planaria.swarm.tasks.base import TaskProblem
from support.swarm.swarms import peer, rounds, threads, tiny, together, weights
from support.swarm.tiny_swarm import case

VERTICAL: dict[str, Any] = {"mode": "vertical", "count": 4, "prompts": 6, "group": 6}


def drawing(own: int, foreign: int, drop_flat: str = "foreign") -> RoundsConfig:
    return RoundsConfig.model_validate({"mode": "vertical", "own": own, "foreign": foreign, "drop_flat": drop_flat})


def groups(of: dict[GroupName, bool]) -> list[Rollout]:
    """Two completions per group, with equal rewards if it is flat."""
    return [
        case(who, problem, index, reward=float(index and not flat))
        for (problem, who), flat in of.items()
        for index in (0, 1)
    ]


def drawn(rollouts: Sequence[Rollout], config: RoundsConfig, *purpose: object) -> set[GroupName]:
    found = mix_groups(round_advantages(rollouts, "vertical", True), rollouts, "me", config, *purpose)
    return {group_of(rollout) for rollout in found.rollouts}


def count(of: set[GroupName], own: bool) -> int:
    return sum((who == "me") is own for _, who in of)


POOLS = st.dictionaries(st.tuples(st.integers(0, 9), st.sampled_from(["me", "a", "b"])), st.booleans(), max_size=30)


@given(POOLS, st.integers(0, 6), st.integers(0, 6), st.integers(0, 99))
def test_draws_take_as_many_groups_as_required_or_available(
    pool: dict[GroupName, bool], own: int, foreign: int, seed: int
) -> None:
    if not own + foreign:
        return
    lively = {group for group, flat in pool.items() if not flat}
    found = drawn(groups(pool), drawing(own, foreign, "all" if own else "foreign"), seed)
    assert found <= lively
    assert count(found, True) == min(own, count(lively, True))
    assert count(found, False) == min(foreign, count(lively, False))


@given(POOLS, st.integers(1, 30), st.integers(0, 99))
def test_flat_groups_take_a_place_unless_they_are_dropped(pool: dict[GroupName, bool], each: int, seed: int) -> None:
    own, foreign = ({group for group in pool if (group[1] == "me") is mine} for mine in (True, False))
    for drop_flat in ("foreign", "none"):
        found = drawn(groups(pool), drawing(each, each, drop_flat), seed)
        if each >= len(own):
            assert count(found, True) == sum(not pool[group] for group in own)
        if drop_flat == "foreign":
            assert count(found, False) == min(each, sum(not pool[group] for group in foreign))


def test_dropped_flat_groups_make_room_for_others() -> None:
    half = {(n, who): n % 2 == 0 for n in range(10) for who in ("me", "a")}
    sizes = {d: [len(drawn(groups(half), drawing(4, 4, d), s)) for s in range(20)] for d in ("none", "foreign", "all")}
    assert min(sizes["none"]) < 4 and set(sizes["all"]) == {8}
    assert sum(sizes["none"]) < sum(sizes["foreign"]) < sum(sizes["all"])


def test_draws_repeat_from_the_seed_and_differ_between_rounds() -> None:
    rollouts = groups({(n, who): False for n in range(10) for who in ("me", "a", "b")})
    config = drawing(4, 4)
    results = [drawn(rollouts, config, seed, "p0", number) for seed in (1, 2) for number in range(4)]
    assert results == [drawn(rollouts, config, seed, "p0", number) for seed in (1, 2) for number in range(4)]
    assert len({frozenset(found) for found in results}) == 8


def test_draws_are_uniform() -> None:
    rollouts = groups({(n, who): False for n in range(6) for who in ("me", "a")})
    hits = [group for seed in range(600) for group in drawn(rollouts, drawing(2, 3), seed)]
    assert all(abs(hits.count((n, "me")) - 200) < 45 and abs(hits.count((n, "a")) - 300) < 45 for n in range(6))


@pytest.mark.parametrize(("flat_share", "expected"), [(0.3, 0.42), (0.6, 0.57), (0.8, 0.73)])
def test_dropping_flat_groups_favours_a_peer_without_any(flat_share: float, expected: float) -> None:
    """Of three foreign peers with 8 groups each, one has no flat group; 4 groups are drawn."""
    draw = random.Random(0)
    found: list[str] = []
    for seed in range(400):
        pool = {(n, who): who != "c" and draw.random() < flat_share for n in range(8) for who in ("me", "a", "b", "c")}
        found += [who for _, who in drawn(groups(pool), drawing(4, 4), seed) if who != "me"]
    assert found.count("c") / len(found) == pytest.approx(expected, abs=0.03)


def test_fewer_groups_than_required_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    rollouts = groups({(0, "me"): False, (1, "a"): False, (2, "a"): True})
    with caplog.at_level(logging.INFO):
        assert drawn(rollouts, drawing(1, 3)) == {(0, "me"), (1, "a")}
    assert [r.getMessage() for r in caplog.records] == [
        "learns from 1 groups of rounds.foreign = 3: no more are available"
    ]


# Settings


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rounds": {"own": 2}}, r"rounds\.own = 2 needs rounds\.foreign"),
        ({"rounds": {"foreign": 2}}, r"rounds\.foreign = 2 needs rounds\.own"),
        ({"rounds": {"drop_flat": "all"}}, r"rounds\.drop_flat = 'all' needs rounds\.own and rounds\.foreign"),
        ({"rounds": {"mode": "horizontal", "own": 2, "foreign": 2}}, r"rounds\.mode = 'horizontal'"),
        ({"rounds": {"own": 0, "foreign": 0}}, r"rounds\.own = 0 and rounds\.foreign = 0"),
        ({"rounds": {"own": 2, "foreign": 0, "drop_flat": "none"}}, r"'none' .* no effect with rounds\.foreign = 0"),
        ({"rounds": {"own": 0, "foreign": 2, "drop_flat": "all"}}, r"'all' .* no effect with rounds\.own = 0"),
        ({"rounds": {"own": 1, "foreign": 2, "gather": False}}, r"rounds\.foreign = 2: rounds\.gather = false"),
        ({"rounds": {"own": 0, "foreign": 2}, "size": 1}, r"rounds\.foreign = 2: there is only one peer"),
        ({"rounds": {"own": 5, "foreign": 2}}, r"rounds\.own = 5: each peer writes 4 groups"),
        ({"rounds": {"own": 2, "foreign": 2}, "receipts": {"committee": "all"}}, r"receipts\.committee: peers that"),
    ],
)
def test_invalid_draws_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    rounds = {"mode": "vertical", "prompts": 16} | fields.pop("rounds")
    with pytest.raises(ValidationError, match=message):
        SwarmConfig.model_validate(fields | {"rounds": rounds})


@pytest.mark.parametrize(("foreign", "board", "refused"), [(12, "", False), (13, "", True), (13, "shared", False)])
def test_more_foreign_groups_than_the_peers_write_need_a_board_that_others_may_join(
    foreign: int, board: str, refused: bool, tmp_path: Path
) -> None:
    flags = {"out": str(tmp_path), "board": board, "rounds.mode": "vertical", "rounds.own": "2"}
    config = load(shipped.find("arithmetic_swarm"), flags | {"rounds.foreign": str(foreign)})
    message = r"rounds\.foreign = 13: the other peers write 12 groups \(rounds\.prompts = 16, size = 4\)"
    with pytest.raises(UserError, match=message) if refused else nullcontext():
        prepare(config, quiet=True, warmup=False)


def unused(config: SwarmConfig, rewards: dict[GroupName, tuple[float, float]]) -> list[str]:
    """Return why the completions of each group were not learned from."""
    lines = [
        SampleRecord(peer=who, round=0, problem=problem, index=index, reward=reward, passed=[])
        for (problem, who), pair in rewards.items()
        for index, reward in enumerate(pair)
    ]
    reasons = unused_reasons(config, lines)
    return [reasons[who, 0, problem, 0] for problem, who in rewards]


def test_unused_completions_are_of_equal_rewards_or_not_drawn() -> None:
    rewards = {(0, "me"): (1.0, 1.0), (0, "a"): (0.0, 0.0), (1, "a"): (0.0, 1.0)}
    flat, skipped = "all rewards of its group are equal", "its group was not drawn"
    fields: dict[str, Any] = {"size": 3, "rounds": VERTICAL | {"own": 1, "foreign": 1}}
    assert unused(SwarmConfig.model_validate(fields), rewards) == [flat, flat, skipped]
    penalized = SwarmConfig.model_validate(fields | {"loss": {"overlong": 2}})
    assert unused(penalized, rewards) == [f"{flat}, or {skipped}"] * 2 + [skipped]
    horizontal = SwarmConfig.model_validate({"rounds": VERTICAL | {"mode": "horizontal", "group": 8}})
    assert unused(horizontal, {(0, "me"): (1.0, 1.0), (0, "a"): (1.0, 1.0)}) == [flat] * 2


# Whole swarms


def test_own_groups_alone_equal_a_single_peer(tmp_path: Path, pupil: Path) -> None:
    together(tiny(pupil, rounds=VERTICAL | {"gather": False}), tmp_path / "single")
    together(tiny(pupil, rounds=VERTICAL | {"own": 2, "foreign": 0}), tmp_path / "drawn")
    for name in ("p0", "p1", "p2"):
        assert weights(tmp_path / "drawn", name) == weights(tmp_path / "single", name)
    assert len({*weights(tmp_path / "single", "p0")}) > 1
    assert weights(tmp_path / "single", "p0") != weights(tmp_path / "single", "p1")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("drop_flat", ["none", "foreign", "all"])
def test_drawing_all_groups_equals_vertical_mode(tmp_path: Path, pupil: Path, drop_flat: str) -> None:
    together(tiny(pupil, rounds=VERTICAL), tmp_path / "vertical")
    draws = {"own": 2, "foreign": 4, "drop_flat": drop_flat}
    together(tiny(pupil, rounds=VERTICAL | draws), tmp_path / "drawn")
    for name in ("p0", "p1", "p2"):
        assert weights(tmp_path / "drawn", name) == weights(tmp_path / "vertical", "p0")


def test_a_swarm_with_draws_repeats_to_the_bit(tmp_path: Path, pupil: Path) -> None:
    config = tiny(pupil, rounds=VERTICAL | {"own": 1, "foreign": 2})
    for folder in ("one", "other"):
        together(config, tmp_path / folder)
        assert not any(record.missing for record in rounds(tmp_path / folder, "p0").values())
    for name in ("p0", "p1", "p2"):
        first, second = ((tmp_path / folder / PEERS / name / SAMPLES).read_text() for folder in ("one", "other"))
        assert first == second and '"advantage"' in first
    assert weights(tmp_path / "one", "p0") != weights(tmp_path / "one", "p1")


def test_groups_of_a_lying_peer_are_rewarded_by_the_receiver(tmp_path: Path, pupil: Path) -> None:
    """p1 inverts all rewards that it computes; the others score its texts themselves before they learn from them."""
    config = tiny(pupil, rounds=VERTICAL | {"own": 1, "foreign": 4}, loss={"kind": "nois"})
    peers: dict[str, Peer] = {}
    learned: dict[str, list[Rollout]] = {name: [] for name in peer_names(config)}

    def join_swarm(name: str) -> None:
        member = peers[name] = peer(config, name, tmp_path)
        scores, learns = member.scoring.score_untimed, member.learner.learn
        scored: dict[tuple[int, str], float] = {}

        def score(problem: TaskProblem, text: str, who: str = "") -> CompletionScore:
            true = scores(problem, text, who).reward
            scored[problem.number, text] = 1.0 - true if name == "p1" else true
            return CompletionScore(scored[problem.number, text])

        def learn(number: int, taken: Sequence[Rollout], share: float = 1.0) -> UpdateResult:
            for rollout in taken:
                own_score = scored[rollout.problem.number, rollout.text] if rollout.ended else 0.0
                assert rollout.reward == own_score, "not rewarded by the receiver"
            learned[name] += taken
            return learns(number, taken, share)

        member.scoring.score_untimed, member.learner.learn = score, learn  # type: ignore[method-assign]
        member.run()

    with threads(*[partial(join_swarm, name) for name in peer_names(config)]):
        pass
    from_liar = [one for name in ("p0", "p2") for one in learned[name] if one.peer == peers["p1"].id]
    assert {one.reward for one in from_liar} == {0.0, 1.0}
    for one in from_liar:
        assert one.reward == (peers["p0"].task.score(one.problem, one.text) if one.ended else 0.0)
