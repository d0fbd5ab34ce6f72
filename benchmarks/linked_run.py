"""Replicas as processes whose steps wait for emulated links, for runs that machines join and leave.

A processor with time to spare makes a replica that is gone no gain for the others.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common import RUNS
from planaria.config.schema import (
    CheckpointConfig,
    DataConfig,
    ExchangeConfig,
    FleetConfig,
    ModelConfig,
    NetworkConfig,
    OptimConfig,
    PipelineConfig,
    RunConfig,
    TrainConfig,
)

if TYPE_CHECKING:
    from planaria.control.logs import RunRecord

WORKERS = 2
"""of a replica: the ends and one block stage"""
HOPS = 4
"""of a microbatch between them: there and back, forward and backward"""


def add_flags(flags: argparse.ArgumentParser, replicas: int, step_s: float) -> None:
    """The sizes of :func:`recipe`."""
    flags.add_argument("--replicas", type=int, default=replicas)
    flags.add_argument("--step-s", type=float, default=step_s, metavar="S", help="of a step, all of it on the links")
    flags.add_argument("--every", type=int, default=15, help="steps from one round to the next")
    flags.add_argument("--dim", type=int, default=64)
    flags.add_argument("--samples", type=int, default=8, help="of each replica in a step, of 64 bytes each")


def recipe(
    given: argparse.Namespace,
    name: str,
    seed: int,
    steps: int,
    exchange: ExchangeConfig,
    fleet: FleetConfig,
    checkpoint: CheckpointConfig,
) -> RunConfig:
    """A small byte model that learns Python; its step takes ``--step-s``, on the way between two processes."""
    return RunConfig(
        name=name,
        out=str(RUNS),
        seed=seed,
        model=ModelConfig(vocab=260, dim=given.dim, layers=1, heads=4, hidden=given.dim * 11 // 4, context=64),
        pipeline=PipelineConfig(stages=WORKERS - 1, microbatches=1, microbatch_size=given.samples),
        data=DataConfig(tokenizer="bytes"),
        optim=OptimConfig(lr=2e-3, warmup=20, schedule="cosine"),
        train=TrainConfig(steps=steps, eval_every=0, eval_microbatches=32),
        exchange=exchange,
        fleet=fleet,
        checkpoint=checkpoint,
        network=NetworkConfig(emulate="links", latency_s=given.step_s / HOPS),
    )


def final_loss(record: RunRecord) -> float:
    """Validation loss in nats of what the run ended with: of several replicas, of the one model that they make."""
    from planaria.data.shards import prepare
    from planaria.data.stream import Stream
    from planaria.runtime.checkpoint.loading import load_model
    from planaria.runtime.engine import runs
    from planaria.runtime.engine.omission import loss
    from planaria.runtime.engine.samples import batches

    config = record.config
    model = load_model(runs.newest_whole(record.folder), config.pipeline.stages).eval()
    dataset = prepare(config.data, config.model.vocab)
    stream = Stream(dataset, "validation", config.model.context, config.seed)
    batch = batches(stream, 0, config.pipeline.microbatch_size)
    return loss(model, batch, config.train.eval_microbatches, ())


class Guest:
    """A machine that has been lent to a run: ``planaria join`` and its workers, a session of their own."""

    def __init__(self, folder: Path, number: int) -> None:
        self._told = folder / f"guest-{number}.log"
        with self._told.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "planaria", "join", str(folder)],
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def joined(self) -> bool:
        return "joined" in self._told.read_text()

    @property
    def gone(self) -> bool:
        return self._process.poll() is not None

    def leave(self) -> None:
        """Ctrl-C: it leaves once others have taken over what it has."""
        self._process.send_signal(signal.SIGINT)

    def vanish(self) -> None:
        """All its processes die at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def end(self) -> None:
        """The run is over: it goes by itself, or is made to."""
        try:
            self._process.wait(20.0)
        except subprocess.TimeoutExpired:
            self.vanish()
