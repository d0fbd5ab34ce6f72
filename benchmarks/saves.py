"""How long does training wait for a checkpoint that is written in the background, over one that it waits for?

The fleet trains a model of SmolLM2-135M's shapes, from random weights, once with each kind of save in turns. A wait is
from the order to save to the order of the next step, as the run's log has it. The claim: all waits of a run in the
background, the first included, which copies to memory that was never touched, take at most 1/10 of as many in the
foreground. What the writing costs the steps beside it is shown.

A checkpoint has 12 bytes a parameter, 1.6 GB; a run needs room for two of them (``--out``).
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING

from benchmarks.common import RUNS, Claim, Row, conclude, interleaved, parser, start
from benchmarks.fleet_run import bytes_data, require_finished, run_fleet
from planaria.common.errors import UserError
from planaria.config.schema import (
    CheckpointConfig,
    FleetConfig,
    OptimConfig,
    PipelineConfig,
    RecoveryConfig,
    RunConfig,
    TrainConfig,
)
from planaria.control import decisions as d

if TYPE_CHECKING:
    from planaria.control.logs import RunRecord

NAME = "saves"
LITTLE = Claim(high=0.1)


class Arm:
    """Runs with one kind of save, and what their logs say."""

    def __init__(self, given: argparse.Namespace, background: bool) -> None:
        self.config = recipe(given, background)
        self.waits: list[float] = []
        """of each save but the last of a run, which always is waited for"""
        self.plain: list[float] = []
        """steps beside which nothing is written"""
        self.beside: list[float] = []

    def run(self) -> float:
        """The mean wait of one more run; seconds."""
        record = run_fleet(self.config)
        require_finished(record)
        waits = self._read(record)
        shutil.rmtree(record.folder)
        self.waits += waits
        return fmean(waits)

    def _read(self, record: RunRecord) -> list[float]:
        waits, ordered, began, writing = [], None, 0.0, False
        for t, fact in record.history:
            if isinstance(fact, d.Save):
                ordered, writing = t, True
            elif isinstance(fact, d.Seal):
                writing = False
            elif isinstance(fact, d.RunStep):
                waits += [] if ordered is None else [t - ordered]
                ordered, began = None, t
            elif isinstance(fact, d.Commit):
                (self.beside if writing else self.plain).append(t - began)
        return waits


def recipe(given: argparse.Namespace, background: bool) -> RunConfig:
    """The recipe smollm2 without its weights."""
    from planaria.config.recipe import load
    from planaria.config.shipped import find

    model = load(find("smollm2"), {}).model
    if given.layers < 6 or (given.layers - model.ends_layers) % 4:
        raise UserError(f"--layers {given.layers}: two at the ends and as many in each of four stages; give 6, 10, …")
    return RunConfig(
        name=f"{NAME}-{'background' if background else 'foreground'}",
        out=str(given.out),
        model=model.model_copy(update={"layers": given.layers, "context": given.context}),
        pipeline=PipelineConfig(stages=4, microbatches=4, microbatch_size=1),
        optim=OptimConfig(lr=1e-5),
        data=bytes_data(),
        train=TrainConfig(steps=given.every * (given.saves + 1), eval_every=0),
        recovery=RecoveryConfig(strategy="checkpoint"),
        fleet=FleetConfig(spares=0),
        checkpoint=CheckpointConfig(every=given.every, keep=1, background=background),
    )


def compare(given: argparse.Namespace) -> Row:
    from planaria.models.stages import parameter_count

    behind, before = Arm(given, True), Arm(given, False)
    short, long = interleaved([behind.run, before.run], given.repeats)
    size = 12 * parameter_count(before.config.model) / 1e9
    beside = {
        "background": f"{median(behind.waits):.3f} s, at most {max(behind.waits):.3f} s",
        "foreground": f"{median(before.waits):.2f} s",
        "a step": f"{median(behind.plain):.2f} s",
        "beside writing": f"{median(behind.beside):.2f} s" if behind.beside else "none",
    }
    ratios = [a / b for a, b in zip(short, long, strict=True)]
    what = f"{size:.1f} GB at five workers: wait in the background / in the foreground"
    return Row(what, ratios, "memory / disk", LITTLE, beside)


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--repeats", type=int, default=3, help="runs of each kind")
    flags.add_argument("--saves", type=int, default=3, help="of a run, beside the one at its end")
    flags.add_argument("--every", type=int, default=12, help="steps between saves")
    flags.add_argument("--layers", type=int, default=30, help="fewer take less room: 6 half a gigabyte")
    flags.add_argument("--context", type=int, default=16, help="tokens of a sample; short steps make short runs")
    flags.add_argument("--out", type=Path, default=RUNS, help="a folder on the disk that is written to")
    given = flags.parse_args()
    return conclude(NAME, given, [compare(given)], ["measured: mean wait of a run's saves in either way"])


if __name__ == "__main__":
    start(main)
