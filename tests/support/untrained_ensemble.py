"""A finished ensemble without training: a random parent, perturbed children, and distinct texts."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Mapping
from pathlib import Path

import torch

from planaria.config.schema import DataConfig, ModelConfig
from planaria.data.tokenizer import load_tokenizer
from planaria.lab.experts import manifest
from planaria.lab.experts.domains import HELD_OUT, TEST, TRAINED
from planaria.lab.experts.experts_spec import MixtureSpec
from planaria.lab.experts.manifest import EnsembleManifest, Expert
from planaria.models.huggingface import export_model
from planaria.models.llama_stages import Llama, parameter_count

SHAPE = ModelConfig(vocab=257, dim=16, layers=2, heads=2, hidden=24, context=32, init_std=0.3)
LETTERS = {"digits": string.digits, "lower": string.ascii_lowercase, "upper": string.ascii_uppercase}
"""Domain → characters of its texts."""
END = 256


def text(domain: str, length: int = 4000, part: str = TEST) -> str:
    draw = random.Random(f"{part} of {domain}")
    return "".join(draw.choice(LETTERS[domain]) for _ in range(length))


def child(parent: Llama, seed: int, far: float = 0.05) -> Llama:
    """Return the parent with noise on every parameter."""
    draw = torch.Generator().manual_seed(seed)
    made = Llama(parent.config, initialise=False)
    state = parent.global_state()
    made.load_global_state({name: t + far * torch.randn(t.shape, generator=draw) for name, t in state.items()})
    return made.eval()


def write_ensemble(folder: Path, mixture: Mapping[str, object] | None = None, names: tuple[str, ...] = ()) -> Path:
    """Write an ensemble of these domains, by default the first two; its parent is ``ensemble/parent/model``."""
    names, parent, run = names or ("digits", "lower"), Llama(SHAPE, seed=1).eval(), folder / "ensemble"
    run.mkdir(parents=True)
    tokenizer = run / manifest.TOKENIZER
    load_tokenizer(DataConfig(tokenizer="bytes"), SHAPE.vocab, folder).save(tokenizer)
    export_model(parent, run / "parent" / "model", tokenizer, END)
    members = []
    for number, name in enumerate(names):
        place = run / name / "model"
        export_model(child(parent, number), place, tokenizer, END)
        members.append(
            Expert(
                name=f"{name}-expert", domain=name, model=f"{name}/model", parent="parent/model",
                sha256=manifest.digest(place / manifest.WEIGHTS), parameters=parameter_count(SHAPE),
            )
        )  # fmt: skip
        for part in (TRAINED, HELD_OUT, TEST):
            (run / part).mkdir(exist_ok=True)
            (run / part / f"{name}.jsonl").write_text(json.dumps({"text": text(name, part=part)}) + "\n")
    manifest.write(
        run,
        EnsembleManifest(
            tokenizer=manifest.digest(tokenizer), vocab=SHAPE.vocab, context=SHAPE.context,
            mixture=MixtureSpec.model_validate(mixture or {}), members=members,
        ),
    )  # fmt: skip
    return run
