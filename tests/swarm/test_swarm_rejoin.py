"""Killed, late and absent peers, and their saved states."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from swarms import ended, log, peer, processes, rounds, threads, tiny, together, until, weights
from torch import nn

from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig
from planaria.models.llama_stages import Llama
from planaria.models.state import StageState
from planaria.runtime.checkpoint.stage_file import stage_file, write_stage
from planaria.swarm.board.message import Rollouts
from planaria.swarm.config import SwarmConfig
from planaria.swarm.policy.base import weights_fingerprint
from planaria.swarm.records.lines import LOG, PEERS, SAMPLES, Evaluated, Started, read_samples
from planaria.swarm.records.outcome import read_outcome
from planaria.swarm.records.saved_state import LearnerProgress, load_state, save_state
from planaria.swarm.swarm_processes import own_identity


def thread_of(
    config: SwarmConfig, name: str, folder: Path, rounds_only: int | None = None, published: bool = False
) -> Callable[[], None]:
    """A peer's life, or the part of it before it dies in a round, with its completions ``published`` or not."""

    class Death(Exception):
        pass

    def live() -> None:
        mortal = peer(config, name, folder)
        publish = mortal.quorum.publish

        def last_words(rollouts: Rollouts) -> None:
            if rollouts.round != rounds_only or published:
                publish(rollouts)
            if rollouts.round == rounds_only:
                raise Death

        mortal.quorum.publish = last_words  # type: ignore[method-assign]
        with contextlib.suppress(Death):
            mortal.run()

    return live


