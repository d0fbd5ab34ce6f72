"""Saved states: restarts that continue bitwise, and export of a peer's policy."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from planaria import cli
from planaria.common.digests import FILE
from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig
from planaria.models.llama_stages import Llama
from planaria.models.state import StageState
from planaria.runtime.checkpoint.stage_file import stage_file, write_stage
from planaria.runtime.preparation import run_folders
from planaria.swarm.board.message import Rollouts
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.policy.base import weights_fingerprint
from planaria.swarm.policy.policies import open_policy
from planaria.swarm.records.lines import LOG, PEERS, SAMPLES, Evaluated, PeerStarted, read_samples
from planaria.swarm.records.outcome import read_outcome
from planaria.swarm.records.saved_state import load_state, save_state, saved_rounds
from planaria.swarm.swarm_processes import own_identity
from support.command_line import refused
from support.swarm.swarms import ended, log, peer, processes, rounds, threads, tiny, together, until, weights


def thread_of(
    config: SwarmConfig, name: str, folder: Path, rounds_only: int | None = None, published: bool = False
) -> Callable[[], None]:
    """A peer's life, or the part of it before it dies in a round, with its completions ``published`` or not."""

    class Death(Exception):
        pass

    def live() -> None:
        mortal = peer(config, name, folder)
        publish = mortal.board.publish

        def last_words(rollouts: Rollouts) -> None:
            if rollouts.round != rounds_only or published:
                publish(rollouts)
            if rollouts.round == rounds_only:
                raise Death

        mortal.board.publish = last_words  # type: ignore[method-assign]
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
    assert len([record for record in log(tmp_path, "p1") if isinstance(record, PeerStarted)]) == 2
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
    [({}, True), ({"options": {"threshold": 0.5}, "max_median_rejection": 0.3, "window": 3}, False)],
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
    with pytest.raises(UserError, match="records of another run; use another --name"):
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
        publish = sleeper.board.publish

        def tardy(rollouts: Rollouts) -> None:
            if rollouts.round == 1:
                until(lambda: (tmp_path / "board" / "peers" / first / "closings" / "000001.json").is_file())
            publish(rollouts)

        sleeper.board.publish = tardy  # type: ignore[method-assign]
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
        save_state(folder, self.model, self.optimizer, round)

    def load(self, folder: Path, round: int = 1) -> None:
        load_state(folder, self.model, self.optimizer, round)


@pytest.mark.parametrize("updates", [0, 3])
def test_training_after_a_restore_is_bitwise_equal(tmp_path: Path, updates: int) -> None:
    first, second = Peer(1), Peer(2)
    for _ in range(updates):
        first.update()
    first.save(tmp_path, round=7)
    second.update()
    second.load(tmp_path, round=7)
    second.generator.set_state(first.generator.get_state())
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
    Peer(3).load(tmp_path, round=2)
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(UserError):
        Peer(3).load(tmp_path, round=1)


def test_a_state_of_another_policy_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    peer = Peer(1)
    peer.save(tmp_path, round=1)
    wider = Llama(CONFIG.model_copy(update={"vocab": 21, "tied": False}), seed=1)
    before = weights_fingerprint(wider)
    for model in (wider, nn.Linear(2, 2)):
        with pytest.raises(UserError, match="resume with the policy that was saved"):
            load_state(tmp_path, model, torch.optim.AdamW(model.parameters()), 1)
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


@pytest.fixture(scope="module")
def done(pupil: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five rounds; the states after the last three savings are kept, the run's end among them."""
    folder = tmp_path_factory.mktemp("learned")
    config = tiny(pupil, size=2, rounds={"count": 5, "keep": 1, "kept": 3, "prompts": 4, "group": 4})
    run_folders.write_config(folder, config)
    together(config, folder)
    return folder


@pytest.mark.parametrize("round", [None, 3])
def test_an_exported_policy_has_the_recorded_weights(done: Path, tmp_path: Path, round: int | None) -> None:
    to = tmp_path / "out"
    arguments = [] if round is None else ["--round", str(round)]
    assert cli.run(["export", str(done), "--peer", "p1", "--to", str(to), *arguments]) == 0
    found = weights_fingerprint(open_policy(str(to)).module)
    noted = rounds(done, "p1")
    assert found == noted[(round or 5) - 1].weights != noted[0].weights


def test_the_last_round_is_always_saved(pupil: Path, tmp_path: Path) -> None:
    together(tiny(pupil, size=2, rounds={"count": 3, "keep": 10, "prompts": 2, "group": 4}), tmp_path)
    assert saved_rounds(tmp_path / PEERS / "p0") == [3]


def test_the_configured_number_of_states_is_kept(done: Path) -> None:
    assert saved_rounds(done / PEERS / "p0") == saved_rounds(done / PEERS / "p1") == [3, 4, 5]


def test_transformers_matches_the_exported_policy(done: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    cli.run(["export", str(done), "--peer", "p0", "--to", str(tmp_path / "out")])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ours, tokens = open_policy(str(tmp_path / "out")), torch.arange(40, 60)[None]
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours.logits(tokens), atol=1e-4, rtol=1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("12+34=")["input_ids"] == ours.encode("12+34=")


def test_invalid_exports_are_refused_in_one_line(
    done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert "pass --peer" in refused(capsys, "export", done, "--to", out)
    assert "did you mean 'p1'?" in refused(capsys, "export", done, "--to", out, "--peer", "p7")
    assert "saved after 3, 4, 5" in refused(capsys, "export", done, "--to", out, "--peer", "p0", "--round", 2)
    assert "not a swarm's run" in refused(capsys, "export", tmp_path, "--to", out, "--peer", "p0")
    out.mkdir()
    (out / "x").touch()
    assert "exists and is not an empty folder" in refused(capsys, "export", done, "--to", out, "--peer", "p0")
    state = done / PEERS / "p1" / "state-000004" / "peer" / "stage-0000.safetensors"
    whole = state.read_bytes()
    state.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "cannot be read" in refused(capsys, "export", done, "--to", tmp_path / "b", "--peer", "p1", "--round", 4)
    state.write_bytes(whole)
    assert (done / FILE).is_file()
