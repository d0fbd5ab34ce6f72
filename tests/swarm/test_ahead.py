"""Drawing ahead of learning: versions of the weights, staleness, checks, recovery, and overlap with a server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from planaria.swarm.assemble import assemble
from planaria.swarm.board.identity import PeerIdentity
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.config.swarm_recipe import shared_settings
from planaria.swarm.learning.learner import Learner, ratio_summary
from planaria.swarm.learning.weight_versions import WeightVersions, drawing_round, why_stale
from planaria.swarm.peer.author import rounds_to_draw
from planaria.swarm.policy.base import likelihood_digest, weights_digest
from planaria.swarm.records.lines import PEERS, SAMPLES, read_samples
from planaria.swarm.records.outcome import read_outcome
from planaria.swarm.report import swarm_report
from planaria.swarm.report.swarm_report import idle_share
from planaria.swarm.swarm_processes import LiveSwarm, own_identity
from support.swarm.swarms import (
    killed_and_restarted,
    openai_server,
    peer,
    rounds,
    timeless,
    tiny,
    together,
    until,
    weights,
)
from support.swarm.tiny_swarm import case, policy, reading

small = st.integers(0, 6)


@given(st.integers(0, 50), small, st.integers(0, 50))
def test_a_round_is_drawn_by_known_weights_of_bounded_age(number: int, ahead: int, first: int) -> None:
    version = drawing_round(max(number, first), ahead, first)
    assert first <= version <= max(number, first)
    assert not why_stale(max(number, first), version, ahead)
    assert drawing_round(number, 0, 0) == number


@given(st.integers(1, 20), small)
def test_every_round_is_drawn_once_and_before_it_is_needed(count: int, ahead: int) -> None:
    begun: set[int] = set()
    for number in range(count):
        new = rounds_to_draw(number, ahead, count, begun)
        assert not begun & {*new} and new == sorted(new) and all(n <= number + ahead for n in new)
        begun |= {*new}
        assert {*range(number, min(number + ahead + 1, count))} <= begun
    assert begun == {*range(count)}


def drift(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.125)


@given(small, st.integers(0, 5), st.integers(1, 8))
def test_the_window_holds_the_drawing_weights_of_every_round(ahead: int, first: int, count: int) -> None:
    pupil = policy()
    versions, digests = WeightVersions(pupil, ahead), {}
    for number in range(first, first + count):
        digests[number] = weights_digest(pupil.module)
        versions.record(number, digests[number])
        assert len(versions.held) <= ahead + 1 and min(versions.held) == drawing_round(number, ahead, first)
        for version in versions.held:
            with versions.load_version(version) as loaded:
                assert weights_digest(pupil.module) == digests[version] == loaded.digest
        assert weights_digest(pupil.module) == digests[number]
        assert versions.drawing_version(number).round == drawing_round(number, ahead, first)
        drift(pupil.module)


@given(st.integers(1, 4), st.integers(0, 4), st.integers(0, 6))
def test_a_window_of_another_size_keeps_the_weights(saved_ahead: int, ahead: int, number: int) -> None:
    pupil = policy()
    saved, again = WeightVersions(pupil, saved_ahead), WeightVersions(pupil, ahead)
    for n in range(number):
        saved.record(n, likelihood_digest(pupil))
        drift(pupil.module)
    before = weights_digest(pupil.module)
    again.restore(saved.earlier_weights(number))
    assert weights_digest(pupil.module) == before
    again.record(number, before)
    assert again.held.keys() == {number, *(n for n in saved.held if number - min(ahead, saved_ahead) <= n)}
    for version in again.held:
        with again.load_version(version) as loaded:
            assert loaded.digest == (before if version == number else likelihood_digest(pupil))
    assert weights_digest(pupil.module) == before


@given(st.integers(1, 4), st.integers(0, 6))
def test_a_restored_window_draws_with_the_same_weights(ahead: int, number: int) -> None:
    pupil = policy()
    versions = WeightVersions(pupil, ahead)
    for n in range(number):
        versions.record(n, likelihood_digest(pupil))
        drift(pupil.module)
    other = pupil.clone()
    again = WeightVersions(other, ahead)
    again.restore(versions.earlier_weights(number))
    assert weights_digest(other.module) == weights_digest(pupil.module)
    for one, which in ((versions, pupil), (again, other)):
        one.record(number, likelihood_digest(which))
    assert again.digests == versions.digests


def test_a_window_of_one_copies_nothing() -> None:
    versions = WeightVersions(policy(), 0)
    versions.record(3, "x")
    assert versions.digests == {3: "x"} and not versions.held[3].weights and not versions.earlier_weights(4)


def test_ratios_are_summarized_by_effective_sample_size_and_percentile() -> None:
    even = [case(read=reading([-1.0, -2.0]), logps=(-1.0, -2.0))]
    assert ratio_summary(even, 20.0) == {"ess": pytest.approx(1.0), "ratio_p99": pytest.approx(1.0)}
    one_sided = [case(read=reading([0.0] * 4), logps=(0.0, -50.0, 0.0, 0.0))]
    found = ratio_summary(one_sided, 20.0)
    assert found["ess"] == pytest.approx(0.25, abs=1e-6) and found["ratio_p99"] < np.exp(20.0)
    assert ratio_summary([case(read=reading([-1.0]))], 20.0) == {}


SECTIONS: dict[str, Any] = {"rounds": {"ahead": 2, "count": 5}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": {"ahead": -1}}, r"(?s)rounds\.ahead.*greater than or equal to 0"),
        ({"rounds": {"ahead": 1.0}}, r"(?s)rounds\.ahead"),
        ({"rounds": {"ahead": 5, "count": 5}}, r"rounds\.ahead = 5: all rounds .*such as 1"),
        *(
            (SECTIONS | {"loss": {"kind": kind}}, f"rounds.ahead = 2: loss.kind = '{kind}' has no bounded weight")
            for kind in ("grpo", "dapo", "nois", "f_nois", "sequence_mask")
        ),
        (
            SECTIONS | {"policy": {"server": "http://x", "max_staleness_rounds": 3}},
            r"policy\.max_staleness_rounds = 3: peers drop .* rounds\.ahead = 2; remove it",
        ),
        (
            {"policy": {"server": "http://x", "serving": {"overlap": False}}},
            r"policy\.serving\.overlap has no effect with rounds\.ahead = 0; remove it",
        ),
    ],
)
def test_unusable_settings_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SwarmConfig.model_validate(changes)


def test_all_peers_share_ahead_and_old_rules_stay() -> None:
    assert shared_settings(SwarmConfig.model_validate(SECTIONS))["rounds"]["ahead"] == 2
    assert "ahead" not in shared_settings(SwarmConfig())["rounds"]


def test_without_ahead_messages_and_records_are_those_of_older_versions(tmp_path: Path, pupil: Path) -> None:
    together(tiny(pupil, rounds={"count": 3}), tmp_path)
    assert all(not done.staleness and not done.stale for done in rounds(tmp_path, "p0").values())
    assert b"weights_round" not in next((tmp_path / "board").glob("peers/*/rounds/000001.json")).read_bytes()


def test_peers_stay_equal_and_repeat_from_the_seed(tmp_path: Path, pupil: Path) -> None:
    config = tiny(pupil, rounds={"count": 6, "ahead": 2}, shadow=True, evaluate={"every": 3})
    for folder in ("one", "other"):
        together(config, tmp_path / folder)
    assert timeless(tmp_path / "one", "p0") == timeless(tmp_path / "other", "p0")
    assert weights(tmp_path / "one", "p0") == weights(tmp_path / "one", "p1") == weights(tmp_path / "one", "p2")
    assert len({*weights(tmp_path / "one", "p0")}) > 2
    for number, done in rounds(tmp_path / "one", "p1").items():
        assert done.staleness == {min(number, 2): 24} and not done.stale
        assert not done.off, "layers see the weights that drew the completions"
        assert not any(counts.rejected for counts in done.layers["claims"].values())
        assert number < 3 or done.stats.get("ess", 0.0) < 1
    text = "".join(map(str, swarm_report.body(tmp_path / "one", config, read_outcome(tmp_path / "one"))))
    assert "Staleness" in text and "0: 24, 1: 24, 2: 96" in text


def test_draws_use_the_weights_before_the_last_update(tmp_path: Path, pupil: Path) -> None:
    """The first two rounds are drawn alike; a run without staleness draws the second with new weights."""
    texts = {}
    for ahead in (0, 1):
        folder = tmp_path / str(ahead)
        together(tiny(pupil, size=1, rounds={"count": 3, "ahead": ahead, "keep": 0}), folder)
        texts[ahead] = [path.read_text() for path in sorted(folder.glob("board/peers/*/rounds/*.json"))]
        published = [rounds(folder, "p0")[n].weights for n in range(3)]
        for number, text in enumerate(texts[ahead]):
            version = drawing_round(number, ahead, 0)
            assert version == 0 or published[version - 1] in text, "the fingerprint names the drawing weights"
    assert [("weights_round" in text) for text in texts[1]] == [True] * 3


def test_older_completions_are_dropped_and_counted_by_name(tmp_path: Path, pupil: Path) -> None:
    """Peer p2 declares the weights of round 0 in every round."""
    config = tiny(pupil, rounds={"count": 4, "ahead": 1})

    def stuck() -> None:
        slow = peer(config, "p2", tmp_path)
        message = slow._message
        slow._message = lambda number, draw: message(number, draw).model_copy(update={"weights_round": 0})  # type: ignore[method-assign]
        slow.run()

    together(config, tmp_path, ("p0", "p1"), stuck)
    found, who = rounds(tmp_path, "p0"), own_identity(config, "p2", tmp_path).peer
    assert [done.stale for done in found.values()] == [{}, {}, {who: 8}, {who: 8}]
    assert all(max(done.staleness) <= 1 for done in found.values())
    assert "drawn with the weights of round 0, 2 rounds old; rounds.ahead = 1" in found[2].rejected_unread[who]
    layers = {line.layer for line in read_samples(tmp_path / PEERS / "p0" / SAMPLES) if line.round == 3}
    assert "staleness" in layers and weights(tmp_path, "p0") == weights(tmp_path, "p1")


def test_false_claims_about_old_weights_are_refused(tmp_path: Path, pupil: Path) -> None:
    """Peer p2 publishes its log-probabilities under the newest weights, and names those that drew its completions."""
    config = tiny(pupil, rounds={"count": 5, "ahead": 2}, optim={"lr": 0.02})

    def lying() -> None:
        byzantine = peer(config, "p2", tmp_path)
        message = byzantine._message

        def changed(number: int, draw: Any) -> Any:
            written = [
                [
                    replace(r, logps=tuple(r.reading.logps.tolist()))
                    for r in byzantine._read_with_current_weights(rollouts)
                ]
                for rollouts in draw.completions
            ]
            return message(number, replace(draw, completions=written))

        byzantine._message = changed  # type: ignore[method-assign]
        byzantine.run()

    together(config, tmp_path, ("p0", "p1"), lying)
    found, byzantine = rounds(tmp_path, "p0"), own_identity(config, "p2", tmp_path).peer
    assert all(found[0].layers["claims"][who].rejected == 0 for who in found[0].sent)
    late = [found[number].layers["claims"] for number in (3, 4)]
    assert all(layer[byzantine].rejected > 0 for layer in late)
    assert all(layer[who].rejected == 0 for layer in late for who in layer if who != byzantine)


def test_a_killed_peer_returns_with_its_versions(tmp_path: Path, pupil: Path) -> None:
    """Processes: p1 is killed in round 3 or later, restarted, and all weights equal those of an undisturbed run."""
    config = tiny(pupil, size=2, rounds={"count": 9, "keep": 2, "ahead": 2}, evaluate={"problems": 2})
    together(config, tmp_path / "calm")
    killed_and_restarted(LiveSwarm(config, tmp_path / "hit"), after_round=3)
    for name in ("p0", "p1"):
        assert weights(tmp_path / "hit", name) == weights(tmp_path / "calm", name), name


def test_a_late_peer_joins_while_others_draw_ahead(tmp_path: Path, pupil: Path) -> None:
    config = tiny(pupil, rounds={"count": 10, "ahead": 1})

    def join() -> None:
        until(lambda: len(rounds(tmp_path, "p0")) >= 3)
        late = assemble(config, "late", tmp_path, str(tmp_path / "board"), PeerIdentity.generate(), late=True)
        late.run()

    (tmp_path / PEERS / "p0").mkdir(parents=True)
    together(config, tmp_path, beside=join)
    first = min(rounds(tmp_path, "late"))
    assert first > 0 and max(rounds(tmp_path, "late")) == 9
    assert all(max(done.staleness) <= 1 and not done.stale for done in rounds(tmp_path, "p0").values())
    assert weights(tmp_path, "p0") == weights(tmp_path, "p1") == weights(tmp_path, "p2")


@pytest.fixture(scope="module")
def address(pupil: Path) -> Iterator[str]:
    with openai_server(pupil) as url:
        yield url


@pytest.mark.parametrize("habit", ["weights", "fixed"])
def test_overlap_changes_nothing_but_time(tmp_path: Path, pupil: Path, address: str, habit: str) -> None:
    """A server that draws beside the learner; one that loads no weights is replaced by the policy's own draws."""
    for name, overlap in (("beside", True), ("in turn", False)):
        served = {"server": f"{address}/{habit}-{overlap}+{habit}/v1", "serving": {"overlap": overlap}}
        plain = tiny(pupil, size=1, rounds={"count": 5, "ahead": 2, "keep": 0}).model_dump(mode="json")
        config = SwarmConfig.model_validate({**plain, "policy": plain["policy"] | served})
        assert config.draws_during_learning == overlap
        together(config, tmp_path / name)
    assert timeless(tmp_path / "beside", "p0") == timeless(tmp_path / "in turn", "p0")
    found = rounds(tmp_path / "beside", "p0")
    assert len({done.weights for done in found.values()}) > 2
    drew = [bool(done.serving and not done.serving.local) for done in found.values()]
    assert drew == ([True] * 5 if habit == "weights" else [True] * 3 + [False] * 2)
    assert [done.staleness for done in found.values()] == [{min(n, 2): 24} for n in range(5)]


@pytest.mark.slow
def test_overlap_halves_the_idle_share(
    tmp_path: Path, pupil: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server waits 1 s before it draws, and the learner 2 s before it learns."""
    learn = Learner.learn

    def throttled(self: Learner, *given: Any) -> Any:
        time.sleep(2.0)
        return learn(self, *given)

    monkeypatch.setattr(Learner, "learn", throttled)
    idle = []
    for ahead in (0, 1):
        served = {"server": f"{address}/slow-{ahead}+weights+slow/v1"}
        plain = tiny(pupil, size=1, rounds={"count": 6, "ahead": ahead, "keep": 0}).model_dump(mode="json")
        together(SwarmConfig.model_validate({**plain, "policy": plain["policy"] | served}), tmp_path / str(ahead))
        found = rounds(tmp_path / str(ahead), "p0")
        assert all(done.serving and not done.serving.local for done in found.values())
        idle.append(idle_share([*found.values()]))
    assert idle[1] <= idle[0] / 2, idle
