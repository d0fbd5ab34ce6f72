"""A model that trains in milliseconds, on a text that is made here."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from planaria.config.schema import RunConfig
from planaria.data.shards import Dataset, prepare
from planaria.data.stream import Stream
from planaria.lab.inline.engine import InlineEngine


def config_in(folder: Path, **sections: dict[str, Any]) -> RunConfig:
    """A recipe whose text lies in ``folder``; ``sections`` change single fields."""
    corpus = folder / "corpus.txt"
    if not corpus.exists():
        rng = random.Random(34107)
        words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 7))) for _ in range(60)]
        corpus.write_text(" ".join(rng.choices(words, k=6000)))
    plain: dict[str, Any] = {
        "seed": 3,
        "model": {"vocab": 257, "dim": 32, "layers": 4, "heads": 2, "kv_heads": 1, "hidden": 64, "context": 16},
        "pipeline": {"stages": 4, "microbatches": 4, "microbatch_size": 2},
        "data": {"source": str(corpus), "tokenizer": "bytes", "validation": 0.1, "cache": str(folder / "cache")},
        "optim": {"lr": 5e-3},
        "train": {"steps": 10, "eval_every": 0, "eval_microbatches": 8},
        "checkpoint": {"every": 0},
    }
    for name, fields in sections.items():
        plain[name] = {**plain.get(name, {}), **fields}
    return RunConfig.model_validate(plain)


def dataset_of(config: RunConfig) -> Dataset:
    return prepare(config.data, config.model.vocab)


def engine_of(config: RunConfig) -> InlineEngine:
    dataset = dataset_of(config)
    train, validation = (Stream(dataset, s, config.model.context, config.seed) for s in ("train", "validation"))
    return InlineEngine(config, train, validation)


def losses(engine: InlineEngine, steps: int) -> list[float]:
    return [engine.train_step().loss for _ in range(steps)]