@pytest.mark.parametrize("keep", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_and_restarted_peer_ends_equal(tmp_path: Path, pupil: Path, keep: int) -> None:
    config = tiny(pupil, rounds={"count": 8, "keep": keep}, shadow=True)
    with processes(config, tmp_path) as swarm:
        for name in ("p0", "p1", "p2"):
            swarm.start(name)
        until(lambda: len(rounds(tmp_path, "p1")) >= 3)
        os.kill(swarm.processes["p1"].pid or 0, signal.SIGKILL)
        swarm.processes["p1"].join()
        before = len(rounds(tmp_path, "p1"))
        swarm.start("p1")
        assert ended(swarm) == {"p0": 0, "p1": 0, "p2": 0}
    assert before < 8
    assert weights(tmp_path, "p0") == weights(tmp_path, "p1") == weights(tmp_path, "p2")
    assert len({*weights(tmp_path, "p0")}) > 1
    assert len([record for record in log(tmp_path, "p1") if isinstance(record, Started)]) == 2
    alone = [[r.alone for r in log(tmp_path, name) if isinstance(r, Evaluated)] for name in ("p0", "p1")]
    assert len(alone[0]) == len(alone[1]) == 2
    assert read_outcome(tmp_path).peers[1].finished


def test_a_repeated_round_counts_once(tmp_path: Path, pupil: Path) -> None:
    config = tiny(pupil, size=2, rounds={"count": 3, "keep": 2, "kept": 2})
    together(config, tmp_path)
    shutil.rmtree(tmp_path / PEERS / "p0" / "state-000003")
    first = read_outcome(tmp_path)
    samples = len(list(read_samples(tmp_path / PEERS / "p0" / SAMPLES)))
    peer(config, "p0", tmp_path).run()
    again = read_outcome(tmp_path)
    lines = (tmp_path / PEERS / "p0" / LOG).read_text().splitlines()
    assert sum('"kind":"round"' in line for line in lines) == 3 + 1
    assert again.rounds == first.rounds and again.layers == first.layers
    assert [p.points for p in again.peers] == [p.points for p in first.peers]
    assert [p.weights for p in again.peers] == [p.weights for p in first.peers]
    assert len(list(read_samples(tmp_path / PEERS / "p0" / SAMPLES))) == samples


@pytest.mark.slow
@pytest.mark.parametrize(
    ("defence", "shadow"),
    [({}, True), ({"options": {"threshold": 0.5}, "max_median_refusal": 0.3, "window": 3}, False)],
)
def test_a_saved_state_is_sufficient(tmp_path: Path, pupil: Path, defence: dict[str, float], shadow: bool) -> None:
    turns = {"count": 5, "keep": 4, "kept": 2}
    config = tiny(pupil, size=2, shadow=shadow, defence=defence, rounds=turns, evaluate={"every": 5})
    together(config, tmp_path)
    shutil.rmtree(tmp_path / PEERS / "p0" / "state-000005")
    once = rounds(tmp_path, "p0")[4], log(tmp_path, "p0")[-2]
    peer(config, "p0", tmp_path).run()
    again = rounds(tmp_path, "p0")[4], log(tmp_path, "p0")[-2]
    assert isinstance(once[1], Evaluated) and isinstance(again[1], Evaluated)
    same = {"time": 0.0}
    assert once[1].model_copy(update=same) == again[1].model_copy(update=same)
    same = {"time": 0.0, "seconds": {}}
    assert once[0].model_copy(update=same) == again[0].model_copy(update=same)


def test_one_state_is_kept_and_damage_is_reported(tmp_path: Path, pupil: Path) -> None:
    config = tiny(pupil, size=2, rounds={"count": 5, "keep": 2})
    together(config, tmp_path)
    own = tmp_path / PEERS / "p0"
    (state,) = own.glob("state-*")
    assert state.name == "state-000005"
    (own / "state-000006.unfinished").mkdir()
    (state / "memory.json").write_text("{}")
    with pytest.raises(UserError, match=r"state-000005 cannot be resumed .*; remove it"):
        peer(config, "p0", tmp_path).run()


def test_records_of_another_run_are_refused(tmp_path: Path, pupil: Path) -> None:
    config = tiny(pupil, size=1, rounds={"count": 1})
    together(config, tmp_path)
    with pytest.raises(UserError, match="records of another run; give another --name"):
        peer(config.model_copy(update={"board": str(tmp_path / "elsewhere")}), "p0", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("keep", "published"), [(0, False), pytest.param(2, False, marks=pytest.mark.slow), (2, True)])
def test_a_peer_returning_after_its_timeout_ends_equal(tmp_path: Path, pupil: Path, keep: int, published: bool) -> None:
    config = tiny(pupil, rounds={"count": 12, "timeout_s": 3.0, "keep": keep})
    first = [thread_of(config, name, tmp_path) for name in ("p0", "p1")]
    with threads(*first, thread_of(config, "p2", tmp_path, 3, published)):
        until(lambda: len(rounds(tmp_path, "p0")) >= 5)
        peer(config, "p2", tmp_path).run()
    assert weights(tmp_path, "p0") == weights(tmp_path, "p1") == weights(tmp_path, "p2")
    assert len({*weights(tmp_path, "p0")}) > 1
    assert bool(rounds(tmp_path, "p0")[3].missing) != published and rounds(tmp_path, "p0")[4].missing


@pytest.mark.slow
def test_a_peer_returning_after_the_end_catches_up(tmp_path: Path, pupil: Path) -> None:
    config = tiny(pupil, rounds={"timeout_s": 1.0})
    with threads(*[thread_of(config, name, tmp_path) for name in ("p0", "p1")]):
        thread_of(config, "p2", tmp_path, rounds_only=2)()
    peer(config, "p2", tmp_path).run()
    assert weights(tmp_path, "p0") == weights(tmp_path, "p2")


@pytest.mark.slow
def test_no_peer_learns_from_a_late_message(tmp_path: Path, pupil: Path) -> None:
    """Its sender included, who finds out that the round was closed without it."""
    config = tiny(pupil, rounds={"count": 4, "timeout_s": 2.0})

    first = own_identity(config, "p0", tmp_path).peer

    def late() -> None:
        sleeper = peer(config, "p2", tmp_path)
        publish = sleeper.quorum.publish

        def tardy(rollouts: Rollouts) -> None:
            if rollouts.round == 1:
                until(lambda: (tmp_path / "board" / "peers" / first / "closings" / "000001.json").is_file())
            publish(rollouts)

        sleeper.quorum.publish = tardy  # type: ignore[method-assign]
        sleeper.run()

    with threads(*[thread_of(config, name, tmp_path) for name in ("p0", "p1")], late):
        pass
    assert weights(tmp_path, "p0") == weights(tmp_path, "p1") == weights(tmp_path, "p2")
    assert all(rounds(tmp_path, name)[1].missing for name in ("p0", "p1", "p2"))


CONFIG = ModelConfig(vocab=20, dim=8, layers=1, heads=2, hidden=12, context=8, tied=False)


class Peer:
    """A model with frozen norms, its optimizer, and the generator that its batches come from."""

    def __init__(self, seed: int) -> None:
        self.model = Llama(CONFIG, seed=seed)
        for parameter in self.model.parameters():
            parameter.requires_grad_(parameter.dim() > 1)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.01, fused=True)
        self.generator = torch.Generator().manual_seed(seed)

    def update(self) -> None:
        tokens = torch.randint(0, 20, (2, 8), generator=self.generator)
        self.optimizer.zero_grad()
        self.model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        self.optimizer.step()

    def save(self, folder: Path, round: int) -> None:
        save_state(folder, self.model, self.optimizer, self.generator, round)

    def load(self, folder: Path, round: int = 1) -> LearnerProgress:
        return load_state(folder, self.model, self.optimizer, self.generator, round)


