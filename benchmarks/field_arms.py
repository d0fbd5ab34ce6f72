"""The arms of ``benchmarks.field``: every system with the same model, start, samples, batch and optimizer."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.common import RUNS
from benchmarks.field_runs import NAME, folder_of, ran
from benchmarks.field_systems import Planaria, System, Torchft, Torchrun, whole_lines
from planaria.config.options import Options
from planaria.config.schema import (
    CheckpointConfig,
    DataConfig,
    ExchangeConfig,
    FleetConfig,
    ModelConfig,
    ObserveConfig,
    OptimConfig,
    PipelineConfig,
    RecoveryConfig,
    RunConfig,
    TrainConfig,
)

if TYPE_CHECKING:
    from benchmarks.field_peer import Job

PIPELINE, REPLICAS = "planaria, a pipeline", "planaria, replicas"
TORCHFT, TUNED, TORCHRUN = "torchft", "torchft, tuned", "torchrun"
ARMS = {"pipeline": PIPELINE, "replicas": REPLICAS, "torchft": TORCHFT, "tuned": TUNED, "torchrun": TORCHRUN}
"""flag → name"""
OURS, THEIRS = (PIPELINE, REPLICAS), (TORCHFT, TUNED)
PLACES = 4
"""processes that train, in each of them; planaria has a spare beside"""
MICROBATCHES = 4
"""of planaria's step, all replicas together"""
ENDLESS = 1_000_000
MOST_RATE = 25
"""updates a second for which samples are laid out"""
DOCUMENTED = ("--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000")
"""as torchft's own page starts its lighthouse; who is silent for 5 s is dead"""
SHORT = ("--min_replicas", "1", "--quorum_tick_ms", "10")
PROBE_S = 10.0


def recipe(given: argparse.Namespace, seed: int, arm: str) -> RunConfig:
    """Ends and three block stages with twins, or two replicas of ends and one block stage; the same model."""
    replicas = 2 if arm == REPLICAS else 1
    twins = RecoveryConfig(strategy="redundant, checkpoint", options=Options({"forward": False}))
    return RunConfig(
        name=NAME,
        seed=seed,
        model=ModelConfig(
            vocab=260,
            dim=given.dim,
            layers=given.layers,
            hidden=given.dim * 11 // 4,
            context=given.context,
            tied=False,
        ),
        pipeline=PipelineConfig(
            stages=PLACES // replicas - 1,
            microbatches=MICROBATCHES // replicas,
            microbatch_size=given.batch // MICROBATCHES,
        ),
        data=DataConfig(source=given.source, tokenizer="bytes"),
        optim=OptimConfig(lr=given.lr, clip_by="layer"),
        train=TrainConfig(steps=ENDLESS, eval_every=0),
        recovery=RecoveryConfig(strategy="checkpoint") if arm == REPLICAS else twins,
        exchange=ExchangeConfig(replicas=replicas),
        fleet=FleetConfig(spares=1),
        checkpoint=CheckpointConfig(every=given.save_every),
        observe=ObserveConfig(trackers=""),
    )


def job(given: argparse.Namespace, seed: int) -> Job:
    """What the peers are told: planaria's start and samples as files, and the recipe's numbers."""
    from benchmarks.field_peer import Job, Sizes

    config = recipe(given, seed, PIPELINE)
    model, optim = config.model, config.optim
    weights, samples = laid_out(given, config)
    return Job(
        folder="",
        weights=str(weights),
        samples=str(samples),
        sizes=Sizes(
            model.vocab,
            model.dim,
            model.layers,
            model.heads,
            model.hidden,
            model.context,
            model.rope_theta,
            model.norm_eps,
        ),
        batch=given.batch,
        groups=groups(model.layers, weights),
        clip=optim.clip,
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        ranks=PLACES,
        save_every=given.interval,
    )


def laid_out(given: argparse.Namespace, config: RunConfig) -> tuple[Path, Path]:
    """Files of the weights that planaria starts from, and of its samples in their order."""
    import torch
    from safetensors.torch import save_file

    from planaria.data.shards import prepare
    from planaria.data.stream import Stream
    from planaria.models.stages import Llama

    (folder := RUNS / NAME).mkdir(parents=True, exist_ok=True)
    weights, samples = folder / f"weights-{config.seed}.safetensors", folder / f"samples-{config.seed}.safetensors"
    save_file(Llama(config.model, 1, config.seed).global_state(), weights)
    stream = Stream(prepare(config.data, config.model.vocab), "train", config.model.context, config.seed)
    count = round((given.kills + 1) * given.every * MOST_RATE) * given.batch
    windows = torch.stack([stream.sample(n).to(torch.int16) for n in range(count)])
    save_file({"samples": windows}, samples)
    return weights, samples


def groups(layers: int, weights: Path) -> list[list[str]]:
    """Names of parameters that are clipped together, as ``optim.clip_by = "layer"`` says."""
    from safetensors import safe_open

    with safe_open(weights, "pt") as file:
        names = list(file.keys())
    within = [[name for name in names if name.startswith(f"model.layers.{n}.")] for n in range(layers)]
    return within + [[name] for name in names if not name.startswith("model.layers.")]


def systems(given: argparse.Namespace, seed: int) -> dict[str, System]:
    """The arms that are asked for, by name."""
    told = job(given, seed)
    tuned = (*SHORT, "--join_timeout_ms", str(given.join_ms), "--heartbeat_timeout_ms", str(given.heartbeat_ms))
    short = replace(told, tuned=True, limits=(given.gloo_s, told.limits[1]))
    made: dict[str, System] = {
        PIPELINE: Planaria(PIPELINE, PLACES, recipe(given, seed, PIPELINE)),
        REPLICAS: Planaria(REPLICAS, PLACES, recipe(given, seed, REPLICAS)),
        TORCHFT: Torchft(TORCHFT, PLACES, told, given.python, DOCUMENTED),
        TUNED: Torchft(TUNED, PLACES, short, given.python, tuned),
        TORCHRUN: Torchrun(TORCHRUN, PLACES, told, given.torchrun),
    }
    return {name: made[name] for flag, name in ARMS.items() if flag in given.arms}


def best_interval(given: argparse.Namespace, seed: int) -> tuple[int, float]:
    """Updates between torchrun's checkpoints that lose least (Daly), and the seconds that one takes: by a short run."""
    from planaria.recovery.checkpoint import best_interval as daly

    probe = Torchrun(TORCHRUN, PLACES, replace(job(given, seed), save_every=5), given.torchrun)
    found = ran(probe, "probe", (), PROBE_S)
    lines = (json.loads(line) for line in whole_lines(folder_of(probe, "probe") / "0.jsonl"))
    save_s = median(line["saved"] for line in lines if "saved" in line)
    step_s = PROBE_S / sum(found.begin < update.t <= found.end for update in found.updates)
    return max(1, round(daly(save_s, given.every) / step_s)), save_s
