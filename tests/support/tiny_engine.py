"""A recipe whose model trains in milliseconds on generated text, and its reference engine."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import planaria
from planaria.config.schema import RunConfig
from planaria.data.stream import Stream
from planaria.lab.reference.engine import ReferenceEngine
from planaria.models.packing import pack
from planaria.models.state import StageState
from planaria.recovery.chain import ChainPlan

Recipe = Callable[..., RunConfig]
"""a tiny recipe with single fields of its sections changed"""


def config_in(folder: Path, **sections: dict[str, Any]) -> RunConfig:
    """Return a recipe whose text is in ``folder``; ``sections`` change single fields."""
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


def train_stream(config: RunConfig) -> Stream:
    return planaria.streams(config)[0]


def engine_of(config: RunConfig) -> ReferenceEngine:
    return ReferenceEngine(config, *planaria.streams(config))


def losses(engine: ReferenceEngine, steps: int) -> list[float]:
    return [engine.train_step().loss for _ in range(steps)]


def lose(engine: ReferenceEngine, *nodes: int) -> ChainPlan:
    """Overwrite the weights of these nodes with NaN, then lose the nodes."""
    for node in nodes:
        for parameter in engine.runners[node].parameters.values():
            parameter.detach().fill_(math.nan)
    return engine.lose(nodes)


def whole(engine: ReferenceEngine) -> dict[int, bytes]:
    """Return node → its weights, moments, clocks and norms as bytes."""
    return {node: pack(runner.state().trained).numpy().tobytes() for node, runner in engine.runners.items()}


def raw(state: StageState) -> tuple[Any, ...]:
    """Return a stage's weights and moments as bytes, and its clocks, scale and norms."""
    weights = {name: tensor.numpy().tobytes() for name, tensor in state.weights.items()}
    moments = {name: [t.numpy().tobytes() for t in pair.values()] for name, pair in state.moments.items()}
    return weights, moments, state.clocks, state.lr_scale, state.grad_norm, state.clipped_norm
