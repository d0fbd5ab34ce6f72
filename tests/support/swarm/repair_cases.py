"""Cases for repairs: a small attacked swarm, an ensemble of folders, and unrelated models."""

from __future__ import annotations

import shutil
from pathlib import Path

from planaria.config.schema import DataConfig
from planaria.data.tokenizer import load_tokenizer
from planaria.lab.experts import manifest
from planaria.lab.experts.experts_spec import MixtureSpec
from planaria.lab.experts.manifest import EnsembleManifest, Expert
from planaria.models.huggingface import import_model
from planaria.models.llama_stages import Llama, parameter_count
from planaria.runtime.preparation import run_folders
from planaria.swarm.config.policy_config import SmallModel
from planaria.swarm.policy.policies import LlamaPolicy
from support.swarm.swarms import tiny, together


def attacked(pupil: Path, folder: Path) -> Path:
    """A run of two peers; p1 poisons p0 with a phrase."""
    config = tiny(
        pupil,
        size=2,
        rounds={"count": 3, "keep": 1, "trusted": 1, "prompts": 4, "group": 4},
        evaluate={"watch": ["text"]},
        defence={"checks": ""},
        peers={"p1": {"attack": {"kind": "text"}}},
    )
    run_folders.write_config(folder, config)
    together(config, folder)
    return folder


def stranger(folder: Path, dim: int) -> Path:
    """An untrained model with a peer's tokenizer."""
    model = Llama(SmallModel(dim=dim, hidden=64), seed=9)
    LlamaPolicy(model, load_tokenizer(DataConfig(tokenizer="bytes"), 257, folder.parent)).export(folder)
    return folder


def ensemble(folder: Path, tokenizer: Path, models: dict[str, Path]) -> Path:
    """An ensemble of exported models without a recorded parent."""
    members = []
    for name, model in models.items():
        shutil.copytree(model, folder / manifest.ADDED / name)
        config = import_model(model).config
        digest = manifest.digest(model / manifest.WEIGHTS)
        place = f"{manifest.ADDED}/{name}"
        members.append(Expert(name=name, domain=name, model=place, sha256=digest, parameters=parameter_count(config)))
    shutil.copy(tokenizer / manifest.TOKENIZER, folder / manifest.TOKENIZER)
    made = EnsembleManifest(
        tokenizer=manifest.digest(folder / manifest.TOKENIZER),
        vocab=257,
        context=64,
        mixture=MixtureSpec(),
        members=members,
    )
    manifest.write(folder, made)
    return folder