@pytest.mark.parametrize("updates", [0, 3])
def test_training_after_a_restore_is_bitwise_equal(tmp_path: Path, updates: int) -> None:
    first, second = Peer(1), Peer(2)
    for _ in range(updates):
        first.update()
    first.save(tmp_path, round=7)
    second.update()
    assert second.load(tmp_path, round=7) == LearnerProgress(round=7, updates=updates)
    for _ in range(2):
        first.update()
        second.update()
    assert weights_fingerprint(first.model) == weights_fingerprint(second.model)


def test_only_trained_parameters_are_saved(tmp_path: Path) -> None:
    first, second = Peer(1), Peer(1)
    with torch.no_grad():
        second.model.ends.norm.weight.fill_(3.0)
    first.save(tmp_path, round=1)
    second.load(tmp_path)
    assert (second.model.ends.norm.weight == 3.0).all()


def test_a_newer_state_replaces_the_older(tmp_path: Path) -> None:
    peer = Peer(1)
    peer.save(tmp_path, round=1)
    peer.update()
    peer.save(tmp_path, round=2)
    assert Peer(3).load(tmp_path, round=2) == LearnerProgress(2, 1) and len(list(tmp_path.iterdir())) == 1


def test_a_state_of_another_policy_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    peer = Peer(1)
    peer.save(tmp_path, round=1)
    wider = Llama(CONFIG.model_copy(update={"vocab": 21, "tied": False}), seed=1)
    before = weights_fingerprint(wider)
    for model in (wider, nn.Linear(2, 2)):
        with pytest.raises(UserError, match="resume with the policy that was saved"):
            load_state(tmp_path, model, torch.optim.AdamW(model.parameters()), torch.Generator(), 1)
    assert weights_fingerprint(wider) == before


def test_files_that_are_no_peer_state_are_refused(tmp_path: Path) -> None:
    peer = Peer(1)
    with pytest.raises(UserError, match="missing"):
        peer.load(tmp_path)
    weights = {name: p.detach() for name, p in peer.model.named_parameters() if p.requires_grad}
    write_stage(tmp_path, 0, 1, StageState(weights))
    with pytest.raises(UserError, match="holds a stage, not a policy"):
        peer.load(tmp_path)
    file = stage_file(tmp_path, 0)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UserError, match="damaged"):
        peer.load(tmp_path)
