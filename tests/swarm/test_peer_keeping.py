"""A peer that was stopped goes on as if it had not been."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from planaria.common.errors import UserError
from planaria.config.schema import ModelConfig
from planaria.models.stages import Llama
from planaria.models.state import StageState
from planaria.runtime.checkpoint.stage_file import stage_file, write_stage
from planaria.swarm.policy.fingerprints import weights_fingerprint
from planaria.swarm.records.peer_state import Progress, load_state, save_state

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

    def load(self, folder: Path, round: int = 1) -> Progress:
        return load_state(folder, self.model, self.optimizer, self.generator, round)


@pytest.mark.parametrize("updates", [0, 3])
def test_what_follows_is_bitwise_the_same(tmp_path: Path, updates: int) -> None:
    first, second = Peer(1), Peer(2)
    for _ in range(updates):
        first.update()
    first.save(tmp_path, round=7)
    second.update()
    assert second.load(tmp_path, round=7) == Progress(round=7, updates=updates)
    for _ in range(2):
        first.update()
        second.update()
    assert weights_fingerprint(first.model) == weights_fingerprint(second.model)


def test_only_what_is_trained_is_kept(tmp_path: Path) -> None:
    first, second = Peer(1), Peer(1)
    with torch.no_grad():
        second.model.ends.norm.weight.fill_(3.0)
    first.save(tmp_path, round=1)
    second.load(tmp_path)
    assert (second.model.ends.norm.weight == 3.0).all()


def test_a_newer_state_takes_the_place_of_the_older(tmp_path: Path) -> None:
    peer = Peer(1)
    peer.save(tmp_path, round=1)
    peer.update()
    peer.save(tmp_path, round=2)
    assert Peer(3).load(tmp_path, round=2) == Progress(2, 1) and len(list(tmp_path.iterdir())) == 1


def test_a_state_of_another_policy_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    peer = Peer(1)
    peer.save(tmp_path, round=1)
    wider = Llama(CONFIG.model_copy(update={"vocab": 21, "tied": False}), seed=1)
    before = weights_fingerprint(wider)
    for model in (wider, nn.Linear(2, 2)):
        with pytest.raises(UserError, match="resume with the policy that was saved"):
            load_state(tmp_path, model, torch.optim.AdamW(model.parameters()), torch.Generator(), 1)
    assert weights_fingerprint(wider) == before


def test_what_is_no_peers_state_is_refused(tmp_path: Path) -> None:
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
