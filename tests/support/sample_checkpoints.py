"""Checkpoints with random states."""

from __future__ import annotations

import hashlib
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from planaria.config.schema import RunConfig
from planaria.control.facts.events import ReplicaPosition
from planaria.exchange.registry import make_exchange
from planaria.models.families import build_stage
from planaria.models.state import StageState
from planaria.runtime.checkpoint.stage_file import write_stage
from planaria.runtime.checkpoint.store import CheckpointManifest, CheckpointStore, SealedCheckpoint, stage_name

STEP = 30

KINDS: dict[str, dict[str, Any]] = {
    "allreduce": {"bits": 8},
    "noloco": {"every": 4, "bits": 8},
    "diloco": {"every": 4, "bits": 8},
}

OPTIONS: dict[str, dict[str, Any]] = {**KINDS, "pair_mean": {"every": 4}}


def config(
    stages: int, replicas: int = 1, kind: str = "noloco", tied: bool = True, ends_layers: int = 0, **model: Any
) -> RunConfig:
    sizes = {"vocab": 11, "dim": 8, "layers": 12, "heads": 4, "kv_heads": 2, "hidden": 6, "context": 4}
    return RunConfig.model_validate(
        {
            "engine": "inline",
            "model": {**sizes, "tied": tied, "ends_layers": ends_layers, **model},
            "pipeline": {"stages": stages},
            "exchange": {"replicas": replicas, "kind": kind, "options": OPTIONS[kind]},
        }
    )


@cache
def drawn(what: str, name: str, replica: int, shape: tuple[int, ...]) -> Tensor:
    seed = hashlib.sha256(f"{what} {name} {replica}".encode()).digest()[:8]
    return torch.randn(shape, generator=torch.Generator().manual_seed(int.from_bytes(seed, "little")))


def named(given: RunConfig, stage: int, local: str) -> str:
    """Return a parameter's name with layers counted through the whole model."""
    if not local.startswith("layers."):
        return local
    _, number, rest = local.split(".", 2)
    own = given.model.ends_layers
    before = own + (stage - 1) * ((given.model.layers - own) // given.pipeline.stages) if stage else 0
    return f"layer {before + int(number)} {rest}"


def clock(name: str, replica: int) -> int:
    return 17 + replica if name.startswith("layer 5 ") else 30


def scale(name: str) -> float:
    return 1.1 if name.startswith(("layer 5 ", "layer 4 ")) else 1.0


def atom(given: RunConfig, name: str, replica: int, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the state of a parameter. All-reduced replicas are equal except for their own outer parts."""
    alike = 0 if given.exchange.kind == "allreduce" else replica
    parts = make_exchange(given.exchange).parts if given.exchange.replicas > 1 else {}
    outer = {p: drawn(p, name, alike if sharing == "shared" else replica, shape) for p, sharing in parts.items()}
    w, first, second = (drawn(what, name, alike, shape) for what in ("weight", "first", "second"))
    return {
        "weight": w,
        "moments": {"exp_avg": first, "exp_avg_sq": second.square()},
        "clock": clock(name, alike),
        "outer": outer,
    }


def shapes(given: RunConfig, stage: int) -> dict[str, tuple[int, ...]]:
    built = build_stage(given.model, given.pipeline.stages, stage, 0, "meta")
    return {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}


def state(given: RunConfig, stage: int, replica: int) -> StageState:
    atoms = {n: atom(given, named(given, stage, n), replica, s) for n, s in shapes(given, stage).items()}
    scales = {n: scale(named(given, stage, n)) for n in atoms}
    outer = {f"{part}/{n}": t for n, a in atoms.items() for part, t in a["outer"].items()}
    return StageState(
        {n: a["weight"] for n, a in atoms.items()},
        {n: a["moments"] for n, a in atoms.items()},
        {n: a["clock"] for n, a in atoms.items()},
        scales[next(iter(scales))],
        3.0,
        4.0,
        {"cpu": torch.Generator().manual_seed(stage).get_state()},
        outer | ({"rounds": torch.tensor(7)} if outer else {}),
        {n: s for n, s in scales.items() if s != scales[next(iter(scales))]},
    )


States = dict[tuple[int, int], StageState]
"""(replica, stage) → state"""


def states_of(given: RunConfig) -> States:
    both = product(range(given.exchange.replicas), range(given.pipeline.stages + 1))
    return {(replica, stage): state(given, stage, replica) for replica, stage in both}


def gather(
    store: CheckpointStore, given: RunConfig, states: States | None = None, step: int = STEP
) -> CheckpointManifest:
    """Write a checkpoint's stages; return the manifest with which to seal it."""
    several, count = given.exchange.replicas, given.pipeline.stages
    digests = {}
    for (replica, stage), held in (states or states_of(given)).items():
        written = write_stage(store.unsealed_replica_folder(step, several, replica, 0), stage, step, held)
        digests[stage_name(stage, replica, several)] = written.sha256
    return CheckpointManifest(
        step=step,
        stages=list(range(count + 1)),
        pipeline_stages=count,
        replicas=several,
        positions=dict.fromkeys(range(several), ReplicaPosition(step=step)) if several > 1 else {},
        digests=digests,
        model=given.model,
        exchange=given.exchange,
    )


def save(folder: Path, given: RunConfig, states: States | None = None, **changes: Any) -> SealedCheckpoint:
    store = CheckpointStore(folder)
    manifest = gather(store, given, states)
    return store.seal(f"step-{STEP:08d}", manifest.model_copy(update=changes), 9)
